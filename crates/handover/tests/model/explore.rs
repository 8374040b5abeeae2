//! Exploring a scene: all of it within its bounds, or at random far beyond them.

use std::{fmt::Write as _, io::Write as _, sync::Arc, time::Instant};

use handover::{DestinationState, GuestLocation, SourceState};
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};

use crate::{
    repair::Repairs,
    step::{Side, Step},
    world::{Attempt, Bounds, FAULTS, Now, Scene, SourceVmm, Vmm, World, Wrong},
};

/// A scene, for the checker.
pub(crate) struct Stage {
    pub(crate) scene: Scene,
    repairs: Arc<Repairs>,
}

pub(crate) const NEVER_NONE: &str = "I3 the guest comes to run when nothing fails any more";

/// What happens in a scene with enough faults: otherwise the model is about nothing.
/// Under post-copy.
pub(crate) const PARTIAL: &str = "runs without all of its memory";

pub(crate) const STORIES: [&str; 5] = [
    "ends at the destination",
    "goes on at the source after the commit",
    "is sent on before the source knows",
    "moves",
    "moves although the source has died",
];

macro_rules! never {
    ($name:literal, $wrong:ident) => {
        Property::always($name, |_, world: &World| {
            world.now.wrong != Some(Wrong::$wrong)
        })
    };
}

impl Model for Stage {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.scene)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        world.steps(&self.scene, steps);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        Some(world.apply(&self.scene, step))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            never!("I1 never two that run", TwoRun),
            never!("I1 never a stale copy that runs", StaleRuns),
            never!("I2 at the destination: seen there", NotAtDestination),
            never!("I2 at the source: it runs there", NotAtSource),
            never!("I2 lost: it runs nowhere", NotLost),
            never!("I2 running: looked at for each answer", SaidUnseen),
            Property::always(NEVER_NONE, |stage: &Self, world| {
                stage.repairs.end_well(&stage.scene, world)
            }),
            never!("I4 aborted: by who accepted", StrangerBelieved),
            never!("I5 aborted, ended: its VMM has ended", SaidTooSoon),
            never!("I5 no VMM is ended that has the guest", EndedRunning),
            never!("I2 in doubt: a commit was sent", DoubtWithoutCommit),
            never!("I5 the only copy is not ended", OnlyCopyEnded),
            never!("I6 runs as it did before", RunsUnasked),
            never!("I7 never two that have the disks", TwoDisks),
            never!("I7 who has the guest has its disks", NoDisks),
            never!("I8 never with disks that lack a write", OldDisks),
            never!("I9 over: the destination has all memory", NotSupplied),
            // That the model is about something.
            Property::sometimes(PARTIAL, |_, world: &World| {
                let mut attempts = world.now.attempts.iter();
                attempts.any(|a| a.vmm == Vmm::RunsPartial)
            }),
            Property::sometimes(STORIES[3], |_, world: &World| {
                world.now.driver.is_none() && world.has_record(GuestLocation::Destination)
            }),
            Property::sometimes(STORIES[1], |_, world: &World| {
                let took_back = |a: &Attempt| {
                    matches!(&a.journal, Some((_, DestinationState::Aborted { .. })))
                        && matches!(&a.record, Some(SourceState::Over { .. }))
                };
                world.now.source == SourceVmm::Runs && world.now.attempts.iter().any(took_back)
            }),
            Property::sometimes(STORIES[0], |_, world: &World| {
                world.now.declared_lost && world.now.attempts.iter().any(|a| a.ran)
            }),
            Property::sometimes(STORIES[4], |_, world: &World| {
                matches!(world.now.source, SourceVmm::Dead { .. })
                    && world.now.attempts.iter().any(|a| a.vmm.has_guest())
            }),
            Property::sometimes(STORIES[2], |_, world: &World| {
                world.now.elsewhere && world.now.unfinished().is_some()
            }),
        ]
    }
}

impl World {
    fn has_record(&self, guest: GuestLocation) -> bool {
        let is = |a: &Attempt| matches!(&a.record, Some(SourceState::Over { guest: there, .. }) if *there == guest);
        self.now.attempts.iter().any(is)
    }
}

/// What came of an exploration.
pub(crate) struct Explored {
    /// Counterexamples, the shortest first.
    pub(crate) found: Vec<Found>,
    /// What has happened at least once, by property.
    pub(crate) happened: Vec<&'static str>,
}

/// A counterexample.
pub(crate) struct Found {
    pub(crate) property: String,
    /// Steps to it.
    pub(crate) len: usize,
    pub(crate) trace: String,
}

/// Explores all of a scene, or until something is found, or what is `wanted`; prints how much that was.
pub(crate) fn exhaust(scene: Scene, wanted: Option<&'static str>) -> Explored {
    let start = Instant::now();
    let stage = Stage {
        scene,
        repairs: Arc::new(Repairs::new()),
    };
    let checker = stage
        .checker()
        .threads(2)
        .finish_when(wanted.map_or(HasDiscoveries::AnyFailures, |name| {
            HasDiscoveries::AllOf([name].into())
        }))
        .spawn_bfs()
        .join();
    tell(&format!(
        "{}: {} states, {} transitions, depth {}, {:.1} s; {}",
        name(&scene),
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64(),
        bounds(&scene),
    ));
    let (mut found, mut happened) = (Vec::new(), Vec::new());
    for (name, path) in checker.discoveries() {
        if checker.model().property(name).expectation == Expectation::Sometimes {
            happened.push(name);
            continue;
        }
        let steps: Vec<Step> = path.into_actions();
        found.push(Found {
            property: name.to_owned(),
            len: steps.len(),
            trace: trace(&scene, &steps, name == NEVER_NONE),
        });
    }
    found.sort_by_key(|found| found.len);
    happened.sort_unstable();
    Explored { found, happened }
}

/// On the terminal, whether the test passes or not.
pub(crate) fn tell(line: &str) {
    let _ = std::io::stderr().write_all(format!("\n{line}\n").as_bytes());
}

fn name(scene: &Scene) -> String {
    match scene.mutant {
        Some(mutant) => format!("{}, {mutant:?}", scene.name),
        None => scene.name.to_owned(),
    }
}

fn bounds(scene: &Scene) -> String {
    let bounds = &scene.bounds;
    let mut text = format!(
        "hosts {}, attempts {}, commands {}, faults {}",
        scene.hosts, scene.attempts, bounds.commands, bounds.faults
    );
    let any = Bounds::any(bounds.commands, bounds.faults);
    for (fault, name) in FAULTS {
        let most = bounds.each[fault as usize];
        if *bounds != any && most > 0 {
            let _ = write!(text, ", {name} {most}");
        }
    }
    text
}

/// Explores `traces` random traces of at most `len` steps, and prints how much that was.
pub(crate) fn wander(scene: Scene, seed: u64, traces: u32, len: usize) -> Option<Found> {
    let start = Instant::now();
    let (mut taken, mut longest) = (0, 0);
    let repairs = Repairs::new();
    let mut random = Random(seed);
    let mut found = None;
    for _ in 0..traces {
        let steps = wander_once(&scene, &repairs, &mut random, len, &mut found);
        taken += steps;
        longest = longest.max(steps);
        if found.is_some() {
            break;
        }
    }
    tell(&format!(
        "{}: {traces} random traces from seed {seed}, {taken} steps, the longest {longest}, {:.1} s; {}",
        scene.name,
        start.elapsed().as_secs_f64(),
        bounds(&scene),
    ));
    found
}

fn wander_once(
    scene: &Scene,
    repairs: &Repairs,
    random: &mut Random,
    len: usize,
    found: &mut Option<Found>,
) -> usize {
    let mut world = World::new(scene);
    let (mut taken, mut steps) = (Vec::new(), Vec::new());
    // Some traces are calm, some are not; and a trace without some faults comes to where the others matter.
    let calm = 1 + random.below(30);
    for most in &mut world.left.each {
        *most *= u8::from(random.below(2) == 0);
    }
    while taken.len() < len {
        steps.clear();
        world.steps(scene, &mut steps);
        let (faults, usual): (Vec<Step>, Vec<Step>) =
            steps.iter().partition(|step| step.fault().is_some());
        let choice = if usual.is_empty() || (!faults.is_empty() && random.below(calm) == 0) {
            faults
        } else {
            usual
        };
        if choice.is_empty() {
            break;
        }
        let step = choice[random.below(choice.len())];
        taken.push(step);
        world = world.apply(scene, step);
        let ends_well = repairs.end_well(scene, &world);
        let property = match world.now.wrong {
            Some(wrong) => format!("{wrong:?}"),
            None if !ends_well => NEVER_NONE.to_owned(),
            None => continue,
        };
        *found = Some(Found {
            len: taken.len(),
            trace: trace(scene, &taken, !ends_well),
            property,
        });
        break;
    }
    taken.len()
}

/// splitmix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let z = z ^ (z >> 31);
        usize::try_from(z % bound.max(1) as u64).unwrap_or(0)
    }
}

/// The story of a counterexample: each step, and what it changes. One against I3 also has what happens when nothing fails
/// any more.
fn trace(scene: &Scene, steps: &[Step], repair: bool) -> String {
    let mut world = World::new(scene);
    let mut text = String::new();
    for (number, step) in (1..).zip(steps) {
        tell_step(&mut text, scene, &mut world, number, *step);
    }
    if repair {
        text.push_str("     nothing fails any more\n");
        for number in steps.len() + 1..steps.len() + 60 {
            let Some(step) = world.now.repair(scene) else {
                break;
            };
            tell_step(&mut text, scene, &mut world, number, step);
        }
    }
    text
}

fn tell_step(text: &mut String, scene: &Scene, world: &mut World, number: usize, step: Step) {
    let fault = if step.fault().is_some() { "!" } else { " " };
    let _ = writeln!(text, "{number:4}{fault}{}", describe(&world.now, step));
    let before = world.now.tell();
    *world = world.apply(scene, step);
    let after = world.now.tell();
    for line in after.iter().filter(|line| !before.contains(line)) {
        let _ = writeln!(text, "         {line}");
    }
}

fn describe(now: &Now, step: Step) -> String {
    match step {
        Step::Carry(side) | Step::NotWritten(side) => {
            let action = match side {
                Side::Source => {
                    let driver = now.driver.as_ref();
                    format!(
                        "{:?}",
                        driver.and_then(|driver| driver.machine.pending().next())
                    )
                }
                Side::Destination(attempt) => {
                    let job = now.attempts[attempt].job.as_ref();
                    format!("{:?}", job.and_then(|job| job.machine.pending().next()))
                }
            };
            format!("{step:?}: {action}")
        }
        Step::Serve(connection) => {
            format!("{step:?}: {:?}", now.connections[connection].up.front())
        }
        Step::Hear => {
            let mut open = now.connections.iter().filter(|c| c.open);
            format!("{step:?}: {:?}", open.next().and_then(|c| c.down.front()))
        }
        _ => format!("{step:?}"),
    }
}
