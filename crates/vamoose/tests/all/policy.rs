//! What becomes of a guest that writes three times as fast as the link carries: each action at the timeout, on one guest that goes
//! from host to host. And of one that writes little.

use anyhow::{Context as _, Result, ensure};
use lab::{
    counter,
    guest::{Guest, Image, Load},
    qemu::{self, AWKWARD, Binary, Builder},
    ram::Fill,
    serial,
    vamoose::Ended,
};
use serde_json::{Value, json};

use crate::common::{Host, LIMIT, MIB};

/// 3 × 16 MiB per second, all over a part that takes longer to send than any downtime limit here.
const LOAD: Load = Load {
    fill: 32,
    hot: 24,
    rate: 12_288,
};
/// The first round takes longer than the timeout.
const SLOW: [&str; 6] = [
    "--max-bandwidth",
    "16M",
    "--downtime-max",
    "60",
    "--timeout",
    "2",
];

/// A throttled CPU of TCG delays each round by half a second. So the rest never gets very short.
const THROTTLED: [&str; 4] = ["--throttle-max", "98", "--downtime-limit", "1300"];

/// A guest that is migrated again and again.
struct Traveller {
    image: Image,
    binary: Binary,
    guest: Guest,
    host: Host,
    moves: u8,
}

impl Traveller {
    fn start(binary: Binary) -> Result<Option<Self>> {
        let Some(image) = Image::build_or_skip(16)? else {
            return Ok(None);
        };
        let guest = Guest::start(&image.machine(&binary, 256 * MIB + AWKWARD, &LOAD))?;
        guest.wait_ready(LIMIT)?;
        guest.wait_ticks(5, LIMIT)?;
        Ok(Some(Self {
            image,
            binary,
            guest,
            host: Host::start(&[])?,
            moves: 0,
        }))
    }

    /// Tries to move it with these options.
    fn migrate(&mut self, options: &[&str]) -> Result<(Guest, Ended)> {
        let machine = self.image.machine(&self.binary, 256 * MIB + AWKWARD, &LOAD);
        let destination = Guest::start(&machine.incoming().paused())?;
        let name = format!("vm{}", self.moves);
        self.moves += 1;
        self.host.knows(&name, &destination.qemu)?;
        let options = [&SLOW, options].concat();
        let migration = self.host.migrate(&self.guest.qemu, &name, &options)?;
        Ok((destination, migration.finish(LIMIT)?))
    }

    /// Moves it with this action at the timeout, and returns the report.
    fn expect_moved(&mut self, action: &str, options: &[&str]) -> Result<Value> {
        let before = self.parameters()?;
        let options = [&["--on-timeout", action], options].concat();
        let (mut destination, ended) = self.migrate(&options)?;
        let ended = ended.success().with_context(|| self.host.server.stderr())?;
        let told = format!("{action} after ");
        ensure!(ended.stderr.contains(&told), "{}", ended.stderr);
        ensure!(self.parameters()? == before, "settings were not put back");
        destination.qemu.qmp.wait_status("running", LIMIT)?;
        destination.wait_ticks(5, LIMIT)?;
        destination.wait_rounds(1, LIMIT)?;
        let source = std::mem::replace(&mut self.guest, destination);
        serial::follow(&source.finish()?, &self.guest.log())?;
        let report: Value = serde_json::from_str(&ended.stdout)?;
        check_action(&report, action)?;
        Ok(report)
    }

    fn parameters(&mut self) -> Result<[Value; 2]> {
        let qmp = &mut self.guest.qemu.qmp;
        let commands = ["query-migrate-parameters", "query-migrate-capabilities"];
        let [first, second] = commands.map(|command| qmp.execute(command, json!({})));
        Ok([first?, second?])
    }
}

fn check_action(report: &Value, action: &str) -> Result<()> {
    let done = &report["on-timeout"];
    ensure!(done["action"] == action, "{report}");
    ensure!(done["milliseconds"].as_u64() >= Some(2000), "{report}");
    ensure!(done["remaining"].as_u64() > Some(0), "{report}");
    Ok(())
}

#[test]
fn each_action_at_the_timeout() -> Result<()> {
    let Some(binary) = qemu::find_or_skip(10, 0)? else {
        return Ok(());
    };
    let Some(mut traveller) = Traveller::start(binary)? else {
        return Ok(());
    };
    let (_, ended) = traveller.migrate(&[])?;
    ensure!(ended.status.code() == Some(1), "{}", ended.status);
    let ended = ended.failure("MiB are left (")?;
    ensure!(ended.stderr.contains("still runs here"), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout)?;
    ensure!(report["status"] == "failed", "{report}");
    check_action(&report, "abort")?;
    traveller.guest.qemu.qmp.wait_status("running", LIMIT)?;
    traveller.guest.wait_ticks(5, LIMIT)?;

    traveller.expect_moved("pause", &[])?;
    let forced = traveller.expect_moved("force", &[])?;
    ensure!(forced["downtime"].as_u64() < Some(60_000), "{forced}");
    let throttled = traveller.expect_moved("throttle", &THROTTLED)?;
    let throttle = throttled["cpu-throttle-percentage"].as_u64();
    ensure!((Some(11)..=Some(98)).contains(&throttle), "{throttled}");
    Ok(())
}

/// The same without `avail-switchover-bandwidth`.
#[test]
fn an_old_source_pauses_its_guest_at_the_timeout() -> Result<()> {
    let Some(binary) = qemu::find_or_skip(7, 2)? else {
        return Ok(());
    };
    if let Some(mut traveller) = Traveller::start(binary)? {
        traveller.expect_moved("pause", &[])?;
    }
    Ok(())
}

#[test]
fn an_idle_guest_reports_the_parts_of_its_downtime() -> Result<()> {
    let ram = 32 * MIB + AWKWARD;
    let dir = tempfile::tempdir()?;
    let firmware = dir.path().join("firmware");
    counter::write_firmware(&firmware)?;
    let image = counter::Image::new(ram, 1)?;
    let host = Host::start(&[])?;
    for (name, (major, minor)) in [("old", (7, 2)), ("new", (10, 0))] {
        let Some(binary) = qemu::find_or_skip(major, minor)? else {
            continue;
        };
        let machine = Builder::firmware(&binary, ram, &firmware);
        let source = machine.clone().content(Fill::Mixed, 1).start()?;
        let mut destination = machine.incoming().paused().start()?;
        host.knows(name, &destination)?;
        let options = ["--max-bandwidth", "32M"];
        let ended = host.migrate(&source, name, &options)?.finish(LIMIT)?;
        let report: Value = serde_json::from_str(&ended.success()?.stdout)?;
        destination.qmp.wait_status("running", LIMIT)?;
        destination.qmp.stop()?;
        ensure!(image.check(destination.ram())? >= counter::count(source.ram())?);
        let parts = ["last-round", "device-state", "load", "commit"];
        let parts = parts.map(|part| report["downtime-parts"][part].as_u64());
        ensure!(parts.iter().all(Option::is_some), "{report}");
        ensure!(report["on-timeout"].is_null(), "{report}");
        ensure!(
            report["ram"]["dirty-sync-count"].as_u64() >= Some(2),
            "{report}"
        );
    }
    Ok(())
}

/// What cannot work is refused before anything is done.
#[test]
fn what_the_source_lacks_is_refused() -> Result<()> {
    let host = Host::start(&[])?;
    for (version, option, code, reason) in [
        ((7, 2), &["--dirty-limit", "10M"][..], 1, "`dirty-limit`"),
        ((10, 0), &["--dirty-limit", "10M"], 1, "dirty-ring"),
        ((10, 0), &["--on-timeout", "pause"], 2, "--timeout"),
        (
            (10, 0),
            &[
                "--timeout",
                "9",
                "--on-timeout",
                "throttle",
                "--auto-converge",
            ],
            2,
            "later",
        ),
    ] {
        let Some(binary) = qemu::find_or_skip(version.0, version.1)? else {
            continue;
        };
        let machine = Builder::bare(&binary, MIB);
        let mut source = machine.clone().start()?;
        let destination = machine.incoming().start()?;
        host.knows("vm", &destination)?;
        let ended = host.migrate(&source, "vm", option)?.finish(LIMIT)?;
        ensure!(
            ended.status.code() == Some(code),
            "{option:?}: {}",
            ended.stderr
        );
        ended.failure(reason)?;
        ensure!(
            source.qmp.query_migrate()?["status"].is_null(),
            "{option:?}"
        );
        host.forgets("vm")?;
    }
    Ok(())
}
