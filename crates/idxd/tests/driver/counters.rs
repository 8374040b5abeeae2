use super::tree::Tree;
use idxd::{Kind, discovery::*};

const BOTH: [Kind; 2] = [Kind::Dsa, Kind::Iaa];

#[test]
fn faults_on_records_are_counted_by_open_file() {
    let tree = Tree::of(&BOTH);
    for (path, value) in [
        ("dsa0/wq0.0/dsa!wq0.0/file12/pid", "4711\n"),
        ("dsa0/wq0.0/dsa!wq0.0/file12/cr_faults", "3\n"),
        ("dsa0/wq0.0/dsa!wq0.0/file12/cr_fault_failures", "1\n"),
        ("dsa0/wq0.0/dsa!wq0.0/file3/pid", "42\n"),
        (
            "dsa0/wq0.0/dsa!wq0.0/file3/cr_faults",
            "18446744073709551615\n",
        ),
        ("dsa0/wq0.0/dsa!wq0.0/file3/cr_fault_failures", "0\n"),
        // As the documentation writes it.
        ("iax1/wq1.1/iax1!wq1.1/file0/cr_faults", "0\n"),
        // What a broken sysfs might hold.
        ("iax1/wq1.1/iax1!wq1.1/file1/cr_faults", "many\n"),
        ("iax1/wq1.1/iax1!wq1.1/file/cr_faults", "1\n"),
        ("iax1/wq1.1/iax1!wq1.1/uevent", ""),
        ("iax1/wq1.1/iax!wq1.0/file7/cr_faults", "9\n"),
    ] {
        tree.set(path, value);
    }
    let report = report(&tree.root());
    let queue = &report.devices[0].queues[0];
    assert_eq!(
        queue.files,
        [
            OpenFile {
                number: 3,
                pid: Some(42),
                record_faults: Some(u64::MAX),
                record_fault_failures: Some(0),
            },
            OpenFile {
                number: 12,
                pid: Some(4711),
                record_faults: Some(3),
                record_fault_failures: Some(1),
            },
        ]
    );
    assert_eq!(
        (queue.record_faults(), queue.record_fault_failures()),
        (Some(u64::MAX), Some(1))
    );
    let other = &report.devices[1].queues[1];
    assert_eq!(other.files.len(), 2);
    assert_eq!(
        (other.record_faults(), other.record_fault_failures()),
        (Some(0), None)
    );
    let text = report.to_string();
    let line = "open files: 2, faults on their records: 18446744073709551615, records lost: 1";
    assert!(text.contains(line), "{text}");
}

#[test]
fn kernels_that_do_not_count_have_no_counts() {
    let tree = Tree::of(&BOTH);
    // A user without the counters: no shared addresses.
    tree.set("dsa0/wq0.0/dsa!wq0.0/file0/uevent", "");
    let report = report(&tree.root());
    for queue in report.devices.iter().flat_map(|device| &device.queues) {
        assert_eq!(
            (queue.record_faults(), queue.record_fault_failures()),
            (None, None)
        );
    }
    assert!(!report.to_string().contains("records"));
}

#[test]
fn an_event_log_has_entries_of_a_size_where_the_kernel_uses_it() {
    let tree = Tree::of(&BOTH);
    let log = |tree: &Tree| report(&tree.root()).devices[0].event_log;
    assert_eq!(log(&tree), None);
    for (gen_cap, entry_bytes) in [("0x2000", 64), ("0x4000", 128), ("0x6000", 256)] {
        tree.set("dsa0/gen_cap", gen_cap);
        tree.set("dsa0/event_log_size", "64\n");
        let entries = Some(64);
        assert_eq!(
            log(&tree),
            Some(EventLog {
                entry_bytes,
                entries
            })
        );
        tree.remove("dsa0/event_log_size");
        let entries = None;
        assert_eq!(
            log(&tree),
            Some(EventLog {
                entry_bytes,
                entries
            })
        );
    }
    let text = report(&tree.root()).to_string();
    assert!(
        text.contains("event log, which the kernel does not use"),
        "{text}"
    );
}
