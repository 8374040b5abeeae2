//! Options for authentication and encryption between two Vamooses.

use std::{env, ffi::OsString, fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use vamoose_link::{Address, Certificates, Keys, PublicKey, Security};

const SECURITY: &str = "Security";

/// Options for authentication between two Vamooses: one method, the same at both ends. The default is keys, where this host has one.
#[derive(Args, Clone, Debug)]
pub struct SecurityOptions {
    /// Use TLS with the certificates in this directory
    ///
    /// They are named as QEMU names them. Files: ca-cert.pem; at the source client-cert.pem and client-key.pem; at the destination server-cert.pem and
    /// server-key.pem; optionally ca-crl.pem, which must have a current list of each authority. Apart from that, a directory
    /// that QEMU or libvirt uses, such as /etc/pki/qemu, works unchanged.
    #[arg(help_heading = SECURITY, long, value_name = "DIR", conflicts_with_all = ["keys", "peer_key", "insecure"])]
    tls_creds: Option<PathBuf>,
    /// Accept only peers whose certificate has a name that matches, with * and ? as wildcards (repeatable)
    ///
    /// The common name and the DNS names are compared. Without this option, any certificate of the authority is accepted.
    #[arg(help_heading = SECURITY, long, value_name = "PATTERN", requires = "tls_creds", conflicts_with_all = ["keys", "peer_key", "insecure"], hide_short_help = true)]
    allow: Vec<String>,
    /// Name to expect in the destination's certificate [default: the host of its address]
    #[arg(help_heading = SECURITY, long, value_name = "NAME", requires = "tls_creds", conflicts_with_all = ["keys", "peer_key", "insecure"], hide_short_help = true)]
    tls_server_name: Option<String>,
    /// Use TLS with the keys in this directory: the default
    ///
    /// The keys are that of this host and those of its peers. The directory is /etc/vamoose for root, and ~/.config/vamoose for
    /// other users, unless another one is named. `vamoose keys init` makes the key. The file `trusted` lists the peers' keys, one per line; hosts=NAME,NAME... after a key
    /// limits it to these hosts.
    #[arg(help_heading = SECURITY, long, value_name = "DIR", num_args = 0..=1, value_parser = directory, conflicts_with = "insecure")]
    keys: Option<Option<PathBuf>>,
    /// Trust this key instead of those in `trusted`; as `vamoose keys show` prints it on the peer (repeatable)
    #[arg(help_heading = SECURITY,
        long,
        value_name = "KEY",
        conflicts_with = "insecure",
        hide_short_help = true
    )]
    peer_key: Vec<PublicKey>,
    /// Use neither authentication nor encryption
    ///
    /// Anyone who can reach the address can then read and replace the guest's memory.
    #[arg(help_heading = SECURITY, long)]
    insecure: bool,
}

impl SecurityOptions {
    /// The chosen method. Unix sockets need none: file permissions protect them.
    pub fn for_addresses<'a>(
        &self,
        addresses: impl IntoIterator<Item = &'a Address>,
    ) -> Result<Security> {
        let is_unix = |address: &Address| matches!(address, Address::Unix(_));
        if !self.is_given() && addresses.into_iter().all(is_unix) {
            return Ok(Security::Insecure);
        }
        self.security()
    }

    /// Whether an option chooses a method.
    fn is_given(&self) -> bool {
        let has_keys = self.keys.is_some() || !self.peer_key.is_empty();
        self.insecure || self.tls_creds.is_some() || has_keys
    }

    /// Whether neither authentication nor encryption was chosen.
    pub fn is_insecure(&self) -> bool {
        self.insecure
    }

    /// The chosen method.
    pub fn security(&self) -> Result<Security> {
        if self.insecure {
            return Ok(Security::Insecure);
        }
        if let Some(directory) = &self.tls_creds {
            return Ok(Security::Certificates(Certificates {
                directory: directory.clone(),
                allow: only(&self.allow),
                server_name: self.tls_server_name.clone(),
            }));
        }
        self.keys_in(self.keys_directory()?)
    }

    fn keys_in(&self, directory: PathBuf) -> Result<Security> {
        if !self.is_given() && !Keys::has_key(&directory) {
            bail!(
                "this host has no key in {}: `vamoose keys init` makes one, on each host. Otherwise use --tls-creds DIR \
                 (certificates) or --insecure (neither authentication nor encryption)",
                directory.display()
            );
        }
        Ok(Security::Keys(Keys {
            directory,
            trusted: only(&self.peer_key),
        }))
    }

    /// The directory of --keys.
    pub fn keys_directory(&self) -> Result<PathBuf> {
        keys_directory(self.keys.clone().flatten())
    }

    /// Trusts only `key`, unless other options choose whom to trust.
    pub fn trust(&mut self, key: PublicKey) {
        if !self.insecure && self.tls_creds.is_none() && self.peer_key.is_empty() {
            self.peer_key.push(key);
        }
    }
}

/// A directory that is there: in `migrate --keys web1 kvm2`, web1 is none.
fn directory(text: &str) -> Result<PathBuf, String> {
    match fs::metadata(text) {
        Ok(found) if found.is_dir() => Ok(text.into()),
        Ok(_) => Err(format!("it is not a directory; {NO_VALUE}")),
        Err(error) => Err(format!("{error}; {NO_VALUE}")),
    }
}

const NO_VALUE: &str =
    "without DIR, `--keys` comes last, or is left out, as it is the default where there is a key";

/// The values, or `None` if there are none.
fn only<T: Clone>(given: &[T]) -> Option<Vec<T>> {
    (!given.is_empty()).then(|| given.to_vec())
}

/// The directory of this user's key: `named`, or the default.
pub fn keys_directory(named: Option<PathBuf>) -> Result<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    named
        .or_else(|| default_directory(is_root, &|name| env::var_os(name)))
        .context("neither XDG_CONFIG_HOME nor HOME is set: name the directory of the keys")
}

fn default_directory(
    is_root: bool,
    variable: &dyn Fn(&str) -> Option<OsString>,
) -> Option<PathBuf> {
    if is_root {
        return Some(PathBuf::from("/etc/vamoose"));
    }
    let path = |name| {
        let path = PathBuf::from(variable(name)?);
        path.is_absolute().then_some(path)
    };
    let config = path("XDG_CONFIG_HOME").or_else(|| Some(path("HOME")?.join(".config")))?;
    Some(config.join("vamoose"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        security: SecurityOptions,
    }

    fn parse(words: &[&str]) -> Result<Security> {
        let words = ["vamoose"].iter().chain(words);
        Line::try_parse_from(words)?.security.security()
    }

    const KEY: &str = "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=";

    #[test]
    fn each_option_chooses_its_method() {
        assert_eq!(parse(&["--insecure"]).unwrap(), Security::Insecure);
        let certificates = Certificates {
            directory: "/etc/pki/qemu".into(),
            allow: Some(vec!["a*".to_owned(), "b".to_owned()]),
            server_name: Some("host".to_owned()),
        };
        let options = [
            "--tls-creds",
            "/etc/pki/qemu",
            "--allow",
            "a*",
            "--allow",
            "b",
            "--tls-server-name",
            "host",
        ];
        assert_eq!(
            parse(&options).unwrap(),
            Security::Certificates(certificates)
        );
        let keys = |directory: PathBuf, trusted| Security::Keys(Keys { directory, trusted });
        let default = || keys_directory(None).unwrap();
        let key: PublicKey = KEY.parse().unwrap();
        for (options, expected) in [
            (&["--keys", "/proc"][..], keys("/proc".into(), None)),
            (&["--keys"], keys(default(), None)),
            (&["--peer-key", KEY], keys(default(), Some(vec![key]))),
            (
                &["--keys", "/proc", "--peer-key", KEY, "--peer-key", KEY],
                keys("/proc".into(), Some(vec![key, key])),
            ),
        ] {
            assert_eq!(parse(options).unwrap(), expected, "{options:?}");
        }
    }

    #[test]
    fn keys_are_the_default_where_there_is_a_key() {
        let options = Line::parse_from(["vamoose"]).security;
        let directory = tempfile::tempdir().unwrap();
        let none = options.keys_in(directory.path().into()).unwrap_err();
        for way in ["--tls-creds", "vamoose keys init", "--insecure"] {
            assert!(none.to_string().contains(way), "{none}");
        }
        Keys::generate(directory.path()).unwrap();
        let default = options.keys_in(directory.path().into()).unwrap();
        assert!(matches!(
            default,
            Security::Keys(Keys { trusted: None, .. })
        ));
    }

    #[test]
    fn at_most_one_method_can_be_chosen() {
        for options in [
            &["--insecure", "--keys"][..],
            &["--insecure", "--tls-creds", "d"],
            &["--insecure", "--peer-key", KEY],
            &["--tls-creds", "d", "--keys", "d"],
            &["--tls-creds", "d", "--peer-key", KEY],
            &["--allow", "a", "--keys", "d"],
            &["--tls-server-name", "a", "--insecure"],
            &["--peer-key", "garbage"],
        ] {
            assert!(parse(options).is_err(), "{options:?}");
        }
    }

    #[test]
    fn a_guest_is_not_taken_for_the_directory_of_the_keys() {
        for guest in ["web1", "/dev/null"] {
            let error = parse(&["--keys", guest]).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(guest) && error.contains(NO_VALUE), "{error}");
        }
    }

    #[test]
    fn default_keys_directory() {
        let of = |is_root, variables: &[(&str, &str)]| {
            let variable = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| OsString::from(value))
            };
            default_directory(is_root, &variable)
        };
        let home = ("HOME", "/home/me");
        assert_eq!(of(true, &[home]), Some("/etc/vamoose".into()));
        assert_eq!(of(false, &[home]), Some("/home/me/.config/vamoose".into()));
        let config = ("XDG_CONFIG_HOME", "/c");
        assert_eq!(of(false, &[config, home]), Some("/c/vamoose".into()));
        // By the specification, relative paths are ignored.
        let config = ("XDG_CONFIG_HOME", "c");
        assert_eq!(
            of(false, &[config, home]),
            Some("/home/me/.config/vamoose".into())
        );
        assert_eq!(of(false, &[]), None);
    }
}
