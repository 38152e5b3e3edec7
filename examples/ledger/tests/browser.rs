//! The page in a real browser, with real requests to two real instances.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/chromium.rs"]
mod chromium;
#[path = "common/service.rs"]
mod common;

use std::time::Duration;

use chromium::Page;
use common::LONG;
use ledger::{Mode, Options, Running};
use serde_json::json;
use test_bounds::within;
use test_servers::{Database, fresh_database};

/// The usual width of a window.
const WIDE: u32 = 1200;
const DONE: &str = "document.body?.dataset.state === 'idle'";

async fn service(database: Option<&Database>, work: Duration) -> Running {
    let mut options = Options::default();
    options.database_url = database.map(|database| database.url().to_owned());
    options.mode = database.is_none().then_some(Mode::Memory);
    options.work = work;
    // Longer than a lease of a round, also on a busy machine.
    options.wait = Duration::from_secs(10);
    within(LONG, "does not start", ledger::start(options)).await.unwrap()
}

/// Opens the page and waits for the round that it starts with.
fn open(running: &Running, width: u32) -> Page {
    let mut page = Page::open(&format!("http://{}/", running.address()), width);
    page.until(DONE);
    page
}

/// Plays a round.
fn play(page: &mut Page, story: &str, way: &str) {
    start(page, story, way);
    page.until(DONE);
}

fn start(page: &mut Page, story: &str, way: &str) {
    for input in
        [format!("[name=story][value={story}]"), format!("[name=way][value={way}]"), "#run".to_owned()]
    {
        page.evaluate(&format!("document.querySelector({input:?}).click()"));
    }
}

/// Returns the end of a round as the page shows it: the balance, the cell of the table, and the number of marks.
fn shown(page: &mut Page, story: &str, way: &str) -> (String, String, u64) {
    let marks = page.count(".piece.double");
    assert_eq!(page.count(".mark.writes.double"), marks, "{story} {way}");
    assert_eq!(page.count(".said .bad"), marks, "{story} {way}");
    (page.text("#balance"), page.text(&format!("#{way}-{story}")), marks)
}

const TWICE: (&str, &str, u64) = ("−100", "✗ paid twice, balance −100", 1);
const ONCE: (&str, &str, u64) = ("0", "✓ paid once, balance 0", 0);

/// Work long enough for the second request to read on a busy machine too.
const LONG_WORK: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread")]
async fn the_page_opens_with_a_double_spend_without_a_lock() {
    let database = fresh_database().await;
    let running = service(Some(&database), LONG_WORK).await;
    let mut page = open(&running, WIDE);
    let (balance, cell, marks) = shown(&mut page, "click", "none");
    assert_eq!((balance.as_str(), cell.as_str(), marks), TWICE);
    assert!(page.text("#verdict").starts_with("✗ Double spend: 200 credits were paid out of 100."));
    assert_eq!(page.text("#doubles"), "double spend!");
    for lane in ["a", "b"] {
        assert_eq!(page.text(&format!("#{lane} .mark.reads")), "reads 100", "{lane}");
        let said = page.text(&format!("#{lane}-said"));
        assert!(said.contains("read 100, wrote −100, said: paid"), "{lane}: {said}");
    }
    assert_eq!(page.complaints(), [""; 0]);
    // The same in the ledger itself.
    let mut observer = database.connect().await;
    let sql = "SELECT array_agg(amount ORDER BY id) FROM ledger_example.entry WHERE holder > 1000000";
    let entries: Vec<i64> = sqlx::query_scalar(sql).fetch_one(&mut observer).await.unwrap();
    assert_eq!(entries, [100, -100, -100]);
    drop(page);
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_marks_double_spends_of_each_way_in_each_story() {
    let database = fresh_database().await;
    let running = service(Some(&database), LONG_WORK).await;
    let mut page = open(&running, WIDE);
    let expected = [
        ("none", [TWICE, TWICE, TWICE]),
        ("lock", [ONCE, ONCE, TWICE]),
        ("fence", [ONCE, ONCE, ONCE]),
        ("key", [ONCE, TWICE, ONCE]),
        ("tx", [ONCE, ONCE, ONCE]),
    ];
    for (way, ends) in expected {
        for (story, end) in ["click", "two", "freeze"].into_iter().zip(ends) {
            play(&mut page, story, way);
            let (balance, cell, marks) = shown(&mut page, story, way);
            assert_eq!((balance.as_str(), cell.as_str(), marks), end, "{story} {way}");
            let verdict = page.text("#verdict");
            let title = if end == TWICE { "✗ Double spend" } else { "✓ Spent once" };
            assert!(verdict.starts_with(title), "{story} {way}: {verdict}");
            // The reason is shown only if it ended as the page expects.
            assert!(!page.text("#verdict span").is_empty(), "{story} {way}: {verdict}");
            let lanes = page.text("#a-said") + &page.text("#b-said");
            let detail = match (way, story) {
                ("none", "freeze") | ("lock", "freeze") => "stood still",
                ("none", _) | ("key", "two") => "wrote −100, said: paid",
                ("fence", "freeze") => {
                    "was refused at its commit, because its lock had ended: nothing is written"
                }
                ("key", _) => "got the answer of the first request, and spent nothing",
                _ => "read 0, refused: not enough credit",
            };
            assert!(lanes.contains(detail), "{story} {way}: {lanes}");
        }
    }
    assert_eq!(page.count("#results .quiet"), 0, "a round is missing");
    assert_eq!(page.complaints(), [""; 0]);
    drop(page);
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_stands_still_is_seen_while_it_does() {
    let database = fresh_database().await;
    let running = service(Some(&database), Duration::from_millis(500)).await;
    let mut page = open(&running, WIDE);
    start(&mut page, "freeze", "tx");
    page.until("document.querySelector('#a .piece.still') && document.querySelector('#b .piece.waits') && document.body.dataset.state === 'running'");
    assert_eq!(page.text("#balance"), "100", "nothing is committed");
    page.until(DONE);
    assert_eq!(shown(&mut page, "freeze", "tx"), (ONCE.0.to_owned(), ONCE.1.to_owned(), ONCE.2));
    drop(page);
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_can_be_done_without_a_mouse() {
    let database = fresh_database().await;
    let running = service(Some(&database), Duration::from_millis(300)).await;
    let mut page = open(&running, WIDE);
    let focused =
        |page: &mut Page| page.evaluate("document.activeElement.value || document.activeElement.id");
    page.press("Tab");
    assert_eq!(focused(&mut page), "click");
    page.press("ArrowRight");
    assert_eq!(focused(&mut page), "two");
    page.press("Tab");
    assert_eq!(focused(&mut page), "none");
    page.press("ArrowRight");
    page.press("ArrowRight");
    assert_eq!(focused(&mut page), "fence");
    assert_eq!(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"), "solid");
    page.press("Tab");
    assert_eq!(focused(&mut page), "run");
    page.press(" ");
    page.until("document.querySelector('#fence-two').className === 'good'");
    page.until(DONE);
    assert_eq!(focused(&mut page), "run", "the focus is not lost");
    page.press("Tab");
    assert_eq!(focused(&mut page), "all");
    page.press("Tab");
    page.press("Tab");
    page.press("Enter");
    page.until(
        "document.querySelector('#crowd').open && document.querySelectorAll('#locks input').length > 5",
    );
    drop(page);
    running.stop().await.unwrap();
}

/// Returns the texts whose contrast with their background is below 4.5, the least for ordinary text.
const PALE: &str = r#"(() => {
    const canvas = document.createElement("canvas").getContext("2d");
    const bytes = color => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = color => {
        const [r, g, b] = bytes(color).map(part => {
            const value = part / 255;
            return value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
        });
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const behind = node => {
        const color = getComputedStyle(node).backgroundColor;
        return bytes(color)[3] === 255 ? color : behind(node.parentElement);
    };
    const contrast = node => {
        const [low, high] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => a - b);
        return (high + .05) / (low + .05);
    };
    const own = node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    const texts = [...document.querySelectorAll("body *")].filter(node => own(node) && node.checkVisibility());
    const pale = texts.filter(node => node.tagName !== "SCRIPT" && contrast(node) < 4.5);
    return [texts.length, pale.map(node => `${node.textContent} ${contrast(node)}`)];
})()"#;

#[tokio::test(flavor = "multi_thread")]
async fn it_is_readable_in_light_and_dark_and_on_a_narrow_screen() {
    let database = fresh_database().await;
    let running = service(Some(&database), Duration::from_millis(300)).await;
    for width in [WIDE, 360] {
        let mut page = open(&running, width);
        play(&mut page, "freeze", "fence");
        play(&mut page, "click", "none");
        page.evaluate("document.querySelector('#crowd').open = true");
        let mut grounds = Vec::new();
        for scheme in ["light", "dark"] {
            let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
            page.call("Emulation.setEmulatedMedia", features);
            let texts = page.evaluate(PALE);
            assert!(texts[0].as_u64() > Some(40), "{texts}");
            assert_eq!(texts[1], json!([]), "{scheme}");
            grounds.push(page.evaluate("getComputedStyle(document.body).backgroundColor"));
        }
        assert_ne!(grounds[0], grounds[1]);
        let beyond =
            page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth");
        assert_eq!(beyond, 0, "the page is wider than {width}");
        assert_eq!(page.complaints(), [""; 0]);
    }
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_database_it_says_what_is_missing() {
    let running = service(None, LONG_WORK).await;
    let mut page = open(&running, WIDE);
    let (balance, cell, marks) = shown(&mut page, "click", "none");
    assert_eq!((balance.as_str(), cell.as_str(), marks), TWICE);
    play(&mut page, "two", "lock");
    let (balance, cell, marks) = shown(&mut page, "two", "lock");
    assert_eq!((balance.as_str(), cell.as_str(), marks), ONCE);
    let off =
        page.evaluate("[...document.querySelectorAll('#controls input:disabled')].map(input => input.value)");
    assert_eq!(off, json!(["freeze", "fence", "key", "tx"]));
    let missing = page.text("label:has([value=tx]) small");
    assert_eq!(missing, "Needs Postgres: start the service with DATABASE_URL.");
    drop(page);
    running.stop().await.unwrap();
}
