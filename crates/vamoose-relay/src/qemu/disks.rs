//! Activates the disk images of a guest that does not run.
//!
//! A source inactivates its images when it has sent its guest. With `late-block-activate` a destination leaves the images inactive
//! until `cont`, so that they are active at one end only. A guest that is to stay paused needs active images, too: QEMU before 10.0
//! aborts when a guest with inactive images is migrated again. From 10.0 on a command activates images. Older versions
//! activate an image when it is exported, so each image that is not part of another is exported for a moment, read-only, by an
//! unreachable server.

use std::{
    collections::BTreeSet,
    env, fs, io,
    os::unix::{fs::DirBuilderExt as _, net::UnixListener},
};

use handover::AttemptId;
use rustix::fd::AsFd as _;
use serde::Deserialize;
use serde_json::json;
use tracing::debug;
use vamoose_link::random_id;

use super::{Qemu, QemuError};
use crate::chain;

impl Qemu {
    /// Activates all images in this QEMU, without running the guest.
    pub(crate) fn activate_disks(&mut self) -> Result<(), QemuError> {
        let commands = self.qmp.execute("query-commands", json!({}))?;
        let mut commands = commands.as_array().into_iter().flatten();
        if commands.any(|command| command["name"] == "blockdev-set-active") {
            return self.execute("blockdev-set-active", json!({ "active": true }));
        }
        let roots = self.block_graph()?.roots();
        if roots.is_empty() {
            return Ok(());
        }
        self.export_unreachable(&roots)?;
        // An image that another process has locked is exported, but stays inactive.
        match self.block_graph()?.inactive() {
            Some(disk) => Err(QemuError::Inactive(disk)),
            None => Ok(()),
        }
    }

    fn export_unreachable(&mut self, nodes: &[String]) -> Result<(), QemuError> {
        let listener = unreachable_listener().map_err(QemuError::Listener)?;
        self.qmp.give(FILE, listener.as_fd())?;
        let address = json!({ "type": "fd", "data": { "str": FILE } });
        let server = json!({ "addr": address, "max-connections": 1 });
        if let Err(error) = self.execute("nbd-server-start", server) {
            self.execute("closefd", json!({ "fdname": FILE }))?;
            return Err(error);
        }
        let exported = nodes.iter().enumerate().try_for_each(|(number, node)| {
            let id = format!("{FILE}-{number}");
            let export = json!({ "type": "nbd", "id": id, "node-name": node });
            self.execute("block-export-add", export)
        });
        // This removes the exports, too.
        let stopped = self.execute("nbd-server-stop", json!({}));
        exported.and(stopped)
    }

    fn block_graph(&mut self) -> Result<Graph, QemuError> {
        let command = "x-debug-query-block-graph";
        let answer = self.qmp.execute(command, json!({}))?;
        serde_json::from_value(answer).map_err(|error| {
            debug!("{}", chain(&error));
            QemuError::Answer(command, "nodes and edges")
        })
    }
}

/// QEMU's name for the listener's file.
const FILE: &str = "vamoose";

/// A socket at which QEMU can listen, and to which no process can connect: its file has been removed from a private folder.
fn unreachable_listener() -> io::Result<UnixListener> {
    let folder = env::temp_dir().join(format!("vamoose-{}", AttemptId(random_id()?)));
    fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let listener = UnixListener::bind(folder.join("nobody"));
    fs::remove_dir_all(&folder)?;
    listener
}

/// QEMU's images and their users.
#[derive(Deserialize)]
struct Graph {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
}

#[derive(Deserialize)]
struct Node {
    id: u64,
    #[serde(rename = "type")]
    kind: String,
    name: String,
}

#[derive(Deserialize)]
struct Edge {
    parent: u64,
    child: u64,
    /// The parent's permissions on the child. A device has none on an inactive image.
    perm: Vec<String>,
}

impl Graph {
    fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(move |node| node.kind == kind)
    }

    /// The images that are not part of another image. Activating these activates all.
    fn roots(&self) -> Vec<String> {
        let images = self.of_kind("block-driver").map(|node| node.id);
        let images = images.collect::<BTreeSet<_>>();
        let inner = self.edges.iter().filter(|it| images.contains(&it.parent));
        let inner = inner.map(|it| it.child).collect::<BTreeSet<_>>();
        let roots = self
            .of_kind("block-driver")
            .filter(|it| !inner.contains(&it.id));
        roots.map(|node| node.name.clone()).collect()
    }

    /// A disk whose image is inactive.
    fn inactive(&self) -> Option<String> {
        let disk = self.of_kind("block-backend").find(|disk| {
            let uses = |edge: &Edge| edge.parent == disk.id && edge.perm.is_empty();
            self.edges.iter().any(uses)
        });
        disk.map(|disk| disk.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// A disk whose image has a backing image, an image that no disk uses, a disk without an image.
    fn graph(perm: &[&str]) -> Graph {
        let node = |id: u64, kind: &str, name: &str| -> Value {
            json!({ "id": id, "type": kind, "name": name })
        };
        let answer = json!({
            "nodes": [
                node(1, "block-backend", "disk"), node(2, "block-driver", "top"),
                node(3, "block-driver", "file"), node(4, "block-driver", "base"),
                node(5, "block-driver", "alone"), node(6, "block-backend", "empty"),
            ],
            "edges": [
                { "parent": 1, "child": 2, "name": "root", "perm": perm, "shared-perm": [] },
                { "parent": 2, "child": 3, "name": "file", "perm": [], "shared-perm": [] },
                { "parent": 2, "child": 4, "name": "backing", "perm": [], "shared-perm": [] },
            ],
        });
        serde_json::from_value(answer).unwrap()
    }

    #[test]
    fn images_are_activated_from_their_roots() {
        assert_eq!(graph(&[]).roots(), ["top", "alone"]);
    }

    #[test]
    fn an_image_that_its_disk_cannot_use_is_inactive() {
        assert_eq!(graph(&[]).inactive().as_deref(), Some("disk"));
        assert_eq!(graph(&["consistent-read"]).inactive(), None);
    }

    #[test]
    fn unlinked_listener_is_unreachable() {
        let listener = unreachable_listener().unwrap();
        let address = listener.local_addr().unwrap();
        assert!(!address.as_pathname().unwrap().exists());
    }
}
