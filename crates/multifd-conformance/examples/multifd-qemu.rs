//! A driver of a stock QEMU: a machine without CPU and devices, whose only RAM block is `mem`.
//!
//! ```sh
//! scripts/setup qemu
//! cargo build -p multifd-conformance --bins --examples
//! target/debug/multifd-conformance --name "QEMU 10.0" --exclusions crates/multifd-conformance/exclusions.json \
//!     target/debug/examples/multifd-qemu 10.0
//! ```
//!
//! QEMU decodes channels only beside a main stream, which the driver makes: the list of RAM blocks, and as many marks at which QEMU
//! waits for a SYNC as there are SYNCs.

use std::{
    fs,
    io::{Read as _, Write as _, stdin, stdout},
    net::Shutdown,
    os::unix::{
        net::{UnixListener, UnixStream},
        process::ExitStatusExt as _,
    },
    process::ExitCode,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use lab::{
    qemu::{Binary, Builder, Qemu, available},
    ram::Fill,
};
use multifd_conformance::{PACKET_PAGES, Reply, Request, Work};
use serde_json::json;

#[derive(Parser)]
struct Options {
    /// Major and minor version, as in 10.0.
    version: String,
}

/// How long QEMU may take for a case, which it does in milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long QEMU may take to answer when it has closed a channel. When it refuses one, its main thread may wait for a SYNC that never
/// comes, and it never answers again.
const ANSWER: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    lab::exit_code("multifd-qemu", run())
}

fn run() -> Result<()> {
    let version = Options::parse().version;
    let request = Request::read(stdin().lock())?;
    let fits = |binary: &&Binary| {
        binary
            .version
            .to_string()
            .starts_with(&format!("{version}."))
    };
    let binary = available().iter().find(fits);
    let binary = binary.with_context(|| format!("no QEMU {version}: run scripts/setup qemu"))?;
    answer(binary, &request)?.write(stdout().lock())
}

fn answer(binary: &Binary, request: &Request) -> Result<Reply> {
    let unsupported = |why: &str| Ok(Reply::Unsupported(why.to_owned()));
    let [block] = &request.blocks[..] else {
        return unsupported("a machine without devices has one RAM block");
    };
    let machine = Builder::bare(binary, block.len as u64);
    match &request.work {
        Work::Decode(streams) => {
            let mut qemu = machine.incoming().start()?;
            if !set_up(&mut qemu, streams.len(), &request.method)? {
                return unsupported("this QEMU is built without the method");
            }
            decode(&mut qemu, binary.version.major, block.len, streams)
        }
        Work::Encode { channels, rounds } => {
            let [memory] = &rounds[..] else {
                return unsupported("a machine without CPUs writes nothing between two rounds");
            };
            let folder = tempfile::tempdir()?;
            let image = folder.path().join("image");
            fs::write(&image, memory.concat())?;
            let mut qemu = machine.content(Fill::Image(image), 0).start()?;
            if !set_up(&mut qemu, (*channels).into(), &request.method)? {
                return unsupported("this QEMU is built without the method");
            }
            encode(&mut qemu, *channels)
        }
    }
}

/// Sets the method and the number of channels; false if QEMU does not have the method.
fn set_up(qemu: &mut Qemu, channels: usize, method: &str) -> Result<bool> {
    qemu.qmp
        .set_capabilities(&[("multifd", true), ("events", true)])?;
    qemu.qmp
        .set_parameters(json!({ "multifd-channels": channels }))?;
    Ok(qemu
        .qmp
        .set_parameters(json!({ "multifd-compression": method }))
        .is_ok())
}

fn decode(qemu: &mut Qemu, major: u32, len: usize, streams: &[Vec<u8>]) -> Result<Reply> {
    let socket = qemu.socket("migration");
    qemu.qmp
        .migrate_incoming(&format!("unix:{}", socket.display()))?;
    let syncs = streams
        .iter()
        .map(|stream| syncs(stream))
        .max()
        .unwrap_or(0);
    let main = main_stream(major, len, syncs);
    let mut connections = Vec::new();
    let (closed, closes) = mpsc::channel();
    // The main stream first, with its first bytes.
    for (number, bytes) in [&main].into_iter().chain(streams).enumerate() {
        let mut connection = UnixStream::connect(&socket)?;
        connections.push(connection.try_clone()?);
        let (bytes, closed) = (bytes.clone(), closed.clone());
        thread::spawn(move || {
            // QEMU may have seen enough.
            let _ = connection.write_all(&bytes);
            let _ = connection.shutdown(Shutdown::Write);
            let _ = connection.read(&mut [0]);
            let _ = closed.send(number);
        });
    }
    closes
        .recv_timeout(TIMEOUT)
        .context("QEMU waits for ever")?;
    qemu.qmp.set_timeout(ANSWER);
    let Err(why) = qemu.qmp.wait_migration(&["completed"], ANSWER) else {
        return Ok(Reply::Accepted(vec![fs::read(qemu.ram())?]));
    };
    // Whether it ends by itself shows once it has nothing more to read.
    let ended = qemu.wait_exit(Duration::ZERO);
    if let Some(signal) = ended.ok().and_then(|status| status.signal()) {
        bail!("signal {signal} ended QEMU: {}", qemu.stderr());
    }
    Ok(Reply::Refused(format!("{why:#}")))
}

fn encode(qemu: &mut Qemu, channels: u8) -> Result<Reply> {
    let socket = qemu.socket("migration");
    let listener = UnixListener::bind(&socket)?;
    qemu.qmp.migrate(&format!("unix:{}", socket.display()))?;
    let readers: Vec<_> = (0..=channels)
        .map(|_| {
            let (mut connection, _) = listener.accept()?;
            Ok(thread::spawn(move || {
                let mut bytes = Vec::new();
                connection.read_to_end(&mut bytes).map(|_| bytes)
            }))
        })
        .collect::<Result<_>>()?;
    qemu.qmp.wait_migration(&["completed"], TIMEOUT)?;
    let mut streams = Vec::new();
    for reader in readers {
        let Ok(bytes) = reader.join() else {
            bail!("a reader failed");
        };
        streams.push(bytes?);
    }
    streams.retain(|stream| !stream.starts_with(b"QEVM"));
    Ok(Reply::Encoded(streams))
}

/// How many SYNCs a stream has, up to the first header that is none.
fn syncs(stream: &[u8]) -> usize {
    const HEADER: usize = 320 + 8 * PACKET_PAGES;
    const STATE: usize = 276;
    let (mut syncs, mut at) = (0, 64);
    let word = |at: usize| {
        let word = stream.get(at..at + 4)?;
        Some(
            word.iter()
                .fold(0usize, |value, byte| value << 8 | usize::from(*byte)),
        )
    };
    while let (Some(0x1122_3344), Some(flags)) = (word(at), word(at + 8)) {
        let (len, payload) = match flags {
            0x40 => (STATE, word(at + STATE - 4)),
            _ => (
                HEADER,
                word(at + 16).and_then(|normal| if normal == 0 { Some(0) } else { word(at + 20) }),
            ),
        };
        syncs += flags & 1;
        at += len + payload.unwrap_or(0);
    }
    syncs
}

/// A main stream with `syncs` marks, at least two, for a destination of this version: a section that begins, others, and one that
/// ends, each with a mark.
fn main_stream(major: u32, len: usize, syncs: usize) -> Vec<u8> {
    const MEM_SIZE: u64 = 4;
    const FLUSH: u64 = 0x200;
    const EOS: u64 = 0x10;
    const ID: u32 = 2;
    let mut bytes = b"QEVM\0\0\0\x03\x07\0\0\0\x04none".to_vec();
    let mut section = |kind: u8, start: &[u8]| {
        bytes.push(kind);
        bytes.extend(ID.to_be_bytes());
        bytes.extend(start);
        // Before 8.0 the end of a section is the mark.
        if major >= 8 {
            bytes.extend(FLUSH.to_be_bytes());
        }
        bytes.extend(EOS.to_be_bytes());
        bytes.push(0x7e);
        bytes.extend(ID.to_be_bytes());
    };
    let len = len as u64;
    let name = b"\x03ram\0\0\0\0\0\0\0\x04";
    let list = [
        &(len | MEM_SIZE).to_be_bytes()[..],
        b"\x03mem",
        &len.to_be_bytes(),
    ]
    .concat();
    section(1, &[&name[..], &list].concat());
    for _ in 2..syncs {
        section(2, &[]);
    }
    section(3, &[]);
    // The end, and an empty description.
    bytes.extend(b"\0\x06\0\0\0\x02{}");
    bytes
}
