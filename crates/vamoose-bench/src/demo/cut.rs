//! Pulls the cable in the middle of a migration, and plugs it in again.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::middlebox::{Admission, Change, Direction, Flow, Middlebox, Which};
use lab::net::{End, Link, Wire};
use lab::serial::Log;
use serde_json::Value;

use super::screen::note;

/// How long the cable stays pulled: Vamoose gives up connections that are silent for 4 s.
pub(crate) const LASTS: Duration = Duration::from_secs(5);

/// Bytes after which the cable is pulled: about a third of a migration.
const AFTER: u64 = 64 * MIB;
const MIB: u64 = 1 << 20;

/// The cut of the cable.
pub(crate) struct Cut<'a> {
    /// In place of the cable, on loopback: drops everything while it is "pulled".
    proxy: Option<&'a Middlebox>,
    state: State,
}

/// With the bytes sent when the state began.
enum State {
    Begun,
    Plugged(u64),
    Pulled(u64, Instant),
    PluggedAgain([Instant; 2]),
}

impl<'a> Cut<'a> {
    pub(crate) fn new(proxy: Option<&'a Middlebox>) -> Self {
        let state = State::Begun;
        Self { proxy, state }
    }

    /// Pulls or plugs in the cable when it is time. Called at each look at the migration.
    pub(crate) fn look(&mut self, link: &Link) -> Result<()> {
        match self.state {
            State::Begun => self.state = State::Plugged(self.sent(link)?),
            State::Plugged(before) => {
                let sent = self.sent(link)?.saturating_sub(before);
                if sent >= AFTER {
                    self.pull(link).context("pulling the cable")?;
                    self.state = State::Pulled(self.sent(link)?, Instant::now());
                    note(format!(
                        "--- {} MiB have gone over the cable, which is pulled now ---",
                        sent / MIB
                    ));
                }
            }
            State::Pulled(before, at) if at.elapsed() >= LASTS => {
                let crossed = self.sent(link)? - before;
                ensure!(
                    crossed == 0,
                    "{crossed} bytes crossed a cable that was pulled"
                );
                match self.proxy {
                    None => wire(link)?.plug(),
                    Some(proxy) => proxy.admit(Admission::Pass),
                }
                .context("plugging the cable")?;
                self.state = State::PluggedAgain([at, Instant::now()]);
                let lasted = at.elapsed().as_secs_f64();
                note(format!(
                    "--- plugged in again after {lasted:.1} s, in which {crossed} bytes crossed ---"
                ));
            }
            State::Pulled(..) | State::PluggedAgain(_) => {}
        }
        Ok(())
    }

    /// Bytes towards the destination so far.
    fn sent(&self, link: &Link) -> Result<u64> {
        let Some(proxy) = self.proxy else {
            return Ok(wire(link)?.traffic(End::Source)?.sent);
        };
        let connections = proxy.connections().into_iter();
        let passed = connections.map(|it| it.traffic(Direction::ToListener).passed);
        Ok(passed.sum())
    }

    fn pull(&self, link: &Link) -> Result<()> {
        let Some(proxy) = self.proxy else {
            return wire(link)?.pull(End::Source);
        };
        proxy.admit(Admission::Refuse)?;
        proxy.apply(Which::All, Change::Flow(Flow::Drop));
        Ok(())
    }

    /// Shows what the guest did in the meantime, from the source's serial port, and how the migration continued, from its report.
    pub(crate) fn show(&self, source: &Log, report: Option<&Value>) -> Result<()> {
        let span = match self.state {
            State::Begun | State::Plugged(_) => {
                bail!("it ended before {} MiB were sent", AFTER / MIB)
            }
            State::Pulled(..) => bail!("it ended while the cable was pulled"),
            State::PluggedAgain([pulled, plugged]) => pulled..plugged,
        };
        let ticks = source.ticks();
        let ticks = ticks.iter().filter(|tick| span.contains(&tick.at)).count();
        ensure!(
            ticks > 0,
            "the guest stood still while the cable was pulled"
        );
        let link = &report.context("no report")?["link"];
        let reconnects = link["reconnects"]
            .as_u64()
            .context("no reconnects reported")?;
        let cipher = link["tls"].as_str().context("the link was without TLS")?;
        let peer = link["peer"].as_str().context("no peer reported")?;
        ensure!(reconnects > 0, "the migration went on without reconnecting");
        ensure!(link["check"] == true, "the pages were not checked");
        note(format!(
            "while the cable was pulled, the guest ticked {ticks} times at the source\n\
             the migration continued: streams reconnected {reconnects} times, and resumed where they had been cut\n\
             link: {cipher}, peer {peer}; pages and all data sent were checked by CRC-32C"
        ));
        Ok(())
    }
}

fn wire(link: &Link) -> Result<&Wire> {
    link.wires.first().context("a link without a wire")
}
