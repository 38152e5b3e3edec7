//! The meaning of the parameters of statements, for the files in `sql`.

pub(super) type Parameters = Vec<(&'static str, String)>;

pub(super) fn given(parameters: &[(&'static str, &str)]) -> Parameters {
    parameters.iter().map(|(kind, meaning)| (*kind, (*meaning).to_owned())).collect()
}

/// Lists the parameters of a statement that finds rows: the four that all have, and `more`.
pub(super) fn finding(more: &[(&'static str, &str)]) -> Parameters {
    let first = [
        ("bigint", "the largest number of claims"),
        ("text", "the batch, a UUID; the owner of a claim is a hash of it and of the claim's number"),
        ("bigint", "the lease in milliseconds"),
        ("text", "the queue"),
    ];
    given(&[&first, more].concat())
}

/// Lists the parameters of [`finding`] and the values of a cursor.
pub(super) fn behind(order: &[&str], more: &[(&'static str, &str)]) -> Parameters {
    let mut parameters = finding(more);
    parameters.extend(order.iter().map(|column| ("text", format!("{column} of the cursor"))));
    parameters
}

pub(super) fn keys(first: &[(&'static str, &str)]) -> Parameters {
    given(&[first, &[("text[]", "the ids of the rows"), ("text[]", "their queues")]].concat())
}

pub(super) const CLAIMED: [(&str, &str); 5] = [
    ("bigint[]", "for each row, the number of its claim in this call"),
    ("text[]", "its id"),
    ("text[]", "its queue"),
    ("text[]", "the owner of its claim"),
    ("bigint[]", "its epoch"),
];

/// Lists the parameters of a statement that ends several claims: a list per column of their rows.
pub(super) fn ends() -> Parameters {
    given(
        &[&CLAIMED[..], &[("text[]", "the message of its end"), ("bigint[]", "its pause in milliseconds")]]
            .concat(),
    )
}

/// Lists the parameters of a statement that ends one claim of one row.
pub(super) fn end() -> Parameters {
    given(&[
        ("bigint", "the number of the claim in this call"),
        ("text", "the id of the row"),
        ("text", "its queue"),
        ("text", "the owner of the claim"),
        ("bigint", "its epoch"),
        ("text", "the message of its end"),
        ("bigint", "its pause in milliseconds"),
    ])
}

pub(super) const WINDOW: (&str, &str) = ("bigint", "the number of rows to read");
pub(super) const SEEN_GROUPS: (&str, &str) = ("text[]", "groups that this call has already found");
pub(super) const FULL_TENANTS: (&str, &str) = ("text[]", "tenants that this call has found without room");
pub(super) const FOUND: [(&str, &str); 4] = [
    ("text[]", "the ids of rows that were found"),
    ("text[]", "their queues"),
    ("text[]", "their groups"),
    ("bigint[]", "the numbers of their claims"),
];
