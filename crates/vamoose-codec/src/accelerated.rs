//! Hardware with a software fallback, so that every packet is processed even if the device fails.
//!
//! ```text
//!            device ──ok──> shape right? ──yes──> check due? ──no──> out
//!  packet ─>   │ fails         │ no                  │ yes: decode in software, compare
//!              v               v                     ├─ equal ──> out
//!            software fallback <───┴─────────────────────┴─ wrong ──> the device is off from now on
//! ```
//!
//! - Software decodes a packet that no device can have written. That is not a failure.
//! - After a failure, software processes the packet. After a series of failures, software processes the rest of the migration:
//!   a device that times out at every packet would stall it.
//! - A full queue is not a failure: the device is offered the next packet.
//! - **Wrong bytes switch all devices off for the rest of the migration.** If unchecked packets were sent before, the migration
//!   ends with an error: the guest runs at the source, and no corrupt page stays undetected. With [`Verify::All`] there are
//!   no unchecked packets, and the migration continues.

use std::sync::Arc;

use multifd::Method;
use tracing::{debug, error, warn};

use crate::{
    DecodeError, Health,
    engine::{Compress, CompressError, Device, DeviceError, Unpack},
};

/// Which results of a device are checked: decoded or repeated in software, and compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// None.
    Off,
    /// The first packet of each encoder and decoder and every 64th after it.
    #[default]
    Sample,
    /// Every packet: no wrong packet can be sent, and the device saves hardly any work.
    All,
}

impl Verify {
    /// All choices, with their names and what they mean.
    pub const ALL: [(Self, &str, &str); 3] = [
        (Self::Off, "off", "None"),
        (
            Self::Sample,
            "sample",
            "The first packet of every channel, and one in 64",
        ),
        (Self::All, "all", "All"),
    ];
}

/// Decides for one channel when a device is used and when its results are checked.
pub(crate) struct Guard {
    engine: &'static str,
    method: Method,
    verify: Verify,
    health: Arc<Health>,
    until_check: u32,
}

/// One packet out of this many is checked under [`Verify::Sample`].
const SAMPLE: u32 = 64;

/// A timeout costs time, not only a packet.
const TIMEOUT_WEIGHT: u32 = 8;

impl Guard {
    pub(crate) fn new(
        engine: &'static str,
        method: Method,
        verify: Verify,
        health: Arc<Health>,
    ) -> Self {
        Self {
            engine,
            method,
            verify,
            health,
            until_check: 0,
        }
    }

    /// Whether the device gets the next packet, if the packet is one `is_for_it`. If not, counts a fallback.
    fn asks(&self, is_for_it: bool) -> bool {
        let asks = is_for_it && !self.health.is_off();
        if !asks {
            self.health.add_fallback();
        }
        asks
    }

    /// Whether to check the packet that the device has just processed.
    fn checks(&mut self) -> bool {
        match self.verify {
            Verify::Off => false,
            Verify::All => true,
            Verify::Sample => {
                let due = self.until_check == 0;
                self.until_check = if due { SAMPLE } else { self.until_check } - 1;
                due
            }
        }
    }

    fn failed(&self, failure: &DeviceError) {
        self.health.add_fallback();
        let Self { engine, method, .. } = self;
        debug!("engine {engine} did not do a {method} packet, software does: {failure}");
        let weight = match failure {
            DeviceError::Busy => return,
            DeviceError::TimedOut(_) => TIMEOUT_WEIGHT,
            DeviceError::Failed(_) => 1,
        };
        if self.health.add_failure(weight) {
            warn!(
                "engine {engine} has failed too often in a row, at last because {failure}: the rest of \
                 this migration is done in software"
            );
        }
    }

    /// Logs an error, and returns the number of unchecked packets that were sent before, unless it is 0.
    fn wrong(&self) -> Result<(), u64> {
        self.health.add_fallback();
        let unchecked = self.health.add_wrong();
        let Self { engine, method, .. } = self;
        error!(
            "ENGINE {engine} HAS RETURNED WRONG BYTES for a {method} packet and is off for the rest of \
             this migration; {unchecked} packets of its work had not been checked"
        );
        if unchecked > 0 {
            Err(unchecked)
        } else {
            Ok(())
        }
    }
}

/// Encodes by a device, or in software if the device fails: `fallback` and `verifier` implement the device's method.
pub(crate) struct Accelerated {
    pub(crate) guard: Guard,
    pub(crate) device: Box<dyn Device>,
    pub(crate) fallback: Box<dyn Compress>,
    pub(crate) verifier: Box<dyn Unpack>,
    /// Room for the pages of a packet.
    pub(crate) decoded: Vec<u8>,
}

impl Accelerated {
    /// `None` if software has to encode the packet.
    fn by_device(&mut self, pages: &[u8], out: &mut [u8]) -> Result<Option<usize>, CompressError> {
        let written = self.device.compress(pages, out).and_then(|len| {
            let payload = out.get(..len).unwrap_or_default();
            if self.verifier.has_shape(payload, pages.len()) {
                Ok(payload)
            } else {
                let reason = format!("it returned {len} bytes that are no packet");
                Err(DeviceError::Failed(reason))
            }
        });
        let payload = match written {
            Ok(payload) => payload,
            Err(failure) => {
                self.guard.failed(&failure);
                return Ok(None);
            }
        };
        let checked = self.guard.checks();
        if checked && !self.is_right(payload, pages) {
            return match self.guard.wrong() {
                Ok(()) => Ok(None),
                Err(unchecked) => Err(CompressError::Distrusted { unchecked }),
            };
        }
        self.guard.health.add_accelerated(checked);
        Ok(Some(payload.len()))
    }

    fn is_right(&mut self, payload: &[u8], pages: &[u8]) -> bool {
        let decoded = &mut self.decoded[..pages.len()];
        self.verifier.unpack(payload, decoded).is_ok() && decoded == pages
    }
}

impl Compress for Accelerated {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        if self.guard.asks(true)
            && let Some(len) = self.by_device(pages, out)?
        {
            return Ok(len);
        }
        self.fallback.compress(pages, out)
    }
}

/// Decodes by a device, or in software if the device fails: `fallback` implements the device's method.
pub(crate) struct AcceleratedUnpack {
    pub(crate) guard: Guard,
    pub(crate) device: Box<dyn Device>,
    pub(crate) fallback: Box<dyn Unpack>,
    /// Room for the pages of a packet.
    pub(crate) decoded: Vec<u8>,
}

impl Unpack for AcceleratedUnpack {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        // A peer without a device may send packets that no device can read. That is not a failure of this device.
        if !self.guard.asks(self.has_shape(payload, pages.len())) {
            return self.fallback.unpack(payload, pages);
        }
        if let Err(failure) = self.device.unpack(payload, pages) {
            // The payload may be corrupt: the fallback decides.
            self.guard.failed(&failure);
            return self.fallback.unpack(payload, pages);
        }
        let checked = self.guard.checks();
        if checked {
            let decoded = &mut self.decoded[..pages.len()];
            self.fallback.unpack(payload, decoded)?;
            if decoded != pages {
                pages.copy_from_slice(decoded);
                let (method, engine) = (self.guard.method, self.guard.engine);
                return self
                    .guard
                    .wrong()
                    .map_err(|unchecked| DecodeError::Distrusted {
                        method,
                        engine,
                        unchecked,
                    });
            }
        }
        self.guard.health.add_accelerated(checked);
        Ok(())
    }

    fn has_shape(&self, payload: &[u8], pages_len: usize) -> bool {
        self.fallback.has_shape(payload, pages_len)
    }
}
