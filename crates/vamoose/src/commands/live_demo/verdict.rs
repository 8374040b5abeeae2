//! Whether the guest that came is the one that was sent.

use serde::Serialize;

use super::{
    digest::Digest,
    talk::{Arrived, Checksum, WentOn},
};

/// What has been proven so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Verdict {
    /// Whether all of the memory was the same at the switchover; `None` if it could not be compared.
    pub(super) memory_equal: Option<bool>,
    /// Whether the guest could prove its memory, at the switchover and after it went on, wherever that was.
    pub(super) checksum_holds: bool,
    /// What does not hold, in words.
    #[serde(skip)]
    pub(super) wrong: Vec<String>,
}

impl Verdict {
    /// Compares the guest that was sent, `checksum` and `digest`, with what has arrived.
    pub(super) fn arrived(&mut self, checksum: &Checksum, digest: &Digest, arrived: &Arrived) {
        let difference = digest.difference(&arrived.digest);
        self.memory_equal = Some(difference.is_none());
        if let Some(difference) = difference {
            self.wrong
                .push(format!("the memory is not equal: {difference}"));
        }
        self.checksum_holds = arrived.checksum.as_ref() == Ok(checksum);
        match &arrived.checksum {
            Ok(there) if there == checksum => {}
            Ok(there) => self.wrong.push(format!(
                "the guest that came ({there:?}) is not the one that was sent ({checksum:?})"
            )),
            Err(error) => self
                .wrong
                .push(format!("the checksum does not hold: {error}")),
        }
    }

    /// Takes in how the guest did at the destination.
    pub(super) fn went_on(&mut self, went_on: &WentOn) {
        if let Some(failure) = &went_on.failure {
            self.checksum_holds = false;
            self.wrong.push(format!(
                "the checksum does not hold after the guest went on: {failure}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use testguest::{Backing, Fill, Memory, fill};

    use super::*;
    use crate::commands::live_demo::shape::ram_of;

    fn digest(content: &Fill) -> Digest {
        let memory = Memory::new(Backing::Anonymous, 1 << 20).unwrap();
        fill(&memory, content).unwrap();
        Digest::of(&ram_of(&memory).unwrap()).unwrap()
    }

    fn checksum(sum: u64) -> Checksum {
        Checksum {
            writes: 7,
            sums: vec![sum],
        }
    }

    /// What is said of a guest that arrives with this checksum and memory.
    fn verdict(there: Result<Checksum, String>, memory: &Fill, failure: Option<&str>) -> Verdict {
        let mut verdict = Verdict::default();
        let arrived = Arrived {
            checksum: there,
            digest: digest(memory),
            cpu_seconds: 0.0,
            decode_seconds: 0.0,
            copy: None,
        };
        verdict.arrived(&checksum(1), &digest(&Fill::Mixed), &arrived);
        verdict.went_on(&WentOn {
            writes: 1,
            failure: failure.map(str::to_owned),
        });
        verdict
    }

    #[test]
    fn a_whole_guest_is_acquitted() {
        let verdict = verdict(Ok(checksum(1)), &Fill::Mixed, None);
        assert_eq!(verdict.memory_equal, Some(true));
        assert!(verdict.checksum_holds);
        assert_eq!(verdict.wrong, Vec::<String>::new());
    }

    #[test]
    fn whatever_does_not_hold_is_told() {
        for (there, memory, failure, equal, holds, told) in [
            (Ok(1), Fill::Zero, None, false, true, "is not equal"),
            (Ok(2), Fill::Mixed, None, true, false, "not the one"),
            (Err("lost"), Fill::Mixed, None, true, false, "hold: lost"),
            (Ok(1), Fill::Mixed, Some("gone"), true, false, "on: gone"),
        ] {
            let there = there.map(checksum).map_err(str::to_owned);
            let verdict = verdict(there, &memory, failure);
            assert_eq!(verdict.memory_equal, Some(equal), "{told}");
            assert_eq!(verdict.checksum_holds, holds, "{told}");
            assert_eq!(verdict.wrong.len(), 1, "{verdict:?}");
            assert!(verdict.wrong[0].contains(told), "{verdict:?}");
        }
    }
}
