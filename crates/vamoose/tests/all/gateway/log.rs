//! Records in systemd's journal. The test has a stand-in: a socket at the journal's path, in a mount namespace of the gateway.

use std::{
    fs,
    io::Write as _,
    net::TcpStream,
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use lab::{process::Child, skipped};
use rustix::process::geteuid;
use tempfile::TempDir;

use super::{PORT, PORTS, addresses};
use crate::common::{LIMIT, vamoose};

/// The set-up that systemd makes for a service. $1 is the journal's folder, $2 the file that stands for its stream.
const SERVICE: &str = "set -e
mount -t tmpfs none /run
mkdir -p /run/systemd/journal
mount --bind \"$1\" /run/systemd/journal
exec 2>\"$2\"
export JOURNAL_STREAM=$(stat -c %d:%i \"$2\")
shift 2
exec \"$@\"";

/// The next record of the journal whose message contains this text.
fn record(journal: &UnixDatagram, text: &str) -> Result<String> {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let read = journal
            .recv(&mut bytes)
            .with_context(|| format!("no record of {text}"))?;
        let record = String::from_utf8_lossy(&bytes[..read]).into_owned();
        if record.contains(text) {
            return Ok(record);
        }
    }
}

/// A field in the journal's protocol: the length comes before the value.
fn field(name: &str, value: &str) -> String {
    let length = (value.len() as u64).to_le_bytes();
    format!("{name}\n{}{value}\n", String::from_utf8_lossy(&length))
}

#[test]
fn a_service_writes_records_with_fields() -> Result<()> {
    if !geteuid().is_root() {
        return skipped("not root: no mount namespace for a journal");
    }
    let folder = TempDir::new()?;
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("journal"))?;
    let journal = UnixDatagram::bind(path("journal/socket"))?;
    journal.set_read_timeout(Some(LIMIT))?;
    let [own, door, other, _] = addresses();
    let ports = format!("ports = \"{}-{}\"", PORTS[0], PORTS[1]);
    let text = format!(
        "insecure = true\nlisten = [\"{own}:4440\"]\nalias = \"{own}\"\n{ports}\n\
         peers.other = {{ alias = \"{door}\", {ports}, to = [\"{other}:4440\"] }}\n",
    );
    fs::write(path("gateway.toml"), text)?;
    let _gateway = service(folder.path(), &["gateway", "--config", "gateway.toml"])?;
    let ready = record(&journal, "ready for migrations to other")?;
    ensure!(
        ready.contains("SYSLOG_IDENTIFIER") && ready.contains("PRIORITY"),
        "{ready}"
    );
    let mut stranger = TcpStream::connect((door, PORT))?;
    stranger.write_all(b"RPC!")?;
    let refused = record(&journal, "to other, port 49152: refused: ")?;
    for (name, value) in [("VAMOOSE_PEER", "other"), ("VAMOOSE_OUTCOME", "refused")] {
        ensure!(refused.contains(&field(name, value)), "{refused:?}");
    }
    // No record is repeated.
    ensure!(fs::read_to_string(path("stream"))?.is_empty());
    Ok(())
}

fn service(folder: &Path, arguments: &[&str]) -> Result<Child> {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", SERVICE, "sh"]);
    command
        .arg(folder.join("journal"))
        .arg(folder.join("stream"));
    command.arg(vamoose()).args(arguments);
    Child::start(command.current_dir(folder).stdout(Stdio::null()))
}
