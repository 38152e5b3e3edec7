//! Describes holds, as text and as JSON.

use std::time::{Duration, SystemTime};

use leasehold::{HoldInfo, HoldState, KeyInfo, Mode};
use serde_json::{Value, json};

use crate::{numbered_keys, output};

/// Returns the end of a sentence about the key: `, held by ... since ...`, or its cooldown. Empty if the key is free.
pub(crate) fn in_words(seen: &KeyInfo) -> String {
    let Some(hold) = seen.holder() else {
        let cooldown =
            seen.cooldown.map(|time| format!(", in a cooldown for another {}", output::left(time)));
        return cooldown.unwrap_or_default();
    };
    let since = hold.since.map(|since| format!(" since {}", output::moment(since))).unwrap_or_default();
    let others = match seen.holders.iter().filter(|hold| hold.state == HoldState::Held).count() {
        0 | 1 => String::new(),
        live => format!(" and {} more", live - 1),
    };
    let label = hold.label.as_deref().map(|label| format!(" ({})", output::label(label))).unwrap_or_default();
    format!(", held by {}{label}{since}{others}", holder_name(hold))
}

/// Returns the JSON of a key. It always has all fields: the key's, its first holder's, and all holders.
pub(crate) fn describe(seen: &KeyInfo) -> Value {
    let mut value = json!({
        "key": seen.key.as_str(),
        "named": seen.named,
        "cooling_for_ms": seen.cooldown.map(output::millis),
        "waiters": seen.waiters,
        "holders": seen.holders.iter().map(|hold| describe_hold(Some(hold))).collect::<Value>(),
    });
    if let (Value::Object(fields), Value::Object(hold)) = (&mut value, describe_hold(first(seen))) {
        fields.extend(hold);
    }
    value["state"] = state(seen).into();
    value
}

fn describe_hold(hold: Option<&HoldInfo>) -> Value {
    json!({
        "state": hold.map(|hold| state_of_hold(hold.state)),
        "mode": hold.map(|hold| mode(hold.mode)),
        "permit": hold.and_then(|hold| hold.permit),
        "permits": hold.and_then(|hold| permits(hold.mode)),
        "holder": hold.and_then(|hold| hold.holder).map(|holder| holder.to_string()),
        "token": hold.and_then(|hold| hold.token).map(leasehold::FencingToken::as_u64),
        // The token as text too, for JSON readers with floating-point numbers, which cannot represent all of its
        // digits.
        "token_text": hold.and_then(|hold| hold.token).map(|token| token.to_string()),
        "label": hold.and_then(|hold| hold.label.as_deref()),
        "owner": hold.and_then(|hold| hold.owner.as_deref()),
        "since": hold.and_then(|hold| hold.since).and_then(output::utc),
        "held_for_ms": hold.and_then(held_for).map(output::millis),
        "asked": hold.map(|hold| hold.asked),
        "expires_in_ms": hold.and_then(|hold| hold.expires_in).map(output::millis),
    })
}

/// Returns a table with a row per hold, and one for a key without a hold. It omits columns without content: the mode if
/// all holds are exclusive, the end of a cooldown, and the number of waiters if the store does not count them.
pub(crate) fn listed(keys: &[KeyInfo]) -> String {
    let with_waiters = keys.iter().any(|seen| seen.waiters.is_some());
    let with_modes = keys.iter().flat_map(|seen| &seen.holders).any(|hold| hold.mode != Mode::Exclusive);
    let with_cooldowns = keys.iter().any(|seen| opens_in(seen).is_some());
    let names = ["KEY", "STATE", "MODE", "WHO", "SINCE", "FOR", "OPENS IN", "TOKEN", "WAITERS", "LABEL"];
    let is_shown = |column: &usize| match names[*column] {
        "WAITERS" => with_waiters,
        "MODE" => with_modes,
        "OPENS IN" => with_cooldowns,
        _ => true,
    };
    let columns: Vec<usize> = (0..names.len()).filter(is_shown).collect();
    let header: Vec<&str> = columns.iter().map(|column| names[*column]).collect();
    let rows = keys.iter().flat_map(rows).map(|mut cells| {
        columns.iter().map(|column| std::mem::take(&mut cells[*column])).collect::<Vec<_>>()
    });
    output::table(&header, rows)
}

fn rows(seen: &KeyInfo) -> Vec<[String; 10]> {
    if seen.holders.is_empty() {
        return vec![row(seen, None)];
    }
    seen.holders.iter().map(|hold| row(seen, Some(hold))).collect()
}

fn row(seen: &KeyInfo, hold: Option<&HoldInfo>) -> [String; 10] {
    let label = hold.and_then(|hold| hold.label.as_deref());
    [
        numbered_keys::display(seen),
        hold.filter(|hold| hold.state == HoldState::Held).map_or(state(seen), |_| "held").to_owned(),
        output::or_dash(hold.map(mode_and_permit)),
        output::or_dash(hold.map(holder_name)),
        output::or_dash(hold.and_then(|hold| hold.since).map(output::moment)),
        output::or_dash(hold.and_then(held_for).map(output::duration)),
        output::or_dash(opens_in(seen)),
        output::or_dash(hold.and_then(|hold| hold.token).map(|token| token.to_string())),
        output::or_dash(seen.waiters.map(|waiters| waiters.to_string())),
        output::or_dash(label.map(output::label)),
    ]
}

pub(crate) fn details(seen: &KeyInfo, store: &dyn std::fmt::Display) -> String {
    let mut known = vec![
        (if seen.named { "key" } else { "number" }, Some(output::printable(&seen.key.to_string()))),
        ("store", Some(store.to_string())),
        ("state", Some(state(seen).to_owned())),
    ];
    for hold in &seen.holders {
        known.extend([
            ("mode", Some(hold).filter(|hold| hold.mode != Mode::Exclusive).map(mode_and_permit)),
            ("who", hold.owner.as_deref().map(output::printable)),
            ("holder", hold.holder.map(|holder| holder.to_string())),
            ("since", hold.since.map(output::moment)),
            ("for", held_for(hold).map(output::duration)),
            ("token", hold.token.map(|token| token.to_string())),
            ("label", hold.label.as_deref().map(output::label)),
            ("asked", hold.asked.then(|| "to release".to_owned())),
            ("expires in", hold.expires_in.map(output::left)),
        ]);
    }
    known.extend([
        ("cooldown", seen.cooldown.map(output::left)),
        ("waiters", seen.waiters.map(|waiters| waiters.to_string())),
    ]);
    let lines = known.into_iter().filter_map(|(name, value)| Some(format!("{name:<12}{}", value?)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the hold that represents the key: the first live one, otherwise the last holder.
fn first(seen: &KeyInfo) -> Option<&HoldInfo> {
    seen.holder().or_else(|| seen.holders.first())
}

/// Returns the word for the state of a key: `free`, or the reason that blocks other clients, such as `held`.
fn state(seen: &KeyInfo) -> &'static str {
    match first(seen) {
        Some(hold) if hold.state == HoldState::Held => "held",
        _ if seen.cooldown.is_some() => "cooling",
        Some(hold) => state_of_hold(hold.state),
        None => "free",
    }
}

/// Returns the time until the next grant, if only a cooldown blocks other clients. `None` otherwise.
fn opens_in(seen: &KeyInfo) -> Option<String> {
    seen.cooldown.filter(|_| state(seen) == "cooling").map(output::left)
}

fn state_of_hold(state: HoldState) -> &'static str {
    match state {
        HoldState::Held => "held",
        HoldState::Expired => "expired",
        _ => "unknown",
    }
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Permit { .. } => "permit",
        _ => "unknown",
    }
}

/// Returns how many permits the key has.
const fn permits(mode: Mode) -> Option<u32> {
    match mode {
        Mode::Permit { of } => Some(of),
        _ => None,
    }
}

/// Returns the mode for people, with the number of the permit: `permit 3 of 8`, whose numbers begin at zero.
fn mode_and_permit(hold: &HoldInfo) -> String {
    match (hold.mode, hold.permit) {
        (Mode::Permit { of }, Some(number)) => format!("permit {number} of {of}"),
        (Mode::Permit { of }, None) => format!("permit of {of}"),
        (other, _) => mode(other).to_owned(),
    }
}

/// Returns the owner if the store knows it, otherwise the holder id.
fn holder_name(hold: &HoldInfo) -> String {
    let holder = || hold.holder.map(|holder| holder.to_string());
    hold.owner.as_deref().map(output::printable).or_else(holder).unwrap_or_else(|| "somebody".to_owned())
}

fn held_for(hold: &HoldInfo) -> Option<Duration> {
    // Returns zero if the start lies in the future, which is possible after a clock change.
    hold.since.map(|since| SystemTime::now().duration_since(since).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold::{FencingToken, HolderId, LockKey};

    fn key() -> LockKey {
        LockKey::new("a\x1b[31mb").unwrap()
    }

    fn hold() -> HoldInfo {
        let mut hold = HoldInfo::new();
        hold.holder = Some(HolderId::from_parts(1, 2));
        hold.token = Some(FencingToken::from_u64(1024));
        hold.label = Some("la\x07bel".into());
        hold.since = Some(SystemTime::UNIX_EPOCH);
        hold
    }

    fn held() -> KeyInfo {
        KeyInfo::with_hold(key(), hold())
    }

    fn cooling() -> KeyInfo {
        let mut seen = KeyInfo::free(key());
        seen.cooldown = Some(Duration::from_secs(7));
        seen
    }

    fn shared() -> KeyInfo {
        let mut seen = held();
        seen.holders[0].state = HoldState::Expired;
        for counter in [3, 4] {
            let mut hold = hold();
            hold.mode = Mode::Shared;
            hold.holder = Some(HolderId::from_parts(1, counter));
            seen.holders.push(hold);
        }
        seen
    }

    #[test]
    fn nothing_that_people_see_has_control_characters() {
        for seen in [held(), cooling(), shared()] {
            let cells = rows(&seen).into_iter().flatten();
            for text in cells.chain([details(&seen, &"a store").replace('\n', " "), in_words(&seen)]) {
                assert!(!text.chars().any(char::is_control), "{text:?}");
            }
        }
    }

    #[test]
    fn machines_get_the_exact_text_and_every_field() {
        let value = describe(&held());
        assert_eq!(value["key"], "a\x1b[31mb");
        assert_eq!((&value["token"], &value["token_text"]), (&1024.into(), &"1024".into()));
        assert_eq!(value["since"], "1970-01-01T00:00:00.000000Z");
        assert_eq!(value["expires_in_ms"], Value::Null);
        assert_eq!(value["holders"][0]["token"], 1024);
        for seen in [KeyInfo::free(key()), cooling(), held(), shared()] {
            let value = describe(&seen);
            assert_eq!(value.as_object().unwrap().len(), 18, "{value}");
            let inner = value["holders"].as_array().unwrap();
            assert!(inner.iter().all(|hold| hold.as_object().unwrap().len() == 13), "{value}");
        }
    }

    #[test]
    fn a_key_without_a_holder_is_free_or_cooling() {
        let free = describe(&KeyInfo::free(key()));
        assert_eq!((&free["state"], &free["holder"]), (&"free".into(), &Value::Null));
        let value = describe(&cooling());
        assert_eq!((&value["state"], &value["cooling_for_ms"]), (&"cooling".into(), &7000.into()));
        assert_eq!(value["holders"], json!([]));
        assert!(in_words(&cooling()).contains("cooldown for another 7s"), "{}", in_words(&cooling()));
        let mut expired = held();
        expired.holders[0].state = HoldState::Expired;
        assert_eq!(describe(&expired)["state"], "expired");
        expired.cooldown = Some(Duration::from_secs(7));
        assert_eq!(describe(&expired)["state"], "cooling", "it keeps others out");
        expired.holders[0].state = HoldState::Held;
        assert_eq!(describe(&expired)["state"], "held");
    }

    #[test]
    fn several_holders_are_all_shown_and_a_live_one_comes_first() {
        let value = describe(&shared());
        assert_eq!((&value["state"], &value["mode"]), (&"held".into(), &"shared".into()));
        assert_eq!(value["holder"], HolderId::from_parts(1, 3).to_string());
        let states: Vec<_> = value["holders"].as_array().unwrap().iter().map(|hold| &hold["state"]).collect();
        assert_eq!(states, ["expired", "held", "held"]);
        let text = listed(&[shared()]);
        assert_eq!((text.lines().count(), text.contains("MODE")), (4, true), "{text}");
        assert!(in_words(&shared()).ends_with(" and 1 more"), "{}", in_words(&shared()));
        assert!(!listed(&[held()]).contains("MODE"));
    }

    #[test]
    fn permits_are_shown_with_their_numbers() {
        let mut seen = held();
        for number in [5, 0] {
            let mut hold = hold();
            (hold.mode, hold.permit) = (Mode::Permit { of: 8 }, Some(number));
            seen.holders.push(hold);
        }
        seen.holders.remove(0);
        let value = describe(&seen);
        assert_eq!(
            (&value["mode"], &value["permit"], &value["permits"]),
            (&"permit".into(), &5.into(), &8.into())
        );
        assert_eq!((&value["holders"][1]["permit"], &value["holders"][1]["permits"]), (&0.into(), &8.into()));
        for text in [listed(&[seen.clone()]), details(&seen, &"a store")] {
            assert!(text.contains("permit 5 of 8") && text.contains("permit 0 of 8"), "{text}");
        }
        let alone = describe(&held());
        assert_eq!((&alone["permit"], &alone["permits"]), (&Value::Null, &Value::Null));
    }

    #[test]
    fn waiters_have_a_column_where_the_store_counts_them() {
        let mut seen = held();
        assert!(!listed(&[seen.clone()]).contains("WAITERS"));
        seen.waiters = Some(3);
        let text = listed(&[seen]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!((lines[0][6], *lines[1].iter().rev().nth(1).unwrap()), ("WAITERS", "3"), "{text}");
    }

    #[test]
    fn a_cooldown_has_a_column_that_says_when_it_ends() {
        // In whole hours, because the hold's age ends with any number of seconds.
        let cooldown = Some(Duration::from_secs(7 * 3_600));
        let (mut held_with_cooldown, mut cooling) = (held(), cooling());
        (held_with_cooldown.cooldown, cooling.cooldown) = (cooldown, cooldown);
        assert!(
            !listed(&[held(), held_with_cooldown.clone()]).contains("OPENS IN"),
            "a release opens it, or not"
        );
        let text = listed(&[held_with_cooldown, cooling]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines[0].windows(2).any(|words| words == ["OPENS", "IN"]), "{text}");
        assert_eq!(
            (lines[2][1], lines[2].contains(&"7h"), lines[1].contains(&"7h")),
            ("cooling", true, false),
            "{text}"
        );
    }

    #[test]
    fn a_clock_set_back_is_not_a_negative_time() {
        let mut hold = hold();
        hold.since = Some(SystemTime::now() + Duration::from_secs(3600));
        assert_eq!(held_for(&hold), Some(Duration::ZERO));
    }
}
