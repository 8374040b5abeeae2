//! What tests of this crate and of those above it use (cargo feature `fault-injection`).

mod faulty;

pub use faulty::Faults;
pub(crate) use faulty::Faulty;
