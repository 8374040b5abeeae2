//! The mistakes and failures, from the command line to the last moment of a migration.

use std::{
    fs::{self, Permissions},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixListener, UnixStream},
    },
    thread,
};

use anyhow::{Context as _, Result};
use lab::{
    middlebox::{Admission, Change, Direction, Mark, Middlebox, Which},
    qemu::Builder,
    sockets::Port,
    vamoose::Vamoose,
};
use rustix::process::Signal;

use super::{Case, Guest, Scene, command_line, migration};
use crate::common::{
    LIMIT,
    gate::{Fate, Message},
};

/// All cases. Those that wait long come first, so that the others run meanwhile.
pub(super) fn all() -> Vec<Case> {
    let groups = [
        waits(),
        command_lines(),
        security(),
        names(),
        hosts(),
        guests(),
        moments(),
        others(),
    ];
    groups.into_iter().flatten().collect()
}

/// A QEMU that waits for a guest.
pub(super) fn waiting(machine: Builder) -> Builder {
    machine.incoming().paused()
}

/// What is there, but does not answer.
fn waits() -> Vec<Case> {
    vec![
        migration(
            "another tool has the QMP socket",
            "{go} --qmp {qmp} --to {to}",
        )
        .before(|scene| {
            let monitor = UnixStream::connect(scene.value("qmp"))?;
            scene.keep(monitor)
        })
        .says(&["QMP", "{qmp}"]),
        migration(
            "a host that drops packets",
            "{go} {soon} --qmp {qmp} --to tcp:{address}",
        )
        .before(|scene| {
            // One connection is in the queue, and there is no room for a second one.
            let listener = TcpListener::bind("127.0.0.1:0")?;
            rustix::net::listen(&listener, 0)?;
            let address = listener.local_addr()?;
            let queued = TcpStream::connect(address)?;
            scene.set("address", address.to_string());
            scene.keep((listener, queued))
        })
        .says(&["{address}", "timed out"]),
        migration(
            "a server that accepts and says nothing",
            "{go} {soon} --qmp {qmp} --to {to}",
        )
        .before(|scene| {
            let silent = between(scene)?;
            silent.admit(Admission::Silence)?;
            scene.keep(silent)
        })
        .says(&["{to}"]),
        migration(
            "nothing listens at the port",
            "{go} {soon} --qmp {qmp} --to tcp:{address}",
        )
        .before(|scene| {
            let port = Port::new()?;
            scene.set("address", port.address().to_string());
            scene.keep(port)
        })
        .says(&["{address}", "refused"]),
        migration(
            "a host name that does not exist",
            "{go} --qmp {qmp} --to tcp:nosuch.invalid:4440",
        )
        .says(&["nosuch.invalid"]),
        migration(
            "the port of an SSH server",
            "{go} {soon} --qmp {qmp} --to tcp:{address}",
        )
        .before(|scene| {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            scene.set("address", listener.local_addr()?.to_string());
            // Ends with the test's process.
            thread::spawn(move || {
                for mut client in listener.incoming().flatten() {
                    // A client may be gone again. The server reads as much as it needs to see that this is not SSH.
                    let _ = client.write_all(b"SSH-2.0-OpenSSH_9.2p1\r\n");
                    let _ = client.read_exact(&mut [0; 48]);
                }
            });
            Ok(())
        })
        .says(&["{address}", "vamoose serve"]),
        migration(
            "the link is lost for good",
            "{slow} --reconnect-timeout 2 --qmp {qmp} --to {to}",
        )
        .before(|scene| scene.gate().map(drop))
        .during(|scene, _| {
            scene.wait_active()?;
            scene.gate_there()?.close();
            Ok(())
        })
        .prepared()
        .says(&["2 s"]),
        migration(
            "the link is silent for good",
            "{slow} --reconnect-timeout 2 --qmp {qmp} --to {to}",
        )
        .before(|scene| {
            let link = between(scene)?;
            scene.keep(link)
        })
        .during(|scene, _| {
            scene.wait_active()?;
            let link: &Middlebox = scene.kept()?;
            link.admit(Admission::Silence)?;
            for direction in Direction::BOTH {
                link.set_flow(direction, lab::middlebox::Flow::Hold);
            }
            Ok(())
        })
        .prepared()
        .says(&["2 s"]),
    ]
}

/// Values, options and arguments.
fn command_lines() -> Vec<Case> {
    vec![
        command_line("no arguments", "migrate").says(&["Usage: vamoose migrate"]),
        command_line("a guest, but no host", "migrate web1").says(&["HOST"]),
        command_line(
            "an option mistyped",
            "{go} --qmp /nope --to tcp:192.0.2.1:4440 --metod zstd",
        )
        .says(&["--metod", "--method"]),
        command_line(
            "a method that does not exist",
            "{secure} --insecure --qmp /nope --to tcp:192.0.2.1:4440 --method gzip",
        )
        .says(&["gzip", "zstd-frames"]),
        command_line(
            "a level that the method lacks",
            "{secure} --insecure --qmp /nope --to tcp:192.0.2.1:4440 --method zstd --level 99",
        )
        .says(&["99", "22"]),
        command_line(
            "the address of another protocol",
            "{go} --qmp /nope --to ssh://kvm2/",
        )
        .says(&["tcp:HOST:PORT"]),
        command_line(
            "a port that is no number",
            "{go} --qmp /nope --to tcp:kvm2:vnc",
        )
        .says(&["vnc"]),
        command_line(
            "a port out of range",
            "{go} --qmp /nope --to tcp:kvm2:70000",
        )
        .says(&["70000"]),
        command_line(
            "an IPv6 address without brackets",
            "{go} --qmp /nope --to tcp:2001:db8::1:4440",
        )
        .says(&["brackets"]),
        command_line(
            "a rate that is no number",
            "{go} --qmp /nope --to tcp:192.0.2.1:4440 --max-bandwidth fast",
        )
        .says(&["fast", "--max-bandwidth"]),
        command_line(
            "no channels",
            "{go} --qmp /nope --to tcp:192.0.2.1:4440 --channels 0",
        )
        .says(&["--channels"]),
        command_line(
            "a time that is no number",
            "{go} --qmp /nope --to tcp:192.0.2.1:4440 --downtime-max long",
        )
        .says(&["--downtime-max"]),
        command_line(
            "a name where an address is needed",
            "{go} --qmp /nope --to tcp:192.0.2.1:4440 --bind eth0",
        )
        .says(&["eth0"]),
        command_line(
            "two local addresses for one of the host",
            "{go} --qmp /nope --to tcp:192.0.2.1:4440 --bind 127.0.0.1 --bind 127.0.0.2",
        )
        .says(&["--bind"]),
        command_line(
            "keys and --insecure",
            "{go} --keys {dir} --qmp /nope --to tcp:192.0.2.1:4440",
        )
        .says(&["--keys", "--insecure"]),
        migration(
            "a report in a directory that does not exist",
            "{go} --qmp {qmp} --to {to} --json {dir}/nope/report",
        )
        .ends(2, Guest::Here)
        .says(&["{dir}/nope/report"]),
        migration(
            "a state directory that everyone may write to",
            "{go0} --name web1 --state-dir {dir}/home --qmp {qmp} --to {to}",
        )
        .says(&["{dir}/home"]),
        migration("an address as a URL", "{go} --qmp {qmp} --to tcp://{at}").ends(0, Guest::There),
        migration("a QMP socket as a URI", "{go} --qmp unix:{qmp} --to {to}").ends(0, Guest::There),
        migration(
            "a rate in MiB",
            "{go} --max-bandwidth 900MiB --qmp {qmp} --to {to}",
        )
        .ends(0, Guest::There),
        migration(
            "a rate with a fraction",
            "{go} --max-bandwidth 1.5G --qmp {qmp} --to {to}",
        )
        .ends(0, Guest::There),
    ]
}

/// Keys and certificates.
fn security() -> Vec<Case> {
    let with_keys = "--keys {keys}/destination";
    vec![
        command_line(
            "a user without a key",
            "{secure} --qmp /nope --to tcp:192.0.2.1:4440",
        )
        .other_user()
        .says(&["vamoose keys init"]),
        command_line(
            "a server without a key",
            "serve --listen tcp:127.0.0.1:0 --qmp-dir {dir}/empty --state-dir {dir}/state",
        )
        .other_user()
        .says(&["vamoose keys init"]),
        migration(
            "a directory without a key",
            "{secure} --keys {dir}/empty --qmp {qmp} --to {to}",
        )
        .says(&["vamoose keys init"]),
        command_line(
            "a key as the documentation writes it",
            "{secure} --peer-key ed25519:KEY --qmp /nope --to tcp:192.0.2.1:4440",
        )
        .says(&["ed25519:KEY"]),
        migration(
            "a key that others may read",
            "{secure} --keys {keys}/source --qmp {qmp} --to {to}",
        )
        .server(with_keys)
        .before(|scene| {
            let key = scene.keys()?.source.join("key");
            Ok(fs::set_permissions(key, Permissions::from_mode(0o644))?)
        })
        .says(&["chmod 600"]),
        migration(
            "nobody is trusted yet",
            "{secure} --keys {keys}/source --qmp {qmp} --to {to}",
        )
        .server(with_keys)
        .before(|scene| Ok(fs::remove_file(scene.keys()?.source.join("trusted"))?))
        .says(&["trusted", "vamoose keys show"]),
        migration(
            "a trusted key with a letter missing",
            "{secure} --keys {keys}/source --qmp {qmp} --to {to}",
        )
        .server(with_keys)
        .before(|scene| {
            let keys = scene.keys()?;
            let (_, short) = keys.public[1].trim().split_at(9);
            Ok(fs::write(
                keys.source.join("trusted"),
                format!("ed25519:{short}\n"),
            )?)
        })
        .says(&["trusted", "line 1"]),
        migration(
            "another host's key is trusted",
            "{secure} --keys {keys}/source --qmp {qmp} --to {to}",
        )
        .server(with_keys)
        .before(|scene| {
            let keys = scene.keys()?;
            Ok(fs::write(keys.source.join("trusted"), &keys.public[0])?)
        })
        .says(&["vamoose keys show"]),
        migration(
            "the server does not trust this host",
            "{secure} --keys {keys}/source --qmp {qmp} --to {to}",
        )
        .server("--keys {keys}/destination --peer-key {key}")
        .says(&["on the other host"]),
        migration(
            "--insecure to a server with keys",
            "{go} --qmp {qmp} --to {to}",
        )
        .server(with_keys)
        .says(&["--insecure", "both ends"]),
        migration(
            "keys to a server with --insecure",
            "{secure} --keys {keys}/source --qmp {qmp} --to {to}",
        )
        .says(&["--insecure", "both ends"]),
        migration(
            "certificates that are not there",
            "{secure} --tls-creds {dir}/nope --qmp {qmp} --to {to}",
        )
        .says(&["{dir}/nope"]),
    ]
}

/// The file of hosts.
fn names() -> Vec<Case> {
    let command = "migrate web1 kvm2 --keys {keys}/source --qmp {qmp} --state-dir {dir}/state";
    vec![
        migration(
            "a host that neither hosts.toml nor the network knows",
            "migrate web1 nosuch.invalid --insecure --qmp {qmp} --state-dir {dir}/state",
        )
        .says(&["nosuch.invalid", "hosts.toml"]),
        migration("a typing error in hosts.toml", command)
            .before(|scene| scene.write_hosts("[kvm2]\naddres = \"192.0.2.20\"\n"))
            .ends(2, Guest::Here)
            .says(&["{keys}/source/hosts.toml", "addres"]),
        migration("a host without an address", command)
            .before(|scene| scene.write_hosts("[kvm2]\n"))
            .ends(2, Guest::Here)
            .says(&["{keys}/source/hosts.toml", "kvm2"]),
        migration(
            "another host's key in hosts.toml",
            "migrate web1 kvm2 --keys {keys}/source --qmp {qmp} --state-dir {dir}/state",
        )
        .server("--keys {keys}/destination")
        .before(|scene| {
            let keys = scene.keys()?;
            let hosts = format!(
                "[kvm2]\naddress = {:?}\nkey = {:?}\n",
                scene.value("at"),
                keys.public[0].trim()
            );
            scene.write_hosts(&hosts)
        })
        .says(&["hosts.toml", "vamoose keys show"]),
        migration(
            "a guest that this host lacks",
            "migrate web9 {at} --insecure --qmp-dir {dir}/empty --state-dir {dir}/state",
        )
        .says(&["{dir}/empty/web9.qmp"]),
        migration("a dry run", "{go} --dry-run --qmp {qmp} --to {to}").ends(0, Guest::Here),
        migration(
            "a dry run to another machine type",
            "{go} --dry-run --qmp {qmp} --to {to}",
        )
        .destination(|machine| waiting(machine).argument("-machine").argument("q35"))
        .says(&["q35", "pc-i440fx-7.2"]),
    ]
}

/// QEMUs, sockets and servers that are not as they should be.
fn hosts() -> Vec<Case> {
    vec![
        migration("no QMP socket", "{go} --qmp {dir}/nope.qmp --to {to}")
            .says(&["{dir}/nope.qmp", "QMP"]),
        migration(
            "a user who may not open the QMP socket",
            "{go0} --name web1 --state-dir {dir}/home/state --qmp {qmp} --to {to}",
        )
        .other_user()
        .says(&["{qmp}", "ermission denied"]),
        migration(
            "the human monitor's socket",
            "{go} --qmp {dir}/hmp --to {to}",
        )
        .before(|scene| {
            let listener = UnixListener::bind(scene.path("hmp"))?;
            thread::spawn(move || {
                for mut client in listener.incoming().flatten() {
                    // A client may be gone again.
                    let _ = client.write_all(b"QEMU 10.0.0 monitor - type 'help'\r\n(qemu) ");
                }
            });
            Ok(())
        })
        .says(&["QMP", "{dir}/hmp"]),
        migration(
            "a name without a QEMU at the destination",
            "{go0} --state-dir {dir}/state --name web9 --qmp {qmp} --to {to}",
        )
        .says(&["web9", "-incoming defer"]),
        migration(
            "a name with a path in it",
            "{go0} --state-dir {dir}/state --name ../web1 --qmp {qmp} --to {to}",
        )
        .says(&["../web1"]),
        migration(
            "a destination that waits for no guest",
            "{go} --qmp {qmp} --to {to}",
        )
        .destination(|machine| machine.paused())
        .says(&["-incoming defer"]),
        migration(
            "a destination that listens already",
            "{go} --qmp {qmp} --to {to}",
        )
        .destination(|machine| {
            machine
                .paused()
                .argument("-incoming")
                .argument("tcp:127.0.0.1:0")
        })
        .says(&["-incoming defer"]),
        migration("a destination that has ended", "{go} --qmp {qmp} --to {to}")
            .before(|scene| scene.destination()?.kill())
            .says(&["-incoming defer", "web1"]),
        migration("again, after a failure", "{go} --qmp {qmp} --to {to}")
            .before(|scene| {
                let first = scene.command("{slow} --qmp {qmp} --to {to}", false);
                let first = Vamoose::start(&mut { first })?;
                scene.wait_active()?;
                first.signal(Signal::INT)?;
                first.finish(LIMIT)?;
                scene.destination()?.wait_exit(LIMIT)?;
                Ok(())
            })
            .says(&["-incoming defer", "web1"]),
        migration(
            "a second migration of the guest",
            "{go} --qmp {qmp} --to {to}",
        )
        .before(|scene| {
            let first = scene.command("{slow} --qmp {qmp} --to {to}", false);
            let first = Vamoose::start(&mut { first })?;
            scene.wait_active()?;
            scene.keep(first)
        })
        .says(&["under way"]),
    ]
}

/// Destinations that differ from the source.
fn guests() -> Vec<Case> {
    let command = "{go} --qmp {qmp} --to {to}";
    let disk: fn(Builder) -> Builder = |machine| {
        let machine = machine
            .argument("-blockdev")
            .argument("null-co,node-name=disk,size=1048576");
        machine
            .argument("-device")
            .argument("virtio-blk-pci,drive=disk")
    };
    vec![
        migration("another machine type", command)
            .destination(|machine| waiting(machine).argument("-machine").argument("q35"))
            .says(&["q35", "pc-i440fx-7.2"]),
        migration("more memory", command)
            .destination(|machine| {
                let backend = "memory-backend-ram,id=more,size=32M";
                let machine = waiting(machine).argument("-object").argument(backend);
                machine
                    .argument("-machine")
                    .argument("memory-backend=more")
                    .argument("-m")
                    .argument("32M")
            })
            .says(&["16 MiB", "32 MiB"]),
        migration("more CPUs", command)
            .destination(|machine| waiting(machine).argument("-smp").argument("2"))
            .says(&["CPU"]),
        migration("another CPU model", command)
            .destination(|machine| waiting(machine).argument("-cpu").argument("Nehalem,-apic"))
            .ends(0, Guest::There)
            .says(&["Nehalem"]),
        migration("a device is missing", command)
            .source(|machine| machine.argument("-device").argument("virtio-rng-pci"))
            .says(&["virtio-rng"]),
        migration("a device too many", command)
            .destination(|machine| {
                waiting(machine)
                    .argument("-device")
                    .argument("virtio-rng-pci")
            })
            .ends(0, Guest::There)
            .says(&["virtio-rng"]),
        migration("a disk is missing", command)
            .source(disk)
            .says(&["virtio-blk"]),
        migration("another guest's name", command)
            .source(|machine| machine.argument("-name").argument("web1"))
            .destination(|machine| waiting(machine).argument("-name").argument("web2"))
            .says(&["web1", "web2"]),
        migration("another guest's UUID", command)
            .destination(|machine| {
                let uuid = "11111111-2222-3333-4444-555555555555";
                waiting(machine).argument("-uuid").argument(uuid)
            })
            .says(&["11111111-2222-3333-4444-555555555555"]),
        migration("a destination without -S", command)
            .destination(|machine| machine.incoming())
            .ends(0, Guest::There),
    ]
}

/// Moments of a migration.
fn moments() -> Vec<Case> {
    vec![
        migration(
            "Ctrl-C while the server does not answer",
            "{go} --qmp {qmp} --to {to}",
        )
        .before(|scene| {
            let silent = between(scene)?;
            silent.admit(Admission::Silence)?;
            scene.keep(silent)
        })
        .during(|scene, command| {
            let link: &Middlebox = scene.kept()?;
            link.wait_until(LIMIT, |connections| !connections.is_empty())?;
            command.signal(Signal::INT)
        })
        .ends(3, Guest::Here)
        .says(&["ancelled", "web1 still runs here"]),
        migration("Ctrl-C while memory moves", "{slow} --qmp {qmp} --to {to}")
            .during(|scene, command| {
                scene.wait_active()?;
                command.signal(Signal::INT)
            })
            .ends(3, Guest::Here)
            .says(&["Cancelled", "web1 still runs here"]),
        migration("SIGTERM while memory moves", "{slow} --qmp {qmp} --to {to}")
            .during(|scene, command| {
                scene.wait_active()?;
                command.signal(Signal::TERM)
            })
            .ends(3, Guest::Here)
            .says(&["Cancelled", "web1 still runs here"]),
        migration(
            "Ctrl-C when the guest has left",
            "{go} --qmp {qmp} --to {to}",
        )
        .before(|scene| {
            scene.gate()?.rule(Message::Request("commit"), Fate::Held);
            Ok(())
        })
        .during(|scene, command| {
            scene.gate_there()?.wait_until_held()?;
            command.signal(Signal::INT)?;
            scene.gate_there()?.release(Fate::Passes);
            Ok(())
        })
        .ends(0, Guest::There),
        migration(
            "the link is lost when the guest has left",
            "{go} --reconnect-timeout 0 --qmp {qmp} --to {to}",
        )
        .before(|scene| {
            scene.gate()?.rule(Message::Request("commit"), Fate::Held);
            Ok(())
        })
        .during(|scene, command| {
            scene.gate_there()?.wait_until_held()?;
            scene.gate_there()?.close();
            command.wait_for("asking the server again", LIMIT)?;
            command.signal(Signal::INT)
        })
        .ends(4, Guest::Paused)
        .says(&["run the same command again", "vamoose settle --attempt"]),
        migration("a server that starts late", "{go} --qmp {qmp} --to {to}")
            .before(|scene| {
                let link = between(scene)?;
                link.admit(Admission::Refuse)?;
                scene.keep(link)
            })
            .during(|scene, command| {
                // A program that does not try again has ended.
                let _ = command.wait_for("trying again", LIMIT);
                let link: &Middlebox = scene.kept()?;
                link.admit(Admission::Pass)
            })
            .ends(0, Guest::There),
        migration(
            "the first connection is reset",
            "{secure} --keys {keys}/source --qmp {qmp} --to {to}",
        )
        .server("--keys {keys}/destination")
        .before(|scene| {
            let link = between(scene)?;
            let begins = Mark {
                connection: 0,
                direction: Direction::ToDialler,
                bytes: 1,
            };
            link.apply_at(begins, Which::One(0), Change::Reset);
            scene.keep(link)
        })
        .during(|scene, _| {
            let link: &Middlebox = scene.kept()?;
            link.wait_for_changes(LIMIT)
        })
        .ends(0, Guest::There),
        migration(
            "the server is killed",
            "{slow} --reconnect-timeout 1 --qmp {qmp} --to {to}",
        )
        .during(|scene, _| {
            scene.wait_active()?;
            scene.server.as_mut().context("no server")?.kill()
        })
        .prepared()
        .says(&["web1"]),
        migration(
            "the destination QEMU is killed",
            "{slow} --qmp {qmp} --to {to}",
        )
        .during(|scene, _| {
            scene.wait_active()?;
            scene.destination()?.kill()
        })
        .prepared()
        .says(&["destination"]),
    ]
}

/// Commands beside `migrate`.
fn others() -> Vec<Case> {
    let fails = |mistake, command| command_line(mistake, command).ends(1, Guest::None);
    vec![
        command_line("attempts of a state directory that does not exist", "attempts --state-dir {dir}/nope")
            .says(&["{dir}/nope"]),
        fails(
            "an attempt that is not known",
            "settle --attempt 00000000000000000000000000000001 --as never-ran --insecure --state-dir {dir}/state",
        )
        .before(|scene| {
            let state = scene.path("state");
            fs::create_dir(&state)?;
            Ok(fs::set_permissions(state, Permissions::from_mode(0o700))?)
        })
        .says(&["00000000000000000000000000000001", "vamoose attempts"]),
        command_line("a guest's name for an attempt", "settle --attempt web1 --as never-ran --insecure")
            .says(&["web1", "32 hexadecimal"]),
        command_line("an outcome that does not exist", "settle --attempt 00000000000000000000000000000001 --as lost")
            .says(&["never-ran"]),
        fails("a gateway without a configuration", "gateway --check --config {dir}/nope.toml").says(&["{dir}/nope.toml"]),
        fails("a gateway's configuration with a typing error", "gateway --check --config {dir}/gateway.toml")
            .before(|scene| scene.write("gateway.toml", "lisen = [\"127.0.0.1:0\"]\n"))
            .says(&["lisen", "listen"]),
        fails("a gateway's alias that is no address", "gateway --check --config {dir}/gateway.toml")
            .before(|scene| scene.write("gateway.toml", "listen = [\"127.0.0.1:0\"]\nalias = \"kvm1\"\n"))
            .says(&["kvm1", "alias"]),
        fails("emptying a host without libvirt", "evacuate localhost --to kvm2").says(&["virsh"]),
        fails("a port that is taken", "serve --insecure --listen tcp:{address} --qmp-dir {dir}/empty --state-dir {dir}/state")
            .before(|scene| {
                let listener = TcpListener::bind("127.0.0.1:0")?;
                scene.set("address", listener.local_addr()?.to_string());
                scene.keep(listener)
            })
            .says(&["{address}", "in use"]),
        command_line(
            "a QMP directory that does not exist",
            "serve --insecure --listen tcp:127.0.0.1:0 --qmp-dir {dir}/nope --state-dir {dir}/state",
        )
        .says(&["{dir}/nope"]),
    ]
}

fn between(scene: &mut Scene) -> Result<Middlebox> {
    let server: SocketAddr = scene.value("to").trim_start_matches("tcp:").parse()?;
    let link = Middlebox::new(server)?;
    scene.set("to", format!("tcp:{}", link.address()));
    Ok(link)
}
