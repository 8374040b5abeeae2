//! The documentation does not rot: links lead somewhere, the handbook has every page of docs/, commands are those of this program,
//! and quoted messages are in the sources. `docs/commands.rs` types the commands.
//!
//! What is read of Markdown is what these files use: fences, code spans, headings with `#`, inline links and tables.

mod commands;
mod guest;
mod hosts;

use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

/// Pages beside the handbook; it does not have them, so its own pages link to them by [`TREE`].
const BESIDE: [&str; 5] = [
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    "CHANGELOG.md",
];

/// Where a file of this repository is on the web.
const TREE: &str = "https://github.com/vamoose/vamoose/blob/main/";

/// Every Markdown file for users, by its path in the repository.
static PAGES: LazyLock<BTreeMap<PathBuf, String>> = LazyLock::new(|| {
    let mut paths: Vec<PathBuf> = BESIDE.iter().map(PathBuf::from).collect();
    find(Path::new("docs"), "md", &mut paths);
    let read = |path: PathBuf| (path.clone(), read(&path));
    paths.into_iter().map(read).collect()
});

#[test]
fn links_lead_somewhere() {
    let mut count = 0;
    let mut dead = Vec::new();
    for (page, text) in &*PAGES {
        for link in links(text) {
            count += 1;
            if let Err(why) = follow(page, link) {
                dead.push(format!("{}: {link}: {why}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
    assert!(count > 100, "only {count} links were found");
}

#[test]
fn the_summary_has_every_page() {
    let summary = Path::new("docs/SUMMARY.md");
    let mut listed: Vec<PathBuf> = links(&PAGES[summary])
        .map(|link| Path::new("docs").join(link))
        .collect();
    let mut pages: Vec<PathBuf> = PAGES.keys().cloned().collect();
    pages.retain(|page| page.starts_with("docs") && page != summary);
    listed.sort();
    assert_eq!(listed, pages);
}

/// Options that are required, and those that exclude each other, are not looked at: `--help` comes before.
#[test]
fn commands_are_those_of_this_program() {
    let mut count = 0;
    let mut wrong = Vec::new();
    for (page, text) in &*PAGES {
        let blocks = fences(text).into_iter();
        let scripts = blocks.filter(|block| ["sh", "console"].contains(&block.language.as_str()));
        for line in scripts.flat_map(|block| command_lines(&block.text)) {
            for command in commands(&line) {
                count += 1;
                if let Err(why) = try_out(command) {
                    wrong.push(format!("{}: {}: {why}", page.display(), command.join(" ")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 20, "only {count} commands were found");
}

/// Those in columns that are headed `message`, with … where the program puts a value.
#[test]
fn quoted_messages_are_in_the_sources() {
    let mut sources = Vec::new();
    find(Path::new("crates"), "rs", &mut sources);
    sources.retain(|path| path.iter().any(|part| part == "src"));
    let sources: String = sources.iter().map(|path| literals(&read(path))).collect();
    let mut count = 0;
    let mut unknown = Vec::new();
    for (page, text) in &*PAGES {
        for message in messages(text) {
            count += 1;
            if !sources.contains(message.trim_matches('…')) {
                unknown.push(format!("{}: {message}", page.display()));
            }
        }
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
    assert!(count > 50, "only {count} messages were found");
}

/// Whether there is what `link` on `page` leads to.
fn follow(page: &Path, link: &str) -> Result<(), String> {
    if let Some(path) = link.strip_prefix(TREE) {
        let path = path.split('#').next().unwrap_or(path);
        return is_there(Path::new(path));
    }
    if link.contains("://") {
        return Ok(());
    }
    let (file, anchor) = match link.split_once('#') {
        Some((file, anchor)) => (file, Some(anchor)),
        None => (link, None),
    };
    let target = match file {
        "" => page.to_owned(),
        file => resolved(&page.with_file_name(file)),
    };
    if page.starts_with("docs") && !target.starts_with("docs") {
        return Err(format!("the handbook does not have it, {TREE}... does"));
    }
    is_there(&target)?;
    let Some(anchor) = anchor else {
        return Ok(());
    };
    let text = PAGES.get(&target).ok_or("it is no page with headings")?;
    match anchors(text).iter().any(|heading| heading == anchor) {
        true => Ok(()),
        false => Err("there is no such heading".to_owned()),
    }
}

/// Whether the repository has the file or folder.
fn is_there(path: &Path) -> Result<(), String> {
    match root().join(path).exists() {
        true => Ok(()),
        false => Err("there is no such file".to_owned()),
    }
}

/// Lets the program parse the words of a command line, behind its name, and no more.
fn try_out(words: &[String]) -> Result<(), String> {
    let words: Vec<String> = words.iter().map(|word| filled_in(word)).collect();
    // What follows `--` is for another program.
    let own = words.iter().take_while(|word| *word != "--");
    let output = Command::new(env!("CARGO_BIN_EXE_vamoose"))
        .args(own.skip(1))
        .arg("--help")
        .output()
        .unwrap();
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// A word with a key in the place of what stands for one.
fn filled_in(word: &str) -> String {
    match word.starts_with(hosts::KEY) {
        true => "ed25519:Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=".to_owned(),
        false => word.to_owned(),
    }
}

/// The commands of `vamoose` in a line: words from the program's name on, behind `sudo`, `ssh HOST`, a prompt and the like.
fn commands(line: &[String]) -> impl Iterator<Item = &[String]> {
    let ends = |word: &String| ["|", "||", "&&", ";", "&", "..."].contains(&word.as_str());
    line.split(ends).filter_map(|words| {
        let is_name = |at: &usize| words[*at] == "vamoose";
        // There is also a user of that name.
        let is_user = |at: &usize| at.checked_sub(1).is_some_and(|at| words[at] == "-u");
        let begin = (0..words.len()).find(|at| is_name(at) && !is_user(at))?;
        words.get(begin..)
    })
}

/// The lines of a shell script, as words, without comments and quotes.
fn command_lines(script: &str) -> Vec<Vec<String>> {
    let script = script.replace("\\\n", " ");
    let lines = script.lines().map(|line| {
        let mut words = Vec::new();
        for word in line.split_whitespace() {
            if word.starts_with('#') {
                break;
            }
            let (word, end) = match word.strip_suffix(';') {
                Some(word) => (word, Some(";")),
                None => (word, None),
            };
            words.push(word.trim_matches(['\'', '"']).to_owned());
            words.extend(end.map(str::to_owned));
        }
        words
    });
    lines.collect()
}

/// A fenced block.
struct Fence {
    language: String,
    text: String,
}

fn fences(text: &str) -> Vec<Fence> {
    let mut blocks = Vec::new();
    let mut open: Option<Fence> = None;
    for line in text.lines() {
        let fence = line.trim_start().strip_prefix("```");
        open = match (open, fence) {
            (None, None) => None,
            (None, Some(language)) => Some(Fence {
                language: language.to_owned(),
                text: String::new(),
            }),
            (Some(block), Some(_)) => {
                blocks.push(block);
                None
            }
            (Some(mut block), None) => {
                block.text += line.trim_start();
                block.text.push('\n');
                Some(block)
            }
        };
    }
    assert!(open.is_none(), "a fence without an end");
    blocks
}

/// The lines that are in no fence.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_open = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_open ^= is_fence;
        !is_open && !is_fence
    })
}

/// The targets of links and images.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let plain = prose(text).flat_map(|line| spans(line).plain);
    let links = plain.flat_map(|part| part.split("](").skip(1));
    links.filter_map(|part| Some(part.split_once(')')?.0))
}

/// The parts of a line.
#[derive(Default)]
struct Spans<'a> {
    plain: Vec<&'a str>,
    code: Vec<&'a str>,
}

/// A code span is between as many backticks as it begins with. One that goes on in the next line has no link here.
fn spans(line: &str) -> Spans<'_> {
    let mut spans = Spans::default();
    let mut rest = line;
    while let Some(begin) = rest.find('`') {
        let (plain, code) = rest.split_at(begin);
        let inner = code.trim_start_matches('`');
        let mark = &code[..code.len() - inner.len()];
        spans.plain.push(plain);
        let (code, behind) = inner.split_once(mark).unwrap_or((inner, ""));
        spans.code.push(code.trim());
        rest = behind;
    }
    spans.plain.push(rest);
    spans
}

/// The anchors of headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> Vec<String> {
    let mut anchors = Vec::new();
    let mut seen = BTreeMap::new();
    for line in prose(text) {
        let heading = line.trim_start_matches('#');
        if line.len() == heading.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().chars().filter_map(|letter| match letter {
            ' ' => Some('-'),
            '-' | '_' => Some(letter),
            _ => letter.is_alphanumeric().then_some(letter),
        });
        let anchor = kept.collect::<String>().to_lowercase();
        let before = seen.entry(anchor.clone()).or_insert(0);
        anchors.push(match before {
            0 => anchor,
            _ => format!("{anchor}-{before}"),
        });
        *before += 1;
    }
    anchors
}

/// What is code in the columns of tables that are headed `message`.
fn messages(text: &str) -> Vec<&str> {
    let mut messages = Vec::new();
    let mut column = None;
    for line in prose(text) {
        let Some(row) = line.strip_prefix('|') else {
            column = None;
            continue;
        };
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let cell = column.and_then(|column: usize| cells.get(column));
        messages.extend(cell.into_iter().flat_map(|cell| spans(cell).code));
        column = column.or_else(|| cells.iter().position(|cell| *cell == "message"));
    }
    messages
}

/// A source's text with … for each value that is put into a literal, and literals in one piece.
fn literals(source: &str) -> String {
    let mut text = String::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let mut whole = line.to_owned();
        while let Some(begin) = whole.strip_suffix('\\') {
            whole = begin.to_owned() + lines.next().unwrap_or_default().trim_start();
        }
        // Between braces there is no message; `{{` does not occur in them.
        for (at, part) in whole.split('{').enumerate() {
            let rest = match (at, part.split_once('}')) {
                (0, _) | (_, None) => part,
                (_, Some((_, rest))) => {
                    text.push('…');
                    rest
                }
            };
            text += rest;
        }
        text.push('\n');
    }
    text
}

/// The path without `..`.
fn resolved(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

/// Adds the files below `folder` with that ending.
fn find(folder: &Path, ending: &str, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        let path = folder.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            find(&path, ending, files);
        } else if path.extension().is_some_and(|it| it == ending) {
            files.push(path);
        }
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
