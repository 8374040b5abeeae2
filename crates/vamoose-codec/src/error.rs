//! What can go wrong, and whose fault it is.

use multifd::Method;
use thiserror::Error;

/// A method or level that cannot be had.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettingsError {
    /// The method has levels, but not this one.
    #[error("{method} has no level {level}, only {min} to {max}")]
    Level {
        /// The method asked for.
        method: Method,
        /// The level asked for.
        level: i32,
        /// The lowest level there is.
        min: i32,
        /// The highest level there is.
        max: i32,
    },
    /// A level was given to a method without levels.
    #[error("method {method} takes no level, but level {level} was given")]
    NoLevels {
        /// The method asked for.
        method: Method,
        /// The level asked for.
        level: i32,
    },
    /// The method exists in QEMU, but not here.
    #[error("method {method} is not built in")]
    NotBuilt {
        /// The method asked for.
        method: Method,
    },
    /// Hardware that was asked for by name is not there.
    #[error("engine {engine} is absent")]
    EngineAbsent {
        /// The engine asked for.
        engine: &'static str,
        /// Why it is absent.
        #[source]
        reason: Absence,
    },
    /// Hardware that was asked for by name cannot do the method.
    #[error("engine {engine} does not do method {method}, only {}", names(serves))]
    EngineMethod {
        /// The engine asked for.
        engine: &'static str,
        /// The method asked for.
        method: Method,
        /// The methods that it does.
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
    /// The caller gave more than fits into a packet.
    #[error("{len} bytes of pages were given for one packet, at most {max} fit")]
    Input {
        /// Bytes given.
        len: usize,
        /// Most bytes that fit.
        max: usize,
    },
    /// There is no such encoder.
    #[error("no encoder for these settings")]
    Settings(#[from] SettingsError),
    /// The method has no format for pages of this size.
    #[error("{method} takes pages of {only} bytes, not of {page_size}")]
    PageSize {
        /// The encoder's method.
        method: Method,
        /// Bytes in a page of the guest.
        page_size: usize,
        /// Bytes in a page that it can encode.
        only: usize,
    },
    /// The payload would overrun the receiver's buffer. No known input does this.
    #[error("{method} turned {len} bytes of pages into more than the {max} a receiver takes")]
    TooLong {
        /// The encoder's method.
        method: Method,
        /// Bytes of pages in the packet.
        len: usize,
        /// Most bytes that a receiver takes.
        max: usize,
    },
    /// The library behind the encoder refused.
    #[error("the {method} encoder ({engine}) failed: {reason}")]
    Engine {
        /// The encoder's method.
        method: Method,
        /// The library, see [`Settings::engine`](crate::Settings::engine).
        engine: &'static str,
        /// The library's reason.
        reason: &'static str,
    },
    /// A device has returned wrong bytes, after packets that had not been checked.
    #[error(
        "engine {engine} has returned wrong bytes for a {method} packet, and {unchecked} packets had gone out \
         unchecked"
    )]
    Distrusted {
        /// The encoder's method.
        method: Method,
        /// The device.
        engine: &'static str,
        /// Packets that went out before, unchecked.
        unchecked: u64,
    },
    /// The encoder was used again after an error.
    #[error("the {method} encoder was used after it had failed")]
    AfterError {
        /// The encoder's method.
        method: Method,
    },
}

/// A payload that could not be decoded.
///
/// The peer's fault (or the network's), except where a variant is documented otherwise. Except after
/// [`DecodeError::Output`], which changes nothing, the decoder is of no further use.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    /// Raw pages whose payload is not exactly as long as the pages.
    #[error("the peer sent {found} bytes for raw pages of {expected} bytes")]
    RawLength {
        /// Bytes of payload.
        found: usize,
        /// Bytes of pages.
        expected: usize,
    },
    /// The payload ends before the last page is complete.
    #[error(
        "the peer's {method} payload of {payload} bytes holds {found} bytes of pages, expected {expected}"
    )]
    TooShort {
        /// The packet's method.
        method: Method,
        /// Bytes of payload.
        payload: usize,
        /// Bytes of pages that it decodes to.
        found: usize,
        /// Bytes of pages that the header announced.
        expected: usize,
    },
    /// The payload holds more than the announced pages.
    #[error(
        "the peer's {method} payload of {payload} bytes holds more than the expected {expected} bytes of pages"
    )]
    TooLong {
        /// The packet's method.
        method: Method,
        /// Bytes of payload.
        payload: usize,
        /// Bytes of pages that the header announced.
        expected: usize,
    },
    /// The payload continues after the last page, with nothing that the method defines.
    #[error("the peer's {method} payload has {left} bytes left after {expected} bytes of pages")]
    TrailingInput {
        /// The packet's method.
        method: Method,
        /// Bytes of payload that are left.
        left: usize,
        /// Bytes of pages that the header announced.
        expected: usize,
    },
    /// The peer ended the stream, which has to last as long as the channel.
    #[error(
        "the peer ended the channel's {method} stream, which must last for the whole migration"
    )]
    Ended {
        /// The packet's method.
        method: Method,
    },
    /// The payload is not in the method's format.
    #[error("the peer's {method} payload is corrupt: {reason}")]
    Corrupt {
        /// The packet's method.
        method: Method,
        /// The library's reason.
        reason: &'static str,
    },
    /// The peer uses a method that is not built in.
    #[error("the peer sent a packet with method {method}, which is not built in")]
    NotBuilt {
        /// The packet's method.
        method: Method,
    },
    /// The caller asked for more than fits into a packet: our fault.
    #[error("{len} bytes of pages were expected of one packet, at most {max} fit")]
    Output {
        /// Bytes of pages asked for.
        len: usize,
        /// Most bytes that fit.
        max: usize,
    },
    /// The library behind the decoder could not be set up: our host's fault.
    #[error("the {method} decoder could not be created: {reason}")]
    Engine {
        /// The packet's method.
        method: Method,
        /// The library's reason.
        reason: &'static str,
    },
    /// A device of ours has decoded to wrong bytes, after packets that had not been checked.
    #[error(
        "engine {engine} has decoded a {method} packet to wrong bytes, and {unchecked} packets had not been \
         checked"
    )]
    Distrusted {
        /// The packet's method.
        method: Method,
        /// The device.
        engine: &'static str,
        /// Packets that were decoded before, unchecked.
        unchecked: u64,
    },
    /// The decoder was used again after an error: our fault.
    #[error("the decoder was used after it had failed")]
    AfterError,
}
