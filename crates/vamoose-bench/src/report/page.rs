//! A page of HTML that needs nothing else: its style is in it, its plots are SVG, and it has no script. It is well-formed XML, too.

use std::fmt::Write as _;

use super::svg::{Escaped, STYLE, Svg};
use super::table::{Table, Tone};

/// A page, from top to bottom. All texts may hold anything.
pub(crate) struct Page {
    title: String,
    body: String,
    plots: usize,
}

const LAYOUT: &str = "\
:root{color-scheme:light dark;--panel:#f6f8fa;--bad:#fff1f0}\
@media(prefers-color-scheme:dark){:root{--panel:#171c23;--bad:#3a1614}}\
@media print{:root{color-scheme:light;--panel:#f6f8fa;--bad:#fff1f0}}\
*{box-sizing:border-box}\
body{margin:0 auto;max-width:100rem;padding:1rem clamp(.75rem,3vw,2.5rem) 3rem;background:var(--ground);color:var(--ink);\
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:break-word}\
h1{font-size:1.7rem;line-height:1.2;margin:1rem 0}h2{font-size:1.35rem;margin:2.5rem 0 .5rem;border-top:1px solid var(--grid);padding-top:1rem}\
h3{font-size:1.08rem;margin:1.75rem 0 .5rem}p,ul{max-width:75ch}a{color:var(--c2)}\
pre{background:var(--panel);border:1px solid var(--grid);border-radius:6px;padding:.6rem .8rem;white-space:pre-wrap;overflow-wrap:anywhere}\
.scroll{overflow-x:auto;margin:0 0 .75rem}.scroll:focus-visible{outline:2px solid var(--c2)}\
table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums}\
.caption{font-size:.86rem;color:var(--soft);margin:.75rem 0 .25rem}\
th,td{border-bottom:1px solid var(--grid);padding:.3rem .45rem;text-align:left;vertical-align:top}\
thead th{background:var(--panel);vertical-align:bottom;font-weight:600}\
tbody th{font-weight:400;white-space:nowrap;position:sticky;left:0;background:var(--ground);min-width:8rem}\
td{min-width:3rem}td:last-child{min-width:6rem}.spread{white-space:nowrap;color:var(--soft);font-size:.92em;font-weight:400}tr.default th,tr.default td{font-weight:600}tr.short td,tr.short th{background:var(--bad)}\
tr.short td:last-child{color:var(--mark);font-weight:600}\
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,27rem),1fr));gap:1rem;align-items:start;margin:1rem 0}\
figure{margin:0;border:1px solid var(--grid);border-radius:6px;padding:.75rem;min-width:0}\
figure svg{display:block;width:100%;height:auto;max-width:40rem;margin:auto}\
figcaption{font-size:.82rem;color:var(--soft);margin-top:.5rem}figcaption strong{color:var(--ink);display:block}\
summary{cursor:pointer;width:fit-content;color:var(--soft);font-size:.86rem}\
@media(max-width:40rem){tbody th{white-space:normal;min-width:6rem}}\
@page{size:A4 landscape;margin:12mm}\
@media print{body{max-width:none;padding:0;font-size:9.5pt}table{font-size:7.2pt}summary,.caption{font-size:8pt}th,td{padding:1.5pt 2.5pt;min-width:0!important}\
.scroll{overflow:visible}details::details-content{content-visibility:visible;block-size:auto}summary{list-style:none}tbody th{position:static;white-space:normal}figure,tr{break-inside:avoid}h2,h3,.caption{break-after:avoid}\
.plots{grid-template-columns:1fr 1fr}figure svg{max-width:11.5cm}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}";

impl Page {
    pub(crate) fn new(title: &str) -> Self {
        let mut page = Self {
            title: title.to_owned(),
            body: String::new(),
            plots: 0,
        };
        page.add(format_args!("<h1>{}</h1>", Escaped(title)));
        page
    }

    /// A heading, of `level` 2 or 3, to which a link may lead.
    pub(crate) fn heading(&mut self, level: u8, id: &str, text: &str) {
        let (id, text) = (Escaped(id), Escaped(text));
        self.add(format_args!("<h{level} id=\"{id}\">{text}</h{level}>"));
    }

    pub(crate) fn paragraph(&mut self, text: &str) {
        self.add(format_args!("<p>{}</p>", Escaped(text)));
    }

    pub(crate) fn strong(&mut self, text: &str) {
        self.add(format_args!("<p><strong>{}</strong></p>", Escaped(text)));
    }

    /// What was typed.
    pub(crate) fn command(&mut self, text: &str) {
        self.add(format_args!("<pre><code>{}</code></pre>", Escaped(text)));
    }

    /// Links to headings.
    pub(crate) fn contents(&mut self, links: impl IntoIterator<Item = (String, String)>) {
        let links = links.into_iter();
        let links = links.map(|(id, text)| {
            format!(
                "<li><a href=\"#{}\">{}</a></li>",
                Escaped(&id),
                Escaped(&text)
            )
        });
        let links: String = links.collect();
        self.add(format_args!(
            "<nav aria-label=\"Contents\"><ul>{links}</ul></nav>"
        ));
    }

    /// Names, and what they mean.
    pub(crate) fn list<'a>(&mut self, entries: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let entries = entries.into_iter();
        let entries = entries.map(|(name, text)| {
            format!(
                "<li><strong>{}</strong>: {}</li>",
                Escaped(name),
                Escaped(text)
            )
        });
        let entries: String = entries.collect();
        self.add(format_args!("<ul>{entries}</ul>"));
    }

    /// A table that can be moved sideways where it is too wide.
    pub(crate) fn table(&mut self, caption: &str, table: &Table) {
        let mut text = String::new();
        for name in &table.columns {
            let _ = write!(text, "<th scope=\"col\">{}</th>", Escaped(name));
        }
        text += "</tr></thead><tbody>";
        for line in &table.rows {
            text += match line.tone {
                Tone::Plain => "<tr>",
                Tone::Default => "<tr class=\"default\">",
                Tone::Short => "<tr class=\"short\">",
            };
            for (at, cell) in line.cells.iter().enumerate() {
                let name = if at == 0 { "th scope=\"row\"" } else { "td" };
                let _ = write!(text, "<{name}>{}</{}>", with_spread(cell), &name[..2]);
            }
            text += "</tr>";
        }
        let caption = Escaped(caption);
        self.add(format_args!(
            "<p class=\"caption\">{caption}</p><div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{caption}\">\
             <table><thead><tr>{text}</tbody></table></div>"
        ));
    }

    /// The same, which is seen when it is opened, and in print.
    pub(crate) fn folded_table(&mut self, summary: &str, caption: &str, table: &Table) {
        self.add(format_args!(
            "<details><summary>{}</summary>",
            Escaped(summary)
        ));
        self.table(caption, table);
        self.add(format_args!("</details>"));
    }

    /// Plots, as many beside each other as there is room for.
    pub(crate) fn plots<'a>(&mut self, plots: impl IntoIterator<Item = &'a Svg>) {
        let mut text = String::new();
        for svg in plots {
            self.plots += 1;
            let _ = writeln!(
                text,
                "<figure>{}<figcaption><strong>{}</strong>{}</figcaption></figure>",
                svg.inline(&format!("plot{}", self.plots)),
                Escaped(svg.title()),
                Escaped(svg.note())
            );
        }
        if !text.is_empty() {
            self.add(format_args!("<div class=\"plots\">{text}</div>"));
        }
    }

    pub(crate) fn finish(self) -> String {
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\"><head><meta charset=\"utf-8\"/>\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><title>{}</title>\
             <style>{STYLE}{LAYOUT}</style></head>\n<body><main>\n{}</main></body></html>\n",
            Escaped(&self.title),
            self.body
        )
    }

    fn add(&mut self, text: std::fmt::Arguments<'_>) {
        // Cannot fail: it is written into memory.
        let _ = writeln!(self.body, "{text}");
    }
}

/// A spread in brackets stays together, and behind its median.
fn with_spread(cell: &str) -> String {
    let spread = |(before, bracket): (&'_ str, &'_ str)| {
        let (spread, behind) = bracket.split_once(')')?;
        spread.contains('–').then(|| {
            let [before, spread, behind] = [before, spread, behind].map(Escaped);
            format!("{before} <span class=\"spread\">({spread})</span>{behind}")
        })
    };
    let parts = cell.split_once(" (").and_then(spread);
    parts.unwrap_or_else(|| Escaped(cell).to_string())
}
