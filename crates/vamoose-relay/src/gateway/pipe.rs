//! Passes connections on as bytes, in both directions: what is none of a migration's.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, Scope},
};

use tracing::Span;
use vamoose_link::{Hangup, Stats, Stream};

use crate::{
    Direction, RelayError,
    main_stream::{Pump, Witness},
};

/// How connections are passed on.
#[derive(Clone, Copy)]
pub(super) struct Pipes<'a> {
    pub(super) stats: &'a Arc<Stats>,
    pub(super) hangup: &'a Hangup,
    pub(super) config: &'a crate::Config,
}

/// Connections that are being passed on.
pub(super) struct Open<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    pipes: Pipes<'env>,
    report: Sender<Result<(), RelayError>>,
    reports: Receiver<Result<(), RelayError>>,
    count: usize,
    error: Option<RelayError>,
}

impl<'scope, 'env> Open<'scope, 'env> {
    pub(super) fn new(scope: &'scope Scope<'scope, 'env>, pipes: Pipes<'env>) -> Self {
        let (report, reports) = channel();
        Self {
            scope,
            pipes,
            report,
            reports,
            count: 0,
            error: None,
        }
    }

    /// Passes a connection on, from the source's side to the destination's.
    pub(super) fn add(&mut self, from: Arc<Stream>, to: Arc<Stream>) {
        self.pipes.hangup.register(&from);
        self.pipes.hangup.register(&to);
        self.count += 1;
        let (pipes, report, span) = (self.pipes, self.report.clone(), Span::current());
        self.scope.spawn(move || {
            let passed = span.in_scope(|| pipes.pass(&from, &to));
            drop((from, to));
            // The receiver may have seen enough and be gone.
            let _ = report.send(passed);
        });
    }

    /// Whether all connections have ended.
    pub(super) fn is_over(&mut self) -> bool {
        for passed in self.reports.try_iter() {
            self.count -= 1;
            if let Err(error) = passed {
                self.error.get_or_insert(error);
            }
        }
        self.count == 0
    }

    /// The first error, if there was one.
    pub(super) fn verdict(self) -> Result<(), RelayError> {
        self.error.map_or(Ok(()), Err)
    }
}

impl Pipes<'_> {
    fn pass(&self, from: &Arc<Stream>, to: &Arc<Stream>) -> Result<(), RelayError> {
        thread::scope(|scope| {
            let one_way = |direction, from: &Arc<Stream>, to: &Arc<Stream>| {
                let passed = self.pump(direction, from, to).run(Unseen);
                if passed.is_err() {
                    from.shut_down();
                    to.shut_down();
                }
                passed
            };
            let back = scope.spawn(move || one_way(Direction::Back, to, from));
            let forward = one_way(Direction::Forward, from, to);
            // A thread that panicked has no error to add.
            forward.and(back.join().unwrap_or(Ok(())))
        })
    }

    fn pump(&self, direction: Direction, from: &Arc<Stream>, to: &Arc<Stream>) -> Pump<'_> {
        Pump {
            direction,
            from: from.clone(),
            to: to.clone(),
            stats: self.stats,
            pacer: None,
            stall_timeout: self.config.stall_timeout,
        }
    }
}

/// Nothing is looked at.
struct Unseen;

impl Witness for Unseen {
    fn received(&mut self, _: &[u8]) {}
}
