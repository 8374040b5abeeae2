//! The plots of a group: time of each cell, CPU beside time, and what went on in a migration and at the guest's clients.

use std::collections::BTreeMap;

use super::chart::{Chart, Marks, Scale, Series, WIDTH, label, over_time};
use super::results::{Group, Results, Row, Same, Spread};
use super::svg::{Anchor, Shape, Svg, text_width};
use super::table::{self, cpu_total, full, short};
use super::verdict;
use crate::record::{Moment, Record};
use crate::scenario::Who;

/// Those of each scenario and group.
pub(super) type Plots = BTreeMap<(String, Same), Vec<Plot>>;

pub(super) struct Plot {
    /// Without its ending.
    name: String,
    pub(super) svg: Svg,
}

/// Where a downtime is drawn of which it is not known when it began.
const AT_THE_END: &str = " It is known by its length, and drawn at the end.";

pub(super) fn of(results: &Results) -> Plots {
    let sections = results.scenarios.iter();
    let groups =
        sections.flat_map(|section| section.groups.iter().map(|group| (&section.name, group)));
    let plots = groups.map(|(scenario, group)| {
        let prefix = format!("{scenario}-{}", group.same.slug());
        let plot = |(kind, svg): (String, Svg)| Plot {
            name: plain(&format!("{prefix}-{kind}")),
            svg,
        };
        let plots = of_group(group).into_iter().map(plot);
        ((scenario.clone(), group.same), plots.collect())
    });
    plots.collect()
}

impl Plot {
    pub(super) fn file_name(&self) -> String {
        format!("{}.svg", self.name)
    }
}

fn of_group(group: &Group) -> Vec<(String, Svg)> {
    let mut plots = Vec::new();
    plots.extend(times(group).map(|svg| ("time".to_owned(), svg)));
    plots.extend(pareto(group).map(|svg| ("cpu".to_owned(), svg)));
    let shown: Vec<_> = worth_a_look(group);
    let until = shown.iter().map(|(_, record)| end(record));
    let until = until.fold(0.0, f64::max);
    for (row, record) in &shown {
        let svg = timeline(row, record, until);
        plots.extend(svg.map(|svg| (format!("timeline-{}", row.label()), svg)));
    }
    for (row, record) in &shown {
        let svg = latencies(row, record);
        plots.extend(svg.map(|svg| (format!("latency-{}", row.label()), svg)));
    }
    plots
}

/// A typical migration by Vamoose's default (without one: by the fastest Vamoose), and by stock QEMU's fastest method.
fn worth_a_look(group: &Group) -> Vec<(&Row, &Record)> {
    let rows = || group.rows.iter();
    let is_stock = |row: &&Row| row.cell.contender.who == Who::Qemu;
    let default = verdict::fastest(rows().filter(|row| verdict::is_default(&row.cell.contender)));
    let ours = default.or_else(|| verdict::fastest(rows().filter(|row| !is_stock(row))));
    let stock = verdict::fastest(rows().filter(is_stock));
    let both = [ours, stock].into_iter().flatten();
    both.filter_map(|(row, _)| Some((row, row.typical()?)))
        .collect()
}

/// Seconds of each cell, as bars.
fn times(group: &Group) -> Option<Svg> {
    const BAR: f64 = 18.0;
    const TOP: f64 = 12.0;
    /// At the right, for the figure.
    const ROOM: f64 = 48.0;
    /// At the left, for the name: longer ones are cut.
    const MOST_LABEL: f64 = 222.0;
    let mut rows: Vec<&Row> = group.rows.iter().collect();
    rows.sort_by(|one, other| one.cell.contender.cmp(&other.cell.contender));
    let times: Vec<Option<Spread>> = rows.iter().map(|row| row.seconds()).collect();
    let most = times.iter().flatten().map(|time| time.most);
    let widest = rows
        .iter()
        .map(|row| text_width(&group.label(row)))
        .fold(0.0, f64::max);
    let left = widest.min(MOST_LABEL) + 12.0;
    let scale = Scale::over(most.chain([0.0]), (left, WIDTH - ROOM));
    times.iter().flatten().next()?;

    let told = rows.iter().zip(&times).map(|(row, time)| match time {
        Some(time) => format!("{} {} s", group.label(row), full(*time)),
        None => format!("{} was cancelled", group.label(row)),
    });
    let told = told.collect::<Vec<_>>().join("; ");
    let height = TOP + rows.len() as f64 * BAR + 36.0;
    let title = format!("Time by method and channels: {}", group.same.title());
    let mut svg = Svg::new(
        WIDTH,
        height,
        &title,
        "Bars are medians, lines the least and the most of the rounds.",
    );
    svg.tell(&told);
    let bottom = height - 36.0;
    for tick in scale.ticks(5) {
        let x = scale.place(tick);
        svg.line("grid", (x, TOP), (x, bottom));
        svg.text("soft", Anchor::Middle, (x, bottom + 14.0), &label(tick));
    }
    svg.text(
        "soft",
        Anchor::Middle,
        (f64::midpoint(left, WIDTH - ROOM), bottom + 30.0),
        "seconds",
    );
    let mut top = TOP;
    for (row, time) in rows.into_iter().zip(times) {
        let (middle, name) = (top + BAR / 2.0, cut(&group.label(row), MOST_LABEL));
        let is_default = verdict::is_default(&row.cell.contender);
        let weight = if is_default { "strong" } else { "name" };
        svg.text(weight, Anchor::End, (left - 6.0, middle + 4.0), &name);
        if let Some(time) = time {
            let [end, least, most] =
                [time.median, time.least, time.most].map(|time| scale.place(time));
            let tip = format!("{}: {} s", group.label(row), full(time));
            let size = (end - left, BAR - 5.0);
            svg.rect(
                &format!("c{}", colour(row.cell.contender.who)),
                (left, top + 2.5),
                size,
                &tip,
            );
            if most > least {
                svg.line("whisker", (least, middle), (most, middle));
                svg.line("whisker", (least, middle - 3.0), (least, middle + 3.0));
                svg.line("whisker", (most, middle - 3.0), (most, middle + 3.0));
            }
            svg.text(
                "name",
                Anchor::Start,
                (most + 5.0, middle + 4.0),
                &short(time.median),
            );
        } else {
            svg.text(
                "soft",
                Anchor::Start,
                (left + 4.0, middle + 4.0),
                "cancelled",
            );
        }
        top += BAR;
    }
    svg.line("axis", (left, TOP), (left, bottom));
    Some(svg)
}

/// CPU seconds beside seconds: what is on the front is not beaten in both by another cell.
fn pareto(group: &Group) -> Option<Svg> {
    const HEIGHT: f64 = 340.0;
    const BOX: (f64, f64, f64, f64) = (46.0, 34.0, WIDTH - 14.0, HEIGHT - 42.0);
    /// From so many times the least on, factors are shown instead of differences.
    const FAR: f64 = 8.0;
    let point = |row: &Row| Some((row.seconds()?.median, row.spread(cpu_total)?.median));
    let points: Vec<_> = group
        .rows
        .iter()
        .filter_map(|row| Some((row, point(row)?)))
        .collect();
    if points.len() < 2 {
        return None;
    }
    let (left, top, right, bottom) = BOX;
    let scale = |values: Vec<f64>, places| {
        let (low, high) = (
            values.iter().copied().fold(f64::INFINITY, f64::min),
            values.iter().copied().fold(0.0, f64::max),
        );
        if low > 0.0 && high / low > FAR {
            Scale::logarithmic(values.into_iter(), places)
        } else {
            Scale::over(values.into_iter().chain([0.0]), places).with_room(1.1)
        }
    };
    let x = scale(points.iter().map(|(_, (x, _))| *x).collect(), (left, right));
    let y = scale(points.iter().map(|(_, (_, y))| *y).collect(), (bottom, top));
    let front = front(&points.iter().map(|(_, point)| *point).collect::<Vec<_>>());

    let on_front: Vec<_> = front.iter().map(|at| group.label(points[*at].0)).collect();
    let told = format!(
        "Further down and further left is better. Not beaten in both by another: {}.",
        on_front.join("; ")
    );
    let title = format!(
        "CPU seconds of both hosts beside time: {}",
        group.same.title()
    );
    let mut svg = Svg::new(WIDTH, HEIGHT, &title, &told);
    for tick in x.ticks(5) {
        svg.line("grid", (x.place(tick), top), (x.place(tick), bottom));
        svg.text(
            "soft",
            Anchor::Middle,
            (x.place(tick), bottom + 16.0),
            &label(tick),
        );
    }
    for tick in y.ticks(5) {
        svg.line("grid", (left, y.place(tick)), (right, y.place(tick)));
        svg.text(
            "soft",
            Anchor::End,
            (left - 5.0, y.place(tick) + 4.0),
            &label(tick),
        );
    }
    svg.text(
        "soft",
        Anchor::Middle,
        (f64::midpoint(left, right), HEIGHT - 8.0),
        "seconds",
    );
    svg.text("soft", Anchor::Start, (4.0, top - 8.0), "CPU-s");
    legend(&mut svg, group, (left + 40.0, top - 12.0));
    svg.line("axis", (left, bottom), (right, bottom));
    svg.line("axis", (left, top), (left, bottom));

    let place = |(at, value): (f64, f64)| (x.place(at), y.place(value));
    let mut line: Vec<(f64, f64)> = Vec::new();
    for at in &front {
        let (x, y) = place(points[*at].1);
        line.extend(line.last().map(|(_, before)| (x, *before)));
        line.push((x, y));
    }
    svg.polyline("front", &line, "not beaten in both by another");
    for (row, point) in &points {
        let who = row.cell.contender.who;
        let tip = format!(
            "{}: {} s, {} CPU-s",
            group.label(row),
            short(point.0),
            short(point.1)
        );
        svg.point(
            &format!("c{}", colour(who)),
            shape(who),
            place(*point),
            &tip,
        );
    }
    // Names of those on the front first; where there is no room, the tip and the table have to do.
    let rest = (0..points.len()).filter(|at| !front.contains(at));
    let mut taken: Vec<[f64; 4]> = points
        .iter()
        .map(|(_, point)| {
            let (x, y) = place(*point);
            [x - 6.0, y - 6.0, x + 6.0, y + 6.0]
        })
        .collect();
    taken.extend(line.windows(2).map(|ends| {
        let ((x, y), (to_x, to_y)) = (ends[0], ends[1]);
        [
            x.min(to_x),
            y.min(to_y) - 1.0,
            x.max(to_x),
            y.max(to_y) + 1.0,
        ]
    }));
    for at in front.iter().copied().chain(rest) {
        let (row, point) = points[at];
        let name = group.label(row);
        let width = text_width(&name);
        let (x, y) = place(point);
        let (start, middle, end) = (Anchor::Start, Anchor::Middle, Anchor::End);
        let candidates = [
            (start, 9.0, 4.0),
            (end, -9.0, 4.0),
            (middle, 0.0, -10.0),
            (middle, 0.0, 20.0),
            (start, 7.0, -7.0),
            (start, 7.0, 16.0),
            (end, -7.0, -7.0),
            (end, -7.0, 16.0),
        ];
        let free = candidates.into_iter().find_map(|(anchor, dx, dy)| {
            let (x, y) = (x + dx, y + dy);
            let from = match anchor {
                Anchor::Start => x,
                Anchor::Middle => x - width / 2.0,
                Anchor::End => x - width,
            };
            let area = [from, y - 10.0, from + width, y + 3.0];
            let is_inside = from >= left + 2.0
                && from + width <= WIDTH - 2.0
                && area[1] >= top
                && area[3] <= bottom - 1.0;
            let is_free = taken.iter().all(|other| !overlap(&area, other));
            (is_inside && is_free).then_some((area, anchor, (x, y)))
        });
        if let Some((area, anchor, at)) = free {
            taken.push(area);
            let is_default = verdict::is_default(&row.cell.contender);
            let weight = if is_default { "strong" } else { "name" };
            svg.text(weight, anchor, at, &name);
        }
    }
    Some(svg)
}

/// The points that no other beats in both, by their first coordinate.
fn front(points: &[(f64, f64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|one, other| {
        let (one, other) = (points[*one], points[*other]);
        one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1))
    });
    let mut least = f64::INFINITY;
    order.retain(|at| {
        let is_less = points[*at].1 < least;
        least = least.min(points[*at].1);
        is_less
    });
    order
}

/// What the shapes mean.
fn legend(svg: &mut Svg, group: &Group, at: (f64, f64)) {
    let mut all: Vec<Who> = group
        .rows
        .iter()
        .map(|row| row.cell.contender.who)
        .collect();
    all.sort_unstable();
    all.dedup();
    let (mut x, y) = at;
    for who in all {
        let name = name(who);
        svg.point(&format!("c{}", colour(who)), shape(who), (x, y), "");
        svg.text("soft", Anchor::Start, (x + 9.0, y + 4.0), name);
        x += text_width(name) + 26.0;
    }
}

/// What went on in a migration.
fn timeline(row: &Row, record: &Record, until: f64) -> Option<Svg> {
    let moments = &record.timeline;
    let series = |points: Vec<(f64, f64)>| {
        vec![Series {
            name: row.label(),
            colour: colour(row.cell.contender.who),
            points,
        }]
    };
    let of = |value: fn(&Moment) -> f64| -> Vec<(f64, f64)> {
        moments
            .iter()
            .map(|moment| (seconds(moment.milliseconds), value(moment)))
            .collect()
    };
    let sent: Vec<_> = moments
        .iter()
        .map(|moment| (moment.milliseconds, moment.sent_bytes))
        .collect();
    let panels = [
        ("sent, Mbit/s", rates(&sent)),
        (
            "left to send, MiB",
            of(|moment| moment.remaining_bytes as f64 / f64::from(1 << 20)),
        ),
        (
            "pages written by the guest, 1/s",
            of(|moment| moment.dirty_pages_rate as f64),
        ),
    ];
    let charts = panels
        .into_iter()
        .filter(|(_, points)| points.len() > 1 && points.iter().any(|(_, value)| *value > 0.0));
    let charts: Vec<_> = charts
        .map(|(name, points)| Chart {
            name,
            series: series(points),
            is_logarithmic: false,
        })
        .collect();
    if charts.is_empty() {
        return None;
    }
    let counts: Vec<_> = moments
        .iter()
        .map(|moment| (moment.milliseconds, moment.rounds))
        .collect();
    let marks = Marks {
        until,
        paused: paused(record),
        rounds: beginnings(&counts),
        ..Marks::default()
    };
    let title = format!(
        "A migration by {}: {}",
        row.label(),
        Same::of(&record.cell).title()
    );
    let told = format!(
        "{} s, {} rounds over memory (dotted lines). {}",
        short(record.figures.seconds),
        record.figures.rounds.unwrap_or(0),
        pause_told(record)
    );
    Some(over_time(&title, &told, &charts, &marks))
}

/// How the guest answered its clients before, in and after a migration.
fn latencies(row: &Row, record: &Record) -> Option<Svg> {
    let service = record.service.as_ref()?;
    let points: Vec<_> = service
        .latencies
        .iter()
        .map(|latency| (latency.at as f64 / 1e3, latency.milliseconds))
        .collect();
    if points.len() < 2 {
        return None;
    }
    let chart = Chart {
        name: "longest latency, ms",
        series: vec![Series {
            name: row.label(),
            colour: colour(row.cell.contender.who),
            points,
        }],
        is_logarithmic: true,
    };
    let marks = Marks {
        until: end(record),
        paused: paused(record),
        events: vec![(0.0, "begins".to_owned()), (end(record), "ends".to_owned())],
        ..Marks::default()
    };
    let longest = |longest: Option<f64>| longest.map_or("–".to_owned(), short);
    let told = format!(
        "Longest latency {} ms before, {} ms through the migration; {} {} a second before, {} through it. {}",
        longest(service.before.longest),
        longest(service.during.longest),
        short(service.before.rate),
        service.unit,
        short(service.during.rate),
        pause_told(record)
    );
    let title = format!(
        "Clients of the guest, by {}: {}",
        row.label(),
        Same::of(&record.cell).title()
    );
    Some(over_time(&title, &told, &[chart], &marks))
}

/// From when to when the guest stood still, in seconds since the beginning.
fn paused(record: &Record) -> Option<(f64, f64)> {
    let downtime = table::downtime(record)? / 1e3;
    if let Some(stopped) = record.figures.stopped {
        return Some((stopped / 1e3, stopped / 1e3 + downtime));
    }
    let end = end(record);
    (downtime > 0.0 && downtime <= end).then_some((end - downtime, end))
}

/// In seconds since the beginning. The total time is QEMU's own, which begins later where Vamoose sets up first.
fn end(record: &Record) -> f64 {
    let last = record.timeline.last();
    last.map_or(record.figures.seconds, |moment| {
        seconds(moment.milliseconds)
    })
}

fn pause_told(record: &Record) -> String {
    let Some((from, to)) = paused(record) else {
        return String::new();
    };
    let place = match record.figures.stopped {
        Some(_) => "",
        None => AT_THE_END,
    };
    format!("Downtime {} ms (shaded).{place}", short((to - from) * 1e3))
}

/// Megabits a second, from milliseconds and bytes so far. Looks that are close together are taken as one.
pub(crate) fn rates(sent: &[(u64, u64)]) -> Vec<(f64, f64)> {
    /// Milliseconds: QEMU and the kernel send in bursts.
    const LEAST: u64 = 100;
    let mut rates = Vec::new();
    let mut from = sent.first().copied().unwrap_or_default();
    for (at, bytes) in sent.iter().copied() {
        let elapsed = at.saturating_sub(from.0);
        if elapsed >= LEAST {
            let rate = bytes.saturating_sub(from.1) as f64 * 8.0 / elapsed as f64 / 1e3;
            rates.extend([(seconds(from.0), rate), (seconds(at), rate)]);
            from = (at, bytes);
        }
    }
    rates
}

/// When rounds over memory began, in seconds, from milliseconds and rounds so far; the first one is the beginning itself.
pub(crate) fn beginnings(counts: &[(u64, u64)]) -> Vec<f64> {
    let pairs = counts
        .windows(2)
        .filter(|pair| pair[1].1 > pair[0].1 && pair[1].1 > 1);
    pairs.map(|pair| seconds(pair[1].0)).collect()
}

pub(crate) fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1e3
}

fn colour(who: Who) -> usize {
    match who {
        Who::Qemu => 0,
        Who::Relay => 1,
        Who::Pair => 2,
        Who::Migrate => 3,
        Who::Live => 4,
        Who::Sockets => 5,
    }
}

fn shape(who: Who) -> Shape {
    match who {
        Who::Qemu => Shape::Square,
        Who::Relay => Shape::Triangle,
        Who::Pair => Shape::Diamond,
        Who::Migrate => Shape::Circle,
        Who::Live => Shape::Down,
        Who::Sockets => Shape::Cross,
    }
}

fn name(who: Who) -> &'static str {
    match who {
        Who::Qemu => "stock QEMU",
        Who::Relay => "relay",
        Who::Pair => "pair",
        Who::Migrate => "migrate",
        Who::Live => "live",
        Who::Sockets => "sockets",
    }
}

fn overlap(one: &[f64; 4], other: &[f64; 4]) -> bool {
    one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3]
}

/// At most so wide.
fn cut(text: &str, width: f64) -> String {
    if text_width(text) <= width {
        return text.to_owned();
    }
    let kept = text.chars().scan(text_width("…"), |used, character| {
        *used += text_width("m");
        (*used <= width).then_some(character)
    });
    kept.chain(['…']).collect()
}

/// For a file's name.
fn plain(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let text: String = text.chars().map(plain).collect();
    let words: Vec<_> = text.split('-').filter(|word| !word.is_empty()).collect();
    words.join("-")
}
