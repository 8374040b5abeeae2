//! How a connection becomes one of a session: four messages of fixed length, in TLS or not.
//!
//! ```text
//! client                                              server
//!   Hello:   lowest and highest version, nonce ──────>
//!            <────── Answer: version or refusal, nonce, memory for versions of pages
//!   Attach:  session, stream, what it has, proof ────>
//!            <────── Welcome: what it has, proof; or refusal
//! ```
//!
//! The connection that begins a session makes its secret: HMAC-SHA-256 with the key that TLS exports for it (RFC 5705,
//! zeros without TLS) of both nonces. Its id is derived from the secret. Each connection proves that its ends know
//! the secret by HMACs of all messages so far and of its own exported key: neither can be used on another connection,
//! and a version that was changed on its way is noticed. The id goes over the network, the secret never does.
//!
//! Without TLS the secret keeps out who has not seen the first connection, and nobody else.

use aws_lc_rs::{constant_time, hmac};
use thiserror::Error;

use crate::fields::{put, take};

/// The version that this program speaks.
pub const VERSION: u16 = 1;

/// Length of [`Hello`] and [`Answer`].
pub const HELLO_LEN: usize = 48;
/// Length of [`Attach`] and [`Welcome`].
pub const ATTACH_LEN: usize = 64;

/// A number that nobody can foresee, used once.
pub type Nonce = [u8; 32];

/// A key that only both ends of one connection have; zeros without TLS.
pub type Binding = [u8; 32];

/// What names a session on the network.
pub type SessionId = [u8; 16];

/// The client's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    lowest: u16,
    highest: u16,
    nonce: Nonce,
}

/// The server's answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    outcome: Result<u16, Refusal>,
    nonce: Nonce,
    page_cache: u16,
}

/// What the client wants the connection to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attach {
    /// The session that the stream belongs to.
    pub target: Target,
    /// Of the session's streams, counted from 0.
    pub stream: u32,
    /// What the connection is for.
    pub intent: Intent,
    /// What the client has received of this stream.
    pub received: u64,
}

/// Which session a connection belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A new one.
    New,
    /// One that exists.
    Known(SessionId),
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// It opens a stream.
    Open,
    /// It carries a stream on.
    Resume,
    /// It says that the client has given the stream up.
    Abort,
}

/// The server's answer to that: what it has received of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// What the server has received, or why it refuses.
    pub outcome: Result<u64, Refusal>,
}

/// Why a server takes a connection no further.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
#[non_exhaustive]
pub enum Refusal {
    #[error("it speaks no version of the protocol that we do: one of the two programs is too old")]
    Version,
    #[error("it has too many connections")]
    Busy,
    #[error(
        "it does not know the session, or not any more: it was restarted, or has waited too long"
    )]
    UnknownSession,
    #[error("the connection does not prove that it belongs to the session")]
    Proof,
    #[error("the session's stream has ended there")]
    Ended,
    #[error("it speaks TLS only")]
    Insecure,
    #[error("the connection is authenticated as another peer than the session")]
    OtherPeer,
    #[error("what we have received and what it has sent do not fit")]
    Offset,
    #[error("it refuses for a reason that this version does not know")]
    Other,
}

/// Bytes that are no message of this handshake.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum HandshakeError {
    #[error(
        "the peer is no Vamoose, or one that uses TLS where this end does not, or an older one"
    )]
    Magic,
    #[error("the peer's handshake is malformed: {0}")]
    Malformed(&'static str),
    #[error("the peer refuses: {0}")]
    Refused(Refusal),
    #[error("the peer does not prove that it knows the session")]
    Proof,
}

impl Hello {
    /// The message of this program.
    pub fn new(nonce: Nonce) -> Self {
        Self {
            lowest: VERSION,
            highest: VERSION,
            nonce,
        }
    }

    /// The message's bytes.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        put(&mut bytes, 8..10, self.lowest.to_be_bytes());
        put(&mut bytes, 10..12, self.highest.to_be_bytes());
        put(&mut bytes, 16..48, self.nonce);
        bytes
    }

    /// Reads the message.
    ///
    /// # Errors
    /// When a correct client does not send it.
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, HandshakeError> {
        if bytes[..8] != *MAGIC {
            return Err(HandshakeError::Magic);
        }
        zero(&bytes[12..16])?;
        let hello = Self {
            lowest: u16::from_be_bytes(take(bytes, 8..10)),
            highest: u16::from_be_bytes(take(bytes, 10..12)),
            nonce: take(bytes, 16..48),
        };
        if hello.lowest > hello.highest || hello.lowest == 0 {
            return Err(HandshakeError::Malformed("its versions"));
        }
        Ok(hello)
    }
}

impl Answer {
    /// Chooses a version that both speak.
    pub fn to(hello: &Hello, nonce: Nonce) -> Self {
        match (hello.lowest..=hello.highest).contains(&VERSION) {
            true => Self {
                outcome: Ok(VERSION),
                nonce,
                page_cache: 0,
            },
            false => Self::refuse(Refusal::Version),
        }
    }

    /// Adds the memory for versions of pages, in MiB, unless the answer is a refusal.
    pub fn with_page_cache(self, page_cache: u16) -> Self {
        match self.outcome {
            Ok(_) => Self { page_cache, ..self },
            Err(_) => self,
        }
    }

    /// An answer that takes the connection no further.
    pub fn refuse(refusal: Refusal) -> Self {
        Self {
            outcome: Err(refusal),
            nonce: [0; 32],
            page_cache: 0,
        }
    }

    /// The message's bytes.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let (version, status) = match self.outcome {
            Ok(version) => (version, 0),
            Err(refusal) => (0, refusal.code()),
        };
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        put(&mut bytes, 8..10, version.to_be_bytes());
        put(&mut bytes, 10..12, self.page_cache.to_be_bytes());
        put(&mut bytes, 12..16, status.to_be_bytes());
        put(&mut bytes, 16..48, self.nonce);
        bytes
    }

    /// Reads the message.
    ///
    /// # Errors
    /// When a correct server does not send it.
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, HandshakeError> {
        if bytes[..8] != *MAGIC {
            return Err(HandshakeError::Magic);
        }
        let version = u16::from_be_bytes(take(bytes, 8..10));
        let page_cache = u16::from_be_bytes(take(bytes, 10..12));
        let nonce = take(bytes, 16..48);
        let outcome = match (version, u32::from_be_bytes(take(bytes, 12..16))) {
            (VERSION, 0) => Ok(version),
            (0, code @ 1..) => {
                zero(&bytes[10..12])?;
                zero(&nonce)?;
                Err(Refusal::of(code))
            }
            _ => return Err(HandshakeError::Malformed("its version")),
        };
        Ok(Self {
            outcome,
            nonce,
            page_cache,
        })
    }

    /// The server's memory for versions of pages, in MiB.
    pub fn page_cache(&self) -> u16 {
        self.page_cache
    }

    /// The version to speak.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn accepted(&self) -> Result<u16, HandshakeError> {
        self.outcome.map_err(HandshakeError::Refused)
    }
}

/// What both ends of a connection know of it after the first two messages.
pub struct Transcript {
    hello: [u8; HELLO_LEN],
    answer: [u8; HELLO_LEN],
    binding: Binding,
}

/// What the members of a session share.
#[derive(Clone)]
pub struct Secret(hmac::Key);

impl Transcript {
    /// Of a connection on which these two messages went.
    pub fn new(hello: &Hello, answer: &Answer, binding: Binding) -> Self {
        Self {
            hello: hello.encode(),
            answer: answer.encode(),
            binding,
        }
    }

    /// The secret of a session that this connection begins.
    pub fn secret(&self) -> Secret {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.binding);
        let secret = sign(&key, &[b"vamoose session", &self.hello, &self.answer]);
        Secret(hmac::Key::new(hmac::HMAC_SHA256, secret.as_ref()))
    }

    fn proof(&self, secret: &Secret, label: &[u8], messages: &[&[u8]]) -> hmac::Tag {
        let mut parts = vec![label, &self.hello, &self.answer, &self.binding];
        parts.extend_from_slice(messages);
        sign(&secret.0, &parts)
    }
}

impl Secret {
    /// What the session is called on the network.
    pub fn id(&self) -> SessionId {
        take(sign(&self.0, &[b"vamoose id"]).as_ref(), 0..16)
    }
}

impl Attach {
    /// The message's bytes, with the proof.
    pub fn encode(&self, transcript: &Transcript, secret: &Secret) -> [u8; ATTACH_LEN] {
        let mut bytes = [0; ATTACH_LEN];
        if let Target::Known(id) = self.target {
            put(&mut bytes, 0..16, id);
        }
        put(&mut bytes, 16..20, self.stream.to_be_bytes());
        bytes[20] = match self.intent {
            Intent::Open => 1,
            Intent::Resume => 2,
            Intent::Abort => 3,
        };
        put(&mut bytes, 24..32, self.received.to_be_bytes());
        let proof = transcript.proof(secret, b"attach", &[&bytes[..32]]);
        bytes[32..].copy_from_slice(proof.as_ref());
        bytes
    }

    /// Reads what is asked for, before it is proved: the session's secret has to be found first.
    ///
    /// # Errors
    /// When a correct client does not send it.
    pub fn decode(bytes: &[u8; ATTACH_LEN]) -> Result<Self, HandshakeError> {
        zero(&bytes[21..24])?;
        let target = match take(bytes, 0..16) {
            NEW => Target::New,
            id => Target::Known(id),
        };
        let intent = match bytes[20] {
            1 => Intent::Open,
            2 => Intent::Resume,
            3 => Intent::Abort,
            _ => return Err(HandshakeError::Malformed("its intent")),
        };
        let attach = Self {
            target,
            stream: u32::from_be_bytes(take(bytes, 16..20)),
            intent,
            received: u64::from_be_bytes(take(bytes, 24..32)),
        };
        if target == Target::New && (intent != Intent::Open || attach.stream != 0) {
            return Err(HandshakeError::Malformed("a new session that is resumed"));
        }
        Ok(attach)
    }

    /// Whether the sender of these bytes knows the secret.
    pub fn is_proved(bytes: &[u8; ATTACH_LEN], transcript: &Transcript, secret: &Secret) -> bool {
        let proof = transcript.proof(secret, b"attach", &[&bytes[..32]]);
        constant_time::verify_slices_are_equal(proof.as_ref(), &bytes[32..]).is_ok()
    }
}

impl Welcome {
    /// A refusal is not proved: who is refused may not know the secret.
    pub fn encode(
        &self,
        transcript: &Transcript,
        attach: &[u8; ATTACH_LEN],
        secret: Option<&Secret>,
    ) -> [u8; ATTACH_LEN] {
        let mut bytes = [0; ATTACH_LEN];
        match self.outcome {
            Ok(received) => put(&mut bytes, 8..16, received.to_be_bytes()),
            Err(refusal) => put(&mut bytes, 0..4, refusal.code().to_be_bytes()),
        }
        if let Some(secret) = secret {
            let proof = transcript.proof(secret, b"welcome", &[attach, &bytes[..32]]);
            bytes[32..].copy_from_slice(proof.as_ref());
        }
        bytes
    }

    /// What the server has received.
    ///
    /// # Errors
    /// When it refuses, or does not prove that it knows the secret.
    pub fn decode(
        bytes: &[u8; ATTACH_LEN],
        transcript: &Transcript,
        attach: &[u8; ATTACH_LEN],
        secret: &Secret,
    ) -> Result<u64, HandshakeError> {
        zero(&bytes[4..8])?;
        zero(&bytes[16..32])?;
        let received = u64::from_be_bytes(take(bytes, 8..16));
        match u32::from_be_bytes(take(bytes, 0..4)) {
            0 => {}
            _ if received != 0 => return Err(HandshakeError::Malformed("its refusal")),
            code => return Err(HandshakeError::Refused(Refusal::of(code))),
        }
        let proof = transcript.proof(secret, b"welcome", &[attach, &bytes[..32]]);
        match constant_time::verify_slices_are_equal(proof.as_ref(), &bytes[32..]) {
            Ok(()) => Ok(received),
            Err(_) => Err(HandshakeError::Proof),
        }
    }
}

impl Refusal {
    /// Whether another attempt may succeed.
    pub fn may_pass(self) -> bool {
        matches!(self, Self::Busy)
    }

    fn code(self) -> u32 {
        let all = Self::ALL.iter().position(|known| *known == self);
        // One byte is enough for them.
        all.and_then(|at| u32::try_from(at + 1).ok())
            .unwrap_or(u32::MAX)
    }

    fn of(code: u32) -> Self {
        let at = usize::try_from(code).unwrap_or(usize::MAX).wrapping_sub(1);
        Self::ALL.get(at).copied().unwrap_or(Self::Other)
    }

    /// In the order of their codes, which begin at 1.
    const ALL: [Self; 8] = [
        Self::Version,
        Self::Busy,
        Self::UnknownSession,
        Self::Proof,
        Self::Ended,
        Self::Insecure,
        Self::OtherPeer,
        Self::Offset,
    ];
}

const MAGIC: &[u8; 8] = b"VAMOOSE\x01";

/// In the place of a session's id; that none has this one is as sure as that no two have the same.
const NEW: SessionId = [0; 16];

fn sign(key: &hmac::Key, parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    for part in parts {
        context.update(part);
    }
    context.sign()
}

fn zero(bytes: &[u8]) -> Result<(), HandshakeError> {
    match bytes.iter().all(|byte| *byte == 0) {
        true => Ok(()),
        false => Err(HandshakeError::Malformed("bytes that must be 0 are not")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ends {
        transcript: Transcript,
        secret: Secret,
    }

    fn ends() -> Ends {
        let hello = Hello::new([1; 32]);
        let answer = Answer::to(&hello, [2; 32]);
        let transcript = Transcript::new(&hello, &answer, [3; 32]);
        let secret = transcript.secret();
        Ends { transcript, secret }
    }

    fn attach(secret: &Secret) -> Attach {
        Attach {
            target: Target::Known(secret.id()),
            stream: 7,
            intent: Intent::Resume,
            received: 1 << 40,
        }
    }

    #[test]
    fn messages_round_trip() {
        let hello = Hello::new([1; 32]);
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        for answer in [
            Answer::to(&hello, [2; 32]),
            Answer::to(&hello, [2; 32]).with_page_cache(256),
            Answer::refuse(Refusal::Busy),
        ] {
            assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        }
        let Ends { transcript, secret } = ends();
        let attach = attach(&secret);
        let bytes = attach.encode(&transcript, &secret);
        assert_eq!(Attach::decode(&bytes), Ok(attach));
        assert!(Attach::is_proved(&bytes, &transcript, &secret));
        let welcome = Welcome { outcome: Ok(9) }.encode(&transcript, &bytes, Some(&secret));
        assert_eq!(
            Welcome::decode(&welcome, &transcript, &bytes, &secret),
            Ok(9)
        );
        for refusal in Refusal::ALL {
            let outcome = Err(refusal);
            let bytes_of_it = Welcome { outcome }.encode(&transcript, &bytes, None);
            let decoded = Welcome::decode(&bytes_of_it, &transcript, &bytes, &secret);
            assert_eq!(decoded, Err(HandshakeError::Refused(refusal)));
        }
    }

    /// Whatever changes on its way, one end notices: it cannot read the message, it refuses, or the proofs do not fit.
    #[test]
    fn every_flipped_bit_is_noticed() {
        for message in 0..4 {
            let len = if message < 2 { HELLO_LEN } else { ATTACH_LEN };
            for bit in 0..len * 8 {
                let flipped = attempt(|at, bytes| {
                    if at == message {
                        bytes[bit / 8] ^= 1 << (bit % 8);
                    }
                });
                assert!(flipped.is_err(), "message {message}, bit {bit}");
            }
        }
        attempt(|_, _| ()).unwrap();
    }

    /// A handshake of a connection that carries on a session, with what is in between.
    fn attempt(mut between: impl FnMut(usize, &mut [u8])) -> Result<(), HandshakeError> {
        let secret = ends().secret;
        let sent = Hello::new([4; 32]);
        let mut hello = sent.encode();
        between(0, &mut hello);
        let got = Hello::decode(&hello)?;
        let answer = Answer::to(&got, [5; 32]);
        let mut bytes = answer.encode();
        between(1, &mut bytes);
        let answer_got = Answer::decode(&bytes)?;
        answer_got.accepted()?;
        let server = Transcript::new(&got, &answer, [6; 32]);
        let client = Transcript::new(&sent, &answer_got, [6; 32]);

        let attach_sent = attach(&secret).encode(&client, &secret);
        let mut attach_got = attach_sent;
        between(2, &mut attach_got);
        let parsed = Attach::decode(&attach_got)?;
        if parsed.target != Target::Known(secret.id()) {
            return Err(HandshakeError::Refused(Refusal::UnknownSession));
        }
        if !Attach::is_proved(&attach_got, &server, &secret) {
            return Err(HandshakeError::Refused(Refusal::Proof));
        }
        let mut welcome = Welcome { outcome: Ok(3) }.encode(&server, &attach_got, Some(&secret));
        between(3, &mut welcome);
        Welcome::decode(&welcome, &client, &attach_sent, &secret).map(drop)
    }

    #[test]
    fn a_proof_is_of_one_connection_and_one_direction() {
        let Ends { transcript, secret } = ends();
        let bytes = attach(&secret).encode(&transcript, &secret);
        let hello = Hello::new([1; 32]);
        let others = [
            // Another nonce of the server, another of the client, another TLS connection.
            Transcript::new(&hello, &Answer::to(&hello, [9; 32]), [3; 32]),
            Transcript::new(&Hello::new([9; 32]), &Answer::to(&hello, [2; 32]), [3; 32]),
            Transcript::new(&hello, &Answer::to(&hello, [2; 32]), [9; 32]),
        ];
        for other in &others {
            assert!(!Attach::is_proved(&bytes, other, &secret));
            assert_ne!(other.secret().id(), secret.id());
        }
        assert!(!Attach::is_proved(&bytes, &transcript, &others[0].secret()));
        let echoed = Welcome::decode(&bytes, &transcript, &bytes, &secret);
        assert!(echoed.is_err());
    }

    #[test]
    fn versions_that_do_not_meet_are_refused() {
        let hello = |lowest, highest| Hello {
            lowest,
            highest,
            nonce: [0; 32],
        };
        assert_eq!(Answer::to(&hello(1, 9), [0; 32]).accepted(), Ok(VERSION));
        let refused = Err(HandshakeError::Refused(Refusal::Version));
        let answer = Answer::to(&hello(VERSION + 1, 9), [1; 32]);
        assert_eq!(answer.accepted(), refused);
        // The client can read why.
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        assert!(Hello::decode(&hello(2, 1).encode()).is_err());
        assert!(Hello::decode(&hello(0, 1).encode()).is_err());
    }

    #[test]
    fn only_a_first_stream_begins_a_session() {
        let Ends { transcript, secret } = ends();
        let of = |intent, stream| Attach {
            target: Target::New,
            stream,
            intent,
            received: 0,
        };
        for wrong in [
            of(Intent::Resume, 0),
            of(Intent::Abort, 0),
            of(Intent::Open, 1),
        ] {
            assert!(Attach::decode(&wrong.encode(&transcript, &secret)).is_err());
        }
        assert!(Attach::decode(&of(Intent::Open, 0).encode(&transcript, &secret)).is_ok());
    }
}
