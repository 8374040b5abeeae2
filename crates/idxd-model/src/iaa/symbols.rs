//! DEFLATE's alphabets: what the symbols for lengths and distances stand for (RFC 1951, 3.2.5).

/// Symbols for literals, the end of a block and lengths.
pub(super) const LITERALS: usize = 286;
/// Symbols for distances.
pub(super) const DISTANCES: usize = 30;
/// The symbol that ends a block.
pub(super) const END_OF_BLOCK: usize = 256;
/// The first symbol for a length.
pub(super) const FIRST_LENGTH: usize = 257;
/// Bytes that IAA's compressor and decompressor can reach back.
pub(super) const WINDOW: usize = 4096;
/// Shortest and longest copy.
pub(super) const SHORTEST: usize = 3;
pub(super) const LONGEST: usize = 258;

/// A symbol for a length or a distance: the first value it stands for, and how many more bits there are.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) base: u16,
    pub(super) extra: u8,
}

/// By symbol, from [`FIRST_LENGTH`] on.
pub(super) const LENGTH_RANGES: [Range; 29] = {
    let mut ranges = [Range { base: 0, extra: 0 }; 29];
    let mut base = 3;
    let mut symbol = 0_u8;
    while symbol < 28 {
        let extra = if symbol < 8 { 0 } else { symbol / 4 - 1 };
        ranges[symbol as usize] = Range { base, extra };
        base += 1 << extra;
        symbol += 1;
    }
    // 258 has a symbol of its own, although the one before it could express it too.
    ranges[28].base = 258;
    ranges
};

/// By symbol.
pub(super) const DISTANCE_RANGES: [Range; DISTANCES] = {
    let mut ranges = [Range { base: 0, extra: 0 }; DISTANCES];
    let mut base = 1;
    let mut symbol = 0_u8;
    while symbol < 30 {
        let extra = if symbol < 4 { 0 } else { symbol / 2 - 1 };
        ranges[symbol as usize] = Range { base, extra };
        base += 1 << extra;
        symbol += 1;
    }
    ranges
};

/// Index into [`LENGTH_RANGES`] for a length from [`SHORTEST`] to [`LONGEST`].
pub(super) fn of_length(length: usize) -> usize {
    LENGTH_RANGES.partition_point(|range| usize::from(range.base) <= length) - 1
}

/// Index into [`DISTANCE_RANGES`] for a distance from 1 to 32768.
pub(super) fn of_distance(distance: usize) -> usize {
    DISTANCE_RANGES.partition_point(|range| usize::from(range.base) <= distance) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranges_are_those_of_the_rfc() {
        let length = |symbol: usize| {
            let range = LENGTH_RANGES[symbol - FIRST_LENGTH];
            (range.base, range.extra)
        };
        assert_eq!(length(257), (3, 0));
        assert_eq!(length(264), (10, 0));
        assert_eq!(length(265), (11, 1));
        assert_eq!(length(277), (67, 4));
        assert_eq!(length(284), (227, 5));
        assert_eq!(length(285), (258, 0));
        let distance = |symbol: usize| {
            let range = DISTANCE_RANGES[symbol];
            (range.base, range.extra)
        };
        assert_eq!(distance(0), (1, 0));
        assert_eq!(distance(4), (5, 1));
        assert_eq!(distance(23), (3073, 10));
        assert_eq!(distance(29), (24577, 13));
    }

    #[test]
    fn every_value_is_in_the_range_of_its_symbol() {
        for length in SHORTEST..=LONGEST {
            let range = LENGTH_RANGES[of_length(length)];
            assert!((0..1 << range.extra).contains(&(length - usize::from(range.base))));
        }
        assert_eq!(of_length(258), 28);
        for distance in 1..=32768 {
            let range = DISTANCE_RANGES[of_distance(distance)];
            assert!((0..1 << range.extra).contains(&(distance - usize::from(range.base))));
        }
    }
}
