//! In place of DSAs where the feature `dsa` is not built in: there are none, so none of these types has a value.

use std::sync::Arc;

use serde::Serialize;
use thiserror::Error;
use vamoose_codec::Verify;
use vm_memory::VolatileSlice;

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
enum Never {}

/// Work queues of DSAs: none.
#[derive(Debug)]
pub struct Devices(Never);

/// What devices have done: nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OffloadCounters(Never);

/// A device's error.
#[derive(Debug, Error)]
pub enum WrongVerdict {}

#[derive(Debug)]
pub(crate) struct DsaScan(Never);

impl Devices {
    pub(crate) fn work(&self) -> OffloadCounters {
        match self.0 {}
    }
}

impl OffloadCounters {
    pub(crate) fn since(self, _before: Self) -> Self {
        self
    }
}

impl DsaScan {
    pub(crate) fn new(devices: Arc<Devices>, _: u32, _: usize, _: Verify) -> Self {
        match devices.0 {}
    }

    pub(crate) fn start(&mut self, _: &[VolatileSlice<'_>]) {
        match self.0 {}
    }

    pub(crate) fn finish(
        &mut self,
        _: &[VolatileSlice<'_>],
        _: &mut [bool],
    ) -> Result<(), WrongVerdict> {
        match self.0 {}
    }
}
