//! Live migration for VMMs with direct access to guest memory: pre-copy with dirty logs, convergence, and a
//! switchover after which exactly one side has the guest.
//!
//! ```text
//!        source                                                        destination
//!  RAM blocks + dirty log ─> rounds ─> zero scan ─> encode ─> channel ─> decode ─> RAM blocks
//!                              │ the rest fits into the downtime limit
//!  pause, save ────────────────┴─> last pages, device state ───────────> load, resume
//! ```
//!
//! - [`Ram`] and [`RamBlock`]: guest memory, over mappings of `vm-memory` (anonymous, memfd, hugetlb).
//! - [`dirty`]: which pages were written. KVM's logs, userfaultfd's write protection, a bitmap that the VMM feeds
//!   itself, and several merged.
//! - [`SourceGuest`] and [`DestinationGuest`]: implemented by the VMM: pause, resume, save, load.
//! - [`Source`] and [`Destination`]: one migration. [`Handle`] watches and cancels it, [`Status`] has the names of
//!   QEMU's `query-migrate`.
//! - [`Transport`] and [`Acceptor`]: how both reach each other, over sessions or plain connections.
//! - [`session`], [`compression`], [`dsa`]: keys and sessions, how pages are encoded, and devices that help.
//! - [`snapshot`]: a guest that goes to a file, and comes from one.
//! - [`GuestLocation`]: where the guest is when something breaks.
//!
//! Items that a VMM needs from the crates below are re-exported. The parts of errors are in [`causes`].
//!
//! A destination and a source with the default options:
//!
//! ```
//! # #[cfg(not(feature = "sessions"))]
//! # fn main() {}
//! # #[cfg(feature = "sessions")]
//! # mod lines {
//! # use std::{path::PathBuf, sync::Arc, thread};
//! # use vamoose_live::{Destination, DestinationGuest, GuestError, Keys, Ram, RamBlock, Remote, Source, SourceGuest};
//! # use vamoose_live::{vm_memory::MmapRegion, dirty::{DirtyLog, SharedBitmap}};
//! # struct Vm;
//! # impl SourceGuest for Vm {
//! #     fn pause(&mut self) -> Result<(), GuestError> { Ok(()) }
//! #     fn resume(&mut self) -> Result<(), GuestError> { Ok(()) }
//! #     fn save(&mut self) -> Result<Vec<u8>, GuestError> { Ok(vec![1]) }
//! # }
//! # impl DestinationGuest for Vm {
//! #     fn load(&mut self, _: &[u8]) -> Result<(), GuestError> { Ok(()) }
//! #     fn resume(&mut self) -> Result<(), GuestError> { Ok(()) }
//! # }
//! # fn ram() -> Result<Ram, GuestError> {
//! #     Ok(Ram::new(vec![RamBlock::new("ram", Arc::new(MmapRegion::<()>::new(1 << 20)?))?])?)
//! # }
//! # fn destination(address: &str, keys: PathBuf) -> Result<(), GuestError> {
//! # let (ram, mut vm) = (ram()?, Vm);
//! // The destination, at an address such as `tcp:[::]:7000`, with keys in a directory such as `/etc/vm`.
//! Destination::listen(address, Keys::at(keys), &ram)?.run(&mut vm)?;
//! # Ok(())
//! # }
//! # fn source(address: &str, keys: PathBuf) -> Result<(), GuestError> {
//! # let (ram, mut vm) = (ram()?, Vm);
//! # let log: Arc<dyn DirtyLog> = Arc::new(SharedBitmap::new(&ram));
//! // The source.
//! Source::new(&ram, log)?.run(Remote::new(address, Keys::at(keys))?, &mut vm)?;
//! # Ok(())
//! # }
//! # pub fn main() -> Result<(), GuestError> {
//! #     let directory = tempfile::tempdir()?;
//! #     let (near, far) = (directory.path().join("near"), directory.path().join("far"));
//! #     let (near_key, far_key) = (Keys::generate(&near)?, Keys::generate(&far)?);
//! #     std::fs::write(near.join("trusted"), format!("{far_key} far\n"))?;
//! #     std::fs::write(far.join("trusted"), format!("{near_key} near\n"))?;
//! #     let address = format!("unix:{}", directory.path().join("socket").display());
//! #     let arriving = thread::spawn({
//! #         let address = address.clone();
//! #         move || destination(&address, far)
//! #     });
//! #     // Until the destination listens.
//! #     while !arriving.is_finished() && source(&address, near.clone()).is_err() {}
//! #     arriving.join().unwrap()
//! # }
//! # }
//! # #[cfg(feature = "sessions")]
//! # use lines::main;
//! ```
//!
//! The log lines of a migration (`tracing`) lie in a span `migration` with the fields `role` and `attempt`.
//!
//! # Connections
//! A migration goes over a session ([`Transport::Session`], [`Acceptor::Sessions`]): the two ends authenticate each other,
//! by keys ([`Keys`]) or certificates ([`Certificates`](session::Certificates)), all data is encrypted and checked, and lost connections are
//! re-established within [`reconnect_timeout`](session::SessionConfig::reconnect_timeout). Pages have a checksum of their own, from before they are encoded to
//! after they are decoded. Plain sockets ([`Transport::Plain`], [`Acceptor::Plain`]) have none of this. They are for zero-copy
//! send, which a session does not support: a session has to resend exactly the bytes that it sent, and guest memory changes.
//!
//! # Example
//! The guest of this VMM is a counter in memory, and its device state is the counter's address. The source
//! and the destination would be two processes, on two hosts with a key each.
//!
//! ```
//! # #[cfg(not(feature = "sessions"))]
//! # fn main() {}
//! # #[cfg(feature = "sessions")]
//! # mod example {
//! use std::{sync::Arc, thread};
//!
//! use vamoose_live::{
//!     Destination, DestinationGuest, GuestError, Keys, Ram, RamBlock, Remote, Source, SourceGuest,
//!     dirty::SharedBitmap,
//!     vm_memory::{Bytes, MmapRegion},
//! };
//!
//! /// The VMM, on both sides.
//! struct Vm {
//!     ram: Ram,
//!     log: Arc<SharedBitmap>,
//!     counter_at: usize,
//!     runs: bool,
//! }
//!
//! impl Vm {
//!     fn new() -> Result<Self, GuestError> {
//!         let memory = Arc::new(MmapRegion::<()>::new(64 << 20)?);
//!         let ram = Ram::new(vec![RamBlock::new("ram", memory)?])?;
//!         let log = Arc::new(SharedBitmap::new(&ram));
//!         Ok(Vm { ram, log, counter_at: 0, runs: false })
//!     }
//!
//!     /// As a vCPU or a device does: write, then mark.
//!     fn set_counter(&self, value: u64) -> Result<(), GuestError> {
//!         self.ram.blocks()[0].memory().write_obj(value, self.counter_at)?;
//!         self.log.mark(0, self.counter_at as u64, 8);
//!         Ok(())
//!     }
//! }
//!
//! impl SourceGuest for Vm {
//!     fn pause(&mut self) -> Result<(), GuestError> {
//!         self.runs = false;
//!         Ok(())
//!     }
//!     fn resume(&mut self) -> Result<(), GuestError> {
//!         self.runs = true;
//!         Ok(())
//!     }
//!     fn save(&mut self) -> Result<Vec<u8>, GuestError> {
//!         Ok(self.counter_at.to_be_bytes().to_vec())
//!     }
//! }
//!
//! impl DestinationGuest for Vm {
//!     fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
//!         self.counter_at = usize::from_be_bytes(state.try_into()?);
//!         Ok(())
//!     }
//!     fn resume(&mut self) -> Result<(), GuestError> {
//!         self.runs = true;
//!         Ok(())
//!     }
//! }
//! # pub fn main() -> Result<(), GuestError> {
//! # let directory = tempfile::tempdir()?;
//! // As `vamoose keys init` does. Each side is told the other's public key.
//! let (near, far) = (directory.path().join("near"), directory.path().join("far"));
//! let (near_key, far_key) = (Keys::generate(&near)?, Keys::generate(&far)?);
//! let keys = |directory, key| Keys { directory, trusted: Some(vec![key]) };
//!
//! // The destination: accepts sessions, and runs the guest when it has arrived.
//! let mut there = Vm::new()?;
//! let mut destination =
//!     Destination::listen("tcp:127.0.0.1:0", keys(far, near_key), &there.ram)?;
//! let address = destination.addresses()[0].clone();
//! let arriving = thread::spawn(move || destination.run(&mut there).map(|_| there));
//!
//! // The source.
//! let mut here = Vm::new()?;
//! (here.runs, here.counter_at) = (true, 0x5000);
//! here.set_counter(42)?;
//! let to = Remote::new(&address.to_string(), keys(near, far_key))?;
//! let status = Source::new(&here.ram, here.log.clone())?.run(to, &mut here)?;
//! println!("moved {} bytes, downtime {:?}", status.ram.transferred, status.downtime);
//!
//! let there = arriving.join().unwrap()?;
//! assert!(there.runs && !here.runs);
//! let counter: u64 = there.ram.blocks()[0].memory().read_obj(there.counter_at)?;
//! assert_eq!(counter, 42);
//! # Ok(())
//! # }
//! # }
//! # #[cfg(feature = "sessions")]
//! # use example::main;
//! ```
//!
//! # Features
//! | feature | |
//! |---|---|
//! | `sessions` (default) | sessions; rustls is given aws-lc-rs explicitly |
//! | `sessions-ring` | the same where the VMM's own rustls uses ring: rustls is given ring, and the VMM's default provider stays ring |
//! | `lz4`, `zstd` (default) | methods lz4, zstd and zstd-frames. The adaptive method and deltas need them |
//! | `isal` | methods zlib, qpl and qatzip |
//! | `dsa` | Intel's DSA |
//!
//! Without features there is no C in the build: plain connections, and pages as they are.

#![deny(unsafe_code)]

mod config;
mod destination;
pub mod dirty;
mod error;
mod guest;
mod mapping;
mod memory;
mod missing;
mod offload;
mod parallel;
mod present;
#[doc(hidden)]
pub mod protocol;
#[cfg(feature = "_tls")]
pub mod snapshot;
mod source;
mod spans;
mod status;
mod sys;
#[cfg(test)]
#[path = "tests/ram.rs"]
mod test_ram;

pub use destination::{
    Accepted, Acceptor, Arrival, Destination, DestinationConfig, DestinationHandle,
};
pub use error::{DestinationError, SourceError};
pub use guest::{DestinationGuest, GuestError, SourceGuest, Switchover};
pub use handover::GuestLocation;
pub use memory::{Ram, RamBlock, RamError, RamInUse, Region};
pub use source::{
    AutoConverge, OnTimeout, OwnConnections, Source, SourceConfig, Transport, ZeroPageDetection,
};
pub use status::{Handle, Phase, RamStatus, Status};
pub use vamoose_link::{Address, Counters, DowntimeParts, Listener, chain, on_every_thread};
#[cfg(feature = "_tls")]
pub use vamoose_link::{Keys, Remote};
pub use vm_memory;

/// How pages are encoded: methods, their engines, and the adaptive choice.
pub mod compression {
    pub use multifd::Method;
    pub use vamoose_codec::{Accel, Engines, Registry, Settings, Verify};
    pub use vamoose_link::MethodChoice;
}

/// Intel's DSA: devices that look for zero pages at the source.
pub mod dsa {
    pub use crate::offload::{Devices, DsaDetection, OffloadCounters};
}

/// Sessions between two hosts: authenticated, encrypted, checked, and continued over new connections.
#[cfg(feature = "_tls")]
pub mod session {
    pub use vamoose_link::{
        Certificates, Cipher, FileKey, Keys, OneTimeKey, PageStore, Peers, PublicKey, Remote,
        Route, Security, Session, SessionConfig, Sessions,
    };
}

/// The causes of errors, also from the crates below.
pub mod causes {
    pub use crate::{
        dirty::DirtyLogError,
        error::{ChannelError, Mismatch},
        missing::MissingPagesError,
        offload::WrongVerdict,
    };
    pub use handover::{FrameError, VersionMismatch};
    pub use multifd::{InitialError, LayoutError, PacketError};
    pub use vamoose_codec::{DecodeError, EncodeError};
    pub use vamoose_link::{
        AddressError, ConversationError, DialError, ReadError, SocketError, WriteError,
        ZeroCopyError,
    };
    #[cfg(feature = "_tls")]
    pub use vamoose_link::{SessionsError, TlsError};
}
