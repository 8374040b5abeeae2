//! Fault injection, at random or into chosen descriptors.

use std::time::Duration;

use idxd::opcode;

/// Random faults of a [`Model`](super::Model); none by default. For faults of chosen descriptors see
/// [`Model::inject`](super::Model::inject), for pages [`Model::pages`](super::Model::pages), for whole queues and devices the
/// other methods of the model.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Faults of descriptors, each tried in turn when an engine fetches the descriptor.
    pub chances: Vec<Chance>,
    /// Upper limit of the entries that another client occupies in each shared queue; the number changes with each submission.
    pub competitor: u32,
    /// Probability, per mille, that a shared queue reports that it is full although it is not.
    pub full_per_mille: u16,
}

impl Faults {
    /// All faults that a driver has to handle, each with a low probability, but no wrong results
    /// ([`InjectedFault::Corrupt`]) and no stuck engines.
    pub fn everything() -> Self {
        let fault = |write, refused| InjectedFault::PageFault {
            at: At::Anywhere,
            write,
            refused,
        };
        let late = Duration::from_micros(200);
        let chances = [
            (20, On::any(), fault(false, false)),
            (10, On::any(), fault(true, false)),
            (5, On::any(), fault(false, true)),
            (
                10,
                On::any(),
                InjectedFault::Slow(Duration::from_micros(30)),
            ),
            (5, On::any(), InjectedFault::Late(late)),
            (5, On::any(), InjectedFault::RecordLate(late)),
            (2, On::any(), InjectedFault::RecordLost),
            (1, On::any(), InjectedFault::Stuck),
            (5, On::any(), InjectedFault::Status(0x20)),
            (5, On::any(), InjectedFault::Status(0x22)),
            (20, On::batch(), InjectedFault::ListFault(1)),
        ];
        Self {
            chances: chances
                .map(|(per_mille, on, fault)| Chance {
                    per_mille,
                    on,
                    fault,
                })
                .into(),
            competitor: 64,
            full_per_mille: 50,
        }
    }
}

/// A fault with a probability.
#[derive(Clone, Debug)]
pub struct Chance {
    /// Probability per mille.
    pub per_mille: u16,
    /// Descriptors that it applies to.
    pub on: On,
    /// The fault.
    pub fault: InjectedFault,
}

/// A selection of descriptors. `None` matches all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct On {
    /// Descriptors of this device.
    pub device: Option<usize>,
    /// Descriptors with this operation code.
    pub opcode: Option<u8>,
    /// Members of batches with this index.
    pub member: Option<u32>,
}

impl On {
    /// All descriptors.
    pub const fn any() -> Self {
        Self {
            device: None,
            opcode: None,
            member: None,
        }
    }

    /// Descriptors with this operation code.
    pub const fn opcode(opcode: u8) -> Self {
        Self {
            opcode: Some(opcode),
            ..Self::any()
        }
    }

    /// Members of batches with this index.
    pub const fn member(index: u32) -> Self {
        Self {
            member: Some(index),
            ..Self::any()
        }
    }

    /// Batches themselves.
    pub const fn batch() -> Self {
        Self::opcode(opcode::BATCH)
    }

    pub(super) fn fits(&self, device: usize, opcode: u8, member: Option<u32>) -> bool {
        self.device.is_none_or(|wanted| wanted == device)
            && self.opcode.is_none_or(|wanted| wanted == opcode)
            && (self.member.is_none() || self.member == member)
    }
}

/// A fault of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// A page fault: status 0x03, of a write 0x83. The bytes before it are done.
    PageFault {
        /// Offset in source or destination.
        at: At,
        /// In the destination rather than in the source, if there is a destination.
        write: bool,
        /// The page request was refused: status 0x04 or 0x84.
        refused: bool,
    },
    /// The operation takes longer, and occupies its engine meanwhile: a straggler, a slow device.
    Slow(Duration),
    /// Work and record come later, while the engine does other work: late writes into buffers.
    Late(Duration),
    /// The operation never completes. Its engine does other work.
    Stuck,
    /// The operation never completes, and occupies its engine for ever.
    StuckEngine,
    /// The operation is not executed and has this status: 0x20 and 0x22 are hardware errors, 0x24 is IAA's watchdog.
    Status(u8),
    /// The work is done, but the record faults and comes later (the kernel writes it from the event log).
    RecordLate(Duration),
    /// The work is done, but the record faults and never comes. A batch reports status 0x05, result 1.
    RecordLost,
    /// The work is done and reported as success, but one byte of the output is wrong.
    Corrupt,
    /// For batches: the list faults at this member (status 0x06).
    ListFault(u32),
}

/// An offset in a descriptor's source or destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// This byte.
    Byte(u32),
    /// A random byte.
    Anywhere,
}

/// An injected fault that is still to happen.
#[derive(Clone, Debug)]
pub(super) struct Scripted {
    pub(super) on: On,
    pub(super) skip: u32,
    pub(super) times: u32,
    pub(super) fault: InjectedFault,
}
