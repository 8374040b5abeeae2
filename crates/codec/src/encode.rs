//! Encoding: pages of one packet in, its payload out.

use multifd::{Layout, Method};

use crate::{
    EncodeError, Settings,
    engine::{Compress, Fault},
    zlib, zstd,
};

/// Encodes the packets of one channel, in their order, for the whole migration.
pub trait Encoder: Send {
    /// The method, for the packets' flags.
    fn method(&self) -> Method;

    /// The library that does the work: `copy`, `isa-l`, `zlib-rs` or `zstd`.
    fn engine(&self) -> &'static str;

    /// The payload of a packet whose normal pages are `pages`, back to back: at most
    /// `layout.packet_bytes()` of them, and none of them give an empty payload.
    ///
    /// The payload is in `out`, or for method none is `pages` itself, without a copy. `out` is
    /// cleared first and its capacity is reused: its first use reserves
    /// `layout.max_payload()` bytes, after that nothing is allocated.
    ///
    /// # Errors
    /// When `pages` is too long, the library fails, or the payload would be longer than
    /// `layout.max_payload()`. See [`EncodeError`] about using the encoder again.
    fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], EncodeError>;
}

/// An encoder for a new channel.
///
/// # Errors
/// When the method's library cannot be set up (no memory).
pub fn encoder(settings: &Settings, layout: Layout) -> Result<Box<dyn Encoder>, EncodeError> {
    let method = settings.method();
    let level = settings.level().unwrap_or_default();
    let engine = match method {
        Method::Zlib => zlib::compressor(level),
        Method::Zstd => zstd::compressor(level)?,
        // `Settings` lets no other method through.
        Method::None | Method::Qpl | Method::Uadk | Method::Qatzip => {
            return Ok(Box::new(Copy { layout }));
        }
    };
    Ok(Box::new(Stream {
        method,
        layout,
        engine,
        failed: false,
    }))
}

/// Method none.
struct Copy {
    layout: Layout,
}

impl Encoder for Copy {
    fn method(&self) -> Method {
        Method::None
    }

    fn engine(&self) -> &'static str {
        "copy"
    }

    fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        _out: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], EncodeError> {
        check_input(pages, self.layout)?;
        Ok(pages)
    }
}

/// A method with one stream per channel.
struct Stream {
    method: Method,
    layout: Layout,
    engine: Box<dyn Compress>,
    failed: bool,
}

impl Encoder for Stream {
    fn method(&self) -> Method {
        self.method
    }

    fn engine(&self) -> &'static str {
        self.engine.name()
    }

    fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], EncodeError> {
        let method = self.method;
        if self.failed {
            return Err(EncodeError::AfterError { method });
        }
        check_input(pages, self.layout)?;
        out.clear();
        if pages.is_empty() {
            // A flush of nothing would be bytes, which a packet without pages cannot carry.
            return Ok(out);
        }
        let max = self.layout.max_payload();
        out.reserve(max);
        let flushed = self.engine.flush(pages, out);
        let result = match flushed {
            // A larger buffer of the caller's must not hide that the receiver's is full.
            Ok(()) if out.len() > max => Err(Fault::Room),
            flushed => flushed,
        };
        self.failed = result.is_err();
        match result {
            Ok(()) => Ok(out),
            Err(Fault::Room) => Err(EncodeError::TooLong {
                method,
                len: pages.len(),
                max,
            }),
            Err(Fault::Refused(reason)) => Err(EncodeError::Engine {
                method,
                engine: self.engine.name(),
                reason,
            }),
        }
    }
}

fn check_input(pages: &[u8], layout: Layout) -> Result<(), EncodeError> {
    let (len, max) = (pages.len(), layout.packet_bytes());
    if len > max {
        return Err(EncodeError::Input { len, max });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine that writes as many bytes as it is told, or fails.
    struct Scripted(Result<usize, Fault>);

    impl Compress for Scripted {
        fn name(&self) -> &'static str {
            "scripted"
        }

        fn flush(&mut self, _pages: &[u8], out: &mut Vec<u8>) -> Result<(), Fault> {
            out.resize(self.0?, 0);
            Ok(())
        }
    }

    fn stream(script: Result<usize, Fault>) -> Stream {
        Stream {
            method: Method::Zlib,
            layout: Layout::X86,
            engine: Box::new(Scripted(script)),
            failed: false,
        }
    }

    #[test]
    fn a_payload_may_fill_the_receivers_buffer_and_not_a_byte_more() {
        let max = Layout::X86.max_payload();
        let mut out = Vec::with_capacity(2 * max);
        let page = [1; 4096];
        assert_eq!(stream(Ok(max)).encode(&page, &mut out).unwrap().len(), max);
        for script in [Ok(max + 1), Err(Fault::Room)] {
            let mut stream = stream(script);
            assert_eq!(
                stream.encode(&page, &mut out),
                Err(EncodeError::TooLong {
                    method: Method::Zlib,
                    len: 4096,
                    max
                })
            );
            assert_eq!(
                stream.encode(&page, &mut out),
                Err(EncodeError::AfterError {
                    method: Method::Zlib
                })
            );
        }
    }

    #[test]
    fn a_failing_library_is_named() {
        assert_eq!(
            stream(Err(Fault::Refused("out of luck")))
                .encode(&[1; 4096], &mut Vec::new())
                .unwrap_err()
                .to_string(),
            "the zlib encoder (scripted) failed: out of luck"
        );
    }

    #[test]
    fn more_than_a_packet_is_refused_and_does_no_harm() {
        for method in [Method::None, Method::Zlib, Method::Zstd] {
            let settings = Settings::new(method, None).unwrap();
            let mut encoder = encoder(&settings, Layout::X86).unwrap();
            let (len, max) = (512 * 1024 + 4096, 512 * 1024);
            let mut out = Vec::new();
            assert_eq!(
                encoder.encode(&vec![1; len], &mut out),
                Err(EncodeError::Input { len, max })
            );
            assert!(!encoder.encode(&[1; 4096], &mut out).unwrap().is_empty());
        }
    }

    #[test]
    fn no_pages_are_no_payload() {
        for method in [Method::None, Method::Zlib, Method::Zstd] {
            let settings = Settings::new(method, None).unwrap();
            let mut encoder = encoder(&settings, Layout::X86).unwrap();
            assert_eq!(encoder.encode(&[], &mut vec![1]), Ok(&[][..]));
        }
    }
}
