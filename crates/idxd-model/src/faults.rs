//! Fault injection: at random, or exactly where a test wants it.

use std::time::Duration;

use idxd::opcode;

/// What goes wrong by itself in a [`Model`](super::Model); by default nothing does. For faults at an exact place
/// see [`Model::inject`](super::Model::inject), for whole queues and devices the other methods of the model, for
/// pages [`Model::pages`](super::Model::pages).
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// What happens to descriptors at random, each chance tried in turn, when an engine takes the descriptor.
    pub chances: Vec<Chance>,
    /// Another client takes up to so many entries of every shared queue: how many it is changes with each try.
    pub competitor: u32,
    /// How often, per mille, a shared queue reports that it is full though it is not.
    pub full_per_mille: u16,
}

impl Faults {
    /// Everything that a driver has to handle unnoticed, each now and then. Nothing that makes a
    /// result wrong ([`InjectedFault::Corrupt`]), and nothing that takes an engine away for good.
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
            (20, On::batch(), InjectedFault::BatchFirst),
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

/// Something that happens with a probability.
#[derive(Clone, Debug)]
pub struct Chance {
    /// How often, out of 1000.
    pub per_mille: u16,
    /// To which descriptors.
    pub on: On,
    /// What.
    pub fault: InjectedFault,
}

/// Which descriptors are meant. Everything that is `None` fits all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct On {
    /// Those of this device.
    pub device: Option<usize>,
    /// Those with this operation code.
    pub opcode: Option<u8>,
    /// Members of batches with this place, counted from 0.
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

    /// Those with this operation code.
    pub const fn opcode(opcode: u8) -> Self {
        Self {
            opcode: Some(opcode),
            ..Self::any()
        }
    }

    /// The member of a batch at this place, counted from 0.
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

/// What can happen to a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// A page fault that is not waited for: status 0x03, of a write 0x83. What comes before it has been done.
    PageFault {
        /// Where: offset in source or destination, whichever is accessed.
        at: At,
        /// On the destination rather than on the source, where there is one. (Without a source it always is.)
        write: bool,
        /// The page request was refused: status 0x04 or 0x84.
        refused: bool,
    },
    /// Done, but so much later; the engine is kept meanwhile. A straggler, a slow device, a page request.
    Slow(Duration),
    /// Work and record come so much later, while the engine does others: the write into buffers that
    /// the driver gave up too early.
    Late(Duration),
    /// Never completes. The engine does others.
    Stuck,
    /// Never completes, and its engine does nothing else any more.
    StuckEngine,
    /// Nothing is done, and this is the status: 0x20 and 0x22 are errors of the hardware, 0x24 is IAA's watchdog.
    Status(u8),
    /// The work is done; the record faults and comes so much later (the kernel writes it from the event log).
    RecordLate(Duration),
    /// The work is done; the record faults and never comes. A batch reports it: status 0x05, result 1.
    RecordLost,
    /// The work is done and reported as well done, but one byte that was written is wrong.
    Corrupt,
    /// For batches: the list faults at this member (status 0x06).
    ListFault(u32),
    /// For batches: the record of the batch is there before that of the member that is done last.
    BatchFirst,
}

/// A place in what a descriptor works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// This byte.
    Byte(u32),
    /// Anywhere, as the random numbers want it.
    Anywhere,
}

/// A fault that waits for its descriptor.
#[derive(Clone, Debug)]
pub(super) struct Scripted {
    pub(super) on: On,
    pub(super) skip: u32,
    pub(super) times: u32,
    pub(super) fault: InjectedFault,
}
