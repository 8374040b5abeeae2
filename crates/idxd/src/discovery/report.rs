//! Reports the devices of this host, what is missing, and how to set it up.

use std::{fmt, fs, path::Path};

use super::{Device, Problem, QueueName, Root, WorkQueue, entries, scan, setup_commands};
use crate::{Kind, cpu::Features};

/// The devices of this host, and the requirements for using them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Instructions of the processor.
    pub cpu: Features,
    /// Whether this process has CAP_SYS_RAWIO. Without it, the kernel allows only write(2) for devices that are not safe
    /// (INTEL-SA-01084).
    pub raw_io: bool,
    /// Devices on the PCI bus, with or without a driver.
    pub hardware: Vec<Hardware>,
    /// Devices of the driver.
    pub devices: Vec<DeviceReport>,
    /// Descriptions of what this host lacks.
    pub missing: Vec<&'static str>,
}

/// A device on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// Its address, `0000:6a:01.0`.
    pub address: String,
    /// Its kind.
    pub kind: Kind,
    /// The processors that have it.
    pub model: &'static str,
}

/// A device, its queues, and the commands that set it up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// Its attributes.
    pub device: Device,
    /// Its queues, in their order.
    pub queues: Vec<QueueReport>,
    /// The commands for root that set up a queue for processes; empty if there is one, even if this process cannot use
    /// it.
    pub setup: Vec<String>,
    /// Queues in use that these commands disable.
    pub disturbed: Vec<QueueName>,
}

/// A work queue, and why it cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueReport {
    /// Its name.
    pub name: QueueName,
    /// Why it cannot be used; `None` if it can.
    pub problem: Option<Problem>,
    /// The commands for root that solve the problem without touching other queues.
    pub remedy: Vec<String>,
}

/// Examines the host. Never fails: what cannot be read counts as missing.
pub fn report(root: &Root) -> Report {
    let cpu = Features::of_host(&root.cpuinfo());
    let hardware = hardware(root);
    let devices: Vec<DeviceReport> = scan(root).into_iter().map(device_report).collect();
    let without_pasid = devices
        .iter()
        .any(|it| it.device.pasid_enabled == Some(false));
    let checks = [
        (
            hardware.is_empty() && devices.is_empty(),
            "no DSA or IAA on the PCI bus: it takes a Xeon of the fourth generation or later, and a virtual machine has to \
             be given the device",
        ),
        (
            !root.devices().is_dir(),
            "the kernel's driver is not loaded: modprobe idxd",
        ),
        (
            !cpu.enqcmd,
            "the processor has no ENQCMD: no shared work queue can be mapped",
        ),
        (
            cpu.enqcmd && !cpu.enqcmd_enabled,
            "the kernel has not enabled ENQCMD: it takes Linux 5.18, and intel_iommu=on,sm_on at its start",
        ),
        (
            !cpu.movdir64b,
            "the processor has no MOVDIR64B: no dedicated work queue can be mapped",
        ),
        (
            without_pasid,
            "perhaps the devices' use of the addresses of processes (pasid_enabled is 0, as it may be on Linux 5.19 to 6.5 \
             anyway): VT-d and PASID have to be on in the firmware, and the kernel has to be started with \
             intel_iommu=on,sm_on",
        ),
    ];
    Report {
        cpu,
        raw_io: raw_io(&root.proc.join("self/status")),
        hardware,
        devices,
        missing: checks
            .into_iter()
            .filter_map(|(is_missing, what)| is_missing.then_some(what))
            .collect(),
    }
}

fn device_report(device: Device) -> DeviceReport {
    let in_use = |queue: &&WorkQueue| queue.clients.is_some_and(|clients| clients > 0);
    let lacks_queue = device.queues.iter().all(|queue| match queue.usable() {
        Ok(_) => false,
        Err(problem) => !problem.is_beyond_setup(queue),
    });
    let setup = if lacks_queue {
        setup_commands(&device)
    } else {
        Vec::new()
    };
    let disturbed = match setup.is_empty() {
        true => Vec::new(),
        false => device
            .queues
            .iter()
            .filter(in_use)
            .map(|queue| queue.name)
            .collect(),
    };
    let queues = device
        .queues
        .iter()
        .map(|queue| queue_report(&device, queue))
        .collect();
    DeviceReport {
        queues,
        setup,
        disturbed,
        device,
    }
}

fn queue_report(device: &Device, queue: &WorkQueue) -> QueueReport {
    let problem = queue.usable().err();
    let remedy = match &problem {
        Some(problem) if !problem.needs_setup(queue) => problem.commands(device, queue),
        _ => Vec::new(),
    };
    QueueReport {
        name: queue.name,
        problem,
        remedy,
    }
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

/// Devices on the PCI bus, by their addresses.
pub fn hardware(root: &Root) -> Vec<Hardware> {
    let bus = root.sys.join("bus/pci/devices");
    let is = |path: &Path, file: &str, wanted: &str| {
        fs::read_to_string(path.join(file)).is_ok_and(|text| text.trim() == wanted)
    };
    let mut found: Vec<Hardware> = entries(&bus)
        .filter(|address| is(&bus.join(address), "vendor", "0x8086"))
        .filter_map(|address| {
            let mut known = HARDWARE.into_iter();
            let (_, kind, model) =
                known.find(|(number, ..)| is(&bus.join(&address), "device", number))?;
            Some(Hardware {
                address,
                kind,
                model,
            })
        })
        .collect();
    found.sort_by(|one, other| one.address.cmp(&other.address));
    found
}

/// Bit 17 of the effective capabilities (`linux/capability.h`).
fn raw_io(status: &Path) -> bool {
    let status = fs::read_to_string(status).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> 17 & 1 == 1)
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            queues,
            setup,
            disturbed,
        } = self;
        write!(f, "{}", device.name)?;
        if let Some(version) = device.version {
            write!(f, ", version {version:#x}")?;
        }
        if let Some(state) = &device.state {
            write!(f, ", {state}")?;
        }
        if let Some(node) = device.numa_node {
            write!(f, ", NUMA node {node}")?;
        }
        match &device.problem {
            Some(problem) => writeln!(f, ": {problem}")?,
            None => writeln!(f)?,
        }
        for (queue, work_queue) in queues.iter().zip(&device.queues) {
            let QueueReport {
                name,
                problem,
                remedy,
            } = queue;
            match problem {
                None => writeln!(f, "  {name} can be used")?,
                Some(problem) => writeln!(f, "  {name} cannot be used: {problem}")?,
            }
            if work_queue.prs_disable == Some(true) {
                writeln!(
                    f,
                    "    it requests no pages (prs_disable): what is not in memory is a fault"
                )?;
            }
            for command in remedy {
                writeln!(f, "    {command}")?;
            }
        }
        if !setup.is_empty() {
            writeln!(f, "  to make a work queue, as root:")?;
        }
        for command in setup {
            writeln!(f, "    {command}")?;
        }
        for name in disturbed {
            writeln!(f, "  this takes {name} away from those who use it")?;
        }
        Ok(())
    }
}
