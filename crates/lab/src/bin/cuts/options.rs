//! The command line, and what follows from it.

use std::{num::NonZeroUsize, path::PathBuf};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use lab::{
    cuts::{Kind, Phase, Row, Table},
    qemu::{Binary, Version},
};

/// Cut the link while guests move, and write down how each migration ended
#[derive(Parser, Debug)]
#[command(name = "cuts", max_term_width = 100)]
pub(crate) struct Options {
    /// Which rows
    #[arg(long, value_enum, default_value = "quick")]
    table: TableName,
    /// Use only rows whose name contains this, such as `switchover` or `for 25 s` (repeatable: any of them)
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Use every Nth of these rows
    #[arg(long, value_name = "N", default_value = "1")]
    every: NonZeroUsize,
    /// Where methods, versions and securities begin to be dealt out to the rows
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: usize,
    /// Methods, each row has the next one
    #[arg(
        long,
        value_name = "M",
        value_delimiter = ',',
        default_value = "none,zstd,lz4,zlib,auto"
    )]
    method: Vec<String>,
    /// Versions of QEMU, such as 7.2,10.0, each row has the next two [default: all that are available]
    #[arg(long, value_name = "V", value_delimiter = ',')]
    versions: Vec<String>,
    /// How hosts authenticate each other, each row has the next one
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "insecure,keys"
    )]
    security: Vec<Security>,
    /// What is cut: connections in a middlebox, or wires between network namespaces (as root)
    #[arg(long, value_enum, default_value = "middlebox")]
    network: NetworkName,
    /// Packets encoded in parallel per channel
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) streams: NonZeroUsize,
    /// Number of data channels
    #[arg(long, value_name = "N", default_value = "4")]
    pub(crate) channels: NonZeroUsize,
    /// Number of experiments at once
    #[arg(long, value_name = "N", default_value = "2")]
    jobs: NonZeroUsize,
    /// Write the table there too
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Program to test [default: the one beside this program]
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) vamoose: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TableName {
    Quick,
    Full,
}

/// How hosts authenticate each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Security {
    Insecure,
    Keys,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NetworkName {
    Middlebox,
    Wires,
}

/// One experiment.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) number: usize,
    pub(crate) row: Row,
    pub(crate) network: NetworkName,
    pub(crate) setting: Setting,
}

/// What migrations without cuts are compared by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Setting {
    pub(crate) method: String,
    /// Of all QEMUs, the source's and the destination's.
    pub(crate) qemus: [usize; 2],
    pub(crate) versions: [Version; 2],
    pub(crate) security: Security,
}

impl Setting {
    /// Whether the guest runs.
    pub(crate) fn runs(&self) -> bool {
        !self.versions[0].loses_writes()
    }
}

impl Options {
    /// The experiments with these QEMUs.
    pub(crate) fn plans(&self, binaries: &[Binary]) -> Result<Vec<Plan>> {
        let named = |binary: &Binary| {
            let version = binary.version.to_string();
            let is_it = |wanted: &String| version.starts_with(&format!("{wanted}."));
            self.versions.is_empty() || self.versions.iter().any(is_it)
        };
        let qemus: Vec<_> = (0..binaries.len())
            .filter(|at| named(&binaries[*at]))
            .collect();
        let one_of = |count: usize, number: usize| (self.seed + number) % count.max(1);
        let rows = self.rows().enumerate();
        rows.map(|(number, row)| {
            // These phases are those of a running guest.
            let of_running = matches!(row.phase, Phase::LaterRound | Phase::Switchover);
            let suits = |at: &&usize| !of_running || !binaries[**at].version.loses_writes();
            let sources: Vec<_> = qemus.iter().filter(suits).collect();
            // Rows take turns with one path and both: each of them gets everything.
            let source = sources.get(one_of(sources.len(), number + number / 4));
            let source = **source.context("no such QEMU: run scripts/setup qemu")?;
            // And each source every destination.
            let destination = qemus[one_of(qemus.len(), number + number / 2)];
            Ok(Plan {
                number,
                row,
                network: self.network,
                setting: Setting {
                    method: self.method[one_of(self.method.len(), number)].clone(),
                    qemus: [source, destination],
                    versions: [source, destination].map(|qemu| binaries[qemu].version),
                    security: self.security[one_of(self.security.len(), number + number / 2)],
                },
            })
        })
        .collect()
    }

    fn rows(&self) -> impl Iterator<Item = Row> {
        let table = match self.table {
            TableName::Quick => Table::Quick,
            TableName::Full => Table::Full,
        };
        let fits = |row: &Row| {
            let name = row.to_string();
            let is_wanted = |text: &String| name.contains(text);
            self.only.is_empty() || self.only.iter().any(is_wanted)
        };
        let can_be = |row: &Row| match row.kind {
            Kind::Pulled(_) => self.network == NetworkName::Wires,
            Kind::Silent(_) | Kind::HalfOpen(..) => true,
            _ => self.network == NetworkName::Middlebox,
        };
        let rows = table.rows().filter(move |row| fits(row) && can_be(row));
        rows.step_by(self.every.get())
    }

    pub(crate) fn jobs(&self) -> usize {
        self.jobs.get()
    }
}
