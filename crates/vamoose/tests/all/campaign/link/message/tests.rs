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

/// A piece and its kind.
type Piece = (Vec<u8>, Kind);

/// All pieces, and what is left, when so many bytes arrive at once.
fn split(direction: Direction, said: &[u8], size: usize) -> (Vec<Piece>, Vec<u8>) {
    let mut splitter = Splitter::new(direction);
    let (mut pieces, mut waiting) = (Vec::new(), Vec::new());
    let mut is_control = direction == Direction::ToDialler;
    for part in said.chunks(size) {
        waiting.extend_from_slice(part);
        while let Some((len, kind)) = splitter.split(&waiting, is_control) {
            is_control |= kind == Kind::Attach(0);
            pieces.push((waiting.drain(..len).collect(), kind));
        }
    }
    (pieces, waiting)
}

#[test]
fn messages_are_found_however_they_arrive() {
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
        let (pieces, rest) = split(Direction::ToListener, &said, size);
        let kinds: Vec<_> = pieces.iter().map(|(_, kind)| kind.clone()).collect();
        assert_eq!(kinds, expected);
        let pieces = pieces.into_iter().flat_map(|(bytes, _)| bytes);
        assert_eq!(pieces.chain(rest).collect::<Vec<_>>(), said);
    }
}

#[test]
fn answers_are_found() {
    let answer = frame(0, b"{\"answer\":\"running\"}\n");
    let said = [&[0; HELLO_LEN + ATTACH_LEN][..], &answer].concat();
    let (pieces, _) = split(Direction::ToDialler, &said, 1000);
    let expected = Kind::Messages(vec!["answer:running".to_owned()]);
    assert_eq!(pieces[2].1, expected);
}

#[test]
fn pages_are_not_looked_into() {
    let said = [&opening(3)[..], b"whatever comes"].concat();
    let (pieces, rest) = split(Direction::ToListener, &said, 1000);
    assert_eq!(pieces[1].1, Kind::Attach(3));
    assert_eq!(pieces[2].1, Kind::Bytes);
    assert!(rest.is_empty());
}

#[test]
fn bytes_that_are_no_frame_pass() {
    let said = [&opening(0)[..], &[7; 100]].concat();
    let (pieces, rest) = split(Direction::ToListener, &said, 1000);
    assert_eq!(pieces[2].1, Kind::Bytes);
    assert!(rest.is_empty());
}
