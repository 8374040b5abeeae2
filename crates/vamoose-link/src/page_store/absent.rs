//! In place of module `page_store` in a build without sessions: its types have no values.

use std::{io, sync::Arc, time::Instant};

use multifd::{BlockName, Layout, Method, RamHeader};
use vamoose_codec::{DecodeError, EncodeError, shared::Table};

use crate::{Session, Stats, Stream};

/// Of a page store.
pub enum StoreLister {}
/// Of a page store.
pub struct StoreListener(Never);
/// Of a page store.
pub enum StoreSender {}
enum Never {}
pub(crate) enum StoreReader {}
pub(crate) const MANY_UNDECIDED: usize = 0;
pub(crate) struct StoreWriter(Never);

#[derive(Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) method: Method,
    pub(crate) len: usize,
    pub(crate) references: usize,
    pub(crate) needs_store: bool,
}

pub(crate) struct Undecided {
    pub(crate) block: BlockName,
    pub(crate) offsets: Vec<u64>,
    pub(crate) pages: Vec<u8>,
}

impl StoreLister {
    /// None.
    pub fn over(_: &[Arc<Stream>], _: Option<&str>) -> Option<Self> {
        None
    }

    /// Cannot be called.
    pub fn run(&self) {
        match *self {}
    }

    pub(crate) fn reader(&self, _: &Arc<Stream>, _: Layout) -> Option<StoreReader> {
        match *self {}
    }
}

impl StoreListener {
    /// Cannot be called.
    pub fn run(&self) {
        match self.0 {}
    }
}

impl StoreSender {
    /// None.
    pub fn over(_: &Session, _: Option<&str>, _: Arc<Stats>) -> Option<Self> {
        None
    }
}

impl StoreReader {
    pub(crate) fn open(&mut self, _: &[u8], _: usize) -> Result<Parts, DecodeError> {
        match *self {}
    }

    pub(crate) fn keep(&mut self, _: Method, _: &[u8]) {
        match *self {}
    }

    pub(crate) fn find_bases(&mut self, _: &mut Vec<u8>) -> bool {
        match *self {}
    }

    pub(crate) fn join(&mut self, _: Option<&[u8]>, _: &mut [u8]) -> io::Result<Vec<usize>> {
        match *self {}
    }
}

impl StoreWriter {
    pub(crate) fn new(
        sender: Arc<StoreSender>,
        _: Arc<Stream>,
        _: Layout,
    ) -> (Self, StoreListener) {
        match *sender {}
    }

    pub(crate) fn encode(&mut self, _: &[u8], _: &mut [u8]) -> Result<Option<usize>, EncodeError> {
        match self.0 {}
    }

    pub(crate) fn plan(&mut self, _: &[u8], _: bool) -> bool {
        match self.0 {}
    }

    pub(crate) fn takes_raw(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn table(&self) -> &Table {
        match self.0 {}
    }

    pub(crate) fn rest(&mut self, _: &[u8]) -> Option<Vec<u8>> {
        match self.0 {}
    }

    pub(crate) fn note(&mut self, _: &RamHeader, _: &[u8], _: Option<Vec<u8>>, _: (Method, &[u8])) {
        match self.0 {}
    }

    pub(crate) fn has_undecided(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn next_missing(&mut self, _: usize, _: Instant) -> io::Result<Option<Undecided>> {
        match self.0 {}
    }
}
