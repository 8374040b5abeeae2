//! What a set of processes costs in CPU time between two moments.

use anyhow::Result;

use crate::proc;

/// CPU time of some processes since the meter was started.
#[derive(Debug)]
pub struct Meter {
    /// Each process and the CPU seconds it had used at the start.
    at_start: Vec<(u32, f64)>,
}

impl Meter {
    /// Notes what the processes have used so far.
    pub fn start(pids: &[u32]) -> Result<Self> {
        let at_start = pids
            .iter()
            .map(|&pid| Ok((pid, proc::cpu_seconds(pid)?)))
            .collect::<Result<_>>()?;
        Ok(Self { at_start })
    }

    /// CPU seconds (user and system) since the start, in the order of the pids. A process that has ended still counts
    /// until it is reaped.
    pub fn read(&self) -> Result<Vec<f64>> {
        self.at_start
            .iter()
            .map(|&(pid, before)| Ok(proc::cpu_seconds(pid)? - before))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn counts_time_spent() {
        let meter = Meter::start(&[std::process::id()]).unwrap();
        let start = Instant::now();
        while meter.read().unwrap()[0] < 0.05 {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "busy for 30 s, but no CPU time was counted"
            );
        }
    }
}
