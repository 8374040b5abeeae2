//! Post-copy at the destination: fills the missing pages of a guest that runs here already.
//!
//! ```text
//!  faults:      who touches a missing page ─> the number of the page ─> source
//!  streams:     pages of the source ─> a buffer ─> the missing page, in one step       on demand, and in the background
//! ```
//!
//! Until the guest is [owned](PostCopy::own) a failure gives the memory back as it is, so that no thread waits: the guest has not
//! run here and never will. After that, missing pages stay missing: a guest must not see zeros in their place.

use std::{
    io,
    sync::{Arc, Mutex, mpsc::SyncSender},
    thread::{self, Scope},
    time::Duration,
};

use multifd::{Layout, RamHeader};
use vamoose_link::{
    ChannelReader, ConversationError, Hangup, Received, Stream, lock, send_message,
};
use vm_memory::VolatileSlice;

use super::{Event, guest_ram::GuestRam};
use crate::{
    DestinationError,
    dirty::Bitmap,
    error::ChannelError,
    missing::{AtomicPages, Missing},
    protocol::{LAST_SYNC, Request},
    spans::in_span,
};

/// The missing pages, and the streams that they come from. Dropping it ends the streams.
pub(super) struct PostCopy<'env> {
    memory: &'env GuestRam,
    layout: Layout,
    missing: Missing,
    /// Pages that the source has been asked for.
    requested: AtomicPages,
    demand: Arc<Stream>,
    /// The index in the memory of each of the source's blocks.
    blocks: Vec<usize>,
    stop: Hangup,
    progress: Mutex<Progress>,
}

struct Progress {
    /// Streams in the background that have not ended.
    background: usize,
    failure: Option<DestinationError>,
    owned: bool,
}

/// How long to wait until the source has received that nothing is missing.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(5);

impl<'env> PostCopy<'env> {
    /// Has the pages of `missing` be missing. They come on streams, of which the one called `demand` is for pages on demand, and
    /// `background` others are not. The source has the memory's blocks in the order `blocks`.
    pub(super) fn new(
        memory: &'env GuestRam,
        layout: Layout,
        missing: &[Bitmap],
        (demand, blocks): (Arc<Stream>, Vec<usize>),
        background: usize,
    ) -> Result<Arc<Self>, DestinationError> {
        Ok(Arc::new(Self {
            memory,
            layout,
            missing: Missing::new(&memory.ram, missing)?,
            requested: AtomicPages::new(&Bitmap::for_blocks(&memory.ram)),
            demand,
            blocks,
            stop: Hangup::new()?,
            progress: Mutex::new(Progress {
                background,
                failure: None,
                owned: false,
            }),
        }))
    }

    /// Asks the source for missing pages that are touched, on a thread of its own.
    pub(super) fn serve_faults<'scope>(
        self: &Arc<Self>,
        scope: &'scope Scope<'scope, 'env>,
        events: SyncSender<Event>,
    ) -> io::Result<()> {
        let this = self.clone();
        let serve = in_span(move || {
            let served = this.missing.serve(&this.stop, |block, page| {
                if this.requested.set(block, page) {
                    return Ok(());
                }
                // Every block has its place.
                let mut blocks = this.blocks.iter();
                let block = blocks.position(|here| *here == block).unwrap_or(block);
                send_message(&this.demand, &Request::Page { block, page })
            });
            if let Err(error) = served.map_err(|error: ConversationError| error.into()) {
                this.fail(error, &events);
            }
        });
        thread::Builder::new().spawn_scoped(scope, serve)?;
        Ok(())
    }

    /// Fills pages with those that arrive on stream `number`, on a thread of its own.
    pub(super) fn receive<'scope>(
        self: &Arc<Self>,
        scope: &'scope Scope<'scope, 'env>,
        (number, stream, reader): (usize, &Arc<Stream>, ChannelReader),
        events: SyncSender<Event>,
    ) -> io::Result<()> {
        self.stop.register(stream);
        let (this, is_demand) = (self.clone(), Arc::ptr_eq(stream, &self.demand));
        let receive = in_span(move || {
            let received = this.fill(reader, &events);
            match received {
                Ok(()) if !is_demand => lock(&this.progress).background -= 1,
                received => {
                    let source = received.err().unwrap_or(ChannelError::Ended);
                    let channel = number;
                    this.fail(DestinationError::Channel { channel, source }, &events);
                }
            }
            let _ = events.send(Event::PostCopy);
        });
        thread::Builder::new().spawn_scoped(scope, receive)?;
        Ok(())
    }

    /// # Errors
    /// When pages are lost already.
    pub(super) fn check(&self) -> Result<(), DestinationError> {
        lock(&self.progress).failure.take().map_or(Ok(()), Err)
    }

    /// The guest may run here from now on: missing pages are never given up.
    ///
    /// # Errors
    /// When pages are lost already.
    pub(super) fn own(&self) -> Result<(), DestinationError> {
        let mut progress = lock(&self.progress);
        if let Some(error) = progress.failure.take() {
            return Err(error);
        }
        progress.owned = true;
        self.missing.keep_until_filled(true);
        Ok(())
    }

    /// The guest has not run here after all.
    pub(super) fn disown(&self) {
        self.missing.keep_until_filled(false);
        self.missing.release();
    }

    /// Whether all pages are there, or some are lost.
    pub(super) fn is_over(&self) -> bool {
        let progress = lock(&self.progress);
        let is_complete = progress.background == 0 && self.missing.left() == 0;
        is_complete || progress.failure.is_some()
    }

    /// The result, once it is over. Tells the source that nothing is missing.
    pub(super) fn finish(&self) -> Result<(), DestinationError> {
        let failure = lock(&self.progress).failure.take();
        let pages = self.missing.left();
        if let (Some(error), 1..) = (failure, pages) {
            let source = Box::new(error);
            return Err(DestinationError::PagesLost { pages, source });
        }
        self.missing.release();
        // The guest is complete, whatever becomes of this message.
        if send_message(&self.demand, &Request::Complete).is_ok() {
            self.demand.finish();
            self.demand.drain(COMPLETE_TIMEOUT);
        }
        Ok(())
    }

    /// Before the guest is owned, nobody waits for a page that does not come.
    fn fail(&self, error: DestinationError, events: &SyncSender<Event>) {
        let mut progress = lock(&self.progress);
        if self.stop.is_hung_up() || progress.failure.is_some() {
            return;
        }
        progress.failure = Some(error);
        if !progress.owned {
            self.missing.release();
        }
        drop(progress);
        // The coordinator is gone when the attempt is over.
        let _ = events.send(Event::PostCopy);
    }

    /// Fills pages with those of a stream, until it ends. Pages come into a buffer first: a page that is missing has to be there at
    /// once as a whole.
    fn fill(
        &self,
        mut reader: ChannelReader,
        events: &SyncSender<Event>,
    ) -> Result<(), ChannelError> {
        let (layout, page_size) = (self.layout, self.layout.page_size());
        let mut header = RamHeader::new(layout);
        let mut places = Vec::with_capacity(layout.page_count());
        let mut buffer = vec![0; layout.packet_bytes()];
        let mut last = false;
        while reader.read_header(&mut header)? == Received::Packet {
            if last {
                return Err(ChannelError::AfterTheLast);
            }
            last = header.sync && header.packet_num == LAST_SYNC;
            if header.is_empty() {
                continue;
            }
            // Checks that the guest has the pages.
            let block = self.memory.resolve(&header, &mut places)?;
            let bytes = &mut buffer[..header.normal_offsets().len() * page_size];
            reader.read_pages(&header, &[VolatileSlice::from(&mut *bytes)])?;
            let normal = header.normal_offsets().iter().zip(bytes.chunks(page_size));
            let normal = normal.map(|(offset, bytes)| (offset, Some(bytes)));
            let zero = header.zero_offsets().iter().map(|offset| (offset, None));
            for (offset, bytes) in normal.chain(zero) {
                // Resolved, so it fits.
                let page = usize::try_from(*offset).unwrap_or(usize::MAX) / page_size;
                let was_last = self.missing.fill(block, page, bytes);
                if was_last.map_err(ChannelError::Fill)? {
                    let _ = events.send(Event::PostCopy);
                }
            }
        }
        last.then_some(()).ok_or(ChannelError::Ended)
    }
}

/// Ends the threads of a [`PostCopy`], which have it as well.
pub(super) struct Following<'env>(pub(super) Arc<PostCopy<'env>>);

impl Drop for Following<'_> {
    fn drop(&mut self) {
        self.0.stop.hang_up();
    }
}
