//! The work of the data channels' threads.
//!
//! ```text
//!  as many out as in:   [ read, decode, encode, write ]                    one thread per channel
//!  otherwise:           [ read, decode ] ─> exchange ─> [ encode, write ]  one thread per channel and side
//!  several encoders:    [ read, decode ] ─> exchange ─> [ encode, write ]  one thread per encoder
//!  QEMU decodes:        [ read, write ]                                    one thread per channel
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

/// Forwards the packets of one channel to another one, in order, until the source ends the channel. A packet is
/// - forwarded as it is, if the destination QEMU decodes the packets itself. QEMU's decoder has a state, so it has to decode all
///   packets from the first to the last;
/// - decoded and encoded otherwise.
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
        let (sync, method) = (sync_of(&packet), packet.ram().method);
        match config.decoded_by_qemu.filter(|_| !packet.ram().is_empty()) {
            Some(announced) if announced != method => {
                return Err(RelayError::OtherMethod(channel, method, announced));
            }
            Some(_) => {
                reader.read_encoded(&mut packet).map_err(read)?;
                writer.write_encoded(&mut packet).map_err(write)?;
            }
            None => {
                reader.read_rest(&mut packet).map_err(read)?;
                apply(config.zero_pages, &mut packet);
                if !packet.ram().is_empty() {
                    writer.write(&mut packet).map_err(write)?;
                }
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

/// Sends packets from the exchange on one channel, until all readers have ended. Other writers may share the channel.
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
                let mut sent = Ok(());
                let synced = end.sync(|| {
                    sent = send_sync(writer, packet_num, out);
                    if sent.is_ok() { Ok(()) } else { Err(Closed) }
                });
                sent.map_err(failed)?;
                if synced == Err(Closed) {
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

    use multifd::{BlockName, Method, RamHeader};
    use vamoose_codec::{Decoder, Engines, Settings};

    use super::*;

    /// A packet with a page whose payload is no encoding of anything.
    fn packet(method: Method, config: &Config) -> Vec<u8> {
        let layout = config.layout;
        let mut header = RamHeader::new(layout);
        header.method = method;
        header.block = BlockName::new(b"mem").unwrap();
        header.set_pages(&[0x1000], &[0x3000], layout).unwrap();
        header.set_payload_len(5, layout).unwrap();
        let mut bytes = Vec::new();
        header.write(layout, &mut bytes);
        bytes.extend(b"bytes");
        bytes
    }

    /// QEMU is set up for one method, and decodes whatever it gets by that.
    #[test]
    fn packets_of_announced_method_are_forwarded_unchanged() {
        let (mut source, incoming) = UnixStream::pair().unwrap();
        let (outgoing, mut qemu) = UnixStream::pair().unwrap();
        let mut config = Config::new(Engines::software(Settings::default()));
        config.decoded_by_qemu = Some(Method::Zstd);
        let stats = Arc::<Stats>::default();
        let (layout, decoder) = (config.layout, Decoder::new(config.layout));
        let encoder = config.method.encoder(layout, stats.health()).unwrap();
        let (incoming, outgoing) = (Arc::new(incoming.into()), Arc::new(outgoing.into()));
        let mut reader = ChannelReader::new(incoming, layout, decoder, stats.clone());
        let mut writer = ChannelWriter::new(outgoing, layout, encoder, None, stats.clone());
        let good = packet(Method::Zstd, &config);
        let bad = packet(Method::Zlib, &config);
        source.write_all(&[&good[..], &bad].concat()).unwrap();
        let out = OutgoingChannel {
            channel: 0,
            stats: &stats,
            syncs: &Syncs::new(1),
        };
        let passed = pass_on(&mut reader, &mut writer, &config, out);
        let is_refused = matches!(
            passed,
            Err(RelayError::OtherMethod(0, Method::Zlib, Method::Zstd))
        );
        assert!(is_refused, "{passed:?}");
        drop(writer);
        let mut sent = Vec::new();
        qemu.read_to_end(&mut sent).unwrap();
        assert_eq!(sent, good);
    }
}
