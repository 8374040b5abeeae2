//! The hundred guests' experiment, short: the same each time, and no guest fails.

use std::process::Command;

#[test]
fn the_tables_are_the_same_each_time() {
    let run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hundred"));
        let output = command.arg("--quick").output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        String::from_utf8(output.stdout).unwrap()
    };
    let tables = run();
    assert_eq!(tables, run());
    let rows: Vec<_> = tables
        .lines()
        .filter(|line| {
            line.contains(" ms/GiB ") || line.contains("DSA") || line.contains("CPU only")
        })
        .collect();
    assert!(rows.len() > 100);
    let failed = rows
        .iter()
        .filter(|row| !row.contains(" ms/GiB ") && !row.ends_with("| 0 |"));
    assert_eq!(failed.count(), 0, "{tables}");
    assert!(
        tables.contains("had 32 entries, and has 42 after") || tables.contains("and has 43 after")
    );
}
