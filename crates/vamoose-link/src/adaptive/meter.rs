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
}

/// Measures the waits of one thread.
///
/// The kernel tells how long the thread has run and how long it has waited for a core. The rest of the time was spent waiting for
/// input or output, in the proportion of the times of both activities.
pub(crate) struct WaitMeter {
    activity: Activity,
    /// When the activity began.
    since: Instant,
    /// When the window began, and the thread's clock then; `None` before the first activity.
    window: Instant,
    clock: Option<(ThreadClock, ThreadTimes)>,
    input: Duration,
    output: Duration,
    /// Longer inputs are pauses of the source, not waits.
    pause: Duration,
}

/// Waits are measured over at least this time.
pub(super) const WINDOW: Duration = Duration::from_millis(50);

impl WaitMeter {
    /// A meter for the thread that uses it first. Inputs that take longer than `pause` do not count.
    pub(crate) fn new(pause: Duration) -> Self {
        let now = Instant::now();
        Self {
            activity: Activity::Input,
            since: now,
            window: now,
            clock: None,
            input: Duration::ZERO,
            output: Duration::ZERO,
            pause,
        }
    }

    /// The thread turns to another activity.
    pub(crate) fn switch_to(&mut self, activity: Activity) {
        let now = Instant::now();
        let spent = now.saturating_duration_since(self.since);
        match self.activity {
            _ if self.clock.is_none() => {
                let clock = ThreadClock::of_this_thread();
                let times = clock.read();
                (self.clock, self.window) = (Some((clock, times)), now);
            }
            Activity::Input if spent > self.pause => self.window += spent,
            Activity::Input => self.input += spent,
            Activity::Work => {}
            Activity::Output => self.output += spent,
        }
        (self.activity, self.since) = (activity, now);
    }

    /// The shares since the last result, if that is at least 50 ms ago.
    pub(crate) fn shares(&mut self) -> Option<Shares> {
        let time = self.since.saturating_duration_since(self.window);
        let (clock, before) = self.clock.as_mut().filter(|_| time >= WINDOW)?;
        let now = clock.read();
        let before = std::mem::replace(before, now);
        let ran = now.ran.saturating_sub(before.ran);
        let queued = now.queued.saturating_sub(before.queued);
        let part = |part: Duration| (part.as_secs_f64() / time.as_secs_f64()).min(1.0);
        let waited = part(time.saturating_sub(ran + queued));
        let [input, output] = [self.input, self.output].map(|time| time.as_secs_f64());
        let of_input = input / (input + output).max(f64::MIN_POSITIVE);
        (self.input, self.output) = (Duration::ZERO, Duration::ZERO);
        self.window = self.since;
        Some(Shares {
            input: waited * of_input,
            output: waited * (1.0 - of_input),
            core: part(queued),
            nanos: time.as_secs_f64() * 1e9,
        })
    }
}

/// The kernel's record of one thread's times.
struct ThreadClock(Option<File>);

#[derive(Clone, Copy, Default)]
struct ThreadTimes {
    ran: Duration,
    /// Ready to run, without a core.
    queued: Duration,
}

impl ThreadClock {
    fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Where the kernel does not record how long threads are queued, the time counts as waiting.
    fn read(&self) -> ThreadTimes {
        let read = || {
            let mut text = [0; 64];
            let len = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
            parse(str::from_utf8(&text[..len]).ok()?)
        };
        read().unwrap_or_else(|| ThreadTimes {
            ran: thread_cpu_time(),
            queued: Duration::ZERO,
        })
    }
}

/// The two first numbers of proc_pid_schedstat(5), in nanoseconds.
fn parse(text: &str) -> Option<ThreadTimes> {
    let mut numbers = text
        .split_ascii_whitespace()
        .map(|number| number.parse().map(Duration::from_nanos));
    Some(ThreadTimes {
        ran: numbers.next()?.ok()?,
        queued: numbers.next()?.ok()?,
    })
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    const LONG: Duration = Duration::from_millis(30);

    fn work(time: Duration) {
        let start = thread_cpu_time();
        while thread_cpu_time() - start < time {}
    }

    #[test]
    fn waits_are_told_apart_from_work() {
        let mut meter = WaitMeter::new(Duration::from_secs(1));
        meter.switch_to(Activity::Input);
        sleep(LONG);
        meter.switch_to(Activity::Work);
        work(LONG);
        meter.switch_to(Activity::Output);
        sleep(2 * LONG);
        meter.switch_to(Activity::Input);
        let shares = meter.shares().unwrap();
        assert!(shares.input > 0.02, "{shares:?}");
        assert!(shares.output > shares.input, "{shares:?}");
        assert!(shares.input + shares.output < 0.95, "{shares:?}");
        assert!(meter.shares().is_none());
    }

    #[test]
    fn a_pause_of_the_source_does_not_count() {
        let mut meter = WaitMeter::new(LONG / 2);
        meter.switch_to(Activity::Input);
        for _ in 0..3 {
            sleep(LONG);
            meter.switch_to(Activity::Output);
            sleep(LONG);
            meter.switch_to(Activity::Input);
        }
        let shares = meter.shares().unwrap();
        assert!(shares.input < 0.01 && shares.output > 0.2, "{shares:?}");
    }

    #[test]
    fn schedstat_is_parsed() {
        let times = parse("856973 35724 2\n").unwrap();
        assert_eq!(times.ran, Duration::from_nanos(856_973));
        assert_eq!(times.queued, Duration::from_nanos(35_724));
        assert!(parse("").is_none() && parse("1 x").is_none());
    }
}
