//! Checks of the results of IAA's operations.

use super::{
    Check, Ended, Verdict,
    dsa::{holds, noise, size},
    is_so,
    queue::POLYNOMIAL,
    rig::{PAGE, Rig},
    same,
};
use idxd::{
    Descriptor, Kind,
    iaa::{self, Code, Codes, Compress, CompressAecs, Decompress, Histogram},
    opcode,
    status::{ANALYTICS_ERROR, IaaOutcome, SUCCESS},
};

const BOTH: &[u8] = &[opcode::COMPRESS, opcode::DECOMPRESS];

const fn check(number: u32, name: &'static str, what: &'static str, run: super::Run) -> Check {
    Check::new(number, name, what, run).of(Kind::Iaa)
}

pub(super) const CHECKS: &[Check] = &[
    check(
        70,
        "fixed-codes",
        "a page compressed with fixed codes is decompressed the same again, and one of zeros is smaller",
        fixed,
    )
    .by("IAA 2.1, 3.3, 3.4 and 6.4.2")
    .needs(BOTH),
    check(
        71,
        "dynamic-codes",
        "a page compressed with codes from its own statistics is decompressed the same again",
        dynamic,
    )
    .by("IAA 2.1, 3.4 and 3.4.1")
    .needs(BOTH),
    check(
        73,
        "statistics",
        "bytes of which no three repeat are counted one by one, and no match",
        statistics,
    )
    .by("IAA 2.1, 3.4.1")
    .needs(&[opcode::COMPRESS]),
    check(
        74,
        "checksums",
        "compression and decompression say the CRC-32 of the data, and count no bytes when they are done",
        checksums,
    )
    .by("IAA 2.1, 3.6 and 6.2.4")
    .needs(BOTH),
    check(
        75,
        "compress-overflow",
        "compressed data that does not fit is status 0x0a with error 25",
        compress_overflow,
    )
    .by("IAA 2.1, 3.4.2 and 4.4.2")
    .needs(&[opcode::COMPRESS]),
    check(
        76,
        "decompress-overflow",
        "decompressed data that does not fit is status 0x0b",
        decompress_overflow,
    )
    .by("IAA 2.1, 4.4.1")
    .needs(&[opcode::DECOMPRESS]),
    check(
        77,
        "window",
        "a match that reaches back 4096 bytes is right, and one further is status 0x0a with error 17",
        window,
    )
    .by("IAA 2.1, 3.3 and 4.4.2")
    .needs(&[opcode::DECOMPRESS]),
    check(
        78,
        "truncated",
        "a stream that ends too early is an error, wherever it does",
        truncated,
    )
    .by("IAA 2.1, 6.3.2.1")
    .needs(&[opcode::DECOMPRESS]),
    check(
        79,
        "block-type",
        "an undefined block type is status 0x0a with error 13, a stored block with a wrong length error 14",
        block_type,
    )
    .by("IAA 2.1, 4.4.2")
    .needs(&[opcode::DECOMPRESS]),
    check(
        80,
        "symbol-without-code",
        "a symbol for which the AECS has no code is status 0x0a with error 30",
        without_code,
    )
    .by("IAA 2.1, 4.4.2")
    .needs(&[opcode::COMPRESS]),
    check(
        81,
        "aecs-misaligned",
        "an AECS at an address that is no multiple of 32 is status 0x1c",
        misaligned,
    )
    .by("IAA 2.1, 4.4.1 and 6.1.9")
    .needs(&[opcode::COMPRESS]),
    check(
        82,
        "compression-flags",
        "decompression that is not enabled is status 0x30",
        operation_flags,
    )
    .by("IAA 2.1, 4.4.1 and 6.3.2.1")
    .needs(&[opcode::DECOMPRESS]),
    check(
        83,
        "iaa-overlap",
        "input and output that overlap are status 0x16",
        overlap,
    )
    .by("IAA 2.1, 4.1 and 6.1.6")
    .needs(&[opcode::DECOMPRESS]),
    check(
        84,
        "crc64",
        "CRC-64 of \"123456789\" is that of ECMA-182",
        crc64,
    )
    .by("IAA 2.1, 3.10.3")
    .needs(&[opcode::CRC64]),
];

/// Pages of different kinds, all of which can be compressed.
fn samples() -> Vec<(&'static str, Vec<u8>)> {
    let text = b"The quick brown fox jumps over the lazy dog. ";
    let mut half = noise(PAGE);
    half[PAGE / 2..].fill(0);
    let few = noise(PAGE).iter().map(|byte| byte & 3).collect();
    vec![
        ("zeros", vec![0; PAGE]),
        ("text", text.iter().copied().cycle().take(PAGE).collect()),
        ("half of it noise", half),
        ("four symbols", few),
        ("one byte", vec![42]),
    ]
}

fn fixed(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    for (name, data) in samples() {
        let stream = compressed(rig, &data, &CompressAecs::fixed())?;
        is_so(
            name != "zeros" || stream.len() < data.len(),
            "zeros to become smaller",
            format!("{} bytes", stream.len()),
        )?;
        back(rig, name, &stream, &data)?;
    }
    Ok(Verdict::Holds)
}

fn dynamic(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    for (name, data) in samples() {
        let aecs = CompressAecs::dynamic(&counted(rig, &data)?, true);
        let stream = compressed(rig, &data, &aecs)?;
        back(rig, name, &stream, &data)?;
    }
    Ok(Verdict::Holds)
}

fn statistics(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let data: Vec<u8> = (0..=255).collect();
    let histogram = counted(rig, &data)?;
    let bytes = histogram.literals[..256].iter().all(|count| *count == 1);
    let matches: u32 = histogram.literals[257..]
        .iter()
        .chain(&histogram.distances)
        .sum();
    is_so(bytes, "every byte once", "other numbers")?;
    same("0 matches", format!("{matches} matches"))?;
    Ok(Verdict::Holds)
}

fn checksums(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    // CRC-32 of "123456789".
    let (data, crc) = (b"123456789", 0xcbf4_3926_u32);
    let (input, output) = (rig.holding(data)?, rig.pages(2)?);
    let aecs = rig.holding(&CompressAecs::fixed().to_bytes())?;
    let compress = Compress {
        source: input.address(0),
        size: 9,
        destination: output.address(0),
        destination_size: size(PAGE),
        aecs: aecs.address(0),
    };
    let answer = asked(rig, iaa::compress(compress, 0))?;
    same(
        format!("0x01, CRC {crc:#010x}, 0 bytes completed"),
        format!(
            "{:#04x}, CRC {:#010x}, {} bytes completed",
            answer.status, answer.crc, answer.completed
        ),
    )?;
    let decompress = Decompress {
        source: output.address(0),
        size: answer.output_size,
        destination: output.address(PAGE),
        destination_size: size(PAGE),
    };
    let answer = asked(rig, iaa::decompress(decompress, 0))?;
    same(
        format!("0x01, CRC {crc:#010x}, 9 bytes, 0 bytes completed"),
        format!(
            "{:#04x}, CRC {:#010x}, {} bytes, {} bytes completed",
            answer.status, answer.crc, answer.output_size, answer.completed
        ),
    )?;
    Ok(Verdict::Holds)
}

fn compress_overflow(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (input, output) = (rig.holding(&noise(PAGE))?, rig.pages(1)?);
    let aecs = rig.holding(&CompressAecs::fixed().to_bytes())?;
    let compress = Compress {
        source: input.address(0),
        size: size(PAGE),
        destination: output.address(0),
        destination_size: size(PAGE) - 1,
        aecs: aecs.address(0),
    };
    let answer = asked(rig, iaa::compress(compress, 0))?;
    same(error(25), coded(&answer))?;
    // The last byte is beyond the output.
    same("0", output.read(PAGE - 1, 1)[0].to_string())?;
    Ok(Verdict::Holds)
}

fn decompress_overflow(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let mut stream = Stream::default();
    stream.stored(&[7; 100], true);
    let (answer, output) = decompressed(rig, &stream.bytes, 99)?;
    same("0x0b", format!("{:#04x}", answer.status))?;
    same("0", output[99].to_string())?;
    Ok(Verdict::Holds)
}

fn window(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let data = noise(6000);
    for (distance, expected) in [(4096, "success".to_owned()), (4097, error(17))] {
        let mut stream = Stream::default();
        stream.stored(&data, false);
        stream.match_of_three(distance);
        let (answer, output) = decompressed(rig, &stream.bytes, 2 * PAGE)?;
        let of = |what: &str| format!("{what} for distance {distance}");
        same(of(&expected), of(&coded(&answer)))?;
        if answer.status == SUCCESS {
            let back = 6000 - distance as usize;
            let right = output[..6000] == data[..] && output[6000..6003] == data[back..back + 3];
            is_so(right, "the bytes from 4096 bytes before", "others")?;
        }
    }
    Ok(Verdict::Holds)
}

fn truncated(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let mut stream = Stream::default();
    stream.stored(&[7; 100], false);
    stream.match_of_three(5);
    for length in [1, 3, 50, stream.bytes.len() - 2] {
        let (answer, _) = decompressed(rig, &stream.bytes[..length], PAGE)?;
        is_so(
            answer.status == ANALYTICS_ERROR,
            format!("0x0a after {length} bytes"),
            format!("{:#04x} after {length} bytes", answer.status),
        )?;
    }
    Ok(Verdict::Holds)
}

fn block_type(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let undefined: &[u8] = &[0b111, 0, 0, 0, 0, 0, 0, 0];
    let lengths: &[u8] = &[1, 4, 0, 0, 0, 1, 2, 3, 4];
    for (stream, code) in [(undefined, 13), (lengths, 14)] {
        let (answer, _) = decompressed(rig, stream, PAGE)?;
        same(error(code), coded(&answer))?;
    }
    Ok(Verdict::Holds)
}

fn without_code(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    // An AECS of zeros has no codes at all.
    let (input, output, aecs) = (rig.holding(&noise(64))?, rig.pages(1)?, rig.pages(1)?);
    let compress = Compress {
        source: input.address(0),
        size: 64,
        destination: output.address(0),
        destination_size: size(PAGE),
        aecs: aecs.address(0),
    };
    let answer = asked(rig, iaa::compress(compress, 0))?;
    same(error(30), coded(&answer))?;
    Ok(Verdict::Holds)
}

fn misaligned(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (input, output) = (rig.holding(&[1; 64])?, rig.pages(1)?);
    let aecs = rig.pages(1)?;
    aecs.write(16, &CompressAecs::fixed().to_bytes());
    let compress = Compress {
        source: input.address(0),
        size: 64,
        destination: output.address(0),
        destination_size: size(PAGE),
        aecs: aecs.address(16),
    };
    let answer = asked(rig, iaa::compress(compress, 0))?;
    same("0x1c", format!("{:#04x}", answer.status))?;
    Ok(Verdict::Holds)
}

fn operation_flags(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let (input, output) = (rig.pages(1)?, rig.pages(1)?);
    let decompress = Decompress {
        source: input.address(0),
        size: 64,
        destination: output.address(0),
        destination_size: size(PAGE),
    };
    let descriptor = Descriptor {
        operation_flags: 0,
        ..iaa::decompress(decompress, 0)
    };
    let answer = asked(rig, descriptor)?;
    same("0x30", format!("{:#04x}", answer.status))?;
    Ok(Verdict::Holds)
}

fn overlap(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let area = rig.pages(1)?;
    let decompress = Decompress {
        source: area.address(0),
        size: 64,
        destination: area.address(32),
        destination_size: 64,
    };
    let answer = asked(rig, iaa::decompress(decompress, 0))?;
    same("0x16", format!("{:#04x}", answer.status))?;
    Ok(Verdict::Holds)
}

fn crc64(rig: &Rig<'_>) -> Result<Verdict, Ended> {
    let input = rig.holding(b"123456789")?;
    let answer = asked(rig, iaa::crc64(input.address(0), 9, POLYNOMIAL, 0))?;
    same(
        "0x01, 0x6c40df5f0b497347",
        format!("{:#04x}, {:#018x}", answer.status, answer.crc64),
    )?;
    Ok(Verdict::Holds)
}

fn asked(rig: &Rig<'_>, descriptor: Descriptor) -> Result<IaaOutcome, Ended> {
    let image = rig.ask(descriptor)?.image("a status")?;
    IaaOutcome::of(&image).ok_or_else(|| super::skipped("the record has no status"))
}

/// The stream that the device makes of `data`.
fn compressed(rig: &Rig<'_>, data: &[u8], aecs: &CompressAecs) -> Result<Vec<u8>, Ended> {
    let (input, output) = (rig.holding(data)?, rig.pages(2)?);
    let aecs = rig.holding(&aecs.to_bytes())?;
    let compress = Compress {
        source: input.address(0),
        size: size(data.len()),
        destination: output.address(0),
        destination_size: size(2 * PAGE),
        aecs: aecs.address(0),
    };
    let answer = asked(rig, iaa::compress(compress, 0))?;
    same("success", coded(&answer))?;
    Ok(output.read(0, (answer.output_size as usize).min(2 * PAGE)))
}

fn counted(rig: &Rig<'_>, data: &[u8]) -> Result<Histogram, Ended> {
    let (input, output) = (rig.holding(data)?, rig.pages(1)?);
    let statistics = iaa::statistics(input.address(0), size(data.len()), output.address(0), 0);
    same("success", coded(&asked(rig, statistics)?))?;
    let mut bytes = [0; Histogram::SIZE as usize];
    bytes.copy_from_slice(&output.read(0, Histogram::SIZE as usize));
    Ok(Histogram::from_bytes(&bytes))
}

pub(super) fn decompressed(
    rig: &Rig<'_>,
    stream: &[u8],
    capacity: usize,
) -> Result<(IaaOutcome, Vec<u8>), Ended> {
    let (input, output) = (rig.holding(stream)?, rig.pages(3)?);
    let decompress = Decompress {
        source: input.address(0),
        size: size(stream.len()),
        destination: output.address(0),
        destination_size: size(capacity),
    };
    let answer = asked(rig, iaa::decompress(decompress, 0))?;
    Ok((answer, output.read(0, 3 * PAGE)))
}

/// Whether the device makes `data` of a stream again.
fn back(rig: &Rig<'_>, name: &str, stream: &[u8], data: &[u8]) -> Result<(), Ended> {
    let (answer, output) = decompressed(rig, stream, PAGE)?;
    same(
        format!("success, {} bytes ({name})", data.len()),
        format!("{}, {} bytes ({name})", coded(&answer), answer.output_size),
    )?;
    holds(rig.holding(&output[..data.len()])?.as_ref(), data)
}

fn error(code: u8) -> String {
    format!("0x0a, error {code}")
}

fn coded(answer: &IaaOutcome) -> String {
    match answer.status {
        SUCCESS => "success".to_owned(),
        status => format!("{status:#04x}, error {}", answer.error),
    }
}

/// A stream of raw DEFLATE (RFC 1951), by hand.
#[derive(Default)]
struct Stream {
    bytes: Vec<u8>,
    bits: u32,
}

impl Stream {
    fn push(&mut self, value: u32, bits: u32) {
        for bit in 0..bits {
            if self.bits.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if let Some(last) = self.bytes.last_mut() {
                *last |= u8::from(value >> bit & 1 == 1) << (self.bits % 8);
            }
            self.bits += 1;
        }
    }

    fn push_code(&mut self, code: Code) {
        for bit in (0..code.len).rev() {
            self.push(u32::from(code.bits >> bit & 1), 1);
        }
    }

    /// A stored block.
    fn stored(&mut self, data: &[u8], last: bool) {
        self.push(u32::from(last), 3);
        self.push(0, (8 - self.bits % 8) % 8);
        let length = size(data.len());
        self.push(length, 16);
        self.push(!length, 16);
        for byte in data {
            self.push(u32::from(*byte), 8);
        }
    }

    /// A last block, of one match of three bytes.
    fn match_of_three(&mut self, distance: u32) {
        let codes = Codes::fixed();
        self.push(0b011, 3);
        self.push_code(codes.literals()[257]);
        let (symbol, extra, bits) = distance_code(distance);
        self.push_code(codes.distances()[symbol]);
        self.push(extra, bits);
        self.push_code(codes.literals()[256]);
    }
}

/// A distance's symbol, and its further bits.
fn distance_code(distance: u32) -> (usize, u32, u32) {
    let less = distance - 1;
    if less < 4 {
        return (less as usize, 0, 0);
    }
    let top = less.ilog2();
    let second = less >> (top - 1) & 1;
    let bits = top - 1;
    ((2 * top + second) as usize, less & ((1 << bits) - 1), bits)
}
