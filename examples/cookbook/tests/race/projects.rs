use std::collections::BTreeSet;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use cookbook::projects::{
    Assets, PAGE, ProjectError, Step, activate, activate_screen, archive, archive_screen, create, publish,
    request_deletion, reserve, step, sweep_uploads, upload,
};
use cookbook::{file_names, sql};
use futures_util::future::{LocalBoxFuture, join_all};
use sqlx::PgPool;
use test_bounds::within;
use test_servers::Database;

use crate::support::*;

/// Ends the session that is about to make the commit number `at`, counted over all sessions that change something.
const CUT: &str = "
    CREATE TABLE cut (at bigint NOT NULL);
    INSERT INTO cut VALUES (0);
    CREATE SEQUENCE commits;
    CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF current_setting('cut.counted', true) IS DISTINCT FROM pg_current_xact_id()::text THEN
            PERFORM set_config('cut.counted', pg_current_xact_id()::text, false);
            IF nextval('commits') = (SELECT at FROM cut) THEN
                PERFORM pg_terminate_backend(pg_backend_pid());
                PERFORM pg_sleep(600);
            END IF;
        END IF;
        RETURN NULL;
    END $$;
    DO $$
    DECLARE name text;
    BEGIN
        FOREACH name IN ARRAY ARRAY['project', 'screen', 'asset', 'delete_log', 'cascade_job'] LOOP
            EXECUTE format('CREATE CONSTRAINT TRIGGER cut AFTER INSERT OR UPDATE OR DELETE ON %I
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION cut()', name);
        END LOOP;
    END $$";

/// Lists the violations that no reader must see after any commit.
const VIOLATIONS: &str = "
    SELECT 'a name twice: ' || min(name) FROM project WHERE archived_at IS NULL
    GROUP BY owner_id, lower(name) HAVING count(*) > 1
    UNION ALL
    SELECT 'a base name twice: ' || min(file) FROM screen WHERE archived_at IS NULL
    GROUP BY project_id, base HAVING count(*) > 1
    UNION ALL
    SELECT 'a wrong flag: ' || p.name FROM project p JOIN owner o ON o.id = p.owner_id
    WHERE p.archived_at IS NULL AND p.over_quota IS DISTINCT FROM (
        SELECT count(DISTINCT q.id) > o.project_quota OR count(s.id) > o.screen_quota
        FROM project q LEFT JOIN screen s ON s.project_id = q.id AND s.archived_at IS NULL
        WHERE q.owner_id = o.id AND q.archived_at IS NULL AND (q.created_at, q.id) <= (p.created_at, p.id))
    UNION ALL
    SELECT 'deleted without a job or a log entry: ' || name FROM project p
    WHERE deleting_at IS NOT NULL AND NOT (
        EXISTS (SELECT FROM cascade_job WHERE project_id = p.id)
        AND EXISTS (SELECT FROM delete_log WHERE project_id = p.id))
    UNION ALL
    SELECT 'a screen without an object: ' || s.file FROM screen s JOIN project p ON p.id = s.project_id
    WHERE p.deleting_at IS NULL AND NOT EXISTS (SELECT FROM asset WHERE screen_id = s.id)";

/// The projects of an owner: `!` marks those over the quota, brackets the archived ones, with their active screens.
const PROJECTS: &str = "
    SELECT string_agg(concat(CASE WHEN archived_at IS NULL THEN name ELSE '[' || name || ']' END,
        CASE WHEN over_quota THEN '!' END, (SELECT ': ' || string_agg(base, ' ' ORDER BY base) FROM screen s
            WHERE s.project_id = p.id AND s.archived_at IS NULL)), ', ' ORDER BY id)
    FROM project p WHERE owner_id = ";

/// Where a process is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cut {
    Never,
    InCommit(i64),
    BeforeCall(i64),
    AfterCall(i64),
}

/// An object store in memory, in whose calls a process can be killed.
#[derive(Debug)]
struct Bucket {
    objects: Mutex<BTreeSet<String>>,
    cut: Mutex<Cut>,
    calls: AtomicI64,
    /// Seconds by which its clock is ahead.
    ahead: AtomicI64,
}

impl Bucket {
    fn call(&self, effect: impl FnOnce(&mut BTreeSet<String>)) -> io::Result<()> {
        let (call, cut) = (self.calls.fetch_add(1, Ordering::Relaxed) + 1, *self.cut.lock().unwrap());
        if cut != Cut::BeforeCall(call) {
            effect(&mut self.objects.lock().unwrap());
        }
        if [Cut::BeforeCall(call), Cut::AfterCall(call)].contains(&cut) {
            return Err(io::Error::other("killed"));
        }
        Ok(())
    }

    fn objects(&self) -> BTreeSet<String> {
        self.objects.lock().unwrap().clone()
    }
}

impl Assets for Bucket {
    type Error = io::Error;

    async fn put(&self, object: &str, body: Vec<u8>, until: SystemTime) -> io::Result<()> {
        assert_eq!(body, b"picture");
        let ahead = Duration::from_secs(self.ahead.load(Ordering::Relaxed).unsigned_abs());
        if SystemTime::now() + ahead >= until {
            return Err(io::Error::other("403, the signature has expired"));
        }
        self.call(|objects| {
            objects.insert(object.to_owned());
        })
    }

    async fn delete(&self, object: &str) -> io::Result<()> {
        self.call(|objects| {
            objects.remove(object);
        })
    }
}

struct World {
    _db: Database,
    pool: PgPool,
    bucket: Bucket,
}

impl World {
    async fn new() -> Self {
        let db = database(sql(file_names::PAGE, "base name")).await;
        let mut a = db.connect().await;
        run(&mut a, sql(PAGE, "schema")).await;
        run(&mut a, CUT).await;
        let pool = PgPool::connect(db.url()).await.unwrap();
        let bucket = Bucket {
            objects: Mutex::default(),
            cut: Mutex::new(Cut::Never),
            calls: AtomicI64::new(0),
            ahead: AtomicI64::new(0),
        };
        Self { _db: db, pool, bucket }
    }

    /// Runs `sql` with this owner's number in place of `OWNER`, and stores the objects of all rows.
    async fn set_up(&self, sql: &str, owner: i64) {
        run(&self.pool, sql.replace("OWNER", &owner.to_string())).await;
        for object in texts(&self.pool, "SELECT object FROM asset").await {
            self.bucket.objects.lock().unwrap().insert(object);
        }
    }

    async fn id(&self, owner: i64, name: &str) -> i64 {
        let id = "SELECT id FROM project WHERE owner_id = $1 AND name = $2 ORDER BY id LIMIT 1";
        let found: Option<i64> =
            sqlx::query_scalar(id).bind(owner).bind(name).fetch_optional(&self.pool).await.unwrap();
        found.unwrap_or(0)
    }

    async fn cut(&self, cut: Cut) {
        let at = if let Cut::InCommit(at) = cut { at } else { 0 };
        run(&self.pool, format!("UPDATE cut SET at = {at}; SELECT setval('commits', 1, false)")).await;
        self.bucket.calls.store(0, Ordering::Relaxed);
        *self.bucket.cut.lock().unwrap() = cut;
    }

    /// Returns whether the cut's commit or call was reached.
    async fn was_cut(&self, cut: Cut) -> bool {
        match cut {
            Cut::Never => false,
            Cut::InCommit(at) => {
                text(&self.pool, format!("SELECT is_called AND last_value >= {at} FROM commits")).await
                    == "true"
            }
            Cut::BeforeCall(at) | Cut::AfterCall(at) => self.bucket.calls.load(Ordering::Relaxed) >= at,
        }
    }

    async fn projects(&self, owner: i64) -> String {
        text(&self.pool, format!("{PROJECTS} {owner}")).await
    }

    async fn rows(&self) -> BTreeSet<String> {
        texts(&self.pool, "SELECT object FROM asset").await.into_iter().collect()
    }

    /// Asserts the rules that hold at any time.
    async fn check(&self, when: &str) {
        assert_eq!(texts(&self.pool, VIOLATIONS).await, [""; 0], "{when}");
        let (objects, rows) = (self.bucket.objects(), self.rows().await);
        assert!(objects.is_subset(&rows), "{when}: orphans {:?}", objects.difference(&rows));
    }

    /// Lets the time limits of abandoned uploads pass, works off everything, and asserts that nothing is left.
    async fn quiet(&self, when: &str) {
        let past = "UPDATE asset SET put_until = '-infinity' WHERE screen_id IS NULL";
        run(&self.pool, past).await;
        while sweep_uploads(&self.pool, &self.bucket, 2).await.unwrap() > 0 {}
        while step(&self.pool, &self.bucket, 2).await.unwrap() != Step::Idle {}
        self.check(when).await;
        assert_eq!(self.bucket.objects(), self.rows().await, "{when}");
        let left = "SELECT (SELECT count(*) FROM cascade_job)
            + (SELECT count(*) FROM project WHERE deleting_at IS NOT NULL)
            + (SELECT count(*) FROM asset WHERE screen_id IS NULL)";
        assert_eq!(text(&self.pool, left).await, "0", "{when}");
    }
}

/// A client of a workflow: its world, its owner and its number.
type Client = for<'a> fn(&'a World, i64, usize) -> LocalBoxFuture<'a, Result<(), ProjectError>>;

/// Lets two clients run a workflow at once, and kills one of them in each commit, before and after each call of the object
/// store. The first client then repeats its request. Returns how many places there were of each kind.
async fn cut_everywhere(setup: &str, client: Client, expected: &str) -> [i64; 3] {
    let world = World::new().await;
    let (mut places, mut owner) = ([0; 3], 0);
    let kinds: [fn(i64) -> Cut; 3] = [Cut::InCommit, Cut::BeforeCall, Cut::AfterCall];
    for (kind, places) in kinds.into_iter().zip(&mut places) {
        loop {
            owner += 1;
            let cut = kind(*places + 1);
            world.set_up(setup, owner).await;
            world.check("before").await;
            world.cut(cut).await;
            let both = async { tokio::join!(client(&world, owner, 0), client(&world, owner, 1)) };
            let (one, other) = within(LONG, format!("{cut:?} never ends"), both).await;
            let was_cut = world.was_cut(cut).await;
            assert_eq!(was_cut, is_killed(&one) != is_killed(&other), "{cut:?}: {one:?}, {other:?}");
            world.cut(Cut::Never).await;
            world.check(&format!("after {cut:?}")).await;

            let repeated = client(&world, owner, 0).await;
            assert!(!is_killed(&repeated), "{cut:?}: {repeated:?}");
            world.check(&format!("repeated after {cut:?}")).await;
            within(LONG, format!("{cut:?} never quiet"), world.quiet(&format!("in the end of {cut:?}")))
                .await;
            assert_eq!(world.projects(owner).await, expected, "{cut:?}");
            if !was_cut {
                break;
            }
            *places += 1;
        }
    }
    places
}

fn is_killed(result: &Result<(), ProjectError>) -> bool {
    matches!(result, Err(ProjectError::Database(_) | ProjectError::Assets(_)))
}

#[tokio::test]
async fn a_creation_cut_in_its_commit_is_completed_by_the_next_request() {
    let setup = "INSERT INTO owner VALUES (OWNER, 1, 9); INSERT INTO project (owner_id, name) VALUES (OWNER, 'First')";
    let client: Client =
        |world, owner, _| Box::pin(async move { create(&world.pool, owner, "Site").await.map(drop) });
    assert_eq!(cut_everywhere(setup, client, "First, Site!").await, [1, 0, 0]);
}

#[tokio::test]
async fn an_activation_cut_in_its_commit_is_completed_by_the_next_request() {
    let setup = "INSERT INTO owner VALUES (OWNER, 2, 9);
        INSERT INTO project (owner_id, name, archived_at) VALUES (OWNER, 'Old', now());
        UPDATE project SET name = 'Site' WHERE owner_id = OWNER;
        INSERT INTO project (owner_id, name) VALUES (OWNER, 'SITE'), (OWNER, 'Other')";
    let client: Client = |world, owner, _| {
        Box::pin(async move {
            let archived = "SELECT min(id) FROM project WHERE owner_id = $1";
            let id: i64 = sqlx::query_scalar(archived).bind(owner).fetch_one(&world.pool).await?;
            activate(&world.pool, owner, id).await.map(drop)
        })
    };
    assert_eq!(cut_everywhere(setup, client, "Site (Copy 1), SITE, Other!").await, [1, 0, 0]);
}

#[tokio::test]
async fn an_upload_cut_anywhere_is_completed_and_leaves_no_orphan_object() {
    let setup =
        "INSERT INTO owner VALUES (OWNER, 9, 0); INSERT INTO project (owner_id, name) VALUES (OWNER, 'Site')";
    let client: Client = |world, owner, number| {
        Box::pin(async move {
            let (file, project) = (["home.png", "HOME@2x.gif"][number], world.id(owner, "Site").await);
            upload(&world.pool, &world.bucket, owner, project, file, b"picture".to_vec()).await.map(drop)
        })
    };
    let places = cut_everywhere(setup, client, "Site!: home").await;
    // The second client is refused before or after its object, depending on which of the two is faster.
    assert!(places[0] >= 2 && places[1] >= 1 && places[2] >= 1, "{places:?}");
}

#[tokio::test]
async fn a_deletion_cut_anywhere_is_completed_and_leaves_no_orphan_object() {
    let setup = "INSERT INTO owner VALUES (OWNER, 1, 9);
        INSERT INTO project (owner_id, name) VALUES (OWNER, 'Old');
        INSERT INTO project (owner_id, name, over_quota) VALUES (OWNER, 'New', true);
        INSERT INTO screen (project_id, file)
            SELECT id, n || '.png' FROM project, generate_series(1, 3) n WHERE owner_id = OWNER AND name = 'Old';
        INSERT INTO asset (project_id, screen_id, put_until) SELECT project_id, s.id, '-infinity'
            FROM screen s JOIN project p ON p.id = project_id WHERE owner_id = OWNER;
        INSERT INTO asset (project_id, put_until) SELECT id, '-infinity' FROM project WHERE owner_id = OWNER AND name = 'Old'";
    let client: Client = |world, owner, _| {
        Box::pin(async move {
            request_deletion(&world.pool, owner, world.id(owner, "Old").await).await?;
            while step(&world.pool, &world.bucket, 2).await? != Step::Idle {}
            Ok(())
        })
    };
    let places = cut_everywhere(setup, client, "New").await;
    // The request, two steps for four objects, two for three screens, one for the project.
    assert!(places[0] >= 6 && places[1] >= 4 && places[2] >= 4, "{places:?}");
}

#[tokio::test]
async fn all_workflows_at_once_keep_the_rules() {
    let world = World::new().await;
    let setup = "INSERT INTO owner VALUES (OWNER, 3, 4);
        INSERT INTO project (owner_id, name, archived_at)
            SELECT OWNER, name, archived_at FROM (VALUES ('A', NULL), ('B', NULL), ('C', now()), ('C', now())) AS p (name, archived_at);
        INSERT INTO project (owner_id, name, on_hold) VALUES (OWNER, 'Held', false)";
    for owner in 1..=10 {
        world.set_up(setup, owner).await;
        let (a, b) = (world.id(owner, "A").await, world.id(owner, "B").await);
        let (pool, bucket) = (&world.pool, &world.bucket);
        let archived =
            texts(pool, format!("SELECT id FROM project WHERE owner_id = {owner} AND name = 'C'")).await;
        let mut all: Vec<LocalBoxFuture<'_, Result<(), ProjectError>>> = vec![
            Box::pin(async { request_deletion(pool, owner, a).await }),
            Box::pin(async { request_deletion(pool, owner, a).await }),
            Box::pin(async { archive(pool, owner, b).await }),
            Box::pin(async { archive(pool, owner, b).await }),
            Box::pin(async { create(pool, owner, "D").await.map(drop) }),
            Box::pin(async { create(pool, owner, "d").await.map(drop) }),
        ];
        for id in archived {
            let id = id.parse().unwrap();
            all.push(Box::pin(async move { activate(pool, owner, id).await.map(drop) }));
        }
        for file in ["home.png", "home.jpg", "about.png"] {
            all.push(Box::pin(async move {
                upload(pool, bucket, owner, b, file, b"picture".to_vec()).await.map(drop)
            }));
        }
        let results = within(LONG, "never ends", join_all(all)).await;
        assert!(results.iter().all(|result| !is_killed(result)), "{results:?}");
        for (what, pair) in [("archives", 2..4), ("creations", 4..6)] {
            let done = results[pair].iter().filter(|result| result.is_ok()).count();
            assert_eq!(done, 1, "{what}: {results:?}");
        }
        world.check("in the end").await;
        world.quiet("when all is done").await;
        let names = world.projects(owner).await;
        assert!(names.contains("C (Copy 1)") && names.contains("Held") && !names.contains("A"), "{names}");
    }
}

#[tokio::test]
async fn a_screen_brought_back_is_renamed_if_its_name_is_taken() {
    let world = World::new().await;
    world
        .set_up("INSERT INTO owner VALUES (OWNER, 9, 2); INSERT INTO project (owner_id, name) VALUES (OWNER, 'Site')", 1)
        .await;
    let (pool, bucket) = (&world.pool, &world.bucket);
    let site = world.id(1, "Site").await;
    let mut archived = Vec::new();
    for file in ["home.png", "home@2x.png", "HOME.gif"] {
        let screen = upload(pool, bucket, 1, site, file, b"picture".to_vec()).await.unwrap();
        assert!(archive_screen(pool, 1, screen).await.unwrap());
        assert!(!archive_screen(pool, 1, screen).await.unwrap(), "once");
        archived.push(screen);
    }
    assert_eq!(world.projects(1).await, "Site");
    let mut files = Vec::new();
    for screen in &archived {
        files.push(activate_screen(pool, 1, *screen).await.unwrap());
        world.check("a screen is back").await;
    }
    assert_eq!(files, ["home.png", "home (Copy 1)@2x.png", "HOME (Copy 2).gif"]);
    assert_eq!(world.projects(1).await, "Site!: home home (copy 1) home (copy 2)", "and the quota follows");
    let taken = upload(pool, bucket, 1, site, "Home (Copy 1).jpg", b"picture".to_vec()).await;
    assert!(matches!(taken, Err(ProjectError::ScreenTaken)), "{taken:?}");

    let again = activate_screen(pool, 1, archived[0]).await;
    assert!(matches!(again, Err(ProjectError::NotArchived)), "{again:?}");
    let others = activate_screen(pool, 2, archived[0]).await;
    assert!(matches!(others, Err(ProjectError::NoSuchScreen)), "{others:?}");
    // The longest name still has room for the copy's number.
    let long = format!("{}@2x.png", "a".repeat(193));
    let screen = upload(pool, bucket, 1, site, &long, b"picture".to_vec()).await.unwrap();
    archive_screen(pool, 1, screen).await.unwrap();
    upload(pool, bucket, 1, site, &long, b"picture".to_vec()).await.unwrap();
    let copy = activate_screen(pool, 1, screen).await.unwrap();
    assert_eq!(copy, format!("{} (Copy 1)@2x.png", "a".repeat(184)));
    world.quiet("in the end").await;
}

#[tokio::test]
async fn an_object_that_can_still_be_written_keeps_its_row() {
    let world = World::new().await;
    world
        .set_up("INSERT INTO owner VALUES (OWNER, 9, 9); INSERT INTO project (owner_id, name) VALUES (OWNER, 'Site')", 1)
        .await;
    let (pool, bucket) = (&world.pool, &world.bucket);
    let site = world.id(1, "Site").await;
    let reserved = reserve(pool, 1, site, "home.png").await.unwrap();
    assert_eq!(sweep_uploads(pool, bucket, 9).await.unwrap(), 0, "its write might come");
    request_deletion(pool, 1, site).await.unwrap();
    assert_eq!(step(pool, bucket, 9).await.unwrap(), Step::Postponed(site));
    assert_eq!(step(pool, bucket, 9).await.unwrap(), Step::Idle, "until then");
    bucket.put(&reserved.object, b"picture".to_vec(), reserved.until).await.unwrap();
    world.check("written late").await;
    let refused = publish(pool, 1, site, "home.png", &reserved).await;
    assert!(matches!(refused, Err(ProjectError::NoSuchProject)), "{refused:?}");

    // The time limit ends for the database and for the object store.
    run(pool, "UPDATE asset SET put_until = '-infinity'; UPDATE cascade_job SET not_before = '-infinity'")
        .await;
    bucket.ahead.store(3600, Ordering::Relaxed);
    assert_eq!(step(pool, bucket, 9).await.unwrap(), Step::Deleted(1));
    assert_eq!(bucket.objects(), BTreeSet::new());
    assert_eq!(step(pool, bucket, 9).await.unwrap(), Step::Finished(site));
    bucket.put(&reserved.object, b"picture".to_vec(), reserved.until).await.unwrap_err();
    world.quiet("in the end").await;
}

#[tokio::test]
async fn an_upload_that_was_swept_creates_no_screen() {
    let world = World::new().await;
    world
        .set_up("INSERT INTO owner VALUES (OWNER, 9, 9); INSERT INTO project (owner_id, name) VALUES (OWNER, 'Site')", 1)
        .await;
    let (pool, bucket) = (&world.pool, &world.bucket);
    let site = world.id(1, "Site").await;
    let reserved = reserve(pool, 1, site, "home.png").await.unwrap();
    bucket.put(&reserved.object, b"picture".to_vec(), reserved.until).await.unwrap();
    run(pool, "UPDATE asset SET put_until = '-infinity'").await;
    assert_eq!(sweep_uploads(pool, bucket, 9).await.unwrap(), 1);
    let late = publish(pool, 1, site, "home.png", &reserved).await;
    assert!(matches!(late, Err(ProjectError::UploadExpired)), "{late:?}");
    assert_eq!(world.projects(1).await, "Site", "the screen was rolled back");
    world.quiet("in the end").await;
}

#[tokio::test]
async fn a_failing_queue_changes_no_flag_and_no_log() {
    let world = World::new().await;
    let setup = "INSERT INTO owner VALUES (OWNER, 1, 9);
        INSERT INTO project (owner_id, name, over_quota) VALUES (OWNER, 'Old', false), (OWNER, 'New', true);
        INSERT INTO screen (project_id, file) SELECT id, 'home.png' FROM project WHERE name = 'Old';
        INSERT INTO asset (project_id, screen_id, put_until) SELECT project_id, id, '-infinity' FROM screen";
    world.set_up(setup, 1).await;
    let objects = world.bucket.objects();
    assert_eq!(objects.len(), 1);
    run(&world.pool, "ALTER TABLE cascade_job ADD CHECK (false)").await;
    let failed = request_deletion(&world.pool, 1, world.id(1, "Old").await).await;
    assert!(matches!(&failed, Err(ProjectError::Database(error)) if state(error) == "23514"), "{failed:?}");
    assert_eq!(world.projects(1).await, "Old: home, New!");
    assert_eq!((world.bucket.objects(), world.rows().await), (objects.clone(), objects));
    assert_eq!(text(&world.pool, "SELECT count(*) FROM delete_log").await, "0");
}

#[tokio::test]
async fn a_refused_workflow_changes_nothing() {
    let world = World::new().await;
    let setup = "INSERT INTO owner VALUES (OWNER, 9, 9);
        INSERT INTO project (owner_id, name, on_hold, archived_at) VALUES (OWNER, 'Held', true, NULL), (OWNER, 'Gone', false, now())";
    world.set_up(setup, 1).await;
    let (pool, bucket) = (&world.pool, &world.bucket);
    let (held, gone) = (world.id(1, "Held").await, world.id(1, "Gone").await);
    let body = || b"picture".to_vec();
    let refused = [
        create(pool, 1, "HELD").await.map(drop),
        activate(pool, 1, held).await.map(drop),
        archive(pool, 1, gone).await,
        request_deletion(pool, 1, held).await,
        request_deletion(pool, 2, gone).await,
        upload(pool, bucket, 1, gone, "a.png", body()).await.map(drop),
        upload(pool, bucket, 2, held, "a.png", body()).await.map(drop),
    ];
    let kinds: Vec<String> = refused.iter().map(|one| format!("{:?}", one.as_ref().unwrap_err())).collect();
    let expected =
        ["NameTaken", "NotArchived", "Archived", "OnHold", "NoSuchProject", "Archived", "NoSuchProject"];
    assert_eq!(kinds, expected);
    assert_eq!(world.projects(1).await, "Held, [Gone]");
    let written = "SELECT (SELECT count(*) FROM delete_log) + (SELECT count(*) FROM cascade_job) + (SELECT count(*) FROM asset)";
    assert_eq!(text(pool, written).await, "0");
    assert_eq!(bucket.calls.load(Ordering::Relaxed), 0, "no object was written");
}
