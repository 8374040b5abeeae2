//! A guest of libvirt, whose life is followed from host to host.

use std::{fmt, fs, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use lab::{
    guest::{Image, Load},
    serial::{self, Log, Serial},
    writer::Ended,
};

use super::{Host, Hosts};

/// What a guest is called.
pub(crate) const NAME: &str = "web1";

/// Longer than anything may take on a machine that is very busy.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// What virsh says of a guest that a host does not know: already when it looks, or not until it asks.
const GONE: [&str; 2] = ["failed to get domain", "Domain not found"];

/// On which of two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    /// The first one.
    First,
    /// The other one.
    Second,
}

impl Where {
    /// The other one.
    pub(crate) fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    /// The host of these two.
    pub(crate) fn of(self, hosts: &Hosts) -> &Host {
        &hosts.hosts[self as usize]
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::First => "the first host",
            Self::Second => "the second host",
        })
    }
}

/// What a guest has for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// An image that both hosts reach, see [`lab::writer`]. The host's file system is not one that libvirt knows to be shared:
    /// `virsh migrate` needs `--unsafe`.
    Shared,
    /// `/var/lib/disk` of its host, to which the guest does not write.
    Local,
}

/// A running guest, which ticks and checks its memory. It is gone with its hosts.
#[derive(Debug)]
pub(crate) struct Domain<'a> {
    hosts: &'a Hosts,
    storage: Storage,
    at: Where,
    serial: Serial,
    /// What came out of the serial port at the host before.
    before: Option<Log>,
}

impl<'a> Domain<'a> {
    /// Starts a guest with this load, and `ram` MiB, on the first host, and waits until it is ready.
    pub(crate) fn start(
        hosts: &'a Hosts,
        image: &Image,
        ram: u32,
        load: &Load,
        storage: Storage,
    ) -> Result<Self> {
        let at = Where::First;
        let host = at.of(hosts);
        let description = description(image, ram, load, &storage.disk(hosts));
        fs::write(host.path("etc/host/web1.xml"), description).context("describing a guest")?;
        host.virsh(["create", "/etc/host/web1.xml"])?.success()?;
        let serial = host.serial()?;
        let serial = serial.context("the guest's QEMU has not connected its serial port")?;
        serial.wait_ready(LIMIT)?;
        let domain = Self {
            hosts,
            storage,
            at,
            serial,
            before: None,
        };
        domain.writes_on()?;
        Ok(domain)
    }

    /// Ends it, and checks that all that it has written is on its disk, once, and that the disk is nobody's any more.
    pub(crate) fn ends_well(self) -> Result<()> {
        let host = self.at.of(self.hosts);
        host.virsh(["destroy", NAME])?.success()?;
        let told = written(&self.serial.finish());
        match self.storage {
            Storage::Local => Ok(()),
            Storage::Shared => self
                .hosts
                .disk
                .check_since(told, Ended::Running)
                .map(drop)
                .context("the guest's disk"),
        }
    }

    /// Where it is, as far as has been looked.
    pub(crate) fn at(&self) -> Where {
        self.at
    }

    /// What libvirt says of it on a host: `running`, `paused`, ...; none where it is not known.
    pub(crate) fn state(&self, at: Where) -> Result<Option<String>> {
        let ended = at.of(self.hosts).virsh(["domstate", NAME])?;
        match ended.is_success {
            true => Ok(Some(ended.stdout.trim().to_owned())),
            false if GONE.iter().any(|text| ended.stderr.contains(text)) => Ok(None),
            false => bail!("virsh domstate: {}", ended.reason()),
        }
    }

    /// Checks that it has moved to the other host: that it is there in this state and nowhere else, and that it goes on if
    /// that is *running*.
    pub(crate) fn has_moved(&mut self, state: &str) -> Result<()> {
        let to = self.at.other();
        self.is_only(to, state)?;
        let serial = to.of(self.hosts).serial()?;
        let serial = serial.context("the destination's QEMU has not connected its serial port")?;
        let before = std::mem::replace(&mut self.serial, serial).finish();
        before.check()?;
        self.before = Some(before);
        self.at = to;
        if state == "running" {
            self.goes_on()?;
        }
        Ok(())
    }

    /// Lets it go on after it has moved as a paused one, and checks that not a tick is missing.
    pub(crate) fn resume(&mut self) -> Result<()> {
        let host = self.at.of(self.hosts);
        host.virsh(["resume", NAME])?.success()?;
        self.goes_on()
    }

    /// Checks that it has stayed, that it is nowhere else, and that it goes on.
    pub(crate) fn has_stayed(&mut self) -> Result<()> {
        self.is_only(self.at, "running")?;
        // What was to become the guest has gone.
        self.at.other().of(self.hosts).serial()?;
        self.goes_on()
    }

    fn is_only(&self, at: Where, state: &str) -> Result<()> {
        let found = self.state(at)?;
        ensure!(
            found.as_deref() == Some(state),
            "on {at} the guest is {found:?}"
        );
        let other = self.state(at.other())?;
        ensure!(other.is_none(), "on {} the guest is {other:?}", at.other());
        Ok(())
    }

    /// Ticks without a gap to those before, and all of its memory is as it wrote it: a check that was under way does not count.
    fn goes_on(&self) -> Result<()> {
        self.serial.wait_ticks(3, LIMIT)?;
        self.serial.wait_rounds(2, LIMIT)?;
        if let Some(before) = &self.before {
            serial::follow(before, &self.serial.log())?;
        }
        self.writes_on()
    }

    /// To its disk.
    fn writes_on(&self) -> Result<()> {
        if self.storage == Storage::Local {
            return Ok(());
        }
        let before = written(&self.serial.log());
        let is_further = |log: &Log| written(log) > before;
        self.serial.wait("a written number", LIMIT, is_further)
    }
}

/// How far a guest has told to have come on its disk.
fn written(log: &Log) -> u32 {
    let lines = log.lines.iter().rev();
    let mut numbers = lines.filter_map(|line| line.text.strip_prefix("written ")?.parse().ok());
    numbers.next().unwrap_or(0)
}

impl Storage {
    /// The guest's disk, as libvirt is told. Without a driver for IDE in the guest.
    fn disk(self, hosts: &Hosts) -> String {
        let cache = match hosts.disk.is_direct() {
            true => "none",
            false => "writethrough",
        };
        let (format, path, target) = match self {
            Self::Shared => ("qcow2", hosts.disk.path(), "dev='vda' bus='virtio'"),
            Self::Local => ("raw", "/var/lib/disk".into(), "dev='hda' bus='ide'"),
        };
        format!(
            "<disk type='file' device='disk'>\
             <driver name='qemu' type='{format}' cache='{cache}'/><source file='{}'/><target {target}/>\
             </disk>",
            path.display()
        )
    }
}

fn description(image: &Image, ram: u32, load: &Load, disk: &str) -> String {
    let [kernel, initrd] = image.files().map(std::path::Path::display);
    let command_line = load.command_line();
    format!(
        "<domain type='qemu'>
  <name>{NAME}</name>
  <uuid>00000000-0000-4000-8000-0000000000a1</uuid>
  <memory unit='MiB'>{ram}</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='{machine}'>hvm</type>
    <kernel>{kernel}</kernel><initrd>{initrd}</initrd><cmdline>{command_line}</cmdline>
  </os>
  <cpu mode='custom' match='exact'><model fallback='allow'>qemu64</model></cpu>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <serial type='unix'><source mode='connect' path='/run/serial'/></serial>
    <memballoon model='none'/>
    {disk}
  </devices>
</domain>
",
        machine = lab::qemu::MACHINE,
    )
}
