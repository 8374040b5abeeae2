//! The commands of README.md and the handbook are typed, as they are there and in their order, at two hosts (`hosts.rs`, which
//! has the few words that are replaced). A page is [`TYPED`] by a test, which has to type all of it; what no test can type is in
//! [`ELSEWHERE`], with who does, or why nobody does.
//!
//! Commands are the lines of blocks of `sh`, and those behind a prompt in blocks of `console`.

use std::{collections::VecDeque, fs, path::Path, time::Instant};

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    qemu::{Builder, Qemu},
    ram::{self, Fill},
    stand_in,
};
use serde_json::Value;
use tempfile::TempDir;

use super::{
    Fence, PAGES, fences, guest,
    hosts::{Host, Hosts, PLACEHOLDERS, Terminal, share_disk},
    read,
};
use crate::{
    attempts::Scene,
    common::{LIMIT, MIB, expect_equal, set_up, vamoose},
};

/// Makes a test of each function that types a page, and the list of these pages.
macro_rules! typed {
    ($($page:literal: $test:ident,)*) => {
        $(
            #[test]
            fn $test() -> Result<()> {
                Script::of($page).play(scenes::$test)
            }
        )*

        /// Pages that a test types, all but what is [`ELSEWHERE`].
        const TYPED: &[&str] = &[$($page,)*];
    };
}

typed! {
    "README.md": the_readme,
    "docs/accelerators.md": accelerators,
    "docs/hand-over.md": hand_over,
    "docs/libvirt.md": relays_for_libvirt,
    "docs/methods.md": methods,
    "docs/reading-a-report.md": reading_a_report,
    "docs/relay.md": relays,
    "docs/security.md": security,
    "docs/two-hosts.md": two_hosts,
}

/// Commands by their page and beginning, and where they are run instead, or why nowhere.
const ELSEWHERE: &[(&str, &str, Where)] = &[
    ("README.md", "make demo", BY_HAND),
    ("README.md", "make test", Where::Gate("make test")),
    ("docs/accelerators.md", "modprobe idxd", DEVICES),
    ("docs/accelerators.md", "for e in", DEVICES),
    ("docs/accelerators.md", "accel-config", DEVICES),
    ("docs/accelerators.md", "chmod 666 /dev/dsa", DEVICES),
    ("docs/accelerators.md", "vamoose selftest --hw", DEVICES),
    (
        "docs/busy-guests.md",
        "vamoose migrate",
        Where::Similar("policy.rs", "\"--on-timeout\", action"),
    ),
    (
        "docs/cloud-hypervisor.md",
        "ch-remote",
        Where::Nobody("Cloud Hypervisor is in no registry"),
    ),
    (
        "docs/evacuate.md",
        "vamoose evacuate",
        Where::Similar("libvirt/evacuate.rs", "\"evacuate\""),
    ),
    ("docs/gateway.md", "vamoose libvirt setup", FIRST),
    (
        "docs/gateway.md",
        "systemctl restart virtqemud",
        Where::Nobody("the libvirt of Debian 12 is one daemon"),
    ),
    ("docs/install.md", "apt install", FIRST),
    ("docs/install.md", "runuser -u", FIRST),
    ("docs/install.md", "cat >/etc", FIRST),
    ("docs/install.md", "vamoose libvirt setup", FIRST),
    ("docs/install.md", "systemctl restart", FIRST),
    ("docs/install.md", "virsh migrate", FIRST),
    (
        "docs/install.md",
        "vamoose bench",
        Where::Make("package-test"),
    ),
    (
        "docs/install.md",
        "systemctl enable",
        Where::Make("package-test"),
    ),
    (
        "docs/libvirt.md",
        "vamoose libvirt migrate",
        Where::Similar("libvirt.rs", "\"libvirt\", \"migrate\", \"web1\""),
    ),
    (
        "docs/libvirt.md",
        "virsh migrate",
        Where::Similar("libvirt.rs", "\"migrate\", \"--live\", \"web1\""),
    ),
    (
        "docs/post-copy.md",
        "vamoose migrate web1 kvm2 --postcopy",
        Where::Similar("post_copy.rs", "\"--postcopy\""),
    ),
    (
        "docs/post-copy.md",
        "vamoose migrate web1 kvm2 --timeout",
        Where::Similar("post_copy.rs", "\"--on-timeout\""),
    ),
    ("docs/reading-a-report.md", "make bench", BY_HAND),
    (
        "docs/reading-a-report.md",
        "vamoose bench",
        Where::Similar(
            "../../../vamoose-bench/src/codec.rs",
            "every_case_encodes_and_decodes",
        ),
    ),
    (
        "docs/storage.md",
        "vamoose migrate web1 kvm2 --storage all",
        Where::Similar("storage.rs", "\"--storage\", \"all\""),
    ),
    (
        "docs/storage.md",
        "vamoose libvirt migrate",
        Where::Similar("libvirt.rs", "\"--copy-storage\", \"all\""),
    ),
    (
        "docs/storage.md",
        "virsh migrate",
        Where::Similar("libvirt/hosts/storage.rs", "\"--copy-storage-all\""),
    ),
];

/// Who runs a command that is not typed here.
enum Where {
    /// A stage of `.ci/run`, by these words.
    Gate(&'static str),
    /// A test in this file, found by this text, with the names of the lab's hosts.
    Similar(&'static str, &'static str),
    /// A target of the Makefile that the gate does not have, as it needs fresh machines.
    Make(&'static str),
    /// Nobody, for this reason.
    Nobody(&'static str),
}

const FIRST: Where = Where::Make("first-migration");
const DEVICES: Where = Where::Nobody("it needs Intel's DSA and IAA");
const BY_HAND: Where = Where::Nobody("it takes minutes of a release build: for people");

/// No command of the documentation is forgotten: its page is typed, or it is [`ELSEWHERE`], and who is said to run it is there.
#[test]
fn every_command_is_run_or_says_why_not() {
    let mut wrong = Vec::new();
    let mut used = vec![false; ELSEWHERE.len()];
    for (page, text) in &*PAGES {
        let page = page.to_str().unwrap();
        // What made results is not for readers to type.
        if page.starts_with("docs/results") {
            continue;
        }
        for command in commands(text) {
            match elsewhere(page, &command) {
                Some(entry) => used[entry] = true,
                None if TYPED.contains(&page) => {}
                None => wrong.push(format!("{page}: nobody runs: {command}")),
            }
        }
        for line in hidden(text) {
            wrong.push(format!(
                "{page}: its block is neither sh nor console: {line}"
            ));
        }
    }
    for ((page, begin, by), is_used) in ELSEWHERE.iter().zip(used) {
        let name = format!("{page}: {begin}");
        match by {
            _ if !is_used => wrong.push(format!("{name}: no such command")),
            Where::Gate(words) if !read(Path::new(".ci/run")).contains(words) => {
                wrong.push(format!("{name}: .ci/run does not run {words}"));
            }
            Where::Similar(file, text) => {
                let tests = Path::new("crates/vamoose/tests/all").join(file);
                if !read(&tests).contains(text) {
                    wrong.push(format!("{name}: {file} does not have {text}"));
                }
            }
            Where::Make(target)
                if !read(Path::new("Makefile")).contains(&format!("\n{target}:")) =>
            {
                wrong.push(format!("{name}: there is no make {target}"));
            }
            Where::Nobody(why) => println!("{name} is run by nobody: {why}"),
            Where::Gate(_) | Where::Make(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_placeholder_is_used() {
    let all: Vec<String> = PAGES.values().flat_map(|text| commands(text)).collect();
    for (placeholder, _) in PLACEHOLDERS {
        let has_it = |command: &String| command.contains(placeholder);
        assert!(all.iter().any(has_it), "no command has {placeholder}");
    }
}

fn elsewhere(page: &str, command: &str) -> Option<usize> {
    let is_it = |(on, begin, _): &(&str, &str, Where)| *on == page && command.starts_with(begin);
    ELSEWHERE.iter().position(is_it)
}

/// What is left to type of a page.
struct Script {
    page: &'static str,
    left: VecDeque<String>,
}

impl Script {
    fn of(page: &'static str) -> Self {
        let commands = commands(&PAGES[Path::new(page)]);
        let own = commands.into_iter();
        Self {
            page,
            left: own.filter(|it| elsewhere(page, it).is_none()).collect(),
        }
    }

    /// Has a scene type all of it, unless it is skipped.
    fn play(mut self, scene: fn(&mut Self, Hosts) -> Result<Played>) -> Result<()> {
        let Some(hosts) = Hosts::start_or_skip()? else {
            return Ok(());
        };
        match scene(&mut self, hosts).with_context(|| format!("typing {}", self.page))? {
            Played::Skipped => Ok(()),
            Played::ToTheEnd => {
                ensure!(
                    self.left.is_empty(),
                    "{} goes on: {:?}",
                    self.page,
                    self.left
                );
                Ok(())
            }
        }
    }

    /// The next command, which begins like this.
    fn next(&mut self, begin: &str) -> Result<String> {
        let command = self
            .left
            .pop_front()
            .context("there is no further command")?;
        ensure!(command.starts_with(begin), "not {begin} but {command}");
        Ok(command)
    }
}

#[derive(Clone, Copy)]
enum Played {
    ToTheEnd,
    Skipped,
}

/// The server of pages that leave it to another one.
const SERVE: &str = "vamoose serve";

mod scenes {
    use super::*;

    /// Everything by the page, from the keys to the guest that goes on; then the same command again.
    pub(super) fn two_hosts(script: &mut Script, mut hosts: Hosts) -> Result<Played> {
        share_disk(&hosts)?;
        exchange_keys(script, &mut hosts)?;
        let start = script.next("mkdir ")? + "\n" + &script.next("qemu-system-x86_64 ")?;
        let source = hosts.source.start_guest(&start)?;
        let start = script.next("mkdir ")? + "\n" + &script.next("qemu-system-x86_64 ")?;
        let destination = hosts.destination.start_guest(&start)?;
        let serve = hosts.destination.start(&script.next("vamoose serve")?)?;
        serve.wait_for("taking migrations on ")?;
        let [before, after] = [&hosts.source, &hosts.destination].map(|host| host.home("console"));
        wait_until(&source, || guest::has_seen_all(&before))?;

        hosts
            .source
            .run(&script.next("vamoose migrate web1 kvm2 --dry-run")?)?;
        let migrate = script.next("vamoose migrate")?;
        hosts.source.run(&migrate).with_context(|| serve.said())?;
        serve.wait_for("web1: committed, the guest is here")?;
        wait_until(&destination, || guest::has_seen_all(&after))?;
        let ends = (guest::numbers(&before)?, guest::numbers(&after)?);
        let (Some((_, last)), Some((first, _))) = ends else {
            bail!("it has not counted: {ends:?}");
        };
        // The number that was under way between the two has been written in two parts.
        ensure!(
            first > last && first <= last + 2,
            "{first:#x} follows {last:#x}"
        );
        let report: Value =
            serde_json::from_str(&fs::read_to_string(hosts.source.home("web1.json"))?)?;
        ensure!(report["status"] == "completed", "{report}");

        let again = hosts.source.run(&migrate)?;
        ensure!(
            again.stderr.contains("has moved the guest to"),
            "{}",
            again.stderr
        );
        Ok(Played::ToTheEnd)
    }

    pub(super) fn the_readme(script: &mut Script, mut hosts: Hosts) -> Result<Played> {
        exchange_keys(script, &mut hosts)?;
        let serve = start_server(&hosts, &script.next("vamoose serve")?)?;
        moves(&hosts, &serve, &script.next("vamoose migrate")?)?;
        Ok(Played::ToTheEnd)
    }

    pub(super) fn relays(script: &mut Script, mut hosts: Hosts) -> Result<Played> {
        hosts.make_keys("vamoose keys init")?;
        relays_to_stock(&hosts, &script.next("vamoose relay --listen")?)?;

        let mut pair = Pair::start(&hosts)?;
        set_up(&mut pair.destination, 4, "none")?;
        pair.destination.qmp.migrate_incoming("unix:/run/in.sock")?;
        let far = start_relay(
            &hosts.destination,
            &script.next("vamoose relay --session listen")?,
        )?;
        let near = start_relay(
            &hosts.source,
            &script.next("vamoose relay --session connect")?,
        )?;
        pair.migrate_through("unix:/run/out.sock", [near, far])?;
        Ok(Played::ToTheEnd)
    }

    pub(super) fn security(script: &mut Script, mut hosts: Hosts) -> Result<Played> {
        hosts.make_keys(&script.next("vamoose keys init")?)?;
        hosts.source.run(&script.next("vamoose keys show | ssh")?)?;
        hosts.source.run(KNOWN)?;
        let serve = start_server(&hosts, SERVE)?;
        moves(&hosts, &serve, "vamoose migrate web1 kvm2")?;
        Ok(Played::ToTheEnd)
    }

    pub(super) fn methods(script: &mut Script, mut hosts: Hosts) -> Result<Played> {
        let folder = TempDir::new()?;
        if stand_in::libqatzip_or_skip(folder.path(), None)?.is_none() {
            return Ok(Played::Skipped);
        }
        trust_each_other(&mut hosts)?;
        let serve = start_server(&hosts, SERVE)?;
        for _ in 0..2 {
            moves(&hosts, &serve, &script.next("vamoose migrate")?)?;
        }
        let qat = format!("export LD_LIBRARY_PATH={}\n", folder.path().display());
        let probe = hosts
            .source
            .run(&(qat.clone() + &script.next("vamoose probe")?))?;
        ensure!(probe.stdout.contains("qat"), "{}", probe.stdout);
        moves(&hosts, &serve, &(qat + &script.next("vamoose migrate")?))?;
        Ok(Played::ToTheEnd)
    }

    pub(super) fn reading_a_report(script: &mut Script, mut hosts: Hosts) -> Result<Played> {
        trust_each_other(&mut hosts)?;
        let serve = start_server(&hosts, SERVE)?;
        moves(&hosts, &serve, &script.next("vamoose migrate")?)?;
        let report = hosts.source.run("cat web1.json\n")?;
        let report: Value = serde_json::from_str(&report.stdout)?;
        ensure!(report["status"] == "completed", "{report}");
        Ok(Played::ToTheEnd)
    }

    /// As libvirt does with these addresses: the destination listens at the one that the source dials.
    pub(super) fn relays_for_libvirt(script: &mut Script, mut hosts: Hosts) -> Result<Played> {
        trust_each_other(&mut hosts)?;
        let mut pair = Pair::start(&hosts)?;
        set_up(&mut pair.destination, 4, "none")?;
        let address = "tcp:127.0.0.1:49300";
        pair.destination.qmp.migrate_incoming(address)?;
        let far = start_relay(&hosts.destination, &script.next("vamoose relay")?)?;
        let near = start_relay(&hosts.source, &script.next("vamoose relay")?)?;
        pair.migrate_through(address, [near, far])?;
        Ok(Played::ToTheEnd)
    }

    pub(super) fn accelerators(script: &mut Script, hosts: Hosts) -> Result<Played> {
        let selftest = hosts.source.run(&script.next("vamoose selftest")?)?;
        let holds = selftest.stdout.contains("compare-pattern-zero       holds");
        let differs = selftest.stdout.contains("  differs");
        ensure!(holds && !differs, "{}", selftest.stdout);
        // cargo builds it with the tests of vamoose-live.
        if !vamoose().with_file_name("examples/vamoose-demo").exists() {
            lab::skipped("no example vamoose-demo, build vamoose-live's")?;
            return Ok(Played::Skipped);
        }
        let demo = hosts.source.run(&script.next("vamoose-demo")?)?;
        ensure!(
            demo.stderr.contains("of memory equal: yes"),
            "{}",
            demo.stderr
        );
        Ok(Played::ToTheEnd)
    }

    pub(super) fn hand_over(script: &mut Script, hosts: Hosts) -> Result<Played> {
        in_doubt(&hosts, |host, scene| {
            let id = format!("--attempt {}", scene.attempt);
            let mut next = |begin: &str| -> Result<String> {
                let command = script.next(begin)?;
                Ok(command.replace("--attempt c76e412672ef129e4a827ec8b197005e", &id))
            };
            let listed = host.run(&next("vamoose attempts")?)?.stdout;
            ensure!(listed.contains(&scene.attempt), "{listed}");
            ensure!(listed.contains("in doubt"), "{listed}");
            let planned = host.run(&next("vamoose settle")?)?.stdout;
            ensure!(planned.contains("continue the guest"), "{planned}");
            ensure!(scene.at_a.qmp.query_status()? == "postmigrate");
            host.run(&next("vamoose settle")?)?;
            scene.at_a.qmp.wait_status("running", LIMIT)
        })
    }
}

/// The source knows the destination, with its key.
const KNOWN: &str = "cat >/etc/vamoose/hosts.toml <<END
[kvm2]
address = \"192.0.2.20\"
key = \"KEY_OF_KVM2\"
END";
const TRUST: &str = "echo KEY_OF_KVM1 >>/etc/vamoose/trusted";

/// Pages that leave it to another one have this done before.
fn trust_each_other(hosts: &mut Hosts) -> Result<()> {
    hosts.make_keys("vamoose keys init")?;
    hosts.source.run(KNOWN)?;
    hosts.destination.run(TRUST)?;
    Ok(())
}

/// The same by the page.
fn exchange_keys(script: &mut Script, hosts: &mut Hosts) -> Result<()> {
    hosts.make_keys(&script.next("vamoose keys init")?)?;
    hosts
        .source
        .run(&script.next("cat >/etc/vamoose/hosts.toml")?)?;
    hosts.destination.run(&script.next("echo ")?)?;
    Ok(())
}

/// A host with a guest in doubt.
fn in_doubt(hosts: &Hosts, test: impl FnOnce(&Host, &mut Scene) -> Result<()>) -> Result<Played> {
    let mut scene = Scene::start(&hosts.source.qemu, &[])?;
    hosts.source.run("vamoose keys init")?;
    fs::rename(scene.state_of_a(), hosts.source.path("run/vamoose"))?;
    test(&hosts.source, &mut scene)?;
    Ok(Played::ToTheEnd)
}

fn start_server(hosts: &Hosts, command: &str) -> Result<Terminal> {
    let serve = hosts.destination.start(command)?;
    serve.wait_for("taking migrations on ")?;
    Ok(serve)
}

fn start_relay(host: &Host, command: &str) -> Result<Terminal> {
    let relay = host.start(command)?;
    relay.wait_for("listening on ")?;
    Ok(relay)
}

/// The command's relay moves all memory to a stock QEMU.
fn relays_to_stock(hosts: &Hosts, command: &str) -> Result<()> {
    let mut pair = Pair::start(hosts)?;
    set_up(&mut pair.destination, 4, "zstd")?;
    pair.destination
        .qmp
        .migrate_incoming("tcp:192.0.2.20:4444")?;
    let relay = start_relay(&hosts.source, command)?;
    pair.migrate_through("unix:/run/out.sock", [relay])
}

/// The command moves all memory from `/run/vms/web1.qmp` of one host to that of the other.
fn moves(hosts: &Hosts, serve: &Terminal, command: &str) -> Result<()> {
    let pair = Pair::start(hosts)?;
    for (host, qemu) in [
        (&hosts.source, &pair.source),
        (&hosts.destination, &pair.destination),
    ] {
        let monitor = host.path("run/vms/web1.qmp");
        // Of the pair before.
        let _ = fs::remove_file(&monitor);
        std::os::unix::fs::symlink(qemu.qmp_socket(), monitor)?;
    }
    hosts.source.run(command).with_context(|| serve.said())?;
    ram::compare(pair.source.ram(), pair.destination.ram())?;
    Ok(())
}

/// Two bare QEMUs on the hosts.
struct Pair {
    source: Qemu,
    destination: Qemu,
}

impl Pair {
    fn start(hosts: &Hosts) -> Result<Self> {
        let bare = |host: &Host| Builder::bare(&host.qemu, 16 * MIB);
        let source = bare(&hosts.source).content(Fill::Mixed, 1);
        let destination = bare(&hosts.destination).incoming();
        Ok(Self {
            source: source.start()?,
            destination: destination.start()?,
        })
    }

    /// Migrates to the first of the relays, all of which end, and compares all memory.
    fn migrate_through<const N: usize>(&mut self, to: &str, relays: [Terminal; N]) -> Result<()> {
        set_up(&mut self.source, 4, "none")?;
        self.source.qmp.migrate(to)?;
        expect_equal(&mut self.source, &mut self.destination, &[])
            .with_context(|| relays.each_ref().map(Terminal::said).join("\n--\n"))?;
        relays
            .into_iter()
            .try_for_each(|relay| relay.finish()?.success().map(drop))
    }
}

/// Looks again and again, while the commands run.
fn wait_until(running: &Terminal, is_so: impl Fn() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        ensure!(!running.has_ended()?, "it has ended: {}", running.said());
        ensure!(
            start.elapsed() < LIMIT,
            "it takes too long: {}",
            running.said()
        );
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Ok(())
}

/// What a page has its reader type, without comments; lines that belong together in one piece.
fn commands(text: &str) -> Vec<String> {
    let blocks = fences(text).into_iter();
    blocks.flat_map(|block| commands_of(&block)).collect()
}

fn commands_of(block: &Fence) -> Vec<String> {
    let text = block.text.replace("\\\n", "");
    let mut commands = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let line = match block.language.as_str() {
            "sh" => line,
            "console" => match line.split_once("$ ") {
                Some((_, command)) => command,
                None => continue,
            },
            _ => continue,
        };
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut command = line
            .split(" #")
            .next()
            .unwrap_or(line)
            .trim_end()
            .to_owned();
        if let Some((_, end)) = line.split_once("<<") {
            for more in lines.by_ref() {
                command = command + "\n" + more;
                if more == end {
                    break;
                }
            }
        }
        commands.push(command);
    }
    commands
}

/// Commands in blocks that do not say that they have some.
fn hidden(text: &str) -> Vec<String> {
    const PROGRAMS: [&str; 7] = ["$", "apt", "cargo", "ch-remote", "make", "vamoose", "virsh"];
    let blocks = fences(text).into_iter();
    let others = blocks.filter(|block| !["sh", "console"].contains(&block.language.as_str()));
    let lines = others.flat_map(|block| block.text.lines().map(str::to_owned).collect::<Vec<_>>());
    let is_command = |line: &String| {
        let first = line.split_whitespace().next().unwrap_or_default();
        PROGRAMS.contains(&first) || first.ends_with('$') && !line.contains("(qemu)")
    };
    lines.filter(is_command).collect()
}

#[test]
fn commands_are_found() {
    let page = "```sh\n# no\na \\\n  b   # no\n\ncat >c <<END\nd\nEND\n```\n```console\nkvm1$ e f\nno\n```\n```\ng\n```\n";
    assert_eq!(commands(page), ["a b", "cat >c <<END\nd\nEND", "e f"]);
}
