//! A dirty log that combines several logs, each of which records writes that the others do not.

use std::{ops::Range, sync::Arc};

use super::{DirtyLog, DirtyLogError};

/// Several dirty logs of the same memory as one: a page is dirty if it is in one of them.
pub struct Merged {
    logs: Vec<Arc<dyn DirtyLog>>,
}

impl Merged {
    /// One log of `logs`, all of them for the same [`Ram`](crate::Ram).
    pub fn new(logs: Vec<Arc<dyn DirtyLog>>) -> Self {
        Self { logs }
    }
}

impl DirtyLog for Merged {
    /// Starts all of them; when one fails, none is left running.
    fn start(&self) -> Result<(), DirtyLogError> {
        for (index, log) in self.logs.iter().enumerate() {
            if let Err(error) = log.start() {
                for started in self.logs[..=index].iter().rev() {
                    // The error to report is that of the start.
                    let _ = started.stop();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn watch(&self, block: usize, pages: Range<usize>) -> Result<(), DirtyLogError> {
        self.logs
            .iter()
            .try_for_each(|log| log.watch(block, pages.clone()))
    }

    /// The largest part of all logs: logs with smaller parts get several at once. All of a block, if the largest part is not a
    /// multiple of the others.
    fn pages_per_collect(&self) -> usize {
        let pages = || self.logs.iter().map(|log| log.pages_per_collect());
        let most = pages().max().unwrap_or(usize::MAX);
        let fits = pages().all(|pages| pages > 0 && most.is_multiple_of(pages));
        if fits { most } else { usize::MAX }
    }

    fn collect(
        &self,
        block: usize,
        first_page: usize,
        dirty: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        self.logs
            .iter()
            .try_for_each(|log| log.collect(block, first_page, dirty))
    }

    fn clear(&self, block: usize, first_page: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        self.logs
            .iter()
            .try_for_each(|log| log.clear(block, first_page, words))
    }

    /// Stops all of them, and reports the first failure.
    fn stop(&self) -> Result<(), DirtyLogError> {
        let mut result = Ok(());
        for log in &self.logs {
            result = result.and(log.stop());
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Can be collected in parts of so many pages.
    struct Parts(usize);

    impl DirtyLog for Parts {
        fn start(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn pages_per_collect(&self) -> usize {
            self.0
        }

        fn collect(&self, _: usize, _: usize, _: &mut [u64]) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn clear(&self, _: usize, _: usize, _: &[u64]) -> Result<(), DirtyLogError> {
            Ok(())
        }

        fn stop(&self) -> Result<(), DirtyLogError> {
            Ok(())
        }
    }

    #[test]
    fn a_part_is_one_of_every_log() {
        let parts = |each: &[usize]| {
            let log = |pages: &usize| Arc::new(Parts(*pages)) as Arc<dyn DirtyLog>;
            Merged::new(each.iter().map(log).collect()).pages_per_collect()
        };
        assert_eq!(parts(&[64, 256]), 256);
        assert_eq!(parts(&[192, 256]), usize::MAX);
        assert_eq!(parts(&[64, usize::MAX]), usize::MAX);
        assert_eq!(parts(&[]), usize::MAX);
    }
}
