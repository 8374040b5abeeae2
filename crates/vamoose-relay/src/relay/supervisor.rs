//! Decides the outcome of a migration from its threads' reports.
//!
//! ```text
//!           the destination has loaded the guest, and the source knows
//!  Moving ─────────────────────────────────────────────────────────────> Closing ─> Loaded
//!    │ the source breaks off: what it has sent on its channels arrives first
//!    ├───────────────────────────────────────────────────────────────> BrokenOff ─> that error
//!    └─ both directions and all channels end ─> what the main stream has shown; anything else is an error
//! ```

use std::{
    mem,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use tracing::debug;
use vamoose_link::{Hangup, receive_until};

use crate::{Direction, Outcome, RelayError, main_stream::MainState, syncs::Syncs};

pub(crate) enum Report {
    Failed(RelayError),
    /// The source closed a channel in good order.
    ChannelRead {
        channel: usize,
    },
    /// All received packets have been written to a channel.
    ChannelWritten,
    /// One direction of the main stream ended in good order.
    MainEnded(Direction),
    /// The source has received the destination's result of loading the guest.
    Shut {
        code: u32,
    },
}

pub(crate) struct Supervisor<'a> {
    main: &'a MainState,
    syncs: &'a Syncs,
    timeout: Duration,
    on_loaded: &'a dyn Fn(),
    phase: Phase,
    /// Readers and writers of channels that have yet to report their end.
    open_channels: usize,
    closed_channel: Option<usize>,
    forward_open: bool,
    back_open: bool,
    deadline: Option<Instant>,
}

enum Phase {
    Moving {
        /// The deadline has been extended: the main stream waited for a SYNC.
        extended: bool,
    },
    BrokenOff(RelayError),
    Closing,
}

/// How long a source may continue its main stream after it has closed a channel, and how long
/// the connections may take to close when the guest has been loaded.
const CLOSING: Duration = Duration::from_secs(3);

type Ended = Option<Result<Outcome, RelayError>>;

impl<'a> Supervisor<'a> {
    /// Supervises `channels` readers and writers, and the main stream.
    pub(crate) fn new(
        main: &'a MainState,
        syncs: &'a Syncs,
        timeout: Duration,
        channels: usize,
        on_loaded: &'a dyn Fn(),
    ) -> Self {
        Self {
            main,
            syncs,
            timeout,
            on_loaded,
            phase: Phase::Moving { extended: false },
            open_channels: channels,
            closed_channel: None,
            forward_open: true,
            back_open: true,
            deadline: None,
        }
    }

    pub(crate) fn run(
        mut self,
        reports: &Receiver<Report>,
        hangup: &Hangup,
    ) -> Result<Outcome, RelayError> {
        loop {
            if self.open_channels == 0
                && let Some(ended) = self.all_channels_ended()
            {
                return ended;
            }
            let ended = match receive_until(reports, self.deadline) {
                // Before everything else: what has been delivered has happened, cancelled or not.
                Ok(Report::Shut { code: 0 }) => {
                    (self.on_loaded)();
                    self.phase = Phase::Closing;
                    self.wait(CLOSING);
                    None
                }
                _ if hangup.is_hung_up() && !matches!(self.phase, Phase::Closing) => {
                    Some(Err(RelayError::Cancelled))
                }
                Ok(Report::Shut { code }) => Some(Err(RelayError::Refused(code))),
                Ok(Report::ChannelRead { channel }) => {
                    self.open_channels -= 1;
                    self.closed_channel.get_or_insert(channel);
                    let closing = || Instant::now() + CLOSING;
                    self.deadline.get_or_insert_with(closing);
                    None
                }
                Ok(Report::ChannelWritten) => {
                    self.open_channels -= 1;
                    None
                }
                Ok(Report::MainEnded(direction)) => self.main_ended(direction),
                Ok(Report::Failed(error)) => self.failed(error),
                Err(error) => self.nothing_came(error),
            };
            if let Some(ended) = ended {
                return ended;
            }
        }
    }

    fn all_channels_ended(&mut self) -> Ended {
        match &mut self.phase {
            Phase::BrokenOff(error) => Some(Err(mem::replace(error, RelayError::Cancelled))),
            _ if self.forward_open || self.back_open => None,
            Phase::Moving { .. } => Some(self.main.verdict()),
            Phase::Closing => Some(Ok(Outcome::Loaded)),
        }
    }

    fn main_ended(&mut self, direction: Direction) -> Ended {
        match direction {
            Direction::Forward => self.forward_open = false,
            Direction::Back => self.back_open = false,
        }
        match (&self.phase, direction) {
            // Nothing arrives any more.
            (Phase::BrokenOff(_), _) => self.open_channels = 0,
            (Phase::Moving { .. }, _) if self.is_too_early(direction) => {
                let error = RelayError::MainClosed(direction);
                if direction == Direction::Back {
                    return Some(Err(error));
                }
                // What the source sent before it broke off still arrives.
                self.phase = Phase::BrokenOff(error);
                self.wait(CLOSING);
            }
            _ => self.wait(self.timeout.max(CLOSING)),
        }
        None
    }

    fn failed(&mut self, error: RelayError) -> Ended {
        match self.phase {
            Phase::Moving { .. } => Some(Err(error)),
            Phase::BrokenOff(_) => {
                self.open_channels = 0;
                None
            }
            // The destination has the guest and the source knows: what breaks now is only the connections' end.
            Phase::Closing => {
                debug!("the connections ended out of order after the guest had been loaded");
                Some(Ok(Outcome::Loaded))
            }
        }
    }

    /// At the deadline, or when all threads have ended.
    fn nothing_came(&mut self, error: RecvTimeoutError) -> Ended {
        // The main stream cannot end before the channels that it waits for.
        if let Phase::Moving {
            extended: extended @ false,
        } = &mut self.phase
            && error == RecvTimeoutError::Timeout
            && self.syncs.are_awaited()
        {
            *extended = true;
            self.wait(self.timeout);
            return None;
        }
        self.failed(match self.closed_channel {
            Some(channel) if self.forward_open => RelayError::ChannelClosed(channel),
            _ => RelayError::NeverFinished(self.timeout.max(CLOSING)),
        })
    }

    /// Whether this direction of the main stream has ended before the migration. A destination without a return
    /// path closes when it has everything, whether the source has closed or not.
    fn is_too_early(&self, direction: Direction) -> bool {
        let other_open = match direction {
            Direction::Forward => self.back_open,
            Direction::Back => self.forward_open,
        };
        other_open && self.main.is_broken_off()
    }

    fn wait(&mut self, time: Duration) {
        self.deadline = Some(Instant::now() + time);
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, sync::mpsc::channel};

    use vamoose_link::{Socket, Stats, Stream};

    use super::*;
    use crate::main_stream::{ReturnWitness, Witness as _};

    /// The supervisor's outcome for one channel each way, after `reports`.
    fn judge(state: &MainState, hangup: &Hangup, reports: Vec<Report>) -> Result<Outcome, String> {
        let (report, all) = channel();
        for ending in reports {
            report.send(ending).unwrap();
        }
        drop(report);
        let syncs = Syncs::new(1);
        Supervisor::new(state, &syncs, Duration::from_secs(15), 2, &|| ())
            .run(&all, hangup)
            .map_err(|error| error.to_string())
    }

    /// A main stream with these bytes in the two directions.
    fn seen(forward: &[u8], back: &[u8]) -> MainState {
        let state = MainState::default();
        state.received(forward);
        if !back.is_empty() {
            let (end, _) = UnixStream::pair().unwrap();
            let (stream, stats) = (Stream::Socket(Socket::Unix(end)), Stats::default());
            let mut witness = ReturnWitness::new(&state, [&stream, &stream], &stats, |_| ());
            witness.pass(back, &mut |_| Ok(())).unwrap();
        }
        state
    }

    fn channels_end() -> Vec<Report> {
        vec![Report::ChannelRead { channel: 0 }, Report::ChannelWritten]
    }

    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];

    #[test]
    fn either_direction_may_close_first_without_a_return_path() {
        let hangup = Hangup::new().unwrap();
        for ends in [
            [Direction::Back, Direction::Forward],
            [Direction::Forward, Direction::Back],
        ] {
            let mut reports: Vec<_> = ends.map(Report::MainEnded).into();
            reports.extend(channels_end());
            assert_eq!(
                judge(&seen(b"{}", &[]), &hangup, reports),
                Ok(Outcome::Unconfirmed)
            );
        }
    }

    #[test]
    fn main_stream_closed_before_its_end_is_an_error() {
        let hangup = Hangup::new().unwrap();
        for direction in [Direction::Back, Direction::Forward] {
            let closed = Err(RelayError::MainClosed(direction).to_string());
            for state in [seen(b"{", &[]), seen(b"{}", &PONG)] {
                let mut reports = channels_end();
                reports.push(Report::MainEnded(direction));
                assert_eq!(judge(&state, &hangup, reports), closed);
            }
        }
    }

    #[test]
    fn delivered_confirmation_counts_even_if_cancelled() {
        let hangup = Hangup::new().unwrap();
        hangup.hang_up();
        let reports = vec![
            Report::Shut { code: 0 },
            Report::Failed(RelayError::Cancelled),
        ];
        assert_eq!(
            judge(&seen(b"{}", &PONG), &hangup, reports),
            Ok(Outcome::Loaded)
        );
        assert_eq!(
            judge(&seen(b"{}", &PONG), &hangup, channels_end()),
            Err(RelayError::Cancelled.to_string())
        );
    }
}
