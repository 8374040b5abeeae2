//! Packets of which every field can be wrong.

use multifd_conformance::{PACKET_PAGES, PAGE};

pub(super) const MAGIC: u32 = 0x1122_3344;
pub(super) const SYNC: u32 = 1;
pub(super) const DEVICE_STATE: u32 = 0x40;

/// The first 64 bytes of channel `id`.
pub(super) fn initial(id: u8) -> Vec<u8> {
    let mut bytes = [MAGIC.to_be_bytes(), 1u32.to_be_bytes()].concat();
    bytes.resize(64, 0);
    bytes[24] = id;
    bytes
}

/// The fields of a packet, in the order of the wire.
#[derive(Clone)]
pub(super) struct Packet {
    pub(super) magic: u32,
    pub(super) version: u32,
    pub(super) flags: u32,
    pub(super) pages_alloc: u32,
    pub(super) normal: u32,
    pub(super) size: u32,
    pub(super) number: u64,
    pub(super) zero: u32,
    pub(super) reserved: [u8; 28],
    pub(super) name: [u8; 256],
    pub(super) table: [u64; PACKET_PAGES],
    pub(super) payload: Vec<u8>,
}

impl Packet {
    /// Without pages.
    pub(super) fn empty(flags: u32) -> Self {
        Self {
            magic: MAGIC,
            version: 1,
            flags,
            pages_alloc: PACKET_PAGES.to_le_bytes()[0].into(),
            normal: 0,
            size: 0,
            number: 0,
            zero: 0,
            reserved: [0; 28],
            name: [0; 256],
            table: [0; PACKET_PAGES],
            payload: Vec::new(),
        }
    }

    pub(super) fn sync() -> Self {
        Self::empty(SYNC)
    }

    /// With these pages of `mem`, the normal ones encoded as `payload`.
    pub(super) fn encoded(method: u32, normal: &[usize], zero: &[usize], payload: Vec<u8>) -> Self {
        let mut packet = Self::empty(method).named(b"mem");
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        (packet.normal, packet.zero) = (count(normal.len()), count(zero.len()));
        packet.size = count(payload.len());
        for (to, page) in packet.table.iter_mut().zip(normal.iter().chain(zero)) {
            *to = (page * PAGE) as u64;
        }
        packet.payload = payload;
        packet
    }

    /// By method none.
    pub(super) fn plain(normal: &[(usize, Vec<u8>)], zero: &[usize]) -> Self {
        let numbers: Vec<_> = normal.iter().map(|(page, _)| *page).collect();
        let payload = normal.iter().flat_map(|(_, bytes)| bytes).copied();
        Self::encoded(0, &numbers, zero, payload.collect())
    }

    /// Of another RAM block.
    pub(super) fn named(mut self, name: &[u8]) -> Self {
        self.name = [0; 256];
        self.name[..name.len()].copy_from_slice(name);
        self
    }

    /// Changed.
    pub(super) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Header and payload.
    pub(super) fn parts(self) -> impl Iterator<Item = Vec<u8>> {
        let words = [
            self.magic,
            self.version,
            self.flags,
            self.pages_alloc,
            self.normal,
            self.size,
        ];
        let mut header: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        header.extend(self.number.to_be_bytes());
        header.extend(self.zero.to_be_bytes());
        header.extend(self.reserved);
        header.extend(self.name);
        header.extend(self.table.iter().flat_map(|offset| offset.to_be_bytes()));
        [header, self.payload]
            .into_iter()
            .filter(|part| !part.is_empty())
    }
}

/// A packet of device state, of `len` bytes by its header.
pub(super) fn device_state(flags: u32, len: u32, state: &[u8]) -> Vec<u8> {
    let words = [MAGIC, 1, flags];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    bytes.extend(b"0000:00:01.0/vfio");
    bytes.resize(12 + 256, 0);
    bytes.extend(7u32.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(state);
    bytes
}
