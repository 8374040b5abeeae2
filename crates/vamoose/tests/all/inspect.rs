//! `vamoose inspect` on what stock QEMUs sent (`testdata/vectors`), whole, cut and corrupted, and on
//! streams built here for what those do not have.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    slice::from_ref,
};

use multifd::{BlockName, Initial, Layout, Method, RamHeader};
use tempfile::TempDir;

/// Folder, packets, SYNCs, normal pages and zero pages of both channels together.
const VECTORS: [(&str, usize, usize, usize, usize); 8] = [
    ("qemu-10.0.2-none", 14, 6, 777, 247),
    ("qemu-10.0.2-zlib", 14, 6, 777, 247),
    ("qemu-10.0.2-zstd", 14, 6, 777, 247),
    ("qemu-10.0.2-qpl", 14, 6, 777, 247),
    ("qemu-10.0.2-qatzip", 14, 6, 777, 247),
    ("qemu-7.2.22-none", 13, 6, 778, 0),
    ("qemu-7.2.22-zlib", 13, 6, 777, 0),
    ("qemu-7.2.22-zstd", 13, 6, 777, 0),
];

#[test]
fn every_recording_gives_the_guests_ram() {
    let folder = TempDir::new().unwrap();
    let expected = unpack(&vectors().join("ram.img.zst"));
    for (name, packets, syncs, normal, zero) in VECTORS {
        let ram = folder.path().join(name);
        let output = inspect(&[
            &ram_options(&ram, "4M"),
            &[channel(name, 1), channel(name, 0)][..],
        ]);
        assert_eq!(stderr(&output), "", "{name}");
        assert!(output.status.success(), "{name}");
        assert!(fs::read(&ram).unwrap() == expected, "{name}: another RAM");
        let text = stdout(&output);
        let lines: Vec<_> = text.lines().collect();
        let sums = lines.last().unwrap();
        let counts = format!("packets {packets}, SYNCs {syncs}, normal pages {normal} (");
        assert!(sums.starts_with(&counts), "{name}: {sums}");
        assert!(
            sums.ends_with(&format!("zero pages {zero}")),
            "{name}: {sums}"
        );
        // The heading, a line for each packet, and the sums.
        assert_eq!(lines.len(), 1 + packets + 1, "{name}:\n{text}");
        let with_sync = lines.iter().filter(|line| line.contains(" SYNC ")).count();
        assert_eq!(with_sync, syncs, "{name}:\n{text}");
    }
}

#[test]
fn a_recording_may_be_plain_and_one_of_several_channels() {
    let folder = TempDir::new().unwrap();
    let plain = folder.path().join("named.zst");
    fs::write(&plain, unpack(&channel("qemu-10.0.2-zlib", 1))).unwrap();
    let from_plain = inspect(&[&[plain]]);
    let from_packed = inspect(&[&[channel("qemu-10.0.2-zlib", 1)]]);
    assert!(from_plain.status.success());
    assert_eq!(stdout(&from_plain), stdout(&from_packed));
    assert!(stdout(&from_plain).contains("zlib"));
}

#[test]
fn a_stream_cut_anywhere_names_the_byte_and_the_state_of_the_ram() {
    let folder = TempDir::new().unwrap();
    let whole = unpack(&channel("qemu-10.0.2-zlib", 1));
    for (len, problem) in [
        (3, "byte 0: the initial packet is incomplete"),
        (40, "byte 0: the initial packet is incomplete"),
        (
            64 + 5,
            "byte 64: the stream ended in the middle of a packet's",
        ),
        (
            64 + 12,
            "byte 64: the stream ended in the middle of a packet's",
        ),
        (
            64 + 1343,
            "byte 64: the stream ended in the middle of a packet's",
        ),
        (
            100_000,
            "byte 1408: the stream ended in the middle of a packet's payload",
        ),
    ] {
        let cut = folder.path().join("cut");
        fs::write(&cut, &whole[..len]).unwrap();
        let ram = folder.path().join(format!("ram{len}"));
        let output = inspect(&[
            &ram_options(&ram, "4M"),
            &[channel("qemu-10.0.2-zlib", 0), cut.clone()],
        ]);
        refused(&output, &format!("{}: {problem}", cut.display()));
        assert_eq!(ram.exists(), len > 64, "created only for channels");
        assert_eq!(
            stderr(&output).contains("INCOMPLETE"),
            len > 64,
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn a_stream_cut_between_packets_is_missed_by_its_syncs() {
    let folder = TempDir::new().unwrap();
    let whole = unpack(&channel("qemu-10.0.2-none", 1));
    let cut = folder.path().join("cut");
    fs::write(&cut, &whole[..64 + 1344]).unwrap();
    let ram = folder.path().join("ram");
    let output = inspect(&[
        &ram_options(&ram, "4M"),
        &[channel("qemu-10.0.2-none", 0), cut],
    ]);
    refused(&output, "[3, 1] SYNCs: one is truncated");
}

#[test]
fn a_corrupt_stream_is_refused_where_it_is_corrupt() {
    let folder = TempDir::new().unwrap();
    let whole = unpack(&channel("qemu-10.0.2-zlib", 1));
    // Byte, new value, what is printed.
    for (at, value, said) in [
        (3, 0x45, "byte 0: not the recording of a multifd channel"),
        (64 + 3, 0, "byte 64: bad packet: packet magic is 0x11223300"),
        (64 + 11, 0x80, "byte 64: bad packet: packet flags 0x80"),
        (1408 + 16, 0xff, "byte 1408: bad packet: normal_pages is"),
        (1408 + 1344 + 1, 0, "byte 1408: bad payload of packet "),
    ] {
        let mut bytes = whole.clone();
        bytes[at] = value;
        let corrupt = folder.path().join("corrupt");
        fs::write(&corrupt, bytes).unwrap();
        refused(&inspect(&[&[corrupt]]), said);
    }
    let mut packed = fs::read(channel("qemu-10.0.2-zlib", 1)).unwrap();
    let middle = packed.len() / 2;
    packed.truncate(middle);
    let short = folder.path().join("short.zst");
    fs::write(&short, &packed).unwrap();
    refused(&inspect(&[from_ref(&short)]), "incomplete frame");
    packed[4..8].fill(0xff);
    fs::write(&short, &packed).unwrap();
    refused(&inspect(&[&[short]]), "short.zst: Unsupported frame");
}

#[test]
fn pages_beyond_the_size_are_refused_with_both_numbers() {
    let folder = TempDir::new().unwrap();
    let name = "qemu-10.0.2-zstd";
    let ram = folder.path().join("ram");
    let output = inspect(&[
        &ram_options(&ram, "2M"),
        &[channel(name, 0), channel(name, 1)],
    ]);
    refused(&output, "beyond --size 2097152");
    refused(&output, "of RAM block mem");
    refused(&output, "INCOMPLETE");
}

#[test]
fn streams_that_do_not_belong_together_are_refused() {
    let name = "qemu-10.0.2-none";
    let folder = TempDir::new().unwrap();
    let ram = folder.path().join("ram");
    let twice = inspect(&[
        &ram_options(&ram, "4M"),
        &[channel(name, 0), channel("qemu-7.2.22-none", 0)],
    ]);
    refused(&twice, "those of channels [0, 0]");
    let half = inspect(&[&ram_options(&ram, "4M"), &[channel(name, 1)]]);
    refused(&half, "those of channels [1]");
    assert!(!ram.exists());
}

#[test]
fn no_file_is_overwritten_with_ram() {
    let folder = TempDir::new().unwrap();
    let stream = folder.path().join("channel0");
    fs::copy(channel("qemu-10.0.2-none", 0), &stream).unwrap();
    let before = fs::read(&stream).unwrap();
    let output = inspect(&[&ram_options(&stream, "4M"), from_ref(&stream)]);
    refused(&output, "File exists");
    assert!(fs::read(&stream).unwrap() == before);
}

#[test]
fn a_main_stream_is_skipped() {
    let main = vectors().join("qemu-10.0.2-none/main.bin.zst");
    refused(&inspect(&[from_ref(&main)]), "only main streams were given");
    let channels = [0, 1].map(|number| channel("qemu-10.0.2-none", number));
    let expected = stdout(&inspect(&[&channels]));
    let output = inspect(&[&[main], &channels]);
    assert!(output.status.success());
    assert!(stderr(&output).contains("main.bin.zst: skipped: this is a main stream"));
    assert_eq!(stdout(&output), expected);
}

#[test]
fn a_reader_that_leaves_ends_the_printing_and_not_the_ram() {
    let folder = TempDir::new().unwrap();
    let name = "qemu-10.0.2-none";
    let ram = folder.path().join("ram");
    for options in [vec![], ram_options(&ram, "4M")] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_vamoose"))
            .arg("inspect")
            .args(options)
            .args([channel(name, 0), channel(name, 1)])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Closed before anything was read.
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(stderr(&output), "");
        assert!(output.status.success());
    }
    assert!(fs::read(&ram).unwrap() == unpack(&vectors().join("ram.img.zst")));
}

#[test]
fn one_of_several_blocks_has_to_be_chosen() {
    let folder = TempDir::new().unwrap();
    let stream = Stream::new(0)
        .sync()
        .pages("pc.ram", &[(0, 1), (0x1000, 2)], &[])
        .pages("vga.vram", &[(0, 9)], &[])
        .sync()
        .write(&folder, "stream");
    let ram = |name| folder.path().join(name);
    let all = inspect(&[&ram_options(&ram("all"), "8k"), from_ref(&stream)]);
    refused(
        &all,
        "pages of the RAM blocks pc.ram and vga.vram: choose one with --block",
    );
    refused(&all, "INCOMPLETE");
    for (block, content) in [("vga.vram", [9, 0]), ("pc.ram", [1, 2])] {
        let mut options = ram_options(&ram(block), "8k");
        options.extend(["--block".into(), block.into()]);
        let output = inspect(&[&options, from_ref(&stream)]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(pages(&ram(block)), content, "{block}");
    }
    let mut options = ram_options(&ram("mem"), "8k");
    options.extend(["--block".into(), "mem".into()]);
    let output = inspect(&[&options, &[stream]]);
    refused(&output, "--block mem: the streams hold no page of it");
}

#[test]
fn a_sync_is_a_barrier_behind_its_own_pages() {
    let folder = TempDir::new().unwrap();
    // What channel 1 sends before its second SYNC, channel 0 overwrites behind its own.
    let first = Stream::new(0)
        .sync()
        .sync()
        .pages("mem", &[(0x1000, 8)], &[0, 0x3000])
        .sync()
        .write(&folder, "0");
    let second = Stream::new(1)
        .sync()
        .pages("mem", &[(0, 5), (0x1000, 6)], &[])
        .sync_with("mem", &[(0x3000, 7), (0x2000, 7)])
        .sync()
        .write(&folder, "1");
    let ram = folder.path().join("ram");
    let output = inspect(&[&ram_options(&ram, "16k"), &[first, second]]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(
        pages(&ram),
        [0, 8, 7, 0],
        "a page sent later, or zeroed, counts"
    );
}

#[test]
fn device_state_and_other_page_sizes_are_known() {
    let folder = TempDir::new().unwrap();
    let path = Stream::new(0)
        .sync()
        .device_state("0000:00:03.0/vfio", b"state")
        .sync()
        .write(&folder, "stream");
    let output = inspect(&[&[path]]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("DEVICE"), "{}", stdout(&output));

    let folder = TempDir::new().unwrap();
    let mut stream = Stream::new(0).sync();
    stream.method = Method::Uadk;
    let path = stream.pages("mem", &[(0, 1)], &[]).write(&folder, "stream");
    refused(&inspect(&[&[path]]), "uadk");

    let wrong = [PathBuf::from("--page-size"), "64k".into()];
    let output = inspect(&[&wrong, &[channel("qemu-10.0.2-none", 0)]]);
    refused(&output, "bad packet: packet magic");
    let odd = [PathBuf::from("--page-size"), "5000".into()];
    let output = inspect(&[&odd, &[channel("qemu-10.0.2-none", 0)]]);
    refused(&output, "--page-size: page size 5000 is not a power of two");
}

/// A channel's stream being made.
struct Stream {
    bytes: Vec<u8>,
    method: Method,
    packets: u64,
}

impl Stream {
    fn new(channel: u8) -> Self {
        // Like QEMU's: without the announcement of Vamoose.
        let mut initial = Initial::new([0; 16], channel, 255).unwrap().to_bytes();
        initial[25..].fill(0);
        Self {
            bytes: initial.to_vec(),
            method: Method::None,
            packets: 0,
        }
    }

    fn sync(self) -> Self {
        self.packet("", &[], &[], true)
    }

    fn sync_with(self, block: &str, normal: &[(u64, u8)]) -> Self {
        self.packet(block, normal, &[], true)
    }

    fn pages(self, block: &str, normal: &[(u64, u8)], zero: &[u64]) -> Self {
        self.packet(block, normal, zero, false)
    }

    /// Pages given as their offset and the byte that fills them.
    fn packet(mut self, block: &str, normal: &[(u64, u8)], zero: &[u64], sync: bool) -> Self {
        let offsets: Vec<_> = normal.iter().map(|(offset, _)| *offset).collect();
        let mut header = RamHeader::new(Layout::X86);
        if !block.is_empty() {
            header.block = BlockName::new(block.as_bytes()).unwrap();
        }
        header.sync = sync;
        header.method = self.method;
        header.packet_num = self.packets;
        header.set_pages(&offsets, zero, Layout::X86).unwrap();
        header
            .set_payload_len(normal.len() * 4096, Layout::X86)
            .unwrap();
        header.write(Layout::X86, &mut self.bytes);
        for (_, byte) in normal {
            self.bytes.extend_from_slice(&[*byte; 4096]);
        }
        self.packets += 1;
        self
    }

    fn device_state(mut self, id: &str, state: &[u8]) -> Self {
        let start = self.bytes.len();
        for word in [0x1122_3344u32, 1, 0x40] {
            self.bytes.extend_from_slice(&word.to_be_bytes());
        }
        self.bytes.extend_from_slice(id.as_bytes());
        self.bytes.resize(start + 12 + 256, 0);
        for word in [7, u32::try_from(state.len()).unwrap()] {
            self.bytes.extend_from_slice(&word.to_be_bytes());
        }
        self.bytes.extend_from_slice(state);
        self
    }

    fn write(self, folder: &TempDir, name: &str) -> PathBuf {
        let path = folder.path().join(name);
        fs::write(&path, self.bytes).unwrap();
        path
    }
}

/// The bytes that fill the pages of a RAM file.
fn pages(ram: &Path) -> Vec<u8> {
    let bytes = fs::read(ram).unwrap();
    let (pages, rest) = bytes.as_chunks::<4096>();
    assert!(rest.is_empty());
    for page in pages {
        assert_eq!(*page, [page[0]; 4096]);
    }
    pages.iter().map(|page| page[0]).collect()
}

fn inspect(arguments: &[&[PathBuf]]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .arg("inspect")
        .args(arguments.concat())
        .output()
        .unwrap()
}

fn ram_options(ram: &Path, size: &str) -> Vec<PathBuf> {
    vec!["--ram".into(), ram.into(), "--size".into(), size.into()]
}

fn refused(output: &Output, said: &str) {
    let error = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains(said), "`{said}` is not in: {error}");
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn channel(folder: &str, channel: u8) -> PathBuf {
    vectors().join(format!("{folder}/channel{channel}.bin.zst"))
}

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/vectors")
}

fn unpack(path: &Path) -> Vec<u8> {
    zstd::decode_all(fs::File::open(path).unwrap()).unwrap()
}
