//! The file `hosts.toml`: names of other hosts, with their addresses and keys, for `vamoose migrate GUEST HOST`.
//!
//! ```toml
//! [kvm2]
//! address = "192.0.2.20"  # or addresses = [...]; :PORT may follow each
//! bind = ["192.0.2.10"]   # addresses of this host, one for each of the other host
//! key = "ed25519:..."     # the only key that is accepted from it
//! ```

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use vamoose_link::{Address, AddressError, FileFault, Keys, PublicKey, TlsError};

use crate::options::Text;

/// Port of `vamoose serve`.
pub const PORT: u16 = 4440;

/// Another host, with at least one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub to: Vec<Address>,
    /// One for each of `to`, or none.
    pub bind: Vec<IpAddr>,
    pub key: Option<PublicKey>,
    /// Whether the file has it.
    pub is_listed: bool,
}

/// The file's place, beside the keys.
pub fn file(keys: &Path) -> PathBuf {
    keys.join("hosts.toml")
}

/// The host that `file` has under this name, or that has this name, address or URI on the network.
pub fn find(file: &Path, name: &str) -> Result<Host> {
    let text = match Keys::read_guarded(file) {
        Err(TlsError::File {
            fault: FileFault::System(error),
            ..
        }) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        text => text?,
    };
    let listed: BTreeMap<String, Entry> =
        toml::from_slice(&text).with_context(|| file.display().to_string())?;
    let Some(entry) = listed.get(name) else {
        return Ok(Host {
            to: vec![Address::with_default_port(name, PORT)?],
            bind: Vec::new(),
            key: None,
            is_listed: false,
        });
    };
    let to = entry.address.iter().chain(&entry.addresses);
    let to: Vec<_> = to.map(|Text(place)| place.0.clone()).collect();
    ensure!(
        !to.is_empty(),
        "{}: host {name} has no address",
        file.display()
    );
    Ok(Host {
        to,
        bind: entry.bind.clone(),
        key: entry.key.as_ref().map(|key| key.0),
        is_listed: true,
    })
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Entry {
    address: Option<Text<Place>>,
    #[serde(default)]
    addresses: Vec<Text<Place>>,
    #[serde(default)]
    bind: Vec<IpAddr>,
    key: Option<Text<PublicKey>>,
}

/// An address whose scheme and port may be missing.
#[derive(Clone, Debug)]
struct Place(Address);

impl FromStr for Place {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        Address::with_default_port(text, PORT).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use tempfile::TempDir;

    use super::*;

    const KEY: &str = "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=";

    fn find_in(text: &str, name: &str) -> Result<Host> {
        let dir = TempDir::new()?;
        let file = file(dir.path());
        fs::write(&file, text)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644))?;
        find(&file, name)
    }

    fn addresses(host: &Host) -> Vec<String> {
        host.to.iter().map(Address::to_string).collect()
    }

    #[test]
    fn listed_host_has_addresses_and_a_key() {
        let text = format!(
            "[kvm2]\naddress = \"192.0.2.20\"\nkey = \"{KEY}\"\n\
             [kvm3]\naddresses = [\"kvm3.test:4450\", \"2001:db8::3\"]\nbind = [\"192.0.2.1\", \"2001:db8::1\"]\n"
        );
        let host = find_in(&text, "kvm2").unwrap();
        assert_eq!(addresses(&host), ["tcp:192.0.2.20:4440"]);
        assert_eq!(host.key, Some(KEY.parse().unwrap()));
        let host = find_in(&text, "kvm3").unwrap();
        assert_eq!(
            addresses(&host),
            ["tcp:kvm3.test:4450", "tcp:[2001:db8::3]:4440"]
        );
        assert_eq!((host.bind.len(), host.key), (2, None));
    }

    #[test]
    fn other_names_are_those_of_the_network() {
        let missing = find(Path::new("/nowhere/hosts.toml"), "kvm2").unwrap();
        assert_eq!(addresses(&missing), ["tcp:kvm2:4440"]);
        let host = find_in("[kvm3]\naddress = \"x\"\n", "unix:/run/x").unwrap();
        assert_eq!(addresses(&host), ["unix:/run/x"]);
        assert!(!host.is_listed);
    }

    #[test]
    fn mistakes_are_reported() {
        for (text, problem) in [
            ("[kvm2]\naddres = \"x\"\n", "addres"),
            ("[kvm2]\n", "kvm2 has no address"),
            ("[kvm2]\naddress = \"x:y\"\n", "port is not a number"),
            (
                "[kvm2]\naddress = \"x\"\nkey = \"y\"\n",
                "a public key is `ed25519:`",
            ),
        ] {
            let error = format!("{:#}", find_in(text, "kvm2").unwrap_err());
            assert!(error.contains(problem), "{error}");
        }
    }

    /// Whoever can write it decides where guests go.
    #[test]
    fn file_that_others_can_write_is_refused() {
        let dir = TempDir::new().unwrap();
        let file = file(dir.path());
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        let error = format!("{:#}", find(&file, "kvm2").unwrap_err());
        assert!(error.contains("other users can write it"), "{error}");
    }
}
