//! `vamoose selftest`: checks that DSA and IAA, modelled or real, do what the offloads rely on.

mod report;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use idxd::{
    Submit,
    discovery::{self, Device, Root, WorkQueue},
    offload::Choice,
    portal::{self, Access, OpenError},
};
use idxd_model::{Config, Model, PortalKind};
use vamoose::{
    report::{print, write_json},
    say,
};

use self::report::{Host, Report, Tested, Untested};

/// Check that DSA and IAA do what offloads expect of them
///
/// Without --hw, the devices are models: this tests the checks and the models. With --hw, the checks run on the
/// work queues of this host; the report lists where they differ from the models, and is written to a file that
/// can be sent to the authors. The checks harm neither the devices nor their other users. The exit code is 0 if
/// all work queues to be checked can be opened, and every answer that the specification promises is as promised.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Check all usable work queues of this host (see vamoose probe)
    #[arg(long)]
    hw: bool,
    /// Check these work queues, as in wq0.1,wq2.0; auto is all usable ones
    #[arg(
        long,
        value_name = "wqX.Y[,wqX.Y]",
        requires = "hw",
        default_value = "auto"
    )]
    path: Choice,
    /// Write the report as JSON to this file; - is standard output, instead of the text [default with --hw: vamoose-selftest.json]
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = Root::default();
    let report = report(options, &root, |queue| {
        let portal = portal::open(queue)?;
        let access = portal.access();
        Ok((Arc::new(portal), access))
    })?;
    let default = options.hw.then_some("vamoose-selftest.json");
    let target = options.json.as_deref().or(default);
    if let Some(target) = target {
        write_json(&report, target)?;
    }
    if target != Some("-") {
        print(&report.text())?;
    }
    if options.hw
        && let Some(target) = target
    {
        say(format_args!(
            "the report is in {target}: please attach it to an issue at {}/issues",
            env!("CARGO_PKG_REPOSITORY")
        ));
    }
    match report.failures.as_slice() {
        [] => Ok(()),
        failures => bail!("not as it must be: {}", failures.join("; ")),
    }
}

/// Most time that a device may take for a descriptor.
const TIMEOUT: Duration = Duration::from_millis(200);

/// An open work queue.
type Opened = (Arc<dyn Submit>, Access);

/// Makes the checks. Work queues of the machine under `root` are opened by `open`. If one cannot be opened, the others are
/// checked all the same.
fn report(
    options: &Options,
    root: &Root,
    open: impl Fn(&WorkQueue) -> Result<Opened, OpenError>,
) -> Result<Report> {
    if !options.hw {
        return Ok(Report::new(models(), Vec::new(), None));
    }
    let devices = discovery::scan(root);
    let (mut tested, mut untested) = (Vec::new(), Vec::new());
    for queue in chosen(&devices, &options.path)? {
        let (why, is_failure) = match (queue.usable(), &options.path) {
            (Err(problem), Choice::Auto) => (problem.to_string(), false),
            _ => match open(queue) {
                Ok((submit, access)) => {
                    let access = match access {
                        Access::Mapped => "mapped",
                        Access::Written => "written",
                    };
                    let name = format!("{}, {access}", queue.name);
                    tested.push(Tested::run(name, Some(access), submit, TIMEOUT));
                    continue;
                }
                Err(error) => (format!("{:#}", anyhow::Error::from(error)), true),
            },
        };
        untested.push(Untested {
            queue: queue.name.to_string(),
            why,
            is_failure,
        });
    }
    if tested.is_empty() && !untested.iter().any(|queue| queue.is_failure) {
        bail!(
            "no work queue of a DSA or an IAA can be used on this host: {}; vamoose probe says why, and \
             docs/accelerators.md describes how to set one up",
            discovery::missing(root, &devices).join("; ")
        );
    }
    // After the checks, which may have changed the queues.
    let host = Some(Host::of(root));
    Ok(Report::new(tested, untested, host))
}

/// The work queues of a choice, usable or not.
fn chosen<'a>(devices: &'a [Device], choice: &Choice) -> Result<Vec<&'a WorkQueue>> {
    let Choice::Named(names) = choice else {
        return Ok(devices.iter().flat_map(|device| &device.queues).collect());
    };
    let queue = |name| {
        let found = discovery::find(devices, name).map(|(_, queue)| queue);
        found.with_context(|| {
            format!("this host has no work queue {name}; vamoose probe shows what it has")
        })
    };
    names.iter().map(queue).collect()
}

/// Checks models of both kinds, as all users meet them.
fn models() -> Vec<Tested> {
    let models = [
        ("DSA model, ENQCMD", Config::dsa(), PortalKind::Enqcmd),
        ("DSA model, write(2)", Config::dsa(), PortalKind::Write),
        ("IAA model, ENQCMD", Config::iaa(), PortalKind::Enqcmd),
        ("IAA model, write(2)", Config::iaa(), PortalKind::Write),
    ];
    let tested = models.map(|(name, config, portal)| {
        let queue = Model::deterministic(&config).queue(0, 0, portal);
        Tested::run(name.to_owned(), None, queue, TIMEOUT)
    });
    tested.into()
}
