//! One module a command.

pub(crate) mod attempts;
pub(crate) mod inspect;
#[cfg(target_arch = "x86_64")]
pub(crate) mod live_demo;
pub(crate) mod migrate;
pub(crate) mod probe;
pub(crate) mod relay;
pub(crate) mod selftest;
pub(crate) mod serve;
pub(crate) mod settle;
