//! Kind `encode`: a guest's memory, for every method.

use super::{block, case, fill, noise, numbered, page_of};
use multifd_conformance::{Case, Page, Task};

const METHODS: [&str; 5] = ["none", "zlib", "zstd", "qpl", "qatzip"];

pub(super) fn cases() -> Vec<Case> {
    METHODS.into_iter().flat_map(cases_of).collect()
}

fn cases_of(method: &str) -> Vec<Case> {
    let make = |name: &str, rule: &str, channels: u8, rounds: Vec<Vec<(usize, Vec<u8>)>>| {
        let of = |(page, bytes)| page_of("mem", page, bytes);
        let rounds: Vec<Vec<Page>> = rounds
            .into_iter()
            .map(|pages| pages.into_iter().map(of).collect())
            .collect();
        let mut case = case(
            &format!("encode/{method}-{name}"),
            rule,
            Task::Encode { channels, rounds },
        );
        method.clone_into(&mut case.method);
        case
    };
    let text = |page: usize| {
        let words = format!("page {page} of a guest. ");
        words
            .bytes()
            .cycle()
            .take(multifd_conformance::PAGE)
            .collect::<Vec<u8>>()
    };
    let half = [vec![0; 2048], noise(3)[..1024].to_vec(), vec![9; 1024]].concat();
    let mixed = vec![
        (0, fill(7)),
        (3, half),
        (4, text(4)),
        (77, text(77)),
        (255, fill(5)),
    ];
    let first = vec![(0, fill(7)), (3, fill(3)), (4, text(4)), (77, text(77))];
    let second = vec![(0, fill(7)), (3, fill(8)), (77, text(78)), (78, text(78))];
    let mut blocks = make(
        "two-blocks",
        "A packet has pages of one RAM block.",
        2,
        vec![],
    );
    blocks.blocks.push(block("mem2", 8));
    let pages = ["mem", "mem2"].map(|name| page_of(name, 3, text(name.len())));
    blocks.task = Task::Encode {
        channels: 2,
        rounds: vec![pages.to_vec()],
    };
    vec![
        make(
            "zero-memory",
            "Memory of zeros needs no normal page.",
            1,
            vec![vec![]],
        ),
        make("mixed-pages", "Pages of all kinds arrive.", 2, vec![mixed]),
        make(
            "noise",
            "A page that does not compress arrives.",
            1,
            vec![vec![(1, noise(1))]],
        ),
        make(
            "full-packets",
            "A packet has at most 128 pages.",
            1,
            vec![numbered(0, 129)],
        ),
        make(
            "four-channels",
            "A page comes once in a round, over any channel.",
            4,
            vec![numbered(0, 60)],
        ),
        make(
            "rounds",
            "Pages change, become zero and appear.",
            2,
            vec![first, second],
        ),
        blocks,
    ]
}
