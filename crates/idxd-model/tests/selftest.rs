//! The conformance checks against models: healthy ones pass, and each misbehaviour is found.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use idxd::{Descriptor, Kind, Limits, Record, RecordImage, Submit, Submitted, opcode};
use idxd_model::{Config, InjectedFault, Model, On, PortalKind, selftest::*};

const PORTALS: [PortalKind; 2] = [PortalKind::Enqcmd, PortalKind::Write];

const TIMEOUT: Duration = Duration::from_millis(200);

fn on(config: &Config, portal: PortalKind, spoil: impl FnOnce(&Model)) -> Vec<Finding> {
    let model = Model::deterministic(config);
    let queue = model.queue(0, 0, portal);
    spoil(&model);
    run(queue, TIMEOUT)
}

fn verdict<'a>(findings: &'a [Finding], name: &str) -> &'a Verdict {
    let finding = findings.iter().find(|finding| finding.check.name == name);
    &finding.unwrap().verdict
}

fn text(findings: &[Finding]) -> Vec<String> {
    let lines = findings.iter();
    lines
        .map(|finding| format!("{}: {}", finding.check.name, finding.verdict))
        .collect()
}

#[test]
fn checks_have_names_of_their_own() {
    let names: BTreeSet<_> = checks().map(|check| check.name).collect();
    assert_eq!(names.len(), checks().count());
}

#[test]
fn a_healthy_model_passes_all_checks() {
    for config in [Config::dsa(), Config::iaa()] {
        for portal in PORTALS {
            let findings = on(&config, portal, |_| {});
            for Finding { check, verdict, .. } in &findings {
                assert!(
                    !matches!(verdict, Verdict::Differs { .. }),
                    "{check:?} by {portal:?} {verdict}"
                );
            }
            let holding = findings
                .iter()
                .filter(|finding| finding.verdict == Verdict::Holds);
            assert!(holding.count() >= 7, "{:#?}", text(&findings));
        }
    }
}

#[test]
fn only_checks_of_missing_operations_are_skipped() {
    let skipped = |findings: &[Finding]| -> Vec<&str> {
        let skipped = findings
            .iter()
            .filter(|finding| matches!(finding.verdict, Verdict::Skipped { .. }));
        skipped.map(|finding| finding.check.name).collect()
    };
    for config in [Config::dsa(), Config::iaa()] {
        let findings = on(&config, PortalKind::Enqcmd, |_| {});
        assert_eq!(skipped(&findings), [""; 0]);
    }
    let findings = on(&Config::dsa(), PortalKind::Write, |_| {});
    let batches = findings
        .iter()
        .map(|finding| finding.check.name)
        .filter(|name| name.starts_with("batch"));
    assert!(skipped(&findings).into_iter().eq(batches));
}

#[test]
fn a_wrong_status_fails_only_the_checks_that_depend_on_it() {
    let compressions = On::opcode(opcode::COMPRESS);
    let findings = on(&Config::iaa(), PortalKind::Enqcmd, |model| {
        model.inject(compressions, 0, u32::MAX, InjectedFault::Status(0x20));
    });
    let failures: Vec<_> = findings
        .iter()
        .filter(|finding| finding.is_failure())
        .map(|finding| finding.check.name)
        .collect();
    assert_eq!(failures, ["fixed-codes", "compress-overflow"]);
    let Verdict::Differs { expected, found } = verdict(&findings, "fixed-codes") else {
        panic!("{:#?}", text(&findings));
    };
    assert_eq!(
        (expected.as_str(), found.as_str()),
        ("success", "0x20, error 0")
    );
    let mut findings = findings.iter();
    let fixed = findings.find(|finding| finding.check.name == "fixed-codes");
    assert_eq!(fixed.unwrap().record.unwrap().status(), 0x20);
}

#[test]
fn silent_corruption_is_a_difference() {
    let findings = on(&Config::iaa(), PortalKind::Enqcmd, |model| {
        let decompressions = On::opcode(opcode::DECOMPRESS);
        model.inject(decompressions, 0, u32::MAX, InjectedFault::Corrupt);
    });
    let mut findings = findings.iter();
    let fixed = findings.find(|finding| finding.check.name == "fixed-codes");
    assert!(fixed.unwrap().is_failure(), "{fixed:#?}");
}

#[test]
fn an_unanswered_descriptor_fails_one_check_and_the_others_continue() {
    let findings = on(&Config::iaa(), PortalKind::Enqcmd, |model| {
        let compressions = On::opcode(opcode::COMPRESS);
        model.inject(compressions, 0, u32::MAX, InjectedFault::Stuck);
    });
    let stuck = verdict(&findings, "fixed-codes");
    assert!(matches!(stuck, Verdict::Differs { found, .. } if found == "no answer"));
    // A drain would wait for what is stuck, and does not come after it.
    assert_eq!(verdict(&findings, "window"), &Verdict::Holds);
    assert_eq!(verdict(&findings, "malformed"), &Verdict::Holds);
}

#[test]
fn a_dead_queue_ends_the_checks() {
    let spoilers: [fn(&Model); 4] = [
        |model| model.inject(On::any(), 0, u32::MAX, InjectedFault::Stuck),
        |model| model.inject(On::any(), 0, u32::MAX, InjectedFault::StuckEngine),
        |model| model.refuse(0, 0, u32::MAX),
        |model| model.reset(0),
    ];
    for config in [Config::dsa(), Config::iaa()] {
        for portal in PORTALS {
            for spoil in spoilers {
                let findings = on(&config, portal, spoil);
                assert!(findings[0].is_failure(), "{:#?}", text(&findings));
                for Finding { check, verdict, .. } in &findings[1..] {
                    assert!(
                        matches!(verdict, Verdict::Skipped { .. }),
                        "{check:?} {verdict}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_queue_that_dies_in_the_middle_ends_the_checks() {
    for times in [1, 10, 40, 80] {
        let findings = on(&Config::dsa(), PortalKind::Enqcmd, |model| {
            model.inject(On::any(), times, u32::MAX, InjectedFault::Stuck);
        });
        let last = findings.last().unwrap();
        assert!(
            matches!(last.verdict, Verdict::Skipped { .. }),
            "{:#?}",
            text(&findings)
        );
    }
}

#[test]
fn all_faults_together_end_in_time() {
    for seed in 0..4 {
        for mut config in [Config::dsa(), Config::iaa()] {
            config.seed = seed;
            config.faults = idxd_model::Faults::everything();
            let findings = on(&config, PortalKind::Enqcmd, |_| {});
            assert!(findings.len() > 8);
        }
    }
}

#[test]
fn a_seed_reproduces_the_findings() {
    let once = || text(&on(&Config::dsa(), PortalKind::Enqcmd, |_| {}));
    assert_eq!(once(), once());
}

/// A device that does what is promised and not more: fewer bytes are completed than could be, addresses of faults are
/// those of pages, and an IAA's record does not say that a fault was on a write.
#[derive(Debug)]
struct Reticent(Arc<dyn Submit>, Mutex<BTreeMap<u64, RecordImage>>);

impl Reticent {
    fn hide(&self, record: &Record) {
        let Some(image) = record.image() else { return };
        let mut hidden = self.1.lock().unwrap();
        if hidden.get(&record.address()) == Some(&image) {
            return;
        }
        let mut words = image.words;
        let is_partial = matches!(image.status() & 0x7f, 0x03 | 0x04);
        if is_partial && self.limits().kind == Kind::Dsa {
            words[0] &= !(0xfff << 32);
        } else if is_partial {
            words[0] &= !0x80;
        }
        if is_partial || image.status() == 0x06 {
            words[1] &= !0xfff;
        }
        let place = std::ptr::with_exposed_provenance_mut::<u64>(
            usize::try_from(record.address()).unwrap(),
        );
        for (index, word) in words.into_iter().enumerate() {
            // SAFETY: the record's own words, which are atomics; the model has written them, and does so once.
            unsafe { AtomicU64::from_ptr(place.add(index)) }.store(word, Ordering::Release);
        }
        hidden.insert(record.address(), RecordImage { words });
    }
}

impl Submit for Reticent {
    fn limits(&self) -> &Limits {
        self.0.limits()
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        // SAFETY: the caller's.
        unsafe { self.0.submit(descriptors) }
    }

    fn now(&self) -> Duration {
        self.0.now()
    }

    fn pause(&self, record: &Record, until: Duration) {
        self.0.pause(record, until);
        self.hide(record);
    }

    fn close(&self) {
        self.0.close();
    }
}

#[test]
fn a_device_that_only_keeps_the_specifications_promises_passes() {
    for config in [Config::dsa(), Config::iaa()] {
        let model = Model::deterministic(&config);
        let queue = Reticent(model.queue(0, 0, PortalKind::Enqcmd), Mutex::default());
        let findings = run(Arc::new(queue), TIMEOUT);
        for Finding { check, verdict, .. } in &findings {
            assert!(
                !matches!(verdict, Verdict::Differs { .. }),
                "{check:?} {verdict}"
            );
        }
    }
}

/// What a run in the gate does for a few seeds, for as many as SELFTEST_SEEDS says (1,000), from SELFTEST_SEED on (0).
#[test]
#[ignore = "takes minutes"]
fn a_thousand_seeds() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse::<u64>().unwrap())
    };
    let first = number("SELFTEST_SEED", 0);
    for seed in first..first + number("SELFTEST_SEEDS", 1000) {
        for mut config in [Config::dsa(), Config::iaa()] {
            config.seed = seed;
            for portal in PORTALS {
                for Finding { check, verdict, .. } in on(&config, portal, |_| {}) {
                    assert!(
                        !matches!(verdict, Verdict::Differs { .. }),
                        "seed {seed}: {check:?} by {portal:?} {verdict}"
                    );
                }
            }
        }
    }
}
