//! What every dirty log has to be: a set of the pages that were written.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use vamoose_live::{
    Ram,
    dirty::{Bitmap, DirtyLog},
};
use vm_memory::Bytes;

/// A page of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) block: usize,
    pub(crate) page: usize,
}

/// Writes a value somewhere into a page; where depends on the value. After it has returned the log knows.
pub(crate) type Write = Box<dyn FnMut(Place, u64) + Send>;

/// A guest's memory, the log for it, and who writes.
pub(crate) struct Fixture {
    ram: Ram,
    log: Arc<dyn DirtyLog>,
    writers: Vec<Write>,
    /// The blocks that the writers write, and nothing else.
    blocks: Range<usize>,
    /// Whether `collect` leaves bits to be cleared by `clear`.
    keeps: bool,
}

impl Fixture {
    /// A log that clears when it collects.
    pub(crate) fn new(ram: Ram, log: Arc<dyn DirtyLog>, writers: Vec<Write>) -> Self {
        let blocks = 0..ram.blocks().len();
        Self {
            ram,
            log,
            writers,
            blocks,
            keeps: false,
        }
    }

    /// Leaves the blocks before `first` to the guest itself.
    pub(crate) fn writing_from_block(self, first: usize) -> Self {
        Self {
            blocks: first..self.blocks.end,
            ..self
        }
    }

    /// Whether pages are dirty until they are cleared, instead of collected.
    pub(crate) fn keeping(self, keeps: bool) -> Self {
        Self { keeps, ..self }
    }

    /// One writer more.
    pub(crate) fn with_writer(mut self, writer: Write) -> Self {
        self.writers.push(writer);
        self
    }

    pub(crate) fn write(&mut self, writer: usize, place: Place, stamp: u64) {
        self.writers[writer](place, stamp);
    }

    pub(crate) fn collected(&self, block: usize) -> Bitmap {
        collected(&self.ram, &*self.log, block)
    }
}

/// All that is asked of a log.
pub(crate) fn check_all(fixture: impl Fn() -> Fixture) {
    no_write_is_lost(fixture());
    a_page_shows_again_whenever_it_is_written(fixture());
    a_log_begins_afresh(fixture());
    a_log_is_a_set_of_pages(fixture());
}

/// Rounds of a migration while the writers write: in the end the copy is right, and the log has nothing more to report.
pub(crate) fn no_write_is_lost(mut fixture: Fixture) {
    const ROUNDS: usize = 100;
    const WRITES: u64 = 20_000;

    let Fixture {
        ram,
        log,
        writers,
        blocks,
        ..
    } = &mut fixture;
    let (ram, log, blocks) = (&*ram, &*log, &*blocks);
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut copy = thread::scope(|scope| {
        let _stop = SetOnDrop(&stop);
        for (seed, write) in (1..).zip(writers) {
            let (stop, written) = (&stop, &written);
            scope.spawn(move || {
                let mut random = Random(seed);
                while !stop.load(Ordering::Relaxed) {
                    write(random.place(ram, blocks), random.next());
                    written.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        start(ram, &**log);
        let mut copy = Copy::of_all(ram);
        let mut rounds = 0;
        while rounds < ROUNDS || written.load(Ordering::Relaxed) < WRITES {
            copy.sync(ram, &**log);
            rounds += 1;
        }
        copy
    });
    copy.sync(ram, &**log);
    copy.assert_equals(ram);
    assert_eq!(copy.sync(ram, &**log), 0, "pages of a guest that stands");
    log.stop().unwrap();
}

/// One page at a time, with nothing else going on that could have it found by chance.
fn a_page_shows_again_whenever_it_is_written(mut fixture: Fixture) {
    let log = Arc::clone(&fixture.log);
    start(&fixture.ram, &*log);
    for block in fixture.blocks.clone() {
        let last = fixture.ram.pages(block) - 1;
        for page in [0, last / 2, last] {
            for stamp in 0..3 {
                fixture.write(0, Place { block, page }, stamp);
                let dirty = fixture.collected(block);
                assert!(
                    dirty.iter().eq([page]),
                    "write {stamp} of {page}: {dirty:?}"
                );
                log.clear(block, 0, dirty.words()).unwrap();
                assert_eq!(fixture.collected(block).count(), 0, "cleared");
            }
        }
    }
    log.stop().unwrap();
}

/// Attempts do not affect each other, however they ended.
fn a_log_begins_afresh(mut fixture: Fixture) {
    let Fixture {
        ram,
        log,
        writers,
        blocks,
        ..
    } = &mut fixture;
    let (ram, log, blocks) = (&*ram, &*log, &*blocks);
    let write = &mut writers[0];
    let edges = blocks
        .clone()
        .flat_map(|block| [0, ram.pages(block) - 1].map(|page| Place { block, page }));
    let edges: BTreeSet<Place> = edges.collect();
    let mut stamp = 0;
    for collects in [true, false, true] {
        edges.iter().for_each(|&place| write(place, stamp));
        start(ram, &**log);
        for block in blocks.clone() {
            assert_eq!(
                collected(ram, &**log, block).count(),
                0,
                "from before the start"
            );
        }
        stamp += 1;
        edges.iter().for_each(|&place| write(place, stamp));
        if collects {
            let found = blocks
                .clone()
                .flat_map(|block| places(block, &collected(ram, &**log, block)));
            assert_eq!(found.collect::<BTreeSet<_>>(), edges);
        }
        log.stop().unwrap();
    }
    // A VMM may stop what is not running, and start what is.
    log.stop().unwrap();
    start(ram, &**log);
    edges.iter().for_each(|&place| write(place, stamp));
    start(ram, &**log);
    for block in blocks.clone() {
        assert_eq!(
            collected(ram, &**log, block).count(),
            0,
            "from before the second start"
        );
    }
    log.stop().unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Write(Vec<(prop::sample::Index, Page)>),
    Collect(prop::sample::Index),
    /// Of a block, from a word on, some words.
    Clear(prop::sample::Index, prop::sample::Index, Vec<u64>),
}

#[derive(Clone, Debug)]
enum Page {
    First,
    Last,
    Any(prop::sample::Index),
}

/// Any sequence of writes, collections and clearings, one after the other.
fn a_log_is_a_set_of_pages(mut fixture: Fixture) {
    let index = any::<prop::sample::Index>;
    let page = prop_oneof![
        Just(Page::First),
        Just(Page::Last),
        index().prop_map(Page::Any),
        index().prop_map(Page::Any)
    ];
    let words = vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 1..12);
    let step = prop_oneof![
        vec((index(), page), 1..30).prop_map(Step::Write),
        index().prop_map(Step::Collect),
        (index(), index(), words).prop_map(|(block, word, words)| Step::Clear(block, word, words)),
    ];
    let mut runner = TestRunner::new(Config {
        cases: 40,
        failure_persistence: None,
        ..Config::default()
    });
    let fixture = std::cell::RefCell::new(&mut fixture);
    let ran = runner.run(&vec(step, 1..40), |steps| {
        follow(&mut fixture.borrow_mut(), &steps)
    });
    ran.unwrap();
}

fn follow(fixture: &mut Fixture, steps: &[Step]) -> Result<(), TestCaseError> {
    let Fixture {
        ram,
        log,
        writers,
        blocks,
        keeps,
    } = fixture;
    let block = |index: &prop::sample::Index| blocks.start + index.index(blocks.len());
    let mut model = vec![BTreeSet::new(); ram.blocks().len()];
    let check = |block: usize, model: &mut [BTreeSet<usize>]| {
        let dirty = collected(ram, &**log, block);
        let expected = &mut model[block];
        prop_assert_eq!(&dirty.iter().collect::<BTreeSet<_>>(), &*expected);
        if !*keeps {
            expected.clear();
        }
        Ok(())
    };
    start(ram, &**log);
    for (stamp, step) in (0..).zip(steps) {
        match step {
            Step::Write(pages) => {
                for (nth, (index, page)) in pages.iter().enumerate() {
                    let block = block(index);
                    let last = ram.pages(block) - 1;
                    let page = match page {
                        Page::First => 0,
                        Page::Last => last,
                        Page::Any(index) => index.index(last + 1),
                    };
                    let writer = nth % writers.len();
                    writers[writer](Place { block, page }, stamp);
                    model[block].insert(page);
                }
            }
            Step::Collect(index) => check(block(index), &mut model)?,
            Step::Clear(index, word, words) => {
                let block = block(index);
                let all = ram.pages(block).div_ceil(64);
                let first = word.index(all);
                let words = &words[..words.len().min(all - first)];
                log.clear(block, first * 64, words).unwrap();
                if *keeps {
                    let cleared = |page: &usize| {
                        let word = (page / 64).checked_sub(first).and_then(|at| words.get(at));
                        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
                    };
                    model[block].retain(|page| !cleared(page));
                }
            }
        }
    }
    for block in blocks.clone() {
        check(block, &mut model)?;
    }
    log.stop().unwrap();
    Ok(())
}

/// What the destination has.
struct Copy {
    blocks: Vec<Vec<u8>>,
}

impl Copy {
    fn of_all(ram: &Ram) -> Self {
        let blocks = ram.blocks().iter().map(|block| {
            let mut bytes = vec![0; block.len()];
            block.memory().copy_to(&mut bytes[..]);
            bytes
        });
        Self {
            blocks: blocks.collect(),
        }
    }

    /// One round, by the discipline: collect, clear a chunk, read its pages. Returns the number of pages.
    fn sync(&mut self, ram: &Ram, log: &dyn DirtyLog) -> usize {
        const CHUNK: usize = 3;
        let mut pages = 0;
        for (index, bytes) in self.blocks.iter_mut().enumerate() {
            let dirty = collected(ram, log, index);
            for (chunk, words) in dirty.words().chunks(CHUNK).enumerate() {
                if words.iter().all(|&word| word == 0) {
                    continue;
                }
                let first = chunk * CHUNK * 64;
                log.clear(index, first, words).unwrap();
                for page in (first..first + words.len() * 64).filter(|&page| dirty.get(page)) {
                    let start = page * ram.page_size();
                    let memory = ram.blocks()[index].memory();
                    let memory = memory.subslice(start, ram.page_size()).unwrap();
                    memory.copy_to(&mut bytes[start..][..ram.page_size()]);
                }
            }
            pages += dirty.count();
        }
        pages
    }

    fn assert_equals(&self, ram: &Ram) {
        let now = Self::of_all(ram);
        for (index, (copy, now)) in self.blocks.iter().zip(&now.blocks).enumerate() {
            let pages = copy
                .chunks(ram.page_size())
                .zip(now.chunks(ram.page_size()));
            let wrong = pages.enumerate().filter(|(_, (copy, now))| copy != now);
            let wrong: Vec<usize> = wrong.map(|(page, _)| page).collect();
            assert!(wrong.is_empty(), "block {index}: pages {wrong:?} were lost");
        }
    }
}

/// Stores `stamp` in a page, somewhere.
pub(crate) fn write(ram: &Ram, place: Place, stamp: u64) {
    let address = place.page * ram.page_size() + offset_in_page(ram.page_size(), stamp);
    let memory = ram.blocks()[place.block].memory();
    memory.store(stamp, address, Ordering::Relaxed).unwrap();
}

/// Where in a page `stamp` goes.
pub(crate) fn offset_in_page(page_size: usize, stamp: u64) -> usize {
    (stamp as usize % (page_size / 8)) * 8
}

/// Starts the log, and watches all memory, in several windows.
pub(crate) fn start(ram: &Ram, log: &dyn DirtyLog) {
    const WINDOW: usize = 192;
    log.start().unwrap();
    for block in 0..ram.blocks().len() {
        let pages = ram.pages(block);
        for first in (0..pages).step_by(WINDOW) {
            log.watch(block, first..pages.min(first + WINDOW)).unwrap();
        }
    }
}

/// What the log reports now.
pub(crate) fn collected(ram: &Ram, log: &dyn DirtyLog, block: usize) -> Bitmap {
    let mut dirty = Bitmap::new(ram.pages(block));
    dirty.change(|words| log.collect(block, 0, words)).unwrap();
    dirty
}

fn places(block: usize, pages: &Bitmap) -> Vec<Place> {
    pages.iter().map(|page| Place { block, page }).collect()
}

/// xorshift64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn place(&mut self, ram: &Ram, blocks: &Range<usize>) -> Place {
        let block = blocks.start + self.next() as usize % blocks.len();
        let page = self.next() as usize % ram.pages(block);
        Place { block, page }
    }
}

/// Lets the writers end when an assertion fails, too.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
