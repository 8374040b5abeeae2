//! The least that still goes wrong: faults, guests and hosts are left out for as long as the same happens.

use crate::{Options, Run, run};

pub(crate) fn shrink(options: &Options, wrong: &str) -> (Options, Run) {
    let mut least = options.clone();
    let goes_wrong = |options: &Options| run(options, false).wrong.as_deref() == Some(wrong);
    // First halves, then quarters, then each.
    let mut size = least.faults.len();
    while size > 0 {
        let mut at = 0;
        while at < least.faults.len() {
            let mut fewer = least.clone();
            fewer.faults.drain(at..(at + size).min(fewer.faults.len()));
            match goes_wrong(&fewer) {
                true => least = fewer,
                false => at += size,
            }
        }
        size /= 2;
    }
    let simpler: [fn(&mut Options); 7] = [
        |it| it.guests = 1,
        |it| it.paths = 1,
        |it| it.channels = 1,
        |it| it.evacuates = false,
        |it| it.paused = false,
        |it| it.timeout = None,
        |it| it.writes = 0,
    ];
    for simplify in simpler {
        let mut simple = least.clone();
        simplify(&mut simple);
        if goes_wrong(&simple) {
            least = simple;
        }
    }
    let ran = run(&least, true);
    (least, ran)
}
