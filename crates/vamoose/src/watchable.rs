//! Shows the migrations of a command to `vamoose attempts --watch`.

use std::{path::Path, thread::Scope};

use tracing::warn;
use vamoose_link::HangupGuard;
use vamoose_relay::{UnderWay, WatchError, Watchable, chain};

/// Makes this command visible in `dir`. A failure is only logged, because it must not end a migration.
pub fn bind(dir: &Path) -> Option<Watchable> {
    let refused = |error: &WatchError| {
        warn!(
            "`vamoose attempts --watch` will not see this: {}",
            chain(error)
        );
    };
    Watchable::bind(dir).inspect_err(refused).ok()
}

/// Answers with the migrations of `list` until the guard is dropped.
pub fn serve<'scope>(
    scope: &'scope Scope<'scope, '_>,
    watchable: Option<&'scope Watchable>,
    list: impl Fn() -> Vec<UnderWay> + Send + 'scope,
) -> Option<HangupGuard<'scope>> {
    let watchable = watchable?;
    scope.spawn(move || watchable.serve(&list));
    Some(watchable.ends_with())
}
