use super::*;

const MODES: [Mode; 4] =
    [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 1 }, Mode::Permit { of: 4_000_000_000 }];

fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

fn within(span: &Span, name: &[u8]) -> bool {
    span.begin.as_slice() <= name && name < span.end.as_slice()
}

#[test]
fn the_entries_of_a_key_are_in_its_range_and_in_no_other() {
    let (names, holder) = (Names::new("/locks"), HolderId::from_parts(7, 1));
    let all = ["a", "a\u{1}", "a/b", "ab", "b", "a "];
    for owner in all {
        for other in all {
            let entry = names.entry(&key(other), holder, Mode::Exclusive);
            assert_eq!(within(&names.queue(&key(owner)), &entry), owner == other, "{owner:?} {other:?}");
            let cooldown = names.cooldown_of(&key(other), holder);
            assert_eq!(within(&names.cooldown(&key(owner)), &cooldown), owner == other);
            assert!(!within(&names.queue(&key(owner)), &cooldown));
        }
    }
}

#[test]
fn no_name_is_under_two_prefixes() {
    let holder = HolderId::from_parts(1, 1);
    let (outer, inner) = (Names::new("app"), Names::new("app/q"));
    let entry = inner.entry(&key("k"), holder, Mode::Exclusive);
    assert!(!within(&outer.queues(""), &entry));
    assert_eq!(outer.parse_entry(&entry), None);
    assert_ne!(outer.entry(&key("/q/k"), holder, Mode::Exclusive), entry);
}

#[test]
fn names_say_their_key_and_holder() {
    let (names, holder) = (Names::new("/locks"), HolderId::from_parts(0xabc, 17));
    let key = key("ledger:42/ü");
    for mode in MODES {
        let named = Named { key: key.clone(), mode, holder };
        assert_eq!(names.parse_entry(&names.entry(&key, holder, mode)), Some(named));
    }
    assert_eq!(names.parse_cooldown(&names.cooldown_of(&key, holder)), Some((key.clone(), holder)));
    assert_eq!(names.parse_note(&names.note(&key, holder)), Some((key.clone(), holder)));
    assert_eq!(names.parse_number(&names.number(&key, 11)), Some((key.clone(), 11)));
    assert_eq!(names.parse_entry(&names.note(&key, holder)), None);
    assert_eq!(names.parse_entry(&names.cooldown_of(&key, holder)), None);
    for strange in ["/other//q/k\0", "/locks//q/k\0p\0", "/locks//q/k\0x\0", "/locks//q/k\0s\0s\0"] {
        assert_eq!(names.parse_entry(format!("{strange}{holder}").as_bytes()), None, "{strange:?}");
    }
    assert_eq!(names.parse_entry(&names.base()), None);
}

#[test]
fn the_entries_that_exclude_a_reader_are_one_range() {
    let (names, holder) = (Names::new("p"), HolderId::from_parts(u128::MAX, 1));
    for (name, of) in [("k", "k"), ("k", "ks"), ("ks", "k")] {
        for mode in MODES {
            let entry = names.entry(&key(name), holder, mode);
            let (queue, rivals) = (names.queue(&key(of)), names.not_shared(&key(of)));
            assert_eq!(within(&queue, &entry), name == of, "{mode:?}");
            assert_eq!(within(&rivals, &entry), name == of && mode != Mode::Shared, "{mode:?}");
        }
    }
}

#[test]
fn the_numbers_of_a_key_are_in_its_range_and_in_no_other() {
    let names = Names::new("p");
    for name in ["k", "k1", "j"] {
        let number = names.number(&key(name), 1);
        assert_eq!(within(&names.numbers(&key("k")), &number), name == "k");
        assert_eq!(within(&names.all_numbers("k"), &number), name != "j");
    }
}

#[test]
fn the_notes_of_an_engine_are_in_its_range() {
    let (names, key) = (Names::new("p"), key("k"));
    let own = names.notes(5);
    assert!(within(&own, &names.note(&key, HolderId::from_parts(5, 1))));
    assert!(within(&own, &names.note(&key, HolderId::from_parts(5, u64::MAX))));
    assert!(!within(&own, &names.note(&key, HolderId::from_parts(6, 1))));
}

#[test]
fn a_list_by_prefix_has_the_keys_with_that_prefix() {
    let (names, holder) = (Names::new("p"), HolderId::from_parts(1, 1));
    let ledger = names.queues("ledger:");
    assert!(within(&ledger, &names.entry(&key("ledger:1"), holder, Mode::Shared)));
    assert!(!within(&ledger, &names.entry(&key("ledge"), holder, Mode::Exclusive)));
    assert!(within(&names.queues(""), &names.entry(&key("\u{10ffff}"), holder, Mode::Permit { of: 2 })));
}
