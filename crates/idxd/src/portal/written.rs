//! Submission by write(2), where the kernel does not allow processes to map the portal: the buffer is an array of
//! descriptors, and the return value is the number of bytes that the device accepted.

use std::{
    fs::File,
    io::{self, ErrorKind, Write},
};

use zerocopy::IntoBytes;

use super::{Transport, instructions};
use crate::{Descriptor, Refusal, Submitted};

const DESCRIPTOR: usize = size_of::<Descriptor>();

/// A work queue's open character device.
#[derive(Debug)]
pub(super) struct Written {
    file: File,
}

impl Written {
    pub(super) fn of(file: File) -> Self {
        Self { file }
    }
}

impl Transport for Written {
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        instructions::sfence();
        push(descriptors.as_bytes(), |rest| (&self.file).write(rest))
    }

    fn abandon(self: Box<Self>) {
        drop(self);
    }
}

/// Writes `bytes` up to the first descriptor that is refused.
fn push(bytes: &[u8], mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> Submitted {
    let mut written = 0;
    let refusal = loop {
        let rest = &bytes[written..];
        if rest.is_empty() {
            break None;
        }
        // A short count means that the next descriptor was refused; writing it again returns the reason.
        match write(rest) {
            Ok(0) => break Some(Refusal::System(ErrorKind::WriteZero.into())),
            Ok(count) if count % DESCRIPTOR == 0 => written += count.min(rest.len()),
            Ok(count) => {
                written += count.min(rest.len());
                break Some(Refusal::System(io::Error::other(
                    "part of a descriptor was written",
                )));
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => break Some(refusal(error)),
        }
    };
    Submitted {
        accepted: written / DESCRIPTOR,
        refusal,
    }
}

/// The meaning of errors of the driver's write (`drivers/dma/idxd/cdev.c`).
fn refusal(error: io::Error) -> Refusal {
    use rustix::io::Errno;

    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN) => Refusal::Full,
        Some(Errno::INVAL) => Refusal::Invalid,
        // The address space is not the one that opened the file.
        Some(Errno::PERM) => Refusal::Forked,
        _ => Refusal::System(error),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Seek},
        os::unix::net::UnixDatagram,
    };

    use rustix::{io::Errno, pipe::PipeFlags};

    use super::*;

    fn numbered(count: u64) -> Vec<Descriptor> {
        (0..count)
            .map(|number| Descriptor {
                address_1: number,
                ..Descriptor::default()
            })
            .collect()
    }

    fn submit(written: &Written, descriptors: &[Descriptor]) -> Submitted {
        // SAFETY: there is no device to execute them.
        unsafe { written.submit(descriptors) }
    }

    #[test]
    fn descriptors_are_written_one_after_the_other() {
        let mut file = tempfile::tempfile().unwrap();
        let written = Written::of(file.try_clone().unwrap());
        let descriptors = numbered(100);
        for part in descriptors.chunks(33) {
            let submitted = submit(&written, part);
            assert!(submitted.accepted == part.len() && submitted.refusal.is_none());
        }
        let nothing = submit(&written, &[]);
        assert!(nothing.accepted == 0 && nothing.refusal.is_none());
        let mut found = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut found).unwrap();
        assert_eq!(found, descriptors.as_bytes());
    }

    #[test]
    fn descriptors_accepted_before_a_full_queue_are_counted() {
        let (mut reader, writer) = pipe();
        let written = Written::of(writer);
        let descriptors = numbered(4096);
        let submitted = submit(&written, &descriptors);
        assert!(matches!(submitted.refusal, Some(Refusal::Full)));
        assert!((1..4096).contains(&submitted.accepted));
        let again = submit(&written, &descriptors);
        assert!(again.accepted == 0 && matches!(again.refusal, Some(Refusal::Full)));
        let mut found = vec![0; submitted.accepted * DESCRIPTOR];
        reader.read_exact(&mut found).unwrap();
        assert_eq!(found, descriptors[..submitted.accepted].as_bytes());
    }

    /// The outcome of 8 descriptors, if write returns this, and then takes all.
    fn pushed(says: &[Result<usize, Errno>]) -> (usize, Option<Refusal>) {
        let mut says = says.iter();
        let submitted = push(&[0; 8 * DESCRIPTOR], |rest| {
            Ok(says.next().copied().unwrap_or(Ok(rest.len()))?)
        });
        (submitted.accepted, submitted.refusal)
    }

    #[test]
    fn short_counts_are_added_up() {
        let counts = |counts: &[usize]| {
            counts
                .iter()
                .map(|count| Ok(count * DESCRIPTOR))
                .collect::<Vec<_>>()
        };
        assert!(matches!(pushed(&counts(&[8])), (8, None)));
        assert!(matches!(pushed(&counts(&[3, 1, 2])), (8, None)));
        assert!(matches!(
            pushed(&counts(&[3, 0])),
            (3, Some(Refusal::System(_)))
        ));
        // More than there was to write.
        assert!(matches!(pushed(&counts(&[3, 9])), (8, None)));
        assert!(matches!(
            pushed(&[Ok(3 * DESCRIPTOR), Err(Errno::INTR)]),
            (8, None)
        ));
        assert!(matches!(
            pushed(&[Ok(3 * DESCRIPTOR), Err(Errno::AGAIN)]),
            (3, Some(Refusal::Full))
        ));
        assert!(matches!(
            pushed(&[Ok(7 * DESCRIPTOR), Err(Errno::INVAL)]),
            (7, Some(Refusal::Invalid))
        ));
    }

    #[test]
    fn a_torn_descriptor_is_not_counted() {
        for torn in [1, 32, 63] {
            let says = [Ok(2 * DESCRIPTOR), Ok(DESCRIPTOR + torn)];
            assert!(matches!(pushed(&says), (3, Some(Refusal::System(_)))));
        }
    }

    #[test]
    fn errors_of_the_system_are_told() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let submitted = submit(&Written::of(full), &numbered(2));
        assert_eq!(submitted.accepted, 0);
        assert!(
            matches!(submitted.refusal, Some(Refusal::System(error)) if error.kind() == ErrorKind::StorageFull)
        );
        let (one, other) = UnixDatagram::pair().unwrap();
        drop(other);
        let unconnected = File::from(std::os::fd::OwnedFd::from(one));
        let submitted = submit(&Written::of(unconnected), &numbered(2));
        assert!(submitted.accepted == 0 && matches!(submitted.refusal, Some(Refusal::System(_))));
    }

    #[test]
    fn errors_have_the_drivers_meaning() {
        let refusal = |errno: Errno| refusal(errno.into());
        assert!(matches!(refusal(Errno::AGAIN), Refusal::Full));
        assert!(matches!(refusal(Errno::INVAL), Refusal::Invalid));
        assert!(matches!(refusal(Errno::PERM), Refusal::Forked));
        for errno in [Errno::FAULT, Errno::NXIO, Errno::NODEV, Errno::IO] {
            assert!(
                matches!(refusal(errno), Refusal::System(error) if Errno::from_io_error(&error) == Some(errno))
            );
        }
    }

    fn pipe() -> (File, File) {
        let (reader, writer) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        (reader.into(), writer.into())
    }
}
