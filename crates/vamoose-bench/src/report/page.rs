//! A page of HTML, made of Markdown and of plots. It needs no other file, and has no script.

use std::collections::HashMap;

use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd, html};

use super::markdown::Plot;

const STYLE: &str = "\
body{margin:0 auto;max-width:100rem;padding:1rem 2rem;font:1rem/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff}
h2{border-top:1px solid #e1e4e8;padding-top:1rem}p,ul{max-width:75ch}
pre{background:#f6f8fa;border:1px solid #e1e4e8;padding:.6rem .8rem;white-space:pre-wrap}
table{display:block;overflow-x:auto;border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid #e1e4e8;padding:.3rem .45rem;text-align:left;vertical-align:top}
th{background:#f6f8fa}td:last-child strong{color:#b42318}svg{max-width:100%;height:auto}
@page{size:A4 landscape;margin:12mm}
@media print{body{max-width:none;padding:0;font-size:9.5pt}table{font-size:7.2pt}tr,svg{break-inside:avoid}h2,h3{break-after:avoid}}";

/// Renders `markdown`; a plot replaces the image that links to its file.
pub(crate) fn of(title: &str, markdown: &str, plots: &[Plot]) -> String {
    let plots: HashMap<String, &Plot> = plots.iter().map(|plot| (plot.path(), plot)).collect();
    let mut is_alternative_text = false;
    let events =
        Parser::new_ext(markdown, Options::ENABLE_TABLES).filter_map(|event| match event {
            Event::Start(Tag::Image { dest_url, .. }) => {
                is_alternative_text = true;
                let plot = plots.get(dest_url.as_ref())?;
                Some(Event::InlineHtml(CowStr::from(inline(plot))))
            }
            Event::End(TagEnd::Image) => {
                is_alternative_text = false;
                None
            }
            _ if is_alternative_text => None,
            event => Some(event),
        });
    let mut body = String::new();
    html::push_html(&mut body, events);
    let title = escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\"><head><meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><title>{title}</title>\
         <style>\n{STYLE}\n</style></head>\n<body>\n{body}</body></html>\n"
    )
}

fn inline(plot: &Plot) -> String {
    let label = format!("<svg role=\"img\" aria-label=\"{}\" ", escaped(&plot.title));
    plot.svg.replacen("<svg ", &label, 1)
}

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    html::push_html(&mut escaped, [Event::Text(CowStr::from(text))].into_iter());
    escaped.replace('"', "&quot;")
}
