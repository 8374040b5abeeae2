//! What can go wrong, and whose fault it is.
#![allow(missing_docs, reason = "the messages say it")]

use std::cmp::Ordering;

use multifd::Method;
use thiserror::Error;

/// A method, level or engine that is not available.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettingsError {
    #[error("{method} has no level {level}, only {min} to {max}")]
    Level {
        method: Method,
        level: i32,
        min: i32,
        max: i32,
    },
    #[error("method {method} takes no level, but level {level} was given")]
    NoLevels { method: Method, level: i32 },
    /// The method exists in QEMU, but not here.
    #[error("method {method} is not built in")]
    NotBuilt { method: Method },
    /// Hardware that was named is absent.
    #[error("engine {engine} is absent")]
    EngineAbsent {
        engine: &'static str,
        #[source]
        reason: Absence,
    },
    /// Hardware that was named does not support the method.
    #[error("engine {engine} does not do method {method}, only {}", names(serves))]
    EngineMethod {
        engine: &'static str,
        method: Method,
        serves: &'static [Method],
    },
}

/// Why an engine is absent.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Absence(pub String);

fn names(methods: &[Method]) -> String {
    let names: Vec<_> = methods.iter().map(|method| method.name()).collect();
    names.join(" and ")
}

/// A packet that could not be encoded: never the peer's fault.
///
/// Except after [`EncodeError::Input`], which changes nothing, the encoder is of no further use: it
/// may hold history that the peer will never see.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    #[error("{len} bytes of pages were given for one packet, at most {max} fit")]
    Input { len: usize, max: usize },
    #[error("no encoder for these settings")]
    Settings(#[from] SettingsError),
    #[error("{method} takes pages of {only} bytes, not of {page_size}")]
    PageSize {
        method: Method,
        page_size: usize,
        only: usize,
    },
    /// The payload would overrun the receiver's buffer. No known input does this.
    #[error("{method} turned {len} bytes of pages into more than the {max} a receiver takes")]
    TooLong {
        method: Method,
        len: usize,
        max: usize,
    },
    #[error("the {method} encoder ({engine}) failed: {reason}")]
    Engine {
        method: Method,
        engine: &'static str,
        reason: &'static str,
    },
    #[error(
        "engine {engine} has returned wrong bytes for a {method} packet, and {unchecked} packets had gone out \
         unchecked"
    )]
    Distrusted {
        method: Method,
        engine: &'static str,
        unchecked: u64,
    },
    #[error("the {method} encoder was used after it had failed")]
    AfterError { method: Method },
}

/// A payload that could not be decoded.
///
/// The peer's fault (or the network's), except where a variant is documented otherwise. Except after
/// [`DecodeError::Output`], which changes nothing, the decoder is of no further use.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    #[error("the peer sent {found} bytes for raw pages of {expected} bytes")]
    RawLength { found: usize, expected: usize },
    #[error(
        "the peer's {method} payload of {payload} bytes holds {found} bytes of pages, expected {expected}"
    )]
    TooShort {
        method: Method,
        payload: usize,
        found: usize,
        expected: usize,
    },
    #[error(
        "the peer's {method} payload of {payload} bytes holds more than the expected {expected} bytes of pages"
    )]
    TooLong {
        method: Method,
        payload: usize,
        expected: usize,
    },
    /// The payload continues after the last page, with nothing that the method defines.
    #[error("the peer's {method} payload has {left} bytes left after {expected} bytes of pages")]
    TrailingInput {
        method: Method,
        left: usize,
        expected: usize,
    },
    #[error(
        "the peer ended the channel's {method} stream, which must last for the whole migration"
    )]
    Ended { method: Method },
    #[error("the peer's {method} payload is corrupt: {reason}")]
    Corrupt {
        method: Method,
        reason: &'static str,
    },
    #[error("the peer sent a packet with method {method}, which is not built in")]
    NotBuilt { method: Method },
    /// The caller expected more than fits into a packet: our fault.
    #[error("{len} bytes of pages were expected of one packet, at most {max} fit")]
    Output { len: usize, max: usize },
    /// The library behind the decoder could not be set up: our host's fault.
    #[error("the {method} decoder could not be created: {reason}")]
    Engine {
        method: Method,
        reason: &'static str,
    },
    /// A device of ours has decoded to wrong bytes, after packets that had not been checked.
    #[error(
        "engine {engine} has decoded a {method} packet to wrong bytes, and {unchecked} packets had not been \
         checked"
    )]
    Distrusted {
        method: Method,
        engine: &'static str,
        unchecked: u64,
    },
    /// The decoder was used again after an error: our fault.
    #[error("the decoder was used after it had failed")]
    AfterError,
}

impl DecodeError {
    pub(crate) fn trailing(method: Method, left: usize, expected: usize) -> Self {
        Self::TrailingInput {
            method,
            left,
            expected,
        }
    }

    pub(crate) fn too_long(method: Method, payload: usize, expected: usize) -> Self {
        Self::TooLong {
            method,
            payload,
            expected,
        }
    }

    /// Checks that a payload of `payload` bytes has been decoded to `expected` bytes of pages: `found` are there.
    pub(crate) fn check_len(
        method: Method,
        payload: usize,
        found: usize,
        expected: usize,
    ) -> Result<(), Self> {
        match found.cmp(&expected) {
            Ordering::Equal => Ok(()),
            Ordering::Less => Err(Self::TooShort {
                method,
                payload,
                found,
                expected,
            }),
            Ordering::Greater => Err(Self::too_long(method, payload, expected)),
        }
    }
}
