//! An open work queue of a model, as [`Submit`].

use std::{sync::Arc, time::Duration};

use super::{PortalKind, driver::Driver, machine::gone, nanoseconds};
use idxd::{Descriptor, Limits, Record, Submit, Submitted};

#[derive(Debug)]
pub(super) struct Handle {
    pub(super) driver: Arc<Driver>,
    /// `None` if the queue could not be opened.
    pub(super) client: Option<usize>,
    pub(super) portal: PortalKind,
    pub(super) limits: Limits,
}

impl Submit for Handle {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn is_modelled(&self) -> bool {
        true
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        let mut accepted = 0;
        let refusal = match self.client {
            None => Some(gone()),
            Some(client) => self.driver.submit(|machine| {
                let descriptor = descriptors.get(accepted)?;
                let refusal = machine.admit(client, self.portal, descriptor).err();
                accepted += usize::from(refusal.is_none());
                Some(refusal)
            }),
        };
        Submitted { accepted, refusal }
    }

    fn now(&self) -> Duration {
        self.driver.now()
    }

    fn pause(&self, record: &Record, deadline: Duration) {
        self.driver.pause(record, nanoseconds(deadline));
    }

    fn close(&self) {
        if let Some(client) = self.client {
            self.driver.close(client);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}
