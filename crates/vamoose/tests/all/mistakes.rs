//! What a person does wrong, and what fails meanwhile: the message, the exit code, and where the guest is afterwards.
//!
//! MISTAKES_TABLE names a file for a table of all cases in Markdown. MISTAKES_PROGRAM names another `vamoose` to try, such as an
//! earlier one, for a comparison. MISTAKES_ONLY has a part of the names of the cases to try.

mod cases;

use std::{
    any::Any,
    env,
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use crate::common::{LIMIT, MIB, gate::Gate, vamoose};
use anyhow::{Context as _, Result, ensure};
use lab::{
    counter,
    qemu::{self, Binary, Builder, Qemu},
    vamoose::{Keys, Vamoose},
};
use rustix::process::geteuid;
use tempfile::TempDir;

/// More than there are CPUs: most cases wait for a timeout.
const AT_ONCE: usize = 6;

#[test]
fn every_mistake_has_an_answer() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    if !geteuid().is_root() {
        return lab::skipped("only root runs commands as another user");
    }
    let mut cases = cases::all();
    if let Ok(only) = env::var("MISTAKES_ONLY") {
        cases.retain(|case| case.mistake.contains(&only));
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let taken = std::iter::from_fn(|| {
            let number = next.fetch_add(1, Ordering::Relaxed);
            Some((number, cases.get(number)?))
        });
        let tried = taken.map(|(number, case)| (number, case.try_out(&binary)));
        tried.collect::<Vec<_>>()
    };
    let mut outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        let outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
        outcomes.flatten().collect()
    });
    outcomes.sort_by_key(|(number, _)| *number);
    if let Some(path) = env::var_os("MISTAKES_TABLE") {
        fs::write(path, table(&cases, &outcomes))?;
    }
    let mut wrong = String::new();
    for (number, outcome) in &outcomes {
        let case = &cases[*number];
        let (objections, message) = match outcome {
            Ok(outcome) => (case.objections(outcome), outcome.message.clone()),
            Err(error) => (vec!["cannot be tried".to_owned()], format!("{error:#}")),
        };
        if !objections.is_empty() {
            wrong += &format!("{}: {}\n{message}\n\n", case.mistake, objections.join("; "));
        }
    }
    ensure!(wrong.is_empty(), "{wrong}");
    Ok(())
}

/// A mistake, or a failure that a person has to understand.
struct Case {
    mistake: &'static str,
    /// The arguments of `vamoose`. A word in braces stands for one of [`Scene::values`].
    command: &'static str,
    /// Whether another user than root runs it.
    other_user: bool,
    /// Options of the server at the destination.
    server: &'static str,
    source: fn(Builder) -> Builder,
    destination: fn(Builder) -> Builder,
    /// What happens before the command runs, and while it does.
    before: fn(&mut Scene) -> Result<()>,
    during: fn(&mut Scene, &Vamoose) -> Result<()>,
    /// Whether the destination has been prepared for the guest.
    prepared: bool,
    code: i32,
    guest: Guest,
    says: &'static [&'static str],
}

/// Where the guest is afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guest {
    /// The command has nothing to do with any.
    None,
    /// It runs at the source.
    Here,
    /// It runs at the destination.
    There,
    /// It runs nowhere, until a person or the next command decides.
    Paused,
}

struct Outcome {
    code: Option<i32>,
    message: String,
    guest: Guest,
}

/// The lines that a person reads at most.
const LINES: usize = 8;

/// What no message has: signs of a panic, values as Rust prints them for debugging, QEMU's words for a failure elsewhere, and the
/// warning of a moment that was never reached.
const NEVER: [&str; 10] = [
    "panicked",
    "Some(",
    "Err(",
    "Os {",
    "Error {",
    "kind: ",
    "expected inmigrate",
    "Sibling indicated error",
    "Channel error",
    "do not continue the guest",
];

/// A case of a command that fails while the guest runs at the source.
fn migration(mistake: &'static str, command: &'static str) -> Case {
    Case {
        code: 1,
        guest: Guest::Here,
        ..command_line(mistake, command)
    }
}

/// A case of a command line that is refused as such.
fn command_line(mistake: &'static str, command: &'static str) -> Case {
    Case {
        mistake,
        command,
        other_user: false,
        server: "--insecure",
        source: |source| source,
        destination: cases::waiting,
        before: |_| Ok(()),
        during: |_, _| Ok(()),
        prepared: false,
        code: 2,
        guest: Guest::None,
        says: &[],
    }
}

impl Case {
    fn other_user(self) -> Self {
        Self {
            other_user: true,
            ..self
        }
    }

    fn server(self, server: &'static str) -> Self {
        Self { server, ..self }
    }

    fn source(self, source: fn(Builder) -> Builder) -> Self {
        Self { source, ..self }
    }

    fn destination(self, destination: fn(Builder) -> Builder) -> Self {
        Self {
            destination,
            ..self
        }
    }

    fn before(self, before: fn(&mut Scene) -> Result<()>) -> Self {
        Self { before, ..self }
    }

    fn during(self, during: fn(&mut Scene, &Vamoose) -> Result<()>) -> Self {
        Self { during, ..self }
    }

    fn prepared(self) -> Self {
        Self {
            prepared: true,
            ..self
        }
    }

    /// Ends with this exit code, and leaves the guest there.
    fn ends(self, code: i32, guest: Guest) -> Self {
        Self {
            code,
            guest,
            ..self
        }
    }

    fn says(self, says: &'static [&'static str]) -> Self {
        Self { says, ..self }
    }

    fn try_out(&self, binary: &Binary) -> Result<Outcome> {
        let mut scene = Scene::new(self, binary)?;
        (self.before)(&mut scene).context("before")?;
        let command = Vamoose::start(&mut scene.command(self.command, self.other_user))?;
        (self.during)(&mut scene, &command).with_context(|| command.stderr())?;
        let ended = command.finish(LIMIT)?;
        Ok(Outcome {
            code: ended.status.code(),
            message: scene.shortened(&read_by_a_person(&ended.stderr)),
            guest: scene.guest()?,
        })
    }

    fn objections(&self, outcome: &Outcome) -> Vec<String> {
        let (code, message) = (outcome.code, &outcome.message);
        let mut objections = Vec::new();
        if code != Some(self.code) {
            objections.push(format!("exit code {code:?} instead of {}", self.code));
        }
        if outcome.guest != self.guest {
            let guest = outcome.guest;
            objections.push(format!("the guest is {guest:?}, not {:?}", self.guest));
        }
        let says = |text: &&&str| message.contains(&in_table(text));
        let missing = self.says.iter().filter(|text| !says(text));
        objections.extend(missing.map(|text| format!("does not say `{text}`")));
        if self.guest == Guest::There && !message.contains("web1 runs at") {
            objections.push("does not say where the guest runs".to_owned());
        }
        let prepared = self.prepared || self.guest == Guest::Paused;
        let never = NEVER.iter().filter(|text| message.contains(*text));
        let never = never.filter(|text| !prepared || !text.starts_with("do not"));
        objections.extend(never.map(|text| format!("says `{text}`")));
        let lines = message.lines().count();
        if lines > LINES {
            objections.push(format!("{lines} lines"));
        }
        objections
    }
}

/// Two hosts, as far as a case needs them.
struct Scene {
    program: PathBuf,
    /// What the words in braces of a command stand for.
    values: Vec<(&'static str, String)>,
    source: Option<Qemu>,
    destination: Option<Qemu>,
    server: Option<Vamoose>,
    gate: Option<Gate>,
    /// What has to exist as long as the scene.
    kept: Vec<Box<dyn Any>>,
    keys: Option<Keys>,
    dir: TempDir,
}

impl Scene {
    fn new(case: &Case, binary: &Binary) -> Result<Self> {
        let program = env::var_os("MISTAKES_PROGRAM");
        let program = program.map_or_else(|| vamoose().to_owned(), PathBuf::from);
        let dir = TempDir::with_prefix("mistake-")?;
        for folder in ["home", "empty"] {
            fs::create_dir(dir.path().join(folder))?;
        }
        // For a command of another user.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
        fs::set_permissions(dir.path().join("home"), Permissions::from_mode(0o777))?;
        let mut scene = Self {
            program,
            values: vec![("dir", dir.path().display().to_string())],
            source: None,
            destination: None,
            server: None,
            gate: None,
            kept: Vec::new(),
            keys: None,
            dir,
        };
        let words = [case.command, case.server].concat();
        if words.contains("{keys}") {
            let keys = Keys::make(&scene.program)?;
            let folder = keys.source.parent().context("no folder")?;
            scene.set("keys", folder.display().to_string());
            scene.set("key", keys.public[1].trim().to_owned());
            scene.keys = Some(keys);
        }
        if case.guest == Guest::None {
            return Ok(scene);
        }
        let firmware = scene.path("firmware");
        counter::write_firmware(&firmware)?;
        let machine = |seed| counter::machine(binary, 16 * MIB, &firmware, seed);
        let source = (case.source)(machine(1)).start()?;
        scene.set("qmp", source.qmp_socket().display().to_string());
        scene.source = Some(source);
        // A file may name the server.
        let needs_server = ["{to}", "{at}", "kvm2 --keys"];
        if needs_server.iter().any(|word| words.contains(word)) {
            let destination = (case.destination)(machine(2)).start()?;
            fs::create_dir(scene.path("there"))?;
            symlink(destination.qmp_socket(), scene.path("there/web1.qmp"))?;
            scene.destination = Some(destination);
            scene.serve(case.server)?;
        }
        Ok(scene)
    }

    /// Starts the server of the destination.
    fn serve(&mut self, options: &str) -> Result<()> {
        let serve = format!(
            "serve --listen tcp:127.0.0.1:0 --qmp-dir {{dir}}/there --state-dir {{dir}}/state-there {options}"
        );
        let server = Vamoose::start(&mut self.command(&serve, false))?;
        let address = server.wait_for("taking migrations on ", LIMIT)?;
        self.set("at", address.trim_start_matches("tcp:").to_owned());
        self.set("to", address);
        self.server = Some(server);
        Ok(())
    }

    /// Puts a gate before the server.
    fn gate(&mut self) -> Result<&Gate> {
        let gate = Gate::start(self.value("to"))?;
        self.set("to", gate.address.clone());
        Ok(self.gate.insert(gate))
    }

    fn gate_there(&self) -> Result<&Gate> {
        self.gate.as_ref().context("no gate")
    }

    fn source(&mut self) -> Result<&mut Qemu> {
        self.source.as_mut().context("no source")
    }

    fn destination(&mut self) -> Result<&mut Qemu> {
        self.destination.as_mut().context("no destination")
    }

    /// Waits until memory is under way.
    fn wait_active(&mut self) -> Result<()> {
        self.source()?.qmp.wait_migration(&["active"], LIMIT)?;
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn set(&mut self, name: &'static str, value: String) {
        self.values.retain(|(known, _)| *known != name);
        self.values.push((name, value));
    }

    fn value(&self, name: &str) -> &str {
        let mut values = self.values.iter();
        let found = values.find_map(|(known, value)| (*known == name).then_some(value));
        found.map_or("", String::as_str)
    }

    /// Never fails, so that it can be the last step of [`Case::before`].
    fn keep(&mut self, thing: impl Any) -> Result<()> {
        self.kept.push(Box::new(thing));
        Ok(())
    }

    /// A thing that is kept.
    fn kept<T: Any>(&self) -> Result<&T> {
        let found = self.kept.iter().find_map(|thing| thing.downcast_ref());
        found.context("no such thing is kept")
    }

    fn keys(&self) -> Result<&Keys> {
        self.keys.as_ref().context("no keys")
    }

    fn write_hosts(&self, text: &str) -> Result<()> {
        let file = self.keys()?.source.join("hosts.toml");
        fs::write(&file, text)?;
        // Whatever the umask is.
        Ok(fs::set_permissions(file, Permissions::from_mode(0o644))?)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        Ok(fs::write(self.path(name), text)?)
    }

    fn command(&self, words: &str, other_user: bool) -> Command {
        let mut command = match other_user {
            true => {
                let mut command = Command::new("/usr/bin/setpriv");
                command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
                command.arg(&self.program);
                command
            }
            false => Command::new(&self.program),
        };
        // No case depends on keys or programs of this machine.
        for (name, folder) in [("HOME", "home"), ("XDG_RUNTIME_DIR", "home")] {
            command.env(name, self.path(folder));
        }
        command.env_remove("XDG_CONFIG_HOME");
        command.env("PATH", self.path("empty"));
        // An earlier program may lack the option.
        let soon = match env::var_os("MISTAKES_PROGRAM") {
            Some(_) => "",
            None => "--connect-timeout 1",
        };
        let put =
            |words: String, name: &str, text: &str| words.replace(&format!("{{{name}}}"), text);
        let begins = BEGINS.into_iter().chain([("soon", soon)]);
        let words = begins.fold(words.to_owned(), |words, (name, text)| {
            put(words, name, text)
        });
        let values = self.values.iter();
        let words = values.fold(words, |words, (name, value)| put(words, name, value));
        command.args(words.split_whitespace());
        command
    }

    /// The text with the names of a command's values in the place of what they stand for.
    fn shortened(&self, text: &str) -> String {
        let mut values: Vec<_> = self.values.iter().collect();
        values.sort_by_key(|(_, value)| std::cmp::Reverse(value.len()));
        let put = |text: String, (name, value): &&(&str, String)| {
            text.replace(value.as_str(), &name.to_uppercase())
        };
        values.iter().fold(text.to_owned(), put)
    }

    fn guest(&mut self) -> Result<Guest> {
        let Some(source) = &mut self.source else {
            return Ok(Guest::None);
        };
        let here = source.qmp.query_status()? == "running";
        let status = |there: &mut Qemu| there.qmp.query_status();
        // A QEMU whose migration has failed has ended.
        let there = self.destination.as_mut().map(status);
        let there = there.is_some_and(|status| status.is_ok_and(|status| status == "running"));
        ensure!(!here || !there, "the guest runs twice");
        Ok(match (here, there) {
            (true, _) => Guest::Here,
            (_, true) => Guest::There,
            _ => Guest::Paused,
        })
    }
}

/// What other words in braces stand for: how commands begin.
const BEGINS: [(&str, &str); 4] = [
    ("slow", "{go} --max-bandwidth 64k"),
    ("go", "{go0} --name web1 --state-dir {dir}/state"),
    ("go0", "migrate --insecure --method none"),
    ("secure", "migrate --name web1 --state-dir {dir}/state"),
];

/// Without the lines of the log that only report what happens, and without progress.
fn read_by_a_person(stderr: &str) -> String {
    let is_progress = |line: &str| line.get(..4).is_some_and(|start| start.ends_with('%'));
    let is_result = |line: &str| !line.contains(" INFO ") || line.contains(" runs at ");
    let lines = stderr
        .lines()
        .filter(|line| is_result(line) && !is_progress(line));
    lines.collect::<Vec<_>>().join("\n")
}

/// Words in braces as [`Scene::shortened`] writes them.
fn in_table(text: &str) -> String {
    match text
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
    {
        Some((name, rest)) => format!("{}{rest}", name.to_uppercase()),
        None => text.to_owned(),
    }
}

fn table(cases: &[Case], outcomes: &[(usize, Result<Outcome>)]) -> String {
    let mut table =
        "| | mistake | exit code | guest | message | wrong |\n|---|---|---|---|---|---|\n"
            .to_owned();
    for (number, outcome) in outcomes {
        let case = &cases[*number];
        let row = match outcome {
            Ok(outcome) => {
                let code = outcome
                    .code
                    .map_or("signal".to_owned(), |code| code.to_string());
                let message = outcome.message.replace('|', "\\|").replace('\n', "<br>");
                let wrong = case.objections(outcome).join("; ");
                format!("{code} | {:?} | {message} | {wrong}", outcome.guest)
            }
            Err(error) => format!(
                "| | | not tried: {}",
                format!("{error:#}").replace('\n', " ")
            ),
        };
        table += &format!("| {} | {} | {row} |\n", number + 1, case.mistake);
    }
    table
}
