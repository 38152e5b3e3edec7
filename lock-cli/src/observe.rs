//! The command `leasehold observe`.

use std::time::SystemTime;

use leasehold::election::Observer;
use leasehold::{Error, FencingToken, HoldInfo, LockKey};
use serde_json::{Value, json};

use crate::args::ObserveArgs;
use crate::chosen_store::ChosenStore;
use crate::output;

pub(crate) async fn observe(args: &ObserveArgs, store: &ChosenStore) -> Result<u8, Error> {
    let lock = store.connect_to_inspect().await?;
    let mut observer = Observer::new(lock, args.key.get().clone());
    while !output::is_over() {
        match observer.changed().await {
            Ok(leader) if args.json => output::line(&describe(args.key.get(), leader.as_ref()).to_string()),
            Ok(leader) => output::line(&text(leader.as_ref())),
            // Reports the error and goes on, because the next query can succeed.
            Err(error) if error.is_retryable() => {
                output::error(&error);
                if args.json {
                    output::line(&output::described(&error).to_string());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(0)
}

fn text(leader: Option<&HoldInfo>) -> String {
    let Some(hold) = leader else { return "none".to_owned() };
    // Prints the value last, because it can contain spaces.
    let token = output::or_dash(hold.token.map(|token| token.to_string()));
    let holder = output::or_dash(hold.holder.map(|holder| holder.to_string()));
    format!("leader {token} {holder} {}", output::or_dash(hold.label.as_deref().map(output::label)))
}

fn describe(key: &LockKey, leader: Option<&HoldInfo>) -> Value {
    let token = leader.and_then(|hold| hold.token);
    json!({
        "key": key.as_str(),
        "at": output::utc(SystemTime::now()),
        "is_led": leader.is_some(),
        "token": token.map(FencingToken::as_u64),
        "token_text": token.map(|token| token.to_string()),
        "holder": leader.and_then(|hold| hold.holder).map(|holder| holder.to_string()),
        "value": leader.and_then(|hold| hold.label.as_deref()),
        "owner": leader.and_then(|hold| hold.owner.as_deref()),
        "since": leader.and_then(|hold| hold.since).and_then(output::utc),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_no_control_characters_and_the_json_every_field() {
        let mut hold = HoldInfo::new();
        hold.token = Some(FencingToken::from_u64(7));
        hold.label = Some("a\x07 b".into());
        assert_eq!(text(Some(&hold)), "leader 7 - a\\u{7} b");
        assert_eq!(
            (text(None), text(Some(&HoldInfo::new()))),
            ("none".to_owned(), "leader - - -".to_owned())
        );
        let key = LockKey::new("k").unwrap();
        for leader in [None, Some(&hold)] {
            let value = describe(&key, leader);
            assert_eq!((value.as_object().unwrap().len(), &value["is_led"]), (9, &leader.is_some().into()));
        }
        assert_eq!(describe(&key, Some(&hold))["value"], "a\x07 b");
    }
}
