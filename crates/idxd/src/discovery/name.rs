//! Names of devices and work queues, as the kernel prints them and as people type them.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::Kind;

/// A device: `dsa0`, `iax1`. Both kinds share one sequence of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceName {
    /// DSA or IAA, which the kernel calls `iax`.
    pub kind: Kind,
    /// Its number.
    pub number: u32,
}

/// A work queue: `wq0.1` is queue 1 of device 0.
///
/// Users may write it as `wq0.1`, as `dsa0/wq0.1` or as its character device, `/dev/dsa/wq0.1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueName {
    /// The device's kind, where the name contains it.
    pub kind: Option<Kind>,
    /// The device's number.
    pub device: u32,
    /// The queue's number within its device.
    pub queue: u32,
}

/// Why a text is no list of work queues.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// A name has another form.
    #[error(
        "{0:?} is not a work queue: write it as wq0.1, dsa0/wq0.1 or /dev/dsa/wq0.1, several with commas between"
    )]
    Form(String),
    /// One queue is named twice.
    #[error("work queue {0} is named twice")]
    Twice(QueueName),
    /// The text is empty.
    #[error("no work queue is named")]
    Empty,
}

impl QueueName {
    /// Parses one or more names, separated by commas, each queue once.
    pub fn list(text: &str) -> Result<Vec<Self>, NameError> {
        if text.trim().is_empty() {
            return Err(NameError::Empty);
        }
        let mut names = Vec::<Self>::new();
        for part in text.split(',') {
            let name: Self = part.trim().parse()?;
            if names.iter().any(|other| other.is(&name)) {
                return Err(NameError::Twice(name));
            }
            names.push(name);
        }
        Ok(names)
    }

    /// Whether both name the same queue, though one may be more specific.
    pub fn is(&self, other: &Self) -> bool {
        let kinds_agree = self.kind.is_none() || other.kind.is_none() || self.kind == other.kind;
        (self.device, self.queue) == (other.device, other.queue) && kinds_agree
    }
}

impl FromStr for QueueName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let form = || NameError::Form(text.to_owned());
        let (before, last) = match text.rsplit_once('/') {
            Some((before, last)) => (Some(before), last),
            None => (None, text),
        };
        let (device, queue) = last
            .strip_prefix("wq")
            .and_then(|numbers| numbers.split_once('.'))
            .and_then(|(device, queue)| Some((number(device)?, number(queue)?)))
            .ok_or_else(form)?;
        let kind = match before {
            None => None,
            Some("/dev/dsa") => Some(Kind::Dsa),
            Some("/dev/iax") => Some(Kind::Iaa),
            Some(before) => {
                let named = DeviceName::parse(before).filter(|named| named.number == device);
                let named = named.ok_or_else(form)?;
                Some(named.kind)
            }
        };
        Ok(Self {
            kind,
            device,
            queue,
        })
    }
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            device,
            queue,
        } = *self;
        if let Some(kind) = kind {
            write!(
                f,
                "{}/",
                DeviceName {
                    kind,
                    number: device
                }
            )?;
        }
        write!(f, "wq{device}.{queue}")
    }
}

impl DeviceName {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let prefixes = [(Kind::Dsa, "dsa"), (Kind::Iaa, "iax")];
        prefixes.into_iter().find_map(|(kind, prefix)| {
            let number = number(text.strip_prefix(prefix)?)?;
            Some(Self { kind, number })
        })
    }

    /// The queue `queue` of this device.
    pub(super) fn queue(self, queue: u32) -> QueueName {
        QueueName {
            kind: Some(self.kind),
            device: self.number,
            queue,
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", directory(self.kind), self.number)
    }
}

/// The kernel's name of a kind, in the names of devices and in `/dev`.
pub(super) const fn directory(kind: Kind) -> &'static str {
    match kind {
        Kind::Dsa => "dsa",
        Kind::Iaa => "iax",
    }
}

/// A number in the kernel's form: digits only, without leading zeros, so that each queue has one name.
fn number(text: &str) -> Option<u32> {
    let canonical = text == "0" || !text.starts_with('0');
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    (canonical && digits).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(kind: Option<Kind>, device: u32, queue: u32) -> QueueName {
        QueueName {
            kind,
            device,
            queue,
        }
    }

    #[test]
    fn all_forms_are_understood() {
        let list =
            QueueName::list("wq0.1, dsa2/wq2.3,/dev/dsa/wq4.5,/dev/iax/wq1.0,iax3/wq3.7").unwrap();
        let wanted = [
            name(None, 0, 1),
            name(Some(Kind::Dsa), 2, 3),
            name(Some(Kind::Dsa), 4, 5),
            name(Some(Kind::Iaa), 1, 0),
            name(Some(Kind::Iaa), 3, 7),
        ];
        assert_eq!(list, wanted);
    }

    #[test]
    fn a_malformed_queue_name_is_refused_with_a_reason() {
        for text in [
            "wq",
            "wq0",
            "wq0.",
            "wq.1",
            "wq0.1.2",
            "wq-1.0",
            "wq+1.0",
            "wq00.1",
            "wq0.01",
            "WQ0.1",
            "dsa0",
            "dsa/wq0.1",
            "iaa1/wq1.0",
            "/dev/wq0.1",
            "./wq0.1",
            "dsa0/wq0.1/",
            "dsa0/wq1.0",
            "wq0.4294967296",
            "wq0. 1",
            "wq0.1,",
        ] {
            assert!(
                matches!(QueueName::list(text), Err(NameError::Form(_))),
                "{text}"
            );
        }
        assert_eq!(QueueName::list(" "), Err(NameError::Empty));
        let twice = NameError::Twice(name(Some(Kind::Dsa), 0, 1));
        assert_eq!(QueueName::list("wq0.1,dsa0/wq0.1"), Err(twice));
    }

    proptest! {
        #[test]
        fn printed_names_can_be_parsed(
            kind in prop_oneof![Just(None), Just(Some(Kind::Dsa)), Just(Some(Kind::Iaa))],
            device: u32,
            queue: u32,
        ) {
            let name = name(kind, device, queue);
            prop_assert_eq!(name.to_string().parse(), Ok(name));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = QueueName::list(&text);
        }
    }
}
