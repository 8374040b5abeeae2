//! Fields of messages of fixed length.

use std::ops::Range;

/// Writes a field, which is as long as `value`.
pub(crate) fn put<const N: usize>(bytes: &mut [u8], field: Range<usize>, value: [u8; N]) {
    bytes[field].copy_from_slice(&value);
}

/// Reads a field of `N` bytes.
pub(crate) fn take<const N: usize>(bytes: &[u8], field: Range<usize>) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[field]);
    value
}

/// The value with this `code`. The codes of `all` count from `first`.
pub(crate) fn by_code<T: Copy>(all: &[T], first: u8, code: u8) -> Option<T> {
    all.get(usize::from(code.checked_sub(first)?)).copied()
}
