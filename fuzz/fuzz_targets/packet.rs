//! Headers from a peer: refused, or parsed into what writes and parses back to the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use multifd::{
    DEVICE_STATE_HEADER_LEN, DeviceStateHeader, INITIAL_LEN, Initial, Layout,
    MAX_DEVICE_STATE_PAYLOAD, Method, PRELUDE_LEN, PacketKind, Prelude, RamHeader,
};

fuzz_target!(|input: &[u8]| {
    let Some((choice, bytes)) = input.split_first() else {
        return;
    };
    // 1 KiB to 512 KiB.
    let layout = Layout::new(1024 << (choice % 10)).expect("a power of two in the range");
    initial(bytes);
    packet(bytes, layout);
});

fn initial(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<INITIAL_LEN>() else {
        return;
    };
    if let Ok(initial) = Initial::parse(bytes) {
        if let Some(announced) = initial.announced_channels() {
            assert!(initial.channel() < announced);
        }
        assert_eq!(Initial::parse(&initial.to_bytes()), Ok(initial));
    }
}

fn packet(bytes: &[u8], layout: Layout) {
    let Some((prelude, rest)) = bytes.split_first_chunk::<PRELUDE_LEN>() else {
        return;
    };
    let Ok(prelude) = Prelude::parse(prelude) else {
        return;
    };
    match prelude.kind() {
        PacketKind::Ram => ram(prelude, rest, layout),
        PacketKind::DeviceState => device_state(prelude, rest),
    }
}

/// `rest` is filled up with zeros, so that short inputs get far too.
fn ram(prelude: Prelude, rest: &[u8], layout: Layout) {
    let mut rest = rest.to_vec();
    rest.resize(layout.ram_header_len() - PRELUDE_LEN, 0);
    let mut header = RamHeader::new(layout);
    if header.parse(prelude, &rest, layout).is_err() {
        return;
    }
    let (normal, zero) = (header.normal_offsets().len(), header.zero_offsets().len());
    assert!(normal + zero <= layout.page_count());
    assert!(header.payload_len() <= layout.max_payload());
    assert_eq!(header.payload_len() == 0, normal == 0);
    assert_eq!(header.is_empty(), normal + zero == 0);

    let mut written = Vec::new();
    header.write(layout, &mut written);
    assert_eq!(written.len(), layout.ram_header_len());
    let (prelude, rest) = written.split_first_chunk().expect("a whole header");
    let prelude = Prelude::parse(prelude).expect("flags that we wrote");
    // A used header, so that nothing of its earlier content may stay.
    let mut again = RamHeader::new(layout);
    again.sync = true;
    again
        .set_pages(&[0], &[], layout)
        .expect("one page always fits");
    again.parse(prelude, rest, layout).expect("what we wrote");
    if header.is_empty() {
        // Without pages the method means nothing, and is not written.
        header.method = Method::None;
    }
    assert_eq!(again, header);
}

fn device_state(prelude: Prelude, rest: &[u8]) {
    let mut bytes = [0; DEVICE_STATE_HEADER_LEN - PRELUDE_LEN];
    let len = bytes.len().min(rest.len());
    bytes[..len].copy_from_slice(&rest[..len]);
    let Ok(header) = DeviceStateHeader::parse(prelude, &bytes) else {
        return;
    };
    assert!(header.payload_len() <= MAX_DEVICE_STATE_PAYLOAD as usize);
    assert!(header.id().len() <= 256);
    let (prelude, rest) = header
        .as_bytes()
        .split_first_chunk()
        .expect("a whole header");
    let prelude = Prelude::parse(prelude).expect("flags that we wrote");
    let rest = rest.try_into().expect("a whole header");
    assert_eq!(DeviceStateHeader::parse(prelude, rest), Ok(header.clone()));
}
