//! The privileges that a role needs for each store, on a real server.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::time::Duration;

use leasehold::postgres::schema::{self, Stores};
use leasehold::postgres::sqlx::{AssertSqlSafe, raw_sql};
use leasehold::postgres::{DEFAULT_SCHEMA, Identifier};
use leasehold::{ErrorKind, KeyInfo, ListQuery, LockExt as _};
use test_servers::Cluster;

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_use_one_store_alone_has_all_of_that_one() {
    let locks = Identifier::new(DEFAULT_SCHEMA).unwrap();
    let all = [
        ("postgres", Stores::Advisory, "postgres+row"),
        ("postgres+advisory-xact", Stores::Advisory, "postgres+ttl"),
        ("postgres+row", Stores::Row, "postgres"),
        ("postgres+ttl", Stores::Lease, "postgres+row"),
    ];
    for (scheme, stores, other) in all {
        let database = Cluster::shared().fresh_database().await;
        let role = Identifier::new(format!("only_{}", &database.name()[5..])).unwrap();
        let mut admin = database.connect().await;
        schema::install(&mut admin, &locks).await.unwrap();
        let grants = schema::grants(&locks, &role, stores);
        let setup = format!("CREATE ROLE {} LOGIN; {grants}", role.quoted());
        raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
        let url = database.url().replacen("//postgres@", &format!("//{}@", role.as_str()), 1);
        let (_, rest) = url.split_once("://").unwrap();

        // If the schema is complete, `install=true` does nothing and needs no more privileges.
        let (a, b) = (format!("{scheme}://{rest}?install=true"), format!("{scheme}://{rest}"));
        let (a, b) = (leasehold::connect(&a).await.unwrap(), leasehold::connect(&b).await.unwrap());
        let held = a.key("k").label("why").acquire().await.unwrap();
        assert!(b.key("k").try_acquire().await.unwrap().is_none(), "{scheme}");
        let free = KeyInfo::free(held.key().clone());
        let seen = b.admin().unwrap().changed(&free, PATIENCE).await.unwrap();
        assert!(seen.is_some_and(|info| info.is_held()), "{scheme}");
        held.relabel("why not").await.unwrap();
        let everything = ListQuery::new();
        let listing = b.admin().unwrap().list(&everything).await.unwrap();
        assert_eq!(listing.len(), 1, "{scheme}: {listing:?}");
        let (waited, released) =
            tokio::join!(b.key("k").wait(PATIENCE).acquire(), async { held.release().await });
        released.unwrap();
        let waited = waited.unwrap();
        let holder = waited.holder();
        let asked = a.admin().unwrap().ask(waited.key(), holder).await;
        match b.capabilities().admin.ask {
            true => assert!(asked.unwrap(), "{scheme}"),
            false => assert_eq!(asked.unwrap_err().kind(), ErrorKind::Unsupported, "{scheme}"),
        }
        if b.capabilities().admin.force_release {
            assert!(a.admin().unwrap().force_release(waited.key(), holder).await.unwrap(), "{scheme}");
        } else {
            waited.release().await.unwrap();
        }

        let error = match leasehold::connect(&format!("{other}://{rest}")).await {
            Ok(lock) => panic!("{scheme}: {lock}"),
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{other}: {error}");
        a.close().await.unwrap();
        b.close().await.unwrap();
    }
}

/// A look that waits ends with the error of the look that is refused.
#[tokio::test(flavor = "multi_thread")]
async fn an_observer_whose_rights_are_revoked_gets_a_typed_error() {
    let locks = Identifier::new(DEFAULT_SCHEMA).unwrap();
    for (scheme, stores) in [
        ("postgres", Stores::Advisory),
        ("postgres+advisory-xact", Stores::Advisory),
        ("postgres+row", Stores::Row),
        ("postgres+ttl", Stores::Lease),
    ] {
        let database = Cluster::shared().fresh_database().await;
        let role = Identifier::new(format!("seer_{}", &database.name()[5..])).unwrap();
        let mut admin = database.connect().await;
        schema::install(&mut admin, &locks).await.unwrap();
        let grants = schema::grants(&locks, &role, stores);
        let setup = format!("CREATE ROLE {} LOGIN; {grants}", role.quoted());
        raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
        let url = database.url().replacen("//postgres@", &format!("//{}@", role.as_str()), 1);
        let (_, rest) = url.split_once("://").unwrap();
        let lock = leasehold::connect(&format!("{scheme}://{rest}")).await.unwrap();
        let free = KeyInfo::free("k".parse().unwrap());
        let revoke = format!("REVOKE ALL ON ALL TABLES IN SCHEMA {} FROM {}", locks.quoted(), role.quoted());
        let (seen, revoked) = tokio::join!(
            lock.admin().unwrap().changed(&free, PATIENCE),
            raw_sql(AssertSqlSafe(revoke)).execute(&mut admin)
        );
        revoked.unwrap();
        let error = seen.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{scheme}: {error}");
        assert!(error.kind().can_recover() && error.key() == Some(&free.key), "{scheme}: {error}");
        lock.close().await.unwrap();
    }
}

/// A role that can create objects in a schema of the search path can create an operator that fits better than the server's
/// own. An inspection by an administrator must not call it.
#[tokio::test(flavor = "multi_thread")]
async fn operators_of_others_are_not_called() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    let evil = r#"
        CREATE FUNCTION public.evil("char", text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
        CREATE FUNCTION public.evil(oid, regclass) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
        CREATE FUNCTION public.evil(float8, integer) RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
        CREATE OPERATOR public.<> (leftarg = "char", rightarg = text, function = public.evil);
        CREATE OPERATOR public.= (leftarg = oid, rightarg = regclass, function = public.evil);
        CREATE OPERATOR public.* (leftarg = float8, rightarg = integer, function = public.evil);
        CREATE TABLE request (id bigint PRIMARY KEY, status text, owner uuid, lease_until timestamptz);
        INSERT INTO request VALUES (1, 'in-progress', gen_random_uuid(), now() + interval '1 minute')"#;
    raw_sql(evil).execute(&mut admin).await.unwrap();
    let (_, rest) = database.url().split_once("://").unwrap();
    let mut open = database.connect().await;
    raw_sql("BEGIN; SELECT FROM request FOR UPDATE").execute(&mut open).await.unwrap();
    for arguments in ["schema apply", "check", "claims request"] {
        let mut tool = support::tool();
        tool.env("LEASEHOLD_URL", database.url()).args(arguments.split_whitespace());
        let (code, stdout, stderr) = support::finish(&mut tool);
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments}: {stdout}");
    }
    for store in ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"] {
        let poolers: &[&str] = if store == "postgres" { &["detect"] } else { &["detect", "transaction"] };
        for pooler in poolers {
            let lock = leasehold::connect(&format!("{store}://{rest}?pooler={pooler}")).await.unwrap();
            let guard =
                lock.key("k").acquire().await.unwrap_or_else(|error| panic!("{store} {pooler}: {error}"));
            assert_eq!(
                lock.admin().unwrap().list(&ListQuery::new()).await.unwrap().len(),
                1,
                "{store} {pooler}"
            );
            guard.release().await.unwrap();
            lock.close().await.unwrap();
        }
    }
}

/// Every session writes to a table to make tokens grow. A trigger on that table would run with the rights of a superuser who
/// only inspects.
#[tokio::test(flavor = "multi_thread")]
async fn a_superuser_does_not_look_into_a_schema_of_somebody_else() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    let owner = format!("owner_{}", &database.name()[5..]);
    let setup = format!("CREATE ROLE {owner} LOGIN; GRANT CREATE ON DATABASE {} TO {owner}", database.name());
    raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
    let url = database.url().replacen("//postgres@", &format!("//{owner}@"), 1);
    let run = |url: &str, arguments: &str| {
        let mut tool = support::tool();
        tool.env("LEASEHOLD_URL", url).args(arguments.split_whitespace());
        support::finish(&mut tool)
    };
    let (code, _, stderr) = run(&url, "schema apply");
    assert_eq!(code, 0, "{stderr}");
    let trap = format!(
        "SET ROLE {owner}; CREATE TABLE leasehold.caught (who text);
         CREATE FUNCTION leasehold.trap() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO leasehold.caught VALUES (current_user); RETURN new; END $$;
         CREATE TRIGGER trap BEFORE INSERT ON leasehold.incarnation FOR EACH ROW EXECUTE FUNCTION leasehold.trap();
         RESET ROLE"
    );
    raw_sql(AssertSqlSafe(trap)).execute(&mut admin).await.unwrap();
    for store in ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"] {
        let url = database.url().replacen("postgres", store, 1);
        for arguments in ["list", "inspect k", "check", "run k --no-wait -- true", "schema apply"] {
            let (code, stdout, stderr) = run(&url, arguments);
            assert_eq!(code, 69, "{store}, {arguments}: {stderr}");
            let said = format!("{stdout}{stderr}");
            assert!(said.contains("is a superuser") && said.contains(&owner), "{store}, {arguments}: {said}");
        }
    }
    let job = format!("SET ROLE {owner}; CREATE TABLE leasehold.job (id int, state text); RESET ROLE");
    raw_sql(AssertSqlSafe(job)).execute(&mut admin).await.unwrap();
    let (code, _, stderr) = run(database.url(), "claims leasehold.job");
    assert!(code == 69 && stderr.contains("views and casts"), "{code} {stderr}");
    let (code, _, stderr) = run(&url, "claims leasehold.job");
    assert_eq!(code, 0, "{stderr}");
    let caught = raw_sql("SELECT who FROM leasehold.caught").fetch_all(&mut admin).await.unwrap();
    assert_eq!(caught.len(), 0);
    for arguments in ["list", "check"] {
        let (code, _, stderr) = run(&url, arguments);
        assert_eq!(code, 0, "{arguments}: {stderr}");
    }
    let (_, stdout, _) = run(database.url(), "check");
    assert!(stdout.contains("to mend: connect as the owner of the schema"), "{stdout}");
}

/// `GRANT ALL` includes TRIGGER.
#[tokio::test(flavor = "multi_thread")]
async fn a_superuser_does_not_run_the_triggers_of_a_role_that_was_granted_too_much() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    schema::install(&mut admin, &Identifier::new(DEFAULT_SCHEMA).unwrap()).await.unwrap();
    let role = format!("much_{}", &database.name()[5..]);
    let trap = format!(
        "CREATE ROLE {role}; GRANT ALL ON SCHEMA public, leasehold TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO {role};
         SET ROLE {role};
         CREATE FUNCTION public.trap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'sprung'; END $$;
         CREATE TRIGGER trap BEFORE INSERT ON leasehold.incarnation FOR EACH ROW EXECUTE FUNCTION public.trap();
         RESET ROLE"
    );
    raw_sql(AssertSqlSafe(trap)).execute(&mut admin).await.unwrap();
    let look = |arguments: &str| {
        let mut tool = support::tool();
        tool.env("LEASEHOLD_URL", database.url()).args(arguments.split_whitespace());
        let (code, stdout, stderr) = support::finish(&mut tool);
        (code, format!("{stdout}{stderr}"))
    };
    for arguments in ["list", "check", "run k --no-wait -- true", "schema apply"] {
        let (code, said) = look(arguments);
        let is_refused = code == 69 && said.contains("is a superuser") && said.contains(&role);
        assert!(is_refused, "{arguments}: {code} {said}");
    }
    // The objects that the role created stay after the privilege is revoked.
    let revoke = format!("REVOKE TRIGGER, REFERENCES ON ALL TABLES IN SCHEMA leasehold FROM {role}");
    raw_sql(AssertSqlSafe(revoke)).execute(&mut admin).await.unwrap();
    let (code, said) = look("list");
    assert!(code == 69 && said.contains("whoever made the trigger trap"), "{code} {said}");
    let condition = "DROP TRIGGER trap ON leasehold.incarnation;
        CREATE FUNCTION public.quiet(leasehold.incarnation) RETURNS boolean LANGUAGE sql AS 'SELECT false';
        CREATE TRIGGER trap BEFORE INSERT ON leasehold.incarnation FOR EACH ROW
            WHEN (public.quiet(new)) EXECUTE FUNCTION suppress_redundant_updates_trigger()";
    raw_sql(condition).execute(&mut admin).await.unwrap();
    let (code, said) = look("list");
    assert!(code == 69 && said.contains("whoever made the trigger trap"), "{code} {said}");
    let public = "DROP TRIGGER trap ON leasehold.incarnation; GRANT TRIGGER ON leasehold.lease TO PUBLIC";
    raw_sql(public).execute(&mut admin).await.unwrap();
    let (code, said) = look("list");
    assert!(code == 69 && said.contains("public"), "{code} {said}");
    raw_sql("REVOKE TRIGGER ON leasehold.lease FROM PUBLIC").execute(&mut admin).await.unwrap();
    assert_eq!(look("list").0, 0);
}

/// The server's role `pg_database_owner` stands for the owner of the database.
#[tokio::test(flavor = "multi_thread")]
async fn a_superuser_does_not_look_where_the_owner_of_the_database_is_none() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    let look = |schema: &str| {
        let mut tool = support::tool();
        let url = format!("{}?schema={schema}", database.url());
        let (code, stdout, stderr) = support::finish(tool.env("LEASEHOLD_URL", url).arg("list"));
        (code, format!("{stdout}{stderr}"))
    };
    for schema in ["leasehold", "public"] {
        schema::install(&mut admin, &Identifier::new(schema).unwrap()).await.unwrap();
        assert_eq!(look(schema).0, 0, "of a database of a superuser's");
    }
    let role = format!("owns_{}", &database.name()[5..]);
    let sql = format!(
        "CREATE ROLE {role}; ALTER DATABASE {} OWNER TO {role}; ALTER TABLE leasehold.incarnation OWNER TO pg_database_owner",
        database.name()
    );
    raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await.unwrap();
    for schema in ["leasehold", "public"] {
        let (code, said) = look(schema);
        assert!(
            code == 69 && said.contains("is a superuser") && said.contains(&role),
            "{schema}: {code} {said}"
        );
    }
}

/// A foreign key deletes and updates by triggers, with the rights of the role that deletes the referenced row.
#[tokio::test(flavor = "multi_thread")]
async fn a_superuser_does_not_run_what_a_foreign_key_of_another_role_fires() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    schema::install(&mut admin, &Identifier::new(DEFAULT_SCHEMA).unwrap()).await.unwrap();
    let role = format!("refers_{}", &database.name()[5..]);
    let look = || {
        let mut tool = support::tool();
        let (code, stdout, stderr) = support::finish(tool.env("LEASEHOLD_URL", database.url()).arg("list"));
        (code, format!("{stdout}{stderr}"))
    };
    let setup = format!(
        "CREATE ROLE {role}; CREATE SCHEMA theirs AUTHORIZATION {role}; GRANT USAGE ON SCHEMA leasehold TO {role}"
    );
    raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
    assert_eq!(look().0, 0);
    for what in ["REFERENCES (key)", "REFERENCES"] {
        raw_sql(AssertSqlSafe(format!("GRANT {what} ON leasehold.lease TO {role}")))
            .execute(&mut admin)
            .await
            .unwrap();
        let (code, said) = look();
        assert!(
            code == 69 && said.contains(&role) && said.contains("revoke TRIGGER and REFERENCES"),
            "{code} {said}"
        );
    }
    // The objects that the role created stay after the privilege is revoked.
    let trap = format!(
        "SET ROLE {role}; CREATE TABLE theirs.trap (key text REFERENCES leasehold.lease (key) ON DELETE CASCADE); RESET ROLE;
         REVOKE REFERENCES ON leasehold.lease FROM {role}; REVOKE REFERENCES (key) ON leasehold.lease FROM {role}"
    );
    raw_sql(AssertSqlSafe(trap)).execute(&mut admin).await.unwrap();
    let (code, said) = look();
    assert!(code == 69 && said.contains("whoever made the foreign key trap_key_fkey"), "{code} {said}");
    raw_sql("DROP TABLE theirs.trap").execute(&mut admin).await.unwrap();
    assert_eq!(look().0, 0);
}

/// The advice of `check` depends on the purpose of the role.
#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_only_look_is_told_so() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    let roles = ["looks", "lacks"].map(|name| format!("{name}_{}", &database.name()[5..]));
    let locks = Identifier::new(DEFAULT_SCHEMA).unwrap();
    schema::install(&mut admin, &locks).await.unwrap();
    let [looks, lacks] = roles.each_ref().map(|role| Identifier::new(role).unwrap());
    let setup = format!(
        "CREATE ROLE {0} LOGIN; CREATE ROLE {1} LOGIN; {2}{3}; REVOKE INSERT ON leasehold.advisory_name FROM {1}",
        looks.quoted(),
        lacks.quoted(),
        schema::grants_to_read(&locks, &looks),
        schema::grants(&locks, &lacks, Stores::Advisory).trim_end().trim_end_matches(';'),
    );
    raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
    for (role, advice) in roles.iter().zip(["may look at locks", "grant the role what is missing"]) {
        let mut tool = support::tool();
        let url = database.url().replacen("//postgres@", &format!("//{role}@"), 1);
        let (code, stdout, stderr) = support::finish(tool.env("LEASEHOLD_URL", url).arg("check"));
        assert_eq!(code, 69, "{role}: {stderr}");
        assert!(stdout.contains("to mend: ") && stdout.contains(advice), "{role}: {stdout}");
        assert!(!stdout.contains("password"), "{role}: {stdout}");
    }
    // The state after a restart of the server, before a client that draws tokens connects.
    raw_sql("TRUNCATE leasehold.incarnation").execute(&mut admin).await.unwrap();
    for store in ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"] {
        let mut tool = support::tool();
        let url = database.url().replacen("postgres://postgres@", &format!("{store}://{}@", roles[0]), 1);
        let (code, _, stderr) = support::finish(tool.env("LEASEHOLD_URL", url).arg("list"));
        assert_eq!(code, 0, "{store}: {stderr}");
        let (mut tool, holder) = (support::tool(), format!("{}-1", "0".repeat(32)));
        let url = database.url().replacen("postgres://postgres@", &format!("{store}://{}@", roles[0]), 1);
        tool.env("LEASEHOLD_URL", url).args(["release", "k", "--ask", "--holder", &holder]);
        // Row and lease refuse the role, the others have no requests.
        let code = if store.ends_with("row") || store.ends_with("ttl") { 69 } else { 64 };
        assert_eq!(support::finish(&mut tool).0, code, "{store}");
    }
    let mut tool = support::tool();
    let (code, _, stderr) = support::finish(tool.env("LEASEHOLD_URL", database.url()).args([
        "schema",
        "apply",
        "--grant-to",
        "nosuch",
    ]));
    assert!(code == 64 && stderr.contains("no such role") && stderr.contains("nosuch"), "{code} {stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_the_role_may_not_end_is_an_error_and_no_missing_hold() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    let role = Identifier::new(format!("ends_{}", &database.name()[5..])).unwrap();
    let locks = Identifier::new(DEFAULT_SCHEMA).unwrap();
    schema::install(&mut admin, &locks).await.unwrap();
    let grants = schema::grants(&locks, &role, Stores::Advisory);
    let setup = format!("CREATE ROLE {0} LOGIN; {grants}", role.quoted());
    raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
    let lock = leasehold::connect(database.url()).await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    let url = database.url().replacen("//postgres@", &format!("//{}@", role.as_str()), 1);
    let release = |arguments: &[&str]| {
        let mut tool = support::tool();
        tool.env("LEASEHOLD_URL", &url).args(["release", "k", "--force", "--session"]).args(arguments);
        support::finish(&mut tool)
    };
    for grant in ["", "GRANT pg_read_all_stats TO"] {
        if !grant.is_empty() {
            let grant = format!("{grant} {}", role.quoted());
            raw_sql(AssertSqlSafe(grant)).execute(&mut admin).await.unwrap();
        }
        let (code, _, stderr) = release(&[]);
        assert!(code == 69 && stderr.contains("pg_signal_backend"), "{grant}: {code} {stderr}");
        assert!(stderr.contains("by a superuser alone") && stderr.contains("\"k\""), "{grant}: {stderr}");
        let (code, stdout, _) = release(&["--json"]);
        let told: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(
            (code, &told["ok"], &told["kind"]),
            (69, &false.into(), &"permission denied".into()),
            "{grant}"
        );
    }
    assert_eq!(guard.validity(), leasehold::Validity::Valid);
    guard.release().await.unwrap();
    let (code, stdout, stderr) = release(&[]);
    assert!(code == 1 && stdout.contains("no session has this hold"), "{code} {stdout}{stderr}");
    lock.close().await.unwrap();
}
