//! Statements of the library of schema version 3, where the present ones differ.

pub(super) const GRANT: &str = "\
WITH o AS MATERIALIZED (
    SELECT r.key, r.holder AS me, r.ttl, r.cooldown, r.label, l.key IS NULL AS fresh, l.holder, l.token,
        l.released, l.expires_at, l.wake_until, l.cool_until
    FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])
        AS r (key, holder, ttl, cooldown, label)
    LEFT JOIN LATERAL (
        SELECT l.*, CASE WHEN l.cooldown_us IS NOT NULL THEN
            least(l.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' END AS cool_until
        FROM {schema}.lease l WHERE l.key = r.key COLLATE \"C\" OFFSET 0
    ) l ON true
){free}, g AS (
    INSERT INTO {schema}.lease AS l
        (key, holder, token, acquired_at, ttl_us, expires_at, released, cooldown_us, label, owner)
    SELECT o.key, o.me, nextval({token}), clock_timestamp(),
        o.ttl, clock_timestamp() + o.ttl * interval '1 microsecond', false, o.cooldown, o.label, $6::text
    FROM o
    WHERE (o.fresh OR o.released OR o.expires_at <= clock_timestamp())
        AND (o.cool_until IS NULL OR o.cool_until <= clock_timestamp()){among}
    ORDER BY o.key COLLATE \"C\"
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key,
        holder = excluded.holder,
        token = nextval({token}),
        acquired_at = clock_timestamp(),
        ttl_us = excluded.ttl_us,
        expires_at = clock_timestamp() + excluded.ttl_us * interval '1 microsecond',
        released = false,
        cooldown_us = excluded.cooldown_us,
        label = excluded.label,
        owner = excluded.owner,
        wake_until = NULL
    WHERE (l.released OR l.expires_at <= clock_timestamp()) AND (l.cooldown_us IS NULL
        OR least(l.acquired_at, '200000-01-01 00:00:00+00')
            + least(greatest(coalesce(l.window_us, l.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' <= clock_timestamp())
    RETURNING l.key, l.token
), again AS (
    UPDATE {schema}.lease l
    SET expires_at = greatest(l.expires_at, clock_timestamp() + o.ttl * interval '1 microsecond')
    FROM o
    WHERE o.holder = o.me AND NOT o.released AND o.expires_at > clock_timestamp()
        AND l.key = o.key COLLATE \"C\" AND l.holder = o.me AND NOT l.released AND l.expires_at > clock_timestamp()
    RETURNING l.key, l.token
)
SELECT g.key, g.token, false, NULL::bigint, NULL::bigint, false FROM g
UNION ALL
SELECT o.key, (SELECT a.token FROM again a WHERE a.key = o.key),
    coalesce(NOT o.released AND o.expires_at > clock_timestamp(), false),
    CASE WHEN isfinite(o.expires_at)
        THEN ceil(extract(epoch FROM o.expires_at - clock_timestamp()) * 1000000)::bigint END,
    CASE WHEN o.cool_until > clock_timestamp()
        THEN ceil(extract(epoch FROM o.cool_until - clock_timestamp()) * 1000000)::bigint END,
    coalesce(o.wake_until > clock_timestamp() + $7::bigint * interval '1 microsecond', false)
FROM o";

pub(super) const LIST: &str = "\
SELECT i.key, i.holder, i.token, i.label, i.owner,
    CASE WHEN isfinite(i.acquired_at) AND i.acquired_at < '200000-01-01 00:00:00+00'
        THEN (extract(epoch FROM i.acquired_at) * 1000000)::bigint END,
    CASE WHEN i.live THEN 0 WHEN NOT i.released THEN 1 ELSE 2 END::smallint,
    CASE WHEN isfinite(i.expires_at)
        THEN greatest(ceil(extract(epoch FROM i.expires_at - i.now) * 1000000)::bigint, 0) END,
    CASE WHEN i.cool_until > i.now THEN ceil(extract(epoch FROM i.cool_until - i.now) * 1000000)::bigint END,
    coalesce(i.live OR ($3::boolean AND (NOT i.released OR i.cool_until > i.now)), false), i.n = $4::bigint,
    (i.live AND i.asked = i.holder) IS TRUE
FROM (
    SELECT p.*, c.now, NOT p.released AND p.expires_at > c.now AS live,
        CASE WHEN p.cooldown_us IS NOT NULL THEN
            least(p.acquired_at, '200000-01-01 00:00:00+00')
                + least(greatest(coalesce(p.window_us, p.cooldown_us), 0), 3162240000000000)
        * interval '1 microsecond' END AS cool_until,
        row_number() OVER () AS n
    FROM (
        SELECT l.* FROM {schema}.lease l WHERE l.key >= $1::text AND l.key < $2::text
        ORDER BY l.key LIMIT $4::bigint
    ) p, (SELECT clock_timestamp() AS now OFFSET 0) c
) i
WHERE i.live OR ($3::boolean AND (NOT i.released OR i.cool_until > i.now)) OR i.n = $4::bigint
ORDER BY i.key";
