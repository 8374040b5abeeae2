//! Panels of lines over a logarithmic number of guests, as SVG.

use std::fmt::Write;

pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) lines: Vec<Line>,
}

pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) points: Vec<(usize, f64)>,
}

/// Size of a panel's area, and what is around it for text.
const WIDTH: f64 = 250.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 48.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 60.0;
const STYLES: [(&str, &str); 3] = [("#444444", ""), ("#0072b2", ""), ("#d55e00", "5 4")];

#[expect(clippy::cast_precision_loss, reason = "coordinates")]
pub(crate) fn svg(title: &str, panels: &[Panel]) -> String {
    let (step, height) = (WIDTH + LEFT + 16.0, TOP + HEIGHT + BOTTOM);
    let width = step * panels.len() as f64;
    // Writing to a string does not fail.
    let mut text = String::new();
    let _ = write!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"14\">{title}</text>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        draw(&mut text, panel, step * index as f64 + LEFT);
    }
    let names = panels.first().map_or(&[][..], |panel| &panel.lines);
    for (index, line) in names.iter().enumerate() {
        let (x, y) = (LEFT + 130.0 * index as f64, height - 14.0);
        let (colour, dashes) = STYLES[index % STYLES.len()];
        let _ = writeln!(
            text,
            "<path d=\"M{x} {y}h30\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            x + 36.0,
            y + 4.0,
            line.name
        );
    }
    text.push_str("</svg>\n");
    text
}

#[expect(clippy::cast_precision_loss, reason = "coordinates")]
fn draw(text: &mut String, panel: &Panel, left: f64) {
    let points = || panel.lines.iter().flat_map(|line| &line.points);
    let most = points().map(|point| point.1).fold(1.0, f64::max) * 1.05;
    let guests = points().map(|point| point.0).max().unwrap_or(1).max(2);
    let x = |count: usize| left + WIDTH * (count as f64).ln() / (guests as f64).ln();
    let y = |value: f64| TOP + HEIGHT * (1.0 - value / most);
    let _ = writeln!(
        text,
        "<text x=\"{left}\" y=\"{}\">{}</text>",
        TOP - 14.0,
        panel.title
    );
    for part in 0..=4 {
        let value = most * f64::from(part) / 4.0;
        let _ = writeln!(
            text,
            "<path d=\"M{left} {0:.1}h{WIDTH}\" stroke=\"#dddddd\"/><text x=\"{1:.1}\" y=\"{2:.1}\" \
             text-anchor=\"end\">{value:.0}</text>",
            y(value),
            left - 5.0,
            y(value) + 4.0
        );
    }
    for (count, _) in panel.lines.first().map_or(&[][..], |line| &line.points) {
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{count}</text>",
            x(*count),
            TOP + HEIGHT + 16.0
        );
    }
    for (line, (colour, dashes)) in panel.lines.iter().zip(STYLES.iter().cycle()) {
        let path: Vec<String> = line
            .points
            .iter()
            .map(|(count, value)| format!("{:.1},{:.1}", x(*count), y(*value)))
            .collect();
        let _ = writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
    }
}
