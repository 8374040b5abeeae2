//! Writes a guest to a file.

use std::{
    mem,
    os::unix::fs::FileExt,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use multifd::Layout;
use vamoose_codec::{Encoder, Health, is_zero};
use vamoose_link::{NewFile, lock, random_id};

use super::{
    SnapshotError, SnapshotOptions, Written,
    format::{Check, Index, Packet, STATE, TRAILER_LEN, Trailer, number},
};
use crate::{
    Ram, SourceGuest,
    dirty::{Bitmap, DirtyLog, Merged, collect},
    mapping::backings,
    parallel,
    present::Touched,
    protocol::block_shapes,
    source::round::{Pages, Round},
};

pub(super) fn write(
    path: &Path,
    ram: &Ram,
    guest: &mut dyn SourceGuest,
    options: &SnapshotOptions,
) -> Result<Written, SnapshotError> {
    let method = options.engines.settings().method();
    number(method).ok_or(SnapshotError::Method { method })?;
    for (index, block) in ram.blocks().iter().enumerate() {
        if u32::try_from(ram.pages(index)).is_err() {
            let block = block.name().to_string();
            return Err(SnapshotError::Block { block });
        }
    }
    let _held = ram.hold()?;
    let file = NewFile::create(path).map_err(SnapshotError::file(path, "creating it"))?;
    let page_size = u32::try_from(ram.page_size()).unwrap_or(u32::MAX);
    let layout = Layout::new(page_size)?;
    let mut trailer = Trailer {
        is_sealed: options.key.is_some(),
        page_size,
        packet_bytes: u32::try_from(layout.packet_bytes()).unwrap_or(u32::MAX),
        salt: random_id()?,
        index: 0..0,
    };
    let check = match &options.key {
        None => Check::Sum,
        Some(key) => Check::Seal(key.of_file(&trailer.salt)?),
    };
    let writer = Writer {
        ram,
        layout,
        options,
        check,
        file: &file,
        tail: Mutex::default(),
    };
    let (description, runs) = (guest.describe(), guest.is_running());
    let (state, downtime) = writer.write_guest(guest, runs)?;
    let completed = writer.complete(&mut trailer, state, description);
    let bytes = completed.and_then(|len| {
        let named = file.replace();
        named.map_err(SnapshotError::file(path, "naming it"))?;
        Ok(len)
    });
    if bytes.is_err() && runs && !options.resume {
        guest
            .resume()
            .map_err(SnapshotError::guest_call("resume"))?;
    }
    Ok(Written {
        bytes: bytes?,
        downtime,
    })
}

struct Writer<'a> {
    ram: &'a Ram,
    layout: Layout,
    options: &'a SnapshotOptions,
    check: Check,
    file: &'a NewFile,
    tail: Mutex<Tail>,
}

/// The state of devices, behind the parts that go ahead, whose lengths are known.
#[derive(Default)]
struct DeviceState {
    parts: Vec<u64>,
    state: Vec<u8>,
}

impl DeviceState {
    fn take_parts(&mut self, guest: &mut dyn SourceGuest) -> Result<(), SnapshotError> {
        let failed = SnapshotError::guest_call;
        while let Some(part) = guest
            .save_part()
            .map_err(failed("save a part of the state of"))?
        {
            self.parts.push(part.len() as u64);
            self.state.extend(part);
        }
        Ok(())
    }
}

/// Where the next record goes.
#[derive(Default)]
struct Tail {
    offset: u64,
    packets: Vec<Packet>,
}

impl Writer<'_> {
    /// Writes all memory of a guest that `runs` or is paused; returns the device state and how long the guest was paused.
    fn write_guest(
        &self,
        guest: &mut dyn SourceGuest,
        runs: bool,
    ) -> Result<(DeviceState, Duration), SnapshotError> {
        let mut state = DeviceState::default();
        let all = Pages::Touched(Touched::new(backings(self.ram)));
        let log = self.options.log.as_deref().map(Logged);
        let rest = match &log {
            None => Some(all),
            Some(Logged(log)) => {
                log.start()?;
                self.write_round(all, *log)?;
                state.take_parts(guest)?;
                None
            }
        };
        let began = Instant::now();
        let paused = guest.pause().map_err(SnapshotError::guest_call("pause"));
        let written = paused.and_then(|()| {
            state.take_parts(guest)?;
            let rest_of_state = guest.save();
            state
                .state
                .extend(rest_of_state.map_err(SnapshotError::guest_call("save the state of"))?);
            let rest = match rest {
                Some(all) => all,
                None => Pages::Last(self.written()?),
            };
            // It writes nothing.
            self.write_round(rest, &Merged::new(Vec::new()))
        });
        if runs && (written.is_err() || self.options.resume) {
            guest
                .resume()
                .map_err(SnapshotError::guest_call("resume"))?;
        }
        written?;
        Ok((state, began.elapsed()))
    }

    /// Writes what follows the memory; returns the length of the file.
    fn complete(
        self,
        trailer: &mut Trailer,
        DeviceState { parts, mut state }: DeviceState,
        description: Vec<u8>,
    ) -> Result<u64, SnapshotError> {
        let Tail { offset, packets } = mem::take(&mut *lock(&self.tail));
        self.check.add(STATE, &[], &mut state)?;
        self.put(&state, offset)?;
        trailer.index.start = offset + state.len() as u64;
        let index = Index {
            blocks: block_shapes(self.ram),
            state: offset..trailer.index.start,
            packets,
            parts,
            description,
        };
        let record = index.to_record(trailer, &self.check)?;
        self.put(&record, trailer.index.start)?;
        self.put(&trailer.to_bytes(), trailer.index.end)?;
        Ok(trailer.index.end + TRAILER_LEN as u64)
    }

    /// The pages that the log has found.
    fn written(&self) -> Result<Vec<Bitmap>, SnapshotError> {
        let mut written = Bitmap::for_blocks(self.ram);
        if let Some(log) = &self.options.log {
            collect(log.as_ref(), &mut written, parallel::processors())?;
        }
        Ok(written)
    }

    fn write_round(&self, pages: Pages, log: &dyn DirtyLog) -> Result<(), SnapshotError> {
        // A page that is zero now may not have been in an earlier round.
        let keeps_zeros = matches!(pages, Pages::Last(_));
        let threads = parallel::processors();
        let round = Round::new(1, pages, self.ram, threads);
        parallel::each(vec![(); threads], threads, &|()| {
            self.write_share(&round, log, keeps_zeros)
        })
    }

    fn write_share(
        &self,
        round: &Round,
        log: &dyn DirtyLog,
        keeps_zeros: bool,
    ) -> Result<(), SnapshotError> {
        let mut packer = Packer::new(self)?;
        let mut share = round.share(self.ram, log);
        while let Some(chunk) = share.next()? {
            for page in chunk.pages() {
                packer.add(chunk.block, page, keeps_zeros)?;
            }
        }
        packer.flush()
    }

    fn put(&self, bytes: &[u8], offset: u64) -> Result<(), SnapshotError> {
        let written = self.file.file().write_all_at(bytes, offset);
        written.map_err(SnapshotError::file(self.file.path(), "writing it"))
    }

    fn put_packet(&self, mut packet: Packet, record: &mut Vec<u8>) -> Result<(), SnapshotError> {
        let mut tail = lock(&self.tail);
        let (number, offset) = (tail.packets.len() as u64, tail.offset);
        if packet.method.is_some() {
            tail.offset += (record.len() + self.check.len()) as u64;
            packet.place = offset..tail.offset;
        }
        let is_zero = packet.method.is_none();
        tail.packets.push(packet);
        drop(tail);
        if is_zero {
            return Ok(());
        }
        self.check.add(number, &[], record)?;
        self.put(record, offset)
    }
}

/// Collects the pages of packets.
struct Packer<'a> {
    writer: &'a Writer<'a>,
    encoder: Encoder,
    block: usize,
    /// Copies of pages that are not zero, and their numbers.
    pages: Vec<u8>,
    numbers: Vec<u32>,
    zero: Vec<u32>,
    out: Vec<u8>,
}

impl<'a> Packer<'a> {
    fn new(writer: &'a Writer<'_>) -> Result<Self, SnapshotError> {
        let layout = writer.layout;
        let engines = &writer.options.engines;
        Ok(Self {
            writer,
            encoder: engines.encoder(layout, &Arc::<Health>::default())?,
            block: 0,
            pages: Vec::with_capacity(layout.packet_bytes()),
            numbers: Vec::with_capacity(layout.page_count()),
            zero: Vec::with_capacity(layout.page_count()),
            out: vec![0; layout.max_payload()],
        })
    }

    fn add(&mut self, block: usize, page: usize, keeps_zeros: bool) -> Result<(), SnapshotError> {
        // Checked at the beginning.
        let number = u32::try_from(page).unwrap_or(u32::MAX);
        // Pages of a packet ascend. At the end of a round, a thread helps others, with pages that may be before its own.
        let last = self.numbers.last().max(self.zero.last());
        if self.block != block || last.is_some_and(|last| number < *last) {
            self.flush()?;
            self.block = block;
        }
        let size = self.writer.layout.page_size();
        let memory = self.writer.ram.blocks()[block].memory();
        let (Ok(slice), start) = (memory.subslice(page * size, size), self.pages.len()) else {
            return Ok(());
        };
        self.pages.resize(start + size, 0);
        slice.copy_to(&mut self.pages[start..]);
        if is_zero(&self.pages[start..]) {
            self.pages.truncate(start);
            if keeps_zeros {
                self.zero.push(number);
            }
        } else {
            self.numbers.push(number);
        }
        let most = self.writer.layout.page_count();
        if self.numbers.len() == most || self.zero.len() == most {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), SnapshotError> {
        if !self.zero.is_empty() {
            let packet = Packet::new(self.block, None, &self.zero);
            self.writer.put_packet(packet, &mut Vec::new())?;
            self.zero.clear();
        }
        if !self.numbers.is_empty() {
            let encoded = self.encoder.encode(&self.pages, &mut self.out)?;
            let packet = Packet::new(self.block, Some(encoded.method), &self.numbers);
            self.writer
                .put_packet(packet, &mut encoded.payload.to_vec())?;
            self.numbers.clear();
            self.pages.clear();
        }
        Ok(())
    }
}

/// Stops a log that has been started.
struct Logged<'a>(&'a dyn DirtyLog);

impl Drop for Logged<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.stop() {
            tracing::warn!(
                "the guest may be slower from now on: {}",
                crate::chain(&error)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;
    use crate::test_ram;

    /// A thread that has nothing left of its own helps another one, with pages that may be before its own.
    #[test]
    fn pages_of_each_packet_ascend() {
        let ram = test_ram::blocks([16 * 4096].into_iter());
        let order = [5, 6, 2, 12, 13, 7, 0, 9, 8];
        // The others are zero.
        for page in [5, 6, 2, 7, 0] {
            let memory = ram.blocks()[0].memory();
            memory.write(&[7; 4096], page * 4096).unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let file = NewFile::create(&folder.path().join("guest")).unwrap();
        let options = SnapshotOptions::default();
        let writer = Writer {
            ram: &ram,
            layout: Layout::X86,
            options: &options,
            check: Check::Sum,
            file: &file,
            tail: Mutex::default(),
        };
        let mut packer = Packer::new(&writer).unwrap();
        for page in order {
            packer.add(0, page, true).unwrap();
        }
        packer.flush().unwrap();
        let tail = lock(&writer.tail);
        let packets: Vec<Vec<_>> = tail.packets.iter().map(|it| it.pages().collect()).collect();
        assert!(packets.iter().all(|pages| pages.is_sorted()), "{packets:?}");
        let mut all = packets.concat();
        all.sort_unstable();
        assert_eq!(all, [0, 2, 5, 6, 7, 8, 9, 12, 13]);
    }
}
