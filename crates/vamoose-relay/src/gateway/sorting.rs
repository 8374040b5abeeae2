//! What the connections at one port turn out to be: decided once, by the first that shows it.
//!
//! ```text
//!               main stream, or a channel
//!  Undecided ────────────────────────────────> Migration   pages are encoded; who is none of it is turned away
//!   │ silent: the far gateway is asked, and may
//!   │ find that the destination speaks first
//!   └────────────────────────────────────────> Opaque      every connection passes as bytes
//!               TLS, other bytes, the destination spoke
//! ```

use crate::first_bytes::FirstBytes;

/// What a port carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Carries {
    /// Nobody has sent anything.
    #[default]
    Undecided,
    /// A migration in plain text.
    Migration,
    /// Something whose bytes can only be passed on, and why.
    Opaque(&'static str),
}

/// What has happened at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A connection has come, or one that was silent has begun.
    Came(FirstBytes),
    /// The destination has sent something on a connection on which the source has not.
    DestinationSpoke,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The connection waits until it is known what the port carries.
    Hold,
    /// All connections that wait, and this one, are what the port carries.
    Begin,
    /// The connection is part of what the port carries.
    Take,
    /// The connection does not belong here.
    TurnAway,
    Nothing,
}

impl Carries {
    pub(super) fn after(self, event: Event) -> (Self, Action) {
        match (self, event) {
            (Self::Undecided, Event::Came(FirstBytes::Silent)) => (self, Action::Hold),
            (Self::Undecided, event) => (Self::by(event), Action::Begin),
            // A channel of post-copy is silent until a page is asked for.
            (
                Self::Migration,
                Event::Came(FirstBytes::Main | FirstBytes::Channel | FirstBytes::Silent),
            ) => (self, Action::Take),
            (Self::Migration, Event::Came(_)) => (self, Action::TurnAway),
            (Self::Opaque(_), Event::Came(_)) => (self, Action::Take),
            (_, Event::DestinationSpoke) => (self, Action::Nothing),
        }
    }

    fn by(event: Event) -> Self {
        match event {
            Event::Came(FirstBytes::Silent) => Self::Undecided,
            Event::Came(FirstBytes::Main | FirstBytes::Channel) => Self::Migration,
            Event::Came(FirstBytes::Tls) => Self::Opaque("it is TLS"),
            Event::Came(FirstBytes::Other) => {
                Self::Opaque("its first bytes are none of QEMU's migration")
            }
            Event::DestinationSpoke => Self::Opaque("the destination speaks first"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPAQUE: Carries = Carries::Opaque("why");

    #[test]
    fn what_is_decided_stays() {
        use {Action as A, Carries as C, Event::Came, FirstBytes as F};
        for (before, event, after, action) in [
            (C::Undecided, Came(F::Silent), C::Undecided, A::Hold),
            (C::Undecided, Came(F::Main), C::Migration, A::Begin),
            (C::Undecided, Came(F::Channel), C::Migration, A::Begin),
            (C::Undecided, Came(F::Tls), OPAQUE, A::Begin),
            (C::Undecided, Came(F::Other), OPAQUE, A::Begin),
            (C::Undecided, Event::DestinationSpoke, OPAQUE, A::Begin),
            (C::Migration, Came(F::Main), C::Migration, A::Take),
            (C::Migration, Came(F::Channel), C::Migration, A::Take),
            (C::Migration, Came(F::Silent), C::Migration, A::Take),
            (C::Migration, Came(F::Tls), C::Migration, A::TurnAway),
            (C::Migration, Came(F::Other), C::Migration, A::TurnAway),
            (
                C::Migration,
                Event::DestinationSpoke,
                C::Migration,
                A::Nothing,
            ),
            (OPAQUE, Came(F::Main), OPAQUE, A::Take),
            (OPAQUE, Came(F::Channel), OPAQUE, A::Take),
            (OPAQUE, Came(F::Silent), OPAQUE, A::Take),
            (OPAQUE, Came(F::Tls), OPAQUE, A::Take),
            (OPAQUE, Came(F::Other), OPAQUE, A::Take),
            (OPAQUE, Event::DestinationSpoke, OPAQUE, A::Nothing),
        ] {
            let (now, done) = before.after(event);
            assert_eq!(done, action, "{before:?}, {event:?}");
            match (now, after) {
                (C::Opaque(_), C::Opaque(_)) => {}
                _ => assert_eq!(now, after, "{before:?}, {event:?}"),
            }
        }
    }
}
