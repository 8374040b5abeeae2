//! Sends each mark of the main stream after the SYNCs that belong to it.
//!
//! A destination that has read a mark in the main stream (see `marks`) waits for the mark's SYNCs, one from each channel. If a
//! relay dies before it has sent them, the destination's main thread waits for ever, and so does its monitor (7.2, 10.0, 11.1). So
//! **a mark is sent only after its SYNCs have been sent on all channels**: whatever breaks, the destination has all that it waits
//! for, as it does without a relay.
//!
//! This causes no delay: the destination would wait at the mark anyway, and reads SYNCs before their mark. Marks and SYNCs are
//! counted, so either may come first.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing::warn;
use vamoose_link::{Stats, lock};

use crate::{
    Config, Milestone, RelayError,
    main_stream::{MainState, Witness, Write},
    marks::Marks,
};

/// Counts the SYNCs sent on each channel to the destination.
pub(crate) struct Syncs {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// SYNCs sent on each channel.
    out: Vec<u64>,
    last: Option<Instant>,
    /// The main stream waits for a SYNC.
    awaited: bool,
    given_up: bool,
}

/// How waiting for SYNCs ended.
#[derive(Debug, PartialEq, Eq)]
enum Waited {
    /// The SYNCs have been sent.
    Sent,
    /// Nothing was received or sent within the timeout.
    TimedOut,
    /// The migration is over.
    GivenUp,
}

impl Syncs {
    pub(crate) fn new(channels: usize) -> Self {
        Self {
            state: Mutex::new(State {
                out: vec![0; channels],
                last: None,
                awaited: false,
                given_up: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Counts a SYNC that has been sent on `channel`.
    pub(crate) fn sent(&self, channel: usize) {
        let mut state = lock(&self.state);
        if let Some(out) = state.out.get_mut(channel) {
            *out += 1;
        }
        state.last = Some(Instant::now());
        if state.awaited {
            self.changed.notify_all();
        }
    }

    /// When the last SYNC was sent.
    pub(crate) fn last(&self) -> Option<Instant> {
        lock(&self.state).last
    }

    /// Whether the main stream waits for a SYNC.
    pub(crate) fn are_awaited(&self) -> bool {
        lock(&self.state).awaited
    }

    /// Ends every wait.
    pub(crate) fn give_up(&self) {
        lock(&self.state).given_up = true;
        self.changed.notify_all();
    }

    /// Waits until `number` SYNCs have been sent on all channels, for as long as `moved` changes within `timeout`.
    fn wait_for(&self, number: u64, timeout: Duration, moved: impl Fn() -> u64) -> Waited {
        let mut state = lock(&self.state);
        let mut before = moved();
        let waited = loop {
            if state.given_up {
                break Waited::GivenUp;
            }
            if state.out.iter().all(|out| *out >= number) {
                break Waited::Sent;
            }
            state.awaited = true;
            let (woken, waited) = self
                .changed
                .wait_timeout(state, timeout)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
            let now = moved();
            if waited.timed_out() && now == before {
                break Waited::TimedOut;
            }
            before = now;
        };
        state.awaited = false;
        waited
    }
}

/// Forwards a main stream, and each mark after its SYNCs.
pub(crate) struct BehindSyncs<'a> {
    state: &'a MainState,
    syncs: &'a Syncs,
    stats: &'a Stats,
    timeout: Duration,
    marks: Marks,
    found: u64,
    /// Called when the last of the guest may come, and `None` after that.
    reached: Option<&'a (dyn Fn(Milestone) + Sync)>,
}

impl<'a> BehindSyncs<'a> {
    pub(crate) fn new(
        state: &'a MainState,
        syncs: &'a Syncs,
        stats: &'a Stats,
        config: &Config,
        reached: &'a (dyn Fn(Milestone) + Sync),
    ) -> Self {
        Self {
            state,
            syncs,
            stats,
            timeout: config.stall_timeout,
            marks: Marks::new(config.layout),
            found: 0,
            reached: Some(reached),
        }
    }

    /// Before the last section is passed on, that is noted.
    fn note_last(&mut self) {
        if let Some(reached) = self.reached.take_if(|_| self.marks.may_be_last()) {
            reached(Milestone::Last);
        }
    }

    /// Waits for the SYNCs of the latest mark.
    fn wait(&mut self) -> Result<(), RelayError> {
        let moved = || {
            let moved = self.stats.snapshot();
            moved.received_bytes + moved.wire_bytes
        };
        match self.syncs.wait_for(self.found, self.timeout, moved) {
            Waited::Sent => Ok(()),
            Waited::GivenUp => Err(RelayError::Cancelled),
            Waited::TimedOut => {
                // This was not a mark, or the destination will not receive its SYNC either.
                warn!(
                    "the source's main stream seems to ask for SYNC {} and no such SYNC comes: \
                     from here on it is passed on at once",
                    self.found
                );
                self.marks.stop();
                Ok(())
            }
        }
    }
}

impl Witness for BehindSyncs<'_> {
    fn pass(&mut self, piece: &[u8], write: Write<'_>) -> Result<(), RelayError> {
        self.state.received(piece);
        let (mut written, mut followed) = (0, 0);
        while let Some(end) = self.marks.next(&piece[followed..]) {
            followed += end;
            self.found += 1;
            self.note_last();
            // Without its last byte, the mark has no effect.
            write(&piece[written..followed - 1])?;
            written = followed - 1;
            self.wait()?;
        }
        self.note_last();
        write(&piece[written..])?;
        self.state.sent();
        Ok(())
    }

    /// A destination whose main stream breaks off closes its channels, one after the other. A source that is sending a SYNC on
    /// its channels then hangs (seen with 7.2 and 10.0). So what the source has sent on its channels arrives first.
    fn ends(&self) -> bool {
        !self.state.is_broken_off()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc::channel, thread};

    use vamoose_codec::{Engines, Settings};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A start of a section `ram` with one RAM block, and a part without a page: two marks, EOS each.
    fn stream() -> Vec<u8> {
        let eos = &0x10u64.to_be_bytes()[..];
        [
            &b"\x00\x00\x00\x03\x01\x00\x00\x00\x02\x03ram\x00\x00\x00\x00\x00\x00\x00\x04"[..],
            &0x1004u64.to_be_bytes(),
            b"\x03mem",
            &0x1000u64.to_be_bytes(),
            eos,
            b"\x7e\x00\x00\x00\x02\x02\x00\x00\x00\x02",
            eos,
            b"\x7e\x00\x00\x00\x02",
        ]
        .concat()
    }

    #[test]
    fn last_section_is_noted_before_it_is_passed_on() {
        let end = b"\x03\x00\x00\x00\x02";
        let (syncs, state, stats) = (Syncs::new(0), MainState::default(), Stats::default());
        let config = Config::new(Engines::software(Settings::default()));
        for opaque in [false, true] {
            let passed = Mutex::new(Vec::new());
            let noted = Mutex::new(Vec::new());
            let note = |milestone| lock(&noted).push((milestone, lock(&passed).len()));
            let mut main = BehindSyncs::new(&state, &syncs, &stats, &config, &note);
            if opaque {
                main.marks.stop();
            }
            for byte in [&stream()[..], &end[..]].concat() {
                main.pass(&[byte], &mut |part| {
                    lock(&passed).extend_from_slice(part);
                    Ok(())
                })
                .unwrap();
            }
            let before = if opaque { 0 } else { stream().len() };
            assert_eq!(*lock(&noted), [(Milestone::Last, before)]);
        }
    }

    #[test]
    fn mark_is_sent_after_its_sync_on_all_channels() {
        let bytes = stream();
        let first = bytes.len() - 5 - 8 - 10;
        let second = bytes.len() - 5;
        let (syncs, state, stats) = (Syncs::new(2), MainState::default(), Stats::default());
        let mut config = Config::new(Engines::software(Settings::default()));
        config.stall_timeout = LIMIT;
        let (out, written) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut main = BehindSyncs::new(&state, &syncs, &stats, &config, &|_| ());
                let out = out;
                main.pass(&bytes, &mut |part| {
                    out.send(part.to_vec()).unwrap();
                    Ok(())
                })
                .unwrap();
            });
            let next = || written.recv_timeout(LIMIT).unwrap();
            assert_eq!(next(), bytes[..first - 1]);
            syncs.sent(0);
            // The second of one channel is not the first of the other.
            syncs.sent(0);
            assert!(written.try_recv().is_err());
            syncs.sent(1);
            assert_eq!(next(), bytes[first - 1..second - 1]);
            assert!(written.try_recv().is_err());
            syncs.sent(1);
            assert_eq!(next(), bytes[second - 1..]);
        });
    }

    #[test]
    fn waiting_for_a_sync_can_be_given_up() {
        let syncs = Syncs::new(1);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| syncs.wait_for(1, LIMIT, || 0));
            syncs.give_up();
            assert_eq!(waiting.join().unwrap(), Waited::GivenUp);
        });
    }

    #[test]
    fn missing_sync_times_out_without_progress() {
        let waited = Syncs::new(1).wait_for(1, Duration::from_millis(1), || 0);
        assert_eq!(waited, Waited::TimedOut);
    }
}
