//! A guest whose migration is killed, and when the others have its part of a queue.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use idxd::shares::{Share, Weight};

use crate::{guest::table, parameters::Parameters};

/// The argument that makes the program a member of a table, to be killed.
pub(crate) const MEMBER: &str = "--member";

/// What one of `members` has before and after another one is killed, and how long after that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Crash {
    pub(crate) members: usize,
    pub(crate) before: u32,
    pub(crate) after: u32,
    pub(crate) delay: Duration,
}

/// Of so many members, the last one is a process of its own, and dies. The others refresh every 50 ms of virtual time.
pub(crate) fn crash(members: usize) -> Result<Crash> {
    let directory = tempfile::tempdir().context("a directory for the tables of shares")?;
    let entries = Parameters::default().entries;
    let shares: Vec<Share> = (1..members)
        .map(|_| Ok(table(directory.path(), 0, entries)?.join(Weight::NORMAL)?))
        .collect::<Result<_>>()?;
    let mut victim = Command::new(std::env::current_exe()?)
        .arg(MEMBER)
        .arg(directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting another member")?;
    let mut line = String::new();
    let output = victim.stdout.take().context("the member's output")?;
    BufReader::new(output).read_line(&mut line)?;
    ensure!(line == "joined\n", "the other member says `{line}`");

    let tick = Duration::from_millis(50);
    let mut now = Duration::ZERO;
    let mut refresh = |shares: &[Share]| -> Result<u32> {
        now += tick;
        shares.iter().try_for_each(|share| share.refresh(now))?;
        Ok(shares[0].entries())
    };
    refresh(&shares)?;
    let before = refresh(&shares)?;
    victim.kill()?;
    victim.wait()?;
    let mut ticks = 0;
    let after = loop {
        let entries = refresh(&shares)?;
        ticks += 1;
        if entries != before || ticks == 1000 {
            break entries;
        }
    };
    Ok(Crash {
        members,
        before,
        after,
        delay: tick * ticks,
    })
}

/// Joins the table in the directory that is the next argument, and waits for the end.
pub(crate) fn be_a_member(mut arguments: impl Iterator<Item = String>) -> Result<()> {
    let directory = arguments.next().context("which directory?")?;
    let _share =
        table(Path::new(&directory), 0, Parameters::default().entries)?.join(Weight::NORMAL)?;
    println!("joined");
    std::io::stdout().flush()?;
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
