//! Encoding: pages of one packet in, its payload out.

use std::sync::Arc;

use multifd::{Layout, Method};

use crate::{
    EncodeError, Engines, Health, Settings,
    engine::{Compress, CompressError},
};

/// Encodes the packets of one channel, in their order, for the whole migration.
///
/// Where the packets of the method are [independent](crate::Framing::Packet) a channel may have several
/// encoders, each with its share of the packets.
pub struct Encoder {
    method: Method,
    layout: Layout,
    name: &'static str,
    /// `None` for method none.
    engine: Option<Box<dyn Compress>>,
    failed: bool,
}

/// The payload of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded<'a> {
    /// The method, for the packet's flags: the encoder's, or none where its receiver takes any
    /// method and encoding saves nothing (Vamoose's own methods).
    pub method: Method,
    /// The encoded pages: a part of the output buffer, or the pages themselves, without a copy.
    pub payload: &'a [u8],
}

/// An encoder for a new channel, in software.
///
/// # Errors
/// When the method's library cannot be set up (no memory).
pub fn encoder(settings: &Settings, layout: Layout) -> Result<Encoder, EncodeError> {
    Engines::software(*settings).encoder(layout, &Arc::new(Health::default()))
}

impl Encoder {
    /// By an engine with this `name`.
    pub(crate) fn new(
        method: Method,
        layout: Layout,
        name: &'static str,
        engine: Option<Box<dyn Compress>>,
    ) -> Self {
        Self {
            method,
            layout,
            name,
            engine,
            failed: false,
        }
    }

    /// Adds a checksum of the pages to each payload of zstd-frames: zstd's own, which every decoder compares. Other methods have
    /// none.
    ///
    /// # Errors
    /// When the library refuses.
    pub fn add_checksums(&mut self) -> Result<(), EncodeError> {
        let added = (self.engine.as_mut()).map_or(Ok(()), |engine| engine.add_checksums());
        let (method, engine) = (self.method, self.name);
        added.map_err(|reason| EncodeError::Engine {
            method,
            engine,
            reason,
        })
    }

    /// The requested method; see [`Encoded::method`].
    pub fn method(&self) -> Method {
        self.method
    }

    /// The payload of a packet whose normal pages are `pages`, back to back: at most `layout.packet_bytes()` bytes. Without
    /// pages it is empty.
    ///
    /// `out` is the output buffer, of `layout.max_payload()` bytes: with less, a payload that does not fit is an error. Nothing
    /// is allocated.
    ///
    /// # Errors
    /// When `pages` is too long, the library fails, or the payload would be longer than
    /// `layout.max_payload()`. See [`EncodeError`] about using the encoder again.
    pub fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        self.encode_after(&[], pages, out)
    }

    /// As [`encode`](Encoder::encode), of pages that resemble `earlier`: of some of them these are earlier versions, which the
    /// receiver has as well. Only method zstd-frames can.
    ///
    /// # Errors
    /// As [`encode`](Encoder::encode), and by other methods.
    pub fn encode_after<'a>(
        &mut self,
        earlier: &[u8],
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        self.check(pages.len())?;
        let Some(engine) = &mut self.engine else {
            return Ok(raw(pages));
        };
        let out = limited(out, self.layout);
        let result = match (pages, earlier) {
            // A flush has bytes even without pages, and a packet without pages has no payload.
            ([], _) => Ok(0),
            (_, []) => engine.compress(pages, out),
            _ => engine.compress_after(earlier, pages, out),
        };
        match result {
            // A receiver that knows a method of our own takes raw packets beside it.
            Err(CompressError::OutputFull) if !self.method.is_stock() => Ok(raw(pages)),
            result => self.finish(result, pages.len(), out),
        }
    }

    fn check(&self, len: usize) -> Result<(), EncodeError> {
        if self.failed {
            let method = self.method;
            return Err(EncodeError::AfterError { method });
        }
        let max = self.layout.packet_bytes();
        if len > max {
            return Err(EncodeError::Input { len, max });
        }
        Ok(())
    }

    fn finish<'a>(
        &mut self,
        result: Result<usize, CompressError>,
        pages_len: usize,
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        let (method, engine) = (self.method, self.name);
        let error = match result {
            Ok(len) => {
                let payload = &out[..len.min(out.len())];
                return Ok(Encoded { method, payload });
            }
            Err(error) => error,
        };
        self.failed = true;
        Err(match error {
            CompressError::OutputFull => EncodeError::TooLong {
                method,
                len: pages_len,
                max: out.len(),
            },
            CompressError::Refused(reason) => EncodeError::Engine {
                method,
                engine,
                reason,
            },
            CompressError::Distrusted { unchecked } => EncodeError::Distrusted {
                method,
                engine,
                unchecked,
            },
        })
    }
}

/// Name of the engine of method none.
pub(crate) const COPY: &str = "copy";

/// The pages as they are.
fn raw(pages: &[u8]) -> Encoded<'_> {
    Encoded {
        method: Method::None,
        payload: pages,
    }
}

/// The output buffer that a receiver has: a larger one of the caller's must not hide that it is full.
fn limited(out: &mut [u8], layout: Layout) -> &mut [u8] {
    let len = out.len().min(layout.max_payload());
    &mut out[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    const METHODS: [Method; 5] = [
        Method::None,
        Method::Zlib,
        Method::Zstd,
        Method::Lz4,
        Method::ZstdFrames,
    ];

    /// An engine that writes as many bytes as configured, or fails.
    struct Scripted(Result<usize, CompressError>);

    impl Compress for Scripted {
        fn compress(&mut self, _pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
            self.0.map(|len| len.min(out.len()))
        }
    }

    fn scripted(method: Method, script: Result<usize, CompressError>) -> Encoder {
        let engine = Some(Box::new(Scripted(script)) as Box<dyn Compress>);
        Encoder::new(method, Layout::X86, "scripted", engine)
    }

    fn buffer() -> Vec<u8> {
        vec![0; Layout::X86.max_payload()]
    }

    #[test]
    fn a_payload_may_fill_the_receivers_buffer_and_not_a_byte_more() {
        let max = Layout::X86.max_payload();
        let mut larger = vec![0; 2 * max];
        let page = [1; 4096];
        let mut encoder = scripted(Method::Zlib, Ok(usize::MAX));
        assert_eq!(
            encoder.encode(&page, &mut larger).unwrap().payload.len(),
            max
        );
        let mut encoder = scripted(Method::Zlib, Err(CompressError::OutputFull));
        let (method, len) = (Method::Zlib, 4096);
        assert_eq!(
            encoder.encode(&page, &mut larger),
            Err(EncodeError::TooLong { method, len, max })
        );
        assert_eq!(
            encoder.encode(&page, &mut larger),
            Err(EncodeError::AfterError { method })
        );
    }

    #[test]
    fn our_own_methods_go_raw_where_they_save_nothing_and_go_on_after_it() {
        for method in [Method::Lz4, Method::ZstdFrames] {
            let mut encoder = scripted(method, Err(CompressError::OutputFull));
            let page = [1; 4096];
            for _ in 0..2 {
                assert_eq!(encoder.encode(&page, &mut buffer()), Ok(raw(&page)));
            }
        }
    }

    #[test]
    fn a_failing_engine_is_named() {
        let error = |fault| {
            let mut encoder = scripted(Method::Zlib, Err(fault));
            let mut out = buffer();
            encoder
                .encode(&[1; 4096], &mut out)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(CompressError::Refused("out of luck")),
            "the zlib encoder (scripted) failed: out of luck"
        );
        assert_eq!(
            error(CompressError::Distrusted { unchecked: 7 }),
            "engine scripted has returned wrong bytes for a zlib packet, and 7 packets had gone out \
             unchecked"
        );
    }

    #[test]
    fn more_than_a_packet_is_refused_and_does_no_harm() {
        for method in METHODS {
            let settings = Settings::new(method, None).unwrap();
            let mut encoder = encoder(&settings, Layout::X86).unwrap();
            let (len, max) = (512 * 1024 + 4096, 512 * 1024);
            let mut out = buffer();
            assert_eq!(
                encoder.encode(&vec![1; len], &mut out),
                Err(EncodeError::Input { len, max })
            );
            let encoded = encoder.encode(&[1; 4096], &mut out).unwrap();
            assert!(!encoded.payload.is_empty());
        }
    }

    #[test]
    fn no_pages_are_no_payload() {
        for method in METHODS {
            let settings = Settings::new(method, None).unwrap();
            let mut encoder = encoder(&settings, Layout::X86).unwrap();
            assert!(
                encoder
                    .encode(&[], &mut buffer())
                    .unwrap()
                    .payload
                    .is_empty()
            );
        }
    }
}
