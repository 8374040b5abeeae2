//! A method and its level, checked once, before anything is opened.

use multifd::Method;

use crate::{SettingsError, encode::COPY, engine::Software, methods};

/// A method this crate can encode, and its level. By default method none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    method: Method,
    level: Option<i32>,
}

impl Settings {
    /// `method` at `level`, or at the method's default level; see [`methods::info`](crate::info).
    ///
    /// # Errors
    /// When the method is not built into this crate, or the level is not one of its levels.
    pub fn new(method: Method, level: Option<i32>) -> Result<Self, SettingsError> {
        let info = methods::info(method).ok_or(SettingsError::NotBuilt { method })?;
        let level = match (info.levels, level) {
            (None, None) => None,
            (None, Some(level)) => return Err(SettingsError::NoLevels { method, level }),
            (Some(levels), level) => {
                let level = level.unwrap_or(methods::DEFAULT_LEVEL);
                if !levels.range.contains(&level) {
                    return Err(SettingsError::Level {
                        method,
                        level,
                        min: *levels.range.start(),
                        max: *levels.range.end(),
                    });
                }
                Some(if level == 0 { levels.zero } else { level })
            }
        };
        Ok(Self { method, level })
    }

    /// The method.
    pub fn method(&self) -> Method {
        self.method
    }

    /// The effective level, with defaults filled in. `None` for a method without levels.
    pub fn level(&self) -> Option<i32> {
        self.level
    }

    /// Name of the software engine: a library, or `copy` for method none.
    pub fn engine(&self) -> &'static str {
        self.software().map_or(COPY, |(engine, _)| engine.name)
    }

    /// The software engine and its level; `None` for method none.
    pub(crate) fn software(&self) -> Option<(&'static Software, i32)> {
        let (info, level) = (methods::info(self.method)?, self.level?);
        let mut engines = info.software.iter();
        Some((
            engines.find(|engine| engine.levels.contains(&level))?,
            level,
        ))
    }
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
        assert_eq!(error(Method::Uadk, None), "method uadk is not built in");
    }
}
