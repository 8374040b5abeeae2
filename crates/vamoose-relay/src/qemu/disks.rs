//! Activates the disk images of a guest that does not run, and exports them by QEMU's NBD server.
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
    path::PathBuf,
};

use handover::AttemptId;
use rustix::fd::AsFd as _;
use serde::Deserialize;
use serde_json::json;
use tracing::debug;
use vamoose_link::random_id;

use super::{COPY, Qemu, QemuError};
use crate::{chain, qmp::QmpError};

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
        // The server cannot be reached once its folder is gone.
        let listener = PrivateFolder::new().and_then(|folder| folder.listen());
        self.start_nbd_server(&listener.map_err(QemuError::Listener)?, 1)?;
        let exported = nodes
            .iter()
            .enumerate()
            .try_for_each(|(number, node)| self.export(&format!("{FILE}-{number}"), node, false));
        // This removes the exports, too.
        let stopped = self.execute("nbd-server-stop", json!({}));
        exported.and(stopped)
    }

    /// Makes QEMU's NBD server accept clients of `listener`.
    pub(crate) fn start_nbd_server(
        &mut self,
        listener: &UnixListener,
        most_clients: usize,
    ) -> Result<(), QemuError> {
        self.qmp.pass_file(FILE, listener.as_fd())?;
        let address = json!({ "type": "fd", "data": { "str": FILE } });
        let server = json!({ "addr": address, "max-connections": most_clients });
        let started = self.execute("nbd-server-start", server);
        if started.is_err() {
            self.execute("closefd", json!({ "fdname": FILE }))?;
        }
        started
    }

    /// Exports an image under this id, which activates the image.
    pub(crate) fn export(&mut self, id: &str, node: &str, writable: bool) -> Result<(), QemuError> {
        let export =
            json!({ "type": "nbd", "id": id, "name": id, "node-name": node, "writable": writable });
        self.execute("block-export-add", export)
    }

    /// Ends the NBD server if disks have been copied to it: from now on only the guest writes to its disks.
    pub(crate) fn end_copies(&mut self) -> Result<(), QemuError> {
        let exports = match self.qmp.execute("query-block-exports", json!({})) {
            // Before 5.2 there are none.
            Err(QmpError::Refused { .. }) => return Ok(()),
            exports => exports?,
        };
        let mut ids = exports.as_array().into_iter().flatten();
        let is_copy = |id: &str| id.starts_with(COPY);
        match ids.any(|export| export["id"].as_str().is_some_and(is_copy)) {
            true => self.execute("nbd-server-stop", json!({})),
            false => Ok(()),
        }
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

/// A folder for the socket of an NBD server, which only this process and root can reach. Removed on drop.
pub(crate) struct PrivateFolder(PathBuf);

impl PrivateFolder {
    pub(crate) fn new() -> io::Result<Self> {
        let folder = env::temp_dir().join(format!("vamoose-{}", AttemptId(random_id()?)));
        fs::DirBuilder::new().mode(0o700).create(&folder)?;
        Ok(Self(folder))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("nbd")
    }

    /// A listener to be passed to QEMU.
    pub(crate) fn listen(&self) -> io::Result<UnixListener> {
        UnixListener::bind(self.socket())
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        // What cannot be removed stays as private as it was.
        let _ = fs::remove_dir_all(&self.0);
    }
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
        let listener = PrivateFolder::new().unwrap().listen().unwrap();
        let address = listener.local_addr().unwrap();
        assert!(!address.as_pathname().unwrap().exists());
    }
}
