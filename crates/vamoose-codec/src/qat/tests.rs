//! The engine through the real library, which does the work in software: `tests/qat.rs` has it through a stand-in that
//! can be made to fail.

use std::{ffi::OsStr, thread};

use super::*;
use crate::{
    Accel, Decoder, Engines, Health, Registry, Settings, Tally, Verify,
    ffi::libqatzip::tests::real::{
        Real,
        pages::{self, Kind},
    },
};

const LAYOUT: Layout = Layout::X86;

/// The most pages of a packet that the library's software makes into what hardware would send: one member of 64 KiB.
const MOST: usize = 16;

/// Engines with a QAT whose work the real library does.
fn engines(level: i32) -> Option<Engines> {
    let library = Real::open()?.in_software();
    let registry = Registry::with_qat(move || {
        let library = library.clone();
        Ok(Qat { library })
    });
    let settings = Settings::new(Method::Qatzip, Some(level)).unwrap();
    let engines = Arc::new(registry).choose(settings, Accel::Qat, Verify::All);
    Some(engines.unwrap())
}

/// Sends packets with so many pages through the engine, out and in, and returns what it did in each direction.
fn send(engines: &Engines, counts: &[usize]) -> [Tally; 2] {
    let [out, back] = [(); 2].map(|()| Arc::new(Health::default()));
    let mut encoder = engines.encoder(LAYOUT, &out).unwrap();
    let mut decoders = [engines.decoder(LAYOUT, &back), Decoder::new(LAYOUT)];
    let mut room = vec![0; LAYOUT.max_payload()];
    for (count, kind) in counts.iter().zip(Kind::ALL.into_iter().cycle()) {
        let sent = pages::pages(kind, 3, *count);
        let encoded = encoder.encode(&sent, &mut room).unwrap();
        for decoder in &mut decoders {
            let mut received = vec![0xee; sent.len()];
            decoder
                .decode(encoded.method, encoded.payload, &mut received)
                .unwrap();
            assert!(received == sent, "{count} pages, {kind:?}");
        }
    }
    [out.tally(), back.tally()]
}

#[test]
fn packets_of_one_member_go_through_the_library() {
    let counts = [1, 2, 3, 7, MOST, MOST, MOST, MOST];
    for level in [2, 6, 8] {
        let Some(engines) = engines(level) else {
            return;
        };
        // Random pages come back larger than they were: the encoder sends them as they are.
        let all = counts.len() as u64;
        for tally in send(&engines, &counts) {
            assert!(tally.accelerated > 0 && tally.accelerated <= all);
            assert_eq!((tally.fallbacks, tally.wrong), (0, 0), "level {level}");
        }
    }
}

#[test]
fn payload_of_the_librarys_software_is_not_sent() {
    // Levels 1 and 9 are in the header then, and a full packet is a single member.
    for (level, count) in [(1, MOST), (9, MOST), (6, 17), (6, 128)] {
        let Some(engines) = engines(level) else {
            return;
        };
        let [out, back] = send(&engines, &[count, count]);
        assert_eq!((out.accelerated, out.fallbacks), (0, 2), "level {level}");
        // What is sent instead is read by the library.
        assert_eq!((back.accelerated, back.fallbacks), (2, 0), "level {level}");
    }
}

#[test]
fn after_a_damaged_payload_the_next_ones_are_read_by_the_library_again() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    let mut device = Qat { library }.device(Method::Qatzip, 6, LAYOUT);
    let sent = pages::pages(Kind::Text, 5, MOST);
    let mut good = vec![0; LAYOUT.max_payload()];
    let len = device.compress(&sent, &mut good).unwrap();
    good.truncate(len);
    let mut bad = good.clone();
    bad[len / 2] ^= 1;
    // More often than a channel may lose sessions.
    for round in 0..MOST_LOST + 2 {
        let mut received = vec![0xee; sent.len()];
        let refused = device.unpack(&bad, &mut received);
        let reason = "libqatzip's qzDecompress returns -4 (invalid data)";
        assert_eq!(refused, Err(DeviceError::Failed(reason.to_owned())));
        assert_eq!(device.unpack(&good, &mut received), Ok(()), "round {round}");
        assert!(received == sent);
    }
}

#[test]
fn several_channels_use_the_library_at_once() {
    let Some(engines) = engines(6) else {
        return;
    };
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let [out, back] = send(&engines, &[MOST, 1, 5]);
                assert_eq!((out.fallbacks, back.fallbacks), (0, 0));
            });
        }
    });
}

#[test]
fn the_host_without_a_device_says_which_library_it_has() {
    let Some(real) = Real::open() else {
        return;
    };
    let file = real.file().to_owned();
    match Qat::open(file.as_os_str()) {
        Ok(qat) => assert_eq!(qat.library(), Some(&*file)),
        Err(missing) => {
            assert_eq!(missing.library, Some(file));
            assert!(missing.reason.contains("QAT"), "{}", missing.reason);
        }
    }
    let missing = Qat::open(OsStr::new("/nowhere/libqatzip.so.3")).err();
    assert_eq!(missing.unwrap().library, None);
}
