use super::*;

/// Bytes that compress a little.
fn pages(len: usize) -> Vec<u8> {
    let bytes = (0..len).map(|at| ((at * at) >> 5) ^ (at >> 3));
    bytes.map(|byte| byte.to_le_bytes()[0]).collect()
}

#[test]
fn deflate_stays_within_its_room() {
    let pages = pages(3 * 4096);
    let mut enough = vec![0; 1 << 20];
    for level in [1, 2, 3].map(Level) {
        let needed = Deflate::new(level).compress(&pages, &mut enough).unwrap();
        for room in (0..400).chain(needed - 400..needed + 400) {
            let mut out = vec![0xa5; room + 256];
            let result = Deflate::new(level).compress(&pages, &mut out[..room]);
            // A little more room than the result is asked for, to be sure that it is whole.
            match result {
                Ok(written) => assert!(written < room && holds(&out[..written], &pages)),
                Err(fault) => assert!(fault == CompressError::OutputFull && room < needed + 32),
            }
            assert!(out[room..].iter().all(|byte| *byte == 0xa5), "room {room}");
        }
    }
}

fn holds(payload: &[u8], pages: &[u8]) -> bool {
    let mut found = vec![0xa5; pages.len()];
    let step = Inflate::new().step(payload, &mut found).unwrap();
    step.produced == pages.len() && found == pages
}

#[test]
fn no_pointer_to_the_caller_remains_after_a_call() {
    let pages = pages(200_000);
    let mut out = vec![0; 1 << 20];
    let mut deflate = Deflate::new(Level(1));
    let written = deflate.compress(&pages, &mut out).unwrap();
    let payload = out[..written].to_vec();
    let mut inflate = Inflate::new();
    let mut back = vec![0; pages.len()];
    assert_eq!(
        inflate.step(&payload, &mut back).unwrap().produced,
        pages.len()
    );

    let out = out[..].as_ptr_range();
    let lent = [
        pages.as_ptr_range(),
        payload.as_ptr_range(),
        back.as_ptr_range(),
        out,
    ];
    // SAFETY: both states are initialised and as large as their types.
    let words = unsafe { [words(deflate.state.as_ptr()), words(inflate.state.as_ptr())] };
    for lent in lent {
        let lent = lent.start.addr()..lent.end.addr();
        assert!(!words.iter().flatten().any(|word| lent.contains(word)));
    }
}

/// Everything in a state that could be a pointer.
///
/// # Safety
/// `state` must be initialised, including its padding.
pub(super) unsafe fn words<T>(state: *const T) -> Vec<usize> {
    let count = size_of::<T>() / size_of::<usize>();
    // SAFETY: within the state, whose memory was zeroed as a whole, so padding is initialised.
    unsafe { std::slice::from_raw_parts(state.cast(), count) }.to_vec()
}

mod one_shot {
    use super::super::*;
    use crate::ffi::libdeflate::{Inflate, Inflated};

    #[test]
    fn output_stays_within_its_room() {
        let text: Vec<u8> = (0..12_288_u32)
            .map(|at| (((at * at) >> 5) ^ (at >> 3)).to_le_bytes()[0])
            .collect();
        let noise: Vec<u8> = (1..12_289_u64)
            .map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[6])
            .collect();
        for level in [0, 1].map(Level) {
            stays_within_room(
                OneShot::new(level),
                &[&text, &noise, &vec![0; 12_288], &vec![]],
            );
        }
    }

    fn stays_within_room(mut engine: OneShot, inputs: &[&Vec<u8>]) {
        let mut enough = vec![0; 1 << 16];
        for input in inputs {
            let needed = engine.compress(input, &mut enough).unwrap();
            // The fixed code has words of 9 bits.
            assert!(needed <= input.len() + input.len() / 8 + 16);
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
    fn no_pointer_to_the_caller_remains_after_a_call() {
        for input in [
            vec![7; 65_536],
            (0..65_536_u32).map(|at| (at % 251) as u8).collect(),
        ] {
            for (room, level) in [(100, 0), (1 << 17, 0), (100, 1), (1 << 17, 1)] {
                let mut out = vec![0; room];
                let mut engine = OneShot::new(Level(level));
                let _ = engine.compress(&input, &mut out);
                let lent = [input.as_ptr_range(), out[..].as_ptr_range()];
                // SAFETY: the state is initialised and as large as its type.
                let words = unsafe { super::words(engine.state.as_ptr()) };
                for lent in lent {
                    let lent = lent.start.addr()..lent.end.addr();
                    assert!(!words.iter().any(|word| lent.contains(word)));
                }
            }
        }
    }
}
