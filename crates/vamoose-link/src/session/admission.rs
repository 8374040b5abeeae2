//! Limits the connections in their handshake, and decides which one is evicted for a newcomer.
//!
//! Connections are counted by their network: an IPv4 address, an IPv6 /64 (what one host is given), or this host's Unix sockets.
//! When all places are taken, a newcomer gets the place of, in this order:
//!
//! 1. the oldest connection that has sent nothing, of the network that has the most;
//! 2. the oldest one of that network, whatever it has sent, if it has more than the newcomer's would have;
//! 3. the oldest one that has sent nothing, of any network. From a network that has fewer places than the newcomer's would have,
//!    one that is younger than [`GRACE`] is spared: it may be about to speak.
//!
//! So one network alone never keeps the others out, and silent connections keep nobody out for longer than [`GRACE`], however many
//! hosts they come from. An authenticated peer keeps its place. Memory is bounded by the number of places: nothing is kept of
//! refused connections.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv6Addr},
    time::Instant,
};

use crate::timeouts::GRACE;

/// Places of connections; `T` is kept for each.
pub(crate) struct Admission<T> {
    limit: usize,
    /// By number: the oldest first.
    places: BTreeMap<u64, Place<T>>,
    /// Places of unauthenticated connections per network, without zeros.
    networks: HashMap<Network, usize>,
    /// Number of connections not known to have sent anything.
    silent: usize,
    /// Evicted connections that have not left yet.
    leaving: usize,
    next: u64,
}

/// A network; `None` is this host.
pub(crate) type Network = Option<IpAddr>;

/// The network of an address.
pub(crate) fn network(address: Option<IpAddr>) -> Network {
    Some(match address?.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & NETWORK).into(),
        address => address,
    })
}

const NETWORK: u128 = !0 << 64;

struct Place<T> {
    network: Network,
    kept: T,
    since: Instant,
    state: State,
}

/// Progress of a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    /// It has sent nothing.
    Silent,
    HasSpoken,
    /// Its peer is authenticated.
    IsKnown,
}

/// Limit for evicted connections that have not left yet: each still has a thread.
const LEAVING: usize = 64;

/// A connection was let in.
pub(crate) struct Admitted<T> {
    /// Number of the connection.
    pub(crate) number: u64,
    /// `T` of the evicted connection, if there is one.
    pub(crate) evicted: Option<T>,
}

impl<T> Admission<T> {
    /// With `limit` places.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            places: BTreeMap::new(),
            networks: HashMap::new(),
            silent: 0,
            leaving: 0,
            next: 0,
        }
    }

    /// Admits a connection from `network` if there is a free place or another connection can be evicted. `has_spoken` is called for
    /// connections not known to have sent anything.
    pub(crate) fn admit(
        &mut self,
        network: Network,
        kept: T,
        now: Instant,
        has_spoken: impl Fn(&T) -> bool,
    ) -> Option<Admitted<T>> {
        let evicted = match self.places.len() < self.limit {
            true => None,
            false if self.is_crowded() => return None,
            false => {
                let number = self.victim(network, now, has_spoken)?;
                self.leaving += 1;
                self.remove(number)
            }
        };
        let number = self.next;
        self.next += 1;
        *self.networks.entry(network).or_default() += 1;
        self.silent += 1;
        let state = State::Silent;
        let place = Place {
            network,
            kept,
            since: now,
            state,
        };
        self.places.insert(number, place);
        Some(Admitted { number, evicted })
    }

    /// Whether no connection is evicted before others have left.
    pub(crate) fn is_crowded(&self) -> bool {
        self.leaving >= LEAVING
    }

    /// Whether the connection has been evicted.
    pub(crate) fn is_evicted(&self, number: u64) -> bool {
        !self.places.contains_key(&number)
    }

    /// The connection's handshake is over.
    pub(crate) fn leave(&mut self, number: u64) {
        if self.remove(number).is_none() {
            self.leaving = self.leaving.saturating_sub(1);
        }
    }

    /// Number of places and networks in memory.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn kept(&self) -> (usize, usize) {
        (self.places.len(), self.networks.len())
    }

    fn victim(
        &mut self,
        newcomer: Network,
        now: Instant,
        has_spoken: impl Fn(&T) -> bool,
    ) -> Option<u64> {
        let most = self.networks.values().copied().max().unwrap_or_default();
        let count = |network| self.networks.get(&network).copied().unwrap_or_default();
        let is_fair = count(newcomer) + 1 < most;
        if self.silent == 0 && !is_fair {
            return None;
        }
        let mut oldest = None;
        let mut silent = None;
        for (number, place) in &mut self.places {
            let is_of_most = count(place.network) == most;
            if place.state == State::Silent {
                if !has_spoken(&place.kept) {
                    if is_of_most {
                        return Some(*number);
                    }
                    let is_spared = place.network != newcomer
                        && count(newcomer) >= count(place.network)
                        && now.saturating_duration_since(place.since) < GRACE;
                    if !is_spared {
                        silent = silent.or(Some(*number));
                    }
                    continue;
                }
                place.state = State::HasSpoken;
                self.silent -= 1;
            }
            if is_of_most && place.state == State::HasSpoken {
                oldest = oldest.or(Some(*number));
            }
        }
        oldest.filter(|_| is_fair).or(silent)
    }

    fn remove(&mut self, number: u64) -> Option<T> {
        let place = self.places.remove(&number)?;
        self.silent -= usize::from(place.state == State::Silent);
        if place.state != State::IsKnown {
            self.discount(place.network);
        }
        Some(place.kept)
    }

    /// The connection has made progress. One whose peer is authenticated keeps its place.
    pub(crate) fn advance(&mut self, number: u64, state: State) {
        let Some(place) = self.places.get_mut(&number) else {
            return;
        };
        if state > place.state {
            self.silent -= usize::from(place.state == State::Silent);
            place.state = state;
            let network = place.network;
            if state == State::IsKnown {
                self.discount(network);
            }
        }
    }

    fn discount(&mut self, network: Network) {
        if let Some(count) = self.networks.get_mut(&network) {
            *count -= 1;
            if *count == 0 {
                self.networks.remove(&network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIMIT: usize = 6;

    /// Keeps for each connection whether it has sent something.
    type Places = Admission<bool>;

    fn host(last: u8) -> Network {
        network(Some(IpAddr::from([192, 0, 2, last])))
    }

    /// Connections from these hosts, in this order, by what each has sent: `-` nothing, `+` something, `!` proof of its identity.
    fn filled(hosts: &[(u8, char)], began: Instant) -> Places {
        let mut places = Places::new(LIMIT);
        for (number, (from, sent)) in (0..).zip(hosts) {
            let admitted = places.admit(host(*from), *sent != '-', began, |sent| *sent);
            assert_eq!(admitted.unwrap().number, number);
            if *sent == '!' {
                places.advance(number, State::IsKnown);
            }
        }
        places
    }

    /// The connection that is evicted.
    fn evicted_by(places: &mut Places, newcomer: u8, now: Instant) -> Option<u64> {
        let before: Vec<_> = places.places.keys().copied().collect();
        places.admit(host(newcomer), false, now, |sent| *sent)?;
        before.into_iter().find(|number| places.is_evicted(*number))
    }

    /// A name, the connections, the newcomer, and the evicted connection.
    type Case = (&'static str, &'static [(u8, char)], u8, Option<u64>);

    #[test]
    fn evicted_connection_by_case() {
        let cases: &[Case] = &[
            (
                "the oldest silent one",
                &[(1, '-'), (1, '-'), (2, '-'), (3, '-'), (4, '-'), (5, '-')],
                9,
                Some(0),
            ),
            (
                "of the network with the most",
                &[(1, '-'), (2, '+'), (2, '-'), (2, '-'), (3, '-'), (4, '-')],
                9,
                Some(2),
            ),
            (
                "also for one of its own",
                &[(1, '-'), (2, '+'), (2, '-'), (2, '-'), (3, '-'), (4, '-')],
                2,
                Some(2),
            ),
            (
                "one that has sent something, of many",
                &[(1, '-'), (2, '+'), (2, '+'), (2, '+'), (3, '-'), (4, '-')],
                9,
                Some(1),
            ),
            (
                "but not for one of its own",
                &[(1, '+'), (2, '+'), (2, '+'), (2, '+'), (3, '+'), (4, '+')],
                2,
                None,
            ),
            (
                "nor for one that would have as many",
                &[(1, '+'), (1, '+'), (2, '+'), (2, '+'), (3, '+'), (3, '+')],
                1,
                None,
            ),
            (
                "one each",
                &[(1, '+'), (2, '+'), (3, '-'), (4, '-'), (5, '+'), (6, '+')],
                9,
                Some(2),
            ),
            (
                "one each, all have spoken",
                &[(1, '+'), (2, '+'), (3, '+'), (4, '+'), (5, '+'), (6, '+')],
                9,
                None,
            ),
            (
                "nobody who is known",
                &[(1, '!'), (1, '!'), (1, '!'), (1, '!'), (1, '!'), (1, '!')],
                9,
                None,
            ),
            (
                "nor does he count",
                &[(1, '!'), (1, '!'), (1, '!'), (2, '+'), (2, '+'), (3, '+')],
                9,
                Some(3),
            ),
        ];
        for (name, hosts, newcomer, expected) in cases {
            let now = Instant::now();
            let mut places = filled(hosts, now);
            assert_eq!(evicted_by(&mut places, *newcomer, now), *expected, "{name}");
        }
    }

    /// The newcomer, and the connection evicted immediately and later.
    #[test]
    fn young_silent_connections_are_spared() {
        let two = [(2, '+'), (2, '+'), (2, '+'), (2, '+'), (2, '+'), (1, '-')];
        let three = [(1, '-'), (2, '+'), (2, '+'), (2, '+'), (3, '-'), (4, '-')];
        let own = [(1, '-'), (2, '-'), (3, '+'), (3, '+'), (3, '+'), (2, '+')];
        for (name, hosts, newcomer, at_once, later) in [
            ("one network keeps no other out", two, 2, None, Some(5)),
            ("nor with others there", three, 2, None, Some(0)),
            ("a modest network has its turn", two, 1, Some(0), Some(0)),
            ("its own may be taken at once", own, 2, Some(1), Some(0)),
        ] {
            let began = Instant::now();
            for (age, expected) in [(Duration::ZERO, at_once), (GRACE, later)] {
                let mut places = filled(&hosts, began);
                let evicted = evicted_by(&mut places, newcomer, began + age);
                assert_eq!(evicted, expected, "{name}, after {age:?}");
            }
        }
    }

    #[test]
    fn networks_of_addresses() {
        let of = |text: &str| network(Some(text.parse().unwrap()));
        for (one, other, is_same) in [
            ("192.0.2.1", "192.0.2.1", true),
            ("192.0.2.1", "192.0.2.2", false),
            ("192.0.2.1", "::ffff:192.0.2.1", true),
            ("::ffff:192.0.2.1", "::ffff:192.0.2.2", false),
            ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
        ] {
            assert_eq!(of(one) == of(other), is_same, "{one} {other}");
        }
        assert_ne!(of("127.0.0.1"), network(None));
    }

    /// Random events in random order.
    #[test]
    fn memory_is_bounded() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut places = Admission::new(LIMIT);
        let mut alive: Vec<u64> = Vec::new();
        for step in 0..100_000u32 {
            let number = (!alive.is_empty()).then(|| random.usize(..alive.len()));
            match (random.u8(..8), number) {
                (0, Some(at)) => places.leave(alive.swap_remove(at)),
                (1, Some(at)) => places.advance(alive[at], State::HasSpoken),
                (2, Some(at)) if random.u8(..8) == 0 => places.advance(alive[at], State::IsKnown),
                _ => {
                    let from = match random.bool() {
                        true => host(random.u8(..4)),
                        false => network(Some(Ipv6Addr::from_bits(u128::from(step) << 64).into())),
                    };
                    let now = Instant::now();
                    let admitted = places.admit(from, random.bool(), now, |sent| *sent);
                    alive.extend(admitted.map(|it| it.number));
                }
            }
            let (kept, networks) = places.kept();
            assert!(kept <= LIMIT && networks <= kept);
            assert!(alive.len() <= LIMIT + LEAVING);
            let counted: usize = places.networks.values().sum();
            let unknown = places
                .places
                .values()
                .filter(|it| it.state != State::IsKnown);
            assert_eq!(counted, unknown.count());
            let silent = places.places.values();
            let silent = silent.filter(|it| it.state == State::Silent);
            assert_eq!(places.silent, silent.count());
        }
        for number in alive {
            places.leave(number);
        }
        assert_eq!(places.kept(), (0, 0));
        assert_eq!(places.leaving, 0);
    }
}
