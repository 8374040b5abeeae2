//! Handshakes of both ends over a socket, refusals with the messages at both ends, and the record layer.

mod authority;
mod handshakes;
mod interoperation;
mod keys;
mod records;
mod refusals;

use std::{os::unix::net::UnixStream, thread, time::Duration};

use super::{ClientTerms, Secured, ServerTerms, TlsError};
use crate::{Socket, chain};

/// Longer than anything may take on a machine that is very busy.
const LIMIT: Duration = Duration::from_secs(60);

fn sockets() -> (Socket, Socket) {
    let (near, far) = UnixStream::pair().unwrap();
    let [near, far] = [near, far].map(Socket::Unix);
    near.set_stall_timeout(LIMIT).unwrap();
    far.set_stall_timeout(LIMIT).unwrap();
    (near, far)
}

type Done = Result<(Secured, Socket), TlsError>;

/// What a client and a server get that are connected to each other.
fn meet(client: &ClientTerms, server: &ServerTerms, host: &str) -> (Done, Done) {
    let (near, far) = sockets();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| Ok((server.accept(&far, LIMIT)?, far)));
        let connected = client
            .connect(&near, host, &[], LIMIT)
            .map(|secured| (secured, near));
        (connected, accepted.join().unwrap())
    })
}

/// The whole message of an error.
fn message<T>(result: Result<T, TlsError>) -> String {
    match result {
        Ok(_) => "no error".to_owned(),
        Err(error) => chain(&error),
    }
}
