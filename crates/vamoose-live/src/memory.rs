//! Guest memory: RAM blocks over mappings that the guest keeps writing to.
//!
//! A mapping is accessed as a [`VolatileSlice`]: there are no Rust references to bytes that a vCPU may change.
//! They are copied out by `vm-memory`, or go by address to the system calls of `vamoose-link`.

use std::{fmt, ops::Range, sync::Arc};

use multifd::BlockName;
use thiserror::Error;
use vm_memory::{FileOffset, GuestRegionMmap, MmapRegion, VolatileSlice, bitmap::Bitmap};

/// A mapping of guest memory.
pub trait Region: Send + Sync {
    /// The whole mapping.
    fn memory(&self) -> VolatileSlice<'_>;

    /// The file behind a shared mapping (memfd, hugetlbfs) and where in it the mapping begins; `None` for
    /// private memory. The file of a shared mapping shows which parts were never written.
    fn file(&self) -> Option<&FileOffset>;

    /// Whether an untouched page may get other content than zeros when it is touched, as in a guest that is restored from a
    /// snapshot page by page. Such memory is read and sent as a whole.
    ///
    /// Memory that a userfaultfd fills (missing or minor mode) is recognised without this. This is for VMMs that fill memory in
    /// another way, or begin to do so while a migration runs.
    fn is_filled_lazily(&self) -> bool {
        false
    }
}

/// The whole memory of a guest.
#[derive(Clone, Debug)]
pub struct Ram {
    blocks: Vec<RamBlock>,
    page_size: usize,
}

/// A named part of guest memory, which has the same name and length at the destination.
#[derive(Clone)]
pub struct RamBlock {
    name: BlockName,
    region: Arc<dyn Region>,
}

/// RAM that cannot be migrated.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RamError {
    #[error("`{name}` is no name for a RAM block: it needs 1 to 255 bytes without a NUL")]
    Name { name: String },
    #[error("two RAM blocks are called `{name}`")]
    Duplicate { name: String },
    #[error(
        "RAM block `{name}` ({len} bytes at {address:#x}) is not made of whole pages of {page_size} bytes"
    )]
    Pages {
        name: String,
        len: usize,
        address: usize,
        page_size: usize,
    },
    #[error("a guest without RAM blocks")]
    Empty,
    #[error("{blocks} RAM blocks are more than {MAX_BLOCKS}")]
    TooMany { blocks: usize },
}

/// Most RAM blocks of a guest.
const MAX_BLOCKS: usize = 1024;

impl Ram {
    /// The memory that consists of `blocks`, in pages of the host's page size.
    ///
    /// # Errors
    /// When there are no blocks, two of one name, or one that is not made of whole pages.
    pub fn new(blocks: Vec<RamBlock>) -> Result<Self, RamError> {
        let page_size = rustix::param::page_size();
        if blocks.is_empty() {
            return Err(RamError::Empty);
        }
        if blocks.len() > MAX_BLOCKS {
            return Err(RamError::TooMany {
                blocks: blocks.len(),
            });
        }
        for (index, block) in blocks.iter().enumerate() {
            let name = || block.name.to_string();
            if blocks[..index].iter().any(|other| other.name == block.name) {
                return Err(RamError::Duplicate { name: name() });
            }
            let (len, address) = (block.len(), block.address());
            if len == 0 || !len.is_multiple_of(page_size) || !address.is_multiple_of(page_size) {
                return Err(RamError::Pages {
                    name: name(),
                    len,
                    address,
                    page_size,
                });
            }
        }
        Ok(Self { blocks, page_size })
    }

    /// The blocks, in their order.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Bytes in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Bytes in all blocks.
    pub fn total_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.len() as u64).sum()
    }

    /// The number of pages of block `index`; 0 if there is no such block.
    pub fn pages(&self, index: usize) -> usize {
        self.blocks
            .get(index)
            .map_or(0, |block| block.len() / self.page_size)
    }
}

impl RamBlock {
    /// The block `name` over `region`.
    ///
    /// # Errors
    /// When the name does not fit into a packet.
    pub fn new(name: &str, region: Arc<dyn Region>) -> Result<Self, RamError> {
        let name = BlockName::new(name.as_bytes()).map_err(|_| RamError::Name {
            name: name.to_owned(),
        })?;
        Ok(Self { name, region })
    }

    /// The block's name, as packets carry it.
    pub fn name(&self) -> BlockName {
        self.name
    }

    /// The block's memory.
    pub fn memory(&self) -> VolatileSlice<'_> {
        self.region.memory()
    }

    /// See [`Region::file`].
    pub fn file(&self) -> Option<&FileOffset> {
        self.region.file()
    }

    /// See [`Region::is_filled_lazily`].
    pub fn is_filled_lazily(&self) -> bool {
        self.region.is_filled_lazily()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.region.memory().len()
    }

    /// Whether there is no memory in it. [`Ram`] has no such blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the mapping in this process.
    pub fn address(&self) -> usize {
        self.region.memory().ptr_guard().as_ptr().addr()
    }

    pub(crate) fn addresses(&self) -> Range<usize> {
        self.address()..self.address() + self.len()
    }
}

impl fmt::Debug for RamBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({} bytes at {:#x})",
            self.name,
            self.len(),
            self.address()
        )
    }
}

impl<B: Bitmap + Send + Sync> Region for MmapRegion<B> {
    fn memory(&self) -> VolatileSlice<'_> {
        whole(self)
    }

    fn file(&self) -> Option<&FileOffset> {
        self.file_offset()
    }
}

impl<B: Bitmap + Send + Sync> Region for GuestRegionMmap<B> {
    fn memory(&self) -> VolatileSlice<'_> {
        whole(self)
    }

    fn file(&self) -> Option<&FileOffset> {
        self.file_offset()
    }
}

#[allow(
    unsafe_code,
    reason = "another view of a mapping, without its bitmap: the proof is at the block"
)]
fn whole<B: Bitmap>(region: &MmapRegion<B>) -> VolatileSlice<'_> {
    // SAFETY: the region is mapped at this address with this length for as long as it is borrowed, which
    // is the lifetime of the slice. Its bitmap, if there is one, counts writes of this process: as
    // a source the migration only reads, and at the destination every page is new to the VMM.
    unsafe { VolatileSlice::new(region.as_ptr(), region.size()) }
}
