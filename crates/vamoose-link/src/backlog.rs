//! Bounds the unsent bytes in a connection's send buffer, in time rather than in bytes.
//!
//! ```text
//!  written ──> [ not sent yet ] ──> [ in flight ] ──> peer
//!               25 ms of the link    what its rate and delay need: the congestion control's
//! ```
//!
//! The kernel lets a send buffer grow to megabytes, which take seconds on a slow link. A source counts written bytes as sent: it
//! would overestimate the link, and pause its guest while all these bytes have yet to be sent. Connections that share a link each
//! have a share of its rate, so their bounds add up to the same time.
//!
//! The bound is the kernel's own (`TCP_NOTSENT_LOWAT`), set regularly from the rate that the kernel counts. Bytes in flight are not
//! bounded, so a long link stays full.

use std::{
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use crate::{
    Socket,
    memory::{self, TcpProgress},
};

/// Maintains the bound of one connection.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    next_look: Option<Instant>,
    bound: Bound,
}

/// The bound. Longer than encoding a packet takes, so that the link stays busy meanwhile.
const TIME: Duration = Duration::from_millis(25);

/// How often the rate is read.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl Backlog {
    /// Call before each packet written to `socket`, always the same socket.
    pub(crate) fn bound(&mut self, socket: &Socket) {
        let Socket::Tcp(stream) = socket else {
            return;
        };
        let now = Instant::now();
        if self.next_look.is_some_and(|next| now < next) {
            return;
        }
        self.next_look = now.checked_add(LOOK_EVERY);
        // Older kernels keep their own bound.
        if let Some(progress) = memory::tcp_progress(stream.as_fd())
            && let Some(bytes) = self.bound.after(progress)
        {
            // A kernel that refuses keeps its own bound.
            let _ = memory::bound_unsent(stream.as_fd(), bytes);
        }
    }
}

/// The rule, without a socket.
#[derive(Debug, Default)]
struct Bound {
    last: Option<TcpProgress>,
    /// Bytes per second, once known.
    rate: Option<f64>,
    /// The bound set last.
    bytes: u32,
}

/// The bound until the rate is known.
const FIRST: u32 = 128 << 10;

/// The least bound: some segments.
const LEAST: u32 = 16 << 10;

/// A rate is measured over at least this time with bytes to send.
const LEAST_BUSY: Duration = Duration::from_millis(20);

impl Bound {
    /// The new bound in bytes, if it changes.
    fn after(&mut self, now: TcpProgress) -> Option<u32> {
        let last = *self.last.get_or_insert(now);
        let busy = now.busy.saturating_sub(last.busy);
        if busy >= LEAST_BUSY {
            let acknowledged = now.acknowledged.saturating_sub(last.acknowledged);
            let rate = acknowledged as f64 / busy.as_secs_f64();
            // A faster link is used at once; a slower one is followed gradually.
            self.rate = Some(match self.rate {
                Some(before) if rate < before => (before + rate) / 2.0,
                _ => rate,
            });
            self.last = Some(now);
        }
        let bytes = self.rate.map_or(FIRST, wanted);
        let is_news = bytes.abs_diff(self.bytes) > self.bytes / 8;
        is_news.then(|| {
            self.bytes = bytes;
            bytes
        })
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is positive, and the cast saturates"
)]
fn wanted(rate: f64) -> u32 {
    // The kernel doubles it.
    ((rate * TIME.as_secs_f64()) as u32).clamp(LEAST, u32::MAX / 4)
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bytes of a model"
    )]

    use std::{
        io::Write as _,
        net::{TcpListener, TcpStream},
    };

    use rustix::io::ioctl_fionread;

    use super::*;

    /// Bytes that a socket holds after it was filled without a reader.
    fn fill(bound: impl FnOnce(&Socket)) -> usize {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = Socket::Tcp(near);
        bound(&near);
        let piece = vec![0; 1 << 20];
        let mut written = 0;
        while let Ok(taken) = (&near).write(&piece) {
            written += taken;
        }
        written - usize::try_from(ioctl_fionread(far).unwrap()).unwrap()
    }

    #[test]
    fn send_buffer_is_bounded() {
        let bounded = fill(|socket| Backlog::default().bound(socket));
        // Plus a started segment.
        let most = FIRST as usize + (128 << 10);
        assert!(bounded <= most, "{bounded}");
        assert!(fill(|_| ()) > most, "unbounded sockets hold no more");
    }

    /// A link of a rate in bytes per second, and a sender that fills the bound.
    struct Simulated {
        rate: f64,
        bound: Bound,
        now: Duration,
        acknowledged: f64,
        unsent: f64,
        /// The longest wait of an unsent byte, in seconds.
        longest: f64,
    }

    impl Simulated {
        fn new(rate: f64) -> Self {
            Self {
                rate,
                bound: Bound::default(),
                now: Duration::ZERO,
                acknowledged: 0.0,
                unsent: 0.0,
                longest: 0.0,
            }
        }

        /// Runs for a time with a sender of at most `offered` bytes per second.
        fn run(&mut self, time: Duration, offered: f64) {
            let end = self.now + time;
            while self.now < end {
                let progress = TcpProgress {
                    acknowledged: self.acknowledged as u64,
                    busy: self.now,
                    round_trip: Duration::ZERO,
                };
                let _ = self.bound.after(progress);
                let step = LOOK_EVERY.as_secs_f64();
                // The buffer is refilled many times between two looks.
                let sent = (offered.min(self.rate)) * step;
                self.unsent = match offered > self.rate {
                    true => f64::from(self.bound.bytes),
                    false => 0.0,
                };
                self.longest = self.longest.max(self.unsent / self.rate);
                self.acknowledged += sent;
                self.now += LOOK_EVERY;
            }
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn unsent_bytes_are_bounded_in_time_from_10_megabits() {
        for rate in [1.25e6, 12.5e6, 125e6, 1.25e9, 12.5e9] {
            let mut link = Simulated::new(rate);
            link.run(SECOND, f64::INFINITY);
            link.longest = 0.0;
            link.run(SECOND, f64::INFINITY);
            assert!(link.longest <= 0.026, "{} s at {rate}", link.longest);
            // But enough to keep the link busy.
            assert!(link.longest >= 0.02, "{} s at {rate}", link.longest);
        }
    }

    #[test]
    fn the_bound_follows_the_link() {
        let mut link = Simulated::new(125e6);
        link.run(SECOND, f64::INFINITY);
        link.rate = 12.5e6;
        link.run(SECOND, f64::INFINITY);
        link.longest = 0.0;
        link.run(SECOND, f64::INFINITY);
        assert!(link.longest <= 0.029, "{} s", link.longest);
        link.rate = 125e6;
        link.run(2 * LOOK_EVERY, f64::INFINITY);
        assert!(f64::from(link.bound.bytes) >= 0.02 * 125e6);
    }

    #[test]
    fn an_idle_connection_does_not_change_the_bound() {
        let mut bound = Bound::default();
        let at = |acknowledged, busy| TcpProgress {
            acknowledged,
            busy: Duration::from_millis(busy),
            round_trip: Duration::ZERO,
        };
        assert_eq!(bound.after(at(0, 0)), Some(FIRST));
        assert_eq!(bound.after(at(100, 1)), None);
        assert_eq!(bound.after(at(200, 19)), None);
        assert_eq!(bound.after(at(2_000_000, 20)), Some(2_500_000));
        assert_eq!(bound.after(at(2_000_000, 20)), None);
    }

    #[test]
    fn the_slowest_link_gets_some_segments() {
        assert_eq!(wanted(0.0), LEAST);
        assert_eq!(wanted(f64::INFINITY), u32::MAX / 4);
    }
}
