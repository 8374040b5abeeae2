//! Draws charts as SVG: bars, and curves over time.

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::results::Spread;
use super::table::short;

/// A horizontal bar: the median, and a line from the least to the most value.
pub(crate) struct Bar {
    pub(crate) name: String,
    /// Without a value, the migrations were cancelled.
    pub(crate) value: Option<Spread>,
    pub(crate) colour: RGBColor,
}

/// Curves over time. Panels are drawn below each other, over the same time.
pub(crate) struct Panel {
    /// Quantity on the vertical axis, with its unit.
    pub(crate) name: &'static str,
    pub(crate) curves: Vec<Curve>,
}

pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) colour: RGBColor,
    /// Seconds and values.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Marks in all panels, in seconds.
pub(crate) struct Marks {
    /// Least end of the time axis.
    pub(crate) until: f64,
    /// The guest was paused: shaded.
    pub(crate) paused: Option<(f64, f64)>,
    /// A round over memory began: grey lines.
    pub(crate) rounds: Vec<f64>,
    /// A connection was replaced: red lines.
    pub(crate) reconnects: Vec<f64>,
}

impl Panel {
    /// Whether a curve has a line that is not zero.
    pub(crate) fn shows_anything(&self) -> bool {
        let shows = |curve: &Curve| {
            curve.points.len() > 1 && curve.points.iter().any(|(_, value)| *value > 0.0)
        };
        self.curves.iter().any(shows)
    }
}

/// Colours of contenders, in the order of [`Who`](crate::scenario::Who), and of methods.
pub(crate) const COLOURS: [RGBColor; 6] = [
    RGBColor(87, 96, 106),
    RGBColor(161, 92, 0),
    RGBColor(5, 80, 174),
    RGBColor(13, 122, 69),
    RGBColor(130, 80, 223),
    RGBColor(207, 34, 46),
];
const SHADE: RGBColor = RGBColor(246, 210, 213);
const GRID: RGBColor = RGBColor(225, 228, 232);
const ROUND: RGBColor = RGBColor(170, 176, 184);
const RECONNECT: RGBColor = RGBColor(180, 35, 24);

const FONT: &str = "sans-serif";
/// Of plots between the tables of a report.
pub(crate) const IN_REPORT: u32 = 900;
/// Of plots that fill a page.
pub(crate) const IN_PAGE: u32 = 1340;
/// The least length of an axis: all values may be zero.
const LEAST: f64 = 1e-3;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the bars, the first one at the top. `unit` is what the axis shows.
pub(crate) fn bars(unit: &str, bars: &[Bar]) -> Result<String> {
    const BAR: usize = 20;
    const AXIS: u32 = 40;
    let longest = bars.iter().map(|bar| bar.name.chars().count()).max();
    let names = u32::try_from(longest.unwrap_or(0) * 7 + 8)?;
    let height = u32::try_from(bars.len() * BAR)? + AXIS + 16;
    let most = bars.iter().filter_map(|bar| bar.value);
    let most = most.map(|value| value.most).fold(LEAST, f64::max);
    drawn((IN_REPORT, height), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .x_label_area_size(AXIS)
            .y_label_area_size(names)
            .build_cartesian_2d(0.0..most * 1.15, bars.len() as f64..0.0)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_y_mesh().disable_y_axis();
        mesh.x_labels(6).x_desc(unit).max_light_lines(0);
        mesh.bold_line_style(GRID).label_style((FONT, 12)).draw()?;
        let name = (FONT, 12).into_text_style(area);
        let name = name.pos(Pos::new(HPos::Right, VPos::Center));
        let figure = name.pos(Pos::new(HPos::Left, VPos::Center));
        for (row, bar) in bars.iter().enumerate() {
            let (top, middle, bottom) = (row as f64 + 0.15, row as f64 + 0.5, row as f64 + 0.85);
            let text = |at: f64, gap: i32, text: String, style: &TextStyle<'static>| {
                EmptyElement::at((at, middle)) + Text::new(text, (gap, 0), style.clone())
            };
            let plot = chart.plotting_area();
            plot.draw(&text(0.0, -6, bar.name.clone(), &name))?;
            let Some(value) = bar.value else {
                plot.draw(&text(0.0, 6, "cancelled".to_owned(), &figure))?;
                continue;
            };
            let corners = [(0.0, top), (value.median, bottom)];
            plot.draw(&Rectangle::new(corners, bar.colour.filled()))?;
            let spread = vec![(value.least, middle), (value.most, middle)];
            plot.draw(&PathElement::new(spread, BLACK))?;
            plot.draw(&text(value.most, 5, short(value.median), &figure))?;
        }
        Ok(())
    })
}

/// Draws panels of curves below each other.
pub(crate) fn over_time(panels: &[Panel], marks: &Marks, width: u32) -> Result<String> {
    const PANEL: usize = 130;
    let curves = panels.iter().flat_map(|panel| &panel.curves);
    let times = curves.flat_map(|curve| curve.points.iter().map(|(time, _)| *time));
    let ends = times.clone().chain(marks.paused.map(|(_, end)| end));
    let range = times.fold(0.0, f64::min)..ends.fold(marks.until.max(LEAST), f64::max);
    let height = u32::try_from(panels.len() * PANEL)?;
    drawn((width, height), |area| {
        let areas = area.split_evenly((panels.len(), 1));
        areas
            .iter()
            .zip(panels)
            .try_for_each(|(area, panel)| draw_panel(area, panel, marks, range.clone()))
    })
}

fn draw_panel(
    area: &Area<'_>,
    panel: &Panel,
    marks: &Marks,
    time: std::ops::Range<f64>,
) -> Result<()> {
    let values = panel.curves.iter().flat_map(|curve| &curve.points);
    let top = values.map(|(_, value)| *value).fold(LEAST, f64::max) * 1.08;
    let mut chart = ChartBuilder::on(area)
        .margin(4)
        .margin_right(14)
        .caption(panel.name, (FONT, 13))
        .x_label_area_size(22)
        .y_label_area_size(60)
        .build_cartesian_2d(time, 0.0..top)?;
    if let Some((from, to)) = marks.paused {
        chart.draw_series([Rectangle::new([(from, 0.0), (to, top)], SHADE.filled())])?;
    }
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .x_labels(8)
        .y_labels(4)
        .max_light_lines(0);
    mesh.x_label_formatter(&|seconds| format!("{seconds} s"));
    mesh.bold_line_style(GRID).label_style((FONT, 11)).draw()?;
    let lines = [(&marks.rounds, ROUND), (&marks.reconnects, RECONNECT)];
    for (times, colour) in lines {
        chart.draw_series(
            times
                .iter()
                .map(|at| PathElement::new(vec![(*at, 0.0), (*at, top)], colour)),
        )?;
    }
    for curve in &panel.curves {
        let colour = curve.colour;
        let line = chart.draw_series(LineSeries::new(
            curve.points.iter().copied(),
            colour.stroke_width(2),
        ))?;
        if panel.curves.len() > 1 {
            line.label(&curve.name);
            line.legend(move |(x, y)| {
                PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2))
            });
        }
    }
    if panel.curves.len() > 1 {
        let mut labels = chart.configure_series_labels();
        labels
            .position(SeriesLabelPosition::UpperLeft)
            .label_font((FONT, 11));
        labels.background_style(WHITE.mix(0.8)).draw()?;
    }
    Ok(())
}

fn drawn(size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(svg)
}
