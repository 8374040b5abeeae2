//! An open work queue of a model, as [`Submit`].

use std::{fmt, io, sync::Arc, time::Duration};

use super::{PortalKind, driver::Driver, gone, machine::Denied, nanoseconds};
use idxd::{
    Capabilities, Descriptor, Kind, Limits, Mode, Operations, Record, Refusal, Submit, Submitted,
};

pub(super) struct Handle {
    driver: Arc<Driver>,
    client: usize,
    portal: PortalKind,
    limits: Limits,
}

impl Handle {
    pub(super) fn new(
        driver: Arc<Driver>,
        client: usize,
        portal: PortalKind,
        limits: Limits,
    ) -> Self {
        Self {
            driver,
            client,
            portal,
            limits,
        }
    }
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
        let denied = self.driver.submit(|machine| {
            let denied = machine
                .admit(self.client, self.portal, descriptors.get(accepted)?)
                .err();
            accepted += usize::from(denied.is_none());
            Some(denied)
        });
        let refusal = denied.map(|denied| match denied {
            Denied::Full => Refusal::Full,
            Denied::Invalid => Refusal::Invalid,
            Denied::Forked => Refusal::Forked,
            Denied::Closed => Refusal::Closed,
            Denied::Gone => Refusal::System(gone()),
        });
        Submitted { accepted, refusal }
    }

    fn now(&self) -> Duration {
        self.driver.now()
    }

    fn pause(&self, record: &Record, deadline: Duration) {
        self.driver.pause(record, nanoseconds(deadline));
    }

    fn close(&self) {
        self.driver.close(self.client);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("client", &self.client)
            .field("portal", &self.portal)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// A work queue that could not be opened.
#[derive(Debug)]
pub(super) struct Refusing {
    errno: i32,
    limits: Limits,
}

impl Refusing {
    pub(super) fn new(errno: i32) -> Self {
        let limits = Limits {
            kind: Kind::Dsa,
            mode: Mode::Shared,
            size: 0,
            threshold: 0,
            max_batch: None,
            max_transfer: 0,
            block_on_fault: false,
            operations: Operations::default(),
            version: 0,
            capabilities: Capabilities::default(),
            numa_node: None,
        };
        Self { errno, limits }
    }
}

impl Submit for Refusing {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn is_modelled(&self) -> bool {
        true
    }

    unsafe fn submit(&self, _: &[Descriptor]) -> Submitted {
        let error = io::Error::from_raw_os_error(self.errno);
        Submitted {
            accepted: 0,
            refusal: Some(Refusal::System(error)),
        }
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn pause(&self, _: &Record, _: Duration) {}

    fn close(&self) {}
}
