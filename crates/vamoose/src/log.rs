//! The log: lines for people, or records with searchable fields.
//!
//! Text lines already name a migration's attempt, guest, peer and outcome, so only records have these fields as well.

use std::{
    env, fmt,
    io::{self, IsTerminal as _},
};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use rustix::fs::fstat;
use tracing::{
    field::{Field, Visit},
    level_filters::LevelFilter,
};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    field::{RecordFields, VisitOutput as _},
    fmt::{
        FormatFields, MakeWriter,
        format::{DefaultVisitor, Writer},
        layer,
    },
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

/// Destination and format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines on standard error
    Text,
    /// One JSON object per line, on standard error
    Json,
    /// Records in systemd's journal, with fields VAMOOSE_ATTEMPT, _GUEST, _PEER and _OUTCOME
    Journald,
}

/// Prefix of field names in the journal.
const PREFIX: &str = "VAMOOSE";

/// Fields that the text of a line repeats.
const IN_TEXT: [&str; 3] = ["guest", "peer", "outcome"];

/// Starts the log. `VAMOOSE_LOG` filters it.
///
/// # Errors
/// If the journal was requested and cannot be reached.
pub fn start(format: Option<LogFormat>) -> Result<()> {
    let filter = EnvFilter::builder()
        .with_env_var("VAMOOSE_LOG")
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    let is_terminal = io::stderr().is_terminal();
    let log = match format {
        Some(LogFormat::Text) => text(io::stderr, is_terminal),
        Some(LogFormat::Json) => json(io::stderr),
        Some(LogFormat::Journald) => journald().context("--log-format journald: no journal")?,
        None if is_journal() => journald().unwrap_or_else(|_| text(io::stderr, false)),
        None => text(io::stderr, is_terminal),
    };
    tracing_subscriber::registry()
        .with(log.with_filter(filter))
        .init();
    Ok(())
}

type Log = Box<dyn Layer<Registry> + Send + Sync>;

fn text<W>(writer: W, is_terminal: bool) -> Log
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = layer().with_writer(writer).with_ansi(is_terminal);
    // The logger would report its own errors to the same closed standard error, and panic.
    let lines = lines.log_internal_errors(false);
    lines.with_target(false).fmt_fields(Plain).boxed()
}

fn json<W>(writer: W) -> Log
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    layer()
        .json()
        .with_writer(writer)
        .log_internal_errors(false)
        .with_span_list(false)
        .boxed()
}

fn journald() -> io::Result<Log> {
    let priorities = PriorityMappings {
        info: Priority::Informational,
        debug: Priority::Debug,
        ..PriorityMappings::new()
    };
    let records = tracing_journald::layer()?.with_field_prefix(Some(PREFIX.to_owned()));
    Ok(records.with_priority_mappings(priorities).boxed())
}

/// Whether standard error is still the journal that systemd connected it to.
fn is_journal() -> bool {
    let Ok(told) = env::var("JOURNAL_STREAM") else {
        return false;
    };
    fstat(io::stderr()).is_ok_and(|file| told == format!("{}:{}", file.st_dev, file.st_ino))
}

/// Default formatting, without the fields in [`IN_TEXT`].
struct Plain;

impl<'w> FormatFields<'w> for Plain {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut visitor = Without(DefaultVisitor::new(writer, true));
        fields.record(&mut visitor);
        visitor.0.finish()
    }
}

struct Without<'w>(DefaultVisitor<'w>);

impl Visit for Without<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if !IN_TEXT.contains(&field.name()) {
            self.0.record_str(field, value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if !IN_TEXT.contains(&field.name()) {
            self.0.record_debug(field, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        sync::{Arc, Mutex},
    };

    use tracing::{error_span, info, subscriber::with_default};
    use vamoose_link::lock;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The log of a migration.
    fn logged(log: impl FnOnce(Written) -> Log) -> String {
        let written = Written::default();
        let subscriber = tracing_subscriber::registry().with(log(written.clone()));
        with_default(subscriber, || {
            let span = error_span!("migration", port = 7);
            span.in_scope(|| {
                info!(
                    guest = Some("web1"),
                    outcome = "loaded",
                    more = 1,
                    "web1: loaded"
                )
            });
        });
        let text = lock(&written.0).clone();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_text_line_repeats_no_field() {
        let line = logged(|out| text(move || out.clone(), false));
        assert!(
            line.ends_with("INFO migration{port=7}: web1: loaded more=1\n"),
            "{line}"
        );
    }

    #[test]
    fn records_have_fields() {
        let record: serde_json::Value =
            serde_json::from_str(&logged(|out| json(move || out.clone()))).unwrap();
        assert_eq!(record["level"], "INFO");
        assert_eq!(record["fields"]["message"], "web1: loaded");
        assert_eq!(record["fields"]["guest"], "web1");
        assert_eq!(record["fields"]["outcome"], "loaded");
        assert_eq!(record["span"]["port"], 7);
    }
}
