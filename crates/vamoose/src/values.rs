//! Values of options: sizes, rates and times, with units.

use std::{fmt, num::NonZeroU64, str::FromStr, time::Duration};

use vamoose_link::Bytes;

/// A size in bytes. Units: k, M, G and T, with or without iB, are powers of 1024; kB, MB, GB and TB are powers of 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl Size {
    /// The size of something in memory.
    pub fn in_memory(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes = split(text).and_then(|(number, unit)| match unit {
            "" => whole(number),
            unit => whole(number * bytes_in(unit)?),
        });
        bytes.map(Self).ok_or_else(|| {
            format!("`{text}` is not a size: write a number of bytes, or a number and a unit, as in 512k, 1.5M or 2G")
        })
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Bytes(self.0).fmt(f)
    }
}

/// A bandwidth in bytes per second, with a unit of [`Size`], or with kbit, Mbit or Gbit, which are powers of 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub NonZeroU64);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let amount = text.strip_suffix("/s").unwrap_or(text);
        let rate = split(amount).and_then(|(number, unit)| {
            // Of `Mbps` and `Mbit`.
            let bits = unit.strip_suffix("bit").or(unit.strip_suffix("bps"));
            whole(
                number
                    * match bits {
                        Some(prefix) => power(prefix, 1000.0)? / 8.0,
                        None => bytes_in(unit)?,
                    },
            )
        });
        let rate = rate.ok_or_else(|| {
            format!("`{text}` is not a bandwidth: write a number and a unit, as in 80M (MiB per second), 80MB/s or 500Mbit")
        })?;
        let rate = NonZeroU64::new(rate).ok_or("the bandwidth must not be 0")?;
        Ok(Self(rate))
    }
}

/// A time, in seconds if `text` has no unit: ms, s, min or h.
pub fn seconds(text: &str) -> Result<Duration, String> {
    time(text, 1.0)
}

/// As [`seconds`], but in milliseconds if `text` has no unit.
pub fn milliseconds(text: &str) -> Result<Duration, String> {
    time(text, 1e-3)
}

/// As [`seconds`], and at least one millisecond.
pub fn positive_seconds(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        time if time < Duration::from_millis(1) => Err("the time must not be 0".to_owned()),
        time => Ok(time),
    }
}

fn time(text: &str, default: f64) -> Result<Duration, String> {
    let time = split(text).and_then(|(number, unit)| {
        let unit = match unit {
            "" => default,
            "ms" => 1e-3,
            "s" => 1.0,
            "min" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        // Longer times cannot be added to clocks.
        Duration::try_from_secs_f64(number * unit)
            .ok()
            .filter(|it| *it < Duration::from_secs(1 << 32))
    });
    time.ok_or_else(|| {
        format!("`{text}` is not a time: write a number and a unit, as in 300ms, 10s or 5min")
    })
}

/// The number at the beginning of `text`, and its unit.
fn split(text: &str) -> Option<(f64, &str)> {
    let is_of_number = |letter: char| letter.is_ascii_digit() || letter == '.';
    let end = text
        .find(|letter| !is_of_number(letter))
        .unwrap_or(text.len());
    Some((text[..end].parse().ok()?, text[end..].trim_start()))
}

fn bytes_in(unit: &str) -> Option<f64> {
    match unit.strip_suffix("iB") {
        Some(prefix) => power(prefix, 1024.0),
        None => match unit.strip_suffix('B') {
            Some(prefix) => power(prefix, 1000.0),
            None => power(Some(unit).filter(|it| !it.is_empty())?, 1024.0),
        },
    }
}

fn power(prefix: &str, base: f64) -> Option<f64> {
    let exponent = match prefix {
        "" => 0,
        "k" | "K" => 1,
        "m" | "M" => 2,
        "g" | "G" => 3,
        "t" | "T" => 4,
        _ => return None,
    };
    Some(base.powi(exponent))
}

/// Numbers below 2^53 are exact.
fn whole(number: f64) -> Option<u64> {
    let limit = 9_007_199_254_740_992.0;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked"
    )]
    (0.0..limit).contains(&number).then_some(number as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4k", 4096),
            ("512K", 512 << 10),
            ("1M", 1 << 20),
            ("10MiB", 10 << 20),
            ("1.5M", 3 << 19),
            ("2 GiB", 2 << 30),
            ("3G", 3 << 30),
            ("10MB", 10_000_000),
            ("512B", 512),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in [
            "",
            "k",
            "-1",
            "1.2.3",
            "4Kib",
            "4Kbit",
            "1e3",
            "99999999999T",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn rates_need_a_unit() {
        for (text, bytes) in [
            ("16k", 16 << 10),
            ("1.5M", 3 << 19),
            ("10MB/s", 10_000_000),
            ("10MiB/s", 10 << 20),
            ("500Mbit", 62_500_000),
            ("1Gbit/s", 125_000_000),
            ("100Mbps", 12_500_000),
            ("2000B", 2000),
        ] {
            let rate = text.parse::<Rate>().map(|rate| rate.0.get());
            assert_eq!(rate, Ok(bytes), "{text}");
        }
        // A megabit, or a megabyte?
        for text in ["", "100", "1.5", "10Mb", "10Mib", "1M/h", "fast"] {
            let error = text.parse::<Rate>().unwrap_err();
            assert!(error.contains("500Mbit"), "{error}");
        }
        assert!("0M".parse::<Rate>().unwrap_err().contains("must not be 0"));
    }

    #[test]
    fn times_may_have_a_unit() {
        for (text, expected) in [
            ("10", 10_000),
            ("10s", 10_000),
            ("300ms", 300),
            ("0.5", 500),
            ("5min", 300_000),
        ] {
            assert_eq!(seconds(text), Ok(Duration::from_millis(expected)), "{text}");
        }
        assert_eq!(milliseconds("300"), milliseconds("0.3s"));
        for text in ["", "s", "-1", "1d", "1e9", "99999999999999"] {
            assert!(seconds(text).unwrap_err().contains("300ms"), "{text}");
        }
        assert!(positive_seconds("0").is_err());
    }
}
