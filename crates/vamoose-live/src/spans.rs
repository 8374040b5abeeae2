//! Log lines lie in the span `migration` of their migration, whichever of its threads writes them.

use tracing::Span;

/// `run`, on another thread, within the span of this one.
pub(crate) fn in_span<T>(run: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let span = Span::current();
    move || span.in_scope(run)
}
