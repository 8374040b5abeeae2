//! What the kernel has counted of the calling thread.

use std::mem::MaybeUninit;

/// How often the thread has waited for something other than a core (`ru_nvcsw`); 0 where nobody counts.
pub(crate) fn waits() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` has room for what the call writes, and it keeps no pointer to it.
    let failed = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0;
    if failed {
        return 0;
    }
    // SAFETY: it was zeroed, which is a valid value of a structure of integers, whatever was written since.
    let usage = unsafe { usage.assume_init() };
    u64::try_from(usage.ru_nvcsw).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;

    #[test]
    fn a_thread_that_waits_is_counted() {
        let before = waits();
        thread::sleep(Duration::from_millis(1));
        assert!(waits() > before);
    }
}
