//! In place of `zstd_frames` where zstd is not built in: nothing is a frame.

/// Bytes of a [`raw_frame`].
pub const RAW_FRAME_LEN: usize = 12;

/// Never: without zstd a frame's checksum cannot be compared.
pub fn checks_itself(_payload: &[u8], _pages_len: usize) -> bool {
    false
}

/// None: frames are for method zstd-frames.
pub fn raw_frame(_page_size: usize) -> Option<[u8; RAW_FRAME_LEN]> {
    None
}
