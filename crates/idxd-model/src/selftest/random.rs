//! The offloads against devices in which everything goes wrong by chance, from a seed: what comes out has to be what
//! the processor alone would have made.
//!
//! Each round has models of its own with [`Faults::everything`], pages of its own, and a time of its own between
//! giving work to a device and wanting it back. Nothing of it depends on real time, so that a seed gives the same
//! rounds again.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use super::{
    Options,
    iaa::decompressed,
    rig::{PAGE, Rig},
};
use crate::{Config, Faults, Model, PortalKind, random::Random};
use idxd::{
    Kind, Queue, Record, Shape, Submit, Tuning,
    offload::{Compressor, Decompressor, Devices, OffloadCounters, Tables, ZeroScanner},
};

/// What came of the rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    /// How many there were.
    pub rounds: u32,
    /// Pages that were looked at, compressed or decompressed.
    pub pages: u64,
    /// Who did them.
    pub work: OffloadCounters,
    /// What was wrong, round by round; nothing should be.
    pub wrong: Vec<String>,
}

/// Does `rounds` rounds, from `seed`.
pub fn run(seed: u64, rounds: u32) -> Rounds {
    let mut random = Random::new(seed);
    let mut all = Rounds {
        rounds,
        ..Rounds::default()
    };
    for round in 0..rounds {
        let mut this = Round {
            random: Random::new(random.next()),
            wrong: Vec::new(),
            pages: 0,
            work: OffloadCounters::default(),
        };
        this.zeros();
        this.streams();
        all.pages += this.pages;
        all.work = sum(all.work, this.work);
        let wrong = this.wrong.into_iter();
        all.wrong
            .extend(wrong.map(|what| format!("round {round}: {what}")));
    }
    all
}

struct Round {
    random: Random,
    wrong: Vec<String>,
    pages: u64,
    work: OffloadCounters,
}

/// Devices with injected faults, and their queues, which advance time.
struct Bad {
    devices: Arc<Devices>,
    queues: Vec<Arc<dyn Submit>>,
    /// Goes after its queues.
    _model: Model,
}

/// Most pages of a batch.
const BATCH: usize = 128;

/// Most pages to be compressed, of which each takes long in software.
const STREAMS: usize = 24;

impl Round {
    fn zeros(&mut self) {
        let shape = Shape {
            members: size(BATCH),
            buffer_bytes: 0,
        };
        let Some(bad) = self.bad(Kind::Dsa, shape) else {
            return;
        };
        let mut scanner =
            ZeroScanner::new(Arc::clone(&bad.devices), size(PAGE), NonZeroU32::new(64));
        for _ in 0..=self.random.index(4) {
            let pages = self.some_pages(BATCH);
            let addresses: Vec<u64> = pages
                .chunks(PAGE)
                .map(|page| page.as_ptr().expose_provenance() as u64)
                .collect();
            let truth: Vec<bool> = pages.chunks(PAGE).map(is_zero).collect();
            let batch = scanner.start(&addresses);
            self.let_time_go_on(&bad);
            let mut verdicts = vec![false; addresses.len()];
            let result = scanner.finish(
                batch,
                &addresses,
                &mut |page| truth.get(page).copied().unwrap_or(false),
                &mut verdicts,
            );
            if let Err(error) = result {
                self.wrong.push(error.to_string());
            }
            let judged = verdicts.iter().zip(&truth);
            let wrong = judged.filter(|(answer, is)| answer != is).count();
            if wrong > 0 {
                self.wrong.push(format!("{wrong} pages judged wrong"));
            }
            self.pages += addresses.len() as u64;
        }
        self.work = sum(self.work, bad.devices.work());
    }

    fn streams(&mut self) {
        let shape = Shape {
            members: 1,
            buffer_bytes: PAGE,
        };
        let Some(bad) = self.bad(Kind::Iaa, shape) else {
            return;
        };
        let options = Options::default();
        let good = Model::deterministic(&Config::iaa());
        let processor = Rig::new(good.queue(0, 0, PortalKind::Enqcmd), &options);
        let inflate = |stream: &[u8]| {
            let (answer, output) = decompressed(&processor, stream, PAGE).ok()?;
            (answer.output_size as usize == PAGE).then(|| output[..PAGE].to_vec())
        };

        let pages = self.some_pages(STREAMS);
        let tables = match self.random.index(2) {
            0 => Tables::Fixed,
            _ => Tables::Learned,
        };
        let mut compressor = Compressor::new(Arc::clone(&bad.devices), PAGE, STREAMS, tables);
        let mut streams: Vec<Option<Vec<u8>>> = Vec::new();
        // The processor finds nothing shorter, ever: such pages go out as they are.
        compressor.compress(&pages, &mut |_, _| None, &mut |stream| {
            streams.push(stream.map(<[u8]>::to_vec));
        });
        drop(compressor);
        let count = pages.len() / PAGE;
        if streams.len() != count {
            self.wrong
                .push(format!("{} streams of {count} pages", streams.len()));
        }
        let (mut originals, mut compressed) = (Vec::new(), Vec::new());
        for (page, stream) in pages.chunks(PAGE).zip(streams) {
            let Some(stream) = stream else { continue };
            if inflate(&stream).as_deref() != Some(page) {
                self.wrong
                    .push("a stream that is not the page's".to_owned());
            }
            originals.extend_from_slice(page);
            compressed.push(stream);
        }

        let mut decompressor = Decompressor::new(Arc::clone(&bad.devices), PAGE);
        let mut output = vec![0xaa; originals.len()];
        let result = decompressor.decompress(
            &|page| compressed[page].as_slice(),
            &mut output,
            &mut |stream, page| {
                inflate(stream)
                    .map(|bytes| page.copy_from_slice(&bytes))
                    .ok_or(())
            },
        );
        drop(decompressor);
        if result.is_err() || output != originals {
            self.wrong
                .push("pages that are not what they were".to_owned());
        }
        self.pages += 2 * count as u64;
        self.work = sum(self.work, bad.devices.work());
    }

    /// One or two devices, behind one portal or the other.
    fn bad(&mut self, kind: Kind, shape: Shape) -> Option<Bad> {
        let mut config = Config::devices(kind, 1 + self.random.index(2));
        config.faults = Faults::everything();
        config.seed = self.random.next();
        let portal = match self.random.index(2) {
            0 => PortalKind::Enqcmd,
            _ => PortalKind::Write { unsafe_v1: false },
        };
        let model = Model::deterministic(&config);
        let queues: Vec<_> = (0..config.devices.len())
            .map(|device| model.queue(device, 0, portal))
            .collect();
        let tuning = Tuning {
            slots: 16,
            ..Tuning::default()
        };
        let opened = queues
            .iter()
            .map(|queue| Ok((Queue::new(Arc::clone(queue), shape, tuning)?, None)))
            .collect::<Result<Vec<_>, idxd::OpenQueueError>>();
        match opened {
            Ok(opened) => Some(Bad {
                devices: Arc::new(Devices::new(opened, None)),
                queues,
                _model: model,
            }),
            Err(error) => {
                self.wrong.push(format!(
                    "a model cannot be driven: {:#}",
                    anyhow::Error::from(error)
                ));
                None
            }
        }
    }

    /// Pages of which some are zero, some but for a byte, some of few symbols, and some full of noise.
    fn some_pages(&mut self, most: usize) -> Vec<u8> {
        let count = 1 + self.random.index(most);
        let mut pages = vec![0; count * PAGE];
        for page in pages.chunks_mut(PAGE) {
            match self.random.index(4) {
                0 => {}
                1 => page[self.random.index(PAGE)] = 1,
                symbols => {
                    let mask = if symbols == 2 { 0x03 } else { 0xff };
                    for bytes in page.chunks_mut(8) {
                        let word = self.random.next().to_le_bytes();
                        for (byte, random) in bytes.iter_mut().zip(word) {
                            *byte = random & mask;
                        }
                    }
                }
            }
        }
        pages
    }

    fn let_time_go_on(&mut self, bad: &Bad) {
        let nothing = Record::default();
        for _ in 0..self.random.index(1000) {
            for queue in &bad.queues {
                queue.pause(&nothing, queue.now() + Duration::from_micros(1));
            }
        }
    }
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

fn size(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

fn sum(one: OffloadCounters, other: OffloadCounters) -> OffloadCounters {
    OffloadCounters {
        model: one.model || other.model,
        by_device: one.by_device + other.by_device,
        refused: one.refused + other.refused,
        failed: one.failed + other.failed,
        overtaken: one.overtaken + other.overtaken,
        checked: one.checked + other.checked,
    }
}
