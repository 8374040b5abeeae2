//! What a program does first on every thread that a link or a migration starts.

use std::{
    io,
    sync::OnceLock,
    thread::{Builder, JoinHandle},
};

static FIRST: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Has `first` called on every thread that this crate and those above it start from here on, before anything else, on that thread: to
/// install a seccomp filter, or to choose processors. False if there is one already: it stays.
#[must_use]
pub fn on_every_thread(first: impl Fn() + Send + Sync + 'static) -> bool {
    FIRST.set(Box::new(first)).is_ok()
}

/// `run`, for a new thread.
pub fn for_thread<T>(run: impl FnOnce() -> T) -> impl FnOnce() -> T {
    move || {
        if let Some(first) = FIRST.get() {
            first();
        }
        run()
    }
}

/// Starts a thread.
pub(crate) fn spawn<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().spawn(for_thread(run))
}
