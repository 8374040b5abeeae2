//! The flags field of a packet: SYNC, compression method, device state.

use std::fmt;

use crate::PacketError;

pub(crate) const SYNC: u32 = 1;
pub(crate) const DEVICE_STATE: u32 = 0x40;
const METHOD_MASK: u32 = 0x3e;
pub(crate) const KNOWN_FLAGS: u32 = SYNC | METHOD_MASK | DEVICE_STATE;

/// How the normal pages of one packet are encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Method {
    /// Pages back to back, as they are.
    #[default]
    None,
    /// One zlib stream per channel, sync-flushed at the end of each packet.
    Zlib,
    /// One zstd frame per channel, flushed at the end of each packet and never ended.
    Zstd,
    /// Raw deflate per page, with a table of lengths.
    Qpl,
    /// HiSilicon's accelerator framework.
    Uadk,
    /// Concatenated gzip members per packet.
    Qatzip,
}

impl Method {
    /// Every method that has a bit on the wire.
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::Zlib,
        Self::Zstd,
        Self::Qpl,
        Self::Uadk,
        Self::Qatzip,
    ];

    /// QEMU's name for the method, as in its `multifd-compression` parameter.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Qpl => "qpl",
            Self::Uadk => "uadk",
            Self::Qatzip => "qatzip",
        }
    }

    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Zlib => 0x02,
            Self::Zstd => 0x04,
            Self::Qpl => 0x08,
            Self::Uadk => 0x10,
            Self::Qatzip => 0x20,
        }
    }

    pub(crate) fn from_flags(flags: u32) -> Result<Self, PacketError> {
        Self::ALL
            .into_iter()
            .find(|method| method.bits() == flags & METHOD_MASK)
            .ok_or(PacketError::AmbiguousMethod { flags })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
