//! Identifiers of attempts and of destinations: 128 random bits each, drawn by the caller.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// Identifies one attempt to migrate a guest, on both hosts. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId(pub [u8; 16]);

/// Identifies a destination and its memory: one process, and those that continue it from its journal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub [u8; 16]);

/// Text that is not an id.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("an id has 32 hexadecimal digits")]
pub struct IdError;

macro_rules! hexadecimal {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                parse(text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(de::Error::custom)
            }
        }
    };
}

hexadecimal!(AttemptId);
hexadecimal!(Incarnation);

fn parse(text: &str) -> Result<[u8; 16], IdError> {
    // A number may have a sign, and fewer digits.
    if text.len() != 32 || text.starts_with('+') {
        return Err(IdError);
    }
    let number = u128::from_str_radix(text, 16).map_err(|_| IdError)?;
    Ok(number.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_id_parses_back(bytes: [u8; 16]) {
            let id = AttemptId(bytes);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
            let json = serde_json::to_string(&id).unwrap();
            prop_assert_eq!(serde_json::from_str::<AttemptId>(&json).unwrap(), id);
        }

        #[test]
        fn no_text_is_parsed_into_something_else(text in ".{0,40}") {
            if let Ok(id) = text.parse::<Incarnation>() {
                prop_assert_eq!(id.to_string(), text.to_lowercase());
            }
        }
    }
}
