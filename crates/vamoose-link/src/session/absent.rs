//! In place of `session` where sessions are not built in. None can be begun: there are no values of these types.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::{Address, PageCaches, Stream, memory::Left, stream::Delivery};

/// Longest payload with a checksum of its own.
pub(crate) const MAX_LEN: usize = 1 << 20;

#[derive(Clone, Debug)]
enum Never {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    #[default]
    Filling,
    Finishing,
    Paused,
}

/// Methods that cannot be called, as there is no value of their type.
macro_rules! uncallable {
    ($($type:ident { $($vis:vis fn $name:ident($($argument:ident: $of:ty),*) $(-> $result:ty)?;)* })*) => {
        $(
            #[derive(Clone, Debug)]
            #[allow(missing_docs, reason = "it has no value")]
            pub struct $type(Never);

            #[allow(missing_docs, dead_code, unused_variables, reason = "they cannot be called")]
            impl $type {
                $($vis fn $name(&self, $($argument: $of),*) $(-> $result)? {
                    match self.0 {}
                })*
            }
        )*
    };
}

uncallable! {
    Session {
        pub fn open() -> Result<Stream, DialError>;
        pub fn config() -> &SessionConfig;
        pub fn identity() -> Option<&str>;
        pub fn page_cache() -> Option<usize>;
        pub(crate) fn kept_pages() -> usize;
        pub fn reconnect_timeout() -> Duration;
        pub fn is(other: &Session) -> bool;
        pub fn shut_down();
        pub fn set_paused(is_paused: bool);
        pub(crate) fn set_finishing(is_finishing: bool);
        pub(crate) fn reported_share() -> u32;
        pub(crate) fn urgency() -> Urgency;
        pub fn shut_down_but(spared: &Stream);
        pub fn refused() -> Option<Duration>;
    }
    Sessions {
        pub fn try_next() -> Option<Introduced>;
        pub fn addresses() -> std::slice::Iter<'_, Address>;
    }
    Resumable {
        pub(crate) fn stream() -> &Resumable;
        pub(crate) fn session() -> Session;
        pub(crate) fn report_wait(share: f64);
        pub(crate) fn peer_wait() -> Option<f64>;
        pub(crate) fn delivery() -> Option<Delivery>;
        pub(crate) fn close(error: StreamError);
        pub(crate) fn finish();
        pub(crate) fn drain(timeout: Duration) -> bool;
        pub(crate) fn read(out: &mut [u8]) -> io::Result<usize>;
        pub(crate) fn read_until(out: &mut [u8], deadline: Option<Instant>) -> io::Result<Option<usize>>;
        pub(crate) fn write_both(head: &[u8], tail: &[u8]) -> io::Result<()>;
        pub(crate) fn write_packet(
            head: &[u8], payload: &mut Box<[u8]>, len: usize, pages: Option<u32>
        ) -> io::Result<()>;
        pub(crate) fn is_checked() -> bool;
        pub(crate) fn pages() -> Option<u32>;
        pub(crate) fn connection_name() -> String;
        pub(crate) fn send_memory(header: &[u8], pages: &[vm_memory::VolatileSlice<'_>]) -> io::Result<()>;
        pub(crate) fn receive_memory(left: &mut Left<'_>) -> io::Result<usize>;
        pub(crate) fn set_stall_timeout(timeout: Duration);
        pub(crate) fn stall_timeout() -> Duration;
    }
}

impl Session {
    pub(crate) fn of(stream: &Resumable) -> Self {
        stream.session()
    }
}

impl AsFd for Sessions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }
}

/// The options of sessions.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "there are no sessions")]
pub struct SessionConfig {
    pub reconnect_timeout: Duration,
    pub page_cache: usize,
    pub page_caches: PageCaches,
    never: Never,
}

/// Another Vamoose.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "there are no sessions")]
pub struct Remote {
    pub config: SessionConfig,
}

impl Remote {
    /// Begins a session.
    ///
    /// # Errors
    /// None.
    pub fn dial(&self) -> Result<(Session, Stream), DialError> {
        match self.config.never {}
    }
}

/// A stream of a session.
#[allow(missing_docs, reason = "there are no sessions")]
pub struct Introduced {
    pub stream: Stream,
    pub session: Session,
}

/// A session that could not begin.
#[derive(Debug, Error)]
pub enum DialError {}

#[allow(missing_docs, reason = "there are no sessions")]
impl DialError {
    pub fn is_about_tls(&self) -> bool {
        match *self {}
    }

    pub fn is_about_port(&self) -> bool {
        match *self {}
    }
}

/// Sessions that could not be accepted.
#[derive(Debug, Error)]
pub enum SessionsError {}

/// The end of a stream.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "there are no sessions")]
pub enum StreamError {
    ShutDown,
}
