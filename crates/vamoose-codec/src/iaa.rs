//! Engine iaa: Intel's In-Memory Analytics Accelerator for method qpl.
//!
//! ```text
//!   packet ──> Compressor ── each page an operation ──> work queues of IAAs, in turn
//!                  │  what is refused, fails or is late: method qpl's software, page by page
//!                  v
//!              Payload (the table of lengths, the streams in their order)
//! ```
//! The payload is method qpl's ([`qpl`]), whether a device or the processor has compressed a page. Pages that the processor
//! compresses instead of a device are counted ([`OffloadCounters`]); the packet has not failed. It fails only if all work
//! queues are dead: then the guard of this engine switches it off (module `accelerated`).
//!
//! # Levels
//! IAA has one way to search for matches. The level chooses the Huffman code:
//!
//! - Level 0: the code that is built into the format. One operation a page, without waiting.
//! - Levels 1 and above: a learned code. Before a packet, the devices count the symbols of every 16th page; the code for them
//!   is sent with each page, 60 to 110 bytes. That costs a wait of microseconds per packet and the construction of the code.
//!   A page that does not become shorter is sent as it is.
//!
//! For pages that a device does not compress, qpl's software engine of the same level does.
//!
//! `bench/benches/iaa.rs` measures with the **model** of an IAA: at level 0 the device takes most of the time, at level 1 the
//! construction of the code, about 150 µs a packet.
//!
//! # Canned mode
//! In IAA's canned mode the learned code would be sent once per packet instead of with each page. It is not used: the packet
//! would need a format that only another Vamoose reads, to save 5 % of the bytes of [`qpl`]'s table, and between two Vamooses
//! lz4 and zstd-frames are better without any device. It would also lose the format's fallback for data that the code does
//! not suit.

use std::sync::Arc;

use idxd::offload::{Compressor, Decompressor, Devices, OffloadCounters, Tables};
use multifd::{Layout, Method};

use crate::{
    engine::{Accelerator, Compress, CompressError, Device, DeviceError},
    ffi::libdeflate::Inflate,
    qpl::{self, Encoded, PAGE_SIZE, Payload},
};

/// The work queues of IAAs.
pub(crate) struct Iaa {
    devices: Arc<Devices>,
}

impl Iaa {
    pub(crate) const NAME: &str = "iaa";
    pub(crate) const METHODS: &[Method] = &[Method::Qpl];

    /// By `devices`, whose slots have a buffer for a page.
    pub(crate) fn new(devices: Arc<Devices>) -> Self {
        Self { devices }
    }
}

impl Accelerator for Iaa {
    fn takes(&self, layout: Layout) -> bool {
        layout.page_size() == PAGE_SIZE
    }

    fn device(&self, _method: Method, level: i32, layout: Layout) -> Box<dyn Device> {
        Box::new(IaaDevice {
            devices: self.devices.clone(),
            level,
            pages: layout.packet_bytes() / PAGE_SIZE,
            encoding: None,
            decoding: None,
        })
    }

    fn work(&self) -> Option<OffloadCounters> {
        Some(self.devices.work())
    }
}

/// One channel's use of them, in both directions as it needs them.
struct IaaDevice {
    devices: Arc<Devices>,
    level: i32,
    /// Most pages of a packet.
    pages: usize,
    encoding: Option<Encoding>,
    decoding: Option<Decoding>,
}

struct Encoding {
    compressor: Compressor,
    software: Box<dyn Compress>,
}

struct Decoding {
    decompressor: Decompressor,
    software: Inflate,
    /// Where the pages' streams begin, and after the last one where it ends.
    starts: Vec<usize>,
}

impl IaaDevice {
    fn check(&self) -> Result<(), DeviceError> {
        if self.devices.are_gone() {
            return Err(DeviceError::Failed(
                "all its work queues have stopped answering".to_owned(),
            ));
        }
        Ok(())
    }
}

impl Device for IaaDevice {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, DeviceError> {
        self.check()?;
        let encoding = match &mut self.encoding {
            Some(encoding) => encoding,
            slot => slot.insert(Encoding::new(&self.devices, self.level, self.pages)?),
        };
        encoding.compress(pages, out).map_err(|fault| {
            failed(&format_args!(
                "its pages did not become a packet: {fault:?}"
            ))
        })
    }

    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DeviceError> {
        self.check()?;
        let decoding = match &mut self.decoding {
            Some(decoding) => decoding,
            slot => slot.insert(Decoding::new(&self.devices, self.pages)?),
        };
        decoding.unpack(payload, pages)
    }
}

impl Encoding {
    fn new(devices: &Arc<Devices>, level: i32, pages: usize) -> Result<Self, DeviceError> {
        let tables = match level {
            0 => Tables::Fixed,
            _ => Tables::Learned,
        };
        Ok(Self {
            compressor: Compressor::new(devices.clone(), PAGE_SIZE, pages, tables),
            software: qpl::deflate(level).map_err(|reason| failed(&reason))?,
        })
    }

    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let Self {
            compressor,
            software,
        } = self;
        let mut payload = Payload::new(pages.len(), out)?;
        let mut rest = pages.chunks_exact(PAGE_SIZE);
        let mut result = Ok(());
        compressor.compress(
            pages,
            &mut |page, room| software.compress(page, room).ok(),
            &mut |stream| {
                let (Ok(()), Some(page)) = (result, rest.next()) else {
                    return;
                };
                result = payload.page(page, |room| {
                    let stream = stream.ok_or(CompressError::OutputFull)?;
                    let room = room
                        .get_mut(..stream.len())
                        .ok_or(CompressError::OutputFull)?;
                    room.copy_from_slice(stream);
                    Ok(stream.len())
                });
            },
        );
        result.map(|()| payload.written)
    }
}

impl Decoding {
    fn new(devices: &Arc<Devices>, pages: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            decompressor: Decompressor::new(devices.clone(), PAGE_SIZE),
            software: Inflate::new(Method::Qpl).map_err(|error| failed(&error))?,
            starts: Vec::with_capacity(pages + 1),
        })
    }

    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DeviceError> {
        let Self {
            decompressor,
            software,
            starts,
        } = self;
        let encoded =
            Encoded::parse(payload, pages.len(), PAGE_SIZE).map_err(|error| failed(&error))?;
        starts.clear();
        starts.push(0);
        starts.extend(encoded.streams().scan(0, |end, stream| {
            *end += stream.len();
            Some(*end)
        }));
        let stream = |page: usize| &encoded.streams[starts[page]..starts[page + 1]];
        decompressor
            .decompress(&stream, pages, &mut |stream: &[u8], page: &mut [u8]| {
                qpl::read(software, stream, page)
            })
            .map_err(|reason| failed(&reason))
    }
}

fn failed(reason: &dyn std::fmt::Display) -> DeviceError {
    DeviceError::Failed(reason.to_string())
}
