use super::*;

const PLAIN: Fuzz<'_> = Fuzz {
    target: "itself",
    inputs: 3_000,
    examples: &["postgres://user@host/db", "memory:x"],
    words: &["needle"],
};

#[test]
fn a_fault_is_found_made_small_and_can_be_repeated() {
    let has_needle = |input: &[u8]| assert!(!input.windows(6).any(|six| six == b"needle"), "found it");
    let found = catch_unwind(|| PLAIN.check(has_needle)).unwrap_err();
    let text = found.downcast_ref::<String>().unwrap();
    assert!(text.contains("found it") && text.contains("\nneedle\n"), "{text}");
    let seed = text.rsplit_once("--seed ").unwrap().1.parse().unwrap();
    let inputs = inputs::near(PLAIN.examples, PLAIN.words);
    let check = |input: &[u8]| outcome(input, None, &has_needle);
    assert_eq!(PLAIN.one(seed, &inputs, &check).unwrap_err(), *text);
}

#[test]
fn an_input_is_slow_if_it_is_so_twice_and_there_is_a_limit() {
    let calls = AtomicU64::new(0);
    let wait = |_: &[u8]| {
        calls.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(2));
    };
    let limit = Duration::from_millis(1);
    assert!(outcome(b"", Some(limit), &wait).unwrap_err().contains("it takes"));
    assert_eq!(calls.swap(0, Ordering::Relaxed), 2);
    assert_eq!((outcome(b"", None, &wait), calls.into_inner()), (Ok(()), 1));
}

#[test]
fn what_was_kept_is_checked_first() {
    let seen = Mutex::new(Vec::new());
    PLAIN.check(|input| seen.lock().unwrap().push(input.to_vec()));
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen[..2], [b"#kept\n\xff\\".to_vec(), "é".as_bytes().to_vec()]);
    assert!(seen.len() >= 3_000, "{}", seen.len());
    assert!(seen.iter().any(|input| input == b"memory:x"), "valid ones are among them");
    let different: std::collections::BTreeSet<_> = seen.iter().collect();
    assert!(2 * different.len() > seen.len(), "{} of {}", different.len(), seen.len());
}

#[test]
fn lines_of_a_corpus_are_read_as_they_are_written() {
    for input in [&b"#a\n\r\t\\\"'\0\xff"[..], "é".as_bytes(), b"", b"\\x41"] {
        assert_eq!(corpus::bytes(&corpus::line(input)), input);
    }
}
