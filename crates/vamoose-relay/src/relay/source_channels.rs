//! Closes a source QEMU's connections when its migration fails: the main stream first, the channels last.
//!
//! A QEMU handles the end of its main stream well: it takes its images back and continues the guest. It does not handle
//! channels that break while it writes to them:
//! - in the last round, 7.2 continues the guest without its images, and aborts at the guest's next write;
//! - while a SYNC goes out, 7.2 and 10.0 may wait for that SYNC for ever; the guest runs, but can never be migrated again.
//!
//! So the relay reads and drops what the source still sends on its channels, until the source has closed them.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tracing::debug;
use vamoose_link::{Hangup, Stream};

use crate::gather::Connections;

/// The channels of a source QEMU, which the migration's [`Hangup`] leaves open. Empty if the source is another
/// relay: its session handles the break.
pub(super) struct SourceChannels {
    channels: Vec<Arc<Stream>>,
}

/// How long a source may take to close its channels after the end of its main stream.
const CLOSING: Duration = Duration::from_secs(3);
/// Bytes that are read at a time.
const PIECE: usize = 64 << 10;

impl SourceChannels {
    pub(super) fn new(source: &Connections, hangup: &Hangup) -> Self {
        let of_qemu = |channel: &&Arc<Stream>| channel.socket().is_some();
        let channels: Vec<_> = source.channels.iter().filter(of_qemu).cloned().collect();
        for channel in &channels {
            hangup.spare(channel);
        }
        Self { channels }
    }

    /// Waits until the source has closed its channels after the end of its main stream, but not for too long. Then shuts the
    /// channels down. A second call returns at once.
    pub(super) fn wait(&self) {
        let deadline = Instant::now() + CLOSING;
        thread::scope(|scope| {
            for channel in &self.channels {
                scope.spawn(move || drop_rest(channel, deadline));
            }
        });
        self.shut_down();
    }

    pub(super) fn shut_down(&self) {
        for channel in &self.channels {
            channel.shut_down();
        }
    }
}

/// Reads `channel` to its end, or to the deadline.
fn drop_rest(channel: &Stream, deadline: Instant) {
    let mut piece = vec![0; PIECE];
    loop {
        match channel.read_until(&mut piece, Some(deadline)) {
            Ok(Some(1..)) if Instant::now() < deadline => {}
            Ok(Some(0)) => return,
            Ok(_) => return debug!("the source has not closed its channel in time"),
            Err(error) => return debug!("a channel of the source: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixStream,
    };

    use vamoose_link::Socket;

    use super::*;

    /// A source that has much to send on its channel when its migration fails, and closes that when its main stream has ended.
    #[test]
    fn a_source_writes_to_its_channels_until_it_closes_them() {
        let pair = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (Arc::new(Stream::Socket(Socket::Unix(ours))), theirs)
        };
        let ((main, mut main_of_source), (channel, mut channel_of_source)) = (pair(), pair());
        let hangup = Hangup::new().unwrap();
        let source = Connections {
            main: main.clone(),
            channels: vec![channel.clone()],
        };
        for stream in [&main, &channel] {
            hangup.register(stream);
        }
        let channels = SourceChannels::new(&source, &hangup);
        let writer = thread::spawn(move || {
            main_of_source.read_exact(&mut [0]).unwrap_err();
            let written = channel_of_source.write_all(&vec![1; 4 << 20]);
            drop(channel_of_source);
            written
        });
        hangup.hang_up();
        channels.wait();
        writer.join().unwrap().unwrap();
        // There is nothing left to wait for.
        channels.wait();
    }
}
