//! The statements of leases that several holders have at once: shared ones, and permits of a semaphore.
//!
//! ```text
//!                       gate, the row in lease        parts, the rows in lease_part
//!   exclusive or free   as in the statements of sql   all out of use ("of" is -1)
//!   shared              holder '*', indefinitely      "of" is 0, each held or free
//!   N permits           holder '#N', indefinitely     exactly 0 to N - 1, "of" is N
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

/// The statements of leases with several holders.
pub(crate) const PARTS: Parts = Parts {
    join: JOIN,
    join_many: JOIN_MANY,
    extend: EXTEND,
    enter_shared: ENTER_SHARED,
    enter_permits: ENTER_PERMITS,
    look: LOOK,
    convert: CONVERT,
    mark_writer: MARK_WRITER,
    renew_early: Some(RENEW_EARLY),
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
UPDATE ONLY {schema}.lease_part p SET
    holder = $2::text,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond',
    released = false,
    label = $4::text,
    owner = $5::text
WHERE p.ctid = (
    SELECT p.ctid FROM ONLY {schema}.lease_part p
    WHERE p.key = $1::text COLLATE \"C\" AND p.of = $6::integer AND (p.released OR p.expires_at <= clock_timestamp())
        AND (
            SELECT g.holder = CASE WHEN $6::integer = 0 THEN '*' ELSE '#' || $6::integer END
                AND NOT g.released AND g.expires_at = 'infinity'
                AND (g.writer_until > clock_timestamp()) IS NOT TRUE
            FROM {schema}.lease g WHERE g.key = $1::text COLLATE \"C\"
        )
    ORDER BY p.part LIMIT 1
    FOR UPDATE SKIP LOCKED
)
RETURNING p.token, p.part";

/// Works like [`JOIN`] for several keys. The comparison of the key prevents that a part of an inherited table is written.
const JOIN_MANY: &str = "\
UPDATE {schema}.lease_part p SET
    holder = s.holder,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond',
    released = false,
    label = $4::text,
    owner = $5::text
FROM (
    SELECT r.n, r.key, r.holder, f.at
    FROM (
        SELECT unnest($1::text[]) AS key, unnest($2::text[]) AS holder,
            generate_series(1, cardinality($1::text[])::bigint) AS n
    ) r CROSS JOIN LATERAL (
        SELECT p.ctid AS at FROM {schema}.lease_part p
        WHERE p.key = r.key COLLATE \"C\" AND p.of = $6::integer
            AND (p.released OR p.expires_at <= clock_timestamp())
            AND (
                SELECT g.holder = CASE WHEN $6::integer = 0 THEN '*' ELSE '#' || $6::integer END
                    AND NOT g.released AND g.expires_at = 'infinity'
                    AND (g.writer_until > clock_timestamp()) IS NOT TRUE
                FROM {schema}.lease g WHERE g.key = r.key COLLATE \"C\"
            )
        ORDER BY p.part LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) f
    OFFSET 0
) s
WHERE p.ctid = s.at AND (p.key = s.key) IS TRUE
RETURNING s.n, p.token, p.part";

const EXTEND: &str = "\
UPDATE {schema}.lease_part p
SET expires_at = greatest(p.expires_at, clock_timestamp() + $3::bigint * interval '1 microsecond')
WHERE p.key = $1::text AND p.holder = $2::text AND p.of = $4::integer AND NOT p.released
    AND p.expires_at > clock_timestamp()
RETURNING p.token, p.part";

/// Takes a part that is out of use, or a new one. Two that enter at once can choose the same part. The second then has only
/// written the gate, and skips some parts (`$7`) in its next attempt, because a crowd of readers would collide again.
const ENTER_SHARED: &str = "\
WITH n AS MATERIALIZED (
    SELECT coalesce(
        (SELECT x.part FROM {schema}.lease_part x WHERE x.key = $1::text AND x.of = -1
            ORDER BY x.part OFFSET $7::integer LIMIT 1),
        (SELECT max(x.part) + 1 + $7::integer FROM {schema}.lease_part x WHERE x.key = $1::text), $7::integer) AS part
), g AS (
    INSERT INTO {schema}.lease AS l (key, holder, token, acquired_at, ttl_us, expires_at, released)
    SELECT $1::text, '*', nextval({token}), clock_timestamp(), 0, 'infinity', false
    FROM (SELECT) one LEFT JOIN {schema}.lease o ON o.key = $1::text COLLATE \"C\"
    WHERE o.key IS NULL
        OR (o.holder = '*' AND NOT o.released AND o.expires_at = 'infinity'
            AND (o.writer_until > clock_timestamp()) IS NOT TRUE)
        OR ((o.released OR o.expires_at <= clock_timestamp()) AND (o.cooldown_us IS NULL
            OR least(o.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(o.window_us, o.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' <= clock_timestamp()))
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key,
        holder = '*',
        token = nextval({token}),
        acquired_at = clock_timestamp(),
        ttl_us = 0,
        expires_at = 'infinity',
        released = false,
        cooldown_us = NULL,
        label = NULL,
        owner = NULL
    WHERE (l.holder = '*' AND NOT l.released AND l.expires_at = 'infinity'
            AND (l.writer_until > clock_timestamp()) IS NOT TRUE)
        OR ((l.released OR l.expires_at <= clock_timestamp()) AND (l.cooldown_us IS NULL
            OR least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' <= clock_timestamp()))
    RETURNING l.key, l.token
)
INSERT INTO {schema}.lease_part AS p
    (key, part, of, holder, token, acquired_at, ttl_us, expires_at, released, label, owner)
SELECT g.key, n.part, $6::integer, $2::text, g.token, clock_timestamp(), $3::bigint,
    clock_timestamp() + $3::bigint * interval '1 microsecond', false, $4::text, $5::text
FROM g, n
ON CONFLICT (key, part) DO UPDATE SET
    of = excluded.of,
    holder = excluded.holder,
    token = excluded.token,
    acquired_at = excluded.acquired_at,
    ttl_us = excluded.ttl_us,
    expires_at = excluded.expires_at,
    released = false,
    label = excluded.label,
    owner = excluded.owner
WHERE p.of = -1
RETURNING p.token, p.part";

/// Puts all N parts into use, the first of them for the caller. If an operator has opened the gate, a part can be in use
/// although its gate is free. Such a part is replaced after its end.
const ENTER_PERMITS: &str = "\
WITH g AS (
    INSERT INTO {schema}.lease AS l (key, holder, token, acquired_at, ttl_us, expires_at, released)
    SELECT $1::text, '#' || $6::integer, nextval({token}), clock_timestamp(), 0, 'infinity', false
    FROM (SELECT) one LEFT JOIN {schema}.lease o ON o.key = $1::text COLLATE \"C\"
    WHERE o.key IS NULL
        OR ((o.released OR o.expires_at <= clock_timestamp()) AND (o.cooldown_us IS NULL
            OR least(o.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(o.window_us, o.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' <= clock_timestamp()))
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key,
        holder = excluded.holder,
        token = nextval({token}),
        acquired_at = clock_timestamp(),
        ttl_us = 0,
        expires_at = 'infinity',
        released = false,
        cooldown_us = NULL,
        label = NULL,
        owner = NULL
    WHERE (l.released OR l.expires_at <= clock_timestamp()) AND (l.cooldown_us IS NULL
        OR least(l.acquired_at, '200000-01-01 00:00:00+00')
            + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
            * interval '1 microsecond' <= clock_timestamp())
    RETURNING l.key, l.token
), p AS (
    INSERT INTO {schema}.lease_part AS p
        (key, part, of, holder, token, acquired_at, ttl_us, expires_at, released, label, owner)
    SELECT g.key, n.part, $6::integer, $2::text, g.token, clock_timestamp(), $3::bigint,
        clock_timestamp() + $3::bigint * interval '1 microsecond', n.part > 0, $4::text, $5::text
    FROM g, generate_series(0, $6::integer - 1) AS n (part)
    ON CONFLICT (key, part) DO UPDATE SET
        of = excluded.of,
        holder = excluded.holder,
        token = excluded.token,
        acquired_at = excluded.acquired_at,
        ttl_us = excluded.ttl_us,
        expires_at = excluded.expires_at,
        released = excluded.released,
        label = excluded.label,
        owner = excluded.owner
    WHERE p.of = -1 OR p.released OR p.expires_at <= clock_timestamp()
    RETURNING p.token, p.part, p.released
)
SELECT p.token, p.part FROM p WHERE NOT p.released";

const LOOK: &str = "\
SELECT o.in_parts, coalesce(o.live, false),
    CASE WHEN isfinite(o.expires_at)
        THEN ceil(extract(epoch FROM o.expires_at - clock_timestamp()) * 1000000)::bigint END,
    CASE WHEN o.cool_until > clock_timestamp()
        THEN ceil(extract(epoch FROM o.cool_until - clock_timestamp()) * 1000000)::bigint END,
    coalesce(o.wake_until > clock_timestamp() + $2::bigint * interval '1 microsecond', false),
    coalesce(o.writer_until > clock_timestamp() + $2::bigint * interval '1 microsecond', false),
    coalesce(o.writer_until > clock_timestamp(), false),
    c.parts, c.held,
    CASE WHEN isfinite(c.first)
        THEN ceil(extract(epoch FROM c.first - clock_timestamp()) * 1000000)::bigint END,
    CASE WHEN isfinite(c.last)
        THEN ceil(extract(epoch FROM c.last - clock_timestamp()) * 1000000)::bigint END
FROM (SELECT) one LEFT JOIN LATERAL (
    SELECT l.expires_at, l.wake_until, l.writer_until, NOT l.released AND l.expires_at > clock_timestamp() AS live,
        CASE WHEN NOT l.released AND l.expires_at = 'infinity' AND l.holder ~ '^([*]|#[1-9][0-9]*)$'
            THEN l.holder END AS in_parts,
        CASE WHEN l.cooldown_us IS NOT NULL THEN
            least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
                * interval '1 microsecond' END AS cool_until
    FROM {schema}.lease l WHERE l.key = $1::text COLLATE \"C\"
    OFFSET 0
) o ON true CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE x.fits) AS parts, count(*) FILTER (WHERE x.live) AS held,
        min(x.expires_at) FILTER (WHERE x.live) AS first, max(x.expires_at) FILTER (WHERE x.live) AS last
    FROM (
        SELECT p.expires_at, NOT p.released AND p.expires_at > clock_timestamp() AS live,
            CASE p.of WHEN 0 THEN '*' ELSE '#' || p.of END = o.in_parts AS fits
        FROM {schema}.lease_part p
        WHERE o.in_parts IS NOT NULL AND p.key = $1::text COLLATE \"C\" AND p.of >= 0
        OFFSET 0
    ) x
) c";

/// The check before the locks spares the holders, because a try must lock no part that is held. The full lock of the parts
/// waits for fences. A gate or a part that
/// has changed since the snapshot is not at its `ctid` there. The parts then stay in use, because the server runs the
/// update of the parts even if the update of the gate finds no row. Keeps the mark of waiters, because readers wait for the end
/// of this grant.
const CONVERT: &str = "\
WITH g AS MATERIALIZED (
    SELECT l.ctid AS at FROM ONLY {schema}.lease l
    WHERE l.key = $1::text COLLATE \"C\" AND NOT l.released AND l.expires_at = 'infinity'
        AND l.holder ~ '^([*]|#[1-9][0-9]*)$'
        AND NOT EXISTS (
            SELECT FROM {schema}.lease_part p
            WHERE p.key = $1::text AND p.of >= 0 AND NOT p.released AND p.expires_at > clock_timestamp()
        )
    FOR UPDATE
), p AS MATERIALIZED (
    SELECT f.at FROM g CROSS JOIN LATERAL (
        SELECT p.ctid AS at FROM ONLY {schema}.lease_part p
        WHERE p.key = $1::text COLLATE \"C\" AND p.of >= 0 AND (p.released OR p.expires_at <= clock_timestamp())
        ORDER BY p.part
        FOR UPDATE{skip}
    ) f
), c AS MATERIALIZED (
    SELECT (SELECT count(*) FROM g CROSS JOIN LATERAL (
            SELECT FROM ONLY {schema}.lease v WHERE v.ctid = g.at OFFSET 0
        ) v) = 1
        AND (SELECT count(*) FROM p CROSS JOIN LATERAL (
            SELECT FROM ONLY {schema}.lease_part v WHERE v.ctid = p.at OFFSET 0
        ) v)
            = (SELECT count(*) FROM {schema}.lease_part x WHERE x.key = $1::text AND x.of >= 0) AS all_free
), d AS (
    UPDATE ONLY {schema}.lease_part x SET of = -1, released = true FROM p, c
    WHERE x.ctid = p.at AND (x.key = $1::text) IS TRUE AND c.all_free
    RETURNING 1
)
UPDATE ONLY {schema}.lease l SET
    key = l.key,
    holder = $2::text,
    token = nextval({token}),
    acquired_at = clock_timestamp(),
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond',
    released = $6::boolean,
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
        SELECT l.key FROM {schema}.lease l
        WHERE l.key = r.key COLLATE \"C\" AND NOT l.released AND l.expires_at = 'infinity'
            AND l.holder ~ '^([*]|#[1-9][0-9]*)$'
        FOR NO KEY UPDATE
    ) f
)
UPDATE {schema}.lease l SET
    wake_until = greatest(l.wake_until, clock_timestamp() + $2::bigint * interval '1 microsecond'),
    writer_until = greatest(l.writer_until, clock_timestamp() + $2::bigint * interval '1 microsecond')
WHERE l.key = ANY (ARRAY(SELECT g.key FROM g))
RETURNING l.key";

/// Renews parts as the statement for leases does. The check of the gate ends the hold of a part whose gate an operator has
/// opened or removed, even if the key has parts of another mode since. Counts holders, because one holder can have two parts.
const RENEW_EARLY: &str = "\
WITH u AS (
    UPDATE {schema}.lease_part p SET
        ttl_us = $3::bigint,
        expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
    WHERE p.key = ANY ($1::text[])
        AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
        AND p.of >= 0 AND NOT p.released AND p.expires_at > clock_timestamp() + interval '300 milliseconds'
        AND p.asked IS DISTINCT FROM p.holder
        AND (
            SELECT NOT g.released AND g.expires_at = 'infinity'
                AND g.holder = CASE p.of WHEN 0 THEN '*' ELSE '#' || p.of END
            FROM {schema}.lease g WHERE g.key = p.key
        )
    RETURNING p.holder, CASE
        WHEN p.expires_at + interval '300 milliseconds' < clock_timestamp() + $3::bigint * interval '1 microsecond'
        THEN ('the server stood still while it renewed ' || p.key)::boolean
        ELSE true
    END AS in_time
)
SELECT count(DISTINCT u.holder) FILTER (WHERE u.in_time) FROM u";

const RENEW: &str = "\
WITH g AS MATERIALIZED (
    SELECT p.key, p.holder, p.expires_at AS until FROM {schema}.lease_part p
    WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
        AND p.of >= 0 AND NOT p.released
        AND (
            SELECT NOT g.released AND g.expires_at = 'infinity' AND g.holder = CASE p.of WHEN 0 THEN '*' ELSE '#' || p.of END
            FROM {schema}.lease g WHERE g.key = p.key
        )
    ORDER BY p.key, p.part
    FOR NO KEY UPDATE{skip}
)
UPDATE {schema}.lease_part p SET
    ttl_us = $3::bigint,
    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
WHERE p.key = ANY (ARRAY(SELECT g.key FROM g WHERE g.until > clock_timestamp()))
    AND (p.holder IN (SELECT g.holder FROM g WHERE g.until > clock_timestamp())) IS TRUE
    AND p.of >= 0 AND NOT p.released
RETURNING p.key, p.holder, (p.asked = p.holder) IS TRUE";

const CONFIRM: &str = "\
SELECT p.key, p.holder, (p.asked = p.holder) IS TRUE FROM {schema}.lease_part p
WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
    AND p.of >= 0 AND NOT p.released
    AND p.expires_at > clock_timestamp()
    AND (
        SELECT NOT g.released AND g.expires_at = 'infinity' AND g.holder = CASE p.of WHEN 0 THEN '*' ELSE '#' || p.of END
        FROM {schema}.lease g WHERE g.key = p.key
    )";

const RELABEL: &str = "\
UPDATE {schema}.lease_part p SET label = $3::text
WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0 AND NOT p.released AND p.expires_at > clock_timestamp()
RETURNING true";

/// Reads the mark in the gate, but does not lock the gate after a part. The waiter of a missed mark polls. The third
/// parameter only takes the place that it has in the statement of a gate.
const RELEASE_UNAWAITED: &str = "\
UPDATE ONLY {schema}.lease_part p SET released = true
WHERE p.key = $1::text AND p.holder = $2::text AND $3::boolean IS NOT NULL AND p.of >= 0 AND NOT p.released
    AND p.expires_at > clock_timestamp()
    AND (
        SELECT g.wake_until > clock_timestamp() FROM {schema}.lease g WHERE g.key = $1::text COLLATE \"C\"
    ) IS NOT TRUE";

const RELEASE_ONE: &str = "\
UPDATE {schema}.lease_part p SET released = true
WHERE p.key = $1::text AND p.holder = $2::text AND $3::boolean IS NOT NULL AND p.of >= 0 AND NOT p.released
RETURNING (p.expires_at > clock_timestamp())::integer
    + CASE WHEN (SELECT g.wake_until > clock_timestamp() FROM {schema}.lease g WHERE g.key = $1::text COLLATE \"C\")
        THEN 2 + length(pg_notify({channel}, 'f' || p.key)::text) ELSE 0 END";

const RELEASE: &str = "\
UPDATE {schema}.lease_part p SET released = true
WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
    AND p.of >= 0 AND NOT p.released
    AND $3::text[] IS NOT NULL
RETURNING p.holder, (p.expires_at > clock_timestamp())::integer
    + CASE WHEN (SELECT g.wake_until > clock_timestamp() FROM {schema}.lease g WHERE g.key = p.key)
        THEN 2 + length(pg_notify({channel}, 'f' || p.key)::text) ELSE 0 END";

const RELEASE_UNLOCKED: &str = "\
WITH g AS MATERIALIZED (
    SELECT p.key, p.holder FROM {schema}.lease_part p
    WHERE p.key = ANY ($1::text[]) AND (p.holder IN (SELECT unnest($2::text[]))) IS TRUE
        AND p.of >= 0 AND NOT p.released
    ORDER BY p.key, p.part
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {schema}.lease_part p SET released = true
WHERE p.key = ANY (ARRAY(SELECT g.key FROM g)) AND (p.holder IN (SELECT g.holder FROM g)) IS TRUE
    AND $3::text[] IS NOT NULL AND p.of >= 0 AND NOT p.released
RETURNING p.holder, (p.expires_at > clock_timestamp())::integer
    + CASE WHEN (SELECT g.wake_until > clock_timestamp() FROM {schema}.lease g WHERE g.key = p.key)
        THEN 2 + length(pg_notify({channel}, 'f' || p.key)::text) ELSE 0 END";

/// Frees the part, and leaves it in use, because a semaphore must have all its parts.
const FORCE: &str = "\
UPDATE {schema}.lease_part p SET released = true
WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0 AND NOT p.released AND p.expires_at > clock_timestamp()
RETURNING pg_notify({channel}, 'b' || p.holder || ' ' || p.key)";

const ASK: &str = "\
UPDATE {schema}.lease_part p SET asked = p.holder
WHERE p.key = $1::text AND p.holder = $2::text AND p.of >= 0 AND NOT p.released AND p.expires_at > clock_timestamp()
RETURNING pg_notify({channel}, 'b' || p.holder || ' ' || p.key)";

/// Ends with a limit, because a job opens only some keys, and a later one reads the page again.
const IDLE: &str = "\
SELECT l.key::text FROM (
    SELECT l.* FROM {schema}.lease l WHERE l.key > $2::text ORDER BY l.key LIMIT $3::bigint
) l
WHERE NOT l.released AND l.expires_at = 'infinity' AND l.holder ~ '^([*]|#[1-9][0-9]*)$'
    AND l.acquired_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    AND (
        SELECT true FROM {schema}.lease_part p WHERE p.key = l.key AND p.of >= 0
            AND p.expires_at >= clock_timestamp() - $1::bigint * interval '1 microsecond'
        LIMIT 1
    ) IS NULL
LIMIT 100";

/// Removes parts that are out of use. A request that takes such a part writes its `\"of\"`, and the locked row is checked
/// again.
const PURGE: &str = "\
DELETE FROM ONLY {schema}.lease_part d WHERE d.of = -1 AND d.ctid = ANY (ARRAY(
    SELECT p.ctid FROM ONLY {schema}.lease_part p
    WHERE p.key > $2::text AND p.key < $4::text AND p.of = -1
        AND p.expires_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    ORDER BY p.key, p.part LIMIT $3::bigint
    FOR UPDATE SKIP LOCKED
))";
