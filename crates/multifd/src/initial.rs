//! The first 64 bytes of a data channel.

use crate::{
    InitialError, MAGIC, VERSION,
    ram::{part, read_u32},
};

/// Bytes of the initial packet.
pub const INITIAL_LEN: usize = 64;

/// Most channels a migration can have: ids are one byte, QEMU's own limit is 255.
pub const MAX_CHANNELS: usize = 255;

/// Introduces a data channel: whose it is and which one.
///
/// QEMU leaves 39 bytes of the initial packet reserved and reads none of them. A Vamoose that dials
/// announces there how many channels it will open, so that another Vamoose need not guess; see
/// [`Initial::announced_channels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initial {
    uuid: [u8; 16],
    channel: u8,
    announced_channels: Option<u8>,
}

impl Initial {
    /// The introduction of channel `channel` of a migration with `channels` channels; `uuid` is the
    /// guest's, all zeros if it has none.
    ///
    /// # Errors
    /// When there are more than [`MAX_CHANNELS`] channels or `channel` is not one of them.
    pub fn new(uuid: [u8; 16], channel: u8, channels: usize) -> Result<Self, InitialError> {
        let announced = u8::try_from(channels).map_err(|_| InitialError::Channels { channels })?;
        if channel >= announced {
            return Err(InitialError::ChannelId { channel, announced });
        }
        Ok(Self {
            uuid,
            channel,
            announced_channels: Some(announced),
        })
    }

    /// Parses the first packet of a channel.
    ///
    /// # Errors
    /// When the bytes do not begin a multifd channel. The channel's id is checked against the
    /// announced number of channels only, where there is one: a caller that knows the number must
    /// check `channel() < number` itself, since QEMU does not.
    pub fn parse(bytes: &[u8; INITIAL_LEN]) -> Result<Self, InitialError> {
        let [magic, version] = [0, VERSION_AT].map(|at| read_u32(bytes, at));
        let [channel, channels] = part(bytes, CHANNEL_AT);
        if magic != MAGIC {
            return Err(InitialError::Magic { found: magic });
        }
        if version != VERSION {
            return Err(InitialError::Version { found: version });
        }
        let announced_channels = (part(bytes, VAMOOSE_AT) == VAMOOSE).then_some(channels);
        if let Some(announced) = announced_channels
            && channel >= announced
        {
            return Err(InitialError::ChannelId { channel, announced });
        }
        Ok(Self {
            uuid: part(bytes, UUID_AT),
            channel,
            announced_channels,
        })
    }

    /// The 64 bytes to send.
    pub fn to_bytes(&self) -> [u8; INITIAL_LEN] {
        let mut bytes = [0; INITIAL_LEN];
        bytes[..VERSION_AT].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[VERSION_AT..UUID_AT].copy_from_slice(&VERSION.to_be_bytes());
        bytes[UUID_AT..CHANNEL_AT].copy_from_slice(&self.uuid);
        bytes[CHANNEL_AT] = self.channel;
        if let Some(channels) = self.announced_channels {
            bytes[CHANNEL_AT + 1] = channels;
            bytes[VAMOOSE_AT..RESERVED_AT].copy_from_slice(&VAMOOSE);
        }
        bytes
    }

    /// The guest's uuid; a destination QEMU refuses another than its own.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The channel's id, from 0.
    pub fn channel(&self) -> u8 {
        self.channel
    }

    /// The number of channels that the peer will open, where the peer is a Vamoose. QEMU does not send it.
    pub fn announced_channels(&self) -> Option<u8> {
        self.announced_channels
    }
}

/// Marks the reserved bytes as ours.
const VAMOOSE: [u8; 6] = *b"vamoos";

/// Where the fields are: magic, version, uuid, the channel's id. Behind it, in QEMU's reserved bytes: the announced number of channels,
/// and the mark.
const VERSION_AT: usize = 4;
const UUID_AT: usize = 8;
const CHANNEL_AT: usize = 24;
const VAMOOSE_AT: usize = 26;
const RESERVED_AT: usize = 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn qemu_announces_nothing() {
        let mut bytes = [0; INITIAL_LEN];
        bytes[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
        bytes[24] = 3;
        let initial = Initial::parse(&bytes).unwrap();
        assert_eq!((initial.channel(), initial.announced_channels()), (3, None));
        assert_eq!(initial.to_bytes(), bytes);
    }

    #[test]
    fn an_id_beyond_the_channels_is_refused() {
        let refused = InitialError::ChannelId {
            channel: 2,
            announced: 2,
        };
        assert_eq!(Initial::new([0; 16], 2, 2), Err(refused.clone()));
        let mut bytes = Initial::new([0; 16], 1, 2).unwrap().to_bytes();
        bytes[24] = 2;
        assert_eq!(Initial::parse(&bytes), Err(refused));
        assert_eq!(
            Initial::new([0; 16], 0, 256),
            Err(InitialError::Channels { channels: 256 })
        );
    }

    proptest! {
        #[test]
        fn built_header_parses_back(uuid: [u8; 16], channel in 0u8..254, more in 1usize..=64) {
            let channels = (usize::from(channel) + more).min(MAX_CHANNELS);
            let initial = Initial::new(uuid, channel, channels).unwrap();
            prop_assert_eq!(Initial::parse(&initial.to_bytes()), Ok(initial));
        }

        #[test]
        fn any_bytes_parse_or_are_refused(bytes: [[u8; 32]; 2]) {
            let bytes: [u8; INITIAL_LEN] = bytes.concat().try_into().unwrap();
            prop_assert!(Initial::parse(&bytes).is_ok() == (bytes[..8] == [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]));
        }
    }
}
