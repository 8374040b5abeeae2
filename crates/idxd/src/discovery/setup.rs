//! The accel-config commands that make a device ready.
//!
//! Source: accel-config's manual pages and the attributes of the driver's sysfs. Disabling a device is assumed to reset all
//! of its groups and queues, so the new queue of an enabled device gets all entries.

use std::path::Path;

use super::{Device, WorkQueue, name};
use crate::Kind;

/// Batch size of a new queue. The driver's default of 32 is small.
const BATCH: u32 = 128;
/// Transfer size of a new queue: the driver's default.
const TRANSFER: u64 = 2 << 20;
/// Name of a new queue. The kernel requires one; it has no meaning.
const NAME: &str = "offload";

/// The commands for root, in this order, that give `device` one shared work queue for processes.
///
/// An enabled device is disabled first, which ends the work of all users of its queues ([`Device::clients`]). On a disabled
/// device, configured queues keep their entries as long as there are entries left. Empty for a device without queues.
pub fn setup_commands(device: &Device) -> Vec<String> {
    let Some((queue, entries)) = place(device) else {
        return Vec::new();
    };
    let (on, path) = (
        device.state.as_deref() != Some("disabled"),
        queue.name.to_string(),
    );
    let mut commands = Vec::new();
    if on {
        let enabled = device
            .queues
            .iter()
            .filter(|queue| queue.state.as_deref() == Some("enabled"));
        commands.extend(enabled.map(|queue| format!("accel-config disable-wq {}", queue.name)));
        commands.push(format!("accel-config disable-device {}", device.name));
    }
    let engines = device.engines.iter();
    commands.extend(engines.map(|engine| {
        format!(
            "accel-config config-engine {}/engine{}.{engine} --group-id=0",
            device.name, device.name.number
        )
    }));
    let mut configure = format!(
        "accel-config config-wq {path} --group-id=0 --mode=shared --wq-size={entries} --threshold={entries} \
         --priority=10 --block-on-fault=0"
    );
    if device.name.kind == Kind::Dsa {
        let batch = BATCH.min(device.max_batch_size.unwrap_or(BATCH));
        configure += &format!(" --max-batch-size={batch}");
    }
    let transfer = TRANSFER.min(device.max_transfer_size.unwrap_or(TRANSFER));
    configure += &format!(" --max-transfer-size={transfer} --type=user");
    if queue.has_driver_name {
        configure += " --driver-name=user";
    }
    configure += &format!(" --name={NAME}");
    commands.push(configure);
    commands.push(format!("accel-config enable-device {}", device.name));
    commands.push(format!("accel-config enable-wq {path}"));
    commands.extend(permit(
        &Path::new("/dev")
            .join(name::directory(device.name.kind))
            .join(queue.file_name()),
    ));
    commands
}

/// The commands that enable a configured queue.
pub(super) fn enable(device: &Device, queue: &WorkQueue) -> Vec<String> {
    let mut commands = Vec::new();
    if device.state.as_deref() == Some("disabled") {
        commands.push(format!("accel-config enable-device {}", device.name));
    }
    commands.push(format!("accel-config enable-wq {}", queue.name));
    commands
}

/// The commands that enable a queue's address translation. They end the work of its users.
pub(super) fn enable_ats(queue: &WorkQueue) -> Vec<String> {
    let name = queue.name;
    vec![
        format!("accel-config disable-wq {name}"),
        format!("accel-config config-wq {name} --ats-disable=0"),
        format!("accel-config enable-wq {name}"),
    ]
}

/// The commands that allow this process's group to open `path`. Root needs none.
pub(super) fn permit(path: &Path) -> Vec<String> {
    if rustix::process::geteuid().is_root() {
        return Vec::new();
    }
    let (group, path) = (rustix::process::getegid().as_raw(), path.display());
    vec![format!("chgrp {group} {path}"), format!("chmod 660 {path}")]
}

/// The queue to set up, and its number of entries.
fn place(device: &Device) -> Option<(&WorkQueue, u32)> {
    let size = |queue: &WorkQueue| queue.size.unwrap_or(0);
    let total = device.max_work_queues_size.unwrap_or(1).max(1);
    if device.state.as_deref() != Some("disabled") {
        return Some((device.queues.first()?, total));
    }
    let taken = device
        .queues
        .iter()
        .map(size)
        .fold(0_u32, u32::saturating_add);
    let left = total.saturating_sub(taken);
    let fresh = device
        .queues
        .iter()
        .find(|queue| size(queue) == 0 && queue.kind.as_deref() != Some("user"));
    match fresh {
        Some(queue) if left > 0 => Some((queue, left)),
        _ => {
            let largest = device.queues.iter().max_by_key(|queue| size(queue))?;
            Some((largest, size(largest).saturating_add(left).clamp(1, total)))
        }
    }
}
