//! One module per command.

pub(crate) mod attempts;
pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod evacuate;
pub(crate) mod gateway;
pub(crate) mod keys;
pub(crate) mod libvirt;
pub(crate) mod migrate;
pub(crate) mod pages;
pub(crate) mod predict;
pub(crate) mod probe;
pub(crate) mod relay;
pub(crate) mod selftest;
pub(crate) mod serve;
pub(crate) mod settle;
mod virsh;
