//! The point of no return: tells the destination to run the guest, and finds out whether it does.
//!
//! [`protocol`](crate::protocol) says why this is safe.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use tracing::{info, warn};
use transfer::{Address, SocketError, dial};

use super::link::{Link, unexpected};
use crate::{
    SourceError,
    protocol::{
        DestinationMessage, MigrationId, Opening, ProtocolError, SourceMessage, receive_soon, send,
    },
};

/// Hands the guest, which the destination has loaded, over. When this returns without an error, it runs there.
pub(super) fn hand_over(
    link: &Link<'_>,
    destination: &Address,
    settle_time: Duration,
) -> Result<(), SourceError> {
    let began = Instant::now();
    let mut fate = Fate {
        started: false,
        word_lost: false,
        deadline: began + settle_time,
    };
    // Whether it got through or not: only an answer counts.
    let _ = link.say(&SourceMessage::Commit);
    let mut last = loop {
        match link.hear("answered", ANSWER_WITHIN.min(settle_time)) {
            Ok(said) => match fate.heard(said) {
                Heard::Starts => {}
                Heard::Nonsense(why) => {
                    fate.word_lost = true;
                    break why;
                }
                Heard::Runs => {
                    // For the destination to know that nobody will ask again.
                    let _ = link.say(&SourceMessage::Settled);
                    return Ok(());
                }
                Heard::Never(error) => {
                    let _ = link.say(&SourceMessage::Settled);
                    return Err(error);
                }
            },
            Err(error) => {
                fate.word_lost |= match &error {
                    SourceError::ControlEnded => false,
                    SourceError::Control(error) => !was_closed(error),
                    _ => true,
                };
                break error.to_string();
            }
        }
    };
    warn!("the destination does not say whether the guest runs ({last}): asking again");
    loop {
        match ask(destination, link.id(), &mut fate) {
            Asked::Runs => return Ok(()),
            Asked::Never(error) => return Err(error),
            Asked::NobodyThere if fate.started => return Err(SourceError::Lost),
            Asked::NobodyThere if fate.word_lost => {
                let seconds = began.elapsed().as_secs();
                let last = format!("nobody listens there any more; before that: {last}");
                return Err(SourceError::InDoubt { seconds, last });
            }
            Asked::NobodyThere => return Err(SourceError::Ended),
            Asked::NoAnswer(why) => last = why,
        }
        if Instant::now() + ASK_EVERY >= fate.deadline {
            let seconds = settle_time.as_secs();
            return Err(SourceError::InDoubt { seconds, last });
        }
        thread::sleep(ASK_EVERY);
    }
}

/// How long a destination that lives takes to answer, at most. The guest stands still meanwhile: a dead
/// connection must not be waited for, and asking again does no harm.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

const ASK_EVERY: Duration = Duration::from_millis(200);

/// What is known of the guest.
struct Fate {
    /// The destination said that it starts it.
    started: bool,
    /// A connection on which it may have said so went silent, instead of being closed by it.
    word_lost: bool,
    deadline: Instant,
}

/// What the destination's words mean for the guest.
enum Heard {
    Runs,
    Starts,
    /// It has never run there and never will.
    Never(SourceError),
    /// Nothing that anybody could rely on.
    Nonsense(String),
}

impl Fate {
    /// A connection is lost on which the destination could have answered.
    fn lost(&mut self, error: &ProtocolError) -> Asked {
        self.word_lost |= !was_closed(error);
        Asked::NoAnswer(error.to_string())
    }

    fn heard(&mut self, said: DestinationMessage) -> Heard {
        match said {
            DestinationMessage::Running => Heard::Runs,
            DestinationMessage::Starting => {
                self.started = true;
                Heard::Starts
            }
            DestinationMessage::Aborted { cause } => {
                Heard::Never(SourceError::Destination { cause })
            }
            said => Heard::Nonsense(unexpected(said).to_string()),
        }
    }
}

/// What came of asking over a new connection.
enum Asked {
    Runs,
    /// The destination says that it will not run it.
    Never(SourceError),
    NobodyThere,
    NoAnswer(String),
}

fn ask(destination: &Address, id: MigrationId, fate: &mut Fate) -> Asked {
    let left = fate.deadline.saturating_duration_since(Instant::now());
    let patience = ANSWER_WITHIN.min(left).max(Duration::from_millis(1));
    let stream = match dial(destination, patience) {
        Ok(stream) => stream,
        Err(SocketError::Dial { source, .. }) if nobody_listens(&source) => {
            return Asked::NobodyThere;
        }
        Err(error) => return Asked::NoAnswer(error.to_string()),
    };
    let told = stream
        .write_both(&Opening::control(id), &[])
        .map_err(ProtocolError::from)
        .and_then(|()| send(&stream, &SourceMessage::Commit));
    if let Err(error) = told {
        return fate.lost(&error);
    }
    loop {
        let said = match receive_soon(&stream) {
            Ok(Some(said)) => said,
            Ok(None) => return Asked::NoAnswer("it closed the connection".to_owned()),
            Err(error) => return fate.lost(&error),
        };
        match fate.heard(said) {
            Heard::Starts => {}
            Heard::Nonsense(why) => {
                fate.word_lost = true;
                return Asked::NoAnswer(why);
            }
            Heard::Runs => {
                info!("the guest runs at the destination");
                let _ = send(&stream, &SourceMessage::Settled);
                return Asked::Runs;
            }
            Heard::Never(error) => {
                let _ = send(&stream, &SourceMessage::Settled);
                return Asked::Never(error);
            }
        }
    }
}

/// Whether the peer's system has closed the connection, behind all that the peer had said.
fn was_closed(error: &ProtocolError) -> bool {
    match error {
        ProtocolError::Truncated { .. } => true,
        ProtocolError::Io(error) => matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
        ),
        _ => false,
    }
}

/// Whether the error says that no process listens there.
fn nobody_listens(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        // The second one: a unix socket's file that was removed.
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}
