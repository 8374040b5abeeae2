//! What a connection is, by its first bytes, which stay in the socket.

use std::{os::fd::AsFd, time::Duration};

use multifd::{MAGIC, MAIN_MAGIC};
use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};

/// What a connection begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// The main stream of a migration.
    Main,
    /// One of multifd's channels.
    Channel,
    /// TLS, of QEMU's own.
    Tls,
    /// Anything else.
    Other,
    /// Nothing, for [`SILENCE`]: whoever listens may be the first to send.
    Silent,
}

/// What can be said of a connection now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// It has begun.
    Is(First),
    /// Too little has come yet.
    NotYet,
    /// It has ended without a byte.
    Gone,
}

/// How long a connection may take to its first bytes before it is taken for one on which the other side begins.
pub(super) const SILENCE: Duration = Duration::from_millis(50);

/// Looks at a connection. When it `is_late`, nothing more is waited for.
pub(super) fn look(socket: impl AsFd, is_late: bool) -> Look {
    let mut bytes = [0; 4];
    match peek(socket, &mut bytes) {
        Some(length) => judge(&bytes[..length], is_late),
        None => Look::Gone,
    }
}

/// How many bytes have come, as far as they fit, without that they are taken; `None` when the connection has ended.
pub(super) fn peek(socket: impl AsFd, bytes: &mut [u8]) -> Option<usize> {
    match recv(socket, &mut *bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => None,
        Ok((_, length)) => Some(length.min(bytes.len())),
        Err(Errno::AGAIN | Errno::INTR) => Some(0),
        Err(_) => None,
    }
}

/// The beginning of a TLS handshake, of any version that is in use.
const TLS: [u8; 2] = [0x16, 3];

fn judge(bytes: &[u8], is_late: bool) -> Look {
    let begins = |kind: [u8; 4]| kind.starts_with(bytes);
    let known = [
        (MAIN_MAGIC.to_be_bytes(), First::Main),
        (MAGIC.to_be_bytes(), First::Channel),
    ];
    match bytes {
        [] if is_late => Look::Is(First::Silent),
        [] => Look::NotYet,
        bytes if bytes.starts_with(&TLS) => Look::Is(First::Tls),
        bytes if bytes.len() == 4 => {
            let found = known.iter().find(|(magic, _)| magic == bytes);
            Look::Is(found.map_or(First::Other, |(_, first)| *first))
        }
        bytes if !is_late => {
            let may_be = TLS.starts_with(bytes) || known.iter().any(|(magic, _)| begins(*magic));
            match may_be {
                true => Look::NotYet,
                false => Look::Is(First::Other),
            }
        }
        _ => Look::Is(First::Other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_tell_what_a_connection_is() {
        let (main, channel) = (MAIN_MAGIC.to_be_bytes(), MAGIC.to_be_bytes());
        for (bytes, early, late) in [
            (&b""[..], Look::NotYet, Look::Is(First::Silent)),
            (&main, Look::Is(First::Main), Look::Is(First::Main)),
            (&main[..3], Look::NotYet, Look::Is(First::Other)),
            (&channel, Look::Is(First::Channel), Look::Is(First::Channel)),
            (&channel[..1], Look::NotYet, Look::Is(First::Other)),
            (&[0x16, 3, 1, 2], Look::Is(First::Tls), Look::Is(First::Tls)),
            (&[0x16, 3], Look::Is(First::Tls), Look::Is(First::Tls)),
            (&[0x16], Look::NotYet, Look::Is(First::Other)),
            (b"G", Look::Is(First::Other), Look::Is(First::Other)),
            (b"GET ", Look::Is(First::Other), Look::Is(First::Other)),
        ] {
            assert_eq!(judge(bytes, false), early, "{bytes:x?}");
            assert_eq!(judge(bytes, true), late, "{bytes:x?}");
        }
    }
}
