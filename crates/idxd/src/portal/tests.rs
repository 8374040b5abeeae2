use std::{
    collections::VecDeque,
    fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use super::*;
use crate::{Capabilities, Kind, Operations, discovery, tree::Tree};

/// A queue without a device: it answers as configured.
#[derive(Debug, Default)]
struct Fake {
    /// Refusals to come first.
    refusals: Mutex<VecDeque<Refusal>>,
    /// Statuses of the next descriptors; afterwards success.
    statuses: Mutex<VecDeque<u8>>,
    opcodes: Mutex<Vec<u8>>,
    dropped: AtomicBool,
    abandoned: AtomicBool,
}

#[derive(Debug)]
struct Handle(Arc<Fake>);

impl Transport for Handle {
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        assert!(!self.0.dropped.load(Ordering::SeqCst));
        for (accepted, descriptor) in descriptors.iter().enumerate() {
            if let Some(refusal) = self.0.refusals.lock().unwrap().pop_front() {
                return Submitted {
                    accepted,
                    refusal: Some(refusal),
                };
            }
            self.0.opcodes.lock().unwrap().push(descriptor.opcode());
            let status = self
                .0
                .statuses
                .lock()
                .unwrap()
                .pop_front()
                .unwrap_or(SUCCESS);
            if descriptor.record != 0 {
                // SAFETY: a record's address, as `Submit::submit` demands.
                let record = unsafe { AtomicU64::from_ptr(descriptor.record as *mut u64) };
                record.store(status.into(), Ordering::Release);
            }
        }
        Submitted {
            accepted: descriptors.len(),
            refusal: None,
        }
    }

    fn abandon(self: Box<Self>) {
        self.0.abandoned.store(true, Ordering::SeqCst);
        std::mem::forget(self);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.dropped.store(true, Ordering::SeqCst);
    }
}

fn limits() -> Limits {
    Limits {
        kind: Kind::Dsa,
        size: 16,
        threshold: 16,
        max_batch: std::num::NonZeroU32::new(32),
        max_transfer: 1 << 21,
        operations: Operations([0x1_003f_03ff, 0, 0, 0]),
        version: 0x100,
        capabilities: Capabilities::FIRST_DSA,
    }
}

fn portal(fake: &Arc<Fake>) -> Portal {
    let (transport, waiting) = (Box::new(Handle(fake.clone())), Waiting::new());
    Portal::new(transport, Access::Written, limits(), waiting, QUEUE).unwrap()
}

fn probe_fake(fake: &Arc<Fake>, timeout: Duration) -> Result<Limits, OpenError> {
    let waiting = Waiting::new();
    probe(&Handle(fake.clone()), limits(), &waiting, QUEUE, timeout)
}

const QUEUE: QueueName = QueueName {
    kind: Some(Kind::Dsa),
    device: 0,
    queue: 0,
};

fn submit(portal: &Portal) -> Submitted {
    // SAFETY: a NOOP without a record, and no device.
    unsafe { portal.submit(&[Descriptor::default()]) }
}

#[test]
fn closing_drains_once_and_ends_everything() {
    let fake = Arc::new(Fake::default());
    let portal = portal(&fake);
    assert_eq!(submit(&portal).accepted, 1);
    portal.close();
    portal.close();
    assert!(matches!(
        submit(&portal),
        Submitted {
            accepted: 0,
            refusal: Some(Refusal::Closed)
        }
    ));
    drop(portal);
    assert_eq!(*fake.opcodes.lock().unwrap(), [opcode::NOOP, opcode::DRAIN]);
    assert!(fake.dropped.load(Ordering::SeqCst) && !fake.abandoned.load(Ordering::SeqCst));
}

#[test]
fn nothing_is_submitted_to_a_portal_that_is_gone() {
    for _ in 0..50 {
        let fake = Arc::new(Fake::default());
        let portal = portal(&fake);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| while !matches!(submit(&portal).refusal, Some(Refusal::Closed)) {});
            }
            scope.spawn(|| portal.close());
            portal.close();
            // Whichever of the two calls it was.
            assert!(fake.dropped.load(Ordering::SeqCst));
        });
    }
}

#[test]
fn a_probe_has_every_outcome() {
    const LONG: Duration = Duration::from_secs(3600);
    let within = |timeout, refusals: Vec<Refusal>, statuses: &[u8]| {
        let fake = Arc::new(Fake::default());
        fake.refusals.lock().unwrap().extend(refusals);
        fake.statuses.lock().unwrap().extend(statuses);
        probe_fake(&fake, timeout)
    };
    let probe = |refusals, statuses| within(LONG, refusals, statuses);
    assert!(probe(vec![], &[1]).is_ok());
    assert!(probe(vec![Refusal::Full, Refusal::Full], &[1]).is_ok());
    assert!(matches!(
        probe(vec![], &[0x10]),
        Err(OpenError::Broken { status: 0x10, .. })
    ));
    assert!(matches!(
        within(Duration::ZERO, vec![], &[0]),
        Err(OpenError::NoAnswer(QUEUE))
    ));
    let full = within(Duration::ZERO, vec![Refusal::Full], &[]);
    assert!(matches!(
        full,
        Err(OpenError::Refused {
            refusal: Refusal::Full,
            ..
        })
    ));
    let invalid = probe(vec![Refusal::Invalid], &[]);
    assert!(matches!(
        invalid,
        Err(OpenError::Refused {
            refusal: Refusal::Invalid,
            ..
        })
    ));
}

#[test]
fn a_queue_that_does_no_batch_goes_without() {
    let most_batch = |statuses: &[u8]| {
        let fake = Arc::new(Fake::default());
        fake.statuses.lock().unwrap().extend(statuses);
        let limits = probe_fake(&fake, Duration::from_secs(3600)).unwrap();
        assert_eq!(
            limits.max_batch.is_some(),
            limits.operations.has(opcode::BATCH)
        );
        limits.max_batch
    };
    assert_eq!(most_batch(&[1, 1]), limits().max_batch);
    // Its administrator has left that opcode out, which the kernel's attributes hide.
    assert_eq!(most_batch(&[1, 0x10]), None);
}

#[test]
fn a_forked_child_touches_nothing() {
    let fake = Arc::new(Fake::default());
    let portal = portal(&fake);
    // SAFETY: the child makes no more than loads and system calls: neither locks nor memory of the allocator.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_refused = matches!(submit(&portal).refusal, Some(Refusal::Forked));
        portal.close();
        let is_untouched = !fake.dropped.load(Ordering::SeqCst);
        // SAFETY: ends the child, without anything that exit would run.
        unsafe { libc::_exit(if is_refused && is_untouched { 0 } else { 1 }) };
    }
    assert!(child > 0);
    let mut status = -1;
    // SAFETY: `status` is a place for the result.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(submit(&portal).accepted, 1);
}

#[test]
fn dropped_in_a_child_a_portal_is_abandoned() {
    let fake = Arc::new(Fake::default());
    let portal = portal(&fake);
    // As the kernel does in a child.
    portal.mark.word().store(0, Ordering::Relaxed);
    assert!(matches!(submit(&portal).refusal, Some(Refusal::Forked)));
    drop(portal);
    assert!(fake.abandoned.load(Ordering::SeqCst) && !fake.dropped.load(Ordering::SeqCst));
    assert!(fake.opcodes.lock().unwrap().is_empty());
}

#[test]
fn write_takes_no_batches_of_old_devices() {
    let of = |version, hidden| {
        let operations = limits().operations;
        let operations = if hidden {
            operations.without(opcode::BATCH)
        } else {
            operations
        };
        let written = Limits {
            version,
            operations,
            ..limits()
        }
        .written();
        assert_eq!(
            written.max_batch.is_some(),
            written.operations.has(opcode::BATCH)
        );
        written.max_batch.is_some()
    };
    assert_eq!(
        [of(0x100, false), of(0x200, false), of(0x200, true)],
        [false, true, false]
    );
}

fn open_first(tree: &Tree, enqcmd: bool) -> OpenError {
    open_with(&discovery::scan(&tree.root())[0].queues[0], enqcmd).unwrap_err()
}

#[test]
fn a_queue_that_does_not_answer_is_not_opened() {
    // /dev/null takes all descriptors.
    let tree = Tree::of(&[Kind::Dsa]);
    let error = open_first(&tree, false);
    assert!(matches!(error, OpenError::NoAnswer(QUEUE)), "{error}");
}

#[test]
fn a_queue_that_refuses_is_not_opened() {
    let tree = Tree::of(&[Kind::Dsa]);
    tree.link("dsa/wq0.0", "/dev/full");
    tree.set("dsa0/wq0.0/cdev_minor", "7");
    let error = open_first(&tree, false);
    assert!(
        matches!(
            error,
            OpenError::Refused {
                refusal: Refusal::System(_),
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_portal_that_cannot_be_mapped_is_an_error_unless_the_kernel_forbids_it() {
    // /dev/null has no mmap: ENODEV. No instruction is executed.
    let error = open_first(&Tree::of(&[Kind::Dsa]), true);
    assert!(matches!(error, OpenError::System { .. }), "{error}");
}

#[test]
fn an_unusable_queue_is_not_touched() {
    let tree = Tree::of(&[Kind::Dsa]);
    tree.set("dsa0/wq0.0/state", "disabled");
    let error = open_first(&tree, false);
    assert!(
        matches!(
            error,
            OpenError::Unusable {
                problem: Problem::QueueState(_),
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_queue_that_changes_after_the_scan_is_not_opened() {
    let tree = Tree::of(&[Kind::Dsa]);
    let devices = discovery::scan(&tree.root());
    let queue = &devices[0].queues[0];
    let node = tree.file("dev/dsa/wq0.0");
    tree.link("dsa/wq0.0", "/dev/zero");
    let error = open_with(queue, false).unwrap_err();
    assert!(
        matches!(
            error,
            OpenError::Unusable {
                problem: Problem::OtherNode(_),
                ..
            }
        ),
        "{error}"
    );
    let problem = || match open_node(queue, &node) {
        Err(OpenError::Unusable { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    assert_eq!(problem(), Problem::OtherNode(node.clone()));
    fs::remove_file(&node).unwrap();
    assert_eq!(problem(), Problem::Gone);
}
