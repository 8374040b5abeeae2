//! Migrations with DSAs that look for zero pages at the source: whatever the devices do, the destination has the source's
//! memory. The devices are a model.

use std::sync::Arc;

use crate::common::{
    Here, MIB, Rig, Rng, Shape, Stage, There, by_dsas, dsas, migrate, nothing_to_migrate,
    source_config,
};
use idxd::{Kind, offload::Devices, opcode};
use idxd_model::{Config, Faults, InjectedFault, Model, On, Work};
use multifd::Method;
use vamoose_codec::Verify;
use vamoose_live::{
    GuestLocation, SourceError, Status, Switchover, ZeroPageDetection, dsa::OffloadCounters,
};

/// Before the switchover, at least.
const ROUNDS: u64 = 5;

/// Migrates a guest of each rig, with `count` devices of a model. Between the rounds there is `act`, with the model
/// and the number of rounds so far. Returns what the devices did of the verdicts.
fn migrate_each(
    config: &Config,
    count: usize,
    act: impl Fn(&Model, u64) + Sync,
) -> Vec<OffloadCounters> {
    let migrate_one = |(run, rig): (usize, Rig)| {
        let _rng = Rng::new(run as u64);
        let model = Model::timed(config);
        act(&model, 0);
        let shape = Shape {
            rig,
            blocks: vec![2 * MIB, 12 * MIB],
            ..Shape::default()
        };
        migrate_with(&shape, &dsas(&model, count), |round| {
            act(&model, round);
        })
    };
    Rig::all()
        .into_iter()
        .enumerate()
        .map(migrate_one)
        .collect()
}

fn migrate_with(
    shape: &Shape,
    detecting: &Arc<Devices>,
    act: impl Fn(u64) + Sync,
) -> OffloadCounters {
    let stage = Stage::new(shape);
    let mut config = source_config(Method::Lz4);
    config.packet_bytes = 256 << 10;
    config.zero_page_detection = by_dsas(detecting, Verify::Sample);
    let mut destination = stage.destination(|_| {});
    let mut here = Here::new(&stage).switching(|status: &Status| {
        let round = status.ram.dirty_sync_count;
        act(round);
        if round < ROUNDS {
            Switchover::Forbid
        } else {
            Switchover::Auto
        }
    });
    let source = stage.source(config);
    // It compares all memory at the switchover.
    let outcome = migrate(source, &mut here, &mut destination, &mut There::new(&stage));
    let (status, _) = outcome.expect_done();
    stage.expect_there();
    status.zero_page_detection.unwrap()
}

/// Something goes wrong with some descriptors, `times` times.
fn fault(on: On, times: u32, fault: InjectedFault) -> impl Fn(&Model, u64) + Sync {
    move |model, round| {
        if round == 0 {
            model.inject(on, 3, times, fault);
        }
    }
}

fn nothing(_: &Model, _: u64) {}

#[test]
fn healthy_devices_do_their_part() {
    for count in [1, 2] {
        let config = Config::devices(Kind::Dsa, count);
        // On a busy host a device of threads may be later than the processor all the time.
        let worked = (0..5).any(|_| {
            migrate_each(&config, count, nothing)
                .iter()
                .all(|verdicts| {
                    assert!(verdicts.model);
                    verdicts.by_device > 0
                })
        });
        assert!(
            worked,
            "{count} devices have done nothing in five migrations"
        );
    }
}

#[test]
fn everything_goes_wrong() {
    for count in [1, 2] {
        let mut config = Config::devices(Kind::Dsa, count);
        config.seed = Rng::new(count as u64).next();
        config.faults = Faults::everything();
        migrate_each(&config, count, nothing);
    }
}

#[test]
fn without_devices_it_is_the_processors() {
    for done in migrate_each(&Config::dsa(), 0, nothing) {
        assert_eq!((done.by_device, done.failed, done.overtaken), (0, 0, 0));
        assert!(done.refused > 0);
    }
}

#[test]
fn full_queues_take_nothing() {
    let full = |model: &Model, round| {
        if round == 0 {
            model.refuse(0, 0, u32::MAX);
        }
    };
    for verdicts in migrate_each(&Config::dsa(), 1, full) {
        assert_eq!(verdicts.by_device, 0);
    }
}

#[test]
fn devices_are_reset_in_mid_migration() {
    migrate_each(
        &Config::devices(Kind::Dsa, 2),
        2,
        |model, round| match round {
            2 => model.reset(0),
            3 => model.enable(0),
            4 => model.unplug(1),
            _ => {}
        },
    );
}

#[test]
fn engines_that_are_stuck_cost_time_only() {
    migrate_each(
        &Config::dsa(),
        1,
        fault(On::any(), 4, InjectedFault::StuckEngine),
    );
}

#[test]
fn descriptors_that_never_complete_cost_time_only() {
    for on in [opcode::COMPARE_PATTERN, opcode::BATCH] {
        migrate_each(
            &Config::dsa(),
            1,
            fault(On::opcode(on), 3, InjectedFault::Stuck),
        );
    }
}

#[test]
fn a_device_that_calls_everything_zero_ends_the_migration_and_not_the_guest() {
    if nothing_to_migrate() {
        return;
    }
    for verify in [Verify::Sample, Verify::All] {
        let rng = Rng::new(0);
        let mut config = Config::dsa();
        config.work = Work::Oracle(Arc::new(|_, _| true));
        let model = Model::timed(&config);
        let stage = Stage::new(&Shape::default());
        let mut config = source_config(Method::None);
        config.zero_page_detection = by_dsas(&dsas(&model, 1), verify);
        let mut destination = stage.destination(|_| {});
        // Nobody knows in which round the device is in time: the guest stays until it was.
        let mut here = Here::new(&stage).switching(|_| Switchover::Forbid);
        let source = stage.source(config);
        let outcome = migrate(source, &mut here, &mut destination, &mut There::new(&stage));
        let error = outcome.source.unwrap_err();
        assert!(matches!(error, SourceError::ZeroPages(_)), "{error}");
        assert!(error.to_string().contains("migrate again"), "{error}");
        assert_eq!(error.guest(), GuestLocation::Source);
        outcome.destination.unwrap_err();
        stage.expect_here();
        drop(here);

        let mut config = source_config(Method::None);
        config.zero_page_detection = ZeroPageDetection::Cpu;
        let outcome = migrate(
            stage.source(config),
            &mut Here::new(&stage),
            &mut destination,
            &mut There::new(&stage),
        );
        outcome.expect_done();
        stage.expect_there();
        drop(rng);
    }
}
