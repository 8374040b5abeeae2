//! The log: lines for people, or records with searchable fields.
//!
//! A terminal shows messages only; text elsewhere has times and spans too. Text lines already name a migration's attempt, guest, peer and outcome, so only records have these fields as well.

use std::{
    env, fmt, io,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use rustix::fs::fstat;
use tracing::{
    Event, Level,
    field::{Field, Visit},
    level_filters::LevelFilter,
};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    field::{RecordFields, VisitOutput as _},
    fmt::{
        FmtContext, FormatFields, MakeWriter,
        format::{DefaultVisitor, Writer},
        layer,
    },
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

use crate::{
    options::OUTPUT,
    terminal::{self, Above},
};

/// What is logged, and how.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct LogOptions {
    /// Format of the log [default: journald if standard error is the journal, else text]
    #[arg(help_heading = OUTPUT, long, global = true, value_enum, value_name = "FORMAT", hide_short_help = true)]
    log_format: Option<LogFormat>,
    /// Print errors only
    #[arg(help_heading = OUTPUT, short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Log details of each step as well
    #[arg(help_heading = OUTPUT, short, long, global = true)]
    verbose: bool,
    /// Whether only results and warnings belong on a terminal, beside the progress.
    #[arg(skip)]
    pub is_brief: bool,
}

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

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Whether only errors are printed.
pub fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// Starts the log. `VAMOOSE_LOG` filters it, instead of the options.
///
/// # Errors
/// If the journal was requested and cannot be reached.
pub fn start(options: &LogOptions) -> Result<()> {
    IS_QUIET.store(options.quiet, Ordering::Relaxed);
    let is_terminal = terminal::is_terminal();
    let directives = env::var("VAMOOSE_LOG").unwrap_or_default();
    let directives = match options {
        _ if !directives.is_empty() => directives.as_str(),
        LogOptions { quiet: true, .. } => "error",
        LogOptions { verbose: true, .. } => "info,vamoose=debug,handover=debug",
        LogOptions { is_brief: true, .. } if is_terminal => {
            "warn,vamoose::commands=info,vamoose_relay::migrate::earlier=info"
        }
        _ => "info",
    };
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .parse_lossy(directives);
    let person = || match is_terminal {
        true => on_terminal(|| Above, terminal::has_control()),
        false => text(|| Above),
    };
    let log = match options.log_format {
        Some(LogFormat::Text) => person(),
        Some(LogFormat::Json) => json(io::stderr),
        Some(LogFormat::Journald) => journald().context("--log-format journald: no journal")?,
        None if is_journal() => journald().unwrap_or_else(|_| person()),
        None => person(),
    };
    tracing_subscriber::registry()
        .with(log.with_filter(filter))
        .init();
    Ok(())
}

type Log = Box<dyn Layer<Registry> + Send + Sync>;

fn text<W>(writer: W) -> Log
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = layer().with_writer(writer).with_ansi(false);
    // The logger would report its own errors to the same closed standard error, and panic.
    let lines = lines.log_internal_errors(false);
    lines.with_target(false).fmt_fields(Plain).boxed()
}

fn on_terminal<W>(writer: W, has_color: bool) -> Log
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = layer().with_writer(writer).with_ansi(has_color);
    let lines = lines.log_internal_errors(false).fmt_fields(Plain);
    lines.event_format(message as Format).boxed()
}

type Format = fn(&FmtContext<'_, Registry, Plain>, Writer<'_>, &Event<'_>) -> fmt::Result;

/// A line with a message, and its level if that is more than information.
fn message(
    context: &FmtContext<'_, Registry, Plain>,
    mut line: Writer<'_>,
    event: &Event<'_>,
) -> fmt::Result {
    let (level, color) = match *event.metadata().level() {
        Level::ERROR => ("error: ", 31),
        Level::WARN => ("warning: ", 33),
        _ => ("", 0),
    };
    match line.has_ansi_escapes() && !level.is_empty() {
        true => write!(line, "\x1b[{color}m{level}\x1b[0m")?,
        false => line.write_str(level)?,
    }
    context.field_format().format_fields(line.by_ref(), event)?;
    writeln!(line)
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

    use tracing::{error_span, info, subscriber::with_default, warn};
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
        let line = logged(|out| text(move || out.clone()));
        assert!(
            line.ends_with("INFO migration{port=7}: web1: loaded more=1\n"),
            "{line}"
        );
    }

    #[test]
    fn a_terminal_shows_messages_and_the_level_of_warnings() {
        let line = logged(|out| on_terminal(move || out.clone(), false));
        assert_eq!(line, "web1: loaded more=1\n");
        for (has_color, expected) in [
            (true, "\x1b[33mwarning: \x1b[0mlate\n"),
            (false, "warning: late\n"),
        ] {
            let written = Written::default();
            let out = written.clone();
            let log = on_terminal(move || out.clone(), has_color);
            with_default(tracing_subscriber::registry().with(log), || warn!("late"));
            assert_eq!(lock(&written.0).as_slice(), expected.as_bytes());
        }
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
