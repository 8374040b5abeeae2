//! The conversation as it was recorded when its version was new.
//!
//! `data/conversation-v1.txt` does not change once there is a release: that sends exactly this. A newer version adds another
//! file, and this one is replayed for as long as version 1 is spoken. Its texts are given by the hosts, so that
//! the machines' own texts can be reworded.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test has nobody to report to"
)]

use std::{collections::VecDeque, fmt::Debug};

use handover::{
    Destination, DestinationAction, DestinationEvent, DestinationMessage, Incarnation, Lines,
    Source, SourceAction, SourceEvent, SourceMessage, encode,
};
use serde::{Serialize, de::DeserializeOwned};

const RECORDED: &str = include_str!("data/conversation-v1.txt");

#[test]
fn the_recorded_conversation_is_the_one_that_is_spoken() {
    let mut attempt = Attempt::new();
    for (number, line) in (1..).zip(RECORDED.lines()) {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "" | "#" => continue,
            "==" => attempt.over(number),
            ">" => attempt.source_says(number, rest),
            "<" => attempt.destination_says(number, rest),
            "?" => attempt.tell_source(read(number, rest)),
            "=" => attempt.happens(number, rest),
            _ => panic!("line {number}: {line}"),
        }
    }
    attempt.over(0);
}

/// Both machines, and the messages that they send.
struct Attempt {
    source: Source,
    destination: Destination,
    up: VecDeque<SourceMessage>,
    down: VecDeque<DestinationMessage>,
    decided: Option<String>,
}

const INCARNATION: Incarnation =
    Incarnation([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);

impl Attempt {
    fn new() -> Self {
        Self {
            source: Source::new(true),
            destination: Destination::new(INCARNATION),
            up: VecDeque::new(),
            down: VecDeque::new(),
            decided: None,
        }
    }

    /// All messages are in the record.
    fn over(&mut self, number: usize) {
        assert!(self.up.is_empty(), "line {number}: {:?}", self.up);
        assert!(self.down.is_empty(), "line {number}: {:?}", self.down);
        assert_eq!(self.decided, None, "line {number}");
        *self = Self::new();
    }

    fn source_says(&mut self, number: usize, line: &str) {
        let message: SourceMessage = read(number, line);
        // An engine sends these.
        if !matches!(
            message,
            SourceMessage::Prepare(_) | SourceMessage::State { .. }
        ) {
            assert_eq!(
                self.up.pop_front().as_ref(),
                Some(&message),
                "line {number}"
            );
        }
        self.tell_destination(DestinationEvent::Message(message));
    }

    fn destination_says(&mut self, number: usize, line: &str) {
        let message: DestinationMessage = read(number, line);
        assert_eq!(
            self.down.pop_front().as_ref(),
            Some(&message),
            "line {number}"
        );
        self.tell_source(message);
    }

    fn tell_source(&mut self, message: DestinationMessage) {
        self.source_event(SourceEvent::Message(message));
    }

    fn source_event(&mut self, event: SourceEvent) {
        for action in self.source.handle(event) {
            match action {
                SourceAction::Send(message) => self.up.push_back(message),
                SourceAction::Decide(decision) => {
                    let guest = serde_json::to_value(decision.guest).unwrap();
                    self.decided = guest.as_str().map(str::to_owned);
                }
                SourceAction::Persist | SourceAction::Dial | SourceAction::Resume => {}
            }
        }
    }

    fn tell_destination(&mut self, event: DestinationEvent) {
        for action in self.destination.handle(event) {
            if let DestinationAction::Send(message) = action {
                self.down.push_back(message);
            }
        }
    }

    fn happens(&mut self, number: usize, what: &str) {
        let (whom, what) = what.split_once(": ").unwrap();
        let (what, why) = what.split_once(": ").unwrap_or((what, ""));
        let cause = why.to_owned();
        match (whom, what) {
            ("decided", guest) => {
                assert_eq!(self.decided.take().as_deref(), Some(guest), "line {number}");
            }
            ("source", "paused") => {
                self.source = Source::restore(self.source.state().clone(), false)
            }
            ("source", "restarted") => {
                // Through the journal's text.
                self.source = Source::restore(written_and_read(self.source.state()), true);
            }
            ("source", "stopped") => self.source_event(SourceEvent::Stopped),
            ("source", "failed") => self.source_event(SourceEvent::Failed { cause }),
            ("source", "resumed") => self.source_event(SourceEvent::Resumed),
            ("source", "connected") => self.source_event(SourceEvent::Connected),
            ("source", "ask again") => self.source_event(SourceEvent::AskAgain),
            ("destination", "restarted") => {
                let state = written_and_read(self.destination.state());
                self.destination = Destination::restore(INCARNATION, state);
                self.destination.go_on();
            }
            ("destination", "loaded") => self.tell_destination(DestinationEvent::Loaded),
            ("destination", "still receiving") => {
                self.tell_destination(DestinationEvent::StillReceiving);
            }
            ("destination", "not started") => {
                self.tell_destination(DestinationEvent::NotStarted { cause });
            }
            ("destination", "unclear") => {
                let reason = cause;
                self.tell_destination(DestinationEvent::Unclear { reason });
            }
            ("destination", "died") => self.tell_destination(DestinationEvent::Died { cause }),
            ("destination", started) => {
                let state = started.strip_prefix("started ").unwrap().to_owned();
                self.tell_destination(DestinationEvent::Started { state });
            }
            _ => panic!("line {number}: {what}"),
        }
    }
}

/// A message as `Lines` cuts it out of the stream; its bytes are those that `encode` gives.
fn read<T: DeserializeOwned + Serialize + Debug>(number: usize, line: &str) -> T {
    let bytes = format!("{line}\n").into_bytes();
    let mut lines = Lines::default();
    lines.push(&bytes);
    let message = lines.next_message().unwrap();
    let message: T = message.unwrap_or_else(|| panic!("line {number}: {line}"));
    assert!(!lines.is_in_message());
    let ours = encode(&message).unwrap();
    assert_eq!(
        String::from_utf8_lossy(&ours),
        String::from_utf8_lossy(&bytes)
    );
    message
}

fn written_and_read<T: DeserializeOwned + Serialize>(state: &T) -> T {
    serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap()
}
