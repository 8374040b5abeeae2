//! Work queues of DSAs and IAAs, as options name them: this host's, or those of modelled devices.

use std::{fmt, num::NonZeroU32, str::FromStr};

use anyhow::{Error, Result, anyhow};
use idxd::{
    Kind,
    offload::{Choice, Devices, Options},
};

/// As text: `auto`, names as in `wq0.1,wq2.0`, or `model` and `model:4`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DevicePath {
    /// Devices of this host.
    Host(Choice),
    /// This number of modelled devices.
    Model(NonZeroU32),
}

/// More than a server has.
const MAX_MODELS: u32 = 64;

impl DevicePath {
    pub const AUTO: Self = Self::Host(Choice::Auto);

    pub fn open(&self, kind: Kind, options: &Options) -> Result<Devices> {
        match self {
            Self::Model(count) => Ok(idxd_model::devices(kind, count.get() as usize, options)?),
            Self::Host(choice) => Ok(Devices::open(kind, choice, options)?),
        }
    }
}

impl FromStr for DevicePath {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let count = match text.strip_prefix("model") {
            None => return Ok(Self::Host(text.parse()?)),
            Some("") => Some(NonZeroU32::MIN),
            Some(count) => count.strip_prefix(':').and_then(|count| count.parse().ok()),
        };
        let count = count.filter(|count: &NonZeroU32| count.get() <= MAX_MODELS);
        count.map(Self::Model).ok_or_else(|| {
            anyhow!("{text:?}: modelled devices are `model`, or `model:4` for four (at most {MAX_MODELS})")
        })
    }
}

impl fmt::Display for DevicePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(choice) => choice.fmt(f),
            Self::Model(count) => write!(f, "model:{count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_and_written() {
        for (text, again) in [
            ("auto", "auto"),
            ("model", "model:1"),
            ("model:4", "model:4"),
            ("wq0.1", "wq0.1"),
            ("dsa0/wq0.1,wq2.0", "dsa0/wq0.1,wq2.0"),
        ] {
            assert_eq!(text.parse::<DevicePath>().unwrap().to_string(), again);
        }
        for text in [
            "",
            "model:",
            "model:0",
            "model:65",
            "models",
            "wq",
            "auto,wq0.1",
        ] {
            assert!(text.parse::<DevicePath>().is_err(), "{text}");
        }
    }
}
