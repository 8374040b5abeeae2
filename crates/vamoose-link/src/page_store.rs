//! The page store: pages of guests that came to this host or left it, so that guests that are alike move their common pages once.
//!
//! Guests of one image have most pages in common. A destination with a store tells a source by **fingerprints** which pages it has.
//! A source then sends such a page as a **reference**: its fingerprint and the hash of its content.
//!
//! ```text
//!  source                                              destination
//!     <── keys ─────────────────────────────────────────
//!     <── list: fingerprints of pages in the store ─────   goes on beside the packets, also with pages that come meanwhile
//!   packet 1, before the keys ─────────────────────────>
//!   packet 2: pages, fingerprints of all its pages ────>   keeps the encoded packet with its fingerprints
//!   packet 3: pages, fingerprints, references ─────────>   looks the references up, and compares the hashes
//!     <── verdict: references that were not found ──────
//!   packet 4: the pages that were not found ───────────>
//!   SYNC, when each reference has its verdict ─────────>
//! ```
//!
//! Keys, list and verdicts go the other way on the streams of the channels ([`messages`]), where nothing else goes.
//!
//! # Why no page is wrong
//! A fingerprint (32 words of a page, 30 ns) only says where to look. The hash decides: 16 bytes of BLAKE3 under a key of the
//! store, over the whole page, compared with the page that the store really has. A page that was evicted, a list that lies and two
//! pages with one fingerprint all end the same way: the verdict says that the page was not found, and the source sends it. The
//! source keeps the page until then. It goes on the same channel and before the SYNC, so in the same epoch as the reference: no later
//! version of the page can be overtaken.
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
    collections::{BTreeMap, HashMap},
    fmt, io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use multifd::Method;
use vamoose_codec::{
    Decoder,
    shared::{Fingerprint, PageHash},
};
use zeroize::Zeroizing;

use self::fingerprint::Keys;
pub use self::{
    receiver::StoreLister,
    sender::{StoreListener, StoreSender},
};
pub(crate) use self::{
    receiver::{Parts, StoreReader},
    sender::{MANY_UNDECIDED, StoreWriter},
};
use crate::{lock, tls::matches};

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
    /// Where pages are, of packets before `indexed`.
    index: HashMap<(Group, Fingerprint), (u64, usize)>,
    indexed: u64,
}

/// A packet in the store.
struct Kept {
    group: Group,
    fingerprints: Box<[Fingerprint]>,
    content: Mutex<Content>,
    /// Memory taken by all of this. Changes with the lock of the state only.
    bytes: AtomicUsize,
    /// Was referred to since it came, or was last spared.
    was_used: AtomicBool,
}

enum Content {
    Encoded(Method, Zeroizing<Vec<u8>>),
    /// Decoded for a first reference, with the hash of each page.
    Pages(Zeroizing<Vec<u8>>, Box<[PageHash]>),
}

/// Bytes that a packet takes beside its content and fingerprints.
const OVERHEAD: usize = 256;

impl PageStore {
    /// A store of at most `limit` bytes. With `groups`, patterns of guests' names, a guest shares pages only with guests that match the
    /// same first pattern; a guest that matches none shares with nobody but itself, when it comes back.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new(limit: usize, groups: Vec<String>) -> io::Result<Self> {
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

    /// The store for the guest of this name.
    pub fn of_guest(&self, name: Option<&str>) -> GuestPages {
        let Store { groups, keys, .. } = &*self.0;
        let name = name.unwrap_or_default();
        let of_all = groups.is_empty().then_some("");
        let pattern = || groups.iter().find(|pattern| matches(pattern, name));
        let group = match of_all.or_else(|| pattern().map(String::as_str)) {
            Some(pattern) => keys.hash(&[b"group ", pattern.as_bytes()].concat()),
            None => keys.hash(&[b"guest ", name.as_bytes()].concat()),
        };
        let store = self.clone();
        GuestPages { store, group }
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

    /// Keeps a packet of pages with these fingerprints.
    fn keep(&self, method: Method, payload: &[u8], fingerprints: &[Fingerprint]) {
        if fingerprints.iter().all(|it| *it == 0) {
            return;
        }
        let content = Content::Encoded(method, Zeroizing::new(payload.to_vec()));
        let kept = Arc::new(Kept {
            group: self.group,
            fingerprints: fingerprints.into(),
            content: Mutex::new(content),
            bytes: AtomicUsize::new(OVERHEAD + size_of_val(fingerprints) + payload.len()),
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

    /// Copies the page with this fingerprint and hash to `page`. False if the store does not have it.
    fn find(
        &self,
        fingerprint: Fingerprint,
        hash: PageHash,
        decoder: &mut Decoder,
        page: &mut [u8],
    ) -> bool {
        let found = lock(&self.store.0.state).find(self.group, fingerprint);
        let Some((kept, index)) = found else {
            return false;
        };
        let mut content = lock(&kept.content);
        if let Content::Encoded(method, payload) = &*content {
            let mut pages = Zeroizing::new(vec![0; kept.fingerprints.len() * page.len()]);
            if decoder.decode(*method, payload, &mut pages).is_err() {
                return false;
            }
            let grown = pages.len().saturating_sub(payload.len());
            let hashes = pages.chunks(page.len()).map(|it| self.keys().hash(it));
            let hashes = hashes.collect();
            *content = Content::Pages(pages, hashes);
            lock(&self.store.0.state).grow(&kept, grown);
        }
        let Content::Pages(pages, hashes) = &*content else {
            return false;
        };
        let found = pages.chunks(page.len()).nth(index).zip(hashes.get(index));
        let Some((found, _)) = found.filter(|(_, is)| **is == hash) else {
            return false;
        };
        page.copy_from_slice(found);
        kept.was_used.store(true, Ordering::Relaxed);
        self.store.0.hits.fetch_add(1, Ordering::Relaxed);
        true
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

    /// Where a page is, after the packets that have come since the last reference are in the index.
    fn find(&mut self, group: Group, fingerprint: Fingerprint) -> Option<(Arc<Kept>, usize)> {
        for (number, kept) in self.packets.range(self.indexed..) {
            for (page, fingerprint) in kept.fingerprints.iter().enumerate() {
                self.index
                    .insert((kept.group, *fingerprint), (*number, page));
            }
        }
        self.indexed = self.next;
        let (number, page) = *self.index.get(&(group, fingerprint))?;
        Some((self.packets.get(&number)?.clone(), page))
    }

    /// Evicts the oldest packets until the rest fits. A packet that was used is spared once: it becomes the newest.
    fn evict(&mut self) {
        while self.usage.bytes > self.limit
            && let Some((number, kept)) = self.packets.pop_first()
        {
            if number < self.indexed {
                for fingerprint in &kept.fingerprints {
                    let key = (kept.group, *fingerprint);
                    if self.index.get(&key).is_some_and(|(at, _)| *at == number) {
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
