//! Raw deflate, one whole stream per call: what a gzip member holds.
//!
//! The rules are those of the module above.

use isal_sys::igzip_lib as c;

use super::{DeflateState, Heap, Level, NAME, RAW, lend, whole};
use crate::engine::{Compress, CompressError};

/// Makes streams that have nothing to do with each other.
pub(crate) struct OneShot {
    state: Heap<DeflateState>,
    level: Level,
}

impl OneShot {
    pub(crate) fn new(level: Level) -> Self {
        Self {
            state: Heap::zeroed(),
            level,
        }
    }
}

impl Compress for OneShot {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Incompressible input becomes stored blocks: 5 bytes more for each 65535.
    fn compress(&mut self, input: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let at = self.state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1). Its
        // level buffer is as large as the size that the stream is given, for every level. All else
        // that ISA-L reads of an earlier call, it sets anew first.
        let left = unsafe {
            let stream = &raw mut (*at).stream;
            c::isal_deflate_stateless_init(stream);
            (*stream).level = self.level.0;
            (*stream).level_buf = (&raw mut (*at).level_buffer).cast();
            (*stream).level_buf_size = self.level.buffer_len();
            (*stream).gzip_flag = RAW;
            (*stream).flush = NO_FLUSH;
            (*stream).end_of_stream = 1;
            lend(stream, input, out, c::isal_deflate_stateless)?
        };
        whole(&left, out)
    }
}

const NO_FLUSH: u16 = 0;
const _: () = assert!(NO_FLUSH as u32 == c::NO_FLUSH);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::libdeflate::{Inflate, Inflated};

    #[test]
    fn it_stays_within_whatever_room_it_has() {
        let text: Vec<u8> = (0..12_288_u32)
            .map(|at| (((at * at) >> 5) ^ (at >> 3)).to_le_bytes()[0])
            .collect();
        let noise: Vec<u8> = (1..12_289_u64)
            .map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[6])
            .collect();
        let mut enough = vec![0; 1 << 16];
        let mut engine = OneShot::new(Level(1));
        for input in [&text, &noise, &vec![0; 12_288], &vec![]] {
            let needed = engine.compress(input, &mut enough).unwrap();
            assert!(needed <= input.len() + 5);
            for room in (0..400).chain(needed.saturating_sub(400)..needed + 400) {
                let mut out = vec![0xa5; room + 256];
                match engine.compress(input, &mut out[..room]) {
                    // Repeated bytes are written in another way where there is less room.
                    Ok(written) => assert!(written <= room && holds(&out[..written], input)),
                    Err(fault) => assert!(fault == CompressError::OutputFull && room < needed + 32),
                }
                assert!(out[room..].iter().all(|byte| *byte == 0xa5), "room {room}");
            }
            // A failure leaves no traces.
            let again = engine.compress(input, &mut enough).unwrap();
            assert!(holds(&enough[..again], input));
        }
    }

    fn holds(stream: &[u8], input: &[u8]) -> bool {
        let mut found = vec![0xa5; input.len()];
        let inflated = Inflate::new(multifd::Method::Qpl)
            .unwrap()
            .inflate(stream, &mut found);
        let (consumed, produced) = (stream.len(), input.len());
        inflated == Ok(Inflated { consumed, produced }) && found == input
    }

    #[test]
    fn nothing_of_the_callers_is_pointed_to_after_a_call() {
        for input in [
            vec![7; 65_536],
            (0..65_536_u32).map(|at| (at % 251) as u8).collect(),
        ] {
            for room in [100, 1 << 17] {
                let mut out = vec![0; room];
                let mut engine = OneShot::new(Level(1));
                let _ = engine.compress(&input, &mut out);
                let lent = [input.as_ptr_range(), out[..].as_ptr_range()];
                // SAFETY: the state is initialised and as large as its type.
                let words = unsafe { super::super::tests::words(engine.state.as_ptr()) };
                for lent in lent {
                    let lent = lent.start.addr()..lent.end.addr();
                    assert!(!words.iter().any(|word| lent.contains(word)));
                }
            }
        }
    }
}
