//! Shared by the gateway and the server: draining, and threads whose panics end no other migration.

use std::{
    io,
    panic::{self, AssertUnwindSafe},
    sync::OnceLock,
    thread::{self, Scope},
    time::{Duration, Instant},
};

use tracing::{Span, error, warn};

/// Deadline for the migrations under way, once no further ones are accepted.
#[derive(Default)]
pub(crate) struct Draining(OnceLock<Instant>);

impl Draining {
    pub(crate) fn begin(&self, within: Duration) {
        self.0.get_or_init(|| Instant::now() + within);
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.0.get().is_some()
    }

    /// Whether draining has begun, and either nothing is under way any more or the deadline has passed. A migration that `must_end` is
    /// waited for.
    pub(crate) fn has_ended(
        &self,
        is_idle: impl FnOnce() -> bool,
        must_end: impl FnOnce() -> bool,
    ) -> bool {
        let Some(&until) = self.0.get() else {
            return false;
        };
        if is_idle() {
            return true;
        }
        let is_late = Instant::now() >= until && !must_end();
        if is_late {
            warn!("migrations under way have not ended in time: they are ended now");
        }
        is_late
    }
}

/// Runs `work` in a thread of its own, within `span`. A panic ends this thread only.
pub(crate) fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    span: Span,
    work: impl FnOnce() + Send + 'scope,
) -> io::Result<()> {
    let work = move || span.in_scope(|| catch(work).unwrap_or_default());
    thread::Builder::new().spawn_scoped(scope, work)?;
    Ok(())
}

/// The result of `work`. `None` after a panic, which is logged.
pub(crate) fn catch<T>(work: impl FnOnce() -> T) -> Option<T> {
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    if result.is_err() {
        error!("a bug has ended this migration: its connections are closed");
    }
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draining_ends_when_idle_or_late() {
        let draining = Draining::default();
        assert!(!draining.has_begun() && !draining.has_ended(|| true, || false));
        draining.begin(Duration::from_secs(60));
        assert!(draining.has_begun() && !draining.has_ended(|| false, || false));
        assert!(draining.has_ended(|| true, || false));
        let late = Draining::default();
        late.begin(Duration::ZERO);
        assert!(late.has_ended(|| false, || false));
        assert!(!late.has_ended(|| false, || true));
    }

    #[test]
    fn panic_ends_only_its_own_thread() {
        let other = thread::scope(|scope| {
            spawn(scope, Span::none(), || panic!("as a test wants it")).unwrap();
            scope.spawn(|| 7).join().unwrap()
        });
        assert_eq!(other, 7);
        assert_eq!(catch(|| 8), Some(8));
    }
}
