//! Kinds `zlib`, `zstd`, `qpl`, `qatzip`: the payloads of the methods.

use zstd_safe::{CCtx, InBuffer, OutBuffer, zstd_sys::ZSTD_EndDirective};

use super::{
    Stream, accepted, channel,
    deflate::{Deflate, gzip, member, qpl, ruler, zstd, zstd_block},
    fill, noise,
    packet::{Packet, SYNC},
    refused,
};
use multifd_conformance::{Case, PAGE};

const ZLIB: u32 = 2;
const ZSTD: u32 = 4;
const QPL: u32 = 8;
const QATZIP: u32 = 0x20;

pub(super) fn cases() -> Vec<Case> {
    [zlibs(), zstds(), qpls(), qatzips()].concat()
}

/// A channel with a packet for each payload, of that many pages from page 0 on.
fn packets(method: u32, payloads: Vec<(usize, Vec<u8>)>) -> Vec<Stream> {
    let mut next = 0;
    let packets = payloads.into_iter().map(|(count, payload)| {
        let pages: Vec<_> = (next..next + count).collect();
        next += count;
        Packet::encoded(method, &pages, &[], payload)
    });
    vec![channel(0, packets)]
}

/// Pages 0 and following.
fn pages(pages: Vec<Vec<u8>>) -> Vec<(usize, Vec<u8>)> {
    pages.into_iter().enumerate().collect()
}

fn zlibs() -> Vec<Case> {
    let good = |name: &str, rule: &str, payloads, all| {
        accepted(
            &format!("zlib/{name}"),
            rule,
            packets(ZLIB, payloads),
            pages(all),
        )
    };
    let bad = |name: &str, rule: &str, payloads| {
        refused(&format!("zlib/{name}"), rule, packets(ZLIB, payloads))
    };
    // A page in each of two packets; the second one as it is given.
    let then = |second: &dyn Fn(Deflate) -> Deflate| {
        let mut stream = Deflate::zlib().page(1).flush();
        let first = stream.take();
        vec![(1, first), (1, second(stream).take())]
    };
    let whole = "The payload is exactly the packet's pages.";
    let header = "The stream begins with zlib's header: deflate, and its check bits.";
    let noisy: Vec<Vec<u8>> = (1..=8).map(noise).collect();
    let mut far = noisy
        .iter()
        .fold(Deflate::zlib(), |stream, page| stream.stored(page))
        .flush();
    let far = vec![
        (8, far.take()),
        (1, far.fixed(&[], 32768, 4096).flush().take()),
    ];
    // Each of two channels refers to a page of its own.
    let own = [1u8, 2].map(|byte| {
        let mut stream = Deflate::zlib().fixed(&[byte, byte + 1], 2, 4094).flush();
        let first = stream.take();
        let second = stream.fixed(&[], 4096, 4096).flush().take();
        let at = usize::from(byte);
        let packets = [(at, first), (at + 4, second)];
        let packets = packets.map(|(page, payload)| Packet::encoded(ZLIB, &[page], &[], payload));
        (
            channel(byte - 1, packets),
            [byte, byte + 1].repeat(PAGE / 2),
        )
    });
    let [(first, a), (second, b)] = own;
    let mut through = Deflate::zlib().page(1).flush();
    let through = [
        Packet::encoded(ZLIB, &[0], &[9], through.take()),
        Packet::encoded(ZLIB, &[], &[7], vec![]),
        Packet::sync(),
        Packet::encoded(
            ZLIB | SYNC,
            &[1],
            &[],
            through.fixed(&[], 4096, 4096).flush().take(),
        ),
    ];
    let zlib_page = || Deflate::zlib().page(1).flush().take();
    let cut = |len: usize| {
        vec![
            (1, zlib_page()[..len].to_vec()),
            (1, vec![0, 0, 0, 0xff, 0xff]),
        ]
    };
    let behind = [zlib_page(), vec![0xff; 4]].concat();
    let with_header = |header: [u8; 2]| vec![(1, Deflate::after(&header).page(1).flush().take())];
    vec![
        good(
            "stored",
            "Stored blocks are allowed.",
            then(&|it| it.stored(&noise(5)).flush()),
            vec![fill(1), noise(5)],
        ),
        good(
            "fixed",
            "Blocks in the fixed code are allowed.",
            then(&|it| it.page(2).flush()),
            vec![fill(1), fill(2)],
        ),
        good(
            "dynamic",
            "Blocks with a code of their own are allowed.",
            then(&Deflate::dynamic),
            vec![fill(1), ruler()],
        ),
        good(
            "history",
            "A channel has one stream for the whole migration: packets refer to earlier ones.",
            then(&|it| it.fixed(&[], 4096, 4096).flush()),
            vec![fill(1), fill(1)],
        ),
        good(
            "history-of-32-kib",
            "Packets refer to pages of up to 32 KiB before.",
            far,
            [noisy.clone(), vec![noisy[0].clone()]].concat(),
        ),
        accepted(
            "zlib/history-of-each-channel",
            "Each channel has a stream of its own.",
            vec![first, second],
            vec![(1, a.clone()), (2, b.clone()), (5, a), (6, b)],
        ),
        accepted(
            "zlib/history-through-a-sync",
            "Neither a SYNC nor zero pages begin a new stream.",
            vec![channel(0, through)],
            vec![(0, fill(1)), (1, fill(1))],
        ),
        good(
            "two-blocks",
            "A page may be several blocks, and a block several pages.",
            {
                let halves = Deflate::zlib()
                    .fixed(&[1], 1, 999)
                    .fixed(&[], 1, 7192)
                    .flush()
                    .take();
                vec![(2, halves)]
            },
            vec![fill(1), fill(1)],
        ),
        bad("page-missing", whole, vec![(2, zlib_page())]),
        bad(
            "page-too-many",
            whole,
            vec![(1, Deflate::zlib().page(1).page(2).flush().take())],
        ),
        bad("bytes-behind", whole, vec![(1, behind)]),
        bad("cut", whole, cut(10)),
        bad("header-method", header, with_header([0x79, 0x1a])),
        bad("header-check", header, with_header([0x78, 0x02])),
        bad(
            "header-dictionary",
            "There is no preset dictionary.",
            with_header([0x78, 0x20]),
        ),
        bad(
            "header-again",
            "The header comes once.",
            vec![(1, zlib_page()), (1, zlib_page())],
        ),
        bad(
            "block-type-3",
            "Blocks have one of three types.",
            vec![(1, vec![0x78, 1, 7, 0, 0, 0xff, 0xff])],
        ),
        bad(
            "distance-too-far",
            "A distance does not reach to before the stream.",
            vec![(1, Deflate::zlib().fixed(&[1], 2, 4095).flush().take())],
        ),
        bad(
            "ended",
            "The stream does not end.",
            then(&|it| it.page(2).end_with(&[0x5d, 0x80, 0x30, 0x01])),
        ),
    ]
}

fn zstds() -> Vec<Case> {
    let good = |name: &str, rule: &str, payloads, all| {
        accepted(
            &format!("zstd/{name}"),
            rule,
            packets(ZSTD, payloads),
            pages(all),
        )
    };
    let bad = |name: &str, rule: &str, payloads| {
        refused(&format!("zstd/{name}"), rule, packets(ZSTD, payloads))
    };
    const LEN: u32 = 4096;
    let raw = |bytes: &[u8]| zstd_block(false, 0, LEN, bytes);
    let repeated = |byte: u8, pages: u32| zstd_block(false, 1, pages * LEN, &[byte]);
    let begin = |log: u8, block: Vec<u8>| [zstd(log), block].concat();
    let window = |log: u8| vec![(1, begin(log, repeated(1, 1)))];
    let library = [vec![ruler(), noise(1)], vec![noise(1), ruler(), fill(4)]];
    let encoded = zstd_stream(&library);
    let magic = [
        &[0x28, 0xb5, 0x2f, 0xfe][..],
        &zstd(20)[4..],
        &repeated(1, 1),
    ]
    .concat();
    vec![
        good(
            "raw",
            "Raw blocks are allowed.",
            vec![(1, begin(20, raw(&noise(1))))],
            vec![noise(1)],
        ),
        good(
            "repeated",
            "Blocks of one byte are allowed.",
            vec![(2, begin(20, repeated(3, 2)))],
            vec![fill(3), fill(3)],
        ),
        good(
            "one-frame",
            "A channel has one frame for the whole migration.",
            vec![
                (1, begin(20, repeated(1, 1))),
                (1, raw(&noise(2))),
                (2, repeated(3, 2)),
            ],
            vec![fill(1), noise(2), fill(3), fill(3)],
        ),
        good(
            "compressed",
            "Packets refer to earlier ones of the channel.",
            encoded,
            library.concat(),
        ),
        good(
            "window-1-kib",
            "A window may be small.",
            vec![(1, begin(10, zstd_block(false, 1, 1024, &[1]).repeat(4)))],
            vec![fill(1)],
        ),
        good(
            "window-128-mib",
            "A window has up to 128 MiB.",
            window(27),
            vec![fill(1)],
        ),
        bad("window-256-mib", "A window has up to 128 MiB.", window(28)),
        bad(
            "page-missing",
            "The payload is exactly the packet's pages.",
            vec![(2, begin(20, repeated(1, 1)))],
        ),
        bad(
            "page-too-many",
            "The payload is exactly the packet's pages.",
            vec![(1, begin(20, repeated(1, 2)))],
        ),
        bad("magic", "A frame begins with its magic.", vec![(1, magic)]),
        bad(
            "frame-again",
            "The frame begins once.",
            [window(20), window(20)].concat(),
        ),
        bad(
            "block-type-3",
            "Blocks have one of three types.",
            vec![(1, begin(20, zstd_block(false, 3, LEN, &[1])))],
        ),
        bad(
            "ended",
            "The frame does not end.",
            vec![(1, begin(20, zstd_block(true, 1, LEN, &[1])))],
        ),
        bad(
            "skippable",
            "There are no skippable frames.",
            vec![(
                1,
                [
                    &[0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 7][..],
                    &begin(20, repeated(1, 1)),
                ]
                .concat(),
            )],
        ),
        bad(
            "cut",
            "The payload is exactly the packet's pages.",
            vec![(1, begin(20, raw(&noise(1))[..4000].to_vec()))],
        ),
    ]
}

/// Packets of one frame, as libzstd encodes them.
fn zstd_stream(packets: &[Vec<Vec<u8>>]) -> Vec<(usize, Vec<u8>)> {
    let mut stream = CCtx::create();
    let mut encode = |pages: &Vec<Vec<u8>>| {
        let plain = pages.concat();
        let mut out = Vec::with_capacity(1 << 20);
        let (mut output, mut input) = (OutBuffer::around(&mut out), InBuffer::around(&plain));
        // One call flushes all that fits into the room, and an error of the library shows in the cases.
        let _ = stream.compress_stream2(&mut output, &mut input, ZSTD_EndDirective::ZSTD_e_flush);
        (pages.len(), out)
    };
    packets.iter().map(&mut encode).collect()
}

fn qpls() -> Vec<Case> {
    let good = |name: &str, rule: &str, encoded: Vec<Vec<u8>>, all: Vec<Vec<u8>>| {
        let payloads = vec![(all.len(), qpl(&encoded))];
        accepted(
            &format!("qpl/{name}"),
            rule,
            packets(QPL, payloads),
            pages(all),
        )
    };
    let bad = |name: &str, rule: &str, pages, payload| {
        refused(
            &format!("qpl/{name}"),
            rule,
            packets(QPL, vec![(pages, payload)]),
        )
    };
    let page = |byte: u8| Deflate::after(&[]).page(byte).end().take();
    let lens = |lens: &[u32], rest: &[u8]| {
        let table = lens.iter().flat_map(|len| len.to_be_bytes());
        table.chain(rest.iter().copied()).collect::<Vec<u8>>()
    };
    let len = u32::try_from(page(1).len()).unwrap_or(u32::MAX);
    let table = "The lengths and the pages are all of the payload.";
    let whole = "A page is one stream of raw deflate with exactly 4096 bytes.";
    let stored = |byte: u8| {
        Deflate::after(&[])
            .stored(&[byte; 100])
            .fixed(&[], 1, 3996)
            .end()
            .take()
    };
    vec![
        good(
            "fixed",
            "Blocks in the fixed code are allowed.",
            vec![page(1), page(2)],
            vec![fill(1), fill(2)],
        ),
        good(
            "dynamic",
            "Blocks with a code of their own are allowed.",
            vec![Deflate::after(&[]).dynamic().end().take()],
            vec![ruler()],
        ),
        good(
            "stored-block",
            "Stored blocks are allowed.",
            vec![stored(7)],
            vec![fill(7)],
        ),
        good(
            "raw",
            "A page of 4096 bytes is there as it is.",
            vec![noise(1), page(2), noise(3)],
            vec![noise(1), fill(2), noise(3)],
        ),
        good(
            "128-pages",
            "A packet has up to 128 pages.",
            (1..=128).map(page).collect(),
            (1..=128).map(fill).collect(),
        ),
        bad("table-cut", table, 2, lens(&[len], &[])),
        bad("pages-cut", table, 2, lens(&[len, len], &page(1))),
        bad(
            "bytes-behind",
            table,
            1,
            lens(&[len], &[page(1), vec![0]].concat()),
        ),
        bad("length-0", whole, 1, lens(&[0], &[])),
        bad(
            "length-4097",
            "A page has at most 4096 bytes.",
            1,
            lens(&[4097], &[0; 4097]),
        ),
        bad(
            "length-most",
            "A page has at most 4096 bytes.",
            1,
            lens(&[u32::MAX], &page(1)),
        ),
        bad(
            "page-short",
            whole,
            1,
            qpl(&[Deflate::after(&[]).fixed(&[1], 1, 4094).end().take()]),
        ),
        bad(
            "page-long",
            whole,
            1,
            qpl(&[Deflate::after(&[]).fixed(&[1], 1, 4096).end().take()]),
        ),
        bad(
            "no-end",
            whole,
            1,
            qpl(&[Deflate::after(&[]).page(1).flush().take()]),
        ),
        bad(
            "history",
            "Pages do not refer to each other.",
            2,
            qpl(&[
                page(1),
                Deflate::after(&[]).fixed(&[], 4096, 4096).end().take(),
            ]),
        ),
        bad(
            "zlib-header",
            whole,
            1,
            qpl(&[Deflate::zlib().page(1).end().take()]),
        ),
    ]
}

fn qatzips() -> Vec<Case> {
    let good = |name: &str, rule: &str, members: &[Vec<u8>], all: Vec<Vec<u8>>| {
        let payloads = vec![(all.len(), members.concat())];
        accepted(
            &format!("qatzip/{name}"),
            rule,
            packets(QATZIP, payloads),
            pages(all),
        )
    };
    let bad = |name: &str, rule: &str, pages: usize, members: &[Vec<u8>]| {
        let payloads = vec![(pages, members.concat())];
        refused(&format!("qatzip/{name}"), rule, packets(QATZIP, payloads))
    };
    let deflated = |byte: u8| Deflate::after(&[]).page(byte).end().take();
    let page = |byte: u8| member(&deflated(byte), &fill(byte));
    let run = |byte: u8, len: u32| {
        let plain = vec![byte; usize::try_from(len).unwrap_or(0)];
        member(
            &Deflate::after(&[]).fixed(&[byte], 1, len - 1).end().take(),
            &plain,
        )
    };
    let changed = |from_end: usize| {
        let mut bytes = page(1);
        let at = bytes.len() - from_end;
        bytes[at] ^= 1;
        vec![bytes]
    };
    let cut = |len: usize| vec![page(1)[..len].to_vec()];
    let whole = "The members are exactly the packet's pages.";
    let two = vec![fill(1), fill(2)];
    let three: Vec<_> = [vec![1; 3000], vec![2; 3000], vec![3; 2192]].concat();
    let three = three.chunks(PAGE).map(<[u8]>::to_vec).collect();
    vec![
        good(
            "one-member",
            "A packet may be one member.",
            &[page(1)],
            vec![fill(1)],
        ),
        good(
            "two-members",
            "Members come one after the other.",
            &[page(1), page(2)],
            two,
        ),
        good(
            "members-within-pages",
            "A member may end within a page.",
            &[run(1, 3000), run(2, 3000), run(3, 2192)],
            three,
        ),
        good(
            "128-pages",
            "A member may have more than 64 KiB.",
            &[run(5, 524_288)],
            vec![fill(5); 128],
        ),
        good(
            "plain-gzip",
            "A member need not have QATzip's field.",
            &[gzip(0, &[], &deflated(1), &fill(1))],
            vec![fill(1)],
        ),
        good(
            "dynamic",
            "Blocks with a code of their own are allowed.",
            &[member(
                &Deflate::after(&[]).dynamic().end().take(),
                &ruler(),
            )],
            vec![ruler()],
        ),
        bad(
            "check",
            "The CRC-32 of a member is checked.",
            1,
            &changed(8),
        ),
        bad(
            "length",
            "The length of a member is checked.",
            1,
            &changed(4),
        ),
        bad(
            "magic",
            "A member begins with 1f8b08.",
            1,
            &[[&[0x1f, 0x8c], &page(1)[2..]].concat()],
        ),
        bad("page-missing", whole, 2, &[page(1)]),
        bad("page-too-many", whole, 1, &[page(1), page(2)]),
        bad("bytes-behind", whole, 1, &[page(1), vec![0; 3]]),
        bad("cut-in-the-header", "A member is whole.", 1, &cut(9)),
        bad(
            "cut-in-the-check",
            "A member is whole.",
            1,
            &cut(page(1).len() - 1),
        ),
        bad("cut-in-the-data", "A member is whole.", 1, &cut(30)),
    ]
}
