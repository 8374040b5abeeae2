//! Guest memory: RAM blocks over mappings that the guest keeps writing to.
//!
//! A mapping is accessed as a [`VolatileSlice`]: there are no Rust references to bytes that a vCPU may change.
//! They are copied out by `vm-memory`, or go by address to the system calls of `vamoose-link`.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use multifd::BlockName;
use thiserror::Error;
use vm_memory::{
    FileOffset, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion, VolatileMemory,
    VolatileSlice,
    bitmap::{Bitmap, BitmapSlice},
};

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
    /// How many migrations and snapshots need the blocks as they are, or [`CHANGES`].
    uses: Arc<AtomicUsize>,
}

/// The memory of a guest changes.
const CHANGES: usize = usize::MAX;

/// Keeps a [`Ram`] in use until it is dropped. See [`Ram::change`].
#[derive(Debug)]
pub struct RamInUse {
    uses: Arc<AtomicUsize>,
    as_many: usize,
}

impl Drop for RamInUse {
    fn drop(&mut self) {
        self.uses.fetch_sub(self.as_many, Ordering::AcqRel);
    }
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
    #[error(
        "memory cannot be added or removed now: a migration or a snapshot of the guest is under way"
    )]
    InUse,
    #[error("memory is being added or removed")]
    Changing,
    #[error("a guest without RAM blocks")]
    Empty,
    #[error("{blocks} RAM blocks are more than {MAX_BLOCKS}")]
    TooMany { blocks: usize },
    #[error("the region at guest address {guest_address:#x} has no mapping in this process")]
    NotMapped { guest_address: u64 },
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
        let uses = Arc::default();
        Ok(Self {
            blocks,
            page_size,
            uses,
        })
    }

    /// All regions of a guest's `memory`, each as a block named after its guest address: `ram@100000000`. The blocks keep clones of
    /// `memory`, which have to refer to the same mappings, as those of [`GuestMemoryMmap`](vm_memory::GuestMemoryMmap) do.
    ///
    /// # Errors
    /// As [`Ram::new`], and when a region is not mapped in this process.
    pub fn of_guest<M>(memory: &M) -> Result<Self, RamError>
    where
        M: GuestMemoryBackend + Clone + Send + Sync + 'static,
    {
        let blocks = memory.iter().enumerate().map(|(index, region)| {
            let guest_address = region.start_addr().0;
            whole_region(region).ok_or(RamError::NotMapped { guest_address })?;
            let memory = memory.clone();
            RamBlock::new(
                &format!("ram@{guest_address:x}"),
                Arc::new(RegionOf { memory, index }),
            )
        });
        Self::new(blocks.collect::<Result<_, _>>()?)
    }

    /// For a VMM that adds or removes memory of the guest: no migration and no snapshot of this memory begins until the result is
    /// dropped.
    ///
    /// # Errors
    /// [`RamError::InUse`] while one is under way, or waits for a source: the VMM refuses the change.
    pub fn change(&self) -> Result<RamInUse, RamError> {
        self.hold_as(CHANGES, |uses| uses == 0)
            .ok_or(RamError::InUse)
    }

    /// Keeps the blocks as they are.
    pub(crate) fn hold(&self) -> Result<RamInUse, RamError> {
        self.hold_as(1, |uses| uses != CHANGES)
            .ok_or(RamError::Changing)
    }

    fn hold_as(&self, as_many: usize, may: impl Fn(usize) -> bool) -> Option<RamInUse> {
        let more = |uses| may(uses).then(|| uses + as_many);
        let held = self
            .uses
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        held.ok().map(|_| RamInUse {
            uses: self.uses.clone(),
            as_many,
        })
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

impl From<&Ram> for Option<Ram> {
    fn from(ram: &Ram) -> Self {
        Some(ram.clone())
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
        without_bitmap(&self.as_volatile_slice())
    }

    fn file(&self) -> Option<&FileOffset> {
        self.file_offset()
    }
}

impl<B: Bitmap + Send + Sync> Region for GuestRegionMmap<B> {
    fn memory(&self) -> VolatileSlice<'_> {
        (**self).memory()
    }

    fn file(&self) -> Option<&FileOffset> {
        (**self).file_offset()
    }
}

/// A region of a guest's memory.
struct RegionOf<M> {
    memory: M,
    index: usize,
}

impl<M: GuestMemoryBackend + Send + Sync> Region for RegionOf<M> {
    /// Empty if the clone of the memory has fewer regions, or none that is mapped, which [`Ram::new`] then refuses.
    fn memory(&self) -> VolatileSlice<'_> {
        let region = self.memory.iter().nth(self.index);
        region
            .and_then(whole_region)
            .unwrap_or_else(|| VolatileSlice::from(&mut [][..]))
    }

    fn file(&self) -> Option<&FileOffset> {
        self.memory.iter().nth(self.index)?.file_offset()
    }
}

/// The mapping of `region`, without its bitmap; `None` if it has none in this process.
fn whole_region<R: GuestMemoryRegion>(region: &R) -> Option<VolatileSlice<'_>> {
    Some(without_bitmap(&region.as_volatile_slice().ok()?))
}

#[allow(
    unsafe_code,
    reason = "another view of a mapping, without its bitmap: the proof is at the block"
)]
fn without_bitmap<'a, B: BitmapSlice>(memory: &VolatileSlice<'a, B>) -> VolatileSlice<'a> {
    let (start, len) = (memory.ptr_guard_mut().as_ptr(), memory.len());
    // SAFETY: `memory` is valid for its lifetime, which is that of the new slice. Its bitmap, if there is one, counts writes of
    // this process: as a source the migration only reads, and at the destination every page is new to the VMM.
    unsafe { VolatileSlice::new(start, len) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vm_memory::{
        Address as _, Bytes, GuestAddress, GuestMemoryMmap, GuestMemoryRegionBytes,
        GuestRegionCollection, GuestUsize, MemoryRegionAddress, bitmap::AtomicBitmap, guest_memory,
    };

    use super::*;

    const RANGES: [(GuestAddress, usize); 2] = [
        (GuestAddress(0), 0x3000),
        (GuestAddress(0x1_0000_0000), 0x2000),
    ];

    /// A VMM's own kind of region, as Firecracker has one.
    struct Wrapped {
        region: GuestRegionMmap<AtomicBitmap>,
        is_mapped: bool,
    }

    impl GuestMemoryRegion for Wrapped {
        type B = AtomicBitmap;

        fn len(&self) -> GuestUsize {
            self.region.len()
        }

        fn start_addr(&self) -> GuestAddress {
            self.region.start_addr()
        }

        fn bitmap(&self) -> vm_memory::bitmap::BS<'_, AtomicBitmap> {
            self.region.bitmap()
        }

        fn get_slice(
            &self,
            offset: MemoryRegionAddress,
            count: usize,
        ) -> guest_memory::Result<VolatileSlice<'_, vm_memory::bitmap::BS<'_, AtomicBitmap>>>
        {
            match self.is_mapped {
                true => self.region.get_slice(offset, count),
                false => Err(guest_memory::Error::HostAddressNotAvailable),
            }
        }
    }

    impl GuestMemoryRegionBytes for Wrapped {}

    fn wrapped(is_mapped: bool) -> GuestRegionCollection<Wrapped> {
        let regions = RANGES.map(|(start, len)| Wrapped {
            region: GuestRegionMmap::from_range(start, len, None).unwrap(),
            is_mapped,
        });
        GuestRegionCollection::from_arc_regions(regions.map(Arc::new).to_vec()).unwrap()
    }

    /// Writes through the guest's memory, and reads through the blocks.
    fn check<M>(memory: M)
    where
        M: GuestMemoryBackend + Clone + Send + Sync + 'static,
    {
        let ram = Ram::of_guest(&memory).unwrap();
        for (start, _) in RANGES {
            memory
                .write_obj(start.0 ^ 7, start.unchecked_add(0x1008))
                .unwrap();
        }
        drop(memory);
        let names: Vec<_> = ram
            .blocks()
            .iter()
            .map(|it| it.name().to_string())
            .collect();
        assert_eq!(names, ["ram@0", "ram@100000000"]);
        for (block, (start, len)) in ram.blocks().iter().zip(RANGES) {
            assert_eq!(block.len(), len);
            let written: u64 = block.memory().read_obj(0x1008).unwrap();
            assert_eq!(written, start.0 ^ 7);
        }
    }

    #[test]
    fn the_memory_of_a_guest_is_its_regions() {
        check(GuestMemoryMmap::<()>::from_ranges(&RANGES).unwrap());
        check(GuestMemoryMmap::<AtomicBitmap>::from_ranges(&RANGES).unwrap());
        check(wrapped(true));
        let guest_address = 0;
        assert_eq!(
            Ram::of_guest(&wrapped(false)).unwrap_err(),
            RamError::NotMapped { guest_address }
        );
    }
}
