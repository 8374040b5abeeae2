//! What the host is like. Every figure of the experiment follows from these, the driver's code, and nothing else.

/// Virtual time, in picoseconds: a page takes a device 136 533 of them.
pub(crate) type Picos = u64;

/// One microsecond.
pub(crate) const MICRO: Picos = 1_000_000;
/// One millisecond.
pub(crate) const MILLI: Picos = 1000 * MICRO;
/// One second.
pub(crate) const SECOND: Picos = 1000 * MILLI;

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
/// Pages of a batch: those of a multifd packet.
pub(crate) const BATCH: usize = 128;

/// A host, and what things cost there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Parameters {
    /// DSAs, each with one shared work queue.
    pub(crate) devices: usize,
    /// Entries of each queue, all of them for the portals of processes.
    pub(crate) entries: u32,
    /// Descriptors that a device has fetched at most, beyond those in the queue: one for each engine.
    pub(crate) engines: usize,
    /// A device and one page: 4096 bytes at 30 GB/s. A page that is not zero costs as much (assumed).
    pub(crate) device_page: Picos,
    /// From the end of the transfer to the record.
    pub(crate) latency: Picos,
    /// A processor and a page that is zero, from DRAM: 10 GB/s. The zero-page scan of QEMU's DSA patches cost 11.2 s of
    /// CPU for 100 GiB of zeros, which is 0.43 µs a page with everything around it.
    pub(crate) cpu_zero: Picos,
    /// A processor and a page that is not zero: one line that is in no cache (assumed).
    pub(crate) cpu_normal: Picos,
    /// Bytes of DRAM that this line costs, with the one that is prefetched.
    pub(crate) normal_bytes: u64,
    /// Building one descriptor.
    pub(crate) build: Picos,
    /// Reading one record.
    pub(crate) parse: Picos,
    /// What there is to do for each batch: a slot, a queue, credits.
    pub(crate) batch: Picos,
    /// One ENQCMD, accepted or not: it waits for the device's answer over the bus (assumed; it is a non-posted write).
    pub(crate) enqcmd: Picos,
    /// A look at the clock, and again at a record that was not there.
    pub(crate) look: Picos,
    /// Bytes a second that DRAM gives to all processors and devices together; `None` for no limit.
    pub(crate) memory: Option<u64>,
    /// Bytes a second that the host's link takes, which all guests that send have the same part of.
    pub(crate) link: u64,
}

impl Default for Parameters {
    /// The host of the question: eight devices as the driver's model has them, and a core for each guest.
    fn default() -> Self {
        Self {
            devices: 8,
            entries: 128,
            engines: 4,
            device_page: PAGE * SECOND / 30_000_000_000,
            latency: MICRO,
            cpu_zero: 400_000,
            cpu_normal: 100_000,
            normal_bytes: 128,
            build: 12_000,
            parse: 8_000,
            batch: 100_000,
            enqcmd: 300_000,
            look: 20_000,
            memory: Some(300_000_000_000),
            link: 50_000_000_000,
        }
    }
}
