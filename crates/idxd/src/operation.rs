//! A descriptor that knows which flags its operation takes.
//!
//! A device refuses a flag that an operation does not define, even a harmless one: cache control on a comparison is
//! an error. So the builders of [`dsa`](crate::dsa) and [`iaa`](crate::iaa) return an [`Operation`] of one of the
//! classes below, and a method for a flag only exists where the flag does:
//!
//! ```text
//!   class     fence   block on fault   cache control   strict order, readback
//!   Bare        -           -                -                   -               batch, drain; IAA: NOOP
//!   Nothing     x           -                -                   -               DSA's NOOP
//!   Reads       x           x                -                   -               DSA: compare, CRC
//!   Writes      x           x                x                   x               DSA: copy, fill, deltas
//!   Analyses    -           x                -                   -               IAA: CRC-64
//!   Produces    -           x                x                   -               IAA: (de)compress
//! ```

use std::marker::PhantomData;

use crate::{Capabilities, Descriptor, Flags};

/// A descriptor and, as a type, the flags that can still be set. It asks for a record in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Operation<Class> {
    descriptor: Descriptor,
    class: PhantomData<Class>,
}

impl<Class> Operation<Class> {
    /// `descriptor` with its opcode, the address of its record, and the flags that every operation gets.
    pub(crate) const fn new(opcode: u8, record: u64, descriptor: Descriptor) -> Self {
        let flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
        Self {
            descriptor: Descriptor {
                control: Descriptor::control_of(opcode, flags),
                record,
                ..descriptor
            },
            class: PhantomData,
        }
    }

    /// The descriptor, to be submitted or put into a batch.
    #[must_use]
    pub const fn descriptor(self) -> Descriptor {
        self.descriptor
    }

    pub(crate) const fn with(mut self, flags: Flags) -> Self {
        self.descriptor.control |= flags.0;
        self
    }
}

impl<Class> From<Operation<Class>> for Descriptor {
    fn from(operation: Operation<Class>) -> Self {
        operation.descriptor
    }
}

impl<Class: Fences> Operation<Class> {
    /// Begins only when all earlier descriptors of its batch are complete; if one of them failed, neither this one
    /// nor any after it is done. Only for members of a batch: elsewhere the flag is reserved.
    pub const fn with_fence(self) -> Self {
        self.with(Flags::FENCE)
    }
}

impl<Class: Faults> Operation<Class> {
    /// Waits for page faults, if `waits`, instead of ending with one. A queue that does not have
    /// [`block_on_fault`](crate::Limits::block_on_fault) refuses this (DSA 3.0, 5.5), so pass on what the queue has.
    pub const fn blocking_on_fault(self, waits: bool) -> Self {
        if waits {
            self.with(Flags::BLOCK_ON_FAULT)
        } else {
            self
        }
    }
}

impl<Class: Allocates> Operation<Class> {
    /// Writes to the processor's cache rather than to memory: right when the result is read soon. It is a hint, and
    /// left out where the device lacks it: there the flag is an error (DSA 3.0, 8.1.3.1; IAA 2.1, 6.1.3).
    pub const fn with_cache_control(self, device: Capabilities) -> Self {
        if device.cache_control() {
            self.with(Flags::CACHE)
        } else {
            self
        }
    }
}

impl Operation<Writes> {
    /// What it writes becomes visible in order. An error where the device [cannot](Capabilities::strict_ordering).
    pub const fn with_strict_ordering(self) -> Self {
        self.with(Flags::STRICT_ORDERING)
    }

    /// Reads the destination back before it writes the record. An error where the device
    /// [cannot](Capabilities::destination_readback).
    pub const fn with_destination_readback(self) -> Self {
        self.with(Flags::DESTINATION_READBACK)
    }
}

/// An operation without flags of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bare {}

/// DSA: an operation that touches no memory but its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nothing {}

/// DSA: an operation that only reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {}

/// DSA: an operation with a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {}

/// IAA: an operation that only reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Analyses {}

/// IAA: an operation with a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Produces {}

/// Classes that can be fenced.
pub trait Fences: sealed::Sealed {}
/// Classes that can wait for page faults.
pub trait Faults: sealed::Sealed {}
/// Classes that can write to the cache.
pub trait Allocates: sealed::Sealed {}

impl Fences for Nothing {}
impl Fences for Reads {}
impl Fences for Writes {}
impl Faults for Reads {}
impl Faults for Writes {}
impl Faults for Analyses {}
impl Faults for Produces {}
impl Allocates for Writes {}
impl Allocates for Produces {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Nothing {}
    impl Sealed for super::Reads {}
    impl Sealed for super::Writes {}
    impl Sealed for super::Analyses {}
    impl Sealed for super::Produces {}
}
