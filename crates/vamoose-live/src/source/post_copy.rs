//! Post-copy at the source: sends the missing pages of a guest that runs at the destination already.
//!
//! ```text
//!  demand:      <── the page that somebody touches ──   ══ that page, at once ══>       a stream of its own
//!  background:  ══ all missing pages but those, SYNC, last SYNC ══>                     a stream for each channel
//! ```
//! The guest stays paused here, so its memory no longer changes. Pages are sent on demand from the moment at which the destination
//! loads the guest, in the background once it runs there.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use vamoose_link::{ChannelWriter, Conversation, Stream};

use super::{
    Source,
    channel::Channel,
    link::Link,
    round::{Pages, Round},
};
use crate::{
    SourceError,
    dirty::{Bitmap, count},
    missing::AtomicPages,
    protocol::{Request, missing_bytes},
};

/// The pages that the destination does not have, and the streams that they go over.
pub(super) struct PostCopy {
    missing: Vec<Bitmap>,
    background: Vec<ChannelWriter>,
    /// Pages that have been sent on demand.
    demanded: Arc<AtomicPages>,
    results_in: SyncSender<Result<(), SourceError>>,
    /// The first is the result: a failure, or the destination has all pages.
    results: Receiver<Result<(), SourceError>>,
}

impl PostCopy {
    /// Opens the streams, and sends pages on demand from here on. `missing` are those that the destination does not have.
    pub(super) fn start<'a>(
        source: &'a Source,
        link: &Link<'_, 'a>,
        missing: Vec<Bitmap>,
    ) -> Result<Self, SourceError> {
        let channels = source.config.channels;
        let demanded = Arc::new(AtomicPages::new(&Bitmap::for_blocks(&source.ram)));
        let mut streams = link.open_streams(channels..2 * channels + 1)?;
        let stream = streams.pop().ok_or(SourceError::Unanswered)?;
        // A waiting vCPU does not wait for the bandwidth limit.
        let writer = link.writer(stream.clone(), None)?;
        let background = streams.into_iter();
        let background =
            background.map(|stream| link.writer(stream, Some(source.shared.pacer.clone())));
        let background = background.collect::<Result<_, SourceError>>()?;
        // One for each thread.
        let (results_in, results) = sync_channel(usize::from(channels) + 1);
        link.spawn({
            let (result, demanded) = (results_in.clone(), demanded.clone());
            move || {
                let channel = Channel::new(source, usize::from(2 * channels), writer);
                // Without a receiver the migration is over.
                let _ = result.send(send_on_demand(stream, channel, &demanded));
            }
        })?;
        Ok(Self {
            missing,
            background,
            demanded,
            results_in,
            results,
        })
    }

    /// The missing pages, as the destination is told them.
    pub(super) fn missing(&self) -> Vec<u8> {
        missing_bytes(&self.missing)
    }

    /// Sends all missing pages to the guest, which runs there, and waits until it has them.
    pub(super) fn run<'a>(
        self,
        source: &'a Source,
        link: &Link<'_, 'a>,
        round: u64,
    ) -> Result<(), SourceError> {
        let (stats, missing) = (&source.shared.stats, self.missing);
        let mut progress = source.shared.progress();
        progress.count_remaining(count(&missing), stats);
        drop(progress);
        let channels = self.background.len();
        let round = Arc::new(Round::new(
            round,
            Pages::Last(missing),
            &source.ram,
            channels,
        ));
        for (number, writer) in self.background.into_iter().enumerate() {
            let (round, result) = (round.clone(), self.results_in.clone());
            let demanded = self.demanded.clone();
            link.spawn(move || {
                let mut channel = Channel::new(source, channels + number, writer);
                channel.skip(demanded);
                let sent = channel.send(&round).and_then(|()| channel.finish());
                if sent.is_err() {
                    let _ = result.send(sent);
                }
            })?;
        }
        let all_is_there = self.results.recv();
        // A sender is here.
        all_is_there.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::BrokenPipe).into()))
    }
}

/// Sends the pages that the destination asks for, until it has all.
fn send_on_demand(
    stream: Arc<Stream>,
    mut channel: Channel<'_>,
    demanded: &AtomicPages,
) -> Result<(), SourceError> {
    let mut requests = Conversation::new(stream);
    loop {
        match requests.receive()? {
            Request::Page { block, page } => {
                channel.send_page(block, page)?;
                demanded.set(block, page);
            }
            Request::Complete => return Ok(()),
        }
    }
}
