//! Both ends of a page store, whatever the peer sends: a destination's channel with tables and references, and the way back on which
//! a source hears keys, lists and verdicts.

#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use multifd::Method;
use vamoose_codec::{Decoder, Settings, encoder};
use vamoose_fuzz::{LAYOUT, hear};
use vamoose_link::{
    ChannelReader, ChannelWriter, Packet, PageStore, Received, StoreLister, StoreSender, Stream,
};

/// So small that inputs also evict. Shared by all inputs, as by the guests of a host.
static STORE: LazyLock<PageStore> = LazyLock::new(|| {
    let store = PageStore::new(LIMIT, Vec::new());
    store.expect("the system has random numbers")
});
const LIMIT: usize = 1 << 20;

fuzz_target!(|input: &[u8]| {
    hear(input, destination);
    hear(input, source);
});

fn destination(stream: Arc<Stream>) {
    let pages = STORE.of_guest(None).expect("there are no groups");
    let lister = StoreLister::new(pages, std::slice::from_ref(&stream));
    let mut reader = ChannelReader::new(stream, LAYOUT, Decoder::new(LAYOUT), Arc::default());
    reader.share_pages(&lister);
    let mut packet = Packet::new(LAYOUT);
    while let Ok(Received::Packet) = reader.read(&mut packet) {
        let normal = packet.ram().normal_offsets().len();
        assert_eq!(packet.pages().len(), normal * LAYOUT.page_size());
    }
    assert!(STORE.usage().bytes <= LIMIT);
}

fn source(stream: Arc<Stream>) {
    let sender = Arc::new(StoreSender::new(None, Arc::default()));
    let settings = Settings::new(Method::ZstdFrames, None).expect("a default level");
    let encoder = encoder(&settings, LAYOUT).expect("memory");
    let mut writer = ChannelWriter::new(stream, LAYOUT, encoder, None, Arc::default());
    writer.share_pages(sender.clone()).run();
    // At least 3 bytes announce a list, and each fingerprint has 4.
    assert!(sender.offered().is_none_or(|offered| offered < 1 << 16));
}
