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

/// The methods, a row each: variant, name, bits of the flags field.
macro_rules! methods {
    ($($(#[$meta:meta])* $variant:ident $name:literal $bits:expr,)*) => {
        /// How the normal pages of one packet are encoded.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum Method {
            $($(#[$meta])* $variant,)*
        }

        impl Method {
            /// Every method of the wire format.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            /// The method's name: QEMU's, as in its `multifd-compression` parameter, where QEMU has it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            pub(crate) fn bits(self) -> u32 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

methods! {
    /// Pages back to back, as they are.
    #[default]
    None "none" 0,
    /// One zlib stream per channel, sync-flushed at the end of each packet.
    Zlib "zlib" 0x02,
    /// One zstd frame per channel, flushed at the end of each packet and never ended.
    Zstd "zstd" 0x04,
    /// Raw deflate per page, with a table of lengths.
    Qpl "qpl" 0x08,
    /// HiSilicon's accelerator framework.
    Uadk "uadk" 0x10,
    /// Concatenated gzip members per packet.
    Qatzip "qatzip" 0x20,
    /// One LZ4 block per packet. Vamoose's own.
    Lz4 "lz4" own(1),
    /// One zstd frame per packet, each by itself. Vamoose's own.
    ZstdFrames "zstd-frames" own(2),
    /// A table, and pages, some of which are differences to versions that the receiver has, encoded by another
    /// method. Vamoose's own.
    Delta "delta" own(3),
    /// Pages encoded by another method, without those that the receiver has in its page store, and a table. Vamoose's own.
    Shared "shared" own(4),
}

/// The bits of a method of Vamoose's own.
const fn own(number: u32) -> u32 {
    METHOD_MASK | number << OWN_SHIFT
}

impl Method {
    /// Whether there are QEMUs that know the method. The others are understood by Vamoose only: their
    /// packets carry all of QEMU's method bits at once and a number of their own beside them. Every
    /// QEMU refuses such a packet, whatever its own method, before it looks at the payload.
    pub fn is_stock(self) -> bool {
        self.bits() & OWN_MASK == 0
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
