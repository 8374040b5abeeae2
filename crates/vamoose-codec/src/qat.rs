//! Engine qat: Intel QuickAssist for method qatzip, through libqatzip if the host has it.
//!
//! Each channel and direction has one session, opened by the thread that uses it, at its first packet. A session that has
//! failed may not be used again: a new one is opened for the next packet. A session leaks its memory if its device does not
//! answer. After a few leaks, or sessions that cannot be opened, software serves the channel. If other processes have all
//! instances of the devices, the session stays usable, and opening one is tried again.

#[cfg(test)]
mod tests;

use std::{ffi::OsStr, path::Path, sync::Arc};

use multifd::{Layout, Method};
use tracing::debug;

use crate::{
    engine::{Accelerator, Device, DeviceError, Missing},
    ffi::libqatzip::{Absent, Code, Failure, Library, NAME as LIBRARY, Session, Status, hardware},
};

/// The library and the hardware behind it.
pub(crate) struct Qat {
    library: Arc<Library>,
}

impl Qat {
    pub(crate) const NAME: &str = "qat";
    pub(crate) const METHODS: &[Method] = &[Method::Qatzip];

    /// The host's QAT, or why there is none.
    pub(crate) fn of_host() -> Result<Self, Missing> {
        Self::open(OsStr::new(LIBRARY))
    }

    /// With the library `name`, a path or what the system's loader knows.
    pub(crate) fn open(name: &OsStr) -> Result<Self, Missing> {
        let library = Library::open(name).map_err(|absent| absent.to_string())?;
        debug!("{} is loaded", library.file().display());
        let library = Arc::new(library);
        match hardware(&library) {
            Ok(()) => Ok(Self { library }),
            Err(absent) => {
                debug!("engine {} is absent: {absent}", Self::NAME);
                Err(Missing {
                    reason: absent.to_string(),
                    library: Some(library.file().to_owned()),
                })
            }
        }
    }
}

impl Accelerator for Qat {
    fn device(&self, _method: Method, level: i32, layout: Layout) -> Box<dyn Device> {
        Box::new(QatDevice {
            library: self.library.clone(),
            level: level.unsigned_abs(),
            layout,
            session: None,
            lost: 0,
        })
    }

    fn library(&self) -> Option<&Path> {
        Some(self.library.file())
    }
}

/// Sessions that a channel may lose: memory that an unanswered request may still write to is never freed.
const MOST_LOST: u32 = 4;

struct QatDevice {
    library: Arc<Library>,
    level: u32,
    layout: Layout,
    session: Option<Session>,
    /// Sessions that have leaked their memory, or could not be opened.
    lost: u32,
}

impl QatDevice {
    /// Runs `work` on the session, which is opened first if there is none.
    fn with_session<T>(
        &mut self,
        work: impl FnOnce(&mut Session) -> Result<T, Failure>,
    ) -> Result<T, DeviceError> {
        if self.session.is_none() {
            if self.lost == MOST_LOST {
                return Err(DeviceError::Failed(format!(
                    "{MOST_LOST} QAT sessions have been lost"
                )));
            }
            let (library, level, layout) = (self.library.clone(), self.level, self.layout);
            let opened = Session::open(library, level, layout.packet_bytes(), layout.max_payload());
            let opened = opened.map_err(device_error);
            self.lost += u32::from(matches!(&opened, Err(error) if *error != DeviceError::Busy));
            self.session = Some(opened?);
        }
        let Some(session) = &mut self.session else {
            return Err(DeviceError::Failed("no QAT session".to_owned()));
        };
        let result = work(session);
        if !session.is_ready() {
            self.lost += u32::from(session.leaks());
            self.session = None;
        }
        result.map_err(device_error)
    }
}

impl Device for QatDevice {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, DeviceError> {
        self.with_session(|session| session.compress(pages, out))
    }

    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DeviceError> {
        self.with_session(|session| session.decompress(payload, pages))
    }
}

fn device_error(failure: Failure) -> DeviceError {
    let reason = failure.to_string();
    match failure {
        Failure::Code { code, .. } if code == Code::TIMEOUT => DeviceError::TimedOut(reason),
        // Other processes have all instances at present.
        Failure::Code { code, .. } | Failure::Absent(Absent::Refused { code, .. })
            if code == Code::NO_INSTANCE =>
        {
            DeviceError::Busy
        }
        Failure::Absent(Absent::Hardware(Status::NO_INSTANCE)) => DeviceError::Busy,
        _ => DeviceError::Failed(reason),
    }
}
