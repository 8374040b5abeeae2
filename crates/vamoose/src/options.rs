//! Options that several commands share, and the syntax of their values.

use std::{
    env, fmt,
    fs::File,
    path::PathBuf,
    str::FromStr,
    sync::{Arc, LazyLock},
    time::Duration,
};

use anyhow::{Context as _, Error, Result, bail};
use clap::{
    Args, ValueEnum,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
};
use idxd::{Kind, offload::Options};
use multifd::{Layout, Method};
use serde::{Deserialize, Serialize};
use vamoose_codec::{Accel, DecodedBy, Engines, Registry, Settings, Verify, info};
use vamoose_link::{Address, MethodChoice, Peers};
use vamoose_relay::Config;

use crate::{
    devices::DevicePath,
    report::write_json,
    values::{Rate, Size, positive_seconds},
};

/// Headings of the help.
pub const ENCODING: &str = "Encoding and bandwidth";
pub const CONNECTIONS: &str = "Connections";
const ACCELERATORS: &str = "Accelerators";
pub const BUSY: &str = "Busy guests";
pub const HAND_OVER: &str = "Hand-over";
pub const OUTPUT: &str = "Output";

/// Options for the encoding of pages on the link.
#[derive(Args, Clone, Debug)]
pub struct Encoding {
    /// Encoding of pages towards the destination
    ///
    /// Default: auto to a vamoose; from one, the source QEMU's; otherwise none.
    #[arg(help_heading = ENCODING, long, value_enum)]
    method: Option<MethodName>,
    #[arg(help_heading = ENCODING, long, allow_negative_numbers = true, value_name = "N", help = level_help(), hide_short_help = true)]
    pub level: Option<i32>,
    /// Send a page that was sent before as a difference if that is smaller [default: on with method auto]
    ///
    /// Needs a session, and method auto, lz4 or zstd-frames. See --page-cache.
    #[arg(help_heading = ENCODING, long, value_enum, hide_short_help = true)]
    pub delta: Option<Switch>,
    /// Page size of the guest
    #[arg(help_heading = ENCODING,
        long,
        default_value = "4k",
        value_name = "SIZE",
        hide_short_help = true
    )]
    pub page_size: Size,
    /// Bandwidth limit, such as 80MiB/s or 500Mbit
    ///
    /// Towards the destination. 80M is 80 MiB per second.
    #[arg(help_heading = ENCODING, long, value_name = "RATE")]
    pub max_bandwidth: Option<Rate>,
    #[command(flatten)]
    pub hardware: Hardware,
    #[command(flatten)]
    pub stall_timeout: StallTimeout,
}

impl Encoding {
    /// Whether --method was given.
    pub fn has_method(&self) -> bool {
        self.method.is_some()
    }

    /// The relay's configuration, with method `default` if no --method is given.
    pub fn config(&self, default: MethodName) -> Result<Config> {
        let name = self.method.unwrap_or(default);
        let method = name.choose(self.level, &self.hardware)?;
        if self.method.is_none() {
            tracing::info!("method {}, as no --method is given", method.name());
        }
        let page_size = u32::try_from(self.page_size.0).unwrap_or(u32::MAX);
        if self.delta == Some(Switch::On) && !method.takes_differences() {
            bail!(
                "--delta on: packets of method {} cannot hold differences; those of {}, {} and {} can",
                method.name(),
                MethodChoice::ADAPTIVE,
                Method::Lz4,
                Method::ZstdFrames
            );
        }
        let mut config = Config::new(method);
        if let Some(delta) = self.delta {
            config.delta = delta == Switch::On;
        }
        config.layout = Layout::new(page_size).context("--page-size")?;
        config.max_bandwidth = self.max_bandwidth.map(|rate| rate.0);
        config.stall_timeout = self.stall_timeout.duration();
        Ok(config)
    }
}

/// An option that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// The levels of all methods.
fn level_help() -> String {
    let methods = MethodName::fixed().filter_map(|method| {
        let levels = info(method)?.levels?;
        Some(format!("{method} {levels}"))
    });
    let levels: Vec<_> = methods.collect();
    format!("Level of the method: {} [default: 1]", levels.join(", "))
}

/// Time without progress after which a migration fails.
#[derive(Args, Clone, Copy, Debug)]
pub struct StallTimeout {
    /// Abort after this time without progress from a peer
    #[arg(
        help_heading = CONNECTIONS,
        long,
        default_value = "15s",
        value_name = "TIME",
        value_parser = positive_seconds,
        hide_short_help = true
    )]
    stall_timeout: Duration,
}

impl StallTimeout {
    pub fn duration(self) -> Duration {
        self.stall_timeout
    }
}

/// Where the QEMUs of this host have their monitors.
#[derive(Args, Clone, Debug)]
pub struct QmpDir {
    /// Directory of the QEMUs' QMP sockets, named GUEST.qmp
    #[arg(long, default_value = "/run/vms", value_name = "DIR")]
    pub qmp_dir: PathBuf,
}

/// Users who may connect to a command that listens.
#[derive(Args, Clone, Debug)]
pub struct Access {
    /// User who may connect, besides root and the user of this process (repeatable)
    ///
    /// Checked for connections from this host: the user of the source QEMU, or of a tunnel's process. If this process
    /// runs as root and one UID is given, that user becomes the owner of a unix socket. Otherwise everyone can open the
    /// socket, and connections of other users are refused.
    #[arg(long, value_name = "UID")]
    peer_uid: Vec<u32>,
}

impl Access {
    /// The users who may connect.
    pub fn peers(&self) -> Peers {
        self.peers_besides([])
    }

    /// The users who may connect, and `others`.
    pub fn peers_besides(&self, others: impl IntoIterator<Item = u32>) -> Peers {
        Peers::own_and(self.peer_uid.iter().copied().chain(others))
    }
}

/// Refuses an address that other hosts can reach, unless `insecure`: connections of QEMU are neither authenticated nor encrypted.
pub fn refuse_open_address(listen: &Address, insecure: bool) -> Result<()> {
    if !listen.is_local() && !insecure {
        bail!(
            "other hosts can reach {listen}, where QEMU's connections are neither authenticated nor encrypted: listen on a \
             unix socket or a loopback address, or allow it with --insecure on a trusted network"
        );
    }
    Ok(())
}

/// Destination of a report.
#[derive(Args, Clone, Debug)]
pub struct JsonReport {
    /// Write a report as JSON to FILE, or to standard output
    #[arg(help_heading = OUTPUT, long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<String>,
}

impl JsonReport {
    /// Whether --json was given.
    pub fn is_wanted(&self) -> bool {
        self.json.is_some()
    }

    /// Whether standard output is for the report alone.
    pub fn takes_stdout(&self) -> bool {
        self.json.as_deref() == Some("-")
    }

    /// Fails if the report cannot be written, before there is one. Empties the file: an earlier report is not taken for this one.
    pub fn check(&self) -> Result<()> {
        if let Some(file) = self.json.as_deref().filter(|it| *it != "-") {
            File::create(file).with_context(|| format!("--json {file}"))?;
        }
        Ok(())
    }

    /// Writes `report` if --json was given.
    pub fn write(&self, report: &impl Serialize) -> Result<()> {
        let Some(target) = &self.json else {
            return Ok(());
        };
        write_json(report, target)
    }
}

/// Options for the accelerators of this host, and for checks of their results.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub struct Hardware {
    /// Hardware for encoding and decoding
    #[arg(help_heading = ACCELERATORS, long, default_value = "auto", value_parser = one_of::<Accel>(), hide_short_help = true)]
    #[serde(with = "as_name")]
    accel: Accel,
    /// IAA work queues for method qpl: `auto` (all usable ones), wqX.Y[,wqZ.W...], or `model[:N]`
    ///
    /// Named queues must exist, unless --accel selects another engine or none. `model[:N]` means N devices modelled in
    /// software, for tests.
    #[arg(help_heading = ACCELERATORS,
        long,
        default_value = "auto",
        value_name = "QUEUES",
        hide_short_help = true
    )]
    #[serde(with = "as_text")]
    iaa_path: DevicePath,
    /// Hardware results to verify in software
    #[arg(help_heading = ACCELERATORS, long, default_value = "sample", value_parser = one_of::<Verify>(), hide_short_help = true)]
    #[serde(with = "as_name")]
    pub verify: Verify,
}

/// The defaults of the command line.
impl Default for Hardware {
    fn default() -> Self {
        Self {
            accel: Accel::Auto,
            iaa_path: DevicePath::AUTO,
            verify: Verify::Sample,
        }
    }
}

impl Hardware {
    /// The engines for a migration with `settings`.
    pub fn engines(&self, settings: Settings) -> Result<Engines> {
        let accel = match self.accel {
            Accel::Auto if self.iaa_path != DevicePath::AUTO => Accel::Iaa,
            accel => accel,
        };
        let options = Options::pages(PAGE_BYTES);
        let path = self.iaa_path.clone();
        let mut registry = Registry::with_iaa(move || {
            let opened = path.open(Kind::Iaa, &options);
            opened.map(Arc::new).map_err(|error| format!("{error:#}"))
        });
        if let Ok(faults) = env::var(FAULTS) {
            registry = registry.inject(&faults).map_err(Error::msg)?;
        }
        let engines = Arc::new(registry).choose(settings, accel, self.verify);
        engines.context("--accel")
    }
}

/// Environment variable with the faults of the test engine, in builds with feature `fault-injection`.
const FAULTS: &str = "VAMOOSE_FAULTS";

/// Page size of method qpl.
const PAGE_BYTES: usize = 4096;

/// Serialises a value as its text on the command line.
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

/// A value that is a string in a configuration file.
#[derive(Clone, Debug, Deserialize)]
#[serde(bound = "T: FromStr<Err: fmt::Display>")]
pub struct Text<T>(#[serde(deserialize_with = "as_text::deserialize")] pub T);

/// A value of --method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MethodName {
    Auto,
    Fixed(Method),
}

impl MethodName {
    /// No encoding, which every destination understands.
    pub const NONE: Self = Self::Fixed(Method::None);

    /// The method at the given level, with the engines of `hardware`.
    pub fn choose(self, level: Option<i32>, hardware: &Hardware) -> Result<MethodChoice> {
        match (self, level) {
            (Self::Fixed(method), level) => {
                let settings = Settings::new(method, level).context("--method, --level")?;
                Ok(MethodChoice::Fixed(hardware.engines(settings)?))
            }
            (Self::Auto, None) => {
                let engines = hardware.engines(Settings::default())?;
                Ok(MethodChoice::Adaptive(engines))
            }
            (Self::Auto, Some(level)) => {
                bail!(
                    "--level {level}: method auto chooses its levels itself: name another --method"
                )
            }
        }
    }

    /// The methods that this build has.
    fn fixed() -> impl Iterator<Item = Method> {
        let methods = Method::ALL.into_iter();
        methods.filter(|method| info(*method).is_some())
    }
}

impl FromStr for MethodName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        ValueEnum::from_str(name, false)
    }
}

impl ValueEnum for MethodName {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<MethodName>> = LazyLock::new(|| {
            let fixed = MethodName::fixed().map(MethodName::Fixed);
            std::iter::once(MethodName::Auto).chain(fixed).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, packets, decoded_by) = match self {
            Self::Auto => {
                let packets = "the best of none and zstd-frames for each packet";
                (MethodChoice::ADAPTIVE, packets, DecodedBy::Vamoose)
            }
            Self::Fixed(method) => {
                let info = info(*method)?;
                (method.name(), info.packets, info.decoded_by)
            }
        };
        let help = match decoded_by {
            DecodedBy::AnyQemu => packets.to_owned(),
            DecodedBy::SomeQemu => format!("{packets}; for QEMUs that were built with it"),
            DecodedBy::Vamoose => format!("{packets}; only another vamoose understands it"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// An enumeration with names for the command line.
trait Named: Copy + Send + Sync + 'static {
    /// Values with their names and descriptions.
    const ALL: &'static [(Self, &'static str, &'static str)];
}

impl Named for Accel {
    const ALL: &'static [(Self, &'static str, &'static str)] = &Self::ALL;
}

impl Named for Verify {
    const ALL: &'static [(Self, &'static str, &'static str)] = &Self::ALL;
}

fn one_of<T: Named>() -> impl TypedValueParser<Value = T> {
    let values = T::ALL.iter();
    let values = values.map(|(_, name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(|name| named(&name))
}

fn named<T: Named>(name: &str) -> Result<T, String> {
    let value = T::ALL.iter().find(|(_, known, _)| *known == name);
    value.map_or_else(|| Err(format!("there is no `{name}`")), |value| Ok(value.0))
}

/// Serialises a value of a [`Named`] type as its name.
mod as_name {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error};

    use super::{Named, named};

    pub(super) fn serialize<T: Named + PartialEq, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let name = T::ALL.iter().find(|(known, ..)| known == value);
        serializer.serialize_str(name.map_or("", |(_, name, _)| name))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>, T: Named>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        named(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// The directory of the journal.
#[derive(Args, Debug)]
pub struct StateDir {
    /// Directory of the journal of migration attempts
    /// [default: /run/vamoose for root, $XDG_RUNTIME_DIR/vamoose for other users]
    #[arg(help_heading = HAND_OVER, long, value_name = "DIR", hide_short_help = true)]
    state_dir: Option<PathBuf>,
}

impl StateDir {
    /// The directory, where attempts are to be found: one that was named must exist.
    pub fn existing(&self) -> Result<PathBuf> {
        if let Some(dir) = self.state_dir.as_ref().filter(|dir| !dir.is_dir()) {
            bail!("--state-dir: {} is not a directory", dir.display());
        }
        self.path()
    }

    /// The directory, which may not exist yet.
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

    /// The directory, and that of the packaged gateway.
    pub fn watched(&self) -> Result<Vec<PathBuf>> {
        let mut dirs = vec![self.existing()?];
        if self.state_dir.is_none() {
            dirs.push(PathBuf::from("/run/vamoose-gateway"));
        }
        Ok(dirs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn default_method_depends_on_the_destination() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            encoding: Encoding,
        }
        let name = |options: &[&str], default| {
            let words = ["vamoose"].iter().chain(options);
            let line = <Line as clap::Parser>::try_parse_from(words).unwrap();
            line.encoding
                .config(default)
                .map(|config| config.method.name())
        };
        assert_eq!(name(&[], MethodName::Auto).unwrap(), "auto");
        assert_eq!(name(&[], MethodName::NONE).unwrap(), "none");
        let lz4 = ["--method", "lz4", "--level", "8"];
        assert_eq!(name(&lz4, MethodName::Auto).unwrap(), "lz4");
        let refused = name(&["--level", "3"], MethodName::Auto).unwrap_err();
        assert!(
            refused.to_string().contains("another --method"),
            "{refused}"
        );
    }

    fn settings(method: Method) -> Settings {
        Settings::new(method, None).unwrap()
    }

    #[test]
    fn named_hardware_must_exist() {
        let refused = |options: &[&str], method| {
            let refused = hardware(options).engines(settings(method)).err();
            format!("{:#}", refused.unwrap())
        };
        for options in [
            &["--accel", "iaa", "--iaa-path", "wq77.0"][..],
            &["--iaa-path", "wq77.0"],
        ] {
            assert_eq!(
                refused(options, Method::None),
                "--accel: engine iaa is absent: this host has no work queue wq77.0 of an IAA"
            );
        }
        assert_eq!(
            refused(&["--accel", "iaa"], Method::Zstd),
            "--accel: engine iaa does not do method zstd, only qpl"
        );
        assert!(hardware(&[]).engines(settings(Method::Zstd)).is_ok());
    }

    #[test]
    fn named_model_devices_are_used() {
        let engine = |options: &[&str]| {
            let engines = hardware(options).engines(settings(Method::Qpl));
            engines.unwrap().name()
        };
        assert_eq!(engine(&["--iaa-path", "model:2"]), "iaa");
        assert_eq!(engine(&["--iaa-path", "model", "--accel", "iaa"]), "iaa");
        assert_ne!(engine(&["--iaa-path", "model", "--accel", "none"]), "iaa");
    }

    #[test]
    fn hardware_options_survive_serialisation() {
        let text = serde_json::to_string(&hardware(&["--iaa-path", "model:3"])).unwrap();
        let told: Hardware = serde_json::from_str(&text).unwrap();
        assert_eq!(told.iaa_path.to_string(), "model:3");
    }
}
