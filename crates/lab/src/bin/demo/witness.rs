//! What this machine does to a process that only wants to wake up: the noise that no program is to blame for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A thread that sleeps 10 ms at a time, and notes by how much it overslept at worst. Ends on drop.
pub(crate) struct Witness {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<Duration>>,
}

impl Witness {
    pub(crate) fn start() -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let done = Arc::clone(&done);
            move || watch(&done)
        });
        Self {
            done,
            thread: Some(thread),
        }
    }

    /// The longest delay since the start.
    pub(crate) fn finish(mut self) -> Duration {
        self.end().unwrap_or_default()
    }

    fn end(&mut self) -> Option<Duration> {
        self.done.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.end();
    }
}

fn watch(done: &AtomicBool) -> Duration {
    const NAP: Duration = Duration::from_millis(10);
    let mut longest = Duration::ZERO;
    while !done.load(Ordering::Relaxed) {
        let start = Instant::now();
        thread::sleep(NAP);
        longest = longest.max(start.elapsed().saturating_sub(NAP));
    }
    longest
}
