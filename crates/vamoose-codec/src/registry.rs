//! All engines, and the choice of the engines of a migration.
//!
//! ```text
//!  method      software, the better one first     hardware, before its software fallback
//!  none        copy
//!  zlib        isa-l, zlib-rs
//!  zstd        zstd
//!  lz4         lz4
//!  zstd-frames zstd
//!  qpl         isa-l, libdeflate                  iaa
//!  qatzip      isa-l, libdeflate                  qat
//! ```
//! An absent engine is not an error: the registry has the reason. With [`Accel::Auto`], hardware is used if it is present.
//! Hardware that is named is mandatory: its absence is an error before anything is opened. Whatever a device does later, its
//! packets are encoded: see `accelerated`.

#[cfg(feature = "deflate")]
mod devices;

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use multifd::{Layout, Method};

#[cfg(feature = "deflate")]
use crate::qpl;
use crate::{
    Absence, Decoder, EncodeError, Encoder, Health, Settings, SettingsError,
    accelerated::{Accelerated, Guard, Verify},
    decode,
    encode::COPY,
    engine::{Accelerator, Compress, Missing},
    methods,
};
#[cfg(feature = "fault-injection")]
use crate::{Faults, testing::Faulty};

/// Which of the host's hardware to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accel {
    /// The best that is there.
    #[default]
    Auto,
    /// Software only.
    None,
    /// Intel QuickAssist, for method qatzip.
    Qat,
    /// Intel In-Memory Analytics Accelerator, for method qpl.
    Iaa,
}

impl Accel {
    /// All choices, with their names and what they mean.
    pub const ALL: [(Self, &str, &str); 4] = [
        (Self::Auto, "auto", "The best that is there"),
        (Self::None, "none", "Software only"),
        (Self::Qat, "qat", "Intel QuickAssist, for qatzip"),
        (
            Self::Iaa,
            "iaa",
            "Intel In-Memory Analytics Accelerator, for qpl",
        ),
    ];
}

/// The engines of this program on this host. Hardware is probed when it is first requested.
pub struct Registry {
    hardware: Vec<Hardware>,
}

/// An engine of the registry and the method that it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineInfo {
    /// Name of the library or device.
    pub name: &'static str,
    /// The method it serves.
    pub method: Method,
    /// The levels at which it serves the method; `None` for a method without levels.
    pub levels: Option<RangeInclusive<i32>>,
    /// Whether it is hardware.
    pub hardware: bool,
    /// Why it is absent; `None` if it is present.
    pub absent: Option<String>,
    /// The file of the library that drives the hardware, if that is loaded, with the version in its name. Not of
    /// libraries that are part of this program.
    pub library: Option<PathBuf>,
}

/// The engines chosen for a migration. Cheap to clone.
#[derive(Clone)]
pub struct Engines {
    registry: Arc<Registry>,
    settings: Settings,
    accel: Accel,
    pub(crate) verify: Verify,
}

/// A kind of hardware and how to find it.
struct Hardware {
    name: &'static str,
    methods: &'static [Method],
    /// The choice that makes it mandatory.
    named_by: Option<Accel>,
    open: Box<dyn Fn() -> Opened + Send + Sync>,
    opened: OnceLock<Opened>,
}

/// The accelerator, or why it is absent.
type Opened = Result<Arc<dyn Accelerator>, Missing>;

impl Registry {
    /// Only software.
    fn software() -> Self {
        Self {
            hardware: Vec::new(),
        }
    }

    /// Only software, and an engine with `faults`.
    #[cfg(feature = "fault-injection")]
    pub fn with_faults(faults: &Faults) -> Self {
        let faults = faults.clone();
        let open = move || Ok(Faulty::new(faults.clone()));
        let faulty = Hardware::new(Faulty::NAME, Faulty::METHODS, None, open);
        Self {
            hardware: vec![faulty],
        }
    }

    /// In test builds, puts an engine with the faults that `text` describes before all others. Ignored in other builds.
    ///
    /// # Errors
    /// When `text` describes no faults.
    pub fn inject(mut self, text: &str) -> Result<Self, String> {
        #[cfg(feature = "fault-injection")]
        self.hardware
            .splice(0..0, Self::with_faults(&text.parse()?).hardware);
        let _ = (&mut self.hardware, text);
        Ok(self)
    }

    /// All engines, method by method, the preferred one first. Probes all hardware.
    pub fn engines(&self) -> Vec<EngineInfo> {
        let mut engines = Vec::new();
        for method in Method::ALL {
            let Some(info) = methods::info(method) else {
                continue;
            };
            let software = |name, levels| EngineInfo {
                name,
                method,
                levels,
                hardware: false,
                absent: None,
                library: None,
            };
            for hardware in self.hardware.iter().filter(|h| h.serves(method)) {
                let levels = info.levels.as_ref().map(|levels| levels.range.clone());
                let missing = hardware.opened().as_ref().err();
                engines.push(EngineInfo {
                    hardware: true,
                    absent: missing.map(|missing| missing.reason.clone()),
                    library: hardware.library().map(Path::to_owned),
                    ..software(hardware.name, levels)
                });
            }
            engines.extend(
                info.engines()
                    .map(|(name, levels)| software(name, Some(levels))),
            );
            if info.software.is_empty() {
                engines.push(software(COPY, None));
            }
            #[cfg(all(feature = "deflate", not(feature = "isal")))]
            if matches!(method, Method::Zlib | Method::Qpl | Method::Qatzip) {
                engines.push(EngineInfo {
                    absent: Some("built without the feature `isal`".to_owned()),
                    ..software("isa-l", None)
                });
            }
        }
        engines
    }

    /// Chooses the engines of a migration that is sent with `settings`.
    ///
    /// # Errors
    /// When `accel` names hardware that is absent, or that does not serve the method.
    pub fn choose(
        self: &Arc<Self>,
        settings: Settings,
        accel: Accel,
        verify: Verify,
    ) -> Result<Engines, SettingsError> {
        self.check_named(accel, settings.method())?;
        Ok(Engines {
            registry: self.clone(),
            settings,
            accel,
            verify,
        })
    }

    /// Checks the hardware that `accel` names. Method none is allowed: the hardware may decode received packets.
    fn check_named(&self, accel: Accel, method: Method) -> Result<(), SettingsError> {
        let mut hardware = self.hardware.iter();
        let Some(hardware) = hardware.find(|hardware| hardware.named_by == Some(accel)) else {
            return Ok(());
        };
        let engine = hardware.name;
        if method != Method::None && !hardware.serves(method) {
            return Err(SettingsError::EngineMethod {
                engine,
                method,
                serves: hardware.methods,
            });
        }
        match hardware.opened() {
            Ok(_) => Ok(()),
            Err(missing) => Err(SettingsError::EngineAbsent {
                engine,
                reason: Absence(missing.reason.clone()),
            }),
        }
    }
}

impl Default for Registry {
    /// The registry of this host, with all of its devices that this process can use.
    fn default() -> Self {
        #[cfg(feature = "deflate")]
        let registry = Self::new();
        #[cfg(not(feature = "deflate"))]
        let registry = Self::software();
        registry
    }
}

impl Engines {
    /// Software only.
    pub fn software(settings: Settings) -> Self {
        Self {
            registry: Arc::new(Registry::software()),
            settings,
            accel: Accel::None,
            verify: Verify::Off,
        }
    }

    /// Method and level of the encoder.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Name of the engine that encodes.
    pub fn name(&self) -> &'static str {
        let hardware = self.accelerator(self.settings.method());
        hardware.map_or(self.settings.engine(), |(name, _)| name)
    }

    /// An encoder for a new channel, or another one for the same channel if the method's packets are independent. `health` is
    /// the migration's.
    ///
    /// # Errors
    /// When the method's library cannot be set up (no memory), or the method has no format for such
    /// pages.
    pub fn encoder(&self, layout: Layout, health: &Arc<Health>) -> Result<Encoder, EncodeError> {
        let method = self.settings.method();
        let Some((software, level)) = self.settings.software() else {
            return Ok(Encoder::new(method, layout, COPY, None));
        };
        #[cfg(feature = "deflate")]
        if method == Method::Qpl && layout.page_size() != qpl::PAGE_SIZE {
            return Err(EncodeError::PageSize {
                method,
                page_size: layout.page_size(),
                only: qpl::PAGE_SIZE,
            });
        }
        let fallback = (software.compressor)(level).map_err(|reason| EncodeError::Engine {
            method,
            engine: software.name,
            reason,
        })?;
        let accelerator = self.accelerator(method);
        let verifier = accelerator.and_then(|_| decode::unpacker(method, layout).ok());
        let (name, engine): (_, Box<dyn Compress>) = match (accelerator, verifier) {
            (Some((name, accelerator)), Some(verifier)) => {
                let accelerated = Accelerated {
                    guard: Guard::new(name, method, self.verify, health.clone()),
                    device: accelerator.device(method, level, layout),
                    fallback,
                    verifier,
                    decoded: vec![0; layout.packet_bytes()],
                };
                (name, Box::new(accelerated))
            }
            _ => (software.name, fallback),
        };
        Ok(Encoder::new(method, layout, name, Some(engine)))
    }

    /// A decoder for a new channel. `health` is the migration's.
    pub fn decoder(&self, layout: Layout, health: &Arc<Health>) -> Decoder {
        Decoder::with_engines(layout, self.clone(), health.clone())
    }

    /// The chosen hardware that serves `method`, if it is present, and its name.
    pub(crate) fn accelerator(
        &self,
        method: Method,
    ) -> Option<(&'static str, &Arc<dyn Accelerator>)> {
        let mut hardware = self.registry.hardware.iter();
        hardware.find_map(|it| {
            let accelerator = || Some((it.name, it.opened().as_ref().ok()?));
            (it.is_allowed(self.accel) && it.serves(method)).then(accelerator)?
        })
    }
}

impl Hardware {
    fn new<A: Accelerator + 'static>(
        name: &'static str,
        methods: &'static [Method],
        named_by: Option<Accel>,
        open: impl Fn() -> Result<A, Missing> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            methods,
            named_by,
            open: Box::new(move || Ok(Arc::new(open()?))),
            opened: OnceLock::new(),
        }
    }

    fn is_allowed(&self, accel: Accel) -> bool {
        accel == Accel::Auto || self.named_by == Some(accel)
    }

    fn serves(&self, method: Method) -> bool {
        self.methods.contains(&method)
    }

    fn opened(&self) -> &Opened {
        self.opened.get_or_init(&self.open)
    }

    fn library(&self) -> Option<&Path> {
        match self.opened() {
            Ok(accelerator) => accelerator.library(),
            Err(missing) => missing.library.as_deref(),
        }
    }
}
