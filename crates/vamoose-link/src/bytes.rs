//! Numbers of bytes for people.

use std::fmt;

/// A number of bytes, shown without loss in the largest unit that divides it: 32 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
        let (mut number, mut units) = (self.0, UNITS.iter());
        let mut unit = units.next();
        while number != 0 && number % 1024 == 0 && units.len() > 0 {
            (number, unit) = (number / 1024, units.next());
        }
        write!(f, "{number} {}", unit.unwrap_or(&""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_rounded() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (32 << 20, "32 MiB"),
            (4097 << 20, "4097 MiB"),
            (1 << 60, "1048576 TiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
