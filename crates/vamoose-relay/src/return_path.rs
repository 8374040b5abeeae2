//! Reads the return path for the message that decides, whether the destination has loaded the guest, and for requests of pages, which
//! come only under post-copy.
//!
//! ```text
//! type u16 BE, length u16 BE, then `length` bytes;  type 1 = SHUT: u32 BE, 0 = loaded, else failed
//! ```

/// Follows the messages of a return path, which may arrive in pieces of any size.
#[derive(Default)]
pub(crate) struct ReturnPath {
    /// Bytes of the present message: its header, and the code of a SHUT.
    message: Vec<u8>,
    /// Bytes left of another message.
    skip: u16,
    spoke: bool,
    asks_for_pages: bool,
    /// This is no known return path: the rest is not interpreted.
    is_lost: bool,
}

const SHUT: u16 = 1;
/// Of pages, with or without the name of their RAM block.
const REQUESTS: [u16; 2] = [3, 4];
/// Above the highest known type (7 in QEMU 10), with room for more.
const HIGHEST_TYPE: u16 = 32;

impl ReturnPath {
    /// Reads the next bytes; returns the code of a SHUT that they complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Option<u32> {
        let mut shut = None;
        for byte in bytes {
            if self.is_lost {
                break;
            }
            if self.skip > 0 {
                self.skip -= 1;
                continue;
            }
            self.message.push(*byte);
            match self.message[..] {
                [a, b, c, d] => {
                    self.spoke = true;
                    match (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])) {
                        // Its code follows.
                        (SHUT, 4) => continue,
                        (SHUT | 0 | HIGHEST_TYPE.., _) => self.is_lost = true,
                        (kind, length) => {
                            self.asks_for_pages |= REQUESTS.contains(&kind);
                            self.skip = length;
                        }
                    }
                }
                [_, _, _, _, a, b, c, d] => shut = Some(u32::from_be_bytes([a, b, c, d])),
                _ => continue,
            }
            self.message.clear();
        }
        shut
    }

    /// Whether the destination has asked for pages: the guest runs there under post-copy.
    pub(crate) fn asks_for_pages(&self) -> bool {
        self.asks_for_pages
    }

    /// Whether the destination has sent a message: then the return path is on, and a SHUT must come.
    pub(crate) fn spoke(&self) -> bool {
        self.spoke
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
    fn switchover_acknowledgements_are_ignored() {
        let acknowledged = [0, 7, 0, 0];
        for count in 0..4 {
            let mut path = ReturnPath::default();
            let bytes = [&PONG[..], &acknowledged.repeat(count), &PONG, &SHUT_OK].concat();
            let found = bytes.iter().filter_map(|byte| path.feed(&[*byte]));
            assert_eq!(found.collect::<Vec<_>>(), [0], "{count}");
        }
    }

    #[test]
    fn shut_inside_another_message_is_ignored() {
        let mut path = ReturnPath::default();
        let inner = [&[0, 5, 0, 8][..], &SHUT_OK].concat();
        assert_eq!(path.feed(&inner), None);
        assert_eq!(path.feed(&SHUT_OK), Some(0));
    }

    #[test]
    fn requests_of_pages_are_seen() {
        let by_name = [&[0, 4, 0, 16][..], &[0; 16]].concat();
        let of_the_same_block = [&[0, 3, 0, 12][..], &[0; 12]].concat();
        for request in [by_name, of_the_same_block] {
            let mut path = ReturnPath::default();
            assert_eq!(path.feed(&PONG), None);
            assert!(!path.asks_for_pages());
            assert_eq!(path.feed(&[&request[..], &SHUT_OK].concat()), Some(0));
            assert!(path.asks_for_pages());
        }
    }

    #[test]
    fn unknown_return_path_is_ignored() {
        let mut path = ReturnPath::default();
        assert!(!path.spoke());
        assert_eq!(path.feed(&[0xff; 64]), None);
        assert_eq!(path.feed(&SHUT_OK), None);
        assert!(path.spoke());
    }
}
