//! Guests that write while they are migrated: whatever the options, the destination has the source's memory, byte by
//! byte, at the moment of the switchover, and the guest runs on there.

use std::{
    num::NonZeroU64,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::common::{
    Here, MIB, Outcome, PAGE, Rig, Rng, Shape, Stage, Step, There, Watchdog, address_of, by_dsas,
    dsas, engines, expect_equal, listen, lock, loopback, migrate, migrate_over, move_guest,
    nothing_to_migrate, plain,
    sessions::{Hosts, acceptor_for, way_to},
    snapshot::Snapshot,
    source_config, source_config_by,
};
use idxd_model::{Config, Model};
use multifd::Method;
use rustix::mm::{Advice, madvise};
use testguest::{Backing, Fill, Pattern};
use vamoose_codec::{Engines, Settings, Verify};
use vamoose_link::MethodChoice;
use vamoose_live::{
    AutoConverge, Destination, DestinationConfig, DestinationError, DestinationGuest, GuestError,
    GuestLocation, OnTimeout, Phase, Ram, RamBlock, Source, SourceError, SourceGuest, Status,
    Switchover, ZeroPageDetection, chain, dirty::SharedBitmap, session::PageStore,
};
use vm_memory::Bytes;

/// Of each method; with all methods there are a hundred.
const RUNS: u64 = 13;

#[test]
fn none() {
    any_guest_migrates_with(&engines(Method::None).into());
}

#[test]
fn zlib() {
    any_guest_migrates_with(&engines(Method::Zlib).into());
}

#[test]
fn zstd() {
    any_guest_migrates_with(&engines(Method::Zstd).into());
}

#[test]
fn lz4() {
    any_guest_migrates_with(&engines(Method::Lz4).into());
}

#[test]
fn qpl() {
    any_guest_migrates_with(&engines(Method::Qpl).into());
}

#[test]
fn qatzip() {
    any_guest_migrates_with(&engines(Method::Qatzip).into());
}

#[test]
fn zstd_frames() {
    any_guest_migrates_with(&engines(Method::ZstdFrames).into());
}

#[test]
fn auto() {
    let engines = Engines::software(Settings::default());
    any_guest_migrates_with(&MethodChoice::Adaptive(engines));
}

/// Guests, hosts and options at random, with every rig and number of channels.
fn any_guest_migrates_with(method: &MethodChoice) {
    let rigs = Rig::all();
    if rigs.is_empty() {
        return;
    }
    let mut differences = 0;
    for run in 0..RUNS {
        let mut rng = Rng::new(run);
        let turn = usize::try_from(run).unwrap();
        let rig = rigs[turn % rigs.len()];
        let shape = random_shape(rig, &mut rng);
        let mut config = source_config_by(method.clone());
        config.channels = [1, 2, 8][turn / rigs.len() % 3];
        config.packet_bytes = rng.pick(&[64 << 10, 512 << 10, 4 << 20]);
        config.zero_page_detection = rng.pick(&[ZeroPageDetection::Cpu, ZeroPageDetection::None]);
        config.downtime_limit = Duration::from_millis(rng.pick(&[1, 30, 300]));
        config.max_bandwidth = rng.chance(20).then(|| NonZeroU64::new(64 * MIB).unwrap());
        let rounds = 1 + rng.below(4);
        let hosts = rng.chance(50).then(Hosts::new);
        config.delta = method.takes_differences() && rng.chance(70);
        let context = format!(
            "{shape:?}, {} channels, {rounds} rounds, a session: {}",
            config.channels,
            hosts.is_some()
        );

        let stage = Stage::new(&shape);
        let memory_is_zero = rng.chance(50);
        if !memory_is_zero {
            litter(&stage.there, &mut rng);
        }
        let punch_holes = rng.chance(70);
        let mut destination = stage.destination_at(acceptor_for(hosts.as_ref()), |config| {
            (config.memory_is_zero, config.punch_holes) = (memory_is_zero, punch_holes);
        });
        let to = way_to(hosts.as_ref(), &destination);
        let mut here = Here::new(&stage).switching({
            let stage = stage.clone();
            move |status| disturb(&stage, &mut rng, status, rounds)
        });
        let mut there = There::new(&stage);
        let source = stage.source(config);
        let handle = source.handle();
        let outcome = migrate_over(&to, source, &mut here, &mut destination, &mut there);
        let (status, arrival) = outcome.expect_done();
        assert_eq!(status.status, Phase::Completed, "{context}");
        assert!(status.ram.dirty_sync_count > rounds, "{context}");
        differences += handle.moved().delta_pages;
        // All but the device state.
        let (sent, received) = (status.ram.transferred, arrival.moved.received_bytes);
        assert!(
            (received..received + 8192).contains(&sent),
            "{sent} and {received} bytes, {context}"
        );
        stage.expect_there();
    }
    if !method.takes_differences() {
        assert_eq!(differences, 0);
    }
}

/// The guest moves only after a page was sent as a difference.
#[test]
fn pages_that_are_sent_again_go_as_differences() {
    for method in [Method::Lz4, Method::ZstdFrames] {
        let _watchdog = Watchdog::new(format!("differences by {method}"));
        let hosts = Hosts::new();
        let stage = Stage::new(&Shape::default());
        let mut destination = stage.destination_at(acceptor_for(Some(&hosts)), |_| {});
        let to = way_to(Some(&hosts), &destination);
        let mut config = source_config(method);
        config.delta = true;
        let source = stage.source(config);
        let handle = source.handle();
        let mut here = Here::new(&stage).switching(move |_| match handle.moved().delta_pages {
            0 => Switchover::Forbid,
            _ => Switchover::Auto,
        });
        let mut there = There::new(&stage);
        let outcome = migrate_over(&to, source, &mut here, &mut destination, &mut there);
        outcome.expect_done();
        stage.expect_there();
    }
}

/// The second guest is so slow that the list of what the first one has left is there before its pages.
#[test]
fn guests_that_are_alike_move_their_pages_once() {
    let _watchdog = Watchdog::new("guests that are alike".to_owned());
    let mut hosts = Hosts::new();
    hosts.near.takes_store = true;
    hosts.far.page_store = Some(PageStore::new(64 << 20, Vec::new()).unwrap());
    let mut shared = Vec::new();
    for limit in [None, NonZeroU64::new(2 * MIB)] {
        let stage = Stage::new(&Shape {
            rate: Some(1000),
            working_set: Some(2 * MIB..3 * MIB),
            ..Shape::default()
        });
        let mut destination = stage.destination_at(acceptor_for(Some(&hosts)), |_| {});
        let to = way_to(Some(&hosts), &destination);
        let mut config = source_config(Method::ZstdFrames);
        config.max_bandwidth = limit;
        let source = stage.source(config);
        let handle = source.handle();
        let begun = source.handle();
        let mut here = Here::new(&stage).switching(move |_| {
            begun.set_max_bandwidth(None);
            Switchover::Auto
        });
        let mut there = There::new(&stage);
        let outcome = migrate_over(&to, source, &mut here, &mut destination, &mut there);
        outcome.expect_done();
        stage.expect_there();
        shared.push(handle.moved().shared_pages);
    }
    assert!(shared[0] < 100 && shared[1] > 500, "{shared:?}");
}

fn random_shape(rig: Rig, rng: &mut Rng) -> Shape {
    let last = MIB * rng.pick(&[1, 3, 8]) + PAGE as u64 * rng.below(9);
    let working_set = 2 * MIB..2 * MIB + PAGE as u64 * (1 + rng.below(256));
    Shape {
        rig,
        backing: rng.pick(&[Backing::Anonymous, Backing::Memfd]),
        blocks: rng.pick(&[
            vec![8 * MIB],
            vec![2 * MIB, last],
            vec![2 * MIB, 4 * MIB, last],
        ]),
        vcpus: rng.pick(&[1, 2, 4]),
        pattern: rng.pick(&[Pattern::Sequential, Pattern::Random]),
        rate: rng.pick(&[Some(1_000), Some(20_000), Some(200_000)]),
        working_set: rng.chance(30).then_some(working_set),
        fill: rng.pick(&[Fill::Untouched, Fill::Zero, Fill::Mixed, Fill::Mixed]),
    }
}

/// Leaves something in memory that has to be gone.
fn litter(ram: &Ram, rng: &mut Rng) {
    for block in ram.blocks() {
        let memory = block.memory();
        for _ in 0..rng.below(100) {
            let pages = 1 + rng.below(80);
            let start = PAGE as u64 * rng.below((block.len() / PAGE) as u64);
            let len = usize::try_from(pages * PAGE as u64).unwrap();
            let start = usize::try_from(start).unwrap();
            let litter = vec![0xa5; len.min(block.len() - start)];
            memory.write_slice(&litter, start).unwrap();
        }
    }
}

/// Between two rounds: stops the guest, lets it go on, changes its speed.
fn disturb(stage: &Stage, rng: &mut Rng, status: &Status, rounds: u64) -> Switchover {
    match rng.below(4) {
        0 => stage.guest.pause(),
        1 => stage.guest.resume().unwrap(),
        _ => stage.guest.throttle(rng.pick(&[0, 50, 99])),
    }
    if status.ram.dirty_sync_count <= rounds {
        Switchover::Forbid
    } else if status.ram.dirty_sync_count > rounds + 4 {
        // One that writes too fast for the downtime limit.
        Switchover::Force
    } else {
        Switchover::Auto
    }
}

#[test]
fn there_and_back_again() {
    for rig in Rig::all() {
        let _watchdog = Watchdog::new(format!("there and back with {rig:?}"));
        let shape = Shape {
            rig,
            ..Shape::default()
        };
        let there = Stage::new(&shape);
        let (memory, ram) = (there.guest.memory().clone(), there.ram.clone());
        move_guest(&there, source_config(Method::Zstd));
        let arrived = there.arrived().unwrap();
        let before = arrived.written();
        // Home is full of what the guest left behind.
        let back = Stage::between(&shape, (arrived, there.there.clone()), (memory, ram));
        move_guest(&back, source_config(Method::Lz4));
        assert!(back.arrived().unwrap().written() >= before);
    }
}

#[test]
fn untouched_memory_is_not_sent() {
    for rig in Rig::all() {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let _watchdog = Watchdog::new(format!("untouched memory with {rig:?}, {backing:?}"));
            let shape = Shape {
                rig,
                backing,
                blocks: vec![2 * MIB, 256 * MIB],
                working_set: Some(4 * MIB..5 * MIB),
                fill: Fill::Untouched,
                ..Shape::default()
            };
            let stage = Stage::new(&shape);
            let source = stage.source(source_config(Method::None));
            let outcome = migrate(
                source,
                &mut Here::new(&stage).with_rounds(2),
                &mut stage.destination(|_| {}),
                &mut There::new(&stage),
            );
            let (status, _) = outcome.expect_done();
            let sent = (status.ram.normal + status.ram.duplicate) * PAGE as u64;
            // Some rounds of the working set. What lies in a huge page of private memory is there, all of it.
            let rounds = status.ram.dirty_sync_count + 1;
            assert!(sent <= rounds * 8 * MIB, "{sent} bytes in {rounds} rounds");
            stage.expect_there();
        }
    }
}

#[test]
fn the_vmm_says_when_to_switch_over() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("Forbid, then Force".to_owned());
    // It never converges by itself.
    let shape = Shape {
        rate: None,
        ..Shape::default()
    };
    let stage = Stage::new(&shape);
    let mut config = source_config(Method::None);
    config.downtime_limit = Duration::ZERO;
    let mut rounds = 0;
    let mut here = Here::new(&stage).switching(|status| {
        rounds += 1;
        assert_eq!(status.ram.dirty_sync_count, rounds);
        assert_eq!(status.status, Phase::Active);
        if rounds < 6 {
            Switchover::Forbid
        } else {
            Switchover::Force
        }
    });
    let mut destination = stage.destination(|_| {});
    let outcome = migrate(
        stage.source(config),
        &mut here,
        &mut destination,
        &mut There::new(&stage),
    );
    let (status, _) = outcome.expect_done();
    drop(here);
    assert_eq!(rounds, 6);
    assert_eq!(status.ram.dirty_sync_count, 7);
    let (downtime, parts) = (status.downtime.unwrap(), status.downtime_parts.unwrap());
    let sum = parts.last_round + parts.device_state + parts.load + parts.commit;
    assert_eq!(downtime, sum, "{parts}");
    let report = serde_json::to_value(&status).unwrap();
    for part in ["last-round", "device-state", "load", "commit"] {
        assert!(report["downtime-parts"][part].is_u64(), "{part}: {report}");
    }
    stage.expect_there();
}

/// The guest writes faster than the link, and is slowed down until it fits.
#[test]
fn a_guest_that_writes_too_fast_is_throttled_until_it_converges() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("auto-converge".to_owned());
    let stage = Stage::new(&Shape {
        blocks: vec![32 * MIB],
        rate: None,
        ..Shape::default()
    });
    let mut config = source_config(Method::None);
    config.max_bandwidth = NonZeroU64::new(100 * MIB);
    config.downtime_limit = Duration::from_millis(150);
    config.auto_converge = Some(AutoConverge {
        initial: 80,
        increment: 10,
        max: 99,
    });
    let mut here = Here::new(&stage).switching(|status| {
        // A host that is too busy for the guest to write would do without.
        match status.cpu_throttle_percentage {
            0 => Switchover::Forbid,
            _ => Switchover::Auto,
        }
    });
    let outcome = migrate(
        stage.source(config),
        &mut here,
        &mut stage.destination(|_| {}),
        &mut There::new(&stage),
    );
    let (status, _) = outcome.expect_done();
    let steps = [80, 90, 99];
    assert!(!here.throttles.is_empty());
    assert_eq!(here.throttles, steps[..here.throttles.len()]);
    assert_eq!(Some(&status.cpu_throttle_percentage), here.throttles.last());
    let arrived = stage.arrived().unwrap();
    assert_eq!(arrived.throttled(), 0, "a throttle is the host's");
    stage.expect_there();
}

#[test]
fn the_throttle_is_lifted_when_the_migration_fails() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("throttle of a failed migration".to_owned());
    let stage = Stage::new(&Shape {
        rate: None,
        ..Shape::default()
    });
    let mut config = source_config(Method::None);
    config.max_bandwidth = NonZeroU64::new(100 * MIB);
    config.auto_converge = Some(AutoConverge::default());
    let source = stage.source(config);
    let handle = source.handle();
    let mut here = Here::new(&stage).switching(|status| {
        if status.cpu_throttle_percentage > 20 {
            assert!(handle.cancel());
        }
        Switchover::Forbid
    });
    let outcome = migrate(
        source,
        &mut here,
        &mut stage.destination(|_| {}),
        &mut There::new(&stage),
    );
    assert!(matches!(outcome.source, Err(SourceError::Cancelled)));
    assert!(here.throttles.starts_with(&[20, 30]));
    assert_eq!(here.throttles.last(), Some(&0));
    stage.expect_here();
}

/// The guest writes faster than the link, and nobody asks it to stop before the timeout.
#[test]
fn a_guest_that_is_late_moves_as_its_owner_wants() {
    if nothing_to_migrate() {
        return;
    }
    for action in [OnTimeout::Pause, OnTimeout::Force, OnTimeout::Throttle] {
        let _watchdog = Watchdog::new(format!("{action} at the timeout"));
        let stage = Stage::new(&Shape {
            blocks: vec![32 * MIB],
            rate: None,
            ..Shape::default()
        });
        let mut config = source_config(Method::None);
        config.max_bandwidth = NonZeroU64::new(100 * MIB);
        // What is left when the guest is paused for no more than that is a few pages.
        let is_throttle = action == OnTimeout::Throttle;
        config.downtime_limit = Duration::from_millis(if is_throttle { 150 } else { 1 });
        config.timeout = Some(Duration::from_millis(300));
        config.on_timeout = action;
        config.auto_converge = Some(AutoConverge {
            initial: 80,
            ..AutoConverge::default()
        })
        .filter(|_| is_throttle);
        let source = stage.source(config);
        let mut here = Here::new(&stage).switching(move |status| {
            match is_throttle && status.cpu_throttle_percentage == 0 {
                true => Switchover::Forbid,
                false => Switchover::Auto,
            }
        });
        let mut destination = stage.destination(|_| {});
        let outcome = migrate(source, &mut here, &mut destination, &mut There::new(&stage));
        let (status, _) = outcome.expect_done();
        assert_eq!(here.throttles.is_empty(), !is_throttle);
        if is_throttle {
            assert!(
                status.total_time >= Duration::from_millis(300),
                "throttled before the timeout"
            );
        }
        stage.expect_there();
    }
}

#[test]
fn a_migration_that_takes_too_long_gives_up_and_leaves_the_guest() {
    if nothing_to_migrate() {
        return;
    }
    let slow = NonZeroU64::new(MIB);
    // Between two rounds, and in the middle of one.
    for (max_bandwidth, timeout) in [(None, 200), (slow, 300)] {
        let _watchdog = Watchdog::new(format!("timeout, {max_bandwidth:?}"));
        let stage = Stage::new(&Shape::default());
        let mut config = source_config(Method::None);
        config.max_bandwidth = max_bandwidth;
        config.timeout = Some(Duration::from_millis(timeout));
        let source = stage.source(config);
        let handle = source.handle();
        let mut destination = stage.destination(|_| {});
        let mut here = Here::new(&stage)
            .switching(|_| Switchover::Forbid)
            .hooked(|step| panic!("{step:?}: the guest is to be left alone"));
        let Outcome {
            source,
            destination: refused,
        } = migrate(source, &mut here, &mut destination, &mut There::new(&stage));
        let error = source.unwrap_err();
        assert!(matches!(error, SourceError::TimedOut { .. }), "{error}");
        assert_eq!(error.guest(), GuestLocation::Source);
        assert_eq!(handle.status().status, Phase::Failed);
        assert_eq!(handle.status().error_desc, Some(chain(&error)));
        assert!(!handle.cancel(), "it is over");
        // The end of a channel may be seen before the source's words.
        let refused = refused.unwrap_err();
        assert!(
            match &refused {
                DestinationError::Aborted { cause } => *cause == chain(&error),
                DestinationError::Channel { .. } => true,
                _ => false,
            },
            "{refused}"
        );
        stage.expect_here();
        let outcome = migrate(
            stage.source(source_config(Method::None)),
            &mut Here::new(&stage),
            &mut destination,
            &mut There::new(&stage),
        );
        outcome.expect_done();
        stage.expect_there();
    }
}

#[test]
fn a_limited_bandwidth_is_not_exceeded() {
    if nothing_to_migrate() {
        return;
    }
    const LIMIT: u64 = 32 * MIB;
    let _watchdog = Watchdog::new("bandwidth".to_owned());
    let stage = Stage::new(&Shape {
        rate: Some(1_000),
        ..Shape::default()
    });
    let mut config = source_config(Method::None);
    config.max_bandwidth = NonZeroU64::new(LIMIT);
    let (status, _) = move_guest(&stage, config);
    // However slow the host is: that makes it less.
    let millis = u64::try_from(status.total_time.as_millis()).unwrap();
    let at_most = LIMIT * (millis + 1) / 1000 + 2 * MIB;
    assert!(status.ram.transferred <= at_most, "{status:?}");
}

#[test]
fn pages_go_with_zero_copy() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("zero copy".to_owned());
    let stage = Stage::new(&Shape::default());
    let mut config = source_config(Method::None);
    config.zero_copy = true;
    let log = stage.rig.log(&stage.guest, &stage.ram);
    match Source::with_config(stage.ram.clone(), log, config) {
        Ok(source) => {
            let outcome = migrate(
                source,
                &mut Here::new(&stage).with_rounds(3),
                &mut stage.destination(|_| {}),
                &mut There::new(&stage),
            );
            outcome.expect_done();
            stage.expect_there();
        }
        Err(error) => lab::skipped(&error.to_string()).unwrap(),
    }
}

/// A VMM without a guest: the test writes the memory, between two rounds.
struct Plain<F> {
    log: Arc<SharedBitmap>,
    round: F,
}

impl<F: FnMut(&SharedBitmap, u64) -> Switchover> SourceGuest for Plain<F> {
    fn pause(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(Vec::new())
    }

    fn switchover(&mut self, status: &Status) -> Switchover {
        (self.round)(&self.log, status.ram.dirty_sync_count)
    }
}

/// What has to be true when all memory is there.
struct Expect<F>(F);

impl<F: FnMut()> DestinationGuest for Expect<F> {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        assert!(state.is_empty());
        (self.0)();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

/// Every page is written before the first round; `change` makes some of it zero between two rounds.
fn pages_become_zero(backing: Backing, change: impl Fn(&Ram, std::ops::Range<usize>)) {
    let model = Model::timed(&Config::dsa());
    for (detection, punch_holes) in [
        (ZeroPageDetection::Cpu, false),
        (ZeroPageDetection::Cpu, true),
        (ZeroPageDetection::None, true),
        (by_dsas(&dsas(&model, 1), Verify::Sample), true),
    ] {
        let _watchdog = Watchdog::new(format!("{backing:?} becomes zero"));
        let shape = Shape {
            backing,
            blocks: vec![2 * MIB, 2 * MIB],
            ..Shape::default()
        };
        let ((_, here), (_, there)) = (shape.memory(), shape.memory());
        let log = Arc::new(SharedBitmap::new(&here));
        for block in here.blocks() {
            let memory = block.memory();
            memory.write_slice(&vec![0x5a; block.len()], 0).unwrap();
        }
        let mut config = source_config(Method::None);
        config.zero_page_detection = detection;
        let source = Source::with_config(here.clone(), log.clone(), config).unwrap();
        let mut decisions = DestinationConfig::new(engines(Method::None));
        decisions.punch_holes = punch_holes;
        let mut destination =
            Destination::new(listen(&loopback()), there.clone(), decisions).unwrap();
        let address = address_of(&destination);
        // A single page, some, and so many that a hole is worth it; after the first round and after the second.
        let ranges = [vec![5..6, 100..400], vec![7..9, 450..512]];
        let mut vmm = Plain {
            log,
            round: |log: &SharedBitmap, round| {
                let Some(ranges) = ranges.get(usize::try_from(round).unwrap() - 1) else {
                    return Switchover::Force;
                };
                for range in ranges {
                    change(&here, range.clone());
                    let offset = (range.start * PAGE) as u64;
                    log.mark(1, offset, (range.len() * PAGE) as u64);
                }
                Switchover::Forbid
            },
        };
        let compared = Mutex::new(false);
        let mut expect = Expect(|| {
            expect_equal(&here, &there);
            let (mut page, block) = ([1; PAGE], &there.blocks()[1]);
            block.memory().read_slice(&mut page, 5 * PAGE).unwrap();
            assert_eq!(page, [0; PAGE]);
            *lock(&compared) = true;
        });
        std::thread::scope(|scope| {
            let arriving = scope.spawn(|| destination.run(&mut expect).map(drop));
            source.run(plain(&address), &mut vmm).unwrap();
            arriving.join().unwrap().unwrap();
        });
        assert!(*lock(&compared));
    }
}

#[test]
fn a_page_that_becomes_zero_after_it_was_sent_arrives_as_zeros() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        pages_become_zero(backing, |ram, pages| {
            let memory = ram.blocks()[1].memory();
            let zeros = vec![0; pages.len() * PAGE];
            memory.write_slice(&zeros, pages.start * PAGE).unwrap();
        });
    }
}

/// As a balloon does: the VMM gives memory back, and marks it.
#[test]
fn discarded_memory_arrives_as_zeros() {
    for (backing, advice) in [
        (Backing::Anonymous, Advice::LinuxDontNeed),
        (Backing::Memfd, Advice::LinuxRemove),
    ] {
        pages_become_zero(backing, |ram, pages| {
            let memory = ram.blocks()[1].memory();
            let part = memory.subslice(pages.start * PAGE, pages.len() * PAGE);
            let part = part.unwrap();
            // SAFETY: it is mapped, and nothing has a reference to it.
            unsafe { madvise(part.ptr_guard_mut().as_ptr().cast(), part.len(), advice) }.unwrap();
        });
    }
}

/// Its pages look like ones that were never touched.
#[test]
fn memory_filled_from_a_snapshot_arrives() {
    let _watchdog = Watchdog::new("restored from a snapshot".into());
    let ((_, here), (_, there)) = (Shape::default().memory(), Shape::default().memory());
    let snapshot = match Snapshot::of(&here) {
        Ok(snapshot) => snapshot,
        Err(error) => return lab::skipped(&format!("userfaultfd: {error}")).unwrap(),
    };
    let log = Arc::new(SharedBitmap::new(&here));
    let source =
        Source::with_config(here.clone(), log.clone(), source_config(Method::None)).unwrap();
    let decisions = DestinationConfig::new(engines(Method::None));
    let mut destination = Destination::new(listen(&loopback()), there.clone(), decisions).unwrap();
    let address = address_of(&destination);
    let mut vmm = Plain {
        log,
        round: |_: &SharedBitmap, _| Switchover::Force,
    };
    let missing = Mutex::new(None);
    let mut expect = Expect(|| {
        let mut blocks = there.blocks().iter();
        *lock(&missing) = Some(blocks.find_map(page_that_is_not_of_the_snapshot));
    });
    std::thread::scope(|scope| {
        scope.spawn(|| snapshot.serve());
        let arriving = scope.spawn(|| destination.run(&mut expect).map(drop));
        let moved = source.run(plain(&address), &mut vmm);
        snapshot.stop();
        moved.unwrap();
        arriving.join().unwrap().unwrap();
    });
    assert_eq!(*lock(&missing), Some(None), "a page did not arrive");
}

fn page_that_is_not_of_the_snapshot(block: &RamBlock) -> Option<String> {
    let mut bytes = vec![0; block.len()];
    block.memory().read_slice(&mut bytes, 0).unwrap();
    let mut pages = bytes.chunks(PAGE).enumerate();
    let found = pages.find(|(page, bytes)| *bytes != [Snapshot::content(*page); PAGE]);
    found.map(|(page, bytes)| format!("page {page} of {block:?} holds {:#x}", bytes[0]))
}

/// A device that a VMM forgets to stop. Without the check the destination would miss its last write.
#[test]
fn a_write_behind_pause_is_found() {
    for rig in Rig::all() {
        for forgets in [true, false] {
            let _watchdog = Watchdog::new(format!("{rig:?}, forgets a device: {forgets}"));
            let stage = Stage::new(&Shape {
                rig,
                ..Shape::default()
            });
            let mut config = source_config(Method::None);
            config.check_pause = true;
            let mut here = Here::new(&stage).hooked(|step| {
                if forgets && step == Step::TakeBack {
                    stage.guest.pause();
                }
                Ok(())
            });
            let mut there = There::new(&stage).hooked(|step| {
                if forgets && step == Step::Load {
                    // All memory is at the destination already.
                    let before = stage.guest.written();
                    stage.guest.resume()?;
                    while stage.guest.written() == before {
                        std::thread::yield_now();
                    }
                }
                Ok(())
            });
            let mut destination = stage.destination(|_| {});
            let outcome = migrate(
                stage.source(config),
                &mut here,
                &mut destination,
                &mut there,
            );
            if forgets {
                let error = outcome.source.unwrap_err();
                let SourceError::WrittenWhilePaused { block, page } = &error else {
                    panic!("{error}");
                };
                let mut blocks = stage.ram.blocks().iter();
                let found = blocks.find(|known| known.name().to_string() == *block);
                assert!(found.is_some_and(|block| *page < block.len() / PAGE));
                assert_eq!(error.guest(), GuestLocation::Source);
                assert!(outcome.destination.is_err());
                stage.expect_here();
            } else {
                outcome.expect_done();
                stage.expect_there();
            }
        }
    }
}
