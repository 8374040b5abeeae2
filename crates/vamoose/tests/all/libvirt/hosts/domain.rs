//! A guest of libvirt that is followed from host to host.

use std::{fmt, fs, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use lab::{
    guest::{Image, Load},
    serial::{self, Log, Serial},
    writer::Ended,
};

use super::{Host, Hosts, Storage};

/// The name of the guest.
pub(crate) const NAME: &str = "web1";

/// The limit for anything, on a very busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// virsh's errors for an unknown guest, from two places.
const GONE: [&str; 2] = ["failed to get domain", "Domain not found"];

/// One of the two hosts.
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

/// A running guest that ticks and checks its memory. It ends with its hosts.
#[derive(Debug)]
pub(crate) struct Domain<'a> {
    hosts: &'a Hosts,
    storage: Storage,
    at: Where,
    serial: Serial,
    /// The serial output at the previous host.
    before: Option<Log>,
}

impl<'a> Domain<'a> {
    /// Starts a guest with this load and `ram` MiB on the first host, and waits until it is ready.
    pub(crate) fn start(
        hosts: &'a Hosts,
        image: &Image,
        ram: u32,
        load: &Load,
        storage: Storage,
    ) -> Result<Self> {
        let at = Where::First;
        let host = at.of(hosts);
        storage.make(hosts)?;
        let description = description(image, ram, load, &storage.disks(hosts));
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

    /// Ends the guest, and checks that everything it has written is on its disk once, and that the image is not locked. Compares disks
    /// that were copied.
    pub(crate) fn ends_well(self) -> Result<()> {
        let host = self.at.of(self.hosts);
        host.virsh(["destroy", NAME])?.success()?;
        let told = written(&self.serial.finish());
        self.storage.collect(self.hosts, self.at)?;
        let disk = &self.hosts.disk;
        disk.check_since(told, Ended::Running)
            .map(drop)
            .context("the guest's disk")
    }

    /// The host that it was last found on.
    pub(crate) fn at(&self) -> Where {
        self.at
    }

    /// Its disks.
    pub(crate) fn storage(&self) -> Storage {
        self.storage
    }

    /// libvirt's state of the guest on a host, such as `running`; `None` if it is unknown there.
    pub(crate) fn state(&self, at: Where) -> Result<Option<String>> {
        let ended = at.of(self.hosts).virsh(["domstate", NAME])?;
        match ended.is_success {
            true => Ok(Some(ended.stdout.trim().to_owned())),
            false if GONE.iter().any(|text| ended.stderr.contains(text)) => Ok(None),
            false => bail!("virsh domstate: {}", ended.reason()),
        }
    }

    /// Checks that the guest has moved to the other host: that it is only there, in this state, and if that is *running*, that it
    /// continues.
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

    /// Resumes the guest after it has moved paused, and checks that no tick is missing.
    pub(crate) fn resume(&mut self) -> Result<()> {
        let host = self.at.of(self.hosts);
        host.virsh(["resume", NAME])?.success()?;
        self.goes_on()
    }

    /// Checks that the guest has stayed, is nowhere else, and continues.
    pub(crate) fn has_stayed(&mut self) -> Result<()> {
        self.is_only(self.at, "running")?;
        // Discards the port of the ended destination QEMU.
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

    /// Checks that no tick is missing and that all memory is right, by two checks of memory, as the first may have begun before.
    fn goes_on(&self) -> Result<()> {
        self.serial.wait_ticks(3, LIMIT)?;
        self.serial.wait_rounds(2, LIMIT)?;
        if let Some(before) = &self.before {
            serial::follow(before, &self.serial.log())?;
        }
        self.writes_on()
    }

    /// Waits until the guest writes to its disk.
    fn writes_on(&self) -> Result<()> {
        let before = written(&self.serial.log());
        let is_further = |log: &Log| written(log) > before;
        self.serial.wait("a written number", LIMIT, is_further)
    }
}

/// The last number that the guest has reported to be on its disk.
fn written(log: &Log) -> u32 {
    let lines = log.lines.iter().rev();
    let mut numbers = lines.filter_map(|line| line.text.strip_prefix("written ")?.parse().ok());
    numbers.next().unwrap_or(0)
}

fn description(image: &Image, ram: u32, load: &Load, disks: &str) -> String {
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
    {disks}
  </devices>
</domain>
",
        machine = lab::qemu::MACHINE,
    )
}
