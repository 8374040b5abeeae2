//! The rows of the matrix.

use crate::libvirt::hosts::{Copied, Generation, Storage, Way};

/// A call of `virsh migrate`, and an event during the migration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) flags: &'static [&'static str],
    pub(super) event: Event,
    /// The guest's disks.
    pub(super) storage: Storage,
    /// The requirements.
    needs: Needs,
    /// It runs only if it is named, as its guest may hang by itself.
    pub(super) is_by_name: bool,
}

/// An event during a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Nothing.
    None,
    /// The guest is paused before.
    Paused,
    /// The guest continues at the destination before all of its memory is there.
    Postcopy,
    /// The migration breaks during post-copy, and is resumed.
    PostcopyResumed,
    /// The wire is cut for 3 s.
    Cut(Phase),
    /// The guest moves back and forth, ten times in all.
    ToAndFro,
    /// `virsh domjobabort`.
    Abort(Phase),
    /// A process is killed.
    Kill(Victim, Phase),
}

/// The phase of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// As soon as libvirt knows of the migration.
    Setup,
    /// Part of a disk has been copied.
    Disks,
    /// Part of the memory has been sent for the first time.
    FirstRound,
    /// All of it has been sent once.
    LaterRound,
}

/// The process that is killed.
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
    /// Compression by QEMU, which libvirt supports since 9.4.
    Compression,
    /// Relays or gateways.
    Programs,
    /// A way for all connections between the QEMUs.
    AllConnections,
    Gateways,
}

const PARALLEL: &[&str] = &["--parallel"];

/// Slow enough for events: the guest writes more than this, so the migration does not end.
const SLOW: &[&str] = &["--parallel", "--bandwidth", "12"];

const fn case(name: &'static str, flags: &'static [&'static str], event: Event) -> Case {
    Case {
        name,
        flags,
        event,
        storage: Storage::Shared,
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
            Needs::Gateways => way == Way::Gateways,
        }
    }

    const fn needs(self, needs: Needs) -> Self {
        Self { needs, ..self }
    }

    /// Disks of 64 MiB are copied.
    const fn copying(self, copied: Copied) -> Self {
        Self {
            storage: Storage::Copied(copied, 64),
            needs: Needs::AllConnections,
            ..self
        }
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
    case("parallel, copied storage", PARALLEL, Event::None).copying(Copied::Raw),
    case("copied storage", &[], Event::None).copying(Copied::Qcow2),
    case("parallel, copied storage, qcow2", PARALLEL, Event::None).copying(Copied::Qcow2),
    case(
        "parallel, copied storage over backing files",
        PARALLEL,
        Event::None,
    )
    .copying(Copied::Increment),
    case(
        "parallel, TLS of libvirt, copied storage",
        &["--parallel", "--tls"],
        Event::None,
    )
    .copying(Copied::Qcow2),
    case(
        "cut for 3 s while storage is copied",
        SLOW,
        Event::Cut(Phase::Disks),
    )
    .copying(Copied::Qcow2),
    case(
        "cut for 3 s after storage has been copied",
        SLOW,
        Event::Cut(Phase::FirstRound),
    )
    .copying(Copied::Qcow2),
    case(
        "abort while storage is copied",
        SLOW,
        Event::Abort(Phase::Disks),
    )
    .copying(Copied::Qcow2),
    case(
        "abort after storage has been copied",
        SLOW,
        Event::Abort(Phase::FirstRound),
    )
    .copying(Copied::Increment),
    case(
        "destination's QEMU killed while storage is copied",
        SLOW,
        Event::Kill(Victim::DestinationQemu, Phase::Disks),
    )
    .copying(Copied::Qcow2),
    case(
        "source's gateway killed while storage is copied",
        SLOW,
        Event::Kill(Victim::NearProgram, Phase::Disks),
    )
    .copying(Copied::Qcow2)
    .needs(Needs::Gateways),
    case(
        "destination's gateway killed while storage is copied",
        SLOW,
        Event::Kill(Victim::FarProgram, Phase::Disks),
    )
    .copying(Copied::Raw)
    .needs(Needs::Gateways),
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
