//! `report.html`, to be looked at, printed, or sent to others.

use super::page::Page;
use super::plots::Plots;
use super::results::{Results, Section};
use super::table::Table;
use super::{about, machine, table, verdict};

pub(super) fn of(results: &Results, plots: &Plots) -> String {
    let mut page = Page::new(about::TITLE);
    page.command(&results.machine.command);
    page.table("The machine", &machine(&results.machine));
    for line in verdict::summary(results) {
        page.strong(&line);
    }
    if let Some(overview) = verdict::overview(results) {
        page.table(about::OVERVIEW, &overview);
    }
    page.paragraph(&about::HOW.replace('`', ""));
    let link = |(at, section): (usize, &Section)| (id(at), section.name.clone());
    page.contents(results.scenarios.iter().enumerate().map(link));
    for (at, section) in results.scenarios.iter().enumerate() {
        of_section(&mut page, at, section, plots);
    }
    page.heading(2, "columns", about::COLUMNS);
    page.list(table::meanings(&results.groups()));
    page.finish()
}

fn of_section(page: &mut Page, at: usize, section: &Section, plots: &Plots) {
    page.heading(2, &id(at), &section.name);
    if let Some(about) = &section.about {
        page.paragraph(about);
    }
    for (number, group) in section.groups.iter().enumerate() {
        page.heading(3, &format!("{}-{number}", id(at)), &group.same.title());
        if let Some(verdicts) = verdict::table(group) {
            page.table(about::VERDICTS, &verdicts);
        }
        page.table(about::CELLS, &Table::first(group));
        page.folded_table(about::OTHERS, about::CELLS, &Table::second(group));
        let plots = plots.get(&(section.name.clone(), group.same));
        page.plots(plots.into_iter().flatten().map(|plot| &plot.svg));
    }
    if let Some(published) = &section.published {
        page.heading(3, &format!("{}-published", id(at)), about::PUBLISHED);
        page.paragraph(&published.about);
        page.table(about::PUBLISHED, &published.into());
    }
}

/// Of a scenario's heading.
fn id(at: usize) -> String {
    format!("scenario{at}")
}
