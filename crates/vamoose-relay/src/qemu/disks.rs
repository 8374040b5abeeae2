//! Who has the images of a guest that does not run.
//!
//! A source inactivates its images when it has sent its guest. With `late-block-activate` a destination leaves them alone
//! until `cont`, so that they are active at one end only. A guest that is to stay paused needs them, too: a QEMU before 10.0
//! aborts when a guest with inactive images is migrated on. From 10.0 on there is a command for that. Older ones activate an
//! image for whoever exports it; so each image is exported for a moment, read-only, by a server that nobody can reach.

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
    /// Makes the images this QEMU's, without running the guest. Those that are already stay as they are.
    pub(crate) fn activate_disks(&mut self) -> Result<(), QemuError> {
        if self.schema.has_command("blockdev-set-active") {
            return self.execute("blockdev-set-active", json!({ "active": true }));
        }
        let roots = self.block_graph()?.roots();
        if roots.is_empty() {
            return Ok(());
        }
        self.export_to_nobody(&roots)?;
        // An image that is locked by another process is exported all the same.
        match self.block_graph()?.inactive() {
            Some(disk) => Err(QemuError::Inactive(disk)),
            None => Ok(()),
        }
    }

    fn export_to_nobody(&mut self, nodes: &[String]) -> Result<(), QemuError> {
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
        // It takes its exports with it.
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

/// What QEMU calls the listener's file.
const FILE: &str = "vamoose";

/// A socket at which QEMU can listen, and to which nobody can connect: it has no name any more, and the folder in which it had
/// one was private.
fn unreachable_listener() -> io::Result<UnixListener> {
    let folder = env::temp_dir().join(format!("vamoose-{}", AttemptId(random_id()?)));
    fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let listener = UnixListener::bind(folder.join("nobody"));
    fs::remove_dir_all(&folder)?;
    listener
}

/// QEMU's images and who uses them.
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
    /// What the parent may do with the child. A device may do nothing with an image that is inactive.
    perm: Vec<String>,
}

impl Graph {
    fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(move |node| node.kind == kind)
    }

    /// The images that are no part of another one: activating these activates all.
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

    /// A disk with an image over another one, a drive without a device, a drive without an image.
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
    fn a_listener_without_a_name_can_be_reached_by_nobody() {
        let listener = unreachable_listener().unwrap();
        let address = listener.local_addr().unwrap();
        assert!(!address.as_pathname().unwrap().exists());
    }
}
