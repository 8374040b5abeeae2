//! Prints the packets of a recorded multifd channel.
//!
//! ```sh
//! cargo run -p multifd --example packets                  # a channel of QEMU 10.0 from this repository
//! cargo run -p multifd --example packets -- FILE [FILE..] # other channels, also compressed with zstd
//! ```

use std::{env, error::Error, fs, path::Path};

use multifd::{
    DEVICE_STATE_HEADER_LEN, DeviceStateHeader, INITIAL_LEN, Initial, Layout, PRELUDE_LEN,
    PacketKind, Prelude, RamHeader,
};

const RECORDED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../testdata/vectors/qemu-10.0.2-zlib/channel0.bin.zst"
);

/// Most bytes of a recording.
const MAX_LEN: usize = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut files: Vec<String> = env::args().skip(1).collect();
    if files.is_empty() {
        files.push(RECORDED.to_owned());
    }
    for file in files {
        println!("{file}");
        print_channel(&read(Path::new(&file))?)?;
    }
    Ok(())
}

/// The file's bytes, decompressed.
fn read(file: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    let bytes = fs::read(file)?;
    if file.extension().is_none_or(|extension| extension != "zst") {
        return Ok(bytes);
    }
    let mut recorded = Vec::with_capacity(MAX_LEN);
    zstd_safe::decompress(&mut recorded, &bytes).map_err(zstd_safe::get_error_name)?;
    Ok(recorded)
}

fn print_channel(bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let layout = Layout::X86;
    let mut rest = bytes;
    let initial = Initial::parse(take::<INITIAL_LEN>(&mut rest)?)?;
    println!("channel {}", initial.channel());
    let mut header = RamHeader::new(layout);
    while !rest.is_empty() {
        let prelude = Prelude::parse(take::<PRELUDE_LEN>(&mut rest)?)?;
        let payload_len = match prelude.kind() {
            PacketKind::Ram => {
                let len = layout.ram_header_len() - PRELUDE_LEN;
                let (bytes, after) = rest.split_at_checked(len).ok_or("cut in a header")?;
                header.parse(prelude, bytes, layout)?;
                rest = after;
                print_packet(&header);
                header.payload_len()
            }
            PacketKind::DeviceState => {
                const LEN: usize = DEVICE_STATE_HEADER_LEN - PRELUDE_LEN;
                let header = DeviceStateHeader::parse(prelude, take::<LEN>(&mut rest)?)?;
                println!("device state: {header:?}");
                header.payload_len()
            }
        };
        rest = rest.get(payload_len..).ok_or("cut in a payload")?;
    }
    Ok(())
}

fn print_packet(header: &RamHeader) {
    println!(
        "packet {}: {} normal and {} zero pages of `{}`, {} bytes by method {}{}",
        header.packet_num,
        header.normal_offsets().len(),
        header.zero_offsets().len(),
        header.block,
        header.payload_len(),
        header.method,
        if header.sync { ", SYNC" } else { "" },
    );
}

/// Takes the next `LEN` bytes.
fn take<'a, const LEN: usize>(rest: &mut &'a [u8]) -> Result<&'a [u8; LEN], &'static str> {
    let (bytes, after) = rest.split_first_chunk().ok_or("cut in a header")?;
    *rest = after;
    Ok(bytes)
}
