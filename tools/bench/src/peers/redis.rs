//! Locks in Redis: `SET NX PX` by hand, and the crate `rslock`.

use std::process::Stdio;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Script};
use rslock::LockManager;
use tempfile::TempDir;
use test_servers::Proxy;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

use super::peer::Keys;
use crate::contest::Worker;

const TTL: Duration = Duration::from_secs(30);
/// Time for the server to start, even on a busy machine.
const START: Duration = Duration::from_secs(60);
/// Deletes the key only if it still belongs to the caller.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";
const HOLDER: &str = "0123456789abcdef-0123456789abcdef";

/// A Redis server without persistence, or the way to it.
pub(crate) struct Redis {
    port: u16,
    server: Option<(Child, TempDir)>,
}

impl Redis {
    /// Starts a server on loopback. Returns `None` if Redis is not installed.
    pub(crate) async fn start() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let server = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port", &port.to_string()])
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        let redis = Self { port, server: Some((server.ok()?, directory)) };
        let started = async {
            while redis.connection().await.is_none() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(START, started).await.expect("redis-server does not answer");
        Some(redis)
    }

    /// Returns the same server behind a proxy.
    pub(crate) async fn through_proxy(&self) -> (Self, Proxy) {
        let proxy = Proxy::start(format!("127.0.0.1:{}", self.port)).await;
        (Self { port: proxy.port(), server: None }, proxy)
    }

    /// Returns the process id of the server.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.server.as_ref().and_then(|(server, _)| server.id())
    }

    /// Returns tasks that share one connection, as the client's documentation recommends.
    pub(crate) async fn set_nx(&self, tasks: usize) -> Vec<SetNx> {
        let connection = self.connection().await.expect("redis-server is running");
        let worker = |task| SetNx {
            connection: connection.clone(),
            release: Script::new(RELEASE),
            keys: Keys::of(task, tasks),
        };
        (0..tasks).map(worker).collect()
    }

    /// Returns tasks that share one lock manager, which has one connection.
    pub(crate) async fn rslock(&self, tasks: usize) -> Vec<Rslock> {
        let manager = LockManager::new(vec![self.url()]);
        (0..tasks).map(|task| Rslock { manager: manager.clone(), keys: Keys::of(task, tasks) }).collect()
    }

    /// Returns the number of commands that the server has executed.
    pub(crate) async fn commands(&self) -> u64 {
        let mut connection = self.connection().await.expect("redis-server is running");
        let info: String = redis::cmd("INFO").arg("stats").query_async(&mut connection).await.unwrap();
        field(&info, "total_commands_processed")
    }

    async fn connection(&self) -> Option<MultiplexedConnection> {
        // The usual limit of half a second would end the measurement on a busy machine.
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let client = Client::open(self.url()).unwrap();
        client.get_multiplexed_async_connection_with_config(&config).await.ok()
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

/// Returns the number in a line `name:number` of the server's information.
fn field(info: &str, name: &str) -> u64 {
    let mut lines = info.lines().filter_map(|line| line.trim().split_once(':'));
    let found = lines.find(|(field, _)| *field == name);
    found.and_then(|(_, number)| number.parse().ok()).unwrap_or_default()
}

pub(crate) struct SetNx {
    connection: MultiplexedConnection,
    release: Script,
    keys: Keys,
}

impl Worker for SetNx {
    async fn cycle(&mut self) {
        let key = &self.keys.next().text;
        let mut acquire = redis::cmd("SET");
        acquire.arg(key).arg(HOLDER).arg("NX").arg("PX").arg(TTL.as_millis() as u64);
        let acquired: Option<String> = acquire.query_async(&mut self.connection).await.unwrap();
        let released: u64 =
            self.release.key(key).arg(HOLDER).invoke_async(&mut self.connection).await.unwrap();
        assert!(acquired.is_some() && released == 1);
    }
}

pub(crate) struct Rslock {
    manager: LockManager,
    keys: Keys,
}

impl Worker for Rslock {
    async fn cycle(&mut self) {
        let key = self.keys.next().text.as_str();
        self.manager.acquire(key, TTL).await.unwrap().release().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_from_the_information_of_the_server() {
        let info = "# Clients\r\nconnected_clients:3\r\n# Stats\r\ntotal_commands_processed:120\r\n";
        assert_eq!(field(info, "connected_clients"), 3);
        assert_eq!(field(info, "total_commands_processed"), 120);
        assert_eq!(field(info, "missing"), 0);
    }
}
