//! The cases that are made from descriptions; the others, in the folder `recorded`, come from QEMUs.

mod deflate;
mod encoders;
mod format;
mod order;
mod packet;
mod payloads;

use multifd_conformance::{Block, Bytes, Case, Expect, PAGE, Page, Task};
use packet::{Packet, initial};

/// The kind of the recorded cases.
pub(crate) const RECORDED: &str = "recorded";

/// All of them.
pub(crate) fn all() -> Vec<Case> {
    let parts = [
        format::cases(),
        order::cases(),
        payloads::cases(),
        encoders::cases(),
    ];
    parts.into_iter().flatten().collect()
}

/// Pages of the RAM block `mem`, which most cases have alone.
const PAGES: usize = 256;

/// The bytes of a channel, in parts.
type Stream = Vec<Vec<u8>>;

/// A whole channel: its initial packet, a SYNC, which comes before any page, these packets, and the last SYNC.
fn channel(id: u8, packets: impl IntoIterator<Item = Packet>) -> Stream {
    let all = [Packet::sync()].into_iter().chain(packets);
    let all = all.chain([Packet::sync()]);
    [initial(id)]
        .into_iter()
        .chain(all.flat_map(|packet| packet.parts()))
        .collect()
}

/// A case of a decoder that accepts the streams; these pages of `mem` are not zero then.
fn accepted(name: &str, rule: &str, channels: Vec<Stream>, pages: Vec<(usize, Vec<u8>)>) -> Case {
    let pages = pages
        .into_iter()
        .map(|(page, bytes)| page_of("mem", page, bytes));
    decode(name, rule, channels, Expect::Accepted(pages.collect()))
}

/// A case of a decoder that refuses the streams.
fn refused(name: &str, rule: &str, channels: Vec<Stream>) -> Case {
    decode(name, rule, channels, Expect::Refused)
}

fn decode(name: &str, rule: &str, channels: Vec<Stream>, expect: Expect) -> Case {
    let channels = channels
        .into_iter()
        .map(|parts| parts.into_iter().map(Bytes).collect());
    case(
        name,
        rule,
        Task::Decode {
            channels: channels.collect(),
            expect,
        },
    )
}

/// The method is that of the case's kind.
fn case(name: &str, rule: &str, task: Task) -> Case {
    let kind = name.split('/').next().unwrap_or_default();
    let method = match kind {
        "zlib" | "zstd" | "qpl" | "qatzip" => kind,
        _ => "none",
    };
    Case {
        name: name.to_owned(),
        rule: rule.to_owned(),
        method: method.to_owned(),
        blocks: vec![block("mem", PAGES)],
        task,
    }
}

fn block(name: &str, pages: usize) -> Block {
    Block {
        name: name.to_owned(),
        len: pages * PAGE,
    }
}

fn page_of(block: &str, page: usize, bytes: Vec<u8>) -> Page {
    Page {
        block: block.to_owned(),
        page,
        bytes: Bytes(bytes),
    }
}

/// A page of one byte.
fn fill(byte: u8) -> Vec<u8> {
    vec![byte; PAGE]
}

/// A page that does not compress.
fn noise(seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_be_bytes()[0]
    };
    (0..PAGE).map(|_| next()).collect()
}

/// Pages that are alike: from `first` on, page n is filled with the byte n + 1.
fn numbered(first: usize, count: usize) -> Vec<(usize, Vec<u8>)> {
    let pages = first..first + count;
    pages
        .map(|page| (page, fill(page.to_le_bytes()[0].wrapping_add(1))))
        .collect()
}
