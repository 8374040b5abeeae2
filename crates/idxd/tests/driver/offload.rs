//! What the offload makes of an IAA's answers that the model does not give.

use std::{
    collections::VecDeque,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use idxd::{offload::*, *};

const PAGE: usize = 4096;

/// An IAA that inflates everything to pages of sevens, at once.
#[derive(Debug)]
struct Iaa {
    limits: Limits,
    /// Status and error of the next operations; afterwards success.
    answers: Mutex<VecDeque<(u8, u8)>>,
    flags: Mutex<Vec<Flags>>,
}

impl Iaa {
    fn new(capabilities: Capabilities, answers: &[(u8, u8)]) -> Arc<Self> {
        let limits = Limits {
            kind: Kind::Iaa,
            size: 16,
            threshold: 16,
            max_batch: None,
            max_transfer: 1 << 21,
            operations: Operations([u64::MAX; 4]),
            version: 0x100,
            capabilities,
        };
        Arc::new(Self {
            limits,
            answers: Mutex::new(answers.iter().copied().collect()),
            flags: Mutex::default(),
        })
    }

    fn run(&self, descriptor: &Descriptor) {
        self.flags.lock().unwrap().push(descriptor.flags());
        let (status, error) = self.answers.lock().unwrap().pop_front().unwrap_or((1, 0));
        let size = descriptor.low(1);
        let output: *mut u8 = pointer(descriptor.address_2);
        let record: *mut u64 = pointer(descriptor.record);
        // SAFETY: the slot's buffer and record, as `Submit::submit` demands.
        let words = unsafe {
            output.write_bytes(7, size as usize);
            [
                AtomicU64::from_ptr(record),
                AtomicU64::from_ptr(record.add(3)),
            ]
        };
        words[1].store(size.into(), Ordering::Relaxed);
        words[0].store(u64::from(status) | u64::from(error) << 8, Ordering::Release);
    }
}

impl Submit for Iaa {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        descriptors
            .iter()
            .for_each(|descriptor| self.run(descriptor));
        Submitted {
            accepted: descriptors.len(),
            refusal: None,
        }
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn pause(&self, _record: &Record, _deadline: Duration) {}

    fn close(&self) {}
}

fn pointer<T>(address: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

/// Decompresses one page, and returns what has been counted.
fn decompress(iaa: &Arc<Iaa>) -> OffloadCounters {
    let shape = Shape {
        members: 1,
        buffer_bytes: PAGE,
    };
    let queue = Queue::new(iaa.clone(), shape, Tuning::default()).unwrap();
    let devices = Arc::new(Devices::new([queue]));
    let mut page = vec![0; PAGE];
    Decompressor::new(devices.clone(), PAGE)
        .decompress(&|_| &[1, 2, 3], &mut page, &mut |_, page| {
            page.fill(7);
            Ok::<_, ()>(())
        })
        .unwrap();
    assert!(page.iter().all(|byte| *byte == 7));
    devices.work()
}

#[test]
fn a_page_that_a_device_fails_is_done_by_the_processor() {
    // An error, an end by an administrator, and a fault.
    for answer in [(0x0a, 0x0d), (0x0a, 0x25), (0x03, 0)] {
        let iaa = Iaa::new(Capabilities::FIRST_IAA, &[answer]);
        let work = decompress(&iaa);
        assert_eq!((work.by_device, work.failed), (0, 1), "{answer:x?}");
        assert_eq!(iaa.flags.lock().unwrap().len(), 1, "{answer:x?}");
    }
}

#[test]
fn the_cache_is_only_asked_for_where_the_device_can_write_to_it() {
    for (capabilities, is_asked) in [
        (Capabilities::FIRST_IAA, true),
        (Capabilities::default(), false),
    ] {
        let iaa = Iaa::new(capabilities, &[]);
        assert_eq!(decompress(&iaa).by_device, 1);
        assert_eq!(iaa.flags.lock().unwrap()[0].has(Flags::CACHE), is_asked);
    }
}
