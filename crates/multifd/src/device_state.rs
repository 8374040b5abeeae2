//! Packets with the state of a device (VFIO): known well enough to be passed on.

use crate::{PRELUDE_LEN, PacketError, Prelude, ram::read_u32};

/// Bytes of a device-state header, the 12 of the [`Prelude`] included.
pub const DEVICE_STATE_HEADER_LEN: usize = PRELUDE_LEN + 256 + 4 + 4;

/// Most bytes of device state that one packet may carry. QEMU's VFIO sends at most 1 MiB and a
/// small header at a time; the rest is margin, so that a hostile length allocates nothing large.
pub const MAX_DEVICE_STATE_PAYLOAD: u32 = 4 * 1024 * 1024;

/// Header of a device-state packet, kept as the bytes that it came as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceStateHeader {
    bytes: [u8; DEVICE_STATE_HEADER_LEN],
}

impl DeviceStateHeader {
    /// Parses the header of a packet whose first 12 bytes are `prelude`; `rest` is what follows
    /// them, up to the payload.
    ///
    /// # Errors
    /// When the payload would exceed [`MAX_DEVICE_STATE_PAYLOAD`].
    pub fn parse(
        prelude: Prelude,
        rest: &[u8; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN],
    ) -> Result<Self, PacketError> {
        let mut bytes = [0; DEVICE_STATE_HEADER_LEN];
        bytes[..PRELUDE_LEN].copy_from_slice(&prelude.to_bytes());
        bytes[PRELUDE_LEN..].copy_from_slice(rest);
        let header = Self { bytes };
        match header.payload_len_field() {
            len if len > MAX_DEVICE_STATE_PAYLOAD => Err(PacketError::DeviceStateTooLong { len }),
            _ => Ok(header),
        }
    }

    /// The device's id string, without its padding.
    pub fn id(&self) -> &[u8] {
        let id = &self.bytes[PRELUDE_LEN..PRELUDE_LEN + 256];
        id.split(|byte| *byte == 0).next().unwrap_or(id)
    }

    /// Which instance of the device.
    pub fn instance(&self) -> u32 {
        read_u32(&self.bytes, PRELUDE_LEN + 256)
    }

    /// Bytes of payload after the header, at most [`MAX_DEVICE_STATE_PAYLOAD`].
    pub fn payload_len(&self) -> usize {
        self.payload_len_field() as usize
    }

    /// The whole header as it goes on the wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn payload_len_field(&self) -> u32 {
        read_u32(&self.bytes, PRELUDE_LEN + 256 + 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Method, PacketKind};

    const PRELUDE: Prelude = Prelude {
        kind: PacketKind::DeviceState,
        sync: false,
        method: Method::None,
    };

    fn rest(payload_len: u32) -> [u8; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN] {
        let mut rest = [0; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN];
        rest[..4].copy_from_slice(b"vfio");
        rest[256..260].copy_from_slice(&7u32.to_be_bytes());
        rest[260..].copy_from_slice(&payload_len.to_be_bytes());
        rest
    }

    #[test]
    fn a_header_is_kept_to_the_byte() {
        let header = DeviceStateHeader::parse(PRELUDE, &rest(9)).unwrap();
        assert_eq!(header.id(), b"vfio");
        assert_eq!((header.instance(), header.payload_len()), (7, 9));
        assert_eq!(header.as_bytes()[PRELUDE_LEN..], rest(9));
        assert_eq!(header.as_bytes()[8..12], [0, 0, 0, 0x40]);
        assert_eq!(header.as_bytes().len(), 276);
    }

    #[test]
    fn four_gibibytes_are_refused() {
        assert_eq!(
            DeviceStateHeader::parse(PRELUDE, &rest(u32::MAX)),
            Err(PacketError::DeviceStateTooLong { len: u32::MAX })
        );
    }
}
