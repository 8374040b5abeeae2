//! Refusals, strangers, the end of a gateway, and changes of its configuration.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::Command,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    middlebox::{Change, Direction, Middlebox, Which},
    qemu::{self, Binary, Qemu},
};
use rustix::process::Signal;
use serde_json::json;

use super::{Host, Hosts, PORT, PORTS};
use crate::common::{LIMIT, MIB, bare_pair, set_up, vamoose};

/// Slow enough that a migration takes seconds.
const SLOW: u64 = 3 * MIB;

/// A slow migration under way.
fn under_way(hosts: &Hosts, qemu: &Binary, port: u16) -> Result<(Qemu, Qemu)> {
    let (mut source, mut destination) = hosts.pair(qemu, qemu, port, 2)?;
    source.qmp.cont()?;
    source
        .qmp
        .set_parameters(json!({ "max-bandwidth": SLOW }))?;
    source
        .qmp
        .set_capabilities(&[("pause-before-switchover", true)])?;
    hosts.near.sends(&mut source, port)?;
    source.qmp.wait_transferred(2 * MIB, LIMIT)?;
    // The source's data may be in buffers of sockets: wait until both gateways have the migration.
    destination.qmp.wait_migration(&["active"], LIMIT)?;
    Ok((source, destination))
}

/// Lets the migration end, and expects the guest to have moved.
fn expect_end(hosts: &Hosts, source: &mut Qemu, destination: &mut Qemu) -> Result<()> {
    source.qmp.wait_migration(&["pre-switchover"], LIMIT)?;
    let state = json!({ "state": "pre-switchover" });
    source.qmp.execute("migrate-continue", state)?;
    hosts.expect_moved(source, destination)
}

/// Expects the guest at the source, and moves it again.
fn moves_after_all(hosts: &Hosts, qemu: &Binary, source: &mut Qemu, port: u16) -> Result<()> {
    source.qmp.wait_migration(&["failed"], LIMIT)?;
    source.qmp.wait_status("running", LIMIT)?;
    source.qmp.wait_idle(LIMIT)?;
    let (_, mut destination) = bare_pair(qemu, qemu, 16 * MIB)?;
    set_up(&mut destination, 2, "none")?;
    hosts.far.receives(&mut destination, port)?;
    set_up(source, 2, "none")?;
    source
        .qmp
        .set_capabilities(&[("pause-before-switchover", false)])?;
    source.qmp.take_events();
    hosts.near.sends(source, port)?;
    hosts.expect_moved(source, &mut destination)
}

#[test]
fn a_migration_without_a_waiting_qemu_is_refused_with_the_reason() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start()?;
    let (mut source, _destination) = hosts.pair(&qemu, &qemu, PORT, 2)?;
    source.qmp.cont()?;
    hosts.near.sends(&mut source, PORTS[1])?;
    source.qmp.wait_migration(&["failed"], LIMIT)?;
    let line = hosts
        .near
        .says("port 49155: refused: other refuses: cannot connect to tcp:")?;
    ensure!(line.contains("refused"), "{line}");
    moves_after_all(&hosts, &qemu, &mut source, PORTS[1])
}

#[test]
fn a_peer_that_is_not_there_yet_is_named_and_may_come_later() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut hosts = Hosts::start()?;
    hosts.far.gateway.kill()?;
    let (mut source, _) = bare_pair(&qemu, &qemu, 16 * MIB)?;
    set_up(&mut source, 2, "none")?;
    source.qmp.cont()?;
    hosts.near.sends(&mut source, PORT)?;
    source.qmp.wait_migration(&["failed"], LIMIT)?;
    hosts
        .near
        .says("refused: the gateway of other cannot be reached: cannot connect to tcp:")?;
    hosts.far.restart()?;
    moves_after_all(&hosts, &qemu, &mut source, PORT)
}

#[test]
fn more_migrations_than_are_allowed_are_refused() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::with("", ", migrations = 1", &[])?;
    let (mut first, mut there) = under_way(&hosts, &qemu, PORT)?;
    let (mut second, _waits) = hosts.pair(&qemu, &qemu, PORTS[1], 2)?;
    hosts.near.sends(&mut second, PORTS[1])?;
    second.qmp.wait_migration(&["failed"], LIMIT)?;
    hosts
        .near
        .says("port 49155: refused: other has as many migrations")?;
    expect_end(&hosts, &mut first, &mut there)
}

#[test]
fn strangers_change_nothing() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start()?;
    let (mut source, mut destination) = hosts.pair(&qemu, &qemu, PORT, 4)?;
    let knock = || TcpStream::connect((hosts.near.door, PORT));
    for _ in 0..300 {
        drop(knock()?);
    }
    // Foreign gateways are refused, and so is garbage.
    for address in [hosts.near.own, hosts.far.own] {
        let mut stranger = TcpStream::connect((address, 4440))?;
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
        stranger.set_read_timeout(Some(LIMIT))?;
        let _ = stranger.read_to_end(&mut Vec::new());
    }
    source
        .qmp
        .set_parameters(json!({ "max-bandwidth": SLOW }))?;
    hosts.near.sends(&mut source, PORT)?;
    destination.qmp.wait_migration(&["active"], LIMIT)?;
    let mut silent = Vec::new();
    for at in 0..100 {
        let mut stranger = knock()?;
        match at % 3 {
            0 => drop(stranger),
            // The gateway may have closed the connection already.
            1 => drop(stranger.write_all(b"GET / HTTP/1.1\r\n\r\n")),
            _ => silent.push(stranger),
        }
    }
    hosts.expect_moved(&mut source, &mut destination)?;
    let said = hosts.near.gateway.stderr();
    ensure!(!said.contains("failed"), "{said}");
    Ok(())
}

#[test]
fn a_migration_survives_the_loss_of_all_its_connections() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut middlebox = None;
    let through = |to: &str| {
        let made = middlebox.insert(Middlebox::new(to.parse::<SocketAddr>()?)?);
        Ok(made.address().to_string())
    };
    let hosts = Hosts::through("method = \"none\"", "", &[], through)?;
    let (mut source, mut destination) = under_way(&hosts, &qemu, PORT)?;
    let middlebox = middlebox.context("no middlebox")?;
    for mebibytes in [4, 8] {
        middlebox.wait_for_bytes(Direction::ToListener, mebibytes << 20, LIMIT)?;
        ensure!(middlebox.apply(Which::All, Change::Reset) > 0);
    }
    expect_end(&hosts, &mut source, &mut destination)
}

/// Before it is read again, and while the gateway that is to read it runs.
#[test]
fn a_configuration_is_checked() -> Result<()> {
    let hosts = Hosts::start()?;
    let setting = &hosts.near.setting;
    let check = |text: &str| -> Result<(bool, String)> {
        setting.write(text)?;
        let mut command = Command::new(vamoose());
        command.args(["gateway", "--check", "--config"]);
        let output = command.arg(setting.path()).output()?;
        Ok((output.status.success(), String::from_utf8(output.stderr)?))
    };
    let (passes, said) = check(&setting.text)?;
    ensure!(passes, "{said}");
    let wrong = [
        setting.text.replace("listen", "lissten"),
        setting.text.replace("keys = \"", "keys = \"/nowhere"),
        format!("metrics = \"nowhere\"\n{}", setting.text),
        format!("page-caches = \"4X\"\n{}", setting.text),
        "listen = [".to_owned(),
    ];
    for text in wrong {
        let (passes, said) = check(&text)?;
        ensure!(!passes && said.contains("vamoose: "), "{text}\n{said}");
    }
    Ok(())
}

#[test]
fn a_configuration_is_read_again_and_a_wrong_one_changes_nothing() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut hosts = Hosts::start()?;
    let (mut source, mut destination) = under_way(&hosts, &qemu, PORT)?;
    let reload = |host: &Host, text: &str| -> Result<()> {
        host.setting.write(text)?;
        host.gateway.signal(Signal::HUP)
    };
    reload(&hosts.near, "listen = 7")?;
    hosts
        .near
        .says("the previous configuration stays in force: ")?;
    let [door, ..] = super::addresses();
    let text = hosts
        .near
        .setting
        .text
        .replace(&hosts.near.door.to_string(), &door.to_string());
    reload(&hosts.near, &text)?;
    hosts.near.says("the configuration has been read again")?;
    let deadline = Instant::now() + LIMIT;
    while TcpStream::connect((hosts.near.door, PORTS[1])).is_ok() {
        ensure!(Instant::now() < deadline, "the old alias is still open");
    }
    hosts.near.door = door;
    // The migration under way went on, and the next one takes the other way.
    expect_end(&hosts, &mut source, &mut destination)?;
    let (mut source, mut destination) = hosts.pair(&qemu, &qemu, PORTS[1], 2)?;
    hosts.near.sends(&mut source, PORTS[1])?;
    hosts.expect_moved(&mut source, &mut destination)
}

/// They are not ignored silently.
#[test]
fn changes_that_need_a_restart_are_named() -> Result<()> {
    let hosts = Hosts::start()?;
    let near = &hosts.near;
    let [other, ..] = super::addresses();
    let own = format!("{}:4440", near.own);
    let text = near.setting.text.replace(&own, &format!("{other}:4440"));
    near.setting
        .write(&format!("metrics = \"{other}:4441\"\n{text}"))?;
    near.gateway.signal(Signal::HUP)?;
    near.says("these changes take effect only when the gateway is restarted: listen, metrics")?;
    near.setting.write(&near.setting.text)?;
    near.gateway.signal(Signal::HUP)?;
    near.says("the configuration has been read again")?;
    Ok(())
}

#[test]
fn migrations_that_do_not_finish_in_time_are_ended() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::with("", "", &["--drain-timeout", "0"])?;
    let (mut source, _destination) = under_way(&hosts, &qemu, PORT)?;
    hosts.near.gateway.signal(Signal::TERM)?;
    source.qmp.wait_migration(&["failed"], LIMIT)?;
    source.qmp.wait_status("running", LIMIT)?;
    let ended = hosts.near.gateway.finish(LIMIT)?.success()?;
    ensure!(
        ended.stderr.contains("failed: the migration was cancelled"),
        "{}",
        ended.stderr
    );
    Ok(())
}
#[test]
fn a_gateway_that_dies_ends_its_migrations_and_the_next_one_takes_others() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for kills_near in [true, false] {
        let mut hosts = Hosts::with("reconnect-timeout = 2", "", &[])?;
        let (mut source, mut destination) = under_way(&hosts, &qemu, PORT)?;
        let victim = |hosts: &mut Hosts| -> Result<()> {
            let host = if kills_near {
                &mut hosts.near
            } else {
                &mut hosts.far
            };
            host.restart()
        };
        victim(&mut hosts)?;
        source.qmp.wait_migration(&["failed"], LIMIT)?;
        if !kills_near {
            hosts.near.says("port 49152: failed: ")?;
            destination.wait_exit(LIMIT)?;
        }
        drop(destination);
        moves_after_all(&hosts, &qemu, &mut source, PORTS[1])
            .with_context(|| format!("the near one was killed: {kills_near}"))?;
    }
    Ok(())
}

#[test]
fn a_gateway_that_is_to_end_lets_migrations_finish() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for ends_near in [true, false] {
        let hosts = Hosts::start()?;
        let (mut source, mut destination) = under_way(&hosts, &qemu, PORT)?;
        let host = if ends_near { &hosts.near } else { &hosts.far };
        host.gateway.signal(Signal::TERM)?;
        host.says("no further migrations are accepted")?;
        let (mut late, _waits) = hosts.pair(&qemu, &qemu, PORTS[1], 2)?;
        hosts.near.sends(&mut late, PORTS[1])?;
        late.qmp.wait_migration(&["failed"], LIMIT)?;
        expect_end(&hosts, &mut source, &mut destination)?;
        let Hosts { near, far, .. } = hosts;
        let ended = if ends_near { near } else { far }.gateway.finish(LIMIT)?;
        ensure!(ended.success()?.stderr.contains("loaded; "));
    }
    Ok(())
}
