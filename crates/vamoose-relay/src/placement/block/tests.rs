use proptest::{collection::vec, prelude::*};

use super::*;

const PAGES: usize = 16;
const PAGE: usize = 4096;
/// The block is not at the beginning of its file.
const START: u64 = PAGE as u64;

/// A block of a file that holds `content`.
pub(crate) fn block(content: &[u8]) -> Block {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    let file = file.as_file().try_clone().unwrap();
    file.set_len(START + content.len() as u64).unwrap();
    for (page, content) in content.chunks(PAGE).enumerate() {
        if content.iter().any(|byte| *byte != 0) {
            file.write_all_at(content, START + (page * PAGE) as u64)
                .unwrap();
        }
    }
    let name = BlockName::new(b"mem").unwrap();
    let len = content.len();
    Block::open(name, file, START, len, Layout::X86).unwrap()
}

/// What the file holds.
pub(crate) fn content(block: &Block) -> Vec<u8> {
    let mut content = vec![0; block.len];
    block.file.read_exact_at(&mut content, START).unwrap();
    content
}

fn allocated(block: &Block) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&block.file.metadata().unwrap()) * 512
}

fn write(block: &Block, offsets: &[u64], byte: u8) {
    let pages = vec![byte; offsets.len() * PAGE];
    block.write(offsets, &pages).unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Write(Vec<u64>, u8),
    Clear(Vec<u64>),
}

fn step() -> impl Strategy<Value = Step> {
    let offset = (0..PAGES as u64).prop_map(|page| page * PAGE as u64);
    let offsets = || vec(offset.clone(), 1..PAGES);
    prop_oneof![
        (offsets(), any::<u8>()).prop_map(|(offsets, byte)| Step::Write(offsets, byte)),
        offsets().prop_map(Step::Clear),
    ]
}

proptest! {
    #[test]
    fn file_has_the_written_pages(
        before in prop_oneof![vec(0..3_u8, PAGES), Just(vec![0; PAGES])],
        is_fresh: bool,
        steps in vec(step(), 1..20),
    ) {
        let mut model: Vec<u8> = before.iter().flat_map(|byte| [*byte; PAGE]).collect();
        let is_fresh = is_fresh && before.iter().all(|byte| *byte == 0);
        let block = block(&model).fresh(is_fresh);
        for step in steps {
            let (offsets, byte) = match &step {
                Step::Write(offsets, byte) => {
                    write(&block, offsets, *byte);
                    (offsets, *byte)
                }
                Step::Clear(offsets) => {
                    block.clear(offsets, false).unwrap();
                    (offsets, 0)
                }
            };
            for offset in offsets {
                let start = usize::try_from(*offset).unwrap();
                model[start..start + PAGE].fill(byte);
            }
            prop_assert_eq!(&content(&block), &model);
        }
    }
}

#[test]
fn clearing_unwritten_pages_allocates_nothing() {
    let block = block(&[0; 4 * PAGE]);
    block.clear(&[0, 0x1000, 0x3000], false).unwrap();
    assert_eq!(allocated(&block), 0);
    write(&block, &[0x1000], 7);
    assert_eq!(allocated(&block), PAGE as u64);
}

#[test]
fn single_nonzero_byte_is_cleared() {
    let mut before = vec![0; 2 * PAGE];
    before[2 * PAGE - 1] = 1;
    let block = block(&before);
    block.clear(&[0x1000], false).unwrap();
    assert!(content(&block).iter().all(|byte| *byte == 0));
}

#[test]
fn pages_others_may_have_written_are_read() {
    let block = block(&[1; PAGE]).fresh(true);
    block.clear(&[0], false).unwrap();
    assert_eq!(content(&block)[0], 1);
    block.clear(&[0], true).unwrap();
    assert_eq!(content(&block)[0], 0);
}

#[test]
fn page_outside_the_block_is_refused() {
    let block = block(&[0; 2 * PAGE]);
    for offset in [0x2000, u64::MAX - 0xfff, 1 << 63] {
        for result in [
            block.write(&[0x1000, offset], &[1; 2 * PAGE]),
            block.clear(&[offset], false),
        ] {
            assert!(
                matches!(result, Err(PlaceError::Offset { .. })),
                "{result:?}"
            );
        }
    }
}
