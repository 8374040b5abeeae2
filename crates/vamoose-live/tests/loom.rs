//! The lock-free part of the dirty logs, in every interleaving that the memory model allows.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::sync::Arc;

use loom::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
};
use vamoose_live::{
    Ram, RamBlock,
    dirty::{Bitmap, DirtyLog, SharedBitmap},
};
use vm_memory::MmapRegion;

/// Two pages of guest memory, a word each, and a log. Data is relaxed: only the log may order it.
struct Guest {
    pages: [AtomicU64; 2],
    log: SharedBitmap,
    page_size: u64,
}

/// What the migration has read of them.
#[derive(Default)]
struct Mirror([u64; 2]);

impl Guest {
    fn new(ram: &Ram) -> Arc<Self> {
        Arc::new(Self {
            pages: [AtomicU64::new(0), AtomicU64::new(0)],
            log: SharedBitmap::new(ram),
            page_size: ram.page_size() as u64,
        })
    }

    fn write(&self, page: usize, value: u64) {
        self.pages[page].store(value, Ordering::Relaxed);
        self.log.mark(0, page as u64 * self.page_size, 1);
    }

    /// One round: collects, and reads what was written.
    fn sync(&self, mirror: &mut Mirror) {
        let mut dirty = Bitmap::new(self.pages.len());
        dirty.change(|words| self.log.collect(0, 0, words)).unwrap();
        for page in dirty.iter() {
            mirror.0[page] = self.pages[page].load(Ordering::Relaxed);
        }
    }

    /// What a destination has to have in the end, read by a thread that knows nothing but the log.
    fn check(&self, mirror: &Mirror) {
        for (page, data) in self.pages.iter().enumerate() {
            assert_eq!(mirror.0[page], data.load(Ordering::Relaxed), "page {page}");
        }
    }
}

#[test]
fn no_mark_is_lost_and_data_is_visible_with_its_mark() {
    let ram = two_pages();
    loom::model(move || {
        let guest = Guest::new(&ram);
        guest.log.start().unwrap();
        let writers = [0, 1].map(|page| {
            let guest = Arc::clone(&guest);
            thread::spawn(move || guest.write(page, 7))
        });
        let mut mirror = Mirror::default();
        guest.sync(&mut mirror);
        for writer in writers {
            writer.join().unwrap();
        }
        guest.sync(&mut mirror);
        guest.check(&mirror);
    });
}

#[test]
fn a_page_of_two_writers_is_read_after_the_last() {
    let ram = two_pages();
    loom::model(move || {
        let guest = Guest::new(&ram);
        guest.log.start().unwrap();
        let writers = [5, 6].map(|value| {
            let guest = Arc::clone(&guest);
            thread::spawn(move || guest.write(1, value))
        });
        let mut mirror = Mirror::default();
        guest.sync(&mut mirror);
        for writer in writers {
            writer.join().unwrap();
        }
        guest.sync(&mut mirror);
        guest.check(&mirror);
    });
}

/// Without any `join`: a thread that takes a mark sees the data, through nothing but the log.
#[test]
fn a_mark_publishes_the_write_before_it() {
    let ram = two_pages();
    loom::model(move || {
        let guest = Guest::new(&ram);
        guest.log.start().unwrap();
        let writers = [0, 1].map(|page| {
            let guest = Arc::clone(&guest);
            thread::spawn(move || {
                guest.write(page, 1);
                guest.write(page, 2);
            })
        });
        let mut dirty = Bitmap::new(2);
        dirty
            .change(|words| guest.log.collect(0, 0, words))
            .unwrap();
        for page in dirty.iter() {
            assert_ne!(guest.pages[page].load(Ordering::Relaxed), 0, "page {page}");
        }
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

/// `start` throws marks away, and the migration reads every page after it: a write is seen by one of both.
#[test]
fn a_write_while_the_log_starts_is_not_lost() {
    let ram = two_pages();
    loom::model(move || {
        let guest = Guest::new(&ram);
        let writers = [0, 1].map(|page| {
            let guest = Arc::clone(&guest);
            thread::spawn(move || guest.write(page, 7))
        });
        guest.log.start().unwrap();
        let mut mirror = Mirror::default();
        for (copy, page) in mirror.0.iter_mut().zip(&guest.pages) {
            *copy = page.load(Ordering::Relaxed);
        }
        for writer in writers {
            writer.join().unwrap();
        }
        guest.sync(&mut mirror);
        guest.check(&mirror);
    });
}

fn two_pages() -> Ram {
    let region = MmapRegion::<()>::new(2 * rustix::param::page_size()).unwrap();
    Ram::new(vec![RamBlock::new("ram", Arc::new(region)).unwrap()]).unwrap()
}
