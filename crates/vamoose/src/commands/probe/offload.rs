//! DSA and IAA: which work queues this process can use, and what is missing for more.

use idxd::discovery::{self, Report};
use serde::Serialize;

use super::{Lines, Root, pci::Kind};

/// The work queues, their devices, and what this host lacks.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Offload {
    enqcmd: bool,
    enqcmd_enabled: bool,
    movdir64b: bool,
    waitpkg: bool,
    /// This process may map the portals of devices that are not safe for processes.
    raw_io: bool,
    missing: Vec<String>,
    devices: Vec<Device>,
    #[serde(skip)]
    report: Report,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Device {
    name: String,
    kind: Kind,
    version: Option<u32>,
    state: Option<String>,
    numa_node: Option<u32>,
    problem: Option<String>,
    queues: Vec<Queue>,
    /// Commands for root that make a work queue where there is none.
    setup: Vec<String>,
    /// Work queues in use that these take away.
    disturbed: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Queue {
    name: String,
    usable: bool,
    problem: Option<String>,
    /// Commands for root that remove the problem.
    remedy: Vec<String>,
}

impl Offload {
    pub(super) fn probe(root: &Root) -> Self {
        let report = discovery::report(&root.of_idxd());
        Self {
            enqcmd: report.cpu.enqcmd,
            enqcmd_enabled: report.cpu.enqcmd_enabled,
            movdir64b: report.cpu.movdir64b,
            waitpkg: report.cpu.waitpkg,
            raw_io: report.raw_io,
            missing: report.missing.iter().map(ToString::to_string).collect(),
            devices: report.devices.iter().map(Device::of).collect(),
            report,
        }
    }

    pub(super) fn describe(&self, lines: &mut Lines) {
        const NAME: &str = "dsa and iaa";
        for device in &self.report.devices {
            for line in device.to_string().lines() {
                lines.put(NAME, line);
            }
        }
        for missing in &self.missing {
            lines.put(NAME, format_args!("missing: {missing}"));
        }
    }
}

impl Device {
    fn of(report: &discovery::DeviceReport) -> Self {
        let device = &report.device;
        Self {
            name: device.name.to_string(),
            kind: device.name.kind.into(),
            version: device.version,
            state: device.state.as_ref().map(ToString::to_string),
            numa_node: device.numa_node,
            problem: device.problem.as_ref().map(ToString::to_string),
            queues: report.queues.iter().map(Queue::of).collect(),
            setup: report.setup.clone(),
            disturbed: report.disturbed.iter().map(ToString::to_string).collect(),
        }
    }
}

impl Queue {
    fn of(report: &discovery::QueueReport) -> Self {
        Self {
            name: report.name.to_string(),
            usable: report.problem.is_none(),
            problem: report.problem.as_ref().map(ToString::to_string),
            remedy: report.remedy.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fake, *};

    fn text(offload: &Offload) -> String {
        let mut lines = Lines::default();
        offload.describe(&mut lines);
        lines.0
    }

    #[test]
    fn a_host_without_devices_says_what_is_missing() {
        let (_folder, root) = fake::root(&[]);
        let offload = Offload::probe(&root);
        assert!(offload.devices.is_empty());
        let shown = text(&offload);
        for part in ["no DSA or IAA on the PCI bus", "modprobe idxd"] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn a_device_that_nobody_has_set_up_comes_with_the_commands() {
        let device = "sys/bus/dsa/devices/dsa0";
        let files: Vec<(String, &str)> = [
            ("version", "0x100"),
            ("state", "disabled"),
            ("numa_node", "1"),
            ("max_groups", "4"),
            ("max_engines", "4"),
            ("max_work_queues", "8"),
            ("max_work_queues_size", "128"),
            ("max_batch_size", "1024"),
            ("max_transfer_size", "2147483648"),
            ("op_cap", "001f03ff"),
            ("pasid_enabled", "1"),
            ("group0.0/engines", ""),
            ("engine0.0/group_id", "-1"),
            ("wq0.0/state", "disabled"),
            ("wq0.0/type", "none"),
            ("wq0.0/mode", "shared"),
            ("wq0.0/size", "0"),
            ("wq0.0/max_transfer_size", "2097152"),
            ("wq0.0/max_batch_size", "32"),
        ]
        .map(|(file, text)| (format!("{device}/{file}"), text))
        .into();
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(file, text)| (file.as_str(), *text))
            .collect();
        let (_folder, root) = fake::root(&files);
        let offload = Offload::probe(&root);
        let found = &offload.devices[0];
        assert_eq!((found.name.as_str(), found.numa_node), ("dsa0", Some(1)));
        assert!(!found.queues[0].usable && found.queues[0].problem.is_some());
        let shown = text(&offload);
        for part in [
            "accel-config config-wq",
            "accel-config enable-wq dsa0/wq0.0",
        ] {
            assert!(
                found.setup.iter().any(|line| line.contains(part)),
                "{found:?}"
            );
            assert!(shown.contains(part), "{shown}");
        }
        let json = serde_json::to_value(&offload).unwrap();
        assert_eq!(json["devices"][0]["kind"], "dsa");
        assert!(json.get("report").is_none());
    }
}
