//! What both ends report when a migration ends in some way: a table of the handbook, which is compared with what happens.

use std::{fs, path::Path, sync::Arc, thread, time::Duration};

use multifd::Method;
use vamoose_live::{
    Address, Destination, DestinationError, Handle, SourceConfig, SourceError, Status, Switchover,
    Transport,
};

use crate::common::{
    Here, MIB, Shape, Stage, Step, There, Watchdog, address_of, listen, loopback,
    nothing_to_migrate, plain, sessions::Hosts, source_config,
};

type Asked = dyn Fn(&Handle, &Status) -> Switchover + Send + Sync;

/// How a migration of the guest of `stage` ends.
struct Case<'a> {
    stage: &'a Arc<Stage>,
    destination: Destination,
    to: Transport,
    config: SourceConfig,
    /// The step of a VMM that fails.
    fails: Option<Step>,
    /// The destination goes on waiting.
    waits: bool,
    /// Asked after each round at the source.
    switchover: Box<Asked>,
}

impl<'a> Case<'a> {
    fn new(stage: &'a Arc<Stage>) -> Self {
        let destination = stage.destination(|_| {});
        Self {
            stage,
            to: plain(&address_of(&destination)),
            destination,
            config: source_config(Method::None),
            fails: None,
            waits: false,
            switchover: Box::new(|_, _| Switchover::Auto),
        }
    }

    fn over(
        stage: &'a Arc<Stage>,
        destination: Destination,
        to: impl FnOnce(&Destination) -> Transport,
    ) -> Self {
        Self {
            to: to(&destination),
            destination,
            ..Self::new(stage)
        }
    }

    /// The row `name` of the table.
    fn row(mut self, name: &str) -> String {
        let _watchdog = Watchdog::new(name.to_owned());
        let fail = |step| match self.fails == Some(step) {
            true => Err("a device is broken".into()),
            false => Ok(()),
        };
        let source = self.stage.source(self.config);
        let (handle, stop) = (source.handle(), self.destination.handle());
        let here = Here::new(self.stage).hooked(fail);
        let mut here = here.switching(|status| (self.switchover)(&handle, status));
        let (left, arrived) = thread::scope(|scope| {
            let arriving = scope.spawn(|| {
                self.destination
                    .run(&mut There::new(self.stage).hooked(fail))
            });
            let left = source.run(&self.to, &mut here).unwrap_err();
            if self.waits {
                stop.cancel();
            }
            (left, arriving.join().unwrap().unwrap_err())
        });
        let arrived = match (self.waits, arrived) {
            (true, DestinationError::Cancelled) => "goes on waiting".to_owned(),
            (_, arrived) => told(&arrived),
        };
        // The refusal may be lost with the connection.
        let left = match left {
            SourceError::Unanswered if self.waits => SourceError::SessionExpected,
            left => left,
        };
        assert!(self.stage.guest.is_running() && !self.stage.runs_there());
        format!("| {name} | {} | {arrived} |", told(&left))
    }
}

/// An error's name and message, without numbers that differ from run to run.
fn told(error: &(impl std::error::Error + 'static)) -> String {
    let (debug, message) = (format!("{error:?}"), error.to_string());
    let name = debug.split([' ', '(', '{']).next().unwrap();
    let mut text = String::new();
    for letter in message.chars() {
        match (letter.is_ascii_digit(), text.ends_with('…')) {
            (true, true) => {}
            (true, false) => text.push('…'),
            (false, _) => text.push(letter),
        }
    }
    format!("`{name}`: {text}")
}

#[test]
fn both_ends_report_what_the_handbook_says() {
    if nothing_to_migrate() {
        return;
    }
    let shape = Shape {
        rate: Some(1000),
        ..Shape::default()
    };
    let stage = &Stage::new(&shape);
    let hosts = Hosts::new();
    let sessions = || stage.destination_at(hosts.acceptor(), |_| {});
    let mut rows = Vec::new();
    let mut row = |name: &str, case: Case<'_>| rows.push(case.row(name));

    let mut case = Case::new(stage);
    case.switchover = Box::new(|handle, _| {
        handle.cancel();
        Switchover::Forbid
    });
    row("the source is cancelled", case);
    let mut case = Case::new(stage);
    let stop = case.destination.handle();
    case.switchover = Box::new(move |_, _| {
        stop.cancel();
        Switchover::Forbid
    });
    row("the destination is cancelled", case);
    for (step, name) in [
        (Step::Pause, "the source's VMM cannot pause the guest"),
        (Step::Save, "the source's VMM cannot save the devices"),
        (Step::Load, "the destination's VMM cannot load the devices"),
        (Step::Run, "the destination's VMM cannot resume the guest"),
    ] {
        let mut case = Case::new(stage);
        case.fails = Some(step);
        row(name, case);
    }
    let mut case = Case::new(stage);
    case.config.timeout = Some(Duration::from_millis(100));
    case.switchover = Box::new(|_, _| Switchover::Forbid);
    row("the guest does not converge by the timeout", case);
    let other = Shape {
        blocks: vec![2 * MIB, 8 * MIB],
        ..shape
    };
    let (_, other) = other.memory();
    let config = vamoose_live::DestinationConfig::default();
    let destination = Destination::new(listen(&loopback()), &other, config).unwrap();
    row(
        "RAM blocks of another configuration",
        Case::over(stage, destination, |destination| {
            plain(&address_of(destination))
        }),
    );
    // It trusts the destination, which does not trust it: another one of these keys does.
    let (mut known, mut twin) = (Hosts::new(), hosts.twin());
    twin.befriend(&mut known);
    let mut waits = |name: &str, destination: Destination, to: &dyn Fn(&Address) -> Transport| {
        let mut case = Case::over(stage, destination, |destination| {
            to(&address_of(destination))
        });
        case.waits = true;
        row(name, case);
    };
    waits("a key that the source does not trust", sessions(), &|to| {
        Hosts::new().to(to)
    });
    waits(
        "a key that the destination does not trust",
        sessions(),
        &|to| known.to(to),
    );
    waits(
        "source with a session without keys, destination with keys",
        sessions(),
        &|to| Hosts::insecure(true).to(to),
    );
    waits(
        "plain source, destination with sessions",
        sessions(),
        &plain,
    );
    waits(
        "source with a session, plain destination",
        stage.destination(|_| {}),
        &|to| hosts.to(to),
    );
    compare(&rows);
}

/// Compares `rows` with those of the handbook, if it is here.
fn compare(rows: &[String]) {
    const HEAD: &str = "| what happens | source | destination |\n|---|---|---|\n";
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/live.md");
    let Ok(page) = fs::read_to_string(page) else {
        return lab::skipped("the handbook is not in the package").unwrap();
    };
    let (_, table) = page.split_once(HEAD).expect("the table has gone");
    let table: Vec<_> = table
        .lines()
        .take_while(|line| line.starts_with('|'))
        .collect();
    assert!(table == rows, "the table has to be:\n{}", rows.join("\n"));
}
