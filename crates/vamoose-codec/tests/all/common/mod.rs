//! What several files of tests need.

pub(crate) mod guarded;
pub(crate) mod oracle;
pub(crate) mod pages;
