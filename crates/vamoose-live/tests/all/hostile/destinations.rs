//! Destinations that a source has to survive.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use handover::MAX_LINE;
use multifd::{Layout, Method};
use vamoose_live::{GuestLocation, Source, SourceConfig, SourceError, chain, dirty::SharedBitmap};

use self::{
    Play::{Cut, End, Expect, Say, Write},
    Step::{Complete, Filled, Greeted, InCharge, Ready},
};
use super::{PATIENT, STALL, Vmm, destination_of, is_like, ram, source};
use crate::common::{
    Rng, Watchdog, address_of, expect_equal, plain,
    proxy::{message, name_of, read_line},
    source_config,
};

/// How far a destination follows the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// Its source has described its guest.
    Greeted,
    /// It has received the first round.
    Filled,
    /// It has received the last round: the guest is paused.
    Complete,
    /// It has received the device state.
    Ready,
    /// It was told to run the guest.
    InCharge,
}

/// All steps before the guest is the destination's.
const BEFORE: [Step; 4] = [Greeted, Filled, Complete, Ready];

/// What a destination does after that.
#[derive(Clone, Copy, Debug)]
enum Play<'a> {
    /// Sends a message.
    Say(&'a str),
    /// Sends bytes.
    Write(&'a [u8]),
    /// Receives this message.
    Expect(&'static str),
    /// Closes the control connection, and is asked on the next one.
    Cut,
    /// Ends, as if it was killed.
    End,
}

/// Where the guest is after the migration, and the error's text. The guest runs at the source in the first case only.
#[derive(Clone, Copy, Debug)]
enum Outcome<'a> {
    Here(&'a str),
    InDoubt(&'a str),
    Lost(&'a str),
    There,
}

use Outcome::{Here, InDoubt, Lost, There};

/// Runs a source over a direct link to a hostile destination. A guest that runs at the source afterwards goes to a correct
/// destination.
fn check(name: &str, step: Step, plays: &[Play<'_>], outcome: Outcome<'_>) {
    check_with(
        &|config| config.direct_link = true,
        name,
        step,
        plays,
        outcome,
    );
}

fn check_with(
    settings: &dyn Fn(&mut SourceConfig),
    name: &str,
    step: Step,
    plays: &[Play<'_>],
    outcome: Outcome<'_>,
) {
    let result = run(name, settings, 0, |listener| {
        Fake::at(listener, step).play_all(plays)
    });
    let (location, expected) = match outcome {
        Here(text) => (GuestLocation::Source, text),
        InDoubt(text) => (GuestLocation::InDoubt, text),
        Lost(text) => (GuestLocation::Lost, text),
        There => return result.unwrap(),
    };
    let error = result.unwrap_err();
    let text = chain(&error);
    assert!(is_like(&text, expected), "{name}, after {step:?}: {text}");
    assert_eq!(error.guest(), location, "{name}, after {step:?}: {text}");
}

/// The result of a source with `settings`, whose device state has so many more bytes. Its destination is played by `play`.
fn run(
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
            .run(plain(&address.parse().unwrap()), &mut vmm)
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
        let source = Source::with_config(here.clone(), log, source_config(Method::Lz4)).unwrap();
        let address = address_of(&destination);
        let mut to = Vmm::default();
        thread::scope(|scope| {
            let serving = scope.spawn(|| destination.run(&mut to).map(drop));
            source.run(plain(&address), &mut vmm).unwrap();
            serving.join().unwrap().unwrap();
        });
        expect_equal(&here, &there);
    }
    result
}

const PREPARED: &str =
    r#"{"answer":"prepared","protocol":1,"incarnation":"000102030405060708090a0b0c0d0e0f"}"#;
const PREPARING: &str = r#"{"answer":"preparing"}"#;
const LOADED: &str = r#"{"answer":"loaded"}"#;
const STARTING: &str = r#"{"answer":"starting"}"#;
const RUNNING: &str = r#"{"answer":"running"}"#;
const RECEIVING: &str = r#"{"answer":"receiving"}"#;
const ENDED: &str = r#"{"answer":"ended","cause":"killed"}"#;
const UNCLEAR: &str = r#"{"answer":"unclear","reason":"unsure"}"#;
const REFUSED: &str = r#"{"answer":"refused","reason":"no room"}"#;

/// By the destination that is [`PREPARED`].
const ABORTED: &str =
    r#"{"answer":"aborted","incarnation":"000102030405060708090a0b0c0d0e0f","cause":"no room"}"#;

/// By another one.
const ABORTED_ELSEWHERE: &str =
    r#"{"answer":"aborted","incarnation":"ffffffffffffffffffffffffffffffff","cause":"no room"}"#;
const UNKNOWN: &str = r#"{"answer":"unknown","incarnation":"ffffffffffffffffffffffffffffffff","reason":"never seen"}"#;

#[test]
fn answers_out_of_turn() {
    let synced = [1, 3].map(|round| format!(r#"{{"answer":"synced","round":{round}}}"#));
    let [synced_1, synced_3] = synced.each_ref().map(String::as_str);
    let rest = [
        STARTING, RUNNING, RECEIVING, ENDED, UNCLEAR, UNKNOWN, synced_3,
    ];
    for (step, more) in [
        (Greeted, &[synced_1, LOADED][..]),
        (Filled, &[PREPARED, PREPARING, LOADED]),
        (Complete, &[PREPARED, PREPARING, LOADED, synced_1]),
        (Ready, &[PREPARED, PREPARING, synced_1]),
    ] {
        for answer in rest.iter().chain(more) {
            let outcome = Here("unexpected message from the destination: …");
            check(answer, step, &[Say(answer)], outcome);
        }
    }
}

#[test]
fn failures_before_the_hand_over() {
    let aborted = "the destination has failed: no room";
    let refused = "the destination refuses the guest: no room";
    let malformed = "control connection to the destination: malformed control message: …";
    let too_long = "control connection to the destination: a message of more than 1048576 bytes";
    let unknown = message(r#"{"answer":"yes"}"#);
    let (no_json, long) = (message("accepted"), vec![b'x'; MAX_LINE]);
    for step in BEFORE {
        let end = match step {
            Greeted => "the destination has closed the control connection without an answer: …",
            _ => "control connection to the destination: the connection was closed by the peer",
        };
        let cut = match step {
            Greeted => {
                "the destination answers as one that expects a session, not plain connections"
            }
            _ => {
                "control connection to the destination: the connection ended in the middle of a message"
            }
        };
        #[rustfmt::skip]
        let cases = [
            ("aborted", Say(ABORTED), aborted),
            ("refused", Say(REFUSED), refused),
            ("no JSON", Write(&no_json), malformed),
            ("an unknown message", Write(&unknown), malformed),
            ("a long line", Write(&long), too_long),
            ("half a message", Write(br#"{"answer""#), cut),
            ("the end", Write(b""), end),
        ];
        for (name, play, error) in cases {
            check(name, step, &[play], Here(error));
        }
    }
    for version in [0, 2, 3] {
        let prepared = PREPARED.replace(":1,", &format!(":{version},"));
        let error = format!(
            "the destination has chosen a version of the protocol that was not offered: …, the other side {version} to {version}: …"
        );
        check("another version", Greeted, &[Say(&prepared)], Here(&error));
    }
}

/// It takes the source for a stranger, and closes the connection.
#[test]
fn a_destination_that_closes_the_connection_at_once() {
    for reads in [true, false] {
        let result = run("no answer", &|_| {}, 0, |listener| {
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
    run("preparing", &|_| {}, 0, |listener| {
        let mut fake = Fake::at(listener, Greeted);
        for _ in 0..10 {
            fake.say(PREPARING);
        }
        fake.advance(InCharge);
        fake.say(RUNNING);
        assert_eq!(fake.receive(), "settled");
    })
    .unwrap();
}

#[test]
fn random_answers() {
    for run_number in 0..30 {
        let mut rng = Rng::new(run_number);
        let step = rng.pick(&BEFORE);
        let count = usize::try_from(1 + rng.below(300)).unwrap();
        let bytes = rng.bytes(count);
        // Without a line they may be a session's.
        let error = match step {
            Greeted if !bytes.contains(&b'\n') => "the destination answers as one that …",
            _ => "control connection to the destination: …",
        };
        check("random bytes", step, &[Write(&bytes)], Here(error));
    }
}

/// While the guest runs, the source waits for the stall timeout. While it is paused, only until that is too long.
#[test]
fn destinations_that_do_not_answer() {
    let patient = |config: &mut SourceConfig| config.downtime_max = Duration::from_secs(60);
    let short = |config: &mut SourceConfig| {
        // Enough for a busy host to get as far as the destination stops.
        config.downtime_max = Duration::from_secs(4);
        config.stall_timeout = PATIENT;
    };
    let too_long = "the destination has not received all of the guest within 4s of downtime";
    thread::scope(|scope| {
        for (step, what) in [
            (Filled, "received a round"),
            (Complete, "received a round"),
            (Ready, "loaded the guest"),
        ] {
            scope.spawn(move || {
                let error = format!("the destination has not {what} within …");
                check_with(&patient, "silence", step, &[Expect("abort")], Here(&error));
            });
        }
        for step in [Complete, Ready] {
            scope.spawn(move || {
                check_with(&short, "silence", step, &[Expect("abort")], Here(too_long));
            });
        }
        // More than the sockets hold.
        scope.spawn(move || {
            let result = run("state", &short, 64 << 20, |listener| {
                let mut fake = Fake::at(listener, Complete);
                fake.say(r#"{"answer":"synced","round":2}"#);
                let mut word = fake.receive();
                if word == "state" {
                    // Behind the state there is no room for it.
                    fake.control = answer_control(fake.listener.as_ref().unwrap());
                    word = fake.receive();
                }
                assert_eq!(word, "abort");
            });
            assert_eq!(chain(&result.unwrap_err()), too_long);
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
        .run(plain(&address.parse().unwrap()), &mut vmm)
        .unwrap_err();
    assert!(matches!(error, SourceError::Dial(_)), "{error}");
    assert!(vmm.calls.is_empty());
}

/// What the destination says after `commit` decides where the guest is, and only the destination that was prepared decides.
#[test]
fn after_the_hand_over() {
    let no_room = Here("the destination has failed: no room");
    let ended = Here("the destination has failed: …has ended…");
    let in_doubt = InDoubt("the destination was told to run the guest, …");
    let lost = Lost("…: the guest is lost, or to be resumed here by hand at the state before");
    #[rustfmt::skip]
    let cases = [
        // `running` proves more than `starting`.
        ("running at once", &[Say(RUNNING), Expect("settled")][..], There),
        ("not sure yet: it is asked again", &[Say(RECEIVING), Expect("commit"), Say(UNCLEAR), Expect("commit"), Say(RUNNING), Expect("settled")], There),
        ("it cannot run the guest", &[Say(ABORTED), Expect("abort")], no_room),
        ("the same, after a cut", &[Cut, Say(ABORTED), Expect("abort")], no_room),
        ("it could not run the guest", &[Say(STARTING), Say(ABORTED), Expect("abort")], no_room),
        ("the same, after a cut", &[Say(STARTING), Cut, Say(ABORTED), Expect("abort")], no_room),
        // It listens as long as it may run the guest, and reports so before it does.
        ("it ends", &[End], ended),
        ("it ends when it is asked again", &[Cut, End], ended),
        // The guest has come, and is gone with its VMM.
        ("it ends with the guest", &[Say(STARTING), End], lost),
        ("the same, after a cut", &[Cut, Say(STARTING), End], lost),
        ("the guest has ended", &[Say(STARTING), Say(ENDED), Expect("settled")], Lost("killed: …")),
        // Another destination cannot prove that the guest has never run.
        ("aborted elsewhere", &[Say(ABORTED_ELSEWHERE)], in_doubt),
        ("the same, after a cut", &[Cut, Say(ABORTED_ELSEWHERE)], in_doubt),
        ("aborted elsewhere after starting", &[Say(STARTING), Say(ABORTED_ELSEWHERE)], in_doubt),
        ("the same, after a cut", &[Say(STARTING), Cut, Say(ABORTED_ELSEWHERE)], in_doubt),
        ("unknown elsewhere", &[Say(UNKNOWN)], in_doubt),
        ("the same, after a cut", &[Cut, Say(UNKNOWN)], in_doubt),
        ("unknown elsewhere after starting", &[Say(STARTING), Say(UNKNOWN)], in_doubt),
        ("the same, after a cut", &[Say(STARTING), Cut, Say(UNKNOWN)], in_doubt),
    ];
    for (name, plays, outcome) in cases {
        check(name, InCharge, plays, outcome);
    }
    // A tunnel may refuse connections in the name of a destination that runs the guest.
    let refused = InDoubt("…connection refused…");
    check_with(
        &|_| {},
        "it ends behind a tunnel",
        InCharge,
        &[End],
        refused,
    );
    let started = [Say(STARTING), End];
    check_with(
        &|_| {},
        "it ends behind a tunnel",
        InCharge,
        &started,
        refused,
    );
    // An answer may have been lost on a connection that the source has given up.
    let settings = |config: &mut SourceConfig| {
        config.direct_link = true;
        config.settle_time = Duration::from_secs(8);
    };
    let result = run("silent before it ended", &settings, 0, |listener| {
        let mut fake = Fake::at(listener, InCharge);
        fake.is_asked_again();
        fake.end();
    });
    assert!(
        matches!(result, Err(SourceError::InDoubt { .. })),
        "{result:?}"
    );
}

/// From `commit` on, the guest resumes here only if the destination says that it will not run it.
#[test]
fn nonsense_after_commit_is_not_an_answer() {
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
        // An answer follows.
        run(&name, &|config| config.direct_link = true, 0, |listener| {
            let mut fake = Fake::at(listener, InCharge);
            for _ in 0..2 {
                fake.control.write_all(bytes).unwrap();
                fake.control.shutdown(Shutdown::Write).unwrap();
                fake.is_asked_again();
            }
            fake.say(r#"{"answer":"running"}"#);
            assert_eq!(fake.receive(), "settled");
        })
        .unwrap();
    }
    // No answer follows.
    thread::scope(|scope| {
        for bytes in &nonsense {
            scope.spawn(move || {
                let name = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
                let result = run(&name, &|config| config.direct_link = true, 0, |listener| {
                    let mut fake = Fake::at(listener, InCharge);
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

/// A destination that the test plays.
struct Fake {
    listener: Option<TcpListener>,
    control: TcpStream,
    channels: Vec<TcpStream>,
}

impl Fake {
    /// A destination that follows the protocol up to `step`.
    fn at(listener: TcpListener, step: Step) -> Self {
        let control = answer_control(&listener);
        let mut fake = Self {
            listener: Some(listener),
            control,
            channels: Vec::new(),
        };
        assert_eq!(fake.receive(), "prepare");
        fake.advance(step);
        fake
    }

    /// Follows the protocol from [`Greeted`] up to `step`.
    fn advance(&mut self, step: Step) {
        if step >= Filled {
            self.say(PREPARED);
            for _ in 0..2 {
                let (mut channel, _) = self.listener.as_ref().unwrap().accept().unwrap();
                channel.read_exact(&mut [0; 64]).unwrap();
                self.channels.push(channel);
            }
            self.take_round(1);
        }
        if step >= Complete {
            self.say(r#"{"answer":"synced","round":1}"#);
            self.take_round(2);
        }
        if step >= Ready {
            self.say(r#"{"answer":"synced","round":2}"#);
            assert_eq!(self.receive(), "state");
            let mut state = [0; 5];
            self.control.read_exact(&mut state).unwrap();
            assert_eq!(&state, b"state");
        }
        if step >= InCharge {
            self.say(LOADED);
            assert_eq!(self.receive(), "commit");
        }
    }

    fn play_all(mut self, plays: &[Play<'_>]) {
        let mut ends_with_bytes = false;
        for play in plays {
            match play {
                Say(json) => self.say(json),
                Write(bytes) => {
                    self.control.write_all(bytes).unwrap();
                    ends_with_bytes = true;
                }
                Expect(name) => assert_eq!(self.receive(), *name),
                Cut => {
                    self.control.shutdown(Shutdown::Both).unwrap();
                    self.is_asked_again();
                }
                End => return self.end(),
            }
        }
        if ends_with_bytes {
            let _ = self.control.shutdown(Shutdown::Write);
        }
        if !matches!(plays.last(), Some(Expect(_))) && self.channels.is_empty() || ends_with_bytes {
            // Until the source hangs up.
            let _ = self.control.read_to_end(&mut Vec::new());
        }
    }

    fn say(&mut self, json: &str) {
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

fn answer_control(listener: &TcpListener) -> TcpStream {
    let (mut control, _) = listener.accept().unwrap();
    let mut bytes = [0; 24];
    control.read_exact(&mut bytes).unwrap();
    assert!(bytes.starts_with(b"VAMOOSEC"));
    control
}
