//! Errors as text: for a log, a status, a journal, a peer.

use std::error::Error;

/// An error and its causes on one line: `a: b: c`.
pub fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        line.push_str(&format!(": {cause}"));
        next = cause.source();
    }
    line
}
