//! Axes, and curves over time.

use super::svg::{Anchor, Svg};
use super::table::short;

/// A panel of curves over time in seconds, one under the other with others that have the same axis of time.
pub(crate) struct Chart {
    /// What is on the upright axis, with its unit.
    pub(crate) name: &'static str,
    pub(crate) series: Vec<Series>,
    /// Factors of ten are equally far apart.
    pub(crate) is_logarithmic: bool,
}

/// A curve.
pub(crate) struct Series {
    pub(crate) name: String,
    /// Number of its colour.
    pub(crate) colour: usize,
    /// Seconds and values.
    pub(crate) points: Vec<(f64, f64)>,
}

/// What is marked in all panels, in seconds.
#[derive(Clone, Default)]
pub(crate) struct Marks {
    /// The axis reaches so far at least.
    pub(crate) until: f64,
    /// The guest did not run.
    pub(crate) paused: Option<(f64, f64)>,
    /// A round over memory began.
    pub(crate) rounds: Vec<f64>,
    /// Events, with names.
    pub(crate) events: Vec<(f64, String)>,
}

/// From values to places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    values: (f64, f64),
    places: (f64, f64),
    is_logarithmic: bool,
}

pub(super) const WIDTH: f64 = 480.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = WIDTH - 12.0;
const PANEL: f64 = 96.0;
/// Above each panel, for its name.
const HEAD: f64 = 26.0;
/// Points of a curve: more cannot be seen.
const POINTS: usize = 480;

/// Draws panels under each other.
pub(crate) fn over_time(title: &str, note: &str, charts: &[Chart], marks: &Marks) -> Svg {
    let count = charts.len() as f64;
    let mut svg = Svg::new(WIDTH, count * (PANEL + HEAD) + 40.0, title, note);
    let times = charts
        .iter()
        .flat_map(|chart| &chart.series)
        .flat_map(|series| &series.points);
    let times = times
        .map(|(time, _)| *time)
        .chain(marks.paused.map(|(_, to)| to));
    let time = Scale::over(times.chain([0.0, marks.until]), (LEFT, RIGHT));
    for (at, name) in &marks.events {
        let at = (time.place(*at) + 3.0, HEAD + 11.0);
        svg.text("soft", Anchor::Start, at, name);
    }
    let mut top = HEAD;
    for chart in charts {
        panel(&mut svg, chart, marks, time, top);
        top += PANEL + HEAD;
    }
    let bottom = top - HEAD;
    for tick in time.ticks(6) {
        svg.text(
            "soft",
            Anchor::Middle,
            (time.place(tick), bottom + 16.0),
            &label(tick),
        );
    }
    svg.text(
        "soft",
        Anchor::Middle,
        (f64::midpoint(LEFT, RIGHT), bottom + 32.0),
        "seconds since the migration began",
    );
    svg
}

fn panel(svg: &mut Svg, chart: &Chart, marks: &Marks, time: Scale, top: f64) {
    let bottom = top + PANEL;
    let values = chart.series.iter().flat_map(|series| &series.points);
    let values = values.map(|(_, value)| *value);
    let scale = if chart.is_logarithmic {
        Scale::logarithmic(values, (bottom, top))
    } else {
        Scale::over(values.chain([0.0]), (bottom, top)).with_room(1.08)
    };
    svg.text("strong", Anchor::Start, (4.0, top - 10.0), chart.name);
    legend(svg, chart, top - 10.0);
    for tick in scale.ticks(3) {
        let y = scale.place(tick);
        svg.line("grid", (LEFT, y), (RIGHT, y));
        svg.text("soft", Anchor::End, (LEFT - 6.0, y + 4.0), &label(tick));
    }
    if let Some((from, to)) = marks.paused {
        let (from, to) = (time.place(from), time.place(to));
        let tip = format!(
            "the guest is paused: {} ms",
            short((time.value(to) - time.value(from)) * 1e3)
        );
        svg.rect("shade", (from, top), ((to - from).max(1.5), PANEL), &tip);
        svg.line("edge", (from, top), (from, bottom));
    }
    for round in &marks.rounds {
        svg.line(
            "round",
            (time.place(*round), top),
            (time.place(*round), bottom),
        );
    }
    for (at, _) in &marks.events {
        svg.line("edge", (time.place(*at), top), (time.place(*at), bottom));
    }
    for series in &chart.series {
        let points = thinned(&series.points);
        let places: Vec<_> = points
            .iter()
            .map(|(at, value)| (time.place(*at), scale.place(*value)))
            .collect();
        svg.polyline(&format!("l{}", series.colour), &places, &series.name);
    }
    svg.line("axis", (LEFT, bottom), (RIGHT, bottom));
}

/// Names of the curves at the right above the panel, if there are several.
fn legend(svg: &mut Svg, chart: &Chart, y: f64) {
    if chart.series.len() < 2 {
        return;
    }
    let mut x = RIGHT;
    for series in chart.series.iter().rev() {
        svg.text("soft", Anchor::End, (x, y), &series.name);
        x -= super::svg::text_width(&series.name) + 6.0;
        svg.polyline(
            &format!("l{}", series.colour),
            &[(x - 16.0, y - 4.0), (x, y - 4.0)],
            "",
        );
        x -= 28.0;
    }
}

/// At most [`POINTS`]: of neighbours the highest, so that no peak is lost.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let size = points.len().div_ceil(POINTS).max(1);
    let highest = |chunk: &[(f64, f64)]| {
        chunk
            .iter()
            .copied()
            .max_by(|one, other| one.1.total_cmp(&other.1))
    };
    points.chunks(size).filter_map(highest).collect()
}

impl Scale {
    /// From the least to the highest of `values`, up to a round number.
    pub(super) fn over(values: impl Iterator<Item = f64>, places: (f64, f64)) -> Self {
        let (mut low, mut high) = bounds(values).unwrap_or((0.0, 1.0));
        if high - low <= f64::EPSILON * high.abs() {
            (low, high) = (
                low.min(0.0),
                if high > 0.0 { high } else { low.min(0.0) + 1.0 },
            );
        }
        Self {
            values: (low, high),
            places,
            is_logarithmic: false,
        }
    }

    /// Factors are equally far apart, those of values that are above 0.
    pub(super) fn logarithmic(values: impl Iterator<Item = f64>, places: (f64, f64)) -> Self {
        let (low, high) = bounds(values.filter(|value| *value > 0.0)).unwrap_or((1.0, 10.0));
        let (low, high) = (low.log10(), high.log10());
        let room = ((high - low) * 0.08).max(0.1);
        Self {
            values: (low - room, high + room),
            places,
            is_logarithmic: true,
        }
    }

    /// Leaves room above the highest.
    pub(super) fn with_room(mut self, factor: f64) -> Self {
        self.values.1 = self.values.0 + (self.values.1 - self.values.0) * factor;
        self
    }

    pub(super) fn place(&self, value: f64) -> f64 {
        let value = if self.is_logarithmic {
            value.max(f64::MIN_POSITIVE).log10()
        } else {
            value
        };
        let (low, high) = self.values;
        let part = ((value - low) / (high - low)).clamp(0.0, 1.0);
        self.places.0 + part * (self.places.1 - self.places.0)
    }

    fn value(&self, place: f64) -> f64 {
        let part = (place - self.places.0) / (self.places.1 - self.places.0);
        self.values.0 + part * (self.values.1 - self.values.0)
    }

    /// About `count` round values, in order.
    pub(super) fn ticks(&self, count: u32) -> Vec<f64> {
        /// More could not be read, whatever rounding does.
        const MOST: usize = 24;
        let (low, high) = self.values;
        let rough = (high - low) / f64::from(count);
        if self.is_logarithmic && rough < 1.0 {
            let factors: &[f64] = if rough < 0.4 {
                &[1.0, 2.0, 5.0]
            } else {
                &[1.0]
            };
            let powers = (0..MOST).map(|at| 10f64.powf(low.floor() + at as f64));
            let ticks = powers.flat_map(|power| factors.iter().map(move |factor| factor * power));
            return ticks
                .filter(|tick| (low..=high).contains(&tick.log10()))
                .take(MOST)
                .collect();
        }
        let unit = 10f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * unit);
        let step = steps
            .into_iter()
            .find(|step| *step >= rough * 0.999)
            .unwrap_or(rough);
        let first = (low / step - 1e-9).ceil();
        let ticks = (0..MOST).map(|at| (first + at as f64) * step);
        let ticks = ticks.take_while(|tick| *tick <= high + step * 1e-9);
        let value = |tick| {
            if self.is_logarithmic {
                10f64.powf(tick)
            } else {
                tick
            }
        };
        ticks.map(value).filter(|tick| tick.is_finite()).collect()
    }
}

/// The least and the most of what is finite.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values
        .filter(|value| value.is_finite())
        .fold(None, |bounds, value| {
            let (low, high) = bounds.unwrap_or((value, value));
            Some((value.min(low), value.max(high)))
        })
}

/// Of a tick: without digits that are always zero.
pub(super) fn label(value: f64) -> String {
    let (value, unit) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{}{unit}", if text == "-0" { "0" } else { text })
}
