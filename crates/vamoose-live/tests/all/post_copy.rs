//! Guests that run at the destination before their memory is there.

use std::{
    mem,
    num::NonZeroU64,
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use lab::middlebox::{Admission, Change, Which};
use multifd::Method;
use testguest::{Backing, Pattern};
use vamoose_live::{
    Accepted, Acceptor, Destination, DestinationError, DestinationGuest, GuestError, GuestLocation,
    Handle, Phase, Ram, Source, SourceConfig, SourceError, SourceGuest, Status, Switchover,
    Transport, causes::MissingPagesError, chain, dirty::SharedBitmap,
};
use vm_memory::Bytes;

use crate::common::{
    Here, MIB, Outcome, PAGE, Rig, Shape, Stage, Step, There, Watchdog, address_of, expect_equal,
    lock, middlebox, migrate, migrate_over, nothing_to_migrate,
    sessions::{Hosts, acceptor_for, way_to},
    source_config,
};

/// All of the working set is dirty when the guest switches over: 2 s of memory.
fn shape(rig: Rig, backing: Backing) -> Shape {
    Shape {
        rig,
        backing,
        blocks: vec![2 * MIB, 10 * MIB],
        working_set: Some(MIB..9 * MIB),
        ..Shape::default()
    }
}

fn config(method: Method) -> SourceConfig {
    let mut config = source_config(method);
    config.post_copy = true;
    config.max_bandwidth = NonZeroU64::new(4 * MIB);
    config
}

/// Moves the guest of `stage`, whose memory follows; does something `meanwhile`.
fn follow(
    (stage, to): (&Arc<Stage>, &Transport),
    destination: &mut Destination,
    config: SourceConfig,
    meanwhile: impl FnOnce(&Handle) + Send,
) -> Outcome {
    let source = stage.source(config);
    let handle = source.handle();
    let mut here = Here::new(stage).switching(|_| Switchover::Force);
    let mut there = There::new(stage).partial();
    thread::scope(|scope| {
        scope.spawn(|| meanwhile(&handle));
        migrate_over(to, source, &mut here, destination, &mut there)
    })
}

/// Waits until the guest follows.
fn wait_for_post_copy(handle: &Handle) {
    while handle.status().status != Phase::PostcopyActive {
        assert_ne!(handle.status().status, Phase::Failed);
        thread::sleep(Duration::from_millis(1));
    }
}

/// The guest is at the destination with all of its memory: what it has not written there is the source's.
fn expect_whole(stage: &Arc<Stage>) {
    stage.expect_there();
    let guest = stage.arrived().unwrap();
    guest.pause();
    guest.verify().unwrap();
    let offset = |byte: u64| usize::try_from(byte).unwrap();
    for (block, unwritten) in [(0, 0..offset(MIB)), (1, offset(7 * MIB)..offset(10 * MIB))] {
        let part = |ram: &Ram| {
            let mut bytes = vec![0; unwritten.len()];
            let memory = ram.blocks()[block].memory();
            memory.read_slice(&mut bytes, unwritten.start).unwrap();
            bytes
        };
        assert!(
            part(&stage.ram) == part(&stage.there),
            "block {block} differs"
        );
    }
}

#[test]
fn a_guest_writes_while_its_memory_follows() {
    let hosts = Hosts::new();
    for (rig, backing, method, hosts) in [
        (Rig::Threads, Backing::Anonymous, Method::Zstd, Some(&hosts)),
        (Rig::Threads, Backing::Memfd, Method::None, None),
        (Rig::KvmLog, Backing::Anonymous, Method::Lz4, Some(&hosts)),
        (Rig::Kvm, Backing::Memfd, Method::ZstdFrames, None),
    ] {
        if !Rig::all().contains(&rig) {
            continue;
        }
        let _watchdog = Watchdog::new(format!("post-copy of {rig:?} over {backing:?}"));
        let stage = Stage::new(&shape(rig, backing));
        let mut destination = stage.destination_at(acceptor_for(hosts), |_| {});
        let wrote = AtomicBool::new(false);
        let to = way_to(hosts, &destination);
        let outcome = follow((&stage, &to), &mut destination, config(method), |handle| {
            wait_for_post_copy(handle);
            let guest = stage.arrived().unwrap();
            while handle.status().status == Phase::PostcopyActive {
                wrote.fetch_or(guest.written() > 0, Ordering::Relaxed);
            }
        });
        let (status, _) = outcome.expect_done();
        assert!(wrote.into_inner(), "it has waited for all of its memory");
        assert_eq!(status.status, Phase::Completed);
        assert!(
            status.downtime.unwrap() < status.total_time / 2,
            "{status:?}"
        );
        expect_whole(&stage);
    }
}

/// Loading touches memory: all of it is compared with the source's.
#[test]
fn all_memory_can_be_touched_before_the_guest_runs() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("loading touches all memory".into());
    let stage = Stage::new(&shape(Rig::Threads, Backing::Anonymous));
    let source = stage.source(config(Method::Lz4));
    source.handle().switch_over();
    let mut destination = stage.destination(|_| {});
    let (mut here, mut there) = (Here::new(&stage), There::new(&stage));
    migrate(source, &mut here, &mut destination, &mut there).expect_done();
    expect_whole(&stage);
}

/// A guest that converges is moved as any other.
#[test]
fn nothing_follows_a_guest_that_is_not_forced() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("no post-copy".into());
    let stage = Stage::new(&Shape::default());
    let mut config = config(Method::Zstd);
    config.max_bandwidth = None;
    let mut destination = stage.destination(|_| {});
    let (mut here, mut there) = (Here::new(&stage), There::new(&stage));
    migrate(
        stage.source(config),
        &mut here,
        &mut destination,
        &mut there,
    )
    .expect_done();
    stage.expect_there();
}

#[test]
fn a_cut_of_some_seconds_is_survived() {
    for rig in Rig::all() {
        let _watchdog = Watchdog::new(format!("a cut in a post-copy of {rig:?}"));
        let hosts = Hosts::new();
        let stage = Stage::new(&shape(rig, Backing::Anonymous));
        let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
        let (middlebox, address) = middlebox(&destination);
        let to = hosts.to(&address);
        let mut session = None;
        let cut = |handle: &Handle| {
            wait_for_post_copy(handle);
            middlebox.admit(Admission::Refuse).unwrap();
            middlebox.apply(Which::All, Change::Reset);
            // The length of the cut, not a wait for anything.
            thread::sleep(Duration::from_secs(3));
            assert_eq!(handle.status().status, Phase::PostcopyActive);
            middlebox.admit(Admission::Pass).unwrap();
            session = handle.session();
        };
        let config = config(Method::Zstd);
        follow((&stage, &to), &mut destination, config, cut).expect_done();
        assert!(session.unwrap().reconnects() > 0);
        expect_whole(&stage);
    }
}

#[test]
fn a_link_that_does_not_come_back_leaves_the_guest_at_the_destination() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("a lost link in a post-copy".into());
    let hosts = Hosts::new().reconnecting_for(Duration::from_secs(2));
    let stage = Stage::new(&shape(Rig::Threads, Backing::Anonymous));
    let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
    let (middlebox, address) = middlebox(&destination);
    let mut config = config(Method::Zstd);
    // The source's last word may be lost with the link: the destination listens for it that long.
    config.settle_time = Duration::from_secs(1);
    let to = hosts.to(&address);
    let outcome = follow((&stage, &to), &mut destination, config, |handle| {
        wait_for_post_copy(handle);
        middlebox.admit(Admission::Refuse).unwrap();
        middlebox.apply(Which::All, Change::Reset);
    });
    let error = outcome.source.unwrap_err();
    assert!(matches!(error, SourceError::PagesLost { .. }), "{error}");
    assert_eq!(error.guest(), GuestLocation::Destination);
    let error = outcome.destination.unwrap_err();
    assert!(
        matches!(error, DestinationError::PagesLost { pages: 1.., .. }),
        "{}",
        chain(&error)
    );
    assert_eq!(error.guest(), GuestLocation::Destination);
    assert!(!stage.guest.is_running(), "it runs at both ends");
    // Its threads wait for pages until this process ends.
    mem::forget(stage.arrived());
    mem::forget(stage);
}

/// And nobody waits for a page that does not come.
#[test]
fn before_the_commit_a_lost_link_leaves_the_guest_at_the_source() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("a lost link before the commit".into());
    let hosts = Hosts::new().reconnecting_for(Duration::from_secs(2));
    let stage = Stage::new(&shape(Rig::Threads, Backing::Anonymous));
    let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
    let (middlebox, address) = middlebox(&destination);
    let mut here = Here::new(&stage).switching(|_| Switchover::Force);
    let mut there = There::new(&stage).partial().hooked(|step| {
        if step == Step::Load {
            middlebox.admit(Admission::Refuse)?;
            middlebox.apply(Which::All, Change::Reset);
            for block in stage.there.blocks() {
                let mut bytes = vec![0; block.len()];
                block.memory().read_slice(&mut bytes, 0)?;
            }
        }
        Ok(())
    });
    let source = stage.source(config(Method::Zstd));
    let to = hosts.to(&address);
    let outcome = migrate_over(&to, source, &mut here, &mut destination, &mut there);
    assert_eq!(outcome.source.unwrap_err().guest(), GuestLocation::Source);
    let error = outcome.destination.unwrap_err();
    assert_eq!(error.guest(), GuestLocation::Source);
    stage.expect_here();
    // The same memory can be used again.
    middlebox.admit(Admission::Pass).unwrap();
    let way = (&stage, &to);
    follow(way, &mut destination, config(Method::Zstd), |_| ()).expect_done();
    expect_whole(&stage);
}

/// The guest is paused meanwhile: it resumes here when the longest downtime is over, or at once if somebody cancels.
#[test]
fn a_stream_that_does_not_open_leaves_the_guest_at_the_source() {
    if nothing_to_migrate() {
        return;
    }
    for cancels in [false, true] {
        let _watchdog = Watchdog::new(format!("a stream does not open, cancelled: {cancels}"));
        let stage = Stage::new(&shape(Rig::Threads, Backing::Anonymous));
        let mut config = config(Method::None);
        config.downtime_max = Duration::from_secs(if cancels { 600 } else { 1 });
        let source = stage.source(config);
        let handle = source.handle();
        let accepted = Accepted::new().unwrap();
        let mut destination = stage.destination_at(Acceptor::Own(accepted.clone()), |_| {});
        let (resumed, is_resumed) = mpsc::channel();
        let (is_resumed, watched) = (Mutex::new(is_resumed), handle.clone());
        let to = Transport::own(move || {
            if watched.status().status == Phase::Device {
                if cancels {
                    assert!(watched.cancel());
                }
                // Opens no stream before the guest has been resumed.
                let _ = lock(&is_resumed).recv();
            }
            let (near, far) = UnixStream::pair()?;
            accepted.add(far)?;
            Ok(near)
        });
        let mut here = Here::new(&stage)
            .switching(|_| Switchover::Force)
            .hooked(move |step| {
                if step == Step::TakeBack {
                    resumed.send(())?;
                }
                Ok(())
            });
        let mut there = There::new(&stage).partial();
        let outcome = migrate_over(&to, source, &mut here, &mut destination, &mut there);
        let error = outcome.source.unwrap_err();
        assert_eq!(matches!(error, SourceError::Cancelled), cancels, "{error}");
        let is_late = matches!(error, SourceError::DowntimeExceeded { .. });
        assert_eq!(is_late, !cancels, "{error}");
        assert!(matches!(
            outcome.destination.unwrap_err(),
            DestinationError::Aborted { .. }
        ));
        assert!(handle.status().downtime.is_some());
        stage.expect_here();
    }
}

#[test]
fn blocks_in_another_order_get_their_own_pages() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("blocks in another order".into());
    let shape = Shape {
        blocks: vec![2 * MIB, 2 * MIB],
        ..Shape::default()
    };
    let ((_, here), (_, there)) = (shape.memory(), shape.memory());
    for (number, block) in (1..).zip(here.blocks()) {
        for page in 0..block.len() / PAGE {
            let memory = block.memory();
            memory.write_obj(number << 20 | page, page * PAGE).unwrap();
        }
    }
    let log = Arc::new(SharedBitmap::new(&here));
    let source = Source::with_config(here.clone(), log.clone(), config(Method::None)).unwrap();
    let turned = Ram::new(there.blocks().iter().rev().cloned().collect()).unwrap();
    let config = vamoose_live::DestinationConfig::default();
    let mut destination = Destination::new(acceptor_for(None), &turned, config).unwrap();
    let to = way_to(None, &destination);
    let mut guest = Touching {
        ram: there.clone(),
        touching: None,
    };
    thread::scope(|scope| {
        scope.spawn(|| destination.run(&mut guest).unwrap());
        source.run(&to, &mut Dirty(&log)).unwrap();
    });
    guest.touching.take().unwrap().join().unwrap();
    expect_equal(&here, &there);
}

#[test]
fn a_destination_that_cannot_have_missing_pages_refuses_the_guest() {
    if nothing_to_migrate() {
        return;
    }
    let stage = Stage::new(&Shape::default());
    let mut destination = stage.destination(|config| config.punch_holes = false);
    let source = stage.source(config(Method::None));
    let (mut here, mut there) = (Here::new(&stage), There::new(&stage));
    let outcome = migrate(source, &mut here, &mut destination, &mut there);
    let refusal = outcome.source.unwrap_err();
    assert!(
        matches!(&refusal, SourceError::Refused { cause } if cause.contains("post-copy")),
        "{refusal}"
    );
    assert!(matches!(
        outcome.destination.unwrap_err(),
        DestinationError::PostCopy(MissingPagesError::Pinned)
    ));
    stage.expect_here();
}

/// A VMM without a guest, whose memory is all dirty when it is paused.
struct Dirty<'a>(&'a SharedBitmap);

impl SourceGuest for Dirty<'_> {
    fn pause(&mut self) -> Result<(), GuestError> {
        self.0.mark(0, 0, u64::MAX);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(Vec::new())
    }

    fn switchover(&mut self, _: &Status) -> Switchover {
        Switchover::Force
    }
}

/// Measures how long a page is waited for, from its resume on.
struct Touching {
    ram: Ram,
    touching: Option<thread::JoinHandle<Vec<Duration>>>,
}

impl DestinationGuest for Touching {
    fn load(&mut self, _: &[u8]) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        let ram = self.ram.clone();
        self.touching = Some(thread::spawn(move || {
            let (memory, pages) = (ram.blocks()[0].memory(), ram.pages(0));
            // A number without a factor of two: every page once, in no order.
            let touched = (0..pages).map(|page| page * 40_503 % pages);
            let touched = touched.map(|page| {
                let began = Instant::now();
                let _: u8 = memory.read_obj(page * PAGE).unwrap();
                began.elapsed()
            });
            touched.collect()
        }));
        Ok(())
    }
}

/// `cargo test --release -p vamoose-live --test all -- --ignored --nocapture latency`
#[test]
#[ignore = "a measurement"]
fn latency_of_a_page_on_demand() {
    for is_insecure in [true, false] {
        let hosts = Hosts::insecure(is_insecure);
        let shape = Shape {
            blocks: vec![512 * MIB],
            ..Shape::default()
        };
        let ((_, here), (_, there)) = (shape.memory(), shape.memory());
        let log = Arc::new(SharedBitmap::new(&here));
        let block = here.blocks()[0].memory();
        for page in 0..here.pages(0) {
            block.write_obj(page | 1, page * PAGE).unwrap();
        }
        let mut config = config(Method::None);
        config.max_bandwidth = None;
        let source = Source::with_config(here.clone(), log.clone(), config).unwrap();
        let config = vamoose_live::DestinationConfig::default();
        let mut destination = Destination::new(hosts.acceptor(), &there, config).unwrap();
        let to = hosts.to(&address_of(&destination));
        let guest = Mutex::new(Touching {
            ram: there.clone(),
            touching: None,
        });
        thread::scope(|scope| {
            scope.spawn(|| destination.run(&mut *lock(&guest)).unwrap());
            source.run(&to, &mut Dirty(&log)).unwrap();
        });
        let touching = lock(&guest).touching.take().unwrap();
        let mut waits = touching.join().unwrap();
        waits.retain(|wait| *wait > Duration::from_micros(20));
        waits.sort_unstable();
        let (count, at) = (waits.len(), |share: usize| {
            waits[(waits.len() - 1) * share / 100]
        });
        eprintln!(
            "insecure {is_insecure}: {count} pages waited for, median {:?}, p99 {:?}, most {:?}",
            at(50),
            at(99),
            at(100)
        );
        expect_equal(&here, &there);
    }
}

/// What a KVM guest waits for a page, when it writes one after the other, and none comes unasked.
///
/// `cargo test --release -p vamoose-live --test all -- --ignored --nocapture latency`
#[test]
#[ignore = "a measurement"]
fn latency_of_a_guest_under_kvm() {
    const PAGES: u64 = 5000;
    if !Rig::all().contains(&Rig::KvmLog) {
        return;
    }
    for is_insecure in [true, false] {
        let hosts = Hosts::insecure(is_insecure);
        let shape = Shape {
            rig: Rig::KvmLog,
            blocks: vec![2 * MIB, 62 * MIB],
            working_set: Some(2 * MIB..64 * MIB),
            vcpus: 1,
            pattern: Pattern::Sequential,
            rate: None,
            ..Shape::default()
        };
        let stage = Stage::new(&shape);
        let mut config = config(Method::None);
        config.max_bandwidth = None;
        let source = stage.source(config);
        let handle = source.handle();
        let mut here = Here::new(&stage).switching(|_| {
            handle.set_max_bandwidth(NonZeroU64::new(64 << 10));
            Switchover::Force
        });
        let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
        let to = hosts.to(&address_of(&destination));
        let mut there = There::new(&stage).partial();
        let outcome = thread::scope(|scope| {
            scope.spawn(|| {
                wait_for_post_copy(&handle);
                let guest = stage.arrived().unwrap();
                let (before, began) = (guest.written(), Instant::now());
                while guest.written() < before + PAGES {
                    thread::sleep(Duration::from_millis(1));
                }
                let (pages, took) = (guest.written() - before, began.elapsed());
                let each = took.div_f64(pages as f64);
                eprintln!("insecure {is_insecure}: {pages} pages under KVM, {each:?} each");
                handle.set_max_bandwidth(None);
            });
            migrate_over(&to, source, &mut here, &mut destination, &mut there)
        });
        let (status, _) = outcome.expect_done();
        eprintln!(
            "  downtime {:?}: {:?}",
            status.downtime, status.downtime_parts
        );
        stage.expect_there();
    }
}
