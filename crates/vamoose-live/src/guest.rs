//! Traits that a VMM implements: pausing and resuming its guest, saving and loading the state of its devices.

use crate::{Ram, Status};

/// Any error of a VMM.
pub type GuestError = Box<dyn std::error::Error + Send + Sync>;

/// The guest at the source.
///
/// All methods are called by the thread that runs the migration. An error of any of them ends the migration, and
/// the guest resumes at the source.
pub trait SourceGuest {
    /// Whether the guest runs when the migration begins. One that is paused is never resumed, at either end.
    fn is_running(&self) -> bool {
        true
    }

    /// Describes the guest, in any format: a destination without memory [builds it](DestinationGuest::prepare) from this, before
    /// anything else is sent. At most 200 KiB.
    fn describe(&self) -> Vec<u8> {
        Vec::new()
    }

    /// A part of the state of devices that goes ahead of [`save`](Self::save), such as the pre-copy data of VFIO. Called until there
    /// is none for now: after every round while the guest runs, and once it is paused. Parts arrive in this order.
    ///
    /// # Errors
    /// When the state cannot be saved.
    fn save_part(&mut self) -> Result<Option<Vec<u8>>, GuestError> {
        Ok(None)
    }

    /// Stops all vCPUs and devices. After that nothing writes guest memory.
    ///
    /// # Errors
    /// When the guest cannot be stopped. [`SourceGuest::resume`] is called in that case too.
    fn pause(&mut self) -> Result<(), GuestError>;

    /// Resumes the paused guest, after a migration that failed.
    ///
    /// # Errors
    /// When that is impossible: [`SourceError::NotResumed`](crate::SourceError::NotResumed) then.
    fn resume(&mut self) -> Result<(), GuestError>;

    /// The state of vCPUs and devices of the paused guest, in any format that the destination's VMM
    /// understands. It may write guest memory: dirty pages are collected afterwards.
    ///
    /// # Errors
    /// When the state cannot be saved.
    fn save(&mut self) -> Result<Vec<u8>, GuestError>;

    /// Throttles the vCPUs: they are not to run for `percent` (0 to 99) of the time. Called in steps for a guest that writes
    /// faster than the link moves its memory, and again with 0 if the migration fails.
    fn throttle(&mut self, percent: u8) {
        let _ = percent;
    }

    /// Whether to switch over now; asked after every round.
    fn switchover(&mut self, status: &Status) -> Switchover {
        let _ = status;
        Switchover::Auto
    }
}

/// The guest at the destination.
pub trait DestinationGuest {
    /// Builds the guest's memory as the source [describes](SourceGuest::describe) the guest. Called by a
    /// [`Destination`](crate::Destination) that was given no memory.
    ///
    /// # Errors
    /// When this host cannot have the guest: it is refused then.
    fn prepare(&mut self, description: &[u8]) -> Result<Ram, GuestError> {
        let _ = description;
        Err("this VMM builds no memory from a description".into())
    }

    /// Takes the next part of the state of devices that the source [sends ahead](SourceGuest::save_part). Guest memory is not
    /// complete.
    ///
    /// # Errors
    /// When the state is not this VMM's. The guest stays at the source then.
    fn load_part(&mut self, part: &[u8]) -> Result<(), GuestError> {
        let _ = part;
        Err("this VMM takes no device state in parts".into())
    }

    /// Takes the state of vCPUs and devices. All of guest memory is there, and no other thread writes it; in a post-copy, who
    /// touches a missing page waits for it. The guest must not run yet.
    ///
    /// # Errors
    /// When the state is not this VMM's. The guest resumes at the source then.
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError>;

    /// Resumes the guest: from here on it is at this host.
    ///
    /// # Errors
    /// When it cannot run, and has not run a single instruction: it resumes at the source then.
    fn resume(&mut self) -> Result<(), GuestError>;
}

/// When a source switches over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switchover {
    /// When the rest fits into the downtime limit.
    #[default]
    Auto,
    /// Now, however long it takes. With [`SourceConfig::post_copy`](crate::SourceConfig::post_copy) the guest does not wait for
    /// the rest of its memory.
    Force,
    /// Not yet: another round.
    Forbid,
}
