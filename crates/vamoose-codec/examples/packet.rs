//! Encodes a packet of guest pages by every method, decodes it again and prints the sizes.
//!
//! ```sh
//! cargo run -p vamoose-codec --example packet
//! ```

use std::error::Error;

use multifd::{Layout, Method};
use vamoose_codec::{Decoder, Settings, encoder, info};

fn main() -> Result<(), Box<dyn Error>> {
    let layout = Layout::X86;
    // A full packet of pages that look like text.
    let words = "every page of the guest arrives as it was sent ".bytes();
    let pages: Vec<u8> = words.cycle().take(layout.packet_bytes()).collect();
    let mut received = vec![0; pages.len()];
    let mut out = vec![0; layout.max_payload()];
    // A decoder takes the packets of its channel, whatever their method.
    let mut decoder = Decoder::new(layout);
    for method in Method::ALL {
        if info(method).is_none() {
            continue;
        }
        let settings = Settings::new(method, None)?;
        let mut encoder = encoder(&settings, layout)?;
        let encoded = encoder.encode(&pages, &mut out)?;
        decoder.decode(encoded.method, encoded.payload, &mut received)?;
        assert!(received == pages, "{method}");
        println!(
            "{method:12} {:8} -> {:7} bytes by {}",
            pages.len(),
            encoded.payload.len(),
            settings.engine(),
        );
    }
    Ok(())
}
