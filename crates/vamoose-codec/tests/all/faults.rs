//! An engine that fails, lies and dawdles: the packets are right all the same, or the migration ends.

use std::sync::Arc;

use multifd::{Layout, Method};
use proptest::prelude::*;
use vamoose_codec::{
    Accel, DecodeError, Decoder, EncodeError, Engines, Faults, Health, Registry, Settings, Tally,
    Verify,
};

use crate::common::pages::{self, Kind};

const LAYOUT: Layout = Layout::X86;
const METHODS: [Method; 3] = [Method::Lz4, Method::Qpl, Method::Qatzip];

fn engines(method: Method, faults: &str, verify: Verify) -> Engines {
    let faults: Faults = faults.parse().unwrap();
    let settings = Settings::new(method, None).unwrap();
    let registry = Arc::new(Registry::with_faults(&faults));
    let engines = registry.choose(settings, Accel::Auto, verify).unwrap();
    assert_eq!(engines.name(), "faulty");
    engines
}

/// Compressible packets that all differ.
fn packet(number: u64) -> Vec<u8> {
    let mut packet = pages::pages(Kind::Text, number, 9);
    packet.extend(pages::pages(Kind::Repeated, number, 3));
    packet
}

/// Encodes `packets` packets and decodes them in software; what the engines did, or the first error.
fn encode(engines: &Engines, packets: u64) -> Result<Tally, EncodeError> {
    let health = Arc::new(Health::default());
    let mut encoder = engines.encoder(LAYOUT, &health)?;
    let mut decoder = Decoder::new(LAYOUT);
    let mut room = vec![0; LAYOUT.max_payload()];
    for number in 0..packets {
        let sent = packet(number);
        let encoded = encoder.encode(&sent, &mut room)?;
        let mut received = vec![0xee; sent.len()];
        decoder
            .decode(encoded.method, encoded.payload, &mut received)
            .unwrap_or_else(|error| panic!("packet {number}: {error}"));
        assert!(received == sent, "packet {number} is wrong");
    }
    Ok(health.tally())
}

/// Encodes `packets` packets in software and decodes them with the engines.
fn decode(engines: &Engines, packets: u64) -> Result<Tally, DecodeError> {
    let health = Arc::new(Health::default());
    let mut encoder = vamoose_codec::encoder(engines.settings(), LAYOUT).unwrap();
    let mut decoder = engines.decoder(LAYOUT, &health);
    let mut room = vec![0; LAYOUT.max_payload()];
    for number in 0..packets {
        let sent = packet(number);
        let encoded = encoder.encode(&sent, &mut room).unwrap();
        let mut received = vec![0xee; sent.len()];
        decoder.decode(encoded.method, encoded.payload, &mut received)?;
        assert!(received == sent, "packet {number} is wrong");
    }
    Ok(health.tally())
}

/// What both directions do; they have to agree.
fn both(method: Method, faults: &str, verify: Verify, packets: u64) -> Tally {
    let engines = engines(method, faults, verify);
    let encoded = encode(&engines, packets).unwrap();
    let decoded = decode(&engines, packets).unwrap();
    assert_eq!(encoded, decoded, "{method} {faults}");
    encoded
}

#[test]
fn a_full_queue_costs_the_device_its_packet_and_nothing_else() {
    for method in METHODS {
        let tally = both(method, "refuse", Verify::Sample, 50);
        assert_eq!((tally.accelerated, tally.fallbacks), (0, 50));
        let tally = both(method, "refuse@40", Verify::Sample, 50);
        assert_eq!((tally.accelerated, tally.fallbacks), (10, 40));
        let tally = both(method, "refuse@50%", Verify::Sample, 50);
        assert!((10..40).contains(&tally.fallbacks), "{tally:?}");
        assert_eq!(tally.accelerated + tally.fallbacks, 50);
    }
}

#[test]
fn errors_and_timeouts_end_in_software_and_in_a_row_they_end_the_device() {
    for method in METHODS {
        let tally = both(method, "fail@10", Verify::Sample, 50);
        assert_eq!((tally.accelerated, tally.fallbacks), (40, 10));
        // After 16 failures it is not asked any more, though it would succeed again.
        let tally = both(method, "fail@17", Verify::Sample, 50);
        assert_eq!((tally.accelerated, tally.fallbacks), (0, 50));
        let tally = both(method, "timeout=1ms@1", Verify::Sample, 50);
        assert_eq!((tally.accelerated, tally.fallbacks), (49, 1));
        let tally = both(method, "timeout=1ms@3", Verify::Sample, 50);
        assert_eq!((tally.accelerated, tally.fallbacks), (0, 50));
    }
}

#[test]
fn lengths_that_cannot_be_are_failures() {
    for method in METHODS {
        for faults in ["nothing@5", "beyond@5"] {
            let engines = engines(method, faults, Verify::Off);
            let tally = encode(&engines, 20).unwrap();
            assert_eq!(
                (tally.accelerated, tally.fallbacks),
                (15, 5),
                "{method} {faults}"
            );
        }
    }
}

#[test]
fn everything_wrong_is_caught_when_everything_is_checked() {
    for method in METHODS {
        for fault in ["wrong", "corrupt", "short", "long"] {
            let faults = format!("{fault}@10%,seed=3");
            let engines = engines(method, &faults, Verify::All);
            let health = Arc::new(Health::default());
            // `encode` compares every packet.
            let tally = encode(&engines, 100).unwrap();
            assert!(tally.fallbacks > 0, "{method} {fault}: {tally:?}");
            assert_eq!(tally.checked, tally.accelerated, "{method} {fault}");
            let tally = decode(&engines, 100).unwrap();
            assert_eq!(tally.wrong, 1, "{method} {fault}");
            // From the wrong packet on, the device is off.
            assert_eq!(tally.accelerated + tally.fallbacks, 100);
            assert_eq!(health.tally(), Tally::default());
        }
    }
}

#[test]
fn a_device_that_lies_from_the_start_is_caught_by_the_sample() {
    for method in METHODS {
        for verify in [Verify::Sample, Verify::All] {
            let tally = both(method, "wrong", verify, 50);
            assert_eq!(
                (tally.accelerated, tally.fallbacks, tally.wrong),
                (0, 50, 1),
                "{method} {verify:?}"
            );
        }
    }
}

#[test]
fn the_sample_is_the_first_packet_and_one_in_64() {
    for method in METHODS {
        let tally = both(method, "delay=1us", Verify::Sample, 129);
        assert_eq!((tally.accelerated, tally.checked), (129, 3));
        let tally = both(method, "delay=1us", Verify::Off, 129);
        assert_eq!((tally.accelerated, tally.checked), (129, 0));
    }
}

/// One channel's device is honest for long and has its packets sent unchecked; then another one lies.
#[test]
fn wrong_bytes_after_unchecked_packets_end_the_migration() {
    let method = Method::Lz4;
    let engines = engines(method, "wrong@2%,seed=5", Verify::Sample);
    let health = Arc::new(Health::default());
    let mut room = vec![0; LAYOUT.max_payload()];
    let mut encoder = engines.encoder(LAYOUT, &health).unwrap();
    let error = (0..100_000).find_map(|number| encoder.encode(&packet(number), &mut room).err());
    let Some(EncodeError::Distrusted {
        engine, unchecked, ..
    }) = error
    else {
        panic!("{error:?}");
    };
    assert_eq!(engine, "faulty");
    assert!(unchecked > 0 && health.tally().wrong == 1);
    assert_eq!(
        encoder.encode(&packet(1), &mut room),
        Err(EncodeError::AfterError { method })
    );
    // Every other encoder of the migration works in software from now on.
    let mut other = engines.encoder(LAYOUT, &health).unwrap();
    let before = health.tally();
    assert!(other.encode(&packet(1), &mut room).is_ok());
    let after = health.tally();
    assert_eq!(after.accelerated, before.accelerated);
    assert_eq!(after.fallbacks, before.fallbacks + 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any mixture of faults: with every packet checked, every packet is right.
    #[test]
    fn every_packet_is_right_despite_faults(
        method in prop::sample::select(&METHODS[..]),
        refuse in 0..60_u32,
        fail in 0..30_u32,
        late in 0..5_u32,
        lies in 0..5_u32,
        lengths in 0..10_u32,
        seed: u64,
    ) {
        let faults = format!(
            "refuse@{refuse}%,fail@{fail}%,timeout=1us@{late}%,wrong@{lies}%,corrupt@{lies}%,\
             short@{lengths}%,long@{lengths}%,nothing@{lengths}%,beyond@{lengths}%,seed={seed}"
        );
        let engines = engines(method, &faults, Verify::All);
        for tally in [encode(&engines, 60).unwrap(), decode(&engines, 60).unwrap()] {
            prop_assert_eq!(tally.accelerated + tally.fallbacks, 60);
        }
    }
}
