//! HTTP responder for the metrics. Its clients cannot slow a migration down.
//!
//! One thread answers one request after the other. The length of a request is limited, and so is the total time spent on it.
//! `tiny_http` has no such limits: a client that sends nothing would occupy one of its threads forever.

use std::{
    fmt, io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{SendFlags, send},
};
use tracing::{debug, warn};
use vamoose_link::{Address, Hangup, Listener, Socket, chain, wait_for, wait_until};

/// A responder that ends when it is dropped.
pub struct Responder {
    address: Address,
    stop: Arc<Hangup>,
    thread: Option<JoinHandle<()>>,
}

/// Most bytes of a request.
const LONGEST: usize = 8 << 10;
/// Total time for receiving a request and sending its answer. Other requests wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest wait for a connection before the listener is checked again.
const LOOK: Duration = Duration::from_secs(60);
/// Wait after a failed accept, so that file descriptors become free.
const PAUSE: Duration = Duration::from_millis(100);

impl Responder {
    /// Answers at `address` with the text that `metrics` returns.
    pub(super) fn start(
        address: &Address,
        metrics: impl Fn() -> Result<String, fmt::Error> + Send + 'static,
    ) -> Result<Self> {
        let listener = Listener::bind(address, PATIENCE).context("metrics")?;
        let (address, stop) = (listener.address().clone(), Arc::new(Hangup::new()?));
        let seen = stop.clone();
        let thread = thread::Builder::new().name("metrics".to_owned());
        let thread = thread.spawn(move || accept(&listener, &seen, &metrics));
        Ok(Self {
            address,
            stop,
            thread: Some(thread.context("metrics: no thread can be started")?),
        })
    }

    /// The address, with the port that the kernel chose.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.stop.hang_up();
        if let Some(thread) = self.thread.take() {
            // The thread has reported its errors.
            let _ = thread.join();
        }
    }
}

fn accept(listener: &Listener, stop: &Hangup, metrics: &dyn Fn() -> Result<String, fmt::Error>) {
    while !stop.is_hung_up() {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        if let Err(error) = wait_for(&mut fds, LOOK) {
            return warn!("no more metrics: {error}");
        }
        match listener.try_accept() {
            Ok(Some(socket)) => answer(&socket, metrics),
            Ok(None) => {}
            Err(error) => {
                debug!("{}", chain(&error));
                thread::sleep(PAUSE);
            }
        }
    }
}

fn answer(socket: &Socket, metrics: &dyn Fn() -> Result<String, fmt::Error>) {
    const TEXT: &str = "text/plain";
    let deadline = Instant::now() + PATIENCE;
    let Some(request) = read(socket, deadline) else {
        return socket.shut_down();
    };
    let mut words = request.split(|byte| byte.is_ascii_whitespace());
    let path = match (words.next(), words.next()) {
        (Some(b"GET"), Some(target)) => target.split(|byte| *byte == b'?').next(),
        _ => None,
    };
    let (status, kind, body) = match path {
        Some(b"/metrics") => match metrics() {
            Ok(text) => ("200 OK", OPEN_METRICS, text),
            Err(error) => ("500 Internal Server Error", TEXT, error.to_string()),
        },
        Some(_) => ("404 Not Found", TEXT, "See /metrics\n".to_owned()),
        None => ("405 Method Not Allowed", TEXT, String::new()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    // The client may have disconnected, or read too slowly.
    if write(socket, (head + &body).as_bytes(), deadline).is_err() {
        return socket.shut_down();
    }
    socket.finish();
    // Closing with unread input would reset the connection before the client has read the answer.
    while let Ok(Some(1..)) = socket.read_until(&mut [0; 512], Some(deadline))
        && Instant::now() < deadline
    {}
}

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The head of a request; `None` if the head is late, incomplete or too long.
fn read(socket: &Socket, deadline: Instant) -> Option<Vec<u8>> {
    let mut request = Vec::new();
    while !request.windows(4).any(|it| it == b"\r\n\r\n") {
        let mut piece = [0; 1024];
        let read = socket.read_until(&mut piece, Some(deadline)).ok()??;
        if read == 0 || request.len() + read > LONGEST {
            return None;
        }
        request.extend_from_slice(&piece[..read]);
    }
    Some(request)
}

/// Writes all of `bytes` by `deadline`. The socket's own timeout would restart whenever the client reads a little.
fn write(socket: &Socket, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut fds = [PollFd::new(socket, PollFlags::OUT)];
        if Instant::now() >= deadline || !wait_until(&mut fds, Some(deadline))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixStream,
        path::Path,
    };

    use super::*;

    fn responder(folder: &Path) -> Responder {
        let address = Address::Unix(folder.join("metrics.sock"));
        Responder::start(&address, || Ok("vamoose 1\n".to_owned())).unwrap()
    }

    /// The answer to these bytes.
    fn say(folder: &Path, text: &[u8]) -> String {
        let mut socket = UnixStream::connect(folder.join("metrics.sock")).unwrap();
        // The responder may close the connection while the client still sends.
        let _ = socket.write_all(text);
        let mut answer = String::new();
        let _ = socket.read_to_string(&mut answer);
        answer
    }

    /// Requests metrics until there is an answer.
    fn ask(folder: &Path) {
        let began = Instant::now();
        while !say(folder, b"GET /metrics HTTP/1.1\r\n\r\n").ends_with("vamoose 1\n") {
            assert!(began.elapsed() < Duration::from_secs(60), "no answer");
        }
    }

    #[test]
    fn other_paths_and_methods_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let responder = responder(folder.path());
        for (request, status) in [
            (&b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[..], "200 OK"),
            (b"GET /metrics?a=b HTTP/1.0\r\n\r\n", "200 OK"),
            (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
            (b"GET\r\n\r\n", "404 Not Found"),
            (b"\xff\xfe \r\n\r\n", "405 Method Not Allowed"),
        ] {
            let answer = say(folder.path(), request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}\r\n")),
                "{answer}"
            );
            assert_eq!(answer.ends_with("\r\n\r\nvamoose 1\n"), status == "200 OK");
        }
        drop(responder);
        assert!(!folder.path().join("metrics.sock").exists());
    }

    #[test]
    fn invalid_and_silent_clients_do_not_block_others() {
        let folder = tempfile::tempdir().unwrap();
        let _responder = responder(folder.path());
        assert_eq!(say(folder.path(), &[b'x'; 2 * LONGEST]), "");
        let silent = || UnixStream::connect(folder.path().join("metrics.sock")).unwrap();
        // Silent clients delay others for a limited time; clients that have disconnected do not.
        let strays: Vec<_> = (0..3).map(|_| silent()).collect();
        ask(folder.path());
        drop((strays, (0..16).map(|_| silent()).collect::<Vec<_>>()));
        ask(folder.path());
    }
    #[test]
    fn slow_reader_is_disconnected_at_its_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("metrics.sock"));
        // More than a unix socket buffers.
        let long = || Ok(format!("{}vamoose 1\n", "x".repeat(16 << 20)));
        let _responder = Responder::start(&address, long).unwrap();
        let request = b"GET /metrics HTTP/1.1\r\n\r\n";
        let connect = || UnixStream::connect(folder.path().join("metrics.sock")).unwrap();
        let mut silent = connect();
        silent.write_all(request).unwrap();
        let mut slow = connect();
        slow.write_all(request).unwrap();
        let began = Instant::now();
        // Reads a little at a time, so that a timeout per write would never expire.
        let reading = thread::spawn(move || {
            let (mut piece, mut read) = ([0; 64 << 10], 0);
            while let Ok(bytes @ 1..) = slow.read(&mut piece) {
                read += bytes;
                thread::sleep(PATIENCE / 20);
            }
            read
        });
        ask(folder.path());
        assert!(began.elapsed() < 10 * PATIENCE, "{:?}", began.elapsed());
        assert!(reading.join().unwrap() < 16 << 20);
        drop(silent);
    }
}
