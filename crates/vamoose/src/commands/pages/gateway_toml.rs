//! gateway.toml(5), from the table in docs/gateway.md.

use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

const HANDBOOK: &str = include_str!("../../../../../docs/gateway.md");

/// The page. Keys below a table's are indented.
pub(super) fn page() -> String {
    let version = concat!("vamoose ", env!("CARGO_PKG_VERSION"));
    let mut page = Roff::new();
    page.control("TH", ["gateway.toml", "5", "", version, ""])
        .control("SH", ["NAME"])
        .text([roman("gateway.toml - configuration of vamoose gateway")])
        .control("SH", ["SYNOPSIS"])
        .text([roman("/etc/vamoose/gateway.toml")])
        .control("SH", ["DESCRIPTION"])
        .text([
            roman("What "),
            bold("vamoose-gateway"),
            roman("(8) is started with, and reads again at SIGHUP, as TOML. "),
            bold("vamoose gateway --check"),
            roman(" says what is wrong in it."),
        ])
        .control("SH", ["KEYS"]);
    let mut is_in_table = false;
    for (key, default, meaning) in rows() {
        let is_table = key.contains(".NAME");
        if is_table && is_in_table {
            page.control("RE", []);
        }
        page.control("TP", []);
        page.text(inlines(key, true));
        let mut text = inlines(meaning, false);
        if !default.is_empty() {
            text.push(roman("; default: "));
            text.extend(inlines(default, false));
        }
        page.text(text);
        if is_table {
            page.control("RS", []);
            is_in_table = true;
        }
    }
    if is_in_table {
        page.control("RE", []);
    }
    page.control("SH", ["SEE ALSO"])
        .text([bold("vamoose-gateway"), roman("(8)")]);
    page.render()
}

/// Key, default and meaning.
fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let section = HANDBOOK.split("\n## Configuration\n").nth(1);
    let lines = section.unwrap_or_default().lines();
    let table = lines
        .skip_while(|line| !line.starts_with("|---"))
        .skip(1)
        .take_while(|line| line.starts_with('|'));
    table.filter_map(|line| {
        let mut cells = line.split('|').skip(1).map(str::trim);
        Some((cells.next()?, cells.next()?, cells.next()?))
    })
}

/// Code is bold in a key and italic elsewhere; of a link its text is left.
fn inlines(markdown: &str, is_key: bool) -> Vec<Inline> {
    let code: fn(String) -> Inline = if is_key { bold } else { italic };
    let parts = markdown.split('`').enumerate();
    parts
        .filter(|(_, part)| !part.is_empty())
        .map(|(at, part)| match at % 2 {
            0 => roman(without_links(part)),
            _ => code(part.to_owned()),
        })
        .collect()
}

fn without_links(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once('[') {
        let Some((name, (_, after))) = link
            .split_once("](")
            .and_then(|(name, target)| Some((name, target.split_once(')')?)))
        else {
            break;
        };
        text += before;
        text += name;
        rest = after;
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_every_key_of_the_handbook() {
        let page = page();
        let keys: Vec<_> = rows().map(|(key, ..)| key).collect();
        assert!(keys.contains(&"`listen`") && keys.contains(&"`streams.NAME`"));
        for key in keys {
            for name in key.split('`').skip(1).step_by(2) {
                let name = name.replace('-', "\\-");
                assert!(page.contains(&format!("\\fB{name}")), "{name}:\n{page}");
            }
        }
        assert!(!page.contains('`') && !page.contains(".md"), "{page}");
    }

    #[test]
    fn links_are_their_texts() {
        assert_eq!(without_links("a [b](c.md), [d](e)."), "a b, d.");
        assert_eq!(without_links("a [b"), "a [b");
    }
}
