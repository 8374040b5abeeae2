//! The first 12 bytes of a packet, common to both kinds.

use crate::{
    MAGIC, PacketError, VERSION,
    flags::{DEVICE_STATE, KNOWN_FLAGS, Method, SYNC},
};

/// Bytes to read before the kind of a packet, and so the length of its header, is known.
pub const PRELUDE_LEN: usize = 12;

/// Content of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// Pages of a RAM block, a SYNC, or both (sources before 9.0).
    Ram,
    /// State of a device (VFIO), to be passed on as it is.
    DeviceState,
}

/// Magic, version and flags of a packet, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prelude {
    pub(crate) kind: PacketKind,
    pub(crate) sync: bool,
    pub(crate) method: Method,
}

impl Prelude {
    /// Parses the first 12 bytes of a packet.
    ///
    /// # Errors
    /// On a wrong magic or version, an unknown flag or flags that exclude each other.
    pub fn parse(bytes: &[u8; PRELUDE_LEN]) -> Result<Self, PacketError> {
        let [magic, version, flags] = words(bytes);
        if magic != MAGIC {
            return Err(PacketError::Magic { found: magic });
        }
        if version != VERSION {
            return Err(PacketError::Version { found: version });
        }
        if flags & !KNOWN_FLAGS != 0 {
            return Err(PacketError::UnknownFlags { flags });
        }
        let kind = if flags & DEVICE_STATE == 0 {
            PacketKind::Ram
        } else if flags == DEVICE_STATE {
            PacketKind::DeviceState
        } else {
            return Err(PacketError::MixedDeviceState { flags });
        };
        Ok(Self {
            kind,
            sync: flags & SYNC != 0,
            method: Method::from_flags(flags)?,
        })
    }

    /// Which header follows.
    pub fn kind(&self) -> PacketKind {
        self.kind
    }

    pub(crate) fn to_bytes(self) -> [u8; PRELUDE_LEN] {
        let flags = match self.kind {
            PacketKind::Ram => (u32::from(self.sync) * SYNC) | self.method.bits(),
            PacketKind::DeviceState => DEVICE_STATE,
        };
        let mut bytes = [0; PRELUDE_LEN];
        for (to, word) in bytes.chunks_exact_mut(4).zip([MAGIC, VERSION, flags]) {
            to.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }
}

fn words(bytes: &[u8; PRELUDE_LEN]) -> [u32; 3] {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *bytes;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(magic: u32, version: u32, flags: u32) -> Result<Prelude, PacketError> {
        let bytes = [magic, version, flags].map(u32::to_be_bytes).concat();
        Prelude::parse(&bytes.try_into().unwrap())
    }

    #[test]
    fn each_wrong_field_is_named() {
        assert_eq!(
            parse(0x1122_3345, 1, 0),
            Err(PacketError::Magic { found: 0x1122_3345 })
        );
        assert_eq!(parse(MAGIC, 2, 0), Err(PacketError::Version { found: 2 }));
        assert_eq!(
            parse(MAGIC, 1, 0x80),
            Err(PacketError::UnknownFlags { flags: 0x80 })
        );
        assert_eq!(
            parse(MAGIC, 1, 0x06),
            Err(PacketError::AmbiguousMethod { flags: 0x06 })
        );
        assert_eq!(
            parse(MAGIC, 1, 0x41),
            Err(PacketError::MixedDeviceState { flags: 0x41 })
        );
        // Methods of our own: without QEMU's bits, with a number that is not in use.
        for flags in [0x100, 0x102, 0x3e, 0x53e, 0xf3e] {
            assert_eq!(
                parse(MAGIC, 1, flags),
                Err(PacketError::AmbiguousMethod { flags })
            );
        }
        for (flags, method) in [
            (0x13e, Method::Lz4),
            (0x23e, Method::ZstdFrames),
            (0x33e, Method::Delta),
            (0x43e, Method::Shared),
        ] {
            assert_eq!(parse(MAGIC, 1, flags).map(|p| p.method), Ok(method));
        }
    }

    #[test]
    fn every_legal_flags_field_survives_a_round_trip() {
        for flags in 0..=KNOWN_FLAGS {
            if let Ok(prelude) = parse(MAGIC, 1, flags) {
                assert_eq!(prelude.to_bytes()[8..], flags.to_be_bytes());
            }
        }
    }
}
