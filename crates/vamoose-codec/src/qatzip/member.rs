//! Headers and trailers of gzip members: QATzip's are written, any are read.

/// Most bytes of pages in a member that hardware takes.
pub(super) const MOST_SOURCE: usize = 64 * 1024;

/// Bytes of pages in a member that QATzip does not leave to its software: its threshold, where it is not set.
pub(super) const LEAST_SOURCE: usize = 1024;

/// Most bytes of deflated data that QATzip has room for.
const MOST_DEFLATE: usize = MOST_SOURCE / 8 * 9 + 1024;

/// How every member of QATzip begins: its header up to the two sizes.
const START: [u8; 16] = [
    0x1f, 0x8b, DEFLATE, EXTRA, 0, 0, 0, 0, 0, 0xff, 12, 0, b'Q', b'Z', 8, 0,
];

const MAGIC: [u8; 2] = [0x1f, 0x8b];
const DEFLATE: u8 = 8;

const HEADER_CRC: u8 = 1 << 1;
const EXTRA: u8 = 1 << 2;
const NAME: u8 = 1 << 3;
const COMMENT: u8 = 1 << 4;
const RESERVED: u8 = 0b1110_0000;

/// The header of a member that is to be sent.
pub(super) fn header(source: u32, deflate: u32) -> [u8; START.len() + 8] {
    let mut header = [0; START.len() + 8];
    let (start, sizes) = header.split_at_mut(START.len());
    start.copy_from_slice(&START);
    sizes[..4].copy_from_slice(&source.to_le_bytes());
    sizes[4..].copy_from_slice(&deflate.to_le_bytes());
    header
}

/// The trailer of a member.
pub(super) fn trailer(crc: u32, source: u32) -> [u8; 8] {
    let mut trailer = [0; 8];
    trailer[..4].copy_from_slice(&crc.to_le_bytes());
    trailer[4..].copy_from_slice(&source.to_le_bytes());
    trailer
}

/// Whether `input` can be the start of a member.
pub(super) fn begins(input: &[u8]) -> bool {
    input.starts_with(&MAGIC)
}

/// The source size of the member at the start of `input`, and what follows the member, if that has
/// exactly the form of those that hardware writes. The data is not looked at.
pub(super) fn skip(input: &[u8]) -> Option<(usize, &[u8])> {
    let (start, rest) = input.split_first_chunk()?;
    let (sizes, body) = rest.split_first_chunk()?;
    let sizes = Sizes::read(*sizes)?;
    let (trailer, after) = body.get(sizes.deflate..)?.split_first_chunk()?;
    let (_, in_trailer) = pair(*trailer);
    let same = usize::try_from(in_trailer) == Ok(sizes.source);
    let fits = sizes.deflate <= MOST_DEFLATE;
    (*start == START && same && fits).then_some((sizes.source, after))
}

/// A member's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of the header.
    pub(super) len: usize,
    /// The sizes in the QZ subfield, if there is one.
    pub(super) stated: Option<Sizes>,
}

/// Sizes of a member's data, before and after deflating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) source: usize,
    pub(super) deflate: usize,
}

impl Header {
    /// Parses the header at the start of `input`. The error is its description.
    pub(super) fn parse(input: &[u8]) -> Result<Self, &'static str> {
        let mut rest = input;
        if chunk(&mut rest)? != MAGIC {
            return Err("a member begins as no gzip does");
        }
        let [method, flags, ..] = chunk::<8>(&mut rest)?;
        if method != DEFLATE {
            return Err("a member's header names another method than deflate");
        }
        if flags & RESERVED != 0 {
            return Err("a member's header has reserved flags");
        }
        let mut stated = None;
        if flags & EXTRA != 0 {
            let len = u16::from_le_bytes(chunk(&mut rest)?);
            stated = in_extra_field(take(&mut rest, len.into())?)?;
        }
        for text in [NAME, COMMENT] {
            if flags & text != 0 {
                let len = rest.iter().position(|byte| *byte == 0).ok_or(CUT_SHORT)?;
                take(&mut rest, len + 1)?;
            }
        }
        if flags & HEADER_CRC != 0 {
            let [low, high, ..] =
                libdeflater::crc32(&input[..input.len() - rest.len()]).to_le_bytes();
            if chunk(&mut rest)? != [low, high] {
                return Err("a member's header does not have the CRC that it states");
            }
        }
        Ok(Self {
            len: input.len() - rest.len(),
            stated,
        })
    }
}

/// The sizes in the QZ subfield, if there is one.
fn in_extra_field(mut field: &[u8]) -> Result<Option<Sizes>, &'static str> {
    let mut stated = None;
    while !field.is_empty() {
        let [id @ .., low, high] = chunk::<4>(&mut field)?;
        let data = take(&mut field, u16::from_le_bytes([low, high]).into())?;
        if id == *b"QZ" {
            let sizes = <[u8; 8]>::try_from(data).ok().and_then(Sizes::read);
            let sizes = sizes.ok_or("a member's QZ subfield does not have 8 bytes")?;
            if stated.replace(sizes).is_some() {
                return Err("a member has two QZ subfields");
            }
        }
    }
    Ok(stated)
}

impl Sizes {
    fn read(bytes: [u8; 8]) -> Option<Self> {
        let (source, deflate) = pair(bytes);
        Some(Self {
            source: usize::try_from(source).ok()?,
            deflate: usize::try_from(deflate).ok()?,
        })
    }
}

/// Checks the trailer of a member that holds `source`.
pub(super) fn check_trailer(trailer: [u8; 8], source: &[u8]) -> Result<(), &'static str> {
    let (crc, len) = pair(trailer);
    if u32::try_from(source.len()) != Ok(len) {
        return Err("a member does not have the size that it states");
    }
    if libdeflater::crc32(source) != crc {
        return Err("a member does not have the CRC that it states");
    }
    Ok(())
}

/// Two numbers: the sizes of a QZ subfield, or the CRC and the size of a trailer.
fn pair([a, b, c, d, rest @ ..]: [u8; 8]) -> (u32, u32) {
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(rest))
}

fn chunk<const LEN: usize>(rest: &mut &[u8]) -> Result<[u8; LEN], &'static str> {
    let (chunk, after) = rest.split_first_chunk().ok_or(CUT_SHORT)?;
    *rest = after;
    Ok(*chunk)
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], &'static str> {
    let (taken, after) = rest.split_at_checked(len).ok_or(CUT_SHORT)?;
    *rest = after;
    Ok(taken)
}

const CUT_SHORT: &str = "a member's header is cut short";

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with these flags and this after its ten bytes.
    fn parse(flags: u8, fields: &[&[u8]]) -> Result<Header, &'static str> {
        let start = [0x1f, 0x8b, 8, flags, 1, 2, 3, 4, 5, 6];
        Header::parse(&[&start, &fields.concat()[..]].concat())
    }

    fn plain(len: usize) -> Result<Header, &'static str> {
        Ok(Header { len, stated: None })
    }

    #[test]
    fn ours_are_read_and_skipped() {
        let header = header(0x1234, 2);
        let hex = [
            0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 12, 0, 0x51, 0x5a, 8, 0, 0x34, 0x12, 0, 0, 2, 0,
            0, 0,
        ];
        assert_eq!(header, hex);
        let (source, deflate) = (0x1234, 2);
        let stated = Some(Sizes { source, deflate });
        assert_eq!(Header::parse(&header), Ok(Header { len: 24, stated }));
        let member = [&header[..], &[3, 0], &trailer(7, 0x1234), b"after"].concat();
        assert_eq!(skip(&member), Some((0x1234, &b"after"[..])));
        for len in 0..34 {
            assert_eq!(skip(&member[..len]), None);
        }
    }

    #[test]
    fn every_optional_field_is_skipped() {
        assert_eq!(parse(0, &[b"data"]), plain(10));
        // "Text" is a hint.
        assert_eq!(parse(1, &[b"data"]), plain(10));
        assert_eq!(parse(8, &[b"name\0data"]), plain(15));
        assert_eq!(parse(16, &[b"\0data"]), plain(11));
        assert_eq!(parse(24, &[b"name\0comment\0data"]), plain(23));
        assert_eq!(parse(4, &[&[0, 0], b"data"]), plain(12));
        assert_eq!(parse(4, &[&[4, 0], b"BC\0\0", b"data"]), plain(16));
        assert_eq!(parse(4, &[&[6, 0], b"BC\x02\0ab", b"data"]), plain(18));

        let fields = [&[0, 0][..], b"name\0", b"comment\0"].concat();
        let start = [0x1f, 0x8b, 8, 4 | 8 | 16 | 2, 1, 2, 3, 4, 5, 6];
        let crc = libdeflater::crc32(&[&start[..], &fields].concat()).to_le_bytes();
        assert_eq!(parse(30, &[&fields, &crc[..2], b"data"]), plain(27));
        let reason = Err("a member's header does not have the CRC that it states");
        assert_eq!(parse(30, &[&fields, &crc[2..], b"data"]), reason);
    }

    #[test]
    fn the_qz_subfield_is_found_among_others() {
        let stated = Some(Sizes {
            source: 5,
            deflate: 6,
        });
        let qz = b"QZ\x08\0\x05\0\0\0\x06\0\0\0";
        let found = Ok(Header { len: 28, stated });
        assert_eq!(parse(4, &[&[16, 0], qz, b"BC\0\0"]), found);
        assert_eq!(parse(4, &[&[16, 0], b"BC\0\0", qz]), found);
        assert_eq!(
            parse(4, &[&[24, 0], qz, qz]),
            Err("a member has two QZ subfields")
        );
        for wrong in [&b"QZ\x00\0"[..], b"QZ\x07\0\x05\0\0\0\x06\0\0"] {
            let len = [wrong.len().to_le_bytes()[0], 0];
            assert_eq!(
                parse(4, &[&len, wrong]),
                Err("a member's QZ subfield does not have 8 bytes")
            );
        }
    }

    #[test]
    fn malformed_header_is_described() {
        assert_eq!(
            Header::parse(b"\x1f\x8c\x08"),
            Err("a member begins as no gzip does")
        );
        let method = Header::parse(b"\x1f\x8b\x07\0\0\0\0\0\0\0");
        assert_eq!(
            method,
            Err("a member's header names another method than deflate")
        );
        for flags in [32, 64, 128, 0xff] {
            let reason = Err("a member's header has reserved flags");
            assert_eq!(parse(flags, &[&[0; 99]]), reason);
        }
        let cut = Err(CUT_SHORT);
        for len in 0..10 {
            assert_eq!(Header::parse(&header(1, 1)[..len]), cut, "{len}");
        }
        assert_eq!(parse(8, &[b"name without an end"]), cut);
        assert_eq!(parse(16, &[]), cut);
        assert_eq!(parse(2, &[&[0]]), cut);
        for extra in [
            &[0][..],
            &[1, 0],
            &[0xff, 0xff, 0],
            // Subfields that do not fill the field, or go beyond it.
            &[3, 0, b'B', b'C', 0],
            &[4, 0, b'B', b'C', 1, 0, 0],
        ] {
            assert_eq!(parse(4, &[extra]), cut, "{extra:?}");
        }
    }

    #[test]
    fn trailers_are_checked() {
        let right = trailer(libdeflater::crc32(b"abc"), 3);
        assert_eq!(right, [0xc2, 0x41, 0x24, 0x35, 3, 0, 0, 0]);
        assert_eq!(check_trailer(right, b"abc"), Ok(()));
        for at in 0..8 {
            let mut wrong = right;
            wrong[at] ^= 1;
            assert!(check_trailer(wrong, b"abc").is_err());
        }
    }
}
