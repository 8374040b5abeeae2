//! What a peer of the link sends: handshakes, frames, and what it claims to have received. It is read to the same bytes
//! or refused, and nothing is acknowledged that was not sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vamoose_session::{
    frame::{HEADER_LEN, Header},
    handshake::{ATTACH_LEN, Answer, Attach, HELLO_LEN, Hello, Transcript, Welcome},
    window::{Sums, Window},
};

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else {
        return;
    };
    match kind % 4 {
        0 => hello(bytes),
        1 => attach(bytes),
        2 => frames(bytes),
        _ => acknowledgements(bytes),
    }
});

fn hello(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<HELLO_LEN>() else {
        return;
    };
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), *bytes);
        // Chosen or refused; never a version that the client does not speak.
        let _ = Answer::to(&hello, [0; 32]).accepted();
    }
    if let Ok(answer) = Answer::decode(bytes)
        && answer.accepted().is_ok()
    {
        assert_eq!(answer.encode(), *bytes);
    }
}

fn attach(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<ATTACH_LEN>() else {
        return;
    };
    let hello = Hello::new([1; 32]);
    let transcript = Transcript::new(&hello, &Answer::to(&hello, [2; 32]), [3; 32]);
    let secret = transcript.secret();
    if let Ok(attach) = Attach::decode(bytes) {
        assert_eq!(attach.encode(&transcript, &secret)[..32], bytes[..32]);
    }
    assert!(!Attach::is_proved(bytes, &transcript, &secret));
    assert!(Welcome::decode(bytes, &transcript, &[0; ATTACH_LEN], &secret).is_err());
}

fn frames(bytes: &[u8]) {
    let (headers, _) = bytes.as_chunks::<HEADER_LEN>();
    for header in headers {
        let mut header = *header;
        let sum = crc32c::crc32c(&header[..HEADER_LEN - 4]);
        header[HEADER_LEN - 4..].copy_from_slice(&sum.to_be_bytes());
        if let Ok(read) = Header::decode(&header) {
            assert_eq!(read.encode(), header);
            assert!(read.end() >= read.offset);
        }
    }
}

/// Each byte writes so many bytes, or acknowledges an offset near by.
fn acknowledgements(bytes: &[u8]) {
    let mut window = Window::new(0);
    for pair in bytes.chunks_exact(2) {
        if pair[0] % 2 == 0 {
            let _ = window.push_copy(&[0; 255][..usize::from(pair[1])], Sums::default());
            continue;
        }
        let (before, next) = (window.unacknowledged(), window.next());
        let received = (next + 3).saturating_sub(u64::from(pair[1]) * u64::from(pair[0]));
        match window.acknowledge(received) {
            Ok(_) => assert!(received <= next && window.unacknowledged() <= before),
            Err(_) => assert_eq!(window.unacknowledged(), before),
        }
    }
}
