//! Prometheus' text format, for clients that do not accept OpenMetrics: the same lines, but counters are described under the
//! names of their samples, and there are no units and no end mark.

/// The same metrics as this text of OpenMetrics.
pub(super) fn classic(open: &str) -> String {
    let types = open.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let mut kinds = types.filter_map(|line| Some(line.split_once(' ')?.1));
    let mut text = String::with_capacity(open.len());
    let mut kind = "";
    for line in open.lines() {
        let mut words = line.splitn(4, ' ');
        let line = match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("UNIT" | "EOF"), ..) => continue,
            (Some("#"), Some(what), Some(name), Some(rest)) => {
                // A family begins with its help.
                if what == "HELP" {
                    kind = kinds.next().unwrap_or_default();
                }
                let ending = match kind {
                    "counter" => "_total",
                    "info" => "_info",
                    _ => "",
                };
                let rest = if rest == "info" { "gauge" } else { rest };
                format!("# {what} {name}{ending} {rest}\n")
            }
            _ => format!("{line}\n"),
        };
        text.push_str(&line);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_described_under_the_names_of_their_samples() {
        let open = "# HELP v_build Its version.\n# TYPE v_build info\nv_build_info{a=\"b c\"} 1\n\
                    # HELP v_bytes All bytes.\n# TYPE v_bytes counter\n# UNIT v_bytes bytes\nv_bytes_total 5\n\
                    # HELP v_now Open now.\n# TYPE v_now gauge\nv_now 2\n# EOF\n";
        let expected = "# HELP v_build_info Its version.\n# TYPE v_build_info gauge\nv_build_info{a=\"b c\"} 1\n\
                        # HELP v_bytes_total All bytes.\n# TYPE v_bytes_total counter\nv_bytes_total 5\n\
                        # HELP v_now Open now.\n# TYPE v_now gauge\nv_now 2\n";
        assert_eq!(classic(open), expected);
    }
}
