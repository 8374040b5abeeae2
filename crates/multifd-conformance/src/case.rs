//! A case: a file of JSON in a folder named after its kind.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::{PAGE, notation};

/// One case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Case {
    /// `KIND/WHAT`: where the file is.
    #[serde(skip)]
    pub name: String,
    /// The rule that it checks.
    pub rule: String,
    /// The method that both ends are set to, by QEMU's name.
    pub method: String,
    /// The guest's memory.
    pub blocks: Vec<Block>,
    /// What is asked of the implementation.
    pub task: Task,
}

/// A RAM block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub len: usize,
}

/// What is asked of an implementation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// To decode what comes on these channels.
    Decode {
        /// Each in parts: the initial packet, then headers and payloads.
        channels: Vec<Vec<Bytes>>,
        /// What it makes of them.
        expect: Expect,
    },
    /// To send a guest.
    Encode {
        /// Over so many channels.
        channels: u8,
        /// Its memory in each round: the pages that are not zero.
        rounds: Vec<Vec<Page>>,
    },
}

/// What a decoder makes of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expect {
    /// Memory that was zero has become this: the pages that are not zero.
    Accepted(Vec<Page>),
    /// An error, without a crash.
    Refused,
}

/// A page of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// Its RAM block.
    pub block: String,
    /// Its number in the block.
    pub page: usize,
    /// Its content.
    pub bytes: Bytes,
}

/// Bytes, in files as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&notation::write(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        notation::read(&text).map(Self).map_err(D::Error::custom)
    }
}

/// The content of the RAM blocks, in their order.
pub type Memory = Vec<Vec<u8>>;

impl Case {
    /// The first part of its name.
    pub fn kind(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }

    /// Memory with these pages; all others are zero.
    ///
    /// # Errors
    /// When a page is not in the memory.
    pub fn memory(&self, pages: &[Page]) -> Result<Memory> {
        let mut memory: Memory = self.blocks.iter().map(|block| vec![0; block.len]).collect();
        for Page { block, page, bytes } in pages {
            let index = self.blocks.iter().position(|it| it.name == *block);
            let block =
                index.and_then(|index| memory[index].get_mut(page * PAGE..(page + 1) * PAGE));
            let block = block.with_context(|| format!("{}: no page {page}", self.name))?;
            ensure!(bytes.0.len() == PAGE, "{}: not a page", self.name);
            block.copy_from_slice(&bytes.0);
        }
        Ok(memory)
    }

    /// All cases of a folder, by name.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn load_all(folder: &Path) -> Result<Vec<Self>> {
        let mut cases = Vec::new();
        for kind in entries(folder)? {
            for name in entries(&folder.join(&kind))? {
                let path = folder.join(&kind).join(&name);
                let text = fs::read_to_string(&path);
                let text = text.with_context(|| format!("reading {}", path.display()))?;
                let case: Result<Self, _> = serde_json::from_str(&text);
                let mut case = case.with_context(|| format!("reading {}", path.display()))?;
                case.name = format!("{kind}/{}", name.trim_end_matches(".json"));
                cases.push(case);
            }
        }
        cases.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(cases)
    }
}

fn entries(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
