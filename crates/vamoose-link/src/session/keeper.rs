//! Moves streams between paths, at the client: back to a path that works again, and from slow paths to fast ones.
//!
//! ```text
//!  a path fails ──> its streams go on over the others (dialer) ──> it is tried again after a while ──> they come back
//!  a stream would get more on another path ──> it moves there, and tries its own again after [`STAY`]
//! ```
//! A stream's own path follows from its number, so that streams are spread evenly at first. The throughput of a path is measured
//! by the acknowledged bytes of busy streams.

use std::{collections::HashMap, sync::Arc, time::Instant};

use super::resumable::ResumableStream;
use crate::timeouts::{COMPARE, STAY};

/// Distributes the streams of a session over its paths.
#[derive(Default)]
pub(super) struct Keeper {
    /// Start of the current interval, and the delivered bytes of each stream at that time.
    since: Option<Instant>,
    before: HashMap<u32, u64>,
    /// Streams moved to a faster path, and the time of the move.
    moved: HashMap<u32, Instant>,
}

/// Bytes that a busy stream delivers in an interval.
const BUSY: u64 = 1 << 20;

/// Factor by which a stream must be faster on another path.
const BETTER: f64 = 1.25;

/// Factor by which another path must be faster to take a path's last stream: a SYNC waits for the slowest stream.
const USELESS: f64 = 8.0;

impl Keeper {
    /// Call regularly. Returns a stream that should be moved, and its new path. `usable` says for each path whether it works. While
    /// a guest is paused, working streams are `held`.
    pub(super) fn watch<'a>(
        &mut self,
        streams: &'a [Arc<ResumableStream>],
        usable: &[bool],
        held: bool,
    ) -> Option<(&'a Arc<ResumableStream>, usize)> {
        if held {
            self.since = None;
            return None;
        }
        let positions = streams.iter().filter_map(|stream| {
            Some(Position {
                stream: stream.number,
                path: stream.path()?,
                delivered: stream.delivered(),
            })
        });
        let positions: Vec<_> = positions.collect();
        let (number, path) = self.next_move(Instant::now(), &positions, usable)?;
        let stream = streams.iter().find(|stream| stream.number == number)?;
        Some((stream, path))
    }

    /// The stream to be moved, and its new path.
    fn next_move(
        &mut self,
        now: Instant,
        streams: &[Position],
        usable: &[bool],
    ) -> Option<(u32, usize)> {
        self.moved
            .retain(|_, since| now.saturating_duration_since(*since) < STAY);
        let returned = streams.iter().find_map(|it| {
            let own = own_path(it.stream, usable.len());
            let is_away = it.path != own && !self.moved.contains_key(&it.stream);
            (is_away && usable.get(own) == Some(&true)).then_some((it.stream, own))
        });
        if returned.is_some() {
            // Bytes counted across a move are meaningless.
            self.since = None;
            return returned;
        }
        if (self.since).is_some_and(|since| now.saturating_duration_since(since) < COMPARE) {
            return None;
        }
        let is_first = self.since.replace(now).is_none();
        let gained: Vec<_> = streams
            .iter()
            .filter_map(|it| {
                let before = self.before.get(&it.stream)?;
                let gained = it.delivered.saturating_sub(*before);
                (gained >= BUSY).then_some((*it, gained))
            })
            .collect();
        self.before = streams.iter().map(|it| (it.stream, it.delivered)).collect();
        if is_first {
            return None;
        }
        let (stream, to) = faster(&gained, usable)?;
        if own_path(stream, usable.len()) != to {
            self.moved.insert(stream, now);
        }
        self.since = None;
        Some((stream, to))
    }
}

/// Position of a stream.
#[derive(Clone, Copy, Debug)]
struct Position {
    stream: u32,
    path: usize,
    /// Bytes that the peer has acknowledged since the stream began.
    delivered: u64,
}

/// The stream that would gain the most on another path, if the gain is large enough.
fn faster(gained: &[(Position, u64)], usable: &[bool]) -> Option<(u32, usize)> {
    let mut paths = vec![(0_u64, 0_u32); usable.len()];
    for (it, bytes) in gained {
        let (sum, streams) = paths.get_mut(it.path)?;
        *sum += bytes;
        *streams += 1;
    }
    // The share of each stream on a path.
    let busy = || (0..).zip(&paths).filter(|(_, (_, streams))| *streams > 0);
    let share = |sum: u64, streams: u32| sum as f64 / f64::from(streams);
    let (to, more) = busy()
        .filter(|(path, _)| usable[*path])
        .map(|(path, (sum, streams))| (path, share(*sum, streams + 1)))
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    let (from, now, streams) = busy()
        .filter(|(path, _)| *path != to)
        .map(|(path, (sum, streams))| (path, share(*sum, *streams), *streams))
        .min_by(|a, b| a.1.total_cmp(&b.1))?;
    let factor = if streams > 1 { BETTER } else { USELESS };
    if more < now * factor {
        return None;
    }
    let moved = gained.iter().find(|(it, _)| it.path == from)?;
    Some((moved.0.stream, to))
}

/// The path on which a stream begins.
pub(super) fn own_path(stream: u32, paths: usize) -> usize {
    usize::try_from(stream).unwrap_or_default() % paths.max(1)
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, thread, time::Duration};

    use super::*;
    use crate::{
        Address, Listener, Security, Session, SessionConfig, Sessions, session::dialer,
        timeouts::LOOK,
    };

    const LIMIT: Duration = Duration::from_secs(60);

    const MB: u64 = 1 << 20;

    /// Streams by the paths that carry them, each with what it has delivered, in megabytes.
    fn streams(list: &[(usize, u64)]) -> Vec<Position> {
        (0..)
            .zip(list)
            .map(|(stream, (path, megabytes))| Position {
                stream,
                path: *path,
                delivered: megabytes * MB,
            })
            .collect()
    }

    /// What is moved after two intervals in which the streams went from nothing to what they have.
    fn moved(list: &[(usize, u64)], usable: &[bool]) -> Option<(u32, usize)> {
        let mut keeper = Keeper::default();
        let (begin, list) = (Instant::now(), streams(list));
        let none: Vec<_> = list
            .iter()
            .map(|it| Position {
                delivered: 0,
                ..*it
            })
            .collect();
        let first = keeper.next_move(begin, &none, usable);
        first.or_else(|| keeper.next_move(begin + COMPARE, &list, usable))
    }

    #[test]
    fn streams_stay_on_their_paths_while_paths_are_held() {
        let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
        let listeners = [(); 2].map(|()| Listener::bind(&any, LIMIT).unwrap());
        let paths = listeners.each_ref().map(|it| it.address().clone().into());
        let config = SessionConfig::new(Security::Insecure);
        let _sessions = Sessions::new(listeners.into(), config.clone()).unwrap();
        let (session, _first) = Session::dial(paths.into(), config).unwrap();
        let second = session.open().unwrap();
        (&second).write_all(b"here").unwrap();
        let stream = session.0.find(1).unwrap();
        assert_eq!(stream.path(), Some(1));

        session.set_paused(true);
        assert!(dialer::move_to(&stream, 0));
        thread::sleep(3 * LOOK);
        assert_eq!(stream.path(), Some(0));

        session.set_paused(false);
        let end = Instant::now() + LIMIT;
        while stream.path() != Some(1) {
            assert!(
                Instant::now() < end,
                "the stream does not return to its path"
            );
            thread::sleep(LOOK / 10);
        }
    }

    #[test]
    fn streams_of_equal_paths_stay() {
        let even = [(0, 100), (1, 90), (0, 110), (1, 95)];
        assert_eq!(moved(&even, &[true, true]), None);
        // Nothing is known of paths without work.
        assert_eq!(
            moved(&[(0, 100), (1, 0), (0, 100), (1, 0)], &[true, true]),
            None
        );
    }

    #[test]
    fn a_stream_goes_back_to_a_path_that_has_returned() {
        let displaced = [(0, 100), (0, 100), (0, 100), (0, 100)];
        assert_eq!(moved(&displaced, &[true, false]), None);
        assert_eq!(moved(&displaced, &[true, true]), Some((1, 1)));
    }

    #[test]
    fn streams_leave_a_slow_path_until_shares_are_equal() {
        // 200 and 40: another one gets 66 on the first instead of 20.
        assert_eq!(
            moved(&[(0, 100), (1, 20), (0, 100), (1, 20)], &[true, true]),
            Some((1, 0))
        );
        // The last one stays while it is worth something.
        assert_eq!(moved(&[(0, 100), (1, 60), (0, 100)], &[true, true]), None);
        let mut keeper = Keeper::default();
        let (begin, usable) = (Instant::now(), [true, true]);
        keeper.moved.insert(1, begin);
        let slow = |megabytes: u64| {
            streams(&[
                (0, 90 * megabytes),
                (0, 90 * megabytes),
                (0, 90 * megabytes),
                (1, 2 * megabytes),
            ])
        };
        assert_eq!(keeper.next_move(begin, &slow(0), &usable), None);
        assert_eq!(
            keeper.next_move(begin + COMPARE / 2, &slow(1), &usable),
            None
        );
        assert_eq!(
            keeper.next_move(begin + COMPARE, &slow(1), &usable),
            Some((3, 0))
        );
        // After a while its own path is tried again.
        let all = streams(&[(0, 0), (0, 0), (0, 0), (0, 0)]);
        assert_eq!(keeper.next_move(begin + STAY / 2, &all, &usable), None);
        assert_eq!(keeper.next_move(begin + STAY, &all, &usable), Some((1, 1)));
    }
}
