//! Scenarios: TOML files, built in or the user's own, that describe what to measure.
//!
//! ```toml
//! about = "Silesia over links, from slow to fast"
//! guests = ["silesia"]               # see [`Guest`]
//! links = ["100M", "1G", "open"]     # bits a second, `open` for what the kernel can
//! channels = [2]
//! ram = "1G"
//! rounds = 3
//! contenders = ["qemu zstd", "qemu zstd --tls", "migrate auto --tls"]
//! ```
//!
//! Every combination of guest, link, channels and contender is a cell. `--tls` stands for authentication and encryption. Other words after a contender's method are options of the program
//! beside the source; words after `|` are options of the program beside the destination (`migrate zstd | --stall-timeout 30`).

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use clap::ValueEnum;
use lab::real::{self, Real};
use serde::{Deserialize, Serialize};

use crate::record::Cell;

/// A scenario file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Scenario {
    /// One line for the list of scenarios and the report.
    pub(crate) about: String,
    pub(crate) guests: Vec<Guest>,
    pub(crate) links: Vec<Rate>,
    #[serde(default = "two_channels")]
    pub(crate) channels: Vec<u8>,
    /// Memory of the guest. A guest that does not run may get less: see [`Scenario::cells`].
    pub(crate) ram: Size,
    /// Milliseconds.
    #[serde(default = "downtime_limit")]
    pub(crate) downtime_limit: u64,
    /// Seconds after which a migration is cancelled.
    #[serde(default = "timeout")]
    pub(crate) timeout: u64,
    pub(crate) rounds: u32,
    pub(crate) contenders: Vec<Contender>,
}

/// A guest: its content, if it does not run, or its load.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ValueEnum,
)]
#[serde(into = "String", try_from = "String")]
pub(crate) enum Guest {
    /// Does not run; files: the Silesia corpus, or others; a tenth of the pages is zero.
    Silesia,
    /// Does not run; the same, with half of the pages zero.
    HalfZero,
    /// Does not run; zeros that were written.
    Zero,
    /// Does not run; random bytes.
    Random,
    /// Does not run; what real programs have left in the memory of a Linux guest: see [`Real`].
    Base,
    /// The same.
    Postgres,
    /// The same.
    Jvm,
    /// The same.
    Web,
    /// Linux that only ticks; part of the memory is filled.
    Idle,
    /// A program that writes this many pages a second.
    #[value(skip)]
    Dirty(u32),
    /// Redis: SET of random values of 300 bytes.
    RedisRandom,
    /// Redis: half reads, half updates of a field of a record of 1 KB (YCSB A), zipfian.
    RedisA,
    /// Redis: 95 % reads, 5 % updates (YCSB B).
    RedisB,
    /// PostgreSQL: pgbench without pauses in the guest, all in memory.
    Pgbench,
    /// A program that writes the first 40 of the 512 words of pages, three times as fast as the link carries whole pages.
    Updates,
    /// The same, but every second word of a page is four small counters, which are incremented.
    Counters,
}

/// Rate of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) enum Rate {
    /// Bits a second.
    Constant(u64),
    /// As fast as the kernel can.
    Open,
}

/// A number of bytes, written with k, M or G.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Size(pub(crate) u64);

/// The programs that move the guest, their method and options.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Contender {
    pub(crate) who: Who,
    pub(crate) method: String,
    /// Whether both ends authenticate each other, and encrypt: stock QEMU by certificates, Vamoose by keys.
    pub(crate) tls: bool,
    /// Options of the program beside the source.
    pub(crate) options: Vec<String>,
    /// Options of the program beside the destination.
    pub(crate) far_options: Vec<String>,
}

/// Programs that move a guest. QEMU is always unmodified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Who {
    /// The two QEMUs alone.
    Qemu,
    /// `vamoose migrate` and `vamoose serve`.
    Migrate,
}

/// Built-in scenarios.
const BUILT_IN: [(&str, &str); 14] = [
    ("idle", include_str!("../scenarios/idle.toml")),
    ("silesia", include_str!("../scenarios/silesia.toml")),
    ("half-zero", include_str!("../scenarios/half-zero.toml")),
    ("zero", include_str!("../scenarios/zero.toml")),
    ("links", include_str!("../scenarios/links.toml")),
    ("tls", include_str!("../scenarios/tls.toml")),
    ("real", include_str!("../scenarios/real.toml")),
    ("slow-links", include_str!("../scenarios/slow-links.toml")),
    ("cpu", include_str!("../scenarios/cpu.toml")),
    ("dirty-N", include_str!("../scenarios/dirty.toml")),
    ("busy", include_str!("../scenarios/busy.toml")),
    ("redis", include_str!("../scenarios/redis.toml")),
    ("table-a", include_str!("../scenarios/table-a.toml")),
    ("table-b", include_str!("../scenarios/table-b.toml")),
];

fn two_channels() -> Vec<u8> {
    vec![2]
}

fn downtime_limit() -> u64 {
    300
}

fn timeout() -> u64 {
    120
}

impl Scenario {
    /// The built-in scenarios with their names.
    pub(crate) fn built_in() -> Result<Vec<(&'static str, Self)>> {
        let all = BUILT_IN.iter();
        all.map(|(name, text)| Ok((*name, Self::parse(text).context(*name)?)))
            .collect()
    }

    /// A built-in scenario, or `dirty-N` for any N.
    pub(crate) fn named(name: &str) -> Result<Self> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return Self::parse(text);
        }
        if name.starts_with("dirty-") {
            let mut scenario = Self::named("dirty-N")?;
            scenario.guests = vec![name.parse()?];
            return Ok(scenario);
        }
        let known = BUILT_IN.map(|(name, _)| name).join(", ");
        bail!("there is no scenario {name}: {known}, or a file FILE.toml")
    }

    /// Parses a scenario file.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let scenario: Self = toml::from_str(text)?;
        ensure!(scenario.rounds > 0, "rounds: must be at least 1");
        ensure!(
            !scenario.channels.contains(&0),
            "channels: must be at least 1"
        );
        Ok(scenario)
    }

    /// All cells, ordered by guest and link. A guest that does not run has at most `ram` bytes, and, unless its content is a real
    /// guest's, at most what the link carries in `seconds`, rounded up to 16 MiB.
    pub(crate) fn cells(&self, name: &str, ram: u64, seconds: u64) -> Vec<Cell> {
        let mut cells = Vec::new();
        for guest in &self.guests {
            for link in &self.links {
                for channels in &self.channels {
                    cells.extend(self.contenders.iter().map(|contender| Cell {
                        scenario: name.to_owned(),
                        guest: *guest,
                        link: *link,
                        channels: *channels,
                        contender: contender.clone(),
                        ram: match guest.real() {
                            // Its programs have worked with this memory.
                            Some(_) => self.ram.0.min(ram).max(real::LEAST),
                            // The guest's programs need this memory.
                            None if guest.runs() => self.ram.0,
                            None => self.ram.0.min(ram).min(link.carries(seconds)),
                        },
                        downtime_limit: self.downtime_limit,
                        timeout: self.timeout,
                    }));
                }
            }
        }
        cells
    }
}

impl Guest {
    pub(crate) fn runs(self) -> bool {
        self >= Self::Idle
    }

    /// The guest in whose memory real programs have left this content.
    pub(crate) fn real(self) -> Option<Real> {
        match self {
            Self::Base => Some(Real::Base),
            Self::Postgres => Some(Real::Postgres),
            Self::Jvm => Some(Real::Jvm),
            Self::Web => Some(Real::Web),
            _ => None,
        }
    }
}

impl Rate {
    /// Bytes carried in this many seconds, rounded up to 16 MiB.
    fn carries(self, seconds: u64) -> u64 {
        let bytes = self.limit().map(|rate| (rate / 8).saturating_mul(seconds));
        bytes.map_or(u64::MAX, |bytes| bytes.next_multiple_of(16 << 20))
    }

    /// Bits a second; `None` without a limit.
    pub(crate) fn limit(self) -> Option<u64> {
        match self {
            Self::Constant(rate) => Some(rate),
            Self::Open => None,
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open => f.write_str("open"),
            Self::Constant(rate) if rate % 1_000_000_000 == 0 => {
                write!(f, "{}G", rate / 1_000_000_000)
            }
            Self::Constant(rate) if rate % 1_000_000 == 0 => write!(f, "{}M", rate / 1_000_000),
            Self::Constant(rate) => write!(f, "{rate}"),
        }
    }
}

impl FromStr for Rate {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "open" {
            return Ok(Self::Open);
        }
        let rate = with_unit(text, [("G", 1_000_000_000), ("M", 1_000_000)]);
        let rate = rate.filter(|rate| *rate > 0).with_context(|| {
            format!("`{text}` is not a link: bits a second as in 100M or 10G, or open")
        })?;
        Ok(Self::Constant(rate))
    }
}

impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dirty(pages) => write!(f, "dirty-{pages}"),
            guest => f.write_str(&name(guest)),
        }
    }
}

impl FromStr for Guest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(pages) = text.strip_prefix("dirty-") {
            let pages = pages.parse().ok().filter(|pages| *pages > 0);
            let pages = pages.with_context(|| format!("`{text}`: how many pages a second?"))?;
            return Ok(Self::Dirty(pages));
        }
        ValueEnum::from_str(text, false).map_err(|_| {
            let known = names::<Self>().join(", ");
            anyhow!("there is no guest `{text}`: {known}, dirty-N")
        })
    }
}

/// The option of a contender whose ends authenticate each other, and encrypt.
const TLS: &str = "--tls";

impl Contender {
    /// Whether this is Vamoose at both ends with method auto and no options.
    pub(crate) fn is_default(&self) -> bool {
        let has_options = !self.options.is_empty() || !self.far_options.is_empty();
        self.who == Who::Migrate && self.method == "auto" && !has_options
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", name(&self.who), self.method)?;
        if self.tls {
            write!(f, " {TLS}")?;
        }
        for option in &self.options {
            write!(f, " {option}")?;
        }
        if self.far_options.is_empty() {
            return Ok(());
        }
        write!(f, " | {}", self.far_options.join(" "))
    }
}

impl FromStr for Contender {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (near, far) = text.split_once('|').unwrap_or((text, ""));
        let far_options: Vec<_> = far.split_whitespace().map(str::to_owned).collect();
        let mut words = near.split_whitespace();
        let who = Who::from_str(words.next().unwrap_or_default(), false);
        let who = who.map_err(|_| {
            let known = names::<Who>().join(", ");
            anyhow!("`{text}` is not a contender: {known}, then a method and options")
        })?;
        let method = words
            .next()
            .with_context(|| format!("`{text}`: no method"))?;
        let mut options: Vec<_> = words.map(str::to_owned).collect();
        let all = options.len();
        options.retain(|option| option != TLS);
        let tls = options.len() < all;
        if who == Who::Qemu {
            let known = ["none", "zlib", "zstd", "xbzrle", "auto-converge"];
            ensure!(
                known.contains(&method) && options.is_empty(),
                "`{text}`: the methods of stock QEMU are {}, and its only option here is {TLS}",
                known.join(", ")
            );
        }
        ensure!(
            far_options.is_empty() || who == Who::Migrate,
            "`{text}`: only migrate has a Vamoose beside the destination"
        );
        Ok(Self {
            who,
            method: method.to_owned(),
            tls,
            options,
            far_options,
        })
    }
}

impl FromStr for Size {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        /// A smaller number is taken for one whose unit was forgotten.
        const MIN: u64 = 1 << 20;
        let size = with_unit(text, [("k", 1 << 10), ("M", 1 << 20), ("G", 1 << 30)]);
        let size = size.with_context(|| format!("`{text}` is not a size such as 512M"))?;
        ensure!(
            size >= MIN,
            "{size} bytes are too small for a guest: append a unit, as in 512M or 3G"
        );
        Ok(Self(size))
    }
}

/// A number, multiplied by the factor of its unit.
fn with_unit<const N: usize>(text: &str, units: [(&str, u64); N]) -> Option<u64> {
    let found = |(unit, factor)| Some((text.strip_suffix(unit)?, factor));
    let (digits, factor) = units.into_iter().find_map(found).unwrap_or((text, 1));
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(factor)
}

fn name<T: ValueEnum>(value: &T) -> String {
    let name = value.to_possible_value();
    name.map_or("?".to_owned(), |name| name.get_name().to_owned())
}

fn names<T: ValueEnum>() -> Vec<String> {
    T::value_variants().iter().map(name).collect()
}

/// In TOML and JSON, these are strings.
macro_rules! from_text {
    ($($type:ty),*) => {
        $(
            impl TryFrom<String> for $type {
                type Error = Error;

                fn try_from(text: String) -> Result<Self> {
                    text.parse()
                }
            }
        )*
    };
}

from_text!(Guest, Rate, Contender, Size);

macro_rules! into_text {
    ($($type:ty),*) => {
        $(
            impl From<$type> for String {
                fn from(value: $type) -> Self {
                    value.to_string()
                }
            }
        )*
    };
}

into_text!(Guest, Rate, Contender);

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        about = "A test"
        guests = ["silesia", "dirty-500"]
        links = ["100M", "open"]
        ram = "1G"
        rounds = 3
        contenders = ["qemu zstd", "migrate auto --delta off"]
    "#;

    #[test]
    fn a_scenario_is_all_combinations() {
        let scenario = Scenario::parse(TEXT).unwrap();
        let cells = scenario.cells("test", 512 << 20, 20);
        assert_eq!(cells.len(), 2 * 2 * 2);
        assert_eq!(cells[1].contender.options, ["--delta", "off"]);
        // As much as 100 Mbit/s carry in 20 s, as much as there may be, and what a guest needs that runs.
        let ram = |at: usize| cells[at].ram >> 20;
        assert_eq!([ram(0), ram(2), ram(4), ram(6)], [240, 512, 1024, 1024]);
    }

    #[test]
    fn real_guests_have_the_memory_that_their_programs_need() {
        let scenario = Scenario::parse(&TEXT.replace("silesia", "postgres")).unwrap();
        let ram = |limit: u64| scenario.cells("test", limit << 20, 20)[0].ram >> 20;
        assert_eq!([ram(4096), ram(768), ram(64)], [1024, 768, 512]);
    }

    #[test]
    fn errors_name_the_wrong_value() {
        let error = |from: &str, to: &str| {
            let error = Scenario::parse(&TEXT.replace(from, to)).unwrap_err();
            format!("{error:#}")
        };
        assert!(error("silesia", "silesa").contains("there is no guest `silesa`"));
        assert!(error("open", "10Q").contains("`10Q` is not a link"));
        assert!(error("qemu zstd", "qemu lz4").contains("stock QEMU are none, zlib"));
        assert!(error("migrate auto --delta off", "relay auto").contains("qemu, migrate, then"));
        assert!(error("rounds = 3", "rounds = 0").contains("rounds"));
        assert!(error("1G", "512").contains("append a unit"));
        assert!(error("about", "abuot").contains("abuot"));
    }

    #[test]
    fn displayed_values_parse_to_themselves() {
        let links = ["10M", "1G", "2500M", "1500", "open"];
        assert!(
            links
                .iter()
                .all(|text| text.parse::<Rate>().unwrap().to_string() == *text)
        );
        let guests = ["zero", "jvm", "dirty-7", "redis-b", "pgbench", "updates"];
        assert!(
            guests
                .iter()
                .all(|text| text.parse::<Guest>().unwrap().to_string() == *text)
        );
        let contenders = [
            "qemu none",
            "migrate none --check off",
            "migrate zstd | --stall-timeout 30",
            "qemu zstd --tls",
            "migrate auto --tls --delta off",
        ];
        let back = |text: &str| text.parse::<Contender>().unwrap().to_string();
        assert!(contenders.iter().all(|text| back(text) == *text));
    }

    #[test]
    fn all_scenarios_can_be_read() {
        assert_eq!(Scenario::built_in().unwrap().len(), BUILT_IN.len());
    }
}
