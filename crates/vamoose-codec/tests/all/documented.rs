//! docs/methods.md lists the methods as the table in `methods.rs` has them.

use multifd::Method;
use vamoose_codec::{DecodedBy, MethodInfo, info};

#[cfg(feature = "isal")]
fn document(path: &str) -> String {
    std::fs::read_to_string(format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn methods() -> impl Iterator<Item = (Method, MethodInfo)> {
    let methods = Method::ALL.into_iter();
    methods.filter_map(|method| Some((method, info(method)?)))
}

/// The cells of the table's row that should be there, without the hardware's.
#[cfg(feature = "isal")]
fn row(method: Method, info: &MethodInfo) -> [String; 5] {
    let engines = info.engines().map(|(name, levels)| {
        let served = match levels.start() == levels.end() {
            true => levels.start().to_string(),
            false => format!("{} to {}", levels.start(), levels.end()),
        };
        match info.levels.as_ref() {
            Some(all) if all.range != levels => format!("{name} ({served})"),
            _ => name.to_owned(),
        }
    });
    let engines: Vec<_> = engines.collect();
    [
        method.name().to_owned(),
        info.packets.to_owned(),
        info.levels
            .as_ref()
            .map_or(String::new(), ToString::to_string),
        match engines.len() {
            0 => "copy".to_owned(),
            _ => engines.join(", "),
        },
        match info.decoded_by {
            DecodedBy::AnyQemu => "any QEMU".to_owned(),
            DecodedBy::SomeQemu => format!("QEMUs built with {method}"),
            DecodedBy::Vamoose => "Vamoose".to_owned(),
        },
    ]
}

#[test]
#[cfg(feature = "isal")]
fn methods_md_has_a_row_for_each_method() {
    let text = document("docs/methods.md");
    for (method, info) in methods() {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("| {method} |")));
        let line = line.unwrap_or_else(|| panic!("no row for {method}"));
        let mut cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 6, "{line}");
        cells.remove(4);
        assert_eq!(cells, row(method, &info));
    }
}

#[test]
fn a_stock_method_is_one_that_some_qemu_decodes() {
    for (method, info) in methods() {
        assert_eq!(method.is_stock(), info.decoded_by != DecodedBy::Vamoose);
    }
}
