//! A saved guest: a hash, and the state as JSON. Only a guest with the same description loads it, in the same build of this crate.

use std::hash::{DefaultHasher, Hasher as _};
use std::ops::Range;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::config::Config;

#[derive(Serialize, Deserialize)]
struct State {
    description: String,
    vcpus: Vec<Vec<u8>>,
}

/// The properties that have to be equal on both sides.
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
    // A state has only strings and numbers, so this cannot fail. An empty state would be refused as damaged.
    let state = serde_json::to_vec(&State { description, vcpus }).unwrap_or_default();
    [&hash(&state).to_le_bytes()[..], &state].concat()
}

/// Returns the states of the vCPUs, if `state` is that of a guest with the description `ours`.
pub(crate) fn decode(state: &[u8], ours: &str) -> Result<Vec<Vec<u8>>> {
    const DAMAGED: &str = "not the state of a test guest, or a damaged one";
    let (sum, state) = state.split_first_chunk().context(DAMAGED)?;
    ensure!(hash(state) == u64::from_le_bytes(*sum), DAMAGED);
    let State { description, vcpus } = serde_json::from_slice(state).context(DAMAGED)?;
    ensure!(
        description == ours,
        "saved from the guest {description:?}, this is the guest {ours:?}"
    );
    Ok(vcpus)
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
        assert_eq!(decode(&state, "a guest").unwrap(), vcpus);
    }

    #[test]
    fn malformed_state_behind_a_right_hash_is_refused() {
        for body in ["", "{}", "[1]", r#"{"description":"","vcpus":[[256]]}"#] {
            let state = [&hash(body.as_bytes()).to_le_bytes(), body.as_bytes()].concat();
            let error = decode(&state, "").unwrap_err();
            assert!(error.to_string().contains("damaged"), "{body}: {error}");
        }
    }
}
