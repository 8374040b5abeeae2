//! Which queue is next.

use super::*;
use idxd_model::{InjectedFault, On};

/// Operations that each device has taken.
fn operations(devices: &Devices) -> Vec<u64> {
    statistics(devices).iter().map(|of| of.operations).collect()
}

fn scan(devices: &Arc<Devices>, clock: &Arc<dyn Submit>, times: usize) {
    let memory = Memory::of(&contents(64));
    let pages = memory.addresses(64);
    let mut scanner = ZeroScanner::new(devices.clone(), 4096, None);
    for _ in 0..times {
        let batch = scanner.start(&pages);
        pass(clock, Duration::from_millis(1));
        let mut verdicts = [false; 64];
        scanner
            .finish(
                batch,
                &pages,
                &mut |page| memory.is_zero(page),
                &mut verdicts,
            )
            .unwrap();
        assert!((0..64).all(|page| verdicts[page] == memory.is_zero(page)));
    }
}

#[test]
fn they_take_turns_and_those_that_take_nothing_are_tried_again() {
    let model = Model::deterministic(&Config::devices(Kind::Dsa, 4));
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 4, BATCHES);
    scan(&devices, &clock, 10);
    assert_eq!(operations(&devices), [192, 192, 128, 128]);
    model.refuse(1, 0, u32::MAX);
    model.refuse(3, 0, u32::MAX);
    scan(&devices, &clock, 100);
    let [first, second, third, fourth] = operations(&devices)[..] else {
        panic!()
    };
    assert_eq!((second, fourth), (192, 128));
    assert!(first + third > 90 * 64, "{first} {third}");
    model.refuse(1, 0, 0);
    model.refuse(3, 0, 0);
    scan(&devices, &clock, 1100);
    assert!(operations(&devices)[1] > 192 && operations(&devices)[3] > 128);
}

#[test]
fn a_queue_that_is_always_full_is_rarely_tried() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 1, BATCHES);
    model.refuse(0, 0, u32::MAX);
    scan(&devices, &clock, 5000);
    let statistics = statistics(&devices)[0];
    assert!((5..20).contains(&statistics.full), "{statistics:?}");
    assert_eq!(devices.work().refused, 5000 * 64);
    // As soon as it takes something again it takes everything.
    model.refuse(0, 0, 0);
    scan(&devices, &clock, 1024);
    let before = operations(&devices)[0];
    scan(&devices, &clock, 10);
    assert_eq!(operations(&devices)[0] - before, 640);
}

#[test]
fn devices_that_go_away_one_after_the_other_are_not_missed() {
    let model = Model::deterministic(&Config::devices(Kind::Dsa, 3));
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 3, BATCHES);
    scan(&devices, &clock, 6);
    model.reset(0);
    scan(&devices, &clock, 6);
    model.unplug(1);
    scan(&devices, &clock, 6);
    model.fork();
    scan(&devices, &clock, 6);
    assert_eq!(sum(devices.work()), 24 * 64);
    assert!(devices.work().by_device >= 16 * 64, "{:?}", devices.work());
}

#[test]
fn errors_of_the_hardware_are_the_processors_work() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 1, BATCHES);
    model.inject(On::batch(), 0, 1, InjectedFault::ListFault(1));
    model.inject(On::batch(), 0, 1, InjectedFault::Status(0x22));
    scan(&devices, &clock, 4);
    // One page of the first; none of the second, and then it is left alone once.
    let work = devices.work();
    assert_eq!((work.by_device, work.failed, work.refused), (65, 127, 64));
}
