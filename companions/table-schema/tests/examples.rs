//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/print.rs"]
mod print;

#[test]
fn the_script_has_the_steps_in_their_order() {
    let script = print::script().unwrap();
    let steps = ["ADD COLUMN", "NOT VALID", "INDEX CONCURRENTLY"];
    let places = steps.map(|step| script.find(step).unwrap_or_else(|| panic!("{step}:\n{script}")));
    assert!(places.is_sorted(), "{script}");
}
