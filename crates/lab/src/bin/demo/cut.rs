//! The cable is pulled in the middle of a migration, and plugged again.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::guest::Guest;
use lab::process::Process;
use serde_json::Value;

use crate::network::Cable;
use crate::screen::note;

/// For how long the cable is pulled. Longer than TCP or QEMU would hide: Vamoose gives connections up that are silent for 4 s.
pub(crate) const LASTS: Duration = Duration::from_secs(5);

/// When so much has gone to the destination; about a third of a migration.
const AFTER: u64 = 128 * MIB;
const MIB: u64 = 1 << 20;

/// How often what has been sent is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// While `migrate` runs.
pub(crate) fn pull_and_plug(cable: &Cable<'_>, migrate: &Process, source: &Guest) -> Result<()> {
    let before = cable.sent()?;
    let sent = loop {
        let sent = cable.sent()?.saturating_sub(before);
        if sent >= AFTER {
            break sent;
        }
        let has_ended = migrate.wait(LOOK);
        ensure!(!has_ended, "it ended before {} MiB were sent", AFTER / MIB);
    };
    cable.pull().context("pulling the cable")?;
    let pulled = Instant::now();
    note(format!(
        "--- {} MiB have gone over the cable, and now it is pulled ---",
        sent / MIB
    ));
    let at_the_cut = cable.sent()?;
    ensure!(!migrate.wait(LASTS), "it ended while the cable was pulled");
    let crossed = cable.sent()? - at_the_cut;
    cable.plug().context("plugging the cable")?;
    let ticks = source.log().ticks();
    let meanwhile = ticks.iter().filter(|tick| tick.at >= pulled).count();
    note(format!(
        "--- plugged again after {:.1} s: {crossed} bytes crossed meanwhile, and the guest ticked {meanwhile} times at the source ---",
        pulled.elapsed().as_secs_f64()
    ));
    ensure!(crossed == 0, "the cable was not pulled");
    ensure!(
        meanwhile > 0,
        "the guest stood still while the cable was pulled"
    );
    Ok(())
}

/// What the report says of the link of a migration that was cut.
pub(crate) fn show(link: &Value) -> Result<()> {
    let reconnects = link["reconnects"]
        .as_u64()
        .context("no reconnects reported")?;
    let cipher = link["tls"].as_str().context("the link was without TLS")?;
    let peer = link["peer"].as_str().context("no peer reported")?;
    ensure!(reconnects > 0, "the migration went on without reconnecting");
    ensure!(link["check"] == true, "the pages were not checked");
    note(format!(
        "the migration went on: {reconnects} times a stream reconnected, and went on from where it had been cut\n\
         link: {cipher}, peer {peer}; pages and all that was sent were checked by CRC-32C"
    ));
    Ok(())
}
