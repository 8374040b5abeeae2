//! Passes connections on as bytes, in both directions: what is none of a migration's.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::Scope,
};

use tracing::Span;
use vamoose_link::{Hangup, Stats, Stream};

use crate::{RelayError, main_stream::pass_both_ways};

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
            let stall_timeout = pipes.config.stall_timeout;
            let passed = span.in_scope(|| pass_both_ways(&from, &to, pipes.stats, stall_timeout));
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
