//! Pages that are sent again and again, over several channels of a session: they arrive as they were sent, in few bytes,
//! whatever happens to the connections.

use std::{
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use lab::middlebox::{Change, Direction, Middlebox, Which};
use multifd::{BlockName, Layout, Method};
use proptest::{collection::vec, prelude::*};
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_link::{
    Address, ChannelReader, ChannelWriter, Counters, DeltaReceiver, DeltaSender, Listener, Packet,
    PacketEncoder, PageCaches, Received, Route, Security, Session, SessionConfig, Sessions, Stats,
    Stream,
};

use crate::channel::LAYOUT;

pub(crate) const CHANNELS: usize = 3;
const PAGES: usize = 1200;
const ROUNDS: usize = 6;
const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);

/// A client and a server, with a middlebox between them, and `CHANNELS` streams at each.
pub(crate) struct Ends {
    pub(crate) session: Session,
    pub(crate) near: Vec<Arc<Stream>>,
    pub(crate) far: Vec<Arc<Stream>>,
    pub(crate) middlebox: Middlebox,
    _sessions: Sessions,
}

impl Ends {
    pub(crate) fn new(near: SessionConfig, far: SessionConfig) -> Self {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(&any, far.stall_timeout).unwrap();
        let address = listener.address().to_string();
        let address = address.trim_start_matches("tcp:").parse().unwrap();
        let middlebox = Middlebox::new(address).unwrap();
        let sessions = Sessions::new(vec![listener], far).unwrap();
        let to: Address = format!("tcp:{}", middlebox.address()).parse().unwrap();
        let (session, first) = Session::dial(vec![Route::from(to)], near).unwrap();
        let mut near = vec![Arc::new(first)];
        while near.len() < CHANNELS {
            near.push(Arc::new(session.open().unwrap()));
        }
        // The server learns of a stream with its first byte, which says which it is.
        let mut far: Vec<Option<Arc<Stream>>> = vec![None; CHANNELS];
        for (number, stream) in (0_u8..).zip(&near) {
            stream.write_both(&[number], &[]).unwrap();
        }
        for _ in 0..CHANNELS {
            let stream = sessions.next(LIMIT).unwrap().stream;
            let mut number = [0];
            stream.read_full(&mut number).unwrap();
            far[usize::from(number[0])] = Some(Arc::new(stream));
        }
        Self {
            session,
            near,
            far: far.into_iter().map(Option::unwrap).collect(),
            middlebox,
            _sessions: sessions,
        }
    }
}

/// A guest's memory after so many rounds: every page has changed a little in each, and some altogether.
fn memory(round: usize) -> Vec<u8> {
    let mut memory = Vec::with_capacity(PAGES * PAGE);
    for page in 0..PAGES {
        let generation = if page % 17 == 0 { round } else { 0 };
        let mut random = fastrand::Rng::with_seed((page * 1000 + generation) as u64);
        let start = memory.len();
        memory.extend((0..PAGE).map(|_| random.u8(..)));
        for change in 0..round {
            let at = (page * 31 + change * 97) % PAGE;
            memory[start + at] = memory[start + at].wrapping_add(1 + change as u8);
        }
    }
    memory
}

/// The pages of channel `channel` in `round`: another channel's in the next.
fn pages(channel: usize, round: usize) -> Vec<u64> {
    let pages = 0..PAGES as u64;
    let mine = pages.filter(|page| (*page as usize / 50 + round) % CHANNELS == channel);
    mine.map(|page| page * PAGE as u64).collect()
}

/// Sends one channel's part; as a source does, all channels begin a round together.
fn send(
    stream: Arc<Stream>,
    channel: usize,
    encoder: PacketEncoder,
    cache: Option<Arc<DeltaSender>>,
    (stats, begin): (&Arc<Stats>, &Barrier),
) {
    let mut writer = ChannelWriter::new(stream, LAYOUT, encoder, None, stats.clone());
    if let Some(cache) = cache {
        writer.send_differences(cache).unwrap();
    }
    let mut packet = Packet::new(LAYOUT);
    for round in 0..ROUNDS {
        let memory = memory(round);
        begin.wait();
        for offsets in pages(channel, round).chunks(100) {
            packet.ram_mut().clear();
            packet.ram_mut().block = BlockName::new(b"ram").unwrap();
            packet.ram_mut().set_pages(offsets, &[], LAYOUT).unwrap();
            for (page, offset) in packet.pages_mut().chunks_mut(PAGE).zip(offsets) {
                let at = *offset as usize;
                page.copy_from_slice(&memory[at..at + PAGE]);
            }
            writer.write(&mut packet).unwrap();
        }
        writer.write_sync(round as u64).unwrap();
    }
    writer.finish();
}

fn receive(mut reader: ChannelReader) {
    let (mut packet, mut round, mut memory) = (Packet::new(LAYOUT), 0, memory(0));
    while reader.read(&mut packet).unwrap() == Received::Packet {
        if packet.ram().sync {
            round += 1;
            memory = self::memory(round);
            continue;
        }
        let offsets = packet.ram().normal_offsets();
        for (page, offset) in packet.pages().chunks(PAGE).zip(offsets) {
            let at = *offset as usize;
            assert!(page == &memory[at..at + PAGE], "round {round}, {offset:#x}");
        }
    }
    assert_eq!(round, ROUNDS);
}

/// Sends all rounds, with `meanwhile` in another thread.
fn run(
    ends: &Ends,
    encoder: impl Fn() -> PacketEncoder,
    meanwhile: impl FnOnce(&Middlebox) + Send,
) -> Counters {
    let stats = Arc::<Stats>::default();
    let sender = DeltaSender::over(&ends.session, LAYOUT).map(Arc::new);
    let receiver = DeltaReceiver::of(&ends.far[0], LAYOUT).map(Arc::new);
    let begin = Barrier::new(CHANNELS);
    thread::scope(|scope| {
        for (channel, stream) in ends.near.iter().enumerate() {
            let (encoder, sender, shared) = (encoder(), sender.clone(), (&stats, &begin));
            scope.spawn(move || send(stream.clone(), channel, encoder, sender, shared));
        }
        for stream in &ends.far {
            let decoder = Decoder::new(LAYOUT);
            let mut reader = ChannelReader::new(stream.clone(), LAYOUT, decoder, Arc::default());
            if let Some(receiver) = &receiver {
                reader.take_differences(receiver.clone());
            }
            scope.spawn(move || receive(reader));
        }
        meanwhile(&ends.middlebox);
    });
    stats.snapshot()
}

pub(crate) fn fixed(method: Method) -> PacketEncoder {
    let settings = Settings::new(method, None).unwrap();
    encoder(&settings, LAYOUT).unwrap().into()
}

fn config() -> SessionConfig {
    SessionConfig::new(Security::Insecure)
}

#[test]
fn what_was_sent_before_goes_in_few_bytes() {
    for method in [Method::Lz4, Method::ZstdFrames] {
        let ends = Ends::new(config(), config());
        let sent = run(&ends, || fixed(method), |_| {});
        let all = (ROUNDS * PAGES) as u64;
        // Not in the first two rounds, and not pages that have changed altogether.
        assert!(sent.delta_pages > all / 2, "{sent:?}");
        assert!(sent.wire_bytes < sent.page_bytes / 2, "{sent:?}");
        assert_eq!(sent.normal_pages, all);
        assert_eq!(sent.delta_cache_bytes, (PAGES * PAGE) as u64);
    }
}

#[test]
fn connections_are_lost_and_pages_are_not() {
    let ends = Ends::new(config(), config());
    let sent = run(
        &ends,
        || fixed(Method::Lz4),
        |middlebox| {
            for mebibytes in [3, 8, 10] {
                middlebox
                    .wait_for_bytes(Direction::ToListener, mebibytes << 20, LIMIT)
                    .unwrap();
                middlebox.apply(Which::All, Change::Reset);
            }
        },
    );
    assert!(sent.delta_pages > 0, "{sent:?}");
    assert!(ends.session.reconnects() > 0);
}

#[test]
fn a_small_cache_keeps_what_it_can() {
    for (near, far) in [(1 << 20, 256 << 20), (256 << 20, 1 << 20)] {
        let with = |page_cache| SessionConfig {
            page_cache,
            ..config()
        };
        let sent = run(
            &Ends::new(with(near), with(far)),
            || fixed(Method::Lz4),
            |_| {},
        );
        assert!(sent.delta_pages > 0, "{sent:?}");
        assert!(sent.delta_cache_bytes <= 1 << 20, "{sent:?}");
    }
}

/// Those of a host with many migrations, at either end: the next one goes on with less, or without.
#[test]
fn all_caches_of_a_host_share_its_limit() {
    let with = |limit| SessionConfig {
        page_caches: PageCaches::new(limit),
        ..config()
    };
    for (near, far, most) in [
        (with(4 << 20), config(), 1 << 20),
        (config(), with(4 << 20), 1 << 20),
        (with(0), config(), 0),
        (config(), with(0), 0),
    ] {
        let sent = run(&Ends::new(near, far), || fixed(Method::Lz4), |_| {});
        assert_eq!(sent.delta_pages > 0, most > 0, "{sent:?}");
        assert!(sent.delta_cache_bytes <= most, "{sent:?}");
    }
}

#[test]
fn there_are_no_differences_without_a_cache_or_checksums() {
    let without = [
        (
            SessionConfig {
                page_cache: 0,
                ..config()
            },
            config(),
        ),
        (
            config(),
            SessionConfig {
                page_cache: 0,
                ..config()
            },
        ),
        (
            SessionConfig {
                check: false,
                ..config()
            },
            SessionConfig {
                check: false,
                ..config()
            },
        ),
    ];
    for (near, far) in without {
        let sent = run(&Ends::new(near, far), || fixed(Method::Lz4), |_| {});
        assert_eq!((sent.delta_pages, sent.delta_cache_bytes), (0, 0));
    }
    assert!(DeltaSender::over(&Ends::new(config(), config()).session, Layout::X86).is_some());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// What the fuzz target looks for, from where it gets far.
    #[test]
    fn any_packets_of_a_peer_are_restored_or_refused(
        packets in vec((0..4_u8, vec((0..14_u32, 0..3_u32), 1..5), vec(any::<u8>(), 0..200)), 1..8),
    ) {
        let packets = packets.into_iter().map(|(method, marks, rest)| {
            let mut payload = vec![method, 0, 0, 0];
            for (place, version) in &marks {
                payload.extend_from_slice(&place.to_be_bytes());
                payload.extend_from_slice(&version.to_be_bytes());
            }
            let table = payload.len();
            payload.extend_from_slice(&rest);
            if method == 0 {
                payload.resize(table + marks.len() * PAGE, 7);
            }
            (marks.len(), payload)
        });
        let packets: Vec<_> = packets.collect();
        let packets: Vec<_> = packets.iter().map(|(count, payload)| (*count, &payload[..])).collect();
        vamoose_link::delta_testing::receive(LAYOUT, &packets);
    }
}

#[test]
fn the_sender_decides_about_checksums() {
    let far = SessionConfig {
        check: false,
        ..config()
    };
    let sent = run(&Ends::new(config(), far), || fixed(Method::Lz4), |_| {});
    assert!(sent.normal_pages > 0);
}
