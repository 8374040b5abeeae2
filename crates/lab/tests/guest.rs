//! Proves that the test guest does what it says: that it dirties memory at the rate asked for, and notices corruption.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lab::guest::{Guest, Image, Load};
use lab::qemu;
use lab::ram::{self, Mismatch, PAGE};

const LIMIT: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

#[test]
fn dirties_memory_at_its_rate() -> Result<()> {
    let load = Load {
        fill: 96,
        hot: 64,
        rate: 2000,
    };
    let Some(mut guest) = start(&load)? else {
        return Ok(());
    };
    let dir = tempfile::tempdir_in("/dev/shm")?;
    let before = dir.path().join("before");
    guest.qemu.qmp.stop()?;
    fs::copy(guest.qemu.ram(), &before)?;
    guest.qemu.qmp.cont()?;
    guest.wait_ticks(20, LIMIT)?;
    guest.qemu.qmp.stop()?;
    let Err(Mismatch::Pages { different, .. }) = ram::compare(&before, guest.qemu.ram()) else {
        bail!("no page was dirtied");
    };
    // 2 s at 2000 pages/s, and some of the kernel's own. A busy machine may delay the writer, never hurry it.
    ensure!((1000..6000).contains(&different), "{different} pages");
    Ok(())
}

#[test]
fn notices_corruption() -> Result<()> {
    let Some(mut guest) = start(&Load {
        fill: 64,
        hot: 16,
        rate: 50,
    })?
    else {
        return Ok(());
    };
    guest.qemu.qmp.stop()?;
    // Hot pages that have not been rewritten yet end in counters from this one on, and nothing else in the guest does.
    const UNCHANGED: u64 = 1 << 40;
    let bytes = fs::read(guest.qemu.ram())?;
    let is_hot = |page: &[u8]| {
        let (words, _) = page.as_chunks::<8>();
        let last = words.last().map(|word| u64::from_le_bytes(*word));
        last.is_some_and(|last| (UNCHANGED..UNCHANGED + 4096).contains(&last))
    };
    let pages = bytes.chunks(PAGE).enumerate();
    let hot: Vec<_> = pages
        .filter(|(_, page)| is_hot(page))
        .map(|(number, _)| number)
        .collect();
    ensure!(hot.len() > 2000, "only {} hot pages", hot.len());
    let file = File::options().write(true).open(guest.qemu.ram())?;
    for number in hot {
        let at = number * PAGE + 100;
        file.write_all_at(&[bytes[at] ^ 1], at as u64)?;
    }
    guest.qemu.qmp.cont()?;
    let error = guest
        .wait_rounds(10, LIMIT)
        .err()
        .context("corruption went unnoticed")?;
    ensure!(
        format!("{error:#}").contains("corrupt hot page"),
        "{error:#}"
    );
    Ok(())
}

fn start(load: &Load) -> Result<Option<Guest>> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(None);
    };
    let Some(image) = Image::build_or_skip(16)? else {
        return Ok(None);
    };
    let guest = Guest::start(&image.machine(&binary, 256 * MIB, load))?;
    guest.wait_ready(LIMIT)?;
    Ok(Some(guest))
}
