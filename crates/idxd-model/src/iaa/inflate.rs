//! Decompression as IAA does it: a whole stream of raw DEFLATE whose matches reach back 4 KiB at most.
//!
//! A library decodes. The device's own error codes for malformed streams are lost (every malformed stream is
//! [`MALFORMED`]), and so is its refusal to repeat code lengths across the border of the two alphabets: the driver makes
//! no difference between errors, and never makes such a header.

use miniz_oxide::inflate::{
    TINFLStatus,
    core::{DecompressorOxide, decompress, inflate_flags},
};

use super::deflate::WINDOW;

/// Why there is not all of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It does not fit.
    TooLong,
    /// The stream is wrong, or reaches back too far.
    Malformed,
}

/// Decompresses `input`, up to the end of its last block, into at most `limit` bytes. Returns the output as far as it goes.
pub(super) fn inflate(input: &[u8], limit: usize) -> (Vec<u8>, Result<(), Failure>) {
    let mut output = vec![0; limit];
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let mut decompressor = DecompressorOxide::new();
    let (status, _, written) = decompress(&mut decompressor, input, &mut output, 0, flags);
    output.truncate(written);
    let result = match status {
        TINFLStatus::HasMoreOutput => Err(Failure::TooLong),
        TINFLStatus::Done if written <= WINDOW || fits_window(input) => Ok(()),
        _ => Err(Failure::Malformed),
    };
    (output, result)
}

/// Whether no match of a valid stream reaches back further than the window.
fn fits_window(input: &[u8]) -> bool {
    let (mut decompressor, mut window) = (DecompressorOxide::new(), [0; WINDOW]);
    let (mut read, mut at) = (0, 0);
    loop {
        let rest = &input[read..];
        let (status, more, written) = decompress(&mut decompressor, rest, &mut window, at, 0);
        read += more;
        at = (at + written) % WINDOW;
        if status != TINFLStatus::HasMoreOutput {
            return status == TINFLStatus::Done;
        }
    }
}
