//! Peers that send what no QEMU sends, or stop: the relay ends at once with an error that names who sent
//! what, closes every connection on both sides and leaves nothing behind.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::Shutdown,
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::Command,
    thread,
};

use crate::common::{LIMIT, vamoose};
use anyhow::{Context as _, Result, ensure};
use lab::vamoose::{Ended, Vamoose};
use multifd::{BlockName, INITIAL_LEN, Initial, Layout, MAIN_MAGIC, Method, RamHeader};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;

const LAYOUT: Layout = Layout::X86;

/// A relay between two ends that this test plays.
struct Stage {
    folder: TempDir,
    relay: Vamoose,
    destination: UnixListener,
}

impl Stage {
    fn new(options: &[&str]) -> Result<Self> {
        Self::with(|mut command| {
            command.args(options);
            command
        })
    }

    /// With a relay that is started by what `change` makes of its command.
    fn with(change: impl FnOnce(Command) -> Command) -> Result<Self> {
        let folder = TempDir::new()?;
        let path = folder.path().join("in");
        let destination = UnixListener::bind(&path)?;
        let listen = format!("unix:{}", folder.path().join("out").display());
        let connect = format!("unix:{}", path.display());
        let mut command = Command::new(vamoose());
        command.args(["relay", "--listen", &listen, "--connect", &connect]);
        let relay = Vamoose::start(&mut change(command))?;
        relay.wait_for("listening on ", LIMIT)?;
        Ok(Self {
            folder,
            relay,
            destination,
        })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Opens a connection as a source does.
    fn open(&self, first: &[u8]) -> Result<UnixStream> {
        let mut stream = UnixStream::connect(self.socket())?;
        stream.write_all(first)?;
        Ok(stream)
    }

    /// Opens a whole migration of `channels` channels: main stream last, as QEMU does.
    fn open_all(&self, channels: u8) -> Result<Source> {
        let channels = (0..channels).map(|id| self.open(&initial(id)));
        let channels = channels.collect::<Result<Vec<_>>>()?;
        let main = self.open(&main_stream())?;
        Ok(Source { main, channels })
    }

    /// Takes a connection towards the destination.
    fn accept(&self) -> Result<UnixStream> {
        let limit = Timespec::try_from(LIMIT)?;
        let mut fds = [PollFd::new(&self.destination, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&limit))?;
        ensure!(ready > 0, "nothing came; {}", self.relay.stderr());
        Ok(self.destination.accept()?.0)
    }

    /// Takes what the relay opens towards the destination: main stream first.
    fn accept_all(&self, channels: usize) -> Result<Vec<UnixStream>> {
        (0..=channels)
            .map(|number| {
                let mut stream = self.accept()?;
                let mut first = [0; INITIAL_LEN];
                let length = if number == 0 { 4 } else { INITIAL_LEN };
                stream.read_exact(&mut first[..length])?;
                let magic = u32::from_be_bytes(*first.first_chunk().context("four bytes")?);
                ensure!(
                    (magic == MAIN_MAGIC) == (number == 0),
                    "connection {number}: {magic:#x}"
                );
                Ok(stream)
            })
            .collect()
    }

    /// The relay must fail and print `text`, and its socket must be gone.
    fn expect_failure(self, text: &str) -> Result<Ended> {
        let socket = self.socket();
        let ended = self.relay.finish(LIMIT)?.failure(text)?;
        ensure!(!socket.exists(), "{} is left behind", socket.display());
        Ok(ended)
    }
}

struct Source {
    main: UnixStream,
    channels: Vec<UnixStream>,
}

/// The first packet of channel `id`, as QEMU sends it: it announces nothing.
fn initial(id: u8) -> [u8; INITIAL_LEN] {
    let mut bytes = Initial::new([7; 16], id, 255).unwrap().to_bytes();
    bytes[25..].fill(0);
    bytes
}

/// The beginning of a main stream, as far as a relay looks at it.
fn main_stream() -> Vec<u8> {
    [
        &MAIN_MAGIC.to_be_bytes(),
        &b"\x00\x00\x00\x03\x01\x00\x00\x00\x02\x03ram"[..],
    ]
    .concat()
}

fn sync() -> Vec<u8> {
    let mut header = RamHeader::new(LAYOUT);
    header.sync = true;
    let mut bytes = Vec::new();
    header.write(LAYOUT, &mut bytes);
    bytes
}

/// A packet with two pages of method `method` and `payload`.
fn packet(method: Method, payload: &[u8]) -> Vec<u8> {
    let mut header = RamHeader::new(LAYOUT);
    header.method = method;
    header.block = BlockName::new(b"mem").unwrap();
    header.set_pages(&[0, 4096], &[], LAYOUT).unwrap();
    header.set_payload_len(payload.len(), LAYOUT).unwrap();
    let mut bytes = Vec::new();
    header.write(LAYOUT, &mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

/// Nothing more may come, and the end must.
fn expect_end(stream: &mut UnixStream) -> Result<()> {
    stream.set_read_timeout(Some(LIMIT))?;
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        // A reset is an end, too: the relay left bytes of ours unread.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
        result => result.map(drop).context("the connection was not closed"),
    }
}

/// Sends `bytes` on channel 0 of a migration that has begun well: the relay must print `text` and end all
/// connections on both sides.
fn bad_channel(bytes: &[u8], text: &str) -> Result<()> {
    let stage = Stage::new(&["--stall-timeout", "5"])?;
    let mut source = stage.open_all(2)?;
    let mut destination = stage.accept_all(2)?;
    for channel in &mut source.channels {
        channel.write_all(&sync())?;
    }
    // The relay may have seen enough before everything is written.
    let _ = source.channels[0].write_all(bytes);
    for stream in destination.iter_mut().chain(&mut source.channels) {
        expect_end(stream)?;
    }
    expect_end(&mut source.main)?;
    stage.expect_failure(text).map(drop)
}

/// A good packet with the 32-bit field at `at` replaced.
fn with_field(at: usize, value: u32) -> Vec<u8> {
    let mut bytes = packet(Method::Zstd, &[0; 100]);
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    bytes
}

#[test]
fn bad_packets() -> Result<()> {
    let wrong_magic = with_field(0, 0xdead_beef);
    let cases: [(&[u8], &str); 11] = [
        (
            &wrong_magic,
            "source, channel 0: bad packet: packet magic is 0xdeadbeef",
        ),
        (&with_field(4, 2), "packet version is 2"),
        (&with_field(8, 0x06), "do not name one compression method"),
        (&with_field(8, 0x1000), "unknown bits"),
        (&with_field(8, 0x0100), "do not name one compression method"),
        (&with_field(16, 200), "normal_pages 200 + zero_pages "),
        (
            &with_field(32, 127),
            "normal_pages 2 + zero_pages 127 is beyond",
        ),
        (
            &with_field(20, u32::MAX),
            "next_packet_size is 4294967295 bytes",
        ),
        (&with_field(20, 0), "next_packet_size is 0"),
        (&with_field(324, 5), "offset[0] is 0x5"),
        (
            &packet(Method::Zlib, &[0xaa; 64]),
            "bad payload of packet 0 (RAM block mem, pages at ",
        ),
    ];
    for (bytes, text) in cases {
        bad_channel(bytes, text).context(text)?;
    }
    Ok(())
}

/// A method bit that does not fit the payload is found by its decoder.
#[test]
fn a_wrong_method_bit() -> Result<()> {
    for method in Method::ALL {
        let is_own = matches!(method, Method::Delta | Method::Shared);
        if !is_own && !matches!(method, Method::None | Method::Uadk) {
            bad_channel(&packet(method, &[0x42; 8192]), "bad payload")?;
        }
    }
    bad_channel(&packet(Method::Uadk, &[0x42; 8192]), "uadk")?;
    // A QEMU has no session, and with it no pages that both ends know.
    bad_channel(&packet(Method::Delta, &[0x42; 8192]), "differences")?;
    bad_channel(&packet(Method::Shared, &[0x42; 8192]), "page store")
}

#[test]
fn a_stream_that_ends_in_a_packet() -> Result<()> {
    let whole = packet(Method::None, &[1; 8192]);
    for (length, part) in [(5, "header"), (700, "header"), (5000, "payload")] {
        let stage = Stage::new(&[])?;
        let mut source = stage.open_all(1)?;
        let mut destination = stage.accept_all(1)?;
        source.channels[0].write_all(&sync())?;
        source.channels[0].write_all(&whole[..length])?;
        source.channels.clear();
        for stream in &mut destination {
            expect_end(stream)?;
        }
        stage.expect_failure(&format!("in the middle of a packet's {part}"))?;
    }
    Ok(())
}

/// Whoever comes before the source and is none is turned away, and the relay waits on.
#[test]
fn strangers_before_the_source() -> Result<()> {
    let stage = Stage::new(&["--stall-timeout", "1"])?;
    drop(stage.open(&[])?);
    stage
        .relay
        .wait_for("closed before its first byte", LIMIT)?;
    drop(stage.open(b"QE")?);
    stage.relay.wait_for("its first 4 bytes (got 2)", LIMIT)?;
    let mut garbage = stage.open(b"GET / HTTP/1.1\r\n")?;
    expect_end(&mut garbage)?;
    stage
        .relay
        .wait_for("begins neither a main stream nor a multifd channel", LIMIT)?;
    let mut silent = stage.open(&[])?;
    expect_end(&mut silent)?;
    stage.relay.wait_for("has not introduced itself", LIMIT)?;
    let _source = stage.open_all(2)?;
    stage.accept_all(2)?;
    Ok(())
}

/// One that stays and sends nothing does not keep a source waiting, whether it announces its channels or not.
#[test]
fn a_silent_stranger_beside_the_source() -> Result<()> {
    for options in [&[][..], &["--incoming-channels", "2"]] {
        let stage = Stage::new(options)?;
        let _before = stage.open(&[])?;
        let main = stage.open(&main_stream())?;
        drop(stage.open(&[])?);
        let _channels = [stage.open(&initial(0))?, stage.open(&initial(1))?];
        stage.accept_all(2)?;
        drop(main);
    }
    Ok(())
}

/// Whatever else comes to a relay that is busy ends at once, and what is under way goes on.
#[test]
fn another_migration_while_one_is_under_way() -> Result<()> {
    let stage = Stage::new(&[])?;
    let mut source = stage.open_all(2)?;
    let mut destination = stage.accept_all(2)?;
    drop(stage.open(&[])?);
    for first in [&main_stream()[..], &initial(0), &[0x16, 3, 1, 0, 42]] {
        expect_end(&mut stage.open(first)?)?;
    }
    stage
        .relay
        .wait_for("rejected: a migration is already running", LIMIT)?;
    expect_end(&mut stage.open(b"GET / HTTP/1.1\r\n")?)?;
    stage.relay.wait_for("turning away a stranger", LIMIT)?;
    source.channels[0].write_all(&sync())?;
    destination[1].read_exact(&mut vec![0; LAYOUT.ram_header_len()])?;
    Ok(())
}

/// The same where there are no channels, which shows at once.
#[test]
fn another_migration_while_one_is_passed_through() -> Result<()> {
    let stage = Stage::new(&[])?;
    let mut source = stage.open(&main_stream())?;
    let mut destination = stage.accept()?;
    stage
        .relay
        .wait_for("the source uses a single main connection", LIMIT)?;
    for first in [&main_stream()[..], &initial(0)] {
        expect_end(&mut stage.open(first)?)?;
        drop(stage.accept()?);
    }
    stage
        .relay
        .wait_for("rejected: a migration is already running", LIMIT)?;
    source.write_all(b"more")?;
    destination.read_exact(&mut vec![0; main_stream().len() + 4])?;
    Ok(())
}

/// Without multifd, QEMU (8.0 to 10.0) opens the channel for pages that the destination misses before it sends the first bytes of the main
/// stream, and sends nothing on it. The destination takes the first connection for the main stream.
#[test]
fn a_channel_for_post_copy_before_the_first_bytes() -> Result<()> {
    let stage = Stage::new(&[])?;
    let mut main = stage.open(&[])?;
    let mut near = stage.open(&[])?;
    main.write_all(&main_stream())?;
    let mut first = vec![0; main_stream().len()];
    let mut destination = stage.accept()?;
    destination.read_exact(&mut first)?;
    ensure!(first == main_stream(), "{first:?}");
    let mut far = stage.accept()?;
    near.write_all(b"page")?;
    far.read_exact(&mut first[..4])?;
    ensure!(first.starts_with(b"page"), "{first:?}");
    Ok(())
}

/// The channel on which a source (QEMU 10.1 and later) sends pages that the destination misses comes late, and has no magic.
#[test]
fn a_channel_for_post_copy() -> Result<()> {
    let stage = Stage::new(&[])?;
    let _source = stage.open_all(2)?;
    let _destination = stage.accept_all(2)?;
    let mut near = stage.open(&0x1008_u64.to_be_bytes())?;
    let mut far = stage.accept()?;
    let mut first = [0; 8];
    far.read_exact(&mut first)?;
    ensure!(u64::from_be_bytes(first) == 0x1008, "{first:?}");
    far.write_all(b"back")?;
    near.read_exact(&mut [0; 4])?;
    drop(near);
    expect_end(&mut far)?;
    Ok(())
}

/// Behind TLS, too: only what has spoken is passed on.
#[test]
fn a_silent_stranger_beside_tls() -> Result<()> {
    let stage = Stage::new(&[])?;
    let _silent = stage.open(&[])?;
    let hello = [0x16, 3, 1, 0, 42];
    let near = stage.open(&hello)?;
    let mut far = stage.accept()?;
    far.read_exact(&mut [0; 5])?;
    let garbage = stage.open(b"GET / HTTP/1.1\r\n");
    expect_end(&mut garbage?)?;
    stage
        .relay
        .wait_for("uses TLS and this connection does not", LIMIT)?;
    drop(near);
    drop(far);
    let ended = stage.relay.finish(LIMIT)?.success()?;
    // That may have been a handshake that failed.
    ensure!(!ended.stderr.contains("delivered"), "{}", ended.stderr);
    ensure!(
        ended.stderr.contains("only the QEMUs know"),
        "{}",
        ended.stderr
    );
    Ok(())
}

/// Once the source has begun, its errors are reported.
#[test]
fn first_bytes_that_begin_nothing() -> Result<()> {
    let stage = Stage::with(|mut command| {
        command.env("VAMOOSE_LOG", "debug");
        command
    })?;
    let mut channel = stage.open(&initial(0))?;
    stage.relay.wait_for("channel 0 has come", LIMIT)?;
    let mut garbage = stage.open(b"GET / HTTP/1.1\r\n")?;
    expect_end(&mut garbage)?;
    expect_end(&mut channel)?;
    stage.expect_failure("begins neither a main stream nor a multifd channel")?;

    let stage = Stage::new(&[])?;
    let mut wrong_version = initial(0);
    wrong_version[7] = 9;
    let mut channel = stage.open(&wrong_version)?;
    expect_end(&mut channel)?;
    stage.expect_failure("version of the channel's first 64 bytes is 9")?;

    let stage = Stage::new(&["--stall-timeout", "1"])?;
    let _half = stage.open(&initial(0)[..30])?;
    let _channel = stage.open(&initial(1))?;
    stage.expect_failure("1 connections have not introduced themselves")?;
    Ok(())
}

/// Another user of this host is turned away, over TCP and at a unix socket, unless he is named.
#[test]
fn another_user() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return lab::skipped("only root can be another user");
    }
    let other = "4711";
    for options in [
        &[][..],
        &["--peer-uid", other],
        &["--peer-uid", other, "--peer-uid", "4712"],
    ] {
        for tcp in [true, false] {
            let folder = TempDir::new()?;
            // The file's mode decides who may use the socket.
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
            let path = folder.path().join("out");
            let listen = match tcp {
                true => "tcp:127.0.0.1:0".to_owned(),
                false => format!("unix:{}", path.display()),
            };
            let (relay, address) = Vamoose::relay(vamoose(), &listen, "unix:/nowhere", options)?;
            let client = match address.strip_prefix("tcp:127.0.0.1:") {
                Some(port) => {
                    format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf QEVM >&3; cat <&3")
                }
                // Whether he may is all that is asked here: he may write to it, or not.
                None => format!("test -w {}", path.display()),
            };
            let user = format!("--reuid={other}");
            let ended = Command::new("setpriv")
                .args([&user, "--clear-groups", "bash", "-c", &client])
                .output()?;
            let named = !options.is_empty();
            if tcp {
                let text = match named {
                    true => "cannot connect to unix:/nowhere",
                    false => "turning away user 4711",
                };
                relay.wait_for(text, LIMIT)?;
            } else {
                ensure!(ended.status.success() == named, "{options:?}: {ended:?}");
            }
        }
    }
    Ok(())
}

/// A relay that has no file descriptors left waits until it has some.
#[test]
fn no_file_descriptors_left() -> Result<()> {
    let stage = Stage::with(|command| {
        let mut limited = Command::new("prlimit");
        limited
            .arg("--nofile=24")
            .arg(command.get_program())
            .args(command.get_args());
        limited
    })?;
    let strangers = (0..40)
        .map(|_| stage.open(&[]))
        .collect::<Result<Vec<_>>>()?;
    stage.relay.wait_for("Too many open files", LIMIT)?;
    drop(strangers);
    let _source = stage.open_all(2)?;
    stage.accept_all(2)?;
    Ok(())
}

#[test]
fn channel_ids_that_do_not_fit() -> Result<()> {
    let stage = Stage::new(&["--incoming-channels", "2"])?;
    let _too_large = stage.open(&initial(2))?;
    stage.expect_failure("id 2, but there are 2 channels")?;

    let stage = Stage::new(&[])?;
    let _twice = [stage.open(&initial(1))?, stage.open(&initial(1))?];
    stage.expect_failure("id 1 came twice")?;

    // Channel 1 never comes.
    let stage = Stage::new(&["--stall-timeout", "1"])?;
    let _gap = [stage.open(&initial(0))?, stage.open(&initial(2))?];
    let _main = stage.open(&main_stream())?;
    stage.expect_failure("channels [0, 2]")?;

    // Channel 1 comes when the main stream has begun, before its section `ram`.
    let stage = Stage::new(&[])?;
    let whole = main_stream();
    let (header, ram) = whole.split_at(8);
    let mut main = stage.open(header)?;
    let _first = stage.open(&initial(0))?;
    let _second = stage.open(&initial(1))?;
    main.write_all(ram)?;
    stage.relay.wait_for("incoming=2", LIMIT)?;
    Ok(())
}

/// A destination that stops reading, on a channel or on the main stream, is not waited for forever.
#[test]
fn a_destination_that_stops_reading() -> Result<()> {
    let stage = Stage::new(&["--stall-timeout", "1"])?;
    let mut source = stage.open_all(1)?;
    let destination = stage.accept_all(1)?;
    source.channels[0].write_all(&sync())?;
    let packets = thread::spawn(move || {
        let bytes = packet(Method::None, &[3; 8192]);
        // Until the relay gives up.
        while source.channels[0].write_all(&bytes).is_ok() {}
    });
    stage.expect_failure(
        "destination, channel 0: timed out after 1 s: the peer has stopped reading",
    )?;
    packets.join().unwrap();
    drop(destination);

    let stage = Stage::new(&["--stall-timeout", "1"])?;
    let mut source = stage.open_all(1)?;
    let destination = stage.accept_all(1)?;
    let bytes = thread::spawn(move || while source.main.write_all(&[5; 4096]).is_ok() {});
    stage.expect_failure("the destination has stopped reading")?;
    bytes.join().unwrap();
    drop(destination);
    Ok(())
}

/// One of two channels is stuck, so the other one's writer waits for it at the first SYNC, and the
/// source's other SYNCs fill the queue between them: the relay ends all the same.
#[test]
fn a_channel_that_is_stuck_while_syncs_come() -> Result<()> {
    let stage = Stage::new(&["--channels", "2", "--stall-timeout", "1"])?;
    let mut source = stage.open_all(1)?;
    let mut destination = stage.accept_all(2)?;
    let mut read = destination.remove(1);
    let bytes = thread::spawn(move || {
        let pages = packet(Method::None, &[3; 8192]);
        // More than sockets hold.
        for bytes in std::iter::repeat_n(pages, 1000).chain(std::iter::repeat_n(sync(), 100)) {
            if source.channels[0].write_all(&bytes).is_err() {
                break;
            }
        }
        source
    });
    let reads = thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while read.read(&mut bytes).is_ok_and(|read| read > 0) {}
    });
    stage.expect_failure("the peer has stopped reading")?;
    reads.join().unwrap();
    drop(bytes.join().unwrap());
    drop(destination);
    Ok(())
}

/// A source that stops in the middle of a packet.
#[test]
fn a_source_that_stops_in_a_packet() -> Result<()> {
    let stage = Stage::new(&["--stall-timeout", "1"])?;
    let mut source = stage.open_all(1)?;
    let _destination = stage.accept_all(1)?;
    source.channels[0].write_all(&packet(Method::None, &[1; 8192])[..2000])?;
    stage.expect_failure("timed out after 1 s reading a packet's payload")?;
    Ok(())
}

/// One broken connection ends all of them, whichever it is.
#[test]
fn every_connection_cut() -> Result<()> {
    type Cut = fn(&mut Source, &mut Vec<UnixStream>);
    let cases: [(Cut, &str); 4] = [
        (
            |source, _| drop(source.channels.remove(0)),
            "closed channel 0",
        ),
        (
            |source, _| source.main.shutdown(Shutdown::Both).unwrap(),
            "the source closed the main stream",
        ),
        (|_, destination| drop(destination.remove(0)), "destination"),
        (
            |_, destination| drop(destination.remove(1)),
            "destination, channel 0",
        ),
    ];
    for (cut, text) in cases {
        let stage = Stage::new(&[])?;
        let mut source = stage.open_all(1)?;
        let mut destination = stage.accept_all(1)?;
        source.channels[0].write_all(&sync())?;
        cut(&mut source, &mut destination);
        // Some of it the relay notices only when it writes; it may have noticed before.
        for channel in &mut source.channels {
            let _ = channel.write_all(&packet(Method::None, &[1; 8192]));
        }
        for stream in &mut destination {
            expect_end(stream)?;
        }
        stage.expect_failure(text)?;
    }
    Ok(())
}

/// What a source sent before it closed its connections arrives, the main stream's end first or not: a
/// destination may wait for it.
#[test]
fn data_sent_before_a_cancel_arrives() -> Result<()> {
    let stage = Stage::new(&["--max-bandwidth", "1M"])?;
    let mut source = stage.open_all(1)?;
    let mut destination = stage.accept_all(1)?;
    let pages = packet(Method::None, &[9; 8192]);
    let sent = [&sync()[..], &pages.repeat(20), &sync()].concat();
    thread::scope(|scope| {
        scope.spawn(|| {
            source.channels[0].write_all(&sent).unwrap();
            source.main.shutdown(Shutdown::Both).unwrap();
            source.channels.clear();
        });
        let mut received = Vec::new();
        destination[1].read_to_end(&mut received).unwrap();
        assert_eq!(received.len(), sent.len());
    });
    stage.expect_failure("the source closed the main stream")?;
    Ok(())
}

/// Device state is passed on as it is, through whichever channel.
#[test]
fn device_state_is_passed_on() -> Result<()> {
    let stage = Stage::new(&["--method", "zstd"])?;
    let mut source = stage.open_all(1)?;
    let mut destination = stage.accept_all(1)?;
    let mut state = [0x1122_3344u32, 1, 0x40].map(u32::to_be_bytes).concat();
    state.resize(268, b'd');
    state.extend_from_slice(&7u32.to_be_bytes());
    state.extend_from_slice(&1_500_000u32.to_be_bytes());
    state.resize(276 + 1_500_000, b's');
    let channel = &mut source.channels[0];
    let sent = state.clone();
    thread::scope(|scope| {
        scope.spawn(|| channel.write_all(&sent).unwrap());
        let mut received = vec![0; state.len()];
        destination[1].read_exact(&mut received).unwrap();
        assert!(received == state, "the device state was changed");
    });
    drop(source);
    stage.expect_failure("the source")?;
    Ok(())
}

/// Behind TLS nothing can be understood: every connection is passed through.
#[test]
fn tls_is_passed_through() -> Result<()> {
    let stage = Stage::new(&[])?;
    let hello = [0x16, 3, 1, 0, 42];
    let mut near = [stage.open(&hello)?, stage.open(&hello)?];
    let mut far = Vec::new();
    for _ in &near {
        let mut stream = stage.accept()?;
        let mut got = [0; 5];
        stream.read_exact(&mut got)?;
        ensure!(got == hello);
        far.push(stream);
    }
    stage.relay.wait_for("it is TLS", LIMIT)?;
    for (number, stream) in far.iter_mut().enumerate() {
        stream.write_all(&[u8::try_from(number)?])?;
    }
    // Which of the two is which is for the ends to know: both answers come.
    let mut answers = [0; 2];
    for (stream, answer) in near.iter_mut().zip(&mut answers) {
        stream.read_exact(std::slice::from_mut(answer))?;
    }
    answers.sort_unstable();
    ensure!(answers == [0, 1]);
    drop(near);
    drop(far);
    stage.relay.finish(LIMIT)?.success()?;
    Ok(())
}
