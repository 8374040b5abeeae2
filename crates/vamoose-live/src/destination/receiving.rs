//! The order in which a destination receives the parts of a guest.
//!
//! ```text
//!             all channels connected
//!  Connecting ──────────────────────> Rounds ──> complete: the device state is here, and every channel has ended
//! ```
//!
//! The device state has a connection of its own, so it can arrive before or after the ends of the channels. This module has no I/O
//! and no clock: it takes events, and returns what the coordinator has to do.

use std::sync::Arc;

use handover::SourceMessage;
use vamoose_link::Stream;

use super::Event;
use crate::{DestinationError, error::ChannelError};

/// How much of a guest has been received.
pub(super) enum Receiving {
    /// Not all channels are connected. Nothing is read from any of them yet.
    Connecting {
        channels: Vec<Option<Arc<Stream>>>,
        /// Streams that may follow for a post-copy.
        later: usize,
    },
    Rounds(Rounds),
}

/// Progress of the connected channels and of the device state.
pub(super) struct Rounds {
    /// Rounds whose pages are all written. The channels deliver the next one.
    complete: u64,
    channels: Vec<Channel>,
    /// The device state. No page of a further round may follow it.
    state: Option<Vec<u8>>,
    /// The streams of a post-copy, numbered behind the channels.
    later: Vec<Option<Arc<Stream>>>,
}

/// A channel in the current round.
#[derive(Clone, Copy, Default)]
struct Channel {
    /// The channel has delivered all its pages of the round.
    synced: bool,
    ended: bool,
}

/// What the coordinator has to do.
pub(super) enum Action {
    /// All channels are connected: read from them.
    StartChannels(Vec<Arc<Stream>>),
    /// Have the VMM load this part of the device state.
    LoadPart(Vec<u8>),
    /// Report to the source that all pages of this round are written.
    ReportSynced(u64),
    /// All of the guest is here, and no page is written any more. This is its device state.
    Load(Vec<u8>),
}

impl Receiving {
    /// Of `streams` streams that may come, `channels` come first.
    pub(super) fn new(channels: u8, streams: u8) -> Self {
        Self::Connecting {
            channels: vec![None; channels.into()],
            later: streams.saturating_sub(channels).into(),
        }
    }

    /// The streams of a post-copy, once all have connected.
    pub(super) fn take_later(&mut self) -> Option<Vec<Arc<Stream>>> {
        match self {
            Self::Rounds(rounds) if rounds.later.iter().all(Option::is_some) => {
                Some(rounds.later.drain(..).flatten().collect())
            }
            _ => None,
        }
    }

    /// The number of channels that have connected, until all have.
    pub(super) fn connected(&self) -> Option<usize> {
        match self {
            Self::Connecting { channels, .. } => Some(channels.iter().flatten().count()),
            Self::Rounds(_) => None,
        }
    }

    /// What to do after `event`.
    ///
    /// # Errors
    /// When the source does not follow the protocol, aborts, or a connection has failed.
    pub(super) fn handle(&mut self, event: Event) -> Result<Option<Action>, DestinationError> {
        match (&mut *self, event) {
            (
                Self::Connecting {
                    channels: streams,
                    later,
                },
                Event::Channel(initial, connection),
            ) => {
                let channel = initial.channel();
                match streams.get_mut(usize::from(channel)) {
                    Some(free @ None) => *free = Some(connection.stream),
                    _ => return Err(DestinationError::ChannelNumber { channel }),
                }
                let later = vec![None; *later];
                if streams.iter().any(Option::is_none) {
                    return Ok(None);
                }
                let streams: Vec<_> = streams.drain(..).flatten().collect();
                *self = Self::Rounds(Rounds {
                    complete: 0,
                    channels: vec![Channel::default(); streams.len()],
                    state: None,
                    later,
                });
                Ok(Some(Action::StartChannels(streams)))
            }
            (Self::Rounds(rounds), event) => rounds.handle(event),
            (_, event) => unexpected(event).map(|()| None),
        }
    }
}

impl Rounds {
    fn handle(&mut self, event: Event) -> Result<Option<Action>, DestinationError> {
        if let Event::Channel(initial, connection) = &event
            && let Some(free @ None) = self.later_stream(initial.channel())
        {
            *free = Some(connection.stream.clone());
            return Ok(None);
        }
        match event {
            Event::Synced(channel, round) if self.awaits_sync(channel, round) => {
                self.channels[channel].synced = true;
                self.check_ended()?;
                if !self.channels.iter().all(|channel| channel.synced) {
                    return Ok(None);
                }
                self.complete = round;
                for channel in &mut self.channels {
                    channel.synced = false;
                }
                Ok(Some(Action::ReportSynced(round)))
            }
            Event::Ended(channel, Ok(())) => {
                self.channels[channel].ended = true;
                self.check_ended()?;
                Ok(self.load())
            }
            Event::Part(_, part) if self.state.is_none() => Ok(Some(Action::LoadPart(part))),
            Event::State(_, state) if self.awaits_state() => {
                self.state = Some(state);
                Ok(self.load())
            }
            event => unexpected(event).map(|()| None),
        }
    }

    fn later_stream(&mut self, number: u8) -> Option<&mut Option<Arc<Stream>>> {
        let index = usize::from(number).checked_sub(self.channels.len())?;
        self.later.get_mut(index)
    }

    fn awaits_sync(&self, channel: usize, round: u64) -> bool {
        self.state.is_none() && round == self.complete + 1 && !self.channels[channel].synced
    }

    /// The device state follows a complete round.
    fn awaits_state(&self) -> bool {
        let within_round = self.channels.iter().any(|channel| channel.synced);
        self.state.is_none() && self.complete > 0 && !within_round
    }

    fn load(&mut self) -> Option<Action> {
        let ended = self.channels.iter().all(|channel| channel.ended);
        let state = if ended { self.state.take() } else { None };
        state.map(Action::Load)
    }

    /// A round to which an ended channel has not contributed will never be complete.
    fn check_ended(&self) -> Result<(), DestinationError> {
        let mut channels = self.channels.iter();
        let within_round = channels.clone().any(|channel| channel.synced);
        match channels.position(|channel| channel.ended && !channel.synced) {
            Some(channel) if within_round => Err(DestinationError::Channel {
                channel,
                source: ChannelError::Ended,
            }),
            _ => Ok(()),
        }
    }
}

/// The error for an unexpected event. An unexpected channel is harmless.
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
        Event::State(..) | Event::Part(..) => out_of_turn("state".to_owned()),
        Event::Disconnected(_, error) => Err(error),
        Event::PostCopy => Ok(()),
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

    /// The reported rounds, and the device state or the error, if it came to either.
    fn receive(events: &str) -> (Vec<u64>, Option<Result<Vec<u8>, DestinationError>>) {
        let (mut receiving, mut rounds) = (Receiving::new(2, 2), Vec::new());
        for name in events.split(' ') {
            match receiving.handle(event(name)) {
                Err(error) => return (rounds, Some(Err(error))),
                Ok(Some(Action::ReportSynced(round))) => rounds.push(round),
                Ok(Some(Action::Load(state))) => return (rounds, Some(Ok(state))),
                Ok(_) => {}
            }
        }
        (rounds, None)
    }

    #[test]
    fn guest_is_complete_when_channels_have_ended_and_state_is_here() {
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
    fn event_out_of_turn_ends_the_attempt() {
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
    fn channel_end_within_a_round_ends_the_attempt() {
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
