//! Many small idle guests with memory to send.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use lab::ram::{self, Fill};
use tempfile::TempDir;

use super::{Generation, Hosts, Way, Where};
use crate::common::vamoose;

/// Memory of a guest, in MiB.
const RAM: u32 = 64;

/// Two hosts with guests whose firmware finds nothing to boot, initially on the first host.
#[derive(Debug)]
pub(crate) struct Crowd {
    /// The hosts.
    pub(crate) hosts: Hosts,
    /// The file with the guests' memory content.
    content: PathBuf,
    _folder: TempDir,
}

/// A guest of a crowd.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member<'a> {
    /// The name.
    pub(crate) name: &'a str,
    /// Whether libvirt keeps its definition when it is shut off.
    pub(crate) is_persistent: bool,
    /// The file of its disk on its host, if it has one.
    pub(crate) disk: Option<&'a str>,
    /// A file on its host with other memory content than all others have.
    pub(crate) content: Option<&'a str>,
}

impl<'a> Member<'a> {
    /// A guest like all others.
    pub(crate) fn plain(name: &'a str) -> Self {
        Self {
            name,
            is_persistent: false,
            disk: None,
            content: None,
        }
    }
}

impl Crowd {
    /// Starts hosts that can run `vamoose`, for guests with `content` bytes that do not compress.
    pub(crate) fn hosts(
        generation: &Generation,
        way: Way,
        content: u64,
        rate: u64,
    ) -> Result<Self> {
        let folder = TempDir::with_prefix("vamoose-").context("creating a temporary directory")?;
        let path = folder.path().join("content");
        ram::write(&path, content, &Fill::Random, 1)?;
        let folders = [
            folder.path(),
            vamoose().parent().context("a program without a folder")?,
        ];
        Ok(Self {
            hosts: Hosts::with_folders(generation, way, &folders, rate)?,
            content: path,
            _folder: folder,
        })
    }

    /// Starts a guest on the first host.
    pub(crate) fn start(&self, member: &Member<'_>) -> Result<()> {
        let host = Where::First.of(&self.hosts);
        let file = format!("/etc/host/{}.xml", member.name);
        let description = self.description(member)?;
        fs::write(host.path(&file[1..]), description).context("describing a guest")?;
        if member.is_persistent {
            host.virsh(["define", &file])?.success()?;
            host.virsh(["start", member.name])?.success()?;
        } else {
            host.virsh(["create", &file])?.success()?;
        }
        Ok(())
    }

    /// Checks that exactly these guests run on a host, and that libvirt knows no others.
    pub(crate) fn expect(&self, at: Where, names: &BTreeSet<String>) -> Result<()> {
        for state in ["--state-running", "--all"] {
            let found = at.of(&self.hosts).virsh(["list", "--name", state])?;
            let found = found.success()?;
            let found = found.split_whitespace().map(str::to_owned);
            let found: BTreeSet<_> = found.collect();
            ensure!(
                found == *names,
                "on {at}, by virsh list {state}, there are {found:?} instead of {names:?}"
            );
        }
        Ok(())
    }

    fn description(&self, member: &Member<'_>) -> Result<String> {
        let name = member.name;
        let content = match member.content {
            Some(path) => path,
            None => self.content.to_str().context("the name of a folder")?,
        };
        let disk = member.disk.map_or_else(String::new, |disk| {
            format!(
                "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/>\
                 <source file='{disk}'/><target dev='vda' bus='virtio'/></disk>"
            )
        });
        // The firmware does not use memory above 16 MiB. A loader reads its file before it waits for a migration, but writes
        // nothing then.
        Ok(format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <memory unit='MiB'>{RAM}</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='{machine}'>hvm</type></os>
  <cpu mode='custom' match='exact'><model fallback='allow'>qemu64</model></cpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    {disk}
  </devices>
  <qemu:commandline>
    <qemu:arg value='-device'/>
    <qemu:arg value='loader,file={content},addr=0x1000000,force-raw=on'/>
  </qemu:commandline>
</domain>
",
            machine = lab::qemu::MACHINE,
        ))
    }
}
