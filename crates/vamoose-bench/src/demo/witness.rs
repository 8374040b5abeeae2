//! Measures the noise of this machine: by how much a sleeping thread wakes up late.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A thread that sleeps 10 ms at a time and records its longest delay. Ends on drop.
pub(crate) struct Witness {
    /// The thread runs as long as this exists.
    wanted: Arc<()>,
    thread: JoinHandle<Duration>,
}

impl Witness {
    pub(crate) fn start() -> Self {
        const NAP: Duration = Duration::from_millis(10);
        let wanted = Arc::new(());
        let still_wanted = Arc::downgrade(&wanted);
        let thread = thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while still_wanted.strong_count() > 0 {
                let start = Instant::now();
                thread::sleep(NAP);
                longest = longest.max(start.elapsed().saturating_sub(NAP));
            }
            longest
        });
        Self { wanted, thread }
    }

    /// The longest delay since the start.
    pub(crate) fn finish(self) -> Duration {
        drop(self.wanted);
        self.thread.join().unwrap_or_default()
    }
}
