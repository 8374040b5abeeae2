//! The file of a snapshot, as it is, and with an index as somebody likes it behind a right check. What can be opened is verified, which
//! reads every record.
//!
//! An input is two bytes for the length of the records, the records, and the index.

#![no_main]

use std::{fs::File, io::Write as _};

use libfuzzer_sys::fuzz_target;
use vamoose_live::snapshot::{Snapshot, SnapshotError};

fuzz_target!(|input: &[u8]| {
    let _ = opened(input);
    let Some(([high, low], rest)) = input.split_first_chunk() else {
        return;
    };
    let len = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
    let (records, index) = rest.split_at(len);
    let start = records.len() as u64;
    let trailer = trailer(start, start + index.len() as u64 + 4);
    let sum = crc32c::crc32c_append(crc32c::crc32c(&u64::MAX.to_le_bytes()), &trailer);
    let sum = crc32c::crc32c_append(sum, index).to_le_bytes();
    match opened(&[records, index, &sum, &trailer].concat()) {
        Ok(()) | Err(SnapshotError::Index | SnapshotError::State) => {}
        Err(SnapshotError::Record { .. } | SnapshotError::Decode { .. }) => {}
        Err(error) => panic!("{error}"),
    }
});

/// Of version 1, not encrypted, with pages of 4 KiB in packets of 512 KiB and the index between these bytes.
fn trailer(start: u64, end: u64) -> Vec<u8> {
    let mut trailer = b"VMOOSNAP".to_vec();
    for field in [1_u32, 0, 4096, 512 << 10] {
        trailer.extend(field.to_le_bytes());
    }
    trailer.extend([0; 16]);
    trailer.extend(start.to_le_bytes());
    trailer.extend(end.to_le_bytes());
    trailer.resize(64, 0);
    trailer
}

fn opened(bytes: &[u8]) -> Result<(), SnapshotError> {
    Snapshot::of_file(file(bytes), None)?.verify()
}

/// A file without a name.
fn file(bytes: &[u8]) -> File {
    let file = rustix::fs::memfd_create("snapshot", rustix::fs::MemfdFlags::CLOEXEC);
    let mut file = File::from(file.expect("memory"));
    file.write_all(bytes).expect("memory");
    file
}
