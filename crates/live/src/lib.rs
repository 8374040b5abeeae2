//! Live migration for VMMs with direct access to guest memory.

#![deny(unsafe_code)]

mod dirty;
mod mapping;
mod memory;
mod present;
mod sys;

pub use dirty::{
    Bitmap, DirtyLog, DirtyLogError, KvmDirtyLog, KvmDirtyRing, KvmRings, KvmSlot, Merged,
    SharedBitmap, UserfaultLog,
};
pub use memory::{Ram, RamBlock, RamError, Region};
