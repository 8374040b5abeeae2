//! Guest memory in, guest memory out: every method, any layout of the pages, sockets that take and give little
//! at a time, and a guest that writes meanwhile.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use multifd::{BlockName, Layout, Method, RamHeader};
use proptest::{collection::vec, prelude::*, sample};
use rustix::net::sockopt;
use vamoose_codec::{Decoder, Engines, Settings, encoder};
use vamoose_link::{
    ChannelReader, ChannelWriter, MethodChoice, Packet, PacketEncoder, ReadError, Received, Stats,
    Stream, WriteError, ZeroCopyError,
};
use vm_memory::{Bytes as _, MmapRegion, VolatileMemory as _, VolatileSlice};

const LAYOUT: Layout = Layout::X86;
const METHODS: [Method; 6] = [
    Method::None,
    Method::Zlib,
    Method::Zstd,
    Method::Lz4,
    Method::Qpl,
    Method::Qatzip,
];
/// Of the test's guests.
const PAGES: usize = 64;
const PAGE: usize = 4096;

#[derive(Clone, Copy, Debug)]
enum Transport {
    Unix,
    Tcp,
}

const TRANSPORTS: [Transport; 2] = [Transport::Unix, Transport::Tcp];

/// A connection that takes and gives little at a time when `tight`.
fn connect(transport: Transport, tight: bool) -> (Arc<Stream>, Arc<Stream>) {
    let (near, far) = match transport {
        Transport::Unix => {
            let (near, far) = UnixStream::pair().unwrap();
            (Stream::from(near), Stream::from(far))
        }
        Transport::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (
                Stream::from(near),
                Stream::from(listener.accept().unwrap().0),
            )
        }
    };
    if tight {
        // With less, TCP waits for its timers.
        sockopt::set_socket_send_buffer_size(near.socket().unwrap(), 16 << 10).unwrap();
        sockopt::set_socket_recv_buffer_size(far.socket().unwrap(), 128 << 10).unwrap();
    }
    (Arc::new(near), Arc::new(far))
}

fn writer(stream: Arc<Stream>, method: Method, stats: &Arc<Stats>) -> ChannelWriter {
    let settings = Settings::new(method, None).unwrap();
    let encoder = encoder(&settings, LAYOUT).unwrap();
    ChannelWriter::new(stream, LAYOUT, encoder, None, stats.clone())
}

fn reader(stream: Arc<Stream>, stats: &Arc<Stats>) -> ChannelReader {
    ChannelReader::new(stream, LAYOUT, Decoder::new(LAYOUT), stats.clone())
}

/// A header with these normal pages.
fn header(pages: &[usize]) -> RamHeader {
    let mut header = RamHeader::new(LAYOUT);
    header.block = BlockName::new(b"pc.ram").unwrap();
    let offsets: Vec<_> = pages.iter().map(|page| (page * PAGE) as u64).collect();
    header.set_pages(&offsets, &[], LAYOUT).unwrap();
    header
}

/// The header's normal pages in `memory`.
fn slices<'a>(header: &RamHeader, memory: &VolatileSlice<'a>) -> Vec<VolatileSlice<'a>> {
    let offsets = header.normal_offsets().iter();
    offsets
        .map(|offset| memory.subslice(*offset as usize, PAGE).unwrap())
        .collect()
}

/// The memory of a guest, which threads may share.
fn guest(content: &[u8]) -> MmapRegion {
    let memory = MmapRegion::new(content.len()).unwrap();
    memory.as_volatile_slice().copy_from(content);
    memory
}

/// What is in it: pages all alike, of text, and of noise, each different.
fn content(seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut noise = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..PAGES * PAGE)
        .map(|at| match at / PAGE % 3 {
            0 => (at / PAGE) as u8,
            1 => b'a' + noise() % 8,
            _ => noise(),
        })
        .collect()
}

/// Pages of a packet: in order, backwards, or anyhow; each at most once.
fn pages() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        (0..PAGES, 0..PAGES).prop_map(|(from, count)| (from..PAGES.min(from + count)).collect()),
        (0..PAGES, 0..PAGES)
            .prop_map(|(from, count)| (from..PAGES.min(from + count)).rev().collect()),
        (0..=PAGES).prop_flat_map(|count| {
            let all: Vec<usize> = (0..PAGES).collect();
            sample::subsequence(all, count).prop_shuffle()
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn slices_of_any_shape_arrive_as_they_were_sent(
        header in vec(any::<u8>(), 0..2000),
        from in vec((0usize..PAGES * PAGE, 0usize..3000), 0..600),
        to in vec(0usize..3000, 1..600),
        transport in sample::select(TRANSPORTS.to_vec()),
        tight in any::<bool>(),
    ) {
        let copy = content(1);
        let guest = guest(&copy);
        let range = |(at, len): (usize, usize)| at..(at + len).min(PAGES * PAGE);
        let expected: Vec<u8> = from.iter().flat_map(|slice| &copy[range(*slice)]).copied().collect();
        let (near, far) = connect(transport, tight);
        thread::scope(|scope| {
            scope.spawn(|| {
                let pages: Vec<_> = from
                    .iter()
                    .map(|slice| guest.get_slice(slice.0, range(*slice).len()).unwrap())
                    .collect();
                near.send_memory(&header, &pages).unwrap();
                near.finish();
            });
            let mut got = vec![0; header.len()];
            assert_eq!(far.read_full(&mut got).unwrap(), header.len());
            assert!(got == header, "the header differs");
            // Cut in another way, and with room for a byte more than there is.
            let mut room = vec![0xee; expected.len() + 1];
            let whole = VolatileSlice::from(&mut room[..]);
            let (mut pages, mut at) = (Vec::new(), 0);
            for len in to.iter().chain([&whole.len()]) {
                let len = (*len).min(whole.len() - at);
                pages.push(whole.subslice(at, len).unwrap());
                at += len;
            }
            assert_eq!(far.receive_memory(&pages).unwrap(), expected.len());
            assert!(room[..expected.len()] == expected, "the pages differ");
            assert_eq!(room[expected.len()], 0xee);
        });
    }

    #[test]
    fn packets_arrive_as_they_were_sent(
        packets in vec((pages(), any::<bool>()), 0..8),
        method in sample::select(METHODS.to_vec()),
        transport in sample::select(TRANSPORTS.to_vec()),
        zero_copy in any::<bool>(),
        tight in any::<bool>(),
    ) {
        let zero_copy = zero_copy && method == Method::None && matches!(transport, Transport::Tcp);
        let (near, far) = connect(transport, tight);
        let (sent, received) = (Arc::new(Stats::default()), Arc::new(Stats::default()));
        let source = content(2);
        let guest = guest(&source);
        let mut expected = vec![0; PAGES * PAGE];
        for page in packets.iter().flat_map(|(pages, _)| pages) {
            let page = page * PAGE..(page + 1) * PAGE;
            expected[page.clone()].copy_from_slice(&source[page]);
        }
        let mut destination = vec![0; PAGES * PAGE];
        thread::scope(|scope| {
            scope.spawn(|| {
                let memory = guest.as_volatile_slice();
                let mut writer = writer(near, method, &sent);
                if zero_copy {
                    writer.enable_zero_copy().unwrap();
                }
                for (pages, sync) in &packets {
                    let mut header = header(pages);
                    let slices = slices(&header, &memory);
                    writer.write_memory(&mut header, &slices).unwrap();
                    if *sync {
                        writer.write_sync(7).unwrap();
                    }
                }
                writer.flush().unwrap();
                writer.finish();
            });
            let mut reader = reader(far, &received);
            let memory = VolatileSlice::from(&mut destination[..]);
            let mut got = RamHeader::new(LAYOUT);
            for (pages, sync) in &packets {
                assert_eq!(reader.read_header(&mut got).unwrap(), Received::Packet);
                assert_eq!(got.normal_offsets(), header(pages).normal_offsets());
                reader.read_pages(&got, &slices(&got, &memory)).unwrap();
                if *sync {
                    assert_eq!(reader.read_header(&mut got).unwrap(), Received::Packet);
                    assert!(got.sync && got.is_empty());
                    assert_eq!(got.packet_num, 7);
                }
            }
            assert_eq!(reader.read_header(&mut got).unwrap(), Received::End);
        });
        prop_assert!(destination == expected, "the memory differs");
        let sent = sent.snapshot();
        let count: usize = packets.iter().map(|(pages, _)| pages.len()).sum();
        prop_assert_eq!(sent.packets, packets.len() as u64);
        prop_assert_eq!(sent.page_bytes, (count * PAGE) as u64);
        prop_assert_eq!(sent.wire_bytes, received.snapshot().received_bytes);
        prop_assert_eq!(sent.zero_copy_sends > 0, zero_copy && packets.iter().any(|(pages, _)| pages.len() >= 4));
    }
}

/// What is written by whole packets is read by pages, and the other way round.
#[test]
fn both_ways_speak_the_same() {
    let expected = content(3);
    let guest = guest(&expected);
    for method in METHODS {
        let (near, far) = connect(Transport::Unix, false);
        let (mut writer, mut reader) = (
            writer(near, method, &Arc::default()),
            reader(far, &Arc::default()),
        );
        let mut header = header(&(0..PAGES).collect::<Vec<_>>());
        let mut packet = Packet::new(LAYOUT);
        thread::scope(|scope| {
            scope.spawn(|| {
                let memory = guest.as_volatile_slice();
                writer.write_memory(&mut header, &[memory]).unwrap();
                let mut packet = Packet::new(LAYOUT);
                *packet.ram_mut() = header.clone();
                packet.pages_mut().copy_from_slice(&expected);
                writer.write(&mut packet).unwrap();
            });
            reader.read(&mut packet).unwrap();
            assert!(packet.pages() == expected, "{method}");
            let mut got = RamHeader::new(LAYOUT);
            reader.read_header(&mut got).unwrap();
            let mut room = vec![0; PAGES * PAGE];
            reader
                .read_pages(&got, &[VolatileSlice::from(&mut room[..])])
                .unwrap();
            assert!(room == expected, "{method}");
        });
    }
}

/// Compressors that see their input change may write what no decoder reads.
#[test]
fn a_guest_that_writes_meanwhile_breaks_no_decoder() {
    const PACKETS: usize = 60;
    for method in METHODS {
        let guest = guest(&content(4));
        let over = AtomicBool::new(false);
        let (near, far) = connect(Transport::Unix, false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // Pages turn from text into noise and back, a word at a time.
                let (memory, mut state) = (guest.as_volatile_slice(), 1_u64);
                while !over.load(Ordering::Relaxed) {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let at = (state >> 32) as usize % (PAGES * PAGE / 8) * 8;
                    let word = if state >> 63 == 0 {
                        state
                    } else {
                        0x6161_6161_6161_6161
                    };
                    memory.store(word, at, Ordering::Relaxed).unwrap();
                }
            });
            scope.spawn(|| {
                let mut writer = writer(near, method, &Arc::default());
                let mut header = header(&(0..PAGES).collect::<Vec<_>>());
                for _ in 0..PACKETS {
                    let memory = guest.as_volatile_slice();
                    writer.write_memory(&mut header, &[memory]).unwrap();
                }
                writer.finish();
            });
            let mut reader = reader(far, &Arc::default());
            let mut got = RamHeader::new(LAYOUT);
            let mut room = vec![0; PAGES * PAGE];
            let room = VolatileSlice::from(&mut room[..]);
            let result = (0..PACKETS).try_for_each(|_| {
                reader.read_header(&mut got)?;
                reader.read_pages(&got, &[room])
            });
            over.store(true, Ordering::Relaxed);
            result.unwrap();
        });
    }
}

/// Over a socket that never fills it begins with zstd, and comes to sending raw packets.
#[test]
fn the_adaptive_method_chooses_and_observes_each_packet() {
    let content = content(11);
    let guest = guest(&content);
    let (near, far) = connect(Transport::Unix, false);
    let mut writer = ChannelWriter::new(near, LAYOUT, adaptive(), None, Arc::default());
    let mut reader = reader(far, &Arc::default());
    let (mut packet, mut received) = (Packet::new(LAYOUT), Packet::new(LAYOUT));
    let mut methods = Vec::new();
    let start = Instant::now();
    while methods.last() != Some(&Method::None) {
        assert!(start.elapsed() < Duration::from_secs(60), "{methods:?}");
        if methods.len().is_multiple_of(2) {
            let memory = guest.get_slice(0, 2 * PAGE).unwrap();
            let mut two = header(&[0, 1]);
            writer.write_memory(&mut two, &[memory]).unwrap();
            methods.push(two.method);
        } else {
            *packet.ram_mut() = header(&[0, 1]);
            packet.pages_mut().copy_from_slice(&content[..2 * PAGE]);
            writer.write(&mut packet).unwrap();
            methods.push(packet.ram().method);
        }
        assert_eq!(reader.read(&mut received).unwrap(), Received::Packet);
        assert_eq!(received.ram().method, *methods.last().unwrap());
        assert!(received.pages() == &content[..2 * PAGE]);
    }
    assert_eq!(methods[0], Method::ZstdFrames);
    // There is nothing to decide about a packet without pages.
    writer.write_memory(&mut header(&[]), &[]).unwrap();
}

fn adaptive() -> PacketEncoder {
    let method = MethodChoice::Adaptive(Engines::software(Settings::default()));
    method.encoder(LAYOUT, &Arc::default()).unwrap()
}

#[test]
fn memory_of_the_wrong_length_is_refused_and_does_no_harm() {
    let guest = guest(&content(5));
    let memory = guest.as_volatile_slice();
    let (near, far) = connect(Transport::Unix, false);
    let (mut writer, mut reader) = (
        writer(near, Method::None, &Arc::default()),
        reader(far, &Arc::default()),
    );
    let mut header = header(&[3, 1]);
    let expected = 2 * PAGE;
    for given in [0, PAGE, 2 * PAGE - 1, 2 * PAGE + 1] {
        let slice = memory.subslice(0, given).unwrap();
        let error = writer.write_memory(&mut header, &[slice]).unwrap_err();
        assert!(
            matches!(error, WriteError::Pages { given: g, expected: e } if (g, e) == (given, expected)),
            "{error}"
        );
    }
    let slices = slices(&header, &memory);
    writer.write_memory(&mut header, &slices).unwrap();
    reader.read_header(&mut header).unwrap();
    for given in [0, PAGE, 2 * PAGE - 1, 2 * PAGE + 1] {
        let slice = memory.subslice(0, given).unwrap();
        let error = reader.read_pages(&header, &[slice]).unwrap_err();
        assert!(
            matches!(error, ReadError::Pages { given: g, expected: e } if (g, e) == (given, expected)),
            "{error}"
        );
    }
    reader.read_pages(&header, &slices).unwrap();
}

#[test]
fn a_peer_that_closes_in_a_packet_is_noticed() {
    let guest = guest(&content(6));
    let memory = guest.as_volatile_slice();
    for transport in TRANSPORTS {
        for method in [Method::None, Method::Zstd] {
            let (near, far) = connect(transport, false);
            let stats = Arc::new(Stats::default());
            let mut header = header(&[1, 2]);
            let slices = slices(&header, &memory);
            writer(near, method, &stats)
                .write_memory(&mut header, &slices)
                .unwrap();
            let mut packet = vec![0; stats.snapshot().wire_bytes as usize];
            far.read_full(&mut packet).unwrap();
            for kept in [1, 11, 12, 500, LAYOUT.ram_header_len(), packet.len() - 1] {
                let (near, far) = connect(transport, false);
                (&*near).write_all(&packet[..kept]).unwrap();
                drop(near);
                let mut reader = reader(far, &Arc::default());
                let mut got = RamHeader::new(LAYOUT);
                let error = reader
                    .read_header(&mut got)
                    .and_then(|_| reader.read_pages(&got, &slices))
                    .unwrap_err();
                let expected = if kept < LAYOUT.ram_header_len() {
                    "header"
                } else {
                    "payload"
                };
                assert!(
                    matches!(error, ReadError::Truncated { part, .. } if part == expected),
                    "{transport:?}, {method}, {kept} bytes: {error}"
                );
            }
        }
    }
}

#[test]
fn a_peer_that_stops_reading_or_closes_is_noticed() {
    let guest = guest(&content(7));
    let memory = guest.as_volatile_slice();
    for transport in TRANSPORTS {
        for closes in [false, true] {
            let (near, far) = connect(transport, true);
            near.set_stall_timeout(Duration::from_millis(50)).unwrap();
            let far = (!closes).then_some(far);
            let mut writer = writer(near, Method::None, &Arc::default());
            let mut header = header(&(0..PAGES).collect::<Vec<_>>());
            let error = loop {
                if let Err(error) = writer.write_memory(&mut header, &[memory]) {
                    break error;
                }
            };
            match error {
                WriteError::TimedOut { .. } => assert!(!closes),
                WriteError::Io(_) => assert!(closes),
                error => panic!("{error}"),
            }
            drop(far);
        }
    }
}

#[test]
fn device_state_is_refused_where_only_pages_belong() {
    let (near, far) = connect(Transport::Unix, false);
    let mut bytes = vec![0; 276];
    bytes[..12].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1, 0, 0, 0, 0x40]);
    (&*near).write_all(&bytes).unwrap();
    let mut packet = Packet::new(LAYOUT);
    let (stats, mut header) = (Arc::default(), RamHeader::new(LAYOUT));
    let mut reader = reader(far, &stats);
    reader.read(&mut packet).unwrap();
    (&*near).write_all(&bytes).unwrap();
    let error = reader.read_header(&mut header).unwrap_err();
    assert!(matches!(error, ReadError::DeviceState), "{error}");
}

#[test]
fn zero_copy_is_refused_where_it_cannot_be() {
    let stats = Arc::default();
    let (near, _far) = connect(Transport::Unix, false);
    let error = writer(near, Method::None, &stats).enable_zero_copy();
    assert!(matches!(error, Err(ZeroCopyError::NotTcp)), "{error:?}");
    let (near, _far) = connect(Transport::Tcp, false);
    let error = writer(near, Method::Lz4, &stats).enable_zero_copy();
    assert!(
        matches!(
            error,
            Err(ZeroCopyError::Method {
                method: Method::Lz4
            })
        ),
        "{error:?}"
    );
}

/// Loopback copies, and the kernel reports it.
#[test]
fn copies_after_all_are_counted() {
    const SYNCS: u64 = 3;
    let guest = guest(&content(8));
    let memory = guest.as_volatile_slice();
    let (near, far) = connect(Transport::Tcp, false);
    let stats = Arc::new(Stats::default());
    thread::scope(|scope| {
        scope.spawn(move || std::io::copy(&mut &*far, &mut std::io::sink()).unwrap());
        let mut writer = writer(near, Method::None, &stats);
        writer.enable_zero_copy().unwrap();
        writer.enable_zero_copy().unwrap();
        let mut header = header(&(0..PAGES).collect::<Vec<_>>());
        for _ in 0..SYNCS {
            for _ in 0..10 {
                writer.write_memory(&mut header, &[memory]).unwrap();
            }
            writer.write_sync(0).unwrap();
        }
        writer.finish();
    });
    let counted = stats.snapshot();
    assert!(counted.zero_copy_sends >= 10 * SYNCS, "{counted:?}");
    assert_eq!(counted.copied_sends, counted.zero_copy_sends);
    assert_eq!(counted.missed_zero_copy, SYNCS);
}

/// A peer that takes nothing keeps the kernel from letting go of the pages.
#[test]
fn a_flush_ends_at_the_stall_timeout() {
    let guest = guest(&content(10));
    let (near, far) = connect(Transport::Tcp, true);
    sockopt::set_socket_send_buffer_size(near.socket().unwrap(), 1 << 20).unwrap();
    near.set_stall_timeout(Duration::from_millis(50)).unwrap();
    let mut writer = writer(near, Method::None, &Arc::default());
    writer.enable_zero_copy().unwrap();
    let mut header = header(&(0..PAGES).collect::<Vec<_>>());
    let error = loop {
        let memory = guest.as_volatile_slice();
        let written = writer.write_memory(&mut header, &[memory]);
        if let Err(error) = written.and_then(|()| writer.flush()) {
            break error;
        }
    };
    // Whether the kernel's notification or its acknowledgement is missed first is a matter of timers.
    assert!(
        matches!(
            error,
            WriteError::Held { sends: 1.., .. } | WriteError::TimedOut { .. }
        ),
        "{error}"
    );
    drop(far);
}

/// What a peer never acknowledges stays in the kernel's hands: a flush ends all the same.
#[test]
fn a_flush_ends_when_the_connection_is_shut_down() {
    let guest = guest(&content(9));
    // No more than a socket takes at once: nobody reads.
    let few = 0..8;
    let memory = guest.get_slice(0, few.len() * PAGE).unwrap();
    let (near, far) = connect(Transport::Tcp, false);
    let mut writer = writer(near.clone(), Method::None, &Arc::default());
    writer.enable_zero_copy().unwrap();
    let mut header = header(&few.collect::<Vec<_>>());
    writer.write_memory(&mut header, &[memory]).unwrap();
    near.shut_down();
    // On loopback the pages are copied as they arrive, so that both is right: all of it has, or not.
    match writer.flush() {
        Ok(()) | Err(WriteError::Io(_)) => {}
        Err(error) => panic!("{error}"),
    }
    let mut rest = Vec::new();
    (&*far).read_to_end(&mut rest).unwrap();
    assert!(writer.write_memory(&mut header, &[memory]).is_err());
}
