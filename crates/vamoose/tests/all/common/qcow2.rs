//! Disk images in QEMU's format qcow2.

/// An image of `size` bytes, in which nothing has been written: its header, the table and a block of reference counts, and the
/// table of second-level tables, in a cluster each.
pub(crate) fn empty(size: u64) -> Vec<u8> {
    let cluster = CLUSTER as u64;
    let tables = size.div_ceil(cluster * cluster / 8);
    let no_features = [0; 24];
    let header = [
        b"QFI\xfb".as_slice(),
        &3_u32.to_be_bytes(),
        // No backing file.
        &[0; 12],
        &cluster.trailing_zeros().to_be_bytes(),
        &size.to_be_bytes(),
        // Not encrypted.
        &[0; 4],
        &u32::try_from(tables).unwrap_or(u32::MAX).to_be_bytes(),
        &(3 * cluster).to_be_bytes(),
        &cluster.to_be_bytes(),
        &1_u32.to_be_bytes(),
        // No snapshots.
        &[0; 12],
        &no_features,
        // Reference counts of 16 bits, and the length of this header.
        &4_u32.to_be_bytes(),
        &104_u32.to_be_bytes(),
    ];
    let counts = [
        (2 * cluster).to_be_bytes().to_vec(),
        1_u16.to_be_bytes().repeat(4),
    ];
    let mut image = header.concat();
    for (number, bytes) in counts.iter().enumerate() {
        image.resize((number + 1) * CLUSTER, 0);
        image.extend(bytes);
    }
    image.resize(4 * CLUSTER, 0);
    image
}

/// In bytes.
const CLUSTER: usize = 1 << 16;
