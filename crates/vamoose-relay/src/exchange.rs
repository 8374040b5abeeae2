//! Passes packets from the readers of the incoming channels to the writers of the outgoing channels.
//!
//! ```text
//!  reader 0 ─┐  take() a free packet,                    ┌─ writer 0   next(),
//!  reader 1 ─┼─ read into it, submit()  ─> [one queue] ──┼─ writer 1   encode and send,
//!  reader N ─┘                                           └─ writer M   give_back()
//! ```
//!
//! Between two SYNCs no page appears twice, so any writer may take any packet: the queue is shared,
//! and a faster channel sends more packets. **SYNC is a barrier on both sides**: the last reader to reach
//! it puts one SYNC per writer behind everything read so far, and no reader continues before that. No writer continues before every
//! channel has sent its SYNC.
//!
//! **All packets are allocated at the beginning**: two per channel, or one per reader and writer if these are more. More packets
//! would falsify the bandwidth that the source measures (it counts bytes in the socket as sent), and its estimate of the
//! downtime.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender, bounded};
use multifd::Layout;
use vamoose_link::{Packet, lock};

/// The ends for `readers` readers and for `writers` writers, and their barriers.
pub(crate) fn exchange(
    readers: usize,
    writers: usize,
    layout: Layout,
) -> (Vec<ReaderEnd>, Vec<WriterEnd>, Barriers) {
    let packets = (PACKETS_PER_CHANNEL * readers.max(writers)).max(readers + writers);
    let (give, take) = bounded(packets);
    for _ in 0..packets {
        // The channel has room for all packets.
        let _ = give.try_send(Box::new(Packet::new(layout)));
    }
    let (submit, next) = bounded(packets + writers);
    let read = Arc::new(Barrier::new(readers));
    let sent = Arc::new(Barrier::new(writers));
    let end = ReaderEnd {
        free: take,
        work: submit,
        sync: read.clone(),
        writers,
    };
    let writer_end = WriterEnd {
        work: next,
        free: give,
        sync: sent.clone(),
    };
    let ends = (vec![end; readers], vec![writer_end; writers]);
    (ends.0, ends.1, Barriers([read, sent]))
}

/// See the module's documentation.
const PACKETS_PER_CHANNEL: usize = 2;

/// What a writer has to do next.
pub(crate) enum Work {
    /// Send a packet, then give it back.
    Packet(Box<Packet>),
    /// Send a SYNC, then wait for the other writers.
    Sync { packet_num: u64 },
}

/// The threads at the other end have ended: the migration is over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

#[derive(Clone)]
pub(crate) struct ReaderEnd {
    free: Receiver<Box<Packet>>,
    work: Sender<Work>,
    sync: Arc<Barrier>,
    writers: usize,
}

impl ReaderEnd {
    /// Waits for a free packet.
    pub(crate) fn take(&self) -> Result<Box<Packet>, Closed> {
        self.free.recv().map_err(|_| Closed)
    }

    /// Hands a packet with pages or device state to the writers.
    pub(crate) fn submit(&self, packet: Box<Packet>) -> Result<(), Closed> {
        self.work.send(Work::Packet(packet)).map_err(|_| Closed)
    }

    /// Marks this channel as having reached a SYNC; returns when all have.
    pub(crate) fn sync(&self, packet_num: u64) -> Result<(), Closed> {
        self.sync.wait(|| {
            for _ in 0..self.writers {
                self.work
                    .send(Work::Sync { packet_num })
                    .map_err(|_| Closed)?;
            }
            Ok(())
        })
    }
}

#[derive(Clone)]
pub(crate) struct WriterEnd {
    work: Receiver<Work>,
    free: Sender<Box<Packet>>,
    /// The barrier of all writers.
    sync: Arc<Barrier>,
}

impl WriterEnd {
    /// Waits for something to do; [`Closed`] when all readers have ended and everything is done.
    pub(crate) fn next(&self) -> Result<Work, Closed> {
        self.work.recv().map_err(|_| Closed)
    }

    pub(crate) fn give_back(&self, packet: Box<Packet>) {
        // The channel has room for all packets. The readers may all have ended.
        let _ = self.free.try_send(packet);
    }

    /// Marks this writer as having sent its SYNC; returns when all have sent theirs.
    pub(crate) fn sync(&self) -> Result<(), Closed> {
        self.sync.wait(|| Ok(()))
    }
}

/// The barriers of an exchange.
pub(crate) struct Barriers([Arc<Barrier>; 2]);

impl Barriers {
    /// Ends every wait, because a thread will never reach its barrier.
    pub(crate) fn give_up(&self) {
        for barrier in &self.0 {
            barrier.give_up();
        }
    }
}

/// A reusable barrier whose waits can be ended.
struct Barrier {
    parties: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    arrived: usize,
    round: u64,
    given_up: bool,
}

impl Barrier {
    fn new(parties: usize) -> Self {
        Self {
            parties,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits for all parties; the last one runs `complete` before any continues.
    ///
    /// The lock is not held while `complete` runs: `complete` may wait for a thread that never comes, until
    /// [`Barrier::give_up`] ends the wait.
    fn wait(&self, complete: impl FnOnce() -> Result<(), Closed>) -> Result<(), Closed> {
        let mut state = lock(&self.state);
        if state.given_up {
            return Err(Closed);
        }
        state.arrived += 1;
        if state.arrived == self.parties {
            drop(state);
            let completed = complete();
            state = lock(&self.state);
            // No party has arrived since: all of them were waiting.
            state.arrived = 0;
            state.round += 1;
            state.given_up |= completed.is_err();
            self.changed.notify_all();
        } else {
            let round = state.round;
            while state.round == round && !state.given_up {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
        if state.given_up { Err(Closed) } else { Ok(()) }
    }

    fn give_up(&self) {
        lock(&self.state).given_up = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use proptest::prelude::*;

    use super::*;

    const LAYOUT: Layout = Layout::X86;
    /// Longer than anything may take on a machine that is very busy.
    const LIMIT: Duration = Duration::from_secs(60);

    /// What a writer saw: a packet's number, or a SYNC.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Seen {
        Packet(u64),
        Sync,
    }

    /// Runs `rounds[round][reader]` packets through and returns what each channel's socket saw. A
    /// packet's number is its round.
    fn run(rounds: &[Vec<usize>], readers: usize, writers: usize) -> Vec<Vec<Seen>> {
        let (reader_ends, writer_ends, _barriers) = exchange(readers, writers, LAYOUT);
        let sockets: Vec<_> = (0..writers).map(|_| Mutex::new(Vec::new())).collect();
        thread::scope(|scope| {
            for (reader, end) in reader_ends.into_iter().enumerate() {
                scope.spawn(move || {
                    for (round, packets) in rounds.iter().enumerate() {
                        for _ in 0..packets[reader] {
                            let mut packet = end.take().unwrap();
                            packet.ram_mut().packet_num = round as u64;
                            end.submit(packet).unwrap();
                        }
                        end.sync(round as u64).unwrap();
                    }
                });
            }
            for (writer, end) in writer_ends.into_iter().enumerate() {
                let socket = &sockets[writer];
                scope.spawn(move || {
                    while let Ok(work) = end.next() {
                        match work {
                            Work::Packet(packet) => {
                                // As if it had been encoded.
                                thread::yield_now();
                                let seen = Seen::Packet(packet.ram().packet_num);
                                socket.lock().unwrap().push(seen);
                                end.give_back(packet);
                            }
                            Work::Sync { .. } => {
                                socket.lock().unwrap().push(Seen::Sync);
                                end.sync().unwrap();
                            }
                        }
                    }
                });
            }
        });
        let seen = sockets
            .into_iter()
            .map(|socket| socket.into_inner().unwrap());
        seen.collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn nothing_crosses_a_sync_and_nothing_is_lost(
            readers in 1usize..5,
            writers in 1usize..9,
            rounds in proptest::collection::vec(proptest::collection::vec(0usize..12, 5), 1..5),
        ) {
            let seen = run(&rounds, readers, writers);
            for (round, packets) in rounds.iter().enumerate() {
                let of_round = |seen: &Vec<Seen>| {
                    seen.split(|s| *s == Seen::Sync).nth(round).map_or(0, |round_seen| {
                        assert!(round_seen.iter().all(|s| *s == Seen::Packet(round as u64)));
                        round_seen.len()
                    })
                };
                let sent: usize = packets[..readers].iter().sum();
                prop_assert_eq!(seen.iter().map(of_round).sum::<usize>(), sent);
            }
            for channel in &seen {
                let syncs = channel.iter().filter(|s| **s == Seen::Sync).count();
                prop_assert_eq!(syncs, rounds.len());
            }
        }
    }

    /// More packets that wait would falsify the bandwidth that the source measures.
    #[test]
    fn readers_that_are_ahead_wait_for_a_writer() {
        for (readers, writers, packets) in [(2, 3, 6), (4, 1, 8), (2, 2, 4)] {
            let (reader_ends, writer_ends, _) = exchange(readers, writers, LAYOUT);
            let (reader, writer) = (reader_ends[0].clone(), &writer_ends[0]);
            let (tell, submitted) = bounded(packets + 1);
            let reads = thread::spawn(move || {
                for _ in 0..=packets {
                    let packet = reader.take().unwrap();
                    reader.submit(packet).unwrap();
                    tell.send(()).unwrap();
                }
            });
            for _ in 0..packets {
                submitted.recv_timeout(LIMIT).unwrap();
            }
            let one_more = submitted.recv_timeout(Duration::from_millis(50));
            assert!(one_more.is_err(), "more than {packets} packets wait");
            let Ok(Work::Packet(packet)) = writer.next() else {
                panic!("a packet was submitted");
            };
            writer.give_back(packet);
            submitted.recv_timeout(LIMIT).unwrap();
            reads.join().unwrap();
        }
    }

    /// The writers are stuck: all packets and a SYNC per writer fill the queue, so the next SYNC has to wait for room.
    #[test]
    fn a_reader_at_a_sync_with_a_full_queue_does_not_block_giving_up() {
        let (reader_ends, writer_ends, barriers) = exchange(1, 2, LAYOUT);
        let end = reader_ends[0].clone();
        let (tell, told) = bounded(1);
        let syncing = thread::spawn(move || {
            for _ in 0..4 {
                end.submit(end.take().unwrap()).unwrap();
            }
            end.sync(0).unwrap();
            tell.send(()).unwrap();
            end.sync(1)
        });
        told.recv_timeout(LIMIT).unwrap();
        // Time to block in the second SYNC.
        thread::sleep(Duration::from_millis(50));
        // In a thread of its own, so that the test ends if it fails.
        let (tell, told) = bounded(1);
        thread::spawn(move || {
            barriers.give_up();
            tell.send(()).unwrap();
        });
        assert_eq!(told.recv_timeout(LIMIT), Ok(()));
        drop(writer_ends);
        assert_eq!(syncing.join().unwrap(), Err(Closed));
    }

    #[test]
    fn a_thread_that_waits_at_a_barrier_can_be_released() {
        let (reader_ends, _writer_ends, barriers) = exchange(2, 1, LAYOUT);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| reader_ends[0].sync(0));
            barriers.give_up();
            assert_eq!(waiting.join().unwrap(), Err(Closed));
        });
    }
}
