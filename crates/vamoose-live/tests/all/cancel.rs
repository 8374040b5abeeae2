//! Migrations that are cancelled, at either side and at any time: the guest keeps running, and both sides
//! can try again at once.

use std::{
    net::TcpListener,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crate::common::{
    Here, MIB, Rig, Rng, Shape, Stage, Step, There, Watchdog, address_of, lock, migrate,
    move_guest, move_in_the_end, nothing_to_migrate, plain,
    proxy::opening,
    sessions::{Hosts, acceptor_for, way_to},
    source_config, until_one_arrives,
};
use multifd::Method;
use vamoose_live::{DestinationError, GuestLocation, Handle, Phase, SourceError, Switchover};

/// When the source is cancelled.
#[derive(Clone, Copy, Debug)]
enum When {
    /// Before it begins.
    AtOnce,
    /// When so many bytes were sent, by another thread.
    Bytes(u64),
    /// When it asks the VMM after this round, the VMM.
    Round(u64),
    /// When it asks the VMM to do this.
    Step(Step),
}

#[test]
fn cancelled_after_any_number_of_bytes() {
    cancelled_often(60, |rng| When::Bytes(rng.below(5 * MIB)));
}

#[test]
fn cancelled_in_any_round() {
    cancelled_often(30, |rng| When::Round(1 + rng.below(4)));
}

#[test]
fn cancelled_in_the_switchover() {
    cancelled_often(10, |rng| When::Step(rng.pick(&[Step::Pause, Step::Save])));
}

/// The destination learns that the source is gone when it has nothing left to wait for but its word.
#[test]
fn cancelled_while_the_destination_loads() {
    cancelled_often(2, |_| When::Step(Step::Load));
}

#[test]
fn cancelled_before_it_began() {
    cancelled_often(2, |_| When::AtOnce);
}

fn cancelled_often(runs: u64, when: impl Fn(&mut Rng) -> When) {
    let rigs = Rig::all();
    if rigs.is_empty() {
        return;
    }
    for run in 0..runs {
        let mut rng = Rng::new(run);
        let shape = Shape {
            rig: rng.pick(&rigs),
            blocks: vec![2 * MIB, 2 * MIB],
            rate: rng.pick(&[Some(1_000), Some(20_000)]),
            ..Shape::default()
        };
        let when = when(&mut rng);
        cancelled(&shape, when, &mut rng);
    }
}

fn cancelled(shape: &Shape, when: When, rng: &mut Rng) {
    let stage = Stage::new(shape);
    let mut config = source_config(rng.pick(&[Method::None, Method::Zstd, Method::Lz4]));
    config.channels = rng.pick(&[1, 2, 8]);
    // What a destination waits for the word of a source that is gone. Nothing is committed then.
    let settle_time = if matches!(when, When::Step(Step::Load)) {
        1
    } else {
        5
    };
    config.settle_time = Duration::from_secs(settle_time);
    let source = stage.source(config);
    let handle = source.handle();
    // What cancel() has returned, if it was called.
    let said = Mutex::new(None);
    let cancel = |handle: &Handle| {
        lock(&said).get_or_insert_with(|| handle.cancel());
    };
    let at_step = |step| {
        if matches!(when, When::Step(wanted) if wanted == step) {
            cancel(&handle);
        }
        Ok(())
    };
    let hosts = rng.chance(50).then(Hosts::new);
    let mut destination = stage.destination_at(acceptor_for(hosts.as_ref()), |_| {});
    let to = way_to(hosts.as_ref(), &destination);
    if matches!(when, When::AtOnce) {
        cancel(&handle);
    }
    let (result, failures) = thread::scope(|scope| {
        let arriving = scope.spawn(|| {
            let mut there = There::new(&stage).hooked(at_step);
            until_one_arrives(&mut destination, &mut there).0
        });
        let over = Arc::new(AtomicBool::new(false));
        let canceller = scope.spawn({
            let (handle, over) = (handle.clone(), over.clone());
            move || {
                let When::Bytes(bytes) = when else {
                    return;
                };
                while handle.status().ram.transferred < bytes && !over.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                cancel(&handle);
            }
        });
        let rounds = Here::new(&stage).switching(|status| {
            if matches!(when, When::Round(round) if round <= status.ram.dirty_sync_count) {
                cancel(&handle);
            }
            match status.ram.dirty_sync_count {
                0..4 => Switchover::Forbid,
                _ => Switchover::Force,
            }
        });
        let result = source.run(&to, &mut rounds.hooked(at_step));
        over.store(true, Ordering::SeqCst);
        canceller.join().unwrap();
        assert!(!handle.cancel(), "it is over");
        match &result {
            Ok(_) => stage.expect_there(),
            Err(_) => {
                stage.expect_here();
                move_in_the_end(&stage, &to);
                stage.expect_there();
            }
        }
        (result, arriving.join().unwrap())
    });
    let cancelled = lock(&said).expect("nobody has cancelled");
    match result {
        Ok(status) => {
            assert!(!cancelled, "{when:?}: cancelled, and migrated all the same");
            assert_eq!(status.status, Phase::Completed);
            assert!(failures.is_empty(), "{failures:?}");
        }
        Err(error) => {
            assert!(cancelled, "{when:?}: {error}");
            assert!(matches!(error, SourceError::Cancelled), "{error}");
            assert_eq!(error.guest(), GuestLocation::Source);
            assert_eq!(handle.status().status, Phase::Cancelled);
            // The destination knows why.
            for failure in &failures {
                let is_told =
                    matches!(failure, DestinationError::Aborted { cause } if cause == "cancelled");
                assert!(is_told, "{when:?}: {failure:?}");
            }
            // It may have been over before the destination has heard of it.
            let unheard = matches!(when, When::AtOnce | When::Bytes(0));
            assert!(
                failures.len() == 1 || unheard && failures.is_empty(),
                "{when:?}: {failures:?}"
            );
        }
    }
}

#[test]
fn cancel_after_commit_is_too_late() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("cancel after commit".to_owned());
    let stage = Stage::new(&Shape::default());
    let mut destination = stage.destination(|_| {});
    let stop = destination.handle();
    let source = stage.source(source_config(Method::None));
    let handle = source.handle();
    let mut there = There::new(&stage).hooked(|step| {
        if step == Step::Run {
            assert!(!handle.cancel());
            stop.cancel();
        }
        Ok(())
    });
    let outcome = migrate(source, &mut Here::new(&stage), &mut destination, &mut there);
    let (status, _) = outcome.expect_done();
    assert_eq!(status.status, Phase::Completed);
    assert!(!handle.cancel());
    assert_eq!(handle.status().status, Phase::Completed);
    stage.expect_there();
}

#[test]
fn a_source_that_waits_for_an_answer_is_cancelled() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("cancel without an answer".to_owned());
    let stage = Stage::new(&Shape::default());
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = format!("tcp:{}", silent.local_addr().unwrap());
    let source = stage.source(source_config(Method::None));
    let handle = source.handle();
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            let connection = silent.accept().unwrap();
            assert!(handle.cancel());
            drop(connection);
        });
        source.run(plain(&address.parse().unwrap()), &mut Here::new(&stage))
    });
    assert!(matches!(result, Err(SourceError::Cancelled)));
    stage.expect_here();
    move_guest(&stage, source_config(Method::None));
}

#[test]
fn a_destination_that_waits_is_cancelled() {
    if nothing_to_migrate() {
        return;
    }
    let stage = Stage::new(&Shape::default());
    // For a source, and for a source's first words.
    for connects in [false, true] {
        let _watchdog = Watchdog::new(format!("cancel a waiting destination, {connects}"));
        let mut destination = stage.destination(|_| {});
        let (host, port) = crate::common::socket_address(&address_of(&destination));
        let mut source = std::net::TcpStream::connect((host, port)).unwrap();
        if connects {
            std::io::Write::write_all(&mut source, &opening([7; 16])).unwrap();
        }
        let stop = destination.handle();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| destination.run(&mut There::new(&stage)));
            stop.cancel();
            let error = waiting.join().unwrap().unwrap_err();
            assert!(matches!(error, DestinationError::Cancelled), "{error}");
        });
        // Before it waits, and once.
        stop.cancel();
        let error = destination.run(&mut There::new(&stage)).unwrap_err();
        assert!(matches!(error, DestinationError::Cancelled), "{error}");
        if connects {
            let source = stage.source(source_config(Method::None));
            let mut there = There::new(&stage);
            let outcome = migrate(source, &mut Here::new(&stage), &mut destination, &mut there);
            outcome.expect_done();
            stage.expect_there();
        }
    }
}

#[test]
fn a_destination_is_cancelled_at_any_step() {
    let rigs = Rig::all();
    for run in 0..16 {
        let Some(rig) = rigs.get(usize::try_from(run).unwrap() % rigs.len().max(1)) else {
            return;
        };
        let mut rng = Rng::new(run);
        let shape = Shape {
            rig: *rig,
            ..Shape::default()
        };
        let stage = Stage::new(&shape);
        let step = [None, Some(Step::Pause), Some(Step::Save), Some(Step::Load)];
        let step = step[usize::try_from(run / 2 % 4).unwrap()];
        let mut destination = stage.destination(|_| {});
        let stop = destination.handle();
        let at_step = |now| {
            if step == Some(now) {
                stop.cancel();
            }
            Ok(())
        };
        let cancelled_in = 1 + rng.below(3);
        let mut here = Here::new(&stage).hooked(at_step).switching(|status| {
            if step.is_none() && status.ram.dirty_sync_count == cancelled_in {
                stop.cancel();
            }
            match (step, status.ram.dirty_sync_count) {
                (None, _) | (_, 0..3) => Switchover::Forbid,
                _ => Switchover::Force,
            }
        });
        let mut there = There::new(&stage).hooked(at_step);
        let source = stage.source(source_config(Method::Zstd));
        let outcome = migrate(source, &mut here, &mut destination, &mut there);
        let error = outcome.destination.unwrap_err();
        assert!(
            matches!(error, DestinationError::Cancelled),
            "{step:?}: {error}"
        );
        let error = outcome.source.unwrap_err();
        assert!(
            matches!(&error, SourceError::Destination { cause } if cause == "cancelled"),
            "{step:?}: {error}"
        );
        stage.expect_here();
        // Another destination takes it.
        move_guest(&stage, source_config(Method::None));
    }
}
