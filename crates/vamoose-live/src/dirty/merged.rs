//! One dirty log of several, each of which sees writes that the others do not.

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
                    // What there is to report is why it could not start.
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

    /// The most of all of them: those that can do with less are given several parts at once.
    fn pages_per_collect(&self) -> usize {
        let pages = self.logs.iter().map(|log| log.pages_per_collect());
        pages.max().unwrap_or(usize::MAX)
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
