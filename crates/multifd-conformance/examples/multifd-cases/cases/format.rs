//! Kinds `initial`, `header`, `size`, `end`, `device-state`: each field and each length.

use super::{
    PAGES, Stream, accepted, block, channel, decode, fill, numbered,
    packet::{DEVICE_STATE, MAGIC, Packet, SYNC, device_state, initial},
    page_of, refused,
};
use multifd_conformance::{Case, Expect, PAGE};

pub(super) fn cases() -> Vec<Case> {
    [
        initials(),
        headers(),
        offsets(),
        names(),
        sizes(),
        ends(),
        device_states(),
    ]
    .concat()
}

/// A packet with page 3.
fn one() -> Packet {
    Packet::plain(&numbered(3, 1), &[])
}

/// A channel of its own, on which `bytes` replaces the initial packet.
fn beginning(bytes: Vec<u8>) -> Vec<Stream> {
    let mut stream = channel(0, [one()]);
    stream[0] = bytes;
    vec![stream]
}

fn initials() -> Vec<Case> {
    let with = |at: usize, with: &[u8]| {
        let mut bytes = initial(0);
        bytes[at..at + with.len()].copy_from_slice(with);
        beginning(bytes)
    };
    let ids = |ids: [u8; 2]| ids.map(|id| channel(id, [])).to_vec();
    vec![
        accepted(
            "initial/reserved-bytes",
            "All bytes behind the channel's number are reserved, and ignored.",
            with(25, &[0xff; 39]),
            numbered(3, 1),
        ),
        accepted(
            "initial/last-channel-first",
            "Channels connect in any order; each says its number.",
            vec![channel(2, []), channel(0, [one()]), channel(1, [])],
            numbered(3, 1),
        ),
        refused(
            "initial/magic",
            "A channel begins with 11223344.",
            with(0, &[0x11, 0x22, 0x33, 0x45]),
        ),
        refused(
            "initial/little-endian",
            "Integers are big-endian.",
            with(0, &[0x44, 0x33, 0x22, 0x11, 1, 0, 0, 0]),
        ),
        refused(
            "initial/version-0",
            "The version is 1.",
            with(4, &[0, 0, 0, 0]),
        ),
        refused(
            "initial/version-2",
            "The version is 1.",
            with(4, &[0, 0, 0, 2]),
        ),
        refused(
            "initial/uuid",
            "The uuid is that of the guest, here zeros.",
            with(8, &[7; 16]),
        ),
        refused(
            "initial/number-beyond",
            "Numbers are below the number of channels.",
            with(24, &[1]),
        ),
        refused(
            "initial/number-255",
            "Numbers are below the number of channels.",
            with(24, &[255]),
        ),
        refused(
            "initial/number-twice",
            "Each number comes once.",
            ids([0, 0]),
        ),
        refused(
            "initial/number-missing",
            "Each number comes once.",
            ids([0, 2]),
        ),
    ]
}

fn headers() -> Vec<Case> {
    let bad = |name: &str, rule: &str, change: &dyn Fn(&mut Packet)| {
        refused(
            &format!("header/{name}"),
            rule,
            vec![channel(0, [one().with(change)])],
        )
    };
    let good = |name: &str, rule: &str, change: &dyn Fn(&mut Packet)| {
        let channels = vec![channel(0, [one().with(change)])];
        accepted(&format!("header/{name}"), rule, channels, numbered(3, 1))
    };
    let flags = "A flag that is unknown is refused.";
    let counts = "Normal and zero pages together fit into the table of 128.";
    vec![
        bad("magic", "A packet begins with 11223344.", &|it| {
            it.magic = MAGIC + 1
        }),
        bad("magic-0", "A packet begins with 11223344.", &|it| {
            it.magic = 0
        }),
        bad("version-0", "The version is 1.", &|it| it.version = 0),
        bad("version-2", "The version is 1.", &|it| it.version = 2),
        bad("flag-7", flags, &|it| it.flags = 0x80),
        bad("flag-8", flags, &|it| it.flags = 0x100),
        bad("flag-31", flags, &|it| it.flags = 1 << 31),
        bad("two-methods", "A packet has one method.", &|it| {
            it.flags = 6
        }),
        bad("129-normal", counts, &|it| it.normal = 129),
        bad("129-zero", counts, &|it| it.zero = 129),
        bad("128-and-1", counts, &|it| {
            (it.normal, it.zero, it.size) = (128, 1, 128 << 12)
        }),
        bad("counts-overflow", counts, &|it| it.zero = u32::MAX),
        bad("most-normal", counts, &|it| it.normal = u32::MAX),
        good(
            "number",
            "The packet's number says nothing about order.",
            &|it| it.number = u64::MAX,
        ),
        good("reserved", "Reserved fields are ignored.", &|it| {
            it.reserved = [0xff; 28]
        }),
        good(
            "table-behind",
            "The table behind the pages' offsets is ignored.",
            &|it| it.table[1..].fill(u64::MAX),
        ),
        good(
            "name-behind",
            "The name behind its NUL is ignored.",
            &|it| it.name[4..].fill(b'x'),
        ),
    ]
}

fn offsets() -> Vec<Case> {
    let at = |name: &str, offset: u64| {
        let packet = one().with(|it| it.table[0] = offset);
        let rule = "An offset is a multiple of the page size, within the RAM block.";
        refused(&format!("header/{name}"), rule, vec![channel(0, [packet])])
    };
    let end = (PAGES * PAGE) as u64;
    let last = PAGES - 1;
    let zero = |name: &str, offset: u64| {
        let packet = Packet::plain(&[], &[0]).with(|it| it.table[0] = offset);
        let rule = "An offset of a zero page is within the RAM block.";
        refused(
            &format!("header/{name}"),
            rule,
            vec![channel(0, [one(), packet])],
        )
    };
    let last_pages = Packet::plain(&numbered(last, 1), &[last - 1]);
    vec![
        accepted(
            "header/offset-last",
            "The last page of a RAM block is in it.",
            vec![channel(0, [last_pages])],
            numbered(last, 1),
        ),
        at("offset-behind", end),
        at("offset-far", 1 << 40),
        at("offset-wraps", u64::MAX - 0xfff),
        at("offset-unaligned", 3 * PAGE as u64 + 1),
        at("offset-across-the-end", end - 1),
        at("offset-little-endian", (3 * PAGE as u64).swap_bytes()),
        zero("zero-offset-behind", end),
        zero("zero-offset-wraps", u64::MAX - 0xfff),
    ]
}

fn names() -> Vec<Case> {
    let named = |name: &str, rule: &str, of: &[u8]| {
        refused(
            &format!("header/{name}"),
            rule,
            vec![channel(0, [one().named(of)])],
        )
    };
    let mut pages = vec![page_of("mem", 3, fill(1)), page_of("mem2", 3, fill(2))];
    pages.push(page_of("me", 0, fill(3)));
    let each = pages.iter().map(|page| {
        let content = [(page.page, page.bytes.0.clone())];
        Packet::plain(&content, &[]).named(page.block.as_bytes())
    });
    let mut blocks = decode(
        "header/three-blocks",
        "A packet is about the RAM block of its name, and about no other whose name is alike.",
        vec![channel(0, each)],
        Expect::Accepted(pages),
    );
    blocks.blocks = vec![block("mem2", 8), block("mem", 4), block("me", 1)];
    vec![
        blocks,
        named("name-unknown", "A RAM block must be known.", b"rom"),
        named("name-longer", "A name is compared whole.", b"mem2"),
        named("name-shorter", "A name is compared whole.", b"me"),
        named(
            "name-missing",
            "A packet with pages names its RAM block.",
            b"",
        ),
        named("name-without-end", "A name ends with a NUL.", &[b'm'; 256]),
    ]
}

fn sizes() -> Vec<Case> {
    let mut cases: Vec<_> = [
        (1, 0),
        (2, 1),
        (127, 0),
        (127, 1),
        (128, 0),
        (1, 127),
        (0, 1),
        (0, 128),
    ]
    .into_iter()
    .map(|(normal, zero)| {
        let zeros: Vec<_> = (normal..normal + zero).collect();
        let packet = Packet::plain(&numbered(0, normal), &zeros);
        accepted(
            &format!("size/normal-{normal}-zero-{zero}"),
            "The table has the normal pages' offsets, then those of the zero pages.",
            vec![channel(0, [packet])],
            numbered(0, normal),
        )
    })
    .collect();
    let sized = |name: &str, rule: &str, size: u32, payload: usize| {
        let packet = one().with(|it| {
            it.size = size;
            it.payload.resize(payload, 9);
        });
        refused(&format!("size/{name}"), rule, vec![channel(0, [packet])])
    };
    let plain = "By method none the payload is the normal pages, and nothing else.";
    let limit = "A payload has at most 1 MiB.";
    cases.extend([
        sized("payload-too-short", plain, 4095, 4095),
        sized("payload-too-long", plain, 4097, 4097),
        sized("payload-of-another-page", plain, 8192, 8192),
        sized("payload-missing", "Normal pages have a payload.", 0, 0),
        sized("payload-most", limit, u32::MAX, 4096),
        accepted(
            "size/stale-in-zero-pages",
            "Without normal pages there is no payload, whatever next_packet_size says: QEMU 7.2 leaves an earlier value.",
            vec![channel(0, [Packet::plain(&[], &[2]).with(|it| it.size = 4096), one()])],
            numbered(3, 1),
        ),
        accepted(
            "size/stale-in-sync",
            "Without normal pages there is no payload, whatever next_packet_size says: QEMU 7.2 leaves an earlier value.",
            vec![channel(0, [Packet::sync().with(|it| it.size = 4096), one()])],
            numbered(3, 1),
        ),
    ]);
    cases
}

/// Streams that end too early.
fn ends() -> Vec<Case> {
    let cut = |name: &str, kept: usize| {
        // Into the packet with the page.
        let whole = channel(0, [one()]);
        let start: usize = whole[..2].iter().map(Vec::len).sum();
        let mut bytes = whole.concat();
        bytes.truncate(start + kept);
        refused(
            &format!("end/{name}"),
            "A stream does not end within a packet.",
            vec![vec![bytes]],
        )
    };
    let mut stub = initial(0);
    stub.truncate(63);
    vec![
        cut("in-the-flags", 11),
        cut("behind-the-flags", 12),
        cut("in-the-name", 300),
        cut("before-the-table", 320),
        cut("in-the-table", 1343),
        cut("before-the-payload", 1344),
        cut("in-the-payload", 1344 + 4095),
        refused(
            "end/in-the-initial-packet",
            "A channel begins with 64 bytes.",
            vec![vec![stub]],
        ),
        refused(
            "end/nothing",
            "A channel begins with 64 bytes.",
            vec![vec![]],
        ),
    ]
}

fn device_states() -> Vec<Case> {
    let between = |state: Vec<u8>| {
        let mut stream = channel(0, [one(), Packet::plain(&numbered(5, 1), &[])]);
        // Behind the first page's header and payload.
        stream.insert(4, state);
        vec![stream]
    };
    let passes = |name: &str, rule: &str, state: Vec<u8>| {
        let pages = [numbered(3, 1), numbered(5, 1)].concat();
        accepted(&format!("device-state/{name}"), rule, between(state), pages)
    };
    let fails = |name: &str, rule: &str, state: Vec<u8>| {
        refused(&format!("device-state/{name}"), rule, between(state))
    };
    let flags = "Device state has neither a SYNC nor a method.";
    vec![
        passes(
            "passes",
            "Device state has a header of 276 bytes, and changes no memory.",
            device_state(DEVICE_STATE, 9, b"the state"),
        ),
        passes(
            "empty",
            "Device state may be empty.",
            device_state(DEVICE_STATE, 0, b""),
        ),
        passes(
            "looks-like-packets",
            "The bytes of device state are not looked at.",
            device_state(
                DEVICE_STATE,
                2688,
                &Packet::sync()
                    .parts()
                    .collect::<Vec<_>>()
                    .concat()
                    .repeat(2),
            ),
        ),
        fails("sync", flags, device_state(DEVICE_STATE | SYNC, 0, b"")),
        fails("method", flags, device_state(DEVICE_STATE | 2, 0, b"")),
        fails(
            "longer-than-the-stream",
            "A stream does not end within a packet, and a length is no reason to reserve memory.",
            device_state(DEVICE_STATE, u32::MAX, b"the state"),
        ),
    ]
}
