//! The work of the data channels' threads.
//!
//! ```text
//!  as many out as in:   [ read, decode, encode, write ]                    one thread per channel
//!  otherwise:           [ read, decode ] ─> exchange ─> [ encode, write ]  one thread per channel and side
//!  zstd frames for a QEMU that decodes them:  [ read, write ]              one thread per channel
//! ```
//!
//! One thread for both sides is cheaper: it sends a packet while that is in the cache, no other thread has to wake up, and half as
//! many packets wait in the relay. No barrier is needed: packets after a SYNC stay after it on their channel, and
//! the destination waits for the SYNCs of all channels, as it does without a relay.

use multifd::PacketKind;
use vamoose_link::{ChannelReader, ChannelWriter, Packet, Received, Stats, WriteError};

use crate::{
    Config, RelayError, ZeroPages,
    exchange::{Closed, ReaderEnd, Work, WriterEnd},
    syncs::Syncs,
};

/// A channel to the destination, and its counters.
#[derive(Clone, Copy)]
pub(crate) struct OutgoingChannel<'a> {
    pub(crate) channel: usize,
    pub(crate) stats: &'a Stats,
    pub(crate) syncs: &'a Syncs,
}

/// Forwards the packets of one channel to another one, in order, until the source ends the channel. A packet is forwarded as it is, if
/// it is a zstd frame that the destination QEMU decodes and checks, and is decoded and encoded otherwise.
pub(crate) fn pass_on(
    reader: &mut ChannelReader,
    writer: &mut ChannelWriter,
    config: &Config,
    out: OutgoingChannel<'_>,
) -> Result<(), RelayError> {
    let mut packet = Packet::new(config.layout);
    let channel = out.channel;
    let read = |error| RelayError::SourceChannel(channel, error);
    let write = |error| RelayError::DestinationChannel(channel, error);
    while reader.read_start(&mut packet).map_err(read)? == Received::Packet {
        if packet.kind() == PacketKind::DeviceState {
            writer.write(&mut packet).map_err(write)?;
            continue;
        }
        // Before zero pages are detected or expanded, which leaves the SYNC.
        let sync = sync_of(&packet);
        let takes_frame = writer.takes_frame(packet.ram_mut()).map_err(write)?;
        if takes_frame && config.zero_pages == ZeroPages::Pass {
            if reader.read_frame(&mut packet).map_err(read)? {
                writer.write_frame(&mut packet).map_err(write)?;
            } else if !packet.ram().is_empty() {
                writer.write(&mut packet).map_err(write)?;
            }
        } else {
            reader.read_rest(&mut packet).map_err(read)?;
            apply(config.zero_pages, &mut packet);
            if !packet.ram().is_empty() {
                writer.write(&mut packet).map_err(write)?;
            }
        }
        if let Some(packet_num) = sync {
            send_sync(writer, packet_num, out).map_err(write)?;
        }
    }
    Ok(())
}

/// Takes the packets of one channel to the exchange, until the source ends the channel or all writers have ended.
pub(crate) fn read(
    channel: usize,
    reader: &mut ChannelReader,
    end: &ReaderEnd,
    zero_pages: ZeroPages,
) -> Result<(), RelayError> {
    let failed = |error| RelayError::SourceChannel(channel, error);
    let mut free = None;
    loop {
        // A packet without content is not submitted, and read into again.
        let Ok(mut packet) = free.take().map_or_else(|| end.take(), Ok) else {
            return Ok(());
        };
        if reader.read(&mut packet).map_err(failed)? == Received::End {
            return Ok(());
        }
        let sync = sync_of(&packet);
        let is_ram = packet.kind() == PacketKind::Ram;
        if is_ram {
            apply(zero_pages, &mut packet);
        }
        let submitted = if is_ram && packet.ram().is_empty() {
            free = Some(packet);
            Ok(())
        } else {
            end.submit(packet)
        };
        // Pages inside a SYNC come before the barrier.
        let synced = submitted.and_then(|()| match sync {
            Some(packet_num) => end.sync(packet_num),
            None => Ok(()),
        });
        if synced == Err(Closed) {
            return Ok(());
        }
    }
}

/// Sends packets from the exchange on one channel, until all readers have ended.
pub(crate) fn write(
    writer: &mut ChannelWriter,
    end: &WriterEnd,
    out: OutgoingChannel<'_>,
) -> Result<(), RelayError> {
    let channel = out.channel;
    let failed = |error| RelayError::DestinationChannel(channel, error);
    while let Ok(work) = end.next() {
        match work {
            Work::Packet(mut packet) => {
                writer.write(&mut packet).map_err(failed)?;
                end.give_back(packet);
            }
            Work::Sync { packet_num } => {
                send_sync(writer, packet_num, out).map_err(failed)?;
                if end.sync() == Err(Closed) {
                    break;
                }
            }
        }
    }
    Ok(())
}

fn apply(zero_pages: ZeroPages, packet: &mut Packet) {
    match zero_pages {
        ZeroPages::Pass => {}
        ZeroPages::Expand => packet.expand_zero_pages(),
        ZeroPages::Detect => packet.detect_zero_pages(),
    }
}

/// The number of a packet that is a SYNC, with or without pages.
fn sync_of(packet: &Packet) -> Option<u64> {
    let is_sync = packet.kind() == PacketKind::Ram && packet.ram().sync;
    is_sync.then(|| packet.ram().packet_num)
}

fn send_sync(
    writer: &mut ChannelWriter,
    packet_num: u64,
    out: OutgoingChannel<'_>,
) -> Result<(), WriteError> {
    writer.write_sync(packet_num)?;
    out.syncs.sent(out.channel);
    // Each SYNC is sent on all channels, and counted once.
    if out.channel == 0 {
        out.stats.add_sync();
        writer.end_round();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixStream,
        sync::Arc,
    };

    use multifd::{BlockName, Layout, Method, RamHeader};
    use vamoose_codec::{Decoder, Encoder, Engines, Settings, encoder, raw_frame};

    use super::*;

    const LAYOUT: Layout = Layout::X86;

    fn packet(method: Method, payload: &[u8]) -> Vec<u8> {
        let mut header = RamHeader::new(LAYOUT);
        header.method = method;
        header.block = BlockName::new(b"mem").unwrap();
        header.set_pages(&[0x1000], &[0x3000], LAYOUT).unwrap();
        header.set_payload_len(payload.len(), LAYOUT).unwrap();
        let mut bytes = Vec::new();
        header.write(LAYOUT, &mut bytes);
        bytes.extend(payload);
        bytes
    }

    fn encoder_of(method: Method) -> Encoder {
        encoder(&Settings::new(method, None).unwrap(), LAYOUT).unwrap()
    }

    fn encoded(encoder: &mut Encoder, page: &[u8]) -> Vec<u8> {
        let mut out = vec![0; LAYOUT.max_payload()];
        encoder.encode(page, &mut out).unwrap().payload.to_vec()
    }

    /// QEMU is set up for method zstd. It gets a frame as it came if it compares the checksum, and all other pages raw.
    #[test]
    fn frames_with_checksums_are_forwarded_unchanged() {
        let (mut source, incoming) = UnixStream::pair().unwrap();
        let (outgoing, mut qemu) = UnixStream::pair().unwrap();
        let config = Config::new(Engines::software(Settings::default()));
        let stats = Arc::<Stats>::default();
        let none = config.method.encoder(LAYOUT, stats.health()).unwrap();
        let (incoming, outgoing) = (Arc::new(incoming.into()), Arc::new(outgoing.into()));
        let decoder = Decoder::new(LAYOUT);
        let mut reader = ChannelReader::new(incoming, LAYOUT, decoder, stats.clone());
        let mut writer = ChannelWriter::new(outgoing, LAYOUT, none, None, stats.clone());
        assert!(writer.send_frames());
        let page = [7; 4096];
        let mut checked = encoder_of(Method::ZstdFrames);
        checked.add_checksums().unwrap();
        let checked = encoded(&mut checked, &page);
        let raw = [&raw_frame(4096).unwrap()[..], &page].concat();
        let (mut sent, mut expected) = (Vec::new(), Vec::new());
        for method in [Method::ZstdFrames, Method::Lz4, Method::Zstd, Method::None] {
            let payload = encoded(&mut encoder_of(method), &page);
            sent.extend(packet(Method::ZstdFrames, &checked));
            expected.extend(packet(Method::Zstd, &checked));
            sent.extend(packet(method, &payload));
            expected.extend(packet(Method::Zstd, &raw));
        }
        source.write_all(&sent).unwrap();
        source.shutdown(std::net::Shutdown::Write).unwrap();
        let out = OutgoingChannel {
            channel: 0,
            stats: &stats,
            syncs: &Syncs::new(1),
        };
        pass_on(&mut reader, &mut writer, &config, out).unwrap();
        drop(writer);
        let mut got = Vec::new();
        qemu.read_to_end(&mut got).unwrap();
        assert!(got == expected);
    }
}
