//! What the link to a server carries: data streams that the server discards. A prediction measures for about a second
//! ([`measure`]), a migration with method auto for a few milliseconds ([`SpeedTest`]), while the QEMUs are compared.

use std::{
    io,
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

use handover::{AttemptId, ConnectionKind};
use vamoose_link::{DialError, Limit, Opening, Pacer, Session, Stream};

use crate::control::preamble;

/// A measured link.
#[derive(Clone, Copy, Debug)]
pub struct LinkSpeed {
    /// Bytes per second.
    pub rate: f64,
    /// Round-trip time, while nothing was sent.
    pub round_trip: Duration,
}

/// More streams than this do not carry more, and the server accepts few.
const MOST_STREAMS: u8 = 4;
/// Time for the connections to find their speed.
const WARM_UP: Duration = Duration::from_millis(300);
const MEASURED: Duration = Duration::from_millis(900);
/// Longest measurement of a link on which little arrives.
const LONGEST: Duration = Duration::from_secs(3);
const SAMPLED_EVERY: Duration = Duration::from_millis(4);
/// Rounds of a test: bytes, and the time within which all of them have to arrive. The third round uses up what a shaped link of
/// 1 Gbit/s carries as a burst, and the fourth one fails there.
const FIRST_ROUNDS: [(usize, Duration); 4] = [
    (16 << 10, Duration::from_millis(4)),
    (128 << 10, Duration::from_millis(4)),
    (512 << 10, Duration::from_millis(4)),
    (1 << 20, Duration::from_millis(3)),
];
/// In this time, one thread encodes about as many bytes of pages: 3.4 Gbit/s. With n threads, the round has the nth part of the time.
const LAST_ROUND: (usize, Duration) = (4 << 20, Duration::from_millis(10));
/// How long a migration waits for the test, when all else is ready.
const LONGEST_WAIT_FOR_TEST: Duration = Duration::from_millis(12);
/// As large as a frame, and noise, which nothing on the way can compress.
const PIECE: usize = 128 << 10;

/// Measures the link of a `session` with as many streams as a migration has channels, four at most, within this bandwidth limit. `None`
/// if the server accepts nothing.
pub(super) fn measure(
    session: &Session,
    attempt: AttemptId,
    channels: u8,
    max_bandwidth: Option<NonZeroU64>,
) -> Result<Option<LinkSpeed>, DialError> {
    let round_trip = session.round_trip();
    let streams = session.open_ahead(channels.min(MOST_STREAMS).into());
    let streams = streams
        .into_iter()
        .map(|stream| Ok(Arc::new(stream.wait()?)));
    let streams = streams.collect::<Result<Vec<_>, DialError>>()?;
    let pacer = Pacer::new(max_bandwidth, &Limit::default());
    pacer.follow(session.clone());
    let noise = noise();
    thread::scope(|scope| {
        for stream in &streams {
            let (pacer, noise) = (&pacer, &noise);
            scope.spawn(move || send(stream, attempt, pacer, noise));
        }
        let rate = watch(|| session.paths().iter().map(|path| path.delivered).sum());
        streams.iter().for_each(|stream| stream.shut_down());
        pacer.close();
        Ok(rate.map(|rate| LinkSpeed { rate, round_trip }))
    })
}

/// Sends until the stream is shut down, or the server closes it.
fn send(stream: &Stream, attempt: AttemptId, pacer: &Pacer, noise: &[u8]) {
    let preamble = preamble(ConnectionKind::Measure, attempt);
    let mut sent = stream.write_both(&preamble, &[]);
    while sent.is_ok() {
        pacer.wait_for(noise.len());
        sent = stream.write_both(noise, &[]);
    }
}

/// A test whether the link is so fast that the sender's cores cannot fill it with encoded pages.
pub(super) struct SpeedTest {
    told: Receiver<bool>,
    is_over: Arc<AtomicBool>,
}

impl SpeedTest {
    /// Sends noise for some milliseconds at most. `encoders` threads can encode at once. Without effect if the system refuses a thread.
    pub(super) fn begin(session: &Session, attempt: AttemptId, encoders: f64) -> Self {
        let (tell, told) = mpsc::channel();
        let is_over = Arc::<AtomicBool>::default();
        let ended = is_over.clone();
        // Before the streams of the channels, as a server passes on streams in their order.
        let stream = session.open_ahead(1).pop();
        let has_store = session.has_store();
        let test = move || {
            let Some(Ok(stream)) = stream.map(Opening::wait) else {
                return;
            };
            // With a page store, auto encodes all that shrinks.
            let is_fast =
                !has_store && is_fast(&stream, attempt, encoders, &ended).unwrap_or(false);
            stream.shut_down();
            // Nobody listens if the test has taken too long.
            let _ = tell.send(is_fast);
        };
        let _ = thread::Builder::new().spawn(test);
        Self { told, is_over }
    }

    /// Whether the link is fast. False if that does not show soon.
    pub(super) fn is_fast(&self) -> bool {
        self.told
            .recv_timeout(LONGEST_WAIT_FOR_TEST)
            .unwrap_or(false)
    }
}

impl Drop for SpeedTest {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn is_fast(
    stream: &Stream,
    attempt: AttemptId,
    encoders: f64,
    is_over: &AtomicBool,
) -> io::Result<bool> {
    stream.write_both(&preamble(ConnectionKind::Measure, attempt), &[])?;
    let noise = noise();
    all_arrive(encoders, |bytes, within| {
        let (began, mut left) = (Instant::now(), bytes);
        while left > 0 {
            if is_over.load(Ordering::Relaxed) || began.elapsed() > within {
                return Ok(false);
            }
            let piece = &noise[..noise.len().min(left)];
            stream.write_both(piece, &[])?;
            left -= piece.len();
        }
        Ok(stream.drain(within.saturating_sub(began.elapsed())))
    })
}

/// Whether some noise arrives soon, and then more and more of it, so that a slow link carries little. `arrive` sends some bytes, and
/// says whether all of them have arrived within a time.
fn all_arrive(
    encoders: f64,
    mut arrive: impl FnMut(usize, Duration) -> io::Result<bool>,
) -> io::Result<bool> {
    let last = LAST_ROUND.1.div_f64(encoders.max(1.0));
    for (bytes, within) in FIRST_ROUNDS.into_iter().chain([(LAST_ROUND.0, last)]) {
        if !arrive(bytes, within)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The rate at which `delivered` grows.
fn watch(delivered: impl Fn() -> u64) -> Option<f64> {
    let (began, mut steps) = (Instant::now(), Steps::default());
    while steps.wait(began.elapsed()) {
        thread::sleep(SAMPLED_EVERY);
        steps.saw(began.elapsed(), delivered());
    }
    steps.rate()
}

/// What has been delivered, from one change to another: it changes in steps, which are rare on a slow link. Times are since the
/// beginning.
#[derive(Default)]
struct Steps {
    now: u64,
    first: Option<(Duration, u64)>,
    last: Option<(Duration, u64)>,
}

impl Steps {
    /// Whether to go on.
    fn wait(&self, time: Duration) -> bool {
        time < WARM_UP + MEASURED || self.last.is_none() && time < LONGEST
    }

    fn saw(&mut self, time: Duration, delivered: u64) {
        let is_step = delivered != self.now && time >= WARM_UP;
        self.now = delivered;
        match self.first {
            _ if !is_step => {}
            None => self.first = Some((time, delivered)),
            Some(_) => self.last = Some((time, delivered)),
        }
    }

    fn rate(&self) -> Option<f64> {
        let ((since, before), (until, after)) = self.first.zip(self.last)?;
        // A path that is given up takes its count with it.
        let bytes = after.checked_sub(before)?;
        Some(bytes as f64 / (until - since).as_secs_f64())
    }
}

fn noise() -> Vec<u8> {
    let mut state = 1_u64;
    let words = (0..PIECE / 8).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    });
    words.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rate, of what was delivered at these milliseconds.
    fn rate(seen: &[(u64, u64)]) -> Option<f64> {
        let mut steps = Steps::default();
        for (millis, delivered) in seen {
            let time = Duration::from_millis(*millis);
            assert!(steps.wait(time), "{seen:?} at {millis} ms");
            steps.saw(time, *delivered);
        }
        steps.rate()
    }

    #[test]
    fn test_of_a_link_ends_with_the_first_slow_round() {
        const ROUNDS: usize = FIRST_ROUNDS.len() + 1;
        for slow_round in 0..=ROUNDS {
            let mut sent = 0;
            let is_fast = all_arrive(2.0, |_, _| {
                sent += 1;
                Ok(sent <= slow_round)
            });
            assert_eq!(is_fast.unwrap(), slow_round == ROUNDS);
            assert_eq!(sent, ROUNDS.min(slow_round + 1));
        }
    }

    /// More threads can fill a faster link.
    #[test]
    fn the_last_round_is_shorter_for_more_encoders() {
        let last = |encoders| {
            let mut last = Duration::ZERO;
            let all = all_arrive(encoders, |_, within| {
                last = within;
                Ok(true)
            });
            all.unwrap();
            last
        };
        assert_eq!(last(1.0), 4 * last(4.0));
    }

    #[test]
    fn a_rate_is_that_between_two_steps() {
        for (seen, expected) in [
            (&[][..], None),
            (&[(100, 5000), (400, 6000)], None),
            (&[(100, 5000), (400, 6000), (900, 7000)], Some(2000.0)),
            (&[(400, 6000), (900, 7000), (1000, 7000)], Some(2000.0)),
            (&[(400, 6000), (2900, 7000)], Some(400.0)),
            (&[(400, 6000), (900, 5000)], None),
        ] {
            assert_eq!(rate(seen), expected, "{seen:?}");
        }
        assert!(!Steps::default().wait(LONGEST));
    }
}
