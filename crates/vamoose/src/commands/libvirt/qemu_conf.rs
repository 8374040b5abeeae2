//! The text of libvirt's qemu.conf: what it sets, and the same text with other values.
//!
//! As libvirt's `virconf` has it: a setting is `name = value` to the end of the line; a value is a number, a string in single, double
//! or three double quotes, or a list of those. Of a name that is set twice, the first counts.

use std::{fmt, ops::Range};

use thiserror::Error;

/// A value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Number(i64),
    Text(String),
    /// Nothing that is looked at here.
    List,
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "\"{text}\""),
            Self::List => f.write_str("[...]"),
        }
    }
}

/// A setting that is to be.
pub(super) type Wanted = (&'static str, Value);

/// What a file sets.
#[derive(Debug)]
pub(super) struct QemuConf<'a> {
    text: &'a str,
    settings: Vec<Setting<'a>>,
}

#[derive(Debug)]
struct Setting<'a> {
    name: &'a str,
    value: Value,
    /// Where the value is.
    at: Range<usize>,
}

/// libvirt would not read it either.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("line {line}: {expected} is expected")]
pub(super) struct SyntaxError {
    line: usize,
    expected: &'static str,
}

/// Before settings that are added.
const HEADING: &str =
    "# Migrations to this host come through `vamoose gateway` (vamoose libvirt setup).\n";

impl<'a> QemuConf<'a> {
    /// Reads it.
    pub(super) fn parse(text: &'a str) -> Result<Self, SyntaxError> {
        let mut cursor = Cursor { text, at: 0 };
        let mut settings = Vec::new();
        while cursor.skip_lines() {
            settings.push(cursor.setting()?);
        }
        Ok(Self { text, settings })
    }

    /// What is set by this name.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        let setting = self.settings.iter().find(|it| it.name == name)?;
        Some(&setting.value)
    }

    /// The text that has all of `wanted`, and everything else as it is.
    pub(super) fn with(&self, wanted: &[Wanted]) -> String {
        let mut text = self.text.to_owned();
        // From the end, so that what is before stays where it is.
        for setting in self.settings.iter().rev() {
            if let Some((_, value)) = wanted.iter().find(|(name, _)| *name == setting.name)
                && *value != setting.value
            {
                text.replace_range(setting.at.clone(), &value.to_string());
            }
        }
        let missing = wanted.iter().filter(|(name, _)| self.get(name).is_none());
        let missing: String = missing.map(line).collect();
        if missing.is_empty() {
            return text;
        }
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text + HEADING + &missing
    }
}

/// As it is written.
pub(super) fn line((name, value): &Wanted) -> String {
    format!("{name} = {value}\n")
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Over spaces.
    fn skip_spaces(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\r']).len();
    }

    /// Over everything without a meaning; whether there is more.
    fn skip_lines(&mut self) -> bool {
        loop {
            let rest = self.rest();
            self.at += rest.len() - rest.trim_start().len();
            if !self.rest().starts_with('#') {
                return !self.rest().is_empty();
            }
            self.at += self.rest().find('\n').unwrap_or(self.rest().len());
        }
    }

    fn setting(&mut self) -> Result<Setting<'a>, SyntaxError> {
        let rest = self.rest();
        let is_in_name = |c: char| c.is_ascii_alphanumeric() || "_-./:".contains(c);
        let name = &rest[..rest.find(|c| !is_in_name(c)).unwrap_or(rest.len())];
        if name.is_empty() {
            return Err(self.expected("a name"));
        }
        self.at += name.len();
        self.skip_spaces();
        if !self.eat("=") {
            return Err(self.expected("`=`"));
        }
        self.skip_spaces();
        let start = self.at;
        let value = match self.eat("[") {
            true => self.list()?,
            false => self.scalar()?,
        };
        let at = start..self.at;
        self.skip_spaces();
        match self.rest().chars().next() {
            None | Some('\n' | '#') => Ok(Setting { name, value, at }),
            Some(_) => Err(self.expected("the end of the line")),
        }
    }

    fn list(&mut self) -> Result<Value, SyntaxError> {
        self.skip_lines();
        while !self.eat("]") {
            self.scalar()?;
            self.skip_lines();
            if !self.eat(",") && !self.rest().starts_with(']') {
                return Err(self.expected("`,` or `]`"));
            }
            self.skip_lines();
        }
        Ok(Value::List)
    }

    fn scalar(&mut self) -> Result<Value, SyntaxError> {
        if self.eat("\"\"\"") {
            let end = self.rest().find("\"\"\"");
            return self.text_to(end, 3);
        }
        for quote in ["\"", "'"] {
            if self.eat(quote) {
                let line = self.rest().lines().next().unwrap_or_default();
                return self.text_to(line.find(quote), 1);
            }
        }
        let rest = self.rest();
        let is_in_number = |c: char| c.is_ascii_digit() || c == '-';
        let digits = &rest[..rest.find(|c| !is_in_number(c)).unwrap_or(rest.len())];
        let number = digits.parse().map_err(|_| self.expected("a value"))?;
        self.at += digits.len();
        Ok(Value::Number(number))
    }

    /// The text up to `end` from here, behind which there is a quote of this length.
    fn text_to(&mut self, end: Option<usize>, quote: usize) -> Result<Value, SyntaxError> {
        let end = end.ok_or_else(|| self.expected("the end of a string"))?;
        let text = self.rest()[..end].to_owned();
        self.at += end + quote;
        Ok(Value::Text(text))
    }

    fn eat(&mut self, what: &str) -> bool {
        let is_here = self.rest().starts_with(what);
        if is_here {
            self.at += what.len();
        }
        is_here
    }

    fn expected(&self, expected: &'static str) -> SyntaxError {
        let line = self.text[..self.at].matches('\n').count() + 1;
        SyntaxError { line, expected }
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    const FILE: &str = "# The default.\n#migration_address = \"0.0.0.0\"\nuser = 'libvirt-qemu' # who\n\
        \n  migration_port_min=49152\nnamespaces = [\n  \"mount\", # one\n\n]\nx = \"\"\"\n\
        migration_host = \"in a string\"\n\"\"\"\nmigration_port_min = 7";

    fn wanted() -> [Wanted; 3] {
        [
            ("migration_host", Value::Text("127.77.0.2".to_owned())),
            ("migration_port_min", Value::Number(49216)),
            ("user", Value::Text("libvirt-qemu".to_owned())),
        ]
    }

    #[test]
    fn only_values_that_differ_change() {
        let conf = QemuConf::parse(FILE).unwrap();
        assert_eq!(conf.get("migration_port_min"), Some(&Value::Number(49152)));
        assert_eq!(conf.get("migration_host"), None);
        assert_eq!(conf.get("namespaces"), Some(&Value::List));
        let expected = FILE.replace("=49152", "=49216").replace("= 7", "= 49216\n")
            + HEADING
            + "migration_host = \"127.77.0.2\"\n";
        assert_eq!(conf.with(&wanted()), expected);
    }

    #[test]
    fn what_libvirt_would_not_read_is_said() {
        for (text, line, expected) in [
            ("a = 1\nb", 2, "`=`"),
            ("a = ", 1, "a value"),
            ("a = \"b\nc = 1\n", 1, "the end of a string"),
            ("a = [ 1 2 ]", 1, "`,` or `]`"),
            ("a = [ 1,", 1, "a value"),
            ("a = 1 b = 2", 1, "the end of the line"),
            ("\n= 2", 2, "a name"),
        ] {
            let error = QemuConf::parse(text).unwrap_err();
            assert_eq!(error, SyntaxError { line, expected }, "{text}");
        }
    }

    proptest! {
        /// Of whatever lines a file consists.
        #[test]
        fn all_is_as_wanted_and_everything_else_as_before(
            lines in vec(select(LINES), 0..12),
            has_end in any::<bool>(),
        ) {
            let mut text = lines.concat();
            if !has_end {
                text.truncate(text.trim_end().len());
            }
            let before = QemuConf::parse(&text).unwrap();
            let changed = before.with(&wanted());
            let after = QemuConf::parse(&changed).unwrap();
            for (name, value) in &wanted() {
                prop_assert_eq!(after.get(name), Some(value));
            }
            prop_assert_eq!(&after.with(&wanted()), &changed);
            let is_ours = |line: &&str| wanted().iter().any(|(name, _)| line.trim_start().starts_with(name));
            let others = |text: &str| {
                let lines = text.lines().filter(|line| !is_ours(line) && *line != HEADING.trim_end());
                lines.map(str::to_owned).collect::<Vec<_>>()
            };
            prop_assert_eq!(others(&text), others(&changed));
        }

        /// It is a person's file.
        #[test]
        fn nothing_that_is_read_panics(text in "[a= \n\t#'\"\\[\\],1é-]{0,40}") {
            if let Ok(conf) = QemuConf::parse(&text) {
                let changed = conf.with(&wanted());
                prop_assert!(QemuConf::parse(&changed).is_ok());
            }
        }
    }

    const LINES: &[&str] = &[
        "\n",
        "# migration_host = \"a comment\"\n",
        "migration_host = \"10.0.0.1\"\n",
        "  migration_port_min\t= 1 # the least\n",
        "migration_port_min = 49216\n",
        "user = 'root'\n",
        "user = [ \"of\", \"a wrong kind\" ]\n",
        "namespaces = [\n\t\"mount\",\n\t# no more\n]\n",
        "text = \"\"\"two\nlines\"\"\"\n",
        "max_core = -1\n",
    ];
}
