//! What a guest, a source or a destination could try, each test one thing: no page is ever wrong, and none is given to anyone who
//! does not have it.

use std::{os::unix::net::UnixStream, sync::Arc, thread, time::Duration};

use multifd::{BlockName, Layout, Method, RamHeader};
use vamoose_codec::{
    Decoder, Settings, encoder,
    shared::{Base, Fingerprint, PageHash, Reference, Table},
};

use super::{
    Content, GuestPages, Keep, PAGE_BITS, PageStore, StoreLister, StoreSender, StoreWriter,
    fingerprint::{KEYS_LEN, Keys},
    index_key,
    messages::Message,
    sender::Verdicts,
};
use crate::{ChannelReader, ChannelWriter, Packet, ReadError, Received, Stream, WriteError};

const LAYOUT: Layout = Layout::X86;
const PAGE: usize = 4096;
const PAGES: usize = 60;
const PATIENCE: Duration = Duration::from_secs(60);

fn page(number: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number as u64);
    (0..PAGE).map(|_| random.u8(..16)).collect()
}

/// A stream and what is at its other end.
fn pair() -> (Arc<Stream>, Arc<Stream>) {
    let (near, far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(PATIENCE)).unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    (Arc::new(near.into()), Arc::new(far.into()))
}

fn say(stream: &Stream, message: &Message) {
    stream.write_both(&message.encode(), &[]).unwrap();
}

/// What becomes of a source whose `destination` has its stream, and knows the fingerprints of the pages that will come. Sends `PAGES`
/// pages and a SYNC when `listed` fingerprints have come. Also returns how many have.
fn source(
    listed: usize,
    destination: impl FnOnce(&Arc<Stream>, Vec<Fingerprint>) + Send,
) -> (Result<(), WriteError>, Option<usize>) {
    let (near, far) = pair();
    let keys = Keys::decode(&[7; KEYS_LEN]);
    say(&far, &Message::Keys(keys));
    let sender = Arc::new(StoreSender::new(None, Arc::default()));
    let settings = Settings::new(Method::ZstdFrames, None).unwrap();
    let encoder = encoder(&settings, LAYOUT).unwrap();
    let mut writer = ChannelWriter::new(near.clone(), LAYOUT, encoder, None, Arc::default());
    let listener = writer.share_pages(sender.clone());
    thread::scope(|scope| {
        scope.spawn(move || listener.run());
        let pages = (0..PAGES).map(|number| keys.fingerprint(&page(number)));
        let pages = pages.collect();
        let far = &far;
        scope.spawn(move || {
            destination(far, pages);
            far.shut_down();
        });
        while sender.offered().is_none_or(|offered| offered < listed) {
            thread::yield_now();
        }
        let mut packet = packet(&(0..PAGES).collect::<Vec<_>>());
        let sent = writer
            .write(&mut packet)
            .and_then(|()| writer.write_sync(1));
        near.shut_down();
        (sent, sender.offered())
    })
}

/// What comes until the source gives up.
fn drain(stream: &Stream) -> Vec<u8> {
    let (mut all, mut part) = (Vec::new(), [0; 64]);
    while let Ok(got @ 1..) = stream.read_full(&mut part) {
        all.extend_from_slice(&part[..got]);
    }
    all
}

fn packet(numbers: &[usize]) -> Packet {
    let mut packet = Packet::new(LAYOUT);
    packet.ram_mut().block = BlockName::new(b"ram").unwrap();
    let offsets: Vec<_> = numbers.iter().map(|it| (it * PAGE) as u64).collect();
    packet.ram_mut().set_pages(&offsets, &[], LAYOUT).unwrap();
    for (to, number) in packet.pages_mut().chunks_mut(PAGE).zip(numbers) {
        to.copy_from_slice(&page(*number));
    }
    packet
}

/// What a destination with these pages of a guest reads until a SYNC: the numbers of pages, which are all right.
fn receive(stream: &Arc<Stream>, pages: &GuestPages) -> Result<Vec<usize>, ReadError> {
    let decoder = Decoder::new(LAYOUT);
    let mut reader = ChannelReader::new(stream.clone(), LAYOUT, decoder, Arc::default());
    reader.share_pages(&StoreLister::new(
        pages.clone(),
        std::slice::from_ref(stream),
    ));
    let (mut packet, mut numbers) = (Packet::new(LAYOUT), Vec::new());
    while reader.read(&mut packet)? == Received::Packet && !packet.ram().sync {
        let offsets = packet.ram().normal_offsets();
        for (content, offset) in packet.pages().chunks(PAGE).zip(offsets) {
            let number = usize::try_from(*offset).unwrap() / PAGE;
            assert!(content == page(number), "page {number}");
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// Sends a packet as only a source can that makes it by hand: the pages of these numbers, then references with these hashes, all
/// with these fingerprints.
fn forge(stream: &Stream, numbers: &[usize], claimed: &[Fingerprint], hashes: &[PageHash]) {
    let payload = numbers.iter().flat_map(|it| page(*it)).collect::<Vec<_>>();
    let references = (numbers.len()..).zip(hashes);
    let table = Table {
        fingerprints: claimed.to_vec(),
        references: references
            .map(|(page, hash)| Reference { page, hash: *hash })
            .collect(),
        bases: Vec::new(),
    };
    let referred = (100..).take(hashes.len());
    let numbers: Vec<_> = numbers.iter().copied().chain(referred).collect();
    send(stream, &numbers, (Method::None, payload), &table);
}

/// The same of page `number`, encoded after page `base`.
fn forge_after(stream: &Stream, number: usize, base: usize, keys: &Keys) {
    let settings = Settings::new(Method::ZstdFrames, None).unwrap();
    let (mut encoder, mut out) = (encoder(&settings, LAYOUT).unwrap(), vec![0; 2 * PAGE]);
    let (base, page) = (page(base), page(number));
    let encoded = encoder.encode_after(&base, &page, &mut out).unwrap();
    assert_eq!(encoded.method, Method::ZstdFrames);
    let table = Table {
        fingerprints: vec![keys.fingerprint(&page)],
        references: Vec::new(),
        bases: vec![Base {
            fingerprint: keys.fingerprint(&base),
            hash: keys.hash(&base),
        }],
    };
    let payload = encoded.payload.to_vec();
    send(stream, &[number], (Method::ZstdFrames, payload), &table);
}

fn send(stream: &Stream, numbers: &[usize], pages: (Method, Vec<u8>), table: &Table) {
    let (method, mut payload) = pages;
    let end = payload.len();
    payload.resize(end + table.len(), 0);
    assert!(table.write(method, &mut payload[end..]));
    let mut header = RamHeader::new(LAYOUT);
    header.block = BlockName::new(b"ram").unwrap();
    let offsets: Vec<_> = numbers.iter().map(|it| (it * PAGE) as u64).collect();
    header.set_pages(&offsets, &[], LAYOUT).unwrap();
    header.method = Method::Shared;
    header.set_payload_len(payload.len(), LAYOUT).unwrap();
    let mut bytes = Vec::new();
    header.write(LAYOUT, &mut bytes);
    stream.write_both(&bytes, &payload).unwrap();
}

fn sync(stream: &Stream) {
    let (mut header, mut bytes) = (RamHeader::new(LAYOUT), Vec::new());
    header.sync = true;
    header.write(LAYOUT, &mut bytes);
    stream.write_both(&bytes, &[]).unwrap();
}

/// The store with the first pages of a guest of this name, and the keys.
fn store_of(name: &str) -> (PageStore, Keys) {
    let store = PageStore::new(1 << 20, vec!["acme-*".into(), "shop-*".into()]).unwrap();
    let pages = store.of_guest(Some(name)).unwrap();
    let keys = *pages.keys();
    let (near, far) = pair();
    let numbers: Vec<_> = (0..4).collect();
    let fingerprints: Vec<_> = numbers
        .iter()
        .map(|it| keys.fingerprint(&page(*it)))
        .collect();
    forge(&near, &numbers, &fingerprints, &[]);
    sync(&near);
    assert_eq!(receive(&far, &pages).unwrap(), numbers);
    assert_eq!(store.usage().pages, 4);
    (store, keys)
}

/// What a guest of this name gets for a reference to page 2, and whether its source was told that the page was not found.
fn refer(store: &PageStore, name: &str, fingerprint: Fingerprint, hash: PageHash) -> (bool, bool) {
    let (near, far) = pair();
    forge(&near, &[], &[fingerprint], &[hash]);
    sync(&near);
    let decoder = Decoder::new(LAYOUT);
    let mut reader = ChannelReader::new(far.clone(), LAYOUT, decoder, Arc::default());
    let pages = store.of_guest(Some(name)).unwrap();
    reader.share_pages(&StoreLister::new(pages, std::slice::from_ref(&far)));
    let mut packet = Packet::new(LAYOUT);
    assert_eq!(reader.read(&mut packet).unwrap(), Received::Packet);
    let given = packet.pages() == page(2);
    assert_eq!(packet.ram().normal_offsets().len(), usize::from(given));
    let verdict = Message::read(&near).unwrap().unwrap();
    (given, verdict == Message::Verdict(vec![0]))
}

/// Also where no thread could be had for the reader.
#[test]
fn a_list_ends_with_the_reader_of_any_channel() {
    let store = PageStore::new(1 << 20, Vec::new()).unwrap();
    let (streams, _others): (Vec<_>, Vec<_>) = (0..2).map(|_| pair()).unzip();
    let lister = StoreLister::new(store.of_guest(None).unwrap(), &streams);
    let readers = streams.iter().map(|stream| {
        let decoder = Decoder::new(LAYOUT);
        let mut reader = ChannelReader::new(stream.clone(), LAYOUT, decoder, Arc::default());
        reader.share_pages(&lister);
        reader
    });
    let mut readers: Vec<_> = readers.collect();
    thread::scope(|scope| {
        scope.spawn(|| lister.run());
        readers.pop();
    });
}

#[test]
fn a_list_that_lies_costs_a_question() {
    // The destination has nothing of what it lists.
    let empty = PageStore::new(1 << 20, Vec::new()).unwrap();
    let (sent, _) = source(PAGES, |stream, fingerprints| {
        say(stream, &Message::List(fingerprints));
        let arrived = receive(stream, &empty.of_guest(None).unwrap()).unwrap();
        assert_eq!(arrived, (0..PAGES).collect::<Vec<_>>());
    });
    sent.unwrap();
}

#[test]
fn questions_for_pages_that_were_not_sent_are_refused() {
    for asked in [vec![60], vec![3, 3], vec![3, 2], (0..61).collect()] {
        let (error, _) = source(PAGES, |stream, fingerprints| {
            say(stream, &Message::List(fingerprints));
            // The packet has come, so its references wait for the answer.
            stream.read_full(&mut [0]).unwrap();
            say(stream, &Message::Verdict(asked));
            drain(stream);
        });
        let error = format!("{:?}", error.unwrap_err());
        assert!(error.contains("pages that it was not sent"), "{error}");
    }
}

#[test]
fn nonsense_from_a_destination_ends_the_migration() {
    let (error, _) = source(PAGES, |stream, fingerprints| {
        say(stream, &Message::List(fingerprints));
        stream.write_both(&[9, 9, 9], &[]).unwrap();
        drain(stream);
    });
    let error = format!("{:?}", error.unwrap_err());
    assert!(error.contains("malformed message"), "{error}");
}

#[test]
fn questions_without_references_end_the_way_back() {
    let empty = PageStore::new(1 << 20, Vec::new()).unwrap();
    let (sent, offered) = source(0, |stream, fingerprints| {
        say(stream, &Message::Verdict(Vec::new()));
        say(stream, &Message::List(fingerprints));
        let arrived = receive(stream, &empty.of_guest(None).unwrap()).unwrap();
        assert_eq!(arrived, (0..PAGES).collect::<Vec<_>>());
    });
    sent.unwrap();
    // Nothing that follows is read, and the pages go without the store.
    assert_eq!(offered, Some(0));
}

#[test]
fn a_silent_destination_gets_no_sync() {
    let (error, _) = source(PAGES, |stream, fingerprints| {
        say(stream, &Message::List(fingerprints));
        stream.finish();
        let (mut last, mut sync) = (RamHeader::new(LAYOUT), Vec::new());
        (last.sync, last.packet_num) = (true, 1);
        last.write(LAYOUT, &mut sync);
        let came = drain(stream);
        assert!(!came.is_empty() && !came.ends_with(&sync));
    });
    assert!(matches!(error, Err(WriteError::Io(_))), "{error:?}");
}

#[test]
fn a_page_needs_its_whole_hash() {
    let (store, keys) = store_of("acme-1");
    let (fingerprint, hash) = (keys.fingerprint(&page(2)), keys.hash(&page(2)));
    assert_eq!(refer(&store, "acme-2", fingerprint, hash), (true, false));
    // A source that knows the fingerprint only, and all but a bit of the hash.
    let mut nearly = hash;
    nearly[15] ^= 1;
    for guess in [[0; 16], nearly, keys.hash(&page(1))] {
        assert_eq!(refer(&store, "acme-2", fingerprint, guess), (false, true));
    }
    // The fingerprint of another page, of none, and of the pages that have none.
    for other in [keys.fingerprint(&page(1)), 12345, 0] {
        assert_eq!(refer(&store, "acme-2", other, hash), (false, true));
    }
}

#[test]
fn a_packet_comes_after_its_bases_or_not_at_all() {
    let (store, keys) = store_of("acme-1");
    let pages = store.of_guest(Some("acme-1")).unwrap();
    let (near, far) = pair();
    // After page 2, which the store has; after that one; after a page that the store does not have.
    for (number, base) in [(40, 2), (41, 40), (42, 43)] {
        forge_after(&near, number, base, &keys);
    }
    sync(&near);
    assert_eq!(receive(&far, &pages).unwrap(), [40, 41]);
    for missing in [vec![], vec![], vec![0]] {
        let verdict = Message::read(&near).unwrap();
        assert_eq!(verdict, Some(Message::Verdict(missing)));
    }
    let find = |number: usize, found: &mut [u8]| {
        let page = page(number);
        let (fingerprint, hash) = (keys.fingerprint(&page), keys.hash(&page));
        let decoder = &mut Decoder::new(LAYOUT);
        pages.find(fingerprint, hash, decoder, found).is_some()
    };
    let mut found = vec![0; PAGE];
    assert!(find(40, &mut found));
    assert_eq!(found, page(40));
    // Page 41 has not been decoded before its base is evicted.
    let place = |number| {
        let key = index_key(&pages.group, keys.fingerprint(&page(number)));
        crate::lock(&store.0.state).index[&key] >> PAGE_BITS
    };
    let of_base = place(40);
    crate::lock(&store.0.state)
        .packets
        .remove(&of_base)
        .unwrap();
    assert!(!find(41, &mut found));
    // A decoder that has met such a packet goes on.
    assert!(find(2, &mut found));
    assert_eq!(found, page(2));
}

/// A packet is not kept after the bases of the one before it.
#[test]
fn a_source_keeps_each_packet_with_its_own_bases() {
    let store = PageStore::new(1 << 20, Vec::new()).unwrap();
    let keys = Keys::decode(&[7; KEYS_LEN]);
    let sender = StoreSender::new(store.of_guest(None), Arc::default());
    let sender = Arc::new(sender);
    let (near, _far) = pair();
    let (mut writer, _listener) = StoreWriter::new(sender.clone(), near, LAYOUT);
    let tell = |message| sender.take(message, &Verdicts::default()).unwrap();
    let mut send = |page: &[u8], seeks_bases| {
        let mut header = RamHeader::new(LAYOUT);
        header.set_pages(&[0], &[], LAYOUT).unwrap();
        let mut out = vec![0; 2 * PAGE];
        assert!(writer.plan(page, seeks_bases));
        let len = writer.encode(page, &mut out).unwrap();
        let encoded = match len {
            Some(len) => (Method::ZstdFrames, &out[..len]),
            None => (Method::None, page),
        };
        writer.note(&header, page, None, encoded);
        let state = crate::lock(&store.0.state);
        let (_, kept) = state.packets.last_key_value().unwrap();
        match &*crate::lock(&kept.content) {
            Content::Encoded(_, _, bases) => bases.len(),
            Content::Pages(..) => panic!("nobody has asked for a page of it"),
        }
    };
    tell(Message::Keys(keys));
    let (first, mut second) = (page(1), page(1));
    second[9] ^= 1;
    assert_eq!(send(&first, true), 0);
    tell(Message::List(vec![keys.fingerprint(&first)]));
    assert_eq!(send(&second, true), 1);
    for seeks_bases in [false, true] {
        assert_eq!(send(&page(3), seeks_bases), 0);
    }
}

#[test]
fn another_group_gets_nothing_even_with_the_hash() {
    let (store, keys) = store_of("acme-1");
    let (fingerprint, hash) = (keys.fingerprint(&page(2)), keys.hash(&page(2)));
    for name in ["shop-1", "alone"] {
        assert_eq!(
            refer(&store, name, fingerprint, hash),
            (false, true),
            "{name}"
        );
        let pages = store.of_guest(Some(name)).unwrap();
        let (list, _) = pages.list(0, usize::MAX);
        assert!(list.is_empty(), "{name}: {list:?}");
    }
}

#[test]
fn guests_without_a_name_are_in_no_group() {
    let (store, _) = store_of("acme-1");
    assert!(store.of_guest(None).is_none());
    assert!(store.of_guest(Some("")).is_none());
    let of_all = PageStore::new(1 << 20, Vec::new()).unwrap();
    let groups = [None, Some("web1")].map(|name| of_all.of_guest(name).unwrap().group);
    assert_eq!(groups[0], groups[1]);
}

/// A source may choose other pages than the store has: of the same fingerprint and hash, but longer.
#[test]
fn a_page_of_another_size_is_not_found() {
    let (store, keys) = store_of("acme-1");
    // Decodes the packet.
    let (fingerprint, hash) = (keys.fingerprint(&page(0)), keys.hash(&page(0)));
    let pages = store.of_guest(Some("acme-2")).unwrap();
    let mut found = vec![0; PAGE];
    let is_found = pages.find(fingerprint, hash, &mut Decoder::new(LAYOUT), &mut found);
    assert!(is_found.is_some());
    for size in [PAGE / 2, 2 * PAGE, 8 * PAGE] {
        let layout = Layout::new(u32::try_from(size).unwrap()).unwrap();
        let mut longer = vec![0; size];
        let is_found = pages.find(fingerprint, hash, &mut Decoder::new(layout), &mut longer);
        assert!(is_found.is_none());
        assert!(longer.iter().all(|byte| *byte == 0));
    }
}

/// Pages of which hardly anything is sent cost memory, too: their entries in the index.
#[test]
fn the_limit_holds_for_pages_that_shrink_to_nothing() {
    const LIMIT: usize = 1 << 20;
    let store = PageStore::new(LIMIT, Vec::new()).unwrap();
    let pages = store.of_guest(None).unwrap();
    for packet in 0..2000 {
        let fingerprints: Vec<_> = (0..128).map(|page| 1 + 128 * packet + page).collect();
        let sketches: Vec<_> = fingerprints.iter().map(|it| [*it; 2]).collect();
        pages.keep(&Keep {
            method: Method::ZstdFrames,
            payload: &[7; 20],
            page_size: PAGE,
            fingerprints: &fingerprints,
            sketches: &sketches,
            bases: &[],
        });
        pages.find(1, [0; 16], &mut Decoder::new(LAYOUT), &mut [0; PAGE]);
    }
    let state = crate::lock(&store.0.state);
    let (entries, pages) = (state.index.len(), state.usage.pages);
    assert!(entries * 40 + pages * 12 <= LIMIT, "{entries}, {pages}");
}
