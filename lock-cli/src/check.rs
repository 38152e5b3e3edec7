//! The command `leasehold check`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{
    AcquireOptions, Error, ErrorKind, Fencing, ListQuery, Lock, LockAdmin, LockKey, Scope, StoreFact,
};
use serde_json::{Map, Value, json};

use crate::args::CheckArgs;
use crate::chosen_store::ChosenStore;
use crate::schema::ServerFacts;
use crate::{admin, exit, file_store, output};

/// The key that the check locks. It is always the same, because a store might keep data of every key ever used.
const PROBE: &str = "leasehold:check";

/// How long the check waits for the lock of another check and for an unresponsive store.
const PROBE_LIMIT: Duration = Duration::from_secs(15);

/// A reachable server answers within this time, even if it refuses the connection.
const SOON: Duration = Duration::from_secs(2);

pub(crate) async fn check(args: &CheckArgs, store: &ChosenStore) -> Result<u8, Error> {
    let begun = Instant::now();
    let connected = store.connect_to_inspect().await;
    // Reads the server's facts after connecting, because connecting can install the schema. Skips that for an
    // unresponsive server, because it would cost another timeout.
    let is_away = |error: &Error| error.kind() == ErrorKind::Unavailable && begun.elapsed() > SOON;
    let facts = match &connected {
        Err(error) if is_away(error) => None,
        _ => ServerFacts::of(store.url()).await,
    };
    let (lock, tried) = match connected {
        Ok(lock) => {
            let tried =
                tokio::time::timeout(PROBE_LIMIT * 2, probe(&*lock, store)).await.unwrap_or_else(|_| {
                    Err(Error::new(ErrorKind::Unavailable, "the store does not answer")
                        .with_store(lock.to_string()))
                });
            (Some(lock), tried)
        }
        Err(error) => (None, Err(error)),
    };
    let mut advice = lock.as_deref().map(file_store::cautions).unwrap_or_default();
    advice.extend(
        advice_for(lock.as_deref(), tried.as_ref().err(), facts.as_ref()).into_iter().map(ToOwned::to_owned),
    );
    let own = match lock.as_deref().and_then(Lock::admin) {
        Some(admin) => own_facts(admin).await,
        None => Vec::new(),
    };
    advice.extend(own.iter().filter_map(|fact| fact.advice.clone()));
    let facts = Facts { server: facts.as_ref(), own: &own };
    if args.json {
        output::json(&report(lock.as_ref(), facts, &tried, &advice));
    } else {
        print(lock.as_ref(), facts, &tried, &advice);
    }
    match tried {
        Ok(_) => Ok(0),
        Err(error) if exit::of_error(error.kind()) == exit::USAGE => Ok(exit::USAGE),
        Err(_) => Ok(exit::UNAVAILABLE),
    }
}

/// The facts of a Postgres server, and the facts that a store reports about itself.
#[derive(Clone, Copy)]
struct Facts<'a> {
    server: Option<&'a ServerFacts>,
    own: &'a [StoreFact],
}

/// Returns the facts that the store reports about itself, or its failure to do so as a fact.
async fn own_facts(admin: &dyn LockAdmin) -> Vec<StoreFact> {
    let silent = || Err(Error::new(ErrorKind::Unavailable, "the store does not answer"));
    let facts = tokio::time::timeout(PROBE_LIMIT, admin.facts()).await.unwrap_or_else(|_| silent());
    facts.unwrap_or_else(|error| vec![StoreFact::new("facts", error.to_string())])
}

/// Takes a lock, inspects it and releases it. For a file store, lists the locks and checks that a file can be written.
/// Returns the time this took.
async fn probe(lock: &dyn Lock, store: &ChosenStore) -> Result<Duration, Error> {
    // Checks a file store without a lock, because a lock would create the directory and leave its key's files behind.
    if let Some(admin) = lock.admin().filter(|_| lock.capabilities().scope == Scope::Machine) {
        let start = Instant::now();
        admin.list(&ListQuery::new()).await?;
        if !store.url().is_some_and(|url| url.contains("read-only=true")) {
            file_store::check_writable(lock).await?;
        }
        return Ok(start.elapsed());
    }
    let key = LockKey::new(PROBE)?;
    let options = AcquireOptions::new().wait(PROBE_LIMIT).label("leasehold check");
    let start = Instant::now();
    let guard = lock.acquire(&key, &options).await?;
    let holder = guard.holder();
    if let Some(admin) = lock.admin().filter(|_| lock.capabilities().admin.inspect) {
        let seen = admin.inspect(&key).await?;
        if seen.holder().is_none_or(|hold| hold.holder != Some(holder)) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "a lock that was just taken does not show when it is inspected",
            )
            .with_key(&key)
            .with_store(lock.to_string()));
        }
    }
    guard.release().await?;
    Ok(start.elapsed())
}

fn advice_for(
    lock: Option<&dyn Lock>,
    error: Option<&Error>,
    facts: Option<&ServerFacts>,
) -> Vec<&'static str> {
    let mut advice = Vec::new();
    if let Some(error) = error {
        advice.push(match error.kind() {
            ErrorKind::InvalidOption | ErrorKind::Unsupported => "correct the URL (--url or LEASEHOLD_URL)",
            ErrorKind::PermissionDenied if facts.is_some_and(ServerFacts::may_only_look) => {
                "this role may look at locks (`list`, `inspect`) and take none; if it is to take them, grant it what is missing: `leasehold schema apply --grant-to ROLE`, as the owner of the schema"
            }
            ErrorKind::PermissionDenied if facts.is_some_and(ServerFacts::is_in_foreign_schema) => {
                "connect as the owner of the schema, or as a role with the privileges of `leasehold schema print --grant-to ROLE`"
            }
            ErrorKind::PermissionDenied if facts.is_some() => {
                "grant the role what is missing: `leasehold schema apply --grant-to ROLE`, as the owner of the schema"
            }
            ErrorKind::PermissionDenied if lock.is_some_and(|lock| lock.capabilities().scope == Scope::Machine) => {
                "give this user write access to the directory, or choose another with --url file:///DIRECTORY"
            }
            ErrorKind::PermissionDenied => {
                "see that user and password are right and that this user may read and write there, or choose another store with --url"
            }
            ErrorKind::Unavailable if facts.is_some_and(ServerFacts::is_standby) => "name the primary in the URL",
            ErrorKind::Timeout => "another check may be running; try again",
            ErrorKind::NeedsOperator => "do what the error says, as an operator of the store",
            ErrorKind::InvalidKey => {
                "keys are numbers with this `hash`, so there is no key to try with; use `leasehold list`, or `run` with a number that no other program takes"
            }
            ErrorKind::SchemaMissing => {
                "set the store up with `leasehold schema apply`, or use the version of this tool that did"
            }
            ErrorKind::Corrupt if facts.is_some() => {
                "compare the schema with what `leasehold schema print` prints, and alter it back; `schema apply` leaves what is there as it is"
            }
            ErrorKind::Corrupt => {
                "find out what else writes there; move the damaged files away when no client holds a lock"
            }
            _ => "see that the store runs, can be reached and has room",
        });
    }
    if let Some(capabilities) = lock.map(Lock::capabilities) {
        if capabilities.scope == Scope::Process {
            advice.push("this store excludes within one process only: two commands do not exclude each other there; use a file:/// URL");
        }
        if capabilities.crash_release.is_none() {
            advice.push("a lock whose holder crashed stays locked until `leasehold release KEY --force --holder ID`, with the ID that `leasehold inspect` shows");
        }
        if capabilities.fencing == Fencing::None {
            advice.push(
                "there are no fencing tokens: the late write of a holder that was paused cannot be refused",
            );
        }
    }
    advice
}

fn print(lock: Option<&Arc<dyn Lock>>, facts: Facts<'_>, tried: &Result<Duration, Error>, advice: &[String]) {
    if let Some(lock) = lock {
        output::line(&format!("store: {lock}"));
    }
    match tried {
        Ok(took) if lock.is_some_and(|lock| lock.capabilities().scope == Scope::Machine) => {
            let missing = lock.map_or("", |lock| file_store::missing_note(&**lock));
            output::line(&format!(
                "works: looked at its locks in {took:.1?}, and left nothing behind{missing}"
            ));
        }
        Ok(took) => output::line(&format!("works: took, saw and released a lock in {took:.1?}")),
        Err(error) => output::error(error),
    }
    if let Some(server) = facts.server {
        output::line(&format!("\n{}", output::table(&["SERVER", "VALUE"], server.rows())));
    }
    if !facts.own.is_empty() {
        let rows = facts.own.iter().map(|fact| [fact.name.clone(), fact.value.clone()]);
        output::line(&format!("\n{}", output::table(&["STORE", "VALUE"], rows)));
    }
    if let Some(lock) = lock {
        let rows = capabilities(&**lock).map(|(_, name, text, _)| [name.to_owned(), text]);
        output::line(&format!("\n{}", output::table(&["CAPABILITY", "VALUE"], rows)));
    }
    for sentence in advice {
        output::line(&format!("\nto mend: {sentence}"));
    }
}

fn report(
    lock: Option<&Arc<dyn Lock>>,
    facts: Facts<'_>,
    tried: &Result<Duration, Error>,
    advice: &[String],
) -> Value {
    let table = lock.map(|lock| {
        let rows = capabilities(&**lock);
        rows.into_iter().map(|(id, _, _, value)| (id.to_owned(), value)).collect::<Map<_, _>>()
    });
    json!({
        "store": lock.map(ToString::to_string),
        "ok": tried.is_ok(),
        "error": tried.as_ref().err().map(ToString::to_string),
        "kind": tried.as_ref().err().map(|error| error.kind().as_str()),
        "retryable": tried.as_ref().err().map(Error::is_retryable),
        "took_ms": tried.as_ref().ok().map(|took| output::millis(*took)),
        "server": facts.server.map(ServerFacts::describe),
        "facts": facts.own.iter().map(|fact| (fact.name.clone(), json!(fact.value))).collect::<Map<_, _>>(),
        "capabilities": table,
        "advice": advice,
    })
}

/// Returns each capability of the store: its JSON name and its label, then its value as text and as JSON.
fn capabilities(lock: &dyn Lock) -> [(&'static str, &'static str, String, Value); 23] {
    let has = lock.capabilities();
    let ends_sessions = admin::sessions(lock).is_some();
    let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let within = |bound: Duration| format!("within {}", output::duration(bound));
    let ms = |bound: Duration| json!(output::millis(bound));
    let ttl = |pick: fn(leasehold::LeaseBounds) -> Option<Duration>, none: &str| {
        let bound = has.lease.and_then(pick);
        (bound.map_or_else(|| none.to_owned(), output::duration), bound.map_or(Value::Null, ms))
    };
    let (default_ttl, default_ttl_ms) = ttl(|lease| lease.default, "no lease");
    let (min_ttl, min_ttl_ms) = ttl(|lease| Some(lease.min), "-");
    let (max_ttl, max_ttl_ms) = ttl(|lease| Some(lease.max), "-");
    let permits = match has.modes.max_permits {
        0 => "none".to_owned(),
        limit => format!("at most {limit}"),
    };
    let crash = has.crash_release.map_or_else(|| "never".to_owned(), within);
    [
        ("scope", "excludes", has.scope.to_string(), json!(has.scope.to_string())),
        ("fencing", "fencing tokens", has.fencing.to_string(), json!(has.fencing.to_string())),
        ("fairness", "order of waiters", has.fairness.to_string(), json!(has.fairness.to_string())),
        ("keys", "keys are compared", has.keys.to_string(), json!(has.keys.to_string())),
        ("default_ttl_ms", "TTL by default", default_ttl, default_ttl_ms),
        ("min_ttl_ms", "shortest TTL", min_ttl, min_ttl_ms),
        ("max_ttl_ms", "longest TTL", max_ttl, max_ttl_ms),
        ("crash_release_ms", "free after a crash", crash, has.crash_release.map_or(Value::Null, ms)),
        ("handover_ms", "next waiter granted", within(has.handover), ms(has.handover)),
        ("loss_detection_ms", "loss noticed", within(has.loss_detection), ms(has.loss_detection)),
        ("undo_ms", "abandoned call undone", within(has.undo), ms(has.undo)),
        ("shared", "shared holders", yes(has.modes.shared), json!(has.modes.shared)),
        ("max_permits", "permits of a key", permits, json!(has.modes.max_permits)),
        ("cooldown", "--once-per, --cooldown", yes(has.cooldown), json!(has.cooldown)),
        ("ends_late_by_ms", "TTLs and cooldowns end late", within(has.ends_late_by), ms(has.ends_late_by)),
        ("relabel", "labels can be changed", yes(has.relabel), json!(has.relabel)),
        ("portable", "holds can change processes", yes(has.portable), json!(has.portable)),
        (
            "inspect",
            "inspect, list",
            yes(has.admin.inspect && has.admin.list),
            json!(has.admin.inspect && has.admin.list),
        ),
        ("force_release", "release --force", yes(has.admin.force_release), json!(has.admin.force_release)),
        ("ask", "release --ask, --on-ask", yes(has.admin.ask), json!(has.admin.ask)),
        ("end_session", "release --session", yes(ends_sessions), json!(ends_sessions)),
        ("admin_lag_ms", "names shown", within(has.admin.lag), ms(has.admin.lag)),
        (
            "max_holds",
            "locks held at once",
            has.max_holds.map_or_else(|| "no limit".to_owned(), |limit| format!("at most {limit}")),
            json!(has.max_holds),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use leasehold::{KeyInfo, async_trait};

    use super::*;

    /// The operator's view of a store with these facts.
    #[derive(Debug)]
    struct Named(Result<Vec<StoreFact>, Error>);

    #[async_trait]
    impl LockAdmin for Named {
        async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
            Ok(KeyInfo::free(key.clone()))
        }

        async fn list(&self, _: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
            Ok(Vec::new())
        }

        async fn force_release(&self, _: &LockKey, _: leasehold::HolderId) -> Result<bool, Error> {
            Ok(false)
        }

        async fn facts(&self) -> Result<Vec<StoreFact>, Error> {
            self.0.clone()
        }
    }

    #[tokio::test]
    async fn the_report_has_the_facts_that_the_store_names() {
        let named = vec![StoreFact::new("version", "3.4.23"), StoreFact::new("quota", "2 GiB")];
        let own = own_facts(&Named(Ok(named.clone()))).await;
        assert_eq!(own, named);
        let facts = Facts { server: None, own: &own };
        let report = report(None, facts, &Ok(Duration::ZERO), &[]);
        assert_eq!(report["facts"], json!({ "version": "3.4.23", "quota": "2 GiB" }));
        let failed = Error::new(ErrorKind::PermissionDenied, "no right to read the alarms");
        let own = own_facts(&Named(Err(failed))).await;
        assert!(own.len() == 1 && own[0].value.contains("read the alarms"), "{own:?}");
    }
}
