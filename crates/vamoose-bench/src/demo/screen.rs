//! Output of the demo, at most 80 columns wide. If standard output is closed, the demo goes on without it.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::thread;

use lab::median;

use super::run::Measured;
use super::{ROUNDS, Variant};

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

/// The medians of all contenders over one link.
pub(crate) struct Comparison {
    link: &'static str,
    /// Vamoose is the last.
    rows: [(Variant, Measured); 3],
}

impl Comparison {
    pub(crate) fn of(link: &'static str, moves: &[(Variant, Vec<Measured>); 3]) -> Self {
        let rows = moves
            .each_ref()
            .map(|(variant, moves)| (*variant, middle(moves)));
        Self { link, rows }
    }

    /// A table, without an indent.
    pub(crate) fn table(&self) -> Vec<String> {
        let [(_, none), (_, zstd), (_, vamoose)] = &self.rows;
        let stock = if zstd.seconds < none.seconds {
            zstd
        } else {
            none
        };
        let row = |(variant, it): &(Variant, Measured)| format!("{:<30}{it}", variant.to_string());
        let ratio = |of: fn(&Measured) -> f64| of(vamoose) / of(stock);
        let mut lines = vec![format!(
            "{:<30}{:>9}{:>12}{:>11}{:>12}",
            self.link, "time", "sent", "CPU", "downtime"
        )];
        lines.extend(self.rows.iter().map(row));
        lines.push(format!(
            "{:<30}{:>7.2}{:>10.2}{:>13.2}{:>11.2}",
            "Vamoose to the faster of stock",
            ratio(|it| it.seconds),
            ratio(|it| it.mebibytes),
            ratio(|it| it.cpu),
            ratio(|it| it.downtime),
        ));
        lines
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
         stock QEMU: x509 certificates, no compression or zstd level 1; the guest resumes as soon as it has arrived\n\
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
        let moves = [
            (Variant::Stock("none"), vec![measured(9.0, 10.0)]),
            (
                Variant::Stock("zstd"),
                vec![
                    measured(4.0, 50.0),
                    measured(9.0, 40.0),
                    measured(3.0, 60.0),
                ],
            ),
            (
                Variant::Vamoose,
                vec![
                    measured(3.0, 200.0),
                    measured(1.0, 100.0),
                    measured(2.0, 90.0),
                ],
            ),
        ];
        let table = Comparison::of("1 Gbit/s", &moves).table();
        assert_eq!(
            table,
            [
                "1 Gbit/s                           time        sent        CPU    downtime",
                "stock QEMU, TLS, none            9.00 s     300 MiB     2.00 s       10 ms",
                "stock QEMU, TLS, zstd            4.00 s     300 MiB     2.00 s       50 ms",
                "Vamoose, TLS                     2.00 s     300 MiB     2.00 s      100 ms",
                "Vamoose to the faster of stock   0.50      1.00         1.00       2.00",
            ]
        );
        assert!(table.iter().all(|line| line.len() + 3 <= COLUMNS));
    }
}
