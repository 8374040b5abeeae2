//! Makes the folder of cases.
//!
//! ```sh
//! cargo run -p multifd-conformance --example multifd-cases -- generate
//! cargo run -p multifd-conformance --example multifd-cases -- record encode/zlib-mixed-pages NAME DRIVER ARGUMENTS...
//! ```

mod cases;

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use multifd_conformance::{
    Bytes, Case, Driver, Expect, Memory, PAGE, Page, Reply, Request, Role, Task, decode,
};

#[derive(Parser)]
enum Options {
    /// Write all cases that are made from descriptions, and remove those that are no more.
    Generate,
    /// Write what an encoder sends for a case as a case for decoders.
    Record {
        /// A case of the kind `encode`.
        case: String,
        /// What is recorded: the name of the new case.
        name: String,
        /// The driver, and its arguments.
        #[arg(required = true, trailing_var_arg = true)]
        driver: Vec<OsString>,
    },
}

fn main() -> Result<()> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cases");
    match Options::parse() {
        Options::Generate => generate(&folder),
        Options::Record { case, name, driver } => {
            record(&folder, &case, &name, &Driver::of(driver)?)
        }
    }
}

fn generate(folder: &Path) -> Result<()> {
    let cases = cases::all();
    let names: BTreeSet<_> = cases.iter().map(|case| &case.name).collect();
    ensure!(names.len() == cases.len(), "two cases have the same name");
    for case in Case::load_all(folder)? {
        if case.kind() != cases::RECORDED && !names.contains(&case.name) {
            fs::remove_file(folder.join(format!("{}.json", case.name)))?;
        }
    }
    cases.iter().try_for_each(|case| save(case, folder))
}

fn record(folder: &Path, case: &str, name: &str, driver: &Driver) -> Result<()> {
    let found = Case::load_all(folder)?
        .into_iter()
        .find(|it| it.name == case);
    let mut case = found.with_context(|| format!("no case {case}"))?;
    let reply = driver.ask(&Request::of(&case)?, &case.blocks)?;
    let Reply::Encoded(streams) = reply else {
        bail!("{reply:?}");
    };
    let memory = decode(Role::Decoder, &case.method, &case.blocks, &streams)?;
    let expect = Expect::Accepted(pages(&case, &memory));
    let channels = streams
        .into_iter()
        .map(|stream| vec![Bytes(stream)])
        .collect();
    case.rule = format!("What {name} has sent is understood.");
    case.name = format!("{}/{name}", cases::RECORDED);
    case.task = Task::Decode { channels, expect };
    save(&case, folder)
}

/// The pages of `memory` that are not zero.
fn pages(case: &Case, memory: &Memory) -> Vec<Page> {
    let blocks = case.blocks.iter().zip(memory);
    let pages = blocks.flat_map(|(block, bytes)| {
        let pages = bytes.chunks_exact(PAGE).enumerate();
        pages.map(|(page, bytes)| Page {
            block: block.name.clone(),
            page,
            bytes: Bytes(bytes.to_vec()),
        })
    });
    pages
        .filter(|page| page.bytes.0.iter().any(|byte| *byte != 0))
        .collect()
}

fn save(case: &Case, folder: &Path) -> Result<()> {
    let path = folder.join(format!("{}.json", case.name));
    fs::create_dir_all(folder.join(case.kind()))?;
    let text = serde_json::to_string_pretty(case)? + "\n";
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}
