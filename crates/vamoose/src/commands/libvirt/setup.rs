//! `vamoose libvirt setup`: the lines of qemu.conf that lead libvirt's migrations to the gateway, and what else they need.

use std::{
    fs::{self, File, Permissions},
    io::{self, ErrorKind, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use vamoose_link::Peer;
use vamoose_relay::GatewayConfig;

use super::qemu_conf::{self, QemuConf, Value, Wanted};
use crate::commands::{gateway, virsh};

/// Show, or write, what qemu.conf has to say for migrations through this host's gateway, and check what else they need
///
/// Ends with an error if something would keep migrations from passing.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// The gateway's configuration
    #[arg(long, default_value = "/etc/vamoose/gateway.toml", value_name = "FILE")]
    config: PathBuf,
    /// libvirt's configuration of its QEMUs
    #[arg(long, default_value = "/etc/libvirt/qemu.conf", value_name = "FILE")]
    qemu_conf: PathBuf,
    /// Write the lines into qemu.conf; what it was before is then in qemu.conf.before-vamoose
    #[arg(long)]
    write: bool,
}

enum Finding {
    Fine(String),
    Note(String),
    Problem(String),
}

pub(super) fn run(options: &Options) -> Result<()> {
    let config = gateway::configuration(&options.config)?;
    let path = &options.qemu_conf;
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        read => Some(read.with_context(|| format!("cannot read {}", path.display()))?),
    };
    let conf = QemuConf::parse(text.as_deref().unwrap_or_default());
    let conf = conf.with_context(|| path.display().to_string())?;
    let wanted = wanted(&config)?;
    for setting in &wanted {
        print!("{}", qemu_conf::line(setting));
    }
    if options.write {
        let changed = conf.with(&wanted);
        if text.as_deref() == Some(&*changed) {
            println!("{} has these lines already", path.display());
        } else {
            replace(path, &changed)?;
            println!(
                "{} is written; now restart virtqemud, or libvirtd where it is the one daemon: running guests stay",
                path.display()
            );
        }
    }
    let is_written = options.write;
    let mut findings = libvirt();
    findings.extend(of_qemu_conf(&conf, &wanted, is_written, &config));
    findings.extend(of_gateway(&config));
    let mut problems = 0;
    for finding in findings {
        match finding {
            Finding::Fine(text) => println!("ok: {text}"),
            Finding::Note(text) => println!("note: {text}"),
            Finding::Problem(text) => {
                problems += 1;
                println!("problem: {text}");
            }
        }
    }
    ensure!(problems == 0, "{problems} problems, see above");
    Ok(())
}

/// QEMUs of this host wait at its alias, and libvirt tells sources to connect there.
fn wanted(config: &GatewayConfig) -> Result<[Wanted; 4]> {
    let Some(alias) = config.alias else {
        bail!(
            "the gateway has no alias: it takes streams alone, and libvirt's migrations need one"
        );
    };
    ensure!(
        alias != IpAddr::V4(Ipv4Addr::LOCALHOST),
        "libvirt refuses the alias {alias} as an address for migrations: take another one of 127.0.0.0/8, on all hosts"
    );
    let address = || Value::Text(alias.to_string());
    let port = |port: u16| Value::Number(port.into());
    Ok([
        ("migration_address", address()),
        ("migration_host", address()),
        ("migration_port_min", port(*config.ports.start())),
        ("migration_port_max", port(*config.ports.end())),
    ])
}

/// Whole or not at all, with the owner and the mode that it had.
fn replace(path: &Path, text: &str) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let real = match fs::canonicalize(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
        found => found.with_context(context)?,
    };
    let beside = |ending: &str| {
        let mut name = real.clone().into_os_string();
        name.push(ending);
        PathBuf::from(name)
    };
    let before = fs::metadata(&real).ok();
    if before.is_some() {
        let backup = beside(".before-vamoose");
        copy(&real, &backup).with_context(|| format!("cannot write {}", backup.display()))?;
    }
    let unfinished = beside(&format!(".{}", process::id()));
    let write = || {
        let mut file = create(&unfinished)?;
        file.write_all(text.as_bytes())?;
        if let Some(before) = &before {
            fchown(&file, Some(before.uid()), Some(before.gid()))?;
            file.set_permissions(Permissions::from_mode(before.mode() & 0o7777))?;
        }
        file.sync_all()?;
        fs::rename(&unfinished, &real)
    };
    let written: io::Result<()> = write();
    if written.is_err() {
        // It may not have come so far.
        let _ = fs::remove_file(&unfinished);
    }
    written.with_context(context)
}

/// Only root may read the file until its owner and mode are set: it may hold passwords.
fn create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600).open(path)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    match fs::remove_file(to) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    create(to)?.write_all(&fs::read(from)?)
}

/// Major and minor.
type Version = (u32, u32);

fn libvirt() -> Vec<Finding> {
    match virsh::output(["version"]) {
        Ok(text) => of_versions(&text),
        Err(error) => vec![Finding::Note(format!("no libvirt answers: {error:#}"))],
    }
}

fn of_versions(text: &str) -> Vec<Finding> {
    let version = |of: &str| -> Option<Version> {
        let mut after = text.lines().filter_map(|line| line.split_once(of));
        let mut numbers = after.next()?.1.trim().split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    };
    let (libvirt, qemu) = (
        version("Using library: libvirt "),
        version("Running hypervisor: QEMU "),
    );
    let mut findings = Vec::new();
    match libvirt {
        Some((major, minor)) if [(9, 0), (11, 3)].contains(&(major, minor)) => {
            findings.push(Finding::Fine(format!("libvirt {major}.{minor}")));
        }
        Some((major, minor)) => findings.push(Finding::Note(format!(
            "libvirt {major}.{minor}: tested are 9.0 and 11.3"
        ))),
        None => findings.push(Finding::Note(
            "libvirt does not tell its version".to_owned(),
        )),
    }
    let Some((major, minor)) = qemu else {
        return findings;
    };
    findings.push(match (major, minor) {
        it if it >= (11, 1) && libvirt.is_some_and(|it| it <= (11, 3)) => Finding::Problem(
            format!("QEMU {major}.{minor}: libvirt 11.3 and before cannot drive it: update libvirt"),
        ),
        it if it < (8, 0) => Finding::Note(format!(
            "QEMU {major}.{minor} may lose writes of a busy guest while it moves, without Vamoose as well: pause it"
        )),
        _ => Finding::Fine(format!("QEMU {major}.{minor}")),
    });
    findings
}

fn of_qemu_conf(
    conf: &QemuConf<'_>,
    wanted: &[Wanted],
    is_written: bool,
    config: &GatewayConfig,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, value) in wanted {
        match conf.get(name) {
            Some(found) if found == value => {}
            found => {
                let found = found.map_or("is not set".to_owned(), |it| format!("is {it}"));
                findings.push(match is_written {
                    true => {
                        Finding::Note(format!("before, {name} {}", found.replace("is ", "was ")))
                    }
                    false => Finding::Problem(format!(
                        "{name} {found} in qemu.conf, and has to be {value}: --write sets it"
                    )),
                });
            }
        }
    }
    if findings.is_empty() {
        findings.push(Finding::Fine("qemu.conf has these lines".to_owned()));
    }
    if matches!(conf.get("migrate_tls_force"), Some(Value::Number(it)) if *it != 0) {
        findings.push(Finding::Note(
            "migrate_tls_force is on: QEMUs encrypt themselves, and the gateway passes everything on as it is, without \
             compressing it"
                .to_owned(),
        ));
    }
    // The default is the distribution's user, whom the gateway accepts.
    if let Some(Value::Text(user)) = conf.get("user") {
        findings.push(match gateway::uid(user.trim_start_matches('+')) {
            None => Finding::Problem(format!("user {user} of qemu.conf is not in /etc/passwd")),
            Some(uid) if config.users.allow(Peer::Uid(uid)) => Finding::Fine(format!(
                "the gateway takes connections of QEMU's user {user}"
            )),
            Some(_) => Finding::Problem(format!(
                "QEMUs run as {user}, whose connections the gateway refuses: add it to `users`"
            )),
        });
    }
    findings
}

fn of_gateway(config: &GatewayConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    for peer in config.peers_with_own_ports() {
        findings.push(Finding::Problem(format!(
            "peer {} has ports of this host: libvirt finds no free port for a migration to here",
            peer.name
        )));
    }
    for peer in &config.peers {
        let name = &peer.name;
        if (&**name, 0).to_socket_addrs().is_err() {
            findings.push(Finding::Note(format!(
                "{name} is no name of a host: qemu+ssh://{name}/system needs one, or its address"
            )));
        }
        let Some(alias) = peer.alias else { continue };
        let at = SocketAddr::new(alias, *peer.ports.start());
        // To connect would look like a migration.
        findings.push(match TcpListener::bind(at) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                Finding::Fine(format!("the gateway listens for migrations to {name}"))
            }
            Err(error) => Finding::Problem(format!("{at}, which stands for {name}: {error}")),
            Ok(_) => Finding::Note(format!(
                "nothing listens for migrations to {name}: start the gateway"
            )),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(findings: &[Finding]) -> Vec<&str> {
        let mut problems = Vec::new();
        for finding in findings {
            if let Finding::Problem(text) = finding {
                problems.push(&**text);
            }
        }
        problems
    }

    #[test]
    fn versions_that_do_not_suit_each_other() {
        let say = |libvirt: &str, qemu: &str| {
            let (library, running) = ("Using library: libvirt ", "Running hypervisor: QEMU ");
            of_versions(&format!("{library}{libvirt}\n{running}{qemu}\n"))
        };
        assert!(problems(&say("9.0.0", "7.2.22")).is_empty());
        assert!(problems(&say("11.3.0", "10.0.2")).is_empty());
        assert!(problems(&say("11.9.0", "11.1.0")).is_empty());
        assert!(problems(&say("11.3.0", "11.1.0"))[0].contains("update libvirt"));
        assert!(problems(&of_versions("")).is_empty());
    }

    /// Another user's, where that can be.
    #[test]
    fn a_file_that_is_replaced_keeps_owner_and_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu.conf");
        fs::write(&path, "before").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(4711), Some(4712)).unwrap();
        }
        let of = |path: &Path| {
            let it = fs::metadata(path).unwrap();
            (it.uid(), it.gid(), it.mode() & 0o7777)
        };
        let before = of(&path);
        replace(&path, "after").unwrap();
        assert_eq!(of(&path), before);
        assert_eq!(fs::read_to_string(&path).unwrap(), "after");
        let backup = folder.path().join("qemu.conf.before-vamoose");
        assert_eq!(fs::read_to_string(&backup).unwrap(), "before");
        // It may hold passwords.
        assert_eq!(of(&backup).2, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn qemus_that_encrypt_by_themselves_are_noted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gateway.toml");
        let text = "insecure = true\nlisten = [\"127.0.0.1:4440\"]\nalias = \"127.77.0.1\"\n\
             peers.kvm2 = { alias = \"127.77.0.2\", to = [\"127.0.0.1:4441\"] }\n";
        fs::write(&file, text).unwrap();
        let config = gateway::configuration(&file).unwrap();
        for (line, is_noted) in [
            ("migrate_tls_force = 1", true),
            ("migrate_tls_force = 0", false),
            ("# migrate_tls_force = 1", false),
        ] {
            let conf = QemuConf::parse(line).unwrap();
            let findings = of_qemu_conf(&conf, &[], false, &config);
            let is_it = |it: &Finding| matches!(it, Finding::Note(text) if text.starts_with("migrate_tls_force is on"));
            assert_eq!(findings.iter().any(is_it), is_noted, "{line}");
        }
    }
}
