//! `vamoose libvirt setup`: the lines of qemu.conf that lead libvirt's migrations to the gateway, and checks of the other
//! requirements.

use std::{
    fs::{self, File},
    io::{ErrorKind, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use vamoose_link::Peer;
use vamoose_relay::GatewayConfig;

use crate::commands::{gateway, virsh};

/// Show or add the lines that qemu.conf needs for migrations through this host's gateway, and check the other requirements
///
/// Fails if something would prevent migrations.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// Configuration of the gateway
    #[arg(long, default_value = "/etc/vamoose/gateway.toml", value_name = "FILE")]
    config: PathBuf,
    /// libvirt's configuration of QEMU
    #[arg(long, default_value = "/etc/libvirt/qemu.conf", value_name = "FILE")]
    qemu_conf: PathBuf,
    /// Append the missing lines to qemu.conf
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
    let mut text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let wanted = wanted(&config)?;
    print!("{}", wanted.iter().map(line).collect::<String>());
    if options.write {
        let added = missing(&text, &wanted);
        if added.is_empty() {
            println!("no setting is missing in {}", path.display());
        } else {
            append(path, &added).with_context(|| format!("cannot write {}", path.display()))?;
            println!(
                "{} is written; now restart virtqemud, or libvirtd where it is the one daemon: running guests stay",
                path.display()
            );
        }
        text += &added;
    }
    let mut findings = libvirt();
    findings.extend(of_qemu_conf(&text, &wanted, &config));
    findings.extend(of_gateway(&config, missing(&text, &wanted).is_empty()));
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

/// A setting of qemu.conf: name, and value as in the file.
type Setting = (&'static str, String);

/// The required settings: QEMUs of this host wait at its alias, and libvirt tells sources to connect there.
fn wanted(config: &GatewayConfig) -> Result<[Setting; 4]> {
    let Some(alias) = config.alias else {
        bail!("the gateway has no alias, which libvirt's migrations need: it carries only streams");
    };
    ensure!(
        alias != IpAddr::V4(Ipv4Addr::LOCALHOST),
        "libvirt refuses the alias {alias} as an address for migrations: choose another one in 127.0.0.0/8, on all hosts"
    );
    let address = format!("\"{alias}\"");
    Ok([
        ("migration_address", address.clone()),
        ("migration_host", address),
        ("migration_port_min", config.ports.start().to_string()),
        ("migration_port_max", config.ports.end().to_string()),
    ])
}

fn line((name, value): &Setting) -> String {
    format!("{name} = {value}\n")
}

/// The lines that are missing in `text`, below a comment.
fn missing(text: &str, wanted: &[Setting]) -> String {
    const HEADING: &str =
        "# Migrations to this host come through `vamoose gateway` (vamoose libvirt setup).\n";
    let missing = wanted
        .iter()
        .filter(|(name, _)| value(text, name).is_none());
    let lines: String = missing.map(line).collect();
    let is_complete = text.is_empty() || text.ends_with('\n');
    let end = if is_complete { "" } else { "\n" };
    match &*lines {
        "" => lines,
        lines => format!("{end}{HEADING}{lines}"),
    }
}

fn append(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = File::options().append(true).create(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// The value of a setting in qemu.conf, without quotes. If a name is set twice, libvirt uses the first value.
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut settings = text.lines().filter_map(|line| line.split_once('='));
    let (_, value) = settings.find(|(key, _)| key.trim() == name)?;
    let value = value.trim_start();
    let quotes = ["\"\"\"", "\"", "'"].into_iter();
    let quoted = quotes.filter_map(|quote| value.strip_prefix(quote)?.split(quote).next());
    let mut values = quoted.chain(value.split(['#', ' ', '\t']));
    values.next()
}

/// Major and minor version.
type Version = (u32, u32);

fn libvirt() -> Vec<Finding> {
    match virsh::output(["version"]) {
        Ok(text) => of_versions(&text),
        Err(error) => vec![Finding::Note(format!("libvirt does not answer: {error:#}"))],
    }
}

fn of_versions(text: &str) -> Vec<Finding> {
    let version = |of: &str| -> Option<Version> {
        let mut after = text.lines().filter_map(|line| line.split_once(of));
        let mut numbers = after.next()?.1.trim().split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    };
    let libvirt = version("Using library: libvirt ");
    let of_libvirt = match libvirt {
        Some((major, minor)) if [(9, 0), (11, 3)].contains(&(major, minor)) => {
            Finding::Fine(format!("libvirt {major}.{minor}"))
        }
        Some((major, minor)) => {
            Finding::Note(format!("libvirt {major}.{minor}: tested are 9.0 and 11.3"))
        }
        None => Finding::Note("libvirt does not report its version".to_owned()),
    };
    let qemu = version("Running hypervisor: QEMU ");
    let of_qemu = qemu.map(|(major, minor)| match (major, minor) {
        it if it >= (11, 1) && libvirt.is_some_and(|it| it <= (11, 3)) => Finding::Problem(
            format!("QEMU {major}.{minor}: libvirt 11.3 and before cannot drive it: update libvirt"),
        ),
        it if it < (8, 0) => Finding::Note(format!(
            "QEMU {major}.{minor} may lose writes of a busy guest while it moves, without Vamoose as well: pause it"
        )),
        _ => Finding::Fine(format!("QEMU {major}.{minor}")),
    });
    [of_libvirt].into_iter().chain(of_qemu).collect()
}

fn of_qemu_conf(text: &str, wanted: &[Setting], config: &GatewayConfig) -> Vec<Finding> {
    let settings = wanted.iter().filter_map(|(name, wanted)| {
        let problem = match value(text, name) {
            Some(found) if found == wanted.trim_matches('"') => return None,
            Some(found) => {
                format!("{name} is {found} in qemu.conf, and has to be {wanted}: change that line")
            }
            None => {
                format!("{name} is not set in qemu.conf, and has to be {wanted}: --write adds it")
            }
        };
        Some(Finding::Problem(problem))
    });
    let mut findings: Vec<_> = settings.collect();
    if findings.is_empty() {
        findings.push(Finding::Fine("qemu.conf has these lines".to_owned()));
    }
    if value(text, "migrate_tls_force") == Some("1") {
        findings.push(Finding::Note(
            "migrate_tls_force is on: QEMUs encrypt their migrations themselves, and the gateway passes them on unchanged, \
             without compression"
                .to_owned(),
        ));
    }
    // Without this setting QEMU runs as the distribution's user, whom the gateway accepts by default.
    if let Some(user) = value(text, "user") {
        findings.push(match gateway::uid(user.trim_start_matches('+')) {
            None => Finding::Problem(format!("user {user} of qemu.conf is not in /etc/passwd")),
            Some(uid) if config.users.allow(Peer::Uid(uid)) => Finding::Fine(format!(
                "the gateway accepts connections of QEMU's user {user}"
            )),
            Some(_) => Finding::Problem(format!(
                "QEMUs run as {user}, whose connections the gateway refuses: add it to `users`"
            )),
        });
    }
    findings
}

/// `is_needed`: libvirt's migrations are led to it.
fn of_gateway(config: &GatewayConfig, is_needed: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for peer in config.peers_with_own_ports() {
        findings.push(Finding::Problem(format!(
            "the ports of peer {} overlap this host's: libvirt finds no free port for a migration to this host",
            peer.name
        )));
    }
    for peer in &config.peers {
        let name = &peer.name;
        if (&**name, 0).to_socket_addrs().is_err() {
            findings.push(Finding::Note(format!(
                "{name} cannot be resolved: qemu+ssh://{name}/system needs one, or its address"
            )));
        }
        let Some(alias) = peer.alias else { continue };
        let at = SocketAddr::new(alias, *peer.ports.start());
        // A test connection would look like a migration.
        findings.push(match TcpListener::bind(at) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                Finding::Fine(format!("the gateway listens for migrations to {name}"))
            }
            Err(error) => {
                Finding::Problem(format!("{at}, the address of {name} on this host: {error}"))
            }
            Ok(_) => Finding::Note(format!(
                "nothing listens for migrations to {name}: start the gateway{}",
                match is_needed {
                    true => ". Until it runs, libvirt moves no guest to this host",
                    false => " before libvirt is led to it",
                }
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

    fn config() -> GatewayConfig {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gateway.toml");
        let text = "insecure = true\nlisten = [\"127.0.0.1:4440\"]\nalias = \"127.77.0.1\"\n\
             peers.kvm2 = { alias = \"127.77.0.2\", to = [\"127.0.0.1:4441\"] }\n";
        fs::write(&file, text).unwrap();
        gateway::configuration(&file).unwrap()
    }

    #[test]
    fn incompatible_versions_are_problems() {
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

    #[test]
    fn values_are_read_as_libvirt_reads_them() {
        let text = "# The default.\n#migration_address = \"0.0.0.0\"\nuser = 'libvirt-qemu' # who\n\
            \ngroup = \"\"\"kvm's\"\"\"\n  migration_port_min=49152\nnamespaces = [\n  \"mount\", # one\n\n]\nmigration_port_min = 7";
        assert_eq!(value(text, "migration_address"), None);
        assert_eq!(value(text, "user"), Some("libvirt-qemu"));
        assert_eq!(value(text, "group"), Some("kvm's"));
        assert_eq!(value(text, "migration_port_min"), Some("49152"));
    }

    #[test]
    fn file_is_only_appended_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu.conf");
        for expected in ["one\n", "one\none\n"] {
            append(&path, "one\n").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), expected);
        }
    }

    #[test]
    fn different_settings_are_problems() {
        let config = config();
        let wanted = wanted(&config).unwrap();
        let text = "migration_address = \"127.77.0.1\"\nmigration_host = \"10.0.0.1\"\nmigration_port_min = 49152\n";
        let findings = of_qemu_conf(text, &wanted, &config);
        let [host, port] = problems(&findings)[..] else {
            panic!("{:?}", problems(&findings));
        };
        assert!(
            host.starts_with(
                "migration_host is 10.0.0.1 in qemu.conf, and has to be \"127.77.0.1\""
            ),
            "{host}"
        );
        assert!(port.starts_with("migration_port_max is not set"), "{port}");
    }

    #[test]
    fn a_gateway_that_does_not_run_is_noted() {
        for (is_needed, says) in [(true, "no guest to this host"), (false, "before libvirt")] {
            let findings = of_gateway(&config(), is_needed);
            let is_it = |it: &Finding| matches!(it, Finding::Note(text) if text.contains(says));
            assert!(findings.iter().any(is_it), "{says}");
        }
    }

    #[test]
    fn forced_tls_of_qemu_is_noted() {
        let config = config();
        for (line, is_noted) in [
            ("migrate_tls_force = 1", true),
            ("migrate_tls_force = 0", false),
            ("# migrate_tls_force = 1", false),
        ] {
            let findings = of_qemu_conf(line, &[], &config);
            let is_it = |it: &Finding| matches!(it, Finding::Note(text) if text.starts_with("migrate_tls_force is on"));
            assert_eq!(findings.iter().any(is_it), is_noted, "{line}");
        }
    }
}
