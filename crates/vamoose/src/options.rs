//! Options that several commands share, and the syntax of their values.

use std::{
    env, fmt,
    num::{NonZeroU64, NonZeroUsize},
    path::PathBuf,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use idxd::{Kind, offload::Options, shares::Weight};
use multifd::{Layout, Method};
use serde::{Deserialize, Serialize};
use vamoose_codec::{Accel, Engines, Registry, Settings, Verify};
use vamoose_link::{Address, Peers};
use vamoose_relay::Config;

use crate::{devices::DevicePath, report::write_json};

/// How pages cross the link.
#[derive(Args, Clone, Debug)]
pub struct Encoding {
    /// Encoding of pages towards the destination
    #[arg(long, value_enum, default_value_t = MethodName::None)]
    pub method: MethodName,
    /// Level of the method: zlib 0 to 9, zstd and zstd-frames negative (fast) to 22, lz4 from 1 (higher is faster),
    /// qpl 0 (fast) to 12, qatzip 1 to 9 [default: 1]
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub level: Option<i32>,
    #[command(flatten)]
    pub hardware: Hardware,
    /// Packets encoded in parallel per channel, 1 to 64, for methods whose packets are independent (auto, lz4,
    /// zstd-frames, qpl, qatzip)
    #[arg(long, default_value = "1", value_name = "N")]
    pub streams: NonZeroUsize,
    /// Page size of the guest
    #[arg(long, default_value = "4k", value_name = "SIZE")]
    pub page_size: Size,
    /// Bandwidth limit towards the destination, in bytes per second
    #[arg(long, value_name = "RATE")]
    pub max_bandwidth: Option<Size>,
    #[command(flatten)]
    pub stall_timeout: StallTimeout,
}

impl Encoding {
    /// The relay that these options describe.
    pub fn config(&self) -> Result<Config> {
        let engines = self.hardware.engines(self.method.settings(self.level)?)?;
        let page_size = u32::try_from(self.page_size.0).unwrap_or(u32::MAX);
        if self.streams > NonZeroUsize::MIN && !engines.settings().packets_are_independent() {
            bail!(
                "--streams {}: the packets of a {} channel form one stream; methods auto, lz4, zstd-frames, qpl and \
                 qatzip can encode several in parallel",
                self.streams,
                engines.settings().name()
            );
        }
        if self.streams.get() > MAX_STREAMS {
            bail!("--streams {}: the maximum is {MAX_STREAMS}", self.streams);
        }
        let mut config = Config::new(engines);
        config.streams = self.streams;
        config.layout = Layout::new(page_size).context("--page-size")?;
        config.max_bandwidth = self.max_bandwidth.map(Size::rate).transpose()?;
        config.stall_timeout = self.stall_timeout.duration();
        Ok(config)
    }
}

/// Each stream has a thread, and buffers of 1.5 MiB.
const MAX_STREAMS: usize = 64;

/// When a peer is given up.
#[derive(Args, Clone, Copy, Debug)]
pub struct StallTimeout {
    /// Abort after this many seconds without progress from a peer
    #[arg(long, default_value_t = 15, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    stall_timeout: u64,
}

impl StallTimeout {
    /// As the crates below have it.
    pub fn duration(self) -> Duration {
        Duration::from_secs(self.stall_timeout)
    }
}

/// Who may connect where a command listens.
#[derive(Args, Clone, Debug)]
pub struct Access {
    /// Allow a non-local listen address without authentication or encryption
    ///
    /// Anyone who can reach the address can then read and replace the guest's memory. Use it on a trusted network only;
    /// otherwise listen on a loopback address behind a tunnel.
    #[arg(long)]
    insecure: bool,
    /// User who may connect, besides root and the user of this process (repeatable)
    ///
    /// Checked for connections from this host: the source QEMU's user, or that of a tunnel's process. If this process
    /// runs as root and one UID is given, a unix socket is handed over to that user; otherwise its permissions let
    /// everyone connect, and connections of other users are refused.
    #[arg(long, value_name = "UID")]
    peer_uid: Vec<u32>,
}

impl Access {
    /// Who may connect to `listen`, unless it is open to other hosts without permission.
    pub fn peers(&self, listen: &Address) -> Result<Peers> {
        refuse_open_address(listen, self.insecure)?;
        Ok(Peers::own_and(self.peer_uid.iter().copied()))
    }
}

/// Refuses an address that other hosts can reach, as long as there is neither authentication nor encryption.
pub fn refuse_open_address(listen: &Address, insecure: bool) -> Result<()> {
    if !listen.is_local() && !insecure {
        bail!(
            "other hosts can reach {listen}, and vamoose neither authenticates nor encrypts: listen on a loopback \
             address behind a tunnel, or allow it with --insecure on a trusted network"
        );
    }
    Ok(())
}

/// Where a report goes.
#[derive(Args, Clone, Debug)]
pub struct JsonReport {
    /// Write a report as JSON to a file, or to standard output with -
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

impl JsonReport {
    /// Writes `report` if one is wanted.
    pub fn write(&self, report: &impl Serialize) -> Result<()> {
        let Some(target) = &self.json else {
            return Ok(());
        };
        write_json(report, target)
    }
}

/// What is used of this host's hardware, and how far it is trusted.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub struct Hardware {
    /// Hardware for encoding and decoding
    #[arg(long, value_enum, default_value_t = AccelName::Auto)]
    accel: AccelName,
    /// IAA work queues for method qpl: `auto` (all usable ones), wqX.Y[,wqZ.W...], or `model[:N]`
    ///
    /// Named queues are required, unless --accel selects another engine or none. `model[:N]` stands for N devices
    /// modelled in software, for tests.
    #[arg(long, default_value = "auto", value_name = "QUEUES")]
    #[serde(with = "as_text")]
    iaa_path: DevicePath,
    #[command(flatten)]
    pub shares: DeviceShares,
    /// Results of hardware to verify in software
    #[arg(long, value_enum, default_value_t = VerifyName::Sample)]
    verify: VerifyName,
}

/// How many migrations divide work queues of DSAs and IAAs among them.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub struct DeviceShares {
    /// Directory through which migrations of this host share DSA and IAA work queues fairly
    ///
    /// Must be the same for all of them. Without it, each migration takes what it can get.
    #[arg(long, value_name = "DIR")]
    device_shares: Option<PathBuf>,
    /// Weight of this migration's share of the work queues, 1 to 15
    #[arg(long, default_value_t = 4, value_name = "WEIGHT", value_parser = clap::value_parser!(u8).range(1..=15))]
    priority: u8,
}

impl DeviceShares {
    /// As [`Options::shares`] has it.
    pub fn of_devices(&self) -> Option<(PathBuf, Weight)> {
        let directory = self.device_shares.clone()?;
        Some((directory, Weight::new(self.priority)))
    }
}

impl Hardware {
    /// The engines for a migration that is sent with `settings`.
    pub fn engines(&self, settings: Settings) -> Result<Engines> {
        let accel = match self.accel {
            AccelName::Auto if self.iaa_path != DevicePath::AUTO => Accel::Iaa,
            AccelName::Auto => Accel::Auto,
            AccelName::None => Accel::None,
            AccelName::Qat => Accel::Qat,
            AccelName::Iaa => Accel::Iaa,
        };
        let options = Options {
            shares: self.shares.of_devices(),
            ..Options::pages(PAGE_BYTES)
        };
        let path = self.iaa_path.clone();
        let registry = Registry::with_iaa(move || {
            let opened = path.open(Kind::Iaa, &options);
            opened.map_err(|error| format!("{error:#}"))
        });
        let engines = Arc::new(registry).choose(settings, accel, self.verify())?;
        Ok(engines)
    }

    /// How many of the hardware's results are checked.
    pub fn verify(&self) -> Verify {
        match self.verify {
            VerifyName::Off => Verify::Off,
            VerifyName::Sample => Verify::Sample,
            VerifyName::All => Verify::All,
        }
    }
}

/// Method qpl's pages.
const PAGE_BYTES: usize = 4096;

/// A value of serde as the command line has it.
pub mod as_text {
    use std::{fmt::Display, str::FromStr};

    use serde::{Deserialize as _, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(
        value: &impl Display,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(D::Error::custom)
    }
}

/// The methods of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodName {
    /// What serves best, packet by packet, of none, lz4 and zstd-frames; only another vamoose understands it
    Auto,
    /// Pages as they are
    None,
    /// One zlib stream per channel
    Zlib,
    /// One zstd frame per channel
    Zstd,
    /// LZ4 per packet; only another vamoose understands it
    Lz4,
    /// A zstd frame per packet; only another vamoose understands it
    ZstdFrames,
    /// Deflate per page, as Intel's IAA does it
    Qpl,
    /// Gzip per packet, as Intel's QAT does it
    Qatzip,
}

impl MethodName {
    /// The method with the level that was given, if one was.
    pub fn settings(self, level: Option<i32>) -> Result<Settings> {
        match (self.method(), level) {
            (Some(method), level) => Ok(Settings::new(method, level)?),
            (None, None) => Ok(Settings::auto()),
            (None, Some(level)) => bail!("--level {level}: method auto chooses its levels itself"),
        }
    }

    /// `None` for auto.
    fn method(self) -> Option<Method> {
        Some(match self {
            Self::Auto => return None,
            Self::None => Method::None,
            Self::Zlib => Method::Zlib,
            Self::Zstd => Method::Zstd,
            Self::Lz4 => Method::Lz4,
            Self::ZstdFrames => Method::ZstdFrames,
            Self::Qpl => Method::Qpl,
            Self::Qatzip => Method::Qatzip,
        })
    }
}

/// The accelerators of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
enum AccelName {
    /// The best that is there
    Auto,
    /// Software only
    None,
    /// Intel QuickAssist, for qatzip
    Qat,
    /// Intel In-Memory Analytics Accelerator, for qpl
    Iaa,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
enum VerifyName {
    /// No results
    Off,
    /// The first packet of every channel, then one in 64
    Sample,
    /// Every result
    All,
}

/// A size in bytes, or a rate in bytes per second: a number with k, M, G or T (powers of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl Size {
    pub fn rate(self) -> Result<NonZeroU64> {
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

/// Where attempts are recorded.
#[derive(Args, Debug)]
pub struct StateDir {
    /// Directory of the journal of migration attempts
    /// [default: /run/vamoose for root, $XDG_RUNTIME_DIR/vamoose for other users]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl StateDir {
    /// The folder, which need not be there yet.
    pub fn path(&self) -> Result<PathBuf> {
        if let Some(dir) = &self.state_dir {
            return Ok(dir.clone());
        }
        if rustix::process::geteuid().is_root() {
            return Ok(PathBuf::from("/run/vamoose"));
        }
        let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let dir =
            runtime.context("XDG_RUNTIME_DIR is not set: name a directory with --state-dir")?;
        Ok(dir.join("vamoose"))
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

    /// Options as they are given on the command line.
    fn hardware(options: &[&str]) -> Hardware {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            hardware: Hardware,
        }
        let words = ["vamoose"].iter().chain(options);
        <Line as clap::Parser>::try_parse_from(words)
            .unwrap()
            .hardware
    }

    fn settings(method: Method) -> Settings {
        Settings::new(method, None).unwrap()
    }

    #[test]
    fn hardware_that_is_named_must_be_there() {
        let refused = |options: &[&str], method| {
            let refused = hardware(options).engines(settings(method)).err();
            refused.unwrap().to_string()
        };
        for options in [
            &["--accel", "iaa", "--iaa-path", "wq77.0"][..],
            &["--iaa-path", "wq77.0"],
        ] {
            assert_eq!(
                refused(options, Method::None),
                "engine iaa is absent: this host has no work queue wq77.0 (`vamoose probe` shows what there is and \
                 what is missing); without it: --accel auto, or none"
            );
        }
        assert_eq!(
            refused(&["--accel", "iaa"], Method::Zstd),
            "engine iaa does not do method zstd, only qpl"
        );
        assert!(hardware(&[]).engines(settings(Method::Zstd)).is_ok());
    }

    #[test]
    fn devices_in_software_are_used_if_they_are_named() {
        let engine = |options: &[&str]| {
            let engines = hardware(options).engines(settings(Method::Qpl));
            engines.unwrap().name()
        };
        assert_eq!(engine(&["--iaa-path", "model:2"]), "iaa");
        assert_eq!(engine(&["--iaa-path", "model", "--accel", "iaa"]), "iaa");
        assert_ne!(engine(&["--iaa-path", "model", "--accel", "none"]), "iaa");
    }

    #[test]
    fn hardware_can_be_told_to_another_process() {
        let options = [
            "--iaa-path",
            "model:3",
            "--device-shares",
            "/run/vamoose",
            "--priority",
            "9",
        ];
        let text = serde_json::to_string(&hardware(&options)).unwrap();
        let told: Hardware = serde_json::from_str(&text).unwrap();
        assert_eq!(told.iaa_path.to_string(), "model:3");
        let (folder, weight) = told.shares.of_devices().unwrap();
        assert_eq!(folder, PathBuf::from("/run/vamoose"));
        assert_eq!(weight, Weight::new(9));
        assert!(hardware(&[]).shares.of_devices().is_none());
    }
}
