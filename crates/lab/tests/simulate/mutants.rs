//! Defects put back, one at a time: each must be found, which shows what the simulator sees.
//!
//! Most are past ones of `trust.md` (H1 to H14, L...) or of the model of `handover`, under its numbers (A1 to A9).

macro_rules! mutants {
    ($($(#[$told:meta])* $name:ident,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Mutant {
            $($(#[$told])* $name,)*
        }

        impl Mutant {
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

mutants! {
    // The hand-over and its journals.
    /// `commit`, a start, an acceptance, an end without a record of it.
    NoRecordOfCommitting,
    NoRecordOfStarting,
    NoRecordOfReceiving,
    NoRecordOfAborting,
    /// What is to follow a record is done although it could not be written.
    IgnoresFailedWrites,
    /// Records are written and not synced.
    ForgetsFsync,
    /// A1: `commit` is answered by whatever attempt the host has.
    AnswersByName,
    /// A3: *running* is repeated without a look.
    RepeatsRunning,
    /// A5: a server that does not know the attempt is taken for one that has aborted it.
    UnknownIsAborted,
    /// A6: closed and then refused is taken for proof.
    TrustsRefusals,
    /// A silent destination is taken for a dead one.
    SilenceIsEvidence,
    /// A9: a command that is run again assumes that the guest ran.
    AssumesThatItRan,
    /// *Aborted* is sent of a QEMU that could not be ended.
    AbortsWithoutEnd,
    /// A QEMU whose connections are gone is ended without a look whether it has loaded the guest.
    EndsTheLoaded,
    /// A server that was started again forgets that it may have told the guest to run.
    ForgetsThatItTold,
    /// A QEMU that has sent its guest on is requested to run.
    RunsWhatWasSentOn,
    /// `commit` is sent without a look at the source's own QEMU.
    CommitsWithoutALook,
    // What drives QEMUs.
    /// H1: a guest that is to stay paused does not get its disks at the destination; or it gets them early.
    PausedWithoutDisks,
    TakesDisksEarly,
    /// H3: every pause is taken for the switchover.
    TakesPausesForTheSwitchover,
    /// H4: a QEMU that has ended while nobody followed leaves the guest in doubt.
    DoubtsTheDead,
    /// H5: a guest that was continued and has stopped since is unclear.
    DoubtsTheHalted,
    /// H6: a paused guest that comes back does not get its disks.
    ComesBackWithoutDisks,
    /// H7: `migrate` does not look at its relay.
    IgnoresItsRelay,
    /// H8: what is found sent is taken for this attempt's.
    TakesItForItsOwn,
    /// H9: silence and refusals do not contradict a person.
    SettlesOnSilence,
    /// H14: entries of another QEMU count for a monitor that does not answer.
    TakesAnyRecord,
    /// What another tool sent while `migrate` got ready is continued when the attempt fails.
    ContinuesWhatAnotherSent,
    // Sessions.
    /// What comes on an old connection is taken for the new one's.
    MixesConnections,
    /// A reader gets bytes before they are judged.
    ReadsUnjudged,
    /// L9: acknowledgements that are due are never sent.
    NoHeartbeats,
    /// A connection that was welcomed says nothing until there is something to say: a storm of resets ends streams.
    NoFirstAcknowledgement,
    /// A writer does not ask for room.
    IgnoresRoom,
    /// The answer to an attempt that was given up counts.
    TakesLateWelcomes,
    /// Two streams of a session have one number.
    ReusesStreamNumbers,
    /// A server tells its client less than it has: bytes are repeated.
    ForgetsWhatItReceived,
    // Memory, policy, evacuation.
    /// A relay lets a SYNC overtake pages.
    SyncOvertakes,
    /// No one tells QEMU how much may be left.
    GuidesNothing,
    /// A host that does not answer is taken for one without the guest.
    TakesUnknownForSource,
}
