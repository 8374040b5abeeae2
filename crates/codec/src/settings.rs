//! Which method at which level, checked once, before anything is opened.

use std::ops::RangeInclusive;

use multifd::Method;

use crate::{SettingsError, lz4, qatzip, qpl, registry, zlib, zstd};

/// A method this crate can encode, and its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    method: Method,
    level: Option<i32>,
}

impl Settings {
    /// `method` at `level`, or at the method's default level (1, as QEMU's).
    ///
    /// zlib takes 0 (stored) to 9. zstd takes its negative (fast) levels up to 22; 0 stands for
    /// zstd's own default, 3, as it does in QEMU. lz4 takes its accelerations, 1 to 65537, of which
    /// higher ones are faster. qpl takes 0 (the fastest) to 12,
    /// qatzip 1 to 9. none takes no level.
    ///
    /// # Errors
    /// When the method is not built into this crate, or the level is not one of its levels.
    pub fn new(method: Method, level: Option<i32>) -> Result<Self, SettingsError> {
        if method == Method::Uadk {
            return Err(SettingsError::NotBuilt { method });
        }
        let Some(range) = Self::levels(method) else {
            return none(method, level);
        };
        let level = level.unwrap_or(DEFAULT_LEVEL);
        check(method, level, &range)?;
        let level = match (method, level) {
            (Method::Zstd, 0) => zstd::OWN_DEFAULT_LEVEL,
            _ => level,
        };
        Ok(Self {
            method,
            level: Some(level),
        })
    }

    /// The levels of `method`; `None` when it takes none.
    pub fn levels(method: Method) -> Option<RangeInclusive<i32>> {
        match method {
            Method::Zlib => Some(zlib::LEVELS),
            Method::Zstd => Some(zstd::levels()),
            Method::Lz4 => Some(lz4::LEVELS),
            Method::Qatzip => Some(qatzip::LEVELS),
            Method::Qpl => Some(qpl::LEVELS),
            Method::None | Method::Uadk => None,
        }
    }

    /// The method.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Whether each packet of the method is decoded without the others, so that several can be encoded
    /// at once and in any order.
    pub fn packets_are_independent(&self) -> bool {
        !matches!(self.method, Method::Zlib | Method::Zstd)
    }

    /// The software engine that serves them: a library's name, or `copy` for method none.
    pub fn engine(&self) -> &'static str {
        registry::software(self).map_or(registry::COPY, |engine| engine.name)
    }

    /// The level that acts: defaults are filled in. `None` for the method that has no levels.
    pub fn level(&self) -> Option<i32> {
        self.level
    }
}

/// Level where none is given, as in QEMU.
const DEFAULT_LEVEL: i32 = 1;

fn none(method: Method, level: Option<i32>) -> Result<Settings, SettingsError> {
    match level {
        None => Ok(Settings { method, level }),
        Some(level) => Err(SettingsError::NoLevels { method, level }),
    }
}

fn check(method: Method, level: i32, range: &RangeInclusive<i32>) -> Result<(), SettingsError> {
    if range.contains(&level) {
        return Ok(());
    }
    Err(SettingsError::Level {
        method,
        level,
        min: *range.start(),
        max: *range.end(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_qemu() {
        for (method, level) in [
            (Method::None, None),
            (Method::Zlib, Some(1)),
            (Method::Zstd, Some(1)),
            (Method::Lz4, Some(1)),
        ] {
            let settings = Settings::new(method, None).unwrap();
            assert_eq!((settings.method(), settings.level()), (method, level));
        }
        let zstd = Settings::new(Method::Zstd, Some(0)).unwrap();
        assert_eq!(zstd.level(), Some(3));
    }

    #[test]
    fn the_ends_of_each_range_are_in_and_their_neighbours_out() {
        for (method, min, max) in [
            (Method::Zlib, 0, 9),
            (Method::Zstd, -131_072, 22),
            (Method::Lz4, 1, 65_537),
        ] {
            assert_eq!(Settings::new(method, Some(min)).unwrap().level(), Some(min));
            assert_eq!(Settings::new(method, Some(max)).unwrap().level(), Some(max));
            for level in [min - 1, max + 1, i32::MIN, i32::MAX] {
                assert_eq!(
                    Settings::new(method, Some(level)),
                    Err(SettingsError::Level {
                        method,
                        level,
                        min,
                        max
                    })
                );
            }
        }
    }

    #[test]
    fn errors_say_what_would_have_been_right() {
        let error = |method, level| Settings::new(method, level).unwrap_err().to_string();
        assert_eq!(
            error(Method::Zlib, Some(10)),
            "zlib has no level 10, only 0 to 9"
        );
        assert_eq!(
            error(Method::None, Some(1)),
            "method none takes no level, but level 1 was given"
        );
        assert_eq!(
            error(Method::Uadk, None),
            "method uadk is not built into this program"
        );
    }
}
