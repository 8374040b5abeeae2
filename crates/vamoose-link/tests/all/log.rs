//! What the crate logs, for tests that look for it.

use std::{
    fmt::{self, Write as _},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lab::watched::Watched;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// Keeps messages from now on. Tests run side by side: they tell theirs apart by what these say.
pub(crate) fn keep() {
    lines();
}

/// Waits for a message that begins so, with this in it.
pub(crate) fn wait_for(begin: &str, part: &str) {
    let is_it = |line: &&String| line.starts_with(begin) && line.contains(part);
    let find = |lines: &Vec<String>| lines.iter().find(is_it).map(drop);
    if lines().wait(Duration::from_secs(60), find).is_none() {
        let lines = lines().lock();
        let alike: Vec<_> = lines.iter().filter(|it| it.starts_with(begin)).collect();
        panic!("'{part}' was not logged, but {alike:#?}");
    }
}

/// Whether a message has this in it.
pub(crate) fn has(part: &str) -> bool {
    lines().lock().iter().any(|line| line.contains(part))
}

fn lines() -> &'static Watched<Vec<String>> {
    static LINES: OnceLock<Watched<Vec<String>>> = OnceLock::new();
    LINES.get_or_init(|| {
        tracing::subscriber::set_global_default(Keep).unwrap();
        Watched::new(Vec::new())
    })
}

struct Keep;

impl Subscriber for Keep {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        static LAST: AtomicU64 = AtomicU64::new(1);
        span::Id::from_u64(LAST.fetch_add(1, Ordering::Relaxed))
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        lines().update(|lines| lines.push(line.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}
