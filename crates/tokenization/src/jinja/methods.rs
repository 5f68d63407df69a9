//! Methods of Python's texts, lists and dictionaries, as far as they change nothing.

use super::arguments::{is_true, named as arguments_of, text as text_of, unless_none, whole};
use super::lazy::Lazy;
use super::values::{contains, equal, integer, items, named, represented, text, wrong};
use crate::python_json::is_dictionary;
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Error, State, Value};
use std::sync::Arc;

const OF_TEXTS: [&str; 37] = [
    "capitalize",
    "center",
    "count",
    "endswith",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "title",
    "upper",
    "zfill",
];
const OF_DICTIONARIES: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const OF_LISTS: [&str; 3] = ["copy", "count", "index"];

/// Whether a value has a method of that name.
pub(super) fn is_known(value: &Value, name: &str) -> bool {
    match value.kind() {
        ValueKind::String => OF_TEXTS.contains(&name),
        ValueKind::Map => is_dictionary(value) && OF_DICTIONARIES.contains(&name),
        ValueKind::Seq => OF_LISTS.contains(&name) && (name != "copy" || !value.is_tuple()),
        _ => false,
    }
}

/// A method that is not called: it is defined, and true.
#[derive(Debug)]
pub(super) struct Method {
    pub(super) of: Value,
    pub(super) name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State, arguments: &[Value]) -> Result<Value, Error> {
        call(state, &self.of, &self.name, arguments)
    }
}

/// Calls a method.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Err(wrong(format!("an undefined value has no method `{name}`"))),
        _ if name.starts_with("__") => Err(wrong(format!("the method `{name}` is not safe"))),
        ValueKind::String if is_known(value, name) => {
            let result = of_text(value.as_str().unwrap_or_default(), name, arguments)?;
            Ok(if value.is_safe() {
                escaped(result)
            } else {
                result
            })
        }
        ValueKind::Map if is_known(value, name) => of_dictionary(value, name, arguments),
        ValueKind::Seq if is_known(value, name) => of_list(value, name, arguments),
        ValueKind::Map if name == "cycle" && arguments.is_empty() => {
            Err(wrong("loop.cycle() has nothing to go through"))
        }
        ValueKind::Map | ValueKind::Plain => value.call_method(state, name, arguments),
        _ => Err(wrong(format!(
            "{} has no method `{name}` here",
            named(value)
        ))),
    }
}

/// What a method makes of an escaped text is escaped.
pub(super) fn escaped(value: Value) -> Value {
    match (value.kind(), items(&value)) {
        (ValueKind::String, _) => Value::from_safe_string(value.to_string()),
        (ValueKind::Seq, Ok(parts)) if value.is_tuple() => Value::from(Tuple::from(
            parts.into_iter().map(escaped).collect::<Vec<_>>(),
        )),
        (ValueKind::Seq, Ok(parts)) => parts.into_iter().map(escaped).collect(),
        _ => value,
    }
}

fn of_list(value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let items = items(value)?;
    if name == "copy" {
        let [] = arguments_of(arguments, [])?;
        return Ok(value.clone());
    }
    let [wanted] = arguments_of(arguments, ["value"])?;
    let wanted = wanted.ok_or_else(|| wrong("an argument is missing"))?;
    let mut equal = items.iter().map(|item| equal(item, &wanted));
    match name {
        "count" => Ok(Value::from(equal.filter(|equal| *equal).count())),
        _ => {
            let at = equal.position(|equal| equal);
            at.map(Value::from)
                .ok_or_else(|| wrong("the list has no such item"))
        }
    }
}

fn of_dictionary(value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if name == "get" {
        let [key, default] = arguments_of(arguments, ["key", "default"])?;
        let key = key.ok_or_else(|| wrong("an argument is missing"))?;
        let found = match contains(value, &key)? {
            true => Some(value.get_item(&key)?),
            false => default,
        };
        return Ok(found.unwrap_or(Value::from(())));
    }
    let [] = arguments_of(arguments, [])?;
    Ok(match name {
        "copy" => value.clone(),
        "keys" => Lazy::view(items(value)?),
        "values" => {
            let values = items(value)?.into_iter().map(|key| value.get_item(&key));
            Lazy::view(values.collect::<Result<_, _>>()?)
        }
        _ => Lazy::view(entries(value)?),
    })
}

/// The entries of a dictionary, as tuples.
pub(super) fn entries(value: &Value) -> Result<Vec<Value>, Error> {
    let entry = |key: Value| {
        let entry = value.get_item(&key)?;
        Ok(Value::from(Tuple::from([key, entry])))
    };
    items(value)?.into_iter().map(entry).collect()
}

fn of_text(said: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let all = |is: fn(char) -> bool| Value::from(!said.is_empty() && said.chars().all(is));
    match name {
        "split" | "rsplit" => return split(said, name == "rsplit", arguments),
        "strip" | "lstrip" | "rstrip" => return strip(said, name, arguments),
        "startswith" | "endswith" => return begins_or_ends(said, name, arguments),
        "center" | "ljust" | "rjust" | "zfill" => return padded(said, name, arguments),
        "find" | "rfind" | "index" | "rindex" | "count" | "partition" | "rpartition"
        | "removeprefix" | "removesuffix" => {
            let [part] = arguments_of(arguments, ["part"])?;
            return with_part(said, name, text_of(&part)?);
        }
        "join" => {
            let [parts] = arguments_of(arguments, ["parts"])?;
            let parts = items(&parts.unwrap_or(Value::from(())))?;
            let texts: Result<Vec<String>, Error> = parts
                .into_iter()
                .map(|part| text_of(&Some(part)).map(String::from))
                .collect();
            return Ok(Value::from(texts?.join(said)));
        }
        "replace" => {
            let [old, new, count] = arguments_of(arguments, ["old", "new", "count"])?;
            return replaced(said, &old, &new, whole(&count, -1)?);
        }
        "splitlines" => {
            let [ends] = arguments_of(arguments, ["keepends"])?;
            let lines = lines(said, is_true(&ends));
            return Ok(Value::from_iter(lines));
        }
        "format" => {
            let arguments: Result<Vec<Value>, Error> = arguments.iter().map(written).collect();
            return format(FormatStyle::StrFormat, said, &arguments?).map(Value::from);
        }
        _ => {}
    }
    let [] = arguments_of(arguments, [])?;
    Ok(match name {
        "upper" => Value::from(said.to_uppercase()),
        "lower" => Value::from(said.to_lowercase()),
        "title" => Value::from(title(said)),
        "capitalize" => Value::from(capitalised(said)),
        "isascii" => Value::from(said.is_ascii()),
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isspace" => all(char::is_whitespace),
        "isdecimal" | "isdigit" | "isnumeric" => all(char::is_numeric),
        "islower" => Value::from(is_cased(said, char::is_lowercase, char::is_uppercase)),
        _ => Value::from(is_cased(said, char::is_uppercase, char::is_lowercase)),
    })
}

/// Whether a text has letters of one case and none of the other.
pub(super) fn is_cased(text: &str, case: fn(char) -> bool, other: fn(char) -> bool) -> bool {
    text.chars().any(case) && !text.chars().any(other)
}

fn with_part(said: &str, name: &str, part: &str) -> Result<Value, Error> {
    let found = if name.starts_with("rp") || name.starts_with("rf") || name.starts_with("ri") {
        said.rfind(part)
    } else {
        said.find(part)
    };
    let place = found.map(|at| said[..at].chars().count());
    match name {
        "count" => return Ok(Value::from(said.matches(part).count())),
        "removeprefix" => return Ok(Value::from(said.strip_prefix(part).unwrap_or(said))),
        "removesuffix" => return Ok(Value::from(said.strip_suffix(part).unwrap_or(said))),
        "find" | "rfind" => return Ok(place.map_or(Value::from(-1), Value::from)),
        "index" | "rindex" => {
            return place
                .map(Value::from)
                .ok_or_else(|| wrong("the text has no such part"));
        }
        _ if part.is_empty() => return Err(wrong("a separator is not empty")),
        _ => {}
    }
    let parts = match found {
        Some(at) => [&said[..at], part, &said[at + part.len()..]],
        None if name == "partition" => [said, "", ""],
        None => ["", "", said],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

fn replaced(
    said: &str,
    old: &Option<Value>,
    new: &Option<Value>,
    count: i128,
) -> Result<Value, Error> {
    let (old, new) = (text_of(old)?, text_of(new)?);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    Ok(Value::from(said.replacen(old, new, count)))
}

fn split(said: &str, is_from_end: bool, arguments: &[Value]) -> Result<Value, Error> {
    let [separator, most] = arguments_of(arguments, ["sep", "maxsplit"])?;
    let most = usize::try_from(whole(&most, -1)?).unwrap_or(usize::MAX - 1) + 1;
    let mut parts: Vec<&str> = Vec::new();
    match unless_none(separator) {
        Some(separator) => {
            let separator = Some(separator);
            let separator = text_of(&separator)?;
            if separator.is_empty() {
                return Err(wrong("a separator is not empty"));
            }
            match is_from_end {
                true => parts.extend(said.rsplitn(most, separator)),
                false => parts.extend(said.splitn(most, separator)),
            }
        }
        None if is_from_end => {
            let mut rest = said.trim_end();
            while !rest.is_empty() {
                let at = rest
                    .rfind(char::is_whitespace)
                    .filter(|_| parts.len() + 1 < most);
                let start = at.map_or(0, |at| {
                    at + rest[at..].chars().next().map_or(0, char::len_utf8)
                });
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end();
            }
        }
        None => {
            let mut rest = said.trim_start();
            while !rest.is_empty() {
                let end = rest
                    .find(char::is_whitespace)
                    .filter(|_| parts.len() + 1 < most);
                let end = end.unwrap_or(rest.len());
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start();
            }
        }
    }
    if is_from_end {
        parts.reverse();
    }
    Ok(Value::from_iter(parts))
}

fn strip(said: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [chars] = arguments_of(arguments, ["chars"])?;
    let chars = unless_none(chars);
    Ok(Value::from(stripped(said, name, &chars)?))
}

/// A text without characters at its ends: white space, unless others are named.
pub(super) fn stripped<'a>(
    said: &'a str,
    name: &str,
    chars: &Option<Value>,
) -> Result<&'a str, Error> {
    let chars = match chars {
        Some(_) => Some(text_of(chars)?),
        None => None,
    };
    let is_in = |char: char| match chars {
        Some(chars) => chars.contains(char),
        None => char.is_whitespace() || ('\x1c'..='\x1f').contains(&char),
    };
    Ok(match name {
        "lstrip" => said.trim_start_matches(is_in),
        "rstrip" => said.trim_end_matches(is_in),
        _ => said.trim_matches(is_in),
    })
}

fn begins_or_ends(said: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [parts] = arguments_of(arguments, ["parts"])?;
    let parts = match parts {
        Some(parts) if parts.is_tuple() => items(&parts)?,
        part => vec![part.unwrap_or(Value::from(()))],
    };
    for part in parts {
        let part = Some(part);
        let part = text_of(&part)?;
        let is_there = match name {
            "startswith" => said.starts_with(part),
            _ => said.ends_with(part),
        };
        if is_there {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn padded(said: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [width, fill] = arguments_of(arguments, ["width", "fillchar"])?;
    let width = width
        .as_ref()
        .map_or_else(|| Err(wrong("a width is missing")), integer)?;
    let width = usize::try_from(width.max(0)).unwrap_or(0).min(10_000);
    let fill = match (name, &fill) {
        ("zfill", _) => "0",
        (_, None) => " ",
        (_, fill) => text_of(fill)?,
    };
    if fill.chars().count() != 1 {
        return Err(wrong("what fills a text is one character"));
    }
    let missing = width.saturating_sub(said.chars().count());
    let before = match name {
        "ljust" => 0,
        "rjust" | "zfill" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    let sign = if name == "zfill" && said.starts_with(['+', '-']) {
        1
    } else {
        0
    };
    let (fills, after) = (fill.repeat(before), fill.repeat(missing - before));
    Ok(Value::from(format!(
        "{}{fills}{}{after}",
        &said[..sign],
        &said[sign..]
    )))
}

/// The lines of a text, with their ends if they are to be kept.
pub(super) fn lines(text: &str, with_ends: bool) -> Vec<&str> {
    let is_end = |char: char| {
        matches!(
            char,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let sign = match rest[end..].starts_with("\r\n") {
            true => 2,
            false => rest[end..].chars().next().map_or(0, char::len_utf8),
        };
        lines.push(&rest[..end + if with_ends { sign } else { 0 }]);
        rest = &rest[end + sign..];
    }
    lines
}

/// Python's `str.title`: a letter is capital where none stands before it.
fn title(text: &str) -> String {
    let mut is_within_word = false;
    let mut titled = String::with_capacity(text.len());
    for char in text.chars() {
        match is_within_word {
            true => titled.extend(char.to_lowercase()),
            false => titled += &capital(char),
        }
        is_within_word = char.is_alphabetic();
    }
    titled
}

/// Python's `str.capitalize`.
pub(super) fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(capital).unwrap_or_default();
    first + &chars.as_str().to_lowercase()
}

/// A letter as it begins a title: of two that it becomes only the first is capital.
fn capital(char: char) -> String {
    let mut upper = char.to_uppercase();
    let first = upper.next().into_iter();
    first.chain(upper.flat_map(char::to_lowercase)).collect()
}

/// `'%s' % x`; a tuple has the values of several places.
pub(super) fn percent(template: &Value, values: &Value) -> Result<Value, Error> {
    let template = template.as_str().unwrap_or_default();
    if template.contains("%(") {
        return Err(wrong(
            "`%` takes no places with names here; write `~` instead",
        ));
    }
    // Python takes these for a dictionary of names, of which none has to be used.
    let is_mapping = matches!(values.kind(), ValueKind::Seq | ValueKind::Map) && !values.is_tuple();
    let values = match values.is_tuple() {
        true => items(values)?,
        false => vec![values.clone()],
    };
    let mut given = values.iter();
    let mut places = Vec::new();
    let mut plain = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('%') {
        let flags = rest[at + 1..]
            .trim_start_matches(|char: char| "#0- +.".contains(char) || char.is_ascii_digit());
        let end = rest.len() - flags.len();
        plain += &rest[..end];
        let conversion = flags
            .chars()
            .next()
            .ok_or_else(|| wrong("a `%` is not finished"))?;
        rest = &flags[conversion.len_utf8()..];
        plain.push(if conversion == 'r' { 's' } else { conversion });
        if conversion != '%' {
            let value = given
                .next()
                .ok_or_else(|| wrong("`%` has too few values"))?;
            places.push(match conversion {
                'r' => represented(value)?.into(),
                's' => text(value)?.into(),
                _ => value.clone(),
            });
        }
    }
    if given.next().is_some() && !(is_mapping && places.is_empty()) {
        return Err(wrong("`%` has too many values"));
    }
    format(FormatStyle::Printf, &(plain + rest), &places).map(Value::from)
}

/// A value for a place in a text: numbers and texts stay, the others are what Python writes.
fn written(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::String => Ok(value.clone()),
        _ => text(value).map(Value::from),
    }
}
