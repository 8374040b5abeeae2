//! What a writer sends, a reader receives: every method, any pages, any split into packets, one channel for
//! the whole of it.

use std::{io::Write as _, os::unix::net::UnixStream, sync::Arc, thread, time::Duration};

use multifd::{BlockName, Layout, Method};
use proptest::{collection::vec, prelude::*};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::{
    ChannelReader, ChannelWriter, Packet, ReadError, Received, Stats, Stream, WriteError,
};

pub(crate) const LAYOUT: Layout = Layout::X86;
pub(crate) const METHODS: [Method; 7] = [
    Method::None,
    Method::Zlib,
    Method::Zstd,
    Method::Lz4,
    Method::ZstdFrames,
    Method::Qpl,
    Method::Qatzip,
];

/// What a packet is made of: the kind of each normal page, the number of zero pages, a SYNC behind it.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) pages: Vec<u8>,
    pub(crate) zero: usize,
    pub(crate) sync: bool,
}

fn sent() -> impl Strategy<Value = Sent> {
    (vec(any::<u8>(), 0..40), 0usize..20, any::<bool>()).prop_map(|(pages, zero, sync)| Sent {
        pages,
        zero,
        sync,
    })
}

/// A page by a kind: all alike, text-like or noise.
pub(crate) fn page(kind: u8) -> Vec<u8> {
    let mut state = u32::from(kind) + 1;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    match kind % 3 {
        0 => vec![kind; 4096],
        1 => (0..4096).map(|_| b'a' + noise() % 8).collect(),
        _ => (0..4096).map(|_| noise()).collect(),
    }
}

pub(crate) fn build(sent: &Sent, packet: &mut Packet) {
    let count = sent.pages.len() + sent.zero;
    let offsets = (0..count as u64)
        .map(|page| page * 4096)
        .collect::<Vec<_>>();
    let (normal, zero) = offsets.split_at(sent.pages.len());
    let header = packet.ram_mut();
    header.clear();
    header.block = BlockName::new(b"pc.ram").unwrap();
    header.set_pages(normal, zero, LAYOUT).unwrap();
    for (to, kind) in packet.pages_mut().chunks_mut(4096).zip(&sent.pages) {
        to.copy_from_slice(&page(*kind));
    }
}

fn pair() -> (Arc<Stream>, Arc<Stream>) {
    let (near, far) = UnixStream::pair().unwrap();
    (Arc::new(Stream::from(near)), Arc::new(Stream::from(far)))
}

fn writer(stream: Arc<Stream>, method: Method, stats: &Arc<Stats>) -> ChannelWriter {
    let settings = Settings::new(method, None).unwrap();
    let encoder = encoder(&settings, LAYOUT).unwrap();
    ChannelWriter::new(stream, LAYOUT, encoder, None, stats.clone())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn packets_arrive_as_they_were_sent(
        packets in vec(sent(), 0..8),
        method in proptest::sample::select(METHODS.to_vec()),
    ) {
        let (near, far) = pair();
        let stats = Arc::new(Stats::default());
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut writer = writer(near, method, &stats);
                let mut packet = Packet::new(LAYOUT);
                for sent in &packets {
                    build(sent, &mut packet);
                    writer.write(&mut packet).unwrap();
                    if sent.sync {
                        writer.write_sync(3).unwrap();
                    }
                }
                writer.finish();
            });
            let received = Arc::new(Stats::default());
            let mut reader = ChannelReader::new(far, LAYOUT, Decoder::new(LAYOUT), received.clone());
            let mut packet = Packet::new(LAYOUT);
            for sent in &packets {
                assert_eq!(reader.read(&mut packet).unwrap(), Received::Packet);
                assert_eq!(packet.ram().normal_offsets().len(), sent.pages.len());
                assert_eq!(packet.ram().zero_offsets().len(), sent.zero);
                assert!(!packet.ram().sync);
                let pages = sent.pages.iter().flat_map(|kind| page(*kind)).collect::<Vec<_>>();
                assert!(packet.pages() == pages, "the pages differ");
                if sent.sync {
                    assert_eq!(reader.read(&mut packet).unwrap(), Received::Packet);
                    assert!(packet.ram().sync && packet.ram().is_empty());
                    assert_eq!(packet.ram().packet_num, 3);
                }
            }
            assert_eq!(reader.read(&mut packet).unwrap(), Received::End);
            assert_eq!(received.snapshot().received_bytes, stats.snapshot().wire_bytes);
        });
    }
}

#[test]
fn a_reader_that_stops_is_noticed() {
    let (near, far) = pair();
    near.set_stall_timeout(Duration::from_millis(50)).unwrap();
    let mut writer = writer(near, Method::None, &Arc::default());
    let mut packet = Packet::new(LAYOUT);
    let sent = Sent {
        pages: vec![1; 40],
        zero: 0,
        sync: false,
    };
    let error = loop {
        build(&sent, &mut packet);
        if let Err(error) = writer.write(&mut packet) {
            break error;
        }
    };
    assert!(matches!(error, WriteError::TimedOut { .. }), "{error}");
    drop(far);
}

#[test]
fn a_writer_that_stops_in_a_packet_is_noticed() {
    let (near, far) = pair();
    far.set_stall_timeout(Duration::from_millis(50)).unwrap();
    (&*near).write_all(&[0x11, 0x22]).unwrap();
    let mut reader = ChannelReader::new(far, LAYOUT, Decoder::new(LAYOUT), Arc::default());
    let error = reader.read(&mut Packet::new(LAYOUT)).unwrap_err();
    assert!(
        matches!(error, ReadError::TimedOut { part: "header", .. }),
        "{error}"
    );
}

#[test]
fn a_silent_channel_is_waited_for() {
    let (near, far) = pair();
    far.set_stall_timeout(Duration::from_millis(20)).unwrap();
    let reading = thread::spawn(move || {
        ChannelReader::new(far, LAYOUT, Decoder::new(LAYOUT), Arc::default())
            .read(&mut Packet::new(LAYOUT))
    });
    // Longer than the stall timeout, and nothing has begun.
    thread::sleep(Duration::from_millis(100));
    let mut writer = writer(near, Method::None, &Arc::default());
    writer.write_sync(1).unwrap();
    assert_eq!(reading.join().unwrap().unwrap(), Received::Packet);
}
