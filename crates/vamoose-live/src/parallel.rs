//! Work that is done in parts, by several threads.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    thread,
};

use vamoose_link::lock;

use crate::spans::in_span;

/// Calls `work` with each of `parts`, on up to `threads` threads, until it fails. The caller's is one of them, and does
/// everything where no other can be had.
///
/// # Errors
/// The first failure.
pub(crate) fn each<T: Send, E: Send>(
    parts: Vec<T>,
    threads: usize,
    work: &(dyn Fn(T) -> Result<(), E> + Sync),
) -> Result<(), E> {
    let threads = threads.min(parts.len());
    let (parts, failure) = (Mutex::new(parts.into_iter()), Mutex::new(None));
    let next = || lock(&failure).is_none().then(|| lock(&parts).next())?;
    let run = || {
        if let Err(error) = std::iter::from_fn(next).try_for_each(work) {
            lock(&failure).get_or_insert(error);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            let builder = thread::Builder::new().name("vamoose-part".into());
            if let Err(error) = builder.spawn_scoped(scope, in_span(run)) {
                tracing::debug!(%error, "no more threads: fewer do the work");
                break;
            }
        }
        run();
    });
    let failure = failure.into_inner();
    let failure = failure.unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}

/// `range` in parts that end at multiples of `size`.
pub(crate) fn aligned_parts(
    range: Range<usize>,
    size: usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = range.end.min((start / size + 1) * size);
        let part = start..end;
        start = end;
        (!part.is_empty()).then_some(part)
    })
}

/// As many threads as this process has processors.
pub(crate) fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Barrier, Mutex, mpsc},
        time::Duration,
    };

    use super::*;

    #[test]
    fn each_part_is_done_once() {
        for threads in [0, 1, 3] {
            for parts in [0, 1, 2, 100] {
                let done = Mutex::new(Vec::new());
                let all = each((0..parts).collect(), threads, &|part| {
                    done.lock().unwrap().push(part);
                    Ok::<_, ()>(())
                });
                all.unwrap();
                let mut done = done.into_inner().unwrap();
                done.sort_unstable();
                assert!(done.into_iter().eq(0..parts), "{threads} threads");
            }
        }
    }

    #[test]
    fn the_first_failure_ends_the_work() {
        let done = Mutex::new(0);
        let failure = each((0..1000).collect(), 1, &|part| {
            *done.lock().unwrap() += 1;
            if part < 7 { Ok(()) } else { Err(part) }
        });
        assert_eq!((failure, done.into_inner().unwrap()), (Err(7), 8));
    }

    #[test]
    fn parts_end_at_multiples_of_their_size() {
        for (range, ends) in [
            (0x1000..0x1000, &[][..]),
            (0x1000..0x3000, &[0x3000]),
            (0x1000..0x4000, &[0x4000]),
            (0x3000..0x9000, &[0x4000, 0x8000, 0x9000]),
        ] {
            let mut next = range.start;
            for (part, end) in aligned_parts(range.clone(), 0x4000).zip(ends) {
                assert_eq!(part, next..*end);
                next = *end;
            }
            assert_eq!(next, range.end);
            assert_eq!(aligned_parts(range, 0x4000).count(), ends.len());
        }
    }

    #[test]
    fn parts_are_done_at_the_same_time() {
        let (done_in, done) = mpsc::channel();
        // On a thread that is left behind if the parts wait for each other in vain.
        thread::spawn(move || {
            let meet = Barrier::new(2);
            let both = each(vec![(), ()], 2, &|()| {
                meet.wait();
                Ok::<_, ()>(())
            });
            both.unwrap();
            done_in.send(()).unwrap();
        });
        done.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}
