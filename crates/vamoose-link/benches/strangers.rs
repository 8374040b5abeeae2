//! What connections cost that never get through their handshake: memory that is kept of them, and time to accept.
//!
//! ```text
//! cargo bench -p vamoose-link --bench strangers [-- CONNECTIONS]    # over sockets; 20,000 if not given
//! ```
//! First a million newcomers at the structure that admits them, all of whose places are taken, each from a network of its own: where those
//! that have the places have sent something, so that the newcomers are refused, and where they have not, so that each gets a place.
//! Then real ones, from thousands of addresses of the loopback network, at a server whose places are taken: how long from dialling one to
//! its end.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded figures"
)]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, TcpStream},
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, SocketType, bind, connect, ipproto, socket};
use vamoose_link::{
    Address, Listener, Security, SessionConfig, Sessions, session_testing::Strangers,
};

const PLACES: usize = 512;
const MILLION: u64 = 1_000_000;
/// How many are measured at the beginning, and at the end.
const SAMPLE: u64 = 10_000;

fn main() {
    for (what, has_sent) in [("refused", true), ("let in for a silent one", false)] {
        structure(what, has_sent);
    }
    let count = std::env::args().skip(1).find_map(|word| word.parse().ok());
    sockets(count.unwrap_or(20_000));
}

fn structure(what: &str, has_sent: bool) {
    let mut strangers = Strangers::new(PLACES);
    let from = |network: u64| {
        IpAddr::V6(Ipv6Addr::from_bits(
            (0x2001_0db8 << 96) | (u128::from(network) << 64),
        ))
    };
    for network in 0..PLACES as u64 {
        strangers.admit(from(network), has_sent);
    }
    let before = resident();
    let mut admitted = 0;
    let mut sample = |numbers: std::ops::Range<u64>| {
        let began = Instant::now();
        let count = numbers.end - numbers.start;
        for number in numbers {
            admitted += u64::from(strangers.admit(from(number + PLACES as u64), has_sent));
        }
        began.elapsed().as_secs_f64() / count as f64 * 1e6
    };
    let first = sample(0..SAMPLE);
    sample(SAMPLE..MILLION - SAMPLE);
    let last = sample(MILLION - SAMPLE..MILLION);
    let grown = resident().saturating_sub(before);
    println!(
        "{MILLION} {what}: {first:.2} us each at first, {last:.2} us at last; {grown} KiB more; kept {:?}; admitted {admitted}",
        strangers.kept()
    );
}

fn sockets(count: u32) {
    let listen = "tcp:127.0.0.1:0".parse().expect("it is an address");
    let listener = Listener::bind(&listen, Duration::from_secs(60)).expect("it is free");
    let Address::Tcp { port, .. } = *listener.address() else {
        return;
    };
    let server = SocketAddr::from(([127, 0, 0, 1], port));
    let config = SessionConfig::new(Security::Insecure);
    let _sessions = Sessions::new(vec![listener], config).expect("it can be served");
    // All of them are of addresses of their own.
    let dial = |number: u32| {
        let from = Ipv4Addr::from_bits(0x7f40_0000 + number);
        let socket = socket(AddressFamily::INET, SocketType::STREAM, Some(ipproto::TCP));
        let socket = socket.expect("there are sockets");
        bind(&socket, &SocketAddrV4::new(from, 0)).expect("it is of this host");
        connect(&socket, &server).expect("it listens");
        TcpStream::from(socket)
    };
    let mut held: Vec<TcpStream> = Vec::new();
    let mut number = 0;
    let mut refill = |held: &mut Vec<TcpStream>| {
        held.clear();
        while held.len() < PLACES {
            number += 1;
            let mut stream = dial(number);
            stream.write_all(b"V").expect("it is open");
            held.push(stream);
        }
        Instant::now()
    };
    let mut times = Vec::new();
    let mut filled = refill(&mut held);
    let before = resident();
    for number in 0..count {
        // Handshakes end after ten seconds.
        if filled.elapsed() > Duration::from_secs(8) {
            filled = refill(&mut held);
        }
        let began = Instant::now();
        let mut stream = dial(0x0010_0000 + number);
        // Refused at once, or let in for another one; then it is closed here.
        let _ = stream.set_read_timeout(Some(Duration::from_millis(100)));
        let _ = stream.read(&mut [0]);
        times.push(began.elapsed());
    }
    let grown = resident().saturating_sub(before);
    let median = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    };
    let part = times.len() / 10;
    println!(
        "{count} over sockets: {:?} each at first, {:?} at last (medians); {grown} KiB more",
        median(&times[..part]),
        median(&times[times.len() - part..])
    );
}

/// Memory of this process, in KiB.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("there is /proc");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let words = line.and_then(|line| line.split_whitespace().next());
    words.and_then(|word| word.parse().ok()).unwrap_or_default()
}
