//! Checks of IAA: compression, decompression, and pages that are not there.

use super::{
    Check, Verdict, expect, expect_equal, noise,
    rig::{Area, PAGE, Rig},
    size,
};
use idxd::{
    Descriptor,
    iaa::{self, Compress, CompressAecs, Decompress},
    opcode,
    status::{ANALYTICS_ERROR, IaaOutcome, SUCCESS},
};

const BOTH: &[u8] = &[opcode::COMPRESS, opcode::DECOMPRESS];
const DECOMPRESS: &[u8] = &[opcode::DECOMPRESS];

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "fixed-codes",
        what: "a page compressed with fixed codes is decompressed the same again, and one of zeros is smaller",
        section: Some("IAA 2.1, 3.3, 3.4 and 6.4.2"),
        needs: BOTH,
        run: round_trips,
    },
    Check {
        name: "compress-overflow",
        what: "compressed data that does not fit is status 0x0a with error 25",
        section: Some("IAA 2.1, 3.4.2 and 4.4.2"),
        needs: &[opcode::COMPRESS],
        run: |rig| {
            let (found, _) = compressed(rig, &noise(PAGE), PAGE - 1)?;
            expect_equal("0x0a, error 25", found)
        },
    },
    Check {
        name: "decompress-overflow",
        what: "decompressed data that does not fit is status 0x0b",
        section: Some("IAA 2.1, 4.4.1"),
        needs: DECOMPRESS,
        run: |rig| {
            let (found, _) = decompressed(rig, &stored(&[7; 100], true), 99)?;
            expect_equal("0x0b, error 0", found)
        },
    },
    Check {
        name: "window",
        what: "a match that reaches back 4096 bytes is right, and one further is an error",
        section: Some("IAA 2.1, 3.3 and 4.4.2"),
        needs: DECOMPRESS,
        run: window,
    },
    Check {
        name: "malformed",
        what: "a stream that ends too early, and a block of an undefined type, are errors",
        section: Some("IAA 2.1, 4.4.2 and 6.3.2.1"),
        needs: DECOMPRESS,
        run: malformed,
    },
    Check {
        name: "iaa-fault-on-read",
        what: "a page that may not be read is status 0x03",
        section: Some("IAA 2.1, 4.4.1"),
        needs: DECOMPRESS,
        run: fault_on_read,
    },
    Check {
        name: "iaa-fault-on-write",
        what: "a page that may not be written is status 0x03, with or without the bit for a write",
        section: Some("IAA 2.1, 4.4.1 and 6.2.1"),
        needs: DECOMPRESS,
        run: fault_on_write,
    },
];

/// Pages of different kinds, all of which can be compressed.
fn samples() -> [(&'static str, Vec<u8>); 5] {
    let text = b"The quick brown fox jumps over the lazy dog. ";
    let mut half = noise(PAGE);
    half[PAGE / 2..].fill(0);
    let few = noise(PAGE).iter().map(|byte| byte & 3).collect();
    [
        ("zeros", vec![0; PAGE]),
        ("text", text.iter().copied().cycle().take(PAGE).collect()),
        ("half of it noise", half),
        ("four symbols", few),
        ("one byte", vec![42]),
    ]
}

/// Compresses samples, and decompresses them.
fn round_trips(rig: &Rig) -> Result<(), Verdict> {
    for (name, data) in samples() {
        let (found, stream) = compressed(rig, &data, 2 * PAGE)?;
        expect_equal("success", found)?;
        let (found, output) = decompressed(rig, &stream, PAGE)?;
        let describe = |found: &str, length: usize| format!("{found}, {length} bytes ({name})");
        let expected = describe("success", data.len());
        expect_equal(expected, describe(&found, output.len()))?;
        expect(output == data, "the same bytes again", "others")?;
        expect(
            name != "zeros" || stream.len() < data.len(),
            "zeros to become smaller",
            format!("{} bytes", stream.len()),
        )?;
    }
    Ok(())
}

fn window(rig: &Rig) -> Result<(), Verdict> {
    let data = noise(6000);
    let (found, output) = decompressed(rig, &with_match(&data, MATCH_4096), 2 * PAGE)?;
    expect_equal("success", found)?;
    let back = data.len() - 4096;
    let is_right = output == [&data[..], &data[back..back + 3]].concat();
    expect(is_right, "the bytes from 4096 bytes before", "others")?;
    let (found, _) = decompressed(rig, &with_match(&data, MATCH_4097), 2 * PAGE)?;
    is_error(&found, "a match 4097 bytes back")
}

fn malformed(rig: &Rig) -> Result<(), Verdict> {
    let whole = with_match(&noise(6000), MATCH_4096);
    for length in [1, 3, 50, whole.len() - 2] {
        let (found, _) = decompressed(rig, &whole[..length], 2 * PAGE)?;
        is_error(&found, &format!("a stream cut after {length} bytes"))?;
    }
    let (found, _) = decompressed(rig, &[0b111, 0, 0, 0, 0, 0, 0, 0], PAGE)?;
    is_error(&found, "block type 3")
}

fn is_error(found: &str, of: &str) -> Result<(), Verdict> {
    expect(
        found.starts_with(&format!("{ANALYTICS_ERROR:#04x}")),
        format!("{ANALYTICS_ERROR:#04x} for {of}"),
        format!("{found} for {of}"),
    )
}

fn fault_on_read(rig: &Rig) -> Result<(), Verdict> {
    let (area, output) = (rig.before_hole()?, rig.pages(1)?);
    // Within a block: the beginning lies before the page's end, the rest behind it.
    let stream = stored(&[7; 64], true);
    let start = PAGE - 10;
    area.write(start, &stream[..10]);
    let descriptor = decompress(area.address(start), stream.len(), output.address(0), PAGE);
    fault(rig, descriptor, &[0x03])
}

fn fault_on_write(rig: &Rig) -> Result<(), Verdict> {
    let stream = stored(&[7; 8], true);
    let (area, input) = (rig.before_hole()?, rig.holding(&stream)?);
    let descriptor = decompress(input.address(0), stream.len(), area.address(PAGE - 4), PAGE);
    // The bit for a write is defined for other statuses only.
    fault(rig, descriptor, &[0x83, 0x03])
}

fn fault(rig: &Rig, descriptor: Descriptor, statuses: &[u8]) -> Result<(), Verdict> {
    let status = rig.ask(descriptor)?.status();
    expect(
        statuses.contains(&status),
        format!("one of {statuses:#04x?}"),
        format!("{status:#04x}"),
    )
}

/// What compression with fixed codes into `capacity` bytes reports, and the stream.
fn compressed(rig: &Rig, data: &[u8], capacity: usize) -> Result<(String, Vec<u8>), Verdict> {
    let (input, output) = (rig.holding(data)?, rig.pages(3)?);
    let compress = Compress {
        source: input.address(0),
        size: size(data.len()),
        destination: output.address(0),
        destination_size: size(capacity),
        aecs: rig.holding(&CompressAecs::fixed().to_bytes())?.address(0),
    };
    finish(rig, iaa::compress(compress, 0), output, capacity)
}

/// What decompression into `capacity` bytes reports, and the output.
fn decompressed(rig: &Rig, stream: &[u8], capacity: usize) -> Result<(String, Vec<u8>), Verdict> {
    let (input, output) = (rig.holding(stream)?, rig.pages(3)?);
    let (from, to) = (input.address(0), output.address(0));
    let descriptor = decompress(from, stream.len(), to, capacity);
    finish(rig, descriptor, output, capacity)
}

/// What an operation reports, and its output, behind which nothing may be written.
fn finish(
    rig: &Rig,
    descriptor: Descriptor,
    output: Area,
    capacity: usize,
) -> Result<(String, Vec<u8>), Verdict> {
    let image = rig.ask(descriptor.with(rig.limits().capabilities.cache_flag()))?;
    let outcome = IaaOutcome::of(&image);
    let outcome = outcome.ok_or_else(|| Verdict::Skipped("the record has no status".into()))?;
    let found = match outcome.status {
        SUCCESS => "success".to_owned(),
        status => format!("{status:#04x}, error {}", outcome.error),
    };
    let behind = output.read(capacity, 64);
    expect(
        behind.iter().all(|byte| *byte == 0),
        "nothing written behind the output",
        "other bytes",
    )?;
    let length = (outcome.output_size as usize).min(capacity);
    Ok((found, output.read(0, length)))
}

fn decompress(source: u64, length: usize, destination: u64, capacity: usize) -> Descriptor {
    let decompress = Decompress {
        source,
        size: size(length),
        destination,
        destination_size: size(capacity),
    };
    iaa::decompress(decompress, 0)
}

/// A block of raw DEFLATE that holds `data` (RFC 1951, 3.2.4).
fn stored(data: &[u8], last: bool) -> Vec<u8> {
    let [low, high, ..] = size(data.len()).to_le_bytes();
    let header = [u8::from(last), low, high, !low, !high];
    [&header[..], data].concat()
}

/// `data`, and a last block with this match.
fn with_match(data: &[u8], block: [u8; 5]) -> Vec<u8> {
    [&stored(data, false)[..], &block].concat()
}

/// Last blocks with fixed codes (RFC 1951, 3.2.5 and 3.2.6): one match of three bytes this far back, and the end of the block.
const MATCH_4096: [u8; 5] = match_block(23, 0x3ff);
const MATCH_4097: [u8; 5] = match_block(24, 0);

/// The block of a distance's symbol and its further bits.
const fn match_block(distance: u32, further: u64) -> [u8; 5] {
    // Codes have their most significant bit first: 0000001 is the length, 0000000 the end.
    let code = (distance.reverse_bits() >> 27) as u64;
    let bits = 0b011 | 1 << 9 | code << 10 | further << 15;
    let [a, b, c, d, e, ..] = bits.to_le_bytes();
    [a, b, c, d, e]
}
