//! A device whose records are any bytes at all: its results may be wrong, but nothing breaks.

use std::{
    num::NonZeroU32,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use proptest::{collection::vec, prelude::*};

use super::{compression::inflate, *};
use idxd::{Capabilities, Descriptor, Limits, Operations, Submitted, opcode};

#[derive(Debug)]
struct Noise {
    limits: Limits,
    /// Records, used in turn.
    records: Vec<[u64; 8]>,
    turn: Mutex<usize>,
    now: AtomicU64,
}

impl Noise {
    fn devices(kind: Kind, shape: Shape, records: Vec<[u64; 8]>) -> Arc<Devices> {
        let limits = Limits {
            kind,
            size: 32,
            threshold: 32,
            max_batch: NonZeroU32::new(16).filter(|_| kind == Kind::Dsa),
            max_transfer: 1 << 21,
            operations: Operations([u64::MAX; 4]),
            version: 0x100,
            capabilities: Capabilities::FIRST_DSA,
        };
        let noise = Arc::new(Self {
            limits,
            records,
            turn: Mutex::default(),
            now: AtomicU64::default(),
        });
        let queue = Queue::new(noise, shape, Tuning::default()).unwrap();
        Arc::new(Devices::new([queue]))
    }

    /// Writes the next record, status last.
    fn answer(&self, record: u64) {
        let mut turn = self.turn.lock().unwrap();
        let words = self.records[*turn % self.records.len()];
        *turn += 1;
        let place: *mut u64 =
            std::ptr::with_exposed_provenance_mut(usize::try_from(record).unwrap());
        for (index, word) in words.iter().enumerate().rev() {
            // SAFETY: a record of the arena, which is mapped until the queue is closed, and consists of atomics.
            let place = unsafe { AtomicU64::from_ptr(place.add(index)) };
            place.store(*word, Ordering::Release);
        }
    }
}

impl Submit for Noise {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        for descriptor in descriptors {
            if descriptor.opcode() == opcode::BATCH {
                let list: *const Descriptor = std::ptr::with_exposed_provenance(
                    usize::try_from(descriptor.address_1).unwrap(),
                );
                for index in 0..descriptor.size as usize {
                    // SAFETY: a list of so many descriptors.
                    self.answer(unsafe { (*list.add(index)).record });
                }
            }
            self.answer(descriptor.record);
        }
        Submitted {
            accepted: descriptors.len(),
            refusal: None,
        }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.now.load(Ordering::Relaxed))
    }

    fn pause(&self, _: &Record, deadline: Duration) {
        let deadline = u64::try_from(deadline.as_nanos()).unwrap();
        self.now.fetch_max(deadline, Ordering::Relaxed);
    }

    fn close(&self) {}
}

/// Any record; often success, or nothing yet.
fn record() -> impl Strategy<Value = [u64; 8]> {
    let status = prop_oneof![2 => Just(1), 1 => Just(0), 1 => Just(5), 1 => 0..256u64];
    (status, any::<[u64; 8]>(), 0..6000u64).prop_map(|(status, mut words, size)| {
        words[0] = words[0] & !0xff | status;
        // A size of output that may be right.
        words[3] = words[3] & !0xffff_ffff | size;
        words
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_record_breaks_anything(records in vec(record(), 1..40)) {
        let memory = Memory::of(&contents(48));
        let devices = Noise::devices(Kind::Dsa, BATCHES, records.clone());
        let mut scanner = ZeroScanner::new(devices.clone(), 4096, NonZeroU32::new(2));
        for _ in 0..12 {
            let pages = memory.addresses(48);
            let batch = scanner.start(&pages);
            let mut verdicts = [false; 48];
            let _ = scanner.finish(batch, &pages, &mut |page| memory.is_zero(page), &mut verdicts);
        }
        prop_assert_eq!(sum(devices.work()), 12 * 48);

        let devices = Noise::devices(Kind::Iaa, PAGES, records);
        let mut compressor = Compressor::new(devices.clone(), PAGE, 48);
        let mut emitted = 0;
        compressor.compress(&memory.bytes()[..48 * PAGE], &mut |_, _| Some(PAGE), &mut |stream| {
            assert!(stream.is_none_or(|stream| (1..PAGE).contains(&stream.len())));
            emitted += 1;
        });
        prop_assert_eq!(emitted, 48);
        let mut pages = vec![0; 48 * PAGE];
        let stream = |page: usize| memory.page(page);
        Decompressor::new(devices.clone(), PAGE)
            .decompress(&stream, &mut pages, &mut inflate)
            .unwrap();
        // Raw pages are no work.
        prop_assert_eq!(sum(devices.work()), 48);
    }

    #[test]
    fn no_text_of_a_choice_breaks_anything(text: String, count: u64) {
        for text in [text.clone(), format!("model:{text}"), format!("model:{count}"), format!("wq0.1,{text}")] {
            if let Ok(choice) = text.parse::<Choice>() {
                prop_assert_eq!(choice.to_string().parse::<Choice>(), Ok(choice));
            }
        }
    }
}
