//! The threads of a migration: one for each channel, or for each reader and stream, and two for the main stream.

use std::{
    sync::{Arc, mpsc::Sender},
    thread::Scope,
};

use tracing::Span;
use vamoose_link::{ChannelReader, ChannelWriter, Pacer, Stats, Stream};

use super::supervisor::Report;
use crate::{
    Config, Direction, Milestone, channels,
    channels::OutgoingChannel,
    exchange::{ReaderEnd, WriterEnd},
    main_stream::{MainState, Pump, ReturnWitness, Witness},
    syncs::{BehindSyncs, Syncs},
};

/// Starts the threads of a migration, within its span. Each thread reports its end.
pub(super) struct Threads<'scope, 'env> {
    pub(super) scope: &'scope Scope<'scope, 'env>,
    pub(super) report: Sender<Report>,
    pub(super) stats: &'env Arc<Stats>,
    pub(super) syncs: &'env Syncs,
    pub(super) config: &'env Config,
}

impl<'scope, 'env> Threads<'scope, 'env> {
    pub(super) fn read(&self, channel: usize, mut reader: ChannelReader, end: ReaderEnd) {
        let zero_pages = self.config.zero_pages;
        self.spawn(move |report| {
            let read = channels::read(channel, &mut reader, &end, zero_pages);
            report(read.map_or_else(Report::Failed, |()| Report::ChannelRead { channel }));
        });
    }

    pub(super) fn write(&self, channel: usize, mut writer: ChannelWriter, end: WriterEnd) {
        let out = self.out(channel);
        self.spawn(
            move |report| match channels::write(&mut writer, &end, out) {
                Ok(()) => {
                    writer.finish();
                    report(Report::ChannelWritten);
                }
                Err(error) => report(Report::Failed(error)),
            },
        );
    }

    pub(super) fn pass_on(
        &self,
        channel: usize,
        mut reader: ChannelReader,
        mut writer: ChannelWriter,
    ) {
        let (config, out) = (self.config, self.out(channel));
        self.spawn(
            move |report| match channels::pass_on(&mut reader, &mut writer, config, out) {
                Ok(()) => {
                    writer.finish();
                    report(Report::ChannelRead { channel });
                    report(Report::ChannelWritten);
                }
                Err(error) => report(Report::Failed(error)),
            },
        );
    }

    pub(super) fn forward_main(
        &self,
        from: &Arc<Stream>,
        to: &Arc<Stream>,
        pacer: &'env Pacer,
        state: &'env MainState,
        reached: &'env (dyn Fn(Milestone) + Sync),
    ) {
        let mut behind = BehindSyncs::new(state, self.syncs, self.stats, self.config, reached);
        let pump = Pump::new(Direction::Forward, from, to, self.stats, Some(pacer));
        self.spawn(move |report| report(main_ended(pump, &mut behind)));
    }

    pub(super) fn return_main(&self, from: &Arc<Stream>, to: &Arc<Stream>, state: &'env MainState) {
        let pump = Pump::new(Direction::Back, from, to, self.stats, None);
        let (near, far, stats) = (to.clone(), from.clone(), self.stats);
        self.spawn(move |report| {
            let shut = |code| report(Report::Shut { code });
            let mut witness = ReturnWitness::new(state, [&*near, &*far], stats, shut);
            report(main_ended(pump, &mut witness));
        });
    }

    fn out(&self, channel: usize) -> OutgoingChannel<'env> {
        OutgoingChannel {
            channel,
            stats: self.stats,
            syncs: self.syncs,
        }
    }

    /// `work` owns its connections, and reports while they are open: the reason must be reported before the consequences of a
    /// closed connection.
    fn spawn(&self, work: impl FnOnce(&dyn Fn(Report)) + Send + 'scope) {
        let (report, span) = (self.report.clone(), Span::current());
        self.scope.spawn(move || {
            let _span = span.entered();
            work(&|end| {
                // The supervisor may have returned already.
                let _ = report.send(end);
            });
        });
    }
}

fn main_ended(pump: Pump<'_>, witness: &mut impl Witness) -> Report {
    let direction = pump.direction;
    let ended = pump.run(witness);
    ended.map_or_else(Report::Failed, |()| Report::MainEnded(direction))
}
