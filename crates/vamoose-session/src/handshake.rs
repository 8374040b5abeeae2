//! The handshake that makes a connection part of a session: four messages of fixed length, with or without TLS.
//!
//! ```text
//! client                                              server
//!   Hello:   lowest and highest version, nonce, whether references to a page store may be sent ──>
//!            <────── Answer: version or refusal, nonce, memory for versions of pages, whether there is a page store
//!   Attach:  session, stream, bytes received, proof ─>
//!            <────── Welcome: bytes received, proof; or refusal
//! ```
//!
//! With TLS, Hello follows the end of the client's TLS handshake at once: the server is authenticated by then, and reads Hello only
//! when it has accepted the client. The streams of a session can be opened side by side, in any order, each once.
//!
//! The secret of a session is derived from its first connection: HMAC-SHA-256 of both nonces, with the key that TLS exports for the
//! connection (RFC 5705; zeros without TLS). The session's id is derived from the secret. On each connection, both ends prove that
//! they know the secret by HMACs of all earlier messages and of the connection's own exported key. A proof is therefore useless on
//! another connection, and a version that was changed in transit is noticed. The id is sent over the network, the secret never.
//!
//! Without TLS, the secret only keeps out an attacker who has not seen the first connection.

use aws_lc_rs::{constant_time, hmac};
use thiserror::Error;

use crate::fields::{by_code, put, take};

/// The version that this program speaks.
pub const VERSION: u16 = 1;

/// Length of [`Hello`] and [`Answer`].
pub const HELLO_LEN: usize = 48;
/// Length of [`Attach`] and [`Welcome`].
pub const ATTACH_LEN: usize = 64;

/// An unpredictable number, used once.
pub type Nonce = [u8; 32];

/// A key known only to the two ends of one connection; zeros without TLS.
pub type Binding = [u8; 32];

/// Identifies a session on the network.
pub type SessionId = [u8; 16];

/// The client's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    lowest: u16,
    highest: u16,
    /// Whether the client listens to a server with a page store.
    pub takes_store: bool,
    nonce: Nonce,
}

/// The server's answer to [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    outcome: Result<u16, Refusal>,
    nonce: Nonce,
    /// Nothing with a refusal.
    pub offer: Offer,
}

/// What a server has for the pages of its client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// Memory for versions of pages, in MiB.
    pub page_cache: u16,
    /// A page store, for a client that takes one.
    pub has_store: bool,
}

/// The client's request to attach the connection to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attach {
    /// Session of the stream.
    pub target: Target,
    /// Number of the stream in its session, from 0.
    pub stream: u32,
    /// Purpose of the connection.
    pub intent: Intent,
    /// Offset up to which the client has received the stream.
    pub received: u64,
}

/// Session of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A new session.
    New,
    /// An existing session.
    Known(SessionId),
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Opens a stream.
    Open = 1,
    /// Resumes a stream.
    Resume,
    /// Reports that the client has given up the stream.
    Abort,
}

/// The server's answer to [`Attach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Offset up to which the server has received the stream, or why it refuses.
    pub outcome: Result<u64, Refusal>,
}

/// Why a server refuses a connection.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
#[non_exhaustive]
pub enum Refusal {
    #[error(
        "it speaks no version of the protocol that this end speaks: one of the two programs is too old"
    )]
    Version,
    #[error("it has too many connections")]
    Busy,
    #[error("it does not know the session: it was restarted, or has waited too long")]
    UnknownSession,
    #[error("the connection does not prove that it belongs to the session")]
    Proof,
    #[error("the session's stream has ended there")]
    Ended,
    #[error("it speaks TLS only")]
    Insecure,
    #[error("the connection is authenticated as another peer than the session")]
    OtherPeer,
    #[error("the received offset is not one that it has sent")]
    Offset,
    #[error("its reason is unknown to this version")]
    Other,
}

/// A handshake that failed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum HandshakeError {
    #[error("the peer is not Vamoose, or it uses TLS and this end does not")]
    Magic,
    #[error("the peer's handshake is malformed: {0}")]
    Malformed(&'static str),
    #[error("the peer refuses: {0}")]
    Refused(Refusal),
    #[error("the peer does not prove that it knows the session")]
    Proof,
}

impl Hello {
    /// The message of this version.
    pub fn new(nonce: Nonce) -> Self {
        Self {
            lowest: VERSION,
            highest: VERSION,
            takes_store: false,
            nonce,
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        put(&mut bytes, 8..10, self.lowest.to_be_bytes());
        put(&mut bytes, 10..12, self.highest.to_be_bytes());
        bytes[12] = self.takes_store.into();
        put(&mut bytes, 16..48, self.nonce);
        bytes
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// When no correct client sends these bytes.
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, HandshakeError> {
        if bytes[..8] != *MAGIC {
            return Err(HandshakeError::Magic);
        }
        zero(&bytes[13..16])?;
        let hello = Self {
            lowest: u16::from_be_bytes(take(bytes, 8..10)),
            highest: u16::from_be_bytes(take(bytes, 10..12)),
            takes_store: bytes[12] == 1,
            nonce: take(bytes, 16..48),
        };
        if bytes[12] > 1 {
            return Err(HandshakeError::Malformed("what it takes"));
        }
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
                offer: Offer::default(),
            },
            false => Self::refuse(Refusal::Version),
        }
    }

    /// Adds what the server has, unless the answer is a refusal.
    #[must_use]
    pub fn offering(self, offer: Offer) -> Self {
        match self.outcome {
            Ok(_) => Self { offer, ..self },
            Err(_) => self,
        }
    }

    /// An answer that refuses the connection.
    pub fn refuse(refusal: Refusal) -> Self {
        Self {
            outcome: Err(refusal),
            nonce: [0; 32],
            offer: Offer::default(),
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let (version, status) = match self.outcome {
            Ok(version) => (version, self.offer.has_store.into()),
            Err(refusal) => (0, refusal.code()),
        };
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        put(&mut bytes, 8..10, version.to_be_bytes());
        put(&mut bytes, 10..12, self.offer.page_cache.to_be_bytes());
        put(&mut bytes, 12..16, status.to_be_bytes());
        put(&mut bytes, 16..48, self.nonce);
        bytes
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// When no correct server sends these bytes.
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, HandshakeError> {
        if bytes[..8] != *MAGIC {
            return Err(HandshakeError::Magic);
        }
        let version = u16::from_be_bytes(take(bytes, 8..10));
        let page_cache = u16::from_be_bytes(take(bytes, 10..12));
        let nonce = take(bytes, 16..48);
        let status = u32::from_be_bytes(take(bytes, 12..16));
        let outcome = match (version, status) {
            (VERSION, 0 | 1) => Ok(version),
            (0, code @ 1..) => {
                zero(&bytes[10..12])?;
                zero(&nonce)?;
                Err(Refusal::of(code))
            }
            _ => return Err(HandshakeError::Malformed("its version")),
        };
        let offer = Offer {
            page_cache,
            has_store: outcome.is_ok() && status == 1,
        };
        Ok(Self {
            outcome,
            nonce,
            offer,
        })
    }

    /// The version to speak.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn accepted(&self) -> Result<u16, HandshakeError> {
        self.outcome.map_err(HandshakeError::Refused)
    }
}

/// The first two messages of a connection, and its channel binding.
pub struct Transcript {
    hello: [u8; HELLO_LEN],
    answer: [u8; HELLO_LEN],
    binding: Binding,
}

/// The secret shared by the two ends of a session.
#[derive(Clone)]
pub struct Secret(hmac::Key);

impl Transcript {
    /// Transcript of a connection with these two messages.
    pub fn new(hello: &Hello, answer: &Answer, binding: Binding) -> Self {
        Self {
            hello: hello.encode(),
            answer: answer.encode(),
            binding,
        }
    }

    /// Secret of the session that this connection begins.
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
    /// Id of the session.
    pub fn id(&self) -> SessionId {
        take(sign(&self.0, &[b"vamoose id"]).as_ref(), 0..16)
    }
}

impl Attach {
    /// Encodes the message, with the proof.
    pub fn encode(&self, transcript: &Transcript, secret: &Secret) -> [u8; ATTACH_LEN] {
        let mut bytes = [0; ATTACH_LEN];
        if let Target::Known(id) = self.target {
            put(&mut bytes, 0..16, id);
        }
        put(&mut bytes, 16..20, self.stream.to_be_bytes());
        bytes[20] = self.intent as u8;
        put(&mut bytes, 24..32, self.received.to_be_bytes());
        let proof = transcript.proof(secret, b"attach", &[&bytes[..32]]);
        bytes[32..].copy_from_slice(proof.as_ref());
        bytes
    }

    /// Decodes the message without verifying the proof: the session's secret must be looked up first.
    ///
    /// # Errors
    /// When no correct client sends these bytes.
    pub fn decode(bytes: &[u8; ATTACH_LEN]) -> Result<Self, HandshakeError> {
        zero(&bytes[21..24])?;
        let target = match take(bytes, 0..16) {
            NEW => Target::New,
            id => Target::Known(id),
        };
        let intents = [Intent::Open, Intent::Resume, Intent::Abort];
        let intent = by_code(&intents, 1, bytes[20]);
        let intent = intent.ok_or(HandshakeError::Malformed("its intent"))?;
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

    /// Verifies that the sender of the message knows the secret.
    pub fn is_proved(bytes: &[u8; ATTACH_LEN], transcript: &Transcript, secret: &Secret) -> bool {
        let proof = transcript.proof(secret, b"attach", &[&bytes[..32]]);
        constant_time::verify_slices_are_equal(proof.as_ref(), &bytes[32..]).is_ok()
    }
}

impl Welcome {
    /// Encodes the message. A refusal has no proof, as the refused client may not know the secret.
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

    /// Decodes the message: the offset up to which the server has received the stream.
    ///
    /// # Errors
    /// When the server refuses, or does not prove that it knows the secret.
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
        all.and_then(|at| u32::try_from(at + 1).ok())
            .unwrap_or(u32::MAX)
    }

    fn of(code: u32) -> Self {
        let at = usize::try_from(code).unwrap_or(usize::MAX).wrapping_sub(1);
        Self::ALL.get(at).copied().unwrap_or(Self::Other)
    }

    /// In the order of the codes, which begin at 1.
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

/// Sent instead of an id for a new session. No session has this id: that is as unlikely as two sessions with one id.
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
            Answer::to(&hello, [2; 32]).offering(Offer {
                page_cache: 256,
                has_store: true,
            }),
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
            takes_store: false,
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
