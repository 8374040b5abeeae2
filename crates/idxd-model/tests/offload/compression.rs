//! Pages to streams and back.

use std::io::{Read as _, Write as _};

use super::*;
use idxd_model::{Chance, Faults, InjectedFault, On};

pub(crate) fn deflate(page: &[u8], room: &mut [u8]) -> Option<usize> {
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(page).unwrap();
    let stream = encoder.finish().unwrap();
    room.get_mut(..stream.len())?.copy_from_slice(&stream);
    Some(stream.len())
}

pub(crate) fn inflate(stream: &[u8], page: &mut [u8]) -> std::io::Result<()> {
    match stream.len() {
        PAGE => page.copy_from_slice(stream),
        _ => flate2::read::DeflateDecoder::new(stream).read_exact(page)?,
    }
    Ok(())
}

/// What goes out for each page, and how often the processor did one.
pub(crate) fn compress(compressor: &mut Compressor, pages: &[u8]) -> (Vec<Option<Vec<u8>>>, u64) {
    let (mut streams, mut by_processor) = (Vec::new(), 0);
    compressor.compress(
        pages,
        &mut |page, room| {
            by_processor += 1;
            deflate(page, room)
        },
        &mut |stream| streams.push(stream.map(<[u8]>::to_vec)),
    );
    for (stream, page) in streams.iter().zip(pages.chunks(PAGE)) {
        if let Some(stream) = stream {
            assert!(stream.len() < PAGE);
            let mut inflated = vec![0; PAGE];
            inflate(stream, &mut inflated).unwrap();
            assert_eq!(inflated, page);
        }
    }
    assert_eq!(streams.len(), pages.len() / PAGE);
    (streams, by_processor)
}

/// Returns how many of the streams were some: the others are pages as they are.
pub(crate) fn decompress(
    decompressor: &mut Decompressor,
    streams: &[Option<Vec<u8>>],
    originals: &[u8],
) -> u64 {
    let mut pages = vec![1; originals.len()];
    let stream = |page: usize| match &streams[page] {
        Some(stream) => &stream[..],
        None => &originals[page * PAGE..][..PAGE],
    };
    decompressor
        .decompress(&stream, &mut pages, &mut inflate)
        .unwrap();
    assert_eq!(pages, originals);
    streams.iter().flatten().count() as u64
}

#[test]
fn what_is_compressed_is_decompressed() {
    let model = Model::deterministic(&Config::devices(Kind::Iaa, 2));
    let devices = devices(&model, 2, PAGES);
    let memory = contents(64);
    let mut compressor = Compressor::new(devices.clone(), PAGE, 64);
    let mut decompressor = Decompressor::new(devices.clone(), PAGE);
    for count in [64, 1, 0, 33, 64] {
        let pages = &memory[..count * PAGE];
        let (streams, _) = compress(&mut compressor, pages);
        assert!(
            streams
                .iter()
                .enumerate()
                .all(|(page, it)| it.is_some() == (page % 4 != 1))
        );
        decompress(&mut decompressor, &streams, pages);
    }
    assert!(devices.work().by_device > 200, "{:?}", devices.work());
}

/// Of an operation that is complete a record has no bytes completed (IAA 2.1, 6.2.4).
#[test]
fn pages_that_a_device_decompressed_are_not_repeated() {
    let model = Model::deterministic(&Config::iaa());
    let devices = devices(&model, 1, PAGES);
    let memory = contents(64);
    let mut compressor = Compressor::new(devices.clone(), PAGE, 64);
    let (streams, _) = compress(&mut compressor, &memory);
    let before = devices.work();
    let count = decompress(
        &mut Decompressor::new(devices.clone(), PAGE),
        &streams,
        &memory,
    );
    let work = devices.work().since(before);
    assert_eq!((work.by_device, work.failed), (count, 0), "{work:?}");
}

#[test]
fn without_devices_the_processor_does_it() {
    let devices = Arc::new(Devices::none());
    let memory = contents(16);
    let mut compressor = Compressor::new(devices.clone(), PAGE, 16);
    let (streams, by_processor) = compress(&mut compressor, &memory);
    assert_eq!(by_processor, 16);
    let streams = decompress(
        &mut Decompressor::new(devices.clone(), PAGE),
        &streams,
        &memory,
    );
    let all = OffloadCounters {
        refused: 16 + streams,
        ..OffloadCounters::default()
    };
    assert_eq!(devices.work(), all);
}

#[test]
fn a_stuck_device_costs_a_moment() {
    let mut config = Config::iaa();
    config.faults = Faults {
        chances: vec![Chance {
            per_mille: 1000,
            on: On::any(),
            fault: InjectedFault::Stuck,
        }],
        ..Faults::default()
    };
    let model = Model::deterministic(&config);
    let (devices, memory) = (devices(&model, 1, PAGES), contents(64));
    let mut operations = 0;
    let mut compressor = Compressor::new(devices.clone(), PAGE, 64);
    for _ in 0..20 {
        let before = model.now();
        let (streams, _) = compress(&mut compressor, &memory);
        // Four microseconds for each page before the processor takes one, and once a hundred.
        let took = model.now() - before;
        assert!(took <= Duration::from_micros(64 * 4 + 100 + 10), "{took:?}");
        let streams = decompress(
            &mut Decompressor::new(devices.clone(), PAGE),
            &streams,
            &memory,
        );
        operations += 64 + streams;
    }
    // No more than there are slots, and soon none is submitted.
    assert_eq!(devices.work().by_device, 0);
    assert!(statistics(&devices)[0].operations <= 64);
    assert_eq!(sum(devices.work()), operations);
}

#[test]
fn a_device_that_recovers_is_used_again() {
    let model = Model::deterministic(&Config::iaa());
    let (devices, memory) = (devices(&model, 1, PAGES), contents(64));
    let mut compressor = Compressor::new(devices.clone(), PAGE, 64);
    model.refuse(0, 0, u32::MAX);
    for _ in 0..100 {
        compress(&mut compressor, &memory);
    }
    // 6400 pages, and few of them were offered.
    assert!(statistics(&devices)[0].full < 20);
    model.refuse(0, 0, 0);
    for _ in 0..40 {
        compress(&mut compressor, &memory);
    }
    assert!(devices.work().by_device > 64, "{:?}", devices.work());
}

#[test]
fn pages_that_one_cannot_make_shorter_stay_as_they_are() {
    let model = Model::deterministic(&Config::iaa());
    let devices = devices(&model, 1, PAGES);
    let noise: Vec<u8> = contents(2)[PAGE..].to_vec();
    let mut compressor = Compressor::new(devices.clone(), PAGE, 1);
    assert_eq!(compress(&mut compressor, &noise).0, [None]);
    assert_eq!(devices.work().by_device, 1);
}

#[test]
fn a_stream_that_is_wrong_is_the_processors_error() {
    let model = Model::deterministic(&Config::iaa());
    let devices = devices(&model, 1, PAGES);
    let memory = contents(64);
    let mut compressor = Compressor::new(devices.clone(), PAGE, 64);
    let (mut streams, _) = compress(&mut compressor, &memory);
    let mut decompressor = Decompressor::new(devices.clone(), PAGE);
    for wrong in [
        vec![],
        vec![0xff; 100],
        streams[2].clone().unwrap()[..20].to_vec(),
    ] {
        let right = streams[7].replace(wrong);
        let mut pages = vec![0; memory.len()];
        let stream = |page: usize| match &streams[page] {
            Some(stream) => &stream[..],
            None => &memory[page * PAGE..][..PAGE],
        };
        let result = decompressor.decompress(&stream, &mut pages, &mut inflate);
        assert!(result.is_err());
        streams[7] = right;
        // Nothing is left of it.
        decompress(&mut decompressor, &streams, &memory);
    }
}

#[test]
fn a_panic_leaves_no_operation_in_flight() {
    let model = Model::deterministic(&Config::iaa());
    let devices = devices(&model, 1, PAGES);
    let memory = contents(64);
    let mut compressor = Compressor::new(devices.clone(), PAGE, 64);
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        compressor.compress(&memory, &mut |_, _| None, &mut |_| panic!("on purpose"));
    }));
    assert!(panics.is_err());
    // The other way round, so that a stream from before would be another page's.
    let turned: Vec<u8> = memory.chunks(PAGE).rev().flatten().copied().collect();
    compress(&mut compressor, &turned);
}

#[test]
fn buffers_that_are_too_small_are_not_used() {
    let model = Model::deterministic(&Config::iaa());
    let shape = Shape {
        members: 1,
        buffer_bytes: PAGE - 1,
    };
    let devices = devices(&model, 1, shape);
    let memory = contents(4);
    let mut compressor = Compressor::new(devices.clone(), PAGE, 4);
    compress(&mut compressor, &memory);
    assert_eq!(devices.work().refused, 4);
}

#[test]
fn page_sized_payloads_are_not_streams_and_trailing_bytes_are_ignored_by_a_device() {
    let model = Model::deterministic(&Config::iaa());
    let devices = devices(&model, 1, PAGES);
    // A stored block that is not the last, two with nothing in them, and a last one that fills the page.
    let stored = |last: u8, data: &[u8]| {
        let len = u16::try_from(data.len()).unwrap();
        [&[last][..], &len.to_le_bytes(), &(!len).to_le_bytes(), data].concat()
    };
    let repeated = stored(0, &[7; 4000]);
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut encoder, &[8; 96]).unwrap();
    let rest = encoder.finish().unwrap();
    let fill = (PAGE - repeated.len() - rest.len()) / 5 - 1;
    let mut like_a_stream = repeated;
    for _ in 0..fill {
        like_a_stream.extend(stored(0, &[]));
    }
    let stream = [&like_a_stream[..], &rest].concat();
    let mut inflated = Vec::new();
    std::io::Read::read_to_end(
        &mut flate2::read::DeflateDecoder::new(&stream[..]),
        &mut inflated,
    )
    .unwrap();
    assert_eq!(inflated.len(), PAGE);
    let trailing = [&stream[..], &[0]].concat();
    let raw = vec![5; PAGE];

    let streams = [&raw[..], &stream, &trailing, &raw];
    let mut pages = vec![0; 4 * PAGE];
    let mut by_processor = Vec::new();
    Decompressor::new(devices.clone(), PAGE)
        .decompress(
            &|page| streams[page],
            &mut pages,
            &mut |stream: &[u8], page: &mut [u8]| {
                by_processor.push(stream.len());
                page.fill(stream[0]);
                Ok::<_, ()>(())
            },
        )
        .unwrap();
    assert!(trailing.len() < PAGE);
    assert_eq!(by_processor, [PAGE, PAGE]);
    assert_eq!(pages[PAGE..2 * PAGE], inflated);
    assert_eq!(pages[2 * PAGE..3 * PAGE], inflated);
    let work = devices.work();
    assert_eq!((work.by_device, work.failed), (2, 0), "{work:?}");
}
