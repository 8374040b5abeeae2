//! What a qpl migration costs the processor with IAA, as far as a machine without one can tell, against software.
//!
//! ```text
//! VAMOOSE_CORPUS=target/corpus/silesia:target/corpus/memory cargo bench --manifest-path bench/Cargo.toml --bench iaa
//! ```
//! The device is a [`Playback`]: it knows what the crate's model of IAA makes of each page, and gives that out at the
//! model's default speed (4 GB/s in eight engines, a latency of 1 µs). Looking it up and copying it is the device's
//! work, and taken out of the time: its clock stands still meanwhile. What is left is the encoder's whole path, as
//! one thread goes it: building and submitting descriptors, reading records, copying streams into the payload, the
//! software that does what is late, the check of every 64th packet, and waiting. Waiting counts as processor time, which it is.
//!
//! Of each packet the fastest of some rounds counts, so that what else the machine does is not in it: a packet by the
//! device is shorter than the time slices of the system. Software's is not, and is measured in the thread's CPU time.
//! Not in the figures: the instruction ENQCMD itself (here a call of a function), what cache lines cost that a device has
//! written, and all that the model does not know. The figures are about the model, the driver and the software.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded numbers"
)]

use std::{
    collections::{HashMap, VecDeque},
    env, fmt,
    hint::{black_box, spin_loop},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use idxd::{
    Descriptor, Limits, Queue, Record, RecordImage, Shape, Submit, Submitted, Tuning,
    offload::Devices,
};
use idxd_model::{Config, Model, PortalKind, Speeds};
use multifd::Method;
use rustix::time::{ClockId, clock_gettime};
use vamoose_codec::{Accel, Encoder, Health, Registry, Settings, Verify, encoder};

#[path = "common/corpus.rs"]
mod corpus;

use corpus::{Corpus, LAYOUT, corpora};

const PAGE: usize = 4096;
const ROUNDS: usize = 15;

fn main() {
    // `cargo test --benches` only wants to see that it runs.
    let (packets, rounds) = if env::args().any(|arg| arg == "--bench") {
        (24, ROUNDS)
    } else {
        (1, 1)
    };
    println!(
        "| corpus | engine, level | ns a page | of them waiting | CPU s/GiB | ratio | by the device |"
    );
    println!("|---|---|---|---|---|---|---|");
    for corpus in corpora(packets) {
        for level in [0, 1] {
            by_software(&corpus, level, rounds);
            by_device(&corpus, level, rounds);
        }
    }
}

fn by_software(corpus: &Corpus, level: i32, rounds: usize) {
    let mut encoder = encoder(&settings(level), LAYOUT).expect("an encoder");
    let measured = measure(corpus, rounds, &mut encoder, &mut || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        let now = Duration::try_from(now).expect("a time after the thread's start");
        (now, Duration::ZERO)
    });
    measured.print(corpus, &format!("software {level}"), "");
}

fn by_device(corpus: &Corpus, level: i32, rounds: usize) {
    let playback = Arc::new(Playback::new());
    let shape = Shape {
        members: 1,
        buffer_bytes: PAGE,
    };
    let tuning = Tuning {
        slots: 128,
        ..Tuning::default()
    };
    let queue = Queue::new(playback.clone(), shape, tuning).expect("a queue");
    let devices = Arc::new(Devices::new([queue]));
    let opened = devices.clone();
    let registry = Arc::new(Registry::with_iaa(move || Ok(opened.clone())));
    let engines = registry
        .choose(settings(level), Accel::Iaa, Verify::Sample)
        .expect("an engine");
    let health = Arc::new(Health::default());
    let mut encoder = engines.encoder(LAYOUT, &health).expect("an encoder");
    // The model works once, out of the time.
    let mut times = || playback.times();
    measure(corpus, 1, &mut encoder, &mut times);
    let before = devices.work();
    let measured = measure(corpus, rounds, &mut encoder, &mut times);
    let work = devices.work();
    let by_device = work.by_device - before.by_device;
    let all = rounds * corpus.bytes() / PAGE;
    let share = format!("{:.1} %", by_device as f64 * 100.0 / all as f64);
    measured.print(corpus, &format!("IAA (model) {level}"), &share);
}

fn settings(level: i32) -> Settings {
    Settings::new(Method::Qpl, Some(level)).expect("a level")
}

struct Measured {
    elapsed: Duration,
    waited: Duration,
    encoded: usize,
}

/// The fastest round of each packet. `times` tells the time, and how much of it was waiting, so far.
fn measure(
    corpus: &Corpus,
    rounds: usize,
    encoder: &mut Encoder,
    times: &mut dyn FnMut() -> (Duration, Duration),
) -> Measured {
    let mut room = vec![0; LAYOUT.max_payload()];
    let mut sum = Measured {
        elapsed: Duration::ZERO,
        waited: Duration::ZERO,
        encoded: 0,
    };
    for packet in &corpus.packets {
        let mut best = None;
        let mut encoded = 0;
        for _ in 0..rounds {
            let (start, waited) = times();
            let payload = encoder
                .encode(packet, &mut room)
                .expect("a payload")
                .payload;
            encoded = black_box(payload).len();
            let (end, waited_then) = times();
            let round = (end - start, waited_then - waited);
            best = Some(best.map_or(round, |best: (Duration, Duration)| best.min(round)));
        }
        let (elapsed, waited) = best.expect("a round");
        sum.elapsed += elapsed;
        sum.waited += waited;
        sum.encoded += encoded;
    }
    sum
}

impl Measured {
    fn print(&self, corpus: &Corpus, engine: &str, by_device: &str) {
        let pages = corpus.bytes() as f64 / PAGE as f64;
        let nanos = |time: Duration| time.as_secs_f64() * 1e9 / pages;
        println!(
            "| {} | {engine} | {:.0} | {:.0} | {:.2} | {:.3} | {by_device} |",
            corpus.name,
            nanos(self.elapsed),
            nanos(self.waited),
            self.elapsed.as_secs_f64() * (1 << 30) as f64 / corpus.bytes() as f64,
            corpus.bytes() as f64 / self.encoded as f64,
        );
    }
}

/// A work queue of an IAA that knows all answers.
struct Playback {
    model: Arc<dyn Submit>,
    limits: Limits,
    start: Instant,
    state: Mutex<State>,
    /// Dropped last.
    _model: Model,
}

#[derive(Default)]
struct State {
    /// By flags and source: pages lie still.
    answers: HashMap<(u16, u64), Arc<Answer>>,
    /// When each engine has time.
    engines: [Duration; ENGINES],
    /// In the order in which they are due: all take the same time.
    due: VecDeque<Due>,
    /// Time that the device itself took.
    own: Duration,
    waited: Duration,
}

struct Answer {
    record: RecordImage,
    output: Vec<u8>,
}

struct Due {
    at: Duration,
    record: u64,
    destination: u64,
    answer: Arc<Answer>,
}

const ENGINES: usize = 8;

impl Playback {
    fn new() -> Self {
        let model = Model::deterministic(&Config::iaa());
        let queue = model.queue(0, 0, PortalKind::Enqcmd);
        Self {
            limits: queue.limits().clone(),
            model: queue,
            start: Instant::now(),
            state: Mutex::default(),
            _model: model,
        }
    }

    /// The time, and how much of it was waiting.
    fn times(&self) -> (Duration, Duration) {
        let state = self.state();
        (self.time(&state), state.waited)
    }

    /// The clock stands still while the device itself works.
    fn time(&self, state: &State) -> Duration {
        self.start.elapsed() - state.own
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics here")
    }

    /// Does what is due.
    fn complete(&self, state: &mut State) {
        let now = self.time(state);
        if state.due.front().is_none_or(|due| due.at > now) {
            return;
        }
        let begin = Instant::now();
        while state.due.front().is_some_and(|due| due.at <= now)
            && let Some(due) = state.due.pop_front()
        {
            let Answer { record, output } = &*due.answer;
            // SAFETY: destination and record are writable until the record is complete, as whoever submits promises,
            // and the output is not longer than the destination was for the model. Records are aligned.
            unsafe {
                let destination = due.destination as *mut u8;
                destination.copy_from_nonoverlapping(output.as_ptr(), output.len());
                let words = due.record as *const AtomicU64;
                for index in (0..record.words.len()).rev() {
                    (*words.add(index)).store(record.words[index], Ordering::Release);
                }
            }
        }
        state.own += begin.elapsed();
    }

    /// What the model makes of it.
    fn ask_model(&self, descriptor: &Descriptor) -> Answer {
        let mut output = vec![0; PAGE];
        let record = Record::default();
        let mut own = *descriptor;
        own.record = record.address();
        own.address_2 = output.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: record and output live until the record is complete.
        let submitted = unsafe { self.model.submit(&[own]) };
        assert_eq!(submitted.accepted, 1);
        let record = loop {
            match record.image() {
                Some(image) => break image,
                None => {
                    let deadline = self.model.now() + Duration::from_millis(1);
                    self.model.pause(&record, deadline);
                }
            }
        };
        output.truncate(own.low(1) as usize);
        Answer { record, output }
    }
}

impl Submit for Playback {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        let mut state = self.state();
        let now = self.time(&state);
        let begin = Instant::now();
        for descriptor in descriptors {
            let key = (descriptor.operation_flags, descriptor.address_1);
            let answer = state.answers.entry(key);
            let answer = answer
                .or_insert_with(|| Arc::new(self.ask_model(descriptor)))
                .clone();
            let speeds = Speeds::default();
            let takes = f64::from(descriptor.size) / (speeds.compress as f64 / ENGINES as f64);
            let engine = state.engines.iter_mut().min().expect("an engine");
            *engine = now.max(*engine) + Duration::from_secs_f64(takes);
            let at = *engine + speeds.latency;
            state.due.push_back(Due {
                at,
                record: descriptor.record,
                destination: descriptor.address_2,
                answer,
            });
        }
        state.own += begin.elapsed();
        Submitted {
            accepted: descriptors.len(),
            refusal: None,
        }
    }

    fn now(&self) -> Duration {
        let mut state = self.state();
        self.complete(&mut state);
        self.time(&state)
    }

    fn pause(&self, record: &Record, deadline: Duration) {
        let mut state = self.state();
        let begin = self.time(&state);
        loop {
            self.complete(&mut state);
            let now = self.time(&state);
            if record.status() != 0 || now >= deadline {
                state.waited += now - begin;
                return;
            }
            spin_loop();
        }
    }

    fn close(&self) {
        self.state().due.clear();
    }
}

impl fmt::Debug for Playback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Playback")
    }
}
