//! Options that several commands share, and how their values are written.

use std::{fmt, num::NonZeroU64, str::FromStr, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use codec::Settings;
use multifd::{Layout, Method};
use relay::Config;

/// How pages cross the link.
#[derive(Args, Clone, Debug)]
pub(crate) struct Encoding {
    /// How pages are encoded on the way to the destination
    #[arg(long, value_enum, default_value_t = MethodName::None)]
    pub(crate) method: MethodName,
    /// Level of the method: zlib 0 to 9, zstd negative (fast) to 22; its default is 1
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) level: Option<i32>,
    /// Hardware to use for the method
    #[arg(long, value_enum, default_value_t = Accel::Auto)]
    pub(crate) accel: Accel,
    /// Page size of the guest in bytes
    #[arg(long, default_value = "4k", value_name = "SIZE")]
    pub(crate) page_size: Size,
    /// Most bytes per second on the way to the destination
    #[arg(long, value_name = "RATE")]
    pub(crate) max_bandwidth: Option<Size>,
    /// Seconds for which a peer may neither send nor take a byte while one is awaited
    #[arg(long, default_value_t = 15, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) stall_timeout: u64,
}

impl Encoding {
    /// The relay that these options describe.
    pub(crate) fn config(&self) -> Result<Config> {
        self.accel.check()?;
        let settings = Settings::new(self.method.method()?, self.level)?;
        let page_size = u32::try_from(self.page_size.0).unwrap_or(u32::MAX);
        let mut config = Config::new(settings);
        config.layout = Layout::new(page_size).context("--page-size")?;
        config.max_bandwidth = self.max_bandwidth.map(Size::rate).transpose()?;
        config.stall_timeout = Duration::from_secs(self.stall_timeout);
        Ok(config)
    }
}

/// The methods of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodName {
    /// Pages as they are
    None,
    /// One zlib stream per channel
    Zlib,
    /// One zstd frame per channel
    Zstd,
    /// LZ4 per packet, between two Vamooses (not in this build)
    Lz4,
    /// Deflate per page, as Intel's IAA does it (not in this build)
    Qpl,
    /// Gzip per packet, as Intel's QAT does it (not in this build)
    Qatzip,
}

impl MethodName {
    fn method(self) -> Result<Method> {
        Ok(match self {
            Self::None => Method::None,
            Self::Zlib => Method::Zlib,
            Self::Zstd => Method::Zstd,
            Self::Qpl => Method::Qpl,
            Self::Qatzip => Method::Qatzip,
            Self::Lz4 => bail!(
                "method lz4 is not built into this vamoose; use zstd with a negative level for speed"
            ),
        })
    }
}

/// The accelerators of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Accel {
    /// The best that is there
    Auto,
    /// Software only
    None,
    /// Intel QuickAssist (not in this build)
    Qat,
    /// Intel In-Memory Analytics Accelerator (not in this build)
    Iaa,
}

impl Accel {
    /// A named accelerator is mandatory, so its absence is an error at the start.
    fn check(self) -> Result<()> {
        match self {
            Self::Auto | Self::None => Ok(()),
            Self::Qat | Self::Iaa => bail!(
                "--accel {}: this vamoose is built without a driver for it; use --accel auto",
                self.to_possible_value()
                    .map_or_else(String::new, |value| value.get_name().to_owned())
            ),
        }
    }
}

/// A size in bytes, or a rate in bytes per second: a number with k, M, G or T (powers of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl Size {
    pub(crate) fn rate(self) -> Result<NonZeroU64> {
        NonZeroU64::new(self.0).context("--max-bandwidth: a rate of 0 moves nothing")
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || {
            format!("`{text}` is not a size: write a number, with k, M, G or T (powers of 1024)")
        };
        let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            _ => return Err(error()),
        };
        let number: u64 = digits.parse().map_err(|_| error())?;
        number
            .checked_mul(1 << shift)
            .map(Self)
            .ok_or_else(|| format!("`{text}` is too large a size"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4k", 4096),
            ("512K", 512 << 10),
            ("1M", 1 << 20),
            ("3G", 3 << 30),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "k", "-1", "1.5G", "4KiB", "99999999999T"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_not_built_is_said_early() {
        assert!(
            Accel::Qat
                .check()
                .unwrap_err()
                .to_string()
                .contains("--accel qat")
        );
        assert!(MethodName::Lz4.method().is_err());
    }
}
