use std::io::Read;

use flate2::read::DeflateDecoder;
use proptest::prelude::*;

use idxd::iaa::*;

const END_OF_BLOCK: usize = 256;

/// What compressed data consists of.
#[derive(Clone, Copy, Debug)]
enum Token {
    Literal(u8),
    /// Length 3 to 258, distance 1 to 32768.
    Match(u16, u16),
}

/// Any data; matches that reach back before its start are left out.
fn tokens() -> impl Strategy<Value = Vec<Token>> {
    let token = prop_oneof![
        3 => any::<u8>().prop_map(Token::Literal),
        3 => (0_u8..4).prop_map(Token::Literal),
        2 => (3_u16..=258, 1_u16..=4096).prop_map(|(len, distance)| Token::Match(len, distance)),
    ];
    prop::collection::vec(token, 0..400).prop_map(|tokens| {
        let mut size = 0_usize;
        tokens
            .into_iter()
            .filter(|token| {
                let (len, distance) = match token {
                    Token::Literal(_) => (1, 0),
                    Token::Match(len, distance) => (usize::from(*len), usize::from(*distance)),
                };
                let possible = distance <= size;
                size += if possible { len } else { 0 };
                possible
            })
            .collect()
    })
}

fn expand(tokens: &[Token]) -> Vec<u8> {
    let mut data = Vec::new();
    for token in tokens {
        match token {
            Token::Literal(byte) => data.push(*byte),
            Token::Match(len, distance) => {
                for _ in 0..*len {
                    data.push(data[data.len() - usize::from(*distance)]);
                }
            }
        }
    }
    data
}

/// Symbol, extra bits, and how many: of the symbols from `first` on, each of which begins at one of `bases`.
fn symbol(value: u16, first: usize, bases: &[(u16, u8)]) -> (usize, u32, u8) {
    let at = bases.iter().rposition(|(base, _)| *base <= value).unwrap();
    let (base, bits) = bases[at];
    (first + at, u32::from(value - base), bits)
}

/// RFC 1951, 3.2.5, by its rule rather than by its tables.
fn length(len: u16) -> (usize, u32, u8) {
    if len == 258 {
        return (285, 0, 0);
    }
    let bases: Vec<(u16, u8)> = (0..28_u8)
        .map(|symbol| match symbol / 4 {
            0 | 1 => (3 + u16::from(symbol), 0),
            group => (3 + (u16::from(4 + symbol % 4) << (group - 1)), group - 1),
        })
        .collect();
    symbol(len, 257, &bases)
}

fn distance(distance: u16) -> (usize, u32, u8) {
    let bases: Vec<(u16, u8)> = (0..30_u8)
        .map(|symbol| match symbol / 2 {
            0 => (1 + u16::from(symbol), 0),
            group => (1 + (u16::from(2 + symbol % 2) << (group - 1)), group - 1),
        })
        .collect();
    symbol(distance, 0, &bases)
}

fn count_of(tokens: &[Token]) -> Histogram {
    let mut histogram = Histogram::new();
    for token in tokens {
        match token {
            Token::Literal(byte) => histogram.literals[usize::from(*byte)] += 1,
            Token::Match(len, far) => {
                histogram.literals[length(*len).0] += 1;
                histogram.distances[distance(*far).0] += 1;
            }
        }
    }
    histogram
}

/// Bits of any number, as a stream has them.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    bits: usize,
}

impl Bits {
    fn push(&mut self, value: u32, bits: u8) {
        for bit in 0..bits {
            if self.bits.is_multiple_of(8) {
                self.bytes.push(0);
            }
            *self.bytes.last_mut().unwrap() |= ((value >> bit & 1) as u8) << (self.bits % 8);
            self.bits += 1;
        }
    }

    fn push_code(&mut self, code: Code) {
        assert_ne!(code.len, 0, "a symbol without a code");
        for bit in (0..code.len).rev() {
            self.push(u32::from(code.bits >> bit & 1), 1);
        }
    }
}

/// A stream of one block: its header, data, and end.
fn stream(tokens: &[Token], codes: &Codes, header: &Header) -> Vec<u8> {
    let mut bits = Bits::default();
    for at in 0..header.bits() {
        let byte = header.bytes()[usize::from(at / 8)];
        bits.push((byte >> (at % 8) & 1).into(), 1);
    }
    for token in tokens {
        match token {
            Token::Literal(byte) => bits.push_code(codes.literals()[usize::from(*byte)]),
            Token::Match(len, far) => {
                let (symbol, extra, count) = length(*len);
                bits.push_code(codes.literals()[symbol]);
                bits.push(extra, count);
                let (symbol, extra, count) = distance(*far);
                bits.push_code(codes.distances()[symbol]);
                bits.push(extra, count);
            }
        }
    }
    bits.push_code(codes.literals()[END_OF_BLOCK]);
    bits.bytes
}

fn inflate(stream: &[u8]) -> Vec<u8> {
    let mut data = Vec::new();
    DeflateDecoder::new(stream).read_to_end(&mut data).unwrap();
    data
}

#[test]
fn fixed_codes_are_those_of_the_rfc() {
    let codes = Codes::fixed();
    let expected = [
        (0, 0x30, 8),
        (143, 0xbf, 8),
        (144, 0x190, 9),
        (255, 0x1ff, 9),
        (256, 0, 7),
        (279, 0x17, 7),
        (280, 0xc0, 8),
        (285, 0xc5, 8),
    ];
    for (symbol, bits, len) in expected {
        assert_eq!(codes.literals()[symbol], Code { bits, len }, "{symbol}");
    }
    for (symbol, code) in codes.distances().iter().enumerate() {
        assert_eq!((usize::from(code.bits), code.len), (symbol, 5));
    }
    let header = codes.header(true);
    assert_eq!((header.bytes(), header.bits()), (&[0b011][..], 3));
    assert_eq!(codes.header(false).bytes(), [0b010]);
}

#[test]
fn even_nothing_and_one_symbol_have_complete_codes() {
    for tokens in [
        vec![],
        vec![Token::Literal(7)],
        vec![Token::Literal(7); 300],
    ] {
        let codes = Codes::of(&count_of(&tokens));
        let stream = stream(&tokens, &codes, &codes.header(true));
        assert_eq!(inflate(&stream), expand(&tokens));
    }
}

proptest! {
    #[test]
    fn any_inflate_understands_codes_of_the_data(tokens in tokens()) {
        let codes = Codes::of(&count_of(&tokens));
        let stream = stream(&tokens, &codes, &codes.header(true));
        prop_assert_eq!(inflate(&stream), expand(&tokens));
    }

    #[test]
    fn any_inflate_understands_fixed_codes(tokens in tokens()) {
        let codes = Codes::fixed();
        let stream = stream(&tokens, &codes, &codes.header(true));
        prop_assert_eq!(inflate(&stream), expand(&tokens));
    }

    #[test]
    fn covering_codes_of_other_data_do_as_well(sample in tokens(), tokens in tokens()) {
        let codes = Codes::of(&count_of(&sample).covering());
        let stream = stream(&tokens, &codes, &codes.header(true));
        prop_assert_eq!(inflate(&stream), expand(&tokens));
    }

    /// Of any counts at all: the header fits its place, and what inflates is one literal.
    #[test]
    fn headers_fit_an_aecs(
        literals in prop::collection::vec(prop_oneof![Just(0), 0..9_u32, any::<u32>()], LITERALS),
        distances in prop::collection::vec(prop_oneof![Just(0), 0..9_u32, any::<u32>()], DISTANCES),
        exponents in prop::collection::vec(0..32_u8, LITERALS),
    ) {
        let mut histogram = Histogram::new();
        histogram.literals.copy_from_slice(&literals);
        histogram.distances.copy_from_slice(&distances);
        let mut steep = histogram.clone();
        for (count, exponent) in steep.literals.iter_mut().zip(exponents) {
            *count = 1 << exponent;
        }
        for mut histogram in [histogram, steep] {
            histogram.literals[65] = histogram.literals[65].max(1);
            let codes = Codes::of(&histogram);
            let header = codes.header(true);
            prop_assert!(header.bits() <= 1654);
            let stream = stream(&[Token::Literal(65)], &codes, &header);
            prop_assert_eq!(inflate(&stream), [65]);
        }
    }
}
