//! The folder of cases is up to date, and the implementations that this repository knows pass.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

#[path = "../examples/multifd-cases/cases/mod.rs"]
mod cases;

use std::path::PathBuf;

use multifd_conformance::{
    Case, Driver, Exclusions, Expect, Request, Role, Task, Verdict, Work, decode, fits, run, table,
};

fn all_cases() -> Vec<Case> {
    Case::load_all(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cases")).unwrap()
}

/// What did not pass of a driver without exclusions.
fn failures(driver: &Driver, cases: &[Case]) -> Vec<(String, Verdict)> {
    let outcomes = run(driver, cases, &[], 4).unwrap();
    let outcomes = outcomes
        .into_iter()
        .map(|outcome| (outcome.case, outcome.verdict));
    outcomes
        .filter(|(_, verdict)| *verdict != Verdict::Passed)
        .collect()
}

fn program(name: &str, arguments: &[&str]) -> Driver {
    let tests = std::env::current_exe().unwrap();
    let program = tests
        .ancestors()
        .nth(2)
        .unwrap()
        .join("examples")
        .join(name);
    let arguments = arguments.iter().map(Into::into).collect();
    assert!(
        program.exists(),
        "cargo build -p multifd-conformance --examples"
    );
    Driver { program, arguments }
}

#[test]
fn the_folder_has_what_generate_writes() {
    let mut there = all_cases();
    there.retain(|case| case.kind() != cases::RECORDED);
    let mut made = cases::all();
    made.sort_by(|a, b| a.name.cmp(&b.name));
    for (there, made) in there.iter().zip(&made) {
        assert!(
            there == made,
            "{} differs: cargo run -p multifd-conformance --example multifd-cases generate",
            made.name
        );
    }
    assert_eq!(
        there.len(),
        made.len(),
        "cargo run -p multifd-conformance --example multifd-cases generate"
    );
}

#[test]
fn the_suites_own_decoder_passes() {
    for case in all_cases() {
        let (Task::Decode { expect, .. }, Work::Decode(streams)) =
            (&case.task, Request::of(&case).unwrap().work)
        else {
            continue;
        };
        let decoded = decode(Role::Decoder, &case.method, &case.blocks, &streams);
        match expect {
            Expect::Refused => assert!(decoded.is_err(), "{}", case.name),
            Expect::Accepted(pages) => {
                let memory = case.memory(pages).unwrap();
                assert!(
                    decoded.is_ok_and(|decoded| decoded == memory),
                    "{}",
                    case.name
                );
            }
        }
    }
}

/// Vamoose and each stock QEMU pass all cases that are not excluded, and docs/results/conformance.md has the counts.
#[test]
fn implementations_pass_as_the_results_say() {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let exclusions = std::fs::read_to_string(manifest.join("exclusions.json")).unwrap();
    let mut exclusions: Exclusions = serde_json::from_str(&exclusions).unwrap();
    let cases = all_cases();
    let mut drivers = vec![("Vamoose".to_owned(), program("multifd-vamoose", &[]))];
    for (major, minor) in lab::qemu::VERSIONS {
        if lab::qemu::find_or_skip(major, minor).unwrap().is_some() {
            let version = format!("{major}.{minor}");
            let driver = program("multifd-qemu", &[&version]);
            drivers.push((format!("QEMU {version}"), driver));
        }
    }
    let complete = drivers.len() == 1 + lab::qemu::VERSIONS.len();
    let results: Vec<_> = drivers
        .into_iter()
        .map(|(name, driver)| {
            let excluded = exclusions.remove(&name).unwrap_or_default();
            // QEMUs that refuse a stream are waited for.
            let mut outcomes = run(&driver, &cases, &excluded, 16).unwrap();
            // On a busy host an answer may come later than a driver waits for it: once more, alone.
            for outcome in &mut outcomes {
                if let Verdict::Failed(why) = &outcome.verdict {
                    eprintln!("{name}: {}: {why}: trying again", outcome.case);
                    let again = cases.iter().filter(|case| case.name == outcome.case);
                    let again: Vec<_> = again.cloned().collect();
                    outcome.verdict = run(&driver, &again, &[], 1).unwrap().remove(0).verdict;
                }
            }
            (name, outcomes)
        })
        .collect();
    let all = results
        .iter()
        .flat_map(|(name, outcomes)| outcomes.iter().map(move |it| (name, it)));
    let failed: Vec<_> = all
        .filter(|it| matches!(it.1.verdict, Verdict::Failed(_)))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    if !complete {
        return;
    }
    assert!(
        exclusions.is_empty(),
        "no such implementations: {:?}",
        exclusions.keys()
    );
    let page = manifest.join("../../docs/results/conformance.md");
    let text = std::fs::read_to_string(&page).unwrap();
    let (before, found) = text.split_once("## By kind\n\n").unwrap();
    let expected = table(&results);
    if std::env::var_os("CONFORMANCE_WRITE").is_some() {
        std::fs::write(&page, format!("{before}## By kind\n\n{expected}")).unwrap();
    } else {
        assert!(
            found == expected,
            "run this test with CONFORMANCE_WRITE=1:\n{expected}"
        );
    }
}

/// A decoder that is broken on purpose is found, each time by the case that is about the rule.
#[test]
fn every_fault_of_a_decoder_is_found() {
    let mut decoding = all_cases();
    decoding.retain(|case| case.kind() != "encode");
    for (fault, case) in [
        ("zero-pages-first", "page/zero-among-normal"),
        ("zero-pages-stay", "page/zero-again"),
        ("little-endian", "header/offset-little-endian"),
        ("page-count", "size/normal-1-zero-0"),
        ("no-barrier", "sync/first-channel-last"),
        ("last-group", "size/normal-127-zero-0"),
        ("sync-pages", "sync/with-pages"),
        ("any-magic", "initial/magic"),
        ("any-number", "initial/number-beyond"),
        ("beyond-the-block", "header/offset-behind"),
        ("any-block", "header/name-unknown"),
        ("any-payload", "zlib/page-missing"),
        ("ends-anywhere", "end/in-the-table"),
        ("no-history", "zlib/history-through-a-sync"),
    ] {
        let broken = program("multifd-vamoose", &["--broken", fault]);
        let found = failures(&broken, &decoding);
        let names: Vec<_> = found.iter().map(|(case, _)| case.as_str()).collect();
        assert!(names.contains(&case), "{fault}: {names:?}");
        println!(
            "{fault}: found by {} cases: {}",
            names.len(),
            names.join(" ")
        );
    }
}

/// docs/wire.md cites every case, and no other.
#[test]
fn the_wire_document_cites_the_cases() {
    let document = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/wire.md");
    let text = std::fs::read_to_string(document).unwrap();
    let cases = all_cases();
    let kinds: Vec<_> = cases.iter().map(Case::kind).collect();
    let spans = text.split('`').skip(1).step_by(2);
    let cited: Vec<_> = spans
        .filter(|span| {
            span.split_once('/')
                .is_some_and(|(kind, _)| kinds.contains(&kind))
        })
        .collect();
    for case in &cases {
        assert!(
            cited.iter().any(|it| fits(it, &case.name)),
            "{} is not cited",
            case.name
        );
    }
    for pattern in cited {
        assert!(
            cases.iter().any(|case| fits(pattern, &case.name)),
            "no case {pattern}"
        );
    }
}
