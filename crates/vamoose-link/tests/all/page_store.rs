//! Guests that are alike, one after the other to a destination with a page store: their memory arrives as it was, and pages that the
//! store has are not sent.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use lab::middlebox::{Change, Direction, Middlebox, Which};
use multifd::{BlockName, Method};
use vamoose_codec::Decoder;
use vamoose_link::{
    ChannelReader, ChannelWriter, Counters, Packet, PageStore, Received, Security, SessionConfig,
    Stats, StoreLister, StoreSender,
};

use crate::{
    channel::LAYOUT,
    delta::{CHANNELS, Ends, fixed},
};

const PAGE: usize = 4096;
const PAGES: usize = 1500;
const LIMIT: Duration = Duration::from_secs(60);

/// Memory of guest `number`: two thirds are the same in all guests, elsewhere in each.
fn guest(number: usize) -> Vec<u8> {
    let mut memory = vec![0; PAGES * PAGE];
    for (index, page) in memory.chunks_mut(PAGE).enumerate() {
        // Not in the same order in each guest.
        let content = (index * 7 + number * 101) % PAGES;
        let is_common = !content.is_multiple_of(3);
        let seed = content + if is_common { 0 } else { (number + 1) * PAGES };
        let mut random = fastrand::Rng::with_seed(seed as u64);
        page.fill_with(|| random.u8(..16));
    }
    memory
}

fn config(store: Option<&PageStore>) -> SessionConfig {
    SessionConfig {
        page_store: store.cloned(),
        takes_store: true,
        ..SessionConfig::new(Security::Insecure)
    }
}

fn store(limit: usize) -> PageStore {
    PageStore::new(limit, Vec::new()).unwrap()
}

/// Sends the guest's `memory`, and then a hundred of its pages again, changed, between hosts with these stores, when the source has
/// at least `offered` fingerprints. Checks what arrives.
fn migrate(
    memory: &[u8],
    (near, far): (Option<&PageStore>, Option<&PageStore>),
    (name, offered): (&str, usize),
    meanwhile: impl FnOnce(&Middlebox) + Send,
) -> Counters {
    let ends = Ends::new(config(near), config(far));
    assert_eq!(ends.session.has_store(), far.is_some());
    let stats = Arc::<Stats>::default();
    let own = near.and_then(|store| store.of_guest(Some(name)));
    let sender = Arc::new(StoreSender::new(own, stats.clone()));
    let pages = far.and_then(|store| store.of_guest(Some(name)));
    let lister = pages.map(|pages| StoreLister::new(pages, &ends.far));
    let mut changed = memory.to_vec();
    for page in changed.chunks_mut(PAGE).step_by(7) {
        page[1] ^= 1;
    }
    let arrived = Mutex::new(vec![0; memory.len()]);
    thread::scope(|scope| {
        let mut work = Vec::new();
        let mut writers = Vec::new();
        for stream in &ends.near {
            let (stream, encoder) = (stream.clone(), fixed(Method::ZstdFrames));
            let mut writer = ChannelWriter::new(stream, LAYOUT, encoder, None, stats.clone());
            if far.is_some() {
                let listener = writer.share_pages(sender.clone());
                scope.spawn(move || listener.run());
            }
            writers.push(writer);
        }
        for stream in &ends.far {
            let decoder = Decoder::new(LAYOUT);
            let mut reader = ChannelReader::new(stream.clone(), LAYOUT, decoder, Arc::default());
            if let Some(lister) = &lister {
                reader.share_pages(lister);
            }
            let arrived = &arrived;
            work.push(scope.spawn(move || receive(reader, arrived)));
        }
        if let Some(lister) = &lister {
            scope.spawn(|| lister.run());
            let deadline = Instant::now() + LIMIT;
            while sender.offered().is_none_or(|listed| listed < offered) {
                assert!(Instant::now() < deadline, "{name}: {:?}", sender.offered());
                thread::yield_now();
            }
        }
        for (channel, mut writer) in writers.into_iter().enumerate() {
            let changed = &changed;
            work.push(scope.spawn(move || {
                send(&mut writer, channel, memory, 1);
                send(&mut writer, channel, changed, 7);
                writer.finish();
            }));
        }
        meanwhile(&ends.middlebox);
        work.into_iter().for_each(|it| it.join().unwrap());
        ends.near.iter().for_each(|stream| stream.shut_down());
    });
    assert!(*arrived.lock().unwrap() == changed, "{name}");
    stats.snapshot()
}

/// Sends every `step`th page that is this channel's.
fn send(writer: &mut ChannelWriter, channel: usize, memory: &[u8], step: usize) {
    let mine = |page: &usize| page.is_multiple_of(step) && page % CHANNELS == channel;
    let pages: Vec<_> = (0..memory.len() / PAGE).filter(mine).collect();
    let mut packet = Packet::new(LAYOUT);
    for part in pages.chunks(60) {
        let offsets: Vec<_> = part.iter().map(|page| (page * PAGE) as u64).collect();
        packet.ram_mut().clear();
        packet.ram_mut().block = BlockName::new(b"ram").unwrap();
        packet.ram_mut().set_pages(&offsets, &[], LAYOUT).unwrap();
        for (to, page) in packet.pages_mut().chunks_mut(PAGE).zip(part) {
            to.copy_from_slice(&memory[page * PAGE..][..PAGE]);
        }
        writer.write(&mut packet).unwrap();
    }
    writer.write_sync(step as u64).unwrap();
}

fn receive(mut reader: ChannelReader, arrived: &Mutex<Vec<u8>>) {
    let mut packet = Packet::new(LAYOUT);
    while reader.read(&mut packet).unwrap() == Received::Packet {
        let mut arrived = arrived.lock().unwrap();
        let offsets = packet.ram().normal_offsets();
        for (page, offset) in packet.pages().chunks(PAGE).zip(offsets) {
            let at = usize::try_from(*offset).unwrap();
            arrived[at..at + PAGE].copy_from_slice(page);
        }
    }
}

#[test]
fn common_pages_are_sent_once() {
    let far = store(64 << 20);
    let first = migrate(&guest(0), (None, Some(&far)), ("first", 0), |_| ());
    assert_eq!((first.shared_pages, first.missed_pages), (0, 0));
    let second = migrate(&guest(1), (None, Some(&far)), ("second", PAGES - 9), |_| ());
    // All that are common, but for pages with one fingerprint. Some that have changed had changed in the first guest, too.
    assert!((990..1300).contains(&second.shared_pages), "{second:?}");
    assert!(second.missed_pages < 5, "{second:?}");
    assert!(second.wire_bytes < first.wire_bytes * 6 / 10, "{second:?}");
    let pages = second.normal_pages - second.missed_pages;
    assert_eq!(pages, (PAGES + PAGES.div_ceil(7)) as u64);
    // A destination without a store, and a source that does not know it.
    let plain = migrate(&guest(2), (Some(&far), None), ("third", 0), |_| ());
    assert_eq!((plain.shared_pages, plain.wire_bytes > 0), (0, true));
}

#[test]
fn a_guest_that_comes_home_finds_its_pages() {
    let (home, away) = (store(64 << 20), store(64 << 20));
    let memory = guest(0);
    migrate(&memory, (Some(&home), Some(&away)), ("web1", 0), |_| ());
    let kept = home.usage().pages;
    assert!(kept >= PAGES, "{kept}");
    let back = migrate(
        &memory,
        (Some(&away), Some(&home)),
        ("web1", PAGES - 9),
        |_| (),
    );
    assert!(back.shared_pages > PAGES as u64 - 9, "{back:?}");
}

/// The memory with a bit of each page changed, and the pages in another order.
fn nearly(memory: &[u8]) -> Vec<u8> {
    let mut nearly = Vec::with_capacity(memory.len());
    for index in 0..PAGES {
        nearly.extend_from_slice(&memory[index * 11 % PAGES * PAGE..][..PAGE]);
        nearly[index * PAGE + 9] ^= 1;
    }
    nearly
}

#[test]
fn pages_that_resemble_those_of_the_store_are_encoded_after_them() {
    let (home, away) = (store(64 << 20), store(64 << 20));
    let stores = (Some(&home), Some(&away));
    let first = migrate(&guest(0), stores, ("first", 0), |_| ());
    let second = migrate(&nearly(&guest(0)), stores, ("second", PAGES - 9), |_| ());
    assert_eq!(second.missed_pages, 0, "{second:?}");
    assert!(second.wire_bytes < first.wire_bytes / 10, "{second:?}");
    // Both stores have kept the second guest, too.
    let back = (Some(&away), Some(&home));
    let back = migrate(&nearly(&guest(0)), back, ("second", 2 * PAGES - 20), |_| ());
    assert!(back.shared_pages > PAGES as u64 - 9, "{back:?}");
}

#[test]
fn pages_after_an_evicted_one_are_sent() {
    let (home, away) = (store(64 << 20), store(64 << 20));
    let stores = (Some(&home), Some(&away));
    migrate(&guest(0), stores, ("first", 0), |_| ());
    let second = ("second", PAGES - 9);
    let sent = migrate(&nearly(&guest(0)), stores, second, |middlebox| {
        let toward = Direction::ToListener;
        middlebox.wait_for_bytes(toward, 1, LIMIT).unwrap();
        away.set_limit(100_000);
    });
    assert!(sent.missed_pages > 0, "{sent:?}");
}

#[test]
fn pages_that_were_evicted_are_sent() {
    let far = store(64 << 20);
    migrate(&guest(0), (None, Some(&far)), ("first", 0), |_| ());
    // What was listed is gone before it is referred to.
    let sent = migrate(
        &guest(1),
        (None, Some(&far)),
        ("second", PAGES - 9),
        |middlebox| {
            middlebox
                .wait_for_bytes(Direction::ToListener, 1, LIMIT)
                .unwrap();
            far.set_limit(100_000);
        },
    );
    assert!(sent.missed_pages > 0, "{sent:?}");
    assert!(far.usage().bytes <= 100_000);
    far.set_limit(0);
    let usage = far.usage();
    assert_eq!((usage.bytes, usage.pages), (0, 0));
    assert!(usage.evictions > PAGES as u64, "{usage:?}");
}

/// Files that are compressed already, in the page caches of guests that are alike.
#[test]
fn pages_that_do_not_shrink_are_sent_once() {
    let far = store(64 << 20);
    let memory = noise(PAGES);
    migrate(&memory, (None, Some(&far)), ("first", 0), |_| ());
    let second = migrate(&memory, (None, Some(&far)), ("second", PAGES - 9), |_| ());
    assert!(second.shared_pages > PAGES as u64 - 9, "{second:?}");
}

/// It would be kept in vain.
#[test]
fn memory_that_shrinks_nowhere_is_hardly_kept() {
    let far = store(64 << 20);
    migrate(&noise(10_000), (None, Some(&far)), ("noise", 0), |_| ());
    // Of 60 pages each.
    let kept = far.usage().pages / 60;
    assert!((CHANNELS * 14..=CHANNELS * 16).contains(&kept), "{kept}");
}

fn noise(pages: usize) -> Vec<u8> {
    let mut memory = vec![0; pages * PAGE];
    fastrand::Rng::with_seed(1).fill(&mut memory);
    memory
}

/// Each miss costs a round trip.
#[test]
fn pages_that_differ_in_a_bit_are_not_asked_for() {
    let far = store(64 << 20);
    migrate(&guest(0), (None, Some(&far)), ("first", 0), |_| ());
    let mut nearly = guest(0);
    for page in nearly.chunks_mut(PAGE) {
        page[9] ^= 1;
    }
    let sent = migrate(&nearly, (None, Some(&far)), ("nearly", PAGES - 9), |_| ());
    // By chance, one in a million has the same fingerprint.
    assert!(sent.missed_pages < 3, "{sent:?}");
    assert!(sent.shared_pages < 20, "{sent:?}");
    assert_eq!(far.usage().hits, sent.shared_pages);
}

#[test]
fn guests_of_different_groups_share_nothing() {
    let groups = vec!["web*".to_owned(), "db*".to_owned()];
    let far = PageStore::new(64 << 20, groups).unwrap();
    migrate(&guest(0), (None, Some(&far)), ("web1", 0), |_| ());
    for (name, offered, shares) in [
        ("db1", 0, false),
        ("other", 0, false),
        ("another", 0, false),
        ("web2", PAGES - 9, true),
        ("other", PAGES - 9, true),
    ] {
        let sent = migrate(&guest(1), (None, Some(&far)), (name, offered), |_| ());
        // Its own pages are listed while it goes, so those that come twice may be found.
        assert_eq!(sent.shared_pages > 900, shares, "{name}: {sent:?}");
    }
}

#[test]
fn connections_are_lost_and_pages_are_not() {
    let far = store(64 << 20);
    migrate(&guest(0), (None, Some(&far)), ("first", 0), |_| ());
    let sent = migrate(
        &guest(1),
        (None, Some(&far)),
        ("second", PAGES - 9),
        |middlebox| {
            for kibibytes in [50, 150, 250] {
                middlebox
                    .wait_for_bytes(Direction::ToListener, kibibytes << 10, LIMIT)
                    .unwrap();
                middlebox.apply(Which::All, Change::Reset);
            }
        },
    );
    assert!(sent.shared_pages > 900, "{sent:?}");
}
