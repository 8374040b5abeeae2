//! `vamoose inspect`: the packets of recorded channel streams.
//!
//! The streams of one migration are read together, round by round: a SYNC is a barrier, so everything up to a stream's n-th SYNC
//! comes before anything behind the n-th SYNC of any other. Within a round no page appears twice, so the order of the streams
//! does not matter there.

mod ram;
mod recording;

use std::{
    io::{self, BufWriter, Write},
    path::PathBuf,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use multifd::{Initial, Layout, PacketKind};
use tracing::warn;

use self::{ram::RamFile, recording::Recording};
use vamoose::options::Size;
use vamoose_link::Packet;

/// Print the packets of recorded channel streams, and optionally apply them to a RAM file
///
/// A stream is everything that one multifd channel carried, from its first 64 bytes on, plain or compressed with zstd. Name
/// all channels of a migration at once: they are read together, from SYNC to SYNC. Main streams among them are skipped.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Write the guest's resulting memory to this new file
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
    let mut recordings = Vec::new();
    for path in &options.streams {
        match Recording::open(path, layout)? {
            Some(recording) => recordings.push(recording),
            None => warn!(
                "{}: skipped: this is a main stream (QEVM), not a channel",
                path.display()
            ),
        }
    }
    ensure!(
        !recordings.is_empty(),
        "no channel streams: only main streams were given"
    );
    recordings.sort_by_key(|recording| recording.initial.channel());
    let mut out = BufWriter::new(io::stdout().lock());
    match (&options.ram, options.size) {
        (Some(path), Some(size)) => {
            check_channels(&recordings)?;
            let mut ram = RamFile::create(path, size, options.block.as_deref())?;
            read(&mut recordings, layout, &mut out, Some(&mut ram))
                .and_then(|()| ram.finish())
                .with_context(|| format!("{} is INCOMPLETE", path.display()))?;
        }
        _ => read(&mut recordings, layout, &mut out, None)?,
    }
    match out.flush() {
        // `| head` has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        flushed => flushed.context("cannot write to standard output"),
    }
}

/// Without one of the channels, memory would be missing from the RAM file.
fn check_channels(recordings: &[Recording]) -> Result<()> {
    let initials = recordings.iter().map(|recording| &recording.initial);
    let announced = initials.clone().filter_map(Initial::announced_channels);
    let count = announced.max().map_or(0, usize::from).max(recordings.len());
    let channels: Vec<_> = initials.map(|it| usize::from(it.channel())).collect();
    ensure!(
        channels.iter().copied().eq(0..count),
        "--ram needs each channel of one migration once: the streams are those of channels {channels:?}"
    );
    Ok(())
}

const HEAD: &str = "channel         byte     packet flags  method  normal   zero  payload block";

/// Prints and applies every packet, round by round, then prints the sums.
fn read(
    recordings: &mut [Recording],
    layout: Layout,
    out: &mut impl Write,
    mut ram: Option<&mut RamFile>,
) -> Result<()> {
    let mut packet = Packet::new(layout);
    // Whether to go on: a failure to print must not leave the RAM file incomplete. The caller reports it, by `flush`.
    let needs_all = ram.is_some();
    let mut print = |line: String| writeln!(out, "{line}").is_ok() || needs_all;
    if !print(HEAD.to_owned()) {
        return Ok(());
    }
    let (mut packets, mut normal, mut zero, mut payload) = (0_u64, 0, 0, 0);
    while !recordings.iter().all(|recording| recording.ended) {
        for recording in &mut *recordings {
            while recording.next(&mut packet)? {
                if !print(line(recording, &packet)) {
                    return Ok(());
                }
                packets += 1;
                normal += packet.ram().normal_offsets().len();
                zero += packet.ram().zero_offsets().len();
                payload += packet.ram().payload_len();
                if let Some(ram) = ram.as_deref_mut() {
                    let applied = ram.apply(&packet, layout);
                    applied.with_context(|| recording.place())?;
                }
                recording.advance(&packet);
                if packet.ram().sync {
                    break;
                }
            }
        }
    }
    let syncs: Vec<_> = recordings.iter().map(|recording| recording.syncs).collect();
    let _ = print(format!(
        "packets {packets}, SYNCs {}, normal pages {normal} ({} bytes sent as {payload}), zero pages {zero}",
        syncs.iter().sum::<u64>(),
        normal * layout.page_size(),
    ));
    ensure!(
        syncs.iter().all(|count| *count == syncs[0]),
        "the streams have {syncs:?} SYNCs: one is truncated, or they belong to two migrations"
    );
    Ok(())
}

fn line(recording: &Recording, packet: &Packet) -> String {
    let (channel, at, ram) = (recording.initial.channel(), recording.at, packet.ram());
    let is_device_state = packet.kind() == PacketKind::DeviceState;
    let flags = match ram.sync {
        _ if is_device_state => "DEVICE",
        true => "SYNC",
        false => "-",
    };
    let payload = match is_device_state {
        true => packet.state().len(),
        false => ram.payload_len(),
    };
    let (method, block) = match ram.is_empty() {
        true => ("-", "-".to_owned()),
        false => (ram.method.name(), ram.block.to_string()),
    };
    let (normal, zero) = (ram.normal_offsets().len(), ram.zero_offsets().len());
    let number = ram.packet_num;
    format!(
        "{channel:>7} {at:>12} {number:>10} {flags:<6} {method:<7} {normal:>6} {zero:>6} {payload:>8} {block}"
    )
}
