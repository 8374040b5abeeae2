//! Addresses as QEMU's migration URIs: `tcp:HOST:PORT` and `unix:PATH`.

use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr};

use thiserror::Error;

/// Where to listen or to dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `tcp:HOST:PORT`; an IPv6 address stands in brackets. An empty host is every address.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// Port; 0 lets the system choose when listening.
        port: u16,
    },
    /// `unix:PATH`.
    Unix(PathBuf),
}

/// A text is not an address.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("`{text}` is not an address: {problem} (write tcp:HOST:PORT or unix:PATH)")]
pub struct AddressError {
    /// What was given.
    pub text: String,
    /// What is wrong with it.
    pub problem: &'static str,
}

impl Address {
    /// The address in `text`, in which scheme and port may be missing: a name or an address alone is TCP with this port.
    ///
    /// # Errors
    /// When `text` is no address.
    pub fn with_default_port(text: &str, port: u16) -> Result<Self, AddressError> {
        if text.starts_with("tcp:") || text.starts_with("unix:") {
            return text.parse();
        }
        let host = text.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        let host = host.unwrap_or(text);
        if host.parse::<IpAddr>().is_ok() || !(host.is_empty() || host.contains(':')) {
            let host = host.to_owned();
            return Ok(Self::Tcp { host, port });
        }
        let address = format!("tcp:{text}").parse();
        address.map_err(|AddressError { problem, .. }| AddressError {
            text: text.to_owned(),
            problem,
        })
    }

    /// Whether only this host can reach the address: a unix socket, `localhost` or a loopback
    /// address.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp { host, .. } => {
                host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |problem| AddressError {
            text: text.to_owned(),
            problem,
        };
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(error("the path is empty"));
            }
            return Ok(Self::Unix(path.into()));
        }
        let rest = text
            .strip_prefix("tcp:")
            .ok_or_else(|| error("it starts with neither tcp: nor unix:"))?;
        // libvirt's URIs have the slashes, QEMU's have not.
        let rest = rest.strip_prefix("//").unwrap_or(rest);
        let (host, port) = rest
            .rsplit_once(':')
            .ok_or_else(|| error("the port is missing"))?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner
                .strip_suffix(']')
                .ok_or_else(|| error("the bracket of the IPv6 address is not closed"))?,
            None if host.contains(':') => {
                return Err(error("an IPv6 address stands in brackets"));
            }
            None => host,
        };
        let port = port
            .parse()
            .map_err(|_| error("the port is not a number from 0 to 65535"))?;
        Ok(Self::Tcp {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in [
            "tcp:localhost:4444",
            "tcp:[::1]:0",
            "tcp::4444",
            "unix:/run/x.sock",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn slashes_of_libvirt_are_accepted() {
        let address: Address = "tcp://kvm2:1".parse().unwrap();
        assert_eq!(address.to_string(), "tcp:kvm2:1");
    }

    #[test]
    fn scheme_and_port_may_be_missing() {
        for (text, address) in [
            ("kvm2", "tcp:kvm2:4440"),
            ("kvm2:1", "tcp:kvm2:1"),
            ("192.0.2.20", "tcp:192.0.2.20:4440"),
            ("2001:db8::20", "tcp:[2001:db8::20]:4440"),
            ("[2001:db8::20]", "tcp:[2001:db8::20]:4440"),
            ("[2001:db8::20]:1", "tcp:[2001:db8::20]:1"),
            ("tcp:kvm2:1", "tcp:kvm2:1"),
            ("unix:/x", "unix:/x"),
        ] {
            let read = Address::with_default_port(text, 4440).unwrap();
            assert_eq!(read.to_string(), address, "{text}");
        }
        for text in ["", "kvm2:", "kvm2:x", "tcp:kvm2", "[::1"] {
            assert!(Address::with_default_port(text, 4440).is_err(), "{text}");
        }
    }

    #[test]
    fn only_loopback_is_local() {
        let local = |text: &str| text.parse::<Address>().unwrap().is_local();
        assert!(local("unix:/x") && local("tcp:localhost:1"));
        assert!(local("tcp:127.0.0.9:1") && local("tcp:[::1]:1"));
        assert!(!local("tcp::1") && !local("tcp:0.0.0.0:1") && !local("tcp:10.0.0.1:1"));
    }

    #[test]
    fn errors_name_the_problem() {
        for (text, problem) in [
            ("", "neither"),
            ("exec:cat", "neither"),
            ("unix:", "path is empty"),
            ("tcp:host", "port is missing"),
            ("tcp:host:70000", "port is not a number"),
            ("tcp:::1:4444", "in brackets"),
            ("tcp:[::1:4444", "not closed"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
