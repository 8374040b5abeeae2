//! An engine that misbehaves as configured, for tests (cargo feature `fault-injection`).
//!
//! It does its work by a method's software, and then what the [`Faults`] describe. As text they are
//! separated by commas, each with an optional value and an optional condition:
//!
//! ```text
//!  refuse            its queue is full                    @3      for the first 3 packets of each device
//!  fail              an error                             @10%    at random, for one packet in ten
//!  timeout=10ms      an error, after that time            (none)  at every packet
//!  delay=100us       the result, later by that time
//!  wrong             a correct encoding of other pages
//!  corrupt           a flipped bit in the payload
//!  short, long       a payload cut short, or with bytes behind its end
//!  nothing, beyond   a length of 0, or more than there was room for
//!  seed=7            for what happens at random
//!  honest=64         nothing of this for the first 64 packets of each device
//! ```
//! For example `delay=100us,refuse@50%,wrong@1%`. When it decodes, all kinds of wrong results are a
//! flipped bit in the pages.

use std::{
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use multifd::{Layout, Method};

use crate::{
    Settings, decode,
    engine::{Accelerator, Compress, Device, DeviceError, Unpack},
};

/// What a faulty engine does wrong, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    rules: Vec<Rule>,
    seed: u64,
    honest: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    fault: Fault,
    /// For the first packets of each device only.
    first: u64,
    /// For this share of them, at random.
    percent: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Refuse,
    Fail,
    TimeOut(Duration),
    Delay(Duration),
    Wrong,
    Corrupt,
    Short,
    Long,
    Nothing,
    Beyond,
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut faults = Self::default();
        for item in text.split(',').map(str::trim) {
            let added = faults.add(item);
            added.ok_or_else(|| format!("`{item}` is not a fault"))?;
        }
        Ok(faults)
    }
}

impl Faults {
    /// Adds an item of the text; `None` if it is not one.
    fn add(&mut self, item: &str) -> Option<()> {
        let (fault, condition) = item.split_once('@').unwrap_or((item, "100%"));
        let (first, percent) = match condition.strip_suffix('%') {
            Some(percent) => (u64::MAX, percent.parse().ok()?),
            None => (condition.parse().ok()?, 100),
        };
        let fault = match fault.split_once('=').unwrap_or((fault, "")) {
            ("seed", seed) => {
                self.seed = seed.parse().ok()?;
                return Some(());
            }
            ("honest", packets) => {
                self.honest = packets.parse().ok()?;
                return Some(());
            }
            ("timeout", value) => Fault::TimeOut(time(value)?),
            ("delay", value) => Fault::Delay(time(value)?),
            ("refuse", "") => Fault::Refuse,
            ("fail", "") => Fault::Fail,
            ("wrong", "") => Fault::Wrong,
            ("corrupt", "") => Fault::Corrupt,
            ("short", "") => Fault::Short,
            ("long", "") => Fault::Long,
            ("nothing", "") => Fault::Nothing,
            ("beyond", "") => Fault::Beyond,
            _ => return None,
        };
        self.rules.push(Rule {
            fault,
            first,
            percent,
        });
        Some(())
    }
}

fn time(text: &str) -> Option<Duration> {
    if let Some(number) = text.strip_suffix("us") {
        return number.parse().ok().map(Duration::from_micros);
    }
    let number = text.strip_suffix("ms")?;
    number.parse().ok().map(Duration::from_millis)
}

/// The accelerator whose devices have `faults`.
pub(crate) struct Faulty {
    faults: Faults,
    devices: AtomicU64,
}

impl Faulty {
    pub(crate) const NAME: &str = "faulty";
    /// Those whose packets are independent.
    pub(crate) const METHODS: &[Method] = &[Method::Lz4, Method::Qpl, Method::Qatzip];

    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            devices: AtomicU64::new(0),
        }
    }
}

impl Accelerator for Faulty {
    fn device(&self, method: Method, level: i32, layout: Layout) -> Box<dyn Device> {
        let number = self.devices.fetch_add(1, Ordering::Relaxed);
        let settings = Settings::new(method, Some(level)).ok();
        let software = settings.and_then(|settings| settings.software());
        Box::new(FaultyDevice {
            faults: self.faults.clone(),
            random: Random(self.faults.seed.wrapping_add(number)),
            packets: 0,
            compress: software.and_then(|(engine, level)| (engine.compressor)(level).ok()),
            unpack: decode::unpacker(method, layout).ok(),
            altered: Vec::new(),
        })
    }
}

struct FaultyDevice {
    faults: Faults,
    random: Random,
    packets: u64,
    compress: Option<Box<dyn Compress>>,
    unpack: Option<Box<dyn Unpack>>,
    altered: Vec<u8>,
}

impl FaultyDevice {
    /// Delays, and picks the fault of this packet: the first that applies.
    fn fault(&mut self) -> Result<Option<Fault>, DeviceError> {
        let number = self.packets;
        self.packets += 1;
        if number < self.faults.honest {
            return Ok(None);
        }
        let mut picked = None;
        for rule in &self.faults.rules {
            let is_drawn = rule.percent == 100 || self.random.next() % 100 < rule.percent;
            match rule.fault {
                _ if number >= rule.first || !is_drawn => {}
                Fault::Delay(time) => thread::sleep(time),
                fault if picked.is_none() => picked = Some(fault),
                _ => {}
            }
        }
        match picked {
            Some(Fault::Refuse) => Err(DeviceError::Busy),
            Some(Fault::Fail) => Err(DeviceError::Failed("it was told to fail".to_owned())),
            Some(Fault::TimeOut(time)) => {
                thread::sleep(time);
                Err(DeviceError::TimedOut(format!("after {time:?}")))
            }
            picked => Ok(picked),
        }
    }

    fn index_below(&mut self, len: usize) -> usize {
        let below = u64::try_from(len.max(1)).unwrap_or(u64::MAX);
        usize::try_from(self.random.next() % below).unwrap_or_default()
    }
}

impl Device for FaultyDevice {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, DeviceError> {
        let fault = self.fault()?;
        self.altered.clear();
        self.altered.extend_from_slice(pages);
        if fault == Some(Fault::Wrong) {
            let at = self.index_below(pages.len());
            self.altered[at] ^= 1;
        }
        let room = out.len();
        let software = (self.compress.as_mut())
            .ok_or_else(|| DeviceError::Failed("no software to work with".to_owned()))?;
        let len = software
            .compress(&self.altered, out)
            .map_err(|fault| DeviceError::Failed(format!("{fault:?}")))?;
        Ok(match fault {
            Some(Fault::Corrupt) => {
                let at = self.index_below(len);
                out[at] ^= 1 << (at % 8);
                len
            }
            Some(Fault::Short) => len - 1,
            Some(Fault::Long) => (len + 9).min(room),
            Some(Fault::Nothing) => 0,
            Some(Fault::Beyond) => room + 1,
            _ => len,
        })
    }

    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DeviceError> {
        let fault = self.fault()?;
        let software = (self.unpack.as_mut())
            .ok_or_else(|| DeviceError::Failed("no software to work with".to_owned()))?;
        software
            .unpack(payload, pages)
            .map_err(|error| DeviceError::Failed(error.to_string()))?;
        if fault.is_some() {
            let at = self.index_below(pages.len());
            pages[at] ^= 1;
        }
        Ok(())
    }
}

/// A small generator (splitmix64): the same faults for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_as_they_are_documented() {
        let rule = |fault, first, percent| Rule {
            fault,
            first,
            percent,
        };
        assert_eq!(
            "delay=100us,refuse@3, wrong@5%,seed=7".parse(),
            Ok(Faults {
                rules: vec![
                    rule(Fault::Delay(Duration::from_micros(100)), u64::MAX, 100),
                    rule(Fault::Refuse, 3, 100),
                    rule(Fault::Wrong, u64::MAX, 5),
                ],
                seed: 7,
                honest: 0,
            })
        );
        for text in [
            "", "explode", "delay", "delay=7", "refuse=1", "wrong@x", "seed",
        ] {
            assert!(text.parse::<Faults>().is_err(), "{text}");
        }
    }
}
