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
//! IAA has one way to search for matches, and here always uses the code that is built into the format: one operation a page.
//! The level is that of qpl's software engine, for pages that a device does not compress. Codes learned from a part of each
//! packet saved 4 % of the bytes ([`qpl`]), for a wait and the construction of a code per packet.

use std::sync::Arc;

use idxd::offload::{Compressor, Decompressor, Devices, OffloadCounters};
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
        Ok(Self {
            compressor: Compressor::new(devices.clone(), PAGE_SIZE, pages),
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
