use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

/// A middlebox, and connections through it.
struct Bench {
    middlebox: Middlebox,
    listener: TcpListener,
    /// Diallers and what the listener has accepted, in order of arrival.
    pairs: Vec<[TcpStream; 2]>,
}

impl Bench {
    fn new(connections: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut bench = Self {
            middlebox: Middlebox::new(listener.local_addr().unwrap()).unwrap(),
            listener,
            pairs: Vec::new(),
        };
        (0..connections).for_each(|_| bench.connect());
        bench
    }

    fn connect(&mut self) {
        let dialler = self.dial().unwrap();
        let (accepted, _) = self.listener.accept().unwrap();
        accepted.set_read_timeout(Some(LIMIT)).unwrap();
        self.pairs.push([dialler, accepted]);
        let count = self.pairs.len();
        wait_for_connections(&self.middlebox, count);
    }

    fn dial(&self) -> io::Result<TcpStream> {
        let dialler = TcpStream::connect(self.middlebox.address())?;
        dialler.set_read_timeout(Some(LIMIT))?;
        Ok(dialler)
    }

    /// The ends of a connection that send and receive.
    fn ends(&self, number: usize, direction: Direction) -> (&TcpStream, &TcpStream) {
        let [dialler, accepted] = &self.pairs[number];
        match direction {
            Direction::ToListener => (dialler, accepted),
            Direction::ToDialler => (accepted, dialler),
        }
    }

    fn traffic(&self, number: usize, direction: Direction) -> Traffic {
        self.middlebox.connections()[number].traffic(direction)
    }

    fn status(&self, number: usize) -> Status {
        self.middlebox.connections()[number].status
    }

    #[track_caller]
    fn passes(&self, number: usize, direction: Direction) {
        let (mut from, to) = self.ends(number, direction);
        from.write_all(b"passes").unwrap();
        expect(to, b"passes");
    }

    #[track_caller]
    fn drops(&self, number: usize, direction: Direction) {
        let (mut from, to) = self.ends(number, direction);
        let before = self.traffic(number, direction);
        from.write_all(b"dropped").unwrap();
        let dropped =
            |known: &[Connection]| known[number].traffic(direction).dropped == before.dropped + 7;
        self.middlebox.wait_until(LIMIT, dropped).unwrap();
        assert_eq!(self.traffic(number, direction).passed, before.passed);
        expect_nothing(to);
    }

    fn apply_one_way(&self, direction: Direction, flow: Flow) {
        let change = Change::OneWay(direction, flow);
        assert_eq!(self.middlebox.apply(Which::One(0), change), 1);
    }
}

fn wait_for_connections(middlebox: &Middlebox, count: usize) {
    let joined = |known: &[Connection]| {
        let joined = known.iter().filter(|it| it.status != Status::Dialling);
        joined.count() >= count
    };
    middlebox.wait_until(LIMIT, joined).unwrap();
}

#[track_caller]
fn expect(mut stream: &TcpStream, expected: &[u8]) {
    let mut read = vec![0; expected.len()];
    stream.read_exact(&mut read).unwrap();
    assert_eq!(read, expected);
}

/// Nothing has come, not even an end.
#[track_caller]
fn expect_nothing(mut stream: &TcpStream) {
    stream.set_nonblocking(true).unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
}

#[track_caller]
fn expect_reset(mut stream: &TcpStream) {
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[track_caller]
fn expect_end(mut stream: &TcpStream) {
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

/// A middlebox may have thousands of connections, one after the other.
#[test]
fn a_connection_that_has_ended_holds_no_descriptors() {
    let mut bench = Bench::new(1);
    bench.pairs.clear();
    let ended = |known: &[Connection]| known[0].status == Status::Closed;
    bench.middlebox.wait_until(LIMIT, ended).unwrap();
    let state = bench.middlebox.0.state.lock();
    let entry = &state.entries[0];
    assert!(entry.wake.is_none() && entry.far.is_none());
}

#[test]
fn bytes_and_ends_pass_both_ways() {
    let bench = Bench::new(2);
    for direction in Direction::BOTH {
        let (mut from, to) = bench.ends(1, direction);
        let mut sent = vec![0; 5_000_000];
        fastrand::Rng::with_seed(1).fill(&mut sent);
        let mut received = Vec::new();
        thread::scope(|scope| {
            let sent = &sent;
            scope.spawn(move || {
                from.write_all(sent).unwrap();
                from.shutdown(Shutdown::Write).unwrap();
            });
            let mut to = to;
            to.read_to_end(&mut received).unwrap();
        });
        assert!(sent == received);
        let traffic = Traffic {
            passed: sent.len() as u64,
            ..Traffic::default()
        };
        assert_eq!(bench.traffic(1, direction), traffic);
        assert_eq!(bench.traffic(0, direction), Traffic::default());
    }
    let closed = |known: &[Connection]| known[1].status == Status::Closed;
    bench.middlebox.wait_until(LIMIT, closed).unwrap();
    assert_eq!(bench.status(0), Status::Open);
    bench
        .middlebox
        .wait_for_bytes(Direction::ToDialler, 5_000_000, LIMIT)
        .unwrap();
}

#[test]
fn an_address_refuses_and_comes_back() {
    let mut bench = Bench::new(1);
    for _ in 0..3 {
        bench.middlebox.admit(Admission::Refuse).unwrap();
        assert_eq!(
            bench.dial().unwrap_err().kind(),
            ErrorKind::ConnectionRefused
        );
        // What is open stays so.
        bench.passes(0, Direction::ToListener);
        bench.middlebox.admit(Admission::Pass).unwrap();
        bench.connect();
        bench.passes(bench.pairs.len() - 1, Direction::ToDialler);
    }
}

#[test]
fn a_silent_address_accepts_and_the_listener_learns_nothing() {
    let bench = Bench::new(0);
    bench.middlebox.admit(Admission::Silence).unwrap();
    let mut silent = bench.dial().unwrap();
    silent.write_all(b"hello").unwrap();
    let dropped =
        |known: &[Connection]| known.first().is_some_and(|it| it.to_listener.dropped == 5);
    bench.middlebox.wait_until(LIMIT, dropped).unwrap();
    bench.middlebox.admit(Admission::Pass).unwrap();
    bench.middlebox.apply(Which::All, Change::Flow(Flow::Pass));
    expect_nothing(&silent);
    bench.listener.set_nonblocking(true).unwrap();
    assert_eq!(
        bench.listener.accept().unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
    bench.listener.set_nonblocking(false).unwrap();
    let mut heard = bench.dial().unwrap();
    let (accepted, _) = bench.listener.accept().unwrap();
    heard.write_all(b"heard").unwrap();
    expect(&accepted, b"heard");
    assert_eq!(bench.middlebox.apply(Which::One(0), Change::Reset), 1);
    expect_reset(&silent);
}

#[test]
fn a_listener_that_is_not_there_resets() {
    let nobody = Port::new().unwrap();
    let middlebox = Middlebox::new(nobody.address()).unwrap();
    expect_reset(&TcpStream::connect(middlebox.address()).unwrap());
    wait_for_connections(&middlebox, 1);
    assert_eq!(middlebox.connections()[0].status, Status::Reset);
}

#[test]
fn one_or_all_are_reset_at_both_ends() {
    let bench = Bench::new(3);
    assert_eq!(bench.middlebox.apply(Which::One(1), Change::Reset), 1);
    bench.pairs[1].iter().for_each(expect_reset);
    bench.passes(0, Direction::ToListener);
    bench.passes(2, Direction::ToDialler);
    assert_eq!(bench.middlebox.apply(Which::All, Change::Reset), 2);
    for number in [0, 2] {
        bench.pairs[number].iter().for_each(expect_reset);
    }
    assert_eq!(bench.status(2), Status::Reset);
    assert_eq!(bench.middlebox.apply(Which::All, Change::Reset), 0);
}

#[test]
fn one_or_all_are_closed_at_both_ends() {
    let bench = Bench::new(3);
    assert_eq!(bench.middlebox.apply(Which::One(1), Change::Close), 1);
    for mut end in &bench.pairs[1] {
        // What is sent afterwards goes nowhere, and makes no reset of it.
        end.write_all(b"late").unwrap();
        expect_end(end);
    }
    bench.passes(0, Direction::ToDialler);
    assert_eq!(bench.middlebox.apply(Which::All, Change::Close), 2);
    bench.pairs.iter().flatten().for_each(expect_end);
    assert_eq!(bench.status(0), Status::Closed);
    assert_eq!(bench.traffic(1, Direction::ToListener).passed, 0);
}

#[test]
fn a_silence_drops_bytes_both_ways_for_good() {
    let bench = Bench::new(2);
    bench.passes(0, Direction::ToListener);
    bench
        .middlebox
        .apply(Which::One(0), Change::Flow(Flow::Drop));
    Direction::BOTH
        .iter()
        .for_each(|&direction| bench.drops(0, direction));
    Direction::BOTH
        .iter()
        .for_each(|&direction| bench.passes(1, direction));
    // A hole in a stream cannot be made good.
    bench
        .middlebox
        .apply(Which::One(0), Change::Flow(Flow::Pass));
    Direction::BOTH
        .iter()
        .for_each(|&direction| bench.drops(0, direction));
    assert_eq!(bench.status(0), Status::Open);
}

#[test]
fn a_silence_that_meets_no_byte_ends() {
    let bench = Bench::new(1);
    bench.middlebox.apply(Which::All, Change::Flow(Flow::Drop));
    bench.middlebox.apply(Which::All, Change::Flow(Flow::Pass));
    Direction::BOTH
        .iter()
        .for_each(|&direction| bench.passes(0, direction));
}

#[test]
fn a_half_open_connection_passes_the_other_way() {
    for direction in Direction::BOTH {
        let bench = Bench::new(1);
        bench.apply_one_way(direction, Flow::Drop);
        bench.drops(0, direction);
        bench.passes(0, direction.reverse());
        bench.drops(0, direction);
    }
}

#[test]
fn a_silence_hides_the_end_of_the_sender() {
    for direction in Direction::BOTH {
        let bench = Bench::new(1);
        bench.apply_one_way(direction, Flow::Drop);
        let (from, to) = bench.ends(0, direction);
        bench.drops(0, direction);
        from.shutdown(Shutdown::Write).unwrap();
        bench.passes(0, direction.reverse());
        expect_nothing(to);
    }
}

#[test]
fn a_silence_hides_a_reset() {
    for direction in Direction::BOTH {
        let mut bench = Bench::new(1);
        bench.middlebox.apply(Which::All, Change::Flow(Flow::Drop));
        let (from, mut to) = bench.ends(0, direction);
        reset(from);
        to.write_all(b"into the void").unwrap();
        let dropped = |known: &[Connection]| known[0].traffic(direction.reverse()).dropped == 13;
        bench.middlebox.wait_until(LIMIT, dropped).unwrap();
        expect_nothing(to);
        // The other direction passes: its bytes meet the reset, which still is not told.
        bench.connect();
        let change = Change::OneWay(direction, Flow::Drop);
        bench.middlebox.apply(Which::One(1), change);
        bench.drops(1, direction);
        let (from, mut to) = bench.ends(1, direction);
        reset(from);
        while bench.traffic(1, direction.reverse()).dropped == 0 {
            to.write_all(b"into the void").unwrap();
        }
        expect_nothing(to);
    }
}

#[test]
fn what_is_held_comes_late() {
    for direction in Direction::BOTH {
        let bench = Bench::new(1);
        bench.apply_one_way(direction, Flow::Hold);
        let (mut from, mut to) = bench.ends(0, direction);
        from.write_all(b"late").unwrap();
        from.shutdown(Shutdown::Write).unwrap();
        bench.passes(0, direction.reverse());
        expect_nothing(to);
        assert_eq!(bench.traffic(0, direction), Traffic::default());
        bench.apply_one_way(direction, Flow::Pass);
        let mut received = Vec::new();
        to.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"late");
    }
}

#[test]
fn what_is_held_is_dropped_by_a_cut() {
    for direction in Direction::BOTH {
        let bench = Bench::new(1);
        let (mut from, to) = bench.ends(0, direction);
        bench.passes(0, direction);
        bench.apply_one_way(direction, Flow::Hold);
        from.write_all(b"too late").unwrap();
        bench.middlebox.apply(Which::All, Change::Reset);
        expect_reset(to);
        assert_eq!(bench.traffic(0, direction).passed, 6);
    }
}

#[test]
fn a_cut_at_a_byte_is_there() {
    for direction in Direction::BOTH {
        for change in [Change::Reset, Change::Close, Change::Flow(Flow::Drop)] {
            let bench = Bench::new(2);
            let mark = Mark {
                connection: 1,
                direction,
                bytes: 5,
            };
            bench.middlebox.apply_at(mark, Which::One(1), change);
            bench.passes(0, direction);
            let (mut from, mut to) = bench.ends(1, direction);
            from.write_all(b"before and after").unwrap();
            bench.middlebox.wait_for_changes(LIMIT).unwrap();
            assert_eq!(bench.traffic(1, direction).passed, 5);
            bench.passes(0, direction);
            if change == Change::Reset {
                // It may have overtaken the bytes.
                let mut received = Vec::new();
                let error = to.read_to_end(&mut received).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                assert!(b"befor".starts_with(&received[..]));
            } else {
                expect(to, b"befor");
            }
            match change {
                Change::Close => expect_end(to),
                Change::Reset => expect_reset_or_end(from),
                _ => expect_nothing(to),
            }
        }
    }
}

/// Who has seen the reset when it wrote reads an end.
fn expect_reset_or_end(mut stream: &TcpStream) {
    assert!(!matches!(stream.read(&mut [0]), Ok(1..)));
}

#[test]
fn a_byte_of_one_connection_cuts_all() {
    let bench = Bench::new(3);
    let mark = Mark {
        connection: 2,
        direction: Direction::ToDialler,
        bytes: 3,
    };
    bench.middlebox.apply_at(mark, Which::All, Change::Reset);
    let (mut from, _) = bench.ends(2, Direction::ToDialler);
    from.write_all(b"123456").unwrap();
    bench.middlebox.wait_for_changes(LIMIT).unwrap();
    bench.pairs[..2].iter().flatten().for_each(expect_reset);
}

#[test]
fn a_mark_may_be_of_a_connection_to_come_or_passed() {
    let mut bench = Bench::new(0);
    let mark = |connection, bytes| Mark {
        connection,
        direction: Direction::ToListener,
        bytes,
    };
    bench
        .middlebox
        .apply_at(mark(0, 0), Which::All, Change::Flow(Flow::Hold));
    assert!(bench.middlebox.wait_for_changes(Duration::ZERO).is_err());
    bench.connect();
    bench.middlebox.wait_for_changes(LIMIT).unwrap();
    let (mut from, to) = bench.ends(0, Direction::ToListener);
    from.write_all(b"1234").unwrap();
    bench.middlebox.apply(Which::All, Change::Flow(Flow::Pass));
    expect(to, b"1234");
    bench
        .middlebox
        .apply_at(mark(0, 2), Which::All, Change::Close);
    bench.middlebox.wait_for_changes(Duration::ZERO).unwrap();
    assert_eq!(bench.status(0), Status::Closed);
}

#[test]
fn chosen_bits_are_flipped() {
    for direction in Direction::BOTH {
        let bench = Bench::new(2);
        bench.passes(1, direction);
        bench.middlebox.record();
        for (byte, bit) in [(2, 0), (5, 7), (5, 1)] {
            let mark = Mark {
                connection: 1,
                direction,
                bytes: bench.traffic(1, direction).passed + byte,
            };
            bench.middlebox.flip_at(mark, bit);
        }
        let (mut from, to) = bench.ends(1, direction);
        from.write_all(&[0; 9]).unwrap();
        expect(to, &[0, 0, 1, 0, 0, 0x82, 0, 0, 0]);
        assert_eq!(bench.middlebox.recorded(1, direction), [0; 9]);
        assert!(bench.middlebox.recorded(0, direction).is_empty());
        bench.passes(0, direction);
        bench.passes(1, direction);
        let flipped = [(8, 0), (11, 7), (11, 1)].map(|(byte, bit)| Flipped {
            connection: 1,
            direction,
            byte,
            bit,
        });
        assert_eq!(bench.middlebox.flips(), flipped);
    }
}

#[test]
fn bits_of_connections_to_come_are_flipped() {
    for direction in Direction::BOTH {
        let mut bench = Bench::new(1);
        let mark = |connection, bytes| Mark {
            connection,
            direction,
            bytes,
        };
        bench.middlebox.flip_at(mark(1, 2), 3);
        bench.middlebox.flip_at(mark(2, 0), 0);
        bench.passes(0, direction);
        bench.connect();
        let (mut from, to) = bench.ends(1, direction);
        from.write_all(&[0; 4]).unwrap();
        expect(to, &[0, 0, 8, 0]);
        // Too late.
        bench.middlebox.flip_at(mark(1, 3), 0);
        bench.passes(1, direction);
        assert_eq!(bench.middlebox.flips().len(), 1);
    }
}

#[test]
fn dropping_ends_everything() {
    let bench = Bench::new(2);
    bench
        .middlebox
        .apply(Which::One(1), Change::Flow(Flow::Drop));
    bench.middlebox.admit(Admission::Silence).unwrap();
    let silent = bench.dial().unwrap();
    wait_for_connections(&bench.middlebox, 3);
    let address = bench.middlebox.address();
    drop(bench.middlebox);
    bench.pairs.iter().flatten().for_each(expect_reset);
    expect_reset(&silent);
    let error = TcpStream::connect(address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

/// Passes lines, and notes them once they have passed.
#[derive(Default)]
struct Lines(std::sync::Mutex<(Vec<u8>, Vec<String>)>);

impl Observer for Lines {
    fn piece(&self, _: &Handle, _: usize, direction: Direction, bytes: &[u8]) -> usize {
        if direction == Direction::ToDialler {
            return bytes.len();
        }
        let mut seen = self.0.lock().unwrap();
        let passed = std::mem::take(&mut seen.0);
        if !passed.is_empty() {
            seen.1.push(String::from_utf8(passed).unwrap());
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let len = end.map_or(0, |end| end + 1);
        seen.0 = bytes[..len].to_vec();
        len
    }
}

#[test]
fn observer_decides_what_passes_in_pieces() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let lines = Arc::<Lines>::default();
    let middlebox = Middlebox::observed(listener.local_addr().unwrap(), lines.clone()).unwrap();
    let mut dialler = TcpStream::connect(middlebox.address()).unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    dialler.write_all(b"one\ntwo\nth").unwrap();
    let mut read = [0; 8];
    accepted.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"one\ntwo\n");
    accepted.write_all(b"back").unwrap();
    dialler.read_exact(&mut read[..4]).unwrap();
    assert_eq!(&read[..4], b"back");
    let passed = middlebox.connections()[0].to_listener.passed;
    assert_eq!(passed, 8, "an incomplete line waits");
    // The rest passes when the sender ends.
    dialler.write_all(b"ree\nfo").unwrap();
    dialler.shutdown(Shutdown::Write).unwrap();
    let mut rest = String::new();
    accepted.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "three\nfo");
    assert_eq!(lines.0.lock().unwrap().1, ["one\n", "two\n", "three\n"]);
}
