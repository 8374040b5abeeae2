//! Capabilities of QEMUs that others have switched on.

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
};
use serde_json::{Value, json};

use crate::common::{Host, LIMIT, MIB};

struct Scene {
    host: Host,
    source: Qemu,
    destination: Qemu,
}

impl Scene {
    fn new(binary: &Binary) -> Result<Self> {
        let host = Host::start(&[])?;
        let source = Builder::bare(binary, 4 * MIB).content(Fill::Mixed, 1);
        let source = source.start()?;
        let destination = Builder::bare(binary, 4 * MIB).incoming().start()?;
        host.knows("vm", &destination)?;
        Ok(Self {
            host,
            source,
            destination,
        })
    }
}

fn all() -> Result<Vec<Binary>> {
    let mut found = Vec::new();
    for (major, minor) in qemu::VERSIONS {
        found.extend(qemu::find_or_skip(major, minor)?);
    }
    Ok(found)
}

fn capabilities(qemu: &mut Qemu) -> Result<Value> {
    qemu.qmp.execute("query-migrate-capabilities", json!({}))
}

/// They belong together: QEMU refuses to switch the first one off alone.
#[test]
fn postcopy_and_its_preemption_are_switched_off_and_put_back() -> Result<()> {
    for binary in all()? {
        let mut scene = Scene::new(&binary)?;
        let postcopy = [("postcopy-ram", true), ("postcopy-preempt", true)];
        for qemu in [&mut scene.source, &mut scene.destination] {
            qemu.qmp.set_capabilities(&postcopy)?;
        }
        let before = capabilities(&mut scene.source)?;
        let migration = scene.host.migrate(&scene.source, "vm", &[])?;
        let moved = migration.finish(LIMIT)?.success();
        moved.with_context(|| binary.version.to_string())?;
        ram::compare(scene.source.ram(), scene.destination.ram())?;
        ensure!(
            capabilities(&mut scene.source)? == before,
            "{}",
            binary.version
        );
    }
    Ok(())
}

/// Else the guest's memory would not arrive, at whichever end it is on.
#[test]
fn memory_that_is_not_to_be_sent_is_refused() -> Result<()> {
    for binary in all()? {
        for at_source in [true, false] {
            let mut scene = Scene::new(&binary)?;
            let qemu = match at_source {
                true => &mut scene.source,
                false => &mut scene.destination,
            };
            qemu.qmp.set_capabilities(&[("x-ignore-shared", true)])?;
            let migration = scene.host.migrate(&scene.source, "vm", &[])?;
            let ended = migration.finish(LIMIT)?;
            let ended = ended.failure("the migration capability `x-ignore-shared` is on: ")?;
            ended.failure(" here.")?;
        }
    }
    Ok(())
}

#[test]
fn a_mode_that_is_no_live_migration_is_refused() -> Result<()> {
    for binary in all()?.iter().filter(|it| it.version.major >= 9) {
        let mut scene = Scene::new(binary)?;
        let reboot = json!({ "mode": "cpr-reboot" });
        scene.source.qmp.set_parameters(reboot)?;
        let migration = scene.host.migrate(&scene.source, "vm", &[])?;
        let ended = migration.finish(LIMIT)?;
        ended.failure("the parameter `mode` is `cpr-reboot`")?;
    }
    Ok(())
}
