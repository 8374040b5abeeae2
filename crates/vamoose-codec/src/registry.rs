//! Which engines there are, and which of them does a migration's work.
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
//! An engine that is absent is not an error: the registry has the reason. Under [`Accel::Auto`] hardware is used
//! where it is; naming it makes it mandatory, and its absence an error before anything is opened.
//! Whatever a device does later, its packets are encoded: see `accelerated`.

use std::{
    error::Error,
    iter,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use idxd::{
    Kind,
    offload::{Choice, Devices, OffloadCounters, Options},
};
use multifd::{Layout, Method};

use crate::{
    Absence, Decoder, EncodeError, Encoder, Health, Settings, SettingsError,
    accelerated::{Accelerated, Guard, Verify},
    decode,
    encode::COPY,
    engine::{Accelerator, Missing},
    iaa::Iaa,
    methods,
    qat::Qat,
    qpl,
};
#[cfg(feature = "fault-injection")]
use crate::{Faults, faulty::Faulty};

/// What to use of the host's hardware.
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

/// The engines of this program on this host. Hardware is looked for when it is first asked for.
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
    /// Why it is absent; `None` if it is there.
    pub absent: Option<String>,
    /// The file of the library that drives the hardware, if that is loaded, with the version in its name. Not of
    /// libraries that are part of this program.
    pub library: Option<PathBuf>,
}

/// What is chosen for a migration. Cheap to clone.
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
    /// The choices that allow it.
    chosen_by: &'static [Accel],
    open: Box<dyn Fn() -> Opened + Send + Sync>,
    opened: OnceLock<Opened>,
}

/// The accelerator, or why it is absent.
type Opened = Result<Arc<dyn Accelerator>, Missing>;

impl Registry {
    /// The registry of this host, with all of its IAAs' work queues that a process can use.
    pub fn new() -> Self {
        Self::with_iaa(|| {
            let options = Options::pages(qpl::PAGE_SIZE);
            let opened = Devices::open(Kind::Iaa, &Choice::Auto, &options);
            opened.map_err(|error| {
                let causes = iter::successors(Some(&error as &dyn Error), |&error| error.source());
                let causes: Vec<_> = causes.map(ToString::to_string).collect();
                causes.join(": ")
            })
        })
    }

    /// The registry of this host, with the IAAs that `open` opens once they are asked for, by [`Options::pages`] of
    /// 4096 bytes, or the reason why there are none.
    pub fn with_iaa(open: impl Fn() -> Result<Devices, String> + Send + Sync + 'static) -> Self {
        Self {
            hardware: vec![
                Self::qat(Qat::of_host),
                Self::iaa(move || Ok(Iaa::new(Arc::new(open()?)))),
            ],
        }
    }

    /// Nothing but IAAs by these devices, whose slots have a buffer for 4096 bytes, and software.
    pub fn with_iaa_devices(devices: Arc<Devices>) -> Self {
        Self {
            hardware: vec![Self::iaa(move || Ok(Iaa::new(devices.clone())))],
        }
    }

    fn iaa(open: impl Fn() -> Result<Iaa, String> + Send + Sync + 'static) -> Hardware {
        let chosen_by = &[Accel::Auto, Accel::Iaa];
        Hardware::new(Iaa::NAME, Iaa::METHODS, chosen_by, move || {
            Ok(Arc::new(open()?))
        })
    }

    /// Nothing but QAT, through the libqatzip in `file`, and software.
    pub fn with_libqatzip(file: &Path) -> Self {
        let file = file.to_owned();
        Self::with_qat(move || Qat::open(file.as_os_str()))
    }

    /// Nothing but QAT, and software.
    pub(crate) fn with_qat(
        open: impl Fn() -> Result<Qat, Missing> + Send + Sync + 'static,
    ) -> Self {
        Self {
            hardware: vec![Self::qat(open)],
        }
    }

    fn qat(open: impl Fn() -> Result<Qat, Missing> + Send + Sync + 'static) -> Hardware {
        let chosen_by = &[Accel::Auto, Accel::Qat];
        Hardware::new(Qat::NAME, Qat::METHODS, chosen_by, move || {
            Ok(Arc::new(open()?))
        })
    }

    /// Nothing but an engine with `faults`, and software.
    #[cfg(feature = "fault-injection")]
    pub fn with_faults(faults: &Faults) -> Self {
        Self {
            hardware: vec![Self::faulty(faults.clone())],
        }
    }

    /// In builds for tests, an engine with the faults that `text` describes comes first. In others that is
    /// ignored.
    ///
    /// # Errors
    /// When `text` describes no faults.
    pub fn inject(mut self, text: &str) -> Result<Self, String> {
        #[cfg(feature = "fault-injection")]
        self.hardware.insert(0, Self::faulty(text.parse()?));
        let _ = (&mut self.hardware, text);
        Ok(self)
    }

    #[cfg(feature = "fault-injection")]
    fn faulty(faults: Faults) -> Hardware {
        Hardware::new(Faulty::NAME, Faulty::METHODS, &[Accel::Auto], move || {
            Ok(Arc::new(Faulty::new(faults.clone())))
        })
    }

    /// Every engine, method by method, the preferred one first. Looks for all hardware.
    pub fn engines(&self) -> Vec<EngineInfo> {
        let mut engines = Vec::new();
        for method in Method::ALL {
            let Some(info) = methods::info(method) else {
                continue;
            };
            let levels = info.levels.as_ref().map(|levels| levels.range.clone());
            let hardware = self.hardware.iter().filter(|h| h.serves(method));
            engines.extend(hardware.map(|hardware| EngineInfo {
                name: hardware.name,
                method,
                levels: levels.clone(),
                hardware: true,
                absent: (hardware.opened().as_ref().err()).map(|missing| missing.reason.clone()),
                library: hardware.library().map(Path::to_owned),
            }));
            let mut add = |name, levels, absent| {
                engines.push(EngineInfo {
                    name,
                    method,
                    levels,
                    hardware: false,
                    absent,
                    library: None,
                });
            };
            for (name, levels) in info.engines() {
                add(name, Some(levels), None);
            }
            if info.software.is_empty() {
                add(COPY, None, None);
            }
            if info.uses_isal && cfg!(not(feature = "isal")) {
                let reason = "built without the feature `isal`";
                add("isa-l", None, Some(reason.to_owned()));
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
        if matches!(accel, Accel::Qat | Accel::Iaa) {
            self.demand(accel, settings.method())?;
        }
        Ok(Engines {
            registry: self.clone(),
            settings,
            accel,
            verify,
        })
    }

    /// Method none is no contradiction: what comes in may still be decoded by the hardware.
    fn demand(&self, accel: Accel, method: Method) -> Result<(), SettingsError> {
        let mut hardware = self.hardware.iter();
        let Some(hardware) = hardware.find(|h| h.chosen_by.contains(&accel)) else {
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

    /// The hardware that serves `method` under `accel`, if there is some.
    fn accelerator(&self, method: Method, accel: Accel) -> Option<&Arc<dyn Accelerator>> {
        self.hardware
            .iter()
            .filter(|hardware| hardware.chosen_by.contains(&accel) && hardware.serves(method))
            .find_map(|hardware| hardware.opened().as_ref().ok())
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

impl Engines {
    /// Software only.
    pub fn software(settings: Settings) -> Self {
        Self {
            registry: Arc::new(Registry {
                hardware: Vec::new(),
            }),
            settings,
            accel: Accel::None,
            verify: Verify::Off,
        }
    }

    /// Method and level of what is encoded.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Name of the engine that encodes.
    pub fn name(&self) -> &'static str {
        let hardware = self.accelerator(self.settings.method());
        hardware.map_or(self.settings.engine(), |accelerator| accelerator.name())
    }

    /// What the devices have done that work page by page, of those that these engines have used so far; `None`
    /// without such devices.
    pub fn device_work(&self) -> Option<OffloadCounters> {
        let hardware = self.registry.hardware.iter();
        let mut chosen = hardware.filter(|hardware| hardware.chosen_by.contains(&self.accel));
        chosen.find_map(|hardware| hardware.opened.get()?.as_ref().ok()?.work())
    }

    /// An encoder for a new channel, or one more for the same channel if the method's packets are
    /// independent. `health` is the migration's.
    ///
    /// # Errors
    /// When the method's library cannot be set up (no memory), or the method has no format for such
    /// pages.
    pub fn encoder(&self, layout: Layout, health: &Arc<Health>) -> Result<Encoder, EncodeError> {
        let method = self.settings.method();
        let Some((software, level)) = self.settings.software() else {
            return Ok(Encoder::new(method, layout, None));
        };
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
        let engine = match (accelerator, verifier) {
            (Some(accelerator), Some(verifier)) => Box::new(Accelerated {
                guard: Guard::new(accelerator.name(), method, self.verify, health.clone()),
                device: accelerator.device(method, level, layout),
                fallback,
                verifier,
                decoded: vec![0; layout.packet_bytes()],
            }),
            _ => fallback,
        };
        Ok(Encoder::new(method, layout, Some(engine)))
    }

    /// A decoder for a new channel. `health` is the migration's.
    pub fn decoder(&self, layout: Layout, health: &Arc<Health>) -> Decoder {
        Decoder::with_engines(layout, self.clone(), health.clone())
    }

    pub(crate) fn accelerator(&self, method: Method) -> Option<&Arc<dyn Accelerator>> {
        self.registry.accelerator(method, self.accel)
    }
}

impl Hardware {
    fn new(
        name: &'static str,
        methods: &'static [Method],
        chosen_by: &'static [Accel],
        open: impl Fn() -> Opened + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            methods,
            chosen_by,
            open: Box::new(open),
            opened: OnceLock::new(),
        }
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
