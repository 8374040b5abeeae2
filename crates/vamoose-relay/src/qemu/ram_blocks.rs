//! The RAM blocks of a QEMU, as the QEMU lists them.

use std::path::Path;

use serde_json::json;

use super::{Qemu, QemuError};
use crate::process::ProcessError;

/// A RAM block of a QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RamBlock {
    /// The name in packets.
    pub(crate) name: String,
    /// Bytes in use, and the maximum.
    pub(crate) used: u64,
    pub(crate) total: u64,
    /// Address in QEMU's process.
    pub(crate) address: u64,
    pub(crate) writable: bool,
}

impl Qemu {
    /// The RAM blocks. None if QEMU does not report their addresses (before 8.0).
    pub(crate) fn ram_blocks(&mut self) -> Result<Vec<RamBlock>, QemuError> {
        const COMMAND: &str = "x-query-ramblock";
        const TEXT: &str = "human-readable-text";
        let answer = self.qmp.execute(COMMAND, json!({}))?;
        let table = answer[TEXT].as_str();
        Ok(parse(table.ok_or(QemuError::Answer(COMMAND, TEXT))?))
    }

    /// Which of these capabilities is on.
    pub(crate) fn first_capability_on<'a>(
        &mut self,
        names: &[&'a str],
    ) -> Result<Option<&'a str>, QemuError> {
        let capabilities = self.settings()?.capabilities;
        let mut names = names.iter().copied();
        Ok(names.find(|name| capabilities.get(*name) == Some(&true)))
    }

    /// Runs `look` on the folder of QEMU's process in /proc. The result belongs to this very process.
    pub(crate) fn look_at_process<T>(
        &mut self,
        look: impl FnOnce(&Path) -> T,
    ) -> Result<T, ProcessError> {
        let process = self.process()?;
        let found = look(Path::new(&format!("/proc/{}", process.id.pid)));
        if process.has_ended()? {
            return Err(ProcessError::Ended(process.id.pid));
        }
        Ok(found)
    }
}

/// The rows that have all columns: name, page size and its unit, offset, used, total, address, `rw` or `ro`.
fn parse(table: &str) -> Vec<RamBlock> {
    let number = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let block = |row: &str| {
        let columns = row.split_ascii_whitespace().collect::<Vec<_>>();
        let [name, _, _, _, used, total, address, access] = columns[..] else {
            return None;
        };
        Some(RamBlock {
            name: name.to_owned(),
            used: number(used)?,
            total: number(total)?,
            address: number(address)?,
            writable: access == "rw",
        })
    };
    table.lines().filter_map(block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_with_addresses_is_understood() {
        let blocks = parse(
            "              Block Name    PSize              Offset               Used              Total                HVA  RO\n\
             \x20                    mem    2 MiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007f1edbfff000  rw\n\
             \x20   /rom@etc/acpi/tables    4 KiB  0x00000000070c0000 0x0000000000020000 0x0000000000200000 0x00007f1ed9800000  ro\n",
        );
        let names = blocks.iter().map(|block| block.name.as_str());
        assert_eq!(names.collect::<Vec<_>>(), ["mem", "/rom@etc/acpi/tables"]);
        let RamBlock {
            used,
            total,
            address,
            writable,
            ..
        } = blocks[0];
        assert_eq!(
            (used, total, address, writable),
            (64 << 20, 64 << 20, 0x7f1e_dbff_f000, true)
        );
        assert!(!blocks[1].writable && blocks[1].used < blocks[1].total);
    }

    #[test]
    fn a_list_without_addresses_has_nothing_for_us() {
        let table = "     mem    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000\n";
        assert!(parse(table).is_empty());
    }
}
