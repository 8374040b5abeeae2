//! Peers that do not follow the protocol, or speak another one: they get a refusal, no data, and the next peer is served.
//!
//! The cases are tables. A row has a name, how far the peer follows the protocol, what it does then, and the error that both
//! sides report. The peers' bytes are written by hand, so the tests are also a second opinion on the format.

mod destinations;
mod sources;

use std::{net::TcpStream, sync::Arc, thread, time::Duration};

use multifd::Method;
use vamoose_live::{
    Address, Arrival, Destination, DestinationConfig, DestinationGuest, GuestError, Ram, RamBlock,
    Source, SourceConfig, SourceGuest, dirty::SharedBitmap,
};
use vm_memory::{Bytes, MmapRegion};

use crate::common::{
    PAGE, address_of, engines, expect_equal, listen, loopback, plain, source_config,
};

/// Bytes of the guest's blocks `low` and `high`.
const LOW: usize = 16 * PAGE;
const HIGH: usize = 48 * PAGE;

/// For how long a peer may stop, in tests of peers that stop. They take as long.
const STALL: Duration = Duration::from_secs(2);

/// The same, where only a busy host stops a peer.
const PATIENT: Duration = Duration::from_secs(120);

fn ram() -> Ram {
    let block = |name, len| {
        let region = Arc::new(MmapRegion::<()>::new(len).unwrap());
        RamBlock::new(name, region).unwrap()
    };
    Ram::new(vec![block("low", LOW), block("high", HIGH)]).unwrap()
}

/// A VMM whose guest is its memory.
#[derive(Default)]
struct Vmm {
    runs: bool,
    /// More bytes of device state than there have to be.
    more_state: usize,
    /// What it was asked to do.
    calls: Vec<&'static str>,
}

impl SourceGuest for Vmm {
    fn pause(&mut self) -> Result<(), GuestError> {
        self.calls.push("pause");
        self.runs = false;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.calls.push("resume");
        self.runs = true;
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        let mut state = b"state".to_vec();
        state.resize(state.len() + self.more_state, 0);
        Ok(state)
    }
}

impl DestinationGuest for Vmm {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        self.calls.push("load");
        assert_eq!(state, b"state");
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.calls.push("run");
        self.runs = true;
        Ok(())
    }
}

fn destination_of(there: &Ram) -> Destination {
    destination_within(PATIENT, there)
}

fn destination_within(stall_timeout: Duration, there: &Ram) -> Destination {
    let mut config = DestinationConfig::new(engines(Method::None));
    config.stall_timeout = stall_timeout;
    config.max_state = 1000;
    Destination::new(listen(&loopback()), there.clone(), config).unwrap()
}

/// The destination receives the guest of a correct source. All of its pages differ from what was there before.
fn serve_a_correct_one(destination: &mut Destination, there: &Ram) -> Arrival {
    let address = address_of(destination);
    let mut to = Vmm::default();
    let arrival = thread::scope(|scope| {
        let serving = scope.spawn(|| destination.run(&mut to));
        move_correct_one(&address, there);
        serving.join().unwrap().unwrap()
    });
    assert!(to.runs);
    arrival
}

/// A correct source moves its guest to a destination whose memory is `there`.
fn move_correct_one(address: &Address, there: &Ram) {
    let (here, source) = source(|_| {});
    let mut from = Vmm::default();
    source.run(plain(address), &mut from).unwrap();
    assert!(!from.runs);
    expect_equal(&here, there);
}

/// A source whose guest has something in some of its pages.
fn source(settings: impl FnOnce(&mut SourceConfig)) -> (Ram, Source) {
    let here = ram();
    for page in [0, 3, 7, 15] {
        let memory = here.blocks()[0].memory();
        memory.write_slice(&[0xc3; PAGE], page * PAGE).unwrap();
    }
    let log = Arc::new(SharedBitmap::new(&here));
    let mut config = source_config(Method::None);
    settings(&mut config);
    let source = Source::with_config(here.clone(), log, config).unwrap();
    (here, source)
}

/// Whether `found` is `expected`, in which `…` stands for anything.
fn is_like(found: &str, expected: &str) -> bool {
    let mut rest = found;
    for (index, part) in expected.split('…').enumerate() {
        match rest.find(part) {
            Some(at) if at == 0 || index > 0 => rest = &rest[at + part.len()..],
            _ => return false,
        }
    }
    rest.is_empty() || expected.ends_with('…')
}

fn connect((host, port): &(String, u16)) -> TcpStream {
    TcpStream::connect((host.as_str(), *port)).unwrap()
}
