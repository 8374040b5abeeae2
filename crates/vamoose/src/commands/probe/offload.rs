//! DSA and IAA: which work queues this process can use, and what is missing for more.

use idxd::discovery::{self, DeviceReport, QueueReport, Report};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::{Lines, Root, engines::Kind};

/// The work queues, their devices, and what this host lacks.
#[derive(Debug)]
pub(super) struct Offload(Report);

impl Offload {
    pub(super) fn probe(root: &Root) -> Self {
        Self(discovery::report(&root.of_idxd()))
    }

    pub(super) fn describe(&self, lines: &mut Lines) {
        const NAME: &str = "dsa and iaa";
        for device in &self.0.devices {
            for line in device.to_string().lines() {
                lines.put(NAME, line);
            }
        }
        for missing in &self.0.missing {
            lines.put(NAME, format_args!("missing: {missing}"));
        }
    }
}

impl Serialize for Offload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let missing = texts(&self.0.missing);
        json!({
            "missing": missing,
            // Why there are no devices.
            "devices-reason": self.0.devices.is_empty().then(|| missing.join("; ")),
            "devices": self.0.devices.iter().map(device).collect::<Vec<_>>(),
        })
        .serialize(serializer)
    }
}

fn device(report: &DeviceReport) -> Value {
    let device = &report.device;
    json!({
        "name": device.name.to_string(),
        "kind": Kind::from(device.name.kind),
        "state": device.state.as_ref().map(ToString::to_string),
        "numa-node": device.numa_node,
        "problem": device.problem.as_ref().map(ToString::to_string),
        "queues": report.queues.iter().map(queue).collect::<Vec<_>>(),
        // Commands for root that make a work queue where there is none, and the work queues in use that these remove.
        "setup": report.setup,
        "disturbed": texts(&report.disturbed),
    })
}

fn queue(report: &QueueReport) -> Value {
    json!({
        "name": report.name.to_string(),
        "usable": report.problem.is_none(),
        "problem": report.problem.as_ref().map(ToString::to_string),
        // Commands for root that solve the problem.
        "remedy": report.remedy,
    })
}

fn texts<T: ToString>(values: &[T]) -> Vec<String> {
    values.iter().map(ToString::to_string).collect()
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
        assert!(offload.0.devices.is_empty());
        let shown = text(&offload);
        for part in ["no DSA or IAA on the PCI bus", "modprobe idxd"] {
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn an_unconfigured_device_comes_with_its_commands() {
        let (_folder, offload) = dsa0(&[]);
        let json = serde_json::to_value(&offload).unwrap();
        let found = &json["devices"][0];
        assert_eq!(json["devices-reason"], Value::Null);
        assert_eq!(found["name"], "dsa0");
        assert_eq!(found["numa-node"], 1);
        assert_eq!(found["kind"], "dsa");
        let queue = &found["queues"][0];
        assert_eq!(queue["usable"], false);
        assert!(queue["problem"].is_string(), "{found}");
        let shown = text(&offload);
        for part in [
            "accel-config config-wq",
            "accel-config enable-wq dsa0/wq0.0",
        ] {
            assert!(found["setup"].to_string().contains(part), "{found}");
            assert!(shown.contains(part), "{shown}");
        }
    }

    #[test]
    fn a_queue_without_page_requests_is_marked() {
        let (_folder, offload) = dsa0(&[("wq0.0/prs_disable", "1")]);
        assert!(text(&offload).contains("prs_disable"));
    }

    /// A DSA with a work queue that has not been set up, and `more` files.
    fn dsa0(more: &[(&str, &str)]) -> (tempfile::TempDir, Offload) {
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
        .iter()
        .chain(more)
        .map(|(file, text)| (format!("{device}/{file}"), *text))
        .collect();
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(file, text)| (file.as_str(), *text))
            .collect();
        let (folder, root) = fake::root(&files);
        (folder, Offload::probe(&root))
    }
}
