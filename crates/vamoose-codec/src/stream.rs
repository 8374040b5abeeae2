//! Decodes the packets of a stream that lasts for the whole migration: methods zlib and zstd.

use multifd::Method;

use crate::DecodeError;

/// One stream being read.
pub(crate) trait Stream: Send {
    /// Decodes some of `input` into some of `output`, at least one byte of one of them if that is
    /// possible at all. An error is the library's description of what is wrong with the input.
    fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, &'static str>;
}

/// What one [`Stream::step`] has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Bytes taken from the start of the input.
    pub(crate) consumed: usize,
    /// Bytes written to the start of the output.
    pub(crate) produced: usize,
    /// Whether the stream ended here.
    pub(crate) ended: bool,
}

/// Fills all of `pages` from a packet's part of the stream, which is `payload` behind its first `head` bytes.
///
/// When the pages are full there is input left in a correct packet: the end of the last block and the flush. It has to be
/// fed to the stream too, so that the next packet starts where this one stopped, and must not decode to anything. One
/// spare byte of room shows whether it would.
pub(crate) fn unpack(
    method: Method,
    stream: &mut impl Stream,
    payload: &[u8],
    head: usize,
    pages: &mut [u8],
) -> Result<(), DecodeError> {
    let corrupt = |reason| DecodeError::Corrupt { method, reason };
    let expected = pages.len();
    let (mut input, mut found) = (&payload[head.min(payload.len())..], 0);
    loop {
        let full = found == expected;
        let mut spare = [0];
        let output = if full {
            &mut spare[..]
        } else {
            &mut pages[found..]
        };
        let step = stream.step(input, output).map_err(corrupt)?;
        if step.ended {
            return Err(DecodeError::Ended { method });
        }
        if full && step.produced > 0 {
            return Err(DecodeError::too_long(method, payload.len(), expected));
        }
        input = &input[step.consumed.min(input.len())..];
        found += step.produced;
        if full && input.is_empty() {
            return Ok(());
        }
        // Libraries report "no progress" each in their own way, some as success: the counts decide.
        if step.consumed == 0 && step.produced == 0 {
            let left = input.len();
            return match (full, left) {
                (true, _) => Err(DecodeError::trailing(method, left, expected)),
                // Too short.
                (false, 0) => DecodeError::check_len(method, payload.len(), found, expected),
                (false, _) => Err(corrupt("decoding makes no progress")),
            };
        }
    }
}
