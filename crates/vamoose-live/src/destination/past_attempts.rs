//! Failed attempts of a destination, for sources that ask later.

use std::collections::VecDeque;

use handover::{
    AttemptId, Destination, DestinationAction, DestinationEvent, DestinationMessage, Incarnation,
    SourceMessage,
};

/// How many attempts are remembered. Older ones are answered with `unknown`.
const MAX: usize = 64;

pub(super) struct PastAttempts {
    pub(super) incarnation: Incarnation,
    attempts: VecDeque<(AttemptId, Destination)>,
}

impl PastAttempts {
    pub(super) fn new(incarnation: Incarnation) -> Self {
        let attempts = VecDeque::new();
        Self {
            incarnation,
            attempts,
        }
    }

    pub(super) fn knows(&self, attempt: AttemptId) -> bool {
        self.attempts.iter().any(|(known, _)| *known == attempt)
    }

    pub(super) fn remember(&mut self, attempt: AttemptId, machine: Destination) {
        if self.attempts.len() == MAX {
            self.attempts.pop_front();
        }
        self.attempts.push_back((attempt, machine));
    }

    /// The answer to `message` of an attempt that is not the current one.
    pub(super) fn answer(
        &mut self,
        attempt: AttemptId,
        message: SourceMessage,
    ) -> Option<DestinationMessage> {
        let known = self
            .attempts
            .iter()
            .position(|(known, _)| *known == attempt);
        let Some(index) = known else {
            return self.answer_unknown(&message);
        };
        let actions = self.attempts[index]
            .1
            .handle(DestinationEvent::Message(message));
        if actions.contains(&DestinationAction::Forget) {
            self.attempts.remove(index);
        }
        // The attempt is over, so an answer is the only action that matters.
        actions.into_iter().find_map(|action| match action {
            DestinationAction::Send(message) => Some(message),
            _ => None,
        })
    }

    fn answer_unknown(&self, message: &SourceMessage) -> Option<DestinationMessage> {
        let incarnation = self.incarnation;
        match message {
            SourceMessage::Prepare(_) => Some(DestinationMessage::Refused {
                reason: "another migration is under way".to_owned(),
            }),
            SourceMessage::Commit { .. } | SourceMessage::Abort { .. } => {
                Some(DestinationMessage::Unknown {
                    incarnation,
                    reason: "this destination does not know the attempt".to_owned(),
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: SourceMessage = SourceMessage::Commit { resume: true };

    fn attempt(number: usize) -> AttemptId {
        AttemptId((number as u128).to_be_bytes())
    }

    fn given_up(past: &PastAttempts) -> Destination {
        let mut machine = Destination::new(past.incarnation);
        for event in [
            DestinationEvent::Failed {
                cause: "no more".to_owned(),
            },
            DestinationEvent::Died {
                cause: String::new(),
            },
        ] {
            machine.handle(event);
        }
        machine
    }

    #[test]
    fn failed_attempts_are_aborted_and_forgotten_ones_unknown() {
        let incarnation = Incarnation([7; 16]);
        let mut past = PastAttempts::new(incarnation);
        for number in 0..=MAX {
            past.remember(attempt(number), given_up(&past));
        }
        let aborted = Some(DestinationMessage::Aborted {
            incarnation,
            cause: "no more".to_owned(),
        });
        for _ in 0..2 {
            assert_eq!(past.answer(attempt(MAX), COMMIT), aborted);
        }
        assert_eq!(past.attempts.len(), MAX);
        // Its source knows.
        assert_eq!(past.answer(attempt(MAX), SourceMessage::Settled), None);
        for forgotten in [0, MAX, MAX + 1] {
            let answer = past.answer(attempt(forgotten), COMMIT);
            assert!(matches!(answer, Some(DestinationMessage::Unknown { .. })));
        }
    }
}
