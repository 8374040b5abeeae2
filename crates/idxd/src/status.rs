//! The parts of IAA's completion records that the driver acts on.
//!
//! A device sets bit 7 of a record's first byte if a page fault was on a write, so the byte must be masked before it is
//! compared with a status. Bit 6 is masked as well, as in Intel's QPL and accel-config.
//!
//! Sources: DSA 3.0, 5.8.1; IAA 2.1, 4.4 and 6.2.

use crate::RecordImage;

/// The bits of a record's first byte that are the status.
pub(crate) const CODE: u8 = 0x3f;
/// Status of both devices: done.
pub const SUCCESS: u8 = 0x01;
/// Status of IAA: the record's second byte has an error code.
pub const ANALYTICS_ERROR: u8 = 0x0a;
/// Status of IAA's decompression: the output does not fit.
const OUTPUT_OVERFLOW: u8 = 0x0b;
/// Error code of IAA's compression: the output does not fit.
const OUTPUT_TOO_SMALL: u8 = 25;

/// The report of IAA about one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IaaOutcome {
    /// Status of the operation.
    pub status: u8,
    /// Error code if `status` is [`ANALYTICS_ERROR`]; otherwise 0.
    pub error: u8,
    /// Bytes of output. The last one may be partial.
    pub output_size: u32,
}

impl IaaOutcome {
    /// Reads a record; `None` if the device is not done.
    pub fn of(image: &RecordImage) -> Option<Self> {
        let status = image.status() & CODE;
        let error = if status == ANALYTICS_ERROR {
            image.result()
        } else {
            0
        };
        (image.status() != 0).then(|| Self {
            status,
            error,
            output_size: (image.words[3] & 0xffff_ffff) as u32,
        })
    }

    /// Whether the output does not fit, which compression reports with an error code, and decompression with a status.
    pub fn does_not_fit(&self) -> bool {
        self.status == OUTPUT_OVERFLOW || self.error == OUTPUT_TOO_SMALL
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn image(bytes: &[(usize, u64)]) -> RecordImage {
        let mut image = RecordImage::default();
        for (at, value) in bytes {
            image.words[at / 8] |= value << (8 * (at % 8));
        }
        image
    }

    #[test]
    fn an_unfinished_record_has_no_outcome() {
        let unfinished = image(&[(1, 1), (4, 77), (8, 0x1000)]);
        assert_eq!(IaaOutcome::of(&unfinished), None);
    }

    #[test]
    fn a_fault_on_a_write_is_the_same_status() {
        for byte in [0x03, 0x83] {
            let image = image(&[(0, byte), (1, 1), (4, 0x800), (8, 0x7f00_1234_5000)]);
            assert_eq!(IaaOutcome::of(&image).unwrap().status, 0x03);
        }
    }

    #[test]
    fn fields_are_at_their_places() {
        let outcome = IaaOutcome::of(&image(&[
            (0, 1),
            (4, 4096),
            (16, 0xffff_ffff),
            (24, 1234),
            (28, 5),
            (29, 0xff),
            (30, 0xbeef),
            (32, 0xdead_cafe),
            (40, 0x0123_4567_89ab_cdef),
        ]))
        .unwrap();
        let expected = IaaOutcome {
            status: SUCCESS,
            error: 0,
            output_size: 1234,
        };
        assert_eq!(outcome, expected);
        assert!(!outcome.does_not_fit());
    }

    #[test]
    fn output_that_does_not_fit_is_reported_in_two_ways() {
        let of = |bytes: &[(usize, u64)]| IaaOutcome::of(&image(bytes)).unwrap();
        assert!(of(&[(0, 0x0a), (1, 25)]).does_not_fit());
        assert!(of(&[(0, 0x0b)]).does_not_fit());
        let damaged = of(&[(0, 0x0a), (1, 17)]);
        assert!(!damaged.does_not_fit());
        assert_eq!(damaged.error, 17);
        // The error code is only valid with its status.
        assert!(!of(&[(0, 0x03), (1, 25)]).does_not_fit());
    }

    proptest! {
        #[test]
        fn any_record_can_be_read(words: [u64; 8]) {
            let image = RecordImage { words };
            prop_assert_eq!(IaaOutcome::of(&image).is_some(), words[0] & 0xff != 0);
        }
    }
}
