//! Sessions whose connections are reset, blocked and refused, again and again: the guest arrives whole and runs at one end
//! alone. And peers that are not trusted, and links that do not come back.

use std::{num::NonZeroU64, os::unix::net::UnixStream, thread, time::Duration};

use crate::common::{
    Here, MIB, Shape, Stage, Step, There, Watchdog, address_of,
    cuts::{Cut, Phase, run},
    in_parallel, loopback, middlebox, migrate_over, nothing_to_migrate,
    sessions::Hosts,
    source_config, until_one_arrives,
};
use lab::middlebox::{Admission, Change, Direction, Which};
use multifd::Method;
use vamoose_live::{
    Accepted, Acceptor, DestinationError, GuestLocation, Listener, Remote, SourceConfig,
    SourceError, Status, Switchover, Transport, causes, chain,
    session::{OneTimeKey, Security, SessionConfig, Sessions},
};

/// Slow enough for cuts to find something under way.
fn slow() -> SourceConfig {
    let mut config = source_config(Method::Zstd);
    config.max_bandwidth = NonZeroU64::new(16 * MIB);
    config.channels = 3;
    config
}

fn shape() -> Shape {
    Shape {
        blocks: vec![2 * MIB, 4 * MIB],
        rate: Some(1_000),
        ..Shape::default()
    }
}

#[test]
fn every_way_to_cut_a_link_is_survived() {
    if nothing_to_migrate() {
        return;
    }
    let hosts = [Hosts::new(), Hosts::insecure(true)];
    let cuts = Cut::all();
    in_parallel(u64::try_from(cuts.len()).unwrap(), |run| {
        let number = usize::try_from(run).unwrap();
        let _watchdog = Watchdog::new(cuts[number].to_string());
        survive(&hosts[number % 3 % 2], cuts[number]);
    });
}

/// A migration through a middlebox whose connections are cut.
fn survive(hosts: &Hosts, cut: Cut) {
    let stage = Stage::new(&shape());
    let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
    let (middlebox, address) = middlebox(&destination);
    let (reconnects, was_cut) = run(cut, &middlebox, |experiment| {
        let source = stage.source(slow());
        let handle = source.handle();
        let mut here = Here::new(&stage)
            .switching(|status| {
                experiment.reached(match status.ram.dirty_sync_count {
                    1 => Phase::FirstRound,
                    _ => Phase::LaterRound,
                });
                in_round_three(status)
            })
            .hooked(|step| {
                if step == Step::Pause {
                    experiment.reached(Phase::Switchover);
                }
                Ok(())
            });
        let mut there = There::new(&stage).hooked(|step| {
            if step == Step::Run {
                experiment.reached(Phase::HandOver);
            }
            Ok(())
        });
        let to = hosts.to(&address);
        let outcome = migrate_over(&to, source, &mut here, &mut destination, &mut there);
        outcome.expect_done();
        handle.session().unwrap().reconnects()
    });
    assert!(was_cut, "{cut} was never made");
    // Behind the hand-over the guest may have been over before.
    assert!(reconnects > 0 || cut.phase == Phase::HandOver, "{cut}");
    stage.expect_there();
}

fn in_round_three(status: &Status) -> Switchover {
    match status.ram.dirty_sync_count {
        0..3 => Switchover::Forbid,
        _ => Switchover::Force,
    }
}

/// In the middle of rounds, of packets and of messages.
#[test]
fn connections_are_reset_again_and_again() {
    if nothing_to_migrate() {
        return;
    }
    for is_insecure in [false, true] {
        let _watchdog = Watchdog::new(format!("resets, insecure: {is_insecure}"));
        let hosts = Hosts::insecure(is_insecure);
        let stage = Stage::new(&shape());
        let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
        let (middlebox, address) = middlebox(&destination);
        let source = stage.source(slow());
        let handle = source.handle();
        let reset = || {
            middlebox.apply(Which::All, Change::Reset);
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                for bytes in (1..6).map(|times| times * MIB / 4) {
                    let to_listener = Direction::ToListener;
                    middlebox
                        .wait_for_bytes(to_listener, bytes, Duration::from_secs(300))
                        .unwrap();
                    reset();
                }
            });
            // With the guest paused, and while it is handed over.
            let mut here = Here::new(&stage).switching(in_round_three).hooked(|_| {
                reset();
                Ok(())
            });
            let mut there = There::new(&stage).hooked(|_| {
                reset();
                Ok(())
            });
            let to = hosts.to(&address);
            let outcome = migrate_over(&to, source, &mut here, &mut destination, &mut there);
            outcome.expect_done();
        });
        stage.expect_there();
        let session = handle.session().unwrap();
        assert!(session.reconnects() > 4, "{}", session.reconnects());
        assert_eq!(session.cipher().is_none(), is_insecure);
        assert!(session.is_checked());
    }
}

/// Before the commit it is the source's, running or paused for the switchover.
#[test]
fn a_guest_whose_link_does_not_come_back_goes_on_at_the_source() {
    if nothing_to_migrate() {
        return;
    }
    for paused in [false, true] {
        let _watchdog = Watchdog::new(format!("a long cut, paused: {paused}"));
        let hosts = Hosts::new().reconnecting_for(Duration::from_secs(2));
        let stage = Stage::new(&shape());
        let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
        let (middlebox, address) = middlebox(&destination);
        let cut = || {
            middlebox.admit(Admission::Refuse).unwrap();
            middlebox.apply(Which::All, Change::Reset);
        };
        let mut here = Here::new(&stage)
            .switching(|status| {
                if !paused {
                    cut();
                }
                in_round_three(status)
            })
            .hooked(|step| {
                if step == Step::Pause {
                    cut();
                }
                Ok(())
            });
        let to = hosts.to(&address);
        let outcome = migrate_over(
            &to,
            stage.source(slow()),
            &mut here,
            &mut destination,
            &mut There::new(&stage),
        );
        let error = outcome.source.unwrap_err();
        assert_eq!(error.guest(), GuestLocation::Source);
        assert!(
            matches!(error, SourceError::Control(_) | SourceError::Channel { .. }),
            "{error}"
        );
        assert!(
            chain(&error).contains("no connection for 2 s"),
            "{}",
            chain(&error)
        );
        let error = outcome.destination.unwrap_err();
        assert!(
            matches!(
                error,
                DestinationError::Control(_) | DestinationError::Channel { .. }
            ),
            "{error}"
        );
        stage.expect_here();
        // Later it can be moved.
        middlebox.admit(Admission::Pass).unwrap();
        let outcome = migrate_over(
            &to,
            stage.source(slow()),
            &mut Here::new(&stage),
            &mut destination,
            &mut There::new(&stage),
        );
        outcome.expect_done();
        stage.expect_there();
    }
}

/// A paused guest does not wait for the connection for longer than it may be paused.
#[test]
fn a_cut_is_no_reason_for_more_downtime_than_there_may_be() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("downtime".to_owned());
    let hosts = Hosts::new();
    let stage = Stage::new(&shape());
    let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
    let (middlebox, address) = middlebox(&destination);
    let mut config = slow();
    config.downtime_max = Duration::from_secs(2);
    thread::scope(|scope| {
        let arriving = scope.spawn(|| until_one_arrives(&mut destination, &mut There::new(&stage)));
        let mut here = Here::new(&stage).switching(in_round_three).hooked(|step| {
            match step {
                Step::Pause => {
                    middlebox.admit(Admission::Refuse).unwrap();
                    middlebox.apply(Which::All, Change::Reset);
                }
                Step::TakeBack => middlebox.admit(Admission::Pass).unwrap(),
                _ => {}
            }
            Ok(())
        });
        let error = stage.source(config).run(hosts.to(&address), &mut here);
        let error = error.unwrap_err();
        let max = Duration::from_secs(2);
        assert!(
            matches!(error, SourceError::DowntimeExceeded { max: it } if it == max),
            "{error}"
        );
        stage.expect_here();
        // Until it knows, the destination waits for the first one.
        let again = || stage.source(source_config(Method::None));
        while let Err(error) = again().run(hosts.to(&address), &mut Here::new(&stage)) {
            assert_eq!(error.guest(), GuestLocation::Source, "{error}");
            assert!(matches!(error, SourceError::Refused { .. }), "{error}");
            thread::sleep(Duration::from_millis(200));
        }
        arriving.join().unwrap();
    });
    stage.expect_there();
}

#[test]
fn a_peer_that_is_not_trusted_is_refused_at_both_ends() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("peers that are not trusted".to_owned());
    let (hosts, others) = (Hosts::new(), Hosts::new());
    let stage = Stage::new(&shape());
    let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
    let address = address_of(&destination);
    let stop = destination.handle();
    // It trusts the destination, which does not trust it: another one of these keys does.
    let (mut known, mut twin) = (Hosts::new(), hosts.twin());
    twin.befriend(&mut known);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| destination.run(&mut There::new(&stage)));
        for (to, told) in [
            (others.to(&address), "refusing the server"),
            (known.to(&address), "the server refuses this client"),
            (Hosts::insecure(true).to(&address), "it speaks TLS only"),
        ] {
            let mut here = Here::new(&stage).hooked(|step| panic!("{step:?}"));
            let error = stage.source(slow()).run(&to, &mut here).unwrap_err();
            let is_refused = matches!(
                error,
                SourceError::Session(_) | SourceError::OtherTransport(_)
            );
            assert!(is_refused, "{error}");
            assert!(chain(&error).contains(told), "{}", chain(&error));
        }
        stage.expect_here();
        // Nobody has got so far that the destination had to deal with it.
        stop.cancel();
        let ended = waiting.join().unwrap();
        assert!(
            matches!(ended, Err(DestinationError::Cancelled)),
            "{ended:?}"
        );
    });
}

/// The host refuses connections when the destination's process has ended.
#[test]
fn a_paused_guest_does_not_wait_for_a_destination_that_has_ended() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("a destination that has ended".to_owned());
    let hosts = Hosts::new();
    let stage = Stage::new(&shape());
    let mut destination = stage.destination_at(hosts.acceptor(), |_| {});
    let (middlebox, address) = middlebox(&destination);
    let stop = destination.handle();
    thread::scope(|scope| {
        let mut there = There::new(&stage).hooked(|step| {
            if step == Step::Load {
                middlebox.admit(Admission::Refuse).unwrap();
                middlebox.apply(Which::All, Change::Reset);
            }
            Ok(())
        });
        let waiting = scope.spawn(move || destination.run(&mut there));
        let source = stage.source(slow());
        let handle = source.handle();
        let error = source
            .run(hosts.to(&address), &mut Here::new(&stage))
            .unwrap_err();
        assert!(matches!(error, SourceError::Unanswered), "{error}");
        // It was paused, and runs again.
        assert!(handle.status().downtime.is_some());
        stage.expect_here();
        stop.cancel();
        waiting.join().unwrap().unwrap_err();
    });
}

/// Sockets that the VMM has made: no address, no listener.
#[test]
fn a_guest_moves_over_connections_of_the_vmm() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("connections of the VMM".to_owned());
    let accepted = Accepted::new().unwrap();
    let stage = Stage::new(&shape());
    let mut destination = stage.destination_at(Acceptor::Own(accepted.clone()), |_| {});
    let to = Transport::own(move || {
        let (near, far) = UnixStream::pair()?;
        accepted.add(far)?;
        Ok(near)
    });
    let (watched, source) = (destination.handle(), stage.source(slow()));
    let mut there = There::new(&stage);
    let outcome = migrate_over(
        &to,
        source,
        &mut Here::new(&stage),
        &mut destination,
        &mut there,
    );
    let (status, arrival) = outcome.expect_done();
    stage.expect_there();
    assert!(arrival.running);
    let moved = watched.moved();
    assert_eq!(moved, arrival.moved);
    assert_eq!(moved.normal_pages, status.ram.normal);
    assert_eq!(moved.zero_pages, status.ram.duplicate);
    assert_eq!(moved.page_bytes, status.ram.normal_bytes);
    assert_eq!(moved.syncs, status.ram.dirty_sync_count);
    let file = std::fs::File::open("/proc/self/status").unwrap();
    assert!(Accepted::new().unwrap().add(file).is_err(), "no socket");
}

/// The keys of a VMM that has no directory for them.
#[test]
fn a_guest_moves_by_keys_in_memory() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("keys in memory".to_owned());
    let [near, far] = [(); 2].map(|()| OneTimeKey::generate().unwrap());
    let (near_key, far_key) = (near.public(), far.public());
    let config = |own, peer| SessionConfig::new(Security::OneTime { own, peer });
    let listener = Listener::bind(&loopback(), Duration::from_secs(60)).unwrap();
    let address = listener.address().to_string();
    let sessions = Sessions::new(vec![listener], config(far, near_key)).unwrap();
    let stage = Stage::new(&shape());
    let mut destination = stage.destination_at(Acceptor::Sessions(sessions), |_| {});
    let security = Security::OneTime {
        own: near,
        peer: far_key,
    };
    let to = Transport::from(Remote::new(&address, security).unwrap());
    let (source, mut there) = (stage.source(slow()), There::new(&stage));
    let outcome = migrate_over(
        &to,
        source,
        &mut Here::new(&stage),
        &mut destination,
        &mut there,
    );
    outcome.expect_done();
    stage.expect_there();
}

#[test]
fn zero_copy_with_a_session_is_refused() {
    if nothing_to_migrate() {
        return;
    }
    let hosts = Hosts::new();
    let stage = Stage::new(&shape());
    let destination = stage.destination_at(hosts.acceptor(), |_| {});
    let mut config = source_config(Method::None);
    config.channels = 1;
    config.packet_bytes = 64 << 10;
    config.zero_copy = true;
    let log = stage.rig.log(&stage.guest, &stage.ram);
    let source = match vamoose_live::Source::with_config(stage.ram.clone(), log, config) {
        Err(error @ SourceError::ZeroCopy(causes::ZeroCopyError::LockedMemory { .. })) => {
            lab::skipped(&error.to_string()).unwrap();
            return;
        }
        source => source.unwrap(),
    };
    let handle = source.handle();
    let to = hosts.to(&address_of(&destination));
    let error = source.run(&to, &mut Here::new(&stage)).unwrap_err();
    let refused = causes::ZeroCopyError::Session;
    assert!(
        matches!(
            &error,
            SourceError::ZeroCopy(causes::ZeroCopyError::Session)
        ),
        "{error}"
    );
    assert_eq!(error.to_string(), refused.to_string());
    // Nothing was opened for it.
    assert!(handle.session().is_none());
    stage.expect_here();
}
