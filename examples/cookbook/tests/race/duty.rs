use std::cell::RefCell;

use cookbook::duty::{Duty, run_for};
use leasehold_api::{ErrorKind, LockExt as _, LockKey, RunError};
use leasehold_memory::{ClientSetup, MemoryStore};
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use test_servers::{Cluster, Proxy};

fn report() -> LockKey {
    LockKey::new("report").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_an_outage_saving_work_goes_on_and_a_constraint_does_not() {
    let db = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let server = PgConfig::from_url(&proxy.url(db.url())).unwrap().install_schema(true);
    let lock = TtlConfig::new(server).connect().await.unwrap();
    let tokens = RefCell::new(Vec::new());
    let work = async |token| tokens.borrow_mut().push(token);
    assert_eq!(run_for(Duty::EnforceConstraint, &lock, &report(), &work).await.unwrap(), Some(()));
    assert!(tokens.borrow()[0].is_some(), "something to compare");

    proxy.cut();
    let error = run_for(Duty::EnforceConstraint, &lock, &report(), &work).await.unwrap_err();
    // The kind depends on whether the session noticed the cut before its request.
    let out = [ErrorKind::Unavailable, ErrorKind::OutcomeUnknown];
    assert!(matches!(&error, RunError::NotRun(error) if out.contains(&error.kind())), "{error:?}");
    assert_eq!(tokens.borrow().len(), 1, "closed");
    assert_eq!(run_for(Duty::SaveWork, &lock, &report(), &work).await.unwrap(), Some(()));
    assert_eq!(tokens.borrow()[1..], [None], "open, and nothing says that it was alone");
}

#[tokio::test]
async fn work_in_progress_elsewhere_is_not_done_twice() {
    let store = MemoryStore::new();
    let (one, other) = (store.client().unwrap(), store.client().unwrap());
    let guard = other.key("report").acquire().await.unwrap();
    let never = async |_| panic!("it is held");
    assert_eq!(run_for(Duty::SaveWork, &one, &report(), never).await.unwrap(), None);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_constraint_needs_tokens_that_last() {
    let client = MemoryStore::new().client_with(ClientSetup::new()).unwrap();
    let never = async |_| panic!("not with this store");
    let error = run_for(Duty::EnforceConstraint, &client.lock, &report(), never).await.unwrap_err();
    assert!(matches!(&error, RunError::NotRun(error) if error.kind() == ErrorKind::Unsupported), "{error:?}");
    assert_eq!(run_for(Duty::SaveWork, &client.lock, &report(), async |_| 7).await.unwrap(), Some(7));
}
