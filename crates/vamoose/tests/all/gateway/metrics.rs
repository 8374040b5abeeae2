//! Metrics of a gateway and a server, also as a real Prometheus reads them, with the packaged rules and dashboard.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use lab::{process::Child, qemu, skipped, target_dir};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Hosts, PORT};
use crate::common::{Host, LIMIT, MIB, bare_pair};

/// Interval of polls.
const LOOK: Duration = Duration::from_millis(50);
const PORT_OF_PROMETHEUS: u16 = 9090;
pub(crate) const WITH_METRICS: &str = "metrics = \"127.0.0.1:0\"";
const DASHBOARD: &str = include_str!("../../../../../packaging/grafana/vamoose.json");
const RULES: &str = include_str!("../../../../../packaging/prometheus/vamoose.rules.yml");

/// Address of the near gateway's metrics.
pub(crate) fn address(hosts: &Hosts) -> Result<String> {
    let address = hosts.near.says("metrics at tcp:")?;
    Ok(address.trim().to_owned())
}

/// The body of an answer.
fn get(at: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {at}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    Ok(body.to_owned())
}

/// The value of a sample.
fn value(metrics: &str, sample: &str) -> Result<f64> {
    let found = metrics.lines().find_map(|line| line.strip_prefix(sample));
    let value = found.with_context(|| format!("no {sample} in\n{metrics}"))?;
    Ok(value.trim().parse()?)
}

/// Waits until a sample has this value.
pub(crate) fn wait_for(at: &str, sample: &str, expected: f64) -> Result<()> {
    wait_until(at, sample, |found| found == expected)
}

pub(crate) fn wait_until(at: &str, sample: &str, is_it: impl Fn(f64) -> bool) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let metrics = get(at, "/metrics")?;
        if value(&metrics, sample).is_ok_and(&is_it) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{sample}: {metrics}");
        thread::sleep(LOOK);
    }
}

/// A program of Prometheus, by its name.
fn program_or_skip(name: &str) -> Result<Option<PathBuf>> {
    let path = target_dir().join("prometheus").join(name);
    if !path.is_file() {
        skipped(&format!("no {name}: scripts/setup prometheus"))?;
        return Ok(None);
    }
    Ok(Some(path))
}

fn moved(hosts: &Hosts) -> Result<bool> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(false);
    };
    let (mut source, mut destination) = hosts.pair(&qemu, &qemu, PORT, 2)?;
    hosts.near.sends(&mut source, PORT)?;
    hosts.expect_moved(&mut source, &mut destination)?;
    hosts.near.says("to other, port 49152: loaded; ")?;
    Ok(true)
}

#[test]
fn a_migration_and_a_refusal_are_counted() -> Result<()> {
    let hosts = Hosts::with(WITH_METRICS, "", &[])?;
    let at = address(&hosts)?;
    let with = "direction=\"outgoing\",peer=\"other\"";
    let ended = |outcome| format!("vamoose_migrations_total{{{with},outcome=\"{outcome}\"}}");
    ensure!(value(&get(&at, "/metrics")?, &ended("loaded"))? == 0.0);
    if !moved(&hosts)? {
        return Ok(());
    }
    // No QEMU waits there now.
    let mut stranger = TcpStream::connect((hosts.near.door, PORT))?;
    stranger.write_all(b"RPC!")?;
    hosts.near.says("to other, port 49152: refused: ")?;
    let metrics = get(&at, "/metrics")?;
    ensure!(value(&metrics, &ended("loaded"))? == 1.0, "{metrics}");
    ensure!(value(&metrics, &ended("refused"))? == 1.0, "{metrics}");
    ensure!(value(&metrics, &ended("failed"))? == 0.0, "{metrics}");
    let one = |name: &str| value(&metrics, &format!("{name}{{{with}}}"));
    let guest = one("vamoose_migration_guest_bytes_total")?;
    let link = one("vamoose_migration_link_bytes_total")?;
    ensure!(guest > link && link > 0.0, "{metrics}");
    ensure!(one("vamoose_migrations_in_flight")? == 0.0, "{metrics}");
    ensure!(one("vamoose_migration_syncs_total")? > 0.0, "{metrics}");
    ensure!(one("vamoose_migration_duration_seconds_count")? == 1.0);
    ensure!(one("vamoose_migration_switchover_seconds_count")? == 1.0);
    Ok(())
}

#[test]
fn a_migration_under_way_is_counted() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::with(WITH_METRICS, "", &[])?;
    let at = address(&hosts)?;
    let (mut source, mut destination) = hosts.pair(&qemu, &qemu, PORT, 2)?;
    let limit = |bytes: u64| json!({ "max-bandwidth": bytes });
    source.qmp.set_parameters(limit(MIB))?;
    hosts.near.sends(&mut source, PORT)?;
    source.qmp.wait_transferred(MIB, LIMIT)?;
    let with = "{direction=\"outgoing\",peer=\"other\"}";
    let in_flight = format!("vamoose_migrations_in_flight{with}");
    wait_for(&at, &in_flight, 1.0)?;
    let guest = format!("vamoose_migration_guest_bytes_total{with}");
    // Data from QEMU may still be on its way.
    wait_until(&at, &guest, |it| it > 0.0)?;
    source.qmp.set_parameters(limit(0))?;
    hosts.expect_moved(&mut source, &mut destination)?;
    wait_for(&at, &in_flight, 0.0)
}

#[test]
fn a_cancelled_migration_has_not_failed() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::with("", "", &["--metrics", "tcp:127.0.0.1:0"])?;
    let (mut source, _destination) = hosts.pair(&qemu, &qemu, PORT, 2)?;
    source.qmp.set_parameters(json!({ "max-bandwidth": MIB }))?;
    hosts.near.sends(&mut source, PORT)?;
    source.qmp.wait_transferred(MIB, LIMIT)?;
    source.qmp.execute("migrate_cancel", json!({}))?;
    source.qmp.wait_migration(&["cancelled"], LIMIT)?;
    for (host, direction) in [(&hosts.near, "outgoing"), (&hosts.far, "incoming")] {
        let at = host.says("metrics at tcp:")?;
        let with = format!("direction=\"{direction}\",peer=\"other\"");
        let ended = |outcome| format!("vamoose_migrations_total{{{with},outcome=\"{outcome}\"}}");
        wait_for(at.trim(), &ended("stopped"), 1.0)?;
        wait_for(at.trim(), &ended("failed"), 0.0)?;
    }
    Ok(())
}

/// Names of metrics in queries.
fn names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
    let ours = words.filter(|it| it.starts_with("vamoose_"));
    ours.collect()
}

#[test]
fn dashboard_and_alerts_name_metrics_that_there_are() -> Result<()> {
    let hosts = Hosts::with(WITH_METRICS, "", &[])?;
    let metrics = get(&address(&hosts)?, "/metrics")?;
    let samples = metrics.lines().filter(|line| !line.starts_with('#'));
    let samples = samples.filter_map(|line| line.split(['{', ' ']).next());
    let there: BTreeSet<_> = samples.collect();
    let named: BTreeSet<_> = names(DASHBOARD).union(&names(RULES)).copied().collect();
    ensure!(named.len() > 10, "{named:?}");
    let missing: Vec<_> = named.difference(&there).collect();
    ensure!(missing.is_empty(), "{missing:?} of {there:?}");
    let described = include_str!("../../../../../docs/metrics.md");
    let bare = there.iter().map(|it| {
        let ends = ["_bucket", "_sum", "_count"];
        ends.iter()
            .find_map(|end| it.strip_suffix(end))
            .unwrap_or(it)
    });
    let missing: Vec<_> = bare.filter(|it| !described.contains(*it)).collect();
    ensure!(missing.is_empty(), "docs/metrics.md has no {missing:?}");
    Ok(())
}

#[test]
fn the_rules_are_right() -> Result<()> {
    let Some(promtool) = program_or_skip("promtool")? else {
        return Ok(());
    };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/prometheus");
    for (check, file) in [
        ("check", "vamoose.rules.yml"),
        ("test", "vamoose.rules.test.yml"),
    ] {
        let mut command = Command::new(&promtool);
        lab::run(command.args([check, "rules", file]).current_dir(folder))?;
    }
    Ok(())
}

/// A Prometheus that scrapes a gateway.
struct Prometheus {
    at: String,
    _process: Child,
    _folder: TempDir,
}

impl Prometheus {
    /// Starts it at an address that no other test uses.
    fn start(program: &PathBuf, own: Ipv4Addr, gateway: &str) -> Result<Self> {
        let folder = TempDir::new()?;
        let configuration = json!({
            "global": { "scrape_interval": "200ms", "evaluation_interval": "200ms" },
            "rule_files": ["rules.yml"],
            "scrape_configs": [{ "job_name": "vamoose", "static_configs": [{ "targets": [gateway] }] }],
        });
        // JSON is YAML as well.
        fs::write(
            folder.path().join("prometheus.yml"),
            configuration.to_string(),
        )?;
        fs::write(folder.path().join("rules.yml"), RULES)?;
        let at = format!("{own}:{PORT_OF_PROMETHEUS}");
        let mut command = Command::new(program);
        command
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address={at}"))
            .current_dir(folder.path())
            .stderr(Stdio::null());
        Ok(Self {
            at,
            _process: Child::start(&mut command)?,
            _folder: folder,
        })
    }

    /// The answer to a query.
    fn query(&self, query: &str) -> Result<Value> {
        let bytes = query.bytes().map(|byte| format!("%{byte:02X}"));
        let path = format!("/api/v1/query?query={}", bytes.collect::<String>());
        Ok(serde_json::from_str(&get(&self.at, &path)?)?)
    }

    /// Waits until a query has this result.
    fn wait_for(&self, query: &str, expected: f64) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let answer = self.query(query);
            let found = answer.as_ref().ok().and_then(|answer| {
                let value = answer["data"]["result"][0]["value"][1].as_str()?;
                value.parse::<f64>().ok()
            });
            if found == Some(expected) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{query}: {answer:?}");
            thread::sleep(LOOK);
        }
    }
}

#[test]
fn a_real_prometheus_sees_a_migration() -> Result<()> {
    let Some(program) = program_or_skip("prometheus")? else {
        return Ok(());
    };
    let hosts = Hosts::with(WITH_METRICS, "", &[])?;
    let prometheus = Prometheus::start(&program, hosts.near.own, &address(&hosts)?)?;
    let loaded = "vamoose_migrations_total{direction=\"outgoing\", outcome=\"loaded\"}";
    prometheus.wait_for(loaded, 0.0)?;
    prometheus.wait_for("vamoose_build_info", 1.0)?;
    if !moved(&hosts)? {
        return Ok(());
    }
    prometheus.wait_for(loaded, 1.0)?;
    prometheus.wait_for("count(vamoose_migration_link_bytes_total > 0)", 1.0)?;
    // All queries of the dashboard.
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let targets = panels
        .iter()
        .filter_map(|panel| panel["targets"].as_array())
        .flatten();
    for target in targets {
        let query = target["expr"].as_str().context("no query")?;
        let query = ["$__rate_interval", "$__range"]
            .iter()
            .fold(query.to_owned(), |query, name| query.replace(name, "1m"))
            .replace("$instance", ".*")
            .replace("$peer", ".*");
        let answer = prometheus.query(&query)?;
        ensure!(answer["status"] == "success", "{query}: {answer}");
    }
    let rules: Value = serde_json::from_str(&get(&prometheus.at, "/api/v1/rules")?)?;
    let rules = rules["data"]["groups"][0]["rules"].as_array().cloned();
    let rules = rules.context("no rules")?;
    ensure!(
        rules.iter().all(|rule| rule["lastError"].is_null()),
        "{rules:?}"
    );
    Ok(())
}

#[test]
fn a_server_counts_its_migrations() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&["--metrics", "tcp:127.0.0.1:0"])?;
    let at = host.server.wait_for("metrics at tcp:", LIMIT)?;
    let (source, destination) = bare_pair(&binary, &binary, 16 * MIB)?;
    host.knows("vm", &destination)?;
    for (name, is_there) in [("nobody", false), ("vm", true)] {
        let ended = host.migrate(&source, name, &[])?.finish(LIMIT)?;
        ensure!(ended.success().is_ok() == is_there, "{name}");
    }
    for outcome in ["loaded", "refused"] {
        let labels = format!("direction=\"incoming\",peer=\"\",outcome=\"{outcome}\"");
        // Its source may have ended before its relay here.
        wait_for(
            at.trim(),
            &format!("vamoose_migrations_total{{{labels}}}"),
            1.0,
        )?;
    }
    Ok(())
}

#[test]
fn an_address_that_is_taken_is_an_error_at_the_start() -> Result<()> {
    let hosts = Hosts::with(WITH_METRICS, "", &[])?;
    let at = address(&hosts)?;
    let folder = TempDir::new()?;
    let mut serve = Command::new(crate::common::vamoose());
    serve.args([
        "serve",
        "--insecure",
        "--listen",
        "tcp:127.0.0.1:0",
        "--qmp-dir",
    ]);
    serve
        .arg(folder.path())
        .arg("--state-dir")
        .arg(folder.path().join("state"));
    serve.args(["--metrics", &format!("tcp:{at}")]);
    let said = lab::vamoose::Vamoose::start(&mut serve)?.finish(LIMIT)?;
    said.failure("metrics: cannot listen on tcp:")?;
    Ok(())
}
