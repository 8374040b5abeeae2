//! Real data for benchmarks, named by `VAMOOSE_CORPUS`; see `methods.rs`.

use std::{env, fs, path::Path};

use multifd::Layout;

pub(crate) const LAYOUT: Layout = Layout::X86;

/// Full packets, from all over the files of a directory.
pub(crate) struct Corpus {
    pub(crate) name: String,
    pub(crate) packets: Vec<Vec<u8>>,
}

/// At most `most` packets from each directory.
pub(crate) fn corpora(most: usize) -> Vec<Corpus> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let root = root.expect("the workspace");
    let Some(dirs) = env::var_os("VAMOOSE_CORPUS") else {
        return vec![Corpus::new(
            &root.join("testdata/vectors/ram.img.zst"),
            most,
        )];
    };
    env::split_paths(&dirs)
        .map(|dir| Corpus::new(&root.join(dir), most))
        .collect()
}

impl Corpus {
    /// Takes a file for a directory with nothing else in it.
    fn new(path: &Path, most: usize) -> Self {
        let mut files = vec![path.to_owned()];
        if !path.is_file() {
            let entries = fs::read_dir(path).expect("VAMOOSE_CORPUS are directories");
            files = entries
                .map(|entry| entry.expect("its entries can be read").path())
                .filter(|path| path.is_file())
                .collect();
        }
        files.sort();
        let mut bytes = Vec::new();
        for file in files {
            for page in read(&file).chunks_exact(LAYOUT.page_size()) {
                if page.iter().any(|byte| *byte != 0) {
                    bytes.extend_from_slice(page);
                }
            }
        }
        let all: Vec<_> = bytes.chunks_exact(LAYOUT.packet_bytes()).collect();
        assert!(!all.is_empty(), "not a full packet in {}", path.display());
        let packets = all.iter().step_by(all.len().div_ceil(most));
        let packets: Vec<_> = packets.map(|packet| packet.to_vec()).collect();
        let name = path.file_name().unwrap_or(path.as_os_str());
        let name = name.display().to_string();
        let (taken, of, path) = (packets.len(), all.len(), path.display());
        println!("corpus {name}: {taken} of the {of} packets in {path}");
        Self { name, packets }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.packets.iter().map(Vec::len).sum()
    }
}

fn read(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).expect("a file of the corpus");
    if path.extension().is_none_or(|extension| extension != "zst") {
        return bytes;
    }
    let len = zstd_safe::get_frame_content_size(&bytes).expect("a zstd file");
    let len = len.expect("a zstd file that knows its size");
    let mut plain = Vec::with_capacity(usize::try_from(len).expect("a file that fits"));
    zstd_safe::decompress(&mut plain, &bytes).expect("a whole zstd file");
    plain
}
