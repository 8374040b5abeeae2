//! A saved guest: bytes that only a guest of the same make takes.
//!
//! ```text
//! "VMTGUEST"  version u32  description (u32 length, UTF-8)  per vCPU: u32 length, state  FNV-1a u64 of it all
//! ```
//! All numbers are little-endian. The description names everything that has to be equal on both sides. Any change of
//! the format, of the guest's code or of the vCPUs' state is a new version.

use std::ops::Range;

use thiserror::Error;

use crate::config::Config;

const MAGIC: &[u8; 8] = b"VMTGUEST";
const VERSION: u32 = 1;

/// A state that this guest does not take.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LoadError {
    /// Only a guest of [`Guest::incoming`](crate::Guest::incoming) loads, and once.
    #[error("this guest does not wait for a state")]
    NotWaiting,
    #[error("not the state of a test guest")]
    Foreign,
    #[error("the state of a test guest is damaged")]
    Damaged,
    #[error("the state of a test guest has version {theirs}, this is version {VERSION}")]
    Version { theirs: u32 },
    #[error("saved from the guest {theirs:?}, this is the guest {ours:?}")]
    OtherGuest { theirs: String, ours: String },
    #[error("the state of vCPU {vcpu} does not fit: {reason}")]
    Vcpu { vcpu: u8, reason: String },
    /// The guest's code or page tables are not in its memory: it is not all here, and to run it could do anything.
    #[error(
        "the memory at {address:#x} does not hold the guest's code and page tables: migrate the memory first"
    )]
    Code { address: u64 },
}

/// What has to be equal on both sides.
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

pub(crate) fn encode(description: &str, vcpus: &[Vec<u8>]) -> Vec<u8> {
    let mut state = MAGIC.to_vec();
    state.extend(VERSION.to_le_bytes());
    put(&mut state, description.as_bytes());
    for vcpu in vcpus {
        put(&mut state, vcpu);
    }
    state.extend(hash(&state).to_le_bytes());
    state
}

/// The states of the vCPUs, if `state` is of a guest that `description` describes.
pub(crate) fn decode<'a>(state: &'a [u8], description: &str) -> Result<Vec<&'a [u8]>, LoadError> {
    let rest = state.strip_prefix(MAGIC).ok_or(LoadError::Foreign)?;
    let (version, _) = rest.split_first_chunk().ok_or(LoadError::Damaged)?;
    let (hashed, sum) = state.split_last_chunk().ok_or(LoadError::Damaged)?;
    if hash(hashed) != u64::from_le_bytes(*sum) {
        return Err(LoadError::Damaged);
    }
    let theirs = u32::from_le_bytes(*version);
    if theirs != VERSION {
        return Err(LoadError::Version { theirs });
    }
    let mut rest = hashed
        .get(MAGIC.len() + size_of::<u32>()..)
        .ok_or(LoadError::Damaged)?;
    let theirs = take(&mut rest)?;
    if theirs != description.as_bytes() {
        return Err(LoadError::OtherGuest {
            theirs: String::from_utf8_lossy(theirs).into_owned(),
            ours: description.to_owned(),
        });
    }
    let mut vcpus = Vec::new();
    while !rest.is_empty() {
        vcpus.push(take(&mut rest)?);
    }
    Ok(vcpus)
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "a description and a vCPU's state are some hundred bytes"
)]
fn put(state: &mut Vec<u8>, bytes: &[u8]) {
    state.extend((bytes.len() as u32).to_le_bytes());
    state.extend(bytes);
}

fn take<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], LoadError> {
    let (len, behind) = rest.split_first_chunk().ok_or(LoadError::Damaged)?;
    let len = usize::try_from(u32::from_le_bytes(*len)).map_err(|_| LoadError::Damaged)?;
    let (bytes, behind) = behind.split_at_checked(len).ok_or(LoadError::Damaged)?;
    *rest = behind;
    Ok(bytes)
}

/// Each step can be undone, so a difference in one place is never lost again.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_was_put_in_comes_out() {
        let vcpus = [vec![1, 2, 3], vec![], vec![4; 400]];
        let state = encode("a guest", &vcpus);
        assert_eq!(decode(&state, "a guest").unwrap(), vcpus);
    }

    #[test]
    fn another_version_is_named() {
        let mut state = encode("a guest", &[]);
        state[8] = 9;
        let end = state.len() - 8;
        let sum = hash(&state[..end]);
        state[end..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(
            decode(&state, "a guest"),
            Err(LoadError::Version { theirs: 9 })
        );
    }

    proptest! {
        #[test]
        fn lengths_that_lie_are_found_behind_a_right_hash(
            body in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut state = MAGIC.to_vec();
            state.extend(VERSION.to_le_bytes());
            state.extend(body);
            state.extend(hash(&state).to_le_bytes());
            // Whatever comes out, it is no panic, and no more than what went in.
            if let Ok(vcpus) = decode(&state, "") {
                prop_assert!(vcpus.concat().len() < state.len());
            }
        }
    }
}
