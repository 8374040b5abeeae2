//! Encoding: pages of one packet in, its payload out.

use std::{sync::Arc, time::Duration};

use multifd::{Layout, Method};

use crate::{
    EncodeError, Engines, Health, Settings,
    engine::{Compress, Fault},
    registry,
};

/// Encodes the packets of one channel, in their order, for the whole migration.
///
/// Where the packets of the method are independent (lz4, zstd-frames, qpl, qatzip) a channel may have several
/// encoders, each with its share of the packets.
pub trait Encoder: Send {
    /// The method that was asked for, none for auto; see [`Encoded::method`].
    fn method(&self) -> Method;

    /// The engine that does the work: a library's name, a device's, `copy` for method none, or `auto`.
    fn engine(&self) -> &'static str;

    /// The payload of a packet whose normal pages are `pages`, back to back: at most
    /// `layout.packet_bytes()` of them, and none of them give an empty payload.
    ///
    /// `out` is room for the payload, of `layout.max_payload()` bytes: with less, what does not fit
    /// is an error. Nothing is allocated.
    ///
    /// # Errors
    /// When `pages` is too long, the library fails, or the payload would be longer than
    /// `layout.max_payload()`. See [`EncodeError`] about using the encoder again.
    fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError>;

    /// Room for the pages of the next packet in the encoder itself, for callers that have to copy them
    /// anyway: [`encode_room`](Encoder::encode_room) then saves the encoder a copy of its own. `None` if
    /// it makes none.
    fn room(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// As [`encode`](Encoder::encode), of the pages that are the first `len` bytes of the
    /// [`room`](Encoder::room).
    ///
    /// # Errors
    /// As [`encode`](Encoder::encode).
    fn encode_room<'a>(
        &mut self,
        len: usize,
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        let _ = out;
        Err(EncodeError::Input { len, max: 0 })
    }

    /// Whether the next packet goes as it is, by method none, so that nobody need gather its pages. After
    /// `true`, [`encode`](Encoder::encode) is not called for that packet.
    fn next_is_raw(&mut self) -> bool {
        false
    }

    /// Tells how long the channel took for the last packet: `wire_bytes` bytes, header included, for
    /// `page_bytes` bytes of pages. `took` is wall time, and waiting for a limited bandwidth is in
    /// it: a limit is as good as a slow link. `queued` finds out, by a system call, how many bytes of the
    /// channel its socket still holds; `None` where nobody knows.
    fn sent(
        &mut self,
        wire_bytes: usize,
        page_bytes: usize,
        took: Duration,
        queued: &dyn Fn() -> Option<usize>,
    ) {
        let _ = (wire_bytes, page_bytes, took, queued);
    }
}

/// The payload of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded<'a> {
    /// The method, for the packet's flags: the encoder's, or none where its receiver takes any
    /// method and encoding saves nothing (lz4, zstd-frames).
    pub method: Method,
    /// The encoded pages: a part of the room that was given, or the pages themselves, without a copy.
    pub payload: &'a [u8],
}

/// An encoder for a new channel, in software.
///
/// # Errors
/// When the method's library cannot be set up (no memory).
pub fn encoder(settings: &Settings, layout: Layout) -> Result<Box<dyn Encoder>, EncodeError> {
    Engines::software(*settings).encoder(layout, &Arc::new(Health::default()))
}

/// Method none.
pub(crate) fn copy(layout: Layout) -> Box<dyn Encoder> {
    Box::new(Copy { layout })
}

/// Any other method.
pub(crate) fn coded(method: Method, layout: Layout, engine: Box<dyn Compress>) -> Box<dyn Encoder> {
    Box::new(Coded {
        method,
        layout,
        engine,
        failed: false,
    })
}

struct Copy {
    layout: Layout,
}

impl Encoder for Copy {
    fn method(&self) -> Method {
        Method::None
    }

    fn engine(&self) -> &'static str {
        registry::COPY
    }

    fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        _out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        check_input(pages, self.layout)?;
        Ok(raw(pages))
    }

    fn next_is_raw(&mut self) -> bool {
        true
    }
}

struct Coded {
    method: Method,
    layout: Layout,
    engine: Box<dyn Compress>,
    failed: bool,
}

impl Encoder for Coded {
    fn method(&self) -> Method {
        self.method
    }

    fn engine(&self) -> &'static str {
        self.engine.name()
    }

    fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        self.check(pages.len())?;
        if pages.is_empty() {
            return Ok(self.nothing(out));
        }
        let room = self.room_in(out);
        match self.engine.compress(pages, &mut out[..room]) {
            // Whoever knows a method of our own takes raw packets beside it.
            Err(Fault::Room) if !self.method.is_stock() => Ok(raw(pages)),
            result => self.finish(result, pages.len(), &mut out[..room]),
        }
    }

    fn room(&mut self) -> Option<&mut [u8]> {
        let packet_bytes = self.layout.packet_bytes();
        self.engine.room()?.get_mut(..packet_bytes)
    }

    fn encode_room<'a>(
        &mut self,
        len: usize,
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        self.check(len)?;
        if len == 0 {
            return Ok(self.nothing(out));
        }
        let room = self.room_in(out);
        let result = self.engine.compress_room(len, &mut out[..room]);
        self.finish(result, len, &mut out[..room])
    }
}

impl Coded {
    fn check(&self, pages_len: usize) -> Result<(), EncodeError> {
        if self.failed {
            let method = self.method;
            return Err(EncodeError::AfterError { method });
        }
        check_len(pages_len, self.layout)
    }

    /// A flush of nothing would be bytes, which a packet without pages cannot carry.
    fn nothing<'a>(&self, out: &'a [u8]) -> Encoded<'a> {
        Encoded {
            method: self.method,
            payload: &out[..0],
        }
    }

    /// A larger buffer of the caller's must not hide that the receiver's is full.
    fn room_in(&self, out: &[u8]) -> usize {
        out.len().min(self.layout.max_payload())
    }

    fn finish<'a>(
        &mut self,
        result: Result<usize, Fault>,
        pages_len: usize,
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        let method = self.method;
        let fault = match result {
            Ok(len) => {
                let payload = &out[..len.min(out.len())];
                return Ok(Encoded { method, payload });
            }
            Err(fault) => fault,
        };
        self.failed = true;
        let engine = self.engine.name();
        Err(match fault {
            Fault::Room => EncodeError::TooLong {
                method,
                len: pages_len,
                max: out.len(),
            },
            Fault::Refused(reason) => EncodeError::Engine {
                method,
                engine,
                reason,
            },
            Fault::Distrusted { unchecked } => EncodeError::Distrusted {
                method,
                engine,
                unchecked,
            },
        })
    }
}

/// The pages as they are.
pub(crate) fn raw(pages: &[u8]) -> Encoded<'_> {
    Encoded {
        method: Method::None,
        payload: pages,
    }
}

pub(crate) fn check_input(pages: &[u8], layout: Layout) -> Result<(), EncodeError> {
    check_len(pages.len(), layout)
}

fn check_len(len: usize, layout: Layout) -> Result<(), EncodeError> {
    let max = layout.packet_bytes();
    if len > max {
        return Err(EncodeError::Input { len, max });
    }
    Ok(())
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

    /// An engine that writes as many bytes as it is told, or fails.
    struct Scripted(Result<usize, Fault>);

    impl Compress for Scripted {
        fn name(&self) -> &'static str {
            "scripted"
        }

        fn compress(&mut self, _pages: &[u8], out: &mut [u8]) -> Result<usize, Fault> {
            self.0.map(|len| len.min(out.len()))
        }
    }

    fn scripted(method: Method, script: Result<usize, Fault>) -> Box<dyn Encoder> {
        coded(method, Layout::X86, Box::new(Scripted(script)))
    }

    fn room() -> Vec<u8> {
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
        let mut encoder = scripted(Method::Zlib, Err(Fault::Room));
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
            let mut encoder = scripted(method, Err(Fault::Room));
            let page = [1; 4096];
            for _ in 0..2 {
                assert_eq!(encoder.encode(&page, &mut room()), Ok(raw(&page)));
            }
        }
    }

    #[test]
    fn a_failing_engine_is_named() {
        let error = |fault| {
            let mut encoder = scripted(Method::Zlib, Err(fault));
            let mut out = room();
            encoder
                .encode(&[1; 4096], &mut out)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(Fault::Refused("out of luck")),
            "the zlib encoder (scripted) failed: out of luck"
        );
        assert_eq!(
            error(Fault::Distrusted { unchecked: 7 }),
            "engine scripted has returned wrong bytes for a zlib packet, and 7 packets had gone out \
             unchecked: use --accel none, or --verify all"
        );
    }

    #[test]
    fn more_than_a_packet_is_refused_and_does_no_harm() {
        for method in METHODS {
            let settings = Settings::new(method, None).unwrap();
            let mut encoder = encoder(&settings, Layout::X86).unwrap();
            let (len, max) = (512 * 1024 + 4096, 512 * 1024);
            let mut out = room();
            assert_eq!(
                encoder.encode(&vec![1; len], &mut out),
                Err(EncodeError::Input { len, max })
            );
            let encoded = encoder.encode(&[1; 4096], &mut out).unwrap();
            assert!(!encoded.payload.is_empty());
        }
    }

    #[test]
    fn only_method_none_is_raw_beforehand() {
        for method in METHODS {
            let settings = Settings::new(method, None).unwrap();
            let mut encoder = encoder(&settings, Layout::X86).unwrap();
            assert_eq!(encoder.next_is_raw(), method == Method::None);
        }
    }

    #[test]
    fn no_pages_are_no_payload() {
        for method in METHODS {
            let settings = Settings::new(method, None).unwrap();
            let mut encoder = encoder(&settings, Layout::X86).unwrap();
            assert!(encoder.encode(&[], &mut room()).unwrap().payload.is_empty());
        }
    }
}
