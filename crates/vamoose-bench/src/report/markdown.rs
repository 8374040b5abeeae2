//! Builds `report.md`.

use super::results::{Group, Results, Section};
use super::table::{self, Table, escaped};
use crate::record::Machine;

const HOW_TO_READ: &str = "\
Figures are medians of the rounds, with the minimum and the maximum in brackets. The cells of a scenario take turns, so that a slow \
period of the machine affects all of them. Only figures of one run can be compared. If the memory of a guest is not equal after a \
migration, the run ends and the migration gives no figure. `results.jsonl` has all figures of each migration.

- **migrate auto**, without options, is Vamoose's default, in bold.
- **seconds**: total time of the migration; `>` marks one that was cancelled after that time.
- **downtime**: from the guest's stop to its start at the destination, by one clock; for guests that do not run, as the source QEMU \
reports it.
- **rounds**: rounds over the guest's memory.
- **link, MB**: bytes sent over the link with the headers of TCP and IP (where unknown: as the sender counts them), in 10^6.
- **CPU, s/GiB**: CPU seconds of both hosts for each GiB of the guest's memory.
- **answers/s**, **p99**: rate of the answers to the guest's clients, and latency of the slowest hundredth: before → during the \
migration.
- **proof**: *equal*: the whole memory of both ends was compared; *checked*: the running guest has verified its memory; *served*: a \
real program continued to run and gave no wrong answer; *cancelled*: took too long, and the guest runs at the source.
";

pub(super) fn of(results: &Results) -> String {
    let command = results.machine.command.replace("```", "");
    let machine = machine(&results.machine).markdown();
    let mut text = format!("# Vamoose beside stock QEMU\n\n```\n{command}\n```\n\n{machine}");
    let comparison = table::comparison(results);
    if !comparison.is_empty() {
        text += "\n## Vamoose's default and stock QEMU's fastest method\n\n";
        text += &comparison.markdown();
    }
    for section in &results.scenarios {
        text += &heading(section);
        for group in &section.groups {
            text += &of_group(group);
        }
    }
    text + "\n## How to read the tables\n\n" + HOW_TO_READ
}

fn heading(section: &Section) -> String {
    let about = section.about.as_ref();
    let about = about.map_or(String::new(), |about| format!("\n{}\n", escaped(about)));
    format!("\n## {}\n{about}", escaped(&section.name))
}

fn of_group(group: &Group) -> String {
    let (title, table) = (escaped(&group.title()), table::of(group).markdown());
    format!("\n### {title}\n\n{table}")
}

fn machine(machine: &Machine) -> Table {
    let mut table = Table::new(["", "measured on"]);
    let memory = format!("{:.1} GiB", machine.memory as f64 / f64::from(1 << 30));
    let processors = format!("{} ({})", machine.processors, machine.processor);
    for (name, value) in [
        ("processors", &processors),
        ("memory", &memory),
        ("kernel", &machine.kernel),
        ("QEMU", &machine.qemu),
        ("Vamoose", &machine.vamoose),
        ("silesia", &machine.corpus),
        ("date", &machine.date),
        ("load average at the start", &machine.load),
    ] {
        table.add([name.to_owned(), escaped(value)]);
    }
    table
}
