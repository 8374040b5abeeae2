//! A model of the hand-over: every order of events, with every fault, up to a number of faults; and random ones far
//! beyond.
//!
//! The model has a source host and one or two destination hosts, with the machines of this crate in processes that drive
//! VMMs as `migrate`, `serve` and the VMMs of `live` do. A person runs commands, old ones too. Processes carry out one
//! action after another and may be killed between any two of them, and be started again; VMMs may die, refuse, or not
//! answer; connections may break with bytes under way, which then arrive late or never; journals may be unwritable or
//! gone; the guest may be paused and continued by its owner, be stopped by something after it was continued, be sent on from the
//! destination, or be moved by another tool. [`world`] defines what there is, [`step`] what may happen.
//!
//! # What never happens
//! - I1: two VMMs run the guest, or one runs a copy that is older than what has run elsewhere.
//! - I2: a command reports a guest at the destination that has not been seen there, at the source where it does not run,
//!   or lost while it runs, or in doubt without a commit. A destination sends *running* without a look.
//! - I3: no VMM runs the guest once nothing fails any more: processes are started again, everything is delivered, the
//!   same command is run again. This is tried in every state. It excuses only what is unknowable: all copies are gone,
//!   or a VMM or its journal has ended between the order to run and the look ([`repair`]).
//! - I4: *aborted* is believed from another incarnation than the one that accepted.
//! - I5: *aborted* or *ended* is sent of a VMM that is still there; a VMM is ended that has the guest; a destination gives up the
//!   only copy, or is told to.
//! - I6: a guest that its owner has paused is requested to run, or one that shall run is left paused.
//! - I7: two VMMs have the guest's disks, or one is reported to have the guest that does not have its disks.
//! - I8: the guest runs with disks that lack something it has written, where each host has disks of its own.
//! - I9: an attempt is over while the destination still lacks memory that post-copy has left at the source.
//!
//! # What the model takes for granted, and every driver has to see to
//! - A new attempt begins only when the journal has no other of this VMM that is not over.
//! - One driver at a time has a VMM.
//! - A driver knows of a pause before the switchover that follows it.
//! - A VMM that is asked to pause a guest that it has sent, or to migrate it, refuses: only whoever continues it can.
//! - A server makes a VMM run only if that has loaded the guest and not sent it on. One that is found dead before it
//!   was requested to is `NotStarted`; its death is reported besides, but not during a request or a look.
//! - A VMM is asked to switch to post-copy only while its driver's machine is Switching. A driver reports `Failed` then only of a VMM
//!   that has come back, and `GuestDied` of one that is to resume after the switch, which no VMM can.
//! - A server writes down that it receives before it sends *prepared*.
//! - `NotPersisted` means that the journal has what it had before.
//! - A message for which there is no connection is reported as `Closed`, incomplete.
//!
//! # Not in the model
//! An owner's wish that cannot be written down while a VMM is asked to switch to post-copy, which nobody can take back then; two
//! drivers at once, a person's word (`settle`; but for the word that nobody else has moved the guest, which is true),
//! versions, an answer to an order that takes effect long after it was given up, an owner who pauses the guest at the
//! destination before that has seen it run, another tool that moves a guest which came back while the journal could not be
//! written, and a host that starts anew: its guests and its journal end together.
//!
//! `make model` explores more, by `MODEL_FAULTS`, `MODEL_COMMANDS`, `MODEL_ATTEMPTS`, `MODEL_HOSTS`, `MODEL_TRACES` and
//! `MODEL_SEED`.

#![allow(clippy::panic, reason = "a counterexample is told in full")]

#[path = "model/explore.rs"]
mod explore;
#[path = "model/repair.rs"]
mod repair;
#[path = "model/step.rs"]
mod step;
#[path = "model/world.rs"]
mod world;

use std::{env, str::FromStr};

use explore::{Found, exhaust, tell, wander};
use world::{Bounds, Engine, Fault, Mutant, Scene};

/// One destination, one attempt.
const QEMU: Scene = Scene {
    name: "QEMUs",
    engine: Engine::Qemu,
    hosts: 1,
    attempts: 1,
    resume: true,
    copies: false,
    post_copy: false,
    bounds: Bounds::any(2, 3),
    mutant: None,
};

const POST_COPY: Scene = Scene {
    name: "QEMUs, post-copy",
    post_copy: true,
    ..QEMU
};

const LIVE: Scene = Scene {
    name: "live, a direct network",
    engine: Engine::Live { direct: true },
    bounds: Bounds::any(3, 5),
    ..QEMU
};

const PROXIES: Scene = Scene {
    name: "live, proxies",
    engine: Engine::Live { direct: false },
    ..LIVE
};

#[test]
fn one_attempt() {
    let happened = never_goes_wrong(Scene {
        bounds: Bounds::any(2, 4),
        ..QEMU
    });
    assert_eq!(happened, explore::STORIES);
}

#[test]
fn a_guest_that_its_owner_paused() {
    never_goes_wrong(Scene {
        name: "QEMUs, a paused guest",
        resume: false,
        ..QEMU
    });
}

#[test]
fn a_guest_that_is_paused_and_continued() {
    for resume in [true, false] {
        never_goes_wrong(Scene {
            name: "QEMUs, paused and continued by others",
            resume,
            bounds: Bounds::any(2, 3)
                .with(Fault::Owner, 2)
                .with(Fault::Repeat, 0),
            ..QEMU
        });
    }
}

#[test]
fn a_guest_that_is_continued_and_stops() {
    never_goes_wrong(Scene {
        name: "QEMUs, stops by itself",
        bounds: Bounds::any(2, 3)
            .with(Fault::Halt, 1)
            .with(Fault::Repeat, 0),
        ..QEMU
    });
}

#[test]
fn a_guest_whose_disks_are_copied() {
    for resume in [true, false] {
        never_goes_wrong(Scene {
            name: "QEMUs, disks of their own",
            copies: true,
            resume,
            ..QEMU
        });
    }
}

/// What a command finds sent may be another tool's doing: it asks for a word.
#[test]
fn a_guest_that_another_tool_moves() {
    never_goes_wrong(Scene {
        name: "QEMUs, moved by another tool",
        bounds: Bounds::any(2, 3)
            .with(Fault::Moved, 1)
            .with(Fault::Repeat, 0),
        ..QEMU
    });
}

/// Who does that has looked at the destination, and the old command is run again all the same.
#[test]
fn a_guest_that_is_continued_by_hand() {
    never_goes_wrong(Scene {
        name: "QEMUs, continued by hand",
        // Its death since could not be distinguished from one before.
        bounds: Bounds::any(3, 3).with(Fault::Hand, 1).with(Fault::Death, 0),
        ..QEMU
    });
}

#[test]
fn post_copy() {
    let happened = never_goes_wrong(Scene {
        bounds: Bounds::any(2, 3),
        ..POST_COPY
    });
    assert!(happened.contains(&explore::PARTIAL));
}

#[test]
fn post_copy_of_a_guest_that_is_paused_and_continued() {
    for resume in [true, false] {
        never_goes_wrong(Scene {
            resume,
            bounds: Bounds::any(2, 2)
                .with(Fault::Owner, 2)
                .with(Fault::Repeat, 0),
            ..POST_COPY
        });
    }
}

#[test]
fn post_copy_to_two_destinations() {
    never_goes_wrong(two_of_post_copy(1));
}

#[test]
#[ignore = "minutes: make model"]
fn post_copy_to_two_destinations_with_two_faults() {
    never_goes_wrong(two_of_post_copy(2));
}

fn two_of_post_copy(faults: u8) -> Scene {
    Scene {
        hosts: 2,
        attempts: 2,
        bounds: Bounds::any(2, faults),
        ..POST_COPY
    }
}

#[test]
fn two_destinations() {
    never_goes_wrong(Scene {
        name: "QEMUs, two destinations",
        hosts: 2,
        attempts: 2,
        bounds: Bounds::any(3, 2),
        ..QEMU
    });
}

#[test]
fn the_same_destination_again() {
    never_goes_wrong(Scene {
        name: "QEMUs, the same destination again",
        attempts: 2,
        bounds: Bounds::any(3, 2),
        ..QEMU
    });
}

#[test]
fn many_commands() {
    never_goes_wrong(Scene {
        name: "QEMUs, many commands",
        hosts: 2,
        attempts: 3,
        bounds: Bounds::any(5, 1),
        ..QEMU
    });
}

#[test]
fn a_vmm_that_migrates_itself() {
    never_goes_wrong(LIVE);
    never_goes_wrong(Scene {
        name: "live, a direct network, again",
        attempts: 2,
        bounds: Bounds::any(4, 3),
        ..LIVE
    });
}

#[test]
fn a_vmm_that_migrates_itself_through_proxies() {
    never_goes_wrong(PROXIES);
    never_goes_wrong(Scene {
        name: "live, proxies, again",
        attempts: 2,
        bounds: Bounds::any(4, 3),
        ..PROXIES
    });
}

#[test]
fn long_random_traces() {
    for scene in [QEMU, POST_COPY, LIVE, PROXIES] {
        never_goes_wrong_at_random(scene, 1, 10_000);
    }
}

/// `make model`: more of everything.
#[test]
#[ignore = "takes minutes"]
fn more_of_everything() {
    let commands = setting("MODEL_COMMANDS", 3);
    let faults = setting("MODEL_FAULTS", 3);
    let attempts = setting("MODEL_ATTEMPTS", 2);
    for scene in [LIVE, PROXIES, QEMU] {
        let is_qemu = scene.engine == Engine::Qemu;
        never_goes_wrong(Scene {
            hosts: if is_qemu {
                setting("MODEL_HOSTS", 2)
            } else {
                1
            },
            attempts,
            bounds: Bounds::any(commands, faults),
            ..scene
        });
        let seed = setting("MODEL_SEED", 2);
        never_goes_wrong_at_random(scene, seed, setting("MODEL_TRACES", 200_000));
    }
}

/// A fix taken out, and the model finds what it was for.
mod mutants {
    use super::{Bounds, Fault, LIVE, Mutant, POST_COPY, PROXIES, QEMU, Scene, exhaust, expect};

    #[test]
    fn a1_a_commit_is_answered_by_name() {
        let scene = Scene {
            hosts: 2,
            attempts: 2,
            bounds: Bounds::these(3, [(Fault::Failure, 1), (Fault::Kill, 1)]),
            ..QEMU
        };
        caught(
            scene,
            Mutant::AnswersByName,
            "I1 never a stale copy that runs",
        );
    }

    #[test]
    fn a2_a_server_without_a_record_continues_what_it_finds() {
        let faults = [(Fault::Kill, 1), (Fault::SentOn, 1), (Fault::Forget, 1)];
        let scene = Scene {
            bounds: Bounds::these(2, faults),
            ..QEMU
        };
        caught(scene, Mutant::ContinuesStrangers, "I1 never two that run");
    }

    #[test]
    fn a3_running_is_repeated_without_a_look() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Monitor, 1), (Fault::Death, 1)]),
            ..QEMU
        };
        let reported = "I2 at the destination: seen there";
        caught(scene, Mutant::RepeatsRunning, reported);
    }

    #[test]
    fn a5_a_stranger_aborts() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1)]),
            ..PROXIES
        };
        caught(
            scene,
            Mutant::StrangersAbort,
            "I1 never a stale copy that runs",
        );
        // The guest may run on beside it, where a process is not its guest.
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1), (Fault::Forget, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::StrangersAbort, "I1 never two that run");
    }

    #[test]
    fn a6_closed_and_refused_is_taken_for_proof() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Cut, 2)]),
            ..PROXIES
        };
        caught(scene, Mutant::TrustsProxies, "I1 never two that run");
    }

    #[test]
    fn a9_a_guest_is_assumed_to_have_run() {
        let scene = Scene {
            resume: false,
            bounds: Bounds::these(2, [(Fault::Kill, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::AssumesThatItRan, "I6 runs as it did before");
    }

    #[test]
    fn commit_without_a_record() {
        let scene = Scene {
            bounds: Bounds::these(2, [(Fault::Kill, 1), (Fault::Death, 1)]),
            ..QEMU
        };
        caught(
            scene,
            Mutant::NoRecordOfCommitting,
            "I2 lost: it runs nowhere",
        );
    }

    #[test]
    fn a_start_without_a_record() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1), (Fault::Death, 1)]),
            ..QEMU
        };
        let stale = "I1 never a stale copy that runs";
        caught(scene, Mutant::NoRecordOfStarting, stale);
    }

    #[test]
    fn prepared_without_a_record() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1)]),
            ..QEMU
        };
        caught(
            scene,
            Mutant::NoRecordOfReceiving,
            super::explore::NEVER_NONE,
        );
    }

    #[test]
    fn a_vmm_is_ended_without_a_record() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1), (Fault::Monitor, 1)]),
            ..QEMU
        };
        caught(
            scene,
            Mutant::NoRecordOfAborting,
            super::explore::NEVER_NONE,
        );
    }

    #[test]
    fn a_record_that_could_not_be_written_is_ignored() {
        let scene = Scene {
            bounds: Bounds::these(2, [(Fault::Journal, 1), (Fault::Kill, 1)]),
            ..QEMU
        };
        caught(
            scene,
            Mutant::IgnoresFailedWrites,
            super::explore::NEVER_NONE,
        );
    }

    #[test]
    fn aborted_before_the_vmm_has_ended() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Monitor, 1), (Fault::Failure, 1)]),
            ..QEMU
        };
        let said = "I5 aborted, ended: its VMM has ended";
        caught(scene, Mutant::AbortsWithoutEnd, said);
    }

    #[test]
    fn a_server_forgets_that_it_may_have_told_the_guest_to_run() {
        let scene = Scene {
            bounds: Bounds::these(2, [(Fault::Kill, 1), (Fault::Death, 1)]),
            ..QEMU
        };
        caught(
            scene,
            Mutant::ForgetsThatItTold,
            "I1 never a stale copy that runs",
        );
    }

    #[test]
    fn a_guest_that_was_sent_on_is_told_to_run() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1), (Fault::SentOn, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::RunsWhatWasSentOn, "I1 never two that run");
    }

    #[test]
    fn commit_is_said_of_a_guest_that_runs_at_the_source() {
        let scene = Scene {
            bounds: Bounds::these(2, [(Fault::Kill, 1), (Fault::Hand, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::CommitsWithoutALook, "I1 never two that run");
    }

    #[test]
    fn commit_is_repeated_for_a_guest_that_was_continued_meanwhile() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Cut, 1), (Fault::Hand, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::AsksWithoutALook, "I1 never two that run");
    }

    #[test]
    fn a_switch_to_post_copy_without_a_record() {
        let scene = Scene {
            bounds: Bounds::these(1, []),
            ..POST_COPY
        };
        let over = "I9 over: the destination has all memory";
        caught(scene, Mutant::SwitchesWithoutRecord, over);
    }

    #[test]
    fn a_vmm_is_ended_after_the_switch_to_post_copy() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1)]),
            ..POST_COPY
        };
        let ended = "I5 the only copy is not ended";
        caught(scene, Mutant::EndsTheSwitched, ended);
    }

    /// Its server is killed when it has loaded everything, and the source's VMM ends.
    #[test]
    fn the_last_copy_of_a_guest_is_ended() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Kill, 1), (Fault::Death, 1)]),
            ..QEMU
        };
        let ended = "I5 the only copy is not ended";
        caught(scene, Mutant::EndsTheLoaded, ended);
    }

    #[test]
    fn post_copy_is_over_before_all_memory_has_come() {
        let scene = Scene {
            bounds: Bounds::these(1, []),
            ..POST_COPY
        };
        let over = "I9 over: the destination has all memory";
        caught(scene, Mutant::LeavesTheSwitched, over);
    }

    #[test]
    fn h1_a_paused_guest_does_not_get_its_disks() {
        let scene = Scene {
            resume: false,
            bounds: Bounds::these(1, []),
            ..QEMU
        };
        caught(scene, Mutant::PausedWithoutDisks, HAS_DISKS);
    }

    #[test]
    fn h1_a_destination_takes_the_disks_before_the_commit() {
        let scene = Scene {
            resume: false,
            bounds: Bounds::these(1, [(Fault::Kill, 1)]),
            ..QEMU
        };
        caught(
            scene,
            Mutant::TakesDisksEarly,
            "I7 never two that have the disks",
        );
    }

    #[test]
    fn h3_a_pause_is_taken_for_the_switchover() {
        let scene = Scene {
            bounds: Bounds::these(2, [(Fault::Owner, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::WaitsForRunning, super::explore::NEVER_NONE);
    }

    #[test]
    fn h3_a_pause_is_forgotten() {
        for resume in [true, false] {
            let scene = Scene {
                resume,
                bounds: Bounds::these(1, [(Fault::Owner, 1)]),
                ..QEMU
            };
            caught(scene, Mutant::ForgetsThePause, "I6 runs as it did before");
        }
    }

    #[test]
    fn h4_a_guest_that_has_ended_is_in_doubt() {
        let scene = Scene {
            bounds: Bounds::these(2, [(Fault::Kill, 1), (Fault::Death, 1)]),
            ..QEMU
        };
        let doubt = "I2 in doubt: a commit was sent";
        caught(scene, Mutant::DoubtsTheDead, doubt);
    }

    #[test]
    fn h4_the_destination_is_told_to_give_up_the_only_copy() {
        let scene = Scene {
            bounds: Bounds::these(2, [(Fault::Kill, 1), (Fault::Death, 1)]),
            ..QEMU
        };
        let ended = "I5 the only copy is not ended";
        caught(scene, Mutant::AbortsForTheDead, ended);
    }

    #[test]
    fn h5_a_guest_that_was_continued_and_stopped_is_unclear() {
        let scene = Scene {
            bounds: Bounds::these(1, [(Fault::Halt, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::DoubtsTheHalted, super::explore::NEVER_NONE);
    }

    #[test]
    fn h6_a_paused_guest_comes_back_without_its_disks() {
        let scene = Scene {
            resume: false,
            bounds: Bounds::these(1, [(Fault::Failure, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::ReturnsWithoutDisks, HAS_DISKS);
    }

    #[test]
    fn h8_a_guest_that_another_tool_has_moved_is_taken_for_ones_own() {
        let faults = [(Fault::Kill, 1), (Fault::Failure, 1), (Fault::Moved, 1)];
        let scene = Scene {
            bounds: Bounds::these(2, faults),
            ..QEMU
        };
        caught(scene, Mutant::TakesForItsOwn, "I1 never two that run");
    }

    #[test]
    fn a_migration_does_not_wait_for_the_copies_of_the_disks() {
        let scene = Scene {
            copies: true,
            bounds: Bounds::these(1, []),
            ..QEMU
        };
        caught(scene, Mutant::GoesOnWhenReady, WHOLE_DISKS);
    }

    #[test]
    fn a_guest_that_stays_has_gone_over_to_the_copies() {
        let scene = Scene {
            copies: true,
            bounds: Bounds::these(1, [(Fault::Failure, 1)]),
            ..QEMU
        };
        caught(scene, Mutant::GoesOverToTheCopies, WHOLE_DISKS);
    }

    /// None of them is found where the machines are used as they are meant to be.
    #[test]
    fn without_a_mutant_nothing_is_found() {
        let bounds = Bounds::these(2, [(Fault::Kill, 1), (Fault::Cut, 1)]);
        for scene in [QEMU, LIVE, PROXIES] {
            super::never_goes_wrong(Scene { bounds, ..scene });
        }
    }

    const WHOLE_DISKS: &str = "I8 never with disks that lack a write";
    const HAS_DISKS: &str = "I7 who has the guest has its disks";

    fn caught(scene: Scene, mutant: Mutant, property: &'static str) {
        let mutant = Some(mutant);
        let explored = exhaust(Scene { mutant, ..scene }, Some(property));
        expect(&explored.found, property);
    }
}

/// Explores all of a scene; returns what has happened in it.
fn never_goes_wrong(scene: Scene) -> Vec<&'static str> {
    let explored = exhaust(scene, None);
    tell_first(&explored.found);
    explored.happened
}

fn never_goes_wrong_at_random(scene: Scene, seed: u64, traces: u32) {
    let scene = Scene {
        hosts: if scene.engine == Engine::Qemu { 2 } else { 1 },
        attempts: 6,
        bounds: Bounds::any(200, 250)
            .with(Fault::Owner, 20)
            .with(Fault::Halt, 5)
            .with(Fault::Moved, 1),
        ..scene
    };
    tell_first(wander(scene, seed, traces, 2000).as_slice());
}

fn tell_first(found: &[Found]) {
    if let Some(found) = found.first() {
        let (property, len, trace) = (&found.property, found.len, &found.trace);
        panic!("{property}: not so after {len} steps\n{trace}");
    }
}

fn expect(found: &[Found], property: &str) {
    let names: Vec<_> = found.iter().map(|found| found.property.as_str()).collect();
    let Some(found) = found.iter().find(|found| found.property == property) else {
        panic!("not found: {property}; found: {names:?}")
    };
    tell(&format!("  found: {property}, after {} steps", found.len));
}

fn setting<T: FromStr>(name: &str, default: T) -> T {
    match env::var(name).map(|text| text.parse()) {
        Ok(Ok(value)) => value,
        Ok(Err(_)) => panic!("{name} is not a number in range"),
        Err(_) => default,
    }
}
