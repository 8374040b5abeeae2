//! A model of both ends: channels with several writers, packets that overtake each other, sockets that hold a few of them,
//! and more pages than slots. In any order of steps, pages arrive as they were sent, both caches are the same, and some step is
//! always possible.

use std::collections::VecDeque;

use multifd::{BlockName, Layout, RamHeader};
use proptest::{collection::vec, prelude::*};
use vamoose_codec::delta::Mark;

use crate::delta::{DeltaError, DeltaReceiver, DeltaSender, SLOT_OVERHEAD, sender::Planned};

const PAGE: usize = 1024;

fn layout() -> Layout {
    let layout = Layout::new(u32::try_from(PAGE).unwrap()).unwrap();
    layout.with_packet_bytes(64 << 10).unwrap()
}

/// What is on a socket.
enum Wire {
    Packet(Packet),
    Sync,
}

struct Packet {
    marks: Vec<Mark>,
    /// The versions that the sender encodes the pages after.
    earlier: Vec<u8>,
    pages: Vec<u8>,
}

/// The packet a writer is working on.
enum Work {
    Planned(Vec<Planned>, Vec<u8>),
    Made(Packet),
}

struct Channel {
    /// Rounds still to send: packets of page numbers.
    rounds: VecDeque<VecDeque<Vec<u64>>>,
    epoch: u64,
    writers: Vec<Option<Work>>,
    socket: VecDeque<Wire>,
}

struct World {
    sender: DeltaSender,
    receiver: DeltaReceiver,
    memory: Vec<Vec<u8>>,
    channels: Vec<Channel>,
    differences: usize,
}

/// Packets that a socket holds.
const SOCKET: usize = 3;

impl World {
    fn new(pages: usize, slots: usize, channels: usize, writers: usize) -> Self {
        let bytes = slots * (PAGE + SLOT_OVERHEAD);
        let channel = || Channel {
            rounds: VecDeque::new(),
            epoch: 0,
            writers: (0..writers).map(|_| None).collect(),
            socket: VecDeque::new(),
        };
        Self {
            sender: DeltaSender::new(bytes, layout()),
            // Waits fail at once.
            receiver: DeltaReceiver::new(bytes, layout(), std::time::Duration::ZERO),
            memory: (0..pages)
                .map(|page| vec![u8::try_from(page % 251).unwrap(); PAGE])
                .collect(),
            channels: (0..channels).map(|_| channel()).collect(),
            differences: 0,
        }
    }

    /// Takes a step on this channel, chosen by `at`; false if that step is not possible now.
    fn step(&mut self, channel: usize, at: usize) -> bool {
        let writers = self.channels[channel].writers.len();
        match at % (writers + 1) {
            0 => self.receive(channel),
            writer => self.write(channel, writer - 1),
        }
    }

    fn write(&mut self, number: usize, writer: usize) -> bool {
        let channel = &mut self.channels[number];
        match channel.writers[writer].take() {
            None => {
                let Some(round) = channel.rounds.front_mut() else {
                    return false;
                };
                let Some(pages) = round.pop_front() else {
                    let is_last = channel.writers.iter().all(Option::is_none);
                    if !is_last || channel.socket.len() >= SOCKET {
                        return false;
                    }
                    channel.rounds.pop_front();
                    channel.epoch += 1;
                    channel.socket.push_back(Wire::Sync);
                    return true;
                };
                let mut header = RamHeader::new(layout());
                header.block = BlockName::new(b"ram").unwrap();
                let offsets: Vec<u64> = pages.iter().map(|page| page * PAGE as u64).collect();
                header.set_pages(&offsets, &[], layout()).unwrap();
                let mut plan = Vec::new();
                self.sender.plan(&header, channel.epoch, &mut plan);
                let pages = pages
                    .iter()
                    .map(|page| &self.memory[usize::try_from(*page).unwrap()][..]);
                let bytes = pages.collect::<Vec<_>>().concat();
                channel.writers[writer] = Some(Work::Planned(plan, bytes));
            }
            Some(Work::Planned(plan, pages)) => {
                let (mut earlier, mut marks) = (Vec::new(), Vec::new());
                self.sender.prepare(&plan, &pages, &mut earlier, &mut marks);
                self.sender.finish(&plan);
                channel.writers[writer] = Some(Work::Made(Packet {
                    marks,
                    earlier,
                    pages,
                }));
            }
            Some(Work::Made(packet)) if channel.socket.len() < SOCKET => {
                channel.socket.push_back(Wire::Packet(packet));
            }
            waiting => {
                channel.writers[writer] = waiting;
                return false;
            }
        }
        true
    }

    fn receive(&mut self, number: usize) -> bool {
        let socket = &mut self.channels[number].socket;
        let Some(Wire::Packet(packet)) = socket.front() else {
            return socket.pop_front().is_some();
        };
        let mut earlier = Vec::new();
        match self.receiver.versions(&packet.marks, &mut earlier) {
            Err(DeltaError::Missing { .. }) => return false,
            found => found.unwrap(),
        }
        assert_eq!(earlier, packet.earlier);
        self.receiver.keep(&packet.marks, &packet.pages).unwrap();
        let is_difference = |mark: &&Mark| mark.is_difference();
        self.differences += packet.marks.iter().filter(is_difference).count();
        socket.pop_front();
        true
    }

    /// Runs to the end: steps by `choices`, then in turn.
    fn run(&mut self, choices: &[(usize, usize)]) {
        for (channel, at) in choices {
            self.step(channel % self.channels.len(), *at);
        }
        loop {
            let mut goes_on = false;
            for channel in 0..self.channels.len() {
                for at in 0..=self.channels[channel].writers.len() {
                    goes_on |= self.step(channel, at);
                }
            }
            if !goes_on {
                break;
            }
        }
        for channel in &self.channels {
            assert!(
                channel.rounds.is_empty() && channel.socket.is_empty(),
                "all wait"
            );
        }
        let all = self.sender.all();
        assert_eq!(self.receiver.all(all.len()), all);
    }
}

/// A round of a guest: the bytes it has changed, and the packets of each channel.
type Round = (Vec<(usize, usize, u8)>, Vec<Vec<Vec<u64>>>);

const PAGES: usize = 24;

fn round() -> impl Strategy<Value = Round> {
    let changes = vec((0..PAGES, 0..PAGE, any::<u8>()), 0..40);
    let packet = vec(0..PAGES as u64, 1..12);
    (changes, vec(vec(packet, 0..4), 3))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Pages may be sent several times in a round.
    #[test]
    fn both_caches_are_the_same_and_no_reader_waits_for_ever(
        rounds in vec(round(), 1..8),
        slots in 1..40_usize,
        channels in 1..=3_usize,
        writers in 1..=3_usize,
        choices in vec((0..3_usize, 0..4_usize), 0..400),
    ) {
        let mut world = World::new(PAGES, slots, channels, writers);
        let mut choices = choices.chunks(60);
        for (changes, packets) in rounds {
            for (page, at, byte) in changes {
                world.memory[page][at] = byte;
            }
            for (channel, packets) in world.channels.iter_mut().zip(packets) {
                channel.rounds.push_back(packets.into());
            }
            // Some steps now; the rest is mixed with later rounds.
            for (channel, at) in choices.next().unwrap_or_default() {
                world.step(channel % channels, *at);
            }
        }
        world.run(choices.next().unwrap_or_default());
    }
}

/// Sends each page once, on channels in turn.
fn send_all(world: &mut World, pages: std::ops::Range<u64>) {
    let pages: Vec<u64> = pages.collect();
    let channels = world.channels.len();
    for (number, channel) in world.channels.iter_mut().enumerate() {
        let packets = pages.chunks(8).enumerate();
        let mine = packets.filter(|(index, _)| index % channels == number);
        channel
            .rounds
            .push_back(mine.map(|(_, pages)| pages.to_vec()).collect());
    }
    for page in pages {
        world.memory[usize::try_from(page).unwrap()][7] += 1;
    }
    world.run(&[]);
}

#[test]
fn a_page_goes_as_a_difference_from_the_third_time_on() {
    let mut world = World::new(64, 64, 2, 2);
    for (round, differences) in [0, 0, 64, 128].into_iter().enumerate() {
        send_all(&mut world, 0..64);
        assert_eq!(world.differences, differences, "round {round}");
    }
}

#[test]
fn with_more_pages_than_slots_the_slots_keep_theirs() {
    let mut world = World::new(200, 40, 2, 1);
    for _ in 0..6 {
        send_all(&mut world, 0..200);
    }
    assert!(world.differences > 100, "{}", world.differences);
}

#[test]
fn slots_of_pages_no_longer_sent_are_reused() {
    let mut world = World::new(200, 40, 1, 1);
    for _ in 0..4 {
        send_all(&mut world, 0..40);
    }
    // The first of the other pages are sent together with some of the earlier ones.
    for (other, rounds) in [(30..70, 8), (120..160, 80)] {
        let before = world.differences;
        for _ in 0..rounds {
            send_all(&mut world, other.clone());
        }
        assert!(
            world.differences > before + 60,
            "{before}, {}",
            world.differences
        );
    }
}

/// Sends page 0 to a receiver with pages in guest memory.
fn mark_of(sender: &DeltaSender, epoch: u64, page: &[u8]) -> (Mark, Vec<u8>) {
    let (mut plan, mut marks, mut earlier) = (Vec::new(), Vec::new(), Vec::new());
    sender.plan(&header(&[0], &[]), epoch, &mut plan);
    sender.prepare(&plan, page, &mut earlier, &mut marks);
    sender.finish(&plan);
    (marks[0], earlier)
}

fn header(normal: &[u64], zero: &[u64]) -> RamHeader {
    let mut header = RamHeader::new(layout());
    header.block = BlockName::new(b"ram").unwrap();
    header.set_pages(normal, zero, layout()).unwrap();
    header
}

#[test]
fn in_place_a_page_sent_without_the_cache_is_forgotten() {
    let sender = DeltaSender::in_place(1 << 20, layout());
    let (old, new) = (vec![7; PAGE], [vec![8; 16], vec![7; PAGE - 16]].concat());
    let mut epoch = 0;
    let mut next = |page: &[u8]| {
        epoch += 1;
        mark_of(&sender, epoch, page)
    };
    assert_eq!(next(&old), (Mark::Plain, Vec::new()));
    assert_eq!(next(&old), (Mark::Plain, Vec::new()));
    assert_eq!(next(&new), (Mark::InPlace, old.clone()));
    // Sent past the cache, and as a zero page in packets that are planned and that are not.
    sender.pass_by(&header(&[0], &[]));
    assert_eq!(next(&old).0, Mark::Plain);
    assert_eq!(next(&new).0, Mark::InPlace);
    sender.pass_by(&header(&[], &[0]));
    assert_eq!(next(&old).0, Mark::Plain);
    assert_eq!(next(&new).0, Mark::InPlace);
    sender.plan(&header(&[], &[0]), 100, &mut Vec::new());
    assert_eq!(next(&old).0, Mark::Plain);
    // Twice in an epoch: the second version is not kept.
    let twice = next(&new);
    assert_eq!(twice.0, Mark::InPlace);
    assert_eq!(mark_of(&sender, 9, &old), (Mark::Plain, Vec::new()));
    assert_eq!(mark_of(&sender, 1000, &new).0, Mark::Plain);
}
