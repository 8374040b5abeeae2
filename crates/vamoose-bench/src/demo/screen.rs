//! What the demo shows. If standard output is closed it goes on without.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::thread;

use super::run::Run;

pub(crate) fn say(text: impl Display) {
    // print macros panic when the reader has gone.
    let _ = writeln!(io::stdout(), "{text}");
}

/// Begins a part of the story.
pub(crate) fn step(number: u32, title: &str) {
    say(format!("\n{number}. {title}"));
}

/// A remark within a step; it may have several lines.
pub(crate) fn note(text: impl Display) {
    for line in text.to_string().lines() {
        say(format!("   {line}"));
    }
}

/// All runs side by side.
pub(crate) fn table(runs: &[Run], measuring: &str) {
    const MIB: f64 = (1 << 20) as f64;
    say("                    total  downtime  tick gap     link  ratio     CPU seconds");
    say(
        "                        s        ms        ms      MiB         source  vamoose  dest.    all   (guest)",
    );
    for run in runs {
        let Run { figures, .. } = run;
        let bytes = figures.link_bytes.or(figures.wire_bytes);
        let link = bytes.map(|bytes| bytes as f64 / MIB);
        let pages = figures
            .normal_pages
            .map(|pages| (pages * 4096) as f64 / MIB);
        let ratio = pages.zip(link).map(|(pages, link)| pages / link);
        let known = |value: Option<f64>, digits| {
            value.map_or_else(|| "?".to_owned(), |value| format!("{value:.digits$}"))
        };
        let (link, ratio) = (known(link, 0), known(ratio, 2));
        let cpu = &figures.cpu;
        say(format!(
            "   {:<14} {:>7.1} {:>9} {:>9} {link:>8} {ratio:>6} {:>8.2} {:>8.2} {:>6.2} {:>6.2} {:>9.2}",
            run.variant.to_string(),
            run.total.as_secs_f64(),
            run.downtime.as_millis(),
            run.life.continuity.gap().as_millis(),
            cpu.source,
            cpu.sender + cpu.receiver,
            cpu.destination,
            cpu.total(),
            run.guest_cpu,
        ));
    }
    say("");
    note(format!(
        "total: from the command until the guest runs at the destination.\n\
         downtime: from the guest's stop to its start, by one clock.\n\
         tick gap: measured, last tick at the source to first at the destination; ticks come every 100 ms.\n\
         link: bytes to the destination, {measuring}. ratio: pages sent / link.\n\
         CPU seconds: of the migration; the guest itself (vCPU threads of both QEMUs) is shown apart.\n\
         Stock QEMU: zstd, level 1. vamoose: its default, method auto.\n\
         All: 2 channels, downtime limit 300 ms, return path, destination memory preallocated.\n\
         The cable stayed plugged in all of these; the move whose cable was pulled is not among them.\n\
         vamoose: destination with -S, continued once the source has stopped for good; pages and all that was sent\n\
         are checked by CRC-32C. TLS: authenticated and encrypted. plain: neither, for a fair comparison with\n\
         stock: plain TCP; destination without -S, so that the guest goes on as soon as it has arrived.\n\
         One run each on {}: a picture, not a benchmark.",
        machine()
    ));
}

fn machine() -> String {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("?");
    format!("{cores} cores shared by all, load average {load}")
}
