//! What a VMM may do besides: describe its guest, send device state in parts, and be kept from changing memory.

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex},
    thread,
};

use multifd::Method;
use vamoose_live::{
    Arrival, Destination, DestinationConfig, DestinationError, DestinationGuest, GuestError,
    Handle, Ram, RamBlock, RamError, Source, SourceError, SourceGuest, Status, Switchover,
    dirty::SharedBitmap,
    snapshot::{Snapshot, SnapshotError, SnapshotOptions},
};
use vm_memory::{Bytes, MmapRegion};

use crate::common::{
    Watchdog, address_of, expect_equal, listen, lock, loopback, plain, source_config,
};

/// A VMM without a guest, whose devices have state in parts.
#[derive(Default)]
struct Vm {
    /// Lengths of its blocks.
    description: Vec<u8>,
    /// Parts that are sent after each round, and once it is paused.
    parts: VecDeque<Vec<&'static str>>,
    sending: VecDeque<&'static str>,
    is_paused: bool,
    built: Option<Ram>,
    /// What it was asked to load, in order.
    loaded: Vec<String>,
    /// A part that it refuses.
    refuses: Option<&'static str>,
}

/// A block of so many pages for each of `description`.
fn ram_of(description: &[u8]) -> Ram {
    let blocks = description.iter().enumerate().map(|(number, pages)| {
        let region = MmapRegion::<()>::new(usize::from(*pages) << 12).unwrap();
        RamBlock::new(&format!("block{number}"), Arc::new(region)).unwrap()
    });
    Ram::new(blocks.collect()).unwrap()
}

impl SourceGuest for Vm {
    fn describe(&self) -> Vec<u8> {
        self.description.clone()
    }

    fn save_part(&mut self) -> Result<Option<Vec<u8>>, GuestError> {
        if self.is_paused {
            self.sending.extend(self.parts.drain(..).flatten());
        }
        Ok(self.sending.pop_front().map(|part| part.into()))
    }

    fn switchover(&mut self, _: &Status) -> Switchover {
        match self.parts.len() {
            0..2 => Switchover::Force,
            _ => {
                self.sending.extend(self.parts.pop_front().unwrap());
                Switchover::Forbid
            }
        }
    }

    fn pause(&mut self) -> Result<(), GuestError> {
        self.is_paused = true;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.is_paused = false;
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(b"the rest".to_vec())
    }
}

impl DestinationGuest for Vm {
    fn prepare(&mut self, description: &[u8]) -> Result<Ram, GuestError> {
        if description.is_empty() {
            return Err("a guest without memory".into());
        }
        let ram = ram_of(description);
        self.built = Some(ram.clone());
        Ok(ram)
    }

    fn load_part(&mut self, part: &[u8]) -> Result<(), GuestError> {
        let part = String::from_utf8(part.to_vec())?;
        if self.refuses == Some(&part[..]) {
            return Err("no such device".into());
        }
        self.loaded.push(part);
        Ok(())
    }

    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        self.load_part(state)
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

/// Migrates between two VMMs.
fn migrate(
    ram: &Ram,
    here: &mut Vm,
    destination: &mut Destination,
    there: &mut Vm,
) -> (
    Result<Status, SourceError>,
    Result<Arrival, DestinationError>,
) {
    let _watchdog = Watchdog::new("two VMMs".into());
    let to = plain(&address_of(destination));
    let log = Arc::new(SharedBitmap::new(ram));
    let config = source_config(Method::None);
    let source = Source::with_config(ram.clone(), log, config).unwrap();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run(there));
        (source.run(to, here), arriving.join().unwrap())
    })
}

fn destination(ram: Option<&Ram>) -> Destination {
    let config = DestinationConfig::default().max_state(1000);
    Destination::new(listen(&loopback()), ram.cloned(), config).unwrap()
}

#[test]
fn a_description_is_not_too_long() {
    let (here, there) = (ram_of(&[1]), ram_of(&[1]));
    let mut destination = destination(Some(&there));
    let stop = destination.handle();
    let mut described = |len| {
        let mut vm = Vm {
            description: vec![255; len],
            ..Vm::default()
        };
        migrate(&here, &mut vm, &mut destination, &mut Vm::default())
    };
    const MOST: usize = 200 << 10;
    stop.cancel();
    let (refused, _) = described(MOST + 1);
    let refused = refused.unwrap_err();
    assert!(
        matches!(&refused, SourceError::Config(text)
        if text.contains(&MOST.to_string()) && text.contains(&(MOST + 1).to_string())),
        "{refused}"
    );
    let (sent, arrived) = described(MOST);
    sent.unwrap();
    arrived.unwrap();
}

#[test]
fn a_destination_builds_memory_as_the_source_describes_it() {
    let mut destination = destination(None);
    // One that it cannot have first.
    for description in [vec![], vec![3, 200]] {
        let ram = ram_of(if description.is_empty() {
            &[1]
        } else {
            &description
        });
        let mut here = Vm {
            description,
            ..Vm::default()
        };
        let mut there = Vm::default();
        for (number, block) in ram.blocks().iter().enumerate() {
            block.memory().write_obj(number + 7, 4096 - 8).unwrap();
        }
        let outcome = migrate(&ram, &mut here, &mut destination, &mut there);
        match here.description.is_empty() {
            true => {
                let (Err(SourceError::Refused { cause }), Err(DestinationError::Guest { .. })) =
                    &outcome
                else {
                    panic!("{outcome:?}");
                };
                assert!(cause.contains("a guest without memory"), "{cause}");
                assert!(!here.is_paused);
            }
            false => {
                outcome.0.unwrap();
                outcome.1.unwrap();
                expect_equal(&ram, &there.built.unwrap());
            }
        }
    }
}

/// Cancels while a part of its state is being sent.
struct Cancelling(Handle);

impl SourceGuest for Cancelling {
    fn save_part(&mut self) -> Result<Option<Vec<u8>>, GuestError> {
        assert!(self.0.cancel());
        Ok(Some(b"a part".to_vec()))
    }

    fn pause(&mut self) -> Result<(), GuestError> {
        Err("it is cancelled before".into())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(Vec::new())
    }
}

/// The destination is told on another connection: on that of the state it would be taken for a part.
#[test]
fn a_destination_learns_why_a_state_ends_too_early() {
    let _watchdog = Watchdog::new("cancelled within a state".into());
    let (here, there) = (ram_of(&[4]), ram_of(&[4]));
    let mut destination = destination(Some(&there));
    let to = plain(&address_of(&destination));
    let log = Arc::new(SharedBitmap::new(&here));
    let source = Source::with_config(here.clone(), log, source_config(Method::None)).unwrap();
    let mut guest = Cancelling(source.handle());
    let (source, destination) = thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run(&mut Vm::default()));
        (source.run(to, &mut guest), arriving.join().unwrap())
    });
    assert!(matches!(source, Err(SourceError::Cancelled)), "{source:?}");
    assert!(
        matches!(&destination, Err(DestinationError::Aborted { cause }) if cause == "cancelled"),
        "{destination:?}"
    );
}

#[test]
fn device_state_goes_ahead_in_parts() {
    let ram = ram_of(&[4]);
    let parts = || VecDeque::from([vec!["a", "b"], vec![], vec!["c"], vec!["d", "e"]]);
    let all = ["a", "b", "c", "d", "e", "the rest"];
    let here = || Vm {
        parts: parts(),
        description: vec![4],
        ..Vm::default()
    };
    let there = ram_of(&[4]);
    let mut vm = Vm::default();
    let outcome = migrate(&ram, &mut here(), &mut destination(Some(&there)), &mut vm);
    outcome.1.unwrap();
    assert_eq!(vm.loaded, all);
    // By way of a file.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("snapshot");
    Snapshot::write(&file, &ram, &mut here(), &SnapshotOptions::default()).unwrap();
    let snapshot = Snapshot::open(&file, None).unwrap();
    assert_eq!(snapshot.description(), [4]);
    let mut vm = Vm::default();
    snapshot.restore(&there, &mut vm).unwrap();
    assert_eq!(vm.loaded, all);
    // A part that is refused leaves the guest at the source.
    for refuses in ["a", "c", "e"] {
        let mut vm = Vm {
            refuses: Some(refuses),
            ..Vm::default()
        };
        let mut here = here();
        let outcome = migrate(&ram, &mut here, &mut destination(Some(&there)), &mut vm);
        let (Err(SourceError::Destination { cause }), Err(DestinationError::Guest { .. })) =
            &outcome
        else {
            panic!("{outcome:?}");
        };
        assert!(cause.contains("no such device"), "{cause}");
        assert!(!here.is_paused);
    }
    // All parts together are limited.
    let long: &str = "x".repeat(600).leak();
    let mut vm = Vm::default();
    let mut here = Vm {
        parts: [vec![long], vec![], vec![long]].into(),
        ..Vm::default()
    };
    let outcome = migrate(&ram, &mut here, &mut destination(Some(&there)), &mut vm);
    assert!(
        matches!(
            outcome.1,
            Err(DestinationError::StateLength {
                len: 600,
                max: 1000
            })
        ),
        "{outcome:?}"
    );
    assert_eq!(vm.loaded, [long]);
    outcome.0.unwrap_err();
}

/// A VMM that would add memory while it is paused.
struct Hotplug<'a>(&'a Ram, &'a Mutex<Vec<Option<RamError>>>);

impl Hotplug<'_> {
    fn add_memory(&self) {
        lock(self.1).push(self.0.change().err());
    }
}

impl SourceGuest for Hotplug<'_> {
    fn pause(&mut self) -> Result<(), GuestError> {
        self.add_memory();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(Vec::new())
    }
}

impl DestinationGuest for Hotplug<'_> {
    fn load(&mut self, _: &[u8]) -> Result<(), GuestError> {
        self.add_memory();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

#[test]
fn memory_does_not_change_while_a_guest_moves() {
    let _watchdog = Watchdog::new("hotplug".into());
    let (here, there) = (ram_of(&[4]), ram_of(&[4]));
    let log = Arc::new(SharedBitmap::new(&here));
    let refusals = Mutex::default();
    let take = || mem::take(&mut *lock(&refusals));
    let mut destination = destination(Some(&there));
    let to = plain(&address_of(&destination));
    let source = || Source::new(&here, log.clone()).unwrap();
    let change = here.change().unwrap();
    let refused = source().run(&to, &mut Hotplug(&here, &refusals));
    assert!(matches!(refused, Err(SourceError::Ram(RamError::Changing))));
    drop(change);
    let change = there.change().unwrap();
    let refused = destination.run(&mut Hotplug(&there, &refusals));
    assert!(matches!(
        refused,
        Err(DestinationError::Ram(RamError::Changing))
    ));
    assert_eq!(
        there.change().unwrap_err(),
        RamError::InUse,
        "another change"
    );
    drop(change);
    thread::scope(|scope| {
        let arriving = scope.spawn(|| destination.run(&mut Hotplug(&there, &refusals)));
        source().run(&to, &mut Hotplug(&here, &refusals)).unwrap();
        arriving.join().unwrap().unwrap();
    });
    assert_eq!(take(), [Some(RamError::InUse), Some(RamError::InUse)]);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("snapshot");
    let options = SnapshotOptions::default();
    Snapshot::write(&file, &here, &mut Hotplug(&here, &refusals), &options).unwrap();
    let snapshot = Snapshot::open(&file, None).unwrap();
    snapshot
        .restore(&there, &mut Hotplug(&there, &refusals))
        .unwrap();
    assert_eq!(take(), [Some(RamError::InUse), Some(RamError::InUse)]);
    let _change = (here.change().unwrap(), there.change().unwrap());
    let refused = snapshot.restore(&there, &mut Hotplug(&there, &refusals));
    assert!(matches!(
        refused,
        Err(SnapshotError::Ram(RamError::Changing))
    ));
}
