//! What encodes and decodes pages in this build, and why the rest does not.

use std::fmt;

use serde::Serialize;

use super::pci::{Device, Kind};

/// A way to do a method's work.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Engine {
    name: &'static str,
    /// QEMU's name of the method.
    method: &'static str,
    present: bool,
    /// Why it is absent, or what it serves.
    reason: String,
}

/// The engines, given the accelerators of this host.
pub(super) fn engines(devices: &[Device]) -> Vec<Engine> {
    let engine = |name, method, present, reason: &str| Engine {
        name,
        method,
        present,
        reason: reason.to_owned(),
    };
    let isal = cfg!(feature = "isal");
    vec![
        engine("copy", "none", true, "pages as they are"),
        engine(
            "isa-l",
            "zlib",
            isal,
            if isal {
                "the levels for which it is the faster one"
            } else {
                "not in this build: cargo feature `isal` is off"
            },
        ),
        engine(
            "zlib-rs",
            "zlib",
            true,
            if isal {
                "the other levels"
            } else {
                "all levels"
            },
        ),
        engine("zstd", "zstd", true, "all levels"),
        accelerator("qat", "qatzip", Kind::Qat, devices),
        accelerator("iaa", "qpl", Kind::Iaa, devices),
    ]
}

fn accelerator(name: &'static str, method: &'static str, kind: Kind, devices: &[Device]) -> Engine {
    let seen = devices.iter().filter(|device| device.kind == kind).count();
    let seen = match seen {
        0 => format!("no {} device seen", kind.name()),
        1 => format!("1 {} device seen", kind.name()),
        more => format!("{more} {} devices seen", kind.name()),
    };
    Engine {
        name,
        method,
        present: false,
        reason: format!("no driver in this build; {seen}"),
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let presence = if self.present { "present" } else { "absent" };
        let (name, method, reason) = (self.name, self.method, &self.reason);
        write!(f, "{name:<8} {method:<7} {presence:<8} {reason}")
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{fake, pci},
        *,
    };

    #[test]
    fn devices_do_not_make_an_engine_without_a_driver() {
        let (_folder, root) = fake::root(&[
            ("sys/bus/pci/devices/0000:6b:00.0/vendor", "0x8086"),
            ("sys/bus/pci/devices/0000:6b:00.0/device", "0x4944"),
            ("sys/bus/pci/devices/0000:70:00.0/vendor", "0x8086"),
            ("sys/bus/pci/devices/0000:70:00.0/device", "0x4946"),
        ]);
        let engines = engines(&pci::devices(&root));
        let reason = |name| {
            let engine = engines.iter().find(|engine| engine.name == name).unwrap();
            assert!(!engine.present);
            engine.reason.as_str()
        };
        assert_eq!(reason("qat"), "no driver in this build; 2 QAT devices seen");
        assert_eq!(reason("iaa"), "no driver in this build; no IAA device seen");
    }
}
