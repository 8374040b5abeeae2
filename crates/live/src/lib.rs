//! Live migration for VMMs with direct access to guest memory.

#![deny(unsafe_code)]

mod dirty;
mod memory;

pub use dirty::{Bitmap, DirtyLog, DirtyLogError, SharedBitmap};
pub use memory::{Ram, RamBlock, RamError, Region};
