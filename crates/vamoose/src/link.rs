//! Options of the link between two Vamooses.

use std::{fs, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use vamoose_link::{Address, PageStore, Remote, Route, SessionConfig};

use crate::{
    options::{CONNECTIONS, ENCODING, Switch},
    security::SecurityOptions,
    values::{Size, seconds},
};

/// Options of a session.
#[derive(Args, Clone, Debug)]
pub struct LinkOptions {
    #[command(flatten)]
    pub security: SecurityOptions,
    /// Checksums of pages and of all sent data; off only to measure their cost
    #[arg(help_heading = CONNECTIONS, long, value_enum, default_value_t = Switch::On, hide_short_help = true)]
    check: Switch,
    /// Fail after this time without a connection; 0: at once
    #[arg(
        help_heading = CONNECTIONS,
        long,
        default_value = "30s",
        value_name = "TIME",
        value_parser = seconds,
        hide_short_help = true
    )]
    reconnect_timeout: Duration,
    /// Most memory at each end for earlier versions of pages, from which differences are sent; 0: send no differences
    ///
    /// Applies to each migration. The smaller of the two ends' values is used.
    #[arg(
        help_heading = ENCODING,
        long,
        default_value = "256M",
        value_name = "SIZE",
        hide_short_help = true
    )]
    page_cache: Size,
}

/// The page store of a process that takes migrations.
#[derive(Args, Clone, Debug)]
pub struct PageStoreOptions {
    /// Keep pages of guests that came, in this much memory: guests that are alike move their common pages once
    #[arg(
        help_heading = ENCODING,
        long,
        value_name = "SIZE"
    )]
    page_store: Option<Size>,
    /// Share pages only among guests whose names match the same PATTERN (repeatable)
    ///
    /// The first pattern counts that a name matches; `*` stands for any characters. A guest that matches none shares with no other
    /// guest. Without this option, all guests share pages.
    #[arg(
        help_heading = ENCODING,
        long = "page-store-group",
        value_name = "PATTERN",
        requires = "page_store",
        hide_short_help = true
    )]
    page_store_groups: Vec<String>,
}

impl PageStoreOptions {
    /// The store, if one is wanted.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn open(&self) -> Result<Option<PageStore>> {
        let store = self.page_store.filter(|size| size.0 > 0);
        let groups = self.page_store_groups.clone();
        let store = store.map(|size| PageStore::new(size.in_memory(), groups));
        store.transpose().context("--page-store")
    }
}

/// Memory for the page caches of all migrations of this process: `size`, or a quarter of the host's memory, at most 4 GiB.
pub fn page_caches(size: Option<Size>) -> usize {
    const MOST: u64 = 4 << 30;
    let quarter = || memory_of_host().map_or(MOST, |bytes| (bytes / 4).min(MOST));
    size.unwrap_or_else(|| Size(quarter())).in_memory()
}

/// The paths to the addresses `to` of one host: from the addresses `bind`, one for each of `to`, or from any. `None` if the
/// numbers of addresses differ.
pub fn paths(to: &[Address], bind: &[IpAddr]) -> Option<Vec<Route>> {
    if !bind.is_empty() && bind.len() != to.len() {
        return None;
    }
    let paths = to.iter().enumerate().map(|(at, address)| Route {
        to: address.clone(),
        bind: bind.get(at).copied(),
    });
    Some(paths.collect())
}

/// `MemTotal:  16303400 kB`
fn memory_of_host() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let mut lines = text.lines();
    let total = lines.find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = total.split_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

impl LinkOptions {
    /// Configuration of the sessions at these addresses.
    pub fn config<'a>(
        &self,
        addresses: impl IntoIterator<Item = &'a Address>,
        stall_timeout: Duration,
    ) -> Result<SessionConfig> {
        Ok(SessionConfig {
            check: self.check == Switch::On,
            reconnect_timeout: self.reconnect_timeout,
            stall_timeout,
            page_cache: self.page_cache.in_memory(),
            ..SessionConfig::new(self.security.for_addresses(addresses)?)
        })
    }

    /// The Vamoose at the addresses `to` of one host, reached from the addresses `bind` ([`paths`]).
    pub fn remote(
        &self,
        to: &[Address],
        bind: &[IpAddr],
        stall_timeout: Duration,
    ) -> Result<Remote> {
        let paths = paths(to, bind).with_context(|| {
            format!(
                "--bind: {} addresses for {} destination addresses: give one for each, in the same order, or none",
                bind.len(),
                to.len()
            )
        })?;
        Ok(Remote {
            paths,
            config: self.config(to, stall_timeout)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_caches_leave_the_host_most_of_its_memory() {
        assert_eq!(page_caches(Some(Size(5 << 30))), 5 << 30);
        let bytes = page_caches(None);
        assert!((1 << 20..=4 << 30).contains(&bytes), "{bytes}");
        assert!(bytes as u64 <= memory_of_host().unwrap() / 4);
    }
}
