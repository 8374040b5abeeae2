//! gateway.toml(5), from the table in docs/gateway.md.

const HANDBOOK: &str = include_str!("../../../../../docs/gateway.md");

const INTRODUCTION: &str = "\
.SH NAME
gateway.toml \\- configuration of vamoose gateway
.SH SYNOPSIS
/etc/vamoose/gateway.toml
.SH DESCRIPTION
The configuration of \\fBvamoose\\-gateway\\fR(8), in TOML. The gateway reads it at its start and at SIGHUP.
\\fBvamoose gateway \\-\\-check\\fR reports errors in it.
.SH KEYS
";

/// The page. Keys below a table's are indented.
pub(super) fn page() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut page = format!(".TH gateway.toml 5 \"\" \"vamoose {version}\"\n{INTRODUCTION}");
    let mut end_of_table = "";
    for (key, default, meaning) in rows() {
        let is_table = key.contains(".NAME");
        if is_table {
            page += end_of_table;
        }
        let default = match default {
            "" => String::new(),
            default => format!("; default: {default}"),
        };
        let (key, text) = (
            roff(key, "\\fB"),
            roff(&format!("{meaning}{default}"), "\\fI"),
        );
        page += &format!(".TP\n{key}\n{text}\n");
        if is_table {
            page += ".RS\n";
            end_of_table = ".RE\n";
        }
    }
    page + end_of_table + ".SH SEE ALSO\n\\fBvamoose\\-gateway\\fR(8)\n"
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

/// Code is in `font`; of a link its text is left.
fn roff(markdown: &str, font: &str) -> String {
    let parts = markdown.split('`').enumerate();
    let parts = parts.map(|(at, part)| match at % 2 {
        0 => without_links(part).replace('-', "\\-"),
        _ => format!("{font}{}\\fR", part.replace('-', "\\-")),
    });
    parts.collect()
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
