//! The flags field of a packet: SYNC, compression method, device state.

use std::fmt;

use crate::PacketError;

pub(crate) const SYNC: u32 = 1;
pub(crate) const DEVICE_STATE: u32 = 0x40;
const METHOD_MASK: u32 = 0x3e;
/// Number of a method of Vamoose's own, next to all of QEMU's method bits; see [`Method::is_stock`].
const OWN_MASK: u32 = 0x0f00;
const OWN_SHIFT: u32 = 8;
pub(crate) const KNOWN_FLAGS: u32 = SYNC | METHOD_MASK | DEVICE_STATE | OWN_MASK;

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
    /// One LZ4 block per packet. Vamoose's own.
    Lz4,
    /// One zstd frame per packet, each by itself. Vamoose's own.
    ZstdFrames,
}

impl Method {
    /// Every method that can be told on the wire.
    pub const ALL: [Self; 8] = [
        Self::None,
        Self::Zlib,
        Self::Zstd,
        Self::Qpl,
        Self::Uadk,
        Self::Qatzip,
        Self::Lz4,
        Self::ZstdFrames,
    ];

    /// The method's name: QEMU's, as in its `multifd-compression` parameter, where QEMU has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Qpl => "qpl",
            Self::Uadk => "uadk",
            Self::Qatzip => "qatzip",
            Self::Lz4 => "lz4",
            Self::ZstdFrames => "zstd-frames",
        }
    }

    /// Whether there are QEMUs that know the method. The others are understood by Vamoose only: their
    /// packets carry all of QEMU's method bits at once and a number of their own beside them. Every
    /// QEMU refuses such a packet, whatever its own method, before it looks at the payload.
    pub fn is_stock(self) -> bool {
        !matches!(self, Self::Lz4 | Self::ZstdFrames)
    }

    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Zlib => 0x02,
            Self::Zstd => 0x04,
            Self::Qpl => 0x08,
            Self::Uadk => 0x10,
            Self::Qatzip => 0x20,
            Self::Lz4 => METHOD_MASK | 1 << OWN_SHIFT,
            Self::ZstdFrames => METHOD_MASK | 2 << OWN_SHIFT,
        }
    }

    pub(crate) fn from_flags(flags: u32) -> Result<Self, PacketError> {
        Self::ALL
            .into_iter()
            .find(|method| method.bits() == flags & (METHOD_MASK | OWN_MASK))
            .ok_or(PacketError::AmbiguousMethod { flags })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
