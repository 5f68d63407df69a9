//! Messages as transformers hands them to a template.

use serde_json::{Map, Value};

/// The names of a message's reasoning, the usual one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Fields that are null are left out, since templates write `None` for them; reasoning of any name has the usual one, and
/// `thinking`.
pub(crate) fn for_template(messages: &[Value]) -> Vec<Value> {
    let plain = |message: &Value| match message {
        Value::Object(fields) => Value::Object(plain_fields(fields)),
        other => other.clone(),
    };
    messages.iter().map(plain).collect()
}

fn plain_fields(fields: &Map<String, Value>) -> Map<String, Value> {
    let present = fields.iter().filter(|(_, field)| !field.is_null());
    let mut fields: Map<String, Value> = present
        .map(|(name, field)| (name.clone(), field.clone()))
        .collect();
    let reasoning = REASONING.iter().find_map(|name| fields.get(*name));
    if let Some(reasoning) = reasoning.cloned() {
        let thinking = fields.shift_remove("thinking");
        let thinking = thinking.unwrap_or_else(|| reasoning.clone());
        // A template may write all fields: this is transformers' order.
        fields.shift_insert(0, "thinking".into(), thinking);
        fields.insert("reasoning_content".into(), reasoning);
    }
    fields
}
