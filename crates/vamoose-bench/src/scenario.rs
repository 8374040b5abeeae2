//! What is measured, as data: a scenario is a TOML file, built in or the user's own.
//!
//! ```toml
//! about = "Silesia over links, from slow to fast"
//! guests = ["silesia"]               # see [`Guest`]
//! links = ["100M", "1G", "open"]     # bits a second, `open` for what the kernel can
//! channels = [2]
//! ram = "1G"
//! rounds = 3
//! contenders = ["qemu zstd", "pair auto", "migrate auto --delta off"]
//! ```
//!
//! Every combination of guest, link, channels and contender is a cell. Words behind a contender's method are options of the
//! program that it runs beside the source; those behind `|` of the one beside the destination (`pair none | --placement on`).

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Error, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::record::Cell;

/// A scenario file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Scenario {
    /// What it shows, in a line.
    pub(crate) about: String,
    pub(crate) guests: Vec<Guest>,
    pub(crate) links: Vec<Rate>,
    #[serde(default = "two_channels")]
    pub(crate) channels: Vec<u8>,
    /// Of the guest. A slow link gets a smaller one: see [`Scenario::cells`].
    pub(crate) ram: Size,
    /// Milliseconds.
    #[serde(default = "downtime_limit")]
    pub(crate) downtime_limit: u64,
    /// Seconds after which a migration is cancelled.
    #[serde(default = "timeout")]
    pub(crate) timeout: u64,
    pub(crate) rounds: u32,
    pub(crate) contenders: Vec<Contender>,
    /// What others have measured.
    #[serde(default)]
    pub(crate) published: Option<Published>,
}

/// Figures of others, on their hardware, for the report.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Published {
    /// Who has measured what, on which hardware.
    pub(crate) about: String,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// What the guest is, and what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) enum Guest {
    /// It does not run, and its memory has this in it.
    Still(Content),
    /// Linux, which runs this.
    Running(Workload),
}

/// Content of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Content {
    /// Files: the Silesia corpus, or others; a tenth of the pages is zero.
    Silesia,
    /// The same, and half of the pages is zero.
    HalfZero,
    /// Zeros that were written.
    Zero,
    /// Nothing: it was never touched.
    Untouched,
    Random,
}

/// What a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Workload {
    /// Nothing besides a sign of life; some of its memory is filled.
    Idle,
    /// A program that writes so many pages a second.
    Dirty(u32),
    /// Redis: SET of random values of 300 bytes.
    RedisRandom,
    /// Redis: half reads, half updates of a field of a record of 1 KB (YCSB A), zipfian.
    RedisA,
    /// Redis: 95 % reads, 5 % updates (YCSB B).
    RedisB,
    /// Redis: half reads, half reads with an update afterwards (YCSB F).
    RedisF,
    /// PostgreSQL: the transactions of pgbench (TPC-B).
    Postgres,
    /// A compiler, which compiles one file after the other.
    Compile,
    /// A program that writes pages three times as fast as the link carries them.
    Writer,
    /// The same, which changes only the first 40 of the 512 words of a page.
    Updates,
    /// The same, which counts: each second word of a page is four small counters, all of which go up.
    Counters,
}

/// What a link carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) enum Rate {
    /// Bits a second.
    Constant(u64),
    /// What the kernel can.
    Open,
    /// 100 Mbit/s, then 1 Gbit/s for a while, then 100 Mbit/s again.
    Changing,
}

/// A number of bytes, written with k, M or G.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Size(pub(crate) u64);

/// Who moves the guest, by which method.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Contender {
    pub(crate) who: Who,
    pub(crate) method: String,
    /// Options of the program beside the source.
    pub(crate) options: Vec<String>,
    /// Options of the program beside the destination.
    pub(crate) far_options: Vec<String>,
}

/// The ways to attach. `QEMU` is always an unmodified one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Who {
    /// QEMU to QEMU.
    Qemu,
    /// `vamoose relay` beside the source; the destination QEMU decodes.
    Relay,
    /// Two of them, with a session between.
    Pair,
    /// `vamoose migrate` and `vamoose serve`.
    Migrate,
    /// The crate for VMMs: `vamoose-demo`, without a QEMU.
    Live,
    /// iperf3: as many bytes through as many sockets, which is what the kernel takes for them.
    Sockets,
}

const WHO: [(&str, Who); 6] = [
    ("qemu", Who::Qemu),
    ("relay", Who::Relay),
    ("pair", Who::Pair),
    ("migrate", Who::Migrate),
    ("live", Who::Live),
    ("sockets", Who::Sockets),
];

const CONTENTS: [(&str, Content); 5] = [
    ("silesia", Content::Silesia),
    ("half-zero", Content::HalfZero),
    ("zero", Content::Zero),
    ("untouched", Content::Untouched),
    ("random", Content::Random),
];

const WORKLOADS: [(&str, Workload); 10] = [
    ("idle", Workload::Idle),
    ("redis-random", Workload::RedisRandom),
    ("redis-a", Workload::RedisA),
    ("redis-b", Workload::RedisB),
    ("redis-f", Workload::RedisF),
    ("postgres", Workload::Postgres),
    ("compile", Workload::Compile),
    ("writer", Workload::Writer),
    ("updates", Workload::Updates),
    ("counters", Workload::Counters),
];

/// The scenarios that the program brings along.
const BUILT_IN: [(&str, &str); 16] = [
    ("idle", include_str!("../scenarios/idle.toml")),
    ("silesia", include_str!("../scenarios/silesia.toml")),
    ("half-zero", include_str!("../scenarios/half-zero.toml")),
    ("zero", include_str!("../scenarios/zero.toml")),
    ("links", include_str!("../scenarios/links.toml")),
    ("slow-links", include_str!("../scenarios/slow-links.toml")),
    ("cpu", include_str!("../scenarios/cpu.toml")),
    ("dirty-N", include_str!("../scenarios/dirty.toml")),
    ("busy", include_str!("../scenarios/busy.toml")),
    ("placement", include_str!("../scenarios/placement.toml")),
    ("redis", include_str!("../scenarios/redis.toml")),
    ("postgres", include_str!("../scenarios/postgres.toml")),
    ("table-a", include_str!("../scenarios/table-a.toml")),
    ("table-b", include_str!("../scenarios/table-b.toml")),
    ("table-c", include_str!("../scenarios/table-c.toml")),
    ("table-d", include_str!("../scenarios/table-d.toml")),
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
    /// The names of those that are built in, and what they show.
    pub(crate) fn built_in() -> Result<Vec<(&'static str, Self)>> {
        let all = BUILT_IN.iter();
        all.map(|(name, text)| Ok((*name, Self::parse(text).context(*name)?)))
            .collect()
    }

    /// One that is built in, `dirty-N` for any N among them.
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

    /// Reads a file's text.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let scenario: Self = toml::from_str(text)?;
        ensure!(scenario.rounds > 0, "rounds: must be at least 1");
        ensure!(
            !scenario.channels.contains(&0),
            "channels: must be at least 1"
        );
        if let Some(published) = &scenario.published {
            let columns = published.columns.len();
            ensure!(
                published.rows.iter().all(|row| row.len() == columns),
                "published: a row has not {columns} columns"
            );
        }
        Ok(scenario)
    }

    /// Its cells, those of one guest and link beside one another. `ram` is the most that a guest may have that does not run,
    /// and the link carries it within so many seconds.
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
                        ram: match guest {
                            Guest::Still(_) => self.ram.0.min(ram).min(link.carries(seconds)),
                            // Its programs need what they need.
                            Guest::Running(_) => self.ram.0,
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

impl Rate {
    /// Bytes in so many seconds, in steps of 16 MiB.
    fn carries(self, seconds: u64) -> u64 {
        let rate = match self {
            Self::Open => return u64::MAX,
            Self::Constant(rate) => rate,
            Self::Changing => 300_000_000,
        };
        (rate / 8)
            .saturating_mul(seconds)
            .next_multiple_of(16 << 20)
    }

    /// At the beginning.
    pub(crate) fn first(self) -> Option<u64> {
        match self {
            Self::Constant(rate) => Some(rate),
            Self::Open => None,
            Self::Changing => Some(100_000_000),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Constant(rate) = self else {
            return f.write_str(match self {
                Self::Open => "open",
                _ => "changing",
            });
        };
        match rate {
            _ if rate % 1_000_000_000 == 0 => write!(f, "{}G", rate / 1_000_000_000),
            _ if rate % 1_000_000 == 0 => write!(f, "{}M", rate / 1_000_000),
            _ => write!(f, "{rate}"),
        }
    }
}

impl FromStr for Rate {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "open" => Self::Open,
            "changing" => Self::Changing,
            _ => {
                let (digits, unit) = match text.strip_suffix(['G', 'M']) {
                    Some(digits) if text.ends_with('G') => (digits, 1_000_000_000),
                    Some(digits) => (digits, 1_000_000),
                    None => (text, 1),
                };
                let number: Option<u64> = digits.parse().ok();
                let rate = number.and_then(|number| number.checked_mul(unit));
                let rate = rate.filter(|rate| *rate > 0).with_context(|| {
                    format!(
                        "`{text}` is no link: bits a second as in 100M or 10G, open, or changing"
                    )
                })?;
                Self::Constant(rate)
            }
        })
    }
}

impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Still(content) => name_of(&CONTENTS, content),
            Self::Running(Workload::Dirty(pages)) => return write!(f, "dirty-{pages}"),
            Self::Running(workload) => name_of(&WORKLOADS, workload),
        };
        f.write_str(name)
    }
}

impl FromStr for Guest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(pages) = text.strip_prefix("dirty-") {
            let pages = pages.parse().ok().filter(|pages| *pages > 0);
            let pages = pages.with_context(|| format!("`{text}`: how many pages a second?"))?;
            return Ok(Self::Running(Workload::Dirty(pages)));
        }
        let content = find(&CONTENTS, text).map(Self::Still);
        let workload = || find(&WORKLOADS, text).map(Self::Running);
        content.or_else(workload).with_context(|| {
            let contents = CONTENTS.iter().map(|(name, _)| *name);
            let workloads = WORKLOADS.iter().map(|(name, _)| *name);
            let all: Vec<_> = contents.chain(workloads).chain(["dirty-N"]).collect();
            format!("there is no guest `{text}`: {}", all.join(", "))
        })
    }
}

impl Contender {
    /// Whether its programs run without further options.
    pub(crate) fn has_defaults(&self) -> bool {
        self.options.is_empty() && self.far_options.is_empty()
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&WHO, &self.who))?;
        if self.who != Who::Sockets {
            write!(f, " {}", self.method)?;
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
        let who = find(&WHO, words.next().unwrap_or_default());
        let who = who.with_context(|| {
            let known = WHO.map(|(name, _)| name).join(", ");
            format!("`{text}` is no contender: {known}, then a method and options")
        })?;
        let method = match who {
            Who::Sockets => "none",
            _ => words
                .next()
                .with_context(|| format!("`{text}`: by which method?"))?,
        };
        let options: Vec<_> = words.map(str::to_owned).collect();
        if who == Who::Qemu {
            let known = ["none", "zlib", "zstd", "xbzrle", "auto-converge"];
            ensure!(
                known.contains(&method) && options.is_empty(),
                "`{text}`: stock QEMU has {}, and no options here",
                known.join(", ")
            );
        }
        ensure!(
            far_options.is_empty() || matches!(who, Who::Pair | Who::Migrate),
            "`{text}`: only pair and migrate have a Vamoose beside the destination"
        );
        Ok(Self {
            who,
            method: method.to_owned(),
            options,
            far_options,
        })
    }
}

impl FromStr for Size {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        /// Less is a forgotten unit.
        const MIN: u64 = 1 << 20;
        let units = [("k", 10), ("M", 20), ("G", 30)];
        let with_unit = |(unit, shift)| Some((text.strip_suffix(unit)?, shift));
        let (digits, shift) = units.into_iter().find_map(with_unit).unwrap_or((text, 0));
        let number: Option<u64> = digits.parse().ok();
        let size = number.and_then(|number| number.checked_mul(1 << shift));
        let size = size.with_context(|| format!("`{text}` is not a size such as 512M"))?;
        ensure!(
            size >= MIN,
            "{size} bytes are too small for a guest: append a unit, as in 512M or 3G"
        );
        Ok(Self(size))
    }
}

fn find<T: Copy>(table: &[(&str, T)], text: &str) -> Option<T> {
    let row = table.iter().find(|(name, _)| *name == text);
    row.map(|(_, value)| *value)
}

fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> &'static str {
    let row = table.iter().find(|(_, known)| known == value);
    row.map_or("?", |(name, _)| name)
}

/// As text in TOML and JSON.
macro_rules! as_text {
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

as_text!(Guest, Rate, Contender, Size);

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
        contenders = ["qemu zstd", "pair auto --delta off"]
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
    fn what_is_wrong_with_a_scenario_is_named() {
        let error = |from: &str, to: &str| {
            let error = Scenario::parse(&TEXT.replace(from, to)).unwrap_err();
            format!("{error:#}")
        };
        assert!(error("silesia", "silesa").contains("there is no guest `silesa`"));
        assert!(error("open", "10Q").contains("`10Q` is no link"));
        assert!(error("qemu zstd", "qemu lz4").contains("stock QEMU has none, zlib"));
        assert!(error("rounds = 3", "rounds = 0").contains("rounds"));
        assert!(error("1G", "512").contains("append a unit"));
        assert!(error("about", "abuot").contains("abuot"));
    }

    #[test]
    fn texts_and_back() {
        let links = ["10M", "1G", "2500M", "1500", "open", "changing"];
        assert!(
            links
                .iter()
                .all(|text| text.parse::<Rate>().unwrap().to_string() == *text)
        );
        let guests = ["zero", "dirty-7", "redis-b", "postgres"];
        assert!(
            guests
                .iter()
                .all(|text| text.parse::<Guest>().unwrap().to_string() == *text)
        );
        let contenders = [
            "sockets",
            "qemu none",
            "live none --copy dsa",
            "pair none | --placement on",
        ];
        let back = |text: &str| text.parse::<Contender>().unwrap().to_string();
        assert!(contenders.iter().all(|text| back(text) == *text));
    }

    #[test]
    fn all_scenarios_can_be_read() {
        assert_eq!(Scenario::built_in().unwrap().len(), BUILT_IN.len());
    }
}
