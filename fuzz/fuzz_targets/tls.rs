//! What arrives behind a TLS handshake, and what a user writes down of peers. Records that are in order are handed out
//! whole and in order, and nothing of a record that is not; files and names are read or refused.

#![no_main]

use std::{io::Write as _, os::unix::net::UnixStream};

use libfuzzer_sys::fuzz_target;
use vamoose_link::{
    Cipher, PublicKey, Socket,
    tls_testing::{Forging, MAX_CONTENT, Opening, common_name, matches, parse_trusted},
};

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else {
        return;
    };
    match kind % 4 {
        0 | 1 => records(bytes),
        2 => trusted(bytes),
        _ => names(bytes),
    }
});

/// The length of reads, then records: a byte for the kind and two for the length of each.
fn records(bytes: &[u8]) {
    let Some((read_len, mut rest)) = bytes.split_first() else {
        return;
    };
    let mut forging = Forging::new(Cipher::default()).expect("a key");
    let (mut wire, mut expected, mut is_whole) = (Vec::new(), Vec::new(), true);
    // No more than the socket holds, as nobody reads meanwhile.
    for _ in 0..256 {
        let Some(([kind, high, low], after)) = rest.split_first_chunk() else {
            break;
        };
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (content, after) = after.split_at(len);
        rest = after;
        if kind % 8 == 0 {
            // Bytes that nobody has sealed.
            is_whole &= content.is_empty();
            wire.extend_from_slice(content);
            continue;
        }
        // Most are data; the others choose their type and padding themselves.
        let inner = if kind % 8 < 5 {
            [content, &[23], &vec![0; usize::from(kind / 8)]].concat()
        } else {
            content.to_vec()
        };
        wire.extend(forging.record(&inner).expect("it is short"));
        if is_whole && is_data(&inner) {
            let end = inner.iter().rposition(|byte| *byte != 0).expect("its type");
            expected.extend_from_slice(&inner[..end]);
        } else {
            is_whole = false;
        }
    }
    let (near, far) = UnixStream::pair().expect("sockets");
    (&near).write_all(&wire).expect("the socket holds it");
    drop(near);
    let socket = Socket::Unix(far);
    let mut opening = Opening::new(Cipher::default()).expect("a key");
    let mut out = vec![0; 1 + usize::from(*read_len) * 16];
    let mut opened = Vec::new();
    loop {
        match opening.read(&socket, &mut out) {
            Ok(0) => break,
            Ok(read) => opened.extend_from_slice(&out[..read]),
            Err(_) => {
                assert!(
                    opening.read(&socket, &mut out).is_err(),
                    "used after an error"
                );
                break;
            }
        }
    }
    assert!(
        expected.starts_with(&opened),
        "other bytes than were sealed"
    );
}

/// Whether an opener has to take it: of type data, and not too long. Its length fits into a record.
fn is_data(inner: &[u8]) -> bool {
    let end = inner.iter().rposition(|byte| *byte != 0);
    end.is_some_and(|end| inner[end] == 23 && end <= MAX_CONTENT)
}

fn trusted(text: &[u8]) {
    if let Ok(keys) = parse_trusted(text) {
        let line = |(key, hosts): &(PublicKey, Vec<String>)| match &hosts[..] {
            [] => format!("{key} again\n"),
            hosts => format!("{key} hosts={} again\n", hosts.join(",")),
        };
        let list: Vec<_> = keys.iter().map(line).collect();
        let again = parse_trusted(list.concat().as_bytes());
        assert_eq!(again.expect("it is a list"), keys);
        for (key, _) in keys {
            assert_eq!(key.to_string().parse::<PublicKey>(), Ok(key));
        }
    }
}

fn names(bytes: &[u8]) {
    let _ = common_name(bytes);
    let text = String::from_utf8_lossy(bytes);
    if let Some((pattern, name)) = text.split_once('\n') {
        assert!(matches("*", name));
        let is_plain = !pattern.contains(['*', '?']);
        if is_plain {
            assert_eq!(
                matches(pattern, name),
                pattern.to_lowercase() == name.to_lowercase()
            );
        }
        let _ = matches(pattern, name);
    }
}
