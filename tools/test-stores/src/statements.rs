//! The statements of a table store by name. A new field of `Dialect` does not compile until it is listed here.

use leasehold_postgres::table::{Dialect, Parts};

/// Returns the names and texts of all statements of the store and of `more`, rendered for `schema`.
pub(crate) fn rendered(
    dialect: &Dialect,
    more: &[(&'static str, &str)],
    schema: &str,
) -> Vec<(&'static str, String)> {
    let Dialect {
        kind: _,
        stores: _,
        free,
        among,
        grant_one,
        retake_one,
        grant_free,
        grant,
        renew_early,
        renew,
        confirm,
        relabel,
        give_out,
        adopt,
        release_unawaited,
        release_one,
        release,
        release_unlocked,
        mark,
        served,
        force,
        ask,
        list,
        purge,
        parts,
    } = dialect;
    let all = [
        ("grant_one", (*grant_one).to_owned()),
        ("retake_one", (*retake_one).to_owned()),
        ("grant_free", (*grant_free).to_owned()),
        ("grant", grant.replace("{free}", "").replace("{among}", "")),
        ("grant skipping", grant.replace("{free}", free).replace("{among}", among)),
        ("renew", renew.replace("{skip}", "")),
        ("renew skipping", renew.replace("{skip}", " SKIP LOCKED")),
        ("confirm", (*confirm).to_owned()),
        ("relabel", (*relabel).to_owned()),
        ("release_unawaited", (*release_unawaited).to_owned()),
        ("release_one", (*release_one).to_owned()),
        ("release", (*release).to_owned()),
        ("release_unlocked", (*release_unlocked).to_owned()),
        ("mark", mark.replace("{skip}", "")),
        ("mark skipping", mark.replace("{skip}", " SKIP LOCKED")),
        ("served", (*served).to_owned()),
        ("force", (*force).to_owned()),
        ("ask", (*ask).to_owned()),
        ("list", (*list).to_owned()),
        ("inspect", (*list).to_owned()),
        ("purge", (*purge).to_owned()),
    ];
    let some = [("renew_early", renew_early), ("give_out", give_out), ("adopt", adopt)];
    let some = some.into_iter().filter_map(|(statement, text)| Some((statement, (*text)?.to_owned())));
    let more = more.iter().map(|(statement, text)| (*statement, (*text).to_owned()));
    let render = |(statement, text): (&'static str, String)| {
        let token = format!("'{schema}.token'::regclass");
        let text = text.replace("{schema}", schema).replace("{token}", &token);
        (statement, text.replace("{channel}", "'nobody_listens'"))
    };
    let parts = parts.iter().flat_map(of_parts);
    all.into_iter().chain(some).chain(parts).chain(more).map(render).collect()
}

/// Returns the statements of shared holds and permits.
fn of_parts(parts: &Parts) -> Vec<(&'static str, String)> {
    let Parts {
        join,
        join_many,
        extend,
        enter_shared,
        enter_permits,
        look,
        convert,
        mark_writer,
        renew_early,
        renew,
        confirm,
        relabel,
        release_unawaited,
        release_one,
        release,
        release_unlocked,
        force,
        ask,
        idle,
        purge,
    } = parts;
    let all = [
        ("join", (*join).to_owned()),
        ("join_many", (*join_many).to_owned()),
        ("extend", (*extend).to_owned()),
        ("enter_shared", (*enter_shared).to_owned()),
        ("enter_permits", (*enter_permits).to_owned()),
        ("look", (*look).to_owned()),
        ("convert", convert.replace("{skip}", "")),
        ("convert skipping", convert.replace("{skip}", " SKIP LOCKED")),
        ("mark_writer", (*mark_writer).to_owned()),
        ("renew part", renew.replace("{skip}", "")),
        ("renew part skipping", renew.replace("{skip}", " SKIP LOCKED")),
        ("confirm part", (*confirm).to_owned()),
        ("relabel part", (*relabel).to_owned()),
        ("release_unawaited part", (*release_unawaited).to_owned()),
        ("release_one part", (*release_one).to_owned()),
        ("release part", (*release).to_owned()),
        ("release_unlocked part", (*release_unlocked).to_owned()),
        ("force part", (*force).to_owned()),
        ("ask part", (*ask).to_owned()),
        ("idle", (*idle).to_owned()),
        ("purge parts", (*purge).to_owned()),
    ];
    let renew_early = renew_early.map(|text| ("renew_early part", text.to_owned()));
    all.into_iter().chain(renew_early).collect()
}
