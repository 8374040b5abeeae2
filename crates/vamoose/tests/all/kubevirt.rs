//! `vamoose gateway --kubevirt` on two nodes, with a caller that does what KubeVirt's virt-handler does with its own proxies, and
//! with stock QEMUs in the place of those in pods.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::SocketAddr,
    os::unix::{
        fs::MetadataExt as _,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    middlebox::{Change, Middlebox, Which},
    qemu::{self, Builder},
    ram::Fill,
    vamoose::Vamoose,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
};
use rustix::process::{Signal, geteuid};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{LIMIT, MIB, expect_equal, set_up, vamoose};

const KEY: &str = "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0";

/// Two nodes of a cluster.
struct Cluster {
    near: Node,
    far: Node,
}

/// A node, with the folder of the sockets in its pod.
struct Node {
    gateway: Vamoose,
    folder: TempDir,
}

impl Cluster {
    fn start() -> Result<Self> {
        let authority = Authority::new()?;
        Ok(Self {
            near: Node::start(&authority)?,
            far: Node::start(&authority)?,
        })
    }

    /// Sockets at which a target waits, and the slots of both nodes that lead there.
    fn slots(&self, numbers: &[u16]) -> Result<(BTreeMap<u16, PathBuf>, BTreeMap<u16, PathBuf>)> {
        let waiting: BTreeMap<_, _> = numbers
            .iter()
            .map(|number| (*number, self.far.path(&format!("target-{number}"))))
            .collect();
        let ports = self.far.start_target(&waiting)?;
        let sockets = self.near.start_source(&ports)?;
        Ok((waiting, sockets))
    }
}

impl Node {
    fn start(authority: &Authority) -> Result<Self> {
        let folder = TempDir::new()?;
        authority.issue(folder.path())?;
        let text = format!(
            "tls-creds = {:?}\nkubevirt = {{ listen = \"127.0.0.1\", certificate = \"virt-handler\" }}\n",
            folder.path()
        );
        fs::write(folder.path().join("gateway.toml"), text)?;
        let gateway = run(folder.path())?;
        Ok(Self { gateway, folder })
    }

    /// As a crash and a new pod would.
    fn restart(&mut self) -> Result<()> {
        self.gateway.kill()?;
        self.gateway = run(self.folder.path())?;
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn ask(&self, request: &Value) -> Result<Value> {
        self.ask_in_words(&request.to_string())
    }

    fn ask_in_words(&self, request: &str) -> Result<Value> {
        let mut control = UnixStream::connect(self.path("control"))?;
        control.set_read_timeout(Some(LIMIT))?;
        control.write_all(format!("{request}\n").as_bytes())?;
        let mut answer = String::new();
        control.read_to_string(&mut answer)?;
        serde_json::from_str(&answer).with_context(|| format!("{request}: {answer}"))
    }

    fn start_target(&self, sockets: &BTreeMap<u16, PathBuf>) -> Result<BTreeMap<u16, u16>> {
        let answer = self.ask(&json!({ "start-target": { "key": KEY, "sockets": sockets } }))?;
        let ports = answer.get("ports").with_context(|| answer.to_string())?;
        Ok(serde_json::from_value(ports.clone())?)
    }

    fn start_source(&self, ports: &BTreeMap<u16, u16>) -> Result<BTreeMap<u16, PathBuf>> {
        self.start_source_for(ports, geteuid().as_raw())
    }

    fn start_source_for(
        &self,
        ports: &BTreeMap<u16, u16>,
        user: u32,
    ) -> Result<BTreeMap<u16, PathBuf>> {
        let answer = self.ask(&json!({ "start-source": {
            "key": KEY, "to": "127.0.0.1", "ports": ports, "directory": self.folder.path(), "user": user,
        } }))?;
        let sockets = answer.get("sockets").with_context(|| answer.to_string())?;
        Ok(serde_json::from_value(sockets.clone())?)
    }

    fn stop(&self, side: &str) -> Result<()> {
        let answer = self.ask(&json!({ format!("stop-{side}"): { "key": KEY } }))?;
        ensure!(answer == "stopped", "{answer}");
        Ok(())
    }
}

fn run(folder: &Path) -> Result<Vamoose> {
    let mut command = Command::new(vamoose());
    command.arg("gateway").arg("--config");
    command.arg(folder.join("gateway.toml"));
    command.arg("--kubevirt").arg(folder.join("control"));
    let gateway = Vamoose::start(&mut command)?;
    gateway.wait_for("ready for requests on ", LIMIT)?;
    Ok(gateway)
}

/// Who vouches for the nodes of a cluster.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Ok(Self(CertifiedIssuer::self_signed(
            params,
            KeyPair::generate()?,
        )?))
    }

    /// The certificate of a node, for both roles.
    fn issue(&self, directory: &Path) -> Result<()> {
        let mut params = CertificateParams::new(vec!["virt-handler".to_owned()])?;
        let name = &mut params.distinguished_name;
        name.push(DnType::CommonName, "virt-handler");
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.0)?.pem();
        fs::write(directory.join("ca-cert.pem"), self.0.pem())?;
        for role in ["server", "client"] {
            fs::write(directory.join(format!("{role}-cert.pem")), &certificate)?;
            let path = directory.join(format!("{role}-key.pem"));
            fs::write(path, key.serialize_pem())?;
        }
        Ok(())
    }
}

fn connect(path: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(path).with_context(|| path.display().to_string())?;
    stream.set_read_timeout(Some(LIMIT))?;
    Ok(stream)
}

fn read(mut stream: &UnixStream, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Answers each connection with what it gets, as long as the process lives.
fn echo(path: &Path) -> Result<()> {
    let listener = UnixListener::bind(path)?;
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut back = stream.try_clone()?;
                std::io::copy(&mut stream, &mut back)
            });
        }
    });
    Ok(())
}

/// Greets each connection before it has sent anything.
fn greet(path: &Path) -> Result<()> {
    let listener = UnixListener::bind(path)?;
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // Who has gone is not greeted.
            let _ = stream.write_all(b"NBDMAGIC");
        }
    });
    Ok(())
}

#[test]
fn a_guest_moves_through_the_slots_of_its_key() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let cluster = Cluster::start()?;
    let (waiting, sockets) = cluster.slots(&[0, 49_152, 49_153])?;
    for (number, name) in [
        (0, format!("{KEY}-source.sock")),
        (49_152, format!("{KEY}-49152-source.sock")),
        (49_153, format!("{KEY}-49153-source.sock")),
    ] {
        ensure!(sockets[&number] == cluster.near.path(&name));
    }
    echo(&waiting[&0])?;
    greet(&waiting[&49_153])?;

    let mut rpc = connect(&sockets[&0])?;
    rpc.write_all(b"prepare")?;
    ensure!(read(&rpc, 7)? == b"prepare");
    ensure!(read(&connect(&sockets[&49_153])?, 8)? == b"NBDMAGIC");

    let mut source = Builder::bare(&binary, 16 * MIB)
        .content(Fill::Mixed, 1)
        .argument("-name")
        .argument("guest=default_web1")
        .start()?;
    let mut destination = Builder::bare(&binary, 16 * MIB).incoming().start()?;
    for qemu in [&mut source, &mut destination] {
        set_up(qemu, 4, "none")?;
    }
    let unix = |path: &Path| format!("unix:{}", path.display());
    destination.qmp.migrate_incoming(&unix(&waiting[&49_152]))?;
    source.qmp.migrate(&unix(&sockets[&49_152]))?;
    let gateways = [&cluster.near.gateway, &cluster.far.gateway];
    expect_equal(&mut source, &mut destination, &gateways)?;
    cluster.near.gateway.wait_for(
        &format!("guest default_web1 to the other node, stream {KEY}-49152: loaded; "),
        LIMIT,
    )?;

    // The connection of libvirt is there all the time.
    rpc.write_all(b"finish")?;
    ensure!(read(&rpc, 6)? == b"finish");
    drop(rpc);
    cluster.near.stop("source")?;
    cluster.far.stop("target")?;
    for path in sockets.values() {
        ensure!(!path.exists(), "{} is still there", path.display());
    }
    for node in [&cluster.near, &cluster.far] {
        let keys = node.ask(&json!({ "list": {} }))?;
        ensure!(keys == json!({ "keys": { "sources": [], "targets": [] } }));
    }
    Ok(())
}

#[test]
fn a_key_that_is_started_again_stays_unless_it_leads_elsewhere() -> Result<()> {
    let cluster = Cluster::start()?;
    let (waiting, sockets) = cluster.slots(&[0])?;
    echo(&waiting[&0])?;
    let mut rpc = connect(&sockets[&0])?;
    rpc.write_all(b"one")?;
    ensure!(read(&rpc, 3)? == b"one");
    let ports = cluster.far.start_target(&waiting)?;
    ensure!(cluster.near.start_source(&ports)? == sockets);
    rpc.write_all(b"two")?;
    ensure!(read(&rpc, 3)? == b"two");

    let mut elsewhere = waiting.clone();
    elsewhere.insert(0, cluster.far.path("elsewhere"));
    greet(&elsewhere[&0])?;
    let moved = cluster.far.start_target(&elsewhere)?;
    ensure!(rpc.read(&mut [0]).unwrap_or(0) == 0, "not ended");
    ensure!(cluster.near.start_source(&moved)? == sockets);
    ensure!(read(&connect(&sockets[&0])?, 8)? == b"NBDMAGIC");
    Ok(())
}

#[test]
fn a_gateway_that_died_leaves_nothing_in_the_way_of_the_next() -> Result<()> {
    let mut cluster = Cluster::start()?;
    let (waiting, sockets) = cluster.slots(&[0])?;
    echo(&waiting[&0])?;
    cluster.near.restart()?;
    cluster.far.restart()?;
    ensure!(sockets[&0].exists());
    // That the keys are not known any more is no error.
    cluster.near.stop("source")?;
    cluster.far.stop("target")?;
    let ports = cluster.far.start_target(&waiting)?;
    ensure!(cluster.near.start_source(&ports)? == sockets);
    let mut rpc = connect(&sockets[&0])?;
    rpc.write_all(b"again")?;
    ensure!(read(&rpc, 5)? == b"again");
    Ok(())
}

#[test]
fn libvirts_connection_survives_the_loss_of_those_between_the_nodes() -> Result<()> {
    let cluster = Cluster::start()?;
    let waiting = BTreeMap::from([(0, cluster.far.path("target-0"))]);
    echo(&waiting[&0])?;
    let ports = cluster.far.start_target(&waiting)?;
    let middlebox = Middlebox::new(SocketAddr::from(([127, 0, 0, 1], ports[&0])))?;
    let through = BTreeMap::from([(0, middlebox.address().port())]);
    let sockets = cluster.near.start_source(&through)?;
    let mut rpc = connect(&sockets[&0])?;
    for word in [b"one", b"two", b"six"] {
        rpc.write_all(word)?;
        ensure!(read(&rpc, 3)? == word);
        ensure!(middlebox.apply(Which::All, Change::Reset) > 0);
    }
    rpc.write_all(b"end")?;
    ensure!(read(&rpc, 3)? == b"end");
    Ok(())
}

#[test]
fn only_nodes_of_the_cluster_are_let_in() -> Result<()> {
    let cluster = Cluster::start()?;
    let stranger = Node::start(&Authority::new()?)?;
    let waiting = BTreeMap::from([(0, cluster.far.path("target-0"))]);
    let listener = UnixListener::bind(&waiting[&0])?;
    listener.set_nonblocking(true)?;
    let ports = cluster.far.start_target(&waiting)?;
    let sockets = stranger.start_source(&ports)?;
    let mut rpc = connect(&sockets[&0])?;
    rpc.write_all(b"let me in")?;
    ensure!(!matches!(rpc.read(&mut [0]), Ok(1..)));
    stranger.gateway.wait_for("refused: ", LIMIT)?;
    ensure!(listener.accept().is_err());
    Ok(())
}

#[test]
fn wrong_requests_are_answered_with_the_reason() -> Result<()> {
    let cluster = Cluster::start()?;
    for (request, reason) in [
        ("{", "EOF"),
        (r#"{"start-everything":{}}"#, "start-everything"),
        (
            r#"{"start-target":{"key":"../x","sockets":{"0":"/x"}}}"#,
            "key `../x`",
        ),
        (
            r#"{"start-target":{"key":"x","sockets":{"0":"x"}}}"#,
            "no absolute path",
        ),
        (r#"{"start-target":{"key":"x","sockets":{}}}"#, "no slot"),
        (
            r#"{"start-source":{"key":"x","to":"h","ports":{"0":1},"directory":"/no/such","user":1}}"#,
            "slot 0: cannot listen on unix:/no/such/x-source.sock",
        ),
    ] {
        let answer = cluster.near.ask_in_words(request)?;
        let error = answer["error"].as_str().unwrap_or_default();
        ensure!(error.contains(reason), "{request}: {answer}");
    }
    Ok(())
}

#[test]
fn sockets_belong_to_the_user_who_is_named() -> Result<()> {
    if !geteuid().is_root() {
        return lab::skipped("only root can give a socket to another user");
    }
    const NOBODY: u32 = 65_534;
    let cluster = Cluster::start()?;
    let sockets = cluster
        .near
        .start_source_for(&BTreeMap::from([(0, 1)]), NOBODY)?;
    let found = fs::metadata(&sockets[&0])?;
    ensure!(found.uid() == NOBODY && found.mode() & 0o777 == 0o600);
    Ok(())
}

#[test]
fn a_gateway_that_is_to_end_starts_nothing_and_lets_migrations_finish() -> Result<()> {
    let cluster = Cluster::start()?;
    let (waiting, sockets) = cluster.slots(&[0])?;
    echo(&waiting[&0])?;
    let mut rpc = connect(&sockets[&0])?;
    rpc.write_all(b"one")?;
    ensure!(read(&rpc, 3)? == b"one");
    cluster.near.gateway.signal(Signal::TERM)?;
    let text = "no further migrations are taken";
    cluster.near.gateway.wait_for(text, LIMIT)?;
    let other = json!({ "start-target": { "key": "other", "sockets": { "0": "/x" } } });
    let answer = cluster.near.ask(&other)?;
    ensure!(
        answer["error"] == "this gateway is about to end",
        "{answer}"
    );
    rpc.write_all(b"two")?;
    ensure!(read(&rpc, 3)? == b"two");
    drop(rpc);
    let Cluster { near, far: _far } = cluster;
    near.gateway.finish(LIMIT)?.success()?;
    Ok(())
}
