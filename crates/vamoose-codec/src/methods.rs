//! The table of methods: what each is, its levels, its engines in software and its decoder.
//!
//! A new method needs a row in `multifd`'s `flags` (name, bits), a row here, and a module with its format.
//! Encoders, decoders, command-line options and documentation read these rows.

use std::{fmt, ops::RangeInclusive};

use multifd::{Layout, Method};

#[cfg(feature = "lz4")]
use crate::lz4;
use crate::{
    DecodeError,
    engine::{Software, Unpack},
};
#[cfg(feature = "deflate")]
use crate::{qatzip, qpl, zlib};
#[cfg(feature = "zstd")]
use crate::{zstd, zstd_frames};

/// A method that this crate encodes and decodes.
pub struct MethodInfo {
    /// A short description of its packets.
    pub packets: &'static str,
    /// The levels that can be set; `None` for a method without levels.
    pub levels: Option<Levels>,
    /// The far sides that decode it.
    pub decoded_by: DecodedBy,
    /// The engines, the better one first; none for method none.
    pub(crate) software: &'static [Software],
    /// How the packets of a channel depend on each other.
    pub framing: Framing,
    /// The decoder of a new channel. `None` for method none.
    pub(crate) unpacker: Option<NewUnpacker>,
}

type NewUnpacker = fn(Layout) -> Result<Box<dyn Unpack>, DecodeError>;

/// The far sides that decode a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodedBy {
    /// Any QEMU that knows multifd.
    AnyQemu,
    /// QEMUs that were built with its library, which distributions' are not.
    SomeQemu,
    /// Another Vamoose only.
    Vamoose,
}

/// The default level of every method, as in QEMU.
pub(crate) const DEFAULT_LEVEL: i32 = 1;

/// The levels of a method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    /// The lowest and the highest.
    pub range: RangeInclusive<i32>,
    /// Whether a higher level is the faster one.
    pub higher_is_faster: bool,
    /// The level that is used for level 0.
    pub(crate) zero: i32,
}

/// How the packets of a channel depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// All packets of a channel are one stream, encoded and decoded one after the other.
    Stream,
    /// Each packet is decoded without the others: several can be encoded at once and in any order.
    Packet,
}

/// The method's row; `None` for a method that this crate does not implement, or was built without.
pub fn info(method: Method) -> Option<MethodInfo> {
    let info = match method {
        Method::None => MethodInfo {
            packets: "pages as they are",
            decoded_by: DecodedBy::AnyQemu,
            levels: None,
            software: &[],
            framing: Framing::Packet,
            unpacker: None,
        },
        #[cfg(feature = "deflate")]
        Method::Zlib => MethodInfo {
            packets: "one zlib stream per channel",
            decoded_by: DecodedBy::AnyQemu,
            levels: Some(Levels::of(zlib::LEVELS)),
            software: zlib::ENGINES,
            framing: Framing::Stream,
            unpacker: Some(|_| Ok(Box::new(zlib::Unpacker::new()))),
        },
        #[cfg(feature = "zstd")]
        Method::Zstd => MethodInfo {
            packets: "one zstd frame per channel",
            decoded_by: DecodedBy::AnyQemu,
            levels: Some(Levels::of_zstd()),
            software: zstd::ENGINES,
            framing: Framing::Stream,
            unpacker: Some(|_| Ok(Box::new(zstd::Unpacker::new()?))),
        },
        #[cfg(feature = "deflate")]
        Method::Qpl => MethodInfo {
            packets: "deflate per page, as Intel's IAA does it",
            decoded_by: DecodedBy::SomeQemu,
            levels: Some(Levels::of(qpl::LEVELS)),
            software: qpl::ENGINES,
            framing: Framing::Packet,
            unpacker: Some(|layout| Ok(Box::new(qpl::Unpacker::new(layout)?))),
        },
        #[cfg(feature = "deflate")]
        Method::Qatzip => MethodInfo {
            packets: "gzip members of 64 KiB, as Intel's QAT does it",
            decoded_by: DecodedBy::SomeQemu,
            levels: Some(Levels::of(qatzip::LEVELS)),
            software: qatzip::ENGINES,
            framing: Framing::Packet,
            unpacker: Some(|_| Ok(Box::new(qatzip::Unpacker::new()?))),
        },
        #[cfg(feature = "lz4")]
        Method::Lz4 => MethodInfo {
            packets: "one LZ4 block per packet",
            decoded_by: DecodedBy::Vamoose,
            levels: Some(Levels {
                higher_is_faster: true,
                ..Levels::of(lz4::LEVELS)
            }),
            software: lz4::ENGINES,
            framing: Framing::Packet,
            unpacker: Some(|_| Ok(Box::new(lz4::Unpacker))),
        },
        #[cfg(feature = "zstd")]
        Method::ZstdFrames => MethodInfo {
            packets: "one zstd frame per packet",
            decoded_by: DecodedBy::Vamoose,
            levels: Some(Levels::of_zstd()),
            software: zstd_frames::ENGINES,
            framing: Framing::Packet,
            unpacker: Some(|_| Ok(Box::new(zstd_frames::Unpacker::new()?))),
        },
        // Not built in. There is no engine for UADK; delta and shared wrap another method, see the modules of their names.
        _ => return None,
    };
    Some(info)
}

impl MethodInfo {
    /// Its engines in software and the levels that each serves, the better one first.
    pub fn engines(&self) -> impl Iterator<Item = (&'static str, RangeInclusive<i32>)> + '_ {
        self.levels.iter().flat_map(|levels| {
            let served = |engine: &Software| (engine.name, levels.within(&engine.levels));
            self.software.iter().map(served)
        })
    }
}

impl Levels {
    const fn of(range: RangeInclusive<i32>) -> Self {
        Self {
            range,
            higher_is_faster: false,
            zero: 0,
        }
    }

    #[cfg(feature = "zstd")]
    fn of_zstd() -> Self {
        Self {
            zero: zstd::OWN_DEFAULT_LEVEL,
            ..Self::of(zstd::levels())
        }
    }

    /// The part of `levels` that the method has.
    fn within(&self, levels: &RangeInclusive<i32>) -> RangeInclusive<i32> {
        *self.range.start().max(levels.start())..=*self.range.end().min(levels.end())
    }
}

/// As text: `0 to 9`. Negative levels are summarised, as the number of the lowest one means nothing to users.
impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self.range.start() {
            ..0 => f.write_str("negative (fast)")?,
            least => write!(f, "{least}")?,
        }
        write!(f, " to {}", self.range.end())?;
        if self.higher_is_faster {
            f.write_str(" (higher is faster)")?;
        }
        Ok(())
    }
}
