//! HTTP responder for the metrics, whose clients cannot slow a migration down.
//!
//! One thread and one answer per connection. Connections, and the length and time of a request, are limited. `tiny_http` has no
//! such limits: a client that sends nothing would keep one of its threads for ever.

use std::{
    fmt,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags};
use tracing::{debug, warn};
use vamoose_link::{Address, Hangup, Listener, Socket, chain, wait_for};

/// Answers until dropped.
pub struct Responder {
    address: Address,
    stop: Arc<Hangup>,
    thread: Option<JoinHandle<()>>,
}

/// Open connections; further ones are closed. Prometheus needs one.
const MOST: usize = 8;
/// Most bytes of a request.
const LONGEST: usize = 8 << 10;
/// Time for a request to arrive, and for its answer to be read.
const PATIENCE: Duration = Duration::from_secs(5);
/// Wait before another accept, so that file descriptors become free.
const PAUSE: Duration = Duration::from_millis(100);

/// Text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// OpenMetrics, for clients that accept it.
    Open,
    /// Prometheus' text format.
    Classic,
}

impl Format {
    fn media_type(self) -> &'static str {
        match self {
            Self::Open => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

impl Responder {
    /// Answers at `address` with what `metrics` makes.
    pub(super) fn start(
        address: &Address,
        metrics: impl Fn(Format) -> Result<String, fmt::Error> + Send + Sync + 'static,
    ) -> Result<Self> {
        let listener = Listener::bind(address, PATIENCE).context("metrics")?;
        let (address, stop) = (listener.address().clone(), Arc::new(Hangup::new()?));
        let (seen, metrics) = (stop.clone(), Arc::new(metrics));
        let work = move || accept(&listener, &seen, &metrics);
        let thread = thread::Builder::new().name("metrics".to_owned());
        let thread = thread
            .spawn(work)
            .context("metrics: no thread can be started")?;
        Ok(Self {
            address,
            stop,
            thread: Some(thread),
        })
    }

    /// Where.
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

fn accept<M>(listener: &Listener, stop: &Hangup, metrics: &Arc<M>)
where
    M: Fn(Format) -> Result<String, fmt::Error> + Send + Sync + 'static,
{
    // One reference for each open connection, besides this one.
    let open = Arc::new(());
    while !stop.is_hung_up() {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        if let Err(error) = wait_for(&mut fds, PATIENCE) {
            return warn!("no more metrics: {error}");
        }
        let socket = match listener.try_accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => continue,
            Err(error) => {
                debug!("{}", chain(&error));
                thread::sleep(PAUSE);
                continue;
            }
        };
        if Arc::strong_count(&open) > MOST {
            continue;
        }
        let (metrics, counted) = (metrics.clone(), open.clone());
        let work = move || {
            answer(&socket, &*metrics);
            drop(counted);
        };
        if let Err(error) = thread::Builder::new().spawn(work) {
            debug!("a request for metrics is not answered: {error}");
        }
    }
}

fn answer(socket: &Socket, metrics: impl Fn(Format) -> Result<String, fmt::Error>) {
    let Some(request) = read(socket) else {
        return socket.shut_down();
    };
    let (status, kind, body) = match judge(&request) {
        Request::Metrics(format) => match metrics(format) {
            Ok(text) => ("200 OK", format.media_type(), text),
            Err(error) => ("500 Internal Server Error", "text/plain", error.to_string()),
        },
        Request::Other => ("404 Not Found", "text/plain", "See /metrics\n".to_owned()),
        Request::NotRead => ("405 Method Not Allowed", "text/plain", String::new()),
        Request::Nonsense => ("400 Bad Request", "text/plain", String::new()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    // The client may have gone.
    let _ = socket.write_both(head.as_bytes(), body.as_bytes());
    socket.finish();
    // Closing with unread input would reset the connection before the client has read the answer.
    let deadline = Instant::now() + PATIENCE;
    while matches!(
        socket.read_until(&mut [0; 512], Some(deadline)),
        Ok(Some(1..))
    ) {}
}

/// The head of a request; `None` if it is late, incomplete or too long.
fn read(socket: &Socket) -> Option<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
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

#[derive(Debug, PartialEq, Eq)]
enum Request {
    Metrics(Format),
    Other,
    NotRead,
    Nonsense,
}

fn judge(request: &[u8]) -> Request {
    let line = request.split(|byte| *byte == b'\r').next();
    let line = line.and_then(|line| str::from_utf8(line).ok());
    let words: Vec<_> = line.map_or_else(Vec::new, |line| line.split(' ').collect());
    let [method, target, version] = words[..] else {
        return Request::Nonsense;
    };
    let path = target.split('?').next();
    match (method, path) {
        _ if !version.starts_with("HTTP/1.") => Request::Nonsense,
        ("GET", Some("/metrics")) => Request::Metrics(accepted(request)),
        ("GET", _) => Request::Other,
        _ => Request::NotRead,
    }
}

fn accepted(request: &[u8]) -> Format {
    let head = String::from_utf8_lossy(request).to_ascii_lowercase();
    let mut lines = head.lines().filter(|line| line.starts_with("accept:"));
    match lines.any(|line| line.contains("application/openmetrics-text")) {
        true => Format::Open,
        false => Format::Classic,
    }
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
        Responder::start(&address, |_| Ok("vamoose 1\n".to_owned())).unwrap()
    }

    /// What comes back for these bytes.
    fn say(folder: &Path, text: &[u8]) -> String {
        let mut socket = UnixStream::connect(folder.join("metrics.sock")).unwrap();
        // It may be turned away while it still sends.
        let _ = socket.write_all(text);
        let mut answer = String::new();
        let _ = socket.read_to_string(&mut answer);
        answer
    }

    /// Until there is an answer.
    fn ask(folder: &Path) {
        let began = Instant::now();
        while !say(folder, b"GET /metrics HTTP/1.1\r\n\r\n").ends_with("vamoose 1\n") {
            assert!(began.elapsed() < Duration::from_secs(60), "no answer");
        }
    }

    #[test]
    fn only_metrics_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let responder = responder(folder.path());
        for (request, status) in [
            (&b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[..], "200 OK"),
            (b"GET /metrics?a=b HTTP/1.0\r\n\r\n", "200 OK"),
            (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
            (b"GET /metrics\r\n\r\n", "400 Bad Request"),
            (b"\xff\xfe \r\n\r\n", "400 Bad Request"),
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
    fn who_accepts_open_metrics_gets_it() {
        let request = |accept: &str| {
            let text = format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{accept}\r\n");
            judge(text.as_bytes())
        };
        for accept in [
            "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n",
            "accept: text/plain, application/openmetrics-text\r\n",
        ] {
            assert_eq!(request(accept), Request::Metrics(Format::Open));
        }
        for accept in [
            "",
            "Accept: text/plain\r\n",
            "X: application/openmetrics-text\r\n",
        ] {
            assert_eq!(request(accept), Request::Metrics(Format::Classic));
        }
    }

    #[test]
    fn strays_do_not_hurt() {
        let folder = tempfile::tempdir().unwrap();
        let _responder = responder(folder.path());
        assert_eq!(say(folder.path(), &[b'x'; 2 * LONGEST]), "");
        let silent = || UnixStream::connect(folder.path().join("metrics.sock")).unwrap();
        let strays: Vec<_> = (0..MOST - 1).map(|_| silent()).collect();
        // All places but one are taken, when that of the first has been given back.
        ask(folder.path());
        let more: Vec<_> = (0..2 * MOST).map(|_| silent()).collect();
        drop((strays, more));
        ask(folder.path());
    }
}
