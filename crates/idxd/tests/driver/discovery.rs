use std::{
    fs, io,
    num::NonZeroU32,
    os::unix::{ffi::OsStringExt, fs::symlink},
};

use proptest::prelude::*;

use super::tree::Tree;
use idxd::{discovery::*, *};

const BOTH: [Kind; 2] = [Kind::Dsa, Kind::Iaa];

fn queue(tree: &Tree, name: &str) -> WorkQueue {
    let devices = scan(&tree.root());
    find(&devices, &name.parse().unwrap()).unwrap().1.clone()
}

fn problem(tree: &Tree, name: &str) -> Problem {
    queue(tree, name).usable().unwrap_err()
}

/// All queues of the tree but `name` can be used.
fn others_are_usable(tree: &Tree, name: &str) {
    let name: QueueName = name.parse().unwrap();
    for queue in scan(&tree.root())
        .iter()
        .flat_map(|device| &device.queues)
        .filter(|queue| !queue.name.is(&name))
    {
        queue.usable().unwrap();
    }
}

#[test]
fn a_scan_finds_all_devices_and_queues() {
    for count in 1..=8 {
        let kinds: Vec<Kind> = BOTH.into_iter().cycle().take(count).collect();
        let tree = Tree::of(&kinds);
        let devices = scan(&tree.root());
        let found: Vec<Kind> = devices.iter().map(|device| device.name.kind).collect();
        assert_eq!(found, kinds);
        for device in &devices {
            assert_eq!((&device.problem, device.queues.len()), (&None, 3));
            for queue in &device.queues {
                queue.usable().unwrap();
            }
        }
    }
}

#[test]
fn limits_are_those_of_the_queue() {
    let tree = Tree::of(&BOTH);
    let dsa = queue(&tree, "dsa0/wq0.0");
    let operations = Operations([0x1_003f_03ff, 0, 0, 0]);
    let wanted = Limits {
        kind: Kind::Dsa,
        size: 16,
        threshold: 12,
        max_batch: NonZeroU32::new(32),
        max_transfer: 2 << 20,
        operations,
        version: 0x100,
        capabilities: Capabilities::FIRST_DSA,
    };
    assert_eq!(dsa.usable(), Ok(&wanted));
    let iaa = queue(&tree, "iax1/wq1.0");
    let limits = iaa.usable().unwrap();
    assert_eq!((limits.kind, limits.max_batch), (Kind::Iaa, None));
    assert!(limits.operations.has(opcode::DECOMPRESS) && limits.operations.has(opcode::COMPRESS));
}

#[test]
fn limits_stay_within_the_devices() {
    let tree = Tree::of(&BOTH);
    tree.set("dsa0/wq0.0/max_batch_size", "4096");
    tree.set("dsa0/wq0.0/max_transfer_size", "18446744073709551615");
    tree.set("dsa0/wq0.0/threshold", "4294967295");
    tree.set("dsa0/wq0.1/max_batch_size", "1");
    tree.set("dsa0/wq0.1/op_config", "bf067f");
    let limits = queue(&tree, "wq0.0").usable().cloned().unwrap();
    assert_eq!(
        (limits.max_batch, limits.max_transfer),
        (NonZeroU32::new(1024), 1 << 31)
    );
    assert_eq!(limits.threshold, 16);
    let limits = queue(&tree, "wq0.1").usable().cloned().unwrap();
    assert_eq!(
        (limits.max_batch, limits.operations),
        (None, Operations([0xbf_067f, 0, 0, 0]))
    );
}

#[test]
fn every_problem_is_named_and_affects_no_other_queue() {
    let cases: [(&str, &str, Problem); 11] = [
        (
            "state",
            "disabled",
            Problem::QueueState("disabled".to_owned()),
        ),
        ("state", "locked", Problem::QueueState("locked".to_owned())),
        ("type", "kernel", Problem::Type("kernel".to_owned())),
        ("type", "none", Problem::Type("none".to_owned())),
        (
            "driver_name",
            "dmaengine",
            Problem::Driver("dmaengine".to_owned()),
        ),
        (
            "size",
            "4294967296",
            Problem::Garbled {
                attribute: "size",
                value: "4294967296".to_owned(),
            },
        ),
        (
            "size",
            "0",
            Problem::Garbled {
                attribute: "size",
                value: "0".to_owned(),
            },
        ),
        (
            "size",
            "",
            Problem::Garbled {
                attribute: "size",
                value: String::new(),
            },
        ),
        ("mode", "dedicated", Problem::Mode("dedicated".to_owned())),
        (
            "max_transfer_size",
            "-1",
            Problem::Garbled {
                attribute: "max_transfer_size",
                value: "-1".to_owned(),
            },
        ),
        (
            "op_config",
            "yes",
            Problem::Garbled {
                attribute: "op_config",
                value: "yes".to_owned(),
            },
        ),
    ];
    for (attribute, value, wanted) in cases {
        let tree = Tree::of(&BOTH);
        tree.set(&format!("dsa0/wq0.0/{attribute}"), value);
        assert_eq!(problem(&tree, "wq0.0"), wanted);
        others_are_usable(&tree, "wq0.0");
    }
}

#[test]
fn malformed_optional_attributes_are_ignored() {
    let tree = Tree::of(&BOTH);
    tree.set("dsa0/wq0.0/cdev_minor", "none");
    tree.set("dsa0/wq0.0/priority", "99999999999999999999");
    tree.set("dsa0/gen_cap", "0xwhat");
    let devices = scan(&tree.root());
    let limits = devices[0].queues[0].usable().unwrap();
    assert_eq!(limits.capabilities, Capabilities(0));
}

#[test]
fn problems_of_a_device_affect_only_its_queues() {
    let cases = [
        (
            "state",
            "disabled",
            Problem::DeviceState("disabled".to_owned()),
        ),
        ("state", "halted", Problem::DeviceState("halted".to_owned())),
        (
            "version",
            "one",
            Problem::Garbled {
                attribute: "version",
                value: "one".to_owned(),
            },
        ),
    ];
    for (attribute, value, wanted) in cases {
        let tree = Tree::of(&BOTH);
        tree.set(&format!("dsa0/{attribute}"), value);
        assert_eq!(problem(&tree, "wq0.0"), wanted);
        assert!(queue(&tree, "wq1.0").usable().is_ok());
    }
}

#[test]
fn a_queue_that_may_report_success_for_a_lost_write_is_refused() {
    let tree = Tree::of(&BOTH);
    for name in ["dsa0/wq0.0", "iax1/wq1.0"] {
        tree.set(&format!("{name}/ats_disable"), "0");
        assert!(queue(&tree, name).usable().is_ok());
        tree.set(&format!("{name}/ats_disable"), "1");
        assert_eq!(queue(&tree, name).usable(), Err(Problem::AtsDisabled));
    }
    let text = Problem::AtsDisabled.to_string();
    assert!(text.contains("ats_disable is 1: set it to 0"), "{text}");
}

#[test]
fn a_queue_without_page_requests_is_usable() {
    let tree = Tree::of(&BOTH);
    tree.set("dsa0/wq0.0/prs_disable", "1");
    let found = queue(&tree, "wq0.0");
    assert!(found.prs_disabled && found.usable().is_ok());
    assert!(!queue(&tree, "wq0.1").prs_disabled);
}

/// Whether the host lacks something whose description contains `text`.
fn lacks(root: &Root, text: &str) -> bool {
    let missing = missing(root, &scan(root));
    missing.iter().any(|what| what.contains(text))
}

#[test]
fn pasid_enabled_0_does_not_make_a_queue_unusable() {
    let tree = Tree::of(&BOTH);
    tree.set("dsa0/pasid_enabled", "0");
    assert!(queue(&tree, "wq0.0").usable().is_ok());
    assert!(lacks(&tree.root(), "perhaps"));
}

#[test]
fn optional_attributes_may_be_missing() {
    let tree = Tree::of(&BOTH);
    for attribute in [
        "max_batch_size",
        "op_config",
        "driver_name",
        "cdev_minor",
        "block_on_fault",
        "priority",
    ] {
        tree.remove(&format!("dsa0/wq0.0/{attribute}"));
    }
    for attribute in ["pasid_enabled", "gen_cap", "numa_node", "max_batch_size"] {
        tree.remove(&format!("dsa0/{attribute}"));
    }
    let queue = queue(&tree, "wq0.0");
    let limits = queue.usable().unwrap();
    assert_eq!(
        (limits.max_batch, limits.operations.has(opcode::MEMMOVE)),
        (None, true)
    );
}

#[test]
fn missing_required_attributes_are_problems() {
    for attribute in ["state", "type", "mode", "size", "max_transfer_size"] {
        let tree = Tree::of(&BOTH);
        tree.remove(&format!("iax1/wq1.1/{attribute}"));
        assert_eq!(problem(&tree, "wq1.1"), Problem::Missing { attribute });
        others_are_usable(&tree, "wq1.1");
    }
}

#[test]
fn a_scan_survives_malformed_trees() {
    let tree = Tree::of(&BOTH);
    // A queue that goes between listing and reading looks like a link to nowhere.
    symlink("nowhere", tree.path("dsa0/wq0.5")).unwrap();
    tree.set("dsa0/wq0.6", "a file");
    tree.set("dsa0/wq0.x/state", "enabled");
    tree.set("dsa0/wq0.07/state", "enabled");
    tree.set("dsa0/wq9.0/state", "enabled");
    tree.set("dsa7", "a file");
    tree.set("dsa01/state", "enabled");
    tree.set("dsa0/wq0.0/name", [0xff, 0xfe]);
    tree.remove("dsa0/wq0.1/size");
    fs::create_dir(tree.path("dsa0/wq0.1/size")).unwrap();
    let strange = std::ffi::OsString::from_vec(b"dsa\xff".to_vec());
    fs::create_dir(tree.root().sys.join("bus/dsa/devices").join(strange)).unwrap();

    let devices = scan(&tree.root());
    let names: Vec<String> = devices
        .iter()
        .map(|device| device.name.to_string())
        .collect();
    assert_eq!(names, ["dsa0", "iax1", "dsa7"]);
    let not_a_directory = io::ErrorKind::NotADirectory;
    assert_eq!(
        devices[2].problem,
        Some(Problem::Unreadable {
            attribute: "version",
            kind: not_a_directory
        })
    );
    assert!(devices[2].queues.is_empty());
    let numbers: Vec<u32> = devices[0]
        .queues
        .iter()
        .map(|queue| queue.name.queue)
        .collect();
    assert_eq!(numbers, [0, 1, 2, 5, 6]);
    assert!(devices[0].queues[0].usable().is_ok());
    let is_a_directory = io::ErrorKind::IsADirectory;
    assert_eq!(
        problem(&tree, "wq0.1"),
        Problem::Unreadable {
            attribute: "size",
            kind: is_a_directory
        }
    );
    assert_eq!(
        problem(&tree, "wq0.5"),
        Problem::Missing { attribute: "state" }
    );
    assert_eq!(
        problem(&tree, "wq0.6"),
        Problem::Unreadable {
            attribute: "state",
            kind: not_a_directory
        }
    );
}

#[test]
fn the_character_device_has_to_be_there_and_right() {
    let tree = Tree::of(&BOTH);
    let node = tree.file("dev/dsa/wq0.0");
    // 1:5 in the place of 1:3.
    tree.link("dsa/wq0.0", "/dev/zero");
    assert_eq!(problem(&tree, "wq0.0"), Problem::OtherNode(node.clone()));
    fs::remove_file(&node).unwrap();
    let by_number = tree.file("dev/char/1:3");
    assert_eq!(
        problem(&tree, "wq0.0"),
        Problem::NoNode(vec![node.clone(), by_number])
    );
    tree.link("char/1:3", "/dev/null");
    assert!(queue(&tree, "wq0.0").usable().is_ok());
    fs::write(&node, "").unwrap();
    assert_eq!(problem(&tree, "wq0.0"), Problem::OtherNode(node.clone()));
    tree.link("dsa/wq0.0", "wq0.0");
    assert!(matches!(problem(&tree, "wq0.0"), Problem::Node { path, .. } if path == node));
    others_are_usable(&tree, "wq0.0");
}

#[test]
fn a_host_without_sysfs_has_no_devices() {
    let directory = tempfile::tempdir().unwrap();
    let root = Root::under(directory.path());
    assert!(scan(&root).is_empty());
    // Without a device, no driver is missing.
    assert!(lacks(&root, "PCI bus") && !lacks(&root, "modprobe idxd"));
}

#[test]
fn a_scan_of_this_machine_succeeds() {
    let root = Root::default();
    for device in scan(&root) {
        assert!(device.to_string().starts_with(&device.name.to_string()));
    }
    missing(&root, &[]);
}

#[test]
fn hardware_without_its_driver_is_seen() {
    let directory = tempfile::tempdir().unwrap();
    let root = Root::under(directory.path());
    for (address, vendor, device) in [
        ("0000:6a:01.0", "0x8086", "0x0b25"),
        ("0000:6a:02.0", "0x8086", "0x0cfe"),
        ("0000:6a:03.0", "0x8086", "0xfd2d"),
        ("0000:00:00.0", "0x1234", "0x0b25"),
    ] {
        let path = root.sys.join("bus/pci/devices").join(address);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("vendor"), format!("{vendor}\n")).unwrap();
        fs::write(path.join("device"), format!("{device}\n")).unwrap();
    }
    let found = pci_devices(&root);
    assert_eq!(found[0].0, "0000:6a:01.0");
    let kinds: Vec<_> = found
        .iter()
        .map(|(_, id)| identify(id).unwrap().0)
        .collect();
    assert_eq!(kinds, [Kind::Dsa, Kind::Iaa, Kind::Iaa]);
    assert!(lacks(&root, "modprobe idxd") && !lacks(&root, "PCI bus"));
}

#[test]
fn devices_are_printed_with_their_queues() {
    let tree = Tree::of(&BOTH);
    tree.set("dsa0/wq0.1/state", "disabled");
    tree.set("dsa0/wq0.2/mode", "dedicated");
    for queue in 0..3 {
        tree.set(&format!("iax1/wq1.{queue}/type"), "none");
    }
    tree.set("iax1/wq1.1/prs_disable", "1");
    let wanted = "\
dsa0, version 0x100, enabled, NUMA node 0
  dsa0/wq0.0 can be used
  dsa0/wq0.1 cannot be used: it is disabled; it has to be enabled
  dsa0/wq0.2 cannot be used: its mode is dedicated; it has to be shared
iax1, version 0x100, enabled, NUMA node 0
  iax1/wq1.0 cannot be used: its type is none; it has to be user
  iax1/wq1.1 cannot be used: its type is none; it has to be user; without page requests (prs_disable), a missing page is a fault
  iax1/wq1.2 cannot be used: its type is none; it has to be user";
    let devices: Vec<String> = scan(&tree.root()).iter().map(Device::to_string).collect();
    assert_eq!(devices.join("\n"), wanted);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_text_of_an_attribute_breaks_anything(
        attribute in prop::sample::select(vec![
            "dsa0/version", "dsa0/state", "dsa0/numa_node", "dsa0/op_cap", "dsa0/gen_cap", "dsa0/max_batch_size",
            "dsa0/max_transfer_size", "dsa0/pasid_enabled", "dsa0/wq0.0/mode", "dsa0/wq0.0/size",
            "dsa0/wq0.0/threshold", "dsa0/wq0.0/type", "dsa0/wq0.0/op_config", "dsa0/wq0.0/max_batch_size",
            "dsa0/wq0.0/block_on_fault", "dsa0/wq0.0/cdev_minor", "dsa0/wq0.0/group_id", "dsa0/wq0.0/ats_disable",
        ]),
        text in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..80),
            "-?[0-9]{1,30}\n?".prop_map(String::into_bytes),
            "(0x)?[0-9a-f]{1,40}(,[0-9a-f]{0,20}){0,12}".prop_map(String::into_bytes),
        ],
    ) {
        let tree = Tree::of(&BOTH);
        tree.set(attribute, text);
        let devices = scan(&tree.root());
        let other = devices.iter().filter(|device| device.name.kind == Kind::Iaa);
        prop_assert!(other.flat_map(|device| &device.queues).any(|queue| queue.usable().is_ok()));
        for queue in devices.iter().flat_map(|device| &device.queues) {
            // What can be used has something to use.
            if let Ok(limits) = queue.usable() {
                prop_assert!(limits.size > 0 && limits.threshold <= limits.size, "{limits:?}");
            }
        }
    }
}
