//! Canned streams, and streams that go on where an output was full: by the driver's own descriptors.

use idxd::{
    iaa::{self, Codes, Compress, CompressAecs, Decompress, DecompressAecs, End, Header},
    status::IaaOutcome,
};

use super::*;

const PAGE: usize = 4096;
const PAGE_BYTES: u32 = 4096;

/// Memory with a header at [`HEADER`], and with tables loaded from it.
struct Canned {
    header: Header,
    compress: CompressAecs,
    memory: Regions,
}

impl Canned {
    fn new(codes: &Codes, last: bool) -> Self {
        let header = codes.header(last);
        let mut memory = Regions::default();
        memory.regions.insert(HEADER, header.bytes().to_vec());
        memory
            .regions
            .insert(TABLES, DecompressAecs::new().bytes().to_vec());
        let mut load: Descriptor = iaa::load_codes(&header, TABLES, 0).into();
        load.address_1 = HEADER;
        let record = execute(&load, &mut memory);
        assert_eq!((record.status(), output_size(&record)), (1, 0));
        Self {
            header,
            compress: CompressAecs::canned(codes),
            memory,
        }
    }

    fn compress(&mut self, page: &[u8]) -> Vec<u8> {
        let aecs = self.compress.to_bytes().to_vec();
        self.memory.regions.insert(AECS, aecs);
        self.memory.regions.insert(SOURCE, page.to_vec());
        self.memory.regions.insert(DESTINATION, vec![0; 3 * PAGE]);
        let compress = Compress {
            source: SOURCE,
            size: u32::try_from(page.len()).unwrap(),
            destination: DESTINATION,
            destination_size: 3 * PAGE_BYTES,
            aecs: AECS,
            end: End::Block,
        };
        let record = execute(&iaa::compress(compress, 0).into(), &mut self.memory);
        assert_eq!(record.status(), 1);
        self.memory.regions[&DESTINATION][..output_size(&record) as usize].to_vec()
    }

    fn decompress(&mut self, stream: &[u8]) -> (RecordImage, Vec<u8>) {
        self.memory.regions.insert(SOURCE, stream.to_vec());
        self.memory.regions.insert(DESTINATION, vec![0; PAGE]);
        let decompress = Decompress {
            source: SOURCE,
            size: u32::try_from(stream.len()).unwrap(),
            destination: DESTINATION,
            destination_size: PAGE_BYTES,
        };
        let operation = iaa::decompress_canned(decompress, TABLES, 0);
        let record = execute(&operation.into(), &mut self.memory);
        let output = self.memory.regions[&DESTINATION][..output_size(&record) as usize].to_vec();
        (record, output)
    }
}

/// Codes for anything, but best for `data`.
fn codes_of(data: &[u8]) -> Codes {
    let mut job = Job::compress(data, 1);
    let record = job.execute();
    let bytes = job.output(&record);
    let histogram = iaa::Histogram::from_bytes(bytes.as_slice().try_into().unwrap());
    Codes::of(&histogram.covering())
}

#[test]
fn canned_streams_come_back_with_one_set_of_tables() {
    for last in [false, true] {
        for codes in [Codes::fixed(), codes_of(&corpus_of("text"))] {
            let mut canned = Canned::new(&codes, last);
            let tables = canned.memory.regions[&TABLES].clone();
            for (name, data) in corpus() {
                for page in data.chunks(PAGE) {
                    let stream = canned.compress(page);
                    let (record, back) = canned.decompress(&stream);
                    assert_eq!((record.status(), record.result()), (1, 0), "{name}");
                    assert_eq!(back, page, "{name}");
                    assert_eq!(crc_of(&record), crc32_by_zlib(page), "{name}");
                    if last {
                        assert_eq!(inflated_by_zlib(&canned.header.prepend(&stream)), page);
                    }
                }
            }
            assert_eq!(canned.memory.regions[&TABLES], tables);
        }
    }
}

#[test]
fn headers_repeat_no_length_from_one_alphabet_to_the_other() {
    // Sixteen symbols of either alphabet, so that all codes have four bits: the last literals, the first distances.
    let mut histogram = iaa::Histogram::new();
    histogram.literals[241..257].fill(1);
    histogram.distances[..16].fill(1);
    let codes = Codes::of(&histogram);
    let is_even = codes.literals()[256].len == codes.distances()[0].len;
    assert!(is_even, "{codes:?}");
    // Loading them succeeds.
    Canned::new(&codes, true);
}

#[test]
fn a_canned_stream_without_its_end_is_an_error() {
    let page = corpus_of("text")[..PAGE].to_vec();
    let mut canned = Canned::new(&codes_of(&page), true);
    let stream = canned.compress(&page);
    for cut in 1..stream.len() {
        let (record, back) = canned.decompress(&stream[..cut]);
        assert_eq!((record.status(), record.result()), (0x0a, 15), "{cut}");
        assert!(page.starts_with(&back));
    }
}

/// Header, stream and data of the kernel's canned mode (`iaa_crypto`, patch of 28 March 2024 to `linux-crypto`, "Add
/// deflate-canned compression algorithm": `canned_header` and `deflate_iaa_canned_decomp_tv_template`).
#[test]
fn the_kernels_canned_streams_are_understood() {
    const CANNED_HEADER: [u8; 82] = [
        0xed, 0xfd, 0x05, 0x5c, 0x54, 0xcf, 0x17, 0x06, 0x8c, 0xcf, 0x02, 0x22, 0x62, 0x61, 0x63,
        0xaf, 0x8d, 0x85, 0xbb, 0xe4, 0x82, 0xc0, 0x2e, 0x8a, 0x88, 0x8d, 0x8d, 0xcd, 0xb2, 0xbb,
        0x08, 0x4a, 0x49, 0x28, 0x36, 0x36, 0x36, 0x36, 0x36, 0x76, 0x2b, 0x36, 0x26, 0xd8, 0xd8,
        0xd8, 0xad, 0xd8, 0xad, 0xd8, 0xf1, 0x53, 0xf9, 0x9e, 0xb9, 0x33, 0x03, 0xbb, 0x97, 0x5d,
        0xe6, 0x7d, 0xff, 0x1d, 0xef, 0x1e, 0x1f, 0x9e, 0x7b, 0xce, 0x9c, 0x39, 0x33, 0xe7, 0x4c,
        0xdc, 0xeb, 0xe7, 0xf3, 0xf9, 0x7c, 0x3e,
    ];
    const STREAM: [u8; 37] = [
        0x6d, 0x23, 0x43, 0x23, 0xa4, 0x71, 0x31, 0xd2, 0x88, 0xc8, 0x61, 0x52, 0x75, 0x84, 0x56,
        0x1a, 0x13, 0xa2, 0x8e, 0xd6, 0x49, 0x63, 0x43, 0x74, 0xd2, 0x98, 0xc8, 0xe0, 0xd8, 0x61,
        0x58, 0x69, 0xcb, 0x71, 0x01, 0xe5, 0x3f,
    ];
    let mut canned = Canned::new(&Codes::fixed(), true);
    // Its first format's size, and all bits of the last byte.
    let mut load: Descriptor = iaa::load_codes(&canned.header, TABLES, 0).into();
    load.address_1 = HEADER;
    load.size = 82;
    load.operation_flags = 0x201;
    load.operands[1] = 1088 << 32;
    let regions = &mut canned.memory.regions;
    regions.insert(HEADER, CANNED_HEADER.to_vec());
    assert_eq!(execute(&load, &mut canned.memory).status(), 1);
    let (record, back) = canned.decompress(&STREAM);
    assert_eq!((record.status(), record.result()), (1, 0));
    assert_eq!(back, b"Join us now and share the software ".repeat(2));
}

/// Decompresses piece by piece, into outputs of `limit` bytes each.
fn by_pieces(stream: &[u8], limit: u32) -> (RecordImage, Vec<u8>, u32) {
    let mut memory = Regions::default();
    memory.regions.insert(SOURCE, stream.to_vec());
    let copies = DecompressAecs::new().bytes().repeat(2);
    memory.regions.insert(AECS, copies);
    let mut rest = Decompress {
        source: SOURCE,
        size: u32::try_from(stream.len()).unwrap(),
        destination: DESTINATION,
        destination_size: limit,
    };
    let mut output = Vec::new();
    for piece in 0.. {
        memory
            .regions
            .insert(DESTINATION, vec![UNTOUCHED; limit as usize]);
        let operation = iaa::decompress_piece(rest, AECS, piece, 0);
        let record = execute(&operation.into(), &mut memory);
        let size = output_size(&record) as usize;
        output.extend_from_slice(&memory.regions[&DESTINATION][..size]);
        let outcome = IaaOutcome::of(&record).unwrap();
        match rest.rest(&outcome, DESTINATION, limit) {
            Some(next) => rest = next,
            None => return (record, output, piece),
        }
        assert_eq!(size, limit as usize);
    }
    unreachable!("a stream has an end");
}

#[test]
fn what_did_not_fit_goes_on_to_the_identical_bytes() {
    for (name, data) in corpus() {
        let mut streams = vec![compressed(&data).1];
        let page = &data[..data.len().min(PAGE)];
        streams.extend([0, 1, 6].map(|level| deflated_by_zlib(page, level)));
        for stream in streams {
            let expected = inflated_by_zlib(&stream);
            let whole = u32::try_from(expected.len()).unwrap();
            for limit in [1, 2, 3, 100, 257, 4095, 4096, 5000, whole - 1, whole] {
                // One descriptor for each byte of much data shows no more.
                let limit = limit.clamp(1 + whole / 2000, whole);
                let (record, output, pieces) = by_pieces(&stream, limit);
                let code = (record.status(), record.result());
                assert_eq!(code, (1, 0), "{name}, {limit}, {pieces}");
                assert_eq!(output, expected, "{name}, {limit}");
                assert_eq!(crc_of(&record), crc32_by_zlib(&expected));
                if limit % 2 == 0 {
                    assert_eq!(xor_of(&record), xor_by_definition(&expected));
                }
                assert_eq!(pieces, whole.div_ceil(limit) - 1, "{name}, {limit}");
            }
        }
    }
}

#[test]
fn a_broken_aecs_is_named() {
    type Break = fn(&mut [u8]);
    let page = corpus_of("text")[..PAGE].to_vec();
    let mut canned = Canned::new(&codes_of(&page), true);
    let stream = canned.compress(&page);
    let tables = canned.memory.regions[&TABLES].clone();
    let breaks: [(&str, Break); 9] = [
        ("place", |aecs| aecs[0x434] = 0x10),
        ("place", |aecs| aecs[0x435] = 1),
        ("no codes", |aecs| aecs[560..720].fill(0)),
        ("too many codes", |aecs| aecs[560..720].fill(0x11)),
        ("rest of a copy", |aecs| aecs[720] = 1),
        ("input", |aecs| aecs[440] = 65),
        ("format", |aecs| aecs[477] = 1),
        ("format", |aecs| aecs[176] = 1),
        ("dropped bytes", |aecs| aecs[20] = 1),
    ];
    for (what, change) in breaks {
        let mut broken = tables.clone();
        change(&mut broken);
        canned.memory.regions.insert(TABLES, broken);
        let (record, back) = canned.decompress(&stream);
        assert_eq!((record.status(), record.result()), (0x0a, 22), "{what}");
        assert!(back.is_empty());
    }
    // A history that ends beyond its end; the short AECS above have none.
    let mut job = Job::decompress(&[3, 0], 16);
    let mut aecs = DecompressAecs::new().bytes().to_vec();
    aecs[0x4e4..0x4e6].copy_from_slice(&4097_u16.to_le_bytes());
    job.memory.regions.insert(AECS, aecs);
    job.add(Flags::READ_AECS);
    job.aecs(AECS, DecompressAecs::SIZE);
    assert_eq!(job.execute().result(), 22);
}

#[test]
fn a_new_aecs_is_as_good_as_none() {
    let data = corpus_of("words");
    let stream = compressed(&data).1;
    let mut job = Job::decompress(&stream, u32::try_from(data.len()).unwrap());
    let aecs = DecompressAecs::new().bytes().to_vec();
    job.memory.regions.insert(AECS, aecs);
    job.add(Flags::READ_AECS);
    job.aecs(AECS, DecompressAecs::SIZE);
    let record = job.execute();
    assert_eq!(record.status(), 1);
    assert_eq!(job.output(&record), data);
}

#[test]
fn an_input_may_come_in_pieces() {
    let page = &corpus_of("text")[..PAGE];
    let stream = deflated_by_zlib(page, 6);
    for size in [1, 2, 7, 100] {
        let mut memory = Regions::default();
        memory
            .regions
            .insert(AECS, DecompressAecs::new().bytes().repeat(2));
        let mut output = Vec::new();
        let mut status = 0;
        for (piece, input) in (0..).zip(stream.chunks(size)) {
            let mut job = Job::decompress(input, PAGE_BYTES);
            job.memory
                .regions
                .insert(AECS, memory.regions[&AECS].clone());
            job.descriptor = iaa::decompress_piece(
                Decompress {
                    source: SOURCE,
                    size: u32::try_from(input.len()).unwrap(),
                    destination: DESTINATION,
                    destination_size: PAGE_BYTES,
                },
                AECS,
                piece,
                0,
            )
            .into();
            // Written in any case, and no end is asked for.
            job.descriptor.control ^= 3 << 18;
            job.descriptor.operation_flags = 0x17;
            let record = job.execute();
            output.extend(job.output(&record));
            status = record.status();
            assert_eq!(status, 1, "{size}, {piece}");
            memory = job.memory;
        }
        assert_eq!((status, &output[..]), (1, page));
    }
}

proptest! {
    #[test]
    fn any_decompress_aecs_has_an_end(
        changes in prop::collection::vec((0..0x4e8_usize, any::<u8>()), 0..20),
        place in prop::sample::select(vec![0_u8, 1, 2, 4, 6, 8]),
        stream in prop::collection::vec(any::<u8>(), 1..300),
        limit in 0_u32..300,
        flags: u16,
    ) {
        let mut aecs = DecompressAecs::new().bytes().to_vec();
        aecs[0x434] = place;
        // Codes of eight bits for all bytes.
        aecs[560..688].fill(0x88);
        for (at, value) in changes {
            aecs[at] = value;
        }
        let mut job = Job::decompress(&stream, limit);
        job.memory.regions.insert(AECS, aecs.repeat(2));
        job.add(Flags::READ_AECS.with(Flags::WRITE_AECS));
        job.aecs(AECS, DecompressAecs::SIZE);
        job.descriptor.operation_flags = flags & 0x03df | 1;
        let record = job.execute();
        prop_assert!(matches!(record.status(), 1 | 0x0a | 0x0b));
        prop_assert!(record.completed() as usize <= stream.len());
        prop_assert!(output_size(&record) <= limit);
    }
}

const HEADER: u64 = 0x40_0000_0000;
const TABLES: u64 = 0x50_0000_0000;
