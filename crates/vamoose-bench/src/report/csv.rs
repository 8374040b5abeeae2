//! `results.csv`: a line for each migration. Columns are the keys of `results.jsonl`, such as `figures.seconds`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde_json::Value;

use super::results::Results;

pub(super) fn of(results: &Results) -> Result<String> {
    let mut lines = Vec::new();
    for row in results.groups().flat_map(|group| &group.rows) {
        for record in &row.records {
            let mut line = BTreeMap::new();
            flatten(String::new(), serde_json::to_value(record)?, &mut line);
            lines.push(line);
        }
    }
    let columns: BTreeSet<&String> = lines.iter().flat_map(BTreeMap::keys).collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(columns.iter().map(|name| name.as_str()))?;
    for line in &lines {
        writer.write_record(
            columns
                .iter()
                .map(|name| line.get(*name).map_or("", String::as_str)),
        )?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

/// Adds all values except lists, which are timelines.
fn flatten(name: String, value: Value, line: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(values) => {
            for (key, value) in values {
                let separator = if name.is_empty() { "" } else { "." };
                flatten(format!("{name}{separator}{key}"), value, line);
            }
        }
        Value::Array(_) => {}
        Value::Null => drop(line.insert(name, String::new())),
        Value::String(text) => drop(line.insert(name, text)),
        number => drop(line.insert(name, number.to_string())),
    }
}
