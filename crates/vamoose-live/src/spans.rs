//! All threads of a migration log in its span `migration`.

use tracing::Span;
use vamoose_link::for_thread;

/// `run`, in the current span, for another thread.
pub(crate) fn in_span<T>(run: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let span = Span::current();
    for_thread(move || span.in_scope(run))
}
