//! Output of the demo. If standard output is closed, the demo goes on without it.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::thread;

use super::run::Run;

pub(crate) fn say(text: impl Display) {
    // The print macros would panic if standard output is closed.
    let _ = writeln!(io::stdout(), "{text}");
}

/// Begins a step of the demo.
pub(crate) fn step(number: u32, title: &str) {
    say(format!("\n{number}. {title}"));
}

/// Prints a remark within a step; it may have several lines.
pub(crate) fn note(text: impl Display) {
    for line in text.to_string().lines() {
        say(format!("   {line}"));
    }
}

/// Prints all runs side by side.
pub(crate) fn table(runs: &[Run], measuring: &str) {
    say("                    total  downtime  tick gap     link   CPU seconds");
    say("                        s        ms        ms      MiB    all (guest)");
    for run in runs {
        let Run { figures, .. } = run;
        let bytes = figures.link_bytes.or(figures.wire_bytes);
        let link = bytes.map_or("?".to_owned(), |bytes| (bytes >> 20).to_string());
        say(format!(
            "   {:<14} {:>7.1} {:>9} {:>9} {link:>8} {:>6.2} {:>7.2}",
            run.variant.to_string(),
            run.total.as_secs_f64(),
            run.downtime.as_millis(),
            run.life.continuity.gap().as_millis(),
            figures.cpu.total(),
            run.guest_cpu,
        ));
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    say("");
    note(format!(
        "total: from the command until the guest runs at the destination.\n\
         downtime: from the guest's stop to its start, by one clock.\n\
         tick gap: from the last tick at the source to the first at the destination; ticks come every 100 ms.\n\
         link: bytes to the destination, {measuring}.\n\
         CPU seconds: of the migration, at both ends; those of the guest (vCPU threads of both QEMUs) are shown separately.\n\
         Stock QEMU: zstd, level 1. vamoose: its default, method auto.\n\
         All: 2 channels, downtime limit 300 ms, return path, destination memory preallocated, cable plugged in.\n\
         vamoose: destination with -S, resumed once the source has stopped for good; pages and all data sent are\n\
         checked by CRC-32C. TLS: authenticated and encrypted. plain: neither, for a fair comparison with stock.\n\
         stock: plain TCP; destination without -S, so that the guest resumes as soon as it has arrived.\n\
         One run each, on {cores} shared cores: an illustration, not a benchmark."
    ));
}
