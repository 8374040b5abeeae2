//! Finds zero pages with DSAs.

use std::{collections::VecDeque, num::NonZeroU32, sync::Arc};

use idxd::offload::{Batch, Devices, WrongVerdict, ZeroScanner};
use vamoose_codec::Verify;
use vm_memory::VolatileSlice;

use crate::sys::memory::is_zero;

/// A thread's scan by the DSAs of `devices`. Whatever they do, each page gets its verdict, and the scan takes no longer than with
/// the processor alone.
#[derive(Debug)]
pub(crate) struct DsaScan {
    scanner: ZeroScanner,
    page_bytes: usize,
    /// Batches that were started, the oldest first.
    batches: VecDeque<Batch>,
    /// Addresses of the pages of the current call.
    addresses: Vec<u64>,
}

/// Batches that a caller has started and not finished.
const MOST_BATCHES: usize = 4;

impl DsaScan {
    /// For batches of up to `pages` pages of `page_bytes` bytes. Of the pages that a device reports as zero,
    /// `verify` is how many are checked by the processor as well.
    pub(crate) fn new(
        devices: Arc<Devices>,
        page_bytes: u32,
        pages: usize,
        verify: Verify,
    ) -> Self {
        let check_one_in = match verify {
            Verify::Off => None,
            Verify::Sample => Some(SAMPLE),
            Verify::All => Some(NonZeroU32::MIN),
        };
        Self {
            scanner: ZeroScanner::new(devices, page_bytes, check_one_in),
            page_bytes: page_bytes as usize,
            batches: VecDeque::with_capacity(MOST_BATCHES),
            addresses: Vec::with_capacity(pages),
        }
    }

    fn set_addresses(&mut self, pages: &[VolatileSlice<'_>]) {
        let address = |page: &VolatileSlice<'_>| page.ptr_guard().as_ptr().expose_provenance();
        self.addresses.clear();
        self.addresses
            .extend(pages.iter().map(|page| address(page) as u64));
    }

    pub(crate) fn start(&mut self, pages: &[VolatileSlice<'_>]) {
        // The device reads `page_bytes` of each page, whatever its length.
        let fit = pages.iter().all(|page| page.len() == self.page_bytes);
        let batch = if fit {
            self.set_addresses(pages);
            self.scanner.start(&self.addresses)
        } else {
            Batch::default()
        };
        self.batches.push_back(batch);
    }

    pub(crate) fn finish(
        &mut self,
        pages: &[VolatileSlice<'_>],
        verdicts: &mut [bool],
    ) -> Result<(), WrongVerdict> {
        let batch = self.batches.pop_front().unwrap_or_default();
        self.set_addresses(pages);
        let mut is_zero = |page: usize| is_zero(&pages[page]);
        self.scanner
            .finish(batch, &self.addresses, &mut is_zero, verdicts)
    }
}

/// With [`Verify::Sample`], the processor checks one zero page out of this many.
const SAMPLE: NonZeroU32 = NonZeroU32::new(64).unwrap();

#[cfg(test)]
mod tests {
    use idxd::{Kind, Queue, Shape, Tuning};
    use idxd_model::{Config, Faults, Model, PortalKind, Work};
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::offload::ZeroScan;

    const PAGE: usize = 4096;

    fn devices(model: &Model, count: usize) -> Arc<Devices> {
        let shape = Shape {
            members: 128,
            buffer_bytes: 0,
        };
        let queues = (0..count).map(|device| {
            let submit = model.queue(device, 0, PortalKind::Enqcmd);
            Queue::new(submit, shape, Tuning::default()).unwrap()
        });
        Arc::new(Devices::new(queues))
    }

    fn pages(memory: &mut [u8]) -> Vec<VolatileSlice<'_>> {
        let memory = VolatileSlice::from(memory);
        (0..memory.len() / PAGE)
            .map(|page| memory.subslice(page * PAGE, PAGE).unwrap())
            .collect()
    }

    proptest! {
        #[test]
        fn every_page_of_every_batch_has_the_processors_verdict(
            zero in vec(vec(any::<bool>(), 0..200), 1..12),
            seed: u64,
            healthy: bool,
            count in 0_usize..3,
        ) {
            let mut config = Config::devices(Kind::Dsa, 2);
            config.seed = seed;
            if !healthy {
                config.faults = Faults::everything();
            }
            let model = Model::deterministic(&config);
            let mut scan = DsaScan::new(devices(&model, count), 4096, 128, Verify::All);
            let mut batches: Vec<Vec<u8>> = zero.iter().map(|zero| {
                let mut memory = vec![0; zero.len() * PAGE];
                for (page, zero) in memory.chunks_mut(PAGE).zip(zero) {
                    page[PAGE - 1] = u8::from(!zero);
                }
                memory
            }).collect();
            let slices: Vec<_> = batches.iter_mut().map(|memory| pages(memory)).collect();
            // One batch is out while the one before it is finished.
            scan.start(&slices[0]);
            for (number, batch) in slices.iter().enumerate() {
                if let Some(next) = slices.get(number + 1) {
                    scan.start(next);
                }
                let mut verdicts = vec![false; batch.len()];
                scan.finish(batch, &mut verdicts).unwrap();
                prop_assert_eq!(&verdicts, &zero[number]);
            }
        }
    }

    #[test]
    fn a_device_that_lies_is_caught() {
        let mut config = Config::dsa();
        config.work = Work::Oracle(Arc::new(|_, _| true));
        let model = Model::timed(&config);
        let devices = devices(&model, 1);
        let mut memory = vec![1; 64 * PAGE];
        let pages = pages(&mut memory);
        for (verify, caught) in [
            (Verify::Off, false),
            (Verify::Sample, true),
            (Verify::All, true),
        ] {
            let mut scan = DsaScan::new(devices.clone(), 4096, 128, verify);
            let before = devices.work().by_device;
            let mut verdicts = [false; 64];
            let mut result = Ok(());
            // The device may be late, and then the processor does it.
            while devices.work().by_device == before {
                scan.start(&pages);
                result = scan.finish(&pages, &mut verdicts);
            }
            assert_eq!(result.is_err(), caught, "{verify:?}");
        }
    }

    #[test]
    fn pages_of_another_length_are_the_processors() {
        let model = Model::timed(&Config::dsa());
        let devices = devices(&model, 1);
        let mut memory = vec![0; 32 * PAGE];
        memory[PAGE + 5000] = 1;
        let all = VolatileSlice::from(&mut memory[..]);
        let large: Vec<_> = (0..16)
            .map(|page| all.subslice(page * 2 * PAGE, 2 * PAGE).unwrap())
            .collect();
        let mut scan = DsaScan::new(devices.clone(), 4096, 128, Verify::Off);
        let mut verdicts = [false; 16];
        scan.start(&large);
        scan.finish(&large, &mut verdicts).unwrap();
        let expected: Vec<bool> = (0..16).map(|page| page != 1).collect();
        assert_eq!(&verdicts[..], expected);
        assert_eq!(devices.work().by_device, 0);
    }

    #[test]
    fn the_processor_sees_one_bit_anywhere() {
        for len in [1024, PAGE, 65536] {
            let mut page = vec![0; len];
            assert!(is_zero(&VolatileSlice::from(&mut page[..])));
            for at in (0..len).step_by(97).chain([len - 1]) {
                page[at] = 0x10;
                let slice = VolatileSlice::from(&mut page[..]);
                assert!(!is_zero(&slice), "{at} of {len}");
                page[at] = 0;
            }
        }
        let mut memory = vec![0; 3 * PAGE];
        memory[PAGE + 17] = 1;
        let mut verdicts = [false; 3];
        ZeroScan::Cpu
            .finish(&pages(&mut memory), &mut verdicts)
            .unwrap();
        assert_eq!(verdicts, [true, false, true]);
    }
}
