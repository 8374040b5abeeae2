//! Reads a zstd file as what it holds, a buffer at a time.

use std::io::{self, BufRead, Read};

use zstd_safe::{DCtx, InBuffer, OutBuffer, get_error_name};

/// First four bytes of a zstd file.
pub(super) const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The decompressed bytes of `input`.
pub(super) struct Unzstd<R> {
    context: DCtx<'static>,
    input: R,
    /// Whether a frame has begun and not ended.
    within_frame: bool,
}

impl<R: BufRead> Unzstd<R> {
    pub(super) fn new(input: R) -> io::Result<Self> {
        let context =
            DCtx::try_create().ok_or_else(|| io::Error::other("zstd: no memory for a context"))?;
        Ok(Self {
            context,
            input,
            within_frame: false,
        })
    }
}

impl<R: BufRead> Read for Unzstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let packed = self.input.fill_buf()?;
            let file_ended = packed.is_empty();
            if file_ended && !self.within_frame {
                return Ok(0);
            }
            let mut input = InBuffer::around(packed);
            let mut output = OutBuffer::around(buffer);
            let hint = self
                .context
                .decompress_stream(&mut output, &mut input)
                .map_err(|code| {
                    let reason = format!("bad zstd data: {}", get_error_name(code));
                    io::Error::new(io::ErrorKind::InvalidData, reason)
                })?;
            let (consumed, produced) = (input.pos(), output.pos());
            self.input.consume(consumed);
            self.within_frame = hint != 0;
            if produced > 0 {
                return Ok(produced);
            }
            if consumed == 0 && hint != 0 {
                // The context may hold output back even when the file has ended; now it does not.
                let reason = "the zstd file is cut short";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(zstd_safe::compress_bound(bytes.len()));
        zstd_safe::compress(&mut out, bytes, 1).unwrap();
        out
    }

    fn unpack(file: &[u8], buffer: usize) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let input = BufReader::with_capacity(buffer, file);
        Unzstd::new(input)?.read_to_end(&mut out)?;
        Ok(out)
    }

    fn sample() -> Vec<u8> {
        (0..300_000u32)
            .flat_map(|i| (i.wrapping_mul(i) / 7).to_le_bytes())
            .collect()
    }

    #[test]
    fn frames_follow_each_other_whatever_the_buffers() {
        let sample = sample();
        let file = [packed(&sample), packed(b""), packed(b"end")].concat();
        for buffer in [1, 7, 4096, 1 << 20] {
            let bytes = unpack(&file, buffer).unwrap();
            assert!(bytes == [&sample[..], b"end"].concat(), "buffer {buffer}");
        }
    }

    #[test]
    fn a_cut_file_is_said_to_be_cut() {
        let file = packed(&sample());
        for len in [5, file.len() / 2, file.len() - 1] {
            let error = unpack(&file[..len], 4096).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{len}");
        }
    }

    #[test]
    fn garbage_behind_a_frame_is_refused() {
        let file = [&packed(b"page")[..], b"garbage"].concat();
        let error = unpack(&file, 4096).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
