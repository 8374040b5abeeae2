//! Copies, and who writes to them when.

use std::{panic::AssertUnwindSafe, thread};

use super::*;
use idxd_model::{InjectedFault, On, Page};

/// Source and destination of so many pages.
pub(crate) struct Areas {
    pub(crate) source: Memory,
    pub(crate) destination: Memory,
    count: usize,
}

impl Areas {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            source: Memory::of(&contents(count)),
            destination: Memory::of(&vec![9; count * PAGE]),
            count,
        }
    }

    pub(crate) fn moves(&self) -> Vec<Move> {
        let (from, to) = (
            self.source.addresses(self.count),
            self.destination.addresses(self.count),
        );
        let pairs = from.into_iter().zip(to);
        pairs
            .map(|(source, destination)| Move {
                source,
                destination,
                len: 4096,
            })
            .collect()
    }

    /// Copies; then the destination is used for something else, and nothing writes to it any more.
    pub(crate) fn copy(&mut self, copier: &mut Copier, mut after: impl FnMut()) {
        let moves = self.moves();
        // SAFETY: nothing refers to the destination meanwhile.
        unsafe { copier.copy(&moves, &mut |index| by_processor(moves[index])) };
        let bytes = self.count * PAGE;
        assert!(self.destination.bytes()[..bytes] == self.source.bytes()[..bytes]);
        let destination = self.destination.start;
        self.destination.words[destination..].fill(0x0707_0707_0707_0707);
        after();
        assert!(
            self.destination.bytes()[..bytes]
                .iter()
                .all(|byte| *byte == 7)
        );
    }
}

fn by_processor(of: Move) {
    // SAFETY: both are pages of areas that live, and nothing refers to them meanwhile.
    unsafe {
        std::ptr::copy_nonoverlapping(
            of.source as *const u8,
            of.destination as *mut u8,
            of.len as usize,
        );
    }
}

const LONG: Duration = Duration::from_millis(10);

#[test]
fn all_moves_are_copied() {
    let model = Model::deterministic(&Config::devices(Kind::Dsa, 2));
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 2, BATCHES);
    let mut copier = Copier::new(devices.clone());
    for count in [128, 64, 300, 7, 8, 1, 0] {
        Areas::new(count).copy(&mut copier, || pass(&clock, LONG));
    }
    let work = devices.work();
    assert!(work.by_device > 150, "{work:?}");
    assert_eq!(sum(work), 508);
}

#[test]
fn without_devices_the_processor_does_it() {
    let devices = Arc::new(Devices::none());
    Areas::new(64).copy(&mut Copier::new(devices.clone()), || ());
    assert_eq!(devices.work().refused, 64);
}

#[test]
fn the_processor_copies_pages_that_fault() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 1, BATCHES);
    let mut areas = Areas::new(64);
    let moves = areas.moves();
    model.pages().set(moves[63].source, 4096, Page::Absent);
    model
        .pages()
        .set(moves[62].destination, 4096, Page::ReadOnly);
    areas.copy(&mut Copier::new(devices.clone()), || pass(&clock, LONG));
    let work = devices.work();
    assert_eq!((work.failed, work.by_device, work.overtaken), (2, 30, 32));
}

#[test]
fn a_device_that_only_meets_faults_is_left_alone_until_the_pages_are_there() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 1, BATCHES);
    let mut areas = Areas::new(64);
    let mut copier = Copier::new(devices.clone());
    let (start, length) = (areas.moves()[0].destination, 64 * PAGE as u64);
    model.pages().set(start, length, Page::Absent);
    for _ in 0..200 {
        areas.copy(&mut copier, || pass(&clock, Duration::from_micros(1)));
    }
    assert!(statistics(&devices)[0].batches < 12, "{devices:?}");
    assert_eq!(devices.work().by_device, 0);
    model.pages().set(start, length, Page::Present);
    for _ in 0..200 {
        areas.copy(&mut copier, || pass(&clock, Duration::from_micros(1)));
    }
    assert!(devices.work().by_device > 64, "{devices:?}");
}

#[test]
fn a_late_device_never_overwrites_newer_bytes() {
    let late = Duration::from_secs(2);
    for fault in [
        InjectedFault::Late(late),
        InjectedFault::Slow(late),
        InjectedFault::RecordLate(late),
        InjectedFault::RecordLost,
        InjectedFault::Stuck,
        InjectedFault::StuckEngine,
        InjectedFault::Late(Duration::from_millis(1)),
    ] {
        let model = Model::deterministic(&Config::devices(Kind::Dsa, 2));
        let clock = model.queue(0, 0, PortalKind::Enqcmd);
        let devices = devices(&model, 2, BATCHES);
        model.inject(On::member(3), 0, 1, fault);
        let mut copier = Copier::new(devices.clone());
        for _ in 0..6 {
            Areas::new(64).copy(&mut copier, || pass(&clock, 2 * late));
        }
        // Only the queue of the device that did not answer is closed.
        let dead = devices.queues().filter(|queue| queue.is_dead()).count();
        let answers = matches!(fault, InjectedFault::Late(time) if time < late)
            || fault == InjectedFault::RecordLost;
        assert_eq!(dead, usize::from(!answers), "{fault:?}");
        assert_eq!(sum(devices.work()), 6 * 64);
    }
}

#[test]
fn a_panic_does_not_return_before_the_device_is_done() {
    let model = Model::deterministic(&Config::dsa());
    let clock = model.queue(0, 0, PortalKind::Enqcmd);
    let devices = devices(&model, 1, BATCHES);
    model.inject(
        On::any(),
        0,
        64,
        InjectedFault::Late(Duration::from_millis(1)),
    );
    let mut areas = Areas::new(64);
    let moves = areas.moves();
    let mut copier = Copier::new(devices.clone());
    let panics = std::panic::catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: nothing refers to the destination meanwhile.
        unsafe { copier.copy(&moves, &mut |_| panic!("on purpose")) };
    }));
    assert!(panics.is_err());
    let start = areas.destination.start;
    areas.destination.words[start..].fill(0);
    pass(&clock, LONG);
    assert!(areas.destination.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn a_device_that_is_slower_than_the_processor_is_left_alone() {
    let mut config = Config::dsa();
    config.speeds = config.speeds.slower(1000);
    let model = Model::deterministic(&config);
    let devices = devices(&model, 1, BATCHES);
    let mut copier = Copier::new(devices.clone());
    for _ in 0..200 {
        Areas::new(64).copy(&mut copier, || ());
    }
    assert!(statistics(&devices)[0].batches < 12, "{devices:?}");
    assert!(!devices.are_gone());
}

#[test]
fn others_that_use_a_queue_that_is_closed_go_on() {
    let model = Model::timed(&Config::dsa());
    let devices = devices(&model, 1, BATCHES);
    model.inject(On::any(), 40, 1, InjectedFault::Stuck);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut copier = Copier::new(devices.clone());
                for _ in 0..10 {
                    Areas::new(32).copy(&mut copier, || ());
                }
            });
        }
    });
    assert!(devices.are_gone());
    assert_eq!(sum(devices.work()), 3 * 10 * 32);
}
