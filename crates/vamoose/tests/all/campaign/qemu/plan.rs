//! The plan of an experiment with two QEMUs: everything that is random.

use std::fmt;

use lab::qemu::AWKWARD;

use super::host::RECONNECT;
use crate::campaign::fault::{Choices, Fault, Kind, Role, list};
use crate::campaign::random::Random;

/// One experiment.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) number: u64,
    /// Indices of the QEMUs: the source's, the destination's, and the next destination's.
    pub(crate) versions: [usize; 3],
    /// Whether the guest runs, or is paused all the time.
    pub(crate) runs: bool,
    /// Whether destinations are started with -S.
    pub(crate) paused: bool,
    pub(crate) content: u64,
    pub(crate) options: Vec<String>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) then: Then,
    pub(crate) next: Next,
}

/// In the last round it makes a source of a version before 8 abort or hang (docs/qemu.md).
pub(crate) const BREAKS_QEMU_7: Kind = Kind::Kill(Role::Migrate);

/// What follows a successful migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Nothing,
    /// The same command is run again.
    SameCommand,
    /// The destination's QEMU is killed, and the same command run again.
    DestinationDies,
    /// The guest moves on to another host, then the command is run again, perhaps after a restart of the server.
    MovesOn {
        restart: bool,
    },
}

/// The migration that follows a failed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    /// To another host.
    pub(crate) other_host: bool,
    /// To a QEMU of the same name.
    pub(crate) same_name: bool,
    /// Followed by the old command.
    pub(crate) old_command: bool,
}

impl Plan {
    /// Draws a plan with `versions` QEMUs to choose from; `newer` are those of version 8 or later.
    pub(crate) fn draw(
        seed: u64,
        number: u64,
        choices: &Choices,
        newer: &[usize],
        versions: usize,
    ) -> Self {
        let random = &mut Random::of_experiment(seed, number);
        let version = |_| usize::try_from(random.below(versions as u64)).unwrap_or(0);
        let mut versions = [0, 1, 2].map(version);
        let faults = choices.draw(random);
        if faults.iter().any(|fault| fault.kind == BREAKS_QEMU_7) {
            versions[0] = random.choose(newer);
        }
        Self {
            number,
            versions,
            faults,
            runs: random.percent(90),
            paused: random.percent(50),
            content: random.below(CONTENTS),
            options: draw_options(random),
            then: random.weighted(&[
                (50, Then::Nothing),
                (20, Then::SameCommand),
                (10, Then::DestinationDies),
                (10, Then::MovesOn { restart: false }),
                (10, Then::MovesOn { restart: true }),
            ]),
            next: Next {
                other_host: random.percent(50),
                same_name: random.percent(50),
                old_command: random.percent(30),
            },
        }
    }

    /// The plainest migration.
    pub(crate) fn without_faults() -> Self {
        Self {
            number: 0,
            versions: [0; 3],
            runs: true,
            paused: true,
            content: 0,
            options: vec!["--method".to_owned(), "none".to_owned()],
            faults: Vec::new(),
            then: Then::Nothing,
            next: Next {
                other_host: false,
                same_name: false,
                old_command: false,
            },
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let guest = if self.runs { "runs" } else { "is paused" };
        let waits = if self.paused { "with -S" } else { "without -S" };
        write!(
            f,
            "{} (the guest {guest}, destinations {waits}, {}; then {:?}, {:?})",
            list(&self.faults),
            self.options.join(" "),
            self.then,
            self.next
        )
    }
}

/// The number of different initial contents.
pub(crate) const CONTENTS: u64 = 4;
/// The guest's memory. Less than a second's traffic at any bandwidth below.
pub(crate) const RAM: u64 = (4 << 20) + AWKWARD;

fn draw_options(random: &mut Random) -> Vec<String> {
    let mut options = Vec::new();
    let mut option = |name: &str, value: &str| {
        options.extend([name.to_owned(), value.to_owned()]);
    };
    option("--method", random.choose(&["none", "zstd", "zlib", "lz4"]));
    option("--channels", random.choose(&["1", "2", "4"]));
    // Without reconnecting, every fault of the link ends the migration; with it, the migration continues or ends later.
    option("--reconnect-timeout", random.choose(&["0", RECONNECT]));
    if let Some(rate) = random.weighted(&[(60, None), (20, Some("16M")), (20, Some("4M"))]) {
        option("--max-bandwidth", rate);
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_drawn_again_from_its_seed() {
        let kinds = vec![(1, Kind::Kill(Role::Serve)), (1, Kind::Cut)];
        let choices = Choices::new(kinds, 1000, 25);
        let draw = |number| Plan::draw(7, number, &choices, &[1, 2], 3).to_string();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn a_fault_that_breaks_an_old_source_gets_a_newer_one() {
        let choices = Choices::new(vec![(1, BREAKS_QEMU_7)], 1000, 25);
        for number in 0..50 {
            let plan = Plan::draw(7, number, &choices, &[1, 2], 3);
            assert_ne!(plan.versions[0], 0);
        }
    }
}
