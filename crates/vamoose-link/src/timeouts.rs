//! All timeouts of connections and sessions, and what each ends.
//!
//! | timeout | counted from | what it ends |
//! |---|---|---|
//! | [`HANDSHAKE`] | accepting a connection; then its welcome | the connection; then a new stream whose first bytes have not come |
//! | [`GRACE`] | accepting a connection | the protection of a silent connection against newcomers |
//! | [`LINGER`] | refusing a connection | the wait for the peer to read why |
//! | [`ATTEMPT`], [`LAST_ATTEMPT`] | dialling a path | the attempt; the next path is tried |
//! | [`RETRY_PAUSES`] | a round of attempts that failed | the pause before the next round |
//! | [`SHUN`] | a path's failure | the time in which other paths are preferred |
//! | [`STAY`] | moving a stream to a faster path | its stay there; its own path is tried again |
//! | [`RECONNECT`] (configurable) | the loss of a connection | the stream |
//! | [`STALL`] (configurable) | the last byte that the peer took or sent | a read or write, and with it the stream |
//! | [`KEEPALIVE_IDLE`] and 4 x [`KEEPALIVE_INTERVAL`] | the last byte on an idle TCP connection | the connection |
//! | [`LOOK`] | a blocking read or write without progress | the call: its thread checks the timeouts above |
//!
//! The protocol's own timeouts (heartbeat, silence, opening) are in [`vamoose_session::stream`]. Users of a connection choose the
//! stall timeout of [`Listener::bind`](crate::Listener::bind) and [`dial`](crate::dial).

use std::time::Duration;

/// Limit for a handshake at the server, and for the first bytes of a new stream.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(10);

/// The first message of an honest peer takes one round trip to come.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

/// Time for a refused peer to read why.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// Limit for one attempt to connect while another path or another attempt remains.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(3);

/// Limit for the last attempt of a session that has not begun: its peer may be a host under load.
pub(crate) const LAST_ATTEMPT: Duration = Duration::from_secs(10);

/// Pause between two rounds of attempts: the first, and the longest.
pub(crate) const RETRY_PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// Time in which a failed path is tried last: after its first failure, and at most.
pub(crate) const SHUN: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];

/// Time over which the throughput of paths is compared.
pub(crate) const COMPARE: Duration = Duration::from_secs(2);

/// Time that a stream stays on a path faster than its own.
pub(crate) const STAY: Duration = Duration::from_secs(60);

/// Default of [`SessionConfig::reconnect_timeout`](crate::SessionConfig::reconnect_timeout).
pub(crate) const RECONNECT: Duration = Duration::from_secs(30);

/// Default of [`SessionConfig::stall_timeout`](crate::SessionConfig::stall_timeout).
pub(crate) const STALL: Duration = Duration::from_secs(30);

/// Idle time after which TCP probes a connection: a vanished host is noticed within half a minute.
pub(crate) const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);

/// Time between two of the four probes.
pub(crate) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Interval at which blocked and watching threads check the timeouts.
pub(crate) const LOOK: Duration = Duration::from_millis(500);

/// Pause after the system refused to accept a connection.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
