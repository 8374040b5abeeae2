//! Counts the zero pages of a buffer, with the DSAs of this host as far as there are any.
//!
//! ```sh
//! cargo run --release -p idxd --example zero_pages
//! ```

use std::{error::Error, sync::Arc, time::Instant};

use idxd::{
    Kind,
    discovery::{self, Root},
    offload::{Choice, Devices, Options, ZeroScanner},
};

const PAGE: usize = 4096;
const PAGES: usize = 64 * 1024;
const BATCH: usize = 128;

fn main() -> Result<(), Box<dyn Error>> {
    // Every third page is not zero.
    let mut memory = vec![0_u8; PAGES * PAGE];
    for page in memory.chunks_exact_mut(PAGE).step_by(3) {
        page[PAGE - 1] = 1;
    }

    let devices = match Devices::open(Kind::Dsa, &Choice::Auto, &Options::batches(128)) {
        Ok(devices) => devices,
        Err(error) => {
            println!("without a DSA: {error}");
            let root = Root::default();
            for missing in discovery::missing(&root, &discovery::scan(&root)) {
                println!("  missing: {missing}");
            }
            Devices::none()
        }
    };
    let devices = Arc::new(devices);
    let mut scanner = ZeroScanner::new(Arc::clone(&devices), u32::try_from(PAGE)?, None);

    let started = Instant::now();
    let mut zeros = 0;
    for batch in memory.chunks(BATCH * PAGE) {
        let pages: Vec<&[u8]> = batch.chunks_exact(PAGE).collect();
        let addresses: Vec<u64> = pages.iter().map(|page| page.as_ptr() as u64).collect();
        // The device begins. A program with other work does that now.
        let started = scanner.start(&addresses);
        // The processor checks the pages for which the device has no verdict yet.
        let mut by_processor = |page: usize| pages[page].iter().all(|byte| *byte == 0);
        let mut verdicts = vec![false; pages.len()];
        scanner.finish(started, &addresses, &mut by_processor, &mut verdicts)?;
        zeros += verdicts.iter().filter(|is_zero| **is_zero).count();
    }

    let by_device = devices.work().by_device;
    let took = started.elapsed();
    println!("{zeros} of {PAGES} pages are zero; a DSA checked {by_device} of them, in {took:.1?}");
    Ok(())
}
