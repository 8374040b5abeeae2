//! A limit of what a server receives, over real sessions.

use std::{
    io::{Read as _, Write as _},
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use vamoose_link::{
    Address, Limit, Listener, Pacer, Security, Session, SessionConfig, Sessions, Stream,
};

const PATIENCE: Duration = Duration::from_secs(60);
const PACKET: usize = 64 << 10;
const RATE: u64 = 8 << 20;

struct Server {
    sessions: Sessions,
    address: Address,
}

impl Server {
    fn new(limit: &Limit) -> Self {
        let config = SessionConfig {
            limit: limit.clone(),
            ..SessionConfig::new(Security::Insecure)
        };
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), PATIENCE).unwrap();
        let address = listener.address().clone();
        Self {
            sessions: Sessions::new(vec![listener], config).unwrap(),
            address,
        }
    }

    /// A session, and both ends of its stream.
    fn session(&self) -> (Session, Stream, Stream) {
        let config = SessionConfig::new(Security::Insecure);
        let paths = vec![self.address.clone().into()];
        let (session, near) = Session::dial(paths, config).unwrap();
        (&near).write_all(b"here").unwrap();
        let far = self.sessions.next(PATIENCE).unwrap().stream;
        (&far).read_exact(&mut [0; 4]).unwrap();
        (session, near, far)
    }
}

fn limit(rate: u64) -> Limit {
    Limit::new(NonZeroU64::new(rate))
}

/// Takes what comes until the end, and counts it.
fn take(stream: &Stream, count: &AtomicU64) {
    let mut buffer = vec![0; 1 << 20];
    while let Ok(read) = (&*stream).read(&mut buffer)
        && read > 0
    {
        count.fetch_add(read as u64, Ordering::Relaxed);
    }
}

/// It neither waits nor listens to what is reported: the server reads no faster than its limit.
#[test]
fn a_source_that_ignores_its_share_is_held_up() {
    const BYTES: usize = 8 << 20;
    for limit in [limit(RATE), limit(RATE / 2)] {
        let server = Server::new(&limit);
        let (_session, near, far) = server.session();
        let began = Instant::now();
        let count = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| take(&far, &count));
            for packet in vec![7; BYTES].chunks(PACKET) {
                (&near).write_all(packet).unwrap();
            }
            near.finish();
        });
        assert_eq!(count.into_inner(), BYTES as u64);
        let rate = (BYTES - PACKET) as f64 / began.elapsed().as_secs_f64();
        let most = limit.rate().unwrap().get() as f64;
        assert!(rate < most * 1.1, "{rate} of {most}");
    }
}

/// Both have more to send than they may. From when one's guest is paused, that one gets much more than the other, and after a
/// change of the limit both still go on.
#[test]
fn a_paused_guest_goes_first() {
    const SOME: u64 = 1 << 20;
    let limit = limit(RATE);
    let server = Server::new(&limit);
    let guests = [server.session(), server.session()];
    let counts = [AtomicU64::new(0), AtomicU64::new(0)];
    let counted = || [0, 1].map(|at: usize| counts[at].load(Ordering::Relaxed));
    let wait_for = |is_so: &dyn Fn([u64; 2]) -> bool| {
        let end = Instant::now() + PATIENCE;
        while !is_so(counted()) {
            assert!(Instant::now() < end, "{:?}", counted());
            thread::sleep(Duration::from_millis(5));
        }
    };
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for ((session, near, far), count) in guests.iter().zip(&counts) {
            let pacer = Arc::new(Pacer::new(None, &Limit::default()));
            pacer.follow(session.clone());
            let ends = &ends;
            scope.spawn(move || {
                while !ends.load(Ordering::Acquire) {
                    pacer.wait_for(PACKET);
                    (&*near).write_all(&[7; PACKET]).unwrap();
                }
                near.finish();
            });
            scope.spawn(|| take(far, count));
        }
        wait_for(&|counts| counts.iter().all(|count| *count > SOME));
        guests[0].0.set_paused(true);
        // What was under way when it was paused.
        let before = counted();
        wait_for(&|counts| counts[0] > before[0] + SOME);
        let before = counted();
        wait_for(&|counts| counts[0] > before[0] + 8 * SOME);
        let after = counted();
        let gained = [0, 1].map(|at| after[at] - before[at]);
        assert!(gained[0] > 3 * gained[1], "{gained:?}");
        guests[0].0.set_paused(false);
        limit.set(NonZeroU64::new(4 * RATE));
        wait_for(&|counts| (0..2).all(|at| counts[at] > after[at] + SOME));
        ends.store(true, Ordering::Release);
    });
}
