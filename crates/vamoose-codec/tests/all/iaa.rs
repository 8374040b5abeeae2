//! Engine iaa by modelled devices: whatever they do, packets are right, or the migration ends.
//!
//! Models in virtual time: what happens depends on their seed and nothing else.

use std::sync::Arc;

use idxd::{
    Kind, Queue, Shape, Tuning,
    offload::{Choice, Devices, OffloadCounters, Options},
};
use idxd_model::{Config, Faults, InjectedFault, Model, On, PortalKind};
use multifd::{Layout, Method};
use proptest::{collection::vec, prelude::*, sample::Index};
use vamoose_codec::{
    Accel, DecodeError, Decoder, EncodeError, Engines, Health, Registry, Settings, Tally, Verify,
};

use crate::common::pages::{self, PAGE};

const LAYOUT: Layout = Layout::X86;
const METHOD: Method = Method::Qpl;
/// Of the software that does what the devices leave.
const LEVELS: [i32; 3] = [0, 1, 6];

/// Engines by devices of a model.
struct Modelled {
    model: Model,
    devices: Arc<Devices>,
    level: i32,
    verify: Verify,
}

impl Modelled {
    fn new(devices: usize, faults: Faults, seed: u64) -> Self {
        let mut config = Config::devices(Kind::Iaa, devices);
        (config.faults, config.seed) = (faults, seed);
        let model = Model::deterministic(&config);
        let shape = Shape {
            members: 1,
            buffer_bytes: PAGE,
        };
        let tuning = Tuning {
            slots: 128,
            ..Tuning::default()
        };
        let queues = (0..devices).map(|device| {
            let queue = model.queue(device, 0, PortalKind::Enqcmd);
            Queue::new(queue, shape, tuning).unwrap()
        });
        let devices = Arc::new(Devices::new(queues));
        Self {
            model,
            devices,
            level: 0,
            verify: Verify::Sample,
        }
    }

    fn honest(devices: usize) -> Self {
        Self::new(devices, Faults::default(), 1)
    }

    fn engines(&self) -> Engines {
        let settings = Settings::new(METHOD, Some(self.level)).unwrap();
        let devices = self.devices.clone();
        let registry = Arc::new(Registry::with_iaa(move || Ok(devices.clone())));
        let engines = registry.choose(settings, Accel::Iaa, self.verify).unwrap();
        assert_eq!(engines.name(), "iaa");
        engines
    }

    /// Encodes `packets` packets, each after `before`, and decodes them in software.
    fn encode(
        &self,
        packets: u64,
        mut before: impl FnMut(u64),
    ) -> Result<(Tally, OffloadCounters), EncodeError> {
        let (engines, health) = (self.engines(), Arc::new(Health::default()));
        let mut encoder = engines.encoder(LAYOUT, &health)?;
        let mut room = vec![0; LAYOUT.max_payload()];
        for number in 0..packets {
            before(number);
            let sent = packet(number);
            let encoded = encoder.encode(&sent, &mut room)?;
            assert_eq!(encoded.method, METHOD);
            let received = in_software(encoded.payload, sent.len());
            assert!(received == Ok(sent), "packet {number}");
        }
        Ok((health.tally(), engines.device_work().unwrap()))
    }

    /// Encodes `packets` packets in software and decodes them, each after `before`.
    fn decode(
        &self,
        packets: u64,
        mut before: impl FnMut(u64),
    ) -> Result<(Tally, OffloadCounters), DecodeError> {
        let (engines, health) = (self.engines(), Arc::new(Health::default()));
        let mut encoder = vamoose_codec::encoder(engines.settings(), LAYOUT).unwrap();
        let mut decoder = engines.decoder(LAYOUT, &health);
        let mut room = vec![0; LAYOUT.max_payload()];
        for number in 0..packets {
            before(number);
            let sent = packet(number);
            let encoded = encoder.encode(&sent, &mut room).unwrap();
            let mut received = vec![0xee; sent.len()];
            decoder.decode(METHOD, encoded.payload, &mut received)?;
            assert!(received == sent, "packet {number} is wrong");
        }
        Ok((health.tally(), engines.device_work().unwrap()))
    }
}

fn in_software(payload: &[u8], len: usize) -> Result<Vec<u8>, DecodeError> {
    let mut pages = vec![0xee; len];
    Decoder::new(LAYOUT).decode(METHOD, payload, &mut pages)?;
    Ok(pages)
}

/// Pages of every kind; packets differ.
fn packet(number: u64) -> Vec<u8> {
    let of_kind = |kind| pages::pages(kind, number, 1 + usize::try_from(number % 5).unwrap());
    pages::Kind::ALL.map(of_kind).concat()
}

const PACKETS: u64 = 20;

/// Pages of the first `packets` packets.
fn pages_of(packets: u64) -> u64 {
    (0..packets).map(|number| 4 * (1 + number % 5)).sum()
}

fn all(work: OffloadCounters) -> u64 {
    work.by_device + work.refused + work.failed + work.overtaken
}

#[test]
fn devices_and_software_understand_each_other_at_every_level() {
    for devices in [1, 2] {
        for level in LEVELS {
            let mut modelled = Modelled::honest(devices);
            modelled.level = level;
            let (tally, work) = modelled.encode(PACKETS, |_| ()).unwrap();
            assert_eq!((tally.accelerated, tally.fallbacks), (PACKETS, 0));
            assert_eq!(all(work), pages_of(PACKETS));
            assert!(work.by_device > pages_of(PACKETS) / 2, "{work:?}");
            let encoded = work.by_device;
            let (tally, work) = modelled.decode(PACKETS, |_| ()).unwrap();
            assert_eq!((tally.accelerated, tally.fallbacks), (PACKETS, 0));
            assert!(work.by_device > encoded, "{work:?}");
        }
    }
}

#[test]
fn everything_goes_wrong_and_every_packet_is_right() {
    for seed in 0..40 {
        let devices = 1 + usize::try_from(seed % 2).unwrap();
        for verify in [Verify::Off, Verify::All] {
            let mut modelled = Modelled::new(devices, Faults::everything(), seed);
            modelled.level = LEVELS[usize::try_from(seed % 3).unwrap()];
            modelled.verify = verify;
            let (tally, _) = modelled.encode(PACKETS, |_| ()).unwrap();
            assert_eq!(tally.wrong, 0, "seed {seed}");
            let modelled = Modelled::new(devices, Faults::everything(), !seed);
            let (tally, _) = modelled.decode(PACKETS, |_| ()).unwrap();
            assert_eq!(tally.wrong, 0, "seed {seed}");
        }
    }
}

#[test]
fn a_wrong_byte_is_seen_in_the_first_packet_and_in_every_packet_if_all_are_checked() {
    for level in LEVELS {
        for verify in [Verify::Sample, Verify::All] {
            let mut modelled = Modelled::honest(2);
            (modelled.level, modelled.verify) = (level, verify);
            modelled
                .model
                .inject(On::any(), 0, u32::MAX, InjectedFault::Corrupt);
            for (tally, _) in [
                modelled.encode(PACKETS, |_| ()).unwrap(),
                modelled.decode(PACKETS, |_| ()).unwrap(),
            ] {
                assert_eq!(tally.wrong, 1, "level {level}");
                assert_eq!((tally.accelerated, tally.fallbacks), (0, PACKETS));
            }
        }
    }
}

/// The packets 1, 65, ... are checked.
#[test]
fn wrong_bytes_after_unchecked_packets_end_the_migration() {
    let wrong_at = |modelled: &Modelled, packet, at| {
        if packet == at {
            modelled
                .model
                .inject(On::any(), 0, u32::MAX, InjectedFault::Corrupt);
        }
    };
    let modelled = Modelled::honest(1);
    let encoded = modelled.encode(70, |packet| wrong_at(&modelled, packet, 64));
    assert_eq!(
        encoded.unwrap_err(),
        EncodeError::Distrusted {
            method: METHOD,
            engine: "iaa",
            unchecked: 63
        }
    );
    let modelled = Modelled::honest(1);
    let decoded = modelled.decode(70, |packet| wrong_at(&modelled, packet, 64));
    assert_eq!(
        decoded.unwrap_err(),
        DecodeError::Distrusted {
            method: METHOD,
            engine: "iaa",
            unchecked: 63
        }
    );
    // If all are, none has gone out.
    let mut modelled = Modelled::honest(1);
    modelled.verify = Verify::All;
    let (tally, _) = modelled
        .encode(70, |packet| wrong_at(&modelled, packet, 50))
        .unwrap();
    assert_eq!((tally.wrong, tally.accelerated), (1, 50));
}

#[test]
fn queues_that_are_always_full_leave_the_pages_to_the_processor() {
    for level in LEVELS {
        let mut modelled = Modelled::honest(2);
        modelled.level = level;
        for device in 0..2 {
            modelled.model.refuse(device, 0, u32::MAX);
        }
        let (tally, work) = modelled.encode(PACKETS, |_| ()).unwrap();
        assert_eq!((tally.fallbacks, work.by_device), (0, 0));
        assert_eq!(work.refused, pages_of(PACKETS));
        let (tally, work) = modelled.decode(PACKETS, |_| ()).unwrap();
        assert_eq!((tally.fallbacks, work.by_device), (0, 0));
    }
}

#[test]
fn a_device_that_is_reset_leaves_its_pages_to_the_others() {
    for (devices, goes_on) in [(1, false), (2, true)] {
        for encodes in [true, false] {
            let modelled = Modelled::honest(devices);
            let mut at_reset = 0;
            let reset = |packet| {
                if packet == PACKETS / 2 {
                    modelled.model.reset(0);
                    at_reset = modelled.devices.work().by_device;
                }
            };
            let work = if encodes {
                modelled.encode(PACKETS, reset).unwrap().1
            } else {
                modelled.decode(PACKETS, reset).unwrap().1
            };
            assert!(at_reset > 0);
            assert_eq!(work.by_device > at_reset, goes_on, "{work:?}");
        }
    }
}

#[test]
fn devices_that_are_gone_are_given_up() {
    let modelled = Modelled::honest(1);
    let (tally, _) = modelled
        .encode(PACKETS, |packet| {
            if packet == 5 {
                modelled.model.unplug(0);
            }
        })
        .unwrap();
    // The packet at which it shows is finished by the processor.
    assert_eq!((tally.accelerated, tally.fallbacks), (6, PACKETS - 6));
    assert!(modelled.devices.are_gone());
}

#[test]
fn devices_that_never_answer_are_left_alone() {
    for level in LEVELS {
        let mut modelled = Modelled::honest(2);
        modelled.level = level;
        modelled
            .model
            .inject(On::any(), 0, u32::MAX, InjectedFault::Stuck);
        let (tally, work) = modelled.encode(PACKETS, |_| ()).unwrap();
        // The processor has done every page of these packets.
        assert_eq!((work.by_device, tally.accelerated), (0, PACKETS));
        let (_, work) = modelled.decode(PACKETS, |_| ()).unwrap();
        assert_eq!(work.by_device, 0);
        // What they have been given they keep: no more than there are slots.
        for queue in modelled.devices.queues().map(Queue::statistics) {
            assert!(queue.operations <= u64::from(queue.entries), "{queue:?}");
        }
    }
}

#[test]
fn larger_pages_are_decoded_in_software() {
    let layout = Layout::new(16_384).unwrap();
    let (engines, health) = (Modelled::honest(1).engines(), Arc::new(Health::default()));
    let encoded = engines.encoder(layout, &health);
    assert!(matches!(encoded, Err(EncodeError::PageSize { .. })));
    let raw = pages::pages(pages::Kind::Random, 1, 4);
    let payload = [&16_384_u32.to_be_bytes()[..], &raw].concat();
    let mut decoded = vec![0; raw.len()];
    let mut decoder = engines.decoder(layout, &health);
    assert_eq!(decoder.decode(METHOD, &payload, &mut decoded), Ok(()));
    assert!(decoded == raw);
    assert_eq!(health.tally(), Tally::default());
}

#[test]
fn a_host_without_devices_says_so() {
    let empty = tempfile::tempdir().unwrap();
    let registry = |choice: &str| {
        let options = Options {
            root: idxd::discovery::Root::under(empty.path()),
            ..Options::pages(PAGE)
        };
        let choice: Choice = choice.parse().unwrap();
        Arc::new(Registry::with_iaa(move || {
            let opened = Devices::open(Kind::Iaa, &choice, &options);
            opened.map(Arc::new).map_err(|error| error.to_string())
        }))
    };
    let choose = |choice: &str, accel| {
        let settings = Settings::new(METHOD, Some(1)).unwrap();
        registry(choice).choose(settings, accel, Verify::Off)
    };
    assert!(Choice::default() == Choice::Auto);
    for choice in ["auto", "wq1.0"] {
        let error = choose(choice, Accel::Iaa).err().unwrap();
        let error = std::error::Error::source(&error).unwrap().to_string();
        assert!(error.contains("work queue"), "{error}");
        let engines = choose(choice, Accel::Auto).unwrap();
        assert_eq!(engines.name(), engines.settings().engine());
        assert_eq!(engines.device_work(), None);
    }
    let modelled = |accel| {
        let open = || {
            let devices = idxd_model::devices(Kind::Iaa, 1, &Options::pages(PAGE)).unwrap();
            Ok(Arc::new(devices))
        };
        let settings = Settings::new(METHOD, Some(1)).unwrap();
        let registry = Arc::new(Registry::with_iaa(open));
        registry.choose(settings, accel, Verify::Off).unwrap()
    };
    assert_eq!(modelled(Accel::Auto).name(), "iaa");
    assert_ne!(modelled(Accel::None).name(), "iaa");
}

/// A payload of a packet by software, in which bits are flipped.
fn hostile() -> impl Strategy<Value = (Vec<u8>, usize)> {
    let flips = vec((any::<Index>(), 0..8u8), 1..4);
    (0..PACKETS, 0..=6i32, flips, any::<bool>()).prop_map(|(number, level, flips, cut)| {
        let sent = packet(number);
        let settings = Settings::new(METHOD, Some(level)).unwrap();
        let mut room = vec![0; LAYOUT.max_payload()];
        let mut encoder = vamoose_codec::encoder(&settings, LAYOUT).unwrap();
        let mut payload = encoder.encode(&sent, &mut room).unwrap().payload.to_vec();
        for (at, bit) in &flips {
            let at = at.index(payload.len());
            payload[at] ^= 1 << bit;
        }
        if cut {
            payload.pop();
        }
        (payload, sent.len())
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn hostile_payloads_have_softwares_verdict((payload, len) in hostile()) {
        let mut modelled = Modelled::honest(1);
        modelled.verify = Verify::Off;
        let mut pages = vec![0xee; len];
        let mut decoder = modelled.engines().decoder(LAYOUT, &Arc::new(Health::default()));
        let result = decoder.decode(METHOD, &payload, &mut pages).map(|()| pages);
        match in_software(&payload, len) {
            // A device ignores what follows a stream (`idxd::iaa::decompress`); software does not.
            Err(DecodeError::Corrupt { reason, .. }) if reason.ends_with("ends before it should") => {}
            verdict => prop_assert_eq!(result, verdict),
        }
    }
}
