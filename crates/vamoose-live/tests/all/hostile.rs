//! Peers that do not keep to the protocol, or are none: they get a refusal, no data, and the next one is served.
//!
//! The peers' bytes are written by hand, so that this is also a second opinion on the format.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use crate::common::{
    Here, PAGE, Rng, Shape, Stage, There, Watchdog, address_of, listen, lock, loopback, migrate,
    nothing_to_migrate, plain,
    proxy::{ABORT, COMMIT, SETTLED, message, name_of, opening, read_line},
    sessions::Hosts,
    socket_address, source_config,
};
use handover::{FrameError, MAX_LINE};
use multifd::{Layout, Method, PacketError, RamHeader};
use vamoose_link::{Address, ReadError};
use vamoose_live::{
    Arrival, ChannelError, ConversationError, Destination, DestinationError, DestinationGuest,
    GuestError, GuestLocation, Ram, RamBlock, SharedBitmap, Source, SourceConfig, SourceError,
    SourceGuest, Switchover, chain, protocol::LAST_SYNC,
};
use vm_memory::{Bytes, MmapRegion};

/// Bytes of the guest's blocks `low` and `high`.
const LOW: usize = 16 * PAGE;
const HIGH: usize = 48 * PAGE;

const ID: [u8; 16] = *b"some migration's";
const OTHER: [u8; 16] = *b"another one's id";

/// For how long a peer may stop. Tests of that take as long.
const STALL: Duration = Duration::from_secs(2);

/// The same where nothing stops but for a busy host.
const PATIENT: Duration = Duration::from_secs(120);

fn ram() -> Ram {
    let block = |name, len| {
        let region = Arc::new(MmapRegion::<()>::new(len).unwrap());
        RamBlock::new(name, region).unwrap()
    };
    Ram::new(vec![block("low", LOW), block("high", HIGH)]).unwrap()
}

/// A VMM whose guest is its memory.
#[derive(Default)]
struct Vmm {
    runs: bool,
    /// More bytes of device state than there have to be.
    more_state: usize,
    /// What it was asked to do.
    calls: Vec<&'static str>,
}

impl SourceGuest for Vmm {
    fn pause(&mut self) -> Result<(), GuestError> {
        self.calls.push("pause");
        self.runs = false;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.calls.push("resume");
        self.runs = true;
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        let mut state = b"state".to_vec();
        state.resize(state.len() + self.more_state, 0);
        Ok(state)
    }
}

impl DestinationGuest for Vmm {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        self.calls.push("load");
        assert_eq!(state, b"state");
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.calls.push("run");
        self.runs = true;
        Ok(())
    }
}

/// A source that the test plays.
struct Peer {
    address: (String, u16),
    control: TcpStream,
    channels: Vec<TcpStream>,
}

impl Peer {
    fn dial(address: &Address) -> Self {
        let address = socket_address(address);
        Self {
            control: connect(&address),
            address,
            channels: Vec::new(),
        }
    }

    /// One of attempt `id` that has sent no more than that.
    fn of(address: &Address, id: [u8; 16]) -> Self {
        let mut peer = Self::dial(address);
        peer.control.write_all(&opening(id)).unwrap();
        peer
    }

    fn opened(address: &Address) -> Self {
        Self::of(address, ID)
    }

    /// One that was accepted, without channels yet.
    fn accepted(address: &Address) -> Self {
        let mut peer = Self::opened(address);
        peer.prepare(PREPARE);
        peer
    }

    /// Introduces its guest, which is accepted; returns the destination's incarnation.
    fn prepare(&mut self, json: &str) -> String {
        self.send_message(json);
        // It may have some memory to make zero.
        let mut answer = self.receive();
        assert_eq!(answer.0, "preparing");
        while answer.0 == "preparing" {
            answer = self.receive();
        }
        assert_eq!(answer.0, "prepared");
        answer.1
    }

    /// One with both of its channels.
    fn connected(address: &Address) -> Self {
        let mut peer = Self::accepted(address);
        for number in 0..2 {
            peer.open_channel(ID, number);
        }
        peer
    }

    /// One after its first round.
    fn synced(address: &Address) -> Self {
        let mut peer = Self::connected(address);
        for channel in 0..2 {
            peer.send(channel, &packet("low", &[0x1000], &[0x2000]));
            peer.send(channel, &sync(1));
        }
        assert_eq!(peer.receive(), ("synced".to_owned(), r#"1"#.to_owned()));
        peer
    }

    /// One whose guest was loaded.
    fn loaded(address: &Address) -> Self {
        let mut peer = Self::synced(address);
        peer.end_channels();
        peer.send_state(b"state");
        assert_eq!(peer.receive().0, "loaded");
        peer
    }

    fn open_channel(&mut self, id: [u8; 16], number: u8) {
        let mut channel = connect(&self.address);
        channel.write_all(&channel_opening(id, number)).unwrap();
        self.channels.push(channel);
    }

    fn send_message(&mut self, json: &str) {
        self.control.write_all(&message(json)).unwrap();
    }

    fn send_state(&mut self, state: &[u8]) {
        self.send_message(&format!(r#"{{"request":"state","len":{}}}"#, state.len()));
        self.control.write_all(state).unwrap();
    }

    /// The destination's next message: its name, and the number or the texts with it.
    fn receive(&mut self) -> (String, String) {
        let line = read_line(&mut self.control).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&line).unwrap();
        let details =
            ["round", "incarnation", "cause", "reason"].map(|detail| match &value[detail] {
                serde_json::Value::String(text) => text.clone(),
                serde_json::Value::Null => String::new(),
                other => other.to_string(),
            });
        (name_of(&line), details.concat())
    }

    /// Whether the destination has closed the connection without another message.
    fn is_closed(&mut self) -> bool {
        self.control.read(&mut [0]).unwrap_or(0) == 0
    }

    fn send(&mut self, channel: usize, bytes: &[u8]) {
        // It may be gone already: then it has found the error before.
        let _ = self.channels[channel].write_all(bytes);
    }

    fn end_channels(&mut self) {
        for channel in &mut self.channels {
            let _ = channel.write_all(&sync(LAST_SYNC));
            channel.shutdown(Shutdown::Write).unwrap();
        }
    }
}

fn connect((host, port): &(String, u16)) -> TcpStream {
    TcpStream::connect((host.as_str(), *port)).unwrap()
}

/// multifd's initial packet, as QEMU sends it.
fn channel_opening(id: [u8; 16], number: u8) -> Vec<u8> {
    let mut bytes = vec![0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1];
    bytes.extend(id);
    bytes.push(number);
    bytes.resize(64, 0);
    bytes
}

/// Pages of `block`, the normal ones full of 0x77.
fn packet(block: &str, normal: &[u64], zero: &[u64]) -> Vec<u8> {
    let mut header = RamHeader::new(Layout::X86);
    header.block = multifd::BlockName::new(block.as_bytes()).unwrap();
    header.set_pages(normal, zero, Layout::X86).unwrap();
    header
        .set_payload_len(normal.len() * PAGE, Layout::X86)
        .unwrap();
    let mut bytes = Vec::new();
    header.write(Layout::X86, &mut bytes);
    bytes.extend(vec![0x77; normal.len() * PAGE]);
    bytes
}

/// A SYNC, the last packet of a round.
fn sync(round: u64) -> Vec<u8> {
    let mut header = RamHeader::new(Layout::X86);
    header.sync = true;
    header.packet_num = round;
    let mut bytes = Vec::new();
    header.write(Layout::X86, &mut bytes);
    bytes
}

const PREPARE: &str = r#"{"request":"prepare","protocol":1,"blocks":[{"name":"low","len":65536},{"name":"high","len":196608}],"page-size":4096,"packet-bytes":524288,"channels":2,"settle-ms":60000}"#;

/// [`PREPARE`] with a part replaced.
fn prepare_but(part: &str, by: &str) -> String {
    assert!(PREPARE.contains(part));
    PREPARE.replacen(part, by, 1)
}

/// A source as `play` plays it, and the destination's result in the end; after which a right source is served.
/// What `play` returns with the peer is whether that has to get the reason.
fn hostile_source(
    name: &str,
    play: impl FnOnce(&Address) -> (Peer, bool),
    expected: impl FnOnce(&DestinationError) -> bool,
) {
    hostile_source_within(PATIENT, name, play, expected);
}

/// As [`hostile_source`], for a source that may stop for `stall_timeout`.
fn hostile_source_within(
    stall_timeout: Duration,
    name: &str,
    play: impl FnOnce(&Address) -> (Peer, bool),
    expected: impl FnOnce(&DestinationError) -> bool,
) {
    let _watchdog = Watchdog::new(name.to_owned());
    let there = ram();
    let mut destination = destination_within(stall_timeout, &there);
    let address = address_of(&destination);
    let mut vmm = Vmm::default();
    let (error, (mut peer, told)) = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm).unwrap_err());
        let peer = play(&address);
        (serving.join().unwrap(), peer)
    });
    assert!(expected(&error), "{name}: {error:?}");
    assert!(!vmm.runs, "{name}");
    if told {
        // Whatever was under way before.
        let cause = loop {
            let (name, detail) = peer.receive();
            match name.as_str() {
                // Behind the incarnation.
                "aborted" => break detail[32..].to_owned(),
                "refused" => break detail,
                _ => {}
            }
        };
        assert_eq!(cause, chain(&error), "{name}");
    }
    serve_a_right_one(&mut destination, &there);
}

fn destination_of(there: &Ram) -> Destination {
    destination_within(PATIENT, there)
}

fn destination_within(stall_timeout: Duration, there: &Ram) -> Destination {
    let mut config = vamoose_live::DestinationConfig::new(crate::common::engines(Method::None));
    config.stall_timeout = stall_timeout;
    config.max_state = 1000;
    Destination::new(listen(&loopback()), there.clone(), config).unwrap()
}

/// The destination takes the guest of a right source, all of whose pages are something else than before.
fn serve_a_right_one(destination: &mut Destination, there: &Ram) -> Arrival {
    let address = address_of(destination);
    let mut to = Vmm::default();
    let arrival = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut to));
        move_right_one(&address, there);
        serving.join().unwrap().unwrap()
    });
    assert!(to.runs);
    arrival
}

/// Peers that are none, as `play` plays them: the destination keeps waiting for a right source, and serves it.
fn ignored_source(name: &str, play: impl FnOnce(&Address)) {
    let _watchdog = Watchdog::new(name.to_owned());
    let there = ram();
    let mut destination = destination_within(STALL, &there);
    let address = address_of(&destination);
    let mut to = Vmm::default();
    thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut to));
        play(&address);
        move_right_one(&address, &there);
        serving.join().unwrap().unwrap();
    });
    assert!(to.runs, "{name}");
}

/// A right source moves its guest to a destination whose memory is `there`.
fn move_right_one(address: &Address, there: &Ram) {
    let (here, source) = source(|_| {});
    let mut from = Vmm::default();
    source.run(&plain(address), &mut from).unwrap();
    assert!(!from.runs);
    crate::common::expect_equal(&here, there);
}

/// A source whose guest has something in some of its pages.
fn source(settings: impl FnOnce(&mut SourceConfig)) -> (Ram, Source) {
    let here = ram();
    for page in [0, 3, 7, 15] {
        let memory = here.blocks()[0].memory();
        memory.write_slice(&[0xc3; PAGE], page * PAGE).unwrap();
    }
    let log = Arc::new(SharedBitmap::new(&here));
    let mut config = source_config(Method::None);
    settings(&mut config);
    let source = Source::new(here.clone(), log, config).unwrap();
    (here, source)
}

#[test]
fn a_source_of_another_version() {
    for (ours, theirs) in [
        ("0", 0..=0),
        ("9", 9..=9),
        (r#"9,"oldest-protocol":3"#, 3..=9),
    ] {
        let play = |address: &Address| {
            let mut peer = Peer::opened(address);
            peer.send_message(&prepare_but(":1,", &format!(":{ours},")));
            (peer, true)
        };
        hostile_source(
            ours,
            play,
            |error| matches!(error, DestinationError::Version(mismatch) if mismatch.theirs == theirs),
        );
    }
}

/// One that supports newer versions besides, and sends fields that are not known yet.
#[test]
fn a_source_of_a_newer_release() {
    let play = |address: &Address| {
        let newer = r#":9,"oldest-protocol":1,"colour":"blue","#;
        let mut peer = Peer::opened(address);
        peer.prepare(&prepare_but(":1,", newer));
        peer.send_message(ABORT);
        (peer, true)
    };
    hostile_source("newer", play, |error| {
        matches!(error, DestinationError::Aborted { .. })
    });
}

#[test]
fn a_source_with_another_guest() {
    let low = r#"{"name":"low","len":65536}"#;
    let high = r#",{"name":"high","len":196608}"#;
    for hello in [
        prepare_but("4096", "16384"),
        prepare_but("4096", "0"),
        prepare_but("4096", "4294967295"),
        prepare_but("524288", "0"),
        prepare_but("524288", "65537"),
        prepare_but("524288", "8388608"),
        prepare_but(r#""channels":2"#, r#""channels":0"#),
        prepare_but(r#""channels":2"#, r#""channels":65"#),
        prepare_but(r#""channels":2"#, r#""channels":200"#),
        prepare_but(r#""low""#, r#""Low""#),
        prepare_but(r#""low""#, r#""""#),
        prepare_but("65536", "65535"),
        prepare_but("65536", "0"),
        prepare_but("65536", "18446744073709551615"),
        prepare_but(high, ""),
        prepare_but(
            low,
            r#"{"name":"low","len":65536},{"name":"low","len":65536}"#,
        ),
        prepare_but(
            low,
            r#"{"name":"low","len":65536},{"name":"rom","len":4096}"#,
        ),
        prepare_but(r#""high""#, r#""low""#),
    ] {
        let play = |address: &Address| {
            let mut peer = Peer::opened(address);
            peer.send_message(&hello);
            (peer, true)
        };
        hostile_source(&hello, play, |error| {
            matches!(error, DestinationError::Mismatch(_))
        });
    }
}

/// A step of a source's part, and how to get there.
type Step = (&'static str, fn(&Address) -> Peer);

const STEPS: [Step; 5] = [
    ("opened", Peer::opened),
    ("accepted", Peer::accepted),
    ("connected", Peer::connected),
    ("synced", Peer::synced),
    ("loaded", Peer::loaded),
];

#[test]
fn messages_out_of_turn() {
    for (step, reach) in &STEPS[1..] {
        for words in [PREPARE, COMMIT, SETTLED, r#"{"request":"state","len":0}"#] {
            let name = name_of(words.as_bytes());
            // What is in turn.
            let in_turn = [("synced", "state"), ("loaded", "commit")];
            if in_turn.contains(&(*step, name.as_str())) {
                continue;
            }
            let play = |address: &Address| {
                let mut peer = reach(address);
                peer.send_message(words);
                (peer, true)
            };
            hostile_source(&format!("{name} when {step}"), play, |error| {
                matches!(error, DestinationError::OutOfTurn { .. })
            });
        }
    }
    let twice = |address: &Address| {
        let mut peer = Peer::synced(address);
        peer.send_state(b"state");
        peer.send_state(b"state");
        (peer, true)
    };
    hostile_source("state twice", twice, |error| {
        matches!(error, DestinationError::OutOfTurn { .. })
    });
}

#[test]
fn sources_that_give_up() {
    for (step, reach) in &STEPS[1..] {
        let play = |address: &Address| {
            let mut peer = reach(address);
            peer.send_message(ABORT);
            (peer, true)
        };
        hostile_source(
            &format!("abort when {step}"),
            play,
            |error| matches!(error, DestinationError::Aborted { cause } if cause == "no more"),
        );
    }
}

/// Those that ask late get what is known of their attempt, and nothing else.
#[test]
fn attempts_that_are_over_and_unknown_ones_are_answered_for() {
    let _watchdog = Watchdog::new("attempts that are over".to_owned());
    let there = ram();
    let mut destination = destination_of(&there);
    let address = address_of(&destination);
    let mut vmm = Vmm::default();
    let incarnation = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm));
        let mut peer = Peer::opened(&address);
        let incarnation = peer.prepare(PREPARE);
        drop(peer);
        serving.join().unwrap().unwrap_err();
        incarnation
    });
    // Before the destination looks, so that they are the first.
    let mut peers = [(); 5].map(|()| Peer::opened(&address));
    let [asks, asks_again, gives_up, asks_too_late, prepares] = &mut peers;
    asks.send_message(COMMIT);
    asks_again.send_message(COMMIT);
    let mut other = Peer::of(&address, OTHER);
    other.send_message(COMMIT);
    thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm));
        for peer in [asks, asks_again] {
            let (name, details) = peer.receive();
            assert_eq!(name, "aborted");
            assert!(details.starts_with(&incarnation), "{details}");
            assert!(peer.is_closed());
        }
        let (name, details) = other.receive();
        assert_eq!(name, "unknown");
        assert!(details.starts_with(&incarnation), "{details}");
        // A name is used once.
        prepares.send_message(PREPARE);
        assert!(prepares.is_closed());
        // The answer may be lost, and be asked for again.
        gives_up.send_message(ABORT);
        assert_eq!(gives_up.receive().0, "aborted");
        asks_too_late.send_message(COMMIT);
        assert_eq!(asks_too_late.receive().0, "aborted");
        move_right_one(&address, &there);
        serving.join().unwrap().unwrap();
    });
    assert_eq!(vmm.calls, ["load", "run"]);
}

/// Another process at the same address knows nothing of the attempts of the one before.
#[test]
fn another_destination_at_the_same_address_is_another_one() {
    let _watchdog = Watchdog::new("another destination".to_owned());
    let there = ram();
    let incarnations = [(); 2].map(|()| {
        let mut destination = destination_of(&there);
        let address = address_of(&destination);
        thread::scope(|scope| {
            let serving = scope.spawn(|| destination.run(&mut Vmm::default()));
            let incarnation = Peer::opened(&address).prepare(PREPARE);
            serving.join().unwrap().unwrap_err();
            incarnation
        })
    });
    assert_ne!(incarnations[0], incarnations[1]);
}

/// Its memory is in use.
#[test]
fn a_destination_takes_one_guest() {
    let _watchdog = Watchdog::new("one guest".to_owned());
    let there = ram();
    let mut destination = destination_of(&there);
    let address = address_of(&destination);
    serve_a_right_one(&mut destination, &there);
    let mut before = vec![0; LOW];
    let memory = there.blocks()[0].memory();
    memory.read_slice(&mut before, 0).unwrap();
    let mut second = Peer::opened(&address);
    second.send_message(PREPARE);
    let mut vmm = Vmm::default();
    let error = destination.run(&mut vmm).unwrap_err();
    assert!(matches!(error, DestinationError::AlreadyArrived), "{error}");
    let mut after = vec![0; LOW];
    memory.read_slice(&mut after, 0).unwrap();
    assert!(before == after);
    assert_eq!(vmm.calls, [""; 0]);
}

/// Before there is a migration nothing ends the wait for one.
#[test]
fn what_is_no_source_is_ignored() {
    let mut garbage: Vec<Vec<u8>> = bad_messages().into_iter().map(|(_, bytes)| bytes).collect();
    garbage.extend([
        vec![b'x'; MAX_LINE],
        Vec::new(),
        b"{".to_vec(),
        message(SETTLED),
        [&message(r#"{"request":"state","len":5}"#), &b"state"[..]].concat(),
    ]);
    ignored_source("no sources", |address| {
        for bytes in &garbage {
            let mut peer = Peer::opened(address);
            peer.control.write_all(bytes).unwrap();
            peer.control.shutdown(Shutdown::Write).unwrap();
            assert!(peer.is_closed());
        }
        for word in [COMMIT, ABORT] {
            let mut peer = Peer::opened(address);
            peer.send_message(word);
            assert_eq!(peer.receive().0, "unknown");
            assert!(peer.is_closed());
        }
        // Nothing is waited for for ever.
        for bytes in [&b""[..], b"{"] {
            let mut peer = Peer::opened(address);
            peer.control.write_all(bytes).unwrap();
            assert!(peer.is_closed());
        }
    });
}

fn bad_messages() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("no JSON", message("hello")),
        ("nothing", message("")),
        ("an unknown message", message(r#"{"request":"please"}"#)),
        (
            "a field of another type",
            message(r#"{"request":"state","len":"5"}"#),
        ),
        ("a field is missing", message(r#"{"request":"state"}"#)),
        ("a list", message("[[[[[[[[1]]]]]]]]")),
        (
            "no UTF-8",
            b"{\"request\":\"abort\",\"cause\":\"\xff\"}\n".to_vec(),
        ),
    ]
}

#[test]
fn messages_that_are_none() {
    let mut garbage = bad_messages();
    garbage.push(("too long", vec![b'x'; MAX_LINE]));
    // What is sent before `loaded`: later it may be a question whose end was lost.
    for (step, reach) in &STEPS[1..4] {
        for (name, bytes) in &garbage {
            let play = |address: &Address| {
                let mut peer = reach(address);
                peer.control.write_all(bytes).unwrap();
                (peer, true)
            };
            hostile_source(&format!("{name} when {step}"), play, |error| {
                let too_long = *name == "too long";
                match error {
                    DestinationError::Control(ConversationError::Frame(error)) => match error {
                        FrameError::TooLong => too_long,
                        _ => !too_long,
                    },
                    _ => false,
                }
            });
        }
    }
}

#[test]
fn guests_that_are_not_described() {
    for prepare in [
        prepare_but(r#""channels":2"#, r#""channels":256"#),
        prepare_but(r#""channels":2"#, r#""channels":"2""#),
        prepare_but(r#""channels":2,"#, ""),
        prepare_but("65536", "-1"),
        prepare_but("65536", "18446744073709551616"),
        r#"{"request":"prepare","protocol":1}"#.to_owned(),
    ] {
        let play = |address: &Address| {
            let mut peer = Peer::opened(address);
            peer.send_message(&prepare);
            (peer, true)
        };
        hostile_source(&prepare, play, |error| {
            matches!(
                error,
                DestinationError::Control(ConversationError::Frame(FrameError::Malformed(_)))
            )
        });
    }
}

#[test]
fn a_message_that_stops_in_the_middle() {
    thread::scope(|scope| {
        for (step, reach) in &STEPS[2..4] {
            let play = |address: &Address| {
                let mut peer = reach(address);
                peer.control.write_all(b"{").unwrap();
                (peer, true)
            };
            scope.spawn(move || {
                let name = format!("half a message when {step}");
                hostile_source_within(STALL, &name, play, |error| {
                    matches!(
                        error,
                        DestinationError::Control(ConversationError::Stalled(_))
                    )
                });
            });
        }
    });
}

#[test]
fn random_messages() {
    for run in 0..40 {
        let mut rng = Rng::new(run);
        let (step, reach) = STEPS[1 + usize::try_from(rng.below(3)).unwrap()];
        let count = usize::try_from(1 + rng.below(300)).unwrap();
        let bytes = rng.bytes(count);
        let play = |address: &Address| {
            let mut peer = reach(address);
            peer.control.write_all(&bytes).unwrap();
            // It may have found the error before.
            let _ = peer.control.shutdown(Shutdown::Write);
            (peer, false)
        };
        hostile_source(&format!("random bytes when {step}"), play, |error| {
            matches!(error, DestinationError::Control(_))
        });
    }
}

#[test]
fn control_connections_that_end() {
    for (step, reach) in &STEPS[1..4] {
        let play = |address: &Address| {
            let peer = reach(address);
            peer.control.shutdown(Shutdown::Write).unwrap();
            (peer, true)
        };
        hostile_source(&format!("end when {step}"), play, |error| {
            matches!(error, DestinationError::Control(ConversationError::Closed))
        });
        let play = |address: &Address| {
            let mut peer = reach(address);
            peer.control.write_all(b"{").unwrap();
            peer.control.shutdown(Shutdown::Write).unwrap();
            (peer, true)
        };
        hostile_source(&format!("end in a message when {step}"), play, |error| {
            matches!(error, DestinationError::Control(ConversationError::Cut))
        });
    }
}

/// It may have sent `commit`, and dials again: the guest is not dropped before the settle time is over.
#[test]
fn a_source_that_comes_back_is_served() {
    let _watchdog = Watchdog::new("comes back".to_owned());
    let there = ram();
    let mut destination = destination_of(&there);
    let address = address_of(&destination);
    let mut vmm = Vmm::default();
    let arrival = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm));
        drop(Peer::loaded(&address));
        // Another migration has to wait, and its questions are not this one's.
        let mut foreign = Peer::of(&address, OTHER);
        foreign.send_message(PREPARE);
        assert_eq!(foreign.receive().0, "refused");
        let mut foreign = Peer::of(&address, OTHER);
        foreign.send_message(COMMIT);
        assert_eq!(foreign.receive().0, "unknown");
        assert!(foreign.is_closed());
        let mut again = Peer::opened(&address);
        again.send_message(COMMIT);
        assert_eq!(again.receive().0, "starting");
        assert_eq!(again.receive().0, "running");
        drop(again);
        let mut again = Peer::opened(&address);
        again.send_message(COMMIT);
        assert_eq!(again.receive().0, "running");
        again.send_message(SETTLED);
        serving.join().unwrap().unwrap()
    });
    assert!(arrival.settled);
    assert_eq!(vmm.calls, ["load", "run"]);
}

/// A guest that was paused at the source is loaded, and stays paused.
#[test]
fn a_guest_that_is_not_to_run_is_not_resumed() {
    let _watchdog = Watchdog::new("not to run".to_owned());
    let mut destination = destination_of(&ram());
    let address = address_of(&destination);
    let mut vmm = Vmm::default();
    let arrival = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm));
        let mut peer = Peer::loaded(&address);
        for _ in 0..2 {
            peer.send_message(r#"{"request":"commit","resume":false}"#);
        }
        assert_eq!(peer.receive().0, "starting");
        assert_eq!(peer.receive().0, "running");
        assert_eq!(peer.receive().0, "running");
        peer.send_message(SETTLED);
        serving.join().unwrap().unwrap()
    });
    assert!(arrival.settled && !arrival.running);
    assert_eq!(vmm.calls, ["load"]);
    let error = destination.run(&mut vmm).unwrap_err();
    assert!(matches!(error, DestinationError::AlreadyArrived), "{error}");
}

/// What is sent on connections of another attempt is about that one, whenever it comes.
#[test]
fn words_of_another_attempt_are_not_taken_for_the_current_one() {
    let _watchdog = Watchdog::new("another attempt".to_owned());
    let there = ram();
    let mut destination = destination_of(&there);
    let address = address_of(&destination);
    let mut vmm = Vmm::default();
    let arrival = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm));
        // Opened before the current one, and in its middle.
        let mut stale = Peer::of(&address, OTHER);
        stale.send_message(COMMIT);
        assert_eq!(stale.receive().0, "unknown");
        let mut peer = Peer::synced(&address);
        // It is closed.
        let _ = stale.control.write_all(&message(ABORT));
        let mut late = Peer::of(&address, OTHER);
        late.send_message(ABORT);
        assert_eq!(late.receive().0, "unknown");
        peer.end_channels();
        peer.send_state(b"state");
        assert_eq!(peer.receive().0, "loaded");
        peer.send_message(COMMIT);
        assert_eq!(peer.receive().0, "starting");
        assert_eq!(peer.receive().0, "running");
        peer.send_message(SETTLED);
        serving.join().unwrap().unwrap()
    });
    assert!(arrival.settled);
    assert_eq!(vmm.calls, ["load", "run"]);
}

#[test]
fn a_source_that_never_commits() {
    let play = |address: &Address| {
        let mut peer = Peer::opened(address);
        peer.prepare(&prepare_but("60000", "100"));
        for number in 0..2 {
            peer.open_channel(ID, number);
            peer.send(number.into(), &sync(1));
        }
        assert_eq!(peer.receive().0, "synced");
        peer.end_channels();
        peer.send_state(b"state");
        (peer, true)
    };
    hostile_source("no commit", play, |error| {
        matches!(error, DestinationError::NotCommitted { .. })
    });
}

#[test]
fn device_states_that_cannot_be() {
    for len in ["1001", "18446744073709551615"] {
        let play = |address: &Address| {
            let mut peer = Peer::synced(address);
            peer.send_message(&format!(r#"{{"request":"state","len":{len}}}"#));
            (peer, true)
        };
        hostile_source(&format!("{len} bytes of state"), play, |error| {
            matches!(error, DestinationError::StateLength { max: 1000, .. })
        });
    }
    let short = |address: &Address| {
        let mut peer = Peer::synced(address);
        peer.send_message(r#"{"request":"state","len":100}"#);
        peer.control.write_all(b"not yet a hundred").unwrap();
        peer.control.shutdown(Shutdown::Write).unwrap();
        (peer, true)
    };
    hostile_source("a state cut short", short, |error| {
        matches!(
            error,
            DestinationError::Control(ConversationError::Truncated {
                got: 17,
                wanted: 100
            })
        )
    });
}

#[test]
fn channels_that_were_not_announced() {
    for (name, number) in [("twice", 0), ("too many", 2), ("the last", 255)] {
        let play = |address: &Address| {
            let mut peer = Peer::accepted(address);
            peer.open_channel(ID, 0);
            peer.open_channel(ID, number);
            (peer, true)
        };
        hostile_source(
            name,
            play,
            |error| matches!(error, DestinationError::ChannelNumber { channel } if *channel == number),
        );
    }
}

/// A trusted peer that is not the source of an attempt has no part in it, and channels belong to the session of their control
/// connection.
#[test]
fn streams_of_other_sessions_and_peers_are_refused() {
    let _watchdog = Watchdog::new("streams of other sessions".to_owned());
    let (mut hosts, mut others) = (Hosts::new(), Hosts::new());
    hosts.befriend(&mut others);
    let there = ram();
    let config = vamoose_live::DestinationConfig::new(crate::common::engines(Method::None));
    let mut destination = Destination::new(hosts.acceptor(), there, config).unwrap();
    let address = address_of(&destination);
    let open = |hosts: &Hosts, bytes: &[u8]| {
        let (session, stream) = hosts.remote(&address).dial().unwrap();
        stream.write_both(bytes, &[]).unwrap();
        (session, stream)
    };
    let expect_refused = |stream: &vamoose_link::Stream| {
        let mut answer = [0];
        let read = stream.read_full(&mut answer);
        assert!(!matches!(read, Ok(1)), "it got an answer");
    };
    thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut Vmm::default()));
        let prepare = [opening(ID), message(PREPARE)].concat();
        let (session, control) = open(&hosts, &prepare);
        while name_of(&read_line(&mut &control).unwrap()) != "prepared" {}
        // The same host, but another session.
        let (_session, channel) = open(&hosts, &channel_opening(ID, 0));
        expect_refused(&channel);
        // Another host.
        for word in [ABORT, COMMIT] {
            let bytes = [opening(ID), message(word)].concat();
            let (_session, stream) = open(&others, &bytes);
            expect_refused(&stream);
        }
        // That was no end of the attempt: its own channels are taken.
        let channels = [0, 1].map(|number| {
            let channel = session.open().unwrap();
            let bytes = [channel_opening(ID, number), sync(1)].concat();
            channel.write_both(&bytes, &[]).unwrap();
            channel
        });
        assert_eq!(name_of(&read_line(&mut &control).unwrap()), "synced");
        // The source may come again in another session, as when it asks after a cut.
        let abort = [opening(ID), message(ABORT)].concat();
        let (_session, _control) = open(&hosts, &abort);
        let error = serving.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, DestinationError::Aborted { cause } if cause == "no more"),
            "{error}"
        );
        drop(channels);
    });
}

#[test]
fn channels_that_never_come() {
    let play = |address: &Address| {
        let mut peer = Peer::accepted(address);
        peer.open_channel(ID, 1);
        peer.open_channel(OTHER, 0);
        (peer, true)
    };
    hostile_source_within(STALL, "one of two channels", play, |error| {
        matches!(
            error,
            DestinationError::Channels {
                arrived: 1,
                channels: 2,
                ..
            }
        )
    });
}

/// What a peer writes to a channel that was opened, and the error for it.
type Bad = (&'static str, Vec<u8>, fn(&ChannelError) -> bool);

fn bad_packets() -> Vec<Bad> {
    let unaligned = |normal: usize| {
        let offset = [0x1000_u64];
        let mut bytes = if normal == 1 {
            packet("low", &offset, &[])
        } else {
            packet("low", &[], &offset)
        };
        // The first entry of the offset table.
        bytes[320 + 7] = 1;
        bytes
    };
    let mut magic = packet("low", &[0], &[]);
    magic[0] = 0;
    let mut flags = packet("low", &[0], &[]);
    flags[8] = 0xff;
    let mut device_state = packet("low", &[0], &[]);
    device_state[11] = 0x40;
    vec![
        (
            "an unknown block",
            packet("rom", &[0], &[]),
            |error| matches!(error, ChannelError::Block { block } if block == "rom"),
        ),
        (
            "a page behind the end",
            packet("low", &[0, 0x10000], &[]),
            |error| {
                matches!(
                    error,
                    ChannelError::Offset {
                        offset: 0x10000,
                        len: LOW,
                        ..
                    }
                )
            },
        ),
        (
            "a zero page behind the end",
            packet("high", &[], &[0x30000]),
            |error| {
                matches!(
                    error,
                    ChannelError::Offset {
                        offset: 0x30000,
                        len: HIGH,
                        ..
                    }
                )
            },
        ),
        (
            "the last offset",
            packet("low", &[u64::MAX - 0xfff], &[]),
            |error| matches!(error, ChannelError::Offset { .. }),
        ),
        ("a page across pages", unaligned(1), |error| {
            matches!(
                error,
                ChannelError::Read(ReadError::Packet(PacketError::Offset { .. }))
            )
        }),
        ("a zero page across pages", unaligned(0), |error| {
            matches!(
                error,
                ChannelError::Read(ReadError::Packet(PacketError::Offset { .. }))
            )
        }),
        ("no packet", magic, |error| {
            matches!(
                error,
                ChannelError::Read(ReadError::Packet(PacketError::Magic { .. }))
            )
        }),
        ("unknown flags", flags, |error| {
            matches!(
                error,
                ChannelError::Read(ReadError::Packet(PacketError::UnknownFlags { .. }))
            )
        }),
        ("device state", device_state, |error| {
            matches!(error, ChannelError::Read(ReadError::DeviceState))
        }),
    ]
}

#[test]
fn packets_that_cannot_be() {
    // On a channel without a round, and in the second round.
    for reach in [Peer::connected, Peer::synced] {
        for (name, bytes, expected) in bad_packets() {
            let play = |address: &Address| {
                let mut peer = reach(address);
                peer.send(1, &bytes);
                (peer, true)
            };
            hostile_source(name, play, |error| {
                matches!(
                    error,
                    DestinationError::Channel { channel: 1, source } if expected(source)
                )
            });
        }
    }
}

#[test]
fn random_packets() {
    for run in 0..20 {
        let mut rng = Rng::new(run);
        let count = usize::try_from(12 + rng.below(5000)).unwrap();
        let mut bytes = rng.bytes(count);
        if rng.chance(50) {
            // Beyond the magic and the version, at least.
            bytes[..12].copy_from_slice(&packet("low", &[0], &[])[..12]);
        }
        let play = |address: &Address| {
            let mut peer = Peer::connected(address);
            peer.send(0, &bytes);
            let _ = peer.channels[0].shutdown(Shutdown::Write);
            (peer, true)
        };
        hostile_source("random packets", play, |error| {
            matches!(error, DestinationError::Channel { channel: 0, .. })
        });
    }
}

#[test]
fn channels_that_end_too_early() {
    let end = |reach: fn(&Address) -> Peer, bytes: Vec<u8>| {
        move |address: &Address| {
            let mut peer = reach(address);
            peer.send(0, &bytes);
            // Fails when the destination has had enough already.
            let _ = peer.channels[0].shutdown(Shutdown::Write);
            (peer, true)
        }
    };
    hostile_source("no SYNC at all", end(Peer::connected, vec![]), |error| {
        matches!(
            error,
            DestinationError::Channel {
                channel: 0,
                source: ChannelError::Ended
            }
        )
    });
    let pages = packet("low", &[0], &[0x3000]);
    hostile_source(
        "pages without SYNC",
        end(Peer::synced, pages.clone()),
        |error| {
            matches!(
                error,
                DestinationError::Channel {
                    channel: 0,
                    source: ChannelError::Ended
                }
            )
        },
    );
    let unasked = [pages.clone(), sync(LAST_SYNC)].concat();
    hostile_source("pages of no round", end(Peer::synced, unasked), |error| {
        matches!(
            error,
            DestinationError::Channel {
                channel: 0,
                source: ChannelError::PagesAfterSync
            }
        )
    });
    for late in [pages.clone(), sync(2), sync(LAST_SYNC)] {
        let late = [sync(LAST_SYNC), late].concat();
        hostile_source(
            "more than the last packet",
            end(Peer::synced, late),
            |error| {
                matches!(
                    error,
                    DestinationError::Channel {
                        channel: 0,
                        source: ChannelError::AfterTheLast
                    }
                )
            },
        );
    }
    for len in [7, 300, 1000, pages.len() - 1] {
        let part = pages[..len].to_vec();
        hostile_source("half a packet", end(Peer::synced, part), |error| {
            matches!(
                error,
                DestinationError::Channel {
                    channel: 0,
                    source: ChannelError::Read(ReadError::Truncated { .. })
                }
            )
        });
    }
}

#[test]
fn rounds_that_cannot_be() {
    type Wrong = (&'static str, fn(&mut Peer));
    let wrong: [Wrong; 3] = [
        ("round 3 after round 1", |peer| peer.send(0, &sync(3))),
        ("round 1 twice", |peer| peer.send(0, &sync(1))),
        ("round 2 twice, for the other channel", |peer| {
            peer.send(0, &sync(2));
            peer.send(0, &sync(2));
        }),
    ];
    for (name, wrong) in wrong {
        let play = |address: &Address| {
            let mut peer = Peer::synced(address);
            wrong(&mut peer);
            (peer, true)
        };
        hostile_source(name, play, |error| {
            matches!(error, DestinationError::OutOfTurn { .. })
        });
    }
    // Between the state and the end of the channels.
    let late = |address: &Address| {
        let mut peer = Peer::synced(address);
        peer.send_state(b"state");
        for channel in 0..2 {
            peer.send(channel, &packet("low", &[0], &[]));
            peer.send(channel, &sync(2));
        }
        peer.end_channels();
        // In its turn only before the state, which may come later than what the channels had.
        peer.send_state(b"state");
        (peer, true)
    };
    hostile_source("a round after the state", late, |error| {
        matches!(error, DestinationError::OutOfTurn { .. })
    });
}

/// HTTP, nothing at all, and silence, before and during a migration.
#[test]
fn strangers_do_not_disturb() {
    if nothing_to_migrate() {
        return;
    }
    let _watchdog = Watchdog::new("strangers".to_owned());
    let stage = Stage::new(&Shape {
        rate: Some(1_000),
        ..Shape::default()
    });
    let mut destination = stage.destination(|_| {});
    let address = socket_address(&address_of(&destination));
    let strangers = Mutex::new(Vec::new());
    let disturb = || {
        for bytes in [
            &b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..],
            b"",
            b"VA",
            b"VAMOOSEC some",
            b"VAMOOSED some migration's",
            b"\x11\x22\x33\x44\0\0\0\x09",
            b"\0\0\0\0\0\0\0\0\0\0\0",
            &channel_opening(OTHER, 0),
        ] {
            let mut stranger = connect(&address);
            stranger.write_all(bytes).unwrap();
            lock(&strangers).push(stranger);
            drop(connect(&address));
        }
    };
    disturb();
    let mut here = Here::new(&stage)
        .switching(|status| {
            disturb();
            match status.ram.dirty_sync_count {
                0..4 => Switchover::Forbid,
                _ => Switchover::Force,
            }
        })
        .hooked(|_| {
            disturb();
            Ok(())
        });
    let mut there = There::new(&stage).hooked(|_| {
        disturb();
        Ok(())
    });
    let source = stage.source(source_config(Method::Zstd));
    let outcome = migrate(source, &mut here, &mut destination, &mut there);
    outcome.expect_done();
    stage.expect_there();
}

/// A destination that the test plays.
struct Fake {
    listener: Option<TcpListener>,
    control: TcpStream,
    channels: Vec<TcpStream>,
}

impl Fake {
    /// Its source has sent hello.
    fn greeted(listener: TcpListener) -> Self {
        let control = answer_control(&listener);
        let mut fake = Self {
            listener: Some(listener),
            control,
            channels: Vec::new(),
        };
        assert_eq!(fake.receive(), "prepare");
        fake
    }

    /// It has taken the first round.
    fn filled(listener: TcpListener) -> Self {
        let mut fake = Self::greeted(listener);
        fake.fill();
        fake
    }

    fn fill(&mut self) {
        self.send_message(PREPARED);
        for _ in 0..2 {
            let (mut channel, _) = self.listener.as_ref().unwrap().accept().unwrap();
            channel.read_exact(&mut [0; 64]).unwrap();
            self.channels.push(channel);
        }
        self.take_round(1);
    }

    /// It has taken the last round, and the source's guest is paused.
    fn complete(listener: TcpListener) -> Self {
        let mut fake = Self::filled(listener);
        fake.complete_rounds();
        fake
    }

    fn complete_rounds(&mut self) {
        self.send_message(r#"{"answer":"synced","round":1}"#);
        self.take_round(2);
    }

    /// It has taken the state.
    fn ready(listener: TcpListener) -> Self {
        let mut fake = Self::complete(listener);
        fake.take_state();
        fake
    }

    fn take_state(&mut self) {
        self.send_message(r#"{"answer":"synced","round":2}"#);
        assert_eq!(self.receive(), "state");
        let mut state = [0; 5];
        self.control.read_exact(&mut state).unwrap();
        assert_eq!(&state, b"state");
    }

    /// The guest is its own now.
    fn in_charge(listener: TcpListener) -> Self {
        let mut fake = Self::ready(listener);
        fake.take_charge();
        fake
    }

    fn take_charge(&mut self) {
        self.send_message(r#"{"answer":"loaded"}"#);
        assert_eq!(self.receive(), "commit");
    }

    /// Everything from the introduction on.
    fn prepared_to_in_charge(&mut self) {
        self.fill();
        self.complete_rounds();
        self.take_state();
        self.take_charge();
    }

    fn send_message(&mut self, json: &str) {
        self.control.write_all(&message(json)).unwrap();
    }

    fn receive(&mut self) -> String {
        name_of(&read_line(&mut self.control).unwrap())
    }

    /// Reads the pages of a round, on all channels.
    fn take_round(&mut self, round: u64) {
        for channel in &mut self.channels {
            loop {
                let mut header = vec![0; Layout::X86.ram_header_len()];
                channel.read_exact(&mut header).unwrap();
                let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
                let mut payload = vec![0; usize::try_from(word(20)).unwrap()];
                channel.read_exact(&mut payload).unwrap();
                if word(8) & 1 != 0 {
                    assert_eq!((word(24), u64::from(word(28))), (0, round));
                    break;
                }
            }
        }
    }

    /// The source's next connection, on which it has asked.
    fn is_asked_again(&mut self) {
        self.control = answer_control(self.listener.as_ref().unwrap());
        assert_eq!(self.receive(), "commit");
    }

    /// Ends, as if it was killed.
    fn end(mut self) {
        self.listener = None;
    }
}

const PREPARED: &str =
    r#"{"answer":"prepared","protocol":1,"incarnation":"000102030405060708090a0b0c0d0e0f"}"#;

/// By the destination that is [`PREPARED`].
const ABORTED: &str =
    r#"{"answer":"aborted","incarnation":"000102030405060708090a0b0c0d0e0f","cause":"no room"}"#;

/// By another one.
const ABORTED_ELSEWHERE: &str =
    r#"{"answer":"aborted","incarnation":"ffffffffffffffffffffffffffffffff","cause":"no room"}"#;

const UNKNOWN: &str = r#"{"answer":"unknown","incarnation":"ffffffffffffffffffffffffffffffff","reason":"never seen"}"#;

const REFUSED: &str = r#"{"answer":"refused","reason":"no room"}"#;

fn answer_control(listener: &TcpListener) -> TcpStream {
    let (mut control, _) = listener.accept().unwrap();
    let mut bytes = [0; 24];
    control.read_exact(&mut bytes).unwrap();
    assert!(bytes.starts_with(b"VAMOOSEC"));
    control
}

/// A destination as `play` plays it, and the source's result in the end. If the guest is the source's then,
/// it runs, and goes to a right destination.
fn hostile_destination(
    name: &str,
    play: impl FnOnce(TcpListener) + Send,
) -> Result<(), SourceError> {
    hostile_destination_of(name, &|config| config.direct_link = true, 0, play)
}

/// As [`hostile_destination`], for a source with `settings` whose device state has so many bytes more.
fn hostile_destination_of(
    name: &str,
    settings: &dyn Fn(&mut SourceConfig),
    more_state: usize,
    play: impl FnOnce(TcpListener) + Send,
) -> Result<(), SourceError> {
    let _watchdog = Watchdog::new(name.to_owned());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let (here, source) = source(|config| {
        config.stall_timeout = STALL;
        config.settle_time = STALL;
        settings(config);
    });
    let mut vmm = Vmm {
        runs: true,
        more_state,
        calls: Vec::new(),
    };
    let result = thread::scope(|scope| {
        scope.spawn(move || play(listener));
        source
            .run(&plain(&address.parse().unwrap()), &mut vmm)
            .map(drop)
    });
    let location = result.as_ref().err().map(SourceError::guest);
    assert_eq!(
        vmm.runs,
        location == Some(GuestLocation::Source),
        "{name}: {result:?}, {:?}",
        vmm.calls
    );
    vmm.more_state = 0;
    if vmm.runs {
        let there = ram();
        let mut destination = destination_of(&there);
        let log = Arc::new(SharedBitmap::new(&here));
        let source = Source::new(here.clone(), log, source_config(Method::Lz4)).unwrap();
        let address = address_of(&destination);
        let mut to = Vmm::default();
        thread::scope(|scope| {
            let serving = scope.spawn(|| destination.run(&mut to).map(drop));
            source.run(&plain(&address), &mut vmm).unwrap();
            serving.join().unwrap().unwrap();
        });
        crate::common::expect_equal(&here, &there);
    }
    result
}

/// A step of a destination's part, before the guest is its own.
type Part = (&'static str, fn(TcpListener) -> Fake);

const PARTS: [Part; 4] = [
    ("greeted", Fake::greeted),
    ("filled", Fake::filled),
    ("complete", Fake::complete),
    ("ready", Fake::ready),
];

const ANSWERS: [&str; 11] = [
    PREPARED,
    r#"{"answer":"synced","round":1}"#,
    r#"{"answer":"synced","round":3}"#,
    r#"{"answer":"loaded"}"#,
    r#"{"answer":"starting"}"#,
    r#"{"answer":"running"}"#,
    r#"{"answer":"preparing"}"#,
    r#"{"answer":"receiving"}"#,
    r#"{"answer":"ended","cause":"gone"}"#,
    r#"{"answer":"unclear","reason":"gone"}"#,
    UNKNOWN,
];

#[test]
fn answers_out_of_turn() {
    for (part, reach) in PARTS {
        for answer in ANSWERS {
            let in_turn = [
                ("greeted", ANSWERS[0]),
                ("greeted", ANSWERS[6]),
                ("filled", ANSWERS[1]),
                ("ready", ANSWERS[3]),
            ];
            if in_turn.contains(&(part, answer)) {
                continue;
            }
            let name = format!("{answer} when {part}");
            let error = hostile_destination(&name, |listener| {
                let mut fake = reach(listener);
                fake.send_message(answer);
                // Until the source hangs up.
                let _ = fake.control.read_to_end(&mut Vec::new());
            });
            let error = error.unwrap_err();
            assert!(
                matches!(error, SourceError::OutOfTurn { .. }),
                "{name}: {error}"
            );
        }
    }
}

#[test]
fn a_destination_of_another_version() {
    for version in [0, 2, 3] {
        let result = hostile_destination("another version", |listener| {
            let mut fake = Fake::greeted(listener);
            fake.send_message(&PREPARED.replace(":1,", &format!(":{version},")));
            let _ = fake.control.read_to_end(&mut Vec::new());
        });
        assert!(
            matches!(&result, Err(SourceError::Version(mismatch)) if *mismatch.theirs.end() == version),
            "{result:?}"
        );
    }
}

/// It takes a source for a stranger, and closes the connection.
#[test]
fn a_destination_that_closes_the_connection_at_once() {
    for reads in [true, false] {
        let result = hostile_destination("no answer", |listener| {
            let (mut control, _) = listener.accept().unwrap();
            if reads {
                control.read_exact(&mut [0; 24]).unwrap();
                read_line(&mut control).unwrap();
            }
        });
        let error = result.unwrap_err();
        assert!(matches!(error, SourceError::Unanswered), "{error}");
        assert!(error.to_string().contains("expects a session"), "{error}");
    }
}

/// However long it takes, as long as it reports progress.
#[test]
fn a_destination_that_prepares_for_long_is_waited_for() {
    hostile_destination("preparing", |listener| {
        let mut fake = Fake::greeted(listener);
        for _ in 0..10 {
            fake.send_message(r#"{"answer":"preparing"}"#);
        }
        fake.prepared_to_in_charge();
        fake.send_message(r#"{"answer":"running"}"#);
        assert_eq!(fake.receive(), "settled");
    })
    .unwrap();
}

#[test]
fn destinations_that_give_up() {
    for (part, reach) in PARTS {
        for (answer, expected) in [(ABORTED, false), (REFUSED, true)] {
            let name = format!("{answer} when {part}");
            let result = hostile_destination(&name, |listener| {
                let mut fake = reach(listener);
                fake.send_message(answer);
                let _ = fake.control.read_to_end(&mut Vec::new());
            });
            match result.unwrap_err() {
                SourceError::Refused { cause } => assert!(expected && cause == "no room"),
                SourceError::Destination { cause } => assert!(!expected && cause == "no room"),
                error => panic!("{name}: {error}"),
            }
        }
    }
}

#[test]
fn answers_that_are_none() {
    type Check = fn(&SourceError) -> bool;
    let malformed: Check = |error| {
        matches!(
            error,
            SourceError::Control(ConversationError::Frame(FrameError::Malformed(_)))
        )
    };
    let garbage: [(&str, Vec<u8>, Check); 5] = [
        ("no JSON", message("accepted"), malformed),
        (
            "an unknown message",
            message(r#"{"answer":"yes"}"#),
            malformed,
        ),
        ("too long", vec![b'x'; MAX_LINE], |error| {
            matches!(
                error,
                SourceError::Control(ConversationError::Frame(FrameError::TooLong))
            )
        }),
        (
            "half a message",
            message(r#"{"answer":"loaded"}"#)[..9].to_vec(),
            |error| matches!(error, SourceError::Control(ConversationError::Cut)),
        ),
        ("the end", Vec::new(), |error| {
            matches!(
                error,
                SourceError::Control(ConversationError::Closed) | SourceError::Unanswered
            )
        }),
    ];
    for (part, reach) in PARTS {
        for (name, bytes, expected) in &garbage {
            let name = format!("{name} when {part}");
            let result = hostile_destination(&name, |listener| {
                let mut fake = reach(listener);
                fake.control.write_all(bytes).unwrap();
                let _ = fake.control.shutdown(Shutdown::Write);
                let _ = fake.control.read_to_end(&mut Vec::new());
            });
            let error = result.unwrap_err();
            assert!(expected(&error), "{name}: {error}");
            let unanswered = part == "greeted" && bytes.is_empty();
            assert_eq!(
                matches!(error, SourceError::Unanswered),
                unanswered,
                "{name}: {error}"
            );
        }
    }
}

#[test]
fn random_answers() {
    for run in 0..30 {
        let mut rng = Rng::new(run);
        let (part, reach) = rng.pick(&PARTS);
        let count = usize::try_from(1 + rng.below(300)).unwrap();
        let bytes = rng.bytes(count);
        let result = hostile_destination(part, |listener| {
            let mut fake = reach(listener);
            fake.control.write_all(&bytes).unwrap();
            let _ = fake.control.shutdown(Shutdown::Write);
            let _ = fake.control.read_to_end(&mut Vec::new());
        });
        assert!(
            matches!(result, Err(SourceError::Control(_))),
            "{part}: {result:?}"
        );
    }
}

#[test]
fn destinations_that_do_not_answer() {
    thread::scope(|scope| {
        for (part, reach, waits_for) in [
            ("filled", PARTS[1].1, "received a round"),
            ("complete", PARTS[2].1, "received a round"),
            ("ready", PARTS[3].1, "loaded the guest"),
        ] {
            scope.spawn(move || {
                let settings = |config: &mut SourceConfig| {
                    config.downtime_max = Duration::from_secs(60);
                };
                let result = hostile_destination_of(part, &settings, 0, |listener| {
                    let mut fake = reach(listener);
                    let _ = fake.control.read_to_end(&mut Vec::new());
                });
                assert!(
                    matches!(result, Err(SourceError::NoAnswer { what, .. }) if what == waits_for),
                    "{part}: {result:?}"
                );
            });
        }
    });
}

/// While its guest is paused, the source waits for anything only until that is too long.
#[test]
fn destinations_that_stop_while_the_guest_is_paused() {
    let settings = |config: &mut SourceConfig| {
        // Enough for a busy host to get as far as the destination stops.
        config.downtime_max = Duration::from_secs(4);
        config.stall_timeout = PATIENT;
    };
    let settings: &(dyn Fn(&mut SourceConfig) + Sync) = &settings;
    thread::scope(|scope| {
        for (part, reach) in &PARTS[2..] {
            scope.spawn(move || {
                let result = hostile_destination_of(part, &settings, 0, |listener| {
                    let mut fake = reach(listener);
                    assert_eq!(fake.receive(), "abort");
                });
                assert!(
                    matches!(result, Err(SourceError::DowntimeExceeded { max }) if max.as_secs() == 4),
                    "{part}: {result:?}"
                );
            });
        }
        // More than the sockets hold.
        scope.spawn(move || {
            let result = hostile_destination_of("state", &settings, 64 << 20, |listener| {
                let mut fake = Fake::complete(listener);
                fake.send_message(r#"{"answer":"synced","round":2}"#);
                let mut word = fake.receive();
                if word == "state" {
                    // Behind the state there is no room for it.
                    fake.control = answer_control(fake.listener.as_ref().unwrap());
                    word = fake.receive();
                }
                assert_eq!(word, "abort");
            });
            assert!(
                matches!(result, Err(SourceError::DowntimeExceeded { .. })),
                "{result:?}"
            );
        });
    });
}

#[test]
fn a_destination_that_is_not_there() {
    let _watchdog = Watchdog::new("nobody listens".to_owned());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    drop(listener);
    let (_, source) = source(|_| {});
    let mut vmm = Vmm::default();
    let error = source
        .run(&plain(&address.parse().unwrap()), &mut vmm)
        .unwrap_err();
    assert!(matches!(error, SourceError::Dial(_)), "{error}");
    assert!(vmm.calls.is_empty());
}

/// `running` proves more than `starting`.
#[test]
fn a_guest_that_runs_has_started() {
    hostile_destination("running at once", |listener| {
        let mut fake = Fake::in_charge(listener);
        fake.send_message(r#"{"answer":"running"}"#);
        assert_eq!(fake.receive(), "settled");
    })
    .unwrap();
}

#[test]
fn a_destination_that_cannot_run_the_guest_gives_it_back() {
    for before in ["", r#"{"answer":"starting"}"#] {
        for asked_again in [false, true] {
            let result = hostile_destination("aborted", |listener| {
                let mut fake = Fake::in_charge(listener);
                if !before.is_empty() {
                    fake.send_message(before);
                }
                if asked_again {
                    fake.control.shutdown(Shutdown::Both).unwrap();
                    fake.is_asked_again();
                }
                fake.send_message(ABORTED);
                assert_eq!(fake.receive(), "abort");
            });
            assert!(
                matches!(&result, Err(SourceError::Destination { cause }) if cause == "no room"),
                "{result:?}"
            );
        }
    }
}

/// It listens as long as it may run the guest, and reports so before it does.
#[test]
fn a_destination_that_ends_without_a_word_has_not_run_the_guest() {
    let has_ended = |result: Result<(), SourceError>| {
        assert!(
            matches!(&result, Err(SourceError::Destination { cause }) if cause.contains("has ended")),
            "{result:?}"
        );
    };
    has_ended(hostile_destination("ended", |listener| {
        Fake::in_charge(listener).end();
    }));
    has_ended(hostile_destination(
        "ended when it was asked again",
        |listener| {
            let mut fake = Fake::in_charge(listener);
            fake.control.shutdown(Shutdown::Both).unwrap();
            fake.is_asked_again();
            fake.end();
        },
    ));
}

/// Whoever refuses connections may do so in the name of a destination that runs the guest.
#[test]
fn a_destination_that_ends_leaves_the_guest_in_doubt_where_the_link_is_not_direct() {
    for started in [false, true] {
        let result = hostile_destination_of("ended somewhere", &|_| {}, 0, |listener| {
            let mut fake = Fake::in_charge(listener);
            if started {
                fake.send_message(r#"{"answer":"starting"}"#);
            }
            fake.end();
        });
        assert!(
            matches!(&result, Err(SourceError::InDoubt { cause }) if cause.contains("connection refused")),
            "{result:?}"
        );
    }
}

/// Nor does it on a connection that the source has given up: the word may have been lost.
#[test]
fn a_destination_that_was_silent_before_it_ended_leaves_the_guest_in_doubt() {
    let settings = |config: &mut SourceConfig| {
        config.direct_link = true;
        config.settle_time = Duration::from_secs(8);
    };
    let result = hostile_destination_of("silent", &settings, 0, |listener| {
        let mut fake = Fake::in_charge(listener);
        fake.is_asked_again();
        fake.end();
    });
    assert!(
        matches!(result, Err(SourceError::InDoubt { .. })),
        "{result:?}"
    );
}

/// One that has not accepted the guest cannot prove that it has never run.
#[test]
fn the_word_of_another_destination_is_no_answer() {
    for before in ["", r#"{"answer":"starting"}"#] {
        for answer in [ABORTED_ELSEWHERE, UNKNOWN] {
            for asked_again in [false, true] {
                let result = hostile_destination(answer, |listener| {
                    let mut fake = Fake::in_charge(listener);
                    if !before.is_empty() {
                        fake.send_message(before);
                    }
                    if asked_again {
                        fake.control.shutdown(Shutdown::Both).unwrap();
                        fake.is_asked_again();
                    }
                    fake.send_message(answer);
                });
                assert!(
                    matches!(result, Err(SourceError::InDoubt { .. })),
                    "{result:?}"
                );
            }
        }
    }
}

/// It has a VMM of its own, whose guest has come and is gone.
#[test]
fn a_guest_that_has_ended_at_the_destination_is_lost() {
    let result = hostile_destination("ended there", |listener| {
        let mut fake = Fake::in_charge(listener);
        fake.send_message(r#"{"answer":"starting"}"#);
        fake.send_message(r#"{"answer":"ended","cause":"killed"}"#);
        assert_eq!(fake.receive(), "settled");
    });
    assert!(
        matches!(&result, Err(SourceError::Lost { cause }) if cause == "killed"),
        "{result:?}"
    );
}

/// It is asked again on the same connection.
#[test]
fn a_destination_that_cannot_tell_yet_is_asked_again() {
    hostile_destination("not yet", |listener| {
        let mut fake = Fake::in_charge(listener);
        for answer in [
            r#"{"answer":"receiving"}"#,
            r#"{"answer":"unclear","reason":"who knows"}"#,
        ] {
            fake.send_message(answer);
            assert_eq!(fake.receive(), "commit");
        }
        fake.send_message(r#"{"answer":"running","state":"running"}"#);
        assert_eq!(fake.receive(), "settled");
    })
    .unwrap();
}

#[test]
fn a_destination_that_ends_after_it_has_started_the_guest_takes_it_with_it() {
    for asked_again in [false, true] {
        let result = hostile_destination("ended after starting", |listener| {
            let mut fake = Fake::in_charge(listener);
            if asked_again {
                fake.control.shutdown(Shutdown::Both).unwrap();
                fake.is_asked_again();
            }
            fake.send_message(r#"{"answer":"starting"}"#);
            fake.end();
        });
        assert!(
            matches!(result, Err(SourceError::Lost { .. })),
            "{result:?}"
        );
    }
}

/// From `commit` on the guest is taken back for nothing but the destination's word that it will not run it.
#[test]
fn nonsense_instead_of_the_guests_fate_is_no_answer() {
    let nonsense = [
        message(PREPARED),
        message(r#"{"answer":"synced","round":2}"#),
        message(r#"{"answer":"loaded"}"#),
        message(REFUSED),
        message(r#"{"answer":"what?"}"#),
        b"{".to_vec(),
        vec![b'x'; MAX_LINE],
        Vec::new(),
    ];
    for bytes in &nonsense {
        let name = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
        // It comes to its senses.
        hostile_destination(&name, |listener| {
            let mut fake = Fake::in_charge(listener);
            for _ in 0..2 {
                fake.control.write_all(bytes).unwrap();
                fake.control.shutdown(Shutdown::Write).unwrap();
                fake.is_asked_again();
            }
            fake.send_message(r#"{"answer":"running"}"#);
            assert_eq!(fake.receive(), "settled");
        })
        .unwrap();
    }
    // It does not.
    thread::scope(|scope| {
        for bytes in &nonsense {
            scope.spawn(move || {
                let name = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
                let result = hostile_destination(&name, |listener| {
                    let mut fake = Fake::in_charge(listener);
                    let listener = fake.listener.take().unwrap();
                    listener.set_nonblocking(true).unwrap();
                    let end = Instant::now() + 3 * STALL;
                    fake.control.write_all(bytes).unwrap();
                    fake.control.shutdown(Shutdown::Write).unwrap();
                    // It is there for longer than anybody asks.
                    let mut asked = Vec::new();
                    while Instant::now() < end {
                        if let Ok((mut control, _)) = listener.accept() {
                            let _ = control.write_all(bytes);
                            let _ = control.shutdown(Shutdown::Write);
                            asked.push(control);
                        }
                        thread::sleep(Duration::from_millis(10));
                    }
                    assert!(!asked.is_empty(), "nobody has asked again");
                });
                assert!(
                    matches!(result, Err(SourceError::InDoubt { .. })),
                    "{name}: {result:?}"
                );
            });
        }
    });
}
