//! Which method at which level, checked once, before anything is opened.

use std::ops::RangeInclusive;

use multifd::Method;

use crate::{SettingsError, lz4, qatzip, qpl, registry, zlib, zstd, zstd_frames};

/// A method this crate can encode, and its level, or that both are chosen packet by packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `None` for auto.
    method: Option<Method>,
    level: Option<i32>,
}

impl Settings {
    /// Method and level as they serve best, chosen anew for each packet. Only another Vamoose takes it.
    pub fn auto() -> Self {
        Self {
            method: None,
            level: None,
        }
    }

    /// `method` at `level`, or at the method's default level (1, as QEMU's).
    ///
    /// zlib takes 0 (stored) to 9. zstd and zstd-frames take zstd's negative (fast) levels up to 22; 0
    /// stands for zstd's own default, 3, as it does in QEMU. lz4 takes its accelerations, 1 to 65537, of
    /// which higher ones are faster. qpl takes 0 (the fastest) to 12, qatzip 1 to 9. none takes no level.
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
            (Method::Zstd | Method::ZstdFrames, 0) => zstd::OWN_DEFAULT_LEVEL,
            _ => level,
        };
        Ok(Self {
            method: Some(method),
            level: Some(level),
        })
    }

    /// The levels of `method`; `None` when it takes none.
    pub fn levels(method: Method) -> Option<RangeInclusive<i32>> {
        match method {
            Method::Zlib => Some(zlib::LEVELS),
            Method::Zstd => Some(zstd::levels()),
            Method::Lz4 => Some(lz4::LEVELS),
            Method::ZstdFrames => Some(zstd_frames::levels()),
            Method::Qatzip => Some(qatzip::LEVELS),
            Method::Qpl => Some(qpl::LEVELS),
            Method::None | Method::Uadk => None,
        }
    }

    /// The method; `None` for auto.
    pub fn method(&self) -> Option<Method> {
        self.method
    }

    /// The method's name, or `auto`.
    pub fn name(&self) -> &'static str {
        self.method.map_or(AUTO, Method::name)
    }

    /// Whether each packet of the method is decoded without the others, so that several can be encoded
    /// at once and in any order.
    pub fn packets_are_independent(&self) -> bool {
        !matches!(self.method, Some(Method::Zlib | Method::Zstd))
    }

    /// The software engine that serves them: a library's name, `copy` for method none, or `auto` for its
    /// mix of them.
    pub fn engine(&self) -> &'static str {
        let Some(method) = self.method else {
            return AUTO;
        };
        let level = self.level.unwrap_or_default();
        registry::software_at(method, level).map_or(registry::COPY, |engine| engine.name)
    }

    /// The level that acts: defaults are filled in. `None` for auto and for the method that has no levels.
    pub fn level(&self) -> Option<i32> {
        self.level
    }
}

/// Name of the choice of a method for each packet.
const AUTO: &str = "auto";

/// Level where none is given, as in QEMU.
const DEFAULT_LEVEL: i32 = 1;

fn none(method: Method, level: Option<i32>) -> Result<Settings, SettingsError> {
    match level {
        None => Ok(Settings {
            method: Some(method),
            level,
        }),
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
            (Method::ZstdFrames, Some(1)),
        ] {
            let settings = Settings::new(method, None).unwrap();
            assert_eq!((settings.method(), settings.level()), (Some(method), level));
            assert_eq!(settings.name(), method.name());
        }
        let zstd = Settings::new(Method::Zstd, Some(0)).unwrap();
        assert_eq!(zstd.level(), Some(3));
    }

    #[test]
    fn auto_is_neither_a_method_nor_a_level() {
        let auto = Settings::auto();
        assert_eq!((auto.method(), auto.level()), (None, None));
        assert_eq!((auto.name(), auto.engine()), ("auto", "auto"));
        assert!(auto.packets_are_independent());
        // A name must not mean two things to those who read reports, or to `serve`.
        assert!(
            Method::ALL
                .iter()
                .all(|method| method.name() != auto.name())
        );
    }

    #[test]
    fn the_ends_of_each_range_are_in_and_their_neighbours_out() {
        for (method, min, max) in [
            (Method::Zlib, 0, 9),
            (Method::Zstd, -131_072, 22),
            (Method::Lz4, 1, 65_537),
            (Method::ZstdFrames, -131_072, 22),
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
