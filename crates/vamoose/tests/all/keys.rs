//! `vamoose keys` as a user runs it.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
};

use tempfile::TempDir;
use vamoose_link::PublicKey;

use crate::common::vamoose;

fn keys(action: &str, directory: &Path) -> Output {
    let mut command = Command::new(vamoose());
    command.args(["keys", action, "--keys"]).arg(directory);
    command.output().unwrap()
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(output.stdout, b"");
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_key_is_made_once_and_shown_again() {
    let parent = TempDir::new().unwrap();
    let directory = parent.path().join("vamoose");
    let made = keys("init", &directory);
    let key = printed(&made);
    assert!(key.trim_end().parse::<PublicKey>().is_ok(), "{key}");
    assert_eq!(key.lines().count(), 1);
    let next = String::from_utf8(made.stderr).unwrap();
    let trusted = directory.join("trusted").display().to_string();
    assert!(next.contains(&trusted), "{next}");
    let mode = fs::metadata(directory.join("key")).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let list = format!("# Hosts\n{} hosts=kvm2 in rack 7\n", key.trim_end());
    fs::write(directory.join("trusted"), list).unwrap();
    let shown = keys("show", &directory);
    assert_eq!(printed(&shown), key);
    let trusted = String::from_utf8(shown.stderr).unwrap();
    assert!(trusted.contains(" hosts=kvm2 in rack 7"), "{trusted}");

    let again = refused(&keys("init", &directory));
    assert!(again.contains("File exists"), "{again}");
    assert!(again.contains("vamoose keys show"), "{again}");
    assert_eq!(printed(&keys("show", &directory)), key);
}

#[test]
fn errors_of_keys_have_a_remedy() {
    let directory = TempDir::new().unwrap();
    let missing = refused(&keys("show", directory.path()));
    assert!(missing.contains("No such file"), "{missing}");
    assert!(missing.contains("vamoose keys init"), "{missing}");

    printed(&keys("init", directory.path()));
    let key = directory.path().join("key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    let open = refused(&keys("show", directory.path()));
    assert!(open.contains("mode 0644"), "{open}");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&key, "garbage").unwrap();
    let garbage = refused(&keys("show", directory.path()));
    assert!(garbage.contains("no Ed25519 private key"), "{garbage}");
}
