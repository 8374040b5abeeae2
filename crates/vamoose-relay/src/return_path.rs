//! Reads the return path for the one message that decides: whether the destination has loaded the guest.
//!
//! ```text
//! type u16 BE, length u16 BE, then `length` bytes;  type 1 = SHUT: u32 BE, 0 = loaded, else failed
//! ```

/// Follows the messages of a return path, whatever the pieces in which they come.
#[derive(Default)]
pub(crate) struct ReturnPath {
    state: State,
    spoke: bool,
}

enum State {
    /// Collecting type and length.
    Header { bytes: [u8; 4], got: usize },
    /// Collecting the code of a SHUT.
    Shut { bytes: [u8; 4], got: usize },
    /// Skipping the content of another message.
    Skip(usize),
    /// Not a known return path: the rest is not interpreted.
    Lost,
}

impl Default for State {
    fn default() -> Self {
        Self::Header {
            bytes: [0; 4],
            got: 0,
        }
    }
}

const SHUT: u16 = 1;
/// Above the highest known type (7 in QEMU 10), with room for more.
const HIGHEST_TYPE: u16 = 32;

impl ReturnPath {
    /// Takes the next bytes; returns the code of a SHUT that they complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Option<u32> {
        let mut shut = None;
        for byte in bytes {
            shut = self.step(*byte).or(shut);
        }
        shut
    }

    /// Whether the destination has sent a message: then the return path is on, and a SHUT must come.
    pub(crate) fn spoke(&self) -> bool {
        self.spoke
    }

    fn step(&mut self, byte: u8) -> Option<u32> {
        let mut shut = None;
        self.state = match std::mem::replace(&mut self.state, State::Lost) {
            State::Header { mut bytes, got } => {
                bytes[got] = byte;
                match got + 1 {
                    4 => {
                        self.spoke = true;
                        after_header(bytes)
                    }
                    got => State::Header { bytes, got },
                }
            }
            State::Shut { mut bytes, got } => {
                bytes[got] = byte;
                match got + 1 {
                    4 => {
                        shut = Some(u32::from_be_bytes(bytes));
                        State::default()
                    }
                    got => State::Shut { bytes, got },
                }
            }
            State::Skip(1) => State::default(),
            State::Skip(left) => State::Skip(left - 1),
            State::Lost => State::Lost,
        };
        shut
    }
}

fn after_header([a, b, c, d]: [u8; 4]) -> State {
    match (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])) {
        (SHUT, 4) => State::Shut {
            bytes: [0; 4],
            got: 0,
        },
        (SHUT | 0, _) | (HIGHEST_TYPE.., _) => State::Lost,
        (_, 0) => State::default(),
        (_, length) => State::Skip(length.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];
    const SHUT_OK: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
    const SHUT_FAILED: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 9];

    #[test]
    fn shut_is_found_in_any_pieces() {
        let bytes = [PONG, PONG, SHUT_FAILED].concat();
        for size in 1..=bytes.len() {
            let mut path = ReturnPath::default();
            let found = bytes.chunks(size).filter_map(|piece| path.feed(piece));
            assert_eq!(found.collect::<Vec<_>>(), [9], "pieces of {size}");
        }
    }

    /// A destination acknowledges the switchover once, or once for each of its devices.
    #[test]
    fn acknowledgements_of_the_switchover_are_passed_over() {
        let acknowledged = [0, 7, 0, 0];
        for count in 0..4 {
            let mut path = ReturnPath::default();
            let bytes = [&PONG[..], &acknowledged.repeat(count), &PONG, &SHUT_OK].concat();
            let found = bytes.iter().filter_map(|byte| path.feed(&[*byte]));
            assert_eq!(found.collect::<Vec<_>>(), [0], "{count}");
        }
    }

    #[test]
    fn a_shut_inside_another_message_is_not_one() {
        let mut path = ReturnPath::default();
        let inner = [&[0, 5, 0, 8][..], &SHUT_OK].concat();
        assert_eq!(path.feed(&inner), None);
        assert_eq!(path.feed(&SHUT_OK), Some(0));
    }

    #[test]
    fn nonsense_is_not_followed() {
        let mut path = ReturnPath::default();
        assert!(!path.spoke());
        assert_eq!(path.feed(&[0xff; 64]), None);
        assert_eq!(path.feed(&SHUT_OK), None);
        assert!(path.spoke());
    }
}
