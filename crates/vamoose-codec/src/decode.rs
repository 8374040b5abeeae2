//! Decoding: payload of one packet in, its pages out.

use std::sync::Arc;

use multifd::{Layout, Method};

use crate::{
    DecodeError, Engines, Health, Settings,
    accelerated::{AcceleratedUnpack, Guard},
    engine::Unpack,
    methods,
};

/// Decodes the packets of one channel, in their order, for the whole migration.
///
/// Each packet's flags name its method. A method's decoder is created for the first packet of the method.
pub struct Decoder {
    layout: Layout,
    engines: Engines,
    health: Arc<Health>,
    /// By method.
    unpackers: Vec<(Method, Box<dyn Unpack>)>,
    /// The pages of [`decode_borrowed`](Decoder::decode_borrowed).
    pages: Vec<u8>,
    failed: bool,
}

impl Decoder {
    /// A decoder for a new channel, in software.
    pub fn new(layout: Layout) -> Self {
        Engines::software(Settings::default()).decoder(layout, &Arc::default())
    }

    pub(crate) fn with_engines(layout: Layout, engines: Engines, health: Arc<Health>) -> Self {
        Self {
            layout,
            engines,
            health,
            unpackers: Vec::new(),
            pages: Vec::new(),
            failed: false,
        }
    }

    /// Decodes `payload` into `pages`, which are exactly the packet's normal pages, back to back.
    ///
    /// # Errors
    /// When the payload is anything but those pages, encoded by `method` in continuation of the
    /// channel's earlier packets. `pages` may then hold anything. See [`DecodeError`] about using
    /// the decoder again.
    pub fn decode(
        &mut self,
        method: Method,
        payload: &[u8],
        pages: &mut [u8],
    ) -> Result<(), DecodeError> {
        self.decode_after(method, payload, &[], pages)
    }

    /// As [`decode`](Decoder::decode), of pages that were [encoded after](crate::Encoder::encode_after) `earlier`.
    ///
    /// # Errors
    /// As [`decode`](Decoder::decode).
    pub fn decode_after(
        &mut self,
        method: Method,
        payload: &[u8],
        earlier: &[u8],
        pages: &mut [u8],
    ) -> Result<(), DecodeError> {
        self.check(pages.len())?;
        let result = match method {
            Method::None => copy(payload, pages),
            // A packet without normal pages has no payload, not even a flush.
            _ if pages.is_empty() => no_pages(method, payload),
            _ => self.index_of(method).and_then(|index| match earlier {
                [] => self.unpackers[index].1.unpack(payload, pages),
                _ => (self.unpackers[index].1).unpack_after(earlier, payload, pages),
            }),
        };
        self.failed = result.is_err();
        result
    }

    /// As [`decode`](Decoder::decode), of `len` bytes of pages, which stay in the decoder until its next packet. For callers that
    /// copy the pages elsewhere.
    ///
    /// # Errors
    /// As [`decode`](Decoder::decode).
    pub fn decode_borrowed(
        &mut self,
        method: Method,
        payload: &[u8],
        len: usize,
    ) -> Result<&[u8], DecodeError> {
        self.check(len)?;
        let mut pages = std::mem::take(&mut self.pages);
        pages.resize(self.layout.packet_bytes(), 0);
        let result = self.decode(method, payload, &mut pages[..len]);
        self.pages = pages;
        result.map(|()| &self.pages[..len])
    }

    /// Forgets an error, and what came before it.
    pub fn reset(&mut self) {
        self.unpackers.clear();
        self.failed = false;
    }

    /// Whether a packet with `len` bytes of pages can be decoded at all.
    fn check(&self, len: usize) -> Result<(), DecodeError> {
        if self.failed {
            return Err(DecodeError::AfterError);
        }
        let max = self.layout.packet_bytes();
        if len > max {
            return Err(DecodeError::Output { len, max });
        }
        Ok(())
    }

    /// The index of the channel's decoder of `method`.
    fn index_of(&mut self, method: Method) -> Result<usize, DecodeError> {
        let known = self.unpackers.iter().position(|(of, _)| *of == method);
        if let Some(index) = known {
            return Ok(index);
        }
        let software = unpacker(method, self.layout)?;
        let unpacker = self.accelerate(method, software);
        self.unpackers.push((method, unpacker));
        Ok(self.unpackers.len() - 1)
    }

    /// Adds the hardware for `method`, if there is any, to its software fallback.
    fn accelerate(&self, method: Method, software: Box<dyn Unpack>) -> Box<dyn Unpack> {
        let accelerator = self.engines.accelerator(method);
        let Some((name, accelerator)) = accelerator.filter(|it| it.1.takes(self.layout)) else {
            return software;
        };
        Box::new(AcceleratedUnpack {
            guard: Guard::new(name, method, self.engines.verify, self.health.clone()),
            device: accelerator.device(method, LEVEL_OF_DECODERS, self.layout),
            fallback: software,
            decoded: vec![0; self.layout.packet_bytes()],
        })
    }
}

/// Devices take a level when they are set up, also for decoding, where it means nothing.
const LEVEL_OF_DECODERS: i32 = 1;

/// The software decoder of a method.
pub(crate) fn unpacker(method: Method, layout: Layout) -> Result<Box<dyn Unpack>, DecodeError> {
    let info = methods::info(method);
    let unpacker = info.and_then(|info| info.unpacker);
    unpacker.ok_or(DecodeError::NotBuilt { method })?(layout)
}

fn copy(payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
    let (found, expected) = (payload.len(), pages.len());
    if found != expected {
        return Err(DecodeError::RawLength { found, expected });
    }
    pages.copy_from_slice(payload);
    Ok(())
}

fn no_pages(method: Method, payload: &[u8]) -> Result<(), DecodeError> {
    match payload.len() {
        0 => Ok(()),
        left => Err(DecodeError::trailing(method, left, 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn raw_pages_are_copied_only_if_the_lengths_agree() {
        let mut decoder = Decoder::new(Layout::X86);
        let mut pages = [0; 8];
        decoder
            .decode(Method::None, b"12345678", &mut pages)
            .unwrap();
        assert_eq!(&pages, b"12345678");
        assert_eq!(
            decoder.decode(Method::None, b"1234567", &mut pages),
            Err(DecodeError::RawLength {
                found: 7,
                expected: 8
            })
        );
        assert_eq!(
            decoder.decode(Method::None, b"12345678", &mut pages),
            Err(DecodeError::AfterError)
        );
    }

    #[test]
    fn methods_that_are_not_built_in_are_named() {
        let method = Method::Uadk;
        assert_eq!(
            Decoder::new(Layout::X86).decode(method, &[1], &mut [0; 4096]),
            Err(DecodeError::NotBuilt { method })
        );
    }

    #[test]
    fn more_than_a_packet_is_our_fault_and_does_no_harm() {
        let mut decoder = Decoder::new(Layout::X86);
        let (len, max) = (512 * 1024 + 1, 512 * 1024);
        assert_eq!(
            decoder.decode(Method::Zlib, &[1], &mut vec![0; len]),
            Err(DecodeError::Output { len, max })
        );
        assert_eq!(decoder.decode(Method::Zlib, &[], &mut []), Ok(()));
    }
}
