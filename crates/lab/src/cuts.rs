//! The table of experiments with cuts: when a migration's link breaks, how, for how long, and on which paths.
//!
//! ```text
//!  Table::rows() ─> Row ─> run(row, paths, |experiment| the migration)
//!                                           └ experiment.reached(phase): the cut, if it is the row's phase; mended later
//! ```
//! A path is a [`Middlebox`] or a [`Wire`]. Whoever makes the migration reports its phases, and is held up while the link is cut,
//! so that no phase is over before.

use std::fmt;
use std::mem;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, ensure};

use crate::middlebox::{Admission, Change, Direction, Flow, Mark, Middlebox, Status, Which};
use crate::net::{End, Wire};
use crate::watched::Watched;

/// How many experiments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Every phase with every kind, length and number of paths.
    Full,
    /// Every phase and every kind, none for longer than a second.
    Quick,
}

/// One experiment. Its name is what it displays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// When the link is cut.
    pub phase: Phase,
    /// How, and for how long.
    pub kind: Kind,
    /// On which paths.
    pub paths: Paths,
}

/// What a migration has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The first connection is about to be made.
    FirstConnection,
    /// Pages of the first round of the pre-copy are sent.
    FirstRound,
    /// Those of a later one.
    LaterRound,
    /// The guest has been paused.
    Switchover,
    /// The state has been sent, and the two sides agree on who has the guest.
    HandOver,
}

/// What is done to the paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The newest connection of a path is reset.
    ResetOne,
    /// Every second one is, from the oldest.
    ResetSome,
    /// All are.
    ResetAll,
    /// All are reset, and again every 300 ms for so long.
    ResetsFor(Duration),
    /// All are reset, and the address refuses connections for so long.
    Refused(Duration),
    /// Nothing passes, and neither end is told. Behind a middlebox, existing connections stay so; a wire passes again after so long.
    Silent(Duration),
    /// The same in one direction only.
    HalfOpen(Direction, Duration),
    /// The wire is pulled: the source has no carrier for so long.
    Pulled(Duration),
}

/// How many paths of a migration are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paths {
    /// The first.
    One,
    /// All: both, where there are two.
    Both,
}

/// What can be cut.
pub trait Path: Sync {
    /// Whether it can be cut in this way.
    fn supports(&self, kind: Kind) -> bool;
    /// Cuts it.
    fn cut(&self, kind: Kind) -> Result<()>;
    /// Ends a cut of this kind.
    fn mend(&self, kind: Kind) -> Result<()>;
}

/// An experiment while it runs.
pub struct Experiment<'a> {
    row: Row,
    paths: Vec<&'a dyn Path>,
    state: Watched<State>,
}

/// What has been done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// When the link was cut, from the beginning; `None` if the phase was never reached.
    pub cut_after: Option<Duration>,
    /// How long it was cut until it was mended, if it had to be: less than the row says if the migration ended before.
    pub lasted: Option<Duration>,
}

/// Makes an experiment: `migration` reports its phases and gives its result, and the link is mended when it returns at the latest.
///
/// # Errors
/// When a path cannot be cut or mended.
pub fn run<T>(
    row: Row,
    paths: &[&dyn Path],
    migration: impl FnOnce(&Experiment<'_>) -> T,
) -> Result<(T, Outcome)> {
    ensure!(row.suits(paths), "these paths cannot be cut so: {row}");
    let experiment = Experiment {
        row,
        paths: row.paths.of(paths).to_vec(),
        state: Watched::default(),
    };
    let begin = Instant::now();
    let result = thread::scope(|scope| {
        scope.spawn(|| experiment.mend_in_time());
        let _over = Over(&experiment);
        migration(&experiment)
    });
    let state = mem::take(&mut *experiment.state.lock());
    if let Some(error) = state.failure {
        return Err(error.context(format!("experiment: {row}")));
    }
    let cut_after = state.cut.map(|at| at.saturating_duration_since(begin));
    let lasted = state.lasted;
    Ok((result, Outcome { cut_after, lasted }))
}

impl Table {
    /// The experiments, in an order that does not change.
    pub fn rows(self) -> impl Iterator<Item = Row> {
        let rows = Phase::ALL.into_iter().flat_map(|phase| {
            let kinds = kinds().into_iter();
            kinds.flat_map(move |kind| {
                [Paths::One, Paths::Both].map(|paths| Row { phase, kind, paths })
            })
        });
        rows.filter(move |row| self == Self::Full || row.is_quick())
    }
}

impl Row {
    /// Whether the experiment can be made with these paths.
    pub fn suits(&self, paths: &[&dyn Path]) -> bool {
        let count = match self.paths {
            Paths::One => 1,
            Paths::Both => 2,
        };
        let cut = self.paths.of(paths);
        cut.len() >= count && cut.iter().all(|path| path.supports(self.kind))
    }

    /// Each phase with all connections reset on both paths, and each other kind once.
    fn is_quick(&self) -> bool {
        if self.kind == Kind::ResetAll {
            return self.paths == Paths::Both;
        }
        let is_short = self.kind.lasts().is_none_or(|lasts| lasts == QUICK);
        let mut quick = kinds().into_iter().filter(|kind| {
            *kind != Kind::ResetAll && kind.lasts().is_none_or(|lasts| lasts == QUICK)
        });
        let turn = quick.position(|kind| kind == self.kind);
        is_short
            && turn.is_some_and(|turn| {
                let paths = [Paths::One, Paths::Both][turn % 2];
                Phase::ALL[turn % Phase::ALL.len()] == self.phase && paths == self.paths
            })
    }
}

impl Phase {
    /// In their order.
    pub const ALL: [Self; 5] = [
        Self::FirstConnection,
        Self::FirstRound,
        Self::LaterRound,
        Self::Switchover,
        Self::HandOver,
    ];
}

impl Kind {
    /// How long it lasts; `None` if it is over at once.
    pub fn lasts(self) -> Option<Duration> {
        match self {
            Self::ResetOne | Self::ResetSome | Self::ResetAll => None,
            Self::ResetsFor(lasts)
            | Self::Refused(lasts)
            | Self::Silent(lasts)
            | Self::HalfOpen(_, lasts)
            | Self::Pulled(lasts) => Some(lasts),
        }
    }
}

impl Paths {
    fn of<'a, 'b>(self, paths: &'b [&'a dyn Path]) -> &'b [&'a dyn Path] {
        match self {
            Self::One => paths.get(..1).unwrap_or_default(),
            Self::Both => paths,
        }
    }
}

impl Experiment<'_> {
    /// Reports a phase. If it is that of the experiment, the link has been cut when this returns; the first time only.
    pub fn reached(&self, phase: Phase) {
        let is_now = phase == self.row.phase;
        if is_now && !mem::replace(&mut self.state.lock().is_reached, true) {
            let done = self.each(|path| path.cut(self.row.kind));
            self.state.update(|state| {
                state.cut = Some(Instant::now());
                state.note(done.context("cutting"));
            });
        }
    }

    /// Waits until the link works again.
    pub fn wait_until_mended(&self, within: Duration) -> bool {
        let mended = |state: &State| state.is_mended.then_some(());
        self.state.wait(within, mended).is_some()
    }

    /// Mends the link when the time has come, or the migration has ended.
    fn mend_in_time(&self) {
        let Some(begin) = self.await_cut() else {
            return;
        };
        let kind = self.row.kind;
        let Some(lasts) = kind.lasts() else {
            self.state.update(|state| state.is_mended = true);
            return;
        };
        let step = match kind {
            Kind::ResetsFor(_) => AGAIN,
            _ => lasts,
        };
        loop {
            let left = lasts.saturating_sub(begin.elapsed());
            let over = |state: &State| state.is_over.then_some(());
            if self.state.wait(left.min(step), over).is_some() || begin.elapsed() >= lasts {
                break;
            }
            let done = self.each(|path| path.cut(kind));
            self.state.lock().note(done.context("cutting again"));
        }
        let done = self.each(|path| path.mend(kind));
        self.state.update(|state| {
            state.lasted = Some(begin.elapsed());
            state.is_mended = true;
            state.note(done.context("mending"));
        });
    }

    /// When the link was cut; `None` if the migration has ended without.
    fn await_cut(&self) -> Option<Instant> {
        let look = |state: &State| match state.cut {
            Some(at) => Some(Some(at)),
            None => state.is_over.then_some(None),
        };
        loop {
            if let Some(found) = self.state.wait(Duration::from_secs(60), look) {
                return found;
            }
        }
    }

    fn each(&self, what: impl Fn(&dyn Path) -> Result<()>) -> Result<()> {
        self.paths.iter().try_for_each(|path| what(*path))
    }
}

/// Connections through a middlebox. Where none is open, the next one is reset behind its first byte.
impl Path for Middlebox {
    fn supports(&self, kind: Kind) -> bool {
        !matches!(kind, Kind::Pulled(_))
    }

    fn cut(&self, kind: Kind) -> Result<()> {
        match kind {
            Kind::ResetOne | Kind::ResetSome | Kind::ResetAll => self.reset_or_plan(kind),
            Kind::ResetsFor(_) => {
                self.apply(Which::All, Change::Reset);
            }
            Kind::Refused(_) => {
                self.admit(Admission::Refuse)?;
                self.apply(Which::All, Change::Reset);
            }
            Kind::Silent(_) => {
                self.admit(Admission::Silence)?;
                self.apply(Which::All, Change::Flow(Flow::Drop));
            }
            // No handshake succeeds if one direction is lost.
            Kind::HalfOpen(direction, _) => {
                self.admit(Admission::Silence)?;
                self.apply(Which::All, Change::OneWay(direction, Flow::Drop));
            }
            Kind::Pulled(_) => {}
        }
        Ok(())
    }

    fn mend(&self, kind: Kind) -> Result<()> {
        match kind {
            Kind::Refused(_) | Kind::Silent(_) | Kind::HalfOpen(..) => self.admit(Admission::Pass),
            _ => Ok(()),
        }
    }
}

impl Middlebox {
    fn reset_or_plan(&self, kind: Kind) {
        let all = self.connections();
        let is_open =
            |number: &usize| matches!(all[*number].status, Status::Open | Status::Dialling);
        let open: Vec<_> = (0..all.len()).filter(is_open).collect();
        let chosen = match kind {
            Kind::ResetOne => open.last().copied().into_iter().collect(),
            Kind::ResetSome => open.into_iter().step_by(2).collect(),
            _ => open,
        };
        let reset = |number: &usize| self.apply(Which::One(*number), Change::Reset);
        if chosen.iter().map(reset).sum::<usize>() == 0 {
            let mark = Mark {
                connection: all.len(),
                direction: Direction::ToListener,
                bytes: 1,
            };
            self.apply_at(mark, Which::All, Change::Reset);
        }
    }
}

/// The kernel's own connections: they survive what is short.
impl Path for Wire {
    fn supports(&self, kind: Kind) -> bool {
        matches!(kind, Kind::Silent(_) | Kind::HalfOpen(..) | Kind::Pulled(_))
    }

    fn cut(&self, kind: Kind) -> Result<()> {
        match kind {
            Kind::Silent(_) => End::BOTH.iter().try_for_each(|end| self.lose(*end)),
            Kind::HalfOpen(Direction::ToListener, _) => self.lose(End::Source),
            Kind::HalfOpen(Direction::ToDialler, _) => self.lose(End::Destination),
            Kind::Pulled(_) => self.pull(End::Destination),
            _ => Ok(()),
        }
    }

    fn mend(&self, kind: Kind) -> Result<()> {
        match kind {
            Kind::Pulled(_) => self.plug(),
            _ => self.deliver(),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, {}", self.phase, self.kind, self.paths)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FirstConnection => "first connection",
            Self::FirstRound => "first round",
            Self::LaterRound => "later round",
            Self::Switchover => "switchover",
            Self::HandOver => "hand-over",
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ResetOne => "reset one",
            Self::ResetSome => "reset some",
            Self::ResetAll => "reset all",
            Self::ResetsFor(_) => "reset all every 300 ms",
            Self::Refused(_) => "refused",
            Self::Silent(_) => "silent",
            Self::HalfOpen(Direction::ToListener, _) => "half-open there",
            Self::HalfOpen(Direction::ToDialler, _) => "half-open back",
            Self::Pulled(_) => "pulled",
        })?;
        match self.lasts() {
            Some(lasts) => write!(f, " for {} s", lasts.as_secs_f64()),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::One => "one path",
            Self::Both => "both paths",
        })
    }
}

#[derive(Debug, Default)]
struct State {
    is_reached: bool,
    /// When the link was cut.
    cut: Option<Instant>,
    lasted: Option<Duration>,
    is_mended: bool,
    /// The migration has ended.
    is_over: bool,
    /// The first thing that went wrong.
    failure: Option<Error>,
}

impl State {
    fn note(&mut self, done: Result<()>) {
        if let Err(error) = done {
            self.failure.get_or_insert(error);
        }
    }
}

/// Ends the wait for a cut, and the cut, also if the migration panics.
struct Over<'a, 'b>(&'a Experiment<'b>);

impl Drop for Over<'_, '_> {
    fn drop(&mut self) {
        self.0.state.update(|state| state.is_over = true);
    }
}

/// How long cuts last: below what a heartbeat sees, about what it takes, what a user notices, and near the limit of a reconnect.
const LENGTHS: [Duration; 4] = [
    Duration::from_millis(100),
    QUICK,
    Duration::from_secs(5),
    Duration::from_secs(25),
];

/// The length of the quick experiments.
const QUICK: Duration = Duration::from_secs(1);

/// How long a link that breaks again and again is put up with: longer than any timeout.
const MINUTE: Duration = Duration::from_secs(60);

/// How often connections are reset by [`Kind::ResetsFor`].
const AGAIN: Duration = Duration::from_millis(300);

/// All kinds with all lengths.
fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::ResetOne, Kind::ResetSome, Kind::ResetAll];
    for lasts in LENGTHS {
        kinds.extend([
            Kind::ResetsFor(lasts),
            Kind::Refused(lasts),
            Kind::Silent(lasts),
            Kind::HalfOpen(Direction::ToListener, lasts),
            Kind::HalfOpen(Direction::ToDialler, lasts),
            Kind::Pulled(lasts),
        ]);
    }
    kinds.push(Kind::ResetsFor(MINUTE));
    kinds
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::net::link_of_wires_or_skip;
    use crate::net::tests::{connect, expect, expect_nothing};

    const LIMIT: Duration = Duration::from_secs(60);
    const FOREVER: Duration = Duration::from_secs(3600);

    /// A middlebox with so many connections, which are open at both ends.
    fn connected(count: usize) -> (Middlebox, TcpListener, Vec<[TcpStream; 2]>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let middlebox = Middlebox::new(listener.local_addr().unwrap()).unwrap();
        let pairs = (0..count).map(|_| {
            let dialler = TcpStream::connect(middlebox.address()).unwrap();
            [dialler, listener.accept().unwrap().0]
        });
        let pairs = pairs.collect();
        middlebox.wait_for_connections(count, LIMIT).unwrap();
        (middlebox, listener, pairs)
    }

    fn row(kind: Kind, paths: Paths) -> Row {
        let phase = Phase::LaterRound;
        Row { phase, kind, paths }
    }

    fn is_open(middlebox: &Middlebox) -> Vec<bool> {
        let connections = middlebox.connections().into_iter();
        connections.map(|it| it.status == Status::Open).collect()
    }

    #[test]
    fn the_table_is_complete_and_names_are_unique() {
        let rows: Vec<_> = Table::Full.rows().collect();
        assert_eq!(rows.len(), 5 * (3 + 4 * 6 + 1) * 2);
        let names: BTreeSet<_> = rows.iter().map(Row::to_string).collect();
        assert_eq!(names.len(), rows.len());
        assert!(names.contains("switchover: silent for 0.1 s, one path"));
        assert!(names.contains("hand-over: reset all, both paths"));
    }

    #[test]
    fn the_quick_table_has_every_phase_and_kind() {
        let rows: Vec<_> = Table::Quick.rows().collect();
        assert_eq!(rows.len(), 5 + 8);
        for phase in Phase::ALL {
            assert!(rows.iter().any(|row| row.phase == phase));
        }
        let kinds: BTreeSet<_> = rows.iter().map(|row| row.kind.to_string()).collect();
        assert_eq!(kinds.len(), 9);
        assert!(
            rows.iter()
                .all(|row| row.kind.lasts().is_none_or(|it| it <= QUICK))
        );
    }

    #[test]
    fn a_cut_is_in_its_phase_and_once() {
        let (middlebox, _listener, mut pairs) = connected(2);
        let (result, outcome) = run(
            row(Kind::ResetAll, Paths::One),
            &[&middlebox],
            |experiment| {
                experiment.reached(Phase::FirstRound);
                assert_eq!(is_open(&middlebox), [true; 2]);
                experiment.reached(Phase::LaterRound);
                assert_eq!(is_open(&middlebox), [false; 2]);
                pairs.push([
                    TcpStream::connect(middlebox.address()).unwrap(),
                    TcpStream::connect(middlebox.address()).unwrap(),
                ]);
                middlebox.wait_for_connections(4, LIMIT).unwrap();
                experiment.reached(Phase::LaterRound);
                experiment.wait_until_mended(LIMIT)
            },
        )
        .unwrap();
        assert!(result && outcome.cut_after.is_some() && outcome.lasted.is_none());
        assert_eq!(is_open(&middlebox), [false, false, true, true]);
    }

    #[test]
    fn a_phase_that_is_not_reached_cuts_nothing() {
        let (middlebox, _listener, _pairs) = connected(1);
        let row = row(Kind::Refused(FOREVER), Paths::One);
        let ((), outcome) = run(row, &[&middlebox], |_| ()).unwrap();
        assert_eq!(outcome, Outcome::default());
        assert_eq!(is_open(&middlebox), [true]);
    }

    #[test]
    fn one_some_or_all_are_reset() {
        for (kind, open) in [
            (Kind::ResetOne, [true, true, true, false]),
            (Kind::ResetSome, [false, true, false, true]),
            (Kind::ResetAll, [false; 4]),
        ] {
            let (middlebox, _listener, _pairs) = connected(4);
            let reach = |experiment: &Experiment<'_>| experiment.reached(Phase::LaterRound);
            run(row(kind, Paths::One), &[&middlebox], reach).unwrap();
            assert_eq!(is_open(&middlebox), open, "{kind}");
        }
    }

    #[test]
    fn a_connection_to_come_is_reset_behind_its_first_byte() {
        let (middlebox, _listener, _) = connected(0);
        let reach = |experiment: &Experiment<'_>| experiment.reached(Phase::LaterRound);
        run(row(Kind::ResetOne, Paths::One), &[&middlebox], reach).unwrap();
        let mut dialler = TcpStream::connect(middlebox.address()).unwrap();
        dialler.write_all(b"12").unwrap();
        middlebox.wait_for_changes(LIMIT).unwrap();
        assert_eq!(is_open(&middlebox), [false]);
        assert_eq!(middlebox.connections()[0].to_listener.passed, 1);
    }

    #[test]
    fn one_path_or_both_are_cut() {
        for (paths, open) in [(Paths::One, true), (Paths::Both, false)] {
            let (first, _listener, _pairs) = connected(1);
            let (second, _other, _others) = connected(1);
            let reach = |experiment: &Experiment<'_>| experiment.reached(Phase::LaterRound);
            run(row(Kind::ResetAll, paths), &[&first, &second], reach).unwrap();
            assert_eq!(is_open(&first), [false]);
            assert_eq!(is_open(&second), [open]);
        }
        let (only, ..) = connected(0);
        assert!(run(row(Kind::ResetAll, Paths::Both), &[&only], |_| ()).is_err());
        let pulled = row(Kind::Pulled(QUICK), Paths::One);
        assert!(run(pulled, &[&only], |_| ()).is_err());
    }

    #[test]
    fn an_address_refuses_until_the_time_is_over_or_the_migration() {
        for (lasts, waits) in [(LENGTHS[0], true), (FOREVER, false)] {
            let (middlebox, ..) = connected(1);
            let row = row(Kind::Refused(lasts), Paths::One);
            let ((), outcome) = run(row, &[&middlebox], |experiment| {
                experiment.reached(Phase::LaterRound);
                assert_eq!(is_open(&middlebox), [false]);
                if waits {
                    assert!(experiment.wait_until_mended(LIMIT));
                } else {
                    let refused = TcpStream::connect(middlebox.address()).unwrap_err();
                    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
                }
            })
            .unwrap();
            assert_eq!(outcome.lasted.is_some_and(|it| it >= lasts), waits);
            TcpStream::connect(middlebox.address()).unwrap();
        }
    }

    #[test]
    fn connections_are_reset_again_and_again() {
        let (middlebox, ..) = connected(1);
        let row = row(Kind::ResetsFor(FOREVER), Paths::One);
        run(row, &[&middlebox], |experiment| {
            experiment.reached(Phase::LaterRound);
            for _ in 0..2 {
                let mut dialler = TcpStream::connect(middlebox.address()).unwrap();
                let error = dialler.read(&mut [0]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            }
        })
        .unwrap();
    }

    #[test]
    fn silent_connections_stay_so_and_new_ones_pass_afterwards() {
        let there = Kind::HalfOpen(Direction::ToListener, FOREVER);
        let back = Kind::HalfOpen(Direction::ToDialler, FOREVER);
        for (kind, drops) in [
            (Kind::Silent(FOREVER), [true, true]),
            (there, [true, false]),
            (back, [false, true]),
        ] {
            let (middlebox, listener, pairs) = connected(1);
            run(row(kind, Paths::One), &[&middlebox], |experiment| {
                experiment.reached(Phase::LaterRound);
                for mut end in &pairs[0] {
                    end.write_all(b"x").unwrap();
                }
                let seen = |connections: &[crate::middlebox::Connection]| {
                    let ways = Direction::BOTH.map(|way| connections[0].traffic(way));
                    let expected = drops.map(u64::from);
                    ways.map(|way| way.dropped) == expected
                        && ways.map(|way| 1 - way.passed) == expected
                };
                middlebox.wait_until(LIMIT, seen).unwrap();
            })
            .unwrap();
            let mut dialler = TcpStream::connect(middlebox.address()).unwrap();
            listener.accept().unwrap().0.write_all(b"y").unwrap();
            dialler.read_exact(&mut [0]).unwrap();
        }
    }

    #[test]
    fn a_panic_of_the_migration_mends_the_link() {
        let (middlebox, ..) = connected(0);
        let row = row(Kind::Refused(FOREVER), Paths::One);
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run(row, &[&middlebox], |experiment| {
                experiment.reached(Phase::LaterRound);
                panic!("as a test does that fails");
            })
        }));
        assert!(panics.is_err());
        TcpStream::connect(middlebox.address()).unwrap();
    }

    #[test]
    fn wires_are_cut_and_mended() {
        let Some(link) = link_of_wires_or_skip(&[None, None]).unwrap() else {
            return;
        };
        let paths: Vec<&dyn Path> = link.wires.iter().map(|wire| wire as &dyn Path).collect();
        let rows = Table::Full.rows().filter(|row| {
            row.phase == Phase::LaterRound && row.kind.lasts() == Some(QUICK) && row.suits(&paths)
        });
        assert_eq!(rows.count(), 4 * 2);
        let kinds = [
            Kind::Silent(FOREVER),
            Kind::HalfOpen(Direction::ToListener, FOREVER),
            Kind::HalfOpen(Direction::ToDialler, FOREVER),
            Kind::Pulled(FOREVER),
        ];
        let rows = kinds
            .into_iter()
            .flat_map(|kind| [Paths::One, Paths::Both].map(|paths| row(kind, paths)));
        let [wire, other] = &link.wires[..] else {
            unreachable!();
        };
        for row in rows {
            let [source, destination] = &connect(&link, wire, wire.address(End::Destination));
            run(row, &paths, |experiment| {
                experiment.reached(Phase::LaterRound);
                for (mut from, to, way) in [
                    (source, destination, Direction::ToListener),
                    (destination, source, Direction::ToDialler),
                ] {
                    from.write_all(b"x").unwrap();
                    let passes = matches!(row.kind, Kind::HalfOpen(lost, _) if lost != way);
                    if passes {
                        expect(to, b"x");
                    } else {
                        expect_nothing(to);
                    }
                }
                if row.paths == Paths::One {
                    connect(&link, other, other.address(End::Destination));
                }
            })
            .unwrap();
            // What was lost comes, too.
            for (mut from, mut to) in [(source, destination), (destination, source)] {
                from.write_all(b"y").unwrap();
                let mut read = [0];
                while read != *b"y" {
                    to.read_exact(&mut read).unwrap();
                }
            }
        }
    }
}
