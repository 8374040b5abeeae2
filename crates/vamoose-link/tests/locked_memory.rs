//! Too little lockable memory. The limit is the process's, so this test has one to itself.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::{
    io,
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
};

use multifd::{BlockName, Layout, Method, RamHeader};
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, capabilities, set_capabilities},
};
use vamoose_codec::{Settings, encoder};
use vamoose_link::{ChannelWriter, Stats, Stream, ZeroCopyError, check_locked_memory};
use vm_memory::VolatileSlice;

const LAYOUT: Layout = Layout::X86;
const LIMIT: u64 = 64 * 1024;
const PACKETS: usize = 20;

#[test]
fn too_little_locked_memory_is_said_and_gone_without() {
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
    let maximum = getrlimit(Resource::Memlock).maximum;
    let limit = Rlimit {
        current: Some(LIMIT),
        maximum,
    };
    setrlimit(Resource::Memlock, limit).unwrap();

    let error = check_locked_memory(2, LAYOUT).unwrap_err();
    let ZeroCopyError::LockedMemory {
        channels: 2,
        needed,
        limit: LIMIT,
    } = error
    else {
        panic!("{error}");
    };
    let text = error.to_string();
    for part in [
        format!("ulimit -l {}", needed.div_ceil(1024)),
        format!("LimitMEMLOCK={needed}"),
        format!("--memlock={needed}"),
    ] {
        assert!(text.contains(&part), "{text}");
    }

    // A packet is more than the limit, so none can be pinned: all arrive as copies.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let stats = Arc::new(Stats::default());
    let settings = Settings::new(Method::None, None).unwrap();
    let mut writer = ChannelWriter::new(
        Arc::new(Stream::from(near)),
        LAYOUT,
        encoder(&settings, LAYOUT).unwrap(),
        None,
        stats.clone(),
    );
    writer.enable_zero_copy().unwrap();
    let mut memory = vec![7; LAYOUT.packet_bytes()];
    let mut header = RamHeader::new(LAYOUT);
    header.block = BlockName::new(b"pc.ram").unwrap();
    let offsets: Vec<_> = (0..LAYOUT.page_count() as u64)
        .map(|page| page << 12)
        .collect();
    header.set_pages(&offsets, &[], LAYOUT).unwrap();
    thread::scope(|scope| {
        let received = scope.spawn(move || {
            let mut bytes = Vec::new();
            io::Read::read_to_end(&mut far, &mut bytes).unwrap();
            bytes
        });
        let slice = VolatileSlice::from(&mut memory[..]);
        for _ in 0..PACKETS {
            writer.write_memory(&mut header, &[slice]).unwrap();
        }
        writer.write_sync(0).unwrap();
        writer.finish();
        let received = received.join().unwrap();
        let packet = LAYOUT.ram_header_len() + LAYOUT.packet_bytes();
        assert_eq!(received.len(), PACKETS * packet + LAYOUT.ram_header_len());
        for packet in received.chunks_exact(packet) {
            let pages = &packet[LAYOUT.ram_header_len()..];
            assert!(pages.iter().all(|byte| *byte == 7), "the pages differ");
        }
    });
    let counted = stats.snapshot();
    assert_eq!(counted.copied_sends, PACKETS as u64);
    assert_eq!(counted.zero_copy_sends, PACKETS as u64);
    assert_eq!(counted.missed_zero_copy, 1);
}
