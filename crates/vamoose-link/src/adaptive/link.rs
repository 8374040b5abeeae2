//! How fast the link is, as measured on this channel: from when the socket accepts no more.
//!
//! ```text
//! socket's buffer  full ─┐  ┌──┐     ┌── …        the time between the ends of two waits is the
//!                        │ /│ / \   /              link's time for all bytes sent between them,
//!                        └  └    \ /               whatever the buffer holds
//!                        wait    wait
//! ```
//! A socket that has stopped taking bytes takes the next ones only when there is room for a good part of
//! its buffer: the quantum. So a sender that is a little faster than the link waits now and then, and one
//! that has not waited for longer than a quantum explains has a faster link than it thinks.
//!
//! On a slow link that takes a while: buffers hold what it carries in a second. Where the socket reports how many bytes it
//! still holds, those that have gone are known without a wait: the rate of a new link shows before the first one, and a link
//! that has become faster at once.

/// The rate of the link.
pub(super) struct Link {
    /// Nanoseconds per byte on the wire, once the link has been felt.
    time: Option<f64>,
    /// Since the end of a wait, if there has been one.
    span: Option<Span>,
    /// Bytes and time since the last wait, without the time of the next one.
    free: (f64, f64),
    /// Bytes that the socket takes after a wait before the next one, more than the link does meanwhile.
    quantum: f64,
    /// Factor by which the rate is raised next.
    growth: f64,
    /// Spans in a row that were far off, above zero if the link had become slower.
    far_off: i32,
    /// Bytes that the socket held after the last packet, if known.
    queued: Option<f64>,
    /// The most that it has ever held.
    most_held: f64,
    drain: Drain,
    /// Drains in a row that were far off, above zero if the link had become slower.
    far_drains: i32,
}

#[derive(Clone, Copy, Default)]
struct Span {
    bytes: f64,
    time: f64,
    waited: f64,
}

/// What left the socket over some packets.
#[derive(Clone, Copy)]
struct Drain {
    packets: u32,
    bytes: f64,
    time: f64,
    waited: f64,
    /// Whether all earlier packets had left whenever one was out: then the link had nothing to do at times.
    idle: bool,
    /// Whether some of them had not left, ever: then it had something to do all the time.
    busy: bool,
    /// Whether so many had not left that it is not for a delayed acknowledgement.
    deep: bool,
}

impl Drain {
    const NONE: Self = Self {
        packets: 0,
        bytes: 0.0,
        time: 0.0,
        waited: 0.0,
        idle: true,
        busy: true,
        deep: true,
    };
}

/// A drain is at least so long, in nanoseconds and in packets: windows open by leaps.
const LEAST_DRAIN: f64 = 60e6;
const LEAST_DRAINED: u32 = 4;

/// The same of the first drain, in nanoseconds: it tells the rate until there is a span.
const FIRST_DRAIN: f64 = 5e6;

/// Earlier bytes in the socket that are the link's doing: more than wait for a receiver's thread to have a core.
const DEEP: f64 = 400e3;

/// By how much a link that was idle is taken to be faster.
const IDLE_GROWTH: f64 = 2.0;

/// Of links that are faster than this, in nanoseconds per byte, waits show soon enough; and there a receiver is easily
/// taken for a link.
const SLOW: f64 = 5.0;

/// Spans are at least so long, in nanoseconds: the scheduler's hiccups are shorter, and so are the turns
/// that connections take on a link they share.
const LEAST_SPAN: f64 = 30e6;

/// Waits of less than this part of the time are no evidence about the link: the scheduler alone does that.
const LEAST_WAIT: f64 = 0.03;

/// A span that is off by this factor counts as far off; after two in a row the link has changed.
const FAR_OFF: f64 = 2.0;

/// What a new channel takes for the quantum: a third of a large socket buffer.
const FIRST_QUANTUM: f64 = 1e6;

/// Bounds of the quantum: a packet or so, and a third of the largest buffers at both ends.
const LEAST_QUANTUM: f64 = 400e3;
const MOST_QUANTUM: f64 = 4e6;

/// By how much a link is taken to be faster at first; the next steps are larger.
const FIRST_GROWTH: f64 = 1.5;

/// Links that are faster than this, in nanoseconds per byte, are no limit.
const UNLIMITED: f64 = 0.005;

impl Link {
    pub(super) fn new() -> Self {
        Self {
            time: None,
            span: None,
            free: (0.0, 0.0),
            quantum: FIRST_QUANTUM,
            growth: FIRST_GROWTH,
            far_off: 0,
            queued: None,
            most_held: 0.0,
            drain: Drain::NONE,
            far_drains: 0,
        }
    }

    /// Nanoseconds per byte; `None` if the link is no limit.
    pub(super) fn time(&self) -> Option<f64> {
        self.time
    }

    /// Whether the sender has had to wait since it began, or paused: the next wait measures how long, unless more bytes
    /// went out since than its buffer explains.
    pub(super) fn is_felt(&self) -> bool {
        self.span
            .is_some_and(|span| span.bytes < 2.0 * self.quantum)
    }

    /// See the module.
    pub(super) fn quantum(&self) -> f64 {
        self.quantum
    }

    /// The channel had nothing to send for a while: the buffer may be empty.
    pub(super) fn paused(&mut self) {
        self.span = None;
        self.free = (0.0, 0.0);
        self.queued = None;
        self.drain = Drain::NONE;
    }

    /// So many bytes went out in the time since those before, of which the sender has waited for a part. `queued` are those that
    /// the socket still holds, if known.
    pub(super) fn sent(&mut self, bytes: f64, time: f64, waited: f64, queued: Option<f64>) {
        let before = std::mem::replace(&mut self.queued, queued);
        let held = queued.unwrap_or(0.0);
        // What a buffer that grows has taken, the link has not.
        let gone = bytes - (held - self.most_held).max(0.0);
        self.most_held = self.most_held.max(held);
        if let Some(span) = &mut self.span {
            span.bytes += gone;
            span.time += time;
            span.waited += waited;
        }
        self.free.0 += gone;
        self.free.1 += time - waited;
        if self
            .time
            .is_some_and(|link| self.surplus(link) < -2.0 * self.quantum)
        {
            // The buffer may have run empty: the link was idle, and the span is of no use.
            self.span = None;
        }
        if waited > LEAST_WAIT * time {
            self.has_waited();
        } else if let Some(link) = self.time
            && self.surplus(link) > 1.5 * self.quantum
        {
            self.has_grown(link);
        }
        if let (Some(before), Some(queued)) = (before, queued) {
            self.drains(bytes, before, queued, time, waited);
        }
    }

    /// The same, where the socket tells what it held before and holds now.
    fn drains(&mut self, bytes: f64, before: f64, queued: f64, time: f64, waited: f64) {
        let drain = &mut self.drain;
        drain.packets += 1;
        drain.bytes += bytes + before - queued;
        drain.time += time;
        drain.waited += waited;
        drain.idle &= queued <= bytes;
        drain.busy &= queued > bytes;
        drain.deep &= queued > bytes + DEEP;
        let least = match self.time {
            Some(_) => LEAST_DRAIN,
            None => FIRST_DRAIN,
        };
        if drain.time > least && drain.packets >= LEAST_DRAINED {
            let drain = std::mem::replace(&mut self.drain, Drain::NONE);
            self.has_drained(drain);
        }
    }

    fn has_drained(&mut self, drain: Drain) {
        let found = drain.time / drain.bytes.max(1.0);
        let Some(link) = self.time else {
            // Better a rough rate now than megabytes of raw packets until it is exact.
            if drain.deep {
                self.restart_at(found);
            }
            return;
        };
        // A link that was idle at times may be any faster than that, but no slower.
        let is_told = match found > link {
            true => drain.busy && found > SLOW,
            false => link > SLOW,
        };
        let change = if is_told { found / link } else { 1.0 };
        self.far_drains = far_in_a_row(self.far_drains, change);
        if drain.idle && drain.waited < LEAST_WAIT * drain.time {
            if link > SLOW {
                self.paused();
                self.time = Some(link.min(found) / IDLE_GROWTH);
            }
        } else if self.far_drains.abs() >= 2 {
            self.restart_at(found);
        }
    }

    /// The link has this time, whatever waits have told before.
    fn restart_at(&mut self, found: f64) {
        self.time = Some(found);
        (self.span, self.free) = (None, (0.0, 0.0));
    }

    /// Bytes that went out since the last wait beyond what the link has taken.
    fn surplus(&self, link: f64) -> f64 {
        self.free.0 - self.free.1 / link
    }

    fn has_waited(&mut self) {
        if let Some(link) = self.time {
            let found = self.surplus(link).max(0.9 * self.quantum);
            self.quantum = found.clamp(LEAST_QUANTUM, MOST_QUANTUM);
        }
        self.free = (0.0, 0.0);
        self.growth = FIRST_GROWTH;
        match self.span {
            Some(span) if span.time < LEAST_SPAN => return,
            Some(span) if span.waited > LEAST_WAIT * span.time && span.bytes > 0.0 => {
                self.measured(span.time / span.bytes);
            }
            _ => {}
        }
        self.span = Some(Span::default());
    }

    fn measured(&mut self, found: f64) {
        let Some(link) = self.time else {
            self.time = Some(found);
            return;
        };
        let change = found / link;
        self.far_off = far_in_a_row(self.far_off, change);
        self.time = Some(match self.far_off.abs() {
            2.. => found,
            _ => link * change.powf(0.3),
        });
    }

    fn has_grown(&mut self, link: f64) {
        let link = link / self.growth;
        self.growth = (2.0 * self.growth).min(8.0);
        // Or the buffer is larger than it looked.
        self.quantum = (1.5 * self.quantum).min(MOST_QUANTUM);
        self.time = (link > UNLIMITED).then_some(link);
        self.paused();
    }
}

/// How often in a row a link's time was far off, above zero if it had become slower, when it has changed by the factor
/// `change` after `before`.
fn far_in_a_row(before: i32, change: f64) -> i32 {
    match change {
        _ if change > FAR_OFF => before.max(0) + 1,
        _ if change < 1.0 / FAR_OFF => before.min(0) - 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sender that is faster than the link, for so long: packets of 100 KB, and a wait in every fifth.
    fn send_over(link: &mut Link, rate: f64, seconds: f64) {
        let (bytes, work, mut left) = (100e3, 8e3, seconds * 1e9);
        while left > 0.0 {
            for _ in 0..4 {
                link.sent(bytes, work, 0.0, None);
            }
            let all = 5.0 * bytes / rate;
            link.sent(bytes, all - 4.0 * work, all - 5.0 * work, None);
            left -= all;
        }
    }

    fn rate(link: &Link) -> f64 {
        1.0 / link.time().unwrap()
    }

    #[test]
    fn waits_tell_the_rate_whatever_the_buffer_holds() {
        for expected in [0.0125, 0.125, 1.25] {
            let mut link = Link::new();
            send_over(&mut link, expected, 1.0);
            let error = rate(&link) / expected - 1.0;
            assert!(error.abs() < 0.05, "{expected}: {error}");
        }
    }

    #[test]
    fn what_the_socket_holds_tells_the_rate_before_the_first_wait() {
        let (mut link, rate, bytes, each) = (Link::new(), 0.0625, 150e3, 1.5e6);
        for packet in 1..=8 {
            let queued = bytes + DEEP + f64::from(packet) * (bytes - rate * each);
            link.sent(bytes, each, 0.0, Some(queued));
        }
        let found = 1.0 / link.time().unwrap();
        assert!((found / rate - 1.0).abs() < 0.05, "{found}");
    }

    #[test]
    fn a_socket_that_empties_itself_tells_no_rate() {
        let mut link = Link::new();
        for _ in 0..8 {
            link.sent(150e3, 1.5e6, 0.0, Some(100e3));
        }
        assert_eq!(link.time(), None);
    }

    /// As a kernel's buffer does, once raw packets come after small ones.
    #[test]
    fn a_buffer_that_grows_is_not_taken_for_a_faster_link() {
        let (mut link, rate, mut queued) = (Link::new(), 0.0625, 0.4e6);
        let mut send = |bytes: f64, each: f64, count: usize, link: &mut Link| {
            for _ in 0..count {
                queued += bytes - rate * each;
                link.sent(bytes, each, 0.0, Some(queued));
            }
        };
        send(90e3, 1.4e6, 50, &mut link);
        let before = link.time().unwrap();
        send(500e3, 1.6e6, 6, &mut link);
        assert!(
            link.time().unwrap() > 0.9 * before,
            "{before} {link:?}",
            link = link.time()
        );
    }

    #[test]
    fn a_slower_link_is_followed() {
        let mut link = Link::new();
        send_over(&mut link, 1.25, 1.0);
        send_over(&mut link, 0.0125, 0.6);
        assert!(rate(&link) < 1.1 * 0.0125, "{}", rate(&link));
    }

    #[test]
    fn without_waits_a_link_is_taken_to_be_faster_and_at_last_to_be_no_limit() {
        let mut link = Link::new();
        send_over(&mut link, 0.125, 1.0);
        let before = rate(&link);
        let mut sent = 0.0;
        while link.time().is_some_and(|time| 1.0 / time < 1.4 * before) {
            link.sent(100e3, 100e3, 0.0, None);
            sent += 100e3;
        }
        assert!(sent < 4.0 * MOST_QUANTUM, "noticed after {sent} bytes");
        for _ in 0..100_000 {
            link.sent(100e3, 1e3, 0.0, None);
        }
        assert_eq!(link.time(), None);
    }

    /// What a socket of 4 MB holds when the link of 0.00625 bytes a nanosecond becomes `rate`, and the sender does not.
    fn drained_at(rate: f64, seconds: f64) -> Link {
        let mut link = Link::new();
        send_over(&mut link, 0.00625, 2.0);
        let (bytes, each, mut queued, mut left) = (100e3, 15e6, 4e6, seconds * 1e9);
        while left > 0.0 {
            queued = f64::max(queued + bytes - rate * each, 0.9 * bytes);
            link.sent(bytes, each, 0.0, Some(queued));
            left -= each;
        }
        link
    }

    #[test]
    fn what_the_socket_holds_tells_a_faster_link_before_it_is_empty() {
        let link = drained_at(0.015, 0.3);
        let error = rate(&link) / 0.015 - 1.0;
        assert!(error.abs() < 0.05, "{error}");
    }

    #[test]
    fn a_socket_that_is_empty_tells_that_the_link_is_faster_still() {
        let link = drained_at(0.125, 0.4);
        assert!(rate(&link) > 0.025, "{}", rate(&link));
        let link = drained_at(0.00625, 0.4);
        assert!(rate(&link) < 0.007, "{}", rate(&link));
    }

    #[test]
    fn a_link_is_felt_from_the_first_wait_to_a_pause() {
        let mut link = Link::new();
        link.sent(100e3, 1e6, 0.0, None);
        assert!(!link.is_felt());
        link.sent(100e3, 1e6, 0.5e6, None);
        assert!(link.is_felt());
        link.paused();
        assert!(!link.is_felt());
        link.sent(100e3, 1e6, 0.5e6, None);
        assert!(link.is_felt());
        for _ in 0..40 {
            link.sent(100e3, 1e6, 0.0, None);
        }
        assert!(!link.is_felt());
    }
}
