//! Kinds `page` and `sync`: which page is there in the end.

use super::{
    Stream, accepted, channel, fill, noise, numbered,
    packet::{MAGIC, Packet, SYNC, initial},
    refused,
};
use multifd_conformance::Case;

pub(super) fn cases() -> Vec<Case> {
    [pages(), syncs(), barriers()].concat()
}

/// Page 3, filled with this byte.
fn three(byte: u8) -> Packet {
    Packet::plain(&[(3, fill(byte))], &[])
}

fn zeros(pages: &[usize]) -> Packet {
    Packet::plain(&[], pages)
}

fn pages() -> Vec<Case> {
    let one = |packets: Vec<Packet>| vec![channel(0, packets)];
    let mixed = [(9, fill(9)), (2, noise(2)), (5, fill(5))];
    let sorted = vec![(2, noise(2)), (5, fill(5)), (9, fill(9))];
    vec![
        accepted(
            "page/any-order",
            "Pages of a packet come in any order, and stay in that of the table.",
            one(vec![Packet::plain(&mixed, &[7, 1])]),
            sorted,
        ),
        accepted(
            "page/zero-again",
            "A zero page that was written before becomes zero.",
            one(vec![three(1), Packet::sync(), zeros(&[3])]),
            vec![],
        ),
        accepted(
            "page/zero-among-normal",
            "Zero pages of a packet come behind the normal ones in the table.",
            one(vec![
                Packet::plain(&numbered(0, 8), &[]),
                Packet::sync(),
                Packet::plain(&[(1, fill(0xaa)), (6, fill(0xbb))], &[0, 2, 7]),
            ]),
            [vec![(1, fill(0xaa))], numbered(3, 3), vec![(6, fill(0xbb))]].concat(),
        ),
        accepted(
            "page/written-after-zero",
            "A page may follow its zero page.",
            one(vec![zeros(&[3]), Packet::sync(), three(4)]),
            vec![(3, fill(4))],
        ),
        accepted(
            "page/normal-of-zeros",
            "A normal page may be all zeros.",
            one(vec![three(4), Packet::sync(), three(0)]),
            vec![],
        ),
        accepted(
            "page/newest-counts",
            "Of several versions in several rounds the last one counts.",
            one(vec![
                three(1),
                Packet::sync(),
                three(2),
                Packet::sync(),
                three(3),
            ]),
            vec![(3, fill(3))],
        ),
        accepted(
            "page/zero-on-another-channel",
            "A page may come over another channel in each round.",
            vec![
                channel(0, vec![three(1), Packet::sync()]),
                channel(1, vec![Packet::sync(), zeros(&[3])]),
            ],
            vec![],
        ),
    ]
}

fn syncs() -> Vec<Case> {
    let with_sync = |packet: Packet| packet.with(|it| it.flags |= SYNC);
    let pages = vec![(3, fill(3))];
    let behind = |packets: Vec<Packet>| {
        let mut stream = channel(0, []);
        stream.extend(packets.into_iter().flat_map(Packet::parts));
        vec![stream, channel(1, [])]
    };
    let unequal = "Every channel has the same number of SYNCs.";
    vec![
        accepted(
            "sync/alone",
            "A channel need not have pages.",
            vec![channel(0, []), channel(1, [])],
            vec![],
        ),
        accepted(
            "sync/empty-packets",
            "A packet with neither pages nor a SYNC is allowed.",
            vec![channel(
                0,
                [
                    Packet::empty(0),
                    three(3),
                    Packet::empty(0),
                    Packet::empty(0),
                ],
            )],
            pages.clone(),
        ),
        accepted(
            "sync/with-pages",
            "A SYNC may have pages, which come before it: so QEMU before 9.0.",
            vec![channel(0, [with_sync(three(3)), Packet::empty(0)])],
            pages.clone(),
        ),
        accepted(
            "sync/with-pages-before-it",
            "The pages of a SYNC come before it.",
            vec![
                channel(0, [with_sync(three(2))]),
                channel(1, [Packet::sync(), three(3)]),
            ],
            pages.clone(),
        ),
        accepted(
            "sync/with-zero-pages",
            "A SYNC may have zero pages, which come before it.",
            vec![channel(
                0,
                [three(2), Packet::sync(), with_sync(zeros(&[3]))],
            )],
            vec![],
        ),
        accepted(
            "sync/names-a-block",
            "Without pages, the name of a RAM block says nothing.",
            vec![channel(0, [Packet::sync().named(b"rom"), three(3)])],
            pages.clone(),
        ),
        accepted(
            "sync/pages-alloc-0",
            "A SYNC's pages_alloc says nothing: QEMU 10.0 leaves it 0.",
            vec![channel(
                0,
                [Packet::sync().with(|it| it.pages_alloc = 0), three(3)],
            )],
            pages.clone(),
        ),
        accepted(
            "sync/many",
            "There are as many rounds as the source likes.",
            vec![
                channel(0, (0..40).map(|_| Packet::sync()).chain([three(3)])),
                channel(1, (0..40).map(|_| Packet::sync())),
            ],
            pages.clone(),
        ),
        accepted(
            "sync/empty-packet-last",
            "An empty packet may follow the last SYNC.",
            behind(vec![Packet::empty(0)]),
            vec![],
        ),
        refused(
            "sync/pages-behind-the-last",
            "All pages come before the last SYNC.",
            behind(vec![three(3)]),
        ),
        refused("sync/one-more", unequal, behind(vec![Packet::sync()])),
        refused(
            "sync/one-missing",
            unequal,
            vec![vec![initial(0)], channel(1, [])],
        ),
        refused(
            "sync/wrong-magic",
            "A packet begins with 11223344.",
            vec![channel(
                0,
                [Packet::sync().with(|it| it.magic = MAGIC ^ 0xff)],
            )],
        ),
    ]
}

/// A page that moves from channel to channel, a version in each round: whoever does not wait for the SYNCs of all channels has an
/// older one in the end, whichever channel is first, unless it reads them in step by luck.
fn barriers() -> Vec<Case> {
    let rounds = |channels: u8, order: &[u8]| -> Vec<Stream> {
        let of = |id: u8| {
            let rounds = order.iter().zip(1..).flat_map(move |(writer, version)| {
                let page = (*writer == id).then(|| three(version));
                page.into_iter().chain([Packet::sync()])
            });
            channel(id, rounds)
        };
        (0..channels).map(of).collect()
    };
    let orders: [(&str, u8, &[u8]); 6] = [
        ("first-channel-last", 2, &[1, 0]),
        ("last-channel-last", 2, &[0, 1]),
        ("in-turn", 3, &[0, 1, 2, 0, 1, 2]),
        ("in-turn-back", 3, &[2, 1, 0, 2, 1, 0]),
        ("middle-last", 3, &[0, 2, 1]),
        ("eight-channels", 8, &[7, 3, 5, 1, 6, 2, 4, 0]),
    ];
    let mut cases: Vec<_> = orders
        .into_iter()
        .map(|(name, channels, order)| {
            let last = order.len().to_le_bytes()[0];
            accepted(
                &format!("sync/{name}"),
                "What comes before a SYNC, on any channel, is there before what comes behind it on any channel.",
                rounds(channels, order),
                vec![(3, fill(last))],
            )
        })
        .collect();
    cases.push(accepted(
        "sync/zero-behind-a-page",
        "A zero page waits for the SYNC of the channels, too.",
        vec![
            channel(0, [Packet::sync(), zeros(&[3])]),
            channel(1, [three(9), Packet::sync()]),
        ],
        vec![],
    ));
    cases
}
