//! The hardware of this host, and what it lacks for devices to be used.

use std::fs;

use super::{Device, Root, entries};
use crate::{Kind, cpu::has_enqcmd};

/// What the host lacks, as one sentence each. `devices` are those of [`scan`](super::scan).
pub fn missing(root: &Root, devices: &[Device]) -> Vec<&'static str> {
    let bus = pci_devices(root);
    if devices.is_empty() && !bus.iter().any(|(_, id)| identify(id).is_some()) {
        return vec![
            "no DSA or IAA on the PCI bus: it takes a Xeon of the fourth generation or later, and a virtual machine has to \
             be given the device",
        ];
    }
    let checks = [
        (
            !root.devices().is_dir(),
            "the kernel's driver is not loaded: modprobe idxd",
        ),
        (
            !has_enqcmd(&root.proc.join("cpuinfo")),
            "no ENQCMD, so no shared work queue can be mapped: it takes a Xeon of the fourth generation, Linux 5.18, and \
             intel_iommu=on,sm_on at its start",
        ),
        (
            devices
                .iter()
                .any(|device| device.pasid_enabled == Some(false)),
            "perhaps the devices' use of the addresses of processes (pasid_enabled is 0, as it may be on Linux 5.19 to 6.5 \
             anyway): VT-d and PASID have to be on in the firmware, and the kernel has to be started with \
             intel_iommu=on,sm_on",
        ),
    ];
    let missing = checks.into_iter().filter(|(is_missing, _)| *is_missing);
    missing.map(|(_, what)| what).collect()
}

/// The devices' PCI numbers. Source: the kernel's `drivers/dma/idxd/registers.h`.
const HARDWARE: [(&str, Kind, &str); 7] = [
    ("0x0b25", Kind::Dsa, "Sapphire or Emerald Rapids"),
    ("0x11fb", Kind::Dsa, "Granite Rapids-D"),
    ("0x1212", Kind::Dsa, "Diamond Rapids"),
    ("0x0cfe", Kind::Iaa, "Sapphire or Emerald Rapids"),
    ("0x1216", Kind::Iaa, "Diamond Rapids"),
    ("0xb02d", Kind::Iaa, "Panther Lake"),
    ("0xfd2d", Kind::Iaa, "Wildcat Lake"),
];

/// The kind of device with this PCI device id of Intel (as in sysfs, `0x0b25`), and the processors that have it.
pub fn identify(id: &str) -> Option<(Kind, &'static str)> {
    let known = HARDWARE.into_iter().find(|(known, ..)| *known == id);
    known.map(|(_, kind, model)| (kind, model))
}

/// Addresses and ids of all Intel devices on the PCI bus, by address.
pub fn pci_devices(root: &Root) -> Vec<(String, String)> {
    let bus = root.sys.join("bus/pci/devices");
    let mut devices: Vec<_> = entries(&bus)
        .filter_map(|address| {
            let read = |file| fs::read_to_string(bus.join(&address).join(file)).ok();
            let id =
                read("device").filter(|_| read("vendor").is_some_and(|it| it.trim() == "0x8086"));
            Some((address.clone(), id?.trim().to_owned()))
        })
        .collect();
    devices.sort();
    devices
}
