//! Accelerators on the PCI bus, by their ids.

use std::{fmt, fs};

use idxd::discovery;
use serde::Serialize;

use super::{Root, read};

/// An accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Device {
    /// Domain, bus, device and function.
    address: String,
    pub(super) kind: Kind,
    model: &'static str,
    vendor: String,
    device: String,
    /// Nothing on hosts without NUMA.
    pub(super) numa_node: Option<u32>,
    /// The kernel's driver that has it.
    driver: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    Qat,
    Dsa,
    Iaa,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Qat => "QAT",
            Self::Dsa => "DSA",
            Self::Iaa => "IAA",
        }
    }
}

impl From<idxd::Kind> for Kind {
    fn from(kind: idxd::Kind) -> Self {
        match kind {
            idxd::Kind::Dsa => Self::Dsa,
            idxd::Kind::Iaa => Self::Iaa,
        }
    }
}

const INTEL: u32 = 0x8086;

/// Device ids of QAT; idxd knows those of DSA and IAA.
const KNOWN: [(u32, &str); 8] = [
    (0x4940, "4xxx"),
    (0x4941, "4xxx (virtual function)"),
    (0x4942, "401xx"),
    (0x4943, "401xx (virtual function)"),
    (0x4944, "402xx"),
    (0x4945, "402xx (virtual function)"),
    (0x4946, "420xx"),
    (0x4947, "420xx (virtual function)"),
];

/// The accelerators of this host.
pub(super) fn devices(root: &Root) -> Vec<Device> {
    let offload = discovery::hardware(&root.of_idxd());
    root.list("sys/bus/pci/devices")
        .into_iter()
        .filter_map(|(address, folder)| {
            let vendor = read(&folder.join("vendor"))?;
            let device = read(&folder.join("device"))?;
            if hex(&vendor)? != INTEL {
                return None;
            }
            let id = hex(&device)?;
            let (kind, model) = match offload.iter().find(|known| known.address == address) {
                Some(known) => (known.kind.into(), known.model),
                None => {
                    let (_, model) = KNOWN.into_iter().find(|(known, _)| *known == id)?;
                    (Kind::Qat, model)
                }
            };
            Some(Device {
                address,
                kind,
                model,
                vendor,
                device,
                // -1 means that there is none.
                numa_node: read(&folder.join("numa_node")).and_then(|node| node.parse().ok()),
                driver: fs::read_link(folder.join("driver"))
                    .ok()
                    .and_then(|driver| Some(driver.file_name()?.to_string_lossy().into_owned())),
            })
        })
        .collect()
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, model, address) = (self.kind.name(), self.model, &self.address);
        write!(f, "{kind} {model} at {address}")?;
        if let Some(node) = self.numa_node {
            write!(f, ", node {node}")?;
        }
        match &self.driver {
            Some(driver) => write!(f, ", driver {driver}"),
            None => write!(f, ", no driver bound"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fake, *};

    #[test]
    fn accelerators_are_told_from_the_rest() {
        let (_folder, root) = fake::root(&[
            ("sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:00:01.0/device", "0x1237\n"),
            ("sys/bus/pci/devices/0000:6d:00.0/vendor", "0x1af4\n"),
            ("sys/bus/pci/devices/0000:6d:00.0/device", "0x4940\n"),
            ("sys/bus/pci/devices/0000:6b:00.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:6b:00.0/device", "0x4940\n"),
            ("sys/bus/pci/devices/0000:6b:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0000:6a:02.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:6a:02.0/device", "0x0cfe\n"),
            ("sys/bus/pci/devices/0000:6a:02.0/numa_node", "-1\n"),
            ("sys/bus/pci/drivers/4xxx/bind", ""),
            // Files that a hostile or broken sysfs might hold.
            ("sys/bus/pci/devices/0000:ff:00.0/vendor", "Intel\n"),
            ("sys/bus/pci/devices/0000:ff:00.0/device", "\n"),
        ]);
        std::os::unix::fs::symlink(
            "../../drivers/4xxx",
            root.path("sys/bus/pci/devices/0000:6b:00.0/driver"),
        )
        .unwrap();
        let found: Vec<_> = devices(&root).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "IAA Sapphire or Emerald Rapids at 0000:6a:02.0, no driver bound",
                "QAT 4xxx at 0000:6b:00.0, node 1, driver 4xxx",
            ]
        );
    }

    #[test]
    fn no_bus_is_no_device() {
        let (_folder, root) = fake::root(&[]);
        assert_eq!(devices(&root), []);
    }
}
