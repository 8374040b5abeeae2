//! A round: the pages to send, divided among the channels.
//!
//! ```text
//!  block   ├────────── window ──────────┼──── window ────┼──────────── window ────────────┤
//!           opened by one channel: the dirty log starts anew, before any of its pages is read
//!          ├ chunk ┼ chunk ┼ chunk ┼ …                                       4 MiB each
//!           read and sent by that channel, at the end by those that have nothing else to do
//! ```
//!
//! A dirty log is cleared window by window, not chunk by chunk: KVM takes a lock and interrupts every vCPU for each call. The
//! smaller a window is, the fewer guest writes between clearing and reading are sent twice. So
//! a window has at most [a part](WINDOWS) of the round's pages, and is no longer than [a GiB](WINDOW_BYTES).

use std::{
    iter,
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    Ram,
    dirty::{Bitmap, DirtyLog, DirtyLogError, count, ones, pages_in},
    present::Touched,
};

/// The pages that all channels send in a round.
pub(crate) struct Round {
    pub(crate) number: u64,
    pages: Pages,
    windows: Vec<Window>,
    /// The first window that no channel has taken.
    next: AtomicUsize,
}

/// The pages of a round.
pub(crate) enum Pages {
    /// All pages that were ever touched, in the first round. They are found window by window.
    Touched(Touched),
    /// The pages that the log has collected, a bitmap per block.
    Written(Vec<Bitmap>),
    /// The same for a paused guest: it writes no more, so the log is not cleared.
    Last(Vec<Bitmap>),
}

/// Contiguous pages of a block for which the log is cleared in one call.
struct Window {
    block: usize,
    /// The first is a multiple of 64.
    pages: Range<usize>,
    /// Set once the window is open: the pages to send, unless they are in the round's bitmap.
    opened: OnceLock<Option<Vec<u64>>>,
    /// The first chunk that no channel has taken.
    next: AtomicUsize,
}

/// Contiguous pages of a block. Those whose bits are set are to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk<'a> {
    pub(crate) block: usize,
    first_page: usize,
    words: &'a [u64],
}

/// A channel's share of a round.
pub(crate) struct Share<'a> {
    round: &'a Round,
    ram: &'a Ram,
    log: &'a dyn DirtyLog,
    /// The window that this channel has opened last.
    window: Option<&'a Window>,
}

/// Words of a chunk: 4 MiB of memory. Small enough to divide a short round evenly.
const CHUNK_WORDS: usize = 16;

/// Least windows per channel in a round with enough chunks. Then about 2 % of the guest's writes during the round fall between
/// clearing and reading.
const WINDOWS: usize = 32;

/// The longest window, in bytes: KVM spends milliseconds in a call for this much memory.
const WINDOW_BYTES: usize = 1 << 30;

impl Round {
    /// A round of `pages` of `ram` over `channels` channels.
    pub(crate) fn new(number: u64, pages: Pages, ram: &Ram, channels: usize) -> Self {
        let most_pages = pages.count(ram) / (WINDOWS * channels.max(1));
        let most_words = WINDOW_BYTES / ram.page_size() / 64;
        let windows = (0..ram.blocks().len()).flat_map(|block| {
            let pages_of_block = ram.pages(block);
            let chunks = pages.chunks(block, pages_of_block);
            join(chunks, most_pages, most_words).map(move |words| Window {
                block,
                pages: words.start * 64..pages_of_block.min(words.end * 64),
                opened: OnceLock::new(),
                next: AtomicUsize::new(0),
            })
        });
        Self {
            number,
            windows: windows.collect(),
            pages,
            next: AtomicUsize::new(0),
        }
    }

    /// The chunks of a channel, with pages that no other one gets.
    pub(crate) fn share<'a>(&'a self, ram: &'a Ram, log: &'a dyn DirtyLog) -> Share<'a> {
        Share {
            round: self,
            ram,
            log,
            window: None,
        }
    }

    /// The words of the pages of `window` to send, once it is open.
    fn words<'a>(&'a self, window: &'a Window) -> Option<&'a [u64]> {
        match (window.opened.get()?, &self.pages) {
            (Some(words), _) => Some(words),
            (None, Pages::Written(dirty) | Pages::Last(dirty)) => {
                let words = window.pages.start / 64..window.pages.end.div_ceil(64);
                dirty.get(window.block)?.words().get(words)
            }
            (None, Pages::Touched(_)) => None,
        }
    }

    /// Takes a chunk of `window` with pages to send; `None` if no chunk is left, or the window is not open.
    fn chunk<'a>(&'a self, window: &'a Window) -> Option<Chunk<'a>> {
        let words = self.words(window)?;
        let chunks = words.len().div_ceil(CHUNK_WORDS);
        while window.next.load(Ordering::Relaxed) < chunks {
            let first = window.next.fetch_add(1, Ordering::Relaxed) * CHUNK_WORDS;
            let words = words.get(first..words.len().min(first + CHUNK_WORDS))?;
            if words.iter().any(|word| *word != 0) {
                return Some(Chunk {
                    block: window.block,
                    first_page: window.pages.start + first * 64,
                    words,
                });
            }
        }
        None
    }
}

impl<'a> Share<'a> {
    /// The next chunk. Its pages may be read: the log has begun anew for them before.
    pub(crate) fn next(&mut self) -> Result<Option<Chunk<'a>>, DirtyLogError> {
        let round = self.round;
        loop {
            if let Some(chunk) = self.window.and_then(|window| round.chunk(window)) {
                return Ok(Some(chunk));
            }
            // Relaxed: this only divides the windows. `opened` orders the rest.
            let window = round
                .windows
                .get(round.next.fetch_add(1, Ordering::Relaxed));
            let Some(window) = window else {
                // A window that is being opened now is left to its channel.
                return Ok(round.windows.iter().find_map(|window| round.chunk(window)));
            };
            self.open(window)?;
            self.window = Some(window);
        }
    }

    /// Clears the log for the pages of `window`: later writes are logged again.
    fn open(&self, window: &Window) -> Result<(), DirtyLogError> {
        let Window { block, pages, .. } = window;
        let words = match &self.round.pages {
            Pages::Touched(touched) => {
                self.log.watch(*block, pages.clone())?;
                // Only now: a page that is touched later is in the log.
                Some(touched.find(self.ram, *block, pages.clone()))
            }
            Pages::Written(dirty) => {
                let words = pages.start / 64..pages.end.div_ceil(64);
                self.log
                    .clear(*block, pages.start, &dirty[*block].words()[words])?;
                None
            }
            Pages::Last(_) => None,
        };
        // Each window is opened once.
        let _ = window.opened.set(words);
        Ok(())
    }
}

impl Pages {
    /// The number of pages; an upper limit while touched pages are still unknown.
    pub(crate) fn count(&self, ram: &Ram) -> usize {
        match self {
            Self::Touched(_) => (0..ram.blocks().len()).map(|block| ram.pages(block)).sum(),
            Self::Written(dirty) | Self::Last(dirty) => count(dirty),
        }
    }

    /// The chunks of `block`, which has `pages` pages: the words of each, and the number of its pages to send.
    fn chunks(&self, block: usize, pages: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
        let bitmap = match self {
            Self::Touched(_) => None,
            Self::Written(dirty) | Self::Last(dirty) => dirty.get(block).map(Bitmap::words),
        };
        let words = pages.div_ceil(64);
        (0..words).step_by(CHUNK_WORDS).map(move |first| {
            let chunk = first..words.min(first + CHUNK_WORDS);
            let count = match bitmap {
                None => chunk.len() * 64,
                Some(words) => ones(&words[chunk.clone()]),
            };
            (chunk, count)
        })
    }
}

/// Joins chunks, given by their words and their number of pages to send, to windows that neither begin nor end with an empty
/// chunk. A window of several chunks has at most `most_pages` pages to send, and at most `most_words` words.
fn join(
    chunks: impl Iterator<Item = (Range<usize>, usize)>,
    most_pages: usize,
    most_words: usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut chunks = chunks.filter(|(_, pages)| *pages > 0).peekable();
    iter::from_fn(move || {
        let (mut window, mut pages) = chunks.next()?;
        while let Some((chunk, more)) = chunks.next_if(|(chunk, more)| {
            pages + more <= most_pages && chunk.end - window.start <= most_words
        }) {
            window.end = chunk.end;
            pages += more;
        }
        Some(window)
    })
}

impl Chunk<'_> {
    /// The pages to send, in their order.
    pub(crate) fn pages(&self) -> impl Iterator<Item = usize> {
        pages_in(self.first_page, self.words)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Mutex, thread};

    use proptest::{collection::vec, prelude::*};
    use vm_memory::Bytes;

    use super::*;
    use crate::{mapping::Backing, test_ram};

    /// Notes for which pages it has begun anew, and in how many calls.
    #[derive(Default)]
    struct Log {
        watched: Mutex<Vec<(usize, Range<usize>)>>,
        cleared: Mutex<Vec<(usize, usize)>>,
        calls: AtomicUsize,
    }

    impl DirtyLog for Log {
        fn start(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn watch(&self, block: usize, pages: Range<usize>) -> Result<(), DirtyLogError> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            self.watched.lock().unwrap().push((block, pages));
            Ok(())
        }

        fn collect(&self, _: usize, _: usize, _: &mut [u64]) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn clear(&self, block: usize, first: usize, words: &[u64]) -> Result<(), DirtyLogError> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            assert!(first.is_multiple_of(64));
            let pages = pages_in(first, words).map(|page| (block, page));
            self.cleared.lock().unwrap().extend(pages);
            Ok(())
        }

        fn stop(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }
    }

    /// All pages of `round`, as so many channels get them; `before` is called with each page when a channel has it.
    fn pages_of(
        round: &Round,
        ram: &Ram,
        log: &Log,
        channels: usize,
        before: &(dyn Fn(usize, usize) + Sync),
    ) -> Vec<(usize, usize)> {
        let pages = thread::scope(|scope| {
            let channel = || {
                let (mut share, mut pages) = (round.share(ram, log), Vec::new());
                while let Some(chunk) = share.next().unwrap() {
                    pages.extend(chunk.pages().map(|page| (chunk.block, page)));
                    chunk.pages().for_each(|page| before(chunk.block, page));
                }
                pages
            };
            let channels: Vec<_> = (0..channels).map(|_| scope.spawn(channel)).collect();
            let pages = channels.into_iter().map(|channel| channel.join().unwrap());
            pages.collect::<Vec<_>>()
        });
        let mut pages = pages.concat();
        pages.sort_unstable();
        pages
    }

    proptest! {
        #[test]
        fn every_dirty_page_is_taken_once_and_cleared_before(
            blocks in vec((1..9000_usize, vec(0..9000_usize, 0..30)), 1..4),
            channels in 1..5_usize,
        ) {
            let ram = test_ram::blocks(blocks.iter().map(|(pages, _)| pages * 4096));
            let dirty: Vec<Bitmap> = blocks.iter().map(|(pages, set)| {
                let mut bitmap = Bitmap::new(*pages);
                set.iter().for_each(|page| bitmap.set(*page));
                bitmap
            }).collect();
            let all: Vec<_> = dirty.iter().enumerate()
                .flat_map(|(block, dirty)| dirty.iter().map(move |page| (block, page)))
                .collect();
            let log = Log::default();
            let round = Round::new(1, Pages::Written(dirty.clone()), &ram, channels);
            let taken = pages_of(&round, &ram, &log, channels, &|block, page| {
                assert!(log.cleared.lock().unwrap().contains(&(block, page)));
            });
            prop_assert_eq!(&taken, &all);
            let cleared = log.cleared.into_inner().unwrap();
            prop_assert_eq!(cleared.len(), all.len());
            prop_assert_eq!(cleared.into_iter().collect::<BTreeSet<_>>(), all.iter().copied().collect());

            let log = Log::default();
            let round = Round::new(2, Pages::Last(dirty), &ram, channels);
            prop_assert_eq!(&pages_of(&round, &ram, &log, channels, &|_, _| ()), &all);
            prop_assert_eq!(log.calls.into_inner(), 0, "of a paused guest");
        }
    }

    #[test]
    fn all_memory_is_watched_before_what_was_touched_is_taken() {
        const TOUCHED: [usize; 4] = [0, 1023, 1024, 299_999];
        let ram = test_ram::anonymous(300_000 * 4096);
        let memory = ram.blocks()[0].memory();
        for page in TOUCHED {
            memory.write_obj(7_u8, page * 4096).unwrap();
        }
        let backing = Backing::Anonymous { page_size: 4096 };
        for channels in [1, 3] {
            let log = Log::default();
            let pages = Pages::Touched(Touched::new(vec![backing]));
            let round = Round::new(1, pages, &ram, channels);
            let taken = pages_of(&round, &ram, &log, channels, &|_, page| {
                let watched = log.watched.lock().unwrap();
                assert!(watched.iter().any(|(_, pages)| pages.contains(&page)));
            });
            // They may be transparent huge pages.
            assert!(TOUCHED.iter().all(|page| taken.contains(&(0, *page))));
            let mut watched = log.watched.into_inner().unwrap();
            watched.sort_unstable_by_key(|(_, pages)| pages.start);
            let mut next = 0;
            for (_, pages) in watched {
                assert_eq!(pages.start, next);
                next = pages.end;
            }
            assert_eq!(next, 300_000);
        }
    }

    /// What a TiB costs: a call for each GiB, wherever the dirty pages are; of a small guest the windows are a part
    /// of the round.
    #[test]
    fn a_log_is_cleared_in_few_calls() {
        const GIB: usize = 1 << 30;
        for (len, every, channels, most) in [
            (1 << 40, 1, 8, 1024),
            (1 << 40, 5000, 8, 1024),
            (64 * GIB, 1, 2, 64),
            (16 * GIB, 1, 2, 65),
            (16 * GIB, 1, 8, 257),
            (16 << 20, 1, 2, 4),
        ] {
            let ram = test_ram::reserved(len);
            let mut dirty = Bitmap::new(ram.pages(0));
            match every {
                1 => (0..ram.pages(0)).for_each(|page| dirty.set(page)),
                _ => (0..ram.pages(0))
                    .step_by(every)
                    .for_each(|page| dirty.set(page)),
            }
            let count = dirty.count();
            let log = Counting::default();
            let round = Round::new(1, Pages::Written(vec![dirty]), &ram, channels);
            let (mut share, mut taken) = (round.share(&ram, &log), 0);
            while let Some(chunk) = share.next().unwrap() {
                taken += ones(chunk.words);
            }
            let calls = log.0.into_inner();
            assert!(
                taken == count && calls <= most,
                "{calls} calls for {len} bytes"
            );
        }
    }

    /// Counts calls of `clear`.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl DirtyLog for Counting {
        fn start(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn collect(&self, _: usize, _: usize, _: &mut [u64]) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn clear(&self, _: usize, _: usize, _: &[u64]) -> Result<(), DirtyLogError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn stop(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }
    }
}
