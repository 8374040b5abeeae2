//! `migrate --postcopy`: a guest that writes its memory all the time runs at the destination before its memory is there, and neither
//! a cut nor the end of a process loses it.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::Guest,
    middlebox::{Admission, Change, Direction, Flow, Middlebox, Which},
    qemu::{self, Binary},
    vamoose::{Ended, Vamoose},
};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    common::{
        Host, LIMIT,
        gate::{Fate, Gate, Message},
        migrate,
        monitor::SilentMonitor,
        number,
    },
    running::{expect_alive, guests},
};

/// Slow enough for much memory to be left after the switch. The link is one that survives cuts.
const OPTIONS: [&str; 9] = [
    "--timeout",
    "1s",
    "--on-timeout",
    "postcopy",
    "--max-bandwidth",
    "12M",
    "--insecure",
    "--reconnect-timeout",
    "1",
];

/// Does this with a guest past the switch, which must arrive then.
fn after_the_switch(binary: &Binary, work: impl Fn(&mut UnderWay) -> Result<()>) -> Result<()> {
    let Some(mut under_way) = UnderWay::start(binary)? else {
        return Ok(());
    };
    let done = work(&mut under_way).and_then(|()| under_way.arrives());
    done.with_context(|| binary.version.to_string())
}

/// The same with the newest.
fn with_the_newest(work: impl Fn(&mut UnderWay) -> Result<()>) -> Result<()> {
    match newest()? {
        Some(binary) => after_the_switch(&binary, work),
        None => Ok(()),
    }
}

/// The newest QEMU that loses nothing of the guest.
fn newest() -> Result<Option<Binary>> {
    Ok(qemu::for_post_copy_or_skip()?.pop())
}

/// A guest, the QEMU that waits for it, and the host of that, with these options.
fn waited_for(binary: &Binary, options: &[&str]) -> Result<Option<(Guest, Guest, Host)>> {
    let Some((source, destination)) = guests(binary, binary)? else {
        return Ok(None);
    };
    let host = Host::start(options)?;
    host.knows("vm", &destination.qemu)?;
    Ok(Some((source, destination, host)))
}

/// A guest on its way to a host, after the switch.
struct UnderWay {
    source: Guest,
    destination: Guest,
    host: Host,
    network: Middlebox,
    migration: Vamoose,
}

impl UnderWay {
    /// Not past the switch yet. Before it, no end waits for long.
    fn begin(binary: &Binary) -> Result<Option<Self>> {
        let options = ["--insecure", "--reconnect-timeout", "1"];
        let Some((source, destination, host)) = waited_for(binary, &options)? else {
            return Ok(None);
        };
        let network = Middlebox::new(address(&host)?)?;
        Ok(Some(Self {
            migration: command(&source, &network)?,
            source,
            destination,
            host,
            network,
        }))
    }

    fn start(binary: &Binary) -> Result<Option<Self>> {
        let Some(mut it) = Self::begin(binary)? else {
            return Ok(None);
        };
        let follows = it.migration.wait_for("its memory follows", LIMIT);
        follows.with_context(|| it.said())?;
        let account = it.source.qemu.qmp.query_migrate()?;
        ensure!(account["status"] == "postcopy-active", "{account}");
        Ok(Some(it))
    }

    /// Runs the same command again, when the first has ended.
    fn again(&mut self) -> Result<()> {
        self.migration = command(&self.source, &self.network)?;
        Ok(())
    }

    fn cut(&self) -> Result<()> {
        self.network.admit(Admission::Refuse)?;
        self.network.apply(Which::All, Change::Reset);
        Ok(())
    }

    /// For as long as a cable is out. Neither QEMU notices.
    fn is_cut_for(&mut self, seconds: u64) -> Result<()> {
        self.cut()?;
        thread::sleep(Duration::from_secs(seconds));
        self.network.admit(Admission::Pass)?;
        let source = &mut self.source.qemu.qmp;
        source.wait_migration(&["completed"], LIMIT)?;
        ensure!(!self.has_paused(), "{}", self.said());
        Ok(())
    }

    fn loses_migrate(&mut self) -> Result<()> {
        self.migration.kill()?;
        let source = &mut self.source.qemu.qmp;
        let paused = source.wait_migration(&["postcopy-paused"], LIMIT);
        paused.with_context(|| self.said())?;
        self.again()
    }

    fn loses_serve(&mut self) -> Result<()> {
        self.host.restart()?;
        self.network.lead_to(address(&self.host)?);
        Ok(())
    }

    fn said(&mut self) -> String {
        let [from, to] = [&mut self.source, &mut self.destination].map(Guest::fate);
        let (migrate, serve) = (self.migration.stderr(), self.host.server.stderr());
        format!("source:\n{from}\ndestination:\n{to}\nmigrate:\n{migrate}\nserve:\n{serve}")
    }

    /// Whether either QEMU has lost its connection.
    fn has_paused(&mut self) -> bool {
        [&mut self.source, &mut self.destination]
            .into_iter()
            .flat_map(|guest| guest.qemu.qmp.drain_events())
            .any(|event| event.data["status"] == "postcopy-paused")
    }

    fn arrives(self) -> Result<()> {
        let Self {
            mut source,
            mut destination,
            host,
            migration,
            ..
        } = self;
        let ended = migration.finish(LIMIT).and_then(Ended::success);
        ended.with_context(|| {
            let [from, to] = [&mut source, &mut destination].map(Guest::fate);
            let serve = host.server.stderr();
            format!("source:\n{from}\ndestination:\n{to}\nserve:\n{serve}")
        })?;
        source.qemu.qmp.wait_status("postmigrate", LIMIT)?;
        expect_alive(source, destination)
    }
}

fn address(host: &Host) -> Result<SocketAddr> {
    let address = host.address.strip_prefix("tcp:").context("no TCP")?;
    Ok(address.parse()?)
}

fn command(source: &Guest, network: &Middlebox) -> Result<Vamoose> {
    let to = format!("tcp:{}", network.address());
    migrate(&source.qemu.qmp_socket(), &to, "vm", &OPTIONS)
}

/// Each version, after one round.
#[test]
fn a_writing_guest_moves_by_post_copy() -> Result<()> {
    for binary in qemu::for_post_copy_or_skip()? {
        let Some((source, destination, host)) = waited_for(&binary, &[])? else {
            return Ok(());
        };
        let slow = ["--max-bandwidth", "40M", "--downtime-limit", "1"];
        let options = [&["--postcopy"][..], &slow].concat();
        let migration = host.migrate(&source.qemu, "vm", &options)?;
        let ended = migration.finish(LIMIT)?.success();
        let ended = ended.with_context(|| host.server.stderr())?;
        ensure!(
            ended.stderr.contains("its memory follows"),
            "{}",
            ended.stderr
        );
        expect_alive(source, destination).with_context(|| binary.version.to_string())?;
    }
    Ok(())
}

/// Neither QEMU notices.
#[test]
fn a_cut_after_the_switch_is_survived() -> Result<()> {
    with_the_newest(|guest| guest.is_cut_for(3))
}

/// `migrate` pauses the guest just before the switch. From then on, a cancel is too late.
#[test]
fn a_cut_at_the_switch_is_survived() -> Result<()> {
    for binary in qemu::for_post_copy_or_skip()? {
        let Some(mut guest) = UnderWay::begin(&binary)? else {
            return Ok(());
        };
        let pauses = guest.source.qemu.qmp.wait_event("STOP", |_| true, LIMIT);
        pauses.with_context(|| guest.said())?;
        guest.cut()?;
        guest.migration.signal(Signal::INT)?;
        guest.migration.wait_for("too late to cancel", LIMIT)?;
        let arrives = guest.is_cut_for(3).and_then(|()| guest.arrives());
        arrives.with_context(|| binary.version.to_string())?;
    }
    Ok(())
}

/// Before the switch, the guest stays at the source.
#[test]
fn a_cut_before_the_switch_is_not_waited_for() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some(mut guest) = UnderWay::begin(&binary)? else {
        return Ok(());
    };
    guest.source.qemu.qmp.wait_transferred(1 << 20, LIMIT)?;
    guest.cut()?;
    guest.host.server.wait_for("migration failed", LIMIT)?;
    guest.destination.qemu.wait_exit(LIMIT)?;
    let ended = guest.migration.finish(LIMIT)?;
    ensure!(ended.status.code() == Some(1), "{}", ended.stderr);
    guest.source.qemu.qmp.wait_status("running", LIMIT)?;
    guest.source.wait_rounds(1, LIMIT)
}

/// Both QEMUs pause, and go on through the relays of the next command.
#[test]
fn a_killed_migrate_goes_on_when_it_is_run_again() -> Result<()> {
    with_the_newest(UnderWay::loses_migrate)
}

/// However often.
#[test]
#[ignore = "minutes: make postcopy"]
fn a_migrate_that_is_killed_again_and_again_goes_on() -> Result<()> {
    with_the_newest(|guest| {
        for _ in 0..5 {
            guest.loses_migrate()?;
            let follows = guest.migration.wait_for("its memory follows", LIMIT);
            follows.with_context(|| guest.said())?;
        }
        Ok(())
    })
}

/// `migrate` waits for the next server, which takes the attempt up.
#[test]
fn a_killed_server_goes_on_when_it_is_started_again() -> Result<()> {
    with_the_newest(UnderWay::loses_serve)
}

/// `make postcopy`: cuts of several lengths, and kills of both processes, with each QEMU in turn.
#[test]
#[ignore = "takes an hour"]
fn many_cuts_and_kills() -> Result<()> {
    let runs: u32 = number("POSTCOPY_RUNS", 20)?;
    let versions = qemu::for_post_copy_or_skip()?;
    for seconds in [3, 10, 25] {
        for (number, binary) in (1..=runs).zip(versions.iter().cycle()) {
            after_the_switch(binary, |guest| guest.is_cut_for(seconds))
                .with_context(|| format!("cut {number} of {seconds} s"))?;
            let version = binary.version;
            println!("cut of {seconds} s, {number} of {runs}, QEMU {version}: not noticed");
        }
    }
    for binary in &versions {
        let version = binary.version;
        for number in 1..=runs.div_ceil(2) {
            after_the_switch(binary, UnderWay::loses_migrate)
                .with_context(|| format!("kill {number}"))?;
            println!("migrate killed, {number}, QEMU {version}: recovered");
            after_the_switch(binary, UnderWay::loses_serve)
                .with_context(|| format!("kill {number}"))?;
            println!("serve killed, {number}, QEMU {version}: recovered");
        }
    }
    Ok(())
}

/// `make postcopy`: how long a guest waits for a page, through two relays and without. Only 11.1 tells it, so the guest may have lost writes.
#[test]
#[ignore = "a measurement"]
fn the_way_of_a_page() -> Result<()> {
    let Some(binary) = qemu::find_or_skip(11, 1)? else {
        return Ok(());
    };
    for limit in ["40M", "12M"] {
        for (who, migrate) in [
            (
                "QEMU alone",
                alone as fn(&mut Guest, &mut Guest, &str) -> Result<()>,
            ),
            ("two relays", through_relays),
        ] {
            let Some((mut source, mut destination)) = guests(&binary, &binary)? else {
                return Ok(());
            };
            let blocktime = [("postcopy-blocktime", true)];
            destination.qemu.qmp.set_capabilities(&blocktime)?;
            migrate(&mut source, &mut destination, limit)?;
            let account = destination.qemu.qmp.query_migrate()?;
            let [median, high] = [50, 99].map(|percent| within(&account, percent));
            println!(
                "limit {limit}, {who}: {} pages, median < {median:?} µs, p99 < {high:?} µs",
                account["postcopy-latency-dist"]
                    .as_array()
                    .map_or(0, |all| all.iter().filter_map(Value::as_u64).sum()),
            );
        }
    }
    Ok(())
}

/// Microseconds within which so many percent of the pages came that the guest had to wait for. Bucket N of QEMU's ends at 2^(N+1).
fn within(account: &Value, percent: u64) -> Option<u64> {
    let buckets = account["postcopy-latency-dist"].as_array()?;
    let counts = || buckets.iter().filter_map(Value::as_u64);
    let wanted = (counts().sum::<u64>() * percent).div_ceil(100);
    let mut seen = 0;
    let bucket = counts().position(|count| {
        seen += count;
        seen >= wanted
    })?;
    Some(2 << bucket)
}

fn through_relays(source: &mut Guest, destination: &mut Guest, limit: &str) -> Result<()> {
    let host = Host::start(&["--insecure"])?;
    host.knows("vm", &destination.qemu)?;
    let mut options = OPTIONS;
    options[5] = limit;
    let migration = host.migrate(&source.qemu, "vm", &options)?;
    migration.finish(LIMIT)?.success().map(drop)
}

fn alone(source: &mut Guest, destination: &mut Guest, limit: &str) -> Result<()> {
    let (from, to) = (&mut source.qemu.qmp, &mut destination.qemu.qmp);
    for qmp in [&mut *from, &mut *to] {
        let names = ["return-path", "events", "postcopy-ram", "postcopy-preempt"];
        qmp.set_capabilities(&names.map(|name| (name, true)))?;
        let limit = limit.trim_end_matches('M').parse::<u64>()? << 20;
        let limits = json!({ "max-bandwidth": limit, "max-postcopy-bandwidth": limit });
        qmp.set_parameters(limits)?;
    }
    to.migrate_incoming("tcp:127.0.0.1:0")?;
    let port = to.incoming_port()?;
    from.migrate(&format!("tcp:127.0.0.1:{port}"))?;
    thread::sleep(Duration::from_secs(1));
    from.execute("migrate-start-postcopy", json!({}))?;
    to.wait_migration(&["postcopy-active"], LIMIT)?;
    to.cont()?;
    from.wait_migration(&["completed"], LIMIT)?;
    to.wait_migration(&["completed"], LIMIT).map(drop)
}

/// The first interrupt after the switch comes too late, and the second leaves the guest waiting for the next command.
#[test]
#[ignore = "minutes: make postcopy"]
fn a_guest_past_the_switch_is_not_cancelled() -> Result<()> {
    let Some(binary) = newest()? else {
        return Ok(());
    };
    let Some(guest) = UnderWay::start(&binary)? else {
        return Ok(());
    };
    guest.cut()?;
    guest.migration.signal(Signal::INT)?;
    guest.migration.wait_for("too late to cancel", LIMIT)?;
    guest.migration.signal(Signal::INT)?;
    let UnderWay {
        source,
        destination,
        host,
        network,
        migration,
    } = guest;
    let ended = migration.finish(LIMIT)?;
    ensure!(ended.status.code() == Some(4), "{}", ended.stderr);
    ensure!(
        ended.stderr.contains("run the same command again"),
        "{}",
        ended.stderr
    );
    network.admit(Admission::Pass)?;
    let again = UnderWay {
        migration: command(&source, &network)?,
        source,
        destination,
        host,
        network,
    };
    again.arrives()
}

/// A server that knows nothing of the guest takes nothing for it, and leaves its QEMU alone.
#[test]
fn a_server_without_memory_begins_nothing() -> Result<()> {
    let Some(binary) = newest()? else {
        return Ok(());
    };
    let Some(mut guest) = UnderWay::start(&binary)? else {
        return Ok(());
    };
    guest.host.restart_without_memory()?;
    guest.network.lead_to(address(&guest.host)?);
    let answer = "the server does not know this attempt";
    guest.migration.wait_for(answer, LIMIT)?;
    let is_there = !guest.destination.qemu.process().has_ended();
    ensure!(is_there, "{}", guest.said());
    guest.migration.signal(Signal::INT)?;
    guest.migration.wait_for("too late to cancel", LIMIT)?;
    guest.migration.signal(Signal::INT)?;
    let ended = guest.migration.finish(LIMIT)?;
    ensure!(ended.status.code() == Some(4), "{}", ended.stderr);
    Ok(())
}

/// All memory has come, and the source's QEMU is not told: it must not continue its guest, and the destination's says so to the next
/// command.
#[test]
#[ignore = "minutes: make postcopy"]
fn the_last_message_is_lost() -> Result<()> {
    for binary in qemu::for_post_copy_or_skip()? {
        let Some(mut guest) = UnderWay::start(&binary)? else {
            return Ok(());
        };
        let source = &mut guest.source.qemu.qmp;
        while source.query_migrate()?["ram"]["remaining"].as_u64() > Some(1 << 20) {
            thread::sleep(Duration::from_millis(5));
        }
        let flow = |flow| guest.network.set_flow(Direction::ToDialler, flow);
        flow(Flow::Hold);
        let destination = &mut guest.destination.qemu.qmp;
        destination.wait_migration(&["completed"], LIMIT)?;
        guest.migration.kill()?;
        let source = &mut guest.source.qemu.qmp;
        let (ends_as, state) = match binary.version.major {
            // It waits for ever.
            7 => ("postcopy-active", "finish-migrate"),
            // It fails, and would continue a guest that it has paused itself.
            _ => ("failed", "paused"),
        };
        let stays = source.wait_migration(&[ends_as], LIMIT);
        let stays = stays.and_then(|_| source.wait_status(state, LIMIT));
        stays.with_context(|| binary.version.to_string())?;
        flow(Flow::Pass);
        guest.again()?;
        let UnderWay {
            source,
            destination,
            migration,
            ..
        } = guest;
        migration.finish(LIMIT)?.success()?;
        expect_alive(source, destination).with_context(|| binary.version.to_string())?;
    }
    Ok(())
}

/// The next command lets it run at the source.
#[test]
fn a_migrate_is_killed_between_the_pause_and_the_switch() -> Result<()> {
    for binary in qemu::for_post_copy_or_skip()? {
        let Some((mut source, mut destination, host)) = waited_for(&binary, &[])? else {
            return Ok(());
        };
        let monitor = SilentMonitor::before(&source.qemu.qmp_socket())?;
        monitor.fall_silent_at("stop");
        let start = || migrate(&monitor.path(), &host.address, "vm", &OPTIONS);
        let mut migration = start()?;
        let paused = source.qemu.qmp.wait_event("STOP", |_| true, LIMIT);
        paused.with_context(|| migration.stderr())?;
        migration.kill()?;
        source.qemu.qmp.wait_migration(&["failed"], LIMIT)?;
        ensure!(source.qemu.qmp.query_status()? == "paused");
        let ended = start()?.finish(LIMIT)?.failure("no QEMU waits there")?;
        ensure!(ended.status.code() == Some(1), "{}", ended.stderr);
        ensure!(source.qemu.qmp.query_status()? == "running");
        source.wait_rounds(1, LIMIT)?;
        destination.qemu.wait_exit(LIMIT)?;
    }
    Ok(())
}

/// It is asked when it is time to switch.
#[test]
fn a_guest_is_not_paused_before_the_destination_answers() -> Result<()> {
    let Some(binary) = newest()? else {
        return Ok(());
    };
    let Some((mut source, destination, host)) = waited_for(&binary, &[])? else {
        return Ok(());
    };
    let gate = Gate::start(&host.address)?;
    gate.rule(Message::Answer("receiving"), Fate::Held);
    let migration = migrate(&source.qemu.qmp_socket(), &gate.address, "vm", &OPTIONS)?;
    gate.wait_until_held()?;
    source.wait_rounds(1, LIMIT)?;
    ensure!(source.qemu.qmp.query_status()? == "running");
    gate.release(Fate::Passes);
    let ended = migration.finish(LIMIT)?.success();
    ended.with_context(|| host.server.stderr())?;
    expect_alive(source, destination)
}

/// Until the switch, the guest is the source's.
#[test]
fn a_migration_is_cancelled_before_the_switch() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some((mut source, _destination, host)) = waited_for(&binary, &[])? else {
        return Ok(());
    };
    let slow = ["--postcopy", "--max-bandwidth", "5M"];
    let migration = host.migrate(&source.qemu, "vm", &slow)?;
    source.qemu.qmp.wait_transferred(1 << 20, LIMIT)?;
    migration.signal(Signal::INT)?;
    let ended = migration.finish(LIMIT)?;
    ensure!(ended.status.code() == Some(3), "{}", ended.stderr);
    let warns = ended.stderr.contains("QEMU 11 without KVM misses writes");
    ensure!(warns == (binary.version.major == 11), "{}", ended.stderr);
    source.qemu.qmp.wait_status("running", LIMIT)?;
    source.wait_rounds(1, LIMIT)
}
