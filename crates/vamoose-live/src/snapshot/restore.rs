//! Reads a guest from a file.

use std::{
    fs::File, io, iter, ops::Range, os::unix::fs::FileExt, sync::Mutex, thread, time::Instant,
};

use multifd::Layout;
use vamoose_codec::Decoder;
use vamoose_link::{FileKey, Hangup, lock};
use vm_memory::Bytes;

use super::{
    Restored, SnapshotError,
    format::{Check, Index, STATE, TRAILER_LEN, Trailer},
};
use crate::{
    DestinationGuest, Ram, destination::make_zero, dirty::Bitmap, missing::Missing, parallel,
    protocol::check_shape, spans::in_span,
};

/// A snapshot in a file that is complete.
pub struct Snapshot {
    file: File,
    layout: Layout,
    check: Check,
    index: Index,
    state: Vec<u8>,
}

/// Packets that a thread restores at a time.
const PART: usize = 32;

impl Snapshot {
    /// The snapshot in `file`, as [`open`](Snapshot::open).
    ///
    /// # Errors
    /// As [`open`](Snapshot::open).
    pub fn of_file(file: File, key: Option<&FileKey>) -> Result<Self, SnapshotError> {
        let len = file.metadata()?.len();
        let mut trailer = [0; TRAILER_LEN];
        let start = len.saturating_sub(TRAILER_LEN as u64);
        read(&file, &mut trailer, start)?;
        let trailer = Trailer::parse(&trailer, len)?;
        let layout = Layout::new(trailer.page_size)?.with_packet_bytes(trailer.packet_bytes)?;
        let check = match (trailer.is_sealed, key) {
            (false, None) => Check::Sum,
            (true, Some(key)) => Check::Seal(key.of_file(&trailer.salt)?),
            (true, None) => return Err(SnapshotError::KeyNeeded),
            (false, Some(_)) => return Err(SnapshotError::NotEncrypted),
        };
        // Both are no longer than the file.
        let record = |place: &Range<u64>| {
            let len = usize::try_from(place.end - place.start).unwrap_or(usize::MAX);
            let mut record = vec![0; len];
            read(&file, &mut record, place.start).map(|()| record)
        };
        let most = (layout.max_payload() + check.len(), layout.page_count());
        let index = Index::parse(&mut record(&trailer.index)?, &trailer, &check, most)
            .ok_or(SnapshotError::Index)?;
        let mut state = record(&index.state)?;
        let state = check.content(STATE, &[], &mut state);
        let state = state.ok_or(SnapshotError::State)?.to_vec();
        Ok(Self {
            file,
            layout,
            check,
            index,
            state,
        })
    }

    /// What [`SourceGuest::describe`](crate::SourceGuest::describe) said when it was written, for a VMM that builds the guest's memory.
    pub fn description(&self) -> &[u8] {
        &self.index.description
    }

    /// Checks every page of the snapshot, without a guest.
    ///
    /// # Errors
    /// Which record is damaged.
    pub fn verify(&self) -> Result<(), SnapshotError> {
        self.each_packet(|_| true, |_, _| Ok(()))
    }

    /// Restores the guest: fills `ram` with the snapshot's memory, and has `guest` load the device state and resume.
    ///
    /// # Errors
    /// The guest has not run then, and the content of `ram` is undefined.
    pub fn restore(
        &self,
        ram: &Ram,
        guest: &mut dyn DestinationGuest,
    ) -> Result<Restored, SnapshotError> {
        let began = Instant::now();
        let _held = ram.hold()?;
        let places = Places::new(self, ram)?;
        make_zero(ram)?;
        self.each_packet(
            |_| true,
            |number, bytes| {
                for (block, page, bytes) in places.pages(number, bytes) {
                    let memory = ram.blocks()[block].memory();
                    let written = memory.write_slice(bytes, page * ram.page_size());
                    // The page is one of the block.
                    written.map_err(|_| SnapshotError::Index)?;
                }
                Ok(())
            },
        )?;
        self.load(guest)?;
        guest
            .resume()
            .map_err(SnapshotError::guest_call("resume"))?;
        let total_time = began.elapsed();
        Ok(Restored {
            resumed_after: total_time,
            total_time,
        })
    }

    /// Has `guest` load the device state and resume at once, and fills the memory `ram` meanwhile: pages that are touched first, and
    /// all others behind them. Returns when all memory is there. `ram` has to be as for a
    /// [post-copy](crate::SourceConfig::post_copy).
    ///
    /// # Errors
    /// The guest has not run then, except after [`SnapshotError::PagesLost`].
    pub fn restore_on_demand(
        &self,
        ram: &Ram,
        guest: &mut dyn DestinationGuest,
    ) -> Result<Restored, SnapshotError> {
        let began = Instant::now();
        let _held = ram.hold()?;
        let places = Places::new(self, ram)?;
        make_zero(ram)?;
        let missing = Missing::new(ram, &places.filled())?;
        let stop = Hangup::new()?;
        let fill = |number: usize, bytes: &[u8]| {
            for (block, page, bytes) in places.pages(number, bytes) {
                let filled = missing.fill(block, page, Some(bytes));
                filled?;
            }
            Ok(())
        };
        let touched = Touched {
            missing: &missing,
            state: Mutex::default(),
        };
        thread::scope(|scope| {
            let _stop = stop.guard();
            let serve = in_span(|| {
                let mut reader = Reader::new(self);
                let served = missing.serve(&stop, |block, page| match places.packet(block, page) {
                    Some(number) => fill(number, reader.read(number)?),
                    None => Ok(()),
                });
                touched.ended(served);
            });
            let thread = thread::Builder::new().spawn_scoped(scope, serve);
            thread?;
            self.load(guest)?;
            touched.own()?;
            if let Err(error) = guest.resume() {
                missing.keep_until_filled(false);
                missing.release();
                return Err(SnapshotError::guest_call("resume")(error));
            }
            let resumed_after = began.elapsed();
            let is_wanted = |number| {
                let mut pages = places.pages(number, &[]);
                pages.any(|(block, page, _)| missing.is_missing(block, page))
            };
            if let Err(error) = self.each_packet(is_wanted, fill) {
                let (pages, source) = (missing.left(), Box::new(error));
                return Err(SnapshotError::PagesLost { pages, source });
            }
            missing.release();
            Ok(Restored {
                resumed_after,
                total_time: began.elapsed(),
            })
        })
    }

    fn load(&self, guest: &mut dyn DestinationGuest) -> Result<(), SnapshotError> {
        let mut state = &self.state[..];
        for len in &self.index.parts {
            let at = usize::try_from(*len).unwrap_or(usize::MAX);
            let (part, rest) = state.split_at_checked(at).ok_or(SnapshotError::State)?;
            let load = guest.load_part(part);
            load.map_err(SnapshotError::guest_call("load a part of the state of"))?;
            state = rest;
        }
        let load = guest.load(state);
        load.map_err(SnapshotError::guest_call("load the state of"))
    }

    /// Calls `each` with the pages of every packet that is wanted, on all processors.
    fn each_packet(
        &self,
        is_wanted: impl Fn(usize) -> bool + Sync,
        each: impl Fn(usize, &[u8]) -> Result<(), SnapshotError> + Sync,
    ) -> Result<(), SnapshotError> {
        let packets = self.index.packets.len();
        let parts = (0..packets).step_by(PART);
        let parts = parts.map(|first| first..packets.min(first + PART));
        parallel::each(parts.collect(), parallel::processors(), &|part: Range<
            usize,
        >| {
            let mut reader = Reader::new(self);
            let mut wanted = part.filter(|number| is_wanted(*number));
            wanted.try_for_each(|number| each(number, reader.read(number)?))
        })
    }
}

/// The thread that fills pages that are touched.
struct Touched<'a> {
    missing: &'a Missing,
    state: Mutex<TouchedState>,
}

#[derive(Default)]
struct TouchedState {
    owned: bool,
    failure: Option<SnapshotError>,
}

impl Touched<'_> {
    /// Nobody waits for a page that does not come, until the guest runs. Then the threads that restore all pages report the
    /// failure as well.
    fn ended(&self, served: Result<(), SnapshotError>) {
        let mut state = lock(&self.state);
        if let (false, Err(error)) = (state.owned, served) {
            state.failure = Some(error);
            self.missing.release();
        }
    }

    /// The guest may run from here on.
    fn own(&self) -> Result<(), SnapshotError> {
        let mut state = lock(&self.state);
        if let Some(failure) = state.failure.take() {
            return Err(failure);
        }
        state.owned = true;
        self.missing.keep_until_filled(true);
        Ok(())
    }
}

/// Where the pages of a snapshot are in the memory of a guest.
struct Places<'a> {
    index: &'a Index,
    page_size: usize,
    /// The guest's block of each of the snapshot's.
    blocks: Vec<usize>,
    /// The packet of each page of the guest's blocks, and one more; 0 for zeros.
    packets: Vec<Vec<u32>>,
}

impl<'a> Places<'a> {
    fn new(snapshot: &'a Snapshot, ram: &Ram) -> Result<Self, SnapshotError> {
        let (index, layout) = (&snapshot.index, snapshot.layout);
        let page_size = u32::try_from(layout.page_size()).unwrap_or(u32::MAX);
        let blocks = check_shape(&index.blocks, page_size, ram)?;
        let pages = (0..ram.blocks().len()).map(|block| vec![0; ram.pages(block)]);
        let mut packets: Vec<Vec<u32>> = pages.collect();
        for (packet, number) in index.packets.iter().zip(1..) {
            for page in packet.pages() {
                let place = packets[blocks[packet.block]].get_mut(page as usize);
                let place = place.ok_or(SnapshotError::Index)?;
                *place = packet.method.map_or(0, |_| number);
            }
        }
        Ok(Self {
            index,
            page_size: layout.page_size(),
            blocks,
            packets,
        })
    }

    /// The packet with this page of the guest; `None` if it is zero.
    fn packet(&self, block: usize, page: usize) -> Option<usize> {
        let number = *self.packets.get(block)?.get(page)?;
        (number as usize).checked_sub(1)
    }

    /// The pages of packet `number` that no later packet has: block and page of the guest, and their part of `bytes`.
    fn pages<'b>(
        &'b self,
        number: usize,
        bytes: &'b [u8],
    ) -> impl Iterator<Item = (usize, usize, &'b [u8])> {
        let packet = &self.index.packets[number];
        let block = self.blocks[packet.block];
        let bytes = bytes.chunks(self.page_size).chain(iter::repeat(&[][..]));
        let pages = packet.pages().map(|page| page as usize).zip(bytes);
        let pages = pages.filter(move |(page, _)| self.packet(block, *page) == Some(number));
        pages.map(move |(page, bytes)| (block, page, bytes))
    }

    /// The pages that are not zero, a bitmap for each block of the guest.
    fn filled(&self) -> Vec<Bitmap> {
        let bitmap = |packets: &Vec<u32>| {
            let mut bitmap = Bitmap::new(packets.len());
            let filled = packets
                .iter()
                .enumerate()
                .filter(|(_, number)| **number > 0);
            filled.for_each(|(page, _)| bitmap.set(page));
            bitmap
        };
        self.packets.iter().map(bitmap).collect()
    }
}

/// Reads packets.
struct Reader<'a> {
    snapshot: &'a Snapshot,
    decoder: Decoder,
    record: Vec<u8>,
    pages: Vec<u8>,
}

impl<'a> Reader<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        Self {
            snapshot,
            decoder: Decoder::new(snapshot.layout),
            record: Vec::new(),
            pages: vec![0; snapshot.layout.packet_bytes()],
        }
    }

    /// The pages of packet `number`, checked; none if they are zero.
    fn read(&mut self, number: usize) -> Result<&[u8], SnapshotError> {
        let Snapshot {
            file,
            layout,
            check,
            index,
            ..
        } = self.snapshot;
        let packet = &index.packets[number];
        let Some(method) = packet.method() else {
            return Ok(&[]);
        };
        let (start, end) = (packet.place.start, packet.place.end);
        // Checked: no longer than a packet.
        self.record
            .resize(usize::try_from(end - start).unwrap_or(0), 0);
        read(file, &mut self.record, start)?;
        let content = check.content(number as u64, &[], &mut self.record);
        let content = content.ok_or(SnapshotError::Record {
            packet: number,
            place: packet.place.clone(),
        })?;
        let pages = &mut self.pages[..packet.pages().count() * layout.page_size()];
        let decoded = self.decoder.decode(method, content, pages);
        decoded.map_err(|source| SnapshotError::Decode {
            packet: number,
            source,
        })?;
        Ok(pages)
    }
}

/// Reads all of `bytes`.
fn read(file: &File, bytes: &mut [u8], offset: u64) -> Result<(), SnapshotError> {
    file.read_exact_at(bytes, offset)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => SnapshotError::Truncated,
            _ => SnapshotError::Read(error),
        })
}
