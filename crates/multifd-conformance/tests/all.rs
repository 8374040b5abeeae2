//! The folder of cases is up to date, and the implementations that this repository knows pass.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::path::PathBuf;

use multifd_conformance::{Case, Driver, Verdict, cases, run};

fn all_cases() -> Vec<Case> {
    Case::load_all(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cases")).unwrap()
}

/// What did not pass of a driver without exclusions.
fn failures(driver: &Driver, cases: &[Case]) -> Vec<(String, Verdict)> {
    let outcomes = run(driver, cases, &[]).unwrap();
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
            "{} differs: run `multifd-conformance generate`",
            made.name
        );
    }
    assert_eq!(
        there.len(),
        made.len(),
        "run `multifd-conformance generate`"
    );
}

#[test]
fn the_suites_own_decoder_passes() {
    let mut decoding = all_cases();
    decoding.retain(|case| case.kind() != "encode");
    let program = env!("CARGO_BIN_EXE_multifd-conformance").into();
    let driver = Driver {
        program,
        arguments: vec!["decode".into()],
    };
    assert_eq!(failures(&driver, &decoding), []);
}

#[test]
fn vamoose_passes() {
    assert_eq!(failures(&program("multifd-vamoose", &[]), &all_cases()), []);
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
        ("page-count", "size/1-normal-0-zero"),
        ("no-barrier", "sync/first-channel-last"),
        ("last-group", "size/127-normal-0-zero"),
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
