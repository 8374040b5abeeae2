//! The interface between the driver and a device: implemented by the [portals](crate::portal) of real work queues and by
//! the model. Everything above it is the same for both.

use std::{fmt, io, time::Duration};

use thiserror::Error;

use crate::{Descriptor, Limits, Record};

/// One work queue, as one process has it.
pub trait Submit: Send + Sync + fmt::Debug {
    /// What the queue takes.
    fn limits(&self) -> &Limits;

    /// Whether the device is a model: then its speed does not apply to hardware.
    fn is_modelled(&self) -> bool {
        false
    }

    /// Gives the device `descriptors`, in their order, until one is refused. Never waits for the device. The
    /// descriptors themselves have been read when it returns; a batch's list has not.
    ///
    /// # Safety
    /// Each descriptor's record, batch list and destination must stay writable memory of this process that no one
    /// has a reference to (records are [`Record`]s, which may be read), until the record is complete or
    /// [`close`](Submit::close) has returned. The sources may change or go meanwhile: then the result is
    /// worthless, or a fault.
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted;

    /// Time that passes while the device works; from any beginning.
    fn now(&self) -> Duration;

    /// Waits a little: until `record` is complete, or something else happens, but at most until `deadline` (by
    /// [`now`](Submit::now)). It may return for no reason at all.
    fn pause(&self, record: &Record, deadline: Duration);

    /// Gives the queue back, and waits until nothing that was submitted can touch this process's memory any more.
    /// From then on everything is [`Refusal::Closed`].
    fn close(&self);
}

/// What became of a submission.
#[derive(Debug)]
pub struct Submitted {
    /// How many descriptors the device has, counted from the first.
    pub accepted: usize,
    /// Why not all of them.
    pub refusal: Option<Refusal>,
}

/// Why a work queue did not take a descriptor.
#[derive(Debug, Error)]
pub enum Refusal {
    /// It is full, or disabled: a shared queue does not report which.
    #[error("the work queue did not take the descriptor: it is full or disabled")]
    Full,
    /// The kernel does not let it through: a batch where there may be none, a misaligned record.
    #[error("the kernel does not take such a descriptor")]
    Invalid,
    /// A process opened the queue that this one was forked from.
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
