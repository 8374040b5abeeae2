//! The source's side: what the destination's store has, and references that have no verdict yet.

use std::{
    collections::{HashSet, VecDeque},
    io, mem,
    sync::{
        Arc, Condvar, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use multifd::{BlockName, Layout, Method, RamHeader};
use tracing::debug;
use vamoose_codec::{
    Decoder, EncodeError, Encoder, Settings, encoder,
    shared::{Base, Fingerprint, MOST_BASES, Reference, Table},
};

use super::{
    GuestPages, Keep, KeptPage,
    fingerprint::{Keys, Sketch},
    messages::Message,
};
use crate::{Session, Stats, Stream, chain, left, lock};

/// A migration to a destination with a page store, shared by all its channels.
pub struct StoreSender {
    offer: RwLock<Offer>,
    /// The store of this host, which keeps what leaves.
    own: Option<GuestPages>,
    stats: Arc<Stats>,
    found: AtomicU64,
    missed: AtomicU64,
}

#[derive(Default)]
struct Offer {
    keys: Option<Keys>,
    fingerprints: HashSet<Fingerprint>,
}

/// Fingerprints that are remembered: of 28 GiB in pages of 4 KiB. A set of 40 MiB is full then; for more it would double.
const MOST_OFFERED: usize = 7 << 20;

/// Bytes of pages without a verdict from which a channel waits for verdicts: what a fast link carries in a round trip.
pub(crate) const MANY_UNDECIDED: usize = 8 << 20;

/// Packets that do not shrink which a channel adds to the store, and one more for each that does.
const RAW_PACKETS: u32 = 16;

/// Buffers for pages without a verdict that a channel keeps.
const MOST_SPARE: usize = 16;

/// Fewer missed references than this say nothing yet.
const FEW: u64 = 256;

impl StoreSender {
    /// For a migration of the guest of this name over `session`, if its destination has a store.
    pub fn over(session: &Session, guest: Option<&str>, stats: Arc<Stats>) -> Option<Self> {
        let own = session.config().page_store.as_ref();
        let own = own.and_then(|store| store.of_guest(guest));
        session.has_store().then(|| Self::new(own, stats))
    }

    /// For one migration. Its packets are kept in `own` too, for the day the guest comes back.
    pub fn new(own: Option<GuestPages>, stats: Arc<Stats>) -> Self {
        Self {
            offer: RwLock::default(),
            own,
            stats,
            found: AtomicU64::new(0),
            missed: AtomicU64::new(0),
        }
    }

    /// Number of fingerprints that the destination has listed so far. `None` before its keys have come.
    pub fn offered(&self) -> Option<usize> {
        let offer = self.offer.read().unwrap_or_else(PoisonError::into_inner);
        offer.keys.map(|_| offer.fingerprints.len())
    }

    /// Reads what the destination says on the stream of a channel, until the stream ends.
    fn listen(&self, stream: &Stream, verdicts: &Verdicts) {
        let end = loop {
            let message = Message::read(stream);
            let message = message.and_then(|it| it.ok_or(io::ErrorKind::BrokenPipe.into()));
            if let Err(error) = message.and_then(|it| self.take(it, verdicts)) {
                break error;
            }
        };
        debug!("the way back of a channel has ended: {}", chain(&end));
        lock(&verdicts.state).end = Some(end);
        verdicts.changed.notify_all();
    }

    pub(super) fn take(&self, message: Message, verdicts: &Verdicts) -> io::Result<()> {
        match message {
            Message::Keys(keys) => {
                let mut offer = self.offer.write().unwrap_or_else(PoisonError::into_inner);
                offer.keys.get_or_insert(keys);
            }
            Message::List(list) => {
                let mut offer = self.offer.write().unwrap_or_else(PoisonError::into_inner);
                let room = MOST_OFFERED.saturating_sub(offer.fingerprints.len());
                offer.fingerprints.extend(list.into_iter().take(room));
            }
            Message::Verdict(missing) => {
                let mut state = lock(&verdicts.state);
                state.due = state.due.checked_sub(1).ok_or_else(not_sent)?;
                state.came.push_back(missing);
                verdicts.changed.notify_all();
            }
        }
        Ok(())
    }

    /// Whether references are found often enough to be sent.
    fn is_of_use(&self) -> bool {
        let [found, missed] =
            [&self.found, &self.missed].map(|count| count.load(Ordering::Relaxed));
        missed < FEW + found
    }
}

/// The verdicts on a channel's references.
#[derive(Default)]
pub(super) struct Verdicts {
    state: Mutex<VerdictState>,
    changed: Condvar,
}

#[derive(Default)]
struct VerdictState {
    /// Packets with references for which none has come.
    due: usize,
    came: VecDeque<Vec<u16>>,
    /// Why no more come.
    end: Option<io::Error>,
}

fn not_sent() -> io::Error {
    io::Error::other("the destination's page store asks for pages that it was not sent")
}

/// Reads the destination's messages on one channel.
pub struct StoreListener {
    sender: Arc<StoreSender>,
    stream: Arc<Stream>,
    verdicts: Arc<Verdicts>,
}

impl StoreListener {
    /// Reads until the stream ends. Ends no later than the stream is shut down.
    pub fn run(&self) {
        self.sender.listen(&self.stream, &self.verdicts);
    }
}

/// The references of one writer, which is its channel's only one.
pub(crate) struct StoreWriter {
    sender: Arc<StoreSender>,
    verdicts: Arc<Verdicts>,
    /// Without a verdict, in the order of their packets.
    undecided: VecDeque<Undecided>,
    undecided_bytes: usize,
    /// Memory for pages without a verdict.
    spare: Vec<Vec<u8>>,
    page_size: usize,
    table: Table,
    /// The pages that are not references, if there are references.
    rest: Vec<u8>,
    /// See [`Self::takes_raw`].
    raw_packets: u32,
    /// Of the encoded pages, under the keys of this host's store.
    own: Vec<Fingerprint>,
    sketches: Vec<Sketch>,
    bases: Bases,
}

/// What the encoded pages of a packet resemble, of the pages that this host's store keeps.
struct Bases {
    layout: Layout,
    /// Made when it is first needed.
    encoder: Option<Encoder>,
    decoder: Decoder,
    /// Of the planned packet.
    pages: Vec<KeptPage>,
    /// Their content.
    earlier: Vec<u8>,
    /// Packets in a row without bases, see [`Self::are_sought`].
    without: u32,
    /// Packets whose bases the destination had, and packets that were sent again since it had not.
    used: u32,
    lost: u32,
}

/// After so many packets in a row without bases, these are sought for one packet in so many.
const SOUGHT_FOR_ONE_IN: u32 = 16;

/// With fewer bases than this part of its encoded pages, a packet is encoded better without.
const FEWEST_BASES: usize = 8;

/// The pages of a packet that the destination may not have found.
pub(crate) struct Undecided {
    pub(crate) block: BlockName,
    /// Of the references, and then of the encoded pages if the packet has bases.
    pub(crate) offsets: Vec<u64>,
    pub(crate) pages: Vec<u8>,
    reference_count: usize,
}

impl StoreWriter {
    pub(crate) fn new(
        sender: Arc<StoreSender>,
        stream: Arc<Stream>,
        layout: Layout,
    ) -> (Self, StoreListener) {
        let bases = Bases {
            layout,
            encoder: None,
            decoder: Decoder::new(layout),
            pages: Vec::new(),
            earlier: Vec::new(),
            without: 0,
            used: 0,
            lost: 0,
        };
        let verdicts = Arc::<Verdicts>::default();
        let listener = StoreListener {
            sender: sender.clone(),
            stream,
            verdicts: verdicts.clone(),
        };
        let writer = Self {
            sender,
            verdicts,
            undecided: VecDeque::new(),
            undecided_bytes: 0,
            spare: Vec::new(),
            page_size: layout.page_size(),
            table: Table::default(),
            rest: Vec::new(),
            raw_packets: RAW_PACKETS,
            own: Vec::new(),
            sketches: Vec::new(),
            bases,
        };
        (writer, listener)
    }

    /// Plans the table of a packet, with bases or without. False before the destination's keys have come.
    pub(crate) fn plan(&mut self, pages: &[u8], seeks_bases: bool) -> bool {
        let Self {
            sender,
            table,
            page_size,
            own: own_fingerprints,
            sketches,
            bases,
            ..
        } = self;
        table.fingerprints.clear();
        table.references.clear();
        own_fingerprints.clear();
        sketches.clear();
        table.bases.clear();
        bases.clear();
        let offer = sender.offer.read().unwrap_or_else(PoisonError::into_inner);
        let Some(keys) = offer.keys else {
            return false;
        };
        let refers = !offer.fingerprints.is_empty() && sender.is_of_use();
        for (index, page) in pages.chunks_exact(*page_size).enumerate() {
            let fingerprint = keys.fingerprint(page);
            table.fingerprints.push(fingerprint);
            if refers && offer.fingerprints.contains(&fingerprint) {
                table.references.push(Reference {
                    page: index,
                    hash: keys.hash(page),
                });
            } else if let Some(own) = &sender.own {
                own_fingerprints.push(own.keys().fingerprint(page));
                sketches.push(own.keys().sketch(page));
            }
        }
        drop(offer);
        if let Some(own) = &sender.own
            && refers
            && seeks_bases
        {
            let is_offered = |fingerprint| {
                let offer = sender.offer.read().unwrap_or_else(PoisonError::into_inner);
                offer.fingerprints.contains(&fingerprint)
            };
            bases.plan((own, sketches), (&keys, &is_offered), *page_size, table);
        }
        true
    }

    /// Encodes the pages to be encoded after the bases of the planned packet, in `out`. Returns the length. `None` if there are no bases,
    /// or the pages do not shrink; the table then has no bases.
    pub(crate) fn encode(
        &mut self,
        pages: &[u8],
        out: &mut [u8],
    ) -> Result<Option<usize>, EncodeError> {
        if self.table.bases.is_empty() {
            return Ok(None);
        }
        let Bases {
            layout,
            encoder: slot,
            earlier,
            ..
        } = &mut self.bases;
        let encoder = match slot {
            Some(encoder) => encoder,
            None => {
                let settings = Settings::new(Method::ZstdFrames, Some(1))?;
                slot.insert(encoder(&settings, *layout)?)
            }
        };
        let encoded = encoder.encode_after(earlier, pages, out)?;
        let len = (encoded.method == Method::ZstdFrames).then_some(encoded.payload.len());
        match len {
            Some(_) => self.bases.without = 0,
            None => {
                self.table.bases.clear();
                self.bases.clear();
            }
        }
        Ok(len)
    }

    /// Whether packets that do not shrink have a table too. Guests that are alike have such pages in common, such as compressed files.
    /// In memory that hardly shrinks anywhere they are noise more often, and cost both ends more than they bring.
    pub(crate) fn takes_raw(&self) -> bool {
        self.raw_packets > 0
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// The pages to be encoded, in a buffer to be [given back](Self::note): those of the planned packet that are not references.
    /// `None` if these are all.
    pub(crate) fn rest(&mut self, pages: &[u8]) -> Option<Vec<u8>> {
        if self.table.references.is_empty() {
            return None;
        }
        let mut rest = mem::take(&mut self.rest);
        rest.clear();
        let mut references = self.table.references.iter().peekable();
        for (index, page) in pages.chunks_exact(self.page_size).enumerate() {
            if references.next_if(|it| it.page == index).is_none() {
                rest.extend_from_slice(page);
            }
        }
        Some(rest)
    }

    /// The planned packet is about to be sent with this payload, without its table.
    pub(crate) fn note(
        &mut self,
        header: &RamHeader,
        pages: &[u8],
        rest: Option<Vec<u8>>,
        encoded: (Method, &[u8]),
    ) {
        self.raw_packets = match encoded {
            (Method::None, []) => self.raw_packets,
            (Method::None, _) => self.raw_packets.saturating_sub(1),
            _ => self.raw_packets.saturating_add(1),
        };
        if let Some(own) = &self.sender.own {
            own.keep(&Keep {
                method: encoded.0,
                payload: encoded.1,
                page_size: self.page_size,
                fingerprints: &self.own,
                sketches: &self.sketches,
                bases: &self.bases.pages,
            });
        }
        // The store may evict them.
        self.bases.clear();
        if self.table.needs_store() {
            self.note_undecided(header, pages, rest.as_deref().unwrap_or(pages));
        }
        if let Some(rest) = rest {
            self.rest = rest;
        }
    }

    fn note_undecided(&mut self, header: &RamHeader, pages: &[u8], encoded: &[u8]) {
        let (references, offsets) = (&self.table.references, header.normal_offsets());
        let mut undecided = Undecided {
            block: header.block,
            offsets: references.iter().map(|it| offsets[it.page]).collect(),
            pages: self.spare.pop().unwrap_or_default(),
            reference_count: references.len(),
        };
        undecided.pages.clear();
        for Reference { page, .. } in references {
            let page = &pages[page * self.page_size..][..self.page_size];
            undecided.pages.extend_from_slice(page);
        }
        if !self.table.bases.is_empty() {
            let mut references = references.iter().peekable();
            let others = offsets.iter().enumerate();
            let others =
                others.filter(|(index, _)| references.next_if(|it| it.page == *index).is_none());
            undecided.offsets.extend(others.map(|(_, offset)| offset));
            undecided.pages.extend_from_slice(encoded);
        }
        self.undecided_bytes += undecided.pages.len();
        self.undecided.push_back(undecided);
        lock(&self.verdicts.state).due += 1;
    }

    /// Whether references have no verdict yet.
    pub(crate) fn has_undecided(&self) -> bool {
        !self.undecided.is_empty()
    }

    /// Pages that the destination has not found, to be sent next. Waits until `deadline` while more than `most` bytes of pages are
    /// without a verdict. Otherwise returns `None` when no verdict has come.
    ///
    /// # Errors
    /// When the destination gives no verdict any more, or a wrong one.
    pub(crate) fn next_missing(
        &mut self,
        most: usize,
        deadline: Instant,
    ) -> io::Result<Option<Undecided>> {
        while !self.undecided.is_empty() {
            let deadline = (self.undecided_bytes > most).then_some(deadline);
            let Some(missing) = self.verdicts.next(deadline)? else {
                return Ok(None);
            };
            let Some(decided) = self.undecided.pop_front() else {
                return Ok(None);
            };
            self.undecided_bytes -= decided.pages.len();
            let references = decided.reference_count;
            let most = references + usize::from(decided.offsets.len() > references);
            let is_right = missing.is_sorted_by(|before, after| before < after)
                && missing.iter().all(|index| usize::from(*index) < most);
            if !is_right {
                return Err(not_sent());
            }
            let named = missing.iter().map(|index| usize::from(*index));
            let found = references - named.filter(|index| *index < references).count();
            self.sender.found.fetch_add(found as u64, Ordering::Relaxed);
            self.sender
                .missed
                .fetch_add(missing.len() as u64, Ordering::Relaxed);
            let again = decided.only(&missing, self.page_size);
            if decided.offsets.len() > references {
                let is_lost = missing
                    .last()
                    .is_some_and(|it| usize::from(*it) == references);
                let count = match is_lost {
                    true => &mut self.bases.lost,
                    false => &mut self.bases.used,
                };
                *count += 1;
            }
            if self.spare.len() < MOST_SPARE {
                self.spare.push(decided.pages);
            }
            let missed = again.as_ref().map_or(0, |again| again.offsets.len());
            self.sender.stats.shared_pages.add(found);
            self.sender.stats.missed_pages.add(missed);
            if again.is_some() {
                return Ok(again);
            }
        }
        Ok(None)
    }
}

impl Undecided {
    /// Those that a verdict names.
    fn only(&self, missing: &[u16], page_size: usize) -> Option<Self> {
        let (mut offsets, mut pages) = (Vec::new(), Vec::new());
        for index in missing.iter().map(|index| usize::from(*index)) {
            let named = match index < self.reference_count {
                true => index..index + 1,
                false => self.reference_count..self.offsets.len(),
            };
            offsets.extend_from_slice(&self.offsets[named.clone()]);
            pages.extend_from_slice(&self.pages[named.start * page_size..named.end * page_size]);
        }
        let block = self.block;
        (!offsets.is_empty()).then_some(Self {
            block,
            offsets,
            pages,
            reference_count: 0,
        })
    }
}

impl Bases {
    fn clear(&mut self) {
        self.pages.clear();
        self.earlier.clear();
    }

    /// Finds pages of the store that resemble those with these sketches, and that the destination has by its keys and its offer, and adds
    /// them to the table.
    fn plan(
        &mut self,
        (own, sketches): (&GuestPages, &[Sketch]),
        (keys, is_offered): (&Keys, &dyn Fn(Fingerprint) -> bool),
        page_size: usize,
        table: &mut Table,
    ) {
        if sketches.is_empty() {
            return;
        }
        self.without = self.without.wrapping_add(1);
        if !self.are_sought() {
            return;
        }
        let mut rejected: Vec<KeptPage> = Vec::new();
        for found in own.similar(sketches, page_size).into_iter().flatten() {
            let is_known = self
                .pages
                .iter()
                .chain(&rejected)
                .any(|it| it.index == found.index && Arc::ptr_eq(&it.packet, &found.packet));
            if is_known || table.bases.len() == MOST_BASES {
                continue;
            }
            let end = self.earlier.len();
            self.earlier.resize(end + page_size, 0);
            let page = &mut self.earlier[end..];
            let is_there = own.copy(&found, None, &mut self.decoder, page);
            let fingerprint = keys.fingerprint(page);
            if is_there && is_offered(fingerprint) {
                let hash = keys.hash(page);
                table.bases.push(Base { fingerprint, hash });
                self.pages.push(found);
            } else {
                self.earlier.truncate(end);
                rejected.push(found);
            }
        }
        if table.bases.len() * FEWEST_BASES < sketches.len() {
            table.bases.clear();
            self.clear();
        }
    }

    /// Whether it is worth it: in vain it costs both ends for nothing.
    fn are_sought(&self) -> bool {
        let is_now =
            self.without <= SOUGHT_FOR_ONE_IN || self.without.is_multiple_of(SOUGHT_FOR_ONE_IN);
        is_now && self.lost <= 2 + self.used / 8
    }
}

impl Verdicts {
    /// The next verdict. `None` without a deadline, if there is none now.
    fn next(&self, deadline: Option<Instant>) -> io::Result<Option<Vec<u16>>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(verdict) = state.came.pop_front() {
                return Ok(Some(verdict));
            }
            if let Some(end) = state.end.take() {
                return Err(end);
            }
            let wait = deadline.map_or(Duration::ZERO, left);
            match (deadline, wait.is_zero()) {
                (None, _) => return Ok(None),
                (Some(_), true) => return Err(io::ErrorKind::TimedOut.into()),
                (Some(_), false) => {}
            }
            let waited = self.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
