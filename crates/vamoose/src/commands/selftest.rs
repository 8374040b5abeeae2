//! `vamoose selftest`: checks that DSA and IAA, modelled or real, do what the offloads rely on.

mod host;
mod report;
#[cfg(test)]
mod tests;

use std::{
    io::{self, Write as _},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use idxd::{
    Submit,
    discovery::{self, QueueName, Root, WorkQueue},
    portal::{self, Access, OpenError},
};
use idxd_model::{Config, Model, PortalKind, selftest};
use vamoose::{report::write_json, say};

use self::{
    host::Host,
    report::{Report, Tested, Untested},
};

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
    /// Check these work queues only
    #[arg(long, value_name = "wqX.Y[,wqX.Y]", requires = "hw", value_parser = queues)]
    path: Option<Queues>,
    /// Random seed of the models
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Milliseconds that a device may take per descriptor
    #[arg(long, default_value_t = 200, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    patience: u64,
    /// Write the report as JSON to this file; - is standard output, instead of the text [default with --hw: vamoose-selftest.json]
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

/// Names of work queues.
#[derive(Clone, Debug)]
struct Queues(Vec<QueueName>);

fn queues(text: &str) -> Result<Queues, discovery::NameError> {
    QueueName::list(text).map(Queues)
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = Root::default();
    let report = report(options, &root, |queue| {
        let portal = portal::open(queue, &root)?;
        let access = portal.access();
        Ok((Arc::new(portal), access))
    })?;
    let default = options.hw.then_some("vamoose-selftest.json");
    let target = options.json.as_deref().or(default);
    if let Some(target) = target {
        write_json(&report, target)?;
    }
    if target != Some("-") {
        match io::stdout().write_all(report.text().as_bytes()) {
            // `| head` has read enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            result => result.context("cannot write to standard output")?,
        }
    }
    if let Some(target) = target.filter(|_| options.hw) {
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

/// Makes the checks. Work queues of the machine under `root` are opened by `open`.
fn report(
    options: &Options,
    root: &Root,
    open: impl Fn(&WorkQueue) -> Result<Opened, OpenError>,
) -> Result<Report> {
    let models = models(options);
    if !options.hw {
        return Ok(Report::new(options.seed, models, Vec::new(), None));
    }
    let (tested, untested) = hardware(options, root, open)?;
    // After the checks, which may have changed the queues.
    let hardware = (models, Host::of(root));
    Ok(Report::new(options.seed, tested, untested, Some(hardware)))
}

/// An open work queue.
type Opened = (Arc<dyn Submit>, Access);

/// The checks against models of both kinds, as all their users meet them.
fn models(options: &Options) -> Vec<Tested> {
    let models = [
        ("DSA model, ENQCMD", Config::dsa(), PortalKind::Enqcmd),
        ("DSA model, write(2)", Config::dsa(), PortalKind::Write),
        ("IAA model, ENQCMD", Config::iaa(), PortalKind::Enqcmd),
        ("IAA model, write(2)", Config::iaa(), PortalKind::Write),
    ];
    let tested = models.map(|(name, mut config, portal)| {
        config.seed = options.seed;
        let queue = Model::deterministic(&config).queue(0, 0, portal);
        tested(name.to_owned(), None, queue, options)
    });
    tested.into()
}

/// The checks against the work queues of the machine under `root`. One that cannot be opened does not keep others from
/// being checked.
fn hardware(
    options: &Options,
    root: &Root,
    open: impl Fn(&WorkQueue) -> Result<Opened, OpenError>,
) -> Result<(Vec<Tested>, Vec<Untested>)> {
    let devices = discovery::scan(root);
    let all = || devices.iter().flat_map(|device| &device.queues);
    let unusable = || {
        all().filter_map(|queue| Some((queue.name.to_string(), queue.usable().err()?.to_string())))
    };
    let chosen: Vec<_> = match &options.path {
        None => all().filter(|queue| queue.usable().is_ok()).collect(),
        Some(Queues(names)) => names
            .iter()
            .map(|name| {
                let found = discovery::find(&devices, name);
                let (_, queue) = found.with_context(|| {
                    format!("this host has no work queue {name}; vamoose probe shows what it has")
                })?;
                Ok(queue)
            })
            .collect::<Result<_>>()?,
    };
    if chosen.is_empty() {
        let found = discovery::report(root);
        let mut why: Vec<String> = found.missing.iter().map(ToString::to_string).collect();
        why.extend(unusable().map(|(queue, why)| format!("{queue} cannot be used: {why}")));
        bail!(
            "no work queue of a DSA or an IAA can be used on this host: {}; vamoose probe shows how to set one up",
            why.join("; ")
        );
    }
    let mut not_tested: Vec<Untested> = Vec::new();
    if options.path.is_none() {
        not_tested.extend(unusable().map(|(queue, why)| Untested {
            queue,
            why,
            is_failure: false,
        }));
    }
    let mut done = Vec::new();
    for queue in chosen {
        match open(queue) {
            Ok((submit, access)) => {
                let access = match access {
                    Access::Mapped => "mapped",
                    Access::Written => "written",
                };
                let name = format!("{}, {access}", queue.name);
                done.push(tested(name, Some(access), submit, options));
            }
            Err(error) => not_tested.push(Untested {
                queue: queue.name.to_string(),
                why: format!("{:#}", anyhow::Error::from(error)),
                is_failure: true,
            }),
        }
    }
    Ok((done, not_tested))
}

fn tested(
    queue: String,
    portal: Option<&'static str>,
    submit: Arc<dyn Submit>,
    options: &Options,
) -> Tested {
    let kind = submit.limits().kind;
    let findings = selftest::run(submit, Duration::from_millis(options.patience));
    Tested::new(queue, portal, kind, &findings)
}
