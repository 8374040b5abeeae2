//! Every method between two relays, over one channel and over four: of a guest that does not run, and
//! of a Linux guest that writes its memory all the time. The whole memory is compared each time.

use crate::common::{
    LIMIT, MIB, bare_pair, expect_equal, incoming, listen_address, set_up, vamoose,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::{Guest, Image, Load},
    qemu::{self, Binary, Qemu},
    vamoose::Vamoose,
};
use serde_json::{Value, json};

/// Method, level.
type Way = (&'static str, &'static str);

/// Every method, and every engine of it that its level chooses.
const WAYS: &[Way] = &[
    ("none", ""),
    ("zlib", "1"),
    ("zlib", "6"),
    ("zstd", "1"),
    ("lz4", "1"),
    ("lz4", "8"),
    ("zstd-frames", "1"),
    ("qpl", "0"),
    ("qpl", "1"),
    ("qatzip", "1"),
    ("qatzip", "4"),
];

/// Two relays between the QEMUs.
struct Pair {
    near: Vamoose,
    far: Vamoose,
}

impl Pair {
    fn start(
        source: &mut Qemu,
        destination: &mut Qemu,
        way: Way,
        channels: u8,
        more: &[&str],
    ) -> Result<Self> {
        let (method, level) = way;
        set_up(destination, channels, "none")?;
        let connect = incoming(destination, false)?;
        let (far, between) = Vamoose::relay(
            vamoose(),
            "tcp:127.0.0.1:0",
            &connect,
            &["--json", "-", "--method", "none"],
        )?;
        let listen = listen_address(source, "out", false);
        let mut options = vec!["--method", method, "--json", "-"];
        if !level.is_empty() {
            options.extend(["--level", level]);
        }
        options.extend(more);
        let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
        set_up(source, channels, "none")?;
        source.qmp.migrate(&address)?;
        Ok(Self { near, far })
    }

    /// Waits for the end, compares, and returns the reports of both relays.
    fn expect_equal(self, source: &mut Qemu, destination: &mut Qemu) -> Result<[Value; 2]> {
        let Self { near, far } = self;
        expect_equal(source, destination, &[&near, &far])?;
        let report = |relay: Vamoose| -> Result<Value> {
            let ended = relay.finish(LIMIT)?.success()?;
            Ok(serde_json::from_str(&ended.stdout)?)
        };
        Ok([report(near)?, report(far)?])
    }
}

#[test]
fn a_guest_that_stands_still() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for way in WAYS {
        for channels in [1, 4] {
            let context = || format!("{way:?}, {channels} channels");
            still(&binary, *way, channels).with_context(context)?;
        }
    }
    Ok(())
}

fn still(binary: &Binary, way: Way, channels: u8) -> Result<()> {
    let (mut source, mut destination) = bare_pair(binary, binary, 16 * MIB)?;
    let pair = Pair::start(&mut source, &mut destination, way, channels, &[])?;
    let [near, far] = pair.expect_equal(&mut source, &mut destination)?;
    ensure!(near["method"] == way.0, "{near}");
    let number = |report: &Value, key: &str| report[key].as_u64().unwrap_or(0);
    ensure!(
        way.0 == "none" || number(&near, "wire-bytes") < number(&near, "page-bytes"),
        "{near}"
    );
    ensure!(number(&near, "fallbacks") == 0, "{near}");
    ensure!(
        number(&far, "page-bytes") == number(&near, "page-bytes"),
        "{near} {far}"
    );
    Ok(())
}

/// One guest, which goes from QEMU to QEMU: once by every way, over one channel and over four in turn.
#[test]
fn a_guest_that_writes_all_the_time() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some(image) = Image::build_or_skip(16)? else {
        return Ok(());
    };
    let load = Load {
        fill: 96,
        hot: 16,
        // Less than the slowest encoder does of it on a busy machine.
        rate: 500,
    };
    let machine = image.machine(&binary, 256 * MIB, &load);
    let mut guest = Guest::start(&machine)?;
    guest.wait_ready(LIMIT)?;
    guest.wait_ticks(3, LIMIT)?;
    for (way, channels) in WAYS.iter().zip([1, 4].into_iter().cycle()) {
        let context = || format!("{way:?}, {channels} channels");
        let mut next = Guest::start(&machine.clone().incoming().paused())?;
        running(&mut guest, &mut next, *way, channels).with_context(context)?;
        next.qemu.qmp.cont()?;
        next.wait_ticks(1, LIMIT).with_context(context)?;
        guest.finish()?;
        guest = next;
    }
    // It checks its own checksums all the time, and would have stopped with a word about it.
    guest.wait_rounds(2, LIMIT)?;
    guest.finish()?;
    Ok(())
}

fn running(source: &mut Guest, destination: &mut Guest, way: Way, channels: u8) -> Result<()> {
    source
        .qemu
        .qmp
        .set_parameters(json!({ "downtime-limit": 100 }))?;
    let bandwidth = ["--max-bandwidth", "80M"];
    let pair = Pair::start(
        &mut source.qemu,
        &mut destination.qemu,
        way,
        channels,
        &bandwidth,
    )?;
    pair.expect_equal(&mut source.qemu, &mut destination.qemu)?;
    Ok(())
}

/// Who looks for zero pages may be the relay.
#[test]
fn zero_pages_are_found_by_the_relay() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut zero_pages = Vec::new();
    for (by_source, by_relay) in [("multifd", "none"), ("none", "cpu"), ("none", "none")] {
        let (mut source, mut destination) = bare_pair(&binary, &binary, 16 * MIB)?;
        source
            .qmp
            .set_parameters(json!({ "zero-page-detection": by_source }))?;
        let detection = ["--zero-page-detection", by_relay];
        let way = ("lz4", "1");
        let pair = Pair::start(&mut source, &mut destination, way, 2, &detection)?;
        let [near, _] = pair.expect_equal(&mut source, &mut destination)?;
        zero_pages.push(near["zero-pages"].as_u64().unwrap_or(0));
    }
    ensure!(
        zero_pages[0] > 0 && zero_pages[1] == zero_pages[0] && zero_pages[2] == 0,
        "{zero_pages:?}"
    );
    Ok(())
}
