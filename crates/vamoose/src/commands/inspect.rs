//! `vamoose inspect`: the packets of recorded channel streams.
//!
//! ```text
//! file ─> Recording (plain or zstd) ─> Packet ─┬─> Table: a line each, a summary at the end
//!         header check, decode                 └─> Target: the RAM file
//! ```
//!
//! The streams of one migration are walked together, round by round: a SYNC is a barrier, so
//! everything up to a stream's n-th SYNC comes before anything behind the n-th SYNC of any other.
//! Within a round no page appears twice, so the order of the streams does not matter there.

mod ram;
mod recording;
mod table;
mod unzstd;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use multifd::Layout;
use tracing::warn;

use self::{
    ram::Target,
    recording::{Opened, Packet, Recording},
    table::Table,
};
use vamoose::options::Size;

/// Print the packets of recorded channel streams, and optionally apply them to a RAM file
///
/// A stream is everything that one multifd channel carried, from its first 64 bytes on, plain or compressed with zstd. Name
/// all channels of a migration at once: they are read together, from SYNC to SYNC.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Write the guest's resulting memory to this file; overwrites it
    #[arg(long, value_name = "FILE", requires = "size")]
    ram: Option<PathBuf>,
    /// Size of the RAM block
    #[arg(long, value_name = "SIZE", requires = "ram")]
    size: Option<Size>,
    /// RAM block to write, if the streams contain pages of several
    #[arg(long, value_name = "NAME", requires = "ram")]
    block: Option<String>,
    /// Page size of the guest
    #[arg(long, default_value = "4k", value_name = "SIZE")]
    page_size: Size,
    /// Recorded channel streams
    #[arg(required = true, value_name = "STREAM")]
    streams: Vec<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let page_size = u32::try_from(options.page_size.0).unwrap_or(u32::MAX);
    let layout = Layout::new(page_size).context("--page-size")?;
    let mut recordings = open(&options.streams, layout)?;
    let mut target = match (&options.ram, options.size) {
        (Some(path), Some(size)) => {
            refuse_gaps(&recordings)?;
            refuse_overwriting(path, &options.streams)?;
            Some(Target::create(path, size, options.block.as_deref())?)
        }
        _ => None,
    };
    let mut table = Table::new(std::io::stdout().lock());
    let walked = walk(&mut recordings, layout, &mut table, target.as_mut());
    let summed_up = match walked {
        Ok(()) => table.summary(),
        // What was printed belongs before the error, and on broken streams sums mean nothing.
        Err(_) => table.flush(),
    };
    let finished = walked.and_then(|()| match &target {
        Some(target) => target.finish(),
        None => Ok(()),
    });
    finished.map_err(|error| match &target {
        Some(target) => target.blame(&error),
        None => error,
    })?;
    summed_up
}

/// Opens the channels among `paths`, in the order of their ids.
fn open(paths: &[PathBuf], layout: Layout) -> Result<Vec<Recording>> {
    let mut recordings: Vec<Recording> = Vec::new();
    for path in paths {
        match Recording::open(path, layout)? {
            Opened::Main => warn!(
                "{}: skipped: this is a main stream (QEVM), not a channel",
                path.display()
            ),
            Opened::Channel(recording) => recordings.push(*recording),
        }
    }
    if recordings.is_empty() {
        bail!("no channel streams: only main streams were given");
    }
    recordings.sort_by_key(Recording::channel);
    for pair in recordings.windows(2) {
        if pair[0].channel() == pair[1].channel() {
            bail!(
                "{} and {} are both channel {}: name each channel of one migration once",
                pair[0].name(),
                pair[1].name(),
                pair[0].channel()
            );
        }
    }
    Ok(recordings)
}

/// A channel left out is memory left out, so a RAM file needs them all, as far as that can be determined.
fn refuse_gaps(recordings: &[Recording]) -> Result<()> {
    let highest = recordings.last().map_or(0, |last| last.channel());
    let announced = recordings
        .iter()
        .filter_map(Recording::announced_channels)
        .max();
    let last = announced.map_or(highest, |channels| highest.max(channels.saturating_sub(1)));
    let missing = (0..=last).find(|id| recordings.iter().all(|r| r.channel() != *id));
    if let Some(missing) = missing {
        bail!("channel {missing} is missing: --ram needs all channels of the migration");
    }
    Ok(())
}

fn refuse_overwriting(ram: &Path, streams: &[PathBuf]) -> Result<()> {
    // A file that does not exist yet is none of the streams.
    let Ok(target) = ram.canonicalize() else {
        return Ok(());
    };
    for stream in streams {
        if stream.canonicalize().is_ok_and(|path| path == target) {
            bail!(
                "--ram {} is one of the streams, which would be overwritten",
                ram.display()
            );
        }
    }
    Ok(())
}

/// Prints and applies every packet, round by round.
fn walk(
    recordings: &mut [Recording],
    layout: Layout,
    table: &mut Table<impl std::io::Write>,
    mut target: Option<&mut Target>,
) -> Result<()> {
    let mut packet = Packet::new(layout);
    while recordings.iter().any(|recording| !recording.at_end()) {
        for recording in &mut *recordings {
            while recording.next(&mut packet)? {
                table.row(recording.channel(), &packet, layout)?;
                if table.is_unread() && target.is_none() {
                    return Ok(());
                }
                if let Some(target) = target.as_deref_mut() {
                    target
                        .apply(&packet, layout)
                        .with_context(|| recording.place(packet.at))?;
                }
                if packet.is_sync() {
                    break;
                }
            }
        }
        if let Some(target) = target.as_deref_mut() {
            target.barrier(recordings.iter().map(Recording::syncs).min().unwrap_or(0));
        }
    }
    same_syncs(recordings)
}

/// A migration puts every SYNC on every channel, so a stream with fewer was cut off.
fn same_syncs(recordings: &[Recording]) -> Result<()> {
    let most = recordings.iter().max_by_key(|recording| recording.syncs());
    let fewest = recordings.iter().min_by_key(|recording| recording.syncs());
    if let (Some(most), Some(fewest)) = (most, fewest)
        && most.syncs() != fewest.syncs()
    {
        bail!(
            "{} after {} SYNCs, but {} has {}: the first is truncated, or they belong to two migrations",
            fewest.place_of_end(),
            fewest.syncs(),
            most.name(),
            most.syncs()
        );
    }
    Ok(())
}
