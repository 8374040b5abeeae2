//! Cuts what a connection of a session says into messages, as far as the proxy has to know them.
//!
//! ```text
//!  source       Hello, Attach (stream 0 is the control connection's), frames: a preamble, lines of JSON, or pages
//!  destination  Answer, Welcome, frames
//! ```
//! A session without TLS, that is. Each message is written at once, so it is in a frame of its own. When a stream goes on over
//! another connection, frames come again.

use serde_json::Value;
use vamoose_session::frame::{HEADER_LEN, Header};
use vamoose_session::handshake::{ATTACH_LEN, Attach, HELLO_LEN};

use super::Way;

/// A piece of what goes one way over a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) bytes: Vec<u8>,
    pub(super) kind: Kind,
}

/// What a piece is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Of the handshake.
    Handshake,
    /// The part of the handshake by which the connection becomes that of the stream of this number.
    Attach(u32),
    /// Messages of a control connection, such as `request:commit`: one, as a rule, and none in a heartbeat.
    Messages(Vec<String>),
    /// Anything that is not looked into.
    Bytes,
}

/// Collects bytes until there is a piece.
pub(super) struct Cutter {
    way: Way,
    collected: Vec<u8>,
    next: Next,
}

/// What the next bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Hello,
    Attach,
    Frames,
    /// This is no session.
    Unknown,
}

/// Before the messages of a control connection.
const PREAMBLE: usize = 24;

impl Cutter {
    pub(super) fn new(way: Way) -> Self {
        Self {
            way,
            collected: Vec::new(),
            next: Next::Hello,
        }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.collected.extend_from_slice(bytes);
    }

    /// The next piece, if it is complete, of a connection that is known to be a control connection or not.
    pub(super) fn next(&mut self, is_control: bool) -> Option<Piece> {
        let len = match self.next {
            Next::Hello => HELLO_LEN,
            Next::Attach => ATTACH_LEN,
            Next::Frames if is_control => match Header::decode(self.collected.first_chunk()?) {
                Ok(header) => HEADER_LEN + header.len,
                Err(_) => self.give_up(),
            },
            Next::Frames | Next::Unknown => self.collected.len(),
        };
        if len == 0 || len > self.collected.len() {
            return None;
        }
        let bytes: Vec<u8> = self.collected.drain(..len).collect();
        let kind = match self.next {
            Next::Hello => {
                self.next = Next::Attach;
                Kind::Handshake
            }
            Next::Attach => {
                self.next = Next::Frames;
                self.attach(&bytes)
            }
            Next::Frames if is_control => Kind::Messages(self.messages(&bytes)),
            Next::Frames | Next::Unknown => Kind::Bytes,
        };
        Some(Piece { bytes, kind })
    }

    /// The beginning of a piece whose end will not come.
    pub(super) fn rest(self) -> Vec<u8> {
        self.collected
    }

    /// Everything that has been collected is of one piece, and so is what comes.
    fn give_up(&mut self) -> usize {
        self.next = Next::Unknown;
        self.collected.len()
    }

    fn attach(&self, bytes: &[u8]) -> Kind {
        let attach = bytes.first_chunk().map(Attach::decode);
        match (self.way, attach) {
            (Way::There, Some(Ok(attach))) => Kind::Attach(attach.stream),
            _ => Kind::Handshake,
        }
    }

    fn messages(&self, frame: &[u8]) -> Vec<String> {
        let (header, mut payload) = frame.split_at(HEADER_LEN);
        let header = header.first_chunk().map(Header::decode);
        if self.way == Way::There && matches!(header, Some(Ok(header)) if header.offset == 0) {
            payload = payload.get(PREAMBLE..).unwrap_or_default();
        }
        let side = match self.way {
            Way::There => "request",
            Way::Back => "answer",
        };
        let lines = payload.split(|byte| *byte == b'\n');
        let words = lines.filter_map(|line| {
            let message: Value = serde_json::from_slice(line).ok()?;
            Some(format!("{side}:{}", message[side].as_str()?))
        });
        words.collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use vamoose_session::frame;
    use vamoose_session::handshake::{Answer, Hello, Intent, Target, Transcript};

    use super::*;

    /// The handshake of a source's connection that opens a stream, as it would be if the server answered `[2; 32]`.
    pub(crate) fn opening(stream: u32) -> Vec<u8> {
        let hello = Hello::new([1; 32]);
        let transcript = Transcript::new(&hello, &Answer::to(&hello, [2; 32]), [0; 32]);
        let secret = transcript.secret();
        let attach = Attach {
            target: match stream {
                0 => Target::New,
                _ => Target::Known(secret.id()),
            },
            stream,
            intent: Intent::Open,
            received: 0,
        };
        [
            &hello.encode()[..],
            &attach.encode(&transcript, &secret)[..],
        ]
        .concat()
    }

    pub(crate) fn frame(offset: u64, payload: &[u8]) -> Vec<u8> {
        let header = Header {
            kind: frame::Kind::Data,
            len: payload.len(),
            ..Header::empty(frame::Kind::Data, offset, 0)
        };
        [&header.encode()[..], payload].concat()
    }

    /// All pieces, and what is left.
    fn cut(way: Way, said: &[u8], size: usize) -> (Vec<Piece>, Vec<u8>) {
        let mut cutter = Cutter::new(way);
        let (mut pieces, mut is_control) = (Vec::new(), way == Way::Back);
        for part in said.chunks(size) {
            cutter.add(part);
            while let Some(piece) = cutter.next(is_control) {
                is_control |= piece.kind == Kind::Attach(0);
                pieces.push(piece);
            }
        }
        (pieces, cutter.rest())
    }

    #[test]
    fn messages_are_cut_whatever_the_pieces() {
        let heartbeat = Header::empty(frame::Kind::Acknowledge, 54, 0).encode();
        let preamble = frame(0, b"VAMOOSEC\n{\"a\":1}\n89abcdef");
        let commit = frame(24, b"{\"request\":\"commit\",\"x\":1}\n");
        let state = frame(
            51,
            b"{\"request\":\"state\",\"len\":3}\n\n{\"\n{\"request\":\"settled\"}\n",
        );
        let said = [
            &opening(0)[..],
            &preamble,
            &commit,
            &heartbeat,
            &state,
            &commit[..50],
        ]
        .concat();
        let word = |word: &str| format!("request:{word}");
        let expected = [
            Kind::Handshake,
            Kind::Attach(0),
            Kind::Messages(vec![]),
            Kind::Messages(vec![word("commit")]),
            Kind::Messages(vec![]),
            Kind::Messages(vec![word("state"), word("settled")]),
        ];
        for size in [1, 7, 1000] {
            let (pieces, rest) = cut(Way::There, &said, size);
            let kinds: Vec<_> = pieces.iter().map(|piece| piece.kind.clone()).collect();
            assert_eq!(kinds, expected);
            let pieces = pieces.into_iter().flat_map(|piece| piece.bytes);
            assert_eq!(pieces.chain(rest).collect::<Vec<_>>(), said);
        }
    }

    #[test]
    fn answers_are_cut() {
        let answer = frame(0, b"{\"answer\":\"running\"}\n");
        let said = [&[0; HELLO_LEN + ATTACH_LEN][..], &answer].concat();
        let (pieces, _) = cut(Way::Back, &said, 1000);
        let expected = Kind::Messages(vec!["answer:running".to_owned()]);
        assert_eq!(pieces[2].kind, expected);
    }

    #[test]
    fn pages_are_not_looked_into() {
        let said = [&opening(3)[..], b"whatever comes"].concat();
        let (pieces, rest) = cut(Way::There, &said, 1000);
        assert_eq!(pieces[1].kind, Kind::Attach(3));
        assert_eq!(pieces[2].kind, Kind::Bytes);
        assert!(rest.is_empty());
    }

    #[test]
    fn what_is_no_frame_passes() {
        let said = [&opening(0)[..], &[7; 100]].concat();
        let (pieces, rest) = cut(Way::There, &said, 1000);
        assert_eq!(pieces[2].kind, Kind::Bytes);
        assert!(rest.is_empty());
    }
}
