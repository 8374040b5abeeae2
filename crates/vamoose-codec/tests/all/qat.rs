//! Engine qat over a stand-in for libqatzip (`lab::stand_in`): where it is absent, and why; and whatever
//! its library does, every packet is right.

use std::{
    ffi::{CString, c_char, c_long},
    io::Write as _,
    path::PathBuf,
    sync::Arc,
};

use lab::stand_in;
use libloading::os::unix::{Library, Symbol};
use multifd::{Layout, Method};
use vamoose_codec::{
    Absence, Accel, Decoder, Engines, Health, Registry, Settings, SettingsError, Tally, Verify,
};

use crate::common::pages::{self, Kind};

const LAYOUT: Layout = Layout::X86;
const PACKETS: u64 = 6;

/// A libqatzip of a test's own.
pub(crate) struct StandIn {
    file: PathBuf,
    library: Library,
    _folder: tempfile::TempDir,
}

impl StandIn {
    /// `None` when this machine cannot compile it.
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let file = stand_in::libqatzip_or_skip(folder.path(), None).unwrap()?;
        // SAFETY: our own library, which has no constructor that could do harm.
        let library = unsafe { Library::new(&file) }.unwrap();
        Some(Self {
            file,
            library,
            _folder: folder,
        })
    }

    pub(crate) fn with(switches: &[(&str, i64)]) -> Option<Self> {
        let stand_in = Self::new()?;
        for (name, value) in switches {
            stand_in.set(name, *value);
        }
        Some(stand_in)
    }

    fn set(&self, name: &str, value: i64) {
        let name = CString::new(name).unwrap();
        // SAFETY: the C file defines it with this signature.
        unsafe {
            let set: Symbol<unsafe extern "C" fn(*const c_char, c_long)> =
                self.library.get(b"stand_in_set").unwrap();
            set(name.as_ptr(), value);
        }
    }

    pub(crate) fn get(&self, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        // SAFETY: the C file defines it with this signature.
        unsafe {
            let get: Symbol<unsafe extern "C" fn(*const c_char) -> c_long> =
                self.library.get(b"stand_in_get").unwrap();
            get(name.as_ptr())
        }
    }

    pub(crate) fn choose(&self, level: i32, verify: Verify) -> Result<Engines, SettingsError> {
        let settings = Settings::new(Method::Qatzip, Some(level)).unwrap();
        Arc::new(Registry::with_libqatzip(&self.file)).choose(settings, Accel::Qat, verify)
    }

    /// Sends packets through the engine, out and in, and returns what it did in each direction.
    fn send(&self, verify: Verify) -> [Tally; 2] {
        Self::send_through(&self.choose(1, verify).unwrap())
    }

    fn send_through(engines: &Engines) -> [Tally; 2] {
        assert_eq!(engines.name(), "qat");
        let [out, back] = [(); 2].map(|()| Arc::new(Health::default()));
        let mut encoder = engines.encoder(LAYOUT, &out).unwrap();
        let mut decoder = engines.decoder(LAYOUT, &back);
        let mut software = Decoder::new(LAYOUT);
        let mut room = vec![0; LAYOUT.max_payload()];
        for number in 0..PACKETS {
            let kind = Kind::ALL[usize::try_from(number).unwrap() % Kind::ALL.len()];
            let mut sent = pages::pages(kind, number, 127);
            sent.extend(pages::pages(Kind::Random, number, 1));
            let encoded = encoder.encode(&sent, &mut room).unwrap();
            for decoder in [&mut decoder, &mut software] {
                let mut received = vec![0xee; sent.len()];
                decoder
                    .decode(encoded.method, encoded.payload, &mut received)
                    .unwrap();
                assert!(received == sent, "packet {number}");
            }
        }
        [out.tally(), back.tally()]
    }
}

fn sum(tally: Tally) -> u64 {
    tally.accelerated + tally.fallbacks
}

#[test]
fn the_device_does_everything_when_all_is_well() {
    for members in 0..=8 {
        let Some(stand_in) = StandIn::with(&[("members", members)]) else {
            return;
        };
        let [out, back] = stand_in.send(Verify::Sample);
        if members == 0 || members == 8 {
            // As hardware does: one member for each 64 KiB, or fewer bytes.
            assert_eq!((out.accelerated, out.fallbacks), (PACKETS, 0), "{members}");
            assert_eq!(out.checked, 1);
        } else {
            // More than 64 KiB in a member: no hardware receiver would take it.
            assert_eq!((out.accelerated, out.fallbacks), (0, PACKETS), "{members}");
        }
        assert_eq!(
            (back.accelerated, back.fallbacks),
            (PACKETS, 0),
            "{members}"
        );
        for (opened, closed) in [("qzInit_calls", "qzClose_calls"), ("mallocs", "frees")] {
            assert_eq!(stand_in.get(opened), stand_in.get(closed), "{opened}");
        }
        assert_eq!(stand_in.get("misuse"), 0);
    }
}

#[test]
fn the_level_reaches_the_device() {
    let Some(stand_in) = StandIn::new() else {
        return;
    };
    for level in 1..=9 {
        let engines = stand_in.choose(level, Verify::Off).unwrap();
        let mut encoder = engines.encoder(LAYOUT, &Arc::default()).unwrap();
        let mut room = vec![0; LAYOUT.max_payload()];
        encoder.encode(&[7; 4096], &mut room).unwrap();
        assert_eq!(stand_in.get("seen_level"), i64::from(level));
        assert_eq!(stand_in.get("seen_sw_backup"), 0);
    }
}

#[test]
fn every_return_code_costs_the_packet_and_nothing_more() {
    for code in [
        1, 2, 16, 100, -1, -2, -3, -4, -5, -100, -101, -102, -103, -104, -105, -116, -119, -200, 77,
    ] {
        let Some(stand_in) = StandIn::with(&[
            ("qzCompress_code", code),
            ("qzCompress_every", 3),
            ("qzDecompress_code", code),
            ("qzDecompress_every", 3),
        ]) else {
            return;
        };
        for tally in stand_in.send(Verify::Sample) {
            assert!(
                tally.fallbacks > 0 && sum(tally) == PACKETS,
                "{code}: {tally:?}"
            );
            assert_eq!(tally.wrong, 0, "{code}");
        }
    }
}

/// What a QEMU without QAT sends, one member of 512 KiB by QATzip's software, and other gzips.
#[test]
fn a_packet_that_no_device_writes_does_not_reach_the_device() {
    let Some(stand_in) = StandIn::with(&[("strict", 1)]) else {
        return;
    };
    let engines = stand_in.choose(1, Verify::Off).unwrap();
    let health = Arc::new(Health::default());
    let mut decoder = engines.decoder(LAYOUT, &health);
    let sent = pages::pages(Kind::Text, 1, 128);
    let mut decode = |payload: &[u8]| {
        let mut received = vec![0xee; sent.len()];
        let result = decoder.decode(Method::Qatzip, payload, &mut received);
        assert!(result.is_ok() && received == sent, "{result:?}");
    };
    let gzip = |members: usize| {
        let parts = sent.chunks(sent.len() / members).map(|part| {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(part).unwrap();
            gzip.finish().unwrap()
        });
        parts.collect::<Vec<_>>().concat()
    };
    // More often than a device may fail, and a channel lose sessions.
    for _ in 0..10 {
        for payload in [with_extra_field(&gzip(1), sent.len()), gzip(1), gzip(8)] {
            decode(&payload);
        }
    }
    assert_eq!(stand_in.get("qzDecompress_calls"), 0);
    // The device still has all that is for it.
    let mut encoder = engines.encoder(LAYOUT, &Arc::default()).unwrap();
    let mut room = vec![0; LAYOUT.max_payload()];
    decode(encoder.encode(&sent, &mut room).unwrap().payload);
    let tally = health.tally();
    assert_eq!((tally.accelerated, tally.fallbacks), (1, 30));
    drop((decoder, encoder));
    assert_eq!(stand_in.get("mallocs"), stand_in.get("frees"));
}

/// A gzip of one member as QATzip heads it.
fn with_extra_field(gzip: &[u8], source: usize) -> Vec<u8> {
    let body = &gzip[10..];
    let size = |len: usize| u32::try_from(len).unwrap().to_le_bytes();
    let sizes = [size(source), size(body.len() - 8)].concat();
    let header = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x0c\0QZ\x08\0";
    [&header[..], &sizes, body].concat()
}

#[test]
fn a_session_outlives_a_device_without_a_free_instance() {
    let Some(stand_in) = StandIn::with(&[
        ("qzCompress_code", -103),
        ("qzCompress_every", 2),
        ("qzDecompress_code", -103),
        ("qzDecompress_every", 2),
    ]) else {
        return;
    };
    for tally in stand_in.send(Verify::Off) {
        assert!(tally.accelerated >= PACKETS / 2 && sum(tally) == PACKETS);
    }
    // One when the device was looked for, and one in each direction.
    assert_eq!(stand_in.get("qzInit_calls"), 3);
}

#[test]
fn a_session_that_finds_no_free_instance_is_opened_later() {
    for (switch, code) in [("qzInit_code", -103), ("hw_session_stat", 13)] {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        let engines = stand_in.choose(1, Verify::Off).unwrap();
        let health = Arc::new(Health::default());
        let mut encoder = engines.encoder(LAYOUT, &health).unwrap();
        let mut room = vec![0; LAYOUT.max_payload()];
        let sent = pages::pages(Kind::Text, 1, 128);
        stand_in.set(switch, code);
        for _ in 0..40 {
            encoder.encode(&sent, &mut room).unwrap();
        }
        stand_in.set(switch, 0);
        encoder.encode(&sent, &mut room).unwrap();
        let tally = health.tally();
        assert_eq!((tally.accelerated, tally.fallbacks), (1, 40), "{switch}");
    }
}

#[test]
fn a_device_that_always_fails_is_left_alone() {
    for code in [-1, -2, -5] {
        let Some(stand_in) =
            StandIn::with(&[("qzCompress_code", code), ("qzDecompress_code", code)])
        else {
            return;
        };
        for tally in stand_in.send(Verify::Sample) {
            assert_eq!((tally.accelerated, tally.fallbacks), (0, PACKETS), "{code}");
        }
    }
}

#[test]
fn sessions_that_cannot_be_opened_are_software() {
    for (switch, value) in [
        ("qzSetupSessionDeflate_code", -1),
        ("qzGetDefaultsDeflate_code", -1),
        ("no_memory", 1),
        ("bound", i64::from(u32::MAX)),
    ] {
        let Some(stand_in) = StandIn::new() else {
            return;
        };
        // There was a device when it was looked for.
        let engines = stand_in.choose(1, Verify::Sample).unwrap();
        stand_in.set(switch, value);
        for tally in StandIn::send_through(&engines) {
            assert_eq!(
                (tally.accelerated, tally.fallbacks),
                (0, PACKETS),
                "{switch}"
            );
        }
    }
}

#[test]
fn results_of_the_wrong_shape_are_not_sent() {
    for (switch, value) in [
        ("plain_gzip", 1),
        ("header_byte", 1),
        ("header_byte", 11),
        ("header_byte", 17),
        ("header_byte", 21),
        ("qzCompress_dst_len", -1),
        ("qzCompress_dst_len", 1),
        ("qzCompress_dst_len", 1 << 30),
        ("qzCompress_src_len", -4096),
    ] {
        let Some(stand_in) = StandIn::with(&[(switch, value)]) else {
            return;
        };
        let [out, _] = stand_in.send(Verify::Off);
        assert_eq!(
            (out.accelerated, out.fallbacks),
            (0, PACKETS),
            "{switch} {value}"
        );
    }
}

#[test]
fn silent_wrong_bytes_are_caught() {
    for (direction, switch) in ["qzCompress_corrupt", "qzDecompress_corrupt"]
        .iter()
        .enumerate()
    {
        for verify in [Verify::Sample, Verify::All] {
            let Some(stand_in) = StandIn::with(&[(switch, 1)]) else {
                return;
            };
            let tally = stand_in.send(verify)[direction];
            assert_eq!(
                (tally.accelerated, tally.fallbacks),
                (0, PACKETS),
                "{switch}"
            );
            assert!(tally.wrong <= 1, "{switch}: {tally:?}");
        }
    }
}

#[test]
fn why_it_is_absent_is_said() {
    let absent = |file: PathBuf| {
        let registry = Arc::new(Registry::with_libqatzip(&file));
        let rows = registry.engines();
        let row = rows.into_iter().find(|row| row.name == "qat").unwrap();
        assert_eq!(row.method, Method::Qatzip);
        // Named if it can be used, whatever it finds then.
        let is_used = row.library.is_some();
        assert_eq!(is_used, row.absent.as_ref().unwrap().contains("finds no"));
        let settings = Settings::new(Method::Qatzip, None).unwrap();
        // `auto` does without it.
        let engines = registry
            .choose(settings, Accel::Auto, Verify::Sample)
            .unwrap();
        assert_ne!(engines.name(), "qat");
        let refused = registry.choose(settings, Accel::Qat, Verify::Sample).err();
        let reason = row.absent.unwrap();
        assert_eq!(
            refused,
            Some(SettingsError::EngineAbsent {
                engine: "qat",
                reason: Absence(reason.clone())
            })
        );
        reason
    };
    let no_such = absent("/nonexistent/libqatzip.so.3".into());
    assert!(no_such.contains("cannot be loaded"), "{no_such}");
    for symbol in stand_in::LIBQATZIP_SYMBOLS {
        let folder = tempfile::tempdir().unwrap();
        let Some(file) = stand_in::libqatzip_or_skip(folder.path(), Some(symbol)).unwrap() else {
            return;
        };
        let reason = absent(file);
        assert!(
            reason.ends_with(&format!("has no symbol {symbol}")),
            "{reason}"
        );
    }
    for (status, why) in [
        (11, "no hardware"),
        (12, "no driver"),
        (13, "no free instance"),
        (14, "too little memory"),
        (99, "unknown status"),
    ] {
        let Some(stand_in) = StandIn::with(&[("hw_session_stat", status)]) else {
            return;
        };
        let reason = absent(stand_in.file.clone());
        assert!(reason.contains(why), "{reason}");
    }
}
