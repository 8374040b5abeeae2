//! All threads of a migration log in its span `migration`.

use tracing::Span;

/// `run`, in the current span, for another thread.
pub(crate) fn in_span<T>(run: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let span = Span::current();
    move || span.in_scope(run)
}
