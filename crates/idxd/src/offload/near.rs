//! The NUMA node that this process is bound to, by `numactl`, `taskset`, a cpuset or libvirt's pinning.

use std::{fs, ops::RangeInclusive, path::Path};

use crate::discovery::Root;

/// The node of all processors that this process may use; `None` if these belong to several nodes.
pub(super) fn bound_node(root: &Root) -> Option<u32> {
    let status = fs::read_to_string(root.proc.join("self/status")).ok()?;
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .and_then(parse_list)?;
    let nodes = fs::read_dir(root.sys.join("devices/system/node")).ok()?;
    nodes.flatten().find_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix("node")?.parse();
        let processors = processors_of(&entry.path())?;
        // The kernel's lists have runs of maximal length, so a run of the node contains each run that belongs to it.
        let has = |run: &RangeInclusive<u32>| {
            processors
                .iter()
                .any(|own| own.contains(run.start()) && own.contains(run.end()))
        };
        allowed.iter().all(has).then_some(number.ok()?)
    })
}

fn processors_of(node: &Path) -> Option<Vec<RangeInclusive<u32>>> {
    parse_list(&fs::read_to_string(node.join("cpulist")).ok()?)
}

/// Parses a list such as `0-3,8,10-11`.
fn parse_list(list: &str) -> Option<Vec<RangeInclusive<u32>>> {
    let run = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then_some(first..=last)
    };
    list.trim().split(',').map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node_of(allowed: &str, nodes: &[(u32, &str)]) -> Option<u32> {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::under(directory.path());
        let write = |path: std::path::PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let status = format!("Name:\tvamoose\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n");
        write(root.proc.join("self/status"), &status);
        let all = root.sys.join("devices/system/node");
        write(all.join("online"), "0-1\n");
        for (number, processors) in nodes {
            let list = all.join(format!("node{number}/cpulist"));
            write(list, &format!("{processors}\n"));
        }
        bound_node(&root)
    }

    #[test]
    fn a_process_on_one_node_is_near_to_it() {
        let nodes = [(0, "0-3,8-11"), (1, "4-7,12-15"), (2, "")];
        for (allowed, node) in [
            ("0", Some(0)),
            ("1-3,8", Some(0)),
            ("0-3,8-11", Some(0)),
            ("12-15", Some(1)),
            ("4,6,13", Some(1)),
            ("0-7", None),
            ("3-4", None),
            ("0,4", None),
            ("16", None),
            ("", None),
            ("3-1", None),
            ("all", None),
        ] {
            assert_eq!(node_of(allowed, &nodes), node, "{allowed:?}");
        }
        assert_eq!(node_of("0", &[]), None);
        assert_eq!(node_of("0", &[(0, "nonsense"), (3, "0")]), Some(3));
    }

    #[test]
    fn a_host_without_files_has_no_nodes() {
        assert_eq!(bound_node(&Root::under(Path::new("/nowhere"))), None);
    }
}
