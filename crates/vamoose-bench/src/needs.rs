//! Requirements of a run on this host, and the commands that install missing ones.

use std::collections::BTreeMap;
use std::path::Path;

use lab::guest::{Image, Part};
use lab::real::Real;
use lab::{net, proc};

use crate::record::Cell;
use crate::scenario::Rate;

/// Capabilities of this host.
pub(crate) struct Found {
    /// The error tells why links cannot be made.
    links: Result<(), String>,
    /// The part that running guests lack.
    guest: Option<Part>,
    /// Bytes.
    memory: u64,
    shared_memory: bool,
}

const KERNEL: &str = "apt install linux-image-amd64, or scripts/setup guest";
const BUSYBOX: &str = "apt install busybox-static, or scripts/setup guest";
const WORKLOADS: &str = "scripts/setup guest workloads, in Vamoose's sources; a program that was not built there finds them by \
    VAMOOSE_TARGET=SOURCES/target";

impl Found {
    /// Looks at this host.
    pub(crate) fn look() -> Self {
        Self {
            links: net::available().map_err(|error| format!("{error:#}")),
            guest: Image::missing(),
            memory: proc::available_memory().unwrap_or(0),
            shared_memory: Path::new("/dev/shm").is_dir(),
        }
    }

    pub(crate) fn has_links(&self) -> bool {
        self.links.is_ok()
    }

    /// Maximum memory of a guest that does not run. There are two such guests, and the host needs memory, too.
    pub(crate) fn most_ram(&self) -> u64 {
        (self.memory / 4) >> 20 << 20
    }

    /// Splits off the cells that cannot be measured. Returns the others, and lines for the user about the missing requirements.
    pub(crate) fn sort(&self, mut cells: Vec<Cell>) -> (Vec<Cell>, Vec<String>) {
        let mut missing = BTreeMap::<_, usize>::new();
        cells.retain(|cell| {
            let lacks = self.missing(cell);
            let can_be_measured = lacks.is_none();
            if let Some(lacks) = lacks {
                *missing.entry(lacks).or_default() += 1;
            }
            can_be_measured
        });
        let line = |((what, remedy), cells): ((String, &str), usize)| {
            format!("not here: {what}; without it {cells} cells are left out ({remedy})")
        };
        (cells, missing.into_iter().map(line).collect())
    }

    /// The first requirement that a cell lacks, and its remedy.
    fn missing(&self, cell: &Cell) -> Option<(String, &'static str)> {
        let missing = |what: &str, remedy| Some((what.to_owned(), remedy));
        let program = cell.guest.program();
        if !self.shared_memory {
            return missing("/dev/shm", "mount -t tmpfs tmpfs /dev/shm");
        }
        if let Err(why) = &self.links
            && (cell.link != Rate::Open || program.is_some())
        {
            let what = format!("links of given rates ({why})");
            return missing(&what, "run it as root, with Debian's package iproute2");
        }
        if cell.guest.real().is_some() && !Real::is_there() {
            return missing("the guests' programs", WORKLOADS);
        }
        if cell.guest.runs() {
            match self.guest {
                Some(Part::Kernel) => return missing("a kernel for guests", KERNEL),
                Some(Part::Busybox) => return missing("a static busybox for guests", BUSYBOX),
                Some(Part::Ticker) => return missing("the guests' ticker", "scripts/setup guest"),
                None => {}
            }
            if program.is_some_and(|program| !program.is_there()) {
                return missing("the guests' programs", WORKLOADS);
            }
        }
        if cell.ram.saturating_mul(2) > self.memory {
            let what = format!("memory for two guests of {} MiB", cell.ram >> 20);
            return missing(&what, "--ram SIZE makes guests that do not run smaller");
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;

    fn cells() -> Vec<Cell> {
        let scenario = "about = ''\nguests = ['zero', 'idle']\nlinks = ['open', '1G']\nram = '64M'\nrounds = 1\n\
            contenders = ['qemu none', 'migrate none']";
        Scenario::parse(scenario)
            .unwrap()
            .cells("test", 1 << 30, 20)
    }

    #[test]
    fn missing_requirements_are_named_once_and_the_rest_is_measured() {
        let found = Found {
            links: Err("no root".to_owned()),
            guest: None,
            memory: 1 << 30,
            shared_memory: true,
        };
        let (can, lines) = found.sort(cells());
        let can: Vec<_> = can.iter().map(|cell| cell.guest.to_string()).collect();
        assert_eq!(can, ["zero", "zero", "idle", "idle"]);
        assert_eq!(
            lines,
            [
                "not here: links of given rates (no root); without it 4 cells are left out (run it as root, with Debian's package iproute2)",
            ]
        );
    }
}
