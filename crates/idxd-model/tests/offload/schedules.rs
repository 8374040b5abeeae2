//! Everything at once: each page has one verdict, the right one; time is bounded; and a seed repeats itself.

use proptest::{collection::vec, prelude::*};

use idxd_model::{Faults, InjectedFault, On, Page};

use super::{
    compression,
    faults::{any_faults, harmless},
    *,
};

/// What happens before a call.
#[derive(Clone, Copy, Debug)]
enum Event {
    Nothing,
    /// A device is reset, or goes away for good.
    Reset(usize),
    Unplug(usize),
    /// A queue is full: so often, or for ever.
    Full(usize, u32),
    Injected(InjectedFault),
    Absent(usize),
}

#[derive(Clone, Debug)]
struct Schedule {
    faults: Faults,
    devices: usize,
    slower: u32,
    /// An event, how many pages, and microseconds of something else.
    calls: Vec<(Event, usize, u64)>,
    seed: u64,
}

/// What must be the same each time.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    work: OffloadCounters,
    trace: u64,
    took: Duration,
}

fn faults() -> impl Strategy<Value = Faults> {
    prop_oneof![
        Just(Faults::default()),
        Just(Faults::everything()),
        any_faults(harmless(), 6)
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let times = prop_oneof![1..20u32, Just(u32::MAX)];
    prop_oneof![
        6 => Just(Event::Nothing),
        1 => (0..3usize).prop_map(Event::Reset),
        1 => (0..3usize).prop_map(Event::Unplug),
        1 => (0..3usize, times).prop_map(|(device, times)| Event::Full(device, times)),
        2 => harmless().prop_map(Event::Injected),
        1 => (0..128usize).prop_map(Event::Absent),
    ]
}

fn schedule() -> impl Strategy<Value = Schedule> {
    let call = (
        event(),
        0..=128usize,
        prop_oneof![Just(0), 0..50u64, 0..5000u64],
    );
    let slower = prop_oneof![4 => Just(1), 1 => Just(20), 1 => Just(1000)];
    (faults(), 0..=3usize, slower, vec(call, 1..10), any::<u64>()).prop_map(
        |(faults, devices, slower, calls, seed)| Schedule {
            faults,
            devices,
            slower,
            calls,
            seed,
        },
    )
}

impl Schedule {
    fn model(&self, kind: Kind) -> Model {
        let mut config = Config::devices(kind, 3);
        config.faults = self.faults.clone();
        config.seed = self.seed;
        config.speeds = config.speeds.slower(self.slower);
        Model::deterministic(&config)
    }
}

impl Event {
    fn happen(self, model: &Model, pages: &[u64]) {
        match self {
            Self::Nothing => {}
            Self::Reset(device) => {
                model.reset(device);
                model.enable(device);
            }
            Self::Unplug(device) => model.unplug(device),
            Self::Full(device, times) => model.refuse(device, 0, times),
            Self::Injected(fault) => model.inject(On::any(), 0, 1, fault),
            Self::Absent(page) => {
                let page = pages.get(page).copied().unwrap_or_default();
                model.pages().set(page, 4096, Page::Absent);
            }
        }
    }
}

/// Two batches at a time, as a caller has them who encodes one while the next is out.
fn scan(schedule: &Schedule, memory: &Memory) -> Seen {
    let model = schedule.model(Kind::Dsa);
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, schedule.devices, BATCHES);
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, std::num::NonZeroU32::new(3));
    let (mut out, mut pages, mut passed) = (None, 0, Duration::ZERO);
    let finish = |scanner: &mut ZeroScanner, batch: Batch, pages: &[u64]| {
        let (mut times, mut verdicts) = (vec![0; pages.len()], vec![false; pages.len()]);
        let mut by_processor = |page: usize| {
            times[page] += 1;
            memory.is_zero(page)
        };
        let result = scanner.finish(batch, pages, &mut by_processor, &mut verdicts);
        assert_eq!(result, Ok(()));
        for (page, verdict) in verdicts.iter().enumerate() {
            assert_eq!(*verdict, memory.is_zero(page), "page {page}");
        }
        assert!(times.iter().all(|times| *times <= 1));
    };
    for (event, count, meanwhile) in &schedule.calls {
        let addresses = memory.addresses(*count);
        // To disable a device takes as long as what it has.
        let before = model.now();
        event.happen(&model, &addresses);
        passed += model.now() - before;
        let batch = scanner.start(&addresses);
        pages += count;
        let time = Duration::from_micros(*meanwhile);
        pass(&clock, time);
        passed += time;
        if let Some((batch, addresses)) = out.replace((batch, addresses)) {
            finish(&mut scanner, batch, &addresses);
        }
    }
    if let Some((batch, addresses)) = out {
        finish(&mut scanner, batch, &addresses);
    }
    let (work, took) = (devices.work(), model.now());
    assert_eq!(sum(work), pages as u64);
    let calls = u32::try_from(schedule.calls.len()).unwrap();
    assert!(
        took <= passed + Duration::from_micros(50) * calls,
        "{took:?}"
    );
    Seen {
        work,
        trace: model.trace(),
        took,
    }
}

fn round_trip(schedule: &Schedule, memory: &Memory) -> Seen {
    let model = schedule.model(Kind::Iaa);
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, schedule.devices, PAGES);
    let mut compressor = Compressor::new(devices.clone(), PAGE, 128);
    let mut decompressor = Decompressor::new(devices.clone(), PAGE);
    // A late device reads its sources at any time: what it finds must be the same each time.
    let (mut pages, mut kept) = (0, Vec::new());
    for (event, count, meanwhile) in &schedule.calls {
        let count = count / 2;
        event.happen(&model, &memory.addresses(count));
        let before = model.now();
        let bytes = &memory.bytes()[..count * PAGE];
        let (streams, _) = compression::compress(&mut compressor, bytes);
        pages += count as u64;
        pages += compression::decompress(&mut decompressor, &streams, bytes);
        let most = Duration::from_micros(2 * (count as u64 * 5 + 150));
        assert!(
            model.now() - before <= most,
            "{count} pages: {:?}",
            model.now() - before
        );
        kept.push(streams);
        pass(&clock, Duration::from_micros(*meanwhile));
    }
    let work = devices.work();
    assert_eq!(sum(work), pages);
    Seen {
        work,
        trace: model.trace(),
        took: model.now(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn each_page_has_one_verdict_and_it_is_the_processors(schedule in schedule()) {
        let memory = Memory::of(&contents(128));
        let seen = scan(&schedule, &memory);
        prop_assert_eq!(scan(&schedule, &memory), seen);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn pages_come_back_from_their_streams(schedule in schedule()) {
        let memory = Memory::of(&contents(64));
        let seen = round_trip(&schedule, &memory);
        prop_assert_eq!(round_trip(&schedule, &memory), seen);
    }
}
