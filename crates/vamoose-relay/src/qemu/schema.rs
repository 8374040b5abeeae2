//! A QEMU's schema: commands, migration capabilities and parameters.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// The relevant parts of `query-qmp-schema`.
pub(super) struct Schema {
    commands: BTreeSet<String>,
    capabilities: Vec<String>,
    /// Migration parameters, with their values if these are an enumeration.
    parameters: BTreeMap<String, Vec<String>>,
}

impl Schema {
    /// Follows the schema's type names, starting from the commands. The type names themselves are arbitrary.
    pub(super) fn new(schema: Value) -> Self {
        let entries = schema.as_array().into_iter().flatten();
        let types = entries
            .filter_map(|entry| Some((entry["name"].as_str()?, entry)))
            .collect::<BTreeMap<_, _>>();
        let commands = types
            .iter()
            .filter(|(_, entry)| entry["meta-type"] == "command");
        let commands = commands.map(|(name, _)| (*name).to_owned()).collect();
        let entry = |name: &Value| types.get(name.as_str()?).copied();
        let members = |name: &Value| {
            let list = entry(name).and_then(|object| object["members"].as_array());
            list.into_iter().flatten()
        };
        let enumeration = |name: &Value| {
            let values = entry(name).and_then(|kind| kind["values"].as_array());
            let values = values.into_iter().flatten().filter_map(Value::as_str);
            values.map(str::to_owned).collect::<Vec<_>>()
        };
        let argument = |command: &str| types.get(command).map_or(&Value::Null, |c| &c["arg-type"]);

        let list = members(argument("migrate-set-capabilities")).next();
        let element = list
            .and_then(|list| entry(&list["type"]))
            .map_or(&Value::Null, |array| &array["element-type"]);
        let capability = members(element).find(|member| member["name"] == "capability");
        let capabilities = capability.map_or_else(Vec::new, |member| enumeration(&member["type"]));
        let parameters = members(argument("migrate-set-parameters"))
            .filter_map(|member| {
                let values = enumeration(&member["type"]);
                Some((member["name"].as_str()?.to_owned(), values))
            })
            .collect();
        Self {
            commands,
            capabilities,
            parameters,
        }
    }

    pub(super) fn has_command(&self, name: &str) -> bool {
        self.commands.contains(name)
    }

    pub(super) fn has_capability(&self, name: &str) -> bool {
        self.capabilities.iter().any(|known| known == name)
    }

    pub(super) fn has_parameter(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    pub(super) fn parameter_takes(&self, parameter: &str, value: &str) -> bool {
        self.parameters
            .get(parameter)
            .is_some_and(|values| values.iter().any(|known| known == value))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_schema_is_followed_by_its_type_names() {
        let schema = Schema::new(json!([
            { "name": "migrate-set-capabilities", "meta-type": "command", "arg-type": "1" },
            { "name": "1", "meta-type": "object", "members": [{ "name": "capabilities", "type": "[2]" }] },
            { "name": "[2]", "meta-type": "array", "element-type": "2" },
            { "name": "2", "meta-type": "object", "members": [
                { "name": "capability", "type": "3" }, { "name": "state", "type": "bool" }] },
            { "name": "3", "meta-type": "enum", "values": ["multifd", "return-path"] },
            { "name": "migrate-set-parameters", "meta-type": "command", "arg-type": "4" },
            { "name": "4", "meta-type": "object", "members": [
                { "name": "multifd-compression", "type": "5" }, { "name": "downtime-limit", "type": "int" }] },
            { "name": "5", "meta-type": "enum", "values": ["none", "zstd"] },
        ]));
        assert!(schema.has_command("migrate-set-parameters") && !schema.has_command("1"));
        assert!(schema.has_capability("multifd") && !schema.has_capability("rdma"));
        assert!(schema.parameter_takes("multifd-compression", "zstd"));
        assert!(!schema.parameter_takes("multifd-compression", "qpl"));
        assert!(!schema.parameter_takes("zero-page-detection", "multifd"));
        assert!(schema.has_parameter("downtime-limit") && !schema.has_parameter("cpu-throttle"));
        assert!(!Schema::new(Value::Null).has_capability("multifd"));
    }
}
