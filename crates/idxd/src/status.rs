//! The meaning of a completion record, in words.
//!
//! ```text
//!   RecordImage ──► DsaOutcome  status, page fault, result, completed …
//!               └─► IaaOutcome  status, its error, page fault, output size, CRC …
//!
//!   byte 0:   bit 7: the page fault was on a write     bits 5..0: the code
//! ```
//! The same byte with and without bit 7 is the same status: comparing it as a whole misses faults on writes. Bit 6 is
//! masked as well, as Intel's QPL and accel-config do (the uapi header keeps it); no code needs it.
//!
//! Sources: DSA 3.0, 5.8.1, and IAA 2.1, 4.4, whose statuses are DSA's but for its table 4-7. IAA's status 0x34 and
//! errors 33 and 34 are only in Intel's QPL.

use std::fmt;

use crate::{Flags, RecordImage};

/// What DSA reports about one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsaOutcome {
    /// How it ended.
    pub status: DsaStatus,
    /// The page that was missing. `result` then is, of a copy, 1 if it had begun at the end, as areas overlap (DSA 3.0,
    /// 8.3.4), and of a delta's creation 1 if any difference was written (8.3.8); of others it means nothing.
    pub page_fault: Option<PageFault>,
    /// The operation's result: of a comparison 0 for equal and 1 for different, if `status` is a success.
    pub result: u8,
    /// Bytes that were done before a page fault, or a batch's members that were processed. Of a comparison that found a
    /// difference the offset of that, which for [`compare_pattern`](crate::dsa::compare_pattern) may be a lower one
    /// (DSA 3.0, 8.3.6 and 8.3.7). Of other operations that are complete 0 (8.2.4).
    pub completed: u32,
    specific: u32,
}

impl DsaOutcome {
    /// Reads a record; `None` if the device is not done.
    pub fn of(image: &RecordImage) -> Option<Self> {
        if image.status() == 0 {
            return None;
        }
        let status = DsaStatus::of(image.status());
        let faults = matches!(
            status,
            DsaStatus::PageFault
                | DsaStatus::PageRequestDenied
                | DsaStatus::BatchListFault
                | DsaStatus::ReadbackFault
        );
        Some(Self {
            status,
            page_fault: faults.then(|| PageFault::of(image)),
            result: image.result(),
            completed: image.completed(),
            specific: low(image, 2),
        })
    }

    /// Whose fault it likely is.
    pub const fn fault(&self) -> Fault {
        self.status.fault()
    }

    /// Whether a comparison found its areas equal; `None` if it did not come to a result.
    pub const fn equal(&self) -> Option<bool> {
        match self.status {
            DsaStatus::Success | DsaStatus::PredicateFalse => Some(self.result == 0),
            _ => None,
        }
    }

    /// CRC of a [`crc`](crate::dsa::crc) or [`copy_crc`](crate::dsa::copy_crc), as the device has it.
    pub const fn crc(&self) -> u32 {
        self.specific
    }

    /// Bytes of the delta record that [`create_delta`](crate::dsa::create_delta) wrote.
    pub const fn delta_size(&self) -> u32 {
        self.specific
    }

    /// The flags that were not allowed, where that is the status.
    pub fn invalid_flags(&self) -> Option<Flags> {
        (self.status == DsaStatus::InvalidFlags).then_some(Flags(self.specific & 0x00ff_ffff))
    }
}

impl fmt::Display for DsaOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DSA: {}", self.status)?;
        if let Some(flags) = self.invalid_flags() {
            write!(f, ": flags {:#08x}", flags.0)?;
        }
        write_fault(f, self.page_fault)
    }
}

/// What IAA reports about one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IaaOutcome {
    /// How it ended.
    pub status: IaaStatus,
    /// What was wrong, if `status` is [`IaaStatus::AnalyticsError`].
    pub error: Option<AnalyticsError>,
    /// The page that was missing.
    pub page_fault: Option<PageFault>,
    /// 0, but for two cases (IAA 2.1, 6.2.4): at a page fault the bytes of output that were written, and of a
    /// decompression whose output did not fit the bytes of input that were consumed.
    pub completed: u32,
    /// Bytes of output, the last of which may be partial.
    pub output_size: u32,
    /// Valid bits of the last byte; 0 for all of them.
    pub output_bits: u8,
    /// XOR of the uncompressed data's 16-bit words.
    pub xor: u16,
    /// CRC-32 (or CRC-32C, if that was asked for) of the uncompressed data.
    pub crc: u32,
    /// Result of a [`crc64`](crate::iaa::crc64); of other operations not a CRC.
    pub crc64: u64,
    invalid_flags: u32,
}

impl IaaOutcome {
    /// Reads a record; `None` if the device is not done.
    pub fn of(image: &RecordImage) -> Option<Self> {
        if image.status() == 0 {
            return None;
        }
        let status = IaaStatus::of(image.status());
        let faults = matches!(
            status,
            IaaStatus::PageFault | IaaStatus::PageRequestDenied | IaaStatus::ReadbackFault
        );
        let third = image.words[3].to_le_bytes();
        Some(Self {
            status,
            error: (status == IaaStatus::AnalyticsError)
                .then(|| AnalyticsError::from_code(image.result())),
            page_fault: faults.then(|| PageFault::of(image)),
            completed: image.completed(),
            output_size: low(image, 3),
            output_bits: third[4],
            xor: u16::from_le_bytes([third[6], third[7]]),
            crc: low(image, 4),
            crc64: image.words[5],
            invalid_flags: low(image, 2),
        })
    }

    /// Whose fault it likely is.
    pub fn fault(&self) -> Fault {
        self.error
            .map_or(self.status.fault(), AnalyticsError::fault)
    }

    /// Whether the output is too small and nothing else is wrong. Compression reports it with an analytics error,
    /// decompression with a status of its own.
    pub fn does_not_fit(&self) -> bool {
        self.status == IaaStatus::OutputOverflow
            || self.error == Some(AnalyticsError::OutputTooSmall)
    }

    /// The flags that were not allowed, where that is the status.
    pub fn invalid_flags(&self) -> Option<Flags> {
        (self.status == IaaStatus::InvalidFlags).then_some(Flags(self.invalid_flags & 0x00ff_ffff))
    }
}

impl fmt::Display for IaaOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.error {
            Some(error) => write!(f, "IAA: analytics error: {error}")?,
            None => write!(f, "IAA: {}", self.status)?,
        }
        if let Some(flags) = self.invalid_flags() {
            write!(f, ": flags {:#08x}", flags.0)?;
        }
        write_fault(f, self.page_fault)
    }
}

/// An access that could not be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// Address that was missing; bits 11:0 may be 0 (DSA 3.0, 8.2.5).
    pub address: u64,
    /// Whether it was to be written.
    pub write: bool,
}

impl PageFault {
    fn of(image: &RecordImage) -> Self {
        Self {
            address: image.fault_address(),
            write: image.status() & FAULT_ON_WRITE != 0,
        }
    }
}

/// Whose doing a status most likely is, and with it what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// None: it worked.
    None,
    /// Of memory that is not there: do it on the processor, or touch the page and try again.
    Memory,
    /// Of the data: a stream or delta that is damaged, or that does not fit. It would fail anywhere.
    Data,
    /// Of members of a batch: their own records have it. One without a status has not been done.
    Members,
    /// Of the program that built the descriptor.
    Program,
    /// Of the queue's or device's configuration.
    Administrator,
    /// Of the device or the platform: do it elsewhere.
    Device,
    /// None: an administrator's command ended it. Submit it once more.
    Interruption,
    /// Not known to this crate.
    Unknown,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no fault",
            Self::Memory => "a page is missing: do it on the processor",
            Self::Data => "the data's fault",
            Self::Members => "the members' records say why",
            Self::Program => "a bug of the program that built the descriptor",
            Self::Administrator => "the configuration's fault",
            Self::Device => "the device's fault: do it elsewhere",
            Self::Interruption => "an administrator's command ended it: submit it once more",
            Self::Unknown => "unknown whose fault",
        })
    }
}

/// An enum of codes, each with its meaning, and whose fault it likely is.
macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $code:literal, $fault:ident, $meaning:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $(#[doc = concat!(stringify!($code), ": ", $meaning, ".")] $variant,)*
            /// Any other code.
            Other(u8),
        }

        impl $name {
            /// What `code` stands for.
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Other(other),
                }
            }

            /// The code.
            pub const fn code(self) -> u8 {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Other(code) => code,
                }
            }

            /// Whose fault it likely is.
            pub const fn fault(self) -> Fault {
                match self {
                    $(Self::$variant => Fault::$fault,)*
                    Self::Other(_) => Fault::Unknown,
                }
            }

            const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$variant => $meaning,)*
                    Self::Other(_) => "unknown code",
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} ({:#04x}", self.meaning(), self.code())?;
                match self.fault() {
                    Fault::None => f.write_str(")"),
                    fault => write!(f, ", {fault})"),
                }
            }
        }
    };
}

codes! {
    /// How a descriptor of DSA ended.
    DsaStatus {
        Success = 0x01, None, "success";
        PredicateFalse = 0x02, None, "success, but the result is not the expected one";
        PageFault = 0x03, Memory, "page fault, which it was not to wait for";
        PageRequestDenied = 0x04, Memory, "page fault, which the kernel did not resolve";
        BatchFailed = 0x05, Members, "not every member of the batch succeeded";
        BatchListFault = 0x06, Memory, "page fault on the batch's list";
        DeltaOrder = 0x07, Data, "the offsets of a delta do not increase";
        DeltaRange = 0x08, Data, "an offset of a delta lies outside of the destination";
        Dif = 0x09, Data, "data integrity field is wrong";
        UnsupportedOpcode = 0x10, Administrator, "the queue or device does not have this operation";
        InvalidFlags = 0x11, Program, "flags that the operation or queue does not allow";
        ReservedField = 0x12, Program, "a reserved field is not zero";
        TransferSize = 0x13, Program, "the size is zero or more than the queue takes";
        DescriptorCount = 0x14, Program, "the batch has too few or too many descriptors";
        DeltaSize = 0x15, Program, "the size of the delta record is out of range";
        Overlap = 0x16, Program, "areas overlap";
        DualcastAddresses = 0x17, Program, "the two destinations differ in their low bits";
        ListAlignment = 0x18, Program, "the batch's list is misaligned";
        InterruptHandle = 0x19, Program, "invalid interrupt handle";
        RecordFault = 0x1a, Memory, "page fault on the completion record";
        RecordAlignment = 0x1b, Program, "the completion record is misaligned";
        AddressAlignment = 0x1c, Program, "an address is misaligned";
        Privilege = 0x1d, Administrator, "the queue does not allow this privilege";
        TrafficClass = 0x1e, Administrator, "the traffic class is configured wrongly";
        ReadbackFault = 0x1f, Memory, "page fault on a readback address";
        HardwareError = 0x20, Device, "hardware error";
        WriteError = 0x21, Device, "hardware error on a write, or on readback of the destination";
        TranslationFailed = 0x22, Device, "address translation failed";
        DrainAfterRecordFault = 0x26, Device, "drain after a page fault on a record (event log only)";
        BatchAfterRecordFault = 0x27, Device, "batch after a page fault on a record (event log only)";
    }
}

impl DsaStatus {
    /// The status in a record's first byte.
    pub const fn of(byte: u8) -> Self {
        Self::from_code(byte & CODE)
    }
}

codes! {
    /// How a descriptor of IAA ended.
    IaaStatus {
        Success = 0x01, None, "success";
        PageFault = 0x03, Memory, "page fault, which it was not to wait for";
        PageRequestDenied = 0x04, Memory, "page fault, which the kernel did not resolve";
        AnalyticsError = 0x0a, Data, "analytics error";
        OutputOverflow = 0x0b, Data, "the output does not fit";
        UnsupportedOpcode = 0x10, Administrator, "the queue or device does not have this operation";
        InvalidFlags = 0x11, Program, "flags that the operation or queue does not allow";
        ReservedField = 0x12, Program, "a reserved field is not zero";
        InvalidSize = 0x13, Program, "a size, or all sizes together, are zero, or one is more than the queue takes";
        Overlap = 0x16, Program, "areas overlap";
        InterruptHandle = 0x19, Program, "invalid interrupt handle";
        RecordFault = 0x1a, Memory, "page fault on the completion record";
        RecordAlignment = 0x1b, Program, "the completion record is misaligned";
        AddressAlignment = 0x1c, Program, "an address or size of the AECS is misaligned";
        Privilege = 0x1d, Administrator, "the queue does not allow this privilege";
        TrafficClass = 0x1e, Administrator, "the traffic class is configured wrongly";
        ReadbackFault = 0x1f, Memory, "page fault on a readback address";
        HardwareError = 0x20, Device, "hardware error";
        WriteError = 0x21, Device, "hardware error on a write, or on readback of the destination";
        TranslationFailed = 0x22, Device, "address translation failed";
        PageRequestTimeout = 0x23, Device, "a page request was not answered in time";
        Watchdog = 0x24, Device, "the device's watchdog ended the operation";
        InvalidOperationFlags = 0x30, Program, "invalid flags for (de)compression";
        InvalidFilterFlags = 0x31, Program, "invalid filter flags, or second flags for compression";
        InvalidInputSize = 0x32, Program, "the input's size is not a multiple of its 16-bit words";
        ElementCount = 0x33, Program, "invalid number of elements";
        SourceWidth = 0x34, Program, "invalid width of the source";
        InvertOutput = 0x35, Program, "output that cannot be inverted";
    }
}

impl IaaStatus {
    /// The status in a record's first byte.
    pub const fn of(byte: u8) -> Self {
        Self::from_code(byte & CODE)
    }
}

codes! {
    /// What is wrong when IAA's status is an analytics error.
    AnalyticsError {
        HeaderTooLarge = 1, Data, "the input ends within a block's header";
        CodeLengthCode = 2, Data, "undefined code length code";
        FirstLiteralLengthRepeats = 3, Data, "the first literal code's length repeats one before it";
        FirstDistanceLengthRepeats = 4, Data, "the first distance code's length repeats one before it";
        NoLiteralCodes = 5, Data, "no literal code has a length";
        LiteralCodeCount = 6, Data, "wrong number of literal codes";
        DistanceCodeCount = 7, Data, "wrong number of distance codes";
        CodeLengthCodeLengths = 8, Data, "impossible lengths of code length codes";
        LiteralCodeLengths = 9, Data, "impossible lengths of literal codes";
        DistanceCodeLengths = 10, Data, "impossible lengths of distance codes";
        BadLiteralCode = 11, Data, "undefined literal code";
        BadDistanceCode = 12, Data, "undefined distance code";
        BlockType = 13, Data, "undefined block type";
        StoredLength = 14, Data, "a stored block's length and its complement disagree";
        MissingEndOfBlock = 15, Data, "the input ends without an end of block";
        BadLength = 16, Data, "impossible length of a match";
        DistanceTooLarge = 17, Data, "a match reaches further back than the 4 KiB window";
        DistanceBeforeStart = 18, Data, "a match reaches back before the start";
        NoProgress = 19, Device, "input is left, but the engine makes no progress";
        RunLengthFormat = 20, Data, "a run-length encoded input is damaged or truncated";
        FilterOverflow = 21, Data, "an element of a filter's output is too wide";
        Aecs = 22, Program, "invalid AECS";
        TooFewElements = 23, Data, "the first source has fewer elements than expected";
        TooFewSecondElements = 24, Data, "the second source has fewer elements than expected";
        OutputTooSmall = 25, Data, "the output does not fit, and the operation cannot be resumed";
        DistanceCrossesBlock = 26, Data, "a match reaches back into another mini-block";
        LengthCrossesBlock = 27, Data, "a match reaches into the next mini-block";
        MiniBlockSize = 28, Program, "invalid size of mini-blocks";
        Verification = 29, Device, "the engine's own verification failed";
        SymbolWithoutCode = 30, Program, "the AECS has no code for a symbol of the data";
        RunLengthWidth = 31, Data, "impossible width of run-length encoded elements";
        EndedEarly = 32, Data, "the input ends before the expected number of elements";
        RunLengthCount = 33, Data, "impossible count of run-length encoded elements";
        ZeroHeader = 34, Data, "invalid header of a zero-compressed input";
        TooManyLiteralCodes = 35, Data, "more than 286 literal codes";
        TooManyDistanceCodes = 36, Data, "more than 30 distance codes";
        AdministrativeTimeout = 37, Interruption, "over a temporary limit that an administrative command imposed";
        CryptoFlag = 38, Program, "cryptography that the operation does not have, or an invalid parameter of it";
        CryptoSize = 39, Program, "fewer than 16 bytes for XTS";
        TooLongForOnePass = 40, Program, "more than 4 KiB to compress in one pass with a header";
        EarlyAbort = 41, Data, "compression was ended early, as it makes little difference";
        NoHeader = 42, Data, "no header can be made, as fewer than 257 literal codes are in use";
        Linking = 43, Program, "the previous part of an indexed compression was not a multiple of the mini-blocks";
        HeaderTooLong = 44, Data, "the header that was made does not fit into the AECS";
        AecsFormat = 45, Program, "the AECS has the format of another generation";
        InconsistentState = 46, Program, "the AECS holds an inconsistent state";
    }
}

/// The bits of a record's first byte that are the code.
pub(crate) const CODE: u8 = 0x3f;
/// A record's first byte where all went well: of both devices.
pub(crate) const SUCCESS: u8 = DsaStatus::Success.code();
/// Bit of a record's first byte: the page fault was on a write.
const FAULT_ON_WRITE: u8 = 0x80;

fn low(image: &RecordImage, word: usize) -> u32 {
    (image.words[word] & 0xffff_ffff) as u32
}

fn write_fault(f: &mut fmt::Formatter<'_>, fault: Option<PageFault>) -> fmt::Result {
    match fault {
        Some(PageFault { address, write }) => {
            let access = if write { "writing" } else { "reading" };
            write!(f, ", {access} {address:#x}")
        }
        None => Ok(()),
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
    fn nothing_is_said_before_the_end() {
        let unfinished = image(&[(1, 1), (4, 77), (8, 0x1000)]);
        assert_eq!(DsaOutcome::of(&unfinished), None);
        assert_eq!(IaaOutcome::of(&unfinished), None);
    }

    #[test]
    fn a_fault_on_a_write_is_the_same_status() {
        for (byte, write) in [(0x03, false), (0x83, true)] {
            let image = image(&[(0, byte), (1, 1), (4, 0x800), (8, 0x7f00_1234_5000)]);
            let fault = Some(PageFault {
                address: 0x7f00_1234_5000,
                write,
            });
            let outcome = DsaOutcome::of(&image).unwrap();
            assert_eq!(outcome.status, DsaStatus::PageFault);
            assert_eq!(outcome.page_fault, fault);
            assert_eq!(outcome.completed, 0x800);
            assert_eq!(outcome.equal(), None);
            let outcome = IaaOutcome::of(&image).unwrap();
            assert_eq!(outcome.status, IaaStatus::PageFault);
            assert_eq!(outcome.page_fault, fault);
        }
    }

    #[test]
    fn comparisons_have_a_result_in_both_kinds_of_success() {
        for status in [1, 2] {
            for (result, equal) in [(0, true), (1, false)] {
                let outcome = DsaOutcome::of(&image(&[(0, status), (1, result)])).unwrap();
                assert_eq!(outcome.equal(), Some(equal));
                assert_eq!(outcome.page_fault, None);
            }
        }
    }

    #[test]
    fn fields_of_dsa_stand_at_their_places() {
        let outcome = DsaOutcome::of(&image(&[(0, 1), (16, 0x1234_5678), (20, !0)])).unwrap();
        assert_eq!(outcome.crc(), 0x1234_5678);
        assert_eq!(outcome.delta_size(), 0x1234_5678);
        assert_eq!(outcome.invalid_flags(), None);
        let outcome = DsaOutcome::of(&image(&[(0, 0x11), (16, 0xff00_0100)])).unwrap();
        assert_eq!(outcome.invalid_flags(), Some(Flags::CACHE));
        assert_eq!(
            outcome.to_string(),
            "DSA: flags that the operation or queue does not allow (0x11, a bug of the program that built the \
             descriptor): flags 0x000100"
        );
    }

    #[test]
    fn fields_of_iaa_stand_at_their_places() {
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
            status: IaaStatus::Success,
            error: None,
            page_fault: None,
            completed: 4096,
            output_size: 1234,
            output_bits: 5,
            xor: 0xbeef,
            crc: 0xdead_cafe,
            crc64: 0x0123_4567_89ab_cdef,
            invalid_flags: 0xffff_ffff,
        };
        assert_eq!(outcome, expected);
        assert_eq!(outcome.invalid_flags(), None);
        assert!(!outcome.does_not_fit());
    }

    #[test]
    fn what_does_not_fit_is_said_in_two_ways() {
        let compressed = IaaOutcome::of(&image(&[(0, 0x0a), (1, 25)])).unwrap();
        assert!(compressed.does_not_fit());
        let decompressed = IaaOutcome::of(&image(&[(0, 0x0b)])).unwrap();
        assert!(decompressed.does_not_fit());
        let damaged = IaaOutcome::of(&image(&[(0, 0x0a), (1, 17)])).unwrap();
        assert!(!damaged.does_not_fit());
        assert_eq!(damaged.error, Some(AnalyticsError::DistanceTooLarge));
        // The error code is only valid with its status.
        let fault = IaaOutcome::of(&image(&[(0, 0x03), (1, 25)])).unwrap();
        assert!(!fault.does_not_fit());
    }

    #[test]
    fn display_says_whose_fault_it_is() {
        let missing = image(&[(0, 0x83), (8, 0x1000)]);
        assert_eq!(
            DsaOutcome::of(&missing).unwrap().to_string(),
            "DSA: page fault, which it was not to wait for (0x03, a page is missing: do it on the processor), \
             writing 0x1000"
        );
        let damaged = image(&[(0, 0x0a), (1, 13)]);
        assert_eq!(
            IaaOutcome::of(&damaged).unwrap().to_string(),
            "IAA: analytics error: undefined block type (0x0d, the data's fault)"
        );
        assert_eq!(DsaStatus::Success.to_string(), "success (0x01)");
        assert_eq!(DsaStatus::Other(0x3e).fault(), Fault::Unknown);
    }

    proptest! {
        #[test]
        fn codes_and_their_names_are_a_pair(code: u8) {
            prop_assert_eq!(DsaStatus::from_code(code).code(), code);
            prop_assert_eq!(IaaStatus::from_code(code).code(), code);
            prop_assert_eq!(AnalyticsError::from_code(code).code(), code);
        }

        #[test]
        fn any_record_can_be_read(words: [u64; 8]) {
            let image = RecordImage { words };
            prop_assert_eq!(DsaOutcome::of(&image).is_some(), words[0] & 0xff != 0);
            if let (Some(dsa), Some(iaa)) = (DsaOutcome::of(&image), IaaOutcome::of(&image)) {
                prop_assert!(!dsa.to_string().is_empty() && !iaa.to_string().is_empty());
            }
        }
    }
}
