//! Method qatzip from outside: what is sent is what QATzip sends, other libraries read it, any gzip
//! is taken, and anything else is an error without a byte outside the slices.

use std::ffi::c_int;

use flate2::{Compress, Compression, Crc, Decompress, FlushCompress, FlushDecompress, Status};
use multifd::{Layout, Method};
use proptest::{collection::vec, prelude::*, sample::select};
use vamoose_codec::{DecodeError, Decoder, Encoder, Settings, SettingsError, encoder};

use crate::common::guarded::Guarded;
use crate::common::oracle::CZlib;
use crate::common::pages::{self, Kind, PAGE};

const LAYOUT: Layout = Layout::X86;
const QATZIP: Method = Method::Qatzip;
const LEVELS: [i32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
const FULL: usize = 128;
const MOST_SOURCE: usize = 65_536;

fn new_encoder(level: i32) -> Encoder {
    let settings = Settings::new(QATZIP, Some(level)).unwrap();
    encoder(&settings, LAYOUT).unwrap()
}

fn encode(level: i32, pages: &[u8]) -> Vec<u8> {
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut encoder = new_encoder(level);
    let encoded = encoder.encode(pages, &mut out).unwrap();
    assert_eq!(encoded.method, QATZIP);
    encoded.payload.to_vec()
}

/// Decodes with guard bytes around the pages.
fn decode(payload: &[u8], len: usize) -> Result<Vec<u8>, DecodeError> {
    const GUARDS: usize = 300;
    let mut room = vec![0xa5; len + 2 * GUARDS];
    let result = Decoder::new(LAYOUT).decode(QATZIP, payload, &mut room[GUARDS..][..len]);
    let guards = room[..GUARDS].iter().chain(&room[GUARDS + len..]);
    assert!(guards.copied().all(|byte| byte == 0xa5), "a stray write");
    result.map(|()| room[GUARDS..][..len].to_vec())
}

fn reason(payload: &[u8], len: usize) -> &'static str {
    match decode(payload, len) {
        Err(DecodeError::Corrupt { method, reason }) => {
            assert_eq!(method, QATZIP);
            reason
        }
        other => panic!("{:?}", other.map(drop)),
    }
}

fn too_short(payload: usize, found: usize, expected: usize) -> DecodeError {
    DecodeError::TooShort {
        method: QATZIP,
        payload,
        found,
        expected,
    }
}

fn too_long(payload: usize, expected: usize) -> DecodeError {
    DecodeError::TooLong {
        method: QATZIP,
        payload,
        expected,
    }
}

/// Pages of all kinds in turns, each of its own seed.
fn mixed(seed: u64, count: usize) -> Vec<u8> {
    (0..count as u64)
        .flat_map(|at| {
            let kind = Kind::ALL[usize::try_from((seed + at * at) % 4).unwrap()];
            pages::pages(kind, seed + at, 1)
        })
        .collect()
}

/// One bit of entropy in a byte.
fn tiny_entropy(seed: u64, count: usize) -> Vec<u8> {
    let mut pages = pages::pages(Kind::Random, seed, count);
    pages.iter_mut().for_each(|byte| *byte &= 1);
    pages
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// Checks every byte of `payload` that is not deflate data, and returns how many members there are.
fn check_members(payload: &[u8], pages: &[u8]) -> usize {
    let (mut rest, mut source) = (payload, pages);
    let mut members = 0;
    while !rest.is_empty() {
        let start = [
            0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 12, 0, b'Q', b'Z', 8, 0,
        ];
        assert_eq!(rest[..16], start);
        let (size, deflate) = (u32_at(rest, 16), u32_at(rest, 20));
        assert_eq!(size, source.len().min(MOST_SOURCE));
        let (held, after) = source.split_at(size);
        let trailer = &rest[24 + deflate..][..8];
        assert_eq!(trailer[..4], crc32(held).to_le_bytes());
        assert_eq!(u32_at(trailer, 4), size);
        // Stored blocks at worst.
        assert!(deflate <= size + 5 * size.div_ceil(MOST_SOURCE - 1).max(13));
        let (member, next) = rest.split_at(24 + deflate + 8);
        assert_eq!(c_zlib(member, size), Some((member.len(), held.to_vec())));
        (rest, source) = (next, after);
        members += 1;
    }
    assert!(source.is_empty());
    members
}

/// The gzip member at the start of `input`, which holds at most `room` bytes, by the C zlib: its
/// length and what it holds. Its sums are checked.
fn c_zlib(input: &[u8], room: usize) -> Option<(usize, Vec<u8>)> {
    const GZIP_ONLY: c_int = 16 + 15;
    CZlib::new(GZIP_ONLY).decode_stream(input, room)
}

/// A gzip member as another program may write it: any flags and fields, deflate by zlib-rs.
fn foreign(flags: u8, fields: &[u8], level: u32, source: &[u8]) -> Vec<u8> {
    let mut member = vec![0x1f, 0x8b, 8, flags, 0x12, 0x34, 0x56, 0x78, 2, 3];
    member.extend_from_slice(fields);
    if flags & 2 != 0 {
        let crc = crc32(&member).to_le_bytes();
        member.extend_from_slice(&crc[..2]);
    }
    [member, raw_deflate(level, source), trailer(source)].concat()
}

/// The plainest member that holds `source` as `deflate`.
fn foreign_of(deflate: &[u8], source: &[u8]) -> Vec<u8> {
    let start = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    [&start, deflate, &trailer(source)].concat()
}

fn trailer(source: &[u8]) -> Vec<u8> {
    let len = u32::try_from(source.len()).unwrap();
    [crc32(source).to_le_bytes(), len.to_le_bytes()].concat()
}

fn raw_deflate(level: u32, source: &[u8]) -> Vec<u8> {
    let mut stream = Vec::with_capacity(source.len() + source.len() / 8 + 64);
    let mut deflate = Compress::new(Compression::new(level), false);
    deflate
        .compress_vec(source, &mut stream, FlushCompress::Finish)
        .unwrap();
    assert_eq!(deflate.total_in(), source.len() as u64);
    stream
}

/// The raw deflate stream at the start of `data`, which holds at most `room` bytes, by zlib-rs: its
/// length and what it holds.
fn inflate_raw(data: &[u8], room: usize) -> Option<(usize, Vec<u8>)> {
    let mut out = Vec::with_capacity(room);
    let mut inflate = Decompress::new(false);
    let status = inflate.decompress_vec(data, &mut out, FlushDecompress::Finish);
    let len = usize::try_from(inflate.total_in()).unwrap();
    matches!(status, Ok(Status::StreamEnd)).then_some((len, out))
}

/// A QZ member of these bytes.
fn member(source: u32, deflate: &[u8], crc: u32, isize: u32) -> Vec<u8> {
    let mut member = vec![
        0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 12, 0, b'Q', b'Z', 8, 0,
    ];
    member.extend_from_slice(&source.to_le_bytes());
    member.extend_from_slice(&u32::try_from(deflate.len()).unwrap().to_le_bytes());
    member.extend_from_slice(deflate);
    member.extend_from_slice(&crc.to_le_bytes());
    member.extend_from_slice(&isize.to_le_bytes());
    member
}

#[test]
fn a_full_packet_is_eight_members() {
    for level in LEVELS {
        for count in [1, 15, 16, 17, 127, FULL] {
            let sent = mixed(7, count);
            let payload = encode(level, &sent);
            assert_eq!(check_members(&payload, &sent), count.div_ceil(16));
            assert!(decode(&payload, sent.len()).unwrap() == sent);
        }
    }
}

#[test]
fn incompressible_pages_are_stored() {
    let sent = pages::pages(Kind::Random, 1, FULL);
    for level in LEVELS {
        let payload = encode(level, &sent);
        // 32 bytes of header and trailer, and a few for the blocks.
        let most = sent.len() + 8 * (32 + 5 * 14);
        assert!(payload.len() > sent.len() && payload.len() <= most);
        check_members(&payload, &sent);
    }
}

#[test]
fn every_level_is_applied() {
    let text = prose(3, FULL);
    let len = LEVELS.map(|level| encode(level, &text).len());
    assert!(len[..8].is_sorted_by(|a, b| a > b), "{len:?}");
    // The last two only differ in how many of the matches they look at, if there are hundreds.
    let bits = tiny_entropy(3, 16);
    let len = [8, 9].map(|level| encode(level, &bits).len());
    assert!(len[0] > len[1], "{len:?}");
}

#[test]
fn levels_are_1_to_9_and_1_by_default() {
    let level = |level| Settings::new(QATZIP, level).map(|settings| settings.level());
    assert_eq!(level(None), Ok(Some(1)));
    for wrong in [i32::MIN, -1, 0, 10, i32::MAX] {
        assert_eq!(
            level(Some(wrong)),
            Err(SettingsError::Level {
                method: QATZIP,
                level: wrong,
                min: 1,
                max: 9
            })
        );
    }
}

/// Words and phrases that come back, some of them from far away: the longer one looks, the more
/// one finds.
fn prose(seed: u64, count: usize) -> Vec<u8> {
    let words = pages::pages(Kind::Text, seed, count);
    let dice = pages::pages(Kind::Random, seed, count);
    let mut dice = dice.as_chunks::<3>().0.iter();
    let mut words = words.split_inclusive(|byte| *byte == b' ');
    let mut text = Vec::new();
    while text.len() < count * PAGE {
        let [kind, low, high] = *dice.next().unwrap();
        let back = usize::from(u16::from_le_bytes([low, high])) / 2;
        match text.len().checked_sub(back) {
            Some(start) if kind % 3 > 0 => {
                let end = text.len().min(start + 4 + usize::from(kind) / 8);
                text.extend_from_within(start..end);
            }
            _ => text.extend_from_slice(words.next().unwrap()),
        }
    }
    text.truncate(count * PAGE);
    text
}

#[test]
fn any_gzip_is_taken() {
    let sent = mixed(11, 40);
    let extra = b"\x0a\0BC\x02\0xyZZ\0\0";
    for (flags, fields) in [
        (0, &b""[..]),
        (1, b""),
        (2, b""),
        (8, b"name\0"),
        (16, b"\0"),
        (4, extra),
        (8 | 16, b"name\0comment\0"),
        (
            1 | 2 | 4 | 8 | 16,
            &[&extra[..], b"name\0comment\0"].concat(),
        ),
    ] {
        for level in [0, 1, 6, 9] {
            let payload = foreign(flags, fields, level, &sent);
            assert_eq!(c_zlib(&payload, sent.len()).unwrap().1, sent);
            assert!(decode(&payload, sent.len()).unwrap() == sent, "{flags}");
        }
    }
}

#[test]
fn members_may_have_any_size() {
    let sent = mixed(13, FULL);
    for sizes in [&[1][..], &[sent.len()], &[70_000, 3], &[4095, 1, 65_537]] {
        let (mut payload, mut rest) = (Vec::new(), &sent[..]);
        // Single bytes only at the start: their members are 19 bytes long.
        for size in sizes.iter().cycle().take(5000) {
            let (source, after) = rest.split_at(rest.len().min(*size));
            payload.extend(foreign(0, b"", 6, source));
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        if !rest.is_empty() {
            payload.extend(foreign(8, b"the rest\0", 6, rest));
        }
        assert!(payload.len() <= LAYOUT.max_payload());
        assert!(decode(&payload, sent.len()).unwrap() == sent, "{sizes:?}");
    }
    // A payload of as many bytes as there can be.
    let source = pages::pages(Kind::Random, 5, FULL);
    let mut payload = foreign(0, b"", 0, &source);
    let name = vec![b'n'; LAYOUT.max_payload() - payload.len() - 1];
    payload = foreign(8, &[&name[..], b"\0"].concat(), 0, &source);
    assert_eq!(payload.len(), LAYOUT.max_payload());
    assert!(decode(&payload, source.len()).unwrap() == source);
}

#[test]
fn every_truncation_is_an_error() {
    let sent = [mixed(17, 16), pages::pages(Kind::Text, 1, 1)].concat();
    let ours = encode(1, &sent);
    let plain = [
        foreign(2 | 8, b"a\0", 6, &sent[..9000]),
        foreign(0, b"", 6, &sent[9000..]),
    ];
    let edge = plain[0].len();
    let plain = plain.concat();
    for len in 0..ours.len() {
        decode(&ours[..len], sent.len()).unwrap_err();
    }
    for len in 0..plain.len() {
        let error = decode(&plain[..len], sent.len()).unwrap_err();
        let right = match len {
            0 => Some(too_short(0, 0, sent.len())),
            len if len == edge => Some(too_short(len, 9000, sent.len())),
            _ => None,
        };
        if let Some(right) = right {
            assert_eq!(error, right);
        }
    }
}

#[test]
fn every_bit_of_headers_and_trailers_counts() {
    let sent = mixed(19, 20);
    let two = encode(2, &sent);
    let first = 32 + u32_at(&two, 20);
    let headers = (0..24).chain(first..first + 24);
    for at in headers
        .chain(first - 8..first)
        .chain(two.len() - 8..two.len())
    {
        for bit in 0..8 {
            let mut bad = two.clone();
            bad[at] ^= 1 << bit;
            if (first - 8..first).contains(&at) || at >= two.len() - 8 {
                decode(&bad, sent.len()).unwrap_err();
            } else {
                check_flip(&bad, &sent, at % first);
            }
        }
    }
    // A member of zeros is short: all of its bits can be tried.
    let zeros = vec![0; PAGE];
    let zeros_sent = encode(1, &zeros);
    for at in 0..zeros_sent.len() {
        for bit in 0..8 {
            let mut bad = zeros_sent.clone();
            bad[at] ^= 1 << bit;
            check_flip(&bad, &zeros, at);
        }
    }
}

/// Some bits mean nothing: then the pages must be right.
fn check_flip(payload: &[u8], sent: &[u8], in_member: usize) {
    // The text flag, and flags for fields that are empty by chance; the time, xfl and os; an id
    // other than QZ; another way to repeat a zero.
    let idle = (3..10).contains(&in_member) || in_member == 12 || in_member == 13;
    match decode(payload, sent.len()) {
        Ok(pages) => assert!(
            pages == sent && (idle || (24..payload.len() - 8).contains(&in_member)),
            "byte {in_member}"
        ),
        Err(_) => assert!(!(4..10).contains(&in_member), "byte {in_member}"),
    }
}

#[test]
fn wrong_sums_and_sizes_are_named() {
    let page = pages::pages(Kind::Text, 1, 1);
    let (deflate, crc) = (raw_deflate(6, &page), crc32(&page));
    let good = member(4096, &deflate, crc, 4096);
    assert!(decode(&good, PAGE).unwrap() == page);
    let wrong_crc = member(4096, &deflate, !crc, 4096);
    assert_eq!(
        reason(&wrong_crc, PAGE),
        "a member does not have the CRC that it states"
    );
    for size in [0, 4095, 4097, 4096 + 65_536, u32::MAX] {
        assert_eq!(
            reason(&member(4096, &deflate, crc, size), PAGE),
            "a member does not have the size that it states"
        );
        assert_eq!(
            reason(&member(size, &deflate, crc, 4096), PAGE),
            "a member's QZ subfield states wrong sizes"
        );
    }
    let stating = |len: u32| {
        let mut payload = good.clone();
        payload[20..24].copy_from_slice(&len.to_le_bytes());
        payload
    };
    let len = u32::try_from(deflate.len()).unwrap();
    for more in [1, 8] {
        assert_eq!(
            reason(&stating(len + more), PAGE),
            "a member's QZ subfield states wrong sizes"
        );
    }
    for more in [9, 1 << 20, u32::MAX - len] {
        assert_eq!(
            reason(&stating(len + more), PAGE),
            "a member is shorter than its QZ subfield states"
        );
    }
    assert_eq!(
        reason(&stating(len / 2), PAGE),
        "invalid deflate data, or cut short"
    );
    for less in 1..=len {
        decode(&stating(len - less), PAGE).unwrap_err();
    }
    // Data behind the stream's end that the sizes make room for.
    for padding in [1, 8, 4000] {
        let padded = [&deflate[..], &vec![0; padding]].concat();
        assert_eq!(
            reason(&member(4096, &padded, crc, 4096), PAGE),
            "a member's QZ subfield states wrong sizes"
        );
    }
    for cut in 1..=8 {
        assert_eq!(
            reason(&good[..good.len() - cut], PAGE),
            "a member's trailer is cut short"
        );
    }
}

#[test]
fn too_little_and_too_much_are_told_apart() {
    let sent = mixed(23, 32);
    for payload in [encode(1, &sent), foreign(0, b"", 6, &sent)] {
        for pages in [0, 1, 15, 16, 17, 31, 33, 128] {
            let expected = pages * PAGE;
            let error = decode(&payload, expected).unwrap_err();
            let right = match pages {
                0 => DecodeError::TrailingInput {
                    method: QATZIP,
                    left: payload.len(),
                    expected,
                },
                1..32 => too_long(payload.len(), expected),
                _ => too_short(payload.len(), sent.len(), expected),
            };
            assert_eq!(error, right);
        }
        for expected in [sent.len() - 1, sent.len() + 1] {
            decode(&payload, expected).unwrap_err();
        }
        for trailing in [&[0][..], &[0x1f], &[0; 64], b"garbage"] {
            let left = trailing.len();
            let expected = sent.len();
            assert_eq!(
                decode(&[&payload, trailing].concat(), expected),
                Err(DecodeError::TrailingInput {
                    method: QATZIP,
                    left,
                    expected
                })
            );
        }
        let twice = [&payload[..], &payload].concat();
        assert_eq!(
            decode(&twice, sent.len()),
            Err(too_long(twice.len(), sent.len()))
        );
    }
    // 1 MiB of zeros from a kilobyte, for one page.
    let bomb = foreign(0, b"", 9, &vec![0; 1 << 20]);
    assert_eq!(decode(&bomb, PAGE), Err(too_long(bomb.len(), PAGE)));
}

#[test]
fn packets_are_independent() {
    let mut encoder = new_encoder(1);
    let mut out = vec![0; LAYOUT.max_payload()];
    let packets = [mixed(1, 128), mixed(2, 3), mixed(3, 128)];
    let payloads = packets.each_ref().map(|pages| {
        let encoded = encoder.encode(pages, &mut out).unwrap();
        encoded.payload.to_vec()
    });
    let mut decoder = Decoder::new(LAYOUT);
    for at in [2, 0, 1, 1] {
        let mut pages = vec![0xee; packets[at].len()];
        decoder.decode(QATZIP, &payloads[at], &mut pages).unwrap();
        assert!(pages == packets[at]);
    }
}

fn sent() -> impl Strategy<Value = Vec<u8>> {
    let count = 1..=FULL;
    prop_oneof![
        (select(&Kind::ALL[..]), any::<u64>(), count.clone())
            .prop_map(|(kind, seed, count)| pages::pages(kind, seed, count)),
        (any::<u64>(), count.clone()).prop_map(|(seed, count)| tiny_entropy(seed, count)),
        (0..1_u64 << 40, count).prop_map(|(seed, count)| mixed(seed, count)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn all_pages_survive_at_all_levels(sent in sent(), level in select(&LEVELS[..])) {
        let payload = encode(level, &sent);
        prop_assert!(payload.len() <= LAYOUT.max_payload());
        check_members(&payload, &sent);
        prop_assert!(decode(&payload, sent.len()).unwrap() == sent);
    }

    #[test]
    fn neither_side_leaves_its_slices(
        sent in sent(),
        level in select(&LEVELS[..4]),
        flips in vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        short in select(&[0, 0, 1, 5, 40, 5000][..]),
        extra in select(&[0, 0, 0, -5000, -1, 1, 5000_isize][..]),
        at_end in any::<bool>(),
    ) {
        let (mut input, mut output) = (Guarded::new(), Guarded::new());
        let pages = input.slice(sent.len(), at_end);
        pages.copy_from_slice(&sent);
        let mut encoder = new_encoder(level);
        let whole = {
            let out = output.slice(LAYOUT.max_payload(), at_end);
            encoder.encode(pages, out).unwrap().payload.to_vec()
        };
        // Into exactly as much room as it takes, and into less; after an error none can be used.
        let room = whole.len().saturating_sub(short);
        if let Ok(encoded) = encoder.encode(pages, output.slice(room, at_end)) {
            prop_assert!(decode(encoded.payload, sent.len()).unwrap() == sent);
        } else {
            let room = output.slice(whole.len() + 64, at_end);
            let mut encoder = new_encoder(level);
            prop_assert!(decode(encoder.encode(pages, room).unwrap().payload, sent.len()).unwrap() == sent);
        }

        let mut payload = whole;
        for (at, bits) in flips {
            let at = at.index(payload.len());
            payload[at] ^= bits;
        }
        let given = input.slice(payload.len(), at_end);
        given.copy_from_slice(&payload);
        let len = sent.len().saturating_add_signed(extra).min(LAYOUT.packet_bytes());
        let pages = output.slice(len, at_end);
        let result = Decoder::new(LAYOUT).decode(QATZIP, given, pages);
        if result.is_ok() {
            prop_assert!(pages == sent, "a checksum was not looked at");
        }
    }

    #[test]
    fn garbage_does_no_harm(
        start in select(&[0, 2, 4, 10, 16, 24][..]),
        rest in vec(any::<u8>(), 0..3000),
        len in 1..=20_000_usize,
    ) {
        let header = member(4096, &[], 0, 0);
        let payload = [&header[..start], &rest].concat();
        prop_assert!(decode(&payload, len).is_err());
    }

    /// Garbage as deflate data, with right sums where it decodes at all.
    #[test]
    fn deflate_data_means_what_it_means_to_zlib(data in vec(any::<u8>(), 1..200), kind in 0..3_u8) {
        let mut data = data;
        // A last block, of each type in turn.
        data[0] = data[0] & !7 | 1 | kind << 1;
        let room = 1 << 16;
        let Some((len, pages)) = inflate_raw(&data, room) else {
            return Ok(());
        };
        let payload = foreign_of(&data[..len], &pages);
        prop_assert_eq!(&c_zlib(&payload, room).unwrap().1, &pages);
        if !pages.is_empty() {
            prop_assert!(decode(&payload, pages.len()).unwrap() == pages);
        }
    }
}
