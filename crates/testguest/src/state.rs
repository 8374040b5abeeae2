//! A saved guest: a hash, and the state as JSON. Only a guest of the same description takes it, in the same build of this crate.

use std::hash::{DefaultHasher, Hasher as _};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::Config;

/// A state that this guest does not take.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LoadError {
    /// Only a guest of [`Guest::incoming`](crate::Guest::incoming) loads, and once.
    #[error("this guest does not wait for a state")]
    NotWaiting,
    #[error("not the state of a test guest, or a damaged one")]
    Damaged,
    #[error("saved from the guest {theirs:?}, this is the guest {ours:?}")]
    OtherGuest { theirs: String, ours: String },
    #[error("the state of vCPU {vcpu} does not fit: {reason}")]
    Vcpu { vcpu: u8, reason: String },
    /// The guest's code or page tables are missing from its memory: running it could do anything.
    #[error(
        "the memory at {address:#x} does not hold the guest's code and page tables: migrate the memory first"
    )]
    Code { address: u64 },
}

#[derive(Serialize, Deserialize)]
struct State {
    description: String,
    vcpus: Vec<Vec<u8>>,
}

/// Everything that has to be equal on both sides.
pub(crate) fn describe(config: &Config) -> String {
    let Range { start, end } = config.working_set();
    let mut text = format!(
        "{:?} vcpus={} pattern={:?} working-set={start:#x}..{end:#x}",
        config.kind, config.vcpus, config.pattern
    );
    for block in config.memory.blocks() {
        text += &format!(" {}={:#x}", block.name(), block.region().size());
    }
    text
}

pub(crate) fn encode(description: String, vcpus: Vec<Vec<u8>>) -> Vec<u8> {
    // Strings and numbers: this cannot fail. An empty state would be refused as damaged.
    let state = serde_json::to_vec(&State { description, vcpus }).unwrap_or_default();
    [&hash(&state).to_le_bytes()[..], &state].concat()
}

/// The states of the vCPUs, if `state` is of a guest with the description `ours`.
pub(crate) fn decode(state: &[u8], ours: String) -> Result<Vec<Vec<u8>>, LoadError> {
    let (sum, state) = state.split_first_chunk().ok_or(LoadError::Damaged)?;
    if hash(state) != u64::from_le_bytes(*sum) {
        return Err(LoadError::Damaged);
    }
    let state: State = serde_json::from_slice(state).map_err(|_| LoadError::Damaged)?;
    match state.description == ours {
        true => Ok(state.vcpus),
        false => Err(LoadError::OtherGuest {
            theirs: state.description,
            ours,
        }),
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_state_is_loaded() {
        let vcpus = vec![vec![1, 2, 3], vec![], vec![4; 400]];
        let state = encode("a guest".to_owned(), vcpus.clone());
        assert_eq!(decode(&state, "a guest".to_owned()), Ok(vcpus));
    }

    #[test]
    fn malformed_state_behind_a_right_hash_is_refused() {
        for body in ["", "{}", "[1]", r#"{"description":"","vcpus":[[256]]}"#] {
            let state = [&hash(body.as_bytes()).to_le_bytes(), body.as_bytes()].concat();
            assert_eq!(
                decode(&state, String::new()),
                Err(LoadError::Damaged),
                "{body}"
            );
        }
    }
}
