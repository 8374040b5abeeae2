//! What a thread waits for: its input, or somebody who takes its output.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    time::{Duration, Instant},
};

use crate::stats::thread_cpu_time;

/// What a thread does, or waits to be able to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// A sender takes pages from its source, a receiver bytes from the network.
    Input,
    /// Encodes or decodes.
    Work,
    /// A sender gives bytes to the socket, a receiver pages to its consumer.
    Output,
}

/// What a thread waited for, in shares of the time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shares {
    pub(crate) input: f64,
    pub(crate) output: f64,
    /// Ready to run, without a core.
    pub(crate) core: f64,
    /// The time.
    pub(crate) nanos: f64,
    /// Whether there was a pause, which does not belong to the time.
    pub(crate) had_pause: bool,
}

/// Measures the waits of one thread.
///
/// The time of an activity without its CPU time is a wait. The kernel tells how much of all waits was for a core: first what was
/// waited during work, which waits for nothing else, then a part of the other waits in proportion.
pub(crate) struct WaitMeter {
    activity: Activity,
    /// The time of all windows before this one.
    measured: Duration,
    /// When the activity began, and the thread's CPU time then.
    since: Instant,
    ran: Duration,
    /// When the window began.
    window: Instant,
    /// The thread's record, and its time without a core when the window began; `None` before the first activity.
    queue: Option<(QueueClock, Duration)>,
    input: Duration,
    work: Duration,
    output: Duration,
    paused: Duration,
    /// The part of a pause that counts.
    counted: Duration,
}

/// The time over which waits are measured, after windows of `measured` in all. The first windows are short, because a short migration
/// has few long ones.
pub(super) fn window(measured: Duration) -> Duration {
    (measured / 3).clamp(SHORTEST_WINDOW, LONGEST_WINDOW)
}

const SHORTEST_WINDOW: Duration = Duration::from_millis(25);
const LONGEST_WINDOW: Duration = Duration::from_millis(50);

/// Waits for input that take longer are pauses, as between two rounds.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

impl WaitMeter {
    /// For the thread that uses the meter first: a sender. Pauses of the source do not count.
    pub(crate) fn of_sender() -> Self {
        Self::new(Duration::ZERO)
    }

    /// For the thread that uses the meter first: a receiver. A slow link takes longer than a pause for a packet, and shall not look
    /// busy only because of that: of each pause the first 20 ms count.
    pub(crate) fn of_receiver() -> Self {
        Self::new(PAUSE)
    }

    fn new(counted: Duration) -> Self {
        let now = Instant::now();
        Self {
            activity: Activity::Input,
            measured: Duration::ZERO,
            since: now,
            ran: Duration::ZERO,
            window: now,
            queue: None,
            input: Duration::ZERO,
            work: Duration::ZERO,
            output: Duration::ZERO,
            paused: Duration::ZERO,
            counted,
        }
    }

    /// The thread turns to another activity.
    pub(crate) fn switch_to(&mut self, activity: Activity) {
        let (now, ran) = (Instant::now(), thread_cpu_time());
        let spent = now.saturating_duration_since(self.since);
        let waited = spent.saturating_sub(ran.saturating_sub(self.ran));
        match self.activity {
            _ if self.queue.is_none() => {
                let clock = QueueClock::of_this_thread();
                let queued = clock.read();
                (self.queue, self.window) = (Some((clock, queued)), now);
            }
            Activity::Input if spent > PAUSE => {
                self.window += spent.saturating_sub(self.counted);
                self.input += waited.min(self.counted);
                self.paused += waited.saturating_sub(self.counted);
            }
            Activity::Input => self.input += waited,
            Activity::Work => self.work += waited,
            Activity::Output => self.output += waited,
        }
        (self.activity, self.since, self.ran) = (activity, now, ran);
    }

    /// The shares since the last result, if that is at least a [`window`] ago.
    pub(crate) fn shares(&mut self) -> Option<Shares> {
        let time = self.since.saturating_duration_since(self.window);
        let least = window(self.measured);
        let (clock, before) = self.queue.as_mut().filter(|_| time >= least)?;
        let now = clock.read();
        let queued = now.saturating_sub(std::mem::replace(before, now));
        let take = |time: &mut Duration| std::mem::take(time).as_secs_f64();
        let work = take(&mut self.work);
        let [input, output] = [take(&mut self.input), take(&mut self.output)];
        let (waits, paused) = (input + output, take(&mut self.paused));
        let part = (queued.as_secs_f64() - work) / (waits + paused).max(f64::MIN_POSITIVE);
        let part = part.clamp(0.0, 1.0);
        self.measured += time;
        let time = time.as_secs_f64();
        self.window = self.since;
        Some(Shares {
            input: input * (1.0 - part) / time,
            output: output * (1.0 - part) / time,
            core: (work + waits * part) / time,
            nanos: time * 1e9,
            had_pause: paused > 0.0,
        })
    }
}

/// The kernel's record of how long one thread has been ready to run, without a core.
struct QueueClock(Option<File>);

impl QueueClock {
    fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Zero where the kernel does not record that.
    fn read(&self) -> Duration {
        let read = || {
            let mut text = [0; 64];
            let len = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
            parse(str::from_utf8(&text[..len]).ok()?)
        };
        read().unwrap_or_default()
    }
}

/// The second number of proc_pid_schedstat(5), in nanoseconds. The first is up to a tick old, which `thread_cpu_time` is not.
fn parse(text: &str) -> Option<Duration> {
    let queued = text.split_ascii_whitespace().nth(1)?;
    queued.parse().map(Duration::from_nanos).ok()
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    const LONG: Duration = Duration::from_millis(15);

    fn work(time: Duration) {
        let start = thread_cpu_time();
        while thread_cpu_time() - start < time {}
    }

    /// What other tests take of the cores is split in proportion only, and may turn a wait into a pause: so attempts with little of
    /// that count.
    #[test]
    fn waits_are_told_apart_from_work() {
        for _ in 0..5 {
            let mut meter = WaitMeter::of_sender();
            meter.switch_to(Activity::Input);
            sleep(LONG);
            meter.switch_to(Activity::Work);
            work(LONG);
            meter.switch_to(Activity::Output);
            sleep(4 * LONG);
            meter.switch_to(Activity::Input);
            let shares = meter.shares().unwrap();
            if shares.core < 0.1 {
                assert!(shares.output > shares.input, "{shares:?}");
                assert!(shares.input + shares.output < 0.95, "{shares:?}");
            }
            assert!(meter.shares().is_none());
        }
    }

    /// Copies, checksums and encryption are neither waits for the source nor for the link. What other tests take of the cores is
    /// split in proportion only, so attempts with little of that count.
    #[test]
    fn cpu_time_of_input_and_output_is_no_wait() {
        for _ in 0..5 {
            let mut meter = WaitMeter::of_receiver();
            meter.switch_to(Activity::Output);
            for _ in 0..6 {
                meter.switch_to(Activity::Input);
                work(LONG);
                meter.switch_to(Activity::Output);
                sleep(LONG / 2);
            }
            meter.switch_to(Activity::Input);
            let shares = meter.shares().unwrap();
            let is_alone = shares.core < 0.1;
            assert!(!is_alone || shares.input < shares.output, "{shares:?}");
        }
    }

    #[test]
    fn a_pause_counts_in_part_at_a_receiver_and_not_at_all_at_a_sender() {
        for (mut meter, least, most) in [
            (WaitMeter::of_sender(), 0.0, 0.01),
            (WaitMeter::of_receiver(), 0.0, 0.7),
        ] {
            meter.switch_to(Activity::Input);
            for _ in 0..3 {
                sleep(10 * PAUSE);
                meter.switch_to(Activity::Output);
                sleep(2 * PAUSE);
                meter.switch_to(Activity::Input);
            }
            let shares = meter.shares().unwrap();
            assert!(shares.input >= least && shares.input < most, "{shares:?}");
            assert!(shares.output + shares.core > 0.2, "{shares:?}");
        }
    }

    #[test]
    fn windows_are_short_at_first() {
        for (measured, least) in [(0, 25), (90, 30), (150, 50), (10_000, 50)] {
            let [measured, least] = [measured, least].map(Duration::from_millis);
            assert_eq!(window(measured), least);
        }
    }

    #[test]
    fn schedstat_is_parsed() {
        assert_eq!(
            parse("856973 35724 2\n"),
            Some(Duration::from_nanos(35_724))
        );
        assert_eq!(parse("0 0 0\n"), Some(Duration::ZERO));
        assert!(parse("").is_none() && parse("1 x").is_none());
    }
}
