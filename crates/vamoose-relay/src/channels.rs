//! The work of the data channels' threads.
//!
//! ```text
//!  as many out as in:   [ read, decode, encode, write ]                  one thread a channel
//!  otherwise:           [ read, decode ] ─> exchange ─> [ encode, write ]  one thread a channel and side
//!  several streams:     [ read, decode ] ─> exchange ─> [ encode, write ]  one thread a stream on the way out
//!  QEMU decodes:        [ read, write ]                                  one thread a channel
//!  placement:           [ read, decode into QEMU's memory; SYNCs and the rest: write ]  one thread a channel
//! ```
//!
//! One thread for both sides is cheaper: a packet leaves from the cache, no thread is woken for it, and half as
//! many packets wait in the relay. No barrier is needed: packets behind a SYNC stay behind it on their channel, and
//! the destination waits for the SYNCs of all channels, as it does without a relay.

use multifd::{Method, PacketKind};
use vamoose_link::{ChannelReader, ChannelWriter, Packet, ReadError, Received, Stats, WriteError};

use crate::{
    Config, RelayError, ZeroPages,
    exchange::{Closed, ReaderEnd, Work, WriterEnd},
    placement::{PlaceError, Placement},
    syncs::Syncs,
};

/// A channel to the destination, and its counters.
#[derive(Clone, Copy)]
pub(crate) struct Out<'a> {
    pub(crate) channel: usize,
    pub(crate) stats: &'a Stats,
    pub(crate) syncs: &'a Syncs,
}

/// Takes one channel's packets to another one, in their order, until the source ends the channel.
pub(crate) fn pass_on(
    reader: &mut ChannelReader,
    writer: &mut ChannelWriter,
    config: &Config,
    out: Out<'_>,
) -> Result<(), RelayError> {
    let mut packet = Packet::new(config.layout);
    let channel = out.channel;
    let read = |error| RelayError::SourceChannel(channel, error);
    let write = |error| RelayError::DestinationChannel(channel, error);
    while let Some(arrived) = receive(reader, &mut packet, config.zero_pages).map_err(read)? {
        if arrived.has_content {
            writer.write(&mut packet).map_err(write)?;
        }
        if let Some(packet_num) = arrived.sync {
            send_sync(writer, packet_num, out).map_err(write)?;
        }
    }
    Ok(())
}

/// Like [`pass_on`], for packets that are all encoded by `method`, to a QEMU that decodes them: payloads are passed on
/// unread. QEMU's decoder has a state, so it has to decode all packets from the first to the last.
pub(crate) fn pass_encoded(
    reader: &mut ChannelReader,
    writer: &mut ChannelWriter,
    method: Method,
    config: &Config,
    out: Out<'_>,
) -> Result<(), RelayError> {
    let mut packet = Packet::new(config.layout);
    let channel = out.channel;
    let read = |error| RelayError::SourceChannel(channel, error);
    let write = |error| RelayError::DestinationChannel(channel, error);
    while reader.read_start(&mut packet).map_err(read)? == Received::Packet {
        let arrived = arrived(&mut packet, ZeroPages::Pass);
        if packet.kind() == PacketKind::DeviceState {
            writer.write(&mut packet).map_err(write)?;
        } else if arrived.has_content {
            let sent = packet.ram().method;
            if sent != method {
                return Err(RelayError::OtherMethod(channel, sent, method));
            }
            reader.read_encoded(&mut packet).map_err(read)?;
            writer.write_encoded(&mut packet).map_err(write)?;
        }
        if let Some(packet_num) = arrived.sync {
            send_sync(writer, packet_num, out).map_err(write)?;
        }
    }
    Ok(())
}

/// Passes one channel's packets on in order, and writes pages that can be placed into the destination's memory, until the
/// source ends the channel. Module `placement` has the rules.
pub(crate) fn place(
    reader: &mut ChannelReader,
    writer: &mut ChannelWriter,
    placement: &Placement,
    config: &Config,
    out: Out<'_>,
) -> Result<(), RelayError> {
    let mut packet = Packet::new(config.layout);
    let channel = out.channel;
    let read = |error| RelayError::SourceChannel(channel, error);
    let write = |error| RelayError::DestinationChannel(channel, error);
    let place = |error| RelayError::Placement(channel, error);
    let mut syncs = 0;
    // The last SYNC, until it is known that QEMU has gone on from there.
    let mut behind = None;
    while reader.read_start(&mut packet).map_err(read)? == Received::Packet {
        let block = match packet.kind() {
            PacketKind::Ram if !packet.ram().is_empty() => placement.block(&packet.ram().block),
            _ => None,
        };
        let sync = packet.ram().sync.then_some(packet.ram().packet_num);
        if let Some(block) = block {
            if syncs == 0 {
                return Err(place(PlaceError::TooEarly));
            }
            if let Some(packet_num) = behind.take() {
                let is_due = || out.syncs.is_marked(syncs);
                writer.wait_for_reader(packet_num, &is_due).map_err(write)?;
            }
            // Before `place`: closing the placement waits for writes in progress, and must not wait for the source.
            reader.read_rest(&mut packet).map_err(read)?;
            let others = out.syncs.main_has_pages();
            let placed = placement.place(block, &packet, others);
            placed.map_err(place)?;
            let header = packet.ram();
            let (normal, zero) = (header.normal_offsets().len(), header.zero_offsets().len());
            out.stats
                .add_packet(normal, zero, normal * config.layout.page_size());
        } else if packet.kind() == PacketKind::DeviceState {
            writer.write(&mut packet).map_err(write)?;
        } else {
            reader.read_rest(&mut packet).map_err(read)?;
            if arrived(&mut packet, config.zero_pages).has_content {
                writer.write(&mut packet).map_err(write)?;
            }
        }
        if let Some(packet_num) = sync {
            send_sync(writer, packet_num, out).map_err(write)?;
            syncs += 1;
            behind = Some(packet_num);
        }
    }
    Ok(())
}

/// Takes one channel's packets to the exchange, until the source ends the channel or all writers
/// have ended.
pub(crate) fn read(
    channel: usize,
    reader: &mut ChannelReader,
    end: &ReaderEnd,
    zero_pages: ZeroPages,
) -> Result<(), RelayError> {
    let failed = |error| RelayError::SourceChannel(channel, error);
    while let Ok(mut packet) = end.take() {
        let arrived = loop {
            match receive(reader, &mut packet, zero_pages).map_err(failed)? {
                None => return Ok(()),
                Some(arrived) if arrived.has_content => break arrived,
                // Without content nothing has to be handed over: the packet is read into again.
                Some(arrived) => {
                    if pass_sync(end, arrived.sync) == Err(Closed) {
                        return Ok(());
                    }
                }
            }
        };
        // Pages inside a SYNC come before the barrier.
        let submitted = end
            .submit(packet)
            .and_then(|()| pass_sync(end, arrived.sync));
        if submitted == Err(Closed) {
            break;
        }
    }
    Ok(())
}

/// Sends what the exchange has on one channel, until all readers have ended; perhaps beside others.
pub(crate) fn write(
    writer: &mut ChannelWriter,
    end: &WriterEnd,
    out: Out<'_>,
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

/// What to do with a received packet.
struct Arrived {
    /// Pages or device state, to be sent on.
    has_content: bool,
    /// A SYNC behind them, with the packet's number.
    sync: Option<u64>,
}

/// Receives a packet, as it is to be sent on; `None` at the channel's end.
fn receive(
    reader: &mut ChannelReader,
    packet: &mut Packet,
    zero_pages: ZeroPages,
) -> Result<Option<Arrived>, ReadError> {
    Ok(match reader.read(packet)? {
        Received::Packet => Some(arrived(packet, zero_pages)),
        Received::End => None,
    })
}

/// What to do with a received packet.
fn arrived(packet: &mut Packet, zero_pages: ZeroPages) -> Arrived {
    if packet.kind() == PacketKind::DeviceState {
        return Arrived {
            has_content: true,
            sync: None,
        };
    }
    match zero_pages {
        ZeroPages::Pass => {}
        ZeroPages::Expand => packet.expand_zero_pages(),
        ZeroPages::Detect => packet.detect_zero_pages(),
    }
    let header = packet.ram();
    Arrived {
        has_content: !header.is_empty(),
        sync: header.sync.then_some(header.packet_num),
    }
}

fn pass_sync(end: &ReaderEnd, sync: Option<u64>) -> Result<(), Closed> {
    sync.map_or(Ok(()), |packet_num| end.sync(packet_num))
}

fn send_sync(writer: &mut ChannelWriter, packet_num: u64, out: Out<'_>) -> Result<(), WriteError> {
    writer.write_sync(packet_num)?;
    out.syncs.sent(out.channel);
    // A SYNC goes out on every channel and is one all the same.
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

    use multifd::{BlockName, RamHeader};
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
    fn packets_are_passed_as_they_came_if_they_are_of_the_announced_method() {
        let (mut source, incoming) = UnixStream::pair().unwrap();
        let (outgoing, mut qemu) = UnixStream::pair().unwrap();
        let config = Config::new(Engines::software(Settings::default()));
        let stats = Arc::<Stats>::default();
        let (layout, decoder) = (config.layout, Decoder::new(config.layout));
        let encoder = config.method.encoder(layout, stats.health()).unwrap();
        let (incoming, outgoing) = (Arc::new(incoming.into()), Arc::new(outgoing.into()));
        let mut reader = ChannelReader::new(incoming, layout, decoder, stats.clone());
        let mut writer = ChannelWriter::new(outgoing, layout, encoder, None, stats.clone());
        let good = packet(Method::Zstd, &config);
        let bad = packet(Method::Zlib, &config);
        source.write_all(&[&good[..], &bad].concat()).unwrap();
        let out = Out {
            channel: 0,
            stats: &stats,
            syncs: &Syncs::new(1),
        };
        let passed = pass_encoded(&mut reader, &mut writer, Method::Zstd, &config, out);
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
