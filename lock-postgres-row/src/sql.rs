//! The statements of mutex rows.
//!
//! - A row stays locked (`acquired`) until its holder or an operator releases it, never by time.
//! - The token is drawn under the row's lock, drawn again if the row changed during the wait, or drawn as the row is
//!   inserted (`docs/hazards.md` H30, H31). A proposed insertion always has a token, because an existing row could have
//!   been removed.
//! - A release notifies only if a client waits (H33).
//! - A row can hold any value an operator wrote, and windows are cut to a hundred years.

// The path makes the module part of the tests that include this file.
#[path = "sql/parts.rs"]
mod parts;

use leasehold_postgres::schema::Stores;
use leasehold_postgres::table::Dialect;

/// The statements of the row store. `$3` of a grant or renewal, the TTL, is always zero here.
pub(crate) const MUTEXES: Dialect = Dialect {
    kind: "mutex",
    stores: Stores::Row,
    grant_one: GRANT_ONE,
    retake_one: RETAKE_ONE,
    grant_free: GRANT_FREE,
    grant: GRANT,
    free: FREE,
    among: AMONG,
    renew_early: None,
    renew: RENEW,
    confirm: CONFIRM,
    relabel: RELABEL,
    give_out: None,
    adopt: None,
    release_unawaited: RELEASE_UNAWAITED,
    release_one: RELEASE_ONE,
    release: RELEASE,
    release_unlocked: RELEASE_UNLOCKED,
    mark: MARK,
    served: SERVED,
    force: FORCE,
    ask: ASK,
    list: LIST,
    purge: PURGE,
    parts: Some(parts::PARTS),
};

/// Grants one key by an insertion with a conflict path. All parameters must occur in the statement, including
/// the TTL, which is never negative.
const GRANT_ONE: &str = "\
INSERT INTO {schema}.mutex AS l (key, acquired, holder, token, acquired_at, cooldown_us, label, owner)
SELECT $1::text, $3::bigint >= 0, $2::text, nextval({token}),
    clock_timestamp(), $4::bigint, $5::text, $6::text
FROM (SELECT) one LEFT JOIN {schema}.mutex o ON o.key = $1::text COLLATE \"C\"
WHERE o.key IS NULL OR (NOT o.acquired AND (o.cooldown_us IS NULL
    OR least(o.acquired_at, '200000-01-01 00:00:00+00')
        + least(greatest(coalesce(o.window_us, o.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp()))
ON CONFLICT (key) DO UPDATE SET
    key = excluded.key,
    acquired = true,
    holder = excluded.holder,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    released_at = NULL,
    cooldown_us = excluded.cooldown_us,
    label = excluded.label,
    owner = excluded.owner,
    wake_until = NULL
WHERE NOT l.acquired AND (l.cooldown_us IS NULL
    OR least(l.acquired_at, '200000-01-01 00:00:00+00')
        + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp())
RETURNING l.token";

/// Grants one key that has a free row, with a third less server work than an insertion with a conflict. A row
/// has no fence, so the lock of a plain update suffices. After a wait for a changed row, the server evaluates
/// everything again, including the token. If the row is unchanged, no other client was granted it. The
/// grant's time can be older by the wait, which matters only for a cooldown.
const RETAKE_ONE: &str = "\
UPDATE ONLY {schema}.mutex l SET
    acquired = $3::bigint >= 0,
    holder = $2::text,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    released_at = NULL,
    label = $4::text,
    owner = $5::text,
    wake_until = NULL
WHERE l.key = $1::text AND NOT l.acquired AND l.cooldown_us IS NULL
RETURNING l.token";

/// Grants the keys that have a free row. Looks rows up once, locks the released ones, and writes them by
/// `ctid`. A row changed since the start of the statement is locked at its new `ctid`, not found by the
/// update, and left to the next statement. The key is compared again because a `ctid` is unique only within
/// one table, and tables can inherit from this one. `IS TRUE` prevents a lookup by key there, and `OFFSET 0`
/// keeps the subqueries separate.
const GRANT_FREE: &str = "\
UPDATE {schema}.mutex l SET
    acquired = $3::bigint >= 0,
    holder = s.holder,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    released_at = NULL,
    cooldown_us = $4::bigint,
    label = $5::text,
    owner = $6::text,
    wake_until = NULL
FROM (
    SELECT r.n, r.key, r.holder, f.at
    FROM (
        SELECT unnest($1::text[]) AS key, unnest($2::text[]) AS holder,
            generate_series(1, cardinality($1::text[])::bigint) AS n
    ) r CROSS JOIN LATERAL (
        SELECT l.ctid AS at FROM {schema}.mutex l
        WHERE l.key = r.key COLLATE \"C\" AND NOT l.acquired AND (l.cooldown_us IS NULL
            OR least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp())
        FOR UPDATE
    ) f
    OFFSET 0
) s
WHERE l.ctid = s.at AND (l.key = s.key) IS TRUE
RETURNING s.n, l.token";

const GRANT: &str = "\
WITH o AS MATERIALIZED (
    SELECT r.key, r.holder AS me, r.cooldown, r.label, l.key IS NULL AS fresh, l.holder, l.token, l.acquired,
        l.wake_until, l.cool_until
    FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])
        AS r (key, holder, ttl, cooldown, label)
    LEFT JOIN LATERAL (
        SELECT l.*, CASE WHEN l.cooldown_us IS NOT NULL THEN
            least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' END AS cool_until
        FROM {schema}.mutex l WHERE l.key = r.key COLLATE \"C\" OFFSET 0
    ) l ON true
){free}, g AS (
    INSERT INTO {schema}.mutex AS l (key, acquired, holder, token, acquired_at, cooldown_us, label, owner)
    SELECT o.key, true, o.me, nextval({token}), clock_timestamp(),
        o.cooldown, o.label, $6::text
    FROM o
    WHERE (o.fresh OR NOT o.acquired)
        AND (o.cool_until IS NULL OR o.cool_until <= clock_timestamp()){among}
    ORDER BY o.key COLLATE \"C\"
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key,
        acquired = true,
        holder = excluded.holder,
        token = nextval({token}),
        acquired_at = clock_timestamp(),
        released_at = NULL,
        cooldown_us = excluded.cooldown_us,
        label = excluded.label,
        owner = excluded.owner,
        wake_until = NULL
    WHERE NOT l.acquired AND (l.cooldown_us IS NULL
        OR least(l.acquired_at, '200000-01-01 00:00:00+00')
            + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp())
    RETURNING l.key, l.token
)
SELECT g.key, g.token, false, NULL::bigint, NULL::bigint, false, false FROM g
UNION ALL
SELECT o.key,
    CASE WHEN o.holder = o.me AND o.acquired THEN o.token END,
    coalesce(o.acquired, false),
    NULL::bigint,
    CASE WHEN o.cool_until > clock_timestamp()
        THEN ceil(extract(epoch FROM o.cool_until - clock_timestamp()) * 1000000)::bigint END,
    coalesce(o.wake_until > clock_timestamp() + $7::bigint * interval '1 microsecond', false),
    coalesce(o.acquired AND o.holder ~ '^([*]|#[1-9][0-9]*)$', false)
FROM o";

const FREE: &str = ", s AS MATERIALIZED (
    SELECT f.key FROM (SELECT o.key FROM o ORDER BY o.key COLLATE \"C\") r CROSS JOIN LATERAL (
        SELECT l.key FROM {schema}.mutex l WHERE l.key = r.key COLLATE \"C\" AND NOT l.acquired
        FOR UPDATE SKIP LOCKED
    ) f
)";

const AMONG: &str = "
        AND (o.fresh OR o.key IN (SELECT s.key FROM s))";

/// Confirms rows: only checks whether each row is still locked by its holder, because there is nothing to
/// renew. It takes no locks, so it does not need to skip locked rows.
const RENEW: &str = "\
SELECT r.key, r.holder, l.asked FROM unnest($1::text[], $2::text[]) AS r (key, holder) CROSS JOIN LATERAL (
    SELECT (l.asked = l.holder) IS TRUE AS asked FROM {schema}.mutex l
    WHERE l.key = r.key COLLATE \"C\" AND l.holder = r.holder AND l.acquired AND $3::bigint >= 0
    OFFSET 0
) l";

const CONFIRM: &str = "\
SELECT r.key, r.holder, l.asked FROM unnest($1::text[], $2::text[]) AS r (key, holder) CROSS JOIN LATERAL (
    SELECT (l.asked = l.holder) IS TRUE AS asked FROM {schema}.mutex l
    WHERE l.key = r.key COLLATE \"C\" AND l.holder = r.holder AND l.acquired
    OFFSET 0
) l";

const RELABEL: &str = "\
UPDATE {schema}.mutex l SET label = $3::text
WHERE l.key = $1::text AND l.holder = $2::text AND l.acquired
RETURNING true";

/// Releases one hold without waiters. After a wait for a changed row, the server checks all conditions again.
/// `ONLY` excludes tables that inherit from this one, because the written rows are counted.
const RELEASE_UNAWAITED: &str = "\
UPDATE ONLY {schema}.mutex l SET acquired = false, released_at = clock_timestamp(),
    cooldown_us = CASE WHEN NOT $3::boolean THEN l.cooldown_us END
WHERE l.key = $1::text AND l.holder = $2::text AND l.acquired AND l.wake_until IS NULL";

const RELEASE_ONE: &str = "\
UPDATE {schema}.mutex l SET acquired = false, released_at = clock_timestamp(),
    cooldown_us = CASE WHEN NOT $3::boolean THEN l.cooldown_us END
WHERE l.key = $1::text AND l.holder = $2::text AND l.acquired
RETURNING 1
    + CASE WHEN l.wake_until > clock_timestamp() THEN 2 + length(pg_notify({channel}, 'f' || l.key)::text) ELSE 0 END";

const RELEASE: &str = "\
UPDATE {schema}.mutex l SET acquired = false, released_at = clock_timestamp(),
    cooldown_us = CASE WHEN (l.holder IN (SELECT unnest($3::text[]))) IS NOT TRUE THEN l.cooldown_us END
WHERE l.key = ANY ($1::text[])
    AND (l.holder IN (SELECT unnest($2::text[]))) IS TRUE
    AND l.acquired
RETURNING l.holder, 1
    + CASE WHEN l.wake_until > clock_timestamp() THEN 2 + length(pg_notify({channel}, 'f' || l.key)::text) ELSE 0 END";

const RELEASE_UNLOCKED: &str = "\
WITH g AS MATERIALIZED (
    SELECT f.key FROM (
        SELECT u.key, u.holder FROM unnest($1::text[], $2::text[]) AS u (key, holder)
        ORDER BY u.key COLLATE \"C\"
    ) r CROSS JOIN LATERAL (
        SELECT l.key FROM {schema}.mutex l
        WHERE l.key = r.key COLLATE \"C\" AND l.holder = r.holder AND l.acquired
        FOR NO KEY UPDATE SKIP LOCKED
    ) f
)
UPDATE {schema}.mutex l SET acquired = false, released_at = clock_timestamp(),
    cooldown_us = CASE WHEN (l.holder IN (SELECT unnest($3::text[]))) IS NOT TRUE THEN l.cooldown_us END
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g))
RETURNING l.holder, 1
    + CASE WHEN l.wake_until > clock_timestamp() THEN 2 + length(pg_notify({channel}, 'f' || l.key)::text) ELSE 0 END";

/// Notifies the holder's client of the waiter only while callers of that client can pass the hold to each other
/// (`handover_for`), because notifications are costly.
const MARK: &str = "\
WITH g AS MATERIALIZED (
    SELECT f.key FROM (SELECT u.key FROM unnest($1::text[]) AS u (key) ORDER BY u.key COLLATE \"C\") r
    CROSS JOIN LATERAL (
        SELECT l.key FROM {schema}.mutex l WHERE l.key = r.key COLLATE \"C\" AND l.acquired
        FOR NO KEY UPDATE{skip}
    ) f
)
UPDATE {schema}.mutex l SET
    wake_until = greatest(l.wake_until, clock_timestamp() + $2::bigint * interval '1 microsecond')
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g))
RETURNING l.key, CASE WHEN l.acquired_at > clock_timestamp() - interval '10 milliseconds'
    THEN pg_notify({channel}, 'w' || l.key)::text END";

/// A release leaves the holder in its row or part. A grant replaces the holder, or puts the part out of use.
const SERVED: &str = "\
SELECT l.holder IS DISTINCT FROM $2::text AND NOT EXISTS (
    SELECT FROM {schema}.mutex_part p WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0
)
FROM {schema}.mutex l WHERE l.key = $1::text COLLATE \"C\"";

const FORCE: &str = "\
UPDATE {schema}.mutex l SET acquired = false, released_at = clock_timestamp()
WHERE l.key = $1::text AND l.holder = $2::text AND l.acquired
RETURNING pg_notify({channel}, 'b' || l.holder || ' ' || l.key)";

/// Writes the holder, because the request must end with that grant.
const ASK: &str = "\
UPDATE {schema}.mutex l SET asked = l.holder
WHERE l.key = $1::text AND l.holder = $2::text AND l.acquired
RETURNING pg_notify({channel}, 'b' || l.holder || ' ' || l.key)";

/// Reads the place of the last row from the index, then filters the rows as the index finds them. Numbering the rows
/// instead takes two to three times as long, because most rows of a table are of released holds and are not shown. A
/// key with parts in use has a row for each held one. Without one it is only shown as the last key.
const LIST: &str = "\
WITH b AS MATERIALIZED (
    SELECT l.key FROM {schema}.mutex l WHERE l.key >= $1::text AND l.key < $2::text
    ORDER BY l.key OFFSET $4::bigint - 1 LIMIT 1
), c AS MATERIALIZED (
    SELECT clock_timestamp() AS now
)
SELECT i.key, i.holder, i.token, i.label, i.owner,
    CASE WHEN isfinite(i.acquired_at) AND i.acquired_at < '200000-01-01 00:00:00+00'
        THEN (extract(epoch FROM i.acquired_at) * 1000000)::bigint END,
    CASE WHEN i.acquired THEN 0 ELSE 2 END::smallint,
    NULL::bigint,
    CASE WHEN i.cool_until > i.now THEN ceil(extract(epoch FROM i.cool_until - i.now) * 1000000)::bigint END,
    coalesce(i.acquired OR ($3::boolean AND i.cool_until > i.now), false), i.last,
    (i.acquired AND i.asked = i.holder) IS TRUE, i.of, i.part
FROM (
    SELECT q.key, q.now, q.cool_until, q.last, h.*
    FROM (
        SELECT l.*, (SELECT c.now FROM c) AS now, l.acquired AND l.holder ~ '^([*]|#[1-9][0-9]*)$' AS in_parts,
            CASE WHEN l.cooldown_us IS NOT NULL THEN
                least(l.acquired_at, '200000-01-01 00:00:00+00')
                    + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
            * interval '1 microsecond' END AS cool_until,
            (l.key = (SELECT b.key FROM b)) IS TRUE AS last
        FROM {schema}.mutex l
        WHERE l.key >= $1::text AND l.key < $2::text AND l.key <= coalesce((SELECT b.key FROM b), $2::text)
    ) q CROSS JOIN LATERAL (
        SELECT q.holder, q.token, q.label, q.owner, q.acquired_at, q.acquired, q.asked,
            NULL::integer AS of, NULL::integer AS part
        WHERE NOT q.in_parts
        UNION ALL
        SELECT r.holder, r.token, r.label, r.owner, r.acquired_at, r.acquired, r.asked, r.of, r.part
        FROM {schema}.mutex_part r
        WHERE q.in_parts AND r.key = q.key COLLATE \"C\" AND r.of >= 0 AND r.acquired
        UNION ALL
        SELECT q.holder, q.token, NULL, NULL, q.acquired_at, false, NULL, NULL, NULL
        WHERE q.in_parts AND q.last
    ) h
    WHERE q.acquired OR ($3::boolean AND q.cool_until > q.now) OR q.last
) i
ORDER BY i.key, i.part";

const PURGE: &str = "\
WITH page AS MATERIALIZED (
    SELECT p.key, row_number() OVER () AS n FROM (
        SELECT l.key FROM {schema}.mutex l WHERE l.key > $2::text ORDER BY l.key LIMIT $3::bigint
    ) p
), gone AS (
    DELETE FROM {schema}.mutex d WHERE d.key = ANY (ARRAY(
        SELECT f.key FROM page p CROSS JOIN LATERAL (
            SELECT l.key FROM {schema}.mutex l
            WHERE l.key = p.key COLLATE \"C\"
                AND NOT l.acquired AND l.released_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
        AND l.window_us IS NULL
                AND (l.cooldown_us IS NULL OR least(l.acquired_at, '200000-01-01 00:00:00+00')
                    + least(greatest(l.cooldown_us, 0), 3162240000000000)
        * interval '1 microsecond'
                    < clock_timestamp() - $1::bigint * interval '1 microsecond')
            FOR UPDATE SKIP LOCKED
        ) f
    ))
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), (SELECT p.key::text FROM page p WHERE p.n = $3::bigint)";
