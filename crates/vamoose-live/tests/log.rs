//! Every log line of a migration lies in the span of that migration, whichever thread writes it.

#![cfg(not(feature = "loom"))] // whose atomics work in a model only
#![allow(clippy::unwrap_used, reason = "a test")]

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use tracing_subscriber::filter::LevelFilter;
use vamoose_live::{
    Acceptor, Destination, DestinationConfig, DestinationGuest, GuestError, Listener, Ram,
    RamBlock, Source, SourceConfig, SourceGuest, Transport,
    compression::{Engines, Method, Settings},
    dirty::SharedBitmap,
};
use vm_memory::MmapRegion;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Vm;

impl SourceGuest for Vm {
    fn pause(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(vec![7])
    }
}

impl DestinationGuest for Vm {
    fn load(&mut self, _: &[u8]) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
}

fn ram() -> Ram {
    let region = Arc::new(MmapRegion::<()>::new(1 << 20).unwrap());
    Ram::new(vec![RamBlock::new("ram", region).unwrap()]).unwrap()
}

#[test]
fn every_line_names_the_side_and_the_attempt() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::DEBUG)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();
    let engines = Engines::software(Settings::new(Method::Zstd, None).unwrap());
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), Duration::from_secs(60));
    let listener = listener.unwrap();
    let to = Transport::Plain(listener.address().clone());
    let acceptor = Acceptor::Plain(listener);
    let config = DestinationConfig::new(engines.clone());
    let mut destination = Destination::new(acceptor, ram(), config).unwrap();
    let arriving = thread::spawn(move || destination.run(&mut Vm).unwrap());
    let here = ram();
    let bitmap = Arc::new(SharedBitmap::new(&here));
    let source = Source::with_config(here, bitmap, SourceConfig::new(engines)).unwrap();
    source.run(&to, &mut Vm).unwrap();
    arriving.join().unwrap();

    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let ours = |line: &&str| line.contains("vamoose_live");
    let id_of = |line: &str| Some(line.split_once("attempt=")?.1.split_once('}')?.0.to_owned());
    let id = log.lines().find_map(id_of).unwrap();
    for line in log.lines().filter(ours) {
        assert!(line.contains("migration{role="), "{line}");
        assert_eq!(id_of(line), Some(id.clone()), "{line}");
    }
    for (role, text) in [
        ("source", "round sent"),
        ("source", "(last round "),
        ("destination", "accepted a guest"),
        ("destination", "round received"),
    ] {
        let mut lines = log.lines().filter(|line| line.contains(text));
        let role = format!("role=\"{role}\"");
        assert!(lines.any(|line| line.contains(&role)), "{text}: {log}");
    }
}
