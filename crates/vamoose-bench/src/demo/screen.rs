//! Output of the demo, at most 80 columns wide. If standard output is closed, the demo goes on without it.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::thread;

use lab::median;

use super::ROUNDS;
use super::run::Measured;

const COLUMNS: usize = 80;

pub(crate) fn say(text: impl Display) {
    // The print macros would panic if standard output is closed.
    let _ = writeln!(io::stdout(), "{text}");
}

/// Begins a step of the demo.
pub(crate) fn step(number: u32, title: &str) {
    say("");
    wrapped(&format!("{number}. "), "   ", title);
}

/// Prints a remark within a step.
pub(crate) fn note(text: impl Display) {
    for line in text.to_string().lines() {
        wrapped("   ", "     ", line);
    }
}

/// Prints a paragraph outside of steps.
pub(crate) fn wrap(text: impl Display) {
    wrapped("", "", &text.to_string());
}

fn wrapped(first: &str, further: &str, text: &str) {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            say(&line);
            further.clone_into(&mut line);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    say(line);
}

/// The moves of two contenders over one link.
pub(crate) struct Comparison {
    pub(crate) link: &'static str,
    /// Stock QEMU's encoding.
    pub(crate) method: &'static str,
    pub(crate) stock: Vec<Measured>,
    pub(crate) vamoose: Vec<Measured>,
}

impl Comparison {
    /// Vamoose's median time, as a part of stock QEMU's.
    pub(crate) fn of_time(&self) -> f64 {
        middle(&self.vamoose).seconds / middle(&self.stock).seconds
    }

    /// A table, without an indent.
    pub(crate) fn table(&self) -> Vec<String> {
        let [stock, vamoose] = [middle(&self.stock), middle(&self.vamoose)];
        let row = |name: &str, it: Measured| {
            let Measured {
                seconds,
                mebibytes,
                cpu,
                downtime,
            } = it;
            format!("{name:<30}{seconds:>7.2} s{mebibytes:>8.0} MiB{cpu:>9.2} s{downtime:>9.0} ms")
        };
        let part = |of: fn(&Measured) -> f64| of(&vamoose) / of(&stock);
        vec![
            format!(
                "{:<30}{:>9}{:>12}{:>11}{:>12}",
                self.link, "time", "sent", "CPU", "downtime"
            ),
            row(&format!("stock QEMU, TLS, {}", self.method), stock),
            row("Vamoose, TLS", vamoose),
            format!(
                "{:<30}{:>7.2}  {:>8.2}    {:>9.2}  {:>9.2}",
                "ratio, Vamoose to stock",
                part(|it| it.seconds),
                part(|it| it.mebibytes),
                part(|it| it.cpu),
                part(|it| it.downtime),
            ),
        ]
    }
}

/// What the columns of the tables mean.
pub(crate) fn legend(measuring: &str) -> String {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    format!(
        "time: from the command until the guest runs at the destination\n\
         sent: to the destination, {measuring}\n\
         CPU: of all processes at both ends, without the guest's own\n\
         downtime: from the guest's stop to its start, by one clock\n\
         stock QEMU: x509 certificates, zstd level 1 or no compression, whichever was faster; \
         the guest resumes as soon as it has arrived\n\
         Vamoose: its defaults, with keys; it also checks all pages by CRC-32C, survives lost connections, and resumes the guest \
         only when the source has stopped for good\n\
         both: 2 channels, downtime limit 300 ms, destination memory preallocated\n\
         Medians of {ROUNDS} moves, in turn, on {cores} shared cores that carry both hosts, the guest and the link."
    )
}

/// The median of each figure.
fn middle(moves: &[Measured]) -> Measured {
    let of = |figure: fn(&Measured) -> f64| median(moves.iter().map(figure)).unwrap_or(f64::NAN);
    Measured {
        seconds: of(|it| it.seconds),
        mebibytes: of(|it| it.mebibytes),
        cpu: of(|it| it.cpu),
        downtime: of(|it| it.downtime),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_medians_and_shows_where_vamoose_is_behind() {
        let measured = |seconds, downtime| Measured {
            seconds,
            mebibytes: 300.0,
            cpu: 2.0,
            downtime,
        };
        let comparison = Comparison {
            link: "1 Gbit/s",
            method: "zstd",
            stock: vec![
                measured(4.0, 50.0),
                measured(9.0, 40.0),
                measured(3.0, 60.0),
            ],
            vamoose: vec![
                measured(3.0, 200.0),
                measured(1.0, 100.0),
                measured(2.0, 90.0),
            ],
        };
        assert_eq!(
            comparison.table(),
            [
                "1 Gbit/s                           time        sent        CPU    downtime",
                "stock QEMU, TLS, zstd            4.00 s     300 MiB     2.00 s       50 ms",
                "Vamoose, TLS                     2.00 s     300 MiB     2.00 s      100 ms",
                "ratio, Vamoose to stock          0.50      1.00         1.00       2.00",
            ]
        );
        assert!(
            comparison
                .table()
                .iter()
                .all(|line| line.len() + 3 <= COLUMNS)
        );
        assert!((comparison.of_time() - 0.5).abs() < 1e-9);
    }
}
