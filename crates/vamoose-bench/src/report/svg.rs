//! A small writer of SVG.
//!
//! Why not a library for plots: `plotters` writes colours into each element and nothing else, so the page could not show the same
//! plot in light and dark, a mark could not say its figures to a screen reader or under the pointer, and its widths of texts come
//! from fonts of the host that measures. What the plots need of SVG are five elements with a class each; the colours are in one
//! style sheet ([`STYLE`]), which the page and a plot that stands alone share.

use std::fmt::{self, Write as _};

/// A drawing.
#[derive(Clone)]
pub(crate) struct Svg {
    width: f64,
    height: f64,
    title: String,
    /// What to know about it, beneath the plot.
    note: String,
    /// What it shows, for those who do not see it.
    told: String,
    body: String,
}

/// Where a text stands beside its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// The shape of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Circle,
    Square,
    Diamond,
    Triangle,
    Down,
    Cross,
}

/// Colours of the plots, light and dark. `c0` to `c5` are the series.
pub(crate) const STYLE: &str = "\
:root{--ground:#fff;--ink:#1b1f24;--soft:#57606a;--grid:#e1e4e8;--shade:#d1242f22;--mark:#b42318;\
--c0:#57606a;--c1:#a15c00;--c2:#0550ae;--c3:#0d7a45;--c4:#8250df;--c5:#6e7781}\
@media(prefers-color-scheme:dark){:root{--ground:#0f1318;--ink:#e6edf3;--soft:#9aa4af;--grid:#2b323b;--shade:#ff7b7238;--mark:#ff8f85;\
--c0:#aab4bf;--c1:#e3a13b;--c2:#6cb0ff;--c3:#4cc884;--c4:#c29bff;--c5:#8b949e}}\
@media print{:root{--ground:#fff;--ink:#000;--soft:#444;--grid:#ddd;--shade:#d1242f22;--mark:#b42318;\
--c0:#57606a;--c1:#a15c00;--c2:#0550ae;--c3:#0d7a45;--c4:#8250df;--c5:#6e7781}}\
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .soft{fill:var(--soft)}svg .strong{font-weight:600}\
svg .grid{stroke:var(--grid);fill:none}svg .axis{stroke:var(--soft);fill:none}svg .shade{fill:var(--shade)}\
svg .whisker{stroke:var(--ink);stroke-width:1.5;fill:none}svg .front{stroke:var(--soft);stroke-dasharray:4 3;fill:none}\
svg .round{stroke:var(--soft);stroke-dasharray:1 3;fill:none}svg .edge{stroke:var(--mark);fill:none}\
svg .c0{fill:var(--c0)}svg .c1{fill:var(--c1)}svg .c2{fill:var(--c2)}svg .c3{fill:var(--c3)}svg .c4{fill:var(--c4)}svg .c5{fill:var(--c5)}\
svg .l0,svg .l1,svg .l2,svg .l3,svg .l4,svg .l5{fill:none;stroke-width:1.75;stroke-linejoin:round}\
svg .l0{stroke:var(--c0)}svg .l1{stroke:var(--c1)}svg .l2{stroke:var(--c2)}svg .l3{stroke:var(--c3)}svg .l4{stroke:var(--c4)}\
svg .l5{stroke:var(--c5)}";

impl Svg {
    pub(crate) fn new(width: f64, height: f64, title: &str, note: &str) -> Self {
        Self {
            width,
            height,
            title: title.to_owned(),
            note: note.to_owned(),
            told: String::new(),
            body: String::new(),
        }
    }

    pub(crate) fn title(&self) -> &str {
        &self.title
    }

    pub(crate) fn note(&self) -> &str {
        &self.note
    }

    /// Adds what the plot shows, in words.
    pub(crate) fn tell(&mut self, told: &str) {
        told.clone_into(&mut self.told);
    }

    /// `tip` is what the mark says under the pointer, here and below.
    pub(crate) fn rect(&mut self, class: &str, at: (f64, f64), size: (f64, f64), tip: &str) {
        let [x, y, width, height] = [at.0, at.1, size.0.max(0.0), size.1.max(0.0)].map(Number);
        let attributes = format!("x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"");
        self.element("rect", class, &attributes, tip);
    }

    pub(crate) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(Number);
        let attributes = format!("x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"");
        self.element("line", class, &attributes, "");
    }

    pub(crate) fn polyline(&mut self, class: &str, points: &[(f64, f64)], tip: &str) {
        let points = points
            .iter()
            .map(|(x, y)| format!("{},{}", Number(*x), Number(*y)));
        let points = points.collect::<Vec<_>>().join(" ");
        self.element("polyline", class, &format!("points=\"{points}\""), tip);
    }

    pub(crate) fn point(&mut self, class: &str, shape: Shape, at: (f64, f64), tip: &str) {
        const R: f64 = 5.0;
        if shape == Shape::Circle {
            let [x, y, r] = [at.0, at.1, R].map(Number);
            return self.element(
                "circle",
                class,
                &format!("cx=\"{x}\" cy=\"{y}\" r=\"{r}\""),
                tip,
            );
        }
        let corners: &[(f64, f64)] = match shape {
            Shape::Circle => &[],
            Shape::Square => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            Shape::Diamond => &[(0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0)],
            Shape::Triangle => &[(0.0, -1.2), (1.15, 0.9), (-1.15, 0.9)],
            Shape::Down => &[(0.0, 1.2), (1.15, -0.9), (-1.15, -0.9)],
            Shape::Cross => &[
                (-1.2, -0.4),
                (-0.4, -0.4),
                (-0.4, -1.2),
                (0.4, -1.2),
                (0.4, -0.4),
                (1.2, -0.4),
                (1.2, 0.4),
                (0.4, 0.4),
                (0.4, 1.2),
                (-0.4, 1.2),
                (-0.4, 0.4),
                (-1.2, 0.4),
            ],
        };
        let points = corners
            .iter()
            .map(|(x, y)| format!("{},{}", Number(at.0 + x * R), Number(at.1 + y * R)));
        let points = points.collect::<Vec<_>>().join(" ");
        self.element("polygon", class, &format!("points=\"{points}\""), tip);
    }

    pub(crate) fn text(&mut self, class: &str, anchor: Anchor, at: (f64, f64), text: &str) {
        let [x, y] = [at.0, at.1].map(Number);
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        // Cannot fail: it is written into memory, here and below.
        let _ = write!(
            self.body,
            "<text class=\"{class}\" x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{}</text>",
            Escaped(text)
        );
    }

    /// As a part of a page, in which `id` is its own.
    pub(crate) fn inline(&self, id: &str) -> String {
        self.render(id, "")
    }

    /// As a file.
    pub(crate) fn standalone(&self) -> String {
        let style = format!("<style>{STYLE}svg{{background:var(--ground)}}</style>");
        self.render("plot", &style)
    }

    fn render(&self, id: &str, style: &str) -> String {
        let [width, height] = [self.width, self.height].map(Number);
        let (title, note, told) = (
            Escaped(&self.title),
            Escaped(&self.note),
            Escaped(&self.told),
        );
        let id = Escaped(id);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
             role=\"img\" aria-labelledby=\"{id}-title {id}-desc\"><title id=\"{id}-title\">{title}</title>\
             <desc id=\"{id}-desc\">{note} {told}</desc>{style}{}</svg>\n",
            self.body
        )
    }

    fn element(&mut self, name: &str, class: &str, attributes: &str, tip: &str) {
        let _ = write!(self.body, "<{name} class=\"{class}\" {attributes}");
        let _ = match tip {
            "" => write!(self.body, "/>"),
            tip => write!(self.body, "><title>{}</title></{name}>", Escaped(tip)),
        };
    }
}

/// How wide a text is at most, about: fonts differ.
pub(crate) fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 7.1
}

/// A text that may hold anything, for SVG and HTML.
pub(crate) struct Escaped<'a>(pub(crate) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|character| match character {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            '\n' | '\t' => f.write_char(' '),
            // Neither format has characters of control.
            character if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => {
                f.write_char(char::REPLACEMENT_CHARACTER)
            }
            character => f.write_char(character),
        })
    }
}

/// A coordinate, to a tenth of a unit. What is not finite has no place, and is at 0.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = if self.0.is_finite() { self.0 } else { 0.0 };
        let text = format!("{value:.1}");
        f.write_str(text.strip_suffix(".0").unwrap_or(&text))
    }
}
