//! Bytes of any protocol, between a program's connection and a stream of a session.
//!
//! On a session's stream, bytes travel as blocks. A block is what has arrived from the program, or a part of that: no byte waits for
//! another one.
//!
//! ```text
//!  0       kind    0 the bytes themselves, 1 zeros, 2 a zstd frame of the bytes
//!  1..4    length  of the bytes, big endian: 1 to 512 KiB
//!  4..8    length  of the frame, big endian; with kind 2 only
//!   …      the bytes, or the frame
//! ```
//!
//! Method auto chooses the kind and the level as it does for packets of pages, by who waits. Small blocks go as they are. After a
//! block in which zstd found nothing (an encrypted disk, QEMU's own TLS), only a sample of each block is tried until one shrinks.
//!
//! A frame goes with a checksum of its bytes, as a packet goes with one of its pages.

use std::{
    io::{self, Read as _, Write as _},
    sync::Arc,
    time::Duration,
};

use multifd::{Layout, Method};
use thiserror::Error;
use vamoose_codec::{DecodeError, Decoder, EncodeError, is_zero};

use crate::{
    MethodChoice, Pacer, Stats, Stream,
    adaptive::{
        Adaptive, FarEnd,
        meter::{Activity, WaitMeter},
    },
    is_stall,
    socket::uninterrupted,
    stats::cpu_timed,
};

/// Most bytes of a block, and of what [`ByteReader::read`] returns.
const MOST: usize = 512 * 1024;

const HEAD: usize = 4;
/// Bytes of the head of a block with a frame.
const FRAME_HEAD: usize = 8;

/// Kinds of blocks.
const PLAIN: u8 = 0;
const ZEROS: u8 = 1;
const FRAME: u8 = 2;

/// Shorter blocks go as they are: requests, and answers of a page, whose receiver waits for each.
const SMALL: usize = 8 * 1024;

/// Zeros are looked for in parts of this length.
const PART: usize = 32 * 1024;

/// What is tried of a block after one that did not shrink.
const SAMPLE: usize = 16 * 1024;

/// Layout of what encoders and decoders are given: 512 KiB at most.
const LAYOUT: Layout = Layout::X86;

/// Writes the bytes of a program to a stream.
pub struct ByteWriter {
    out: Out,
    /// For a session's stream.
    blocks: Option<Blocks>,
}

/// A stream, and who has to know what is written to it.
struct Out {
    stream: Arc<Stream>,
    stats: Option<Arc<Stats>>,
    pacer: Option<Arc<Pacer>>,
}

/// Writes blocks.
struct Blocks {
    /// `None` with method none.
    encoder: Option<Adaptive>,
    payload: Box<[u8]>,
    /// The last block that was tried did not shrink.
    is_dense: bool,
}

impl ByteWriter {
    /// Writes bytes as they are. What is written is counted in `stats`.
    pub fn plain(stream: Arc<Stream>, stats: Option<Arc<Stats>>) -> Self {
        let out = Out {
            stream,
            stats,
            pacer: None,
        };
        Self { out, blocks: None }
    }

    /// Writes blocks, encoded by method auto, unless `method` is none. What is written is counted in `stats`.
    pub fn blocks(stream: Arc<Stream>, method: &MethodChoice, stats: Option<Arc<Stats>>) -> Self {
        let blocks = Blocks {
            encoder: (method.name() != Method::None.name()).then(|| Adaptive::new(LAYOUT)),
            payload: vec![0; LAYOUT.max_payload()].into(),
            is_dense: false,
        };
        Self {
            blocks: Some(blocks),
            ..Self::plain(stream, stats)
        }
    }

    /// Limits what is written, together with the pacer's other callers.
    #[must_use]
    pub fn paced(mut self, pacer: Option<Arc<Pacer>>) -> Self {
        self.out.pacer = pacer;
        self
    }

    /// Writes all `bytes`.
    ///
    /// # Errors
    /// The stream's; see [`is_stall`](crate::is_stall) for a peer that took nothing for the stall timeout.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(blocks) = &mut self.blocks else {
            (&*self.out.stream).write_all(bytes)?;
            self.out.count(bytes.len());
            return Ok(());
        };
        let mut parts = bytes.chunks(MOST).flat_map(parts);
        parts.try_for_each(|part| blocks.write(part, &self.out))
    }

    /// The stream's stall timeout.
    pub fn stall_timeout(&self) -> Duration {
        self.out.stream.stall_timeout()
    }

    /// Ends the direction to the peer; what has been written still arrives.
    pub fn finish(&self) {
        self.out.stream.finish();
    }
}

impl Out {
    /// So many bytes have been written. Waits for the bandwidth limit, as only now their number is known.
    fn count(&self, bytes: usize) {
        if let Some(stats) = &self.stats {
            stats.add_sent(bytes);
        }
        if let Some(pacer) = &self.pacer {
            pacer.wait_for(bytes);
        }
    }
}

/// A part of a block's bytes: zeros, or other bytes.
#[derive(Debug, PartialEq, Eq)]
enum Part<'a> {
    Zeros(usize),
    Bytes(&'a [u8]),
}

/// Splits `bytes` at zeros.
fn parts(bytes: &[u8]) -> impl Iterator<Item = Part<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let zero = |chunk: &[u8]| chunk.len() == PART && is_zero(chunk);
        let mut chunks = rest.chunks(PART).map(zero);
        let is_zero = chunks.next()?;
        let count = 1 + chunks.take_while(|zero| *zero == is_zero).count();
        let (part, left) = rest.split_at(rest.len().min(count * PART));
        rest = left;
        Some(match is_zero {
            true => Part::Zeros(part.len()),
            false => Part::Bytes(part),
        })
    })
}

impl Blocks {
    /// Writes a block.
    fn write(&mut self, part: Part<'_>, out: &Out) -> io::Result<()> {
        let Out { stream, stats, .. } = out;
        let bytes = match part {
            Part::Zeros(len) => {
                stream.write_both(&head(ZEROS, len), &[])?;
                out.count(HEAD);
                return Ok(());
            }
            Part::Bytes(bytes) => bytes,
        };
        let Some(encoder) = self.encoder.as_mut().filter(|_| bytes.len() >= SMALL) else {
            out.count(write_plain(bytes, stream)?);
            return Ok(());
        };
        encoder.begin_encode();
        let frame = match encoder.next_is_raw() {
            true => None,
            false => {
                let encode = || encode(encoder, &mut self.payload, &mut self.is_dense, bytes);
                let (frame, time) = cpu_timed(encode);
                if let Some(stats) = stats {
                    stats.add_encode(time);
                }
                frame.map_err(io::Error::other)?
            }
        };
        encoder.begin_send();
        let written = match frame {
            None => write_plain(bytes, stream)?,
            Some(len) => {
                let mut frame_head = [0; FRAME_HEAD];
                frame_head[..HEAD].copy_from_slice(&head(FRAME, bytes.len()));
                frame_head[HEAD..].copy_from_slice(&short(len).to_be_bytes());
                let sum = stream.checks_pages().then(|| crc32c::crc32c(bytes));
                stream.write_packet(&frame_head, &mut self.payload, len, sum)?;
                FRAME_HEAD + len
            }
        };
        out.count(written);
        encoder.end_send(bytes.len(), written, || {
            FarEnd::of(stream, stats.as_deref())
        });
        Ok(())
    }
}

fn write_plain(bytes: &[u8], stream: &Stream) -> io::Result<usize> {
    stream.write_both(&head(PLAIN, bytes.len()), bytes)?;
    Ok(HEAD + bytes.len())
}

/// Encodes `bytes` into `payload`, and returns the frame's length. `None` if the frame would save nothing.
fn encode(
    encoder: &mut Adaptive,
    payload: &mut [u8],
    is_dense: &mut bool,
    bytes: &[u8],
) -> Result<Option<usize>, EncodeError> {
    let mut frame_len = |bytes: &[u8], payload: &mut [u8]| -> Result<Option<usize>, EncodeError> {
        let encoded = encoder.encode(bytes, payload)?;
        Ok((encoded.method == Method::ZstdFrames).then_some(encoded.payload.len()))
    };
    if *is_dense && bytes.len() > SAMPLE {
        let middle = (bytes.len() - SAMPLE) / 2;
        if frame_len(&bytes[middle..middle + SAMPLE], payload)?.is_none() {
            return Ok(None);
        }
    }
    let frame = frame_len(bytes, payload)?;
    *is_dense = frame.is_none();
    Ok(frame)
}

fn head(kind: u8, len: usize) -> [u8; HEAD] {
    let mut head = short(len).to_be_bytes();
    head[0] = kind;
    head
}

/// A length of at most [`MOST`], or of a payload.
fn short(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Reads the bytes of a program, or those that a [`ByteWriter`] has written to a session's stream.
pub struct ByteReader {
    stream: Arc<Stream>,
    stats: Option<Arc<Stats>>,
    /// Bytes of the stream that were read before.
    before: Vec<u8>,
    buffer: Box<[u8]>,
    blocks: Option<Unblock>,
}

/// Reads blocks.
struct Unblock {
    decoder: Decoder,
    payload: Box<[u8]>,
    /// What is left of a block of kind 0.
    left: usize,
    meter: WaitMeter,
}

/// What [`ByteReader`] refuses.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
enum BlockError {
    #[error("the peer sends a block of kind {0}, which there is not")]
    Kind(u8),
    #[error("the peer sends a block of {0} bytes; 1 to {MOST} are allowed")]
    Length(usize),
    #[error("the peer sends a frame of {0} bytes; at most {1} are allowed")]
    FrameLength(usize, usize),
    #[error("bad frame")]
    Frame(#[source] DecodeError),
    #[error(
        "the bytes of a block are not those that were sent: their CRC-32C is {found:#010x} after decoding and was \
         {sent:#010x} before encoding; the memory or a processor of one of the hosts is broken"
    )]
    Changed { found: u32, sent: u32 },
}

impl ByteReader {
    /// Reads bytes as they are. What is read from the stream is counted in `stats`.
    pub fn plain(stream: Arc<Stream>, stats: Option<Arc<Stats>>) -> Self {
        Self {
            stream,
            stats,
            before: Vec::new(),
            buffer: vec![0; MOST].into(),
            blocks: None,
        }
    }

    /// Reads blocks, of which `before` was read from the stream before. What is read is counted in `stats`.
    pub fn blocks(stream: Arc<Stream>, before: Vec<u8>, stats: Option<Arc<Stats>>) -> Self {
        let blocks = Unblock {
            decoder: Decoder::new(LAYOUT),
            payload: vec![0; LAYOUT.max_payload()].into(),
            left: 0,
            meter: WaitMeter::of_receiver(),
        };
        Self {
            before,
            blocks: Some(blocks),
            ..Self::plain(stream, stats)
        }
    }

    /// Bytes that have arrived, at least one. `None` at the end of the stream.
    ///
    /// # Errors
    /// The stream's, and [`InvalidData`](io::ErrorKind::InvalidData) when they are no blocks. Waits for the first byte of a block
    /// as long as the stream lets it: [`is_stall`](crate::is_stall) tells that nothing has arrived, and reading may go on.
    pub fn read(&mut self) -> io::Result<Option<&[u8]>> {
        let mut source = Counted {
            stream: &self.stream,
            before: &mut self.before,
            read: 0,
        };
        let found = match &mut self.blocks {
            None => source.read(&mut self.buffer),
            Some(blocks) => blocks.read(&mut source, &mut self.buffer),
        };
        if let Some(stats) = &self.stats {
            stats.add_received(source.read);
        }
        let len = found?;
        Ok((len > 0).then_some(&self.buffer[..len]))
    }
}

/// A stream, after bytes that were read from it before.
struct Counted<'a> {
    stream: &'a Stream,
    before: &'a mut Vec<u8>,
    /// Bytes read.
    read: usize,
}

impl Counted<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = match self.before.len() {
            0 => uninterrupted(|| (&mut &*self.stream).read(out))?,
            there => {
                let len = there.min(out.len());
                out[..len].copy_from_slice(&self.before[..len]);
                self.before.drain(..len);
                len
            }
        };
        self.read += read;
        Ok(read)
    }

    /// Fills `out` within the stall timeout.
    fn read_full(&mut self, out: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < out.len() {
            match self.read(&mut out[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                // A part of the block has been read: the caller must not try again.
                Err(error) if is_stall(&error) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Unblock {
    /// Reads bytes to the beginning of `out`, which takes a whole block. Returns their number; 0 at the end of the stream.
    fn read(&mut self, source: &mut Counted<'_>, out: &mut [u8]) -> io::Result<usize> {
        self.meter.switch_to(Activity::Input);
        let read = match self.left {
            0 => self.read_block(source, out),
            left => {
                let most = left.min(out.len());
                self.read_plain(source, &mut out[..most])
            }
        };
        self.meter.switch_to(Activity::Output);
        if let Some(shares) = self.meter.shares() {
            source.stream.report_wait(shares.input);
        }
        read
    }

    fn read_block(&mut self, source: &mut Counted<'_>, out: &mut [u8]) -> io::Result<usize> {
        let mut head = [0; HEAD];
        match source.read(&mut head)? {
            0 => return Ok(0),
            read => source.read_full(&mut head[read..])?,
        }
        let kind = std::mem::take(&mut head[0]);
        let len = long(head);
        let Some(out) = out.get_mut(..len).filter(|out| !out.is_empty()) else {
            return Err(BlockError::Length(len).into());
        };
        match kind {
            PLAIN => {
                self.left = len;
                self.read_plain(source, out)
            }
            ZEROS => {
                out.fill(0);
                Ok(len)
            }
            FRAME => {
                self.read_frame(source, out)?;
                Ok(len)
            }
            _ => Err(BlockError::Kind(kind).into()),
        }
    }

    /// Reads what has arrived of a block of kind 0.
    fn read_plain(&mut self, source: &mut Counted<'_>, out: &mut [u8]) -> io::Result<usize> {
        match source.read(out)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                self.left -= read;
                Ok(read)
            }
        }
    }

    fn read_frame(&mut self, source: &mut Counted<'_>, out: &mut [u8]) -> io::Result<()> {
        let mut len = [0; FRAME_HEAD - HEAD];
        source.read_full(&mut len)?;
        let (len, most) = (long(len), self.payload.len());
        let frame = self.payload.get_mut(..len);
        let frame = frame.ok_or(BlockError::FrameLength(len, most))?;
        source.read_full(frame)?;
        self.meter.switch_to(Activity::Work);
        let decoded = self.decoder.decode(Method::ZstdFrames, frame, out);
        decoded.map_err(BlockError::Frame)?;
        let found = crc32c::crc32c(out);
        match source.stream.pages_sum() {
            Some(sent) if sent != found => Err(BlockError::Changed { found, sent }.into()),
            _ => Ok(()),
        }
    }
}

fn long(bytes: [u8; 4]) -> usize {
    usize::try_from(u32::from_be_bytes(bytes)).unwrap_or(usize::MAX)
}

impl From<BlockError> for io::Error {
    fn from(error: BlockError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU64, os::unix::net::UnixStream, thread};

    use proptest::{collection::vec, prelude::*};
    use vamoose_codec::{Engines, Settings};

    use super::*;
    use crate::Limit;

    fn pair() -> (UnixStream, Arc<Stream>) {
        let (peer, ours) = UnixStream::pair().unwrap();
        (peer, Arc::new(ours.into()))
    }

    fn writer(stream: Arc<Stream>, stats: &Arc<Stats>) -> ByteWriter {
        ByteWriter::blocks(stream, &MethodChoice::default(), Some(stats.clone()))
    }

    /// Bytes of a kind: zeros, text, noise.
    fn bytes(kind: u8, len: usize, seed: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        let bytes = (0..len).map(|at| match kind {
            0 => 0,
            1 if at % 50 > 0 => b"live migration, "[at % 16],
            _ => random.u8(..),
        });
        bytes.collect()
    }

    /// Writes all pieces, and reads to the end. Returns the bytes, and how many there were on the wire.
    fn pass(pieces: &[Vec<u8>]) -> (Vec<u8>, u64) {
        pass_paced(pieces, None)
    }

    /// The same under a bandwidth limit.
    fn pass_paced(pieces: &[Vec<u8>], pacer: Option<Arc<Pacer>>) -> (Vec<u8>, u64) {
        let (theirs, ours) = pair();
        let stats = Arc::<Stats>::default();
        let mut reader = ByteReader::blocks(Arc::new(theirs.into()), Vec::new(), None);
        let read = thread::scope(|scope| {
            let read = scope.spawn(move || {
                let mut all = Vec::new();
                while let Some(bytes) = reader.read().unwrap() {
                    all.extend_from_slice(bytes);
                }
                all
            });
            let mut writer = writer(ours, &stats).paced(pacer);
            for piece in pieces {
                writer.write(piece).unwrap();
            }
            writer.finish();
            read.join().unwrap()
        });
        (read, stats.snapshot().wire_bytes)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_arrive(
            pieces in vec(vec((0..3_u8, prop_oneof![1..2000_usize, 1..300_000_usize], any::<u64>()), 1..4), 0..8),
        ) {
            let pieces = pieces.into_iter().map(|parts| {
                let parts = parts.into_iter().map(|(kind, len, seed)| bytes(kind, len, seed));
                parts.collect::<Vec<_>>().concat()
            });
            let pieces: Vec<_> = pieces.collect();
            prop_assert!(pass(&pieces).0 == pieces.concat());
        }

        #[test]
        fn any_bytes_are_blocks_or_an_error(
            head in prop_oneof![
                (0..4_u8, 0..1000_u32, 0..1000_u32).prop_map(|(kind, len, frame)| {
                    [&head(kind, len as usize)[..], &frame.to_be_bytes()].concat()
                }),
                vec(any::<u8>(), 0..9),
            ],
            rest in vec(any::<u8>(), 0..2000),
        ) {
            let (mut peer, ours) = pair();
            peer.write_all(&[head, rest].concat()).unwrap();
            drop(peer);
            let mut reader = ByteReader::blocks(ours, Vec::new(), None);
            while let Ok(Some(_)) = reader.read() {}
        }
    }

    #[test]
    fn zeros_and_text_shrink_and_noise_hardly_grows() {
        let len = 256 * 1024;
        let wire = |kind| usize::try_from(pass(&[bytes(kind, len, 1)]).1).unwrap();
        assert_eq!(wire(0), HEAD);
        assert!(wire(1) < len / 2);
        assert_eq!(wire(2), HEAD + len);
        let mixed = [0, 1, 0, 2].map(|kind| bytes(kind, len, 1)).concat();
        assert!(pass(&[mixed]).1 < 2 * len as u64);
    }

    /// A wait for the limit is one for the link, so that nothing goes raw.
    #[test]
    fn bytes_shrink_under_a_bandwidth_limit() {
        let pieces = vec![bytes(1, 256 * 1024, 1); 64];
        let len = pieces.concat().len() as u64;
        let pacer = Pacer::new(NonZeroU64::new(2_000_000), &Limit::new(None));
        let (read, wire) = pass_paced(&pieces, Some(Arc::new(pacer)));
        assert!(read == pieces.concat());
        assert!(wire < len / 8, "{wire} of {len}");
    }

    /// A block behind others that did not shrink is found by its sample.
    #[test]
    fn text_behind_noise_shrinks() {
        let len = 256 * 1024;
        let pieces = [2, 2, 2, 1, 1].map(|kind| bytes(kind, len, 1));
        let (read, wire) = pass(&pieces);
        assert!(read == pieces.concat());
        assert!(wire < 4 * len as u64, "{wire}");
    }

    #[test]
    fn method_none_encodes_nothing() {
        let (_peer, ours) = pair();
        let none = MethodChoice::from(Engines::software(Settings::default()));
        let stats = Arc::<Stats>::default();
        let mut writer = ByteWriter::blocks(ours, &none, Some(stats.clone()));
        writer.write(&bytes(1, 4096, 1)).unwrap();
        assert_eq!(stats.snapshot().wire_bytes, (HEAD + 4096) as u64);
    }

    /// Neither end waits for more: the other end may be waiting for an answer.
    #[test]
    fn what_has_arrived_is_passed_on() {
        let (mut peer, ours) = pair();
        let theirs = Arc::new(Stream::from(peer.try_clone().unwrap()));
        let mut writer = writer(ours.clone(), &Arc::default());
        let mut reader = ByteReader::blocks(theirs, Vec::new(), None);
        for len in [1, 28, 600, 100_000] {
            let request = bytes(1, len, 1);
            writer.write(&request).unwrap();
            assert_eq!(reader.read().unwrap(), Some(&request[..]));
        }
        // Also a part of a plain block, whose head was read before.
        let mut reader = ByteReader::blocks(ours, head(PLAIN, 10).to_vec(), None);
        peer.write_all(&[1, 2, 3]).unwrap();
        assert_eq!(reader.read().unwrap(), Some(&[1, 2, 3][..]));
        peer.write_all(&[4; 7]).unwrap();
        assert_eq!(reader.read().unwrap(), Some(&[4; 7][..]));
    }

    #[test]
    fn wrong_blocks_are_refused() {
        let frame = |len: usize, frame_len: u32| {
            [&head(FRAME, len)[..], &frame_len.to_be_bytes(), &[0; 16]].concat()
        };
        let cases = [
            (head(3, 1).to_vec(), "a block of kind 3"),
            (head(PLAIN, 0).to_vec(), "a block of 0 bytes"),
            (head(ZEROS, MOST + 1).to_vec(), "a block of 524289 bytes"),
            (frame(10, u32::MAX), "a frame of 4294967295 bytes"),
            (frame(10, 16), "bad frame"),
        ];
        for (bytes, said) in cases {
            let (mut peer, ours) = pair();
            peer.write_all(&bytes).unwrap();
            let error = ByteReader::blocks(ours, Vec::new(), None)
                .read()
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains(said), "{error}");
        }
        for cut in [
            &head(PLAIN, 5)[..],
            &head(PLAIN, 5)[..3],
            &frame(10, 30)[..20],
        ] {
            let (mut peer, ours) = pair();
            peer.write_all(cut).unwrap();
            drop(peer);
            let error = ByteReader::blocks(ours, Vec::new(), None)
                .read()
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    /// A caller that reads on after a stall would take the rest of a block for a head.
    #[test]
    fn a_stall_within_a_block_is_no_pause() {
        let (mut peer, ours) = pair();
        ours.set_stall_timeout(Duration::from_millis(10)).unwrap();
        let mut reader = ByteReader::blocks(ours, Vec::new(), None);
        let stalled = reader.read().unwrap_err();
        assert_eq!(stalled.kind(), io::ErrorKind::WouldBlock);
        peer.write_all(&head(PLAIN, 5)[..2]).unwrap();
        let stalled = reader.read().unwrap_err();
        assert_eq!(stalled.kind(), io::ErrorKind::TimedOut);
    }
}
