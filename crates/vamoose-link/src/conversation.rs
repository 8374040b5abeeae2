//! Messages between two processes: lines of JSON over a stream.

use std::{
    io::{self, Read as _},
    sync::Arc,
    time::{Duration, Instant},
};

use handover::{FrameError, Lines, encode};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::{Stream, is_stall};

/// One end of a conversation.
#[derive(Debug)]
pub struct Conversation {
    stream: Arc<Stream>,
    lines: Lines,
}

/// A conversation that failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ConversationError {
    #[error("the connection broke")]
    Broken(#[from] io::Error),
    #[error("the connection was closed by the peer")]
    Closed,
    #[error("the connection ended in the middle of a message")]
    Cut,
    #[error("the connection ended after {got} of {wanted} bytes")]
    Truncated { got: usize, wanted: usize },
    #[error("the peer stopped in the middle of a message for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("no message came in {} s", .0.as_secs())]
    Silent(Duration),
    #[error(transparent)]
    Frame(#[from] FrameError),
}

impl ConversationError {
    /// Whether the peer's system has reset the connection.
    pub fn is_reset(&self) -> bool {
        let reset = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
        matches!(self, Self::Broken(error) if reset.contains(&error.kind()))
    }
}

/// How long to wait for a message.
#[derive(Clone, Copy)]
enum Patience {
    /// No limit for its beginning; the stall timeout from then on.
    Endless,
    /// The stall timeout, from the beginning.
    Stall,
    Until(Instant),
}

impl Conversation {
    /// A conversation over `stream`. Nothing else may read from the stream.
    pub fn new(stream: Arc<Stream>) -> Self {
        let lines = Lines::default();
        Self { stream, lines }
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// As [`send_message`].
    ///
    /// # Errors
    /// When the stream breaks, or the message is too long.
    pub fn send(&self, message: &impl Serialize) -> Result<(), ConversationError> {
        send_message(&self.stream, message)
    }

    /// Waits for a message, without limit for its beginning.
    ///
    /// # Errors
    /// When the stream breaks or ends, or the received bytes are not a message.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<T, ConversationError> {
        let received = self.next(Patience::Endless)?;
        received.ok_or_else(|| self.silent(self.stream.stall_timeout()))
    }

    /// Waits for a message, which must begin within the stream's stall timeout.
    ///
    /// # Errors
    /// As [`receive`](Self::receive), and when no message arrives in time.
    pub fn receive_soon<T: DeserializeOwned>(&mut self) -> Result<T, ConversationError> {
        let received = self.next(Patience::Stall)?;
        received.ok_or_else(|| self.silent(self.stream.stall_timeout()))
    }

    /// Waits for a message, which must be complete `within` this time.
    ///
    /// # Errors
    /// As [`receive`](Self::receive), and when no message arrives in time.
    pub fn receive_within<T: DeserializeOwned>(
        &mut self,
        within: Duration,
    ) -> Result<T, ConversationError> {
        let received = self.receive_until(Instant::now() + within)?;
        received.ok_or_else(|| self.silent(within))
    }

    /// The next message; `None` if it is not complete by `deadline`.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_until<T: DeserializeOwned>(
        &mut self,
        deadline: Instant,
    ) -> Result<Option<T>, ConversationError> {
        self.next(Patience::Until(deadline))
    }

    /// Receives the `len` bytes after the last message, or at the beginning of the conversation. The length is not trusted: memory
    /// grows with the received bytes.
    ///
    /// # Errors
    /// When the stream breaks, stalls or ends before.
    pub fn receive_bytes(&mut self, len: usize) -> Result<Vec<u8>, ConversationError> {
        let mut bytes = self.lines.take_rest(len);
        while bytes.len() < len {
            let start = bytes.len();
            bytes.resize(len.min(start + (1 << 20)), 0);
            let read = self.stream.read_full(&mut bytes[start..]);
            let read = read.map_err(|error| match is_stall(&error) {
                true => ConversationError::Stalled(self.stream.stall_timeout()),
                false => error.into(),
            })?;
            if start + read < bytes.len() {
                let (got, wanted) = (start + read, len);
                return Err(ConversationError::Truncated { got, wanted });
            }
        }
        Ok(bytes)
    }

    fn next<T: DeserializeOwned>(
        &mut self,
        patience: Patience,
    ) -> Result<Option<T>, ConversationError> {
        let mut piece = [0; 4096];
        loop {
            if let Some(message) = self.lines.next_message()? {
                return Ok(Some(message));
            }
            let in_message = self.lines.is_in_message();
            let read = match patience {
                Patience::Until(deadline) => self.stream.read_until(&mut piece, Some(deadline)),
                Patience::Endless if !in_message => self.stream.read_until(&mut piece, None),
                _ => match (&mut &*self.stream).read(&mut piece) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                    Err(error) if in_message && is_stall(&error) => Ok(None),
                    read => read.map(Some),
                },
            };
            match read? {
                Some(0) if in_message => return Err(ConversationError::Cut),
                Some(0) => return Err(ConversationError::Closed),
                Some(read) => self.lines.push(&piece[..read]),
                None => return Ok(None),
            }
        }
    }

    /// Error for a message that has not arrived in this time.
    fn silent(&self, time: Duration) -> ConversationError {
        match self.lines.is_in_message() {
            true => ConversationError::Stalled(time),
            false => ConversationError::Silent(time),
        }
    }
}

/// Sends a message. Another thread may receive from the stream meanwhile.
///
/// # Errors
/// When the stream breaks, or the message is too long.
pub fn send_message(stream: &Stream, message: &impl Serialize) -> Result<(), ConversationError> {
    Ok(stream.write_both(&encode(message)?, &[])?)
}

/// A unique id that cannot be guessed, from the kernel: AWS-LC would first seed its own generator, for 20 ms while a guest may wait.
///
/// # Errors
/// When the system has no random bytes.
pub fn random_id<const LEN: usize>() -> io::Result<[u8; LEN]> {
    let mut id = [0; LEN];
    getrandom(&mut id, GetRandomFlags::empty())?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, thread};

    use handover::{MAX_LINE, SourceMessage};
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LIMIT: Duration = Duration::from_secs(60);

    fn pair() -> [Arc<Stream>; 2] {
        let (near, far) = UnixStream::pair().unwrap();
        [near, far].map(|end| Arc::new(Stream::from(end)))
    }

    /// Reads from a peer that sends `bytes` and closes.
    fn received<T>(bytes: &[u8], read: impl FnOnce(&mut Conversation) -> T) -> T {
        let [ours, theirs] = pair();
        theirs.write_both(bytes, &[]).unwrap();
        drop(theirs);
        read(&mut Conversation::new(ours))
    }

    proptest! {
        #[test]
        fn bytes_after_a_message_and_the_next_message_arrive(state in vec(any::<u8>(), 0..10_000)) {
            let len = state.len() as u64;
            let mut bytes = encode(&SourceMessage::State { len }).unwrap();
            bytes.extend(&state);
            bytes.extend(encode(&SourceMessage::Settled).unwrap());
            received(&bytes, |peer| {
                assert_eq!(peer.receive::<SourceMessage>().unwrap(), SourceMessage::State { len });
                assert_eq!(peer.receive_bytes(state.len()).unwrap(), state);
                let next = peer.receive_within::<SourceMessage>(LIMIT);
                assert_eq!(next.unwrap(), SourceMessage::Settled);
                let end = peer.receive::<SourceMessage>();
                assert!(matches!(end, Err(ConversationError::Closed)), "{end:?}");
            });
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            let first = received(&bytes, Conversation::receive::<SourceMessage>);
            let is_empty = matches!(first, Err(ConversationError::Closed));
            prop_assert_eq!(is_empty, bytes.is_empty());
        }
    }

    #[test]
    fn lengths_are_limited() {
        let long = vec![b' '; MAX_LINE + 1];
        let [ours, theirs] = pair();
        thread::scope(|scope| {
            // More than the socket buffers.
            scope.spawn(|| theirs.write_both(&long, &[]));
            let long = Conversation::new(ours).receive::<SourceMessage>();
            let too_long = ConversationError::Frame(FrameError::TooLong);
            assert_eq!(long.unwrap_err().to_string(), too_long.to_string());
        });
        let (got, wanted) = (5, 1 << 40);
        let cut = received(b"short", |peer| peer.receive_bytes(wanted)).unwrap_err();
        let truncated = ConversationError::Truncated { got, wanted };
        assert_eq!(cut.to_string(), truncated.to_string());
    }

    #[test]
    fn silent_peer_times_out() {
        let [ours, theirs] = pair();
        ours.set_stall_timeout(SHORT).unwrap();
        let mut peer = Conversation::new(ours);
        let nothing = peer.receive_until::<SourceMessage>(Instant::now());
        assert!(nothing.unwrap().is_none());
        for silent in [
            peer.receive_within::<SourceMessage>(SHORT),
            peer.receive_soon(),
        ] {
            assert!(
                matches!(silent, Err(ConversationError::Silent(_))),
                "{silent:?}"
            );
        }
        theirs.write_both(b"{", &[]).unwrap();
        for stalled in [
            peer.receive_within::<SourceMessage>(SHORT),
            peer.receive_soon(),
            peer.receive(),
        ] {
            assert!(
                matches!(stalled, Err(ConversationError::Stalled(_))),
                "{stalled:?}"
            );
        }
        theirs.finish();
        let cut = peer.receive::<SourceMessage>();
        assert!(matches!(cut, Err(ConversationError::Cut)), "{cut:?}");
    }
}
