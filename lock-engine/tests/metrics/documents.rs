//! The page and the dashboard name exactly the exported metrics.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::scenes::store;
use crate::scrape::{Scrape, alone, scrape};

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Starts an engine, which creates all metrics, and scrapes.
async fn exported() -> Scrape {
    let _lock = store("documents").client().unwrap();
    scrape()
}

fn ours(scrape: &Scrape) -> BTreeSet<String> {
    scrape.types.keys().filter(|name| name.starts_with("leasehold")).cloned().collect()
}

/// Returns the texts in backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[tokio::test]
async fn the_page_describes_what_is_exported() {
    let _alone = alone().await;
    let scrape = exported().await;
    let page = document("metrics.md");
    let (all, mut described) = (ours(&scrape), BTreeSet::new());
    for row in page.lines().filter(|line| line.starts_with("| `leasehold.lock.")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, exported, kind, labels, what] = cells[..] else { panic!("{row}") };
        let (name, exported) = (quoted(name)[0], quoted(exported)[0]);
        assert!(exported.starts_with(&name.replace('.', "_")), "{name} is not {exported}");
        assert_eq!(scrape.types.get(exported).map(String::as_str), Some(kind), "{exported}");
        let mut seen = BTreeSet::new();
        for (_, labels, _) in scrape.series.iter().filter(|(series, ..)| base(series, &all) == exported) {
            seen.extend(labels.keys().map(String::as_str).filter(|label| *label != "le"));
        }
        assert_eq!(quoted(labels).into_iter().collect::<BTreeSet<_>>(), seen, "{exported}");
        assert!(!what.is_empty(), "{row}");
        assert!(described.insert(exported.to_owned()), "{exported} is described twice");
    }
    assert_eq!(described, all);
    for (_, labels, _) in &scrape.series {
        for label in ["outcome", "reason"] {
            if let Some(value) = labels.get(label) {
                assert!(page.contains(&format!("`{value}`")), "the page does not name the {label} {value}");
            }
        }
    }
    for name in metrics_named(&page.replace('`', " ")) {
        assert!(described.contains(base(&name, &described)), "{name} is not exported");
    }
}

/// The page's code for installing a recorder is the code of these tests.
#[test]
fn the_page_shows_code_that_works() {
    let page = document("metrics.md");
    let (_, rest) = page.split_once("```rust\n").unwrap();
    let (code, _) = rest.split_once("```").unwrap();
    assert!(code.lines().count() > 5 && include_str!("scrape.rs").contains(code), "{code}");
}

#[tokio::test]
async fn the_dashboard_asks_for_what_is_exported() {
    let _alone = alone().await;
    let exported = ours(&exported().await);
    let text = document("dashboards/leasehold.json");
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut asked = BTreeSet::new();
    for expr in strings(&dashboard, &["expr", "query", "definition"]) {
        for name in metrics_named(expr) {
            let base = base(&name, &exported);
            assert!(exported.contains(base), "{name} is not exported: {expr}");
            asked.insert(base.to_owned());
        }
    }
    assert_eq!(asked, exported, "every metric has its panel");
    // The data source is a variable, chosen on import.
    for source in strings(&dashboard, &["uid"]) {
        assert!(source == "${datasource}" || source == "leasehold", "{source}");
    }
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "panels have ids of their own");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        assert!(panel["description"].as_str().is_some_and(|text| !text.is_empty()), "{}", panel["title"]);
        for expr in strings(&panel["targets"], &["expr"]) {
            assert!(expr.contains("store=~\"$store\""), "{expr}");
            assert_eq!(expr.matches('(').count(), expr.matches(')').count(), "{expr}");
        }
    }
}

/// Returns the words that are Prometheus names of metrics.
fn metrics_named(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("leasehold_lock_")).map(str::to_owned).collect()
}

/// Returns the metric of a series, because a histogram has several.
fn base<'a>(name: &'a str, exported: &BTreeSet<String>) -> &'a str {
    if exported.contains(name) {
        return name;
    }
    ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
}

/// Returns all strings under one of `names`, at any depth of `value`.
fn strings<'a>(value: &'a Value, names: &[&str]) -> Vec<&'a str> {
    match value {
        Value::Object(fields) => {
            let under = |(name, value): (&String, &'a Value)| match value.as_str() {
                Some(text) if names.contains(&name.as_str()) => vec![text],
                _ => strings(value, names),
            };
            fields.iter().flat_map(under).collect()
        }
        Value::Array(values) => values.iter().flat_map(|value| strings(value, names)).collect(),
        _ => Vec::new(),
    }
}
