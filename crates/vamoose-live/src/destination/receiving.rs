//! The order in which a destination receives the parts of a guest.
//!
//! ```text
//!             all connected            every channel has ended
//!  Connecting ─────────────> Rounds ─────────────────────────────> StateAwaited
//!                              │                                        │ device state
//!                              │ device state                           ▼
//!                              └──────────────> ChannelsAwaited ───> Complete
//!                                                        every channel has ended
//! ```
//!
//! The device state has a connection of its own, so it can arrive before or after the ends of the channels. No I/O and no
//! clock: events in, the next state and what to do for it out.

use std::sync::Arc;

use handover::SourceMessage;
use vamoose_link::Stream;

use super::Event;
use crate::{ChannelError, DestinationError};

/// How much of a guest has been received.
pub(super) enum Receiving {
    /// Not all channels are connected. Nothing is read from any of them yet.
    Connecting(Vec<Option<Arc<Stream>>>),
    /// The channels deliver pages of the round after `complete`.
    Rounds {
        complete: u64,
        channels: Vec<Channel>,
    },
    /// The device state is here. No page of a further round may follow, and the channels have to end.
    ChannelsAwaited {
        state: Vec<u8>,
        channels: Vec<Channel>,
    },
    /// All pages are here and every channel has ended.
    StateAwaited,
    /// All of the guest is here, and no page is written any more.
    Complete(Vec<u8>),
}

/// A channel in the current round.
#[derive(Clone, Copy, Default)]
pub(super) struct Channel {
    /// The channel has delivered all its pages of the round.
    synced: bool,
    ended: bool,
}

/// What the coordinator has to do.
pub(super) enum Action {
    /// All channels are connected: read from them.
    StartChannels(Vec<Arc<Stream>>),
    /// Report to the source that all pages of this round are written.
    ReportSynced(u64),
}

impl Receiving {
    pub(super) fn new(channels: u8) -> Self {
        Self::Connecting(vec![None; channels.into()])
    }

    /// The channels that have connected so far, while that is waited for.
    pub(super) fn connected(&self) -> Option<usize> {
        match self {
            Self::Connecting(streams) => Some(streams.iter().flatten().count()),
            _ => None,
        }
    }

    /// The state after `event`, and what to do.
    ///
    /// # Errors
    /// When the source does not follow the protocol, aborts, or a connection has failed.
    pub(super) fn handle(self, event: Event) -> Result<(Self, Option<Action>), DestinationError> {
        match (self, event) {
            (Self::Connecting(streams), Event::Channel(initial, connection)) => {
                connected(streams, initial.channel(), connection.stream)
            }
            (Self::Rounds { complete, channels }, Event::Synced(channel, round))
                if round == complete + 1 && !channels[channel].synced =>
            {
                synced(complete, channels, channel)
            }
            (Self::Rounds { complete, channels }, Event::Ended(channel, Ok(()))) => {
                let channels = ended(channels, channel)?;
                let all = channels.iter().all(|channel| channel.ended);
                Ok(match all && complete > 0 {
                    true => (Self::StateAwaited, None),
                    false => (Self::Rounds { complete, channels }, None),
                })
            }
            (Self::Rounds { complete, channels }, Event::State(_, state))
                if complete > 0 && !channels.iter().any(|channel| channel.synced) =>
            {
                Ok((Self::ChannelsAwaited { state, channels }, None))
            }
            (Self::ChannelsAwaited { state, channels }, Event::Ended(channel, Ok(()))) => {
                let channels = ended(channels, channel)?;
                let all = channels.iter().all(|channel| channel.ended);
                Ok(match all {
                    true => (Self::Complete(state), None),
                    false => (Self::ChannelsAwaited { state, channels }, None),
                })
            }
            (Self::StateAwaited, Event::State(_, state)) => Ok((Self::Complete(state), None)),
            (same, event) => unexpected(event).map(|()| (same, None)),
        }
    }
}

fn connected(
    mut streams: Vec<Option<Arc<Stream>>>,
    channel: u8,
    stream: Arc<Stream>,
) -> Result<(Receiving, Option<Action>), DestinationError> {
    match streams.get_mut(usize::from(channel)) {
        Some(free @ None) => *free = Some(stream),
        _ => return Err(DestinationError::ChannelNumber { channel }),
    }
    if streams.iter().any(Option::is_none) {
        return Ok((Receiving::Connecting(streams), None));
    }
    let channels = vec![Channel::default(); streams.len()];
    let start = Action::StartChannels(streams.into_iter().flatten().collect());
    let complete = 0;
    Ok((Receiving::Rounds { complete, channels }, Some(start)))
}

fn synced(
    complete: u64,
    mut channels: Vec<Channel>,
    channel: usize,
) -> Result<(Receiving, Option<Action>), DestinationError> {
    channels[channel].synced = true;
    check_ended(&channels)?;
    if !channels.iter().all(|channel| channel.synced) {
        return Ok((Receiving::Rounds { complete, channels }, None));
    }
    let complete = complete + 1;
    channels
        .iter_mut()
        .for_each(|channel| channel.synced = false);
    let report = Action::ReportSynced(complete);
    Ok((Receiving::Rounds { complete, channels }, Some(report)))
}

fn ended(mut channels: Vec<Channel>, channel: usize) -> Result<Vec<Channel>, DestinationError> {
    channels[channel].ended = true;
    check_ended(&channels)?;
    Ok(channels)
}

/// A round to which an ended channel has not contributed will never be complete.
fn check_ended(channels: &[Channel]) -> Result<(), DestinationError> {
    let in_round = channels.iter().any(|channel| channel.synced);
    match channels
        .iter()
        .position(|channel| channel.ended && !channel.synced)
    {
        Some(channel) if in_round => Err(DestinationError::Channel {
            channel,
            source: ChannelError::Ended,
        }),
        _ => Ok(()),
    }
}

/// The error for an unexpected event. Only an unexpected channel is harmless.
pub(super) fn unexpected(event: Event) -> Result<(), DestinationError> {
    let out_of_turn = |message| Err(DestinationError::OutOfTurn { message });
    match event {
        Event::Ended(channel, result) => {
            let source = result.err().unwrap_or(ChannelError::Ended);
            Err(DestinationError::Channel { channel, source })
        }
        Event::Message(_, SourceMessage::Abort { cause }) => {
            Err(DestinationError::Aborted { cause })
        }
        Event::Message(_, message) | Event::Connected { message, .. } => {
            out_of_turn(format!("{message:?}"))
        }
        Event::Synced(_, number) => out_of_turn(format!("SYNC {number}")),
        Event::State(..) => out_of_turn("state".to_owned()),
        Event::Disconnected(_, error) => Err(error),
        Event::Cancelled => Err(DestinationError::Cancelled),
        Event::Channel(_, connection) => {
            refuse_channel(&connection.stream);
            Ok(())
        }
    }
}

pub(super) fn refuse_channel(stream: &Stream) {
    tracing::warn!("an unexpected channel connection was refused");
    stream.shut_down();
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use multifd::Initial;

    use super::*;
    use crate::destination::Connection;

    /// Events, in short. Of two channels, a and b.
    fn event(name: &str) -> Event {
        let number = |digits: &str| digits.parse::<u64>().unwrap();
        match name.split_at(1) {
            ("+", channel) => {
                let channel = channel.parse().unwrap();
                let initial = Initial::new([7; 16], channel, 3).unwrap();
                let (stream, _) = UnixStream::pair().unwrap();
                let stream = Arc::new(Stream::from(stream));
                let session = None;
                Event::Channel(initial, Connection { stream, session })
            }
            ("a", "-") => Event::Ended(0, Ok(())),
            ("b", "-") => Event::Ended(1, Ok(())),
            ("a", round) => Event::Synced(0, number(round)),
            ("b", round) => Event::Synced(1, number(round)),
            ("s", _) => Event::State(1, vec![42]),
            _ => Event::Message(1, SourceMessage::Settled),
        }
    }

    /// The rounds that were reported and, if it came to it, whether all was received or why not.
    fn receive(events: &str) -> (Vec<u64>, Option<Result<Vec<u8>, DestinationError>>) {
        let (mut receiving, mut rounds) = (Receiving::new(2), Vec::new());
        for name in events.split(' ') {
            match receiving.handle(event(name)) {
                Err(error) => return (rounds, Some(Err(error))),
                Ok((next, action)) => {
                    if let Some(Action::ReportSynced(round)) = action {
                        rounds.push(round);
                    }
                    receiving = next;
                }
            }
        }
        match receiving {
            Receiving::Complete(state) => (rounds, Some(Ok(state))),
            _ => (rounds, None),
        }
    }

    #[test]
    fn a_guest_is_complete_with_its_rounds_the_ends_of_the_channels_and_its_state() {
        for (events, rounds) in [
            ("+0 +1 a1 b1 a- b- state", 1),
            ("+1 +0 b1 a1 b- a- state", 1),
            ("+0 +1 a1 b1 state a- b-", 1),
            ("+0 +1 a1 b1 a- state b-", 1),
            ("+0 +1 a1 a- b1 b- state", 1),
            ("+0 +1 a1 b1 b2 a2 a3 b3 a- b- state", 3),
        ] {
            let (reported, result) = receive(events);
            assert!(reported.into_iter().eq(1..=rounds), "{events}");
            assert_eq!(result.unwrap().unwrap(), [42], "{events}");
            let (_, unfinished) = receive(events.rsplit_once(' ').unwrap().0);
            assert!(unfinished.is_none(), "{events}");
        }
    }

    #[test]
    fn what_comes_out_of_turn_ends_the_attempt() {
        for events in [
            "a1",
            "+0 state",
            "+0 +1 state",
            "+0 +1 a- b- state",
            "+0 +1 a2",
            "+0 +1 a1 a1",
            "+0 +1 a1 a2",
            "+0 +1 a1 b1 b1",
            "+0 +1 a1 state",
            "+0 +1 a1 b1 a2 state",
            "+0 +1 a1 b1 state state",
            "+0 +1 a1 b1 state a2",
            "+0 +1 a1 b1 a- b- message",
        ] {
            let (_, result) = receive(events);
            let out_of_turn = matches!(result, Some(Err(DestinationError::OutOfTurn { .. })));
            assert!(out_of_turn, "{events}: {result:?}");
        }
        for number in ["+0 +0", "+2"] {
            let (_, result) = receive(number);
            let refused = matches!(result, Some(Err(DestinationError::ChannelNumber { .. })));
            assert!(refused, "{number}: {result:?}");
        }
    }

    #[test]
    fn a_channel_that_ends_within_a_round_ends_the_attempt() {
        for (events, channel) in [
            ("+0 +1 a1 b-", 1),
            ("+0 +1 b- a1", 1),
            ("+0 +1 a1 b1 a- b2", 0),
            ("+0 +1 a1 b1 a2 a- b-", 1),
        ] {
            let (_, result) = receive(events);
            let Some(Err(DestinationError::Channel {
                channel: found,
                source,
            })) = result
            else {
                panic!("{events}: {result:?}");
            };
            assert_eq!(found, channel, "{events}");
            assert!(matches!(source, ChannelError::Ended), "{events}");
        }
        // A further channel is refused and does no harm.
        let (_, result) = receive("+0 +1 +0 a1 b1 a- b- state");
        assert!(result.unwrap().is_ok());
    }
}
