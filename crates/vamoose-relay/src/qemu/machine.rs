//! The machine that a QEMU has for its guest, as far as QMP shows it, and the comparison of two of them.
//!
//! A QEMU that loads a guest reports the first part that it does not have, once most of the memory has been sent, and does not look
//! at the CPU's features at all. QEMU answers each of these questions in less than a millisecond, also while its guest runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vamoose_link::Bytes;

use super::{Qemu, QemuError};

/// What a guest has for a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Machine {
    /// The guest's name; empty if QEMU has none.
    pub(crate) name: String,
    pub(crate) uuid: String,
    machine_type: String,
    ram_bytes: u64,
    cpus: usize,
    cpu_model: String,
    /// Bits by CPUID register; empty if QEMU does not show them.
    cpu_features: BTreeMap<String, u64>,
    has_kvm: bool,
    /// By address, as far as it does not depend on the guest's firmware: those of the root buses.
    pci: BTreeMap<String, PciDevice>,
    /// Number of devices that were added to the machine, by type.
    devices: BTreeMap<String, usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PciDevice {
    /// Vendor and device, such as `1af4:1001`.
    id: String,
    /// For people.
    what: String,
}

/// One fact about both machines. The text is a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// What the fact means for a migration.
    pub fit: Fit,
    text: String,
}

/// What a fact means for a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Both machines are the same.
    Same,
    /// The migration may fail, or the guest may not get along with it.
    MayFail,
    /// The migration would fail.
    Fails,
}

impl Fact {
    /// A part of the text is the peer's.
    pub(super) fn new(fit: Fit, text: &str) -> Self {
        let text = text.replace(char::is_control, "?");
        Self { fit, text }
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Qemu {
    /// The guest's machine. What this QEMU does not know is left out.
    pub(crate) fn machine(&mut self, uuid: &str) -> Result<Machine, QemuError> {
        let of = |path: &str, property: &str| json!({ "path": path, "property": property });
        let [name, kind, memory, kvm, cpus, pci, named, unnamed] = self.qmp.execute_all([
            ("query-name", json!({})),
            ("qom-get", of("/machine", "type")),
            ("query-memory-size-summary", json!({})),
            ("query-kvm", json!({})),
            ("query-cpus-fast", json!({})),
            ("query-pci", json!({})),
            ("qom-list", json!({ "path": "/machine/peripheral" })),
            ("qom-list", json!({ "path": "/machine/peripheral-anon" })),
        ])?;
        let first = cpus[0]["qom-path"].as_str();
        let [cpu_model, features] = match first {
            Some(path) => self.qmp.execute_all([
                ("qom-get", of(path, "type")),
                ("qom-get", of(path, "feature-words")),
            ])?,
            None => [Value::Null, Value::Null],
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of_type = |value: &Value, end| text(value).trim_end_matches(end).to_owned();
        let bytes = |part: &str| memory[part].as_u64().unwrap_or_default();
        let types: BTreeMap<_, _> = list(&named).filter_map(child).collect();
        let mut devices = BTreeMap::new();
        for kind in list(&unnamed).filter_map(child).chain(types.clone()) {
            *devices.entry(kind.1).or_default() += 1;
        }
        Ok(Machine {
            name: text(&name["name"]),
            uuid: uuid.to_owned(),
            machine_type: of_type(&kind, "-machine"),
            ram_bytes: bytes("base-memory").saturating_add(bytes("plugged-memory")),
            cpus: list(&cpus).count(),
            cpu_model: of_type(&cpu_model, "-cpu"),
            cpu_features: list(&features).filter_map(feature_word).collect(),
            has_kvm: kvm["enabled"] == true,
            pci: list(&pci)
                .flat_map(|bus| list(&bus["devices"]))
                .map(|device| pci_device(device, &types))
                .collect(),
            devices,
        })
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Name and type of a device in QOM's tree.
fn child(entry: &Value) -> Option<(String, String)> {
    let kind = entry["type"].as_str()?.strip_prefix("child<")?;
    let kind = kind.strip_suffix('>')?;
    Some((entry["name"].as_str()?.to_owned(), kind.to_owned()))
}

/// A CPUID register with features.
fn feature_word(word: &Value) -> Option<(String, u64)> {
    let bits = word["features"].as_u64().filter(|bits| *bits != 0)?;
    let leaf = word["cpuid-input-eax"].as_u64()?;
    let register = word["cpuid-register"].as_str()?;
    Some(match word["cpuid-input-ecx"].as_u64() {
        Some(sub) => (format!("CPUID {leaf:x}.{sub:x} {register}"), bits),
        None => (format!("CPUID {leaf:x} {register}"), bits),
    })
}

fn pci_device(device: &Value, types: &BTreeMap<String, String>) -> (String, PciDevice) {
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let address = format!(
        "{:02x}:{:02x}.{:x}",
        number(&device["bus"]),
        number(&device["slot"]),
        number(&device["function"])
    );
    let (vendor, id) = (&device["id"]["vendor"], &device["id"]["device"]);
    let id = format!("{:04x}:{:04x}", number(vendor), number(id));
    let name = device["qdev_id"].as_str().unwrap_or_default();
    let what = match (types.get(name), device["class_info"]["desc"].as_str()) {
        (Some(kind), _) => format!("{kind} `{name}`"),
        (None, Some(class)) => format!("{class} ({id})"),
        (None, None) => id.clone(),
    };
    (address, PciDevice { id, what })
}

/// Compares the machine `here` with that at `host`, where it waits under the name `asked_for`.
pub(crate) fn compare(here: &Machine, there: &Machine, host: &str, asked_for: &str) -> Vec<Fact> {
    use Fit::{Fails, MayFail};
    let mut facts = Facts {
        host,
        all: Vec::new(),
    };
    match (here.name.as_str(), there.name.as_str()) {
        ("", _) => {}
        (here, "") if here != asked_for => facts.add("guest", MayFail, here, asked_for),
        (here, "") => facts.add("guest", MayFail, here, here),
        (here, there) => facts.add("guest", Fails, here, there),
    }
    facts.add("uuid", Fails, &here.uuid, &there.uuid);
    let kind = |machine: &Machine| machine.machine_type.clone();
    facts.add("machine type", Fails, &kind(here), &kind(there));
    let ram = |machine: &Machine| Bytes(machine.ram_bytes).to_string();
    facts.add("RAM", Fails, &ram(here), &ram(there));
    let cpus = |machine: &Machine| machine.cpus.to_string();
    facts.add("vCPUs", Fails, &cpus(here), &cpus(there));
    let kvm = |machine: &Machine| if machine.has_kvm { "on" } else { "off" };
    facts.add("KVM", MayFail, kvm(here), kvm(there));
    facts.add("CPU model", MayFail, &here.cpu_model, &there.cpu_model);
    facts.add_features(&here.cpu_features, &there.cpu_features);
    facts.add_pci(&here.pci, &there.pci);
    facts.add_devices(&here.devices, &there.devices);
    facts.all
}

struct Facts<'a> {
    host: &'a str,
    all: Vec<Fact>,
}

impl Facts<'_> {
    /// Adds a fact that has this fit if it differs.
    fn add(&mut self, what: &str, fit: Fit, here: &str, there: &str) {
        let (fit, text) = match here == there {
            true => (Fit::Same, format!("{what}: {here}")),
            false => {
                let host = self.host;
                (fit, format!("{what}: {here} here, {there} at {host}"))
            }
        };
        self.all.push(Fact::new(fit, &text));
    }

    /// The guest may use what its CPU has here. QEMU does not check that.
    fn add_features(&mut self, here: &BTreeMap<String, u64>, there: &BTreeMap<String, u64>) {
        if here.is_empty() || there.is_empty() {
            return;
        }
        let lacks = here.iter().filter_map(|(register, bits)| {
            let lacking = bits & !there.get(register).unwrap_or(&0);
            let bits: Vec<_> = (0..u64::BITS)
                .filter(|bit| lacking >> bit & 1 == 1)
                .map(|bit| bit.to_string())
                .collect();
            (lacking != 0).then(|| format!("{register} bit {}", bits.join("+")))
        });
        let lacks: Vec<_> = lacks.collect();
        match lacks.is_empty() {
            true => self.add("CPU features", Fit::Same, "all there", "all there"),
            false => self.add("CPU features", Fit::MayFail, &lacks.join(", "), "not"),
        }
    }

    fn add_pci(&mut self, here: &BTreeMap<String, PciDevice>, there: &BTreeMap<String, PciDevice>) {
        let before = self.all.len();
        let addresses: BTreeSet<_> = here.keys().chain(there.keys()).collect();
        for address in addresses {
            let (ours, theirs) = (here.get(address), there.get(address));
            let fit = match ours {
                // A device of a failover pair is not there before the guest is.
                Some(ours) if !ours.what.starts_with("vfio") => Fit::Fails,
                _ => Fit::MayFail,
            };
            let what = |device: Option<&PciDevice>| {
                device.map_or_else(|| "none".to_owned(), |device| device.what.clone())
            };
            if ours.map(|device| &device.id) != theirs.map(|device| &device.id) {
                let name = format!("PCI device {address}");
                self.add(&name, fit, &what(ours), &what(theirs));
            }
        }
        if self.all.len() == before {
            let number = here.len().to_string();
            self.add("PCI devices", Fit::Same, &number, &number);
        }
    }

    /// QEMU loads a guest by its devices' addresses, so a missing type is no proof.
    fn add_devices(&mut self, here: &BTreeMap<String, usize>, there: &BTreeMap<String, usize>) {
        let types: BTreeSet<_> = here.keys().chain(there.keys()).collect();
        for kind in types {
            let number = |of: &BTreeMap<String, usize>| of.get(kind).copied().unwrap_or(0);
            let is_told = self
                .all
                .iter()
                .any(|fact| fact.text.contains(kind.as_str()));
            if number(here) != number(there) && !is_told {
                let [here, there] = [here, there].map(|of| number(of).to_string());
                self.add(kind, Fit::MayFail, &here, &there);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let pci = |id: &str, what: &str| PciDevice {
            id: id.to_owned(),
            what: what.to_owned(),
        };
        Machine {
            name: "web1".to_owned(),
            uuid: "1".to_owned(),
            machine_type: "pc-q35-7.2".to_owned(),
            ram_bytes: 512 << 20,
            cpus: 2,
            cpu_model: "EPYC".to_owned(),
            cpu_features: [("CPUID 7.0 EBX".to_owned(), 0b1011)].into(),
            has_kvm: true,
            pci: [
                (
                    "00:01.0".to_owned(),
                    pci("1af4:1000", "virtio-net-pci `nic`"),
                ),
                ("00:02.0".to_owned(), pci("15b3:101e", "vfio-pci `vf`")),
            ]
            .into(),
            devices: [("virtio-net-pci".to_owned(), 1), ("loader".to_owned(), 1)].into(),
        }
    }

    #[test]
    fn equal_machines_have_no_differences() {
        let facts = compare(&machine(), &machine(), "kvm2", "web1");
        assert!(facts.iter().all(|fact| fact.fit == Fit::Same), "{facts:?}");
        assert!(facts.iter().any(|fact| fact.to_string() == "RAM: 512 MiB"));
    }

    #[test]
    fn every_difference_is_one_line_with_its_verdict() {
        use Fit::{Fails, MayFail};
        type Change = fn(&mut Machine);
        let table: [(Change, Fit, &str); 15] = [
            (
                |m| m.name = "web2".into(),
                Fails,
                "guest: web1 here, web2 at kvm2",
            ),
            (|m| m.uuid = "2".into(), Fails, "uuid: 1 here, 2 at kvm2"),
            (
                |m| m.machine_type = "pc-q35-10.0".into(),
                Fails,
                "machine type: pc-q35-7.2 here, pc-q35-10.0 at kvm2",
            ),
            (
                |m| m.ram_bytes = 256 << 20,
                Fails,
                "RAM: 512 MiB here, 256 MiB at kvm2",
            ),
            (
                |m| m.ram_bytes -= 8 << 10,
                Fails,
                "RAM: 512 MiB here, 524280 KiB at kvm2",
            ),
            (|m| m.cpus = 4, Fails, "vCPUs: 2 here, 4 at kvm2"),
            (|m| m.has_kvm = false, MayFail, "KVM: on here, off at kvm2"),
            (
                |m| m.cpu_model = "host".into(),
                MayFail,
                "CPU model: EPYC here, host at kvm2",
            ),
            (
                |m| m.cpu_features = [("CPUID 7.0 EBX".to_owned(), 1)].into(),
                MayFail,
                "CPU features: CPUID 7.0 EBX bit 1+3 here, not at kvm2",
            ),
            (
                |m| drop(m.pci.remove("00:01.0")),
                Fails,
                "PCI device 00:01.0: virtio-net-pci `nic` here, none at kvm2",
            ),
            (
                |m| drop(m.pci.remove("00:02.0")),
                MayFail,
                "PCI device 00:02.0: vfio-pci `vf` here, none at kvm2",
            ),
            (
                |m| {
                    let added = m.pci["00:01.0"].clone();
                    m.pci.insert("00:03.0".to_owned(), added);
                },
                MayFail,
                "PCI device 00:03.0: none here, virtio-net-pci `nic` at kvm2",
            ),
            (
                |m| m.devices.retain(|kind, _| kind != "loader"),
                MayFail,
                "loader: 1 here, 0 at kvm2",
            ),
            (
                |m| m.devices.extend([("nvme".into(), 1)]),
                MayFail,
                "nvme: 0 here, 1 at kvm2",
            ),
            (
                |m| m.machine_type = "\u{1b}[2J".into(),
                Fails,
                "machine type: pc-q35-7.2 here, ?[2J at kvm2",
            ),
        ];
        for (change, fit, line) in table {
            let mut there = machine();
            change(&mut there);
            let facts = compare(&machine(), &there, "kvm2", "web1");
            let differ: Vec<_> = facts.iter().filter(|fact| fact.fit != Fit::Same).collect();
            let expected = Fact {
                fit,
                text: line.to_owned(),
            };
            assert_eq!(differ, [&expected]);
        }
    }

    #[test]
    fn names_are_compared_as_far_as_there_are_any() {
        for (here, there, asked_for, fit) in [
            ("", "", "web2", None),
            ("", "web1", "web2", None),
            ("web1", "", "web1", Some(Fit::Same)),
            ("web1", "", "web2", Some(Fit::MayFail)),
            ("web1", "web1", "web2", Some(Fit::Same)),
            ("web1", "web2", "web2", Some(Fit::Fails)),
        ] {
            let [ours, theirs] = [here, there].map(|name| Machine {
                name: name.to_owned(),
                ..machine()
            });
            let facts = compare(&ours, &theirs, "kvm2", asked_for);
            let found = facts.iter().find(|fact| fact.text.starts_with("guest"));
            assert_eq!(found.map(|fact| fact.fit), fit, "{here}, {there}");
        }
    }

    /// Adding more features is no loss, and other architectures show none.
    #[test]
    fn features_that_the_guest_has_not_seen_do_not_count() {
        let (mut more, mut unknown) = (machine(), machine());
        more.cpu_features.insert("CPUID 1 ECX".to_owned(), 1);
        unknown.cpu_features.clear();
        for there in [more, unknown] {
            let facts = compare(&machine(), &there, "kvm2", "web1");
            assert!(facts.iter().all(|fact| fact.fit == Fit::Same), "{facts:?}");
        }
    }
}
