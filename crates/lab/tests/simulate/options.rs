//! What a run is made of: everything follows from a seed, and each fault can be left out to find the least that goes wrong.

use std::time::Duration;

use convergence::OnTimeout;

use crate::{mutants::Mutant, random::Random};

/// One run.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) seed: u64,
    pub(crate) hosts: usize,
    pub(crate) guests: usize,
    /// A guest's memory, in chunks, and how many of these it writes in a second.
    pub(crate) chunks: usize,
    pub(crate) writes: u64,
    /// Of each path between two hosts, in bytes per second; and the time of one way on the first path.
    pub(crate) rate: u64,
    pub(crate) delay: Duration,
    pub(crate) paths: usize,
    pub(crate) channels: usize,
    pub(crate) reconnect: Duration,
    pub(crate) timeout: Option<(Duration, OnTimeout)>,
    /// The journals are on disks and outlive their hosts' crashes.
    pub(crate) keeps_journals: bool,
    /// Guests do not move one by one: an evacuation empties the first host.
    pub(crate) evacuates: bool,
    /// Guests that their owners have paused from the beginning.
    pub(crate) paused: bool,
    /// When each is due; and the moment, from then on, that it goes with.
    pub(crate) faults: Vec<(Duration, Option<Moment>, Fault)>,
    /// From then on nothing fails any more.
    pub(crate) calm: Duration,
    pub(crate) mutant: Option<Mutant>,
}

/// A process is about to do something that is told with this word, when so many of these have passed.
pub(crate) type Moment = (&'static str, u32);

/// Any action, and those around which there is most to lose.
const MOMENTS: [&str; 10] = [
    "", "Prepare", "Persist", "Loaded", "Commit", "Start", "Running", "Look", "Aborted", "Resume",
];

/// What fails, and what people do. Numbers choose among what there is then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// All connections between two hosts end, and what was on its way is lost.
    Reset(usize),
    /// One end sees a connection end, the other hears nothing any more.
    HalfOpen(usize, usize),
    /// Nothing comes any more on the connections of two hosts, and nobody sees why.
    Swallow(usize),
    /// A path is silent; what was sent comes late.
    Silence(usize, Duration),
    /// Resets, one after the other.
    Storm(usize, Duration, Duration),
    Slow(usize, u64, Duration),
    /// A packet of a connection is lost, and what follows waits for it at one end.
    Late(usize, usize, Duration),
    /// A bit changes in one of the next parts that an end gets.
    Corrupt(usize, usize),
    /// Connections to a host are refused though it is there, as by a proxy or a firewall.
    Refuse(usize, Duration),
    KillMigrate(usize),
    /// `serve` is killed, and comes back.
    KillServe(usize, Duration),
    /// A QEMU ends: that which has the guest, or one that receives it.
    KillSource(usize),
    KillDestination(usize),
    /// `serve` ends and at once the QEMU that receives a guest, or that has it; or another tool sends that guest on, or its disk is full.
    KillBoth(usize, bool, Duration),
    SendOn(usize, bool, Duration),
    /// A host loses its power.
    Crash(usize, Duration),
    /// No journal can be written.
    Journal(usize, Duration),
    /// A QEMU does not answer its monitor.
    Monitor(usize, bool, Duration),
    /// The connection to a monitor breaks at the next `cont`, which is carried out or not.
    Break(usize, bool),
    /// A QEMU cannot be killed.
    Stuck(usize, Duration),
    /// The relay ends; QEMU waits for a SYNC to be sent and does not notice.
    Numb(usize),
    /// The owner pauses the guest or continues it; its disk is full.
    Pause(usize),
    Continue(usize),
    Halt(usize),
    Cancel(usize),
    /// An old command is run again, or a command to another host.
    Again(usize),
    /// A person who is wrong claims that a guest in doubt never ran.
    Settle(usize),
    /// Another tool moves the guest.
    OtherTool(usize),
    /// A QEMU is started at the monitor's path of one that has ended, and another client holds its monitor.
    NewQemu(usize),
}

impl Fault {
    /// The kind's name.
    pub(crate) fn kind(self) -> String {
        let told = format!("{self:?}");
        told.split('(').next().unwrap_or_default().to_owned()
    }

    fn random(random: &mut Random, kind: usize) -> Self {
        let any = random.below(1 << 16);
        let (end, short) = (random.below(2), random.millis(200, 9_000));
        let long = random.millis(1_000, 45_000);
        match kind {
            0 => Self::Reset(any),
            1 => Self::HalfOpen(any, end),
            2 => Self::Swallow(any),
            3 | 4 => Self::Silence(any, long),
            5 => Self::Storm(any, random.millis(300, 2_000), long),
            6 => Self::Slow(any, 2 + random.number() % 9, long),
            7 | 8 => Self::Corrupt(any, end),
            9 => Self::Refuse(any, short),
            10..=13 => Self::KillMigrate(any),
            14..=16 => Self::KillServe(any, short),
            17 => Self::KillSource(any),
            18 | 19 => Self::KillDestination(any),
            20 => Self::Crash(any, long),
            21 | 22 => Self::Journal(any, short),
            23 | 39 => Self::Monitor(any, end == 0, short),
            24 => Self::Break(any, end == 0),
            25 => Self::Stuck(any, short),
            26 => Self::Numb(any),
            27 => Self::Pause(any),
            28 => Self::Continue(any),
            29 | 33 => Self::Halt(any),
            30 => Self::Cancel(any),
            31 => Self::Again(any),
            32 => Self::Settle(any),
            34 => Self::OtherTool(any),
            35 => Self::KillBoth(any, end == 0, short),
            36 => Self::SendOn(any, end == 0, short),
            37 => Self::NewQemu(any),
            38 => Self::Storm(any, random.millis(100, 900), long),
            _ => Self::Late(any, end, short),
        }
    }

    /// The same, for the guest and the hosts of a command.
    pub(crate) fn aimed(mut self, guest: usize, hosts: [usize; 2]) -> Self {
        match &mut self {
            Self::Crash(host, _) => *host = hosts[*host % 2],
            Self::KillServe(host, _)
            | Self::KillBoth(host, ..)
            | Self::SendOn(host, ..)
            | Self::Refuse(host, _)
            | Self::Journal(host, _) => *host = hosts[1],
            Self::KillSource(of)
            | Self::KillDestination(of)
            | Self::Monitor(of, ..)
            | Self::Break(of, _)
            | Self::Stuck(of, _)
            | Self::Numb(of)
            | Self::Pause(of)
            | Self::Continue(of)
            | Self::Halt(of)
            | Self::Cancel(of) => *of = guest,
            _ => {}
        }
        self
    }
}

impl Options {
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let hosts = 2 + random.below(4);
        let chunks = random.pick(&[4, 16, 64, 128]);
        let evacuates = random.percent(25);
        // An evacuation does not take long.
        let minutes = if evacuates {
            1
        } else {
            random.pick(&[2, 5, 10])
        };
        let calm = Duration::from_secs(60 * minutes);
        // Some runs have one fault, some a storm of them; most of a few kinds and with a few moments, which meet more often then, and
        // some two at once.
        let number = random.pick(&[0, 1, 2, 4, 8, 16, 32, 64]);
        const KINDS: usize = 41;
        let few: [usize; 4] = std::array::from_fn(|_| random.below(KINDS));
        let words: [&str; 2] = std::array::from_fn(|_| random.pick(&MOMENTS));
        let mut when = (Duration::ZERO, None);
        let mut faults: Vec<_> = (0..number)
            .map(|_| {
                if random.percent(75) {
                    let word = match random.percent(75) {
                        true => random.pick(&words),
                        false => random.pick(&MOMENTS),
                    };
                    let passed = match word {
                        "" => u32::try_from(random.below(30)).unwrap(),
                        _ => random.pick(&[0, 0, 0, 1, 2, 4]),
                    };
                    let goes_with = random.percent(60).then_some((word, passed));
                    when = (random.millis(0, 60_000 * minutes), goes_with);
                }
                let kind = match random.percent(75) {
                    true => random.pick(&few),
                    false => random.below(KINDS),
                };
                (when.0, when.1, Fault::random(&mut random, kind))
            })
            .collect();
        faults.sort_by_key(|(at, ..)| *at);
        let timeouts = [
            None,
            Some((Duration::from_secs(20), OnTimeout::Abort)),
            Some((Duration::from_secs(20), OnTimeout::Pause)),
            Some((Duration::from_secs(15), OnTimeout::Force)),
            Some((Duration::from_secs(15), OnTimeout::Throttle)),
        ];
        Self {
            seed,
            hosts,
            guests: 1 + random.below(3),
            chunks,
            writes: random.pick(&[0, 1, 5, 20, 60]),
            rate: random.pick(&[125, 400, 1250]) * 1_000_000,
            delay: random.pick(&[100, 1_000, 20_000].map(Duration::from_micros)),
            paths: 1 + random.below(3),
            channels: 1 + random.below(3),
            reconnect: Duration::from_secs(random.pick(&[5, 30, 30])),
            timeout: random.pick(&timeouts),
            keeps_journals: random.percent(30),
            evacuates,
            paused: random.percent(20),
            faults,
            calm,
            mutant: None,
        }
    }
}
