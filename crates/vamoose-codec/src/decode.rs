//! Decoding: payload of one packet in, its pages out.

use std::sync::Arc;

use multifd::{Layout, Method};

use crate::{
    DecodeError, Engines, Health,
    accelerated::{AcceleratedUnpack, Guard},
    engine::{Decompress, Unpack},
    ffi::zstd as frame,
    methods::{self, Decoding},
    zlib, zstd,
};

/// Decodes the packets of one channel, in their order, for the whole migration.
///
/// Each packet's flags name its method. What a method needs is created when the first packet asks for
/// it, so a decoder costs nothing until then.
pub struct Decoder {
    layout: Layout,
    engines: Option<(Engines, Arc<Health>)>,
    zlib: Option<Box<dyn Decompress>>,
    zstd: Option<frame::Decompress>,
    /// Of methods whose packets are independent, by method.
    unpackers: Vec<(Method, Box<dyn Unpack>)>,
    /// Pages that were asked for here, once they are.
    pages: Vec<u8>,
    failed: bool,
}

impl Decoder {
    /// A decoder for a new channel, in software.
    pub fn new(layout: Layout) -> Self {
        Self {
            layout,
            engines: None,
            zlib: None,
            zstd: None,
            unpackers: Vec::new(),
            pages: Vec::new(),
            failed: false,
        }
    }

    pub(crate) fn with_engines(layout: Layout, engines: Engines, health: Arc<Health>) -> Self {
        Self {
            engines: Some((engines, health)),
            ..Self::new(layout)
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
        self.check(pages.len())?;
        let result = match methods::info(method).map(|info| info.decoding) {
            Some(Decoding::Copy) => copy(payload, pages),
            // A packet without normal pages has no payload, not even a flush.
            _ if pages.is_empty() => no_pages(method, payload),
            Some(Decoding::ZlibStream) => fill(
                self.zlib.get_or_insert_with(zlib::decompressor).as_mut(),
                Packet { method, payload },
                pages,
            ),
            Some(Decoding::ZstdStream) => {
                existing_or(&mut self.zstd, || zstd::decompressor(self.layout))
                    .and_then(|frame| copy(frame.decompress(payload, pages.len())?, pages))
            }
            Some(Decoding::Packets(_)) => self
                .unpacker(method)
                .and_then(|unpacker| unpacker.unpack(payload, pages)),
            None => Err(DecodeError::NotBuilt { method }),
        };
        self.failed = result.is_err();
        result
    }

    /// As [`decode`](Decoder::decode), of `len` bytes of pages, which stay in the decoder until its next
    /// packet: for callers that have to copy them elsewhere anyway, as method zstd, whose pages are its
    /// history, then needs no copy of its own.
    ///
    /// # Errors
    /// As [`decode`](Decoder::decode).
    pub fn decode_borrowed<'a>(
        &'a mut self,
        method: Method,
        payload: &'a [u8],
        len: usize,
    ) -> Result<&'a [u8], DecodeError> {
        self.check(len)?;
        if method == Method::Zstd && len > 0 {
            // Until it has succeeded: once its pages are borrowed, nothing can be noted down.
            self.failed = true;
            let frame = existing_or(&mut self.zstd, || zstd::decompressor(self.layout))?;
            let pages = frame.decompress(payload, len)?;
            self.failed = false;
            return Ok(pages);
        }
        let mut pages = std::mem::take(&mut self.pages);
        pages.resize(self.layout.packet_bytes(), 0);
        let result = self.decode(method, payload, &mut pages[..len]);
        self.pages = pages;
        result.map(|()| &self.pages[..len])
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

    /// The channel's decoder of a method whose packets are independent.
    fn unpacker(&mut self, method: Method) -> Result<&mut dyn Unpack, DecodeError> {
        let known = self.unpackers.iter().position(|(of, _)| *of == method);
        let index = match known {
            Some(index) => index,
            None => {
                let software = unpacker(method, self.layout)?;
                self.unpackers
                    .push((method, self.accelerate(method, software)));
                self.unpackers.len() - 1
            }
        };
        Ok(self.unpackers[index].1.as_mut())
    }

    /// Puts the hardware that there is for `method` before its software fallback.
    fn accelerate(&self, method: Method, software: Box<dyn Unpack>) -> Box<dyn Unpack> {
        let Some((engines, health)) = &self.engines else {
            return software;
        };
        let Some(accelerator) = engines.accelerator(method) else {
            return software;
        };
        if !accelerator.takes(self.layout) {
            return software;
        }
        Box::new(AcceleratedUnpack {
            guard: Guard::new(accelerator.name(), method, engines.verify, health.clone()),
            device: accelerator.device(method, LEVEL_OF_DECODERS, self.layout),
            fallback: software,
            decoded: vec![0; self.layout.packet_bytes()],
        })
    }
}

/// Devices take a level when they are set up, also for decoding, where it means nothing.
const LEVEL_OF_DECODERS: i32 = 1;

/// The software decoder of a method whose packets are independent.
pub(crate) fn unpacker(method: Method, layout: Layout) -> Result<Box<dyn Unpack>, DecodeError> {
    match methods::info(method).map(|info| info.decoding) {
        Some(Decoding::Packets(unpacker)) => unpacker(layout),
        Some(Decoding::Copy | Decoding::ZlibStream | Decoding::ZstdStream) | None => {
            Err(DecodeError::NotBuilt { method })
        }
    }
}

/// A payload and how it is encoded.
#[derive(Clone, Copy)]
struct Packet<'a> {
    method: Method,
    payload: &'a [u8],
}

/// Fills all of `pages` from a payload that must hold nothing else.
///
/// When the pages are full there is input left in a correct packet: the end of the last block and
/// the flush. It has to be fed to the stream too, so that the next packet starts where this one
/// stopped, and must not decode to anything. Giving the stream one spare byte of room shows
/// whether it would.
fn fill(
    stream: &mut dyn Decompress,
    Packet { method, payload }: Packet<'_>,
    pages: &mut [u8],
) -> Result<(), DecodeError> {
    let expected = pages.len();
    let (mut input, mut found) = (payload, 0);
    loop {
        let full = found == expected;
        let mut spare = [0];
        let output = if full {
            &mut spare[..]
        } else {
            &mut pages[found..]
        };
        let step = stream
            .step(input, output)
            .map_err(|reason| DecodeError::Corrupt { method, reason })?;
        if step.ended {
            return Err(DecodeError::Ended { method });
        }
        if full && step.produced > 0 {
            return Err(DecodeError::TooLong {
                method,
                payload: payload.len(),
                expected,
            });
        }
        input = &input[step.consumed.min(input.len())..];
        found += step.produced;
        if full && input.is_empty() {
            return Ok(());
        }
        // Libraries report "no progress" each in their own way, some as success: count for them.
        if step.consumed == 0 && step.produced == 0 {
            let left = input.len();
            return Err(match (full, left) {
                (true, _) => DecodeError::TrailingInput {
                    method,
                    left,
                    expected,
                },
                (false, 0) => DecodeError::TooShort {
                    method,
                    payload: payload.len(),
                    found,
                    expected,
                },
                (false, _) => DecodeError::Corrupt {
                    method,
                    reason: "decoding makes no progress",
                },
            });
        }
    }
}

fn copy(payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
    if payload.len() != pages.len() {
        return Err(DecodeError::RawLength {
            found: payload.len(),
            expected: pages.len(),
        });
    }
    pages.copy_from_slice(payload);
    Ok(())
}

fn no_pages(method: Method, payload: &[u8]) -> Result<(), DecodeError> {
    match payload.len() {
        0 => Ok(()),
        left => Err(DecodeError::TrailingInput {
            method,
            left,
            expected: 0,
        }),
    }
}

/// What is in `slot`, created if there is nothing yet.
pub(crate) fn existing_or<T, E>(
    slot: &mut Option<T>,
    create: impl FnOnce() -> Result<T, E>,
) -> Result<&mut T, E> {
    let existing = match slot.take() {
        Some(existing) => existing,
        None => create()?,
    };
    Ok(slot.insert(existing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Step;

    /// A stream whose steps are given.
    struct Scripted(Vec<Result<Step, &'static str>>);

    impl Decompress for Scripted {
        fn step(&mut self, _input: &[u8], _output: &mut [u8]) -> Result<Step, &'static str> {
            self.0.remove(0)
        }
    }

    fn step(consumed: usize, produced: usize) -> Result<Step, &'static str> {
        Ok(Step {
            consumed,
            produced,
            ended: false,
        })
    }

    fn run(steps: &[Result<Step, &'static str>]) -> Result<(), DecodeError> {
        let mut stream = Scripted(steps.to_vec());
        let packet = Packet {
            method: Method::Zlib,
            payload: &[0; 10],
        };
        let result = fill(&mut stream, packet, &mut [0; 4096]);
        assert!(stream.0.is_empty(), "{} steps left", stream.0.len());
        result
    }

    #[test]
    fn the_flush_after_the_last_page_is_fed_to_the_stream() {
        assert_eq!(
            run(&[step(3, 96), step(2, 4000), step(4, 0), step(1, 0)]),
            Ok(())
        );
        assert_eq!(run(&[step(10, 4096), step(0, 0)]), Ok(()));
    }

    #[test]
    fn every_other_outcome_has_its_own_error() {
        let (method, payload, expected) = (Method::Zlib, 10, 4096);
        let ended = Ok(Step {
            consumed: 10,
            produced: 4096,
            ended: true,
        });
        for (steps, error) in [
            (
                &[step(10, 4095), step(0, 0)][..],
                DecodeError::TooShort {
                    method,
                    payload,
                    found: 4095,
                    expected,
                },
            ),
            (
                &[step(5, 4096), step(5, 1)],
                DecodeError::TooLong {
                    method,
                    payload,
                    expected,
                },
            ),
            (
                &[step(5, 4096), step(1, 0), step(0, 0)],
                DecodeError::TrailingInput {
                    method,
                    left: 4,
                    expected,
                },
            ),
            (
                &[step(5, 1), step(0, 0)],
                DecodeError::Corrupt {
                    method,
                    reason: "decoding makes no progress",
                },
            ),
            (&[ended], DecodeError::Ended { method }),
            (
                &[Err("bad block")],
                DecodeError::Corrupt {
                    method,
                    reason: "bad block",
                },
            ),
        ] {
            assert_eq!(run(steps), Err(error));
        }
    }

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
