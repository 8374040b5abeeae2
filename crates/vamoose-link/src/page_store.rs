//! The page store: pages of guests that came to this host or left it, so that guests that are alike move their common pages once.
//!
//! Guests of one image have most pages in common. A destination with a store tells a source by **fingerprints** which pages it has.
//! A source then sends such a page as a **reference**: its fingerprint and the hash of its content. A page that only resembles one
//! that the destination has is encoded after that **base**. A source finds bases among the pages that have left its host: by
//! **sketches**, two parts of each page.
//!
//! ```text
//!  source                                              destination
//!     <── keys ─────────────────────────────────────────
//!     <── list: fingerprints of pages in the store ─────   goes on beside the packets, also with pages that come meanwhile
//!   packet 1, before the keys ─────────────────────────>
//!   packet 2: pages, fingerprints of all its pages ────>   keeps the encoded packet with its fingerprints
//!   packet 3: pages, fingerprints, references ─────────>   looks the references up, and compares the hashes
//!     <── verdict: references and bases not found ──────
//!   packet 4: the pages that were not found ───────────>
//!   SYNC, when each reference has its verdict ─────────>
//! ```
//!
//! Keys, list and verdicts go the other way on the streams of the channels ([`messages`]), where nothing else goes.
//!
//! # Why no page is wrong
//! A fingerprint (32 bits, about 0.1 µs) only says where to look. The hash decides: 16 bytes of BLAKE3 under a key of the
//! store, over the whole page, compared with the page that the store really has. A page that was evicted, a list that lies and two
//! pages with one fingerprint all end the same way: the verdict says that the page was not found, and the source sends it. The
//! source keeps the page until then. It goes on the same channel and before the SYNC, so in the same epoch as the reference: no later
//! version of the page can be overtaken.
//!
//! A packet that needs a base which is not found is not decoded: all its encoded pages are missing. A kept packet is decoded when a
//! page of it is wanted, after its bases; if one of these has been evicted meanwhile, the page is not found. A base's packet has been
//! decoded when the base was found, so no chain of packets has to be decoded.
//!
//! # What it costs guests that have nothing in common
//! The store keeps packets as they came, encoded. It neither decodes nor hashes a page before a reference to its packet comes.
//!
//! # Who may learn what
//! A store is for guests that may know of each other: **groups** keep others apart. SECURITY.md has what a guest can learn. The keys
//! are new with each process, and known to the hosts only, so a guest can neither compute fingerprints nor hashes.

mod fingerprint;
mod messages;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt, io,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use multifd::Method;
use tracing::warn;
use vamoose_codec::{
    Decoder,
    shared::{Fingerprint, PageHash},
};
use zeroize::Zeroizing;

use self::fingerprint::{Keys, Sketch};
pub use self::{
    receiver::StoreLister,
    sender::{StoreListener, StoreSender},
};
pub(crate) use self::{
    receiver::{Parts, StoreReader},
    sender::{MANY_UNDECIDED, StoreWriter},
};
use crate::{lock, memory::return_freed, tls::matches};

/// The pages of a process, shared by its migrations. In memory only, and wiped when they are dropped.
#[derive(Clone)]
pub struct PageStore(Arc<Store>);

/// The store as one guest sees it: only pages of guests of the same group.
#[derive(Clone, Debug)]
pub struct GuestPages {
    store: PageStore,
    group: Group,
}

/// Hash of a pattern, or of the name of a guest that shares pages with no other.
type Group = PageHash;

/// What a store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUse {
    /// Bytes of memory.
    pub bytes: usize,
    /// Pages.
    pub pages: usize,
    /// Pages that references were given since it was made.
    pub hits: u64,
    /// Pages that it has evicted since then.
    pub evictions: u64,
}

struct Store {
    keys: Keys,
    /// Patterns of guests' names. Empty: all guests are one group.
    groups: Vec<String>,
    hits: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    limit: usize,
    usage: StoreUse,
    /// By order of arrival; the first is evicted first.
    packets: BTreeMap<u64, Arc<Kept>>,
    next: u64,
    /// Where pages are, of packets before `indexed`: by fingerprints, and by the parts of sketches.
    index: BTreeMap<IndexKey, Place>,
    indexed: u64,
}

/// A part of the group, and a fingerprint: what is found may be another group's.
type IndexKey = u64;

/// The number of the packet, and in the lowest bits the page in it.
type Place = u64;

/// Packets that are put into the index without a pause: some milliseconds.
const INDEXED_AT_ONCE: usize = 32;

/// A packet has fewer pages.
const PAGE_BITS: u32 = 16;

/// A packet in the store.
struct Kept {
    group: Group,
    page_size: usize,
    fingerprints: Box<[Fingerprint]>,
    /// Of the pages, if they left this host.
    sketches: Box<[Sketch]>,
    content: Mutex<Content>,
    /// Memory taken by all of this. Changes with the lock of the state only.
    bytes: AtomicUsize,
    /// Was referred to since it came, or was last spared.
    was_used: AtomicBool,
}

enum Content {
    /// After these bases.
    Encoded(Method, Zeroizing<Vec<u8>>, Box<[(Weak<Kept>, usize)]>),
    /// Decoded when a first page was wanted, with the hash of each page that was compared.
    Pages(Zeroizing<Vec<u8>>, Box<[Option<PageHash>]>),
}

/// A page of a packet in the store.
struct KeptPage {
    packet: Arc<Kept>,
    index: usize,
}

/// A packet's pages, to be kept.
struct Keep<'a> {
    method: Method,
    payload: &'a [u8],
    page_size: usize,
    fingerprints: &'a [Fingerprint],
    sketches: &'a [Sketch],
    bases: &'a [KeptPage],
}

/// Freed blocks of this length go back to the system: most packets.
const RETURNED: u32 = 32 << 10;

/// Bytes that a packet takes beside its content and pages.
const OVERHEAD: usize = 256;

/// Bytes that a page takes beside its content: its fingerprint, and its entry of the index, whose nodes are half full at least.
const PAGE_OVERHEAD: usize = size_of::<Fingerprint>() + ENTRY;
const ENTRY: usize = 5 * size_of::<(IndexKey, Place)>() / 2;

/// The same of its sketch.
const SKETCH_OVERHEAD: usize = size_of::<Sketch>() + 2 * ENTRY;

impl PageStore {
    /// A store of at most `limit` bytes. With `groups`, patterns of guests' names, a guest shares pages only with guests that match the
    /// same first pattern; a guest that matches none shares with nobody but itself, when it comes back. Of a guest without a name
    /// nothing is kept then.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new(limit: usize, groups: Vec<String>) -> io::Result<Self> {
        return_freed(RETURNED);
        let state = State {
            limit,
            ..State::default()
        };
        Ok(Self(Arc::new(Store {
            keys: Keys::random()?,
            groups,
            hits: AtomicU64::new(0),
            state: Mutex::new(state),
        })))
    }

    /// Changes the limit, and evicts what is beyond.
    pub fn set_limit(&self, limit: usize) {
        let mut state = lock(&self.0.state);
        state.limit = limit;
        state.evict();
    }

    /// The store for the guest of this name. `None` if there are groups and its name is unknown: it could be anybody's.
    pub fn of_guest(&self, name: Option<&str>) -> Option<GuestPages> {
        let Store { groups, keys, .. } = &*self.0;
        let name = name.filter(|name| !name.is_empty());
        let pattern = |name| groups.iter().find(|pattern| matches(pattern, name));
        let group = match (groups.is_empty(), name.map(|name| (name, pattern(name)))) {
            (true, _) => keys.hash(b"group "),
            (false, Some((_, Some(pattern)))) => {
                keys.hash(&[b"group ", pattern.as_bytes()].concat())
            }
            (false, Some((name, None))) => keys.hash(&[b"guest ", name.as_bytes()].concat()),
            (false, None) => {
                warn!(
                    "nothing of this guest is kept: the page store has groups, and the guest no known name"
                );
                return None;
            }
        };
        let store = self.clone();
        Some(GuestPages { store, group })
    }

    /// What the store holds now.
    pub fn usage(&self) -> StoreUse {
        let hits = self.0.hits.load(Ordering::Relaxed);
        let usage = lock(&self.0.state).usage;
        StoreUse { hits, ..usage }
    }
}

impl fmt::Debug for PageStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PageStore").field(&self.usage()).finish()
    }
}

impl GuestPages {
    fn keys(&self) -> &Keys {
        &self.store.0.keys
    }

    fn keep(&self, packet: &Keep<'_>) {
        let Keep {
            fingerprints,
            sketches,
            bases,
            ..
        } = *packet;
        if fingerprints.iter().all(|it| *it == 0) {
            return;
        }
        let after = bases
            .iter()
            .map(|base| (Arc::downgrade(&base.packet), base.index));
        let payload = Zeroizing::new(packet.payload.to_vec());
        let bytes = OVERHEAD
            + PAGE_OVERHEAD * fingerprints.len()
            + SKETCH_OVERHEAD * sketches.len()
            + size_of::<(Weak<Kept>, usize)>() * bases.len()
            + payload.len();
        let kept = Arc::new(Kept {
            group: self.group,
            page_size: packet.page_size,
            fingerprints: fingerprints.into(),
            sketches: sketches.into(),
            content: Mutex::new(Content::Encoded(packet.method, payload, after.collect())),
            bytes: AtomicUsize::new(bytes),
            was_used: AtomicBool::new(false),
        });
        lock(&self.store.0.state).add(kept);
    }

    /// Fingerprints of pages that came after the packet `from`, at least `most` of them if there are as many, and from where to go
    /// on.
    fn list(&self, from: u64, most: usize) -> (Vec<Fingerprint>, u64) {
        let state = lock(&self.store.0.state);
        let mut list = Vec::new();
        for (number, kept) in state.packets.range(from..) {
            if list.len() >= most {
                return (list, *number);
            }
            if kept.group == self.group {
                list.extend(kept.fingerprints.iter().filter(|it| **it != 0));
            }
        }
        (list, state.next)
    }

    /// Copies the page with this fingerprint and hash to `page`. `None` if the store does not have it.
    fn find(
        &self,
        fingerprint: Fingerprint,
        hash: PageHash,
        decoder: &mut Decoder,
        page: &mut [u8],
    ) -> Option<KeptPage> {
        self.index_all();
        let found = lock(&self.store.0.state).find(self.group, index_key(&self.group, fingerprint));
        found.filter(|found| self.copy(found, Some(hash), decoder, page))
    }

    fn count_hit(&self) {
        self.store.0.hits.fetch_add(1, Ordering::Relaxed);
    }

    /// For each of these pages of `page_size` bytes one that resembles it.
    fn similar(&self, sketches: &[Sketch], page_size: usize) -> Vec<Option<KeptPage>> {
        self.index_all();
        let state = lock(&self.store.0.state);
        let similar = |sketch: &Sketch| {
            let parts = sketch.iter().filter(|part| **part != 0);
            let found = parts.filter_map(|it| state.find(self.group, part_key(&self.group, *it)));
            let mut found = found.filter(|it| it.packet.page_size == page_size);
            found.next()
        };
        sketches.iter().map(similar).collect()
    }

    /// Others may use the store meanwhile: there may be many packets since the last call.
    fn index_all(&self) {
        while !lock(&self.store.0.state).index_some() {}
    }

    /// Copies a page to `page`, if it is as long and has this hash. Whether it has.
    fn copy(
        &self,
        from: &KeptPage,
        hash: Option<PageHash>,
        decoder: &mut Decoder,
        page: &mut [u8],
    ) -> bool {
        let KeptPage { packet, index } = from;
        // A hash is of a page of the kept packet's size, whatever the size of this guest's.
        if packet.page_size != page.len() {
            return false;
        }
        let mut content = lock(&packet.content);
        if let Content::Encoded(method, payload, bases) = &*content {
            let Some(pages) = self.decode(packet, (*method, payload), bases, decoder) else {
                // It never can be.
                *content = Content::Pages(Zeroizing::default(), Box::default());
                return false;
            };
            let hashes = vec![None; packet.fingerprints.len()].into_boxed_slice();
            let decoded = pages.len() + size_of_val(&*hashes);
            let grown = decoded.saturating_sub(payload.len());
            *content = Content::Pages(pages, hashes);
            lock(&self.store.0.state).grow(packet, grown);
        }
        let Content::Pages(pages, hashes) = &mut *content else {
            return false;
        };
        let found = pages.chunks(page.len()).nth(*index);
        let Some((found, known)) = found.zip(hashes.get_mut(*index)) else {
            return false;
        };
        if hash.is_some_and(|hash| hash != *known.get_or_insert_with(|| self.keys().hash(found))) {
            return false;
        }
        page.copy_from_slice(found);
        packet.was_used.store(true, Ordering::Relaxed);
        true
    }

    /// The pages of a packet. The packets of its bases are decoded already, so that packets do not wait for each other.
    fn decode(
        &self,
        packet: &Kept,
        (method, payload): (Method, &[u8]),
        bases: &[(Weak<Kept>, usize)],
        decoder: &mut Decoder,
    ) -> Option<Zeroizing<Vec<u8>>> {
        let mut earlier = Zeroizing::new(vec![0; bases.len() * packet.page_size]);
        for ((base, index), to) in bases.iter().zip(earlier.chunks_mut(packet.page_size)) {
            let (packet, index) = (base.upgrade()?, *index);
            let base = KeptPage { packet, index };
            self.copy(&base, None, decoder, to).then_some(())?;
        }
        let mut pages = Zeroizing::new(vec![0; packet.fingerprints.len() * packet.page_size]);
        let decoded = decoder.decode_after(method, payload, &earlier, &mut pages);
        if decoded.is_err() {
            decoder.reset();
        }
        decoded.ok().map(|()| pages)
    }
}

impl State {
    fn add(&mut self, kept: Arc<Kept>) {
        self.usage.bytes += kept.bytes.load(Ordering::Relaxed);
        self.usage.pages += kept.fingerprints.len();
        self.packets.insert(self.next, kept);
        self.next += 1;
        self.evict();
    }

    /// A packet has been decoded, and takes so much more memory.
    fn grow(&mut self, kept: &Kept, bytes: usize) {
        // It may have been evicted meanwhile.
        if kept.bytes.load(Ordering::Relaxed) > 0 {
            kept.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.usage.bytes += bytes;
            self.evict();
        }
    }

    /// Puts some packets that have come since the last reference into the index. Whether these were all.
    fn index_some(&mut self) -> bool {
        let new = self.packets.range(self.indexed..);
        for (number, kept) in new.take(INDEXED_AT_ONCE) {
            self.indexed = number + 1;
            for (page, fingerprint) in (0..).zip(&kept.fingerprints) {
                let key = index_key(&kept.group, *fingerprint);
                self.index.insert(key, *number << PAGE_BITS | page);
            }
            // The first page with a part stays its base: its packet may be decoded already.
            for (page, sketch) in (0..).zip(&kept.sketches) {
                for part in sketch.iter().filter(|part| **part != 0) {
                    let entry = self.index.entry(part_key(&kept.group, *part));
                    entry.or_insert(*number << PAGE_BITS | page);
                }
            }
        }
        self.packets.range(self.indexed..).next().is_none()
    }

    /// A page of the group, if its packet is in the index.
    fn find(&self, group: Group, key: IndexKey) -> Option<KeptPage> {
        let place = *self.index.get(&key)?;
        let packet = self.packets.get(&(place >> PAGE_BITS))?;
        let index = usize::try_from(place % (1 << PAGE_BITS)).ok()?;
        let packet = (packet.group == group).then(|| packet.clone())?;
        Some(KeptPage { packet, index })
    }

    /// Evicts the oldest packets until the rest fits. A packet that was used is spared once: it becomes the newest.
    fn evict(&mut self) {
        while self.usage.bytes > self.limit
            && let Some((number, kept)) = self.packets.pop_first()
        {
            if number < self.indexed {
                let fingerprints = kept.fingerprints.iter();
                let parts = kept.sketches.iter().flatten();
                let keys = fingerprints.map(|it| index_key(&kept.group, *it));
                for key in keys.chain(parts.map(|it| part_key(&kept.group, *it))) {
                    let place = self.index.get(&key);
                    if place.is_some_and(|place| *place >> PAGE_BITS == number) {
                        self.index.remove(&key);
                    }
                }
            }
            if kept.was_used.swap(false, Ordering::Relaxed) {
                self.packets.insert(self.next, kept);
                self.next += 1;
                continue;
            }
            self.usage.bytes -= kept.bytes.swap(0, Ordering::Relaxed);
            self.usage.pages -= kept.fingerprints.len();
            self.usage.evictions += kept.fingerprints.len() as u64;
        }
    }
}

fn index_key(group: &Group, fingerprint: Fingerprint) -> IndexKey {
    let [a, b, c, d, ..] = *group;
    u64::from(u32::from_be_bytes([a, b, c, d])) << 32 | u64::from(fingerprint)
}

/// Another than that of any fingerprint.
fn part_key(group: &Group, part: Fingerprint) -> IndexKey {
    !index_key(group, !part)
}
