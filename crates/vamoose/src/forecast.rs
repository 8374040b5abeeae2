//! What a migration will take, for people and as JSON.

use std::time::Duration;

use serde_json::{Value, json};
use vamoose_link::millis;
use vamoose_relay::{Forecast, Prediction, Remedies};

use crate::{progress::rounded, terminal::wrap};

/// A forecast with the keys of the [`Report`](crate::report::Report) of a migration: times in milliseconds, rates in bytes per second.
/// What is not known is null.
pub fn report(name: &str, forecast: &Forecast) -> Value {
    let (writes, link) = (forecast.writes, forecast.link);
    let predicted = forecast.prediction.as_ref();
    let remedies = predicted.and_then(|it| it.remedies).map(|it| {
        json!({
            "downtime-limit": it.downtime_limit.map(millis),
            "slowdown": it.slowdown,
        })
    });
    json!({
        "status": "predicted",
        "name": name,
        "converges": predicted.map(|it| it.remedies.is_none()),
        "total-time": predicted.map(|it| millis(it.total_time)),
        "downtime": predicted.map(|it| millis(it.downtime)),
        "wire-bytes": predicted.map(|it| it.wire_bytes),
        "method": predicted.map(|it| it.encoding.method),
        "level": predicted.map(|it| it.encoding.level),
        "ram": {
            "total": forecast.ram,
            "used": forecast.used,
            "dirty-sync-count": predicted.map(|it| it.rounds),
            "dirty-rate": writes.map(|it| whole(it.rate)),
            "working-set": writes.map(|it| whole(it.working_set)),
        },
        "link": link.map(|it| json!({
            "bytes-per-second": whole(it.rate),
            "round-trip": it.round_trip.as_secs_f64() * 1e3,
        })),
        "remedies": remedies,
        "unknown": forecast.unknown,
    })
}

/// `None` for what is infinite.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and rates are positive"
)]
fn whole(number: f64) -> Option<u64> {
    number.is_finite().then_some(number as u64)
}

/// A forecast in a few lines.
pub fn text(forecast: &Forecast) -> String {
    const WIDTH: usize = 80;
    let predicted = match &forecast.prediction {
        Some(prediction) => outlook(prediction),
        None => "nothing without the link's speed".to_owned(),
    };
    let mut lines = vec![format!("Predicted: {predicted}.")];
    let used = forecast.used as f64 / forecast.ram.max(1) as f64;
    let writes = match forecast.writes {
        Some(writes) if writes.rate < 1e6 => "; writes little".to_owned(),
        Some(writes) if writes.working_set.is_finite() => {
            let within = mib(writes.working_set);
            format!("; writes {}/s, within {within}", mib(writes.rate))
        }
        Some(writes) => format!("; writes {}/s", mib(writes.rate)),
        None => String::new(),
    };
    let ram = mib(forecast.ram as f64);
    lines.push(format!(
        "Guest: {ram}, of which {:.0} % zero{writes}.",
        (1.0 - used) * 100.0
    ));
    if let Some(link) = forecast.link {
        let trip = link.round_trip.as_secs_f64() * 1e3;
        lines.push(format!(
            "Link: {}/s, round trip {trip:.1} ms.",
            mib(link.rate)
        ));
    }
    lines.extend(
        forecast
            .unknown
            .iter()
            .map(|it| format!("Not known: {it}.")),
    );
    let lines = lines.iter().map(|line| wrap(line, WIDTH) + "\n");
    lines.collect()
}

fn outlook(prediction: &Prediction) -> String {
    let encoding = prediction.encoding;
    let level = encoding
        .level
        .map_or(String::new(), |level| format!(" {level}"));
    match prediction.remedies {
        None => format!(
            "{}, downtime {} ms, {} sent, mostly by {}{level}",
            brief(prediction.total_time),
            millis(prediction.downtime),
            mib(prediction.wire_bytes as f64),
            encoding.method,
        ),
        Some(remedies) => format!(
            "it does not converge: pages go at {}/s, and the guest writes faster. What helps: {}",
            mib(prediction.pace),
            remedy(&remedies)
        ),
    }
}

fn remedy(remedies: &Remedies) -> String {
    let limit = remedies
        .downtime_limit
        .map(|it| format!("--downtime-limit {}ms", millis(it)));
    let slow = remedies.slowdown.map(|lost| {
        let percent = lost * 100.0;
        format!("--auto-converge (the guest slowed down by {percent:.0} %)")
    });
    let pause = "--timeout with --on-timeout pause".to_owned();
    let all: Vec<_> = limit.into_iter().chain(slow).chain([pause]).collect();
    all.join(", or ")
}

fn brief(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 20.0 => format!("{seconds:.1} s"),
        _ => rounded(time),
    }
    .replace(' ', "\u{a0}")
}

fn mib(bytes: f64) -> String {
    format!("{:.0}\u{a0}MiB", bytes / 1_048_576.0)
}

#[cfg(test)]
mod tests {
    use vamoose_link::EncodingCost;
    use vamoose_relay::{LinkSpeed, Writes};

    use super::*;

    fn forecast(remedies: Option<Remedies>) -> Forecast {
        Forecast {
            ram: 4 << 30,
            used: 3 << 30,
            writes: Some(Writes {
                rate: 50.0 * 1_048_576.0,
                working_set: f64::INFINITY,
            }),
            link: Some(LinkSpeed {
                rate: 1e8,
                round_trip: Duration::from_micros(250),
            }),
            unknown: Vec::new(),
            prediction: Some(Prediction {
                remedies,
                total_time: Duration::from_millis(12_340),
                downtime: Duration::from_millis(230),
                wire_bytes: 1_000_000_000,
                rounds: 4,
                encoding: EncodingCost {
                    method: "zstd-frames",
                    level: Some(-1),
                    size: 0.3,
                    cpu: 1e-9,
                },
                pace: 3e8,
            }),
        }
    }

    #[test]
    fn lines_say_what_is_known() {
        let expected = "\
Predicted: 12.3 s, downtime 230 ms, 954 MiB sent, mostly by zstd-frames -1.
Guest: 4096 MiB, of which 25 % zero; writes 50 MiB/s.
Link: 95 MiB/s, round trip 0.2 ms.
";
        assert_eq!(text(&forecast(None)), expected);
        let mut blind = forecast(None);
        (blind.link, blind.prediction, blind.writes) = (None, None, None);
        blind.unknown = vec!["link not measured: serve on kvm2 is older".to_owned()];
        let expected = "\
Predicted: nothing without the link's speed.
Guest: 4096 MiB, of which 25 % zero.
Not known: link not measured: serve on kvm2 is older.
";
        assert_eq!(text(&blind), expected);
    }

    #[test]
    fn remedies_fit_and_are_complete() {
        let stuck = forecast(Some(Remedies {
            downtime_limit: Some(Duration::from_millis(2400)),
            slowdown: Some(0.6),
        }));
        let text = text(&stuck);
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        for part in [
            "does not",
            "--downtime-limit 2400ms",
            "by 60 %",
            "--on-timeout pause",
        ] {
            assert!(text.replace('\n', " ").contains(part), "{part}: {text}");
        }
        let json = report("web1", &stuck);
        assert_eq!(json["converges"], false);
        assert_eq!(json["remedies"]["downtime-limit"], 2400);
        assert_eq!(json["ram"]["dirty-rate"], 50 << 20);
        assert!(json["ram"]["working-set"].is_null());
    }
}
