//! What inspect prints: a line per packet, and sums.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, BufWriter, Write},
};

use anyhow::{Context as _, Result};
use multifd::Layout;

use super::recording::{Content, Packet};

/// Writes lines until the reader has gone.
pub(super) struct Table<W: Write> {
    out: BufWriter<W>,
    unread: bool,
    started: bool,
    channels: BTreeMap<u8, Sums>,
    total: Sums,
}

/// Sums over packets.
#[derive(Clone, Copy, Default)]
struct Sums {
    packets: u64,
    syncs: u64,
    normal: u64,
    zero: u64,
    device_states: u64,
    wire_bytes: u64,
    payload_bytes: u64,
    page_bytes: u64,
}

impl<W: Write> Table<W> {
    pub(super) fn new(out: W) -> Self {
        Self {
            out: BufWriter::new(out),
            unread: false,
            started: false,
            channels: BTreeMap::new(),
            total: Sums::default(),
        }
    }

    /// Whether the reader has gone (`| head`), so that lines go nowhere.
    pub(super) fn is_unread(&self) -> bool {
        self.unread
    }

    /// Prints one packet.
    pub(super) fn row(&mut self, channel: u8, packet: &Packet, layout: Layout) -> Result<()> {
        let channel_sums = self.channels.entry(channel).or_default();
        channel_sums.add(packet, layout);
        self.total.add(packet, layout);
        if !self.started {
            self.started = true;
            self.line(format_args!(
                "{:>7} {:>12} {:>10} {:<6} {:<7} {:>6} {:>6} {:>8} {}",
                "channel",
                "byte",
                "packet",
                "flags",
                "method",
                "normal",
                "zero",
                "payload",
                "block"
            ))?;
        }
        let (at, payload_len) = (packet.at, packet.payload_len);
        let ram = &packet.ram;
        match &packet.content {
            Content::DeviceState(header) => self.line(format_args!(
                "{channel:>7} {at:>12} {:>10} {:<6} {:<7} {:>6} {:>6} {payload_len:>8} {} instance {}",
                "-",
                "DEVICE",
                "-",
                "-",
                "-",
                header.id().escape_ascii(),
                header.instance()
            )),
            Content::Ram | Content::Undecoded => self.line(format_args!(
                "{channel:>7} {at:>12} {:>10} {:<6} {:<7} {:>6} {:>6} {payload_len:>8} {}",
                ram.packet_num,
                if ram.sync { "SYNC" } else { "-" },
                if ram.is_empty() { "-" } else { ram.method.name() },
                ram.normal_offsets().len(),
                ram.zero_offsets().len(),
                if ram.is_empty() {
                    "-".to_owned()
                } else {
                    ram.block.to_string()
                },
            )),
        }
    }

    /// Prints the sums per channel and over all.
    pub(super) fn summary(&mut self) -> Result<()> {
        if self.started {
            self.line(format_args!(""))?;
        }
        self.line(format_args!(
            "{:>7} {:>8} {:>6} {:>10} {:>10} {:>7} {:>14} {:>14} {:>14} {:>6}",
            "channel",
            "packets",
            "syncs",
            "normal",
            "zero",
            "devices",
            "page-bytes",
            "payload-bytes",
            "wire-bytes",
            "ratio"
        ))?;
        for (channel, sums) in self.channels.clone() {
            self.sums(channel, sums)?;
        }
        self.sums("total", self.total)?;
        self.flush()
    }

    /// Hands everything to the reader.
    pub(super) fn flush(&mut self) -> Result<()> {
        let result = self.out.flush();
        self.note(result)
    }

    fn sums(&mut self, name: impl fmt::Display, sums: Sums) -> Result<()> {
        let ratio = if sums.payload_bytes == 0 {
            "-".to_owned()
        } else {
            format!("{:.2}", sums.page_bytes as f64 / sums.payload_bytes as f64)
        };
        self.line(format_args!(
            "{name:>7} {:>8} {:>6} {:>10} {:>10} {:>7} {:>14} {:>14} {:>14} {ratio:>6}",
            sums.packets,
            sums.syncs,
            sums.normal,
            sums.zero,
            sums.device_states,
            sums.page_bytes,
            sums.payload_bytes,
            sums.wire_bytes,
        ))
    }

    fn line(&mut self, line: fmt::Arguments<'_>) -> Result<()> {
        if self.unread {
            return Ok(());
        }
        let result = self
            .out
            .write_fmt(line)
            .and_then(|()| self.out.write_all(b"\n"));
        self.note(result)
    }

    fn note(&mut self, result: io::Result<()>) -> Result<()> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.unread = true;
                Ok(())
            }
            result => result.context("cannot write to standard output"),
        }
    }
}

impl Sums {
    fn add(&mut self, packet: &Packet, layout: Layout) {
        self.packets += 1;
        self.wire_bytes += packet.wire_len as u64;
        if matches!(packet.content, Content::DeviceState(_)) {
            self.device_states += 1;
            return;
        }
        let normal = packet.ram.normal_offsets().len();
        self.syncs += u64::from(packet.ram.sync);
        self.normal += normal as u64;
        self.zero += packet.ram.zero_offsets().len() as u64;
        self.payload_bytes += packet.payload_len as u64;
        self.page_bytes += (normal * layout.page_size()) as u64;
    }
}
