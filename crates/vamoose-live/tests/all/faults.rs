//! Links that break, stop and come back, hosts that die and VMMs that fail, at any point of a migration: exactly one
//! side has the guest afterwards, and nothing that it wrote is lost.

use std::{
    env,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    process::{self, Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use crate::common::{
    Here, Hook, MIB, Outcome, Rig, Rng, Shape, Stage, Step, There, Watchdog, address_of, engines,
    in_parallel, listen, lock, loopback, migrate, move_guest, move_in_the_end, nothing_to_migrate,
    plain,
    proxy::{Action, Point, Proxy, ask, settle},
    source_config, until_one_arrives,
};
use multifd::Method;
use rustix::process::{Resource, Rlimit, setrlimit};
use testguest::Guest;
use vamoose_live::{
    Address, Destination, DestinationConfig, DestinationError, DestinationGuest, GuestError,
    GuestLocation, SourceError, Switchover, chain,
};

/// For how long a source asks, and a destination waits for its word. Long enough for a busy host to get an
/// answer through; where a test waits for it, it is the time that the test takes.
const SETTLE: Duration = Duration::from_secs(8);

const CUTS: [Action; 4] = [
    Action::CutChannel(0),
    Action::CutChannel(1),
    Action::CutControl,
    Action::CutAll,
];

/// A migration through a proxy that breaks; returns the source's report, after everything that has to be true in any
/// case.
fn survive(
    shape: &Shape,
    proxy: impl FnOnce(&Address) -> Proxy,
    at_step: impl Fn(&Proxy, Step) + Sync,
) -> Result<(), SourceError> {
    let stage = Stage::new(shape);
    let mut destination = stage.destination(|_| {});
    let address = address_of(&destination);
    let proxy = proxy(&address);
    let hook = || -> Hook<'_> {
        Box::new(|step| {
            at_step(&proxy, step);
            Ok(())
        })
    };
    let mut config = source_config(Method::None);
    config.settle_time = SETTLE;
    thread::scope(|scope| {
        let arriving = scope.spawn(|| {
            let mut there = There::new(&stage).hooked(hook());
            until_one_arrives(&mut destination, &mut there)
        });
        let mut here = Here::new(&stage).hooked(hook()).switching(in_round_three);
        let result = stage.source(config).run(plain(proxy.address()), &mut here);
        match &result {
            Ok(_) => {
                stage.expect_there();
                // Its last words may have been lost.
                settle(&address, proxy.id());
            }
            Err(error) => {
                assert_eq!(error.guest(), GuestLocation::Source, "{error}");
                stage.expect_here();
                move_in_the_end(&stage, &plain(&address));
                stage.expect_there();
            }
        }
        let (failures, _) = arriving.join().unwrap();
        let by_chance = matches!(proxy.point(), Point::Bytes(_));
        assert!(proxy.has_acted() || by_chance, "{:?}", proxy.said());
        if result.is_ok() {
            assert!(failures.is_empty(), "{failures:?}");
        }
        result.map(drop)
    })
}

fn in_round_three(status: &vamoose_live::Status) -> Switchover {
    match status.ram.dirty_sync_count {
        0..3 => Switchover::Forbid,
        _ => Switchover::Force,
    }
}

fn shape_for(rng: &mut Rng) -> Option<Shape> {
    let rigs = Rig::all();
    (!rigs.is_empty()).then(|| Shape {
        rig: rng.pick(&rigs),
        blocks: vec![2 * MIB, 2 * MIB],
        rate: rng.pick(&[Some(1_000), Some(10_000)]),
        ..Shape::default()
    })
}

#[test]
fn connections_are_cut_after_any_number_of_bytes() {
    in_parallel(60, |run| {
        let mut rng = Rng::new(run);
        let Some(shape) = shape_for(&mut rng) else {
            return;
        };
        // The introductions, and all that comes then.
        let most = rng.pick(&[500, 20 << 10, 4 * MIB, 8 * MIB]);
        let point = Point::Bytes(rng.below(most));
        let action = rng.pick(&CUTS);
        let result = survive(
            &shape,
            |address| Proxy::new(address, point, action),
            |_, _| {},
        );
        // A cut is detected: nothing waits for what will not come.
        assert!(
            !matches!(result, Err(SourceError::NoAnswer { .. })),
            "{point:?}, {action:?}: {result:?}"
        );
    });
}

/// In the order in which they are sent.
const MESSAGES: [&str; 10] = [
    "prepare",
    "preparing",
    "prepared",
    "synced",
    "state",
    "loaded",
    "commit",
    "starting",
    "running",
    "settled",
];

#[test]
fn connections_are_cut_at_every_message() {
    let points: Vec<Point> = MESSAGES
        .iter()
        .flat_map(|message| [Point::Before(message), Point::After(message)])
        .collect();
    let actions = [Action::CutControl, Action::CutAll];
    in_parallel(40, |run| {
        let mut rng = Rng::new(run);
        let Some(shape) = shape_for(&mut rng) else {
            return;
        };
        let run = usize::try_from(run).unwrap();
        let (point, action) = (points[run / 2], actions[run % 2]);
        let result = survive(
            &shape,
            |address| Proxy::new(address, point, action),
            |_, _| {},
        );
        // From `loaded` on the source asks again.
        let loaded = points
            .iter()
            .position(|point| *point == Point::After("loaded"));
        let goes_on = run / 2 >= loaded.unwrap();
        assert_eq!(result.is_ok(), goes_on, "{point:?}, {action:?}: {result:?}");
    });
}

#[test]
fn connections_are_cut_while_a_vmm_is_at_work() {
    let steps = [Step::Pause, Step::Save, Step::Load, Step::Run];
    in_parallel(16, |run| {
        let mut rng = Rng::new(run);
        let Some(shape) = shape_for(&mut rng) else {
            return;
        };
        let run = usize::try_from(run).unwrap();
        let (step, action) = (steps[run / 4], CUTS[run % 4]);
        let result = survive(
            &shape,
            |address| Proxy::new(address, Point::Asked, action),
            |proxy, now| {
                if now == step {
                    proxy.act();
                }
            },
        );
        // When the destination loads there are no channels any more; when it runs the guest the source asks again.
        let goes_on = match action {
            Action::CutChannel(_) => matches!(step, Step::Load | Step::Run),
            _ => step == Step::Run,
        };
        assert_eq!(result.is_ok(), goes_on, "{step:?}, {action:?}: {result:?}");
    });
}

#[test]
fn a_link_that_stops_for_a_while_does_no_harm() {
    let points = [
        Point::Bytes(10),
        Point::Bytes(MIB / 2),
        Point::After("prepare"),
        Point::Before("synced"),
        Point::After("state"),
        Point::Before("loaded"),
        Point::After("commit"),
        Point::Before("running"),
    ];
    thread::scope(|scope| {
        for (run, point) in (0..).zip(points) {
            scope.spawn(move || {
                let mut rng = Rng::new(run);
                let Some(shape) = shape_for(&mut rng) else {
                    return;
                };
                let stall = Action::Stall(Duration::from_secs(3));
                let proxy = |address: &Address| Proxy::new(address, point, stall);
                survive(&shape, proxy, |_, _| {}).unwrap();
            });
        }
    });
}

/// The source dials again until it gets through.
#[test]
fn a_link_that_breaks_again_and_again_does_no_harm() {
    for point in [Point::Before("commit"), Point::Before("running")] {
        let mut rng = Rng::new(0);
        let Some(shape) = shape_for(&mut rng) else {
            return;
        };
        let proxy = |address: &Address| Proxy::repeated(address, point, Action::CutAll, 4);
        let asked = Mutex::new(0);
        survive(&shape, proxy, |proxy, step| {
            if step == Step::Run {
                *lock(&asked) = proxy.said().iter().filter(|word| *word == "commit").count();
            }
        })
        .unwrap();
        let lost = if point == Point::Before("commit") {
            4
        } else {
            0
        };
        assert_eq!(*lock(&asked), lost + 1);
    }
}

/// Until the source has confirmed the outcome, a destination answers.
#[test]
fn a_source_that_was_not_heard_to_the_end_is_answered() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("settled is lost".to_owned());
    let stage = Stage::new(&Shape::default());
    let mut destination = stage.destination(|_| {});
    let address = address_of(&destination);
    let proxy = Proxy::new(&address, Point::Before("settled"), Action::CutControl);
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run(&mut There::new(&stage)));
        let source = stage.source(source_config(Method::None));
        source
            .run(plain(proxy.address()), &mut Here::new(&stage))
            .unwrap();
        stage.expect_there();
        for _ in 0..3 {
            assert_eq!(ask(&address, proxy.id()), "running");
        }
        settle(&address, proxy.id());
        assert!(arriving.join().unwrap().unwrap().settled);
    });
    let words = proxy.said();
    assert_eq!(words.last().unwrap(), "settled");
    stage.expect_there();
}

/// The outcome is unknown then; the guest stays paused at the source, and runs at the destination if started.
#[test]
fn a_link_that_is_gone_for_good_leaves_the_guest_in_doubt() {
    let points = [Point::Before("commit"), Point::After("commit")];
    let ways = [Action::Die, Action::Freeze];
    in_parallel(4, |run| {
        let mut rng = Rng::new(run);
        let Some(shape) = shape_for(&mut rng) else {
            return;
        };
        let run = usize::try_from(run).unwrap();
        let (point, way) = (points[run / 2], ways[run % 2]);
        let stage = Stage::new(&shape);
        let mut destination = stage.destination(|_| {});
        let address = address_of(&destination);
        let proxy = Proxy::new(&address, point, way);
        let mut config = source_config(Method::None);
        config.settle_time = Duration::from_secs(2);
        thread::scope(|scope| {
            let arriving = scope.spawn(|| destination.run(&mut There::new(&stage)));
            let mut here = Here::new(&stage).hooked(|step| {
                assert_ne!(step, Step::TakeBack, "nobody knows where the guest is");
                Ok(())
            });
            let error = stage.source(config).run(plain(proxy.address()), &mut here);
            let error = error.unwrap_err();
            assert!(matches!(error, SourceError::InDoubt { .. }), "{error}");
            assert_eq!(error.guest(), GuestLocation::InDoubt);
            assert!(!stage.guest.is_running());
            if point == Point::Before("commit") {
                let error = arriving.join().unwrap().unwrap_err();
                assert!(
                    matches!(error, DestinationError::NotCommitted { time } if time.as_secs() == 2),
                    "{error}"
                );
                assert!(!stage.runs_there());
            } else {
                assert_eq!(ask(&address, proxy.id()), "running");
                settle(&address, proxy.id());
                arriving.join().unwrap().unwrap();
                stage.expect_there();
            }
        });
    });
}

/// Fails the migration of a guest, at `fails`.
fn failing_at(fails: &[Step]) -> (Arc<Stage>, Outcome) {
    let stage = Stage::new(&Shape::default());
    let hook = || -> Hook<'_> {
        Box::new(|step| {
            if fails.contains(&step) {
                return Err(format!("fails to {step:?}").into());
            }
            Ok(())
        })
    };
    let mut destination = stage.destination(|_| {});
    let outcome = migrate(
        stage.source(source_config(Method::Zstd)),
        &mut Here::new(&stage).hooked(hook()),
        &mut destination,
        &mut There::new(&stage).hooked(hook()),
    );
    (stage, outcome)
}

#[test]
fn a_vmm_that_fails_at_the_source_keeps_its_guest() {
    if nothing_to_migrate() {
        return;
    }
    for (step, call) in [(Step::Pause, "pause"), (Step::Save, "save the state of")] {
        let _watchdog = Watchdog::new(format!("the source fails to {step:?}"));
        let (stage, outcome) = failing_at(&[step]);
        let error = outcome.source.unwrap_err();
        assert!(
            matches!(&error, SourceError::Guest { what, .. } if *what == call),
            "{error}"
        );
        let told = outcome.destination.unwrap_err();
        // The end of a channel may be seen before the source's words.
        assert!(
            match &told {
                DestinationError::Aborted { cause } => *cause == chain(&error),
                DestinationError::Channel { .. } => true,
                _ => false,
            },
            "{told}"
        );
        stage.expect_here();
        move_guest(&stage, source_config(Method::None));
    }
}

#[test]
fn a_vmm_that_fails_at_the_destination_leaves_the_guest_at_the_source() {
    if nothing_to_migrate() {
        return;
    }
    for (step, call) in [(Step::Load, "load the state of"), (Step::Run, "run")] {
        let _watchdog = Watchdog::new(format!("the destination fails to {step:?}"));
        let (stage, outcome) = failing_at(&[step]);
        let error = outcome.destination.unwrap_err();
        assert!(
            matches!(&error, DestinationError::Guest { what, .. } if *what == call),
            "{error}"
        );
        let told = outcome.source.unwrap_err();
        let reason = format!("fails to {step:?}");
        assert!(
            matches!(&told, SourceError::Destination { cause } if cause.ends_with(&reason)),
            "{told}"
        );
        stage.expect_here();
        move_guest(&stage, source_config(Method::None));
    }
}

/// The destination's word that it cannot run the guest is lost, and asked for again.
#[test]
fn a_guest_that_cannot_run_is_taken_back_over_a_broken_link() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("aborted is lost".to_owned());
    let stage = Stage::new(&Shape::default());
    let mut destination = stage.destination(|_| {});
    let cut = (Point::Before("aborted"), Action::CutAll);
    let proxy = Proxy::new(&address_of(&destination), cut.0, cut.1);
    thread::scope(|scope| {
        let arriving = scope.spawn(|| {
            let mut there = There::new(&stage).hooked(|step| match step {
                Step::Run => Err("no CPU left".into()),
                _ => Ok(()),
            });
            destination.run(&mut there)
        });
        let source = stage.source(source_config(Method::None));
        let told = source.run(plain(proxy.address()), &mut Here::new(&stage));
        let told = told.unwrap_err();
        assert!(
            matches!(&told, SourceError::Destination { cause } if cause.ends_with("no CPU left")),
            "{told}"
        );
        stage.expect_here();
        let error = arriving.join().unwrap().unwrap_err();
        assert!(
            matches!(error, DestinationError::Guest { what: "run", .. }),
            "{error}"
        );
    });
    assert!(proxy.has_acted());
}

#[test]
fn a_guest_that_cannot_be_resumed_is_reported() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("the source fails to resume".to_owned());
    let (stage, outcome) = failing_at(&[Step::Save, Step::TakeBack]);
    let error = outcome.source.unwrap_err();
    // Nowhere else, that is: it was never handed over.
    assert_eq!(error.guest(), GuestLocation::Source);
    let SourceError::NotResumed {
        source: cause,
        error,
    } = error
    else {
        panic!("{error}");
    };
    assert!(matches!(*cause, SourceError::Guest { .. }), "{cause}");
    assert_eq!(error.to_string(), "fails to TakeBack");
    assert!(outcome.destination.is_err());
    assert!(!stage.guest.is_running());
    assert!(!stage.runs_there());
}

/// Set for a process that is to be a destination: the step at which it stops, or nothing.
const HOLD: &str = "VAMOOSE_TEST_HOLD";

/// Where it listens.
const LISTEN: &str = "VAMOOSE_TEST_LISTEN";

/// Instead of a step: when it is to run the guest it runs out of file descriptors, until the command `feed`.
const STARVE: &str = "starve";

/// No test, but the program of a destination that can be killed.
#[test]
fn destination_process() {
    let Ok(hold) = env::var(HOLD) else {
        return;
    };
    let (commands_in, commands) = mpsc::channel();
    // It does not outlive who started it.
    thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if line == "feed" {
                lock(&HELD).clear();
            } else {
                let _ = commands_in.send(line);
            }
        }
        process::exit(0);
    });
    let few = Rlimit {
        current: Some(256),
        maximum: Some(256),
    };
    setrlimit(Resource::Nofile, few).unwrap();
    let shape = Shape::default();
    let (memory, ram) = shape.memory();
    let config = DestinationConfig::new(engines(Method::None));
    let address: Address = env::var(LISTEN).unwrap().parse().unwrap();
    let mut destination = Destination::new(listen(&address), ram, config).unwrap();
    println!("\n@{}", address_of(&destination));
    let mut vmm = Alone {
        config: shape.config(memory),
        guest: None,
        hold,
    };
    let arrival = destination.run(&mut vmm);
    println!("@returned {arrival:?}");
    for _ in commands {
        let guest = vmm.guest.as_ref().unwrap();
        guest.pause();
        println!("@verified {:?}", guest.verify());
        guest.resume().unwrap();
    }
}

/// All file descriptors that there were to be had.
static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// The VMM of a process that has no source beside it.
struct Alone {
    config: testguest::Config,
    guest: Option<Guest>,
    hold: String,
}

impl Alone {
    fn reach(&self, step: &str) {
        if self.hold == STARVE && step == "run" {
            let more = || File::open("/dev/null").ok();
            lock(&HELD).extend(std::iter::from_fn(more));
        }
        println!("@{step}");
        if self.hold == step {
            loop {
                thread::park();
            }
        }
    }
}

impl DestinationGuest for Alone {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        self.reach("load");
        let guest = Guest::incoming(&self.config)?;
        guest.load(state)?;
        guest.verify()?;
        self.guest = Some(guest);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.reach("run");
        Ok(self.guest.as_ref().unwrap().resume()?)
    }
}

/// A destination in a process of its own.
struct Remote {
    process: Mutex<Child>,
    lines: Mutex<Receiver<String>>,
}

impl Remote {
    fn start(hold: &str) -> (Self, Address) {
        Self::start_at(&loopback(), hold)
    }

    fn start_at(listen: &Address, hold: &str) -> (Self, Address) {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["faults::destination_process", "--exact", "--nocapture"])
            .env(HOLD, hold)
            .env(LISTEN, listen.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (lines_in, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(said) = line.strip_prefix('@') {
                    let _ = lines_in.send(said.to_owned());
                }
            }
        });
        let remote = Self {
            process: Mutex::new(process),
            lines: Mutex::new(lines),
        };
        let address = remote.next().expect("the process does not listen");
        (remote, address.parse().unwrap())
    }

    /// What it prints next; nothing when it is gone.
    fn next(&self) -> Option<String> {
        lock(&self.lines).recv().ok()
    }

    /// What it has printed, when it has ended.
    fn last_words(&self) -> Vec<String> {
        std::iter::from_fn(|| self.next()).collect()
    }

    fn kill(&self) {
        let mut process = lock(&self.process);
        process.kill().unwrap();
        process.wait().unwrap();
    }

    fn tell(&self, command: &str) {
        let mut process = lock(&self.process);
        writeln!(process.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    fn verify(&self) -> String {
        self.tell("verify");
        self.next().unwrap()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Migrates to a process that `kill` is given to kill, and that stops at step `hold`.
fn migrate_to_a_process(
    hold: &str,
    at_step: impl Fn(&Remote, Step) + Sync,
    kill: impl FnOnce(&Remote, &vamoose_live::Handle, &AtomicBool) + Send,
) -> (Arc<Stage>, Arc<Remote>, Result<(), SourceError>) {
    let stage = Stage::new(&Shape::default());
    let (remote, address) = Remote::start(hold);
    let remote = Arc::new(remote);
    let mut config = source_config(Method::Zstd);
    config.direct_link = true;
    let source = stage.source(config);
    let handle = source.handle();
    let over = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        scope.spawn(|| kill(&remote, &handle, &over));
        let mut here = Here::new(&stage).switching(in_round_three).hooked(|step| {
            at_step(&remote, step);
            Ok(())
        });
        let result = source.run(plain(&address), &mut here);
        over.store(true, Ordering::SeqCst);
        result.map(drop)
    });
    (stage, remote, result)
}

#[test]
fn a_guest_goes_to_another_process() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("to another process".to_owned());
    let (stage, remote, result) = migrate_to_a_process("", |_, _| {}, |_, _, _| {});
    result.unwrap();
    assert!(!stage.guest.is_running());
    assert_eq!(remote.next().unwrap(), "load");
    assert_eq!(remote.next().unwrap(), "run");
    assert!(remote.next().unwrap().starts_with("returned Ok"));
    for _ in 0..2 {
        let verified = remote.verify();
        assert!(verified.starts_with("verified Ok"), "{verified}");
    }
}

#[test]
fn a_destination_that_is_killed_at_any_time_does_not_take_the_guest_with_it() {
    if nothing_to_migrate() {
        return;
    }
    in_parallel(12, |run| {
        let mut rng = Rng::new(run);
        let bytes = rng.below(3 * MIB);
        let (stage, remote, result) = migrate_to_a_process(
            "",
            |_, _| {},
            |remote, handle, over| {
                while handle.status().ram.transferred < bytes && !over.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                remote.kill();
            },
        );
        let said = remote.last_words();
        let was_to_run = said.iter().any(|word| word == "run");
        match result {
            Ok(()) => {
                assert!(was_to_run, "{said:?}");
                assert!(!stage.guest.is_running());
            }
            Err(SourceError::Lost { .. }) => {
                assert!(was_to_run, "{said:?}");
                assert!(!stage.guest.is_running());
            }
            Err(error) => {
                assert_eq!(error.guest(), GuestLocation::Source, "{error}");
                assert!(!was_to_run, "{error}, {said:?}");
                stage.expect_here();
                move_guest(&stage, source_config(Method::None));
            }
        }
    });
}

#[test]
fn a_destination_that_is_killed_in_the_switchover_leaves_the_guest() {
    if nothing_to_migrate() {
        return;
    }
    for step in [Step::Pause, Step::Save] {
        let _watchdog = Watchdog::new(format!("killed in {step:?}"));
        let at_step = |remote: &Remote, now| {
            if now == step {
                remote.kill();
            }
        };
        let (stage, _, result) = migrate_to_a_process("", at_step, |_, _, _| {});
        assert_eq!(result.unwrap_err().guest(), GuestLocation::Source);
        stage.expect_here();
    }
    let _watchdog = Watchdog::new("killed in load".to_owned());
    let (stage, _, result) = migrate_to_a_process("load", |_, _| {}, kill_at("load"));
    assert_eq!(result.unwrap_err().guest(), GuestLocation::Source);
    stage.expect_here();
    move_guest(&stage, source_config(Method::None));
}

/// It has reported that it starts the guest, which no other may do from then on but by hand.
#[test]
fn a_destination_that_is_killed_when_it_runs_the_guest_takes_it_with_it() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("killed in run".to_owned());
    let (stage, _, result) = migrate_to_a_process("run", |_, _| {}, kill_at("run"));
    let error = result.unwrap_err();
    assert!(matches!(error, SourceError::Lost { .. }), "{error}");
    assert_eq!(error.guest(), GuestLocation::Lost);
    assert!(!stage.guest.is_running());
    // The state before is still there for an operator.
    stage.guest.verify().unwrap();
    stage.guest.resume().unwrap();
    stage.expect_here();
}

/// Only the process that has accepted a guest can prove that it never ran there.
#[test]
fn another_process_at_the_destinations_address_does_not_answer_for_it() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("another process answers".to_owned());
    let stage = Stage::new(&Shape::default());
    let (first, address) = Remote::start("run");
    let proxy = Proxy::new(&address, Point::Asked, Action::CutAll);
    thread::scope(|scope| {
        let second = scope.spawn(|| {
            // It has reported that it starts the guest.
            while first.next().unwrap() != "run" {}
            first.kill();
            Remote::start_at(&address, "").0
        });
        let mut here = Here::new(&stage).hooked(not_taken_back);
        let source = stage.source(source_config(Method::None));
        let error = source.run(plain(proxy.address()), &mut here).unwrap_err();
        assert!(matches!(error, SourceError::InDoubt { .. }), "{error}");
        drop(second.join().unwrap());
    });
    assert!(!stage.guest.is_running());
}

/// Whatever forwards connections may end between the source and a destination that runs the guest.
#[test]
fn a_proxy_that_is_gone_is_no_proof_that_the_destination_is() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("the proxy is gone".to_owned());
    let stage = Stage::new(&Shape::default());
    let mut destination = stage.destination(|_| {});
    let address = address_of(&destination);
    let proxy = Proxy::new(&address, Point::After("commit"), Action::Vanish);
    let mut config = source_config(Method::None);
    config.settle_time = Duration::from_secs(2);
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run(&mut There::new(&stage)));
        let mut here = Here::new(&stage).hooked(not_taken_back);
        let source = stage.source(config);
        let error = source.run(plain(proxy.address()), &mut here).unwrap_err();
        assert!(matches!(error, SourceError::InDoubt { .. }), "{error}");
        settle(&address, proxy.id());
        arriving.join().unwrap().unwrap();
    });
    stage.expect_there();
}

fn not_taken_back(step: Step) -> Result<(), GuestError> {
    assert_ne!(step, Step::TakeBack, "nobody knows where the guest is");
    Ok(())
}

/// Whoever has the guest answers for it as soon as it can again.
#[test]
fn a_destination_that_is_out_of_descriptors_for_a_while_answers_afterwards() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("out of descriptors".to_owned());
    let stage = Stage::new(&Shape::default());
    let (remote, address) = Remote::start(STARVE);
    let proxy = Proxy::new(&address, Point::Before("running"), Action::CutAll);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // The second one waits to be accepted, and gets no answer until the source closes it.
            let asked = || proxy.said().iter().filter(|word| *word == "commit").count();
            while asked() < 3 && !over.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            remote.tell("feed");
        });
        let source = stage.source(source_config(Method::None));
        let result = source.run(plain(proxy.address()), &mut Here::new(&stage));
        over.store(true, Ordering::SeqCst);
        result.unwrap();
    });
    assert!(!stage.guest.is_running());
    assert_eq!(remote.next().unwrap(), "load");
    assert_eq!(remote.next().unwrap(), "run");
    assert!(remote.next().unwrap().starts_with("returned Ok"));
    assert!(remote.verify().starts_with("verified Ok"));
}

fn kill_at(step: &str) -> impl FnOnce(&Remote, &vamoose_live::Handle, &AtomicBool) + Send {
    move |remote, _, _| {
        while remote.next().unwrap() != step {}
        remote.kill();
    }
}
