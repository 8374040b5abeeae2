//! The rows of the matrix.

use crate::libvirt::hosts::{Generation, Way};

/// One way to call `virsh migrate`, and what happens meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) flags: &'static [&'static str],
    pub(super) event: Event,
    /// What both ends must know.
    needs: Needs,
    /// It is run when it is named: its guest may hang by itself.
    pub(super) is_by_name: bool,
}

/// What happens during a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Nothing.
    None,
    /// The guest was paused before.
    Paused,
    /// The guest continues at the destination before all of its memory is there.
    Postcopy,
    /// So it does, and the migration breaks then: it is resumed.
    PostcopyResumed,
    /// The guest has a disk that goes with it.
    Storage,
    /// The guest moves to and fro, ten times in all.
    ToAndFro,
    /// `virsh domjobabort`.
    Abort(Phase),
    /// Something dies.
    Kill(Victim, Phase),
}

/// When it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// As soon as libvirt knows of the migration.
    Setup,
    /// Some of the memory has been sent for the first time.
    FirstRound,
    /// All of it has.
    LaterRound,
}

/// Who dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    NearProgram,
    FarProgram,
    DestinationQemu,
    DestinationLibvirtd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// Compression by QEMU itself, which libvirt knows since 9.4.
    Compression,
    /// A program on the way.
    Programs,
    /// A way that takes all connections from QEMU to QEMU.
    AllConnections,
}

const PARALLEL: &[&str] = &["--parallel"];

/// Slow enough for something to happen: the guest writes more than this, so that it does not end either.
const SLOW: &[&str] = &["--parallel", "--bandwidth", "12"];

const fn case(name: &'static str, flags: &'static [&'static str], event: Event) -> Case {
    Case {
        name,
        flags,
        event,
        needs: Needs::Nothing,
        is_by_name: false,
    }
}

impl Case {
    /// Whether it can be tried.
    pub(super) fn suits(&self, generation: &Generation, way: Way) -> bool {
        match self.needs {
            Needs::Nothing => true,
            Needs::Compression => generation.has_compression(),
            Needs::Programs => way != Way::Direct,
            Needs::AllConnections => way != Way::Relays,
        }
    }

    const fn needs(self, needs: Needs) -> Self {
        Self { needs, ..self }
    }

    const fn by_name(self) -> Self {
        Self {
            is_by_name: true,
            ..self
        }
    }
}

pub(super) const CASES: &[Case] = &[
    case("plain", &[], Event::None),
    case("parallel", PARALLEL, Event::None),
    case("p2p", &["--p2p"], Event::None),
    case("parallel, p2p", &["--p2p", "--parallel"], Event::None),
    case(
        "parallel, 4 connections",
        &["--parallel", "--parallel-connections", "4"],
        Event::None,
    ),
    case(
        "parallel, 8 connections",
        &["--parallel", "--parallel-connections", "8"],
        Event::None,
    ),
    case(
        "parallel, zstd of QEMU",
        &["--parallel", "--compressed", "--comp-methods", "zstd"],
        Event::None,
    )
    .needs(Needs::Compression),
    case(
        "parallel, zlib of QEMU",
        &["--parallel", "--compressed", "--comp-methods", "zlib"],
        Event::None,
    )
    .needs(Needs::Compression),
    case("parallel, paused guest", PARALLEL, Event::Paused),
    case("paused guest", &[], Event::Paused),
    case(
        "post-copy",
        &["--postcopy", "--postcopy-bandwidth", "0"],
        Event::Postcopy,
    ),
    case(
        "post-copy, resumed",
        &["--postcopy", "--postcopy-bandwidth", "8"],
        Event::PostcopyResumed,
    )
    .needs(Needs::AllConnections)
    // Under TCG, QEMU delivers an interrupt with its big lock held. When the guest's stack has not come, it waits so for ever, and
    // its monitor with it.
    .by_name(),
    case(
        "parallel, copied storage",
        &["--parallel", "--copy-storage-all"],
        Event::Storage,
    )
    .needs(Needs::AllConnections),
    case("TLS of libvirt", &["--tls"], Event::None),
    case(
        "parallel, TLS of libvirt",
        &["--parallel", "--tls"],
        Event::None,
    ),
    case(
        "parallel, bandwidth",
        &["--parallel", "--bandwidth", "60"],
        Event::None,
    ),
    case(
        "parallel, auto-converge",
        &["--parallel", "--auto-converge"],
        Event::None,
    ),
    case("parallel, to and fro", PARALLEL, Event::ToAndFro),
    case("abort in setup", SLOW, Event::Abort(Phase::Setup)),
    case(
        "abort in the first round",
        SLOW,
        Event::Abort(Phase::FirstRound),
    ),
    case(
        "abort in a later round",
        SLOW,
        Event::Abort(Phase::LaterRound),
    ),
    case(
        "source's relay or gateway killed in setup",
        SLOW,
        Event::Kill(Victim::NearProgram, Phase::Setup),
    )
    .needs(Needs::Programs),
    case(
        "source's relay or gateway killed in the first round",
        SLOW,
        Event::Kill(Victim::NearProgram, Phase::FirstRound),
    )
    .needs(Needs::Programs),
    case(
        "source's relay or gateway killed in a later round",
        SLOW,
        Event::Kill(Victim::NearProgram, Phase::LaterRound),
    )
    .needs(Needs::Programs),
    case(
        "destination's relay or gateway killed in setup",
        SLOW,
        Event::Kill(Victim::FarProgram, Phase::Setup),
    )
    .needs(Needs::Programs),
    case(
        "destination's relay or gateway killed in the first round",
        SLOW,
        Event::Kill(Victim::FarProgram, Phase::FirstRound),
    )
    .needs(Needs::Programs),
    case(
        "destination's relay or gateway killed in a later round",
        SLOW,
        Event::Kill(Victim::FarProgram, Phase::LaterRound),
    )
    .needs(Needs::Programs),
    case(
        "destination's QEMU killed in the first round",
        SLOW,
        Event::Kill(Victim::DestinationQemu, Phase::FirstRound),
    ),
    case(
        "destination's QEMU killed in a later round",
        SLOW,
        Event::Kill(Victim::DestinationQemu, Phase::LaterRound),
    ),
    case(
        "destination's libvirtd killed in the first round, aborted",
        SLOW,
        Event::Kill(Victim::DestinationLibvirtd, Phase::FirstRound),
    ),
];
