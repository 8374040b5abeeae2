//! Whole descriptors, against zlib-rs (by `flate2`) as the oracle of streams.

use std::{collections::BTreeMap, io::Read, io::Write};

use flate2::{Compression, read::DeflateDecoder, write::DeflateEncoder};
use proptest::prelude::*;

mod corrections;

use super::{deflate::WINDOW, execute};
use crate::{
    Config,
    memory::{Fault, Memory},
    validate::validate,
};
use idxd::{Descriptor, Flags, RecordImage, opcode};

const SOURCE: u64 = 0x10_0000_0000;
const DESTINATION: u64 = 0x20_0000_0000;
const AECS: u64 = 0x30_0000_0000;
const AECS_SIZE: u32 = 1568;

/// Flush, and end the block.
const WHOLE_BLOCK: u16 = 0x06;
/// Decompress, flush, stop at the last block's end, which has to be there.
const WHOLE_STREAM: u16 = 0x1f;

#[test]
fn what_it_compresses_zlib_inflates() {
    for (name, data) in corpus() {
        let (record, output) = compressed(&data);
        assert_eq!(record.status(), 1, "{name}");
        assert_eq!(inflated_by_zlib(&output), data, "{name}");
    }
}

#[test]
fn it_compresses_what_can_be_compressed() {
    for (name, at_most) in [
        ("zeros", 0.02),
        ("text", 0.5),
        ("runs", 0.1),
        ("words", 0.65),
    ] {
        let data = corpus_of(name);
        let (_, output) = compressed(&data);
        let ratio = output.len() as f64 / data.len() as f64;
        assert!(ratio < at_most, "{name}: {ratio}");
    }
}

#[test]
fn copies_reach_back_4096_bytes_and_no_further() {
    let noise = noise(WINDOW, 1);
    let (_, near) = compressed(&[&noise[..], &noise].concat());
    let (_, far) = compressed(&[&noise[..], &[7], &noise].concat());
    let (_, once) = compressed(&noise);
    assert!(near.len() < once.len() + 100);
    assert!(far.len() > once.len() + 4000);
}

#[test]
fn too_small_a_destination_fails() {
    let data = noise(4096, 2);
    for limit in [1, 2, 3, 4, 100, 4095, 4096] {
        let mut job = Job::compress(&data, WHOLE_BLOCK);
        job.limit(limit);
        let record = job.execute();
        assert_eq!((record.status(), record.result()), (0x0a, 25));
        assert!(job.is_untouched_after(limit as usize));
    }
    let (record, _) = compressed(&data);
    let exact = output_size(&record);
    for (limit, status) in [(exact, 1), (exact - 1, 0x0a)] {
        let mut job = Job::compress(&data, WHOLE_BLOCK);
        job.limit(limit);
        assert_eq!(job.execute().status(), status);
    }
}

#[test]
fn a_symbol_without_code_fails() {
    let mut job = Job::compress(b"abc", WHOLE_BLOCK);
    if let Some(aecs) = job.memory.regions.get_mut(&AECS) {
        let place = 288 + 4 * usize::from(b'c');
        aecs[place..place + 4].fill(0);
    }
    let record = job.execute();
    assert_eq!((record.status(), record.result()), (0x0a, 30));
}

#[test]
fn an_accumulator_of_more_bits_than_it_has_is_bad() {
    let mut job = Job::compress(b"abc", WHOLE_BLOCK);
    if let Some(aecs) = job.memory.regions.get_mut(&AECS) {
        aecs[28..32].copy_from_slice(&2049_u32.to_le_bytes());
    }
    let record = job.execute();
    assert_eq!((record.status(), record.result()), (0x0a, 22));
}

#[test]
fn pages_that_zlib_deflates_are_inflated() {
    for (name, data) in corpus() {
        for page in data.chunks(4096) {
            for level in 0..=9 {
                let stream = deflated_by_zlib(page, level);
                let mut job = Job::decompress(&stream, 4096);
                let record = job.execute();
                assert_eq!(record.status(), 1, "{name}, {level}");
                assert_eq!(job.output(&record), page, "{name}, {level}");
            }
        }
    }
}

#[test]
fn a_window_of_more_than_4_kib_is_an_error() {
    let noise = noise(WINDOW, 3);
    let near = [&noise[..], &noise].concat();
    let far = [&noise[..], &[7], &noise].concat();
    for (data, status, error) in [(near, 1, 0), (far, 0x0a, 15)] {
        let stream = deflated_by_zlib(&data, 9);
        let record = Job::decompress(&stream, 9000).execute();
        assert_eq!((record.status(), record.result()), (status, error));
    }
}

#[test]
fn output_that_does_not_fit_overflows() {
    for (name, data) in corpus() {
        let (_, stream) = compressed(&data);
        let whole = u32::try_from(data.len()).unwrap();
        for limit in [1, 2, 100, whole / 2, whole - 1] {
            let limit = limit.min(whole - 1);
            let mut job = Job::decompress(&stream, limit);
            let record = job.execute();
            assert_eq!(record.status(), 0x0b, "{name}");
            assert_eq!(output_size(&record), limit);
            assert_eq!(job.output(&record), data[..limit as usize]);
            assert!(job.is_untouched_after(limit as usize));
        }
    }
}

/// Bits in the order of a stream, lowest first; words of Huffman codes are given reversed.
fn bits(parts: &[(u32, u32)]) -> Vec<u8> {
    let flat = parts
        .iter()
        .flat_map(|(value, count)| (0..*count).map(move |bit| value >> bit & 1 == 1));
    let flat: Vec<_> = flat.collect();
    flat.chunks(8)
        .map(|byte| {
            byte.iter()
                .rev()
                .fold(0, |all, bit| all << 1 | u8::from(*bit))
        })
        .collect()
}

#[test]
fn wrong_descriptors_are_refused() {
    type Change = fn(&mut Job);
    let changes: [(&str, Change, u8); 12] = [
        ("opcode", |job| job.descriptor.control |= 0xff << 24, 0x10),
        ("fence", |job| job.add(Flags(1)), 0x11),
        ("check result", |job| job.add(Flags(1 << 7)), 0x11),
        ("no source 2", |job| job.add(Flags(3 << 16)), 0x11),
        ("AECS written", |job| job.add(Flags(1 << 18)), 0x11),
        ("bit 23", |job| job.add(Flags(1 << 23)), 0x11),
        ("elements", |job| job.descriptor.operands[2] = 1 << 32, 0x12),
        ("small AECS", |job| job.aecs(AECS, 1536), 0x13),
        ("overlap", |job| job.descriptor.address_2 = SOURCE + 2, 0x16),
        ("AECS", |job| job.aecs(AECS + 16, AECS_SIZE), 0x1c),
        ("AECS size", |job| job.aecs(AECS, 1569), 0x13),
        (
            "order",
            |job| job.descriptor.operation_flags |= 1 << 5,
            0x30,
        ),
    ];
    for (name, change, status) in changes {
        let mut job = Job::compress(b"abc", WHOLE_BLOCK);
        change(&mut job);
        assert_eq!(job.execute().status(), status, "{name}");
        assert!(job.is_untouched_after(0));
    }
    let mut job = Job::compress(b"abc", WHOLE_BLOCK);
    job.add(Flags(1 << 23 | 1));
    assert_eq!(job.execute().words[2], 1 << 23 | 1);

    let (_, stream) = compressed(b"abc");
    for wrong in [0x0f, 0x1e, 0x3f, 0x1f | 1 << 9, 0x1f | 1 << 15] {
        let mut job = Job::decompress(&stream, 16);
        job.descriptor.operation_flags = wrong;
        assert_eq!(job.execute().status(), 0x30);
    }
}

#[test]
fn faults_are_reported_wherever_they_are() {
    let data = noise(3000, 4);
    let (_, stream) = compressed(&data);
    let aecs = u64::from(AECS_SIZE);
    let jobs: [(&dyn Fn() -> Job, &[_]); 2] = [
        (
            &|| Job::compress(&data, WHOLE_BLOCK),
            &[
                (SOURCE, false),
                (SOURCE + 2999, false),
                (AECS, false),
                (AECS + aecs - 1, false),
                (DESTINATION, true),
                (DESTINATION + 1000, true),
            ],
        ),
        (
            &|| Job::decompress(&stream, 3000),
            &[
                (SOURCE, false),
                (SOURCE + 77, false),
                (DESTINATION, true),
                (DESTINATION + 2999, true),
            ],
        ),
    ];
    for (job, places) in jobs {
        let whole = job().execute();
        assert_eq!(whole.status(), 1);
        for (place, write) in places {
            let mut job = job();
            job.memory.missing = Some(*place);
            let record = job.execute();
            assert_eq!(record.status(), if *write { 0x83 } else { 0x03 });
            let written = match *place {
                DESTINATION.. if *place < AECS => place - DESTINATION,
                _ => 0,
            };
            assert_eq!(
                (record.fault_address(), u64::from(record.completed())),
                (*place, written)
            );
        }
    }
}

#[test]
fn a_huge_size_faults_before_memory_is_allocated() {
    let mut job = Job::decompress(&[0; 100], 16);
    job.descriptor.size = u32::MAX;
    let record = job.execute();
    assert_eq!((record.status(), record.fault_address()), (3, SOURCE + 100));
}

#[test]
fn every_truncation_is_an_error() {
    for (name, data) in corpus() {
        let page = &data[..data.len().min(4096)];
        let streams = [
            compressed(page).1,
            deflated_by_zlib(page, 0),
            deflated_by_zlib(page, 6),
        ];
        for stream in streams {
            for cut in 1..stream.len() {
                let mut job = Job::decompress(&stream[..cut], 4096);
                let record = job.execute();
                assert_eq!(record.status(), 0x0a, "{name}, {cut}");
                assert_eq!(record.result(), 15, "{name}, {cut}");
                // What there is of the output is right.
                assert!(page.starts_with(&job.output(&record)));
            }
        }
    }
}

proptest! {
    #[test]
    fn whatever_is_compressed_comes_back(data in mixed(20_000)) {
        let (record, stream) = compressed(&data);
        prop_assert_eq!(record.status(), 1);
        prop_assert_eq!(&inflated_by_zlib(&stream), &data);
        let mut job = Job::decompress(&stream, u32::try_from(data.len()).unwrap());
        let back = job.execute();
        prop_assert_eq!(back.status(), 1);
        prop_assert_eq!(job.output(&back), data);
    }

    #[test]
    fn a_flipped_bit_is_an_error_or_other_output(data in mixed(4096), level in 0..=9_u32, bit: prop::sample::Index) {
        let mut stream = deflated_by_zlib(&data, level);
        let bit = bit.index(8 * stream.len());
        stream[bit / 8] ^= 1 << (bit % 8);
        any_end(&stream);
    }

    #[test]
    fn any_bytes_have_an_end(stream in prop::collection::vec(any::<u8>(), 1..500), flags: u16) {
        any_end(&stream);
        let mut job = Job::decompress(&stream, 5000);
        job.descriptor.operation_flags = flags;
        job.execute();
    }

    #[test]
    fn any_aecs_has_an_end(words in prop::collection::vec(any::<u32>(), 392), data in mixed(1000), flags: u16) {
        let mut job = Job::compress(&data, flags);
        let mut aecs: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        aecs[29..32].fill(0);
        job.memory.regions.insert(AECS, aecs);
        let record = job.execute();
        prop_assert!(matches!(record.status(), 1 | 0x0a | 0x11 | 0x30));
    }

    #[test]
    fn any_descriptor_has_an_end(
        words: [u32; 16],
        opcode in prop::sample::select(vec![0x42_u32, 0x43, 0x99]),
    ) {
        let mut job = Job::compress(b"abc", WHOLE_BLOCK);
        job.descriptor = Descriptor {
            control: opcode << 24 | words[1] & 0xff_ffff,
            size: words[8],
            address_1: SOURCE.wrapping_add(i64::from(words[4].cast_signed()).cast_unsigned()),
            address_2: DESTINATION,
            operation_flags: words[9].to_le_bytes()[0].into(),
            operands: [AECS, u64::from(words[12]) | u64::from(AECS_SIZE) << 32, 0],
            ..Descriptor::default()
        };
        prop_assert_ne!(job.execute().status(), 0);
    }
}

/// Decompresses what may be no stream at all.
fn any_end(stream: &[u8]) {
    let mut job = Job::decompress(stream, 4096);
    let record = job.execute();
    let size = output_size(&record) as usize;
    match (record.status(), record.result()) {
        (1, 0) => assert!(size <= 4096),
        (0x0b, 0) => assert_eq!(size, 4096),
        (0x0a, code) => assert!((1..=36).contains(&code)),
        other => panic!("{other:?}"),
    }
    assert!(job.is_untouched_after(size));
}

/// A descriptor, and all that it names.
struct Job {
    descriptor: Descriptor,
    memory: Regions,
}

const UNTOUCHED: u8 = 0xa5;

impl Job {
    fn new(opcode: u8, descriptor: Descriptor) -> Self {
        let flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
        Self {
            descriptor: Descriptor {
                control: Descriptor::control_of(opcode, flags),
                ..descriptor
            },
            memory: Regions::default(),
        }
    }

    fn compress(data: &[u8], operation_flags: u16) -> Self {
        let space = 2000 + 9 * data.len() / 8;
        let mut job = Self::with(opcode::COMPRESS, data, operation_flags, space);
        job.memory.regions.insert(AECS, fixed_aecs());
        job.add(Flags::READ_AECS);
        job.aecs(AECS, AECS_SIZE);
        job
    }

    fn decompress(stream: &[u8], limit: u32) -> Self {
        let mut job = Self::with(opcode::DECOMPRESS, stream, WHOLE_STREAM, 0);
        job.limit(limit);
        let space = vec![UNTOUCHED; limit as usize + 100];
        job.memory.regions.insert(DESTINATION, space);
        job
    }

    fn with(opcode: u8, source: &[u8], operation_flags: u16, space: usize) -> Self {
        let mut job = Self::new(
            opcode,
            Descriptor {
                address_1: SOURCE,
                address_2: DESTINATION,
                size: u32::try_from(source.len()).unwrap(),
                operation_flags,
                ..Descriptor::default()
            },
        );
        job.limit(u32::try_from(space).unwrap());
        job.memory.regions.insert(SOURCE, source.to_vec());
        let space = vec![UNTOUCHED; space];
        job.memory.regions.insert(DESTINATION, space);
        job
    }

    fn add(&mut self, flags: Flags) {
        self.descriptor.control |= flags.0;
    }

    fn limit(&mut self, limit: u32) {
        self.descriptor.operands[1] &= !0xffff_ffff;
        self.descriptor.operands[1] |= u64::from(limit);
    }

    fn aecs(&mut self, address: u64, size: u32) {
        self.descriptor.operands[0] = address;
        self.descriptor.operands[1] &= 0xffff_ffff;
        self.descriptor.operands[1] |= u64::from(size) << 32;
    }

    /// Checks and executes the descriptor, as an engine does.
    fn execute(&mut self) -> RecordImage {
        let mut config = Config::iaa();
        let limits = &mut config.devices[0].queues[0];
        limits.max_transfer = u32::MAX.into();
        match validate(&self.descriptor, limits, false) {
            Ok(()) => execute(&self.descriptor, &mut self.memory),
            Err(invalid) => RecordImage {
                words: [
                    invalid.status.into(),
                    0,
                    invalid.flags.into(),
                    0,
                    0,
                    0,
                    0,
                    0,
                ],
            },
        }
    }

    fn output(&self, record: &RecordImage) -> Vec<u8> {
        self.memory.regions[&DESTINATION][..output_size(record) as usize].to_vec()
    }

    fn is_untouched_after(&self, bytes: usize) -> bool {
        let destination = &self.memory.regions[&DESTINATION];
        destination[bytes.min(destination.len())..]
            .iter()
            .all(|byte| *byte == UNTOUCHED)
    }
}

/// Memory is where it has been put; anything else is a fault, and one place may be.
#[derive(Default)]
struct Regions {
    regions: BTreeMap<u64, Vec<u8>>,
    missing: Option<u64>,
}

impl Regions {
    /// The bytes from `address` on that are there, of at most `length`.
    fn there(&mut self, address: u64, length: usize) -> &mut [u8] {
        let missing = self.missing;
        let Some((start, region)) = self.regions.range_mut(..=address).next_back() else {
            return &mut [];
        };
        let from = usize::try_from(address - start).unwrap();
        let Some(bytes) = region.get_mut(from..) else {
            return &mut [];
        };
        let until_missing = missing
            .and_then(|missing| missing.checked_sub(address))
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or(usize::MAX);
        let length = length.min(bytes.len()).min(until_missing);
        &mut bytes[..length]
    }
}

impl Memory for Regions {
    fn read(&mut self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        let bytes = self.there(address, buffer.len());
        let done = bytes.len();
        buffer[..done].copy_from_slice(bytes);
        ended(address, done, buffer.len(), false)
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let places = self.there(address, bytes.len());
        let done = places.len();
        places.copy_from_slice(&bytes[..done]);
        ended(address, done, bytes.len(), true)
    }
}

fn ended(address: u64, done: usize, wanted: usize, write: bool) -> Result<(), Fault> {
    if done == wanted {
        return Ok(());
    }
    let address = address.wrapping_add(done as u64);
    Err(Fault {
        done,
        address,
        write,
    })
}

/// The fixed codes of RFC 1951, after the header of a last block of them.
fn fixed_aecs() -> Vec<u8> {
    let mut words = vec![0_u32; AECS_SIZE as usize / 4];
    words[7] = 3;
    words[8] = 0x03;
    for symbol in 0..286 {
        let (length, code) = match symbol {
            0..144 => (8, 0x30 + symbol),
            144..256 => (9, 0x190 + symbol - 144),
            256..280 => (7, symbol - 256),
            _ => (8, 0xc0 + symbol - 280),
        };
        words[72 + symbol as usize] = length << 15 | code;
    }
    for symbol in 0..30 {
        words[360 + symbol as usize] = 5 << 15 | symbol;
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn compressed(data: &[u8]) -> (RecordImage, Vec<u8>) {
    let mut job = Job::compress(data, WHOLE_BLOCK);
    let record = job.execute();
    let output = job.output(&record);
    assert!(job.is_untouched_after(output.len()));
    (record, output)
}

fn output_size(record: &RecordImage) -> u32 {
    (record.words[3] & 0xffff_ffff) as u32
}

fn inflated_by_zlib(stream: &[u8]) -> Vec<u8> {
    let mut output = Vec::new();
    DeflateDecoder::new(stream)
        .read_to_end(&mut output)
        .unwrap();
    output
}

fn deflated_by_zlib(data: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

fn corpus() -> [(&'static str, Vec<u8>); 6] {
    let text = "No page of a guest is sent twice, unless the guest has written it again. ";
    let text = text.bytes().cycle().enumerate();
    let text = text.map(|(at, byte)| if at % 97 == 0 { b'#' } else { byte });
    let runs = (0..=255).flat_map(|byte| std::iter::repeat_n(byte, 20 + usize::from(byte)));
    let words = noise(4000, 5);
    let words = words.iter().flat_map(|byte| [*byte, byte / 16, 0, 0]);
    [
        ("zeros", vec![0; 20_000]),
        ("text", text.take(12_345).collect()),
        ("noise", noise(9_999, 6)),
        ("runs", runs.collect()),
        ("words", words.collect()),
        ("short", b"xyz".to_vec()),
    ]
}

fn corpus_of(name: &str) -> Vec<u8> {
    let mut corpus = corpus().into_iter();
    corpus.find(|(other, _)| *other == name).unwrap().1
}

fn noise(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Runs, noise and repetitions, in any order.
fn mixed(most: usize) -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        (any::<u8>(), 1..600_usize).prop_map(|(byte, times)| vec![byte; times]),
        prop::collection::vec(any::<u8>(), 1..300),
        (prop::collection::vec(any::<u8>(), 1..40), 1..40_usize)
            .prop_map(|(bytes, times)| bytes.repeat(times)),
        prop::collection::vec(97..101_u8, 1..500),
    ];
    prop::collection::vec(part, 1..40).prop_map(move |parts| {
        let mut data = parts.concat();
        data.truncate(most);
        data
    })
}
