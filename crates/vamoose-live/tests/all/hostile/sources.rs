//! Sources that a destination has to survive.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    sync::Mutex,
    thread,
    time::Duration,
};

use handover::MAX_LINE;
use multifd::{Layout, Method, RamHeader};
use vamoose_live::{
    Address, Destination, DestinationConfig, DestinationError, Switchover, chain,
    protocol::LAST_SYNC,
};
use vm_memory::Bytes;

use self::{
    Play::{Close, CloseChannel, CloseChannels, Open, Say, Send, State, Write},
    Step::{Accepted, Connected, Loaded, Opened, Synced},
};
use super::{
    LOW, PATIENT, STALL, Vmm, connect, destination_of, destination_within, is_like,
    move_correct_one, ram, serve_a_correct_one,
};
use crate::common::{
    Here, PAGE, Rng, Shape, Stage, There, Watchdog, address_of, engines, lock, migrate,
    nothing_to_migrate,
    proxy::{ABORT, COMMIT, SETTLED, message, name_of, opening, read_line},
    sessions::Hosts,
    socket_address, source_config,
};

const ID: [u8; 16] = *b"some migration's";
const OTHER: [u8; 16] = *b"another one's id";

/// How far a source follows the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It has sent the preamble of attempt [`ID`].
    Opened,
    /// Its guest was accepted. It has no channels yet.
    Accepted,
    /// It has both of its channels.
    Connected,
    /// It has sent its first round.
    Synced,
    /// Its guest was loaded.
    Loaded,
}

/// What a source does after that.
#[derive(Clone, Debug)]
enum Play {
    /// Sends a message.
    Say(String),
    /// Sends the device state `state`.
    State,
    /// Sends bytes on the control connection.
    Write(Vec<u8>),
    /// Closes the control connection for writing.
    Close,
    /// Opens a channel of this attempt with this number.
    Open([u8; 16], u8),
    /// Sends bytes on a channel.
    Send(usize, Vec<u8>),
    /// Closes a channel for writing.
    CloseChannel(usize),
    /// Sends the last SYNC on all channels and closes them.
    CloseChannels,
}

fn say(json: &str) -> Play {
    Say(json.to_owned())
}

/// Says [`PREPARE`] with a part replaced.
fn prepare(part: &str, by: &str) -> Play {
    Say(prepare_but(part, by))
}

/// Runs a hostile source. The destination fails with `error`, which the source gets too, and does not run the guest. After
/// that a correct source is served.
fn check(name: &str, step: Step, plays: &[Play], error: &str) {
    check_within(PATIENT, name, step, plays, error);
}

fn check_within(stall_timeout: Duration, name: &str, step: Step, plays: &[Play], error: &str) {
    let name = format!("{name}, after {step:?}");
    let (found, mut peer) = run(stall_timeout, &name, |address| {
        let mut peer = Peer::at(address, step);
        plays.iter().for_each(|play| peer.play(play));
        peer
    });
    assert!(is_like(&found, error), "{name}: {found}");
    assert_eq!(peer.failure(), found, "{name}");
}

/// The error of a destination whose source is played by `play`. After that a correct source is served.
fn run(stall_timeout: Duration, name: &str, play: impl FnOnce(&Address) -> Peer) -> (String, Peer) {
    let _watchdog = Watchdog::new(name.to_owned());
    let there = ram();
    let mut destination = destination_within(stall_timeout, &there);
    let address = address_of(&destination);
    let mut vmm = Vmm::default();
    let (error, peer) = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut vmm).unwrap_err());
        let peer = play(&address);
        (serving.join().unwrap(), peer)
    });
    assert!(!vmm.runs, "{name}");
    serve_a_correct_one(&mut destination, &there);
    (chain(&error), peer)
}

#[test]
fn descriptions_of_a_guest() {
    const VERSION: &str =
        "this side speaks versions 1 to 1 of the control protocol, the other side …";
    const MALFORMED: &str = "control connection from the source: malformed control message: …";
    let newer = r#":9,"oldest-protocol":1,"colour":"blue","#;
    let low = r#"{"name":"low","len":65536}"#;
    let high = r#",{"name":"high","len":196608}"#;
    let channels = r#""channels":2"#;
    #[rustfmt::skip]
    let mismatches = [
        ("large pages", prepare("4096", "16384"), "the source's pages have 16384 bytes, the destination's 4096"),
        ("pages of no bytes", prepare("4096", "0"), "the source's pages have 0 bytes, the destination's 4096"),
        ("pages of 4 GiB", prepare("4096", "4294967295"), "the source's pages have 4294967295 bytes, the destination's 4096"),
        ("packets of no bytes", prepare("524288", "0"), "the source's packet size is invalid: packet size 0 …"),
        ("odd packets", prepare("524288", "65537"), "the source's packet size is invalid: packet size 65537 …"),
        ("large packets", prepare("524288", "8388608"), "the source's packet size is invalid: packet size 8388608 …"),
        ("no channels", prepare(channels, r#""channels":0"#), "the source announces 0 channels"),
        ("65 channels", prepare(channels, r#""channels":65"#), "the source announces 65 channels"),
        ("200 channels", prepare(channels, r#""channels":200"#), "the source announces 200 channels"),
        ("another name", prepare(r#""low""#, r#""Low""#), "the source has no RAM block `low`"),
        ("no name", prepare(r#""low""#, r#""""#), "the source has no RAM block `low`"),
        ("a byte less", prepare("65536", "65535"), "the source's RAM block `low` has 65535 bytes, the destination's 65536"),
        ("an empty block", prepare("65536", "0"), "the source's RAM block `low` has 0 bytes, the destination's 65536"),
        ("a huge block", prepare("65536", "18446744073709551615"), "the source's RAM block `low` has 18446744073709551615 bytes, the destination's 65536"),
        ("a block less", prepare(high, ""), "the source has no RAM block `high`"),
        ("a block twice", prepare(low, &format!("{low},{low}")), "the source has several RAM blocks `low`"),
        ("a block more", prepare(low, &format!(r#"{low},{{"name":"rom","len":4096}}"#)), "the source has a RAM block `rom` that the destination does not have"),
        ("one name for two", prepare(r#""high""#, r#""low""#), "the source has several RAM blocks `low`"),
    ];
    for (name, message, error) in mismatches {
        let error = format!("guest configuration mismatch: {error}");
        check(name, Opened, &[message], &error);
    }
    #[rustfmt::skip]
    let others = [
        ("an older version", prepare(":1,", ":0,"), VERSION),
        ("a newer version", prepare(":1,", ":9,"), VERSION),
        ("newer versions", prepare(":1,", r#":9,"oldest-protocol":3,"#), VERSION),
        ("256 channels", prepare(channels, r#""channels":256"#), MALFORMED),
        ("channels as text", prepare(channels, r#""channels":"2""#), MALFORMED),
        ("channels missing", prepare(r#""channels":2,"#, ""), MALFORMED),
        ("a negative length", prepare("65536", "-1"), MALFORMED),
        ("a length of 2^64", prepare("65536", "18446744073709551616"), MALFORMED),
        ("no description", say(r#"{"request":"prepare","protocol":1}"#), MALFORMED),
    ];
    for (name, message, error) in others {
        check(name, Opened, &[message], error);
    }
    // Newer versions besides this one, and unknown fields.
    let (error, _) = run(PATIENT, "a newer release", |address| {
        let mut peer = Peer::at(address, Opened);
        peer.prepare(&prepare_but(":1,", newer));
        peer.play(&say(ABORT));
        peer
    });
    assert_eq!(error, "the source has given up: no more");
}

#[test]
fn messages_out_of_turn() {
    let state = r#"{"request":"state","len":0}"#;
    let out_of_turn = "unexpected message from the source: …";
    for (step, messages) in [
        (Accepted, &[PREPARE, COMMIT, SETTLED, state][..]),
        (Connected, &[PREPARE, COMMIT, SETTLED, state]),
        (Synced, &[PREPARE, COMMIT, SETTLED]),
        (Loaded, &[PREPARE, SETTLED, state]),
    ] {
        for message in messages {
            check(message, step, &[say(message)], out_of_turn);
        }
        let given_up = "the source has given up: no more";
        check("abort", step, &[say(ABORT)], given_up);
    }
    check("state twice", Synced, &[State, State], out_of_turn);
}

fn bad_messages() -> Vec<(&'static str, Vec<u8>)> {
    let no_utf8 = b"{\"request\":\"abort\",\"cause\":\"\xff\"}\n";
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
        ("no UTF-8", no_utf8.to_vec()),
    ]
}

/// Until `loaded` is sent: later such a message may be a question whose end was lost.
#[test]
fn control_connections() {
    for step in [Accepted, Connected, Synced] {
        for (name, bytes) in bad_messages() {
            let error = "control connection from the source: malformed control message: …";
            check(name, step, &[Write(bytes)], error);
        }
        #[rustfmt::skip]
        let cases = [
            ("a long line", vec![Write(vec![b'x'; MAX_LINE])], "a message of more than 1048576 bytes"),
            ("the end", vec![Close], "the connection was closed by the peer"),
            ("half a message", vec![Write(b"{".to_vec()), Close], "the connection ended in the middle of a message"),
        ];
        for (name, plays, error) in cases {
            let error = format!("control connection from the source: {error}");
            check(name, step, &plays, &error);
        }
    }
    thread::scope(|scope| {
        for step in [Connected, Synced] {
            scope.spawn(move || {
                let half = [Write(b"{".to_vec())];
                let error = "control connection from the source: the peer stopped in the middle of a message for 2 s";
                check_within(STALL, "silence in a message", step, &half, error);
            });
        }
    });
    for len in ["1001", "18446744073709551615"] {
        let state = say(&format!(r#"{{"request":"state","len":{len}}}"#));
        let error = format!(
            "the source announces {len} bytes of device state, more than the limit of 1000"
        );
        check("a long state", Synced, &[state], &error);
    }
    let announced = say(r#"{"request":"state","len":100}"#);
    let short = [announced, Write(b"not yet a hundred".to_vec()), Close];
    let error = "control connection from the source: the connection ended after 17 of 100 bytes";
    check("a short state", Synced, &short, error);
}

#[test]
fn random_messages() {
    for run_number in 0..40 {
        let mut rng = Rng::new(run_number);
        let step = rng.pick(&[Accepted, Connected, Synced]);
        let count = usize::try_from(1 + rng.below(300)).unwrap();
        let bytes = rng.bytes(count);
        let (error, _) = run(PATIENT, "random bytes", |address| {
            let mut peer = Peer::at(address, step);
            peer.play(&Write(bytes));
            // The destination may have found the error before.
            let _ = peer.control.shutdown(Shutdown::Write);
            peer
        });
        assert!(
            is_like(&error, "control connection from the source: …"),
            "{error}"
        );
    }
}

#[test]
fn numbers_of_channels() {
    for number in [0, 2, 255] {
        let error = format!("the source's channel {number} was not announced, or connected twice");
        check(
            "two channels",
            Accepted,
            &[Open(ID, 0), Open(ID, number)],
            &error,
        );
    }
    let one = [Open(ID, 1), Open(OTHER, 0)];
    let error = "only 1 of 2 channels connected within 2 s";
    check_within(STALL, "one of two channels", Accepted, &one, error);
}

fn bad_packets() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let changed = |normal: &[u64], zero: &[u64], at: usize, byte| {
        let mut bytes = packet("low", normal, zero);
        bytes[at] = byte;
        bytes
    };
    // The first entry of the offset table.
    let offset = 320 + 7;
    #[rustfmt::skip]
    let packets = vec![
        ("an unknown block", packet("rom", &[0], &[]), "pages of RAM block `rom`, which this guest does not have"),
        ("a page behind the end", packet("low", &[0, 0x10000], &[]), "offset 0x10000 is outside of RAM block `low` of 65536 bytes"),
        ("a zero page behind the end", packet("high", &[], &[0x30000]), "offset 0x30000 is outside of RAM block `high` of 196608 bytes"),
        ("the last offset", packet("low", &[u64::MAX - 0xfff], &[]), "offset 0xfffffffffffff000 is outside of RAM block `low` of 65536 bytes"),
        ("a page across pages", changed(&[0x1000], &[], offset, 1), "bad packet: offset[0] is 0x1001, not a multiple of the page size 4096"),
        ("a zero page across pages", changed(&[], &[0x1000], offset, 1), "bad packet: offset[0] is 0x1001, not a multiple of the page size 4096"),
        ("another magic number", changed(&[0], &[], 0, 0), "bad packet: packet magic is 0x00223344, expected 0x11223344: the stream is corrupt or out of step"),
        ("unknown flags", changed(&[0], &[], 8, 0xff), "bad packet: packet flags 0xff000000 hold unknown bits (known: 0xf7f)"),
        ("device state", changed(&[0], &[], 11, 0x40), "a packet of device state came on a channel for pages only"),
    ];
    packets
}

/// On a channel without a round, and in the second round.
#[test]
fn packets() {
    for step in [Connected, Synced] {
        for (name, bytes, error) in bad_packets() {
            let error = format!("channel 1 from the source: {error}");
            check(name, step, &[Send(1, bytes)], &error);
        }
    }
}

#[test]
fn random_packets() {
    for run_number in 0..20 {
        let mut rng = Rng::new(run_number);
        let count = usize::try_from(12 + rng.below(5000)).unwrap();
        let mut bytes = rng.bytes(count);
        if rng.chance(50) {
            // Beyond the magic and the version, at least.
            bytes[..12].copy_from_slice(&packet("low", &[0], &[])[..12]);
        }
        let plays = [Send(0, bytes), CloseChannel(0)];
        check(
            "random packets",
            Connected,
            &plays,
            "channel 0 from the source: …",
        );
    }
}

#[test]
fn ends_of_channels() {
    let pages = packet("low", &[0], &[0x3000]);
    let last = sync(LAST_SYNC);
    let join = |packets: &[&[u8]]| packets.concat();
    #[rustfmt::skip]
    let cases = [
        ("no SYNC at all", Connected, vec![], "the channel ended too early"),
        ("pages without SYNC", Synced, pages.clone(), "the channel ended too early"),
        ("pages of no round", Synced, join(&[&pages, &last]), "pages that belong to no round"),
        ("pages behind the end", Synced, join(&[&last, &pages]), "a packet behind the channel's last SYNC"),
        ("a SYNC behind the end", Synced, join(&[&last, &sync(2)]), "a packet behind the channel's last SYNC"),
        ("two ends", Synced, join(&[&last, &last]), "a packet behind the channel's last SYNC"),
        ("7 bytes", Synced, pages[..7].to_vec(), "the stream ended in the middle of a packet's header, after 0 of 5 bytes"),
        ("300 bytes", Synced, pages[..300].to_vec(), "the stream ended in the middle of a packet's header, after 0 of 1044 bytes"),
        ("1000 bytes", Synced, pages[..1000].to_vec(), "the stream ended in the middle of a packet's header, after 0 of 344 bytes"),
        ("a byte less", Synced, pages[..pages.len() - 1].to_vec(), "the stream ended in the middle of a packet's payload, after 4095 of 4096 bytes"),
    ];
    for (name, step, bytes, error) in cases {
        let error = format!("channel 0 from the source: {error}");
        check(name, step, &[Send(0, bytes), CloseChannel(0)], &error);
    }
}

#[test]
fn rounds() {
    let pages = packet("low", &[0], &[]);
    // In turn before the state only. The other state may be received after what the channels had.
    let late = [0, 1].map(|channel| Send(channel, [pages.clone(), sync(2)].concat()));
    let [first, second] = late;
    #[rustfmt::skip]
    let cases = [
        ("round 3 after round 1", vec![Send(0, sync(3))], "SYNC 3"),
        ("round 1 twice", vec![Send(0, sync(1))], "SYNC 1"),
        ("round 2 twice", vec![Send(0, sync(2)), Send(0, sync(2))], "SYNC 2"),
        ("a round after the state", vec![State, first, second, CloseChannels, State], "…"),
    ];
    for (name, plays, message) in cases {
        let error = format!("unexpected message from the source: {message}");
        check(name, Synced, &plays, &error);
    }
}

#[test]
fn a_source_that_never_commits() {
    let (error, _) = run(PATIENT, "no commit", |address| {
        let mut peer = Peer::at(address, Opened);
        peer.prepare(&prepare_but("60000", "100"));
        for number in 0..2 {
            peer.play(&Open(ID, number));
            peer.play(&Send(number.into(), sync(1)));
        }
        assert_eq!(peer.receive().0, "synced");
        peer.play(&CloseChannels);
        peer.play(&State);
        peer
    });
    assert!(
        is_like(&error, "the source has not handed the guest over within …"),
        "{error}"
    );
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
        let mut peer = Peer::at(&address, Opened);
        let incarnation = peer.prepare(PREPARE);
        drop(peer);
        serving.join().unwrap().unwrap_err();
        incarnation
    });
    // Before the destination looks, so that they are the first.
    let mut peers = [(); 5].map(|()| Peer::at(&address, Opened));
    let [asks, asks_again, gives_up, asks_too_late, prepares] = &mut peers;
    asks.say(COMMIT);
    asks_again.say(COMMIT);
    let mut other = Peer::of(&address, OTHER);
    other.say(COMMIT);
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
        prepares.say(PREPARE);
        assert!(prepares.is_closed());
        // The answer may be lost, and be asked for again.
        gives_up.say(ABORT);
        assert_eq!(gives_up.receive().0, "aborted");
        asks_too_late.say(COMMIT);
        assert_eq!(asks_too_late.receive().0, "aborted");
        move_correct_one(&address, &there);
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
            let incarnation = Peer::at(&address, Opened).prepare(PREPARE);
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
    serve_a_correct_one(&mut destination, &there);
    let mut before = vec![0; LOW];
    let memory = there.blocks()[0].memory();
    memory.read_slice(&mut before, 0).unwrap();
    let mut second = Peer::at(&address, Opened);
    second.say(PREPARE);
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
fn connections_of_no_source_are_ignored() {
    let mut garbage: Vec<Vec<u8>> = bad_messages().into_iter().map(|(_, bytes)| bytes).collect();
    garbage.extend([
        vec![b'x'; MAX_LINE],
        Vec::new(),
        b"{".to_vec(),
        message(SETTLED),
        [&message(r#"{"request":"state","len":5}"#), &b"state"[..]].concat(),
    ]);
    ignored_source(|address| {
        for bytes in &garbage {
            let mut peer = Peer::at(address, Opened);
            peer.control.write_all(bytes).unwrap();
            peer.control.shutdown(Shutdown::Write).unwrap();
            assert!(peer.is_closed());
        }
        for word in [COMMIT, ABORT] {
            let mut peer = Peer::at(address, Opened);
            peer.say(word);
            assert_eq!(peer.receive().0, "unknown");
            assert!(peer.is_closed());
        }
        // Nothing is waited for for ever.
        for bytes in [&b""[..], b"{"] {
            let mut peer = Peer::at(address, Opened);
            peer.control.write_all(bytes).unwrap();
            assert!(peer.is_closed());
        }
    });
}

/// Peers that are not sources: the destination keeps waiting for a source, and serves it.
fn ignored_source(play: impl FnOnce(&Address)) {
    let _watchdog = Watchdog::new("not a source".to_owned());
    let there = ram();
    let mut destination = destination_within(STALL, &there);
    let address = address_of(&destination);
    let mut to = Vmm::default();
    thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut to));
        play(&address);
        move_correct_one(&address, &there);
        serving.join().unwrap().unwrap();
    });
    assert!(to.runs);
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
        drop(Peer::at(&address, Loaded));
        // Another migration has to wait, and its questions are not this one's.
        let mut foreign = Peer::of(&address, OTHER);
        foreign.say(PREPARE);
        assert_eq!(foreign.receive().0, "refused");
        let mut foreign = Peer::of(&address, OTHER);
        foreign.say(COMMIT);
        assert_eq!(foreign.receive().0, "unknown");
        assert!(foreign.is_closed());
        let mut again = Peer::at(&address, Opened);
        again.say(COMMIT);
        assert_eq!(again.receive().0, "starting");
        assert_eq!(again.receive().0, "running");
        drop(again);
        let mut again = Peer::at(&address, Opened);
        again.say(COMMIT);
        assert_eq!(again.receive().0, "running");
        again.say(SETTLED);
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
        let mut peer = Peer::at(&address, Loaded);
        for _ in 0..2 {
            peer.say(r#"{"request":"commit","resume":false}"#);
        }
        assert_eq!(peer.receive().0, "starting");
        assert_eq!(peer.receive().0, "running");
        assert_eq!(peer.receive().0, "running");
        peer.say(SETTLED);
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
        stale.say(COMMIT);
        assert_eq!(stale.receive().0, "unknown");
        let mut peer = Peer::at(&address, Synced);
        // It is closed.
        let _ = stale.control.write_all(&message(ABORT));
        let mut late = Peer::of(&address, OTHER);
        late.say(ABORT);
        assert_eq!(late.receive().0, "unknown");
        peer.play(&CloseChannels);
        peer.play(&State);
        assert_eq!(peer.receive().0, "loaded");
        peer.say(COMMIT);
        assert_eq!(peer.receive().0, "starting");
        assert_eq!(peer.receive().0, "running");
        peer.say(SETTLED);
        serving.join().unwrap().unwrap()
    });
    assert!(arrival.settled);
    assert_eq!(vmm.calls, ["load", "run"]);
}

/// A trusted peer that is not the source of an attempt has no part in it, and channels belong to the session of their control
/// connection.
#[test]
fn streams_of_other_sessions_and_peers_are_refused() {
    let _watchdog = Watchdog::new("streams of other sessions".to_owned());
    let (mut hosts, mut others) = (Hosts::new(), Hosts::new());
    hosts.befriend(&mut others);
    let there = ram();
    let config = DestinationConfig::new(engines(Method::None));
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

    /// A source of attempt `id` that has sent its preamble.
    fn of(address: &Address, id: [u8; 16]) -> Self {
        let mut peer = Self::dial(address);
        peer.control.write_all(&opening(id)).unwrap();
        peer
    }

    /// A source of attempt [`ID`] that follows the protocol up to `step`.
    fn at(address: &Address, step: Step) -> Self {
        let mut peer = Self::of(address, ID);
        if step == Opened {
            return peer;
        }
        peer.prepare(PREPARE);
        if step == Accepted {
            return peer;
        }
        for number in 0..2 {
            peer.play(&Open(ID, number));
        }
        if step == Connected {
            return peer;
        }
        for channel in 0..2 {
            peer.play(&Send(channel, packet("low", &[0x1000], &[0x2000])));
            peer.play(&Send(channel, sync(1)));
        }
        assert_eq!(peer.receive(), ("synced".to_owned(), "1".to_owned()));
        if step == Loaded {
            peer.play(&CloseChannels);
            peer.play(&State);
            assert_eq!(peer.receive().0, "loaded");
        }
        peer
    }

    fn play(&mut self, play: &Play) {
        match play {
            Say(json) => self.say(json),
            State => {
                self.say(r#"{"request":"state","len":5}"#);
                self.control.write_all(b"state").unwrap();
            }
            Write(bytes) => self.control.write_all(bytes).unwrap(),
            Close => self.control.shutdown(Shutdown::Write).unwrap(),
            Open(id, number) => {
                let mut channel = connect(&self.address);
                channel.write_all(&channel_opening(*id, *number)).unwrap();
                self.channels.push(channel);
            }
            // The destination may be gone already: then it has found the error before.
            Send(channel, bytes) => drop(self.channels[*channel].write_all(bytes)),
            CloseChannel(channel) => drop(self.channels[*channel].shutdown(Shutdown::Write)),
            CloseChannels => {
                for channel in &mut self.channels {
                    let _ = channel.write_all(&sync(LAST_SYNC));
                    channel.shutdown(Shutdown::Write).unwrap();
                }
            }
        }
    }

    /// Introduces its guest, which is accepted; returns the destination's incarnation.
    fn prepare(&mut self, json: &str) -> String {
        self.say(json);
        // It may have some memory to make zero.
        let mut answer = self.receive();
        assert_eq!(answer.0, "preparing");
        while answer.0 == "preparing" {
            answer = self.receive();
        }
        assert_eq!(answer.0, "prepared");
        answer.1
    }

    fn say(&mut self, json: &str) {
        self.control.write_all(&message(json)).unwrap();
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

    /// Why the destination has failed, behind everything that it sent before.
    fn failure(&mut self) -> String {
        loop {
            let (name, detail) = self.receive();
            match name.as_str() {
                // Behind the incarnation.
                "aborted" => return detail[32..].to_owned(),
                "refused" => return detail,
                _ => {}
            }
        }
    }
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
