//! Records between a sealer and an opener, whole, and changed in every way on their way.

use std::{
    io::{self, Read as _, Write as _},
    thread,
    time::Duration,
};

use proptest::prelude::*;

use super::sockets;
use crate::{
    Socket,
    tls::{
        Cipher, Opener, Sealer,
        record::{ALERT, DATA, HANDSHAKE, HEADER_LEN, MAX_CONTENT, RecordKey, TAG_LEN},
        testing::seal_any,
    },
};

const CIPHERS: [Cipher; 3] = [
    Cipher::Aes128Gcm,
    Cipher::Aes256Gcm,
    Cipher::Chacha20Poly1305,
];

fn key(cipher: Cipher) -> RecordKey {
    let key = [5; 32];
    let len = cipher.algorithm().key_len();
    RecordKey::of(cipher, &key[..len], [6; 12], 0).unwrap()
}

fn sealer(cipher: Cipher) -> Sealer {
    Sealer::new(key(cipher))
}

fn go_on(_taken: usize) -> io::Result<()> {
    Ok(())
}

/// Bytes that differ everywhere.
fn bytes(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..len).map(next).collect()
}

/// What a sealer writes.
fn wire(write: impl FnOnce(&mut Sealer, &Socket) + Send) -> Vec<u8> {
    let (near, far) = sockets();
    thread::scope(|scope| {
        scope.spawn(move || {
            write(&mut sealer(Cipher::default()), &near);
        });
        let mut written = Vec::new();
        (&mut &far).read_to_end(&mut written).unwrap();
        written
    })
}

/// What an opener makes of `wire`, read in pieces of `piece`: the bytes, and the error at the end, if it is not the
/// peer's good-bye.
fn open(wire: &[u8], piece: usize) -> (Vec<u8>, Option<io::Error>) {
    let (near, far) = sockets();
    thread::scope(|scope| {
        scope.spawn(move || {
            // The opener may have given up.
            let _ = (&mut &near).write_all(wire);
        });
        let mut opener = Opener::new(key(Cipher::default()));
        let (mut opened, mut out) = (Vec::new(), vec![0; piece]);
        loop {
            match opener.read(&far, &mut out) {
                Ok(0) => return (opened, None),
                Ok(read) => opened.extend_from_slice(&out[..read]),
                Err(error) => {
                    // For good.
                    opener.read(&far, &mut out).unwrap_err();
                    far.shut_down();
                    return (opened, Some(error));
                }
            }
        }
    })
}

/// Where records begin.
fn records(wire: &[u8]) -> Vec<std::ops::Range<usize>> {
    let (mut ranges, mut start) = (Vec::new(), 0);
    while start < wire.len() {
        let body = u16::from_be_bytes([wire[start + 3], wire[start + 4]]);
        let end = start + HEADER_LEN + usize::from(body);
        ranges.push(start..end);
        start = end;
    }
    ranges
}

#[test]
fn heads_and_bodies_of_every_length_arrive() {
    let pieces = bytes(200_000);
    let mut expected = Vec::new();
    let lens = [
        0,
        1,
        100,
        4096,
        8191,
        8192,
        8193,
        MAX_CONTENT - 1,
        MAX_CONTENT,
        MAX_CONTENT + 1,
        2 * MAX_CONTENT,
        150_000,
    ];
    let wire = wire(|sealer, socket| {
        for head in [0, 1, 1344, 8192, MAX_CONTENT + 7] {
            for first in lens {
                for second in [0, 5, 9000] {
                    let (head, first, second) =
                        (&pieces[..head], &pieces[..first], &pieces[7..][..second]);
                    sealer
                        .send(socket, &[head, first, second], &mut go_on)
                        .unwrap();
                    expected.extend([head, first, second].concat());
                }
            }
        }
        sealer.close(socket, &mut go_on).unwrap();
    });
    for range in records(&wire) {
        assert!(range.len() <= HEADER_LEN + MAX_CONTENT + 1 + TAG_LEN);
    }
    for piece in [1000, MAX_CONTENT, MAX_CONTENT + 1, 300_000] {
        let (opened, error) = open(&wire, piece);
        assert!(opened == expected, "{piece}");
        assert!(error.is_none(), "{error:?}");
    }
}

#[test]
fn a_large_packet_is_cut_into_full_records_behind_its_head() {
    let packet = bytes(512 << 10);
    let wire = wire(|sealer, socket| {
        sealer
            .send(socket, &[&[1; 1344], &packet], &mut go_on)
            .unwrap();
    });
    let lens: Vec<_> = records(&wire).iter().map(ExactSizeIterator::len).collect();
    let overhead = HEADER_LEN + 1 + TAG_LEN;
    let mut expected = vec![MAX_CONTENT + overhead; 33];
    expected[0] = 1344 + overhead;
    assert_eq!(lens, expected);
}

#[test]
fn any_changed_bit_is_noticed() {
    let message = bytes(MAX_CONTENT + 100);
    let wire = wire(|sealer, socket| {
        sealer
            .send(socket, &[b"head", &message], &mut go_on)
            .unwrap();
        sealer.close(socket, &mut go_on).unwrap();
    });
    let whole = [b"head", &message[..]].concat();
    for range in records(&wire) {
        // All of the header, the first and last bytes of the content, its type and the tag.
        let edges = range
            .clone()
            .take(HEADER_LEN + 2)
            .chain(range.end - TAG_LEN - 3..range.end);
        let middle = range.start + range.len() / 2;
        for at in edges.chain([middle]) {
            for bit in 0..8 {
                let mut changed = wire.clone();
                changed[at] ^= 1 << bit;
                let (opened, error) = open(&changed, 64 << 10);
                let error = error.unwrap_or_else(|| panic!("byte {at}, bit {bit}"));
                // A length that became larger waits for bytes that never come.
                assert!(
                    matches!(
                        error.kind(),
                        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
                    ),
                    "{error}"
                );
                assert!(whole.starts_with(&opened), "byte {at}, bit {bit}");
            }
        }
    }
}

#[test]
fn a_connection_that_is_cut_has_not_ended() {
    let message = bytes(3000);
    let wire = wire(|sealer, socket| {
        for _ in 0..2 {
            sealer.send(socket, &[&message], &mut go_on).unwrap();
        }
        sealer.close(socket, &mut go_on).unwrap();
    });
    let whole = [&message[..], &message].concat();
    for len in 0..wire.len() {
        let (opened, error) = open(&wire[..len], 64 << 10);
        assert!(whole.starts_with(&opened), "{len}");
        let kind = error.map(|error| error.kind());
        assert_eq!(kind, Some(io::ErrorKind::UnexpectedEof), "{len}");
    }
    assert!(open(&wire, 64 << 10).1.is_none());
}

#[test]
fn records_in_another_order_are_refused() {
    let wire = wire(|sealer, socket| {
        for content in [b"first.", b"second", b"third."] {
            sealer.send(socket, &[content], &mut go_on).unwrap();
        }
    });
    let records: Vec<_> = records(&wire)
        .into_iter()
        .map(|range| &wire[range])
        .collect();
    for (order, good) in [
        (&[1][..], 0),
        (&[0, 0], 1),
        (&[0, 2], 1),
        (&[0, 1, 0], 2),
        (&[0, 1, 1], 2),
        (&[1, 0], 0),
    ] {
        let wire = order
            .iter()
            .map(|index| records[*index])
            .collect::<Vec<_>>();
        let (opened, error) = open(&wire.concat(), 1000);
        // What arrived in one piece with a bad record may be lost with it.
        assert!(
            b"first.second"[..good * 6].starts_with(&opened),
            "{order:?}"
        );
        assert_eq!(
            error.unwrap().kind(),
            io::ErrorKind::InvalidData,
            "{order:?}"
        );
    }
}

/// An opener gets these records, with contents of any type and padding.
fn open_inner(inner: &[&[u8]]) -> (Vec<u8>, String) {
    let mut key = key(Cipher::default());
    let wire: Vec<_> = inner
        .iter()
        .map(|inner| seal_any(&mut key, inner).unwrap())
        .collect();
    let (opened, error) = open(&wire.concat(), 50);
    (
        opened,
        error.map_or_else(|| "closed".to_owned(), |error| error.to_string()),
    )
}

#[test]
fn records_of_every_kind() {
    const CLOSE: &[u8] = &[1, 0, ALERT];
    let padded = [b"abc", &[DATA][..], &[0; 200]].concat();
    let (opened, end) = open_inner(&[
        &padded,
        &[DATA],
        &[DATA, 0, 0],
        b"def\x17",
        CLOSE,
        b"ghi\x17",
    ]);
    assert_eq!((&opened[..], &end[..]), (&b"abcdef"[..], "closed"));
    let full = [&bytes(MAX_CONTENT)[..], &[DATA]].concat();
    assert_eq!(open_inner(&[&full, CLOSE]).0.len(), MAX_CONTENT);
    let too_long = [&bytes(MAX_CONTENT + 1)[..], &[DATA]].concat();
    let full_of_padding = [&[DATA][..], &[0; MAX_CONTENT + 240 - 1]].concat();
    assert_eq!(open_inner(&[&full_of_padding, CLOSE]).1, "closed");
    for (inner, expected) in [
        (&too_long[..], "the peer sent a record that is too long"),
        (&[0; 20], "the peer sent a record without type"),
        (&[0], "the peer sent a record without type"),
        (&[1, 20], "the peer sent a record of unknown type"),
        (
            &[24, 0, 0, 1, 0, HANDSHAKE],
            "the peer sent a handshake message on an open connection",
        ),
        (&[2, 20, ALERT], "the peer sent the TLS alert BadRecordMac"),
        (&[2, ALERT], "the peer sent a malformed alert"),
        (&[1, 0, 0, ALERT], "the peer sent a malformed alert"),
    ] {
        assert_eq!(open_inner(&[b"abc\x17", inner]).1, expected);
    }
    let empty = [&[DATA][..]; 17];
    assert_eq!(
        open_inner(&empty).1,
        "the peer sent too many records without content"
    );
    let rare = [&[DATA][..], &[DATA], b"a\x17"].repeat(20);
    assert_eq!(
        open_inner(&[&rare[..], &[CLOSE]].concat()),
        (vec![b'a'; 20], "closed".to_owned())
    );
}

#[test]
fn records_are_judged_by_their_headers_first() {
    for (header, expected) in [
        (
            [20, 3, 3, 0, 1],
            "the peer sent a record without encryption",
        ),
        (
            [21, 3, 3, 0, 2],
            "the peer sent a record without encryption",
        ),
        (
            [22, 3, 3, 0, 200],
            "the peer sent a record without encryption",
        ),
        ([0; 5], "the peer sent a record without encryption"),
        ([23, 3, 3, 0, 0], "the peer sent a record that is too short"),
        (
            [23, 3, 3, 0, 16],
            "the peer sent a record that is too short",
        ),
        (
            [23, 3, 3, 0x41, 1],
            "the peer sent a record that is too long",
        ),
        (
            [23, 3, 3, 0xff, 0xff],
            "the peer sent a record that is too long",
        ),
    ] {
        let (opened, error) = open(&header, 100);
        assert_eq!(
            (&opened[..], error.unwrap().to_string()),
            (&[][..], expected.to_owned())
        );
    }
}

#[test]
fn a_read_that_waits_can_be_repeated() {
    let wire = wire(|sealer, socket| {
        sealer.send(socket, &[b"a message"], &mut go_on).unwrap();
    });
    let (near, far) = sockets();
    far.set_stall_timeout(Duration::from_millis(1)).unwrap();
    let mut opener = Opener::new(key(Cipher::default()));
    let mut out = [0; 4];
    for byte in &wire {
        let waited = opener.read(&far, &mut out).unwrap_err();
        assert_eq!(waited.kind(), io::ErrorKind::WouldBlock);
        assert!(!opener.buffered());
        (&mut &near).write_all(&[*byte]).unwrap();
    }
    let mut opened = Vec::new();
    for expected in [4, 4, 1] {
        assert_eq!(opener.read(&far, &mut out).unwrap(), expected);
        opened.extend_from_slice(&out[..expected]);
        assert_eq!(opener.buffered(), opened.len() < 9);
    }
    assert_eq!(opened, b"a message");
}

#[test]
fn a_peer_that_takes_nothing_is_left_to_the_caller() {
    let (near, far) = sockets();
    near.set_stall_timeout(Duration::from_millis(1)).unwrap();
    let mut sealer = sealer(Cipher::default());
    let message = bytes(4 << 20);
    let mut stalls = 0;
    let given_up = sealer.send(&near, &[&message], &mut |_| {
        stalls += 1;
        if stalls < 3 {
            return Ok(());
        }
        Err(io::Error::other("enough"))
    });
    assert_eq!(given_up.unwrap_err().to_string(), "enough");
    assert_eq!(stalls, 3);
    // A part of a record may have been written: nothing can follow.
    let after = sealer.send(&near, &[b"more"], &mut go_on);
    assert_eq!(after.unwrap_err().kind(), io::ErrorKind::NotConnected);
    drop(far);
}

#[test]
fn a_stalled_peer_that_goes_on_gets_everything() {
    let (near, far) = sockets();
    near.set_stall_timeout(Duration::from_millis(1)).unwrap();
    let message = bytes(4 << 20);
    let (stalled, wait) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            // Reads nothing before the writer has stalled.
            wait.recv().unwrap();
            let mut opener = Opener::new(key(Cipher::default()));
            let mut read = vec![0; 4 << 20];
            let mut done = 0;
            while done < read.len() {
                done += opener.read(&far, &mut read[done..]).unwrap();
            }
            read
        });
        let mut sealer = sealer(Cipher::default());
        sealer
            .send(&near, &[&message], &mut |_| {
                let _ = stalled.send(());
                Ok(())
            })
            .unwrap();
        assert!(reader.join().unwrap() == message);
    });
}

#[test]
fn a_key_has_a_limit_of_records() {
    let (near, _far) = sockets();
    let mut sealer = sealer(Cipher::default());
    sealer.limit_records(2);
    for _ in 0..2 {
        sealer.send(&near, &[b"a"], &mut go_on).unwrap();
    }
    let third = sealer.send(&near, &[b"a"], &mut go_on);
    assert_eq!(third.unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
}

#[test]
fn nonces_differ() {
    let mut key = key(Cipher::default());
    let mut seen = std::collections::HashSet::new();
    for _ in 0..1000 {
        assert!(seen.insert(*key.nonce().as_ref()));
        key.advance();
    }
}

/// What is sent: heads and what follows them.
fn messages() -> impl Strategy<Value = Vec<(usize, Vec<usize>)>> {
    let len =
        || prop_oneof![4 => 0..200_usize, 2 => 4000..20_000_usize, 1 => 16_000..150_000_usize];
    let message = (len(), prop::collection::vec(len(), 0..5));
    prop::collection::vec(message, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn sealed_bytes_are_opened(
        messages in messages(),
        reads in prop::collection::vec(prop_oneof![1..64_usize, 1000..20_000_usize, 20_000..200_000_usize], 1..8),
        cipher in 0..3_usize,
    ) {
        let cipher = CIPHERS[cipher];
        let copy = bytes(200_000);
        let mut expected = Vec::new();
        for (head, pieces) in &messages {
            expected.extend_from_slice(&copy[..*head]);
            for piece in pieces {
                expected.extend_from_slice(&copy[3..][..*piece]);
            }
        }
        let (near, far) = sockets();
        let opened = thread::scope(|scope| {
            let (messages, copy) = (&messages, &copy);
            scope.spawn(move || {
                let mut sealer = sealer(cipher);
                for (head, pieces) in messages {
                    let head = &copy[..*head];
                    let pieces = pieces.iter().map(|len| &copy[3..][..*len]);
                    let pieces: Vec<_> = [head].into_iter().chain(pieces).collect();
                    sealer.send(&near, &pieces, &mut go_on).unwrap();
                }
                sealer.close(&near, &mut go_on).unwrap();
            });
            let mut opener = Opener::new(key(cipher));
            let (mut opened, mut out) = (Vec::new(), vec![0; 200_000]);
            for len in reads.iter().cycle() {
                let read = opener.read(&far, &mut out[..*len]).unwrap();
                if read == 0 {
                    break;
                }
                opened.extend_from_slice(&out[..read]);
            }
            opened
        });
        prop_assert!(opened == expected);
    }
}
