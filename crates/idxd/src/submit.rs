//! The interface between the driver and a device: implemented by the [portals](crate::portal) of real work queues and by
//! the model. Everything above it is the same for both.

use std::{fmt, io, time::Duration};

use thiserror::Error;

use crate::{Descriptor, Limits, Record};

/// One work queue, as opened by one process.
pub trait Submit: Send + Sync + fmt::Debug {
    /// Limits of the queue.
    fn limits(&self) -> &Limits;

    /// Whether the device is a model, whose speed does not apply to hardware.
    fn is_modelled(&self) -> bool {
        false
    }

    /// Submits `descriptors` in their order until one is refused. Never waits for the device. When it returns, the
    /// descriptors have been read, but a batch's list has not.
    ///
    /// # Safety
    /// Each descriptor's record, batch list and destination must stay writable memory of this process that no one
    /// has a reference to (records are [`Record`]s, which may be read), until the record is complete or
    /// [`close`](Submit::close) has returned. The sources may change or be unmapped meanwhile: then the
    /// result is undefined, or a fault.
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted;

    /// Monotonic time that passes while the device works.
    fn now(&self) -> Duration;

    /// Waits briefly for `record`, at most until `deadline` (by [`now`](Submit::now)). May return at any time without a
    /// reason.
    fn pause(&self, record: &Record, deadline: Duration);

    /// Closes the queue, and waits until no submitted descriptor can access this process's memory any more. Every later
    /// submission is [`Refusal::Closed`].
    fn close(&self);
}

/// Result of a submission.
#[derive(Debug)]
pub struct Submitted {
    /// Number of descriptors that the device accepted, from the first one on.
    pub accepted: usize,
    /// Why it did not accept the next one.
    pub refusal: Option<Refusal>,
}

/// Why a work queue did not accept a descriptor.
#[derive(Debug, Error)]
pub enum Refusal {
    /// It is full, or disabled: a shared queue does not report which.
    #[error("the work queue did not accept the descriptor: it is full or disabled")]
    Full,
    /// The kernel rejects it, for example a batch through write(2), or a misaligned record.
    #[error("the kernel does not accept such a descriptor")]
    Invalid,
    /// The parent of this forked process opened the queue.
    #[error(
        "the work queue was opened by the process that this one was forked from: open it again"
    )]
    Forked,
    /// The queue has been closed.
    #[error("the work queue is closed")]
    Closed,
    /// Any other error of the system.
    #[error("the work queue cannot be reached")]
    System(#[source] io::Error),
}
