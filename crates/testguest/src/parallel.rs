//! Distributes work on large memory over all CPUs.

use std::{ops::Range, panic, sync::Mutex, thread};

use crate::vcpu::lock;

/// The results of `work` for all `items`, in any order.
pub(crate) fn on_all_cpus<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let threads = cpus.min(items.len());
    let left = Mutex::new(items.into_iter());
    let take = || lock(&left).next();
    let until_none_is_left = || {
        let mut results = Vec::new();
        while let Some(item) = take() {
            results.push(work(item));
        }
        results
    };
    thread::scope(|scope| {
        let threads = (0..threads).map(|_| scope.spawn(until_none_is_left));
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().flat_map(|thread| {
            let results = thread.join();
            results.unwrap_or_else(|cause| panic::resume_unwind(cause))
        });
        results.collect()
    })
}

/// The range in pieces of `most` bytes, the last of which may be shorter.
pub(crate) fn pieces(range: Range<u64>, most: usize) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = range;
    let pieces = (start..end).step_by(most);
    pieces.map(move |at| at..end.min(at + most as u64))
}
