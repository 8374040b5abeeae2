//! The threads of a migration: one for each channel, or for each reader and stream, and two for the main stream.

use std::{
    sync::{Arc, mpsc::Sender},
    thread::Scope,
};

use tracing::Span;
use vamoose_link::{ChannelReader, ChannelWriter, Pacer, Stats, Stream};

use super::supervisor::Report;
use crate::{
    Config, Direction, Placement, channels,
    channels::Out,
    exchange::{ReaderEnd, WriterEnd},
    main_stream::{MainState, Pump, ReturnWitness, Witness},
    syncs::{BehindSyncs, Syncs},
};

/// Starts the threads of a migration, within its span; each reports its end.
pub(super) struct Threads<'scope, 'env> {
    pub(super) scope: &'scope Scope<'scope, 'env>,
    pub(super) report: Sender<Report>,
    pub(super) stats: &'env Arc<Stats>,
    pub(super) syncs: &'env Syncs,
    pub(super) config: &'env Config,
    pub(super) placement: Option<&'env Placement>,
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
        let (config, placement, out) = (self.config, self.placement, self.out(channel));
        self.spawn(move |report| {
            let (from, to) = (&mut reader, &mut writer);
            let passed = match (placement, config.passed) {
                (Some(placement), _) => channels::place(from, to, placement, config, out),
                (None, Some(method)) => channels::pass_encoded(from, to, method, config, out),
                (None, None) => channels::pass_on(from, to, config, out),
            };
            match passed {
                Ok(()) => {
                    writer.finish();
                    report(Report::ChannelRead { channel });
                    report(Report::ChannelWritten);
                }
                Err(error) => report(Report::Failed(error)),
            }
        });
    }

    pub(super) fn forward_main(
        &self,
        from: &Arc<Stream>,
        to: &Arc<Stream>,
        pacer: Option<&'env Pacer>,
        state: &'env MainState,
    ) {
        let Config {
            layout,
            stall_timeout,
            ..
        } = *self.config;
        let behind = BehindSyncs::new(state, self.syncs, self.stats, layout, stall_timeout);
        let pump = self.pump(Direction::Forward, from, to, pacer);
        self.spawn(move |report| report(main_ended(&pump, behind)));
    }

    pub(super) fn return_main(&self, from: &Arc<Stream>, to: &Arc<Stream>, state: &'env MainState) {
        let pump = self.pump(Direction::Back, from, to, None);
        self.spawn(move |report| {
            let witness = ReturnWitness::new(state, |code| report(Report::Shut { code }));
            report(main_ended(&pump, witness));
        });
    }

    fn pump(
        &self,
        direction: Direction,
        from: &Arc<Stream>,
        to: &Arc<Stream>,
        pacer: Option<&'env Pacer>,
    ) -> Pump<'env> {
        Pump {
            direction,
            from: from.clone(),
            to: to.clone(),
            stats: self.stats,
            pacer,
            stall_timeout: self.config.stall_timeout,
        }
    }

    fn out(&self, channel: usize) -> Out<'env> {
        Out {
            channel,
            stats: self.stats,
            syncs: self.syncs,
        }
    }

    /// `work` owns its connections and reports while they are open: what a QEMU does about a
    /// connection that closes must not be reported before the reason for it.
    fn spawn(&self, work: impl FnOnce(&dyn Fn(Report)) + Send + 'scope) {
        let (report, span) = (self.report.clone(), Span::current());
        self.scope.spawn(move || {
            let _span = span.entered();
            work(&|end| {
                // The supervisor may have seen enough and be gone.
                let _ = report.send(end);
            });
        });
    }
}

fn main_ended(pump: &Pump<'_>, witness: impl Witness) -> Report {
    match pump.run(witness) {
        Ok(()) => Report::MainEnded(pump.direction),
        Err(error) => Report::Failed(error),
    }
}
