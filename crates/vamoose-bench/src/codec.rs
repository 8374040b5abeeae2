//! `vamoose bench codec`: what each method makes of given pages, and how fast, without a migration around it.
//!
//! The pages go in packets of 128, without those of zeros, which no method encodes. Every packet is decoded again and compared.
//! Speeds are of one thread's CPU time, medians of the rounds.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use multifd::{Layout, Method};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use vamoose_codec::{Decoder, Settings, encoder, is_zero};

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Files of pages: a guest's memory, or part of it
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Pages measured of each file, in MiB, in packets spread evenly over it
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
    sample: u64,
    /// Rounds; the figures are medians
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One line of JSON for each method and file, instead of tables
    #[arg(long)]
    json: bool,
}

/// What a method makes of the pages of a file.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    file: PathBuf,
    page_bytes: u64,
    method: &'static str,
    level: Option<i32>,
    /// Bytes of pages for each byte of payload.
    ratio: f64,
    /// Bytes of pages per second of CPU time.
    encode: f64,
    decode: f64,
}

/// What auto chooses from, then what QEMU has.
const CASES: [(Method, Option<i32>); 9] = [
    (Method::Lz4, Some(1)),
    (Method::ZstdFrames, Some(-1)),
    (Method::ZstdFrames, Some(1)),
    (Method::ZstdFrames, Some(3)),
    (Method::Zstd, Some(1)),
    (Method::Zstd, Some(3)),
    (Method::Zlib, Some(1)),
    (Method::Qpl, Some(1)),
    (Method::Qatzip, Some(1)),
];

const LAYOUT: Layout = Layout::X86;

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut out = io::stdout().lock();
    for file in &options.files {
        let packets = read(file, options.sample << 20)?;
        if !options.json {
            let mebibytes = packets.iter().map(Vec::len).sum::<usize>() >> 20;
            writeln!(out, "{}: {mebibytes} MiB of pages\n", file.display())?;
            writeln!(out, "method           ratio   encode, MB/s   decode, MB/s")?;
        }
        for (method, level) in CASES {
            let row = measure(
                file,
                &packets,
                &Settings::new(method, level)?,
                options.rounds,
            )?;
            match options.json {
                true => writeln!(out, "{}", serde_json::to_string(&row)?)?,
                false => writeln!(out, "{row}")?,
            }
        }
        if !options.json {
            writeln!(out)?;
        }
    }
    Ok(())
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let level = self.level.map(|level| level.to_string());
        let name = format!("{} {}", self.method, level.unwrap_or_default());
        let [encode, decode] = [self.encode, self.decode].map(|speed| speed / 1e6);
        write!(
            f,
            "{name:14} {:7.3} {encode:14.0} {decode:14.0}",
            self.ratio
        )
    }
}

/// The pages of a file that are not zero, in packets: all of them, or at most `most` bytes of packets spread evenly.
fn read(path: &Path, most: u64) -> Result<Vec<Vec<u8>>> {
    let what = || format!("reading {}", path.display());
    let mut file = File::open(path).with_context(what)?;
    let mut sample = Sample {
        most: (usize::try_from(most)? / LAYOUT.packet_bytes()).max(1),
        step: 1,
        seen: 0,
        packets: Vec::new(),
    };
    let mut packet = Vec::with_capacity(LAYOUT.packet_bytes());
    let mut page = vec![0; LAYOUT.page_size()];
    while read_page(&mut file, &mut page).with_context(what)? {
        if is_zero(&page) {
            continue;
        }
        packet.extend_from_slice(&page);
        if packet.len() == LAYOUT.packet_bytes() {
            sample.add(&packet);
            packet.clear();
        }
    }
    if !packet.is_empty() {
        sample.add(&packet);
    }
    ensure!(
        !sample.packets.is_empty(),
        "{}: all pages are zero",
        path.display()
    );
    Ok(sample.packets)
}

/// Packets spread evenly over a file. The file may be larger than this host's memory.
struct Sample {
    most: usize,
    /// Every so many packets one is kept.
    step: usize,
    seen: usize,
    packets: Vec<Vec<u8>>,
}

impl Sample {
    fn add(&mut self, packet: &[u8]) {
        if self.seen.is_multiple_of(self.step) {
            self.packets.push(packet.to_vec());
        }
        self.seen += 1;
        if self.packets.len() > self.most {
            let kept = std::mem::take(&mut self.packets);
            self.packets = kept.into_iter().step_by(2).collect();
            self.step *= 2;
        }
    }
}

/// Reads the next page. False at the end; the rest of a page there is left out.
fn read_page(file: &mut File, page: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(page) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    }
}

fn measure(file: &Path, packets: &[Vec<u8>], settings: &Settings, rounds: u32) -> Result<Row> {
    let mut times = Vec::new();
    let mut payload_bytes = 0;
    for _ in 0..rounds {
        let (bytes, encode, decode) = round(packets, settings)?;
        payload_bytes = bytes;
        times.push((encode.as_secs_f64(), decode.as_secs_f64()));
    }
    let page_bytes: usize = packets.iter().map(Vec::len).sum();
    let speed = |times: Vec<f64>| lab::median(times).map_or(0.0, |time| page_bytes as f64 / time);
    let (encode, decode) = times.into_iter().unzip();
    Ok(Row {
        file: file.to_owned(),
        page_bytes: page_bytes as u64,
        method: settings.method().name(),
        level: settings.level(),
        ratio: page_bytes as f64 / payload_bytes as f64,
        encode: speed(encode),
        decode: speed(decode),
    })
}

/// Encodes and decodes all packets, as one channel does. Returns the bytes of payload, and the CPU times.
fn round(packets: &[Vec<u8>], settings: &Settings) -> Result<(usize, Duration, Duration)> {
    let mut encoder = encoder(settings, LAYOUT)?;
    let mut decoder = Decoder::new(LAYOUT);
    let mut out = vec![0; LAYOUT.max_payload()];
    let mut pages = vec![0; LAYOUT.packet_bytes()];
    let (mut bytes, mut encode, mut decode) = (0, Duration::ZERO, Duration::ZERO);
    for packet in packets {
        let begin = cpu_time();
        let encoded = encoder.encode(packet, &mut out)?;
        let encoded_at = cpu_time();
        let pages = &mut pages[..packet.len()];
        decoder.decode(encoded.method, encoded.payload, pages)?;
        decode += cpu_time() - encoded_at;
        encode += encoded_at - begin;
        bytes += encoded.payload.len();
        ensure!(
            pages == packet,
            "{}: other pages came back",
            settings.method()
        );
    }
    Ok((bytes, encode, decode))
}

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// 300 pages of text, 100 of zeros in between, and a part of a page.
    fn file() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = b"dirty pages ".repeat(300 << 12);
        let bytes = [
            &text[..150 << 12],
            &[0; 100 << 12],
            &text[..150 << 12],
            b"rest",
        ]
        .concat();
        fs::write(file.path(), bytes).unwrap();
        file
    }

    #[test]
    fn pages_that_are_not_zero_are_sampled_in_packets() {
        let file = file();
        let lens = |most| {
            let packets = read(file.path(), most).unwrap();
            packets
                .iter()
                .map(|packet| packet.len() >> 12)
                .collect::<Vec<_>>()
        };
        assert_eq!(lens(64 << 20), [128, 128, 44]);
        assert_eq!(lens(1 << 20), [128, 44]);
        assert_eq!(lens(1), [128]);
    }

    #[test]
    fn a_file_without_pages_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [0; 8192]).unwrap();
        let error = read(file.path(), 1 << 20).unwrap_err();
        assert!(error.to_string().contains("all pages are zero"), "{error}");
    }

    #[test]
    fn every_case_encodes_and_decodes() {
        let packets = read(file().path(), 1 << 20).unwrap();
        for (method, level) in CASES {
            let settings = Settings::new(method, level).unwrap();
            let row = measure(Path::new("pages"), &packets, &settings, 1).unwrap();
            assert!(row.ratio > 4.0, "{}: {}", row.method, row.ratio);
            let json = serde_json::to_value(&row).unwrap();
            assert_eq!(json["page-bytes"], 172 << 12);
        }
    }
}
