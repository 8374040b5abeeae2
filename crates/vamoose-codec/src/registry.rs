//! Which engines there are, and which of them does a migration's work.
//!
//! ```text
//!  method      software, the better one first     hardware, before its software twin
//!  none        copy
//!  zlib        isa-l, zlib-rs
//!  zstd        zstd
//!  lz4         lz4
//!  zstd-frames zstd
//!  qpl         isa-l, libdeflate                  iaa
//!  qatzip      isa-l, libdeflate                  qat
//! ```
//! Auto mixes copy, lz4 and zstd-frames.
//!
//! An engine that is absent is not an error: it says why. Under [`Accel::Auto`] hardware is used
//! where it is; naming it makes it mandatory, and its absence an error before anything is opened.
//! Whatever a device does later, its packets are encoded: see `accelerated`.

use std::{
    error::Error,
    iter,
    ops::RangeInclusive,
    path::Path,
    sync::{Arc, OnceLock},
};

use idxd::{
    Kind,
    offload::{Choice, Devices, OffloadCounters, Options},
};
use multifd::{Layout, Method};

use crate::{
    Decoder, EncodeError, Encoder, Health, Settings, SettingsError,
    accelerated::{Accelerated, Guard, Verify},
    auto::Auto,
    decode, encode,
    engine::{Accelerator, Software},
    iaa::Iaa,
    lz4,
    qat::Qat,
    qatzip, qpl, zlib, zstd, zstd_frames,
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

/// The engines of this program on this host. Hardware is looked for when it is first asked for.
pub struct Registry {
    hardware: Vec<Hardware>,
}

/// A row of the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
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
}

/// What is chosen for a migration. Cheap to clone.
#[derive(Clone)]
pub struct Engines {
    registry: Arc<Registry>,
    settings: Settings,
    accel: Accel,
    verify: Verify,
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
type Opened = Result<Arc<dyn Accelerator>, String>;

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
                #[cfg(feature = "fault-injection")]
                Self::faulty(Faulty::from_environment),
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
        Self {
            hardware: vec![Self::qat(move || Qat::open(file.as_os_str()))],
        }
    }

    fn qat(open: impl Fn() -> Result<Qat, String> + Send + Sync + 'static) -> Hardware {
        let chosen_by = &[Accel::Auto, Accel::Qat];
        Hardware::new(Qat::NAME, Qat::METHODS, chosen_by, move || {
            Ok(Arc::new(open()?))
        })
    }

    /// Nothing but an engine with `faults`, and software.
    #[cfg(feature = "fault-injection")]
    pub fn with_faults(faults: &Faults) -> Self {
        let faults = faults.clone();
        Self {
            hardware: vec![Self::faulty(move || Ok(Faulty::new(faults.clone())))],
        }
    }

    #[cfg(feature = "fault-injection")]
    fn faulty(open: impl Fn() -> Result<Faulty, String> + Send + Sync + 'static) -> Hardware {
        Hardware::new(Faulty::NAME, Faulty::METHODS, &[Accel::Auto], move || {
            Ok(Arc::new(open()?))
        })
    }

    /// Every engine, method by method, the preferred one first. Looks for all hardware.
    pub fn rows(&self) -> Vec<Row> {
        Method::ALL
            .into_iter()
            .flat_map(|method| {
                let hardware = self.hardware.iter().filter(move |h| h.serves(method));
                let hardware = hardware.map(move |hardware| Row {
                    name: hardware.name,
                    method,
                    levels: Settings::levels(method),
                    hardware: true,
                    absent: hardware.opened().as_ref().err().cloned(),
                });
                let software = software_engines(method).iter().map(move |engine| Row {
                    name: engine.name,
                    method,
                    levels: Settings::levels(method).map(|all| {
                        *all.start().max(engine.levels.start())
                            ..=*all.end().min(engine.levels.end())
                    }),
                    hardware: false,
                    absent: None,
                });
                let copy = (method == Method::None).then_some(Row {
                    name: COPY,
                    method,
                    levels: None,
                    hardware: false,
                    absent: None,
                });
                let with_isal = matches!(method, Method::Zlib | Method::Qpl | Method::Qatzip);
                let left_out = (with_isal && cfg!(not(feature = "isal"))).then(|| Row {
                    name: "isa-l",
                    method,
                    levels: None,
                    hardware: false,
                    absent: Some("this program is built without the feature `isal`".to_owned()),
                });
                hardware.chain(software).chain(copy).chain(left_out)
            })
            .collect()
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
            self.demand(accel, settings.method().unwrap_or_default())?;
        }
        Ok(Engines {
            registry: self.clone(),
            settings,
            accel,
            verify,
        })
    }

    /// Method none (and auto, which encodes in software) is no contradiction: what comes in may still be
    /// decoded by the hardware.
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
            Err(reason) => Err(SettingsError::EngineAbsent {
                engine,
                reason: reason.clone(),
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

    /// Method and level on the way out.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Name of the engine that encodes.
    pub fn name(&self) -> &'static str {
        let hardware = self.settings.method().and_then(|of| self.accelerator(of));
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
    pub fn encoder(
        &self,
        layout: Layout,
        health: &Arc<Health>,
    ) -> Result<Box<dyn Encoder>, EncodeError> {
        let Some(method) = self.settings.method() else {
            return Ok(Box::new(Auto::new(layout)?));
        };
        let level = self.settings.level().unwrap_or_default();
        let Some(software) = software_at(method, level) else {
            return Ok(encode::copy(layout));
        };
        if method == Method::Qpl && layout.page_size() != qpl::PAGE_SIZE {
            return Err(EncodeError::PageSize {
                method,
                page_size: layout.page_size(),
                only: qpl::PAGE_SIZE,
            });
        }
        let twin = (software.compressor)(level).map_err(|reason| EncodeError::Engine {
            method,
            engine: software.name,
            reason,
        })?;
        let engine = match (self.accelerator(method), decode::unpacker(method, layout)) {
            (Some(accelerator), Ok(judge)) => Box::new(Accelerated::new(
                self.guard(accelerator, method, health),
                accelerator.device(method, level, layout),
                twin,
                judge,
                layout,
            )),
            _ => twin,
        };
        Ok(encode::coded(method, layout, engine))
    }

    /// A decoder for a new channel. `health` is the migration's.
    pub fn decoder(&self, layout: Layout, health: &Arc<Health>) -> Decoder {
        Decoder::with_engines(layout, self.clone(), health.clone())
    }

    pub(crate) fn accelerator(&self, method: Method) -> Option<&Arc<dyn Accelerator>> {
        self.registry.accelerator(method, self.accel)
    }

    pub(crate) fn guard(
        &self,
        accelerator: &Arc<dyn Accelerator>,
        method: Method,
        health: &Arc<Health>,
    ) -> Guard {
        Guard::new(accelerator.name(), method, self.verify, health.clone())
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
}

/// The software engine that serves `method` at `level`; `None` for method none.
pub(crate) fn software_at(method: Method, level: i32) -> Option<&'static Software> {
    let mut engines = software_engines(method).iter();
    engines.find(|engine| engine.levels.contains(&level))
}

/// Name of what method none does.
pub(crate) const COPY: &str = "copy";

fn software_engines(method: Method) -> &'static [Software] {
    match method {
        Method::Zlib => zlib::ENGINES,
        Method::Zstd => zstd::ENGINES,
        Method::Lz4 => lz4::ENGINES,
        Method::ZstdFrames => zstd_frames::ENGINES,
        Method::Qatzip => qatzip::ENGINES,
        Method::Qpl => qpl::ENGINES,
        Method::None | Method::Uadk => &[],
    }
}
