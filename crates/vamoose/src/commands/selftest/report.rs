//! What the checks found, for people and for programs.

use idxd::Kind;
use idxd_model::selftest::{Finding, Settled, State, Verdict, random::Rounds, settled};
use serde::Serialize;

/// Everything that is printed.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) hardware: bool,
    pub(super) seed: u64,
    pub(super) tested: Vec<Tested>,
    /// The same checks against models, where the tested ones are none.
    pub(super) modelled: Vec<Tested>,
    pub(super) rounds: Option<Rounds>,
}

/// One work queue and what was found.
#[derive(Debug)]
pub(super) struct Tested {
    pub(super) queue: String,
    pub(super) kind: Kind,
    pub(super) findings: Vec<Finding>,
}

impl Tested {
    fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Dsa => "dsa",
            Kind::Iaa => "iaa",
        }
    }
}

impl Report {
    /// What makes the run a failure.
    pub(super) fn failures(&self) -> Vec<String> {
        let findings = self
            .tested
            .iter()
            .flat_map(|tested| tested.findings.iter().map(move |finding| (tested, finding)));
        let mut failures: Vec<String> = findings
            .filter(|(_, finding)| finding.is_failure())
            .map(|(tested, finding)| format!("{} of {}", finding.check.name, tested.queue))
            .collect();
        failures.extend(self.rounds.iter().flat_map(|rounds| rounds.wrong.clone()));
        failures
    }

    fn settled(&self) -> Vec<Settled> {
        let findings = self.tested.iter().flat_map(|tested| &tested.findings);
        settled(&findings.cloned().collect::<Vec<_>>())
    }

    /// Where a real queue returned something that no model of its kind did.
    fn differences(&self) -> Vec<Difference> {
        let mut differences = Vec::new();
        for tested in self.tested.iter().filter(|_| self.hardware) {
            for finding in &tested.findings {
                if matches!(finding.verdict, Verdict::Skipped { .. }) {
                    continue;
                }
                let of_models: Vec<&Verdict> = self
                    .modelled
                    .iter()
                    .filter(|modelled| modelled.kind == tested.kind)
                    .flat_map(|modelled| &modelled.findings)
                    .filter(|other| other.check.number == finding.check.number)
                    .map(|other| &other.verdict)
                    .filter(|verdict| !matches!(verdict, Verdict::Skipped { .. }))
                    .collect();
                if let Some(model) = of_models.first()
                    && !of_models.contains(&&finding.verdict)
                {
                    differences.push(Difference {
                        queue: tested.queue.clone(),
                        check: finding.check.name,
                        assumptions: finding.check.assumptions,
                        hardware: finding.verdict.to_string(),
                        model: model.to_string(),
                    });
                }
            }
        }
        differences
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for tested in &self.tested {
            text.push_str(&format!("{}\n", tested.queue));
            for Finding { check, verdict } in &tested.findings {
                let open = if check.is_open { "?" } else { " " };
                text.push_str(&format!(
                    "  {:>3}{open} {:<26} {verdict}\n",
                    check.number, check.name
                ));
                if !matches!(verdict, Verdict::Holds) {
                    text.push_str(&format!("{:33}({})\n", "", check.what));
                }
            }
            text.push('\n');
        }
        text.push_str("? the expected answer is not documented: another one is no failure\n\n");
        let whose = match self.hardware {
            true => "",
            false => ", which is what was tested: --hw asks real devices",
        };
        text.push_str(&format!(
            "assumptions of the model, version {}{whose}\n",
            idxd_model::VERSION
        ));
        for Settled {
            assumption,
            state,
            by,
        } in self.settled()
        {
            let by = match by.is_empty() {
                true => String::new(),
                false => format!(" ({})", by.join(", ")),
            };
            let state = state.to_string();
            text.push_str(&format!(
                "  {:>3}  {state:<9} {}{by}\n",
                assumption.number, assumption.what
            ));
        }
        if self.hardware {
            text.push_str("\nwhere the hardware differs from the model\n");
            let differences = self.differences();
            if differences.is_empty() {
                text.push_str("  nowhere, as far as the checks go\n");
            }
            for it in differences {
                let numbers: Vec<_> = it.assumptions.iter().map(ToString::to_string).collect();
                let about = match numbers.is_empty() {
                    true => String::new(),
                    false => format!(" (assumption {})", numbers.join(", ")),
                };
                let Difference {
                    queue,
                    check,
                    hardware,
                    model,
                    ..
                } = it;
                text.push_str(&format!(
                    "  {queue}, {check}{about}: {hardware}; the model: {model}\n"
                ));
            }
        }
        if let Some(rounds) = &self.rounds {
            let work = rounds.work;
            text.push_str(&format!(
                "\n{} rounds of offloads with every fault on, seed {}: {} pages, {} by devices, {} refused, {} failed, \
                 {} overtaken, {} checked, {}\n",
                rounds.rounds,
                self.seed,
                rounds.pages,
                work.by_device,
                work.refused,
                work.failed,
                work.overtaken,
                work.checked,
                match rounds.wrong.len() {
                    0 => "all right".to_owned(),
                    wrong => format!("{wrong} wrong: again with --seed {}", self.seed),
                }
            ));
        }
        text
    }

    pub(super) fn json(&self) -> impl Serialize {
        Json {
            hardware: self.hardware,
            seed: self.seed,
            model_version: idxd_model::VERSION,
            passed: self.failures().is_empty(),
            failures: self.failures(),
            queues: self.tested.iter().map(JsonQueue::of).collect(),
            assumptions: self.settled().iter().map(JsonAssumption::of).collect(),
            differences: self.differences(),
            rounds: self.rounds.as_ref().map(JsonRounds::of),
        }
    }
}

/// A check that came out otherwise with hardware than with a model.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Difference {
    queue: String,
    check: &'static str,
    assumptions: &'static [u32],
    hardware: String,
    model: String,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Json {
    hardware: bool,
    seed: u64,
    model_version: u32,
    passed: bool,
    failures: Vec<String>,
    queues: Vec<JsonQueue>,
    assumptions: Vec<JsonAssumption>,
    differences: Vec<Difference>,
    rounds: Option<JsonRounds>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct JsonQueue {
    queue: String,
    kind: &'static str,
    checks: Vec<JsonCheck>,
}

impl JsonQueue {
    fn of(tested: &Tested) -> Self {
        Self {
            queue: tested.queue.clone(),
            kind: tested.kind(),
            checks: tested.findings.iter().map(JsonCheck::of).collect(),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct JsonCheck {
    number: u32,
    name: &'static str,
    what: &'static str,
    assumptions: &'static [u32],
    open: bool,
    result: &'static str,
    expected: Option<String>,
    found: Option<String>,
    why: Option<String>,
}

impl JsonCheck {
    fn of(finding: &Finding) -> Self {
        let Finding { check, verdict } = finding;
        let (result, expected, found, why) = match verdict {
            Verdict::Holds => ("holds", None, None, None),
            Verdict::Differs { expected, found } => {
                ("differs", Some(expected.clone()), Some(found.clone()), None)
            }
            Verdict::Found(found) => ("found", None, Some(found.clone()), None),
            Verdict::Skipped { why } => ("skipped", None, None, Some(why.clone())),
        };
        Self {
            number: check.number,
            name: check.name,
            what: check.what,
            assumptions: check.assumptions,
            open: check.is_open,
            result,
            expected,
            found,
            why,
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct JsonAssumption {
    number: u32,
    what: &'static str,
    where_used: &'static str,
    state: &'static str,
    by: Vec<&'static str>,
}

impl JsonAssumption {
    fn of(settled: &Settled) -> Self {
        Self {
            number: settled.assumption.number,
            what: settled.assumption.what,
            where_used: settled.assumption.where_used,
            state: match settled.state {
                State::Holds => "holds",
                State::Differs => "differs",
                State::Unproved => "unproved",
            },
            by: settled.by.clone(),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct JsonRounds {
    rounds: u32,
    pages: u64,
    by_device: u64,
    refused: u64,
    failed: u64,
    overtaken: u64,
    checked: u64,
    wrong: Vec<String>,
}

impl JsonRounds {
    fn of(rounds: &Rounds) -> Self {
        let work = rounds.work;
        Self {
            rounds: rounds.rounds,
            pages: rounds.pages,
            by_device: work.by_device,
            refused: work.refused,
            failed: work.failed,
            overtaken: work.overtaken,
            checked: work.checked,
            wrong: rounds.wrong.clone(),
        }
    }
}
