//! An HTTP client with one keep-alive connection and the minimum of HTTP, because it shares the processors with the
//! measured service.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::companions::rounds::Worker;

pub(crate) struct Client {
    stream: TcpStream,
    answer: Vec<u8>,
    /// The requests, sent in turn.
    requests: Vec<String>,
    next: usize,
}

impl Client {
    /// Sends requests for the given holders to `route`, in turn.
    pub(crate) async fn connect(
        address: SocketAddr,
        route: &str,
        holders: impl Iterator<Item = usize>,
    ) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let request = |holder| {
            format!("POST /{route}/{holder} HTTP/1.1\r\nhost: {address}\r\ncontent-length: 0\r\n\r\n")
        };
        Self { stream, answer: Vec::new(), requests: holders.map(request).collect(), next: 0 }
    }
}

impl Worker for Client {
    async fn cycle(&mut self) {
        let request = &self.requests[self.next];
        self.next = (self.next + 1) % self.requests.len();
        self.stream.write_all(request.as_bytes()).await.unwrap();
        self.answer.clear();
        while !is_whole(&self.answer) {
            assert!(self.stream.read_buf(&mut self.answer).await.unwrap() > 0, "the server has hung up");
        }
        assert!(self.answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&self.answer));
    }
}

/// Returns whether the answer contains the head and the whole announced body.
fn is_whole(answer: &[u8]) -> bool {
    const LENGTH: &[u8] = b"\r\ncontent-length: ";
    let Some(head) = find(answer, b"\r\n\r\n") else { return false };
    let length = find(&answer[..head], LENGTH).expect("hyper announces the length of every answer here");
    let digits = answer[length + LENGTH.len()..].iter().take_while(|byte| byte.is_ascii_digit());
    let length = digits.fold(0, |length, digit| length * 10 + usize::from(digit - b'0'));
    answer.len() == head + 4 + length
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}
