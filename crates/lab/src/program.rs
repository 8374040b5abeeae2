//! Linux guests under TCG that run real programs: Redis or PostgreSQL. `scripts/setup workloads` fetches them. The guest's script
//! is `guest/workload`; the network is [`Lan`].

use anyhow::{Result, ensure};

use crate::guest::{Content, Image, PROGRAM};
use crate::net::Lan;
use crate::qemu::{Binary, Builder};
use crate::target_dir;

/// The program in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Redis on port 6379.
    Redis,
    /// PostgreSQL under load: pgbench without pauses, and a client that says `tick N` on the serial port after its Nth commit.
    Postgres,
}

impl Program {
    /// Whether `scripts/setup guest workloads` has fetched it.
    pub fn is_there(self) -> bool {
        let tree = target_dir().join("workloads").join(self.name());
        tree.is_dir() && target_dir().join("guest/drivers").is_dir()
    }

    /// The boot image of a guest with this program.
    pub fn image(self) -> Result<Image> {
        let tree = target_dir().join("workloads").join(self.name());
        ensure!(
            self.is_there(),
            "no {}: run scripts/setup guest workloads",
            tree.display()
        );
        let mut content = Content::system(include_bytes!("../guest/workload"))?;
        content.add_tree(&tree, "")?;
        let part = include_bytes!("../guest/database");
        content.add("database", PROGRAM, part.to_vec());
        Image::of(content)
    }

    /// A machine with `ram` bytes that runs this program, on the [`Lan`].
    pub fn machine(self, image: &Image, binary: &Binary, ram: u64) -> Builder {
        let parameters = format!("vamoose.workload={}", self.name());
        Lan::connect(image.boot(binary, ram, &parameters))
    }

    /// The name of its file tree, and of the function in the guest's script.
    fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Postgres => "postgres",
        }
    }
}
