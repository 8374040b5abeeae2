//! The destination's side: lists what the store has, and looks up references.

use std::{
    io,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use multifd::{Layout, Method};
use vamoose_codec::{
    DecodeError, Decoder,
    shared::{Base, Fingerprint, Reference, Table},
};

use super::{
    GuestPages, Keep, KeptPage,
    messages::{MOST_LISTED, Message},
};
use crate::{Session, Stream, lock};

/// Tells the source of a migration what the store has, for as long as the migration lasts.
pub struct StoreLister {
    pages: GuestPages,
    ways: Vec<WayBack>,
    end: Arc<End>,
}

/// Whether a channel's reader has ended, and so the migration.
#[derive(Default)]
struct End {
    has_come: Mutex<bool>,
    changed: Condvar,
}

/// The way back of a channel. The lock is held for a message.
#[derive(Clone)]
struct WayBack {
    stream: Arc<Stream>,
    turn: Arc<Mutex<()>>,
}

/// How often pages that came meanwhile are listed.
const LISTED_EVERY: Duration = Duration::from_millis(250);

impl StoreLister {
    /// For a migration of the guest of this name with these channels, if this end of their session has a store, and the other uses it.
    pub fn over(channels: &[Arc<Stream>], guest: Option<&str>) -> Option<Self> {
        let session = channels.first()?.session().filter(Session::has_store)?;
        let store = session.config().page_store.as_ref()?;
        Some(Self::new(store.of_guest(guest)?, channels))
    }

    /// For a migration with these channels.
    pub fn new(pages: GuestPages, channels: &[Arc<Stream>]) -> Self {
        let ways = channels.iter().map(|stream| WayBack {
            stream: stream.clone(),
            turn: Arc::default(),
        });
        Self {
            ways: ways.collect(),
            pages,
            end: Arc::default(),
        }
    }

    /// Sends the list, until the reader of a channel is dropped. Ends early if the source cannot be reached: its channels' readers
    /// report why. Streams have to be shut down if it is to end while it writes.
    pub fn run(&self) {
        // The source can do without.
        let _ = self.list();
    }

    /// What a channel's reader needs.
    pub(crate) fn reader(&self, stream: &Arc<Stream>, layout: Layout) -> Option<StoreReader> {
        let way = self
            .ways
            .iter()
            .find(|way| Arc::ptr_eq(&way.stream, stream));
        way.map(|way| StoreReader {
            pages: self.pages.clone(),
            way: way.clone(),
            end: self.end.clone(),
            layout,
            decoder: Decoder::new(layout),
            table: Table::default(),
            bases: Vec::new(),
            kept: Vec::new(),
        })
    }

    fn list(&self) -> io::Result<()> {
        if let Some(first) = self.ways.first() {
            first.send(&Message::Keys(*self.pages.keys()))?;
        }
        let (mut listed, mut ways) = (0, self.ways.iter().cycle());
        let mut has_ended = lock(&self.end.has_come);
        while !*has_ended {
            let (list, next) = self.pages.list(listed, MOST_LISTED);
            listed = next;
            if list.is_empty() {
                let waited = self.end.changed.wait_timeout(has_ended, LISTED_EVERY);
                has_ended = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(has_ended);
            for part in list.chunks(MOST_LISTED) {
                if let Some(way) = ways.next() {
                    way.send(&Message::List(part.to_vec()))?;
                }
            }
            has_ended = lock(&self.end.has_come);
        }
        Ok(())
    }
}

impl WayBack {
    fn send(&self, message: &Message) -> io::Result<()> {
        let _turn = lock(&self.turn);
        self.stream.write_both(&message.encode(), &[])
    }
}

/// The store, as a channel's reader uses it.
pub(crate) struct StoreReader {
    pages: GuestPages,
    way: WayBack,
    end: Arc<End>,
    layout: Layout,
    decoder: Decoder,
    table: Table,
    bases: Vec<KeptPage>,
    /// Fingerprints of the packet's encoded pages.
    kept: Vec<Fingerprint>,
}

/// What a payload of method shared is.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    /// Of the encoded pages.
    pub(crate) method: Method,
    /// Length of their payload.
    pub(crate) len: usize,
    /// Number of references.
    pub(crate) references: usize,
    /// Whether the packet has references or bases.
    pub(crate) needs_store: bool,
}

impl Drop for StoreReader {
    fn drop(&mut self) {
        *lock(&self.end.has_come) = true;
        self.end.changed.notify_all();
    }
}

impl StoreReader {
    /// Reads the table of a packet's payload.
    pub(crate) fn open(&mut self, payload: &[u8], pages: usize) -> Result<Parts, DecodeError> {
        self.bases.clear();
        let (method, len) = self.table.read(payload, pages)?;
        let references = self.table.references.len();
        Ok(Parts {
            method,
            len,
            references,
            needs_store: self.table.needs_store(),
        })
    }

    /// Fills `earlier` with the bases of the packet that was opened. False if one is not found.
    pub(crate) fn find_bases(&mut self, earlier: &mut Vec<u8>) -> bool {
        earlier.clear();
        for Base { fingerprint, hash } in &self.table.bases {
            let end = earlier.len();
            earlier.resize(end + self.layout.page_size(), 0);
            let page = &mut earlier[end..];
            let found = self
                .pages
                .find(*fingerprint, *hash, &mut self.decoder, page);
            match found {
                Some(base) => self.bases.push(base),
                None => return false,
            }
        }
        true
    }

    /// Keeps the encoded pages of the packet that was [opened](Self::open), once they have proved to be right. Its bases have been
    /// [found](Self::find_bases).
    pub(crate) fn keep(&mut self, method: Method, payload: &[u8]) {
        let mut references = self.table.references.iter().peekable();
        let fingerprints = self.table.fingerprints.iter().enumerate();
        self.kept.clear();
        self.kept.extend(
            fingerprints
                .filter(|(page, _)| references.next_if(|it| it.page == *page).is_none())
                .map(|(_, fingerprint)| *fingerprint),
        );
        self.pages.keep(&Keep {
            method,
            payload,
            page_size: self.layout.page_size(),
            fingerprints: &self.kept,
            sketches: &[],
            bases: &self.bases,
        });
        // The store may evict them.
        self.bases.clear();
    }

    /// Puts the packet's pages together: `rest`, the encoded ones if all bases were found, and those of the store, in `out`. Pages that
    /// are missing are zero; their indices are returned, and the source is told to send them.
    ///
    /// # Errors
    /// When the source cannot be reached.
    pub(crate) fn join(&mut self, rest: Option<&[u8]>, out: &mut [u8]) -> io::Result<Vec<usize>> {
        let page_size = self.layout.page_size();
        let mut rest = rest.map(|rest| rest.chunks_exact(page_size));
        let (mut missing, mut verdict) = (Vec::new(), Vec::new());
        let mut references = (0..).zip(&self.table.references).peekable();
        let pages = out.chunks_exact_mut(page_size).enumerate();
        for ((index, page), fingerprint) in pages.zip(&self.table.fingerprints) {
            match references.next_if(|(_, it)| it.page == index) {
                None => match rest.as_mut().and_then(Iterator::next) {
                    Some(encoded) => page.copy_from_slice(encoded),
                    None => {
                        page.fill(0);
                        missing.push(index);
                    }
                },
                Some((number, Reference { hash, .. })) => {
                    let found = self
                        .pages
                        .find(*fingerprint, *hash, &mut self.decoder, page);
                    if found.is_none() {
                        page.fill(0);
                        verdict.push(number);
                        missing.push(index);
                    } else {
                        self.pages.count_hit();
                    }
                }
            }
        }
        if rest.is_none() {
            verdict.push(u16::try_from(self.table.references.len()).unwrap_or(u16::MAX));
        }
        self.way.send(&Message::Verdict(verdict))?;
        Ok(missing)
    }
}
