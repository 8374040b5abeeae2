//! The real library, doing its work in software: sessions, buffers, codes and members are held to it as far as that is
//! the code that serves devices too. Each call costs the process one of its 1024 keys for thread-local data, as the
//! library starts anew whenever there is no device: no more calls than are needed.

use std::{io::Read as _, ops::Deref, sync::Once};

use multifd::{Layout, Method};

use super::super::*;
use crate::{Decoder, Settings, encoder};

#[path = "../../../../tests/all/common/pages.rs"]
pub(crate) mod pages;

use pages::Kind;

/// The real library. `None` where there is none; the test is then reported as skipped.
pub(crate) struct Real(Library);

impl Real {
    pub(crate) fn open() -> Option<Self> {
        let folder = lab::qatzip::folder_or_skip().unwrap()?;
        let files: Vec<_> = lab::qatzip::libraries(&folder).collect();
        let (library, needed) = files.split_last().unwrap();
        silence_c();
        for file in needed {
            // SAFETY: Intel's and the system's libraries, whose constructors any process may run. They stay (rule 2).
            let needed = unsafe { dl::Library::open(Some(file), dl::RTLD_NOW | dl::RTLD_LOCAL) };
            let _ = ManuallyDrop::new(needed.unwrap());
        }
        Some(Self(Library::open(library.as_os_str()).unwrap()))
    }

    /// The same, which does the work itself where there is no device.
    pub(crate) fn in_software(self) -> Arc<Library> {
        Arc::new(Library {
            sw_backup: 1,
            ..self.0
        })
    }
}

impl Deref for Real {
    type Target = Library;

    fn deref(&self) -> &Library {
        &self.0
    }
}

/// qatlib prints a line whenever it finds no device, and these tests make it look for one at every call. What C prints
/// to stderr goes nowhere from now on; Rust, and so the tests' own output, has nothing to do with C's `stderr`.
fn silence_c() {
    unsafe extern "C" {
        static mut stderr: *mut libc::FILE;
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: libc's variable, which it allows to be set. Nothing but libqatzip and qatlib reads it in this
        // process, and each test of these comes by here before it loads them. The stream stays open.
        unsafe {
            let nowhere = libc::fopen(c"/dev/null".as_ptr(), c"w".as_ptr());
            assert!(!nowhere.is_null());
            stderr = nowhere;
        }
    });
}

const PAGES: usize = 512 << 10;
const PAYLOAD: usize = 1 << 20;
const DATA: Failure = Failure::Code {
    call: "qzDecompress",
    code: Code::DATA,
};

/// Most bytes that the library makes of 512 KiB, by its own account without a device: 9 for 8, and some for a header.
const BOUND: usize = 589_904;

/// `len` bytes of a guest's memory, recorded from a real one.
fn memory(len: usize) -> Vec<u8> {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/vectors/ram.img.zst"
    );
    let mut ram = vec![0; 4 << 20];
    zstd_safe::decompress(&mut ram[..], &fs::read(file).unwrap()).unwrap();
    // From where there is something.
    let start = ram.iter().position(|byte| *byte != 0).unwrap();
    ram.drain(..start);
    ram.truncate(len);
    assert_eq!(ram.len(), len);
    ram
}

fn open(library: &Arc<Library>, level: u32) -> Session {
    Session::open(Arc::clone(library), level, PAGES, PAYLOAD).unwrap()
}

fn compress(session: &mut Session, pages: &[u8]) -> Vec<u8> {
    let mut payload = vec![0; PAYLOAD];
    let len = session.compress(pages, &mut payload).unwrap();
    payload.truncate(len);
    payload
}

fn decompress(session: &mut Session, payload: &[u8], len: usize) -> Result<Vec<u8>, Failure> {
    let mut pages = vec![0xee; len];
    session.decompress(payload, &mut pages)?;
    Ok(pages)
}

/// By the program's own decoder, and by one that is not.
fn decodes_to(payload: &[u8], pages: &[u8]) {
    let mut ours = vec![0xee; pages.len()];
    let mut decoder = Decoder::new(Layout::X86);
    decoder.decode(Method::Qatzip, payload, &mut ours).unwrap();
    assert!(ours == pages);
    let mut others = Vec::new();
    let mut decoder = flate2::read::MultiGzDecoder::new(payload);
    decoder.read_to_end(&mut others).unwrap();
    assert!(others == pages);
}

#[test]
fn library_file_names_its_version_and_nothing_is_printed() {
    let Some(real) = Real::open() else {
        return;
    };
    let file = real.file().file_name().unwrap().to_str().unwrap();
    let version = file.strip_prefix("libqatzip.so.3.").unwrap();
    assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{file}");
    // SAFETY: the function's type, by its header; the library has been loaded already, and stays (rule 2).
    let before = unsafe {
        let library = dl::Library::new(real.file()).unwrap();
        let set: unsafe extern "C" fn(c_int) -> c_int =
            symbol(&library, "", c"qzSetLogLevel").unwrap();
        set(NO_LOG)
    };
    assert_eq!(before, NO_LOG);
}

#[test]
fn without_a_device_it_is_no_hardware() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = Arc::new(real.0);
    let found = hardware(&library);
    if has_group(Path::new(VFIO)) {
        // Perhaps there is a device: the other tests are not of it.
        return;
    }
    assert_eq!(found, Err(Absent::Unbound));
    let text = "no QAT device is bound to vfio-pci: /dev/vfio has no group of devices";
    assert_eq!(Absent::Unbound.to_string(), text);
    // What it says itself when it is asked all the same.
    let refused = Session::open(library, 1, PAGES, PAYLOAD).err().unwrap();
    let text = "libqatzip finds no usable QAT hardware: qzInit returns -101 ";
    assert!(refused.to_string().starts_with(text), "{refused}");
}

#[test]
fn its_members_are_read_by_all_at_every_level() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    for level in 1..=9 {
        let mut session = open(&library, level);
        // zlib's level shows in the header.
        let xfl = match level {
            1 => 4,
            9 => 2,
            _ => 0,
        };
        for pages in [
            pages::pages(Kind::Text, level.into(), 1),
            memory(16 * 4096),
            memory(PAGES),
        ] {
            let payload = compress(&mut session, &pages);
            // In software a packet is one member, whatever its size.
            let size = |len: usize| u32::try_from(len).unwrap().to_le_bytes();
            let start = [
                0x1f, 0x8b, 8, 4, 0, 0, 0, 0, xfl, 0xff, 12, 0, b'Q', b'Z', 8, 0,
            ];
            assert_eq!(payload[..16], start);
            assert_eq!(payload[16..20], size(pages.len()));
            assert_eq!(payload[20..24], size(payload.len() - 24 - 8));
            assert_eq!(payload[payload.len() - 4..], size(pages.len()));
            decodes_to(&payload, &pages);
            let back = decompress(&mut session, &payload, pages.len());
            assert!(back == Ok(pages), "level {level}");
        }
    }
}

#[test]
fn library_reads_our_payloads() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    let mut session = open(&library, 1);
    for level in [1, 2, 9] {
        let settings = Settings::new(Method::Qatzip, Some(level)).unwrap();
        let mut encoder = encoder(&settings, Layout::X86).unwrap();
        // One member, one and a bit, eight.
        for len in [16 * 4096, 17 * 4096, PAGES] {
            let pages = memory(len);
            let mut room = vec![0; PAYLOAD];
            let encoded = encoder.encode(&pages, &mut room).unwrap();
            assert_eq!(encoded.method, Method::Qatzip);
            let back = decompress(&mut session, encoded.payload, len);
            assert!(back == Ok(pages), "level {level}, {len} bytes");
        }
    }
}

#[test]
fn incompressible_pages_stay_within_the_bound() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    let mut session = open(&library, 1);
    let bound = |len| {
        // SAFETY: on the thread that has opened and set up the session.
        unsafe { (library.bound)(len, session.handle.at.as_ptr()) as usize }
    };
    assert_eq!(bound(512 << 10), BOUND);
    let one_page = bound(4096);
    // Exactly as much memory as it wants.
    let exact = Session::open(Arc::clone(&library), 1, PAGES, BOUND);
    for kind in [Kind::Random, Kind::Zero, Kind::Repeated] {
        let pages = pages::pages(kind, 7, 128);
        let payload = compress(&mut session, &pages);
        assert!(payload.len() <= BOUND, "{kind:?}: {}", payload.len());
        decodes_to(&payload, &pages);
        assert!(decompress(&mut session, &payload, PAGES) == Ok(pages));
    }
    let random = pages::pages(Kind::Random, 8, 128);
    let payload = compress(&mut exact.unwrap(), &random);
    decodes_to(&payload, &random);
    let page = &random[..4096];
    assert!(compress(&mut session, page).len() <= one_page);

    let allowed = 0..=u32::try_from(BOUND - 1).unwrap();
    let too_small = Session::open(library, 1, PAGES, BOUND - 1);
    let failure = Failure::Made {
        call: "qzMaxCompressedLength",
        claimed: allowed.end() + 1,
        allowed,
    };
    assert_eq!(too_small.err(), Some(failure));
}

#[test]
fn buffers_that_are_too_small_are_an_error_and_end_the_session() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    let pages = pages::pages(Kind::Random, 9, 2);
    let mut session = open(&library, 1);
    let payload = compress(&mut session, &pages);

    // Its software calls that a failure, not a lack of room; nothing is known of the device then.
    session.packed.len = 4096;
    let failure = session.compress(&pages, &mut [0; 1 << 14]);
    let (call, code) = ("qzCompress", Code(-2));
    assert_eq!(failure, Err(Failure::Code { call, code }));
    assert!(session.leaks());
    let spent = session.compress(&pages, &mut [0; 1 << 14]);
    assert_eq!(spent, Err(Failure::SPENT));

    // No error to the library, which fills what there is.
    let mut session = open(&library, 1);
    session.plain.len = 4096;
    let failure = decompress(&mut session, &payload, 4096);
    let given = u32::try_from(payload.len()).unwrap();
    let cut = matches!(failure, Err(Failure::Taken { claimed, given: all, .. }) if claimed < given && all == given);
    assert!(cut);
    let spent = decompress(&mut session, &payload, 4096);
    assert_eq!(spent, Err(Failure::SPENT));
    assert!(!session.leaks());
}

#[test]
fn damaged_payloads_are_refused_and_end_the_session() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    let pages = memory(16 * 4096);
    let good = compress(&mut open(&library, 1), &pages);
    let last = good.len() - 1;
    // In the magic number, in the data, in the CRC, in the size.
    for at in [0, good.len() / 2, last - 7, last] {
        let mut session = open(&library, 1);
        let mut bad = good.clone();
        bad[at] ^= 1;
        let failure = decompress(&mut session, &bad, pages.len());
        assert_eq!(failure, Err(DATA), "byte {at}");
        // The library would refuse everything from now on.
        let spent = decompress(&mut session, &good, pages.len());
        assert_eq!(spent, Err(Failure::SPENT), "byte {at}");
        assert!(!session.leaks());
    }
    let mut session = open(&library, 1);
    let half = decompress(&mut session, &good[..good.len() / 2], pages.len());
    let short = matches!(half, Err(Failure::Made { claimed, .. }) if claimed < 16 * 4096);
    assert!(short);
    let mut session = open(&library, 1);
    let more = decompress(&mut session, &good, 4096);
    let claimed = u32::try_from(pages.len()).unwrap();
    let long = matches!(more, Err(Failure::Made { claimed: made, .. }) if made == claimed);
    assert!(long);
    assert!(decompress(&mut open(&library, 1), &good, pages.len()) == Ok(pages));
}

#[test]
fn levels_that_it_does_not_have_are_refused() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    for level in [0, 13] {
        let refused = Session::open(Arc::clone(&library), level, PAGES, PAYLOAD);
        let (call, code) = ("qzSetupSessionDeflate", Code(-1));
        let expected = Failure::Absent(Absent::Refused { call, code });
        assert_eq!(refused.err(), Some(expected));
    }
}

#[test]
fn sessions_of_several_threads_do_not_meet() {
    let Some(real) = Real::open() else {
        return;
    };
    let library = real.in_software();
    thread::scope(|scope| {
        for seed in 0..4 {
            let library = &library;
            scope.spawn(move || {
                let mut session = open(library, 1);
                for round in 0..4 {
                    let count = usize::try_from(round * 8 + 1).unwrap();
                    let pages = pages::pages(Kind::Text, seed * 10 + round, count);
                    let payload = compress(&mut session, &pages);
                    decodes_to(&payload, &pages);
                    assert!(decompress(&mut session, &payload, pages.len()) == Ok(pages));
                }
            });
        }
    });
    // And one after the other.
    for _ in 0..8 {
        drop(open(&library, 1));
    }
}
