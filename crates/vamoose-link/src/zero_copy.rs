//! Sending guest memory without a copy (MSG_ZEROCOPY).
//!
//! The kernel pins the pages and sends them in place, so a send costs page accounting instead of a copy. It reports released pages
//! later, on the socket's error queue:
//!
//! ```text
//!  send header (copied, MSG_MORE) ── send pages (MSG_ZEROCOPY): outstanding + 1 ── look at the error queue ── …
//!                                      │ ENOBUFS                                     [first, last], copied?
//!                                      ├ something outstanding: wait for a notification, try again
//!                                      └ nothing outstanding: send a copy
//!
//!  flush: until nothing is outstanding, read the error queue, or wait (poll) for the stall timeout at most
//! ```
//!
//! The guest keeps running, and the device sends the bytes that it finds when it reads the page. This is as correct as a
//! copy: the page was cleared in the dirty log before it was sent, so a later write makes it dirty and it is sent again. But an
//! **older** send must be complete before a newer one of the same page starts on another channel. Therefore a channel is flushed at
//! each SYNC, [`ChannelWriter::write_sync`](crate::ChannelWriter::write_sync).
//!
//! The kernel numbers the MSG_ZEROCOPY sends of a socket that took at least a byte, from 0, wrapping around. It reports each number
//! once, in ranges, perhaps out of order, so counting them is enough. Over loopback the kernel copies when the bytes reach the
//! receiving socket, and reports that.

use std::{
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use multifd::{Layout, Method};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::sockopt,
    process::{Resource, getrlimit},
    thread::CapabilitySet,
};
use thiserror::Error;
use vm_memory::VolatileSlice;

use crate::{
    Socket, Stats, WriteError,
    memory::{self, Left, Notification},
    socket::uninterrupted,
    wait_until,
};

/// Why a channel cannot send without a copy.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ZeroCopyError {
    /// An encoder produces other bytes than those of the pages.
    #[error("zero-copy send is for method none, and the method is {method}")]
    Method { method: Method },
    /// Unix sockets always copy.
    #[error("zero-copy send is for TCP, and the channel is a unix socket")]
    NotTcp,
    /// A session may send the same bytes again, so it keeps copies.
    #[error(
        "zero-copy send is for plain connections, and the channel is a stream of a session, which keeps copies of what it sends: \
         use a session without zero-copy send, or plain connections"
    )]
    Session,
    /// A kernel before 4.14.
    #[error("this kernel does not do zero-copy send (SO_ZEROCOPY)")]
    Unsupported(#[source] io::Error),
    /// The kernel would reach the limit of locked memory, and copy.
    #[error(
        "zero-copy send on {channels} channels needs {needed} bytes of locked memory, and the limit is \
         {limit}: raise it with `ulimit -l {}` (systemd: LimitMEMLOCK={needed}; a process that runs: `prlimit \
         --pid PID --memlock={needed}`), or grant CAP_IPC_LOCK",
        .needed.div_ceil(1024)
    )]
    LockedMemory {
        channels: usize,
        needed: u64,
        limit: u64,
    },
}

/// Checks that RLIMIT_MEMLOCK lets `channels` channels with packets of `layout` send without copies.
///
/// The kernel accounts each send to the *user*, as whole pages plus two for the ends, until all of it
/// has been acknowledged. One channel can have: the content of the socket's send buffer (at most the
/// third value of `net.ipv4.tcp_wmem`), a packet being queued, and one that is partly acknowledged,
/// or up to 512 KiB of smaller ones, which the kernel releases together. Fewer than four pages
/// are sent as a copy, so the two pages for the ends add at most half:
///
/// ```text
/// needed = channels * 3/2 * (tcp_wmem[2] + packet + max(packet, 512 KiB))
/// ```
///
/// CAP_IPC_LOCK exempts from the limit, except if granted in a user namespace, which this check does not notice. Other
/// processes of the user that pin memory (io_uring, AF_XDP, QEMU) count towards the same limit. A send
/// beyond the limit is a copy, see [`Counters::copied_sends`](crate::Counters::copied_sends).
///
/// # Errors
/// When the limit is too low; the error names the required one.
pub fn check_locked_memory(channels: usize, layout: Layout) -> Result<(), ZeroCopyError> {
    // If the capabilities cannot be read, the limit applies.
    let exempt = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    let limit = getrlimit(Resource::Memlock).current;
    let needed = needed_memory(channels, layout, largest_send_buffer());
    match limit {
        Some(limit) if limit < needed && !exempt => Err(ZeroCopyError::LockedMemory {
            channels,
            needed,
            limit,
        }),
        _ => Ok(()),
    }
}

/// Enables sends without copies on `stream`.
pub(crate) fn enable(stream: &Socket) -> Result<ZeroCopy, ZeroCopyError> {
    match stream {
        Socket::Unix(_) => Err(ZeroCopyError::NotTcp),
        Socket::Tcp(_) => {
            memory::allow_zero_copy(stream.as_fd()).map_err(ZeroCopyError::Unsupported)?;
            Ok(ZeroCopy::default())
        }
    }
}

/// Whether `bytes` bytes of pages are enough. Accounting a send costs as much as copying two or three pages.
pub(crate) fn is_worth_it(bytes: usize) -> bool {
    bytes >= MIN_PAGES * rustix::param::page_size()
}

/// The sends of a channel whose pages the kernel still holds.
#[derive(Debug, Default)]
pub(crate) struct ZeroCopy {
    /// Sends that the kernel has not released.
    outstanding: u32,
    /// Sends since the last flush, and those that the kernel copied.
    sent: u64,
    copied: u64,
}

impl ZeroCopy {
    /// Sends a packet. When this returns, the kernel may hold `pages`, see [`ZeroCopy::flush`].
    pub(crate) fn send(
        &mut self,
        kernel: &impl Kernel,
        header: &[u8],
        pages: &[VolatileSlice<'_>],
        stats: &Stats,
    ) -> Result<(), WriteError> {
        let copy = |left: &mut Left<'_>, flags| {
            let sent = kernel.send(left, flags);
            left.advance(sent.map_err(|error| failed(kernel, error))?);
            Ok::<_, WriteError>(())
        };
        let mut left = Left::new(header, &[]);
        while left.bytes() > 0 {
            copy(&mut left, libc::MSG_MORE)?;
        }
        let mut left = Left::new(&[], pages);
        while left.bytes() > 0 {
            match kernel.send(&left, libc::MSG_ZEROCOPY) {
                Ok(bytes) => {
                    left.advance(bytes);
                    self.outstanding += 1;
                    self.sent += 1;
                    stats.zero_copy_sends.add(1);
                    // So that the kernel does not run out of memory for notifications.
                    self.read_notifications(kernel, stats)?;
                }
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => {
                    if self.outstanding > 0 {
                        self.wait_for_some(kernel, stats)?;
                    } else {
                        // The limit does not allow a single pinned send.
                        copy(&mut left, 0)?;
                        self.sent += 1;
                        stats.zero_copy_sends.add(1);
                        self.add_copied(1, stats);
                    }
                }
                Err(error) => return Err(failed(kernel, error)),
            }
        }
        Ok(())
    }

    /// Waits until the kernel has released every page.
    pub(crate) fn flush(&mut self, kernel: &impl Kernel, stats: &Stats) -> Result<(), WriteError> {
        while self.outstanding > 0 {
            self.wait_for_some(kernel, stats)?;
        }
        if self.sent > 0 && self.copied == self.sent {
            stats.missed_zero_copy.add(1);
        }
        (self.sent, self.copied) = (0, 0);
        Ok(())
    }

    /// Waits until the kernel has released some outstanding sends.
    fn wait_for_some(&mut self, kernel: &impl Kernel, stats: &Stats) -> Result<(), WriteError> {
        let before = self.outstanding;
        self.read_notifications(kernel, stats)?;
        while self.outstanding == before {
            if !kernel.wait().map_err(|error| failed(kernel, error))? {
                let (sends, seconds) = (before, kernel.stall_timeout().as_secs());
                return Err(WriteError::Held { sends, seconds });
            }
            self.read_notifications(kernel, stats)?;
        }
        Ok(())
    }

    fn read_notifications(
        &mut self,
        kernel: &impl Kernel,
        stats: &Stats,
    ) -> Result<(), WriteError> {
        while self.outstanding > 0 {
            let (mut sends, mut copied) = (0_u64, 0_u64);
            let more = kernel.notifications(&mut |notification| {
                let number = notification.sends();
                sends += number;
                if notification.copied {
                    copied += number;
                }
            });
            let more = more.map_err(|error| failed(kernel, error))?;
            self.outstanding = u32::try_from(sends)
                .ok()
                .and_then(|sends| self.outstanding.checked_sub(sends))
                .ok_or_else(|| WriteError::Io(io::Error::other(TOO_MANY)))?;
            self.add_copied(copied, stats);
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn add_copied(&mut self, sends: u64, stats: &Stats) {
        self.copied += sends;
        stats.copied_sends.add_all(sends);
    }
}

const TOO_MANY: &str = "the kernel has reported more zero-copy sends than there were";

/// The kernel's operations on one socket. Tests replace them.
pub(crate) trait Kernel {
    /// Sends as much of `left` as one call takes, at least a byte. `flags` are those of sendmsg(2).
    fn send(&self, left: &Left<'_>, flags: libc::c_int) -> io::Result<usize>;

    /// Takes a message from the error queue and passes its notifications to `each`; false when the queue is empty.
    fn notifications(&self, each: &mut dyn FnMut(Notification)) -> io::Result<bool>;

    /// Waits for a message in the error queue; false after the stall timeout. A broken or shut-down connection is an error.
    fn wait(&self) -> io::Result<bool>;

    fn stall_timeout(&self) -> Duration;
}

fn failed(kernel: &impl Kernel, error: io::Error) -> WriteError {
    WriteError::of(error, kernel.stall_timeout())
}

impl Kernel for Socket {
    fn send(&self, left: &Left<'_>, flags: libc::c_int) -> io::Result<usize> {
        match uninterrupted(|| memory::send(self.as_fd(), left, flags))? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            bytes => Ok(bytes),
        }
    }

    fn notifications(&self, each: &mut dyn FnMut(Notification)) -> io::Result<bool> {
        uninterrupted(|| memory::read_error_queue(self.as_fd(), each))
    }

    fn wait(&self) -> io::Result<bool> {
        let timeout = sockopt::socket_timeout(self, sockopt::Timeout::Send)?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        // Errors (notifications count as errors) and hang-ups are reported without being requested.
        let mut socket = [PollFd::new(self, PollFlags::empty())];
        if !wait_until(&mut socket, deadline)? {
            return Ok(false);
        }
        if socket[0].revents().contains(PollFlags::ERR) {
            // The socket's own errors are not in the queue.
            sockopt::socket_error(self)??;
            return Ok(true);
        }
        Err(io::ErrorKind::ConnectionAborted.into())
    }

    fn stall_timeout(&self) -> Duration {
        Socket::stall_timeout(self)
    }
}

impl Notification {
    /// Number of sends in it.
    fn sends(self) -> u64 {
        u64::from(self.last.wrapping_sub(self.first)) + 1
    }
}

/// Fewer pages are copied.
const MIN_PAGES: usize = 4;

/// See [`check_locked_memory`].
fn needed_memory(channels: usize, layout: Layout, send_buffer: u64) -> u64 {
    let packet = layout.packet_bytes() as u64;
    let in_flight = send_buffer + packet + packet.max(MERGED_SENDS);
    in_flight
        .saturating_mul(3)
        .saturating_mul(channels as u64)
        .div_ceil(2)
}

/// Bytes of small sends that the kernel releases together.
const MERGED_SENDS: u64 = 512 * 1024;

/// The largest send buffer that TCP gives a socket, bytes.
fn largest_send_buffer() -> u64 {
    let values = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").unwrap_or_default();
    let largest = values.split_ascii_whitespace().nth(2);
    largest
        .and_then(|value| value.parse().ok())
        .unwrap_or(DEFAULT_SEND_BUFFER)
}

/// The default of Linux on a host with enough memory.
const DEFAULT_SEND_BUFFER: u64 = 4 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::VecDeque};

    use super::*;

    /// An answer of the kernel; each is given once, in order.
    enum Event {
        /// A send takes at most this many bytes.
        Takes(libc::c_int, usize),
        /// A send finds no lockable memory.
        NoBuffers,
        /// The error queue has one message with these; it is empty unless this comes next.
        Notifies(Vec<Notification>),
        /// The error queue has a message.
        Wakes,
        /// No message for the stall timeout.
        TimesOut,
        /// The connection was shut down.
        HangsUp,
    }

    use Event::{HangsUp, NoBuffers, Notifies, Takes, TimesOut, Wakes};

    struct Script(RefCell<VecDeque<Event>>);

    impl Script {
        fn next(&self) -> Event {
            let event = self.0.borrow_mut().pop_front();
            event.expect("the script is over")
        }
    }

    impl Kernel for Script {
        fn stall_timeout(&self) -> Duration {
            Duration::from_secs(7)
        }

        fn send(&self, left: &Left<'_>, flags: libc::c_int) -> io::Result<usize> {
            match self.next() {
                Takes(expected, bytes) => {
                    assert_eq!(flags, expected);
                    Ok(bytes.min(left.bytes()))
                }
                NoBuffers => {
                    assert_eq!(flags, ZERO_COPY);
                    Err(Errno::NOBUFS.into())
                }
                _ => panic!("a send was not expected"),
            }
        }

        fn notifications(&self, each: &mut dyn FnMut(Notification)) -> io::Result<bool> {
            if !matches!(self.0.borrow().front(), Some(Notifies(_))) {
                return Ok(false);
            }
            if let Notifies(notifications) = self.next() {
                notifications.into_iter().for_each(each);
            }
            Ok(true)
        }

        fn wait(&self) -> io::Result<bool> {
            match self.next() {
                Wakes => Ok(true),
                TimesOut => Ok(false),
                HangsUp => Err(io::ErrorKind::ConnectionAborted.into()),
                _ => panic!("a wait was not expected"),
            }
        }
    }

    const ALL: usize = usize::MAX;

    /// Flags of a send with more to come at once, of one without a copy, and of a copy.
    const MORE: libc::c_int = libc::MSG_MORE;
    const ZERO_COPY: libc::c_int = libc::MSG_ZEROCOPY;
    const COPY: libc::c_int = 0;

    const fn done(first: u32, last: u32) -> Notification {
        Notification {
            first,
            last,
            copied: false,
        }
    }

    const fn copied(first: u32, last: u32) -> Notification {
        Notification {
            copied: true,
            ..done(first, last)
        }
    }

    /// Result and counters after `packets` packets and, if requested, a flush.
    fn play(
        packets: usize,
        flush: bool,
        events: impl IntoIterator<Item = Event>,
    ) -> (Result<(), WriteError>, [u64; 3]) {
        let script = Script(RefCell::new(events.into_iter().collect()));
        let stats = Stats::default();
        let mut zero_copy = ZeroCopy::default();
        let mut memory = vec![1; 1 << 16];
        let pages = [VolatileSlice::from(&mut memory[..])];
        let mut result = Ok(());
        for _ in 0..packets {
            result = result.and_then(|()| zero_copy.send(&script, b"header", &pages, &stats));
        }
        if flush {
            result = result.and_then(|()| zero_copy.flush(&script, &stats));
        }
        assert!(script.0.borrow().is_empty(), "unused answers");
        let counted = stats.snapshot();
        let sends = counted.zero_copy_sends;
        (
            result,
            [sends, counted.copied_sends, counted.missed_zero_copy],
        )
    }

    /// A packet sent whole.
    fn whole() -> [Event; 2] {
        [Takes(MORE, ALL), Takes(ZERO_COPY, ALL)]
    }

    #[test]
    fn a_flush_waits_for_every_part_of_a_packet() {
        let (result, counted) = play(
            1,
            true,
            [
                Takes(MORE, 2),
                Takes(MORE, ALL),
                Takes(ZERO_COPY, 5000),
                Takes(ZERO_COPY, 1),
                Takes(ZERO_COPY, ALL),
                Wakes,
                Notifies(vec![done(0, 0)]),
                Wakes,
                Notifies(vec![done(1, 2)]),
            ],
        );
        result.unwrap();
        assert_eq!(counted, [3, 0, 0]);
    }

    #[test]
    fn notifications_come_merged_and_in_any_order() {
        let late = [
            Wakes,
            Notifies(vec![done(3, 3), done(1, 2)]),
            Notifies(vec![done(0, 0)]),
        ];
        let events = (0..4).flat_map(|_| whole()).chain(late);
        let (result, counted) = play(4, true, events);
        result.unwrap();
        assert_eq!(counted, [4, 0, 0]);
    }

    #[test]
    fn numbers_wrap_around() {
        assert_eq!(done(u32::MAX, 1).sends(), 3);
        let late = [Notifies(vec![done(u32::MAX, 0)])];
        let events = (0..2).flat_map(|_| whole()).chain(late);
        let (result, _) = play(2, true, events);
        result.unwrap();
    }

    #[test]
    fn a_lost_notification_ends_in_an_error() {
        let late = [Notifies(vec![done(0, 0)]), TimesOut];
        let events = (0..2).flat_map(|_| whole()).chain(late);
        let (result, _) = play(2, true, events);
        assert!(
            matches!(
                result,
                Err(WriteError::Held {
                    sends: 1,
                    seconds: 7
                })
            ),
            "{result:?}"
        );
    }

    #[test]
    fn more_notifications_than_sends_are_an_error() {
        for range in [done(0, 1), done(1, 0)] {
            let events = whole().into_iter().chain([Notifies(vec![range])]);
            let (result, _) = play(1, true, events);
            assert!(matches!(result, Err(WriteError::Io(_))), "{result:?}");
        }
    }

    #[test]
    fn a_flush_ends_when_the_connection_does() {
        let events = whole().into_iter().chain([HangsUp]);
        let (result, _) = play(1, true, events);
        assert!(matches!(result, Err(WriteError::Io(_))), "{result:?}");
    }

    #[test]
    fn without_lockable_memory_waits_for_earlier_sends() {
        let second = [
            Takes(MORE, ALL),
            NoBuffers,
            Wakes,
            Notifies(vec![done(0, 0)]),
            Takes(ZERO_COPY, ALL),
            Notifies(vec![done(1, 1)]),
        ];
        let (result, counted) = play(2, true, whole().into_iter().chain(second));
        result.unwrap();
        assert_eq!(counted, [2, 0, 0]);
    }

    #[test]
    fn without_any_lockable_memory_pages_are_copied() {
        let packet = || [Takes(MORE, ALL), NoBuffers, Takes(COPY, ALL)];
        let events = (0..3).flat_map(|_| packet());
        let (result, counted) = play(3, true, events);
        result.unwrap();
        assert_eq!(counted, [3, 3, 1]);
    }

    #[test]
    fn a_flush_is_missed_when_everything_was_copied() {
        let both = |notifications| {
            let events = (0..2)
                .flat_map(|_| whole())
                .chain([Notifies(notifications)]);
            let (result, counted) = play(2, true, events);
            result.unwrap();
            counted
        };
        assert_eq!(both(vec![copied(0, 1)]), [2, 2, 1]);
        assert_eq!(both(vec![copied(0, 0), done(1, 1)]), [2, 1, 0]);
        // Nothing was sent, so nothing was missed.
        let (result, counted) = play(0, true, []);
        result.unwrap();
        assert_eq!(counted, [0, 0, 0]);
    }

    #[test]
    fn needed_memory_grows_with_channels_and_packets() {
        let needed = |channels, packet_bytes| {
            let layout = Layout::X86.with_packet_bytes(packet_bytes).unwrap();
            needed_memory(channels, layout, 4 << 20)
        };
        assert_eq!(needed(1, 512 << 10), (15 << 20) / 2);
        assert_eq!(needed(8, 512 << 10), 60 << 20);
        assert_eq!(needed(1, 4 << 20), 18 << 20);
        assert!(needed(1, 64 << 10) > 3 * (4 << 20) / 2);
    }
}
