//! A busy session allocates nothing per frame. Allocations of the whole process are counted, so this test has a process to itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    io::Read as _,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use vamoose_link::{Listener, Security, Session, SessionConfig, Sessions, Stream};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code, reason = "the trait is unsafe; all is the system's")]
// SAFETY: passes everything on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const FRAMES: usize = 4000;
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn frames_in_steady_state_allocate_nothing() {
    let config = SessionConfig::new(Security::Insecure);
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), LIMIT).unwrap();
    let to = listener.address().clone();
    let sessions = Sessions::new(vec![listener], config.clone()).unwrap();
    let (_session, near) = Session::dial(vec![to.into()], config).unwrap();
    near.write_both(b"here", &[]).unwrap();
    let far = sessions.next(LIMIT).unwrap().stream;
    (&far).read_exact(&mut [0; 4]).unwrap();
    // The pool of frames that wait for acknowledgement grows up to the window (about 200 such frames), in whichever exchange the receiver is slow. The exchange with
    // the fewest allocations had the pool full at its start.
    let allocations = (0..10)
        .map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            exchange(&near, &far);
            ALLOCATIONS.load(Ordering::Relaxed) - before
        })
        .min()
        .unwrap();
    // Threads that start, and those that watch the session twice a second.
    assert!(allocations < FRAMES / 20, "{allocations} allocations");
}

fn exchange(near: &Stream, mut far: &Stream) {
    const LEN: usize = 20 << 10;
    thread::scope(|scope| {
        scope.spawn(|| {
            let frame = vec![7; LEN];
            for _ in 0..FRAMES {
                near.write_both(&frame, &[]).unwrap();
            }
        });
        let mut frame = vec![0; LEN];
        for _ in 0..FRAMES {
            far.read_exact(&mut frame).unwrap();
        }
    });
}
