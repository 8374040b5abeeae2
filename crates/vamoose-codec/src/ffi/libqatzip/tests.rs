pub(crate) mod real;
mod stand_in;

use std::{fs, io::Read as _, mem::offset_of};

use super::*;
use stand_in::{File, StandIn};

/// Codes that only tests look for.
impl Code {
    const FORCED_SOFTWARE: Self = Self(2);
    const DATA: Self = Self(-4);
}

const PAGES: usize = 512 << 10;
const PAYLOAD: usize = 1 << 20;

/// Bytes that compress a little, differently for each seed.
fn pages(len: usize, seed: usize) -> Vec<u8> {
    let bytes = (0..len).map(|at| ((at * at + seed * 977) >> 5) ^ (at >> 3));
    bytes.map(|byte| byte.to_le_bytes()[0]).collect()
}

fn open(stand_in: &StandIn) -> Result<Session, Failure> {
    Session::open(Arc::clone(&stand_in.library), 1, PAGES, PAYLOAD)
}

fn compress(session: &mut Session, pages: &[u8]) -> Result<Vec<u8>, Failure> {
    let mut payload = vec![0; PAYLOAD];
    let len = session.compress(pages, &mut payload)?;
    payload.truncate(len);
    Ok(payload)
}

fn decompress(session: &mut Session, payload: &[u8], len: usize) -> Result<Vec<u8>, Failure> {
    let mut pages = vec![0; len];
    session.decompress(payload, &mut pages)?;
    Ok(pages)
}

/// The members' sizes before compression, by their headers.
fn members(mut payload: &[u8]) -> Vec<u32> {
    let mut sizes = Vec::new();
    while !payload.is_empty() {
        assert_eq!(payload[..4], [0x1f, 0x8b, 8, 4]);
        assert_eq!(payload[10..16], [12, 0, b'Q', b'Z', 8, 0]);
        let number = |at| u32::from_le_bytes(payload[at..at + 4].try_into().unwrap());
        sizes.push(number(16));
        payload = &payload[24 + number(20) as usize + 8..];
    }
    sizes
}

fn is_balanced(stand_in: &StandIn) -> bool {
    stand_in.get("qzInit_calls") == stand_in.get("qzClose_calls")
        && stand_in.get("qzSetupSessionDeflate_calls") == stand_in.get("qzTeardownSession_calls")
        && stand_in.get("mallocs") == stand_in.get("frees")
        && stand_in.get("misuse") == 0
}

#[test]
fn packets_of_one_to_eight_members_come_back() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    assert_eq!(hardware(&stand_in.library), Ok(()));
    let mut session = open(&stand_in).unwrap();
    for parts in 1..=8 {
        stand_in.set("members", parts.try_into().unwrap());
        for len in [PAGES, 3 * 65536 + 4096, 8 * 4096] {
            let pages = pages(len, parts);
            let payload = compress(&mut session, &pages).unwrap();
            let sizes = members(&payload);
            assert!(sizes.len() <= parts);
            assert_eq!(sizes.iter().sum::<u32>() as usize, len);

            let mut other = Vec::new();
            let mut decoder = flate2::read::MultiGzDecoder::new(&payload[..]);
            decoder.read_to_end(&mut other).unwrap();
            assert!(other == pages);
            assert!(decompress(&mut session, &payload, len).unwrap() == pages);
        }
    }
    // What the device's own size makes of it.
    stand_in.set("members", 0);
    stand_in.set("strict", 1);
    let pages = pages(PAGES - 4096, 9);
    let payload = compress(&mut session, &pages).unwrap();
    let mut sizes = [MEMBER; 8];
    sizes[7] -= 4096;
    assert_eq!(members(&payload), sizes);
    assert!(decompress(&mut session, &payload, pages.len()).unwrap() == pages);

    drop(session);
    assert!(is_balanced(&stand_in));
    assert_eq!(stand_in.get("qzInit_calls"), 2);
    assert_eq!(stand_in.get("mallocs"), 2);
}

#[test]
fn every_level_is_told_to_the_library() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let pages = pages(PAGES, 1);
    let mut sizes = Vec::new();
    for level in 1..=9 {
        let library = Arc::clone(&stand_in.library);
        let mut session = Session::open(library, level, PAGES, PAYLOAD).unwrap();
        assert_eq!(stand_in.get("seen_level"), i64::from(level));
        sizes.push(compress(&mut session, &pages).unwrap().len());
    }
    assert!(sizes[8] < sizes[0], "{sizes:?}");
    for level in [0, 13] {
        let library = Arc::clone(&stand_in.library);
        let failure = Session::open(library, level, PAGES, PAYLOAD).err().unwrap();
        let call = "qzSetupSessionDeflate";
        let code = Code(-1);
        assert_eq!(failure, Failure::Absent(Absent::Refused { call, code }));
    }
    assert!(is_balanced(&stand_in));
}

#[test]
fn the_librarys_own_software_is_never_allowed() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    stand_in.set("seen_init_sw_backup", 99);
    assert_eq!(hardware(&stand_in.library), Ok(()));
    assert_eq!(stand_in.get("seen_init_sw_backup"), 0);
    stand_in.set("seen_init_sw_backup", 99);
    stand_in.set("seen_sw_backup", 99);
    open(&stand_in).unwrap();
    assert_eq!(stand_in.get("seen_init_sw_backup"), 0);
    assert_eq!(stand_in.get("seen_sw_backup"), 0);
}

#[test]
fn unloadable_library_is_absent() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join(NAME);
    let nonsense = folder.path().join("nonsense.so");
    fs::write(&nonsense, "This is no library.").unwrap();
    for path in [&missing, &nonsense] {
        let absent = Library::open(path.as_os_str()).unwrap_err();
        let Absent::Load { name, why } = &absent else {
            panic!("{absent}");
        };
        assert_eq!(name.as_str(), path.to_str().unwrap());
        assert!(!why.is_empty() && !why.contains(name.as_str()), "{why}");
        let text = absent.to_string();
        assert_eq!(text, format!("{name} cannot be loaded: {why}"));
    }
    let absent = Library::open(OsStr::new("no\0name")).unwrap_err();
    assert!(matches!(absent, Absent::Load { .. }), "{absent}");
}

#[test]
fn a_library_without_one_of_the_functions_is_absent() {
    for without in lab::stand_in::LIBQATZIP_SYMBOLS {
        let Some(file) = File::new(Some(without)) else {
            return;
        };
        let absent = Library::open(file.path.as_os_str()).unwrap_err();
        let name = file.path.to_str().unwrap();
        let text = format!("{name} has no symbol {without}");
        assert_eq!(absent.to_string(), text);
        assert!(matches!(absent, Absent::Symbol { symbol, .. } if symbol == without));
    }
}

#[test]
fn the_library_is_told_to_print_nothing_if_it_can_be() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    assert_eq!(stand_in.get("seen_log_level"), 1);
    let Some(file) = File::new(Some(lab::stand_in::LIBQATZIP_OPTIONAL_SYMBOL)) else {
        return;
    };
    let library = Library::open(file.path.as_os_str()).unwrap();
    assert_eq!(library.file(), file.path.canonicalize().unwrap());
    assert_eq!(hardware(&Arc::new(library)), Ok(()));
}

#[test]
fn groups_of_vfio_are_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let vfio = folder.path();
    assert!(!has_group(&vfio.join("vfio")));
    for (name, is_group) in [
        ("vfio", false),
        ("devices", false),
        ("noiommu-", false),
        ("noiommu-new", false),
        ("noiommu-0", true),
        ("17", true),
    ] {
        let entry = vfio.join(name);
        fs::write(&entry, "").unwrap();
        assert_eq!(has_group(vfio), is_group, "{name}");
        fs::remove_file(entry).unwrap();
    }
}

#[test]
fn a_library_that_is_another_one_is_absent() {
    // Any process has loaded this one.
    let absent = Library::open(OsStr::new("libc.so.6")).unwrap_err();
    assert_eq!(absent.to_string(), "libc.so.6 has no symbol qzInit");
}

#[test]
fn hardware_is_absent_with_its_reason() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let refused = |call, code| Absent::Refused {
        call,
        code: Code(code),
    };
    for (stat, at_init, at_set_up) in [
        (
            11,
            refused("qzInit", -101),
            refused("qzSetupSessionDeflate", -101),
        ),
        (
            12,
            refused("qzInit", -102),
            refused("qzSetupSessionDeflate", -101),
        ),
        (
            13,
            refused("qzInit", -103),
            refused("qzSetupSessionDeflate", -101),
        ),
        (
            14,
            refused("qzInit", -104),
            refused("qzSetupSessionDeflate", -101),
        ),
        (
            15,
            Absent::Hardware(Status(15)),
            Absent::Hardware(Status(15)),
        ),
        (
            -1,
            Absent::Hardware(Status(-1)),
            Absent::Hardware(Status(-1)),
        ),
    ] {
        stand_in.set("hw_session_stat", stat);
        assert_eq!(hardware(&stand_in.library), Err(at_init.clone()));
        assert_eq!(open(&stand_in).err().unwrap(), Failure::Absent(at_init));
        // Later libraries say that they have started before.
        stand_in.set("qzInit_code", Code::DUPLICATE.0.into());
        assert_eq!(hardware(&stand_in.library), Err(at_set_up.clone()));
        assert_eq!(open(&stand_in).err().unwrap(), Failure::Absent(at_set_up));
        stand_in.set("qzInit_code", 0);
    }
    let text = "libqatzip finds no usable QAT hardware: ";
    let returns = "qzInit returns -101 (no hardware, and no software either)";
    assert_eq!(
        refused("qzInit", -101).to_string(),
        format!("{text}{returns}")
    );
    let stat = "no free instance (hw_session_stat 13)";
    assert_eq!(
        Absent::Hardware(Status(13)).to_string(),
        format!("{text}{stat}")
    );
    stand_in.set("hw_session_stat", 0);
    assert_eq!(hardware(&stand_in.library), Ok(()));
    assert!(is_balanced(&stand_in));
    assert_eq!(stand_in.get("mallocs"), 0);
}

/// Every code that the library is known to return, but 0, and one that it is not.
const CODES: [i32; 27] = [
    1,
    2,
    11,
    12,
    13,
    14,
    15,
    16,
    100,
    -1,
    -2,
    -3,
    -4,
    -5,
    -100,
    -101,
    -102,
    -103,
    -104,
    -105,
    -116,
    -117,
    -118,
    -119,
    -200,
    77,
    i32::MIN,
];

#[test]
fn codes_of_opening_a_session() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    for code in CODES.map(Code) {
        stand_in.set("qzInit_code", code.0.into());
        if code == Code::DUPLICATE {
            assert_eq!(hardware(&stand_in.library), Ok(()));
            assert!(compress(&mut open(&stand_in).unwrap(), &[7; 4096]).is_ok());
        } else {
            let call = "qzInit";
            let absent = Absent::Refused { call, code };
            assert_eq!(hardware(&stand_in.library), Err(absent.clone()));
            assert_eq!(open(&stand_in).err().unwrap(), Failure::Absent(absent));
        }
        stand_in.set("qzInit_code", 0);

        for call in ["qzGetDefaultsDeflate", "qzSetupSessionDeflate"] {
            let switch = format!("{call}_code");
            stand_in.set(&switch, code.0.into());
            let absent = Absent::Refused { call, code };
            assert_eq!(hardware(&stand_in.library), Err(absent.clone()));
            assert_eq!(open(&stand_in).err().unwrap(), Failure::Absent(absent));
            stand_in.set(&switch, 0);
        }
    }
    assert!(open(&stand_in).is_ok());
    assert!(is_balanced(&stand_in));
}

#[test]
fn codes_of_packets() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let pages = pages(8 * 4096, 3);
    let payload = compress(&mut open(&stand_in).unwrap(), &pages).unwrap();
    for code in CODES.map(Code) {
        for call in ["qzCompress", "qzDecompress"] {
            let mut session = open(&stand_in).unwrap();
            let run = |session: &mut Session| match call {
                "qzCompress" => compress(session, &pages).map(|made| made == payload),
                _ => decompress(session, &payload, pages.len()).map(|made| made == pages),
            };
            let switch = format!("{call}_code");
            stand_in.set(&switch, code.0.into());
            assert_eq!(run(&mut session), Err(Failure::Code { call, code }));
            stand_in.set(&switch, 0);

            // It may have left something behind, so the session is not used again; unless nothing has begun.
            let calls = stand_in.get(&format!("{call}_calls"));
            if code == Code::NO_INSTANCE {
                assert!(session.is_ready());
                assert_eq!(run(&mut session), Ok(true));
            } else {
                assert!(!session.is_ready());
                assert_eq!(run(&mut session), Err(Failure::SPENT));
                assert_eq!(stand_in.get(&format!("{call}_calls")), calls);
            }

            // Only where nothing can come from the device any more is its memory freed.
            let lost = [-2, -5, 77, i32::MIN].contains(&code.0);
            assert_eq!(session.leaks(), lost, "{code}");
            let frees = stand_in.get("frees");
            drop(session);
            let freed = stand_in.get("frees") - frees;
            assert_eq!(freed, if lost { 0 } else { 2 }, "{code}");
            assert_eq!(run(&mut open(&stand_in).unwrap()), Ok(true));
        }
    }
    assert_eq!(stand_in.get("qzInit_calls"), stand_in.get("qzClose_calls"));
    assert_eq!(stand_in.get("misuse"), 0);
}

#[test]
fn codes_say_what_they_mean() {
    let mut meanings = CODES.map(|code| Code(code).meaning()).to_vec();
    // The last two are unknown.
    meanings.pop();
    meanings.sort_unstable();
    meanings.dedup();
    assert_eq!(meanings.len(), CODES.len() - 1);
    let failure = Failure::Code {
        call: "qzCompress",
        code: Code::TIMEOUT,
    };
    let text = "libqatzip's qzCompress returns -5 (timed out)";
    assert_eq!(failure.to_string(), text);
}

#[test]
fn calls_fail_only_when_told_to() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let outcomes = || -> Vec<bool> {
        let run = |_| compress(&mut open(&stand_in).unwrap(), &[1; 4096]).is_ok();
        (0..6).map(run).collect()
    };
    stand_in.set("qzCompress_code", Code::FORCED_SOFTWARE.0.into());
    stand_in.set("qzCompress_first", 2);
    let first_two = [false, false, true, true, true, true];
    assert_eq!(outcomes(), first_two);
    stand_in.set("qzCompress_first", 0);
    stand_in.set("qzCompress_every", 3);
    let each_third = [true, true, false, true, true, false];
    assert_eq!(outcomes(), each_third);
}

#[test]
fn a_slow_device_is_waited_for() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    stand_in.set("delay_us", 20_000);
    let mut session = open(&stand_in).unwrap();
    let start = std::time::Instant::now();
    compress(&mut session, &[1; 4096]).unwrap();
    assert!(start.elapsed().as_micros() >= 20_000);
}

#[test]
fn memory_need_not_be_a_devices() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    stand_in.set("no_pinned", 1);
    let mut session = open(&stand_in).unwrap();
    let pages = pages(PAGES, 4);
    let payload = compress(&mut session, &pages).unwrap();
    assert!(decompress(&mut session, &payload, PAGES).unwrap() == pages);
    drop(session);

    stand_in.set("no_memory", 1);
    let len = PAGES.try_into().unwrap();
    let failure = open(&stand_in).err().unwrap();
    assert_eq!(failure, Failure::Memory { len });
    assert!(is_balanced(&stand_in));
    assert_eq!(stand_in.get("mallocs"), 2);
}

#[test]
fn a_bound_beyond_what_a_payload_may_have_is_refused() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let payload = u32::try_from(PAYLOAD).unwrap();
    for bound in [payload + 1, u32::MAX] {
        stand_in.set("bound", bound.into());
        let failure = Failure::Made {
            call: "qzMaxCompressedLength",
            claimed: bound,
            allowed: 0..=payload,
        };
        assert_eq!(open(&stand_in).err().unwrap(), failure);
    }
    stand_in.set("bound", payload.into());
    assert!(open(&stand_in).is_ok());
    assert!(is_balanced(&stand_in));
}

#[test]
fn lengths_that_the_library_claims_are_not_believed() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let pages = pages(8 * 4096, 5);
    let given = u32::try_from(pages.len()).unwrap();
    let room = u32::try_from(PAYLOAD).unwrap();
    let mut session = open(&stand_in).unwrap();
    let payload = compress(&mut session, &pages).unwrap();
    let packed = u32::try_from(payload.len()).unwrap();

    let call = "qzCompress";
    for (by, claimed) in [
        (-1, given - 1),
        (-1 << 40, 0),
        (1, given + 1),
        (1 << 40, u32::MAX),
    ] {
        stand_in.set("qzCompress_src_len", by);
        let failure = Failure::Taken {
            call,
            claimed,
            given,
        };
        let mut session = open(&stand_in).unwrap();
        assert_eq!(compress(&mut session, &pages), Err(failure));
        assert_eq!(compress(&mut session, &pages), Err(Failure::SPENT));
    }
    stand_in.set("qzCompress_src_len", 0);
    let over = i64::from(room - packed) + 1;
    for (by, claimed) in [(over, room + 1), (1 << 40, u32::MAX), (-1 << 40, 0)] {
        stand_in.set("qzCompress_dst_len", by);
        let allowed = 1..=room;
        let failure = Failure::Made {
            call,
            claimed,
            allowed,
        };
        let mut session = open(&stand_in).unwrap();
        assert_eq!(compress(&mut session, &pages), Err(failure));
        assert_eq!(compress(&mut session, &pages), Err(Failure::SPENT));
    }
    // A claim that is possible is taken for true; what it adds is none of our secrets.
    stand_in.set("qzCompress_dst_len", over - 1);
    let claimed = compress(&mut session, &pages).unwrap();
    assert_eq!(claimed.len(), PAYLOAD);
    assert!(claimed[..payload.len()] == payload);
    assert!(claimed[payload.len()..].iter().all(|&byte| byte == 0));
    stand_in.set("qzCompress_dst_len", 0);

    let call = "qzDecompress";
    for (by, claimed) in [(-1, packed - 1), (1, packed + 1), (1 << 40, u32::MAX)] {
        stand_in.set("qzDecompress_src_len", by);
        let given = packed;
        let failure = Failure::Taken {
            call,
            claimed,
            given,
        };
        let mut session = open(&stand_in).unwrap();
        let run = |session: &mut Session| decompress(session, &payload, pages.len());
        assert_eq!(run(&mut session), Err(failure));
        assert_eq!(run(&mut session), Err(Failure::SPENT));
    }
    stand_in.set("qzDecompress_src_len", 0);
    for (by, claimed) in [
        (-1, given - 1),
        (1, given + 1),
        (1 << 40, u32::MAX),
        (-1 << 40, 0),
    ] {
        stand_in.set("qzDecompress_dst_len", by);
        let allowed = given..=given;
        let failure = Failure::Made {
            call,
            claimed,
            allowed,
        };
        let mut session = open(&stand_in).unwrap();
        let run = |session: &mut Session| decompress(session, &payload, pages.len());
        assert_eq!(run(&mut session), Err(failure));
        assert_eq!(run(&mut session), Err(Failure::SPENT));
    }
    stand_in.set("qzDecompress_dst_len", 0);
    assert!(decompress(&mut session, &payload, pages.len()).unwrap() == pages);
    drop(session);
    assert!(is_balanced(&stand_in));
}

#[test]
fn payloads_must_become_exactly_the_pages() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let session = || open(&stand_in).unwrap();
    let pages = pages(PAGES, 6);
    let payload = compress(&mut session(), &pages).unwrap();
    let call = "qzDecompress";
    for len in [0, 4096, PAGES - 1] {
        let wanted = u32::try_from(len).unwrap();
        let failure = Failure::Made {
            call,
            claimed: PAGES.try_into().unwrap(),
            allowed: wanted..=wanted,
        };
        assert_eq!(decompress(&mut session(), &payload, len), Err(failure));
    }
    // Damaged or cut: for the library to find out, without harm to another session.
    for payload in [&payload[..payload.len() - 1], &payload[1..], &[0; 4096]] {
        let code = Code::DATA;
        let failure = Failure::Code { call, code };
        assert_eq!(decompress(&mut session(), payload, PAGES), Err(failure));
    }
    assert!(decompress(&mut session(), &payload, PAGES).unwrap() == pages);
}

#[test]
fn more_than_a_session_is_for_does_not_reach_the_library() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let mut session = open(&stand_in).unwrap();
    let result = session.compress(&vec![0; PAGES + 1], &mut []);
    assert_eq!(result, Err(Failure::INPUT));
    let result = session.decompress(&[0], &mut vec![0; PAGES + 1]);
    assert_eq!(result, Err(Failure::INPUT));
    let result = session.decompress(&vec![0; PAYLOAD + 1], &mut [0]);
    assert_eq!(result, Err(Failure::INPUT));
    assert_eq!(stand_in.get("qzCompress_calls"), 0);
    assert_eq!(stand_in.get("qzDecompress_calls"), 0);

    // Too little room for the result, on the other hand, is only known afterwards.
    let len = compress(&mut session, &[1; 4096]).unwrap().len();
    let mut out = vec![0xa5; len - 1];
    let failure = session.compress(&[1; 4096], &mut out).unwrap_err();
    assert_eq!(failure, Failure::OUTPUT_FULL);
    assert!(out.iter().all(|&byte| byte == 0xa5));
}

#[test]
fn session_does_not_check_the_bytes() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let mut session = open(&stand_in).unwrap();
    let pages = pages(PAGES, 7);
    let good = compress(&mut session, &pages).unwrap();
    for (switch, differences) in [("qzCompress_corrupt", 1), ("header_byte", 8)] {
        stand_in.set(switch, 1);
        let bad = compress(&mut session, &pages).unwrap();
        let different = good.iter().zip(&bad).filter(|(good, bad)| good != bad);
        assert_eq!((bad.len(), different.count()), (good.len(), differences));
        stand_in.set(switch, 0);
    }
    stand_in.set("plain_gzip", 1);
    let plain = compress(&mut session, &pages).unwrap();
    assert_eq!(plain.len(), good.len() - 8 * 14);
    assert!(decompress(&mut session, &plain, PAGES).unwrap() == pages);

    stand_in.set("qzDecompress_corrupt", 1);
    let bad = decompress(&mut session, &good, PAGES).unwrap();
    let different = bad.iter().zip(&pages).filter(|(bad, good)| bad != good);
    assert_eq!(different.count(), 1);
}

#[test]
fn no_thread_but_its_own_uses_a_session() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    let pages = pages(4096, 8);
    let mut session = open(&stand_in).unwrap();
    let payload = compress(&mut session, &pages).unwrap();
    let session = thread::scope(|scope| {
        let use_it = || {
            let result = compress(&mut session, &pages);
            assert_eq!(result, Err(Failure::WRONG_THREAD));
            let result = decompress(&mut session, &payload, 4096);
            assert_eq!(result, Err(Failure::WRONG_THREAD));
            session
        };
        scope.spawn(use_it).join().unwrap()
    });
    assert_eq!(stand_in.get("qzCompress_calls"), 1);
    assert_eq!(stand_in.get("qzDecompress_calls"), 0);

    // Back home it is what it was.
    let mut session = session;
    assert!(decompress(&mut session, &payload, 4096).unwrap() == pages);

    // Dropped elsewhere, nothing is done to it.
    thread::scope(|scope| scope.spawn(|| drop(session)).join().unwrap());
    for call in [
        "frees",
        "qzTeardownSession_calls",
        "qzClose_calls",
        "misuse",
    ] {
        assert_eq!(stand_in.get(call), 0, "{call}");
    }
}

#[test]
fn threads_with_sessions_of_their_own_do_not_meet() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    thread::scope(|scope| {
        for seed in 0..4 {
            let stand_in = &stand_in;
            scope.spawn(move || {
                let mut session = open(stand_in).unwrap();
                for round in 0..8 {
                    let pages = pages((round + 1) * 4096, seed * 100 + round);
                    let payload = compress(&mut session, &pages).unwrap();
                    let back = decompress(&mut session, &payload, pages.len()).unwrap();
                    assert!(back == pages);
                }
            });
        }
    });
    assert_eq!(stand_in.get("qzClose_calls"), 4);
    assert!(is_balanced(&stand_in));
}

/// The layouts of QATzip 1.3.1 on x86-64.
const _: () = assert!(
    size_of::<QzSession>() == 40
        && align_of::<QzSession>() == 8
        && offset_of!(QzSession, hw_session_stat) == 0
        && offset_of!(QzSession, thread_state) == 8
        && offset_of!(QzSession, internal) == 16
        && offset_of!(QzSession, total_in) == 24
        && offset_of!(QzSession, total_out) == 32
);

const _: () = assert!(
    size_of::<QzSessionParamsDeflate>() == 56
        && align_of::<QzSessionParamsDeflate>() == 4
        && offset_of!(QzSessionParamsDeflate, direction) == 0
        && offset_of!(QzSessionParamsDeflate, level) == 4
        && offset_of!(QzSessionParamsDeflate, algorithm) == 8
        && offset_of!(QzSessionParamsDeflate, max_forks) == 12
        && offset_of!(QzSessionParamsDeflate, sw_backup) == 16
        && offset_of!(QzSessionParamsDeflate, hw_buff_sz) == 20
        && offset_of!(QzSessionParamsDeflate, strm_buff_sz) == 24
        && offset_of!(QzSessionParamsDeflate, input_threshold) == 28
        && offset_of!(QzSessionParamsDeflate, request_threshold) == 32
        && offset_of!(QzSessionParamsDeflate, wait_threshold) == 36
        && offset_of!(QzSessionParamsDeflate, polling) == 40
        && offset_of!(QzSessionParamsDeflate, sensitive_mode) == 44
        && offset_of!(QzSessionParamsDeflate, huffman_header) == 48
        && offset_of!(QzSessionParamsDeflate, data_format) == 52
);
