//! Values as Python has them: their texts, how they compare, what is iterable.

use super::lazy::Lazy;
use crate::python_json::{float, is_dictionary};
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use std::cmp::Ordering;

/// An error of the template's.
pub(super) fn wrong(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// What a value is called in errors.
pub(super) fn named(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => "an undefined value".into(),
        kind => format!("a value of type {kind}"),
    }
}

/// A number: an integer, or a float.
#[derive(Clone, Copy)]
pub(super) enum Number {
    Integer(i128),
    Float(f64),
}

impl Number {
    /// The number that a value is; true and false are 1 and 0.
    pub(super) fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Integer(i128::from(value.is_true()))),
            ValueKind::Number if value.is_integer() => {
                i128::try_from(value.clone()).ok().map(Number::Integer)
            }
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    pub(super) fn float(self) -> f64 {
        match self {
            Number::Integer(number) => number as f64,
            Number::Float(number) => number,
        }
    }
}

impl From<Number> for Value {
    fn from(number: Number) -> Value {
        match number {
            Number::Integer(number) => match i64::try_from(number) {
                Ok(number) => number.into(),
                Err(_) => number.into(),
            },
            Number::Float(number) => number.into(),
        }
    }
}

/// The integer that a value is.
pub(super) fn integer(value: &Value) -> Result<i128, Error> {
    match Number::of(value) {
        Some(Number::Integer(number)) => Ok(number),
        _ => Err(wrong(format!("{} is no integer", named(value)))),
    }
}

/// Python's `str`.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.to_string()),
        _ => represented(value),
    }
}

/// The text, with the five characters that Python's markupsafe escapes as it writes them, unless they are escaped already.
pub(super) fn escaped(value: &Value) -> Result<String, Error> {
    let text = text(value)?;
    if value.is_safe() {
        return Ok(text);
    }
    let text = text.replace('&', "&amp;");
    let text = text.replace('<', "&lt;").replace('>', "&gt;");
    Ok(text.replace('\'', "&#39;").replace('"', "&#34;"))
}

/// Python's `repr`.
pub(super) fn represented(value: &Value) -> Result<String, Error> {
    let joined = |values: Vec<Value>| -> Result<String, Error> {
        let values: Result<Vec<String>, Error> = values.iter().map(represented).collect();
        Ok(values?.join(", "))
    };
    match value.kind() {
        ValueKind::Undefined => Ok("Undefined".into()),
        ValueKind::None | ValueKind::Bool => Ok(value.to_string()),
        ValueKind::Number => Ok(match Number::of(value) {
            Some(Number::Float(number)) => float(number),
            _ => value.to_string(),
        }),
        ValueKind::String => {
            let quoted = quoted(value.as_str().unwrap_or_default());
            Ok(match value.is_safe() {
                true => format!("Markup({quoted})"),
                false => quoted,
            })
        }
        ValueKind::Seq if value.is_tuple() => {
            let comma = if value.len() == Some(1) { "," } else { "" };
            Ok(format!("({}{comma})", joined(items(value)?)?))
        }
        ValueKind::Seq => Ok(format!("[{}]", joined(items(value)?)?)),
        ValueKind::Map if is_dictionary(value) => {
            let entry = |key: Value| -> Result<String, Error> {
                let entry = value.get_item(&key)?;
                Ok(format!("{}: {}", represented(&key)?, represented(&entry)?))
            };
            let entries: Result<Vec<String>, Error> =
                items(value)?.into_iter().map(entry).collect();
            Ok(format!("{{{}}}", entries?.join(", ")))
        }
        _ => Err(wrong(
            "cannot be written as text: a function, a loop or a generator; add `|list`",
        )),
    }
}

/// In single quotes, unless there are some in the text and no double ones.
fn quoted(text: &str) -> String {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    let mut out = String::from(quote);
    for char in text.chars() {
        match char {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            char if char == quote => out.extend(['\\', char]),
            char @ ('\0'..='\x1f' | '\x7f'..='\u{a0}' | '\u{ad}') => {
                out.push_str(&format!("\\x{:02x}", char as u32));
            }
            char => out.push(char),
        }
    }
    out.push(quote);
    out
}

/// What a loop over the value goes through.
pub(super) fn items(value: &Value) -> Result<Vec<Value>, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Vec::new()),
        ValueKind::Map if !is_dictionary(value) => Err(not_iterable(value)),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            value.try_iter()?.checked().collect()
        }
        _ => Err(not_iterable(value)),
    }
}

fn not_iterable(value: &Value) -> Error {
    wrong(format!("{} is not iterable", named(value)))
}

/// Python's `len`.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    let has_length = match value.kind() {
        ValueKind::Undefined => return Ok(0),
        ValueKind::String | ValueKind::Seq => true,
        ValueKind::Map => is_dictionary(value),
        ValueKind::Iterable => !Lazy::is_generator(value),
        _ => false,
    };
    let length = value.len().filter(|_| has_length);
    length.ok_or_else(|| wrong(format!("{} has no length", named(value))))
}

/// Python's `==`.
pub(super) fn equal(a: &Value, b: &Value) -> bool {
    if let (Some(a), Some(b)) = (Number::of(a), Number::of(b)) {
        return match (a, b) {
            (Number::Integer(a), Number::Integer(b)) => a == b,
            _ => a.float() == b.float(),
        };
    }
    if a.kind() != b.kind() {
        return false;
    }
    match a.kind() {
        ValueKind::Seq => {
            let (Ok(ours), Ok(theirs)) = (items(a), items(b)) else {
                return false;
            };
            a.is_tuple() == b.is_tuple()
                && ours.len() == theirs.len()
                && ours.iter().zip(&theirs).all(|(a, b)| equal(a, b))
        }
        ValueKind::Map if is_dictionary(a) && is_dictionary(b) => {
            let entry = |value: &Value, key: &Value| value.get_item(key).unwrap_or_default();
            let (Ok(keys), Ok(theirs)) = (items(a), items(b)) else {
                return false;
            };
            let same = |key: &Value| theirs.contains(key) && equal(&entry(a, key), &entry(b, key));
            keys.len() == theirs.len() && keys.iter().all(same)
        }
        ValueKind::Iterable | ValueKind::Plain | ValueKind::Map => false,
        _ => a == b,
    }
}

/// Which of two values comes first.
///
/// # Errors
/// Values of types that Python does not compare.
pub(super) fn compared(a: &Value, b: &Value) -> Result<Ordering, Error> {
    if let (Some(a), Some(b)) = (Number::of(a), Number::of(b)) {
        return match (a, b) {
            (Number::Integer(a), Number::Integer(b)) => Ok(a.cmp(&b)),
            _ => a
                .float()
                .partial_cmp(&b.float())
                .ok_or_else(|| wrong("NaN has no order")),
        };
    }
    match (a.kind(), b.kind()) {
        (ValueKind::String, ValueKind::String) => Ok(a.as_str().cmp(&b.as_str())),
        (ValueKind::Seq, ValueKind::Seq) if a.is_tuple() == b.is_tuple() => {
            let (ours, theirs) = (items(a)?, items(b)?);
            let differing = ours.iter().zip(&theirs).find(|(a, b)| !equal(a, b));
            match differing {
                Some((a, b)) => compared(a, b),
                None => Ok(ours.len().cmp(&theirs.len())),
            }
        }
        _ => Err(wrong(format!(
            "{} and {} have no order",
            named(a),
            named(b)
        ))),
    }
}

/// Python's `value in container`.
pub(super) fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    match (container.kind(), value.as_str()) {
        (ValueKind::String, Some(part)) => {
            Ok(container.as_str().unwrap_or_default().contains(part))
        }
        (ValueKind::String, None) => Err(wrong(format!("a text cannot contain {}", named(value)))),
        (ValueKind::Map, _)
            if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) && !value.is_tuple() =>
        {
            Err(wrong(format!("{} is no key", named(value))))
        }
        _ => Ok(items(container)?.iter().any(|item| equal(item, value))),
    }
}
