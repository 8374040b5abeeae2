//! `vamoose selftest`: whether DSA and IAA, modelled or real, do what the offloads expect of them.

mod host;
mod report;
#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
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
    /// With --hw: write the report to this file [default: vamoose-selftest.json]
    #[arg(long, value_name = "FILE", requires = "hw")]
    out: Option<PathBuf>,
    /// With --hw: also run checks that leave a trace in the device's error register
    #[arg(long, requires = "hw")]
    hazards: bool,
    /// Random seed of the models
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Milliseconds that a device may take per descriptor
    #[arg(long, default_value_t = 200, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    patience: u64,
    /// Write a JSON object to this file; - is standard output, instead of the text
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
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
    let path = options.out.as_deref().unwrap_or(Path::new(DEFAULT_OUT));
    if options.hw {
        write(&report, path).with_context(|| format!("--out {}", path.display()))?;
    }
    print(&report, options.json.as_deref())?;
    if options.hw {
        notice(&format!(
            "the report is in {}: please attach it to an issue at {}/issues\n",
            path.display(),
            env!("CARGO_PKG_REPOSITORY")
        ));
    }
    let failures = report.failures();
    if failures.is_empty() {
        return Ok(());
    }
    bail!("not as it must be: {}", failures.join("; "))
}

/// Makes the checks. Work queues of the machine under `root` are opened by `open`.
fn report(
    options: &Options,
    root: &Root,
    open: impl Fn(&WorkQueue) -> Result<Opened, OpenError>,
) -> Result<Report> {
    let mut report = Report {
        hardware: options.hw,
        seed: options.seed,
        modelled: models(options),
        ..Report::default()
    };
    if options.hw {
        hardware(&mut report, options, root, open)?;
        // After the checks: what they did to the queues is seen as well.
        report.host = Some(Host::of(root));
    } else {
        report.tested = std::mem::take(&mut report.modelled);
    }
    Ok(report)
}

/// An open work queue.
type Opened = (Arc<dyn Submit>, Access);

/// Where the report goes unless an option names another file.
const DEFAULT_OUT: &str = "vamoose-selftest.json";

fn write(report: &Report, path: &Path) -> Result<()> {
    let text =
        serde_json::to_string_pretty(&report.json()).context("cannot write the result as JSON")?;
    fs::write(path, text + "\n")?;
    Ok(())
}

fn print(report: &Report, json: Option<&Path>) -> Result<()> {
    let text = match json {
        Some(path) if path == Path::new("-") => {
            serde_json::to_string_pretty(&report.json())
                .context("cannot write the result as JSON")?
                + "\n"
        }
        Some(path) => {
            write(report, path).with_context(|| format!("--json {}", path.display()))?;
            report.text()
        }
        None => report.text(),
    };
    match io::stdout().write_all(text.as_bytes()) {
        // `| head` has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Says something beside the result, which may be JSON. Where that cannot be read any more, it is not needed.
fn notice(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// The checks against models of both kinds, as all their users meet them.
fn models(options: &Options) -> Vec<Tested> {
    let unsafe_v1 = true;
    let mut blocking = Config::dsa();
    if let Some(limits) = blocking.limits_mut(0, 0) {
        limits.block_on_fault = true;
    }
    [
        ("DSA model, ENQCMD", Config::dsa(), PortalKind::Enqcmd),
        (
            "DSA model, write(2)",
            Config::dsa(),
            PortalKind::Write { unsafe_v1 },
        ),
        (
            "DSA model that blocks on faults",
            blocking,
            PortalKind::Enqcmd,
        ),
        ("IAA model, ENQCMD", Config::iaa(), PortalKind::Enqcmd),
        (
            "IAA model, write(2)",
            Config::iaa(),
            PortalKind::Write { unsafe_v1 },
        ),
    ]
    .into_iter()
    .map(|(name, mut config, portal)| {
        config.seed = options.seed;
        let model = Model::deterministic(&config);
        // There are no other users.
        tested(
            name.to_owned(),
            None,
            model.queue(0, 0, portal),
            options,
            true,
        )
    })
    .collect()
}

/// The checks against the work queues of the machine under `root`. One that cannot be opened does not keep others from
/// being checked.
fn hardware(
    report: &mut Report,
    options: &Options,
    root: &Root,
    open: impl Fn(&WorkQueue) -> Result<Opened, OpenError>,
) -> Result<()> {
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
    if options.path.is_none() {
        report
            .untested
            .extend(unusable().map(|(queue, why)| Untested {
                queue,
                why,
                is_failure: false,
            }));
    }
    for queue in chosen {
        match open(queue) {
            Ok((submit, access)) => {
                let access = match access {
                    Access::Mapped => "mapped",
                    Access::Written => "written",
                };
                let name = format!("{}, {access}", queue.name);
                let tested = tested(name, Some(access), submit, options, options.hazards);
                report.tested.push(tested);
            }
            Err(error) => report.untested.push(Untested {
                queue: queue.name.to_string(),
                why: format!("{:#}", anyhow::Error::from(error)),
                is_failure: true,
            }),
        }
    }
    Ok(())
}

fn tested(
    queue: String,
    portal: Option<&'static str>,
    submit: Arc<dyn Submit>,
    options: &Options,
    hazards: bool,
) -> Tested {
    let kind = submit.limits().kind;
    let options = selftest::Options {
        timeout: Duration::from_millis(options.patience),
        hazards,
    };
    Tested {
        queue,
        portal,
        kind,
        findings: selftest::run(submit, &options),
    }
}
