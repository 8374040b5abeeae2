//! A user's choice of devices, and how they are opened.

use std::{fmt, str::FromStr, sync::Arc};

use thiserror::Error;

use super::Devices;
use crate::{
    Kind, OpenQueueError, Queue, Shape, Tuning,
    discovery::{self, NameError, QueueName, Root},
    portal,
};

/// Which devices to use. As text: `auto`, or names as in `wq0.1,wq2.0`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// All work queues of the host that this process can use.
    #[default]
    Auto,
    /// The named work queues.
    Named(Vec<QueueName>),
}

/// How to open devices.
#[derive(Clone, Debug)]
pub struct Options {
    /// Size of each slot: for batches of pages, or for single pages with a buffer.
    pub shape: Shape,
    /// Tuning of the queues.
    pub tuning: Tuning,
    /// Location of the host's devices.
    pub root: Root,
}

impl Options {
    /// For batches of up to `pages` pages: zero pages, copies.
    pub fn batches(pages: u32) -> Self {
        Self::of(
            Shape {
                members: pages,
                buffer_bytes: 0,
            },
            BATCHES,
        )
    }

    /// For single pages of `page_bytes` bytes with a buffer for each: compression, decompression.
    pub fn pages(page_bytes: usize) -> Self {
        Self::of(
            Shape {
                members: 1,
                buffer_bytes: page_bytes,
            },
            PAGES,
        )
    }

    fn of(shape: Shape, slots: u32) -> Self {
        Self {
            shape,
            tuning: Tuning {
                slots,
                ..Tuning::default()
            },
            root: Root::default(),
        }
    }
}

/// Why there are no devices.
#[derive(Debug, Error)]
pub enum DevicesError {
    /// The host has no work queue that this process can use.
    #[error("no work queue of {} can be used on this host", name(*.0))]
    None(Kind),
    /// The named work queue does not exist, or belongs to the other kind of device.
    #[error("this host has no work queue {queue} of {}", name(*.kind))]
    Missing {
        /// The queue.
        queue: QueueName,
        /// The required kind.
        kind: Kind,
    },
    /// A work queue cannot be opened.
    #[error(transparent)]
    Portal(#[from] portal::OpenError),
    /// A work queue cannot be driven.
    #[error("cannot drive work queue {queue}")]
    Queue {
        /// The queue.
        queue: QueueName,
        /// Why.
        #[source]
        source: OpenQueueError,
    },
}

/// Slots of a queue for batches: a few for each of many threads. Each slot uses one entry.
const BATCHES: u32 = 64;

/// Slots of a queue for single pages: as many as usual work queues have entries.
const PAGES: u32 = 128;

impl Devices {
    /// Opens the chosen work queues of one kind of device.
    ///
    /// # Errors
    /// If a named work queue cannot be opened, or with [`Choice::Auto`] none at all.
    pub fn open(kind: Kind, choice: &Choice, options: &Options) -> Result<Self, DevicesError> {
        let devices = discovery::scan(&options.root);
        let queues = match choice {
            Choice::Auto => {
                let all = devices.iter().flat_map(|device| &device.queues);
                let usable =
                    all.filter(|queue| queue.usable().is_ok_and(|limits| limits.kind == kind));
                let (opened, failed): (Vec<_>, Vec<_>) = usable
                    .map(|queue| open_queue(queue, options))
                    .partition(Result::is_ok);
                match failed.into_iter().next_back() {
                    _ if !opened.is_empty() => opened,
                    Some(failed) => vec![failed],
                    None => return Err(DevicesError::None(kind)),
                }
            }
            Choice::Named(names) => {
                let open = |name: &QueueName| {
                    let found = discovery::find(&devices, name);
                    let found = found.filter(|(device, _)| device.name.kind == kind);
                    let missing = DevicesError::Missing { queue: *name, kind };
                    open_queue(found.ok_or(missing)?.1, options)
                };
                names.iter().map(open).collect()
            }
        };
        let queues = queues.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(Self::new(queues))
    }
}

fn open_queue(queue: &discovery::WorkQueue, options: &Options) -> Result<Queue, DevicesError> {
    let portal = Arc::new(portal::open(queue)?);
    let driven = Queue::new(portal, options.shape, options.tuning);
    driven.map_err(|source| DevicesError::Queue {
        queue: queue.name,
        source,
    })
}

impl FromStr for Choice {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            names => Ok(Self::Named(QueueName::list(names)?)),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named(names) => {
                let names: Vec<_> = names.iter().map(ToString::to_string).collect();
                f.write_str(&names.join(","))
            }
        }
    }
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Dsa => "a DSA",
        Kind::Iaa => "an IAA",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_and_written() {
        for (text, again) in [
            ("auto", "auto"),
            ("wq0.1", "wq0.1"),
            ("dsa0/wq0.1,wq2.0", "dsa0/wq0.1,wq2.0"),
        ] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), again);
        }
        for text in ["", "wq", "auto,wq0.1"] {
            assert!(text.parse::<Choice>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_host_without_devices_says_so() {
        let empty = tempfile::tempdir().unwrap();
        let options = Options {
            root: Root::under(empty.path()),
            ..Options::batches(128)
        };
        let open = |choice: &str| {
            let choice = choice.parse().unwrap();
            Devices::open(Kind::Dsa, &choice, &options).unwrap_err()
        };
        assert!(matches!(open("auto"), DevicesError::None(Kind::Dsa)));
        assert!(matches!(open("wq0.1"), DevicesError::Missing { .. }));
    }
}
