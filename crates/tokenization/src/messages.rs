//! Messages as transformers hands them to a template.

use files::unique_json;
use serde_json::{Map, Value, json};

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

/// The messages with the arguments of tool calls as objects where they are texts with JSON in them, OpenAI's own form: templates
/// write arguments as JSON themselves, and would quote a text. None where there are no such texts.
pub(crate) fn with_arguments(messages: &[Value]) -> Option<Vec<Value>> {
    let mut has_texts = false;
    let mut messages = messages.to_vec();
    let calls = messages.iter_mut().filter_map(|message| {
        let calls = message.get_mut("tool_calls")?;
        calls.as_array_mut()
    });
    for call in calls.flatten() {
        let holder = match call.get("function").is_some_and(Value::is_object) {
            true => &mut call["function"],
            false => call,
        };
        let Some(arguments) = holder.get_mut("arguments") else {
            continue;
        };
        let text = arguments.as_str().filter(|text| !has_long_integer(text));
        let object = text.and_then(|text| unique_json(text).ok());
        if let Some(object @ Value::Object(_)) = object {
            *arguments = object;
            has_texts = true;
        }
    }
    has_texts.then_some(messages)
}

/// Whether JSON has an integer of more than 64 bits, which would be rounded.
fn has_long_integer(json: &str) -> bool {
    let unescaped = json.replace(r"\\", "").replace("\\\"", "");
    let unquoted = unescaped.split('"').step_by(2);
    let mut numbers = unquoted.flat_map(|part| {
        part.split(|char: char| !char.is_ascii_alphanumeric() && !"+-.".contains(char))
    });
    numbers.any(|number| {
        let digits = number.strip_prefix('-').unwrap_or(number);
        !digits.is_empty()
            && digits.bytes().all(|byte| byte.is_ascii_digit())
            && number.parse::<i64>().is_err()
            && number.parse::<u64>().is_err()
    })
}

/// The message with `text` in place of all that it says, or nothing but that; thoughts only where it has some.
pub(crate) fn saying(message: &Value, text: &str) -> Value {
    let mut other = json!({"role": message["role"], "content": text});
    for name in REASONING {
        if message[name].is_string() && !text.is_empty() {
            other[name] = text.into();
        }
    }
    other
}

/// The messages without tool calls; none where there are none.
pub(crate) fn without_calls(messages: &[Value]) -> Option<Vec<Value>> {
    let has_calls = |message: &Value| {
        message["tool_calls"]
            .as_array()
            .is_some_and(|calls| !calls.is_empty())
    };
    messages.iter().any(has_calls).then(|| {
        let mut messages = messages.to_vec();
        let objects = messages.iter_mut().filter_map(Value::as_object_mut);
        objects.for_each(|fields| drop(fields.shift_remove("tool_calls")));
        messages
    })
}
