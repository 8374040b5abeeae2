//! The method that a migration's packets are sent with.

use std::sync::Arc;

use multifd::{Layout, Method};
use vamoose_codec::{EncodeError, Encoded, Encoder, Engines, Health, Settings};

use crate::adaptive::Adaptive;

/// The method of the packets that a migration sends, and the engines that encode and decode for it.
/// Cheap to clone.
#[derive(Clone)]
pub enum MethodChoice {
    /// One method at one level: the engines' [settings](Engines::settings).
    Fixed(Engines),
    /// None, lz4 or zstd-frames, chosen for each packet and encoded in software. Only another Vamoose decodes it. Of the engines
    /// only the decoders are used.
    Adaptive(Engines),
}

/// Encodes the packets of one channel.
pub enum PacketEncoder {
    /// By one method.
    Fixed(Encoder),
    /// By a method chosen for each packet.
    Adaptive(Box<Adaptive>),
}

impl MethodChoice {
    /// Name of the adaptive method.
    pub const ADAPTIVE: &str = "auto";

    /// Name of the method.
    pub fn name(&self) -> &'static str {
        self.fixed()
            .map_or(Self::ADAPTIVE, |it| it.settings().method().name())
    }

    /// The method's level; `None` if the method has none, or chooses it for each packet.
    pub fn level(&self) -> Option<i32> {
        self.fixed()?.settings().level()
    }

    /// Name of the engine that encodes.
    pub fn engine(&self) -> &'static str {
        self.fixed().map_or(Self::ADAPTIVE, Engines::name)
    }

    fn fixed(&self) -> Option<&Engines> {
        match self {
            Self::Fixed(engines) => Some(engines),
            Self::Adaptive(_) => None,
        }
    }

    /// The engines.
    pub fn engines(&self) -> &Engines {
        match self {
            Self::Fixed(engines) | Self::Adaptive(engines) => engines,
        }
    }

    /// Whether packets of this method can hold differences: the packets must be independent, and for another Vamoose.
    pub fn takes_differences(&self) -> bool {
        let methods = [Method::Lz4, Method::ZstdFrames];
        self.fixed()
            .is_none_or(|it| methods.contains(&it.settings().method()))
    }

    /// An encoder for a new channel. `health` is the migration's.
    ///
    /// # Errors
    /// When the method's library cannot be set up (no memory), or the method does not support the page size.
    pub fn encoder(
        &self,
        layout: Layout,
        health: &Arc<Health>,
    ) -> Result<PacketEncoder, EncodeError> {
        Ok(match self {
            Self::Fixed(engines) => engines.encoder(layout, health)?.into(),
            Self::Adaptive(_) => PacketEncoder::Adaptive(Box::new(Adaptive::new(layout))),
        })
    }
}

impl Default for MethodChoice {
    /// The adaptive method, in software; method none if one of the adaptive method's own is not built in.
    fn default() -> Self {
        let engines = Engines::software(Settings::default());
        match [Method::Lz4, Method::ZstdFrames].map(vamoose_codec::info) {
            [Some(_), Some(_)] => Self::Adaptive(engines),
            _ => Self::Fixed(engines),
        }
    }
}

impl From<Engines> for MethodChoice {
    fn from(engines: Engines) -> Self {
        Self::Fixed(engines)
    }
}

impl From<Encoder> for PacketEncoder {
    fn from(encoder: Encoder) -> Self {
        Self::Fixed(encoder)
    }
}

impl PacketEncoder {
    /// See [`Encoder::add_checksums`].
    pub(crate) fn add_checksums(&mut self) -> Result<(), EncodeError> {
        match self {
            Self::Fixed(encoder) => encoder.add_checksums(),
            Self::Adaptive(adaptive) => {
                adaptive.add_checksums();
                Ok(())
            }
        }
    }

    /// The method of packets that are not encoded: without pages, or sent raw.
    pub(crate) fn method(&self) -> Method {
        match self {
            Self::Fixed(encoder) => encoder.method(),
            Self::Adaptive(_) => Method::None,
        }
    }

    /// Whether the next packet is sent raw, so that its pages need not be gathered.
    pub(crate) fn next_is_raw(&self) -> bool {
        match self {
            Self::Fixed(encoder) => encoder.method() == Method::None,
            Self::Adaptive(adaptive) => adaptive.next_is_raw(),
        }
    }

    /// Whether differences should be sent even if the next packet [is raw](Self::next_is_raw) otherwise.
    pub(crate) fn prefers_differences(&self) -> bool {
        match self {
            Self::Fixed(_) => false,
            Self::Adaptive(adaptive) => adaptive.prefers_differences(),
        }
    }

    /// Whether a packet may take more CPU time for fewer bytes: with method auto, while the link limits.
    pub(crate) fn saves_bytes(&self) -> bool {
        match self {
            Self::Fixed(_) => true,
            Self::Adaptive(adaptive) => adaptive.prefers_differences(),
        }
    }

    /// The next packet is about to be encoded.
    pub(crate) fn begin_encode(&mut self) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.begin_encode();
        }
    }

    /// See [`Encoder::encode`].
    pub(crate) fn encode<'a>(
        &mut self,
        pages: &'a [u8],
        out: &'a mut [u8],
    ) -> Result<Encoded<'a>, EncodeError> {
        match self {
            Self::Fixed(encoder) => encoder.encode(pages, out),
            Self::Adaptive(adaptive) => adaptive.encode(pages, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_method_has_its_own_name_and_no_level() {
        let adaptive = MethodChoice::default();
        assert_eq!((adaptive.name(), adaptive.level()), ("auto", None));
        // A name must not mean two things in reports, or to `serve`.
        assert!(
            Method::ALL
                .iter()
                .all(|method| method.name() != adaptive.name())
        );
    }
}
