//! PostgreSQL on a disk that both hosts reach moves three times in a row, each time with a fault in between. Afterwards the disk is
//! in order, and every row is there that was said to be committed.
//!
//! A move is one command that meets a fault, and, if the guest has stayed, another command, which has to work.

mod guest;

use std::{fmt, time::Instant};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use lab::{
    guest::Guest,
    qemu::{self, Binary},
    vamoose::{Ended, Vamoose},
};
use rustix::process::Signal;
use tempfile::TempDir;

use self::guest::{self as database, Committed, Disk, Found, System};
use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate_from, number,
};

/// What is broken, by what, and when.
#[derive(Clone, Copy, Debug)]
struct Fault {
    harm: Harm,
    moment: Moment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    KillMigrate,
    KillServe,
    KillDestination,
    Cut,
    Cancel,
}

#[derive(Clone, Copy, Debug)]
enum Moment {
    /// So many bytes of the guest have been sent.
    Sent(u64),
    /// The destination has loaded the guest, and the source does not know.
    Loaded,
    /// The source has stopped for good, and the commit is on its way: it meets this fate, if it is not the fault's.
    Commit(Fate),
}

/// Three moves of a guest.
struct Plan {
    /// The QEMUs that it is in, one after the other.
    versions: Vec<Binary>,
    faults: Vec<Fault>,
    /// Of the guest that looks at the disk.
    checker: Binary,
}

/// The guest may be late: how fast pages are sent depends on what else the machine has to do.
const PATIENT: [&str; 4] = ["--downtime-limit", "5000", "--downtime-max", "60"];
/// So that not all is sent before a fault strikes.
const SLOW: [&str; 2] = ["--max-bandwidth", "24M"];
/// Rows that have to be committed after each move.
const ALIVE: usize = 5;

const HARMS: [Harm; 5] = [
    Harm::KillMigrate,
    Harm::KillServe,
    Harm::KillDestination,
    Harm::Cut,
    Harm::Cancel,
];

#[test]
fn a_database_moves_among_faults() -> Result<()> {
    let mut versions = Vec::new();
    for (major, minor) in qemu::VERSIONS {
        versions.extend(qemu::find_or_skip(major, minor)?);
    }
    let (Some(system), Some(oldest)) = (System::build_or_skip()?, versions.first().cloned()) else {
        return Ok(());
    };
    let fault = |harm, moment| Fault { harm, moment };
    let plan = Plan {
        // From the oldest to the newest, and back.
        versions: versions.into_iter().cycle().take(4).collect(),
        faults: vec![
            fault(Harm::KillDestination, Moment::Loaded),
            fault(Harm::KillMigrate, Moment::Commit(Fate::CutBefore)),
            fault(Harm::Cut, Moment::Sent(40 * MIB)),
        ],
        checker: oldest,
    };
    plan.carry_out(&system).map(drop)
}

/// `make databases`: DATABASE_GUESTS, each with three moves; DATABASE_SEED decides everything.
#[test]
#[ignore = "a quarter of an hour"]
fn databases_move_among_faults() -> Result<()> {
    let guests = number("DATABASE_GUESTS", 10)?;
    let seed = number("DATABASE_SEED", fastrand::u64(..1_000_000))?;
    let Some(system) = System::build_or_skip()? else {
        return Ok(());
    };
    println!("seed {seed}");
    let (begin, mut random, mut wrong) = (Instant::now(), Rng::with_seed(seed), 0);
    for number in 0..guests {
        let plan = Plan::draw(&mut random);
        let found = plan.carry_out(&system);
        wrong += u64::from(found.is_err());
        match found {
            Ok(found) => println!("guest {number}: {plan}: {found:?}"),
            Err(error) => println!("guest {number}: {plan}: WRONG: {error:?}"),
        }
    }
    let moves = guests * 3;
    println!("{moves} moves, {wrong} guests wrong, {:?}", begin.elapsed());
    ensure!(wrong == 0, "{wrong} of {guests} guests are not in order");
    Ok(())
}

impl Plan {
    fn draw(random: &mut Rng) -> Self {
        let version = |random: &mut Rng| {
            let all = qemu::available();
            all[random.usize(..all.len())].clone()
        };
        Self {
            versions: (0..4).map(|_| version(random)).collect(),
            faults: (0..3).map(|_| Fault::draw(random)).collect(),
            checker: version(random),
        }
    }

    fn carry_out(&self, system: &System) -> Result<Found> {
        let folder = TempDir::new()?;
        let disk = Disk::new(&folder.path().join("disk"))?;
        let mut scene = Scene::start(system, &disk, &self.versions[0])?;
        for (to, fault) in self.versions[1..].iter().zip(&self.faults) {
            let moved = scene.move_guest(to, *fault);
            moved.with_context(|| scene.story(to, *fault))?;
        }
        let committed = scene.stop()?;
        database::check(system, &self.checker, &disk, &committed)
    }
}

impl Fault {
    fn draw(random: &mut Rng) -> Self {
        let fates = [
            Fate::Passes,
            Fate::CutBefore,
            Fate::CutAfter,
            Fate::AnswerLost,
        ];
        let moment = match random.u8(..4) {
            0 => Moment::Loaded,
            1 => Moment::Commit(fates[random.usize(..fates.len())]),
            _ => Moment::Sent(random.u64(..60 * MIB)),
        };
        let harm = HARMS[random.usize(..HARMS.len())];
        Self { harm, moment }
    }
}

/// Two hosts and the guest.
struct Scene<'a> {
    system: &'a System,
    disk: &'a Disk,
    hosts: [Host; 2],
    /// On the way to each.
    gates: [Gate; 2],
    guest: Guest,
    /// The host that it is on.
    at: usize,
    committed: Committed,
    /// How many QEMUs have waited for it.
    waited: usize,
    /// What the commands of a move have said.
    said: Vec<String>,
}

/// Where a command says the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    Moved,
    Stays,
    Unknown,
}

impl<'a> Scene<'a> {
    fn start(system: &'a System, disk: &'a Disk, binary: &Binary) -> Result<Self> {
        let hosts = [Host::start(&[])?, Host::start(&[])?];
        let gates = [
            Gate::start(&hosts[0].address)?,
            Gate::start(&hosts[1].address)?,
        ];
        let guest = Guest::start(&system.machine(binary, disk))?;
        guest.wait_ready(database::LIMIT)?;
        database::wait_rows(&guest, ALIVE)?;
        Ok(Self {
            system,
            disk,
            hosts,
            gates,
            guest,
            at: 0,
            committed: Committed::default(),
            waited: 0,
            said: Vec::new(),
        })
    }

    /// Moves the guest to the other host.
    fn move_guest(&mut self, to: &Binary, fault: Fault) -> Result<()> {
        self.said.clear();
        let mut destination = self.waiting(to)?;
        let mut claim = self.with_fault(&mut destination, fault)?;
        for _ in 0..4 {
            if claim != Claim::Unknown {
                break;
            }
            claim = self.run()?;
        }
        if claim == Claim::Stays {
            self.expect_stayed(destination)?;
            destination = self.waiting(to)?;
            claim = self.run()?;
        }
        ensure!(claim == Claim::Moved, "nothing is broken any more");
        self.expect_moved(destination)
    }

    /// A QEMU that waits for the guest on the other host.
    fn waiting(&mut self, binary: &Binary) -> Result<Guest> {
        let machine = self.system.machine(binary, self.disk);
        let waiting = Guest::start(&machine.incoming())?;
        self.waited += 1;
        self.hosts[1 - self.at].knows(&self.name(), &waiting.qemu)?;
        Ok(waiting)
    }

    /// Of the last that has waited.
    fn name(&self) -> String {
        format!("database-{}", self.waited)
    }

    /// Runs the command to its end.
    fn run(&mut self) -> Result<Claim> {
        let migration = self.command(&[])?;
        self.end(migration)
    }

    fn end(&mut self, migration: Vamoose) -> Result<Claim> {
        let ended = migration.finish(LIMIT)?;
        let claim = Claim::of(&ended);
        let Ended { status, stderr, .. } = ended;
        self.said
            .push(format!("migrate: {claim:?}, {status}:\n{stderr}"));
        Ok(claim)
    }

    /// What has happened in a move.
    fn story(&self, to: &Binary, fault: Fault) -> String {
        let mut story = format!("to {} with {fault}\n", to.version);
        story += &self.said.join("\n");
        for (number, host) in self.hosts.iter().enumerate() {
            story += &format!("\nserve {number}:\n{}", host.server.stderr());
        }
        story
    }

    fn command(&self, options: &[&str]) -> Result<Vamoose> {
        migrate_from(
            &self.hosts[self.at].state_dir(),
            &self.guest.qemu.qmp_socket(),
            &self.gates[1 - self.at].address,
            &self.name(),
            &[&PATIENT, options].concat(),
        )
    }

    /// Runs the command, which meets the fault. Nothing is broken any more when it has ended.
    fn with_fault(&mut self, destination: &mut Guest, fault: Fault) -> Result<Claim> {
        let there = 1 - self.at;
        let gate = &self.gates[there];
        let (migration, fate) = match fault.moment {
            Moment::Sent(bytes) => {
                let migration = self.command(&SLOW)?;
                migration.wait_for("active", LIMIT)?;
                self.guest.qemu.qmp.wait_transferred(bytes, LIMIT)?;
                (migration, Fate::Passes)
            }
            Moment::Loaded | Moment::Commit(_) => {
                let (message, fate) = match fault.moment {
                    Moment::Commit(fate) => (Message::Request("commit"), fate),
                    _ => (Message::Loaded, Fate::Passes),
                };
                gate.rule(message, Fate::Held);
                let migration = self.command(&[])?;
                let held = gate.wait_until_held();
                held.with_context(|| migration.stderr())?;
                (migration, fate)
            }
        };
        match fault.harm {
            Harm::KillMigrate => migration.signal(Signal::KILL)?,
            Harm::KillServe => {
                self.hosts[there].restart()?;
                gate.lead_to(&self.hosts[there].address);
            }
            Harm::KillDestination => destination.qemu.kill()?,
            Harm::Cut => {
                gate.close();
                gate.open();
            }
            Harm::Cancel => migration.signal(Signal::INT)?,
        }
        gate.release(fate);
        self.end(migration)
    }

    /// The guest runs here, and has never run at the destination.
    fn expect_stayed(&mut self, destination: Guest) -> Result<()> {
        self.guest.qemu.qmp.wait_status("running", LIMIT)?;
        database::wait_rows(&self.guest, ALIVE)?;
        let said = destination.finish()?;
        ensure!(said.lines.is_empty(), "the destination ran: {said:?}");
        Ok(())
    }

    /// The guest runs at the destination, and has stopped here.
    fn expect_moved(&mut self, mut destination: Guest) -> Result<()> {
        destination.qemu.qmp.wait_status("running", LIMIT)?;
        let status = self.guest.qemu.qmp.query_status()?;
        ensure!(status == "postmigrate", "the source is '{status}'");
        database::wait_rows(&destination, ALIVE)?;
        let left = std::mem::replace(&mut self.guest, destination);
        self.at = 1 - self.at;
        self.committed.add(&left.finish()?)
    }

    /// Ends the guest, and returns what it has said in all its life.
    fn stop(mut self) -> Result<Committed> {
        database::stop(&mut self.guest)?;
        self.committed.add(&self.guest.finish()?)?;
        Ok(self.committed)
    }
}

impl Claim {
    /// Of a command that has ended or was killed.
    fn of(ended: &Ended) -> Self {
        match ended.stderr.contains(" here.") {
            _ if ended.status.success() => Self::Moved,
            true => Self::Stays,
            false => Self::Unknown,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.versions[0].version)?;
        for (to, fault) in self.versions[1..].iter().zip(&self.faults) {
            write!(f, " -> {} ({fault})", to.version)?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {:?}", self.harm, self.moment)
    }
}
