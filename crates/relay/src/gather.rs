//! Takes the source's connections and finds out what they are.
//!
//! A source QEMU connects its main stream first, may send its header at once (7.2 does so before it
//! has all channels), and goes on with the section `ram` only when a SYNC has gone out on every
//! channel. Another relay sends on the main stream first, because a destination QEMU demands it, and
//! says in each channel's first packet how many there will be. So the rule is:
//!
//! ```text
//! number of channels known (configured or announced):  done when main and all of them are there
//! unknown, channels there when `ram` is on the main:    done when the backlog is empty
//! unknown, no channel a second after main spoke:        a migration without multifd
//! first byte 0x16 (TLS) on any connection:              nothing can be understood
//! ```

use std::{
    collections::BTreeMap,
    io::{self, Read},
    sync::Arc,
    time::{Duration, Instant},
};

use multifd::{INITIAL_LEN, Initial, MAGIC, MAIN_MAGIC};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{RecvFlags, recv},
};
use transfer::{Hangup, Stream};

use crate::{Accept, RelayError};

/// What the source opened.
pub(crate) enum Arrival {
    /// A multifd migration: main stream (its first four bytes, [`MAIN_MAGIC`], are read already)
    /// and the channels by their ids.
    Multifd {
        main: Arc<Stream>,
        channels: Vec<Arc<Stream>>,
        uuid: [u8; 16],
    },
    /// Something whose bytes can only be passed on.
    Opaque {
        why: &'static str,
        /// Connections in the order in which they came, with the bytes read already.
        opened: Vec<(Arc<Stream>, Vec<u8>)>,
        /// Whether later connections speak first, as TLS does.
        speaks_first: bool,
    },
}

/// Waits for the source's connections: for the first one as long as it takes, then for all the
/// others within `patience`.
pub(crate) fn gather(
    accept: &dyn Accept,
    expected: Option<usize>,
    patience: Duration,
    hangup: &Hangup,
) -> Result<Arrival, RelayError> {
    let mut gathering = Gathering {
        accept,
        hangup,
        expected,
        opening: Vec::new(),
        main: None,
        channels: BTreeMap::new(),
        uuid: None,
    };
    let mut deadline = None;
    loop {
        gathering.accept_all()?;
        if gathering.opening.iter().any(Opening::is_tls) {
            return Ok(gathering.into_opaque("it is TLS", true));
        }
        if gathering.is_complete()? {
            return gathering.into_multifd();
        }
        let now = Instant::now();
        if gathering.is_plain(now) {
            return Ok(gathering.into_opaque("the source uses a single main connection", false));
        }
        if deadline.is_none() && gathering.has_any() {
            deadline = Some(now + patience);
        }
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Err(RelayError::Incomplete {
                missing: gathering.describe(),
            });
        }
        gathering.wait(deadline, now)?;
        gathering.read_openings()?;
    }
}

/// How long after the main stream's first bytes a first channel may still come, where nothing
/// says whether there will be one.
const PLAIN_AFTER: Duration = Duration::from_secs(1);

/// How often the main stream is looked at for its section `ram`, which is milliseconds away.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How the section's name stands on a main stream: with its length.
const RAM_SECTION: &[u8] = b"\x03ram";

struct Gathering<'a> {
    accept: &'a dyn Accept,
    hangup: &'a Hangup,
    expected: Option<usize>,
    opening: Vec<Opening>,
    main: Option<(Arc<Stream>, Instant)>,
    channels: BTreeMap<u8, Arc<Stream>>,
    uuid: Option<[u8; 16]>,
}

/// A connection whose first four bytes are not all there.
struct Opening {
    stream: Arc<Stream>,
    bytes: [u8; 4],
    got: usize,
}

const TLS_HANDSHAKE: u8 = 0x16;

impl Opening {
    fn is_tls(&self) -> bool {
        self.got > 0 && self.bytes[0] == TLS_HANDSHAKE
    }
}

impl Gathering<'_> {
    fn accept_all(&mut self) -> Result<(), RelayError> {
        while let Some(stream) = self.accept.try_accept()? {
            self.hangup.register(&stream);
            self.opening.push(Opening {
                stream,
                bytes: [0; 4],
                got: 0,
            });
        }
        Ok(())
    }

    fn has_any(&self) -> bool {
        self.main.is_some() || !self.opening.is_empty() || !self.channels.is_empty()
    }

    fn is_complete(&mut self) -> Result<bool, RelayError> {
        if let Some(expected) = self.expected
            && let Some(id) = self
                .channels
                .keys()
                .find(|id| usize::from(**id) >= expected)
        {
            return Err(RelayError::ChannelIds {
                problem: format!("id {id}, but there are {expected} channels"),
            });
        }
        if self.main.is_none() || self.channels.is_empty() {
            return Ok(false);
        }
        Ok(match self.expected {
            Some(expected) => self.channels.len() == expected,
            // In this order: what the main stream shows holds for connections that came before.
            None => {
                self.main_has_ram()? && {
                    self.accept_all()?;
                    self.opening.is_empty() && self.ids_are_contiguous()
                }
            }
        })
    }

    /// Whether the source has begun to send its section `ram` on the main stream.
    fn main_has_ram(&self) -> Result<bool, RelayError> {
        let Some((main, _)) = &self.main else {
            return Ok(false);
        };
        // Room for the setup of devices that come before it.
        let mut bytes = vec![0; 64 * 1024];
        let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(main, &mut bytes, peek) {
            Ok((_, length)) => {
                let mut seen = bytes[..length.min(bytes.len())].windows(RAM_SECTION.len());
                Ok(seen.any(|window| window == RAM_SECTION))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(RelayError::Opening(error.into())),
        }
    }

    fn ids_are_contiguous(&self) -> bool {
        let highest = self
            .channels
            .last_key_value()
            .map(|(id, _)| usize::from(*id));
        highest.is_some_and(|highest| highest + 1 == self.channels.len())
    }

    fn is_plain(&self, now: Instant) -> bool {
        self.expected.is_none()
            && self.channels.is_empty()
            && self
                .main
                .as_ref()
                .is_some_and(|(_, spoke)| now >= *spoke + PLAIN_AFTER)
    }

    /// Waits until something happens, or the next deadline.
    fn wait(&self, deadline: Option<Instant>, now: Instant) -> Result<(), RelayError> {
        let plain_at = match &self.main {
            Some((_, spoke)) if self.expected.is_none() && self.channels.is_empty() => {
                Some(*spoke + PLAIN_AFTER)
            }
            _ => None,
        };
        // The main stream is readable all the time, so it cannot be polled for more.
        let look_at = (self.main.is_some() && self.expected.is_none()).then(|| now + LOOK_EVERY);
        let next = [deadline, plain_at, look_at].into_iter().flatten().min();
        let timeout = next
            .map(|next| next.saturating_duration_since(now))
            .and_then(|wait| Timespec::try_from(wait).ok());
        let accept = self.accept.as_fd();
        let mut fds = vec![
            PollFd::new(self.hangup, PollFlags::IN),
            PollFd::new(&accept, PollFlags::IN),
        ];
        let streams = self.opening.iter().map(|opening| &*opening.stream);
        fds.extend(streams.map(|stream| PollFd::new(stream, PollFlags::IN)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(RelayError::SetUp(error.into())),
        }
        if self.hangup.is_hung_up() {
            return Err(RelayError::Cancelled);
        }
        Ok(())
    }

    /// Reads what has come on the connections that have not said what they are.
    fn read_openings(&mut self) -> Result<(), RelayError> {
        for mut opening in std::mem::take(&mut self.opening) {
            if is_readable(&opening.stream)? {
                let read = (&*opening.stream)
                    .read(&mut opening.bytes[opening.got..])
                    .map_err(RelayError::Opening)?;
                if read == 0 {
                    return Err(RelayError::ClosedEarly {
                        got: opening.got,
                        wanted: opening.bytes.len(),
                    });
                }
                opening.got += read;
            }
            if opening.got == opening.bytes.len() && !opening.is_tls() {
                self.classify(opening)?;
            } else {
                self.opening.push(opening);
            }
        }
        Ok(())
    }

    fn classify(&mut self, opening: Opening) -> Result<(), RelayError> {
        match u32::from_be_bytes(opening.bytes) {
            MAIN_MAGIC if self.main.is_some() => Err(RelayError::ChannelIds {
                problem: "there are two main streams".to_owned(),
            }),
            MAIN_MAGIC => {
                self.main = Some((opening.stream, Instant::now()));
                Ok(())
            }
            MAGIC => self.add_channel(&opening),
            _ => Err(RelayError::Garbage {
                found: opening.bytes,
            }),
        }
    }

    fn add_channel(&mut self, opening: &Opening) -> Result<(), RelayError> {
        let mut bytes = [0; INITIAL_LEN];
        let (head, rest) = bytes.split_at_mut(opening.bytes.len());
        head.copy_from_slice(&opening.bytes);
        let got = opening
            .stream
            .read_full(rest)
            .map_err(RelayError::Opening)?;
        if got < rest.len() {
            return Err(RelayError::ClosedEarly {
                got: got + opening.bytes.len(),
                wanted: INITIAL_LEN,
            });
        }
        let initial = Initial::parse(&bytes)?;
        if *self.uuid.get_or_insert(initial.uuid()) != initial.uuid() {
            return Err(RelayError::ChannelIds {
                problem: "the channels belong to guests with different uuids".to_owned(),
            });
        }
        if self.expected.is_none() {
            self.expected = initial.announced_channels().map(usize::from);
        }
        let id = initial.channel();
        match self.channels.insert(id, opening.stream.clone()) {
            None => Ok(()),
            Some(_) => Err(RelayError::ChannelIds {
                problem: format!("id {id} came twice"),
            }),
        }
    }

    fn describe(&self) -> String {
        let ids = self.channels.keys().map(u8::to_string).collect::<Vec<_>>();
        format!(
            "main stream {}; channels [{}] of {}; {} connections have not said what they are",
            if self.main.is_some() {
                "is there"
            } else {
                "is missing"
            },
            ids.join(", "),
            self.expected.map_or_else(
                || "an unknown number".to_owned(),
                |number| number.to_string()
            ),
            self.opening.len(),
        )
    }

    fn into_multifd(self) -> Result<Arrival, RelayError> {
        let Some((main, _)) = self.main else {
            return Err(RelayError::Incomplete {
                missing: "main stream".to_owned(),
            });
        };
        Ok(Arrival::Multifd {
            main,
            // Complete means: distinct ids, all below their number. So the order is the id.
            channels: self.channels.into_values().collect(),
            uuid: self.uuid.unwrap_or_default(),
        })
    }

    fn into_opaque(self, why: &'static str, speaks_first: bool) -> Arrival {
        let main = self
            .main
            .map(|(stream, _)| (stream, MAIN_MAGIC.to_be_bytes().to_vec()));
        let opening = self
            .opening
            .into_iter()
            .map(|opening| (opening.stream, opening.bytes[..opening.got].to_vec()));
        Arrival::Opaque {
            why,
            opened: main.into_iter().chain(opening).collect(),
            speaks_first,
        }
    }
}

fn is_readable(stream: &Stream) -> Result<bool, RelayError> {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match poll(&mut fds, Some(&now)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(RelayError::Opening(io::Error::from(error))),
    }
}
