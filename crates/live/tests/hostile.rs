//! Peers that do not keep to the protocol, or are none: they are told so, get nothing, and the next one is served.
//!
//! The peers' bytes are written by hand, so that this is also a second opinion on the format.

#![cfg(not(feature = "loom"))] // whose atomics work in a model only
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "what helps a test fails it the same way"
)]

mod common;

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use common::{
    Here, PAGE, Rng, Shape, Stage, There, Watchdog, lock, migrate, nothing_to_migrate,
    proxy::{message, opening, read_message, said},
    socket_address, source_config,
};
use live::{
    ChannelError, Destination, DestinationError, DestinationGuest, GuestError, ProtocolError, Ram,
    RamBlock, SharedBitmap, Source, SourceConfig, SourceError, SourceGuest, Switchover,
    Whereabouts,
    protocol::{LAST_SYNC, MAX_MESSAGE},
};
use multifd::{Layout, Method, PacketError, RamHeader};
use transfer::{Address, ReadError};
use vm_memory::{Bytes, MmapRegion};

/// Bytes of the guest's blocks `low` and `high`.
const LOW: usize = 16 * PAGE;
const HIGH: usize = 48 * PAGE;

const ID: [u8; 16] = *b"some migration's";
const OTHER: [u8; 16] = *b"another one's id";

/// For how long a peer may stop. Tests of that take as long.
const STALL: Duration = Duration::from_secs(2);

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
        Ok(b"state".to_vec())
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

    /// One that has introduced itself.
    fn opened(address: &Address) -> Self {
        let mut peer = Self::dial(address);
        peer.control.write_all(&opening(ID)).unwrap();
        peer
    }

    /// One that was accepted, without channels yet.
    fn accepted(address: &Address) -> Self {
        let mut peer = Self::opened(address);
        peer.say(HELLO);
        assert_eq!(peer.hear().0, "accepted");
        peer
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
        assert_eq!(peer.hear(), ("synced".to_owned(), r#"1"#.to_owned()));
        peer
    }

    /// One whose guest was loaded.
    fn loaded(address: &Address) -> Self {
        let mut peer = Self::synced(address);
        peer.end_channels();
        peer.say_state(b"state");
        assert_eq!(peer.hear().0, "loaded");
        peer
    }

    fn open_channel(&mut self, id: [u8; 16], number: u8) {
        let mut channel = connect(&self.address);
        channel.write_all(&channel_opening(id, number)).unwrap();
        self.channels.push(channel);
    }

    fn say(&mut self, json: &str) {
        self.control.write_all(&message(json)).unwrap();
    }

    fn say_state(&mut self, state: &[u8]) {
        self.say(&format!(r#"{{"say":"state","len":{}}}"#, state.len()));
        self.control.write_all(state).unwrap();
    }

    /// The destination's next words: what it says, and the number or the text with it.
    fn hear(&mut self) -> (String, String) {
        let bytes = read_message(&mut self.control).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&bytes[4..]).unwrap();
        let detail = [&value["round"], &value["cause"]].map(|detail| match detail {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Null => String::new(),
            other => other.to_string(),
        });
        (said(&bytes[4..]), detail.concat())
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

const HELLO: &str = r#"{"say":"hello","blocks":[{"name":"low","len":65536},{"name":"high","len":196608}],"page-size":4096,"packet-bytes":524288,"channels":2,"settle-ms":60000}"#;

/// [`HELLO`] with a part replaced.
fn hello_but(part: &str, by: &str) -> String {
    assert!(HELLO.contains(part));
    HELLO.replacen(part, by, 1)
}

/// A source as `play` plays it, and what the destination says of it in the end; after which a right source is served.
/// What `play` returns with the peer is whether that has to be told why.
fn hostile_source(
    name: &str,
    play: impl FnOnce(&Address) -> (Peer, bool),
    expected: impl FnOnce(&DestinationError) -> bool,
) {
    let _watchdog = Watchdog::new(name.to_owned());
    let there = ram();
    let mut destination = destination_of(&there);
    let address = destination.address().clone();
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
            let (said, detail) = peer.hear();
            if ["aborted", "refused"].contains(&said.as_str()) {
                break detail;
            }
        };
        assert_eq!(cause, error.to_string(), "{name}");
    }
    serve_a_right_one(&mut destination, &there);
}

fn destination_of(there: &Ram) -> Destination {
    let mut config = live::DestinationConfig::new(common::engines(Method::None));
    config.stall_timeout = STALL;
    config.max_state = 1000;
    Destination::bind(&common::loopback(), there.clone(), config).unwrap()
}

/// The destination takes the guest of a right source, all of whose pages are something else than before.
fn serve_a_right_one(destination: &mut Destination, there: &Ram) {
    let (here, source) = source(|_| {});
    let address = destination.address().clone();
    let (mut from, mut to) = (Vmm::default(), Vmm::default());
    thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut to).map(drop));
        source.run(&address, &mut from).unwrap();
        serving.join().unwrap().unwrap();
    });
    common::expect_equal(&here, there);
    assert!(to.runs && !from.runs);
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
    let play = |address: &Address| {
        let mut peer = Peer::dial(address);
        let mut bytes = opening(ID);
        bytes[7] = 9;
        peer.control.write_all(&bytes).unwrap();
        (peer, true)
    };
    hostile_source("version 9", play, |error| {
        matches!(
            error,
            DestinationError::Version { theirs: 9, ours } if *ours == live::protocol::VERSION
        )
    });
}

#[test]
fn a_source_with_another_guest() {
    let low = r#"{"name":"low","len":65536}"#;
    let high = r#",{"name":"high","len":196608}"#;
    for hello in [
        hello_but("4096", "16384"),
        hello_but("4096", "0"),
        hello_but("4096", "4294967295"),
        hello_but("524288", "0"),
        hello_but("524288", "65537"),
        hello_but("524288", "8388608"),
        hello_but(r#""channels":2"#, r#""channels":0"#),
        hello_but(r#""channels":2"#, r#""channels":65"#),
        hello_but(r#""channels":2"#, r#""channels":200"#),
        hello_but(r#""low""#, r#""Low""#),
        hello_but(r#""low""#, r#""""#),
        hello_but("65536", "65535"),
        hello_but("65536", "0"),
        hello_but("65536", "18446744073709551615"),
        hello_but(high, ""),
        hello_but(
            low,
            r#"{"name":"low","len":65536},{"name":"low","len":65536}"#,
        ),
        hello_but(
            low,
            r#"{"name":"low","len":65536},{"name":"rom","len":4096}"#,
        ),
        hello_but(r#""high""#, r#""low""#),
    ] {
        let play = |address: &Address| {
            let mut peer = Peer::opened(address);
            peer.say(&hello);
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
    for (step, reach) in STEPS {
        for words in [
            HELLO,
            r#"{"say":"commit"}"#,
            r#"{"say":"settled"}"#,
            r#"{"say":"state","len":0}"#,
        ] {
            let word = said(words.as_bytes());
            // What is in turn.
            let in_turn = [
                ("opened", "hello"),
                ("opened", "commit"),
                ("opened", "settled"),
                ("synced", "state"),
                ("loaded", "commit"),
            ];
            if in_turn.contains(&(step, word.as_str())) {
                continue;
            }
            let play = |address: &Address| {
                let mut peer = reach(address);
                peer.say(words);
                // Nobody is told before there is a migration.
                (peer, step != "opened")
            };
            hostile_source(&format!("{word} when {step}"), play, |error| {
                matches!(error, DestinationError::OutOfTurn { .. })
            });
        }
    }
    let twice = |address: &Address| {
        let mut peer = Peer::synced(address);
        peer.say_state(b"state");
        peer.say_state(b"state");
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
            peer.say(r#"{"say":"abort","cause":"no more"}"#);
            (peer, true)
        };
        hostile_source(
            &format!("abort when {step}"),
            play,
            |error| matches!(error, DestinationError::Aborted { cause } if cause == "no more"),
        );
    }
}

/// The last words about an attempt that is over at the destination come when it waits for the next one.
#[test]
fn an_attempt_that_is_over_does_not_disturb_the_next() {
    let _watchdog = Watchdog::new("an attempt that is over".to_owned());
    let there = ram();
    let mut destination = destination_of(&there);
    let address = destination.address().clone();
    // Before the destination looks, so that they are the first that it hears.
    let mut asks = Peer::opened(&address);
    asks.say(r#"{"say":"commit"}"#);
    let mut late = Peer::opened(&address);
    late.say(r#"{"say":"abort","cause":"cancelled"}"#);
    let mut knows = Peer::opened(&address);
    knows.say(r#"{"say":"settled"}"#);
    let mut vmm = Vmm::default();
    thread::scope(|scope| {
        let handle = destination.handle();
        let serving = scope.spawn(|| destination.run(&mut vmm));
        assert_eq!(asks.hear().0, "aborted");
        handle.cancel();
        let error = serving.join().unwrap().unwrap_err();
        assert!(matches!(error, DestinationError::Cancelled), "{error}");
    });
    assert_eq!(vmm.calls, [""; 0]);
}

#[test]
fn words_that_are_none() {
    let garbage: [(&str, Vec<u8>); 7] = [
        ("no JSON", message("hello")),
        ("nothing", message("")),
        ("an unknown word", message(r#"{"say":"please"}"#)),
        (
            "a field of another type",
            message(r#"{"say":"state","len":"5"}"#),
        ),
        ("a field is missing", message(r#"{"say":"state"}"#)),
        (
            "a number out of range",
            message(&hello_but(r#""channels":2"#, r#""channels":256"#)),
        ),
        ("a list", message("[[[[[[[[1]]]]]]]]")),
    ];
    // What is said before `loaded`: later it may be a question whose end was lost.
    for (step, reach) in &STEPS[..4] {
        for (name, bytes) in &garbage {
            let play = |address: &Address| {
                let mut peer = reach(address);
                peer.control.write_all(bytes).unwrap();
                (peer, *step != "opened")
            };
            hostile_source(&format!("{name} when {step}"), play, |error| {
                matches!(error, DestinationError::Control(ProtocolError::Message(_)))
            });
        }
        let play = |address: &Address| {
            let mut peer = reach(address);
            let len = u32::try_from(MAX_MESSAGE).unwrap() + 1;
            peer.control.write_all(&len.to_be_bytes()).unwrap();
            (peer, *step != "opened")
        };
        hostile_source(&format!("too long when {step}"), play, |error| {
            matches!(
                error,
                DestinationError::Control(ProtocolError::MessageLength { .. })
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
                peer.control.write_all(&[0, 0]).unwrap();
                (peer, true)
            };
            scope.spawn(move || {
                hostile_source(&format!("half a length when {step}"), play, |error| {
                    matches!(error, DestinationError::Control(ProtocolError::Stalled))
                });
            });
        }
    });
}

#[test]
fn a_source_that_says_nothing() {
    let silent = |address: &Address| (Peer::opened(address), false);
    hostile_source("silence", silent, |error| {
        matches!(error, DestinationError::Control(ProtocolError::Silent))
    });
}

#[test]
fn random_words() {
    for run in 0..40 {
        let mut rng = Rng::new(run);
        let (step, reach) = STEPS[usize::try_from(rng.below(4)).unwrap()];
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
    for (step, reach) in &STEPS[..4] {
        let play = |address: &Address| {
            let peer = reach(address);
            peer.control.shutdown(Shutdown::Write).unwrap();
            (peer, *step != "opened")
        };
        hostile_source(&format!("end when {step}"), play, |error| {
            matches!(error, DestinationError::ControlEnded)
        });
        let play = |address: &Address| {
            let mut peer = reach(address);
            peer.control.write_all(&[0, 0, 0, 200, b'{']).unwrap();
            peer.control.shutdown(Shutdown::Write).unwrap();
            (peer, *step != "opened")
        };
        hostile_source(&format!("end in a message when {step}"), play, |error| {
            matches!(
                error,
                DestinationError::Control(ProtocolError::Truncated {
                    got: 1,
                    wanted: 200
                })
            )
        });
    }
}

/// It may have said `commit`, and dials again: the guest is not given up before the settle time is over.
#[test]
fn a_source_that_comes_back_is_served() {
    let _watchdog = Watchdog::new("comes back".to_owned());
    let there = ram();
    let mut destination = destination_of(&there);
    let address = destination.address().clone();
    let mut vmm = Vmm::default();
    let arrival = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm));
        drop(Peer::loaded(&address));
        // Questions about another migration are not answered.
        let mut foreign = Peer::dial(&address);
        foreign.control.write_all(&opening(OTHER)).unwrap();
        foreign.say(r#"{"say":"commit"}"#);
        assert_eq!(foreign.control.read(&mut [0]).unwrap_or(0), 0);
        let mut again = Peer::opened(&address);
        again.say(r#"{"say":"commit"}"#);
        assert_eq!(again.hear().0, "starting");
        assert_eq!(again.hear().0, "running");
        drop(again);
        let mut again = Peer::opened(&address);
        again.say(r#"{"say":"commit"}"#);
        assert_eq!(again.hear().0, "running");
        again.say(r#"{"say":"settled"}"#);
        serving.join().unwrap().unwrap()
    });
    assert!(arrival.settled);
    assert_eq!(vmm.calls, ["load", "run"]);
}

#[test]
fn a_source_that_never_commits() {
    let play = |address: &Address| {
        let mut peer = Peer::opened(address);
        peer.say(&hello_but("60000", "100"));
        assert_eq!(peer.hear().0, "accepted");
        for number in 0..2 {
            peer.open_channel(ID, number);
            peer.send(number.into(), &sync(1));
        }
        peer.end_channels();
        peer.say_state(b"state");
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
            peer.say(&format!(r#"{{"say":"state","len":{len}}}"#));
            (peer, true)
        };
        hostile_source(&format!("{len} bytes of state"), play, |error| {
            matches!(error, DestinationError::StateLength { max: 1000, .. })
        });
    }
    let short = |address: &Address| {
        let mut peer = Peer::synced(address);
        peer.say(r#"{"say":"state","len":100}"#);
        peer.control.write_all(b"not yet a hundred").unwrap();
        peer.control.shutdown(Shutdown::Write).unwrap();
        (peer, true)
    };
    hostile_source("a state cut short", short, |error| {
        matches!(
            error,
            DestinationError::Control(ProtocolError::Truncated {
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

#[test]
fn channels_that_never_come() {
    let play = |address: &Address| {
        let mut peer = Peer::accepted(address);
        peer.open_channel(ID, 1);
        peer.open_channel(OTHER, 0);
        (peer, true)
    };
    hostile_source("one of two channels", play, |error| {
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

/// What a peer writes to a channel that was opened, and what is said of it.
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
                    DestinationError::Channel { channel: 1, error } if expected(error)
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
                error: ChannelError::Ended
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
                    error: ChannelError::Ended
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
                error: ChannelError::PagesAfterSync
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
                        error: ChannelError::AfterTheLast
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
                    error: ChannelError::Read(ReadError::Truncated { .. })
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
        peer.say_state(b"state");
        for channel in 0..2 {
            peer.send(channel, &packet("low", &[0], &[]));
            peer.send(channel, &sync(2));
        }
        peer.end_channels();
        // In its turn only before the state, which may come later than what the channels had.
        peer.say_state(b"state");
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
    let address = socket_address(destination.address());
    let strangers = Mutex::new(Vec::new());
    let disturb = || {
        for bytes in [
            &b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..],
            b"",
            b"VL",
            b"VLIV\0\0\0\x01",
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
    /// Its source has said hello.
    fn greeted(listener: TcpListener) -> Self {
        let control = answer_control(&listener);
        let mut fake = Self {
            listener: Some(listener),
            control,
            channels: Vec::new(),
        };
        assert_eq!(fake.hear(), "hello");
        fake
    }

    /// It has taken the first round.
    fn filled(listener: TcpListener) -> Self {
        let mut fake = Self::greeted(listener);
        fake.say(r#"{"say":"accepted"}"#);
        for _ in 0..2 {
            let (mut channel, _) = fake.listener.as_ref().unwrap().accept().unwrap();
            channel.read_exact(&mut [0; 64]).unwrap();
            fake.channels.push(channel);
        }
        fake.take_round(1);
        fake
    }

    /// It has taken the last round, and the source's guest is paused.
    fn complete(listener: TcpListener) -> Self {
        let mut fake = Self::filled(listener);
        fake.say(r#"{"say":"synced","round":1}"#);
        fake.take_round(2);
        fake
    }

    /// It has taken the state.
    fn ready(listener: TcpListener) -> Self {
        let mut fake = Self::complete(listener);
        fake.say(r#"{"say":"synced","round":2}"#);
        assert_eq!(fake.hear(), "state");
        let mut state = [0; 5];
        fake.control.read_exact(&mut state).unwrap();
        assert_eq!(&state, b"state");
        fake
    }

    /// The guest is its own now.
    fn in_charge(listener: TcpListener) -> Self {
        let mut fake = Self::ready(listener);
        fake.say(r#"{"say":"loaded"}"#);
        assert_eq!(fake.hear(), "commit");
        fake
    }

    fn say(&mut self, json: &str) {
        self.control.write_all(&message(json)).unwrap();
    }

    fn hear(&mut self) -> String {
        said(&read_message(&mut self.control).unwrap()[4..])
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
        assert_eq!(self.hear(), "commit");
    }

    /// Ends, as if it was killed.
    fn end(mut self) {
        self.listener = None;
    }
}

fn answer_control(listener: &TcpListener) -> TcpStream {
    let (mut control, _) = listener.accept().unwrap();
    let mut bytes = [0; 24];
    control.read_exact(&mut bytes).unwrap();
    assert!(bytes.starts_with(b"VLIV\0\0\0\x01"));
    control
}

/// A destination as `play` plays it, and what the source says in the end. If the guest is the source's then,
/// it runs, and goes to a right destination.
fn hostile_destination(
    name: &str,
    play: impl FnOnce(TcpListener) + Send,
) -> Result<(), SourceError> {
    let _watchdog = Watchdog::new(name.to_owned());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let (here, source) = source(|config| {
        config.stall_timeout = STALL;
        config.settle_time = STALL;
    });
    let mut vmm = Vmm {
        runs: true,
        calls: Vec::new(),
    };
    let result = thread::scope(|scope| {
        scope.spawn(move || play(listener));
        source.run(&address.parse().unwrap(), &mut vmm).map(drop)
    });
    let whereabouts = result.as_ref().err().map(SourceError::guest);
    assert_eq!(
        vmm.runs,
        whereabouts == Some(Whereabouts::Source),
        "{name}: {result:?}, {:?}",
        vmm.calls
    );
    if vmm.runs {
        let there = ram();
        let mut destination = destination_of(&there);
        let log = Arc::new(SharedBitmap::new(&here));
        let source = Source::new(here.clone(), log, source_config(Method::Lz4)).unwrap();
        let address = destination.address().clone();
        let mut to = Vmm::default();
        thread::scope(|scope| {
            let serving = scope.spawn(|| destination.run(&mut to).map(drop));
            source.run(&address, &mut vmm).unwrap();
            serving.join().unwrap().unwrap();
        });
        common::expect_equal(&here, &there);
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

const ANSWERS: [&str; 6] = [
    r#"{"say":"accepted"}"#,
    r#"{"say":"synced","round":1}"#,
    r#"{"say":"synced","round":3}"#,
    r#"{"say":"loaded"}"#,
    r#"{"say":"starting"}"#,
    r#"{"say":"running"}"#,
];

#[test]
fn answers_out_of_turn() {
    for (part, reach) in PARTS {
        for answer in ANSWERS {
            let in_turn = [
                ("greeted", ANSWERS[0]),
                ("filled", ANSWERS[1]),
                ("ready", ANSWERS[3]),
            ];
            if in_turn.contains(&(part, answer)) {
                continue;
            }
            let name = format!("{answer} when {part}");
            let error = hostile_destination(&name, |listener| {
                let mut fake = reach(listener);
                fake.say(answer);
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
fn destinations_that_give_up() {
    for (part, reach) in PARTS {
        for (word, expected) in [("aborted", false), ("refused", true)] {
            let name = format!("{word} when {part}");
            let result = hostile_destination(&name, |listener| {
                let mut fake = reach(listener);
                fake.say(&format!(r#"{{"say":"{word}","cause":"no room"}}"#));
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
    let garbage: [(&str, Vec<u8>, Check); 5] = [
        ("no JSON", message("accepted"), |error| {
            matches!(error, SourceError::Control(ProtocolError::Message(_)))
        }),
        ("an unknown word", message(r#"{"say":"yes"}"#), |error| {
            matches!(error, SourceError::Control(ProtocolError::Message(_)))
        }),
        ("too long", vec![0xff; 4], |error| {
            matches!(
                error,
                SourceError::Control(ProtocolError::MessageLength { .. })
            )
        }),
        (
            "half a message",
            message(r#"{"say":"loaded"}"#)[..9].to_vec(),
            |error| matches!(error, SourceError::Control(ProtocolError::Truncated { .. })),
        ),
        ("the end", Vec::new(), |error| {
            matches!(error, SourceError::ControlEnded)
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
                let result = hostile_destination(part, |listener| {
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

#[test]
fn a_destination_that_is_not_there() {
    let _watchdog = Watchdog::new("nobody listens".to_owned());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    drop(listener);
    let (_, source) = source(|_| {});
    let mut vmm = Vmm::default();
    let error = source.run(&address.parse().unwrap(), &mut vmm).unwrap_err();
    assert!(matches!(error, SourceError::Dial(_)), "{error}");
    assert!(vmm.calls.is_empty());
}

/// `running` says more than `starting`.
#[test]
fn a_guest_that_runs_has_started() {
    hostile_destination("running at once", |listener| {
        let mut fake = Fake::in_charge(listener);
        fake.say(r#"{"say":"running"}"#);
        assert_eq!(fake.hear(), "settled");
    })
    .unwrap();
}

#[test]
fn a_destination_that_cannot_run_the_guest_gives_it_back() {
    for before in ["", r#"{"say":"starting"}"#] {
        for asked_again in [false, true] {
            let result = hostile_destination("aborted", |listener| {
                let mut fake = Fake::in_charge(listener);
                if !before.is_empty() {
                    fake.say(before);
                }
                if asked_again {
                    fake.control.shutdown(Shutdown::Both).unwrap();
                    fake.is_asked_again();
                }
                fake.say(r#"{"say":"aborted","cause":"no CPU"}"#);
                assert_eq!(fake.hear(), "settled");
            });
            assert!(
                matches!(&result, Err(SourceError::Destination { cause }) if cause == "no CPU"),
                "{result:?}"
            );
        }
    }
}

/// It listens as long as it may run the guest, and says so before it does.
#[test]
fn a_destination_that_ends_without_a_word_has_not_run_the_guest() {
    let result = hostile_destination("ended", |listener| Fake::in_charge(listener).end());
    assert!(matches!(result, Err(SourceError::Ended)), "{result:?}");
    let result = hostile_destination("ended when it was asked again", |listener| {
        let mut fake = Fake::in_charge(listener);
        fake.control.shutdown(Shutdown::Both).unwrap();
        fake.is_asked_again();
        fake.end();
    });
    assert!(matches!(result, Err(SourceError::Ended)), "{result:?}");
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
            fake.say(r#"{"say":"starting"}"#);
            fake.end();
        });
        assert!(matches!(result, Err(SourceError::Lost)), "{result:?}");
    }
}

/// From `commit` on the guest is taken back for nothing but the destination's word that it will not run it.
#[test]
fn nonsense_instead_of_the_guests_fate_is_no_answer() {
    let nonsense = [
        message(r#"{"say":"accepted"}"#),
        message(r#"{"say":"synced","round":2}"#),
        message(r#"{"say":"loaded"}"#),
        message(r#"{"say":"refused","cause":"busy"}"#),
        message(r#"{"say":"what?"}"#),
        message("{"),
        vec![0xff; 4],
        Vec::new(),
    ];
    for bytes in &nonsense {
        let name = String::from_utf8_lossy(bytes).into_owned();
        // It comes to its senses.
        hostile_destination(&name, |listener| {
            let mut fake = Fake::in_charge(listener);
            for _ in 0..2 {
                fake.control.write_all(bytes).unwrap();
                fake.control.shutdown(Shutdown::Write).unwrap();
                fake.is_asked_again();
            }
            fake.say(r#"{"say":"running"}"#);
            assert_eq!(fake.hear(), "settled");
        })
        .unwrap();
    }
    // It does not.
    thread::scope(|scope| {
        for bytes in &nonsense {
            scope.spawn(move || {
                let name = String::from_utf8_lossy(bytes).into_owned();
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
