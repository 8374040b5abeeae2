//! Placement: a relay writes pages directly into the memory of its destination QEMU, instead of sending them to QEMU.
//!
//! ```text
//!  source ─> channel ─> relay ──── pages of shared RAM blocks ───> file ══════ memory of QEMU
//!                         │                                                      ▲
//!                         └─ SYNCs, pages of other blocks, device state ─> QEMU ─┘ main stream
//! ```
//!
//! Placement needs RAM blocks that are files or memfds mapped shared (`share=on`), as guests with vhost-user devices
//! have. `find` finds these blocks of a QEMU, `block` is the memory of one, and `channels` has the threads.
//!
//! # Why the memory is right
//!
//! QEMU's own rule is: a page that came behind SYNC n of its channel is written when the main thread has passed mark n of
//! the main stream, and before the channel's SYNC n+1 counts. The main thread passes mark n when SYNC n of every channel has
//! come. The relay follows the same rule, so that pages are ordered as in QEMU:
//!
//! - **Not before mark n.** After a SYNC, the relay sends an empty packet on the channel, and places nothing until QEMU has
//!   read it ([`ChannelWriter::wait_for_reader`](vamoose_link::ChannelWriter::wait_for_reader)): QEMU's thread of the channel
//!   stops at a SYNC until the main thread has passed the mark. So pages and zero pages on the main stream (sources before 9.0,
//!   `zero-page-detection=legacy`) are written in their turn. Pages before the first SYNC are an error: only then has QEMU
//!   compared the list of RAM blocks with its own.
//! - **Before SYNC n+1.** The thread that places a channel's pages also sends the channel's SYNCs, in their order.
//! - **Not after the end.** When QEMU reports that it has loaded the guest, [`Placement::close`] waits for pages that are being
//!   written (a correct source has none), and every later page is an error.
//!
//! Zero pages: QEMU clears only pages that it has received itself, so the relay writes the zero pages of a placed block and
//! does not send them to QEMU. A page that was not written in this migration is zero if QEMU has created the file, which has no
//! name then (a memfd, or unlinked) or is younger than QEMU's process. QEMU assumes the same of all its memory. Nothing is
//! assumed of other files, or of any file once pages with content have come on the main stream, which no known source sends
//! beside channels: a page that is a hole or all zeros is left alone, and any other page is cleared.
//!
//! # What is left to QEMU
//!
//! | | |
//! |---|---|
//! | private memory, ROMs, video memory, blocks whose length may change | their packets are sent to QEMU as ever |
//! | QEMU before 8.0 | does not report addresses: nothing is placed |
//! | a destination that is not on a unix socket, other numbers of channels in and out, `--encoders` | nothing is placed |
//! | a monitor whose process is not the one that listens, by the credentials of its socket | nothing is placed |
//! | guests with smaller pages than the host's | nothing is placed |
//! | postcopy, COLO, `mapped-ram`, `x-ignore-shared` | nothing is placed: QEMU tracks the pages itself |
//! | unallocated memory, and a relay in another control group than QEMU | not by `auto`: it would count as the relay's |
//!
//! QEMU tracks received pages only for postcopy and for zero pages in packets, neither of which it gets here. Devices (VFIO,
//! vhost-user) see the same memory as without placement. Neither KVM nor TCG has used it yet. If the migration fails, the
//! placed pages are in a QEMU that will never run this guest.
//!
//! Missing memory (a full file system, no huge page left) fails the migration. **A process that truncates a file of huge pages
//! ends the relay** (SIGBUS), and QEMU too; QEMU's memfds are sealed against that.

mod block;
mod find;

use std::{
    path::Path,
    sync::{Arc, PoisonError, RwLock},
};

use multifd::{BlockName, Layout};
use thiserror::Error;
use tracing::info;
use vamoose_link::{Packet, Socket, Stream};

use crate::{chain, process::ProcessId, qemu::Qemu};
use block::Block;
pub use find::NotPlaced;

/// When pages are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementMode {
    /// Where possible.
    Auto,
    /// Always. A QEMU whose memory cannot be written is refused.
    On,
    /// Never.
    Off,
}

/// Memory of a QEMU that this process can write.
pub struct Placement {
    /// The QEMU's process.
    process: ProcessId,
    blocks: Vec<Block>,
    /// The migration must fail without placement.
    pub(crate) is_demanded: bool,
    /// Locked for reading while pages are being written. True once no page may be written any more.
    closed: RwLock<bool>,
}

/// Why a packet was not placed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PlaceError {
    #[error(
        "the source sent a page at offset {offset:#x} of RAM block {block}, which has {len:#x} bytes"
    )]
    Offset {
        offset: u64,
        block: String,
        len: usize,
    },
    #[error("the source sent pages before its first SYNC")]
    TooEarly,
    #[error("the source sent pages after the destination had loaded the guest")]
    Loaded,
    #[error("the system does not provide the destination's memory (RAM block {block})")]
    Memory {
        block: String,
        #[source]
        error: std::io::Error,
    },
}

impl Placement {
    /// Finds the memory of the QEMU whose monitor is at `path`. `None` if pages are to be sent to QEMU; the log has the reason.
    ///
    /// # Errors
    /// When pages cannot be placed, and `mode` requires it.
    pub fn at(
        path: &Path,
        mode: PlacementMode,
        layout: Layout,
    ) -> Result<Option<Arc<Self>>, NotPlaced> {
        Self::choose(mode, || Self::find(&mut Qemu::connect(path)?, mode, layout))
    }

    /// Like [`Placement::at`], for a QEMU that has been set up for a migration whose guest has pages as in `layout`.
    pub(crate) fn of(
        qemu: &mut Qemu,
        mode: PlacementMode,
        layout: Layout,
    ) -> Result<Option<Arc<Self>>, NotPlaced> {
        Self::choose(mode, || Self::find(qemu, mode, layout))
    }

    fn choose(
        mode: PlacementMode,
        find: impl FnOnce() -> Result<Self, NotPlaced>,
    ) -> Result<Option<Arc<Self>>, NotPlaced> {
        if mode == PlacementMode::Off {
            return Ok(None);
        }
        match find() {
            Ok(placement) => {
                let names = placement.blocks.iter().map(|block| block.name.to_string());
                let names = names.collect::<Vec<_>>().join(", ");
                info!("writing pages into QEMU's memory: {names}");
                Ok(Some(Arc::new(placement)))
            }
            Err(reason) if mode == PlacementMode::On => Err(reason),
            Err(reason) => {
                info!("sending pages to QEMU: {}", chain(&reason));
                Ok(None)
            }
        }
    }

    /// The block, if its pages are placed.
    pub(crate) fn block(&self, name: &BlockName) -> Option<&Block> {
        self.blocks.iter().find(|block| block.name == *name)
    }

    /// Whether `stream` is a connection to the QEMU whose memory this is.
    pub(crate) fn is_behind(&self, stream: &Stream) -> bool {
        let peer = stream.socket().and_then(Socket::peer_pid);
        // Alive, so no other process has reused its number.
        peer == Some(self.process.pid) && matches!(self.process.is_alive(), Ok(true))
    }

    /// Writes the normal pages of a packet into `block`, and clears its zero pages. With `main_has_pages`, QEMU may have
    /// written pages of the block itself.
    pub(crate) fn place(
        &self,
        block: &Block,
        packet: &Packet,
        main_has_pages: bool,
    ) -> Result<(), PlaceError> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(PlaceError::Loaded);
        }
        let header = packet.ram();
        block.write(header.normal_offsets(), packet.pages())?;
        block.clear(header.zero_offsets(), main_has_pages)
    }

    /// Ends placement: nothing is written after this returns.
    pub(crate) fn close(&self) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixStream,
        sync::{Arc, mpsc},
        thread,
        time::Duration,
    };

    use multifd::RamHeader;
    use rustix::io::ioctl_fionread;
    use rustix::net::{RecvFlags, recv};
    use vamoose_codec::{Decoder, Engines, Settings};
    use vamoose_link::{ChannelReader, ChannelWriter, Stats};

    use super::*;
    use crate::{
        Config, RelayError,
        channels::{self, Out},
        syncs::Syncs,
    };

    const LAYOUT: Layout = Layout::X86;
    const PAGE: usize = 4096;
    const LIMIT: Duration = Duration::from_secs(60);

    fn placement() -> Placement {
        Placement {
            process: ProcessId {
                pid: std::process::id(),
                start_time: 0,
            },
            blocks: vec![block::tests::block(&[1; 4 * PAGE])],
            is_demanded: false,
            closed: RwLock::new(false),
        }
    }

    /// A packet with one page of sevens and one of zeros.
    fn pages(name: &[u8]) -> Vec<u8> {
        pages_of(name, 7)
    }

    fn pages_of(name: &[u8], byte: u8) -> Vec<u8> {
        let mut header = RamHeader::new(LAYOUT);
        header.block = BlockName::new(name).unwrap();
        header.set_pages(&[0x1000], &[0x3000], LAYOUT).unwrap();
        header.set_payload_len(PAGE, LAYOUT).unwrap();
        let mut bytes = Vec::new();
        header.write(LAYOUT, &mut bytes);
        bytes.extend([byte; PAGE]);
        bytes
    }

    fn sync() -> Vec<u8> {
        let mut header = RamHeader::new(LAYOUT);
        header.sync = true;
        let mut bytes = Vec::new();
        header.write(LAYOUT, &mut bytes);
        bytes
    }

    /// A channel through a relay.
    struct Channel {
        incoming: Arc<UnixStream>,
        reader: ChannelReader,
        writer: ChannelWriter,
        config: Config,
        stats: Arc<Stats>,
    }

    /// The source's end of a channel, what is between, and QEMU's end.
    fn channel() -> (UnixStream, Channel, UnixStream) {
        let (source, incoming) = UnixStream::pair().unwrap();
        let (outgoing, qemu) = UnixStream::pair().unwrap();
        let config = Config::new(Engines::software(Settings::default()));
        let stats = Arc::<Stats>::default();
        let encoder = config.method.encoder(LAYOUT, stats.health()).unwrap();
        let kept = Arc::new(incoming.try_clone().unwrap());
        let outgoing = Arc::new(outgoing.into());
        let decoder = Decoder::new(LAYOUT);
        let channel = Channel {
            incoming: kept,
            reader: ChannelReader::new(Arc::new(incoming.into()), LAYOUT, decoder, stats.clone()),
            writer: ChannelWriter::new(outgoing, LAYOUT, encoder, None, stats.clone()),
            config,
            stats,
        };
        (source, channel, qemu)
    }

    impl Channel {
        fn run(
            mut self,
            placement: &Placement,
            syncs: &Syncs,
            channel: usize,
        ) -> Result<(), RelayError> {
            let stats = &self.stats;
            let out = Out {
                channel,
                stats,
                syncs,
            };
            let (reader, writer) = (&mut self.reader, &mut self.writer);
            channels::pass_on(reader, writer, Some(placement), &self.config, out)
        }
    }

    /// Runs a channel whose source sends `packets`, beside `qemu`, which has the other end.
    fn run(
        placement: &Placement,
        packets: &[Vec<u8>],
        qemu: impl FnOnce(UnixStream) + Send,
    ) -> Result<(), RelayError> {
        let (mut source, channel, destination) = channel();
        thread::scope(|scope| {
            scope.spawn(|| qemu(destination));
            source.write_all(&packets.concat()).unwrap();
            drop(source);
            channel.run(placement, &Syncs::new(1), 0)
        })
    }

    fn content(placement: &Placement) -> Vec<u8> {
        let content = block::tests::content(&placement.blocks[0]);
        content.chunks(PAGE).map(|page| page[5]).collect()
    }

    fn read_header(qemu: &mut UnixStream) -> Vec<u8> {
        let mut header = vec![0; LAYOUT.ram_header_len()];
        qemu.read_exact(&mut header).unwrap();
        header
    }

    #[test]
    fn pages_after_a_sync_wait_until_qemu_reads_on() {
        let placement = placement();
        run(&placement, &[sync(), pages(b"mem")], |mut qemu| {
            assert_eq!(read_header(&mut qemu), sync());
            // A packet behind the SYNC is there, and has not been read.
            let mut first = [0; 4];
            recv(&qemu, &mut first, RecvFlags::PEEK).unwrap();
            assert_eq!(content(&placement), [1, 1, 1, 1]);
            read_header(&mut qemu);
            let nothing = qemu.read(&mut first).unwrap();
            assert_eq!(nothing, 0);
        })
        .unwrap();
        assert_eq!(content(&placement), [1, 7, 1, 0]);
    }

    /// Channel 0 is a round ahead: its page goes to the same place as one of channel 1 that is late.
    #[test]
    fn round_is_placed_after_all_channels_have_ended_the_last_one() {
        let placement = placement();
        let syncs = Syncs::new(2);
        let (mut early, ahead, mut qemu_ahead) = channel();
        let (mut late, behind, mut qemu_behind) = channel();
        early
            .write_all(&[sync(), sync(), pages(b"mem")].concat())
            .unwrap();
        late.write_all(&sync()).unwrap();
        thread::scope(|scope| {
            let ahead = scope.spawn(|| ahead.run(&placement, &syncs, 0));
            let behind = scope.spawn(|| behind.run(&placement, &syncs, 1));
            // QEMU goes on from a SYNC when it has it from both.
            assert_eq!(read_header(&mut qemu_ahead), sync());
            assert_eq!(read_header(&mut qemu_behind), sync());
            assert_eq!(read_header(&mut qemu_ahead), sync());
            recv(&qemu_ahead, &mut [0; 4], RecvFlags::PEEK).unwrap();
            assert_eq!(content(&placement), [1, 1, 1, 1]);
            late.write_all(&[pages_of(b"mem", 5), sync()].concat())
                .unwrap();
            let empty = read_header(&mut qemu_behind);
            assert_ne!(empty, sync());
            // With the SYNC what came before it is there.
            assert_eq!(read_header(&mut qemu_behind), sync());
            assert_eq!(content(&placement), [1, 5, 1, 0]);
            read_header(&mut qemu_ahead);
            drop((early, late));
            ahead.join().unwrap().unwrap();
            behind.join().unwrap().unwrap();
        });
        assert_eq!(content(&placement), [1, 7, 1, 0]);
    }

    #[test]
    fn source_that_stops_in_a_packet_does_not_prevent_closing() {
        let placement = placement();
        let syncs = Syncs::new(1);
        let (mut source, channel, mut qemu) = channel();
        let incoming = channel.incoming.clone();
        let bytes = [sync(), pages(b"mem")].concat();
        let (begin, end) = bytes.split_at(bytes.len() - 1);
        source.write_all(begin).unwrap();
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            let running = scope.spawn(|| channel.run(&placement, &syncs, 0));
            read_header(&mut qemu);
            read_header(&mut qemu);
            // Until it waits for the last byte.
            while ioctl_fionread(&incoming).unwrap() > 0 {
                thread::yield_now();
            }
            scope.spawn(|| {
                placement.close();
                tell.send(()).unwrap();
            });
            let closed = told.recv_timeout(LIMIT);
            source.write_all(end).unwrap();
            assert_eq!(closed, Ok(()));
            let error = running.join().unwrap();
            let is_refused = matches!(error, Err(RelayError::Placement(0, PlaceError::Loaded)));
            assert!(is_refused, "{error:?}");
        });
        assert_eq!(content(&placement), [1, 1, 1, 1]);
    }

    #[test]
    fn only_connections_to_its_own_process_are_accepted() {
        let mut placement = placement();
        let (stream, _) = UnixStream::pair().unwrap();
        let stream = Stream::from(stream);
        // A process that began at another time has had this number.
        assert!(!placement.is_behind(&stream));
        placement.process = ProcessId::of(std::process::id()).unwrap();
        assert!(placement.is_behind(&stream));
        placement.process = ProcessId::of(1).unwrap();
        assert!(!placement.is_behind(&stream));
    }

    #[test]
    fn closed_qemu_has_not_read() {
        let placement = placement();
        let error = run(&placement, &[sync(), pages(b"mem")], |mut qemu| {
            read_header(&mut qemu);
        });
        assert!(
            matches!(error, Err(RelayError::DestinationChannel(0, _))),
            "{error:?}"
        );
        assert_eq!(content(&placement), [1, 1, 1, 1]);
    }

    #[test]
    fn pages_of_other_blocks_are_sent_to_qemu() {
        let placement = placement();
        run(&placement, &[pages(b"vga"), sync()], |mut qemu| {
            let mut bytes = vec![0; pages(b"vga").len()];
            qemu.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, pages(b"vga"));
            assert_eq!(read_header(&mut qemu), sync());
        })
        .unwrap();
        assert_eq!(content(&placement), [1, 1, 1, 1]);
    }

    #[test]
    fn pages_before_the_first_sync_are_refused() {
        let placement = placement();
        let error = run(&placement, &[pages(b"mem")], drop);
        let is_refused = matches!(error, Err(RelayError::Placement(0, PlaceError::TooEarly)));
        assert!(is_refused, "{error:?}");
        assert_eq!(content(&placement), [1, 1, 1, 1]);
    }

    #[test]
    fn loaded_guest_is_not_written() {
        let placement = placement();
        placement.close();
        let error = run(&placement, &[sync(), pages(b"mem")], |mut qemu| {
            read_header(&mut qemu);
            read_header(&mut qemu);
            assert_eq!(qemu.read(&mut [0]).unwrap(), 0);
        });
        let is_refused = matches!(error, Err(RelayError::Placement(0, PlaceError::Loaded)));
        assert!(is_refused, "{error:?}");
        assert_eq!(content(&placement), [1, 1, 1, 1]);
    }
}
