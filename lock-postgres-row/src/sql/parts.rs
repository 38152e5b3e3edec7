//! The statements of mutex rows that several holders have at once: shared ones, and permits of a semaphore.
//!
//! ```text
//!                       gate, the row in mutex        parts, the rows in mutex_part
//!   exclusive or free   as in the statements of sql   all out of use ("of" is -1)
//!   shared              acquired by '*'               "of" is 0, each held or free
//!   N permits           acquired by '#N'              exactly 0 to N - 1, "of" is N
//! ```
//!
//! - **Gate before part.** A statement that writes both locks the gate first. None locks the gate after a part.
//! - **A new part writes the gate.** So does a part that is put into use again. [`CONVERT`] finds the gate by the `ctid` of
//!   its snapshot, so the key has no part that the snapshot lacks.
//! - **[`CONVERT`] counts the unchanged parts.** It locks the free parts, and counts the parts that are at the `ctid` of its
//!   snapshot. If fewer than all parts in use are unchanged, a part was taken, or taken and released. Then it writes none of
//!   them, because a semaphore must have all its parts.
//! - **[`JOIN`] writes one part and no gate.** It checks `"of"` under the lock of the part.
//! - **Several parts are locked in the order of the index,** which is also the order of [`CONVERT`]. One scan finds them all,
//!   because a scan for each holder would read every part of the key again.
//! - **A subquery shows the snapshot of its statement.** So it must not decide about exclusion. A statement on a part reads
//!   the gate only for fairness, and to find a gate that an operator has changed.
//! - **The mark of a writer** (`writer_until`) keeps new parts out, and ends by itself.

use leasehold_postgres::table::Parts;

/// The statements of rows with several holders. The TTL is always zero here.
pub(crate) const PARTS: Parts = Parts {
    join: JOIN,
    join_many: JOIN_MANY,
    extend: EXTEND,
    enter_shared: ENTER_SHARED,
    enter_permits: ENTER_PERMITS,
    look: LOOK,
    convert: CONVERT,
    mark_writer: MARK_WRITER,
    renew_early: None,
    renew: RENEW,
    confirm: CONFIRM,
    relabel: RELABEL,
    release_unawaited: RELEASE_UNAWAITED,
    release_one: RELEASE_ONE,
    release: RELEASE,
    release_unlocked: RELEASE_UNLOCKED,
    force: FORCE,
    ask: ASK,
    idle: IDLE,
    purge: PURGE,
};

const JOIN: &str = "\
UPDATE ONLY {schema}.mutex_part p SET
    acquired = $3::bigint >= 0,
    holder = $2::text,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    released_at = NULL,
    label = $4::text,
    owner = $5::text
WHERE p.ctid = (
    SELECT p.ctid FROM ONLY {schema}.mutex_part p
    WHERE p.key = $1::text COLLATE \"C\" AND p.of = $6::integer AND NOT p.acquired
        AND (
            SELECT g.holder = CASE WHEN $6::integer = 0 THEN '*' ELSE '#' || $6::integer END
                AND g.acquired AND (g.writer_until > clock_timestamp()) IS NOT TRUE
            FROM {schema}.mutex g WHERE g.key = $1::text COLLATE \"C\"
        )
    ORDER BY p.part LIMIT 1
    FOR UPDATE SKIP LOCKED
)
RETURNING p.token, p.part";

/// Works like [`JOIN`] for several keys. The comparison of the key prevents that a part of an inherited table is written.
const JOIN_MANY: &str = "\
UPDATE {schema}.mutex_part p SET
    acquired = $3::bigint >= 0,
    holder = s.holder,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    released_at = NULL,
    label = $4::text,
    owner = $5::text
FROM (
    SELECT r.n, r.key, r.holder, f.at
    FROM (
        SELECT unnest($1::text[]) AS key, unnest($2::text[]) AS holder,
            generate_series(1, cardinality($1::text[])::bigint) AS n
    ) r CROSS JOIN LATERAL (
        SELECT p.ctid AS at FROM {schema}.mutex_part p
        WHERE p.key = r.key COLLATE \"C\" AND p.of = $6::integer AND NOT p.acquired
        AND (
            SELECT g.holder = CASE WHEN $6::integer = 0 THEN '*' ELSE '#' || $6::integer END
                AND g.acquired AND (g.writer_until > clock_timestamp()) IS NOT TRUE
            FROM {schema}.mutex g WHERE g.key = r.key COLLATE \"C\"
        )
        ORDER BY p.part LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) f
    OFFSET 0
) s
WHERE p.ctid = s.at AND (p.key = s.key) IS TRUE
RETURNING s.n, p.token, p.part";

/// Finds the part of a repeated request. There is no lease to extend.
const EXTEND: &str = "\
SELECT p.token, p.part FROM {schema}.mutex_part p
WHERE p.key = $1::text AND p.holder = $2::text AND $3::bigint >= 0 AND p.of = $4::integer AND p.acquired";

/// Takes a part that is out of use, or a new one. Two that enter at once can choose the same part. The second then has only
/// written the gate, and skips some parts (`$7`) in its next attempt, because a crowd of readers would collide again.
const ENTER_SHARED: &str = "\
WITH n AS MATERIALIZED (
    SELECT coalesce(
        (SELECT x.part FROM {schema}.mutex_part x WHERE x.key = $1::text AND x.of = -1
            ORDER BY x.part OFFSET $7::integer LIMIT 1),
        (SELECT max(x.part) + 1 + $7::integer FROM {schema}.mutex_part x WHERE x.key = $1::text), $7::integer) AS part
), g AS (
    INSERT INTO {schema}.mutex AS l (key, acquired, holder, token, acquired_at)
    SELECT $1::text, $3::bigint >= 0, '*', nextval({token}), clock_timestamp()
    FROM (SELECT) one LEFT JOIN {schema}.mutex o ON o.key = $1::text COLLATE \"C\"
    WHERE o.key IS NULL
        OR (o.acquired AND o.holder = '*' AND (o.writer_until > clock_timestamp()) IS NOT TRUE)
        OR (NOT o.acquired AND (o.cooldown_us IS NULL
            OR least(o.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(o.window_us, o.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' <= clock_timestamp()))
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key,
        acquired = true,
        holder = '*',
        token = nextval({token}),
        acquired_at = clock_timestamp(),
        released_at = NULL,
        cooldown_us = NULL,
        label = NULL,
        owner = NULL
    WHERE (l.acquired AND l.holder = '*' AND (l.writer_until > clock_timestamp()) IS NOT TRUE)
        OR (NOT l.acquired AND (l.cooldown_us IS NULL
            OR least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' <= clock_timestamp()))
    RETURNING l.key, l.token
)
INSERT INTO {schema}.mutex_part AS p (key, part, of, acquired, holder, token, acquired_at, label, owner)
SELECT g.key, n.part, $6::integer, true, $2::text, g.token, clock_timestamp(), $4::text, $5::text
FROM g, n
ON CONFLICT (key, part) DO UPDATE SET
    of = excluded.of,
    acquired = true,
    holder = excluded.holder,
    token = excluded.token,
    acquired_at = excluded.acquired_at,
    released_at = NULL,
    label = excluded.label,
    owner = excluded.owner
WHERE p.of = -1
RETURNING p.token, p.part";

/// Puts all N parts into use, the first of them for the caller. If an operator has opened the gate, a part can be in use
/// although its gate is free. Such a part is replaced after its release.
const ENTER_PERMITS: &str = "\
WITH g AS (
    INSERT INTO {schema}.mutex AS l (key, acquired, holder, token, acquired_at)
    SELECT $1::text, $3::bigint >= 0, '#' || $6::integer, nextval({token}), clock_timestamp()
    FROM (SELECT) one LEFT JOIN {schema}.mutex o ON o.key = $1::text COLLATE \"C\"
    WHERE o.key IS NULL
        OR (NOT o.acquired AND (o.cooldown_us IS NULL
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
        cooldown_us = NULL,
        label = NULL,
        owner = NULL
    WHERE (NOT l.acquired AND (l.cooldown_us IS NULL
            OR least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' <= clock_timestamp()))
    RETURNING l.key, l.token
), p AS (
    INSERT INTO {schema}.mutex_part AS p
        (key, part, of, acquired, holder, token, acquired_at, released_at, label, owner)
    SELECT g.key, n.part, $6::integer, n.part = 0, $2::text, g.token, clock_timestamp(),
        CASE WHEN n.part > 0 THEN clock_timestamp() END, $4::text, $5::text
    FROM g, generate_series(0, $6::integer - 1) AS n (part)
    ON CONFLICT (key, part) DO UPDATE SET
        of = excluded.of,
        acquired = excluded.acquired,
        holder = excluded.holder,
        token = excluded.token,
        acquired_at = excluded.acquired_at,
        released_at = excluded.released_at,
        label = excluded.label,
        owner = excluded.owner
    WHERE p.of = -1 OR NOT p.acquired
    RETURNING p.token, p.part, p.acquired
)
SELECT p.token, p.part FROM p WHERE p.acquired";

const LOOK: &str = "\
SELECT o.in_parts, coalesce(o.acquired, false), NULL::bigint,
    CASE WHEN o.cool_until > clock_timestamp()
        THEN ceil(extract(epoch FROM o.cool_until - clock_timestamp()) * 1000000)::bigint END,
    coalesce(o.wake_until > clock_timestamp() + $2::bigint * interval '1 microsecond', false),
    coalesce(o.writer_until > clock_timestamp() + $2::bigint * interval '1 microsecond', false),
    coalesce(o.writer_until > clock_timestamp(), false),
    c.parts, c.held, NULL::bigint, NULL::bigint
FROM (SELECT) one LEFT JOIN LATERAL (
    SELECT l.acquired, l.wake_until, l.writer_until,
        CASE WHEN l.acquired AND l.holder ~ '^([*]|#[1-9][0-9]*)$' THEN l.holder END AS in_parts,
        CASE WHEN l.cooldown_us IS NOT NULL THEN
            least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' END AS cool_until
    FROM {schema}.mutex l WHERE l.key = $1::text COLLATE \"C\"
    OFFSET 0
) o ON true CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE x.fits) AS parts, count(*) FILTER (WHERE x.acquired) AS held
    FROM (
        SELECT p.acquired, CASE p.of WHEN 0 THEN '*' ELSE '#' || p.of END = o.in_parts AS fits
        FROM {schema}.mutex_part p
        WHERE o.in_parts IS NOT NULL AND p.key = $1::text COLLATE \"C\" AND p.of >= 0
        OFFSET 0
    ) x
) c";

/// The check before the locks spares the holders, because a try must lock no part that is held. A gate or a part that
/// has changed since the snapshot is not at its `ctid` there. The parts then stay in use, because the server runs the
/// update of the parts even if the update of the gate finds no row. Keeps the mark of waiters, because readers wait for the end
/// of this grant.
const CONVERT: &str = "\
WITH g AS MATERIALIZED (
    SELECT l.ctid AS at FROM ONLY {schema}.mutex l
    WHERE l.key = $1::text COLLATE \"C\" AND l.acquired AND l.holder ~ '^([*]|#[1-9][0-9]*)$'
        AND NOT EXISTS (
            SELECT FROM {schema}.mutex_part p WHERE p.key = $1::text AND p.of >= 0 AND p.acquired
        )
    FOR UPDATE
), p AS MATERIALIZED (
    SELECT f.at FROM g CROSS JOIN LATERAL (
        SELECT p.ctid AS at FROM ONLY {schema}.mutex_part p
        WHERE p.key = $1::text COLLATE \"C\" AND p.of >= 0 AND NOT p.acquired
        ORDER BY p.part
        FOR UPDATE{skip}
    ) f
), c AS MATERIALIZED (
    SELECT (SELECT count(*) FROM g CROSS JOIN LATERAL (
            SELECT FROM ONLY {schema}.mutex v WHERE v.ctid = g.at OFFSET 0
        ) v) = 1
        AND (SELECT count(*) FROM p CROSS JOIN LATERAL (
            SELECT FROM ONLY {schema}.mutex_part v WHERE v.ctid = p.at OFFSET 0
        ) v)
            = (SELECT count(*) FROM {schema}.mutex_part x WHERE x.key = $1::text AND x.of >= 0) AS all_free
), d AS (
    UPDATE ONLY {schema}.mutex_part x SET of = -1 FROM p, c
    WHERE x.ctid = p.at AND (x.key = $1::text) IS TRUE AND c.all_free
    RETURNING 1
)
UPDATE ONLY {schema}.mutex l SET
    key = l.key,
    acquired = $3::bigint >= 0 AND NOT $6::boolean,
    holder = $2::text,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    released_at = CASE WHEN $6::boolean THEN clock_timestamp() END,
    cooldown_us = $7::bigint,
    label = $4::text,
    owner = $5::text,
    writer_until = NULL
FROM g, c
WHERE l.ctid = g.at AND (l.key = $1::text) IS TRUE AND c.all_free
    AND (SELECT count(*) FROM d) = (SELECT count(*) FROM p)
RETURNING l.token";

const MARK_WRITER: &str = "\
WITH g AS MATERIALIZED (
    SELECT f.key FROM (SELECT u.key FROM unnest($1::text[]) AS u (key) ORDER BY u.key COLLATE \"C\") r
    CROSS JOIN LATERAL (
        SELECT l.key FROM {schema}.mutex l
        WHERE l.key = r.key COLLATE \"C\" AND l.acquired AND l.holder ~ '^([*]|#[1-9][0-9]*)$'
        FOR NO KEY UPDATE
    ) f
)
UPDATE {schema}.mutex l SET
    wake_until = greatest(l.wake_until, clock_timestamp() + $2::bigint * interval '1 microsecond'),
    writer_until = greatest(l.writer_until, clock_timestamp() + $2::bigint * interval '1 microsecond')
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g))
RETURNING l.key";

/// Confirms parts. The check of the gate ends the hold of a part whose gate an operator has opened or removed, even if the
/// key has parts of another mode since.
const RENEW: &str = "\
SELECT p.key, p.holder, (p.asked = p.holder) IS TRUE FROM {schema}.mutex_part p
WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
    AND p.of >= 0 AND p.acquired AND $3::bigint >= 0
    AND (
        SELECT g.acquired AND g.holder = CASE p.of WHEN 0 THEN '*' ELSE '#' || p.of END
        FROM {schema}.mutex g WHERE g.key = p.key
    )";

const CONFIRM: &str = "\
SELECT p.key, p.holder, (p.asked = p.holder) IS TRUE FROM {schema}.mutex_part p
WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
    AND p.of >= 0 AND p.acquired
    AND (
        SELECT g.acquired AND g.holder = CASE p.of WHEN 0 THEN '*' ELSE '#' || p.of END
        FROM {schema}.mutex g WHERE g.key = p.key
    )";

const RELABEL: &str = "\
UPDATE {schema}.mutex_part p SET label = $3::text
WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0 AND p.acquired
RETURNING true";

/// Reads the mark in the gate, but does not lock the gate after a part. The waiter of a missed mark polls. The third
/// parameter only takes the place that it has in the statement of a gate.
const RELEASE_UNAWAITED: &str = "\
UPDATE ONLY {schema}.mutex_part p SET acquired = false, released_at = clock_timestamp()
WHERE p.key = $1::text AND p.holder = $2::text AND $3::boolean IS NOT NULL AND p.of >= 0 AND p.acquired
    AND (SELECT g.wake_until > clock_timestamp() FROM {schema}.mutex g WHERE g.key = $1::text COLLATE \"C\") IS NOT TRUE";

const RELEASE_ONE: &str = "\
UPDATE {schema}.mutex_part p SET acquired = false, released_at = clock_timestamp()
WHERE p.key = $1::text AND p.holder = $2::text AND $3::boolean IS NOT NULL AND p.of >= 0 AND p.acquired
RETURNING 1
    + CASE WHEN (SELECT g.wake_until > clock_timestamp() FROM {schema}.mutex g WHERE g.key = $1::text COLLATE \"C\")
        THEN 2 + length(pg_notify({channel}, 'f' || p.key)::text) ELSE 0 END";

const RELEASE: &str = "\
UPDATE {schema}.mutex_part p SET acquired = false, released_at = clock_timestamp()
WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
    AND p.of >= 0 AND p.acquired
    AND $3::text[] IS NOT NULL
RETURNING p.holder, 1
    + CASE WHEN (SELECT g.wake_until > clock_timestamp() FROM {schema}.mutex g WHERE g.key = p.key)
        THEN 2 + length(pg_notify({channel}, 'f' || p.key)::text) ELSE 0 END";

const RELEASE_UNLOCKED: &str = "\
WITH g AS MATERIALIZED (
    SELECT p.key, p.holder FROM {schema}.mutex_part p
    WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
        AND p.of >= 0 AND p.acquired
    ORDER BY p.key, p.part
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {schema}.mutex_part p SET acquired = false, released_at = clock_timestamp()
WHERE p.key = ANY (ARRAY(SELECT g.key FROM g)) AND (p.holder IN (SELECT g.holder FROM g)) IS TRUE
    AND $3::text[] IS NOT NULL AND p.of >= 0 AND p.acquired
RETURNING p.holder, 1
    + CASE WHEN (SELECT g.wake_until > clock_timestamp() FROM {schema}.mutex g WHERE g.key = p.key)
        THEN 2 + length(pg_notify({channel}, 'f' || p.key)::text) ELSE 0 END";

/// Frees the part, and leaves it in use, because a semaphore must have all its parts.
const FORCE: &str = "\
UPDATE {schema}.mutex_part p SET acquired = false, released_at = clock_timestamp()
WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0 AND p.acquired
RETURNING pg_notify({channel}, 'b' || p.holder || ' ' || p.key)";

const ASK: &str = "\
UPDATE {schema}.mutex_part p SET asked = p.holder
WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0 AND p.acquired
RETURNING pg_notify({channel}, 'b' || p.holder || ' ' || p.key)";

/// Ends with a limit, because a job opens only some keys, and a later one reads the page again.
const IDLE: &str = "\
SELECT l.key::text FROM (
    SELECT l.* FROM {schema}.mutex l WHERE l.key > $2::text ORDER BY l.key LIMIT $3::bigint
) l
WHERE l.acquired AND l.holder ~ '^([*]|#[1-9][0-9]*)$'
    AND l.acquired_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    AND (
        SELECT true FROM {schema}.mutex_part p WHERE p.key = l.key AND p.of >= 0
            AND (p.acquired OR p.released_at >= clock_timestamp() - $1::bigint * interval '1 microsecond')
        LIMIT 1
    ) IS NULL
LIMIT 100";

/// Removes parts that are out of use. A request that takes such a part writes its `"of"`, and the locked row is checked
/// again.
const PURGE: &str = "\
DELETE FROM ONLY {schema}.mutex_part d WHERE d.of = -1 AND d.ctid = ANY (ARRAY(
    SELECT p.ctid FROM ONLY {schema}.mutex_part p
    WHERE p.key > $2::text AND p.key < $4::text AND p.of = -1
        AND p.released_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    ORDER BY p.key, p.part LIMIT $3::bigint
    FOR UPDATE SKIP LOCKED
))";
