//! The images of a guest's disks, as far as they can be copied from one QEMU to another.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::json;
use vamoose_link::Bytes;

use super::{Fact, Fit, Qemu, QemuError};

/// A disk, as both QEMUs know it: fields of `inspected`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Disk {
    /// The drive's id; without one, the device's.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// The backing file of its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) backing: Option<String>,
}

/// A writable disk and its block node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) disk: Disk,
    pub(crate) node: String,
}

/// Beginning of the ids of all that a copy has in a QEMU, by which a later command finds what is left of an earlier one.
pub(crate) const COPY: &str = "vamoose-disk-";

/// Id of a disk's export at the destination, and of its job and node at the source.
pub(crate) fn copy_id(number: usize) -> String {
    format!("{COPY}{number}")
}

impl Qemu {
    /// The guest's writable disks.
    pub(crate) fn images(&mut self) -> Result<Vec<Image>, QemuError> {
        let entries: Vec<Entry> = self.list("query-block", json!({}))?;
        Ok(entries.into_iter().filter_map(Entry::image).collect())
    }
}

/// Compares the disks `here` that are to be copied with those at `host`. `increments`: only what images have on top of their
/// backing files is copied.
pub(crate) fn compare_disks(
    here: &[Disk],
    there: &[Disk],
    host: &str,
    increments: bool,
) -> Vec<Fact> {
    let facts = here.iter().map(|disk| {
        let Disk { name, bytes, .. } = disk;
        let size = Bytes(*bytes);
        let Some(theirs) = there.iter().find(|it| it.name == *name) else {
            let text = format!(
                "disk {name}: {size} here, none at {host}; start the QEMU there with the same disks"
            );
            return Fact::new(Fit::Fails, &text);
        };
        if theirs.bytes != *bytes {
            let their_size = Bytes(theirs.bytes);
            let text = format!(
                "disk {name}: {size} here, {their_size} at {host}; make an image of {bytes} bytes there (qemu-img create)"
            );
            return Fact::new(Fit::Fails, &text);
        }
        let backing = disk.backing.as_ref().filter(|_| increments);
        match (backing, &theirs.backing) {
            (Some(ours), None) => {
                let text = format!(
                    "disk {name}: on top of {ours} here, of nothing at {host}; make the image there with that backing file \
                     (qemu-img create -b)"
                );
                Fact::new(Fit::Fails, &text)
            }
            (Some(ours), Some(theirs)) if file_name(ours) != file_name(theirs) => {
                let text = format!("disk {name}: on top of {ours} here, of {theirs} at {host}");
                Fact::new(Fit::MayFail, &text)
            }
            _ => Fact::new(Fit::Same, &format!("disk {name}: {size}")),
        }
    });
    facts.collect()
}

/// Of a path, or of a description of an image, which QEMU has in place of a path for some.
fn file_name(of: &str) -> &str {
    let name = Path::new(of).file_name().and_then(|name| name.to_str());
    name.unwrap_or(of)
}

/// A drive, as QEMU lists it.
#[derive(Deserialize)]
struct Entry {
    /// The drive's id.
    #[serde(default)]
    device: String,
    /// The id or the path of the guest's device. Without a device, the image is not the guest's.
    qdev: Option<String>,
    inserted: Option<Inserted>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Inserted {
    node_name: Option<String>,
    ro: bool,
    image: Info,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Info {
    virtual_size: u64,
    backing_image: Option<Backing>,
}

#[derive(Deserialize)]
struct Backing {
    filename: String,
}

impl Entry {
    fn image(self) -> Option<Image> {
        let (device, inserted) = (self.qdev?, self.inserted?);
        let node = inserted.node_name.filter(|_| !inserted.ro)?;
        let device = device.trim_start_matches("/machine/peripheral/");
        let name = match self.device.as_str() {
            "" => device.trim_end_matches("/virtio-backend").to_owned(),
            id => id.to_owned(),
        };
        let disk = Disk {
            name,
            bytes: inserted.image.virtual_size,
            backing: inserted.image.backing_image.map(|it| it.filename),
        };
        Some(Image { disk, node })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str, bytes: u64, backing: Option<&str>) -> Disk {
        Disk {
            name: name.to_owned(),
            bytes,
            backing: backing.map(str::to_owned),
        }
    }

    #[test]
    fn disks_of_a_guest_are_writable_and_have_a_device() {
        let image = json!({ "virtual-size": 4096, "filename": "top",
            "backing-image": { "filename": "/base.raw", "virtual-size": 4096 } });
        let inserted =
            |node: &str, ro: bool| json!({ "node-name": node, "ro": ro, "image": image });
        let virtio = "/machine/peripheral/vdb/virtio-backend";
        let anonymous = "/machine/peripheral-anon/device[0]/virtio-backend";
        let answer = json!([
            { "device": "disk", "qdev": anonymous, "inserted": inserted("#block1", false) },
            { "device": "", "qdev": virtio, "inserted": inserted("b", false) },
            { "device": "", "qdev": "sda", "inserted": inserted("c", false) },
            { "device": "read-only", "qdev": "cd", "inserted": inserted("d", true) },
            { "device": "empty", "qdev": "floppy" },
            { "device": "unused", "inserted": inserted("e", false) },
        ]);
        let entries: Vec<Entry> = serde_json::from_value(answer).unwrap();
        let images: Vec<_> = entries.into_iter().filter_map(Entry::image).collect();
        let expected =
            [("disk", "#block1"), ("vdb", "b"), ("sda", "c")].map(|(name, node)| Image {
                disk: disk(name, 4096, Some("/base.raw")),
                node: node.to_owned(),
            });
        assert_eq!(images, expected);
    }

    #[test]
    fn what_differs_says_what_to_do() {
        let here = [disk("vda", 4096, Some("/a/base.raw"))];
        let with = |bytes, backing| vec![disk("vda", bytes, backing)];
        for (there, increments, fit, what) in [
            (vec![], false, Fit::Fails, "none at kvm2; start the QEMU"),
            (
                with(8192, None),
                false,
                Fit::Fails,
                "4 KiB here, 8 KiB at kvm2; make an image of 4096 bytes",
            ),
            (with(4096, None), false, Fit::Same, "disk vda: 4 KiB"),
            (
                with(4096, None),
                true,
                Fit::Fails,
                "of nothing at kvm2; make the image",
            ),
            (
                with(4096, Some("/b/base.raw")),
                true,
                Fit::Same,
                "disk vda: 4 KiB",
            ),
            (
                with(4096, Some("/a/other.raw")),
                true,
                Fit::MayFail,
                "of /a/other.raw at kvm2",
            ),
        ] {
            let facts = compare_disks(&here, &there, "kvm2", increments);
            assert_eq!(facts.len(), 1);
            assert_eq!(facts[0].fit, fit, "{}", facts[0]);
            assert!(facts[0].to_string().contains(what), "{}", facts[0]);
        }
    }
}
