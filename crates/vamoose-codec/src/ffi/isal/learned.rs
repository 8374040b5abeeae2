//! Raw deflate of short inputs by ISA-L's level 0, with a Huffman code learned from samples of them.
//!
//! Level 0 does not count symbols before it writes: it writes at once, with whatever code it is
//! given. The rules are those of the module above.

use std::ptr;

use isal_sys::igzip_lib as c;

use super::{Heap, NAME, RAW, Zeroable, lend, whole};
use crate::{
    engine::{Compress, CompressError},
    qpl::{PAGE_SIZE, SAMPLE},
};

/// Makes streams that have nothing to do with each other but their code.
pub(crate) struct Learned {
    state: Heap<State>,
}

#[repr(C, align(64))]
struct State {
    stream: c::isal_zstream,
    code: c::isal_hufftables,
    counts: c::isal_huff_histogram,
}

// SAFETY: `State` consists of integers, arrays of them and raw pointers, for which zero is a valid
// value. ISA-L's functions work on what they are given, and on constant tables.
unsafe impl Zeroable for State {}

impl Learned {
    /// Knows a code that fits nothing in particular.
    pub(crate) fn new() -> Self {
        let state = Heap::<State>::zeroed();
        let at = state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1). The
        // function does nothing but store into the stream that it is given; the code that it points
        // the stream to is a constant.
        unsafe {
            c::isal_deflate_stateless_init(&raw mut (*at).stream);
            (*at).stream.gzip_flag = RAW;
            (*at).stream.end_of_stream = 1;
        }
        Self { state }
    }

    /// Chooses the code for `samples`. Other pages can be written with it, too.
    fn learn<'a>(&mut self, samples: impl Iterator<Item = &'a [u8]>) -> Result<(), CompressError> {
        let at = self.state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1).
        let counts = unsafe {
            ptr::write_bytes(&raw mut (*at).counts.lit_len_histogram, 0, 1);
            ptr::write_bytes(&raw mut (*at).counts.dist_histogram, 0, 1);
            &raw mut (*at).counts
        };
        for sample in samples {
            let len = i32::try_from(sample.len()).map_err(|_| CompressError::Refused(TOO_LONG))?;
            // SAFETY: `sample` is valid for `len` reads and is not written to; its address is not
            // kept (rule 2). `counts` is as above. Its table of positions, which is left from
            // earlier samples, is cleared before it is read.
            unsafe { c::isal_update_histogram(sample.as_ptr().cast_mut(), len, counts) };
        }
        // SAFETY: `counts` is as above; the reference goes before anything else uses it.
        bound(unsafe { &mut *counts });
        // SAFETY: `at` is as above, and the two parts of it that are given do not overlap. The code
        // has a word for every literal, length and distance, whatever was counted, none longer than
        // the writer can put down at once. The stream is between two calls, where its code may
        // change, and lives as long as the code.
        let result = unsafe {
            let code = &raw mut (*at).code;
            (*at).stream.hufftables = code;
            c::isal_create_hufftables(code, counts)
        };
        match result {
            0 => Ok(()),
            _ => Err(CompressError::Refused("no Huffman code for these counts")),
        }
    }
}

impl Compress for Learned {
    fn name(&self) -> &'static str {
        NAME
    }

    fn begin(&mut self, pages: &[u8]) -> Result<(), CompressError> {
        self.learn(pages.chunks_exact(PAGE_SIZE).step_by(SAMPLE))
    }

    /// May need a few bytes more than the result has.
    fn compress(&mut self, input: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let at = self.state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1), whose
        // code is a constant of ISA-L's or was made by `learn`. Level 0 needs no level buffer. All
        // else that ISA-L reads of an earlier call, also of one that failed, it sets anew first;
        // positions in the input are counted from `total_in`.
        let left = unsafe {
            let stream = &raw mut (*at).stream;
            (*stream).total_in = 0;
            lend(stream, input, out, c::isal_deflate_stateless)?
        };
        whole(&left, out)
    }
}

const TOO_LONG: &str = "more than 2 GiB";

/// Makes what is rare so frequent that a symbol takes at most [`LOOK_UP`] bits with its extra bits; with unusual counts,
/// a few take one more.
///
/// Every symbol has to have a word, as the pages that are not samples may have any of them. Without this most words
/// would be longer: those of literals that no sample has, and those of lengths with extra bits. QPL's software prepares
/// tables for each page, in a time that grows with the square of the number of long words.
fn bound(counts: &mut c::isal_huff_histogram) {
    let scale = |counts: &mut [u64], look_up: u32, extra_bits: fn(usize) -> usize| {
        let all = counts.iter().sum::<u64>().max(1);
        for (symbol, count) in counts.iter_mut().enumerate() {
            // Three quarters for what was counted: if all else is rare, it takes 514 words of 4096.
            let share = (*count * 3) << (look_up - 2);
            *count = share.max(all << extra_bits(symbol));
        }
    };
    scale(&mut counts.lit_len_histogram, LOOK_UP, |symbol| {
        match symbol {
            // From here on four symbols each have one extra bit more (RFC 1951, 3.2.5); the last has none.
            265..285 => (symbol - 261) / 4,
            _ => 0,
        }
    });
    scale(&mut counts.dist_histogram, LOOK_UP_DISTANCE, |_| 0);
}

/// Bits of literals and lengths, extra bits included, and of distances, without them, that QPL and ISA-L look up at
/// first.
const LOOK_UP: u32 = 12;
const LOOK_UP_DISTANCE: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::libdeflate::Inflate;

    const LEN: usize = 4096;

    /// Text-like, incompressible, constant, and sparse pages.
    fn inputs() -> [Vec<u8>; 5] {
        let text = (0..LEN).map(|at| b'a' + ((at * at) >> 5).to_le_bytes()[0] % 21);
        let noise = (1..=LEN as u64)
            .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40).to_le_bytes()[0]);
        let sparse = (0..LEN).map(|at| if at % 509 == 7 { 200 } else { 0 });
        [
            text.collect(),
            noise.collect(),
            vec![0; LEN],
            vec![0xff; LEN],
            sparse.collect(),
        ]
    }

    fn check(stream: &[u8], input: &[u8]) {
        let mut back = vec![0; input.len()];
        let inflated = Inflate::new(multifd::Method::Qpl)
            .unwrap()
            .inflate(stream, &mut back)
            .unwrap();
        assert_eq!(
            (inflated.consumed, inflated.produced),
            (stream.len(), input.len())
        );
        assert!(back == input);
    }

    #[test]
    fn whatever_was_learned_everything_can_be_written() {
        let mut engine = Learned::new();
        let mut out = vec![0; 2 * LEN];
        let inputs = inputs();
        for input in &inputs {
            let len = engine.compress(input, &mut out).unwrap();
            check(&out[..len], input);
        }
        let none: &[Vec<u8>] = &[];
        let odd = [vec![], vec![1], vec![1, 2, 3], vec![9; 70_000]];
        for samples in [
            none,
            &inputs[..1],
            &inputs[1..2],
            &inputs[2..3],
            &inputs,
            &odd,
        ] {
            engine.learn(samples.iter().map(Vec::as_slice)).unwrap();
            for input in inputs.iter().chain(&odd[..3]) {
                let len = engine.compress(input, &mut out).unwrap();
                check(&out[..len], input);
            }
        }
    }

    #[test]
    fn what_was_learned_shows() {
        let mut engine = Learned::new();
        let mut out = vec![0; 2 * LEN];
        let [text, noise, ..] = inputs();
        let mut len_after = |sample: &[u8]| {
            engine.learn([sample].into_iter()).unwrap();
            engine.compress(&text, &mut out).unwrap()
        };
        let (good, bad) = (len_after(&text), len_after(&noise));
        assert!(good < bad, "{good} {bad}");
        assert!(len_after(&text).abs_diff(good) < 16, "counts are left over");
    }

    #[test]
    fn hardly_a_word_is_longer_than_what_decoders_look_up() {
        let inputs = inputs();
        let none: &[Vec<u8>] = &[];
        for samples in [
            none,
            &inputs[..1],
            &inputs[1..2],
            &inputs[2..3],
            &inputs[4..],
            &inputs,
        ] {
            let mut engine = Learned::new();
            engine.learn(samples.iter().map(Vec::as_slice)).unwrap();
            // SAFETY: the code is initialised, and nothing writes to it.
            let code = unsafe { &(*engine.state.as_ptr()).code };
            // Entries of the lengths of matches have their number of bits, extra ones included, in their low five.
            let lengths = code.len_table.iter().map(|entry| entry & 0x1f);
            let literals = code.lit_table_sizes.iter().map(|bits| (*bits).into());
            let words: Vec<u32> = literals.chain(lengths).collect();
            assert!(words.iter().all(|bits| (1..=LOOK_UP + 1).contains(bits)));
            let long = words.iter().filter(|bits| **bits > LOOK_UP).count();
            assert!(long * 10 < words.len(), "{long} of {}", words.len());
        }
    }

    #[test]
    fn it_stays_within_whatever_room_it_has() {
        let mut engine = Learned::new();
        let inputs = inputs();
        for sample in &inputs {
            engine.learn([sample.as_slice()].into_iter()).unwrap();
            for input in &inputs {
                let mut whole = vec![0; 2 * LEN];
                let needed = engine.compress(input, &mut whole).unwrap();
                for room in (0..300).chain(needed.saturating_sub(40)..needed + 40) {
                    let mut out = vec![0xa5; room + 256];
                    match engine.compress(input, &mut out[..room]) {
                        Ok(len) => {
                            assert!(len <= room);
                            check(&out[..len], input);
                        }
                        Err(fault) => {
                            assert!(fault == CompressError::OutputFull && room < needed + 32)
                        }
                    }
                    assert!(out[room..].iter().all(|byte| *byte == 0xa5), "room {room}");
                }
                // A failure leaves no traces.
                let len = engine.compress(input, &mut whole).unwrap();
                check(&whole[..len], input);
            }
        }
    }

    #[test]
    fn nothing_of_the_callers_is_pointed_to_after_a_call() {
        for room in [100, 2 * LEN] {
            for input in inputs() {
                let mut out = vec![0; room];
                let mut engine = Learned::new();
                engine.learn([input.as_slice()].into_iter()).unwrap();
                let _ = engine.compress(&input, &mut out);
                // SAFETY: the state is initialised and as large as its type.
                let words = unsafe { super::super::tests::words(engine.state.as_ptr()) };
                for lent in [input.as_ptr_range(), out.as_ptr_range()] {
                    let lent = lent.start.addr()..lent.end.addr();
                    assert!(!words.iter().any(|word| lent.contains(word)));
                }
            }
        }
    }
}
