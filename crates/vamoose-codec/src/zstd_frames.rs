//! Method zstd-frames: one complete zstd frame per packet, between two Vamooses.
//!
//! Packets are independent of each other: their levels may differ, and a channel may have several encoders. The price is the
//! history of earlier packets: half a percent of the bytes at level 1, and two at level 3. A frame states
//! how many bytes of pages it holds, and has a checksum of them if that was requested. A packet in which zstd finds next to nothing
//! is sent raw, as method none.
//!
//! A stock QEMU that is set up for method zstd decodes these frames, too, as zstd's streaming functions accept one frame after
//! another. Relays give it those that [`checks_itself`] accepts. Pages that are not encoded need a frame around them: [`raw_frame`].
//!
//! From level 2, the words of a packet are [taken apart](crate::words) where that saves bytes. A byte of value 8 precedes the frame then.
//!
//! If the receiver has earlier versions of a packet's pages, these versions are zstd's prefix when the pages are encoded: what has not
//! changed, or has moved, becomes a match.
//!
//! # Memory
//! Both sides work from slice to slice, without a window buffer of their own. An encoder's tables are no
//! larger than its packets, or [`MAX_WINDOW_LOG`], call for: 1 MiB up to level 2, 4 MiB up to level 6,
//! 12 MiB up to level 12 and 20 MiB above. A decoder has 0.2 MiB, whatever its peer sends.

use std::num::NonZeroU32;

use multifd::Method;
use zstd_safe::{
    CCtx, CParameter, DCtx, ResetDirective, find_frame_compressed_size, get_dict_id_from_frame,
    get_error_name, get_frame_content_size,
};

use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software, Unpack, most_worth_sending},
    ffi::zstd::{compress_after, decompress_after, refused},
    words::{Trial, put_together, take_apart},
};

pub(crate) const ENGINES: &[Software] = &[Software {
    name: "zstd",
    levels: i32::MIN..=i32::MAX,
    compressor: |level| Ok(Box::new(Compressor::new(level)?)),
}];

/// Log of the largest window of a packet without earlier versions, and of the largest tables of any packet: 1 MiB, as in method zstd.
/// Only larger packets could use more.
const MAX_WINDOW_LOG: u32 = 20;

/// The least match of zstd's fast levels is 6 or 7 bytes, and pages have many shorter ones: with 5, samples of real guests' memory take 3 %
/// fewer bytes than at level 1, and the Debian and web servers among them 11 % more CPU time. A table of more than 2^14 entries saves less
/// than 1 % more bytes and costs 6 % more CPU time: it does not fit in the L1 cache.
const DENSER_LEVEL: i32 = 2;
const DENSER_MATCH: u32 = 5;
const DENSER_HASH_LOG: u32 = 14;

struct Compressor {
    context: CCtx<'static>,
    /// Log of the hash table for packets without earlier versions; 0 is the level's own.
    hash_log: u32,
    words: Option<Words>,
}

/// What taking words apart needs.
#[derive(Default)]
struct Words {
    trial: Trial,
    /// Pages with their words taken apart.
    apart: Vec<u8>,
    /// The frame of the other form.
    other: Vec<u8>,
}

impl Compressor {
    fn new(level: i32) -> Result<Self, &'static str> {
        let mut context = CCtx::try_create().ok_or("no memory for a context")?;
        let mut set = |parameter| context.set_parameter(parameter).map_err(get_error_name);
        set(CParameter::WindowLog(MAX_WINDOW_LOG))?;
        set(CParameter::CompressionLevel(level))?;
        let mut hash_log = 0;
        if level == DENSER_LEVEL {
            hash_log = DENSER_HASH_LOG;
            set(CParameter::MinMatch(DENSER_MATCH))?;
            set(CParameter::HashLog(hash_log))?;
        }
        let words = (level >= DENSER_LEVEL).then(Words::default);
        Ok(Self {
            context,
            hash_log,
            words,
        })
    }

    fn compress_apart(
        context: &mut CCtx<'static>,
        pages: &[u8],
        apart: &mut Vec<u8>,
        out: &mut [u8],
    ) -> Result<usize, CompressError> {
        if apart.len() < pages.len() {
            apart.resize(pages.len(), 0);
        }
        let apart = &mut apart[..pages.len()];
        take_apart(pages, apart);
        let (head, out) = out.split_first_mut().ok_or(CompressError::OutputFull)?;
        *head = APART;
        Ok(1 + compress(context, apart, out)?)
    }
}

/// What precedes the frame of a packet whose words are taken apart: no zstd frame starts like this.
const APART: u8 = 8;

fn compress(
    context: &mut CCtx<'static>,
    pages: &[u8],
    out: &mut [u8],
) -> Result<usize, CompressError> {
    context.compress2(out, pages).map_err(refused)
}

impl Compress for Compressor {
    /// Fails with [`CompressError::OutputFull`] if the frame would save too little.
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let room = most_worth_sending(pages.len()).min(out.len());
        let out = &mut out[..room];
        let context = &mut self.context;
        let Some(Words {
            trial,
            apart,
            other,
        }) = &mut self.words
        else {
            return compress(context, pages, out);
        };
        if !trial.is_due() {
            return match trial.wins() {
                true => Self::compress_apart(context, pages, apart, out),
                false => compress(context, pages, out),
            };
        }
        let whole = compress(context, pages, out);
        other.resize(room, 0);
        let other_form = Self::compress_apart(context, pages, apart, other);
        let size = |result: Result<usize, _>| result.unwrap_or(pages.len());
        trial.tell(size(whole), size(other_form));
        match other_form {
            Ok(len) if len < size(whole) => {
                out[..len].copy_from_slice(&other[..len]);
                Ok(len)
            }
            _ => whole,
        }
    }

    fn add_checksums(&mut self) -> Result<(), &'static str> {
        let flag = CParameter::ChecksumFlag(true);
        let set = self.context.set_parameter(flag);
        set.map(drop).map_err(get_error_name)
    }

    fn compress_after(
        &mut self,
        earlier: &[u8],
        pages: &[u8],
        out: &mut [u8],
    ) -> Result<usize, CompressError> {
        let room = most_worth_sending(pages.len()).min(out.len());
        let all = log_of(earlier.len() + pages.len());
        // zstd indexes only the last part of a prefix, 8 bytes for each entry of its hash table: so one entry for every 8 bytes.
        let hash = log_of(earlier.len()).saturating_sub(3);
        let set = |context: &mut CCtx<'static>, hash, window| {
            context.set_parameter(CParameter::HashLog(hash))?;
            context.set_parameter(CParameter::WindowLog(window))
        };
        let mut encode = || {
            // A frame for which there was no room is not over yet.
            self.context.reset(ResetDirective::SessionOnly)?;
            let window = all.clamp(MAX_WINDOW_LOG, LONGEST_WINDOW_LOG);
            set(
                &mut self.context,
                hash.clamp(LEAST_HASH_LOG, MAX_WINDOW_LOG),
                window,
            )?;
            compress_after(&mut self.context, earlier, pages, &mut out[..room])
        };
        let encoded = encode();
        set(&mut self.context, self.hash_log, MAX_WINDOW_LOG).map_err(refused)?;
        encoded.map_err(refused)
    }
}

/// Log of the least hash table of a packet with earlier versions: large enough for the pages themselves.
const LEAST_HASH_LOG: u32 = 16;

/// Log of the largest window of a packet with earlier versions: it reaches from the last page to the first version. It takes no memory,
/// as zstd reads the caller's slices.
const LONGEST_WINDOW_LOG: u32 = 27;

/// The base-2 logarithm of `len`, rounded up.
fn log_of(len: usize) -> u32 {
    usize::BITS - len.saturating_sub(1).leading_zeros()
}

pub(crate) struct Unpacker {
    context: DCtx<'static>,
    /// Pages with their words taken apart.
    apart: Vec<u8>,
}

impl Unpacker {
    pub(crate) fn new() -> Result<Self, DecodeError> {
        let context = DCtx::try_create().ok_or(DecodeError::Engine {
            method: Method::ZstdFrames,
            reason: "no memory for a context",
        })?;
        let apart = Vec::new();
        Ok(Self { context, apart })
    }
}

fn unpack_frame(
    context: &mut DCtx<'static>,
    earlier: &[u8],
    payload: &[u8],
    pages: &mut [u8],
) -> Result<(), DecodeError> {
    check(payload, pages.len())?;
    let found = match earlier {
        [] => context.decompress(pages, payload),
        _ => decompress_after(context, earlier, payload, pages),
    };
    let found = found.map_err(|code| corrupt(get_error_name(code)))?;
    DecodeError::check_len(Method::ZstdFrames, payload.len(), found, pages.len())
}

impl Unpack for Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        self.unpack_after(&[], payload, pages)
    }

    fn unpack_after(
        &mut self,
        earlier: &[u8],
        payload: &[u8],
        pages: &mut [u8],
    ) -> Result<(), DecodeError> {
        let Self { context, apart } = self;
        let [APART, frame @ ..] = payload else {
            return unpack_frame(context, earlier, payload, pages);
        };
        if apart.len() < pages.len() {
            apart.resize(pages.len(), 0);
        }
        let apart = &mut apart[..pages.len()];
        unpack_frame(context, earlier, frame, apart)?;
        put_together(apart, pages);
        Ok(())
    }
}

/// Whether `payload` is one whole zstd frame of `pages_len` bytes of pages, with a checksum of them that every decoder compares.
pub fn checks_itself(payload: &[u8], pages_len: usize) -> bool {
    check(payload, pages_len).is_ok() && payload[MAGIC.len()] & CHECKSUM_FLAG != 0
}

/// Bytes of a [`raw_frame`].
pub const RAW_FRAME_LEN: usize = 12;

/// What makes a page of `page_size` bytes a zstd frame, in front of it: a frame header without a window, which states the frame's
/// length, and the header of a raw block. QEMU asks for one page at a time, so zstd copies a frame of one page to its place at once,
/// and longer frames by way of a buffer. `None` if the page is longer than a block.
pub fn raw_frame(page_size: usize) -> Option<[u8; RAW_FRAME_LEN]> {
    let len = u32::try_from(page_size)
        .ok()
        .filter(|len| *len <= LONGEST_BLOCK)?;
    let mut frame = [0; RAW_FRAME_LEN];
    frame[..4].copy_from_slice(&MAGIC);
    frame[4] = FOUR_BYTES_OF_LENGTH | SINGLE_SEGMENT;
    frame[5..9].copy_from_slice(&len.to_le_bytes());
    let block = len << 3 | RAW_BLOCK | LAST_BLOCK;
    frame[9..].copy_from_slice(&block.to_le_bytes()[..3]);
    Some(frame)
}

/// Bits of a frame's fifth byte.
const CHECKSUM_FLAG: u8 = 1 << 2;
const SINGLE_SEGMENT: u8 = 1 << 5;
const FOUR_BYTES_OF_LENGTH: u8 = 2 << 6;

/// Bits of a block's header.
const LAST_BLOCK: u32 = 1;
const RAW_BLOCK: u32 = 0;

const LONGEST_BLOCK: u32 = 128 << 10;

/// Checks that `payload` is one frame, by itself, that announces `expected` bytes: zstd would also take
/// none, several, and frames that are to be skipped.
fn check(payload: &[u8], expected: usize) -> Result<(), DecodeError> {
    if !payload.starts_with(&MAGIC) {
        return Err(corrupt("it does not start with a zstd frame"));
    }
    let frame =
        find_frame_compressed_size(payload).map_err(|code| corrupt(get_error_name(code)))?;
    let left = payload.len().saturating_sub(frame);
    if left > 0 {
        return Err(DecodeError::trailing(Method::ZstdFrames, left, expected));
    }
    if get_dict_id_from_frame(payload).map_or(0, NonZeroU32::get) != 0 {
        return Err(corrupt("the frame asks for a dictionary"));
    }
    match get_frame_content_size(payload) {
        Ok(Some(found)) => {
            let found = usize::try_from(found).unwrap_or(usize::MAX);
            DecodeError::check_len(Method::ZstdFrames, payload.len(), found, expected)
        }
        _ => Err(corrupt("the frame does not say how much it holds")),
    }
}

/// What a frame starts with.
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

fn corrupt(reason: &'static str) -> DecodeError {
    let method = Method::ZstdFrames;
    DecodeError::Corrupt { method, reason }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};
    use zstd_safe::{InBuffer, OutBuffer};

    use super::*;

    const METHOD: Method = Method::ZstdFrames;

    /// Pages of runs: of one byte, of few different bytes, of noise.
    fn pages() -> impl Strategy<Value = Vec<u8>> {
        let run = (0..3_u8, any::<u64>(), 1..40_usize).prop_map(|(kind, seed, kib)| {
            let mut noise = noise(seed);
            let bytes = (0..kib * 1024).map(|_| match kind {
                0 => seed.to_be_bytes()[0],
                1 => noise.next().unwrap() % 5,
                _ => noise.next().unwrap(),
            });
            bytes.collect::<Vec<_>>()
        });
        vec(run, 1..6).prop_map(|runs| runs.concat())
    }

    fn noise(mut state: u64) -> impl Iterator<Item = u8> {
        std::iter::repeat_with(move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state.to_be_bytes()[0]
        })
    }

    fn encode(compressor: &mut Compressor, pages: &[u8]) -> Result<Vec<u8>, CompressError> {
        let mut out = vec![0; 1 << 20];
        let len = compressor.compress(pages, &mut out)?;
        out.truncate(len);
        Ok(out)
    }

    fn frame(pages: &[u8]) -> Vec<u8> {
        encode(&mut Compressor::new(1).unwrap(), pages).unwrap()
    }

    fn unpack(payload: &[u8], len: usize) -> Result<Vec<u8>, DecodeError> {
        let mut pages = vec![0xee; len];
        let mut unpacker = Unpacker::new().unwrap();
        unpacker.unpack(payload, &mut pages).map(|()| pages)
    }

    /// Decodes packets as QEMU does: one decoder for all of them, and a call for each page.
    fn decode_paged(packets: &[Vec<u8>], pages_len: usize) -> Result<Vec<u8>, &'static str> {
        let mut context = DCtx::create();
        let mut all = Vec::new();
        for packet in packets {
            let mut input = InBuffer::around(packet);
            for _ in 0..pages_len / 4096 {
                let mut page = [0; 4096];
                let mut output = OutBuffer::around(&mut page[..]);
                while output.pos() < 4096 {
                    let hint = context.decompress_stream(&mut output, &mut input);
                    if hint.map_err(get_error_name)? == 0 || input.pos == packet.len() {
                        break;
                    }
                }
                assert_eq!(output.pos(), 4096);
                all.extend(page);
            }
            assert_eq!(input.pos, packet.len());
        }
        Ok(all)
    }

    fn checked_frame(pages: &[u8]) -> Vec<u8> {
        let mut compressor = Compressor::new(1).unwrap();
        compressor.add_checksums().unwrap();
        encode(&mut compressor, pages).unwrap()
    }

    #[test]
    fn a_stock_decoder_takes_frames_with_checksums_and_raw_ones() {
        let pages: Vec<u8> = (0..512_usize << 10)
            .map(|at| (at / 3 % 251).to_le_bytes()[0])
            .collect();
        let header = raw_frame(4096).unwrap();
        let raw = pages.chunks(4096).flat_map(|page| [&header, page].concat());
        let packets = [
            checked_frame(&pages),
            raw.collect(),
            frame(&pages),
            checked_frame(&pages),
        ];
        assert!(decode_paged(&packets, pages.len()).unwrap() == pages.repeat(4));
        assert_eq!(raw_frame(1 << 18), None);
    }

    #[test]
    fn a_stock_decoder_finds_wrong_pages_by_the_checksum() {
        let pages = [7; 1 << 15];
        let good = checked_frame(&pages);
        assert!(checks_itself(&good, pages.len()));
        assert!(!checks_itself(&good, pages.len() + 4096));
        assert!(!checks_itself(&good[..good.len() - 1], pages.len()));
        assert!(!checks_itself(&good.repeat(2), pages.len()));
        assert!(!checks_itself(&frame(&pages), pages.len()));
        let mut bad = good;
        *bad.last_mut().unwrap() ^= 1;
        assert!(checks_itself(&bad, pages.len()));
        assert!(unpack(&bad, pages.len()).is_err());
        let found = decode_paged(&[bad], pages.len()).unwrap_err();
        assert!(found.contains("checksum"), "{found}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// One decoder, and another level for each packet.
        #[test]
        fn pages_arrive_or_go_raw(
            packets in vec((pages(), select(&[-100, -5, -1, 1, 3, 6, 9, 19][..])), 1..4),
        ) {
            let mut unpacker = Unpacker::new().unwrap();
            for (pages, level) in packets {
                let mut compressor = Compressor::new(level).unwrap();
                match encode(&mut compressor, &pages) {
                    Ok(payload) => {
                        prop_assert!(payload.len() <= most_worth_sending(pages.len()));
                        let mut back = vec![0xee; pages.len()];
                        prop_assert_eq!(unpacker.unpack(&payload, &mut back), Ok(()));
                        prop_assert!(back == pages);
                    }
                    Err(fault) => prop_assert_eq!(fault, CompressError::OutputFull),
                }
            }
        }

        #[test]
        fn any_bytes_are_pages_or_an_error(
            start in select(vec![vec![], MAGIC.to_vec(), [&MAGIC[..], &[0x60]].concat()]),
            rest in vec(any::<u8>(), 0..2000),
            len in 1..5000_usize,
        ) {
            let _ = unpack(&[start, rest].concat(), len);
        }

        #[test]
        fn flipped_bits_do_no_harm(
            pages in pages(),
            flips in vec((any::<prop::sample::Index>(), 0..8), 1..4),
        ) {
            if let Ok(mut payload) = encode(&mut Compressor::new(3).unwrap(), &pages) {
                for (at, bit) in flips {
                    let at = at.index(payload.len());
                    payload[at] ^= 1_u8 << bit;
                }
                let _ = unpack(&payload, pages.len());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// Earlier versions of any length, with packets that have none in between.
        #[test]
        fn pages_after_earlier_versions_arrive(
            packets in vec((pages(), vec((any::<prop::sample::Index>(), any::<u8>()), 0..40), 0..4_usize), 1..4),
            level in select(&[-5, 2, 3][..]),
        ) {
            let whole = || Compressor { words: None, ..Compressor::new(level).unwrap() };
            let mut compressor = whole();
            let mut unpacker = Unpacker::new().unwrap();
            for (earlier, changes, kind) in packets {
                let mut now = earlier.clone();
                for (at, byte) in changes {
                    let at = at.index(now.len());
                    now[at] = byte;
                }
                let earlier = match kind {
                    0 => &earlier[..1],
                    1 => &earlier[earlier.len() / 2..],
                    _ => &earlier[..],
                };
                let mut out = vec![0; now.len()];
                let len = compressor.compress_after(earlier, &now, &mut out);
                if let Ok(len) = len {
                    let mut back = vec![0xee; now.len()];
                    prop_assert_eq!(unpacker.unpack_after(earlier, &out[..len], &mut back), Ok(()));
                    prop_assert!(back == now);
                } else {
                    prop_assert_eq!(len, Err(CompressError::OutputFull));
                }
                if let Ok(payload) = encode(&mut compressor, &now) {
                    prop_assert_eq!(&payload, &encode(&mut whole(), &now).unwrap());
                    let mut back = vec![0xee; now.len()];
                    prop_assert_eq!(unpacker.unpack(&payload, &mut back), Ok(()));
                    prop_assert!(back == now);
                }
            }
        }

        #[test]
        fn any_bytes_after_earlier_versions_are_pages_or_an_error(
            earlier in vec(any::<u8>(), 1..2000),
            rest in vec(any::<u8>(), 0..2000),
            len in 1..5000_usize,
        ) {
            let payload = [&MAGIC[..], &rest].concat();
            let mut unpacker = Unpacker::new().unwrap();
            let _ = unpacker.unpack_after(&earlier, &payload, &mut vec![0; len]);
        }
    }

    /// Noise is found again only in the earlier version, also at the beginning of the longest one.
    #[test]
    fn an_earlier_version_of_noise_is_found() {
        let mut compressor = Compressor::new(1).unwrap();
        for len in [4096, 512 << 10, 4 << 20] {
            let earlier: Vec<_> = noise(1).take(len).collect();
            let mut out = vec![0; len];
            let found = compressor.compress_after(&earlier, &earlier.clone(), &mut out);
            assert!(found.unwrap() < len / 64, "{len}: {found:?}");
            let other: Vec<_> = noise(2).take(len).collect();
            let found = compressor.compress_after(&other, &earlier, &mut out);
            assert_eq!(found, Err(CompressError::OutputFull));
        }
    }

    /// A prefix that starts like one of zstd's dictionaries is not read as one.
    #[test]
    fn an_earlier_version_is_no_dictionary() {
        let mut earlier = vec![0x37, 0xa4, 0x30, 0xec];
        earlier.extend(noise(3).take(4092));
        let mut out = vec![0; 4096];
        let mut compressor = Compressor::new(1).unwrap();
        let len = compressor.compress_after(&earlier, &earlier.clone(), &mut out);
        let mut back = vec![0; 4096];
        let mut unpacker = Unpacker::new().unwrap();
        let unpacked = unpacker.unpack_after(&earlier, &out[..len.unwrap()], &mut back);
        assert_eq!(unpacked, Ok(()));
        assert!(back == earlier);
    }

    /// Rows of a table: a number that grows, one of few values, and one that is nearly noise.
    #[test]
    fn words_are_taken_apart_where_that_saves_bytes() {
        let mut noise = noise(4);
        let rows = (0..32_768_u32).flat_map(|row| {
            let [low, few] = [noise.next().unwrap(), noise.next().unwrap() % 5];
            [
                &row.to_le_bytes()[..],
                &[low, few, 0, 0, 0, 0, 0, 0, few, 0, low, 1],
            ]
            .concat()
        });
        let rows: Vec<_> = rows.collect();
        let text: Vec<_> = b"one word, two words, and some others ".repeat(16_000);
        for (pages, is_apart) in [(&rows[..], true), (&text[..512 << 10], false)] {
            for level in [-1, 2, 3] {
                let mut compressor = Compressor::new(level).unwrap();
                for packet in 0..20 {
                    let payload = encode(&mut compressor, pages).unwrap();
                    assert_eq!(payload[0] == APART, is_apart && level > 0, "{packet}");
                    assert!(unpack(&payload, pages.len()).unwrap() == pages);
                }
            }
        }
    }

    #[test]
    fn noise_goes_raw_and_text_does_not() {
        let mut compressor = Compressor::new(1).unwrap();
        let noise: Vec<_> = noise(1).take(8192).collect();
        assert_eq!(
            encode(&mut compressor, &noise),
            Err(CompressError::OutputFull)
        );
        let text = b"dirty pages ".repeat(600);
        assert!(encode(&mut compressor, &text).unwrap().len() < 200);
    }

    #[test]
    fn more_or_fewer_pages_than_expected_are_errors() {
        let pages = b"migration".repeat(1000);
        let payload = frame(&pages);
        assert_eq!(
            unpack(&payload, pages.len() + 1),
            Err(DecodeError::TooShort {
                method: METHOD,
                payload: payload.len(),
                found: pages.len(),
                expected: pages.len() + 1,
            })
        );
        for len in [pages.len() - 1, 1] {
            assert_eq!(
                unpack(&payload, len),
                Err(DecodeError::TooLong {
                    method: METHOD,
                    payload: payload.len(),
                    expected: len,
                })
            );
        }
        for cut in 0..payload.len() {
            assert!(unpack(&payload[..cut], pages.len()).is_err(), "{cut}");
        }
    }

    /// A frame that lies about what it holds is found out by decoding it.
    #[test]
    fn the_announced_size_is_not_believed() {
        let pages = b"downtime".repeat(512);
        let payload = frame(&pages);
        // One segment, a size of two bytes from 256 on.
        assert_eq!(payload[4] & 0xe0, 0x60);
        for (announced, expected) in [(4097_u16, 4097), (4095, 4095), (256, 256)] {
            let mut lie = payload.clone();
            lie[5..7].copy_from_slice(&(announced - 256).to_le_bytes());
            let error = unpack(&lie, expected).unwrap_err();
            assert!(matches!(error, DecodeError::Corrupt { .. }), "{error}");
        }
        // Eight bytes: nearly all the memory that there could be.
        let mut lie = [&MAGIC[..], &[0xe0]].concat();
        lie.extend_from_slice(&(u64::MAX - 2).to_le_bytes());
        lie.extend_from_slice(&payload[7..]);
        let error = unpack(&lie, 4096).unwrap_err();
        assert!(matches!(error, DecodeError::TooLong { .. }), "{error}");
    }

    #[test]
    fn anything_but_one_frame_by_itself_is_refused() {
        let pages = b"page table".repeat(500);
        let payload = frame(&pages);
        let skippable = [0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 7];
        let trailing = |more: &[u8]| {
            let error = DecodeError::TrailingInput {
                method: METHOD,
                left: more.len(),
                expected: pages.len(),
            };
            ([&payload, more].concat(), error)
        };
        // The same frame with an id of a dictionary, and with a window instead of its size.
        let dictionary = [&MAGIC[..], &[payload[4] | 1], &[9], &payload[5..]].concat();
        let unsized_frame = [&MAGIC[..], &[0, 0x48], &payload[7..]].concat();
        for (payload, error) in [
            trailing(&[0]),
            trailing(&payload),
            trailing(&skippable),
            (
                [&skippable[..], &payload].concat(),
                corrupt("it does not start with a zstd frame"),
            ),
            (dictionary, corrupt("the frame asks for a dictionary")),
            (
                unsized_frame,
                corrupt("the frame does not say how much it holds"),
            ),
        ] {
            assert_eq!(unpack(&payload, pages.len()), Err(error));
        }
    }

    #[test]
    fn memory_is_what_the_module_says() {
        for (levels, most) in [
            (-9..=-1, 1),
            (1..=2, 1),
            (3..=6, 4),
            (7..=12, 12),
            (13..=22, 20),
        ] {
            for level in levels {
                for len in [64 << 10, 512 << 10, 4 << 20] {
                    // The high levels take minutes for anything else.
                    let pages = vec![7; len];
                    let mut compressor = Compressor::new(level).unwrap();
                    let mut out = vec![0; len];
                    let len = compressor.compress(&pages, &mut out).unwrap();
                    let size = compressor.context.sizeof();
                    assert!(size <= most << 20, "level {level}: {size} bytes");

                    let mut unpacker = Unpacker::new().unwrap();
                    let mut back = vec![0; pages.len()];
                    unpacker.unpack(&out[..len], &mut back).unwrap();
                    assert!(unpacker.context.sizeof() < 200 << 10, "level {level}");
                }
            }
        }
    }
}
