//! Guards that are dropped while the store does not reply.

use leasehold::blocking::connect;
use test_bounds::Bound;
use test_servers::{Cluster, Proxy};
use tokio::runtime::Runtime;

use super::{LIVENESS, url_of};

/// More guards than seconds in the bound. The leases last longer than the test.
const GUARDS: usize = 100;

#[test]
fn drops_of_many_guards_on_a_silent_store_take_no_longer_than_one_and_release_when_it_is_back() {
    let runtime = Runtime::new().unwrap();
    let (database, proxy) = runtime.block_on(async {
        let server = Cluster::shared();
        (server.fresh_database().await, Proxy::start(server.address()).await)
    });
    for scheme in ["postgres", "postgres+ttl"] {
        let url = url_of(&database, scheme, if scheme == "postgres+ttl" { "&ttl=1h" } else { "" });
        let direct = connect(&url).unwrap();
        let lock = connect(&proxy.url(&url)).unwrap();
        let keys: Vec<_> = (0..GUARDS).map(|n| format!("{scheme} {n}")).collect();
        let guards = lock.keys(keys.clone()).acquire().unwrap();
        proxy.stall();
        let begun = Bound::new(LIVENESS);
        for guard in guards {
            drop(guard);
            begun.check(format_args!("{scheme}: {GUARDS} guards were not dropped"));
        }
        assert!(direct.key("another key").try_acquire().unwrap().is_some(), "{scheme}: the server replies");
        proxy.restore();
        direct.keys(keys).wait(LIVENESS).acquire().unwrap().release().unwrap();
        drop(lock);
    }
}
