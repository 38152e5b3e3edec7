//! The warnings of this process.

use std::fmt;
use std::sync::{Mutex, OnceLock};

use tracing::field::{Field, Visit};

/// All messages at level WARN of threads without a separate subscriber.
pub struct Warnings(&'static Mutex<Vec<String>>);

/// Starts to collect warnings.
pub fn warnings() -> Warnings {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| tracing::subscriber::set_global_default(Collect(&LINES)).unwrap());
    Warnings(&LINES)
}

impl Warnings {
    /// Returns whether a warning contains `text` and reports a missing release.
    pub fn have(&self, text: &str) -> bool {
        self.0.lock().unwrap().iter().any(|line| line.contains("not released") && line.contains(text))
    }
}

struct Collect(&'static Mutex<Vec<String>>);

#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &format!("{field}={value:?} ");
    }
}

impl tracing::Subscriber for Collect {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
