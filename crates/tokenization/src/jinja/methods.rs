//! Methods of Python's texts, lists and dictionaries, as far as they change nothing.

use super::arguments::{
    is_true, named as arguments_of, required, text as text_of, unless_none, whole, width,
};
use super::lazy::Lazy;
use super::values::{contains, equal, items, named, represented, text, wrong};
use crate::python_json::is_dictionary;
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Error, State, Value};
use std::sync::Arc;

/// A method: of the text and its arguments.
type OfText = fn(&str, &[Value]) -> Result<Value, Error>;

const OF_TEXTS: &[(&str, OfText)] = &[
    ("capitalize", |said, given| alone(given, capitalised(said))),
    ("center", |said, given| {
        padded(said, given, |missing, width| {
            missing / 2 + (missing & width & 1)
        })
    }),
    ("count", |said, given| {
        Ok(said.matches(&part(given)?).count().into())
    }),
    ("endswith", |said, given| {
        is_any(given, |part| said.ends_with(part))
    }),
    ("find", |said, given| find(said, given, false)),
    ("format", |said, given| {
        let given: Result<Vec<Value>, Error> = given.iter().map(written).collect();
        format(FormatStyle::StrFormat, said, &given?).map(Value::from)
    }),
    ("index", |said, given| index(said, given, false)),
    ("isalnum", |said, given| {
        all(said, given, char::is_alphanumeric)
    }),
    ("isalpha", |said, given| {
        all(said, given, char::is_alphabetic)
    }),
    ("isascii", |said, given| alone(given, said.is_ascii())),
    ("isdecimal", |said, given| is_number(said, given, "")),
    ("isdigit", |said, given| is_number(said, given, "¹²³")),
    ("islower", |said, given| alone(given, is_lower(said))),
    ("isnumeric", |said, given| is_number(said, given, "¹²³¼½¾")),
    ("isspace", |said, given| all(said, given, is_space)),
    ("isupper", |said, given| alone(given, is_upper(said))),
    ("join", |said, given| {
        let [parts] = arguments_of(given, ["parts"])?;
        let parts = items(&required(parts)?)?;
        let texts: Result<Vec<&str>, Error> = parts.iter().map(text_of).collect();
        Ok(texts?.join(said).into())
    }),
    ("ljust", |said, given| padded(said, given, |_, _| 0)),
    ("lower", |said, given| alone(given, said.to_lowercase())),
    ("lstrip", |said, given| strip(said, given, [true, false])),
    ("partition", |said, given| parts(said, given, false)),
    ("removeprefix", |said, given| {
        Ok(said.strip_prefix(&part(given)?).unwrap_or(said).into())
    }),
    ("removesuffix", |said, given| {
        Ok(said.strip_suffix(&part(given)?).unwrap_or(said).into())
    }),
    ("replace", |said, given| {
        let [old, new, count] = arguments_of(given, ["old", "new", "count"])?;
        let (old, new) = (required(old)?, required(new)?);
        let count = usize::try_from(whole(&count, -1)?).unwrap_or(usize::MAX);
        Ok(said.replacen(text_of(&old)?, text_of(&new)?, count).into())
    }),
    ("rfind", |said, given| find(said, given, true)),
    ("rindex", |said, given| index(said, given, true)),
    ("rjust", |said, given| {
        padded(said, given, |missing, _| missing)
    }),
    ("rpartition", |said, given| parts(said, given, true)),
    ("rsplit", |said, given| split(said, true, given)),
    ("rstrip", |said, given| strip(said, given, [false, true])),
    ("split", |said, given| split(said, false, given)),
    ("splitlines", |said, given| {
        let [ends] = arguments_of(given, ["keepends"])?;
        Ok(Value::from_iter(lines(said, is_true(&ends))))
    }),
    ("startswith", |said, given| {
        is_any(given, |part| said.starts_with(part))
    }),
    ("strip", |said, given| strip(said, given, [true, true])),
    ("title", |said, given| alone(given, title(said))),
    ("upper", |said, given| alone(given, said.to_uppercase())),
    ("zfill", |said, given| {
        let [width_of] = arguments_of(given, ["width"])?;
        let missing = width(&required(width_of)?)?.saturating_sub(said.chars().count());
        let (sign, digits) = said.split_at(usize::from(said.starts_with(['+', '-'])));
        Ok(format!("{sign}{}{digits}", "0".repeat(missing)).into())
    }),
];
const OF_DICTIONARIES: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const OF_LISTS: [&str; 3] = ["copy", "count", "index"];

/// Whether a value has a method of that name.
pub(super) fn is_known(value: &Value, name: &str) -> bool {
    match value.kind() {
        ValueKind::String => OF_TEXTS.iter().any(|(known, _)| *known == name),
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
    let of_text = OF_TEXTS.iter().find(|(known, _)| *known == name);
    match value.kind() {
        ValueKind::Undefined => Err(wrong(format!("an undefined value has no method `{name}`"))),
        _ if name.starts_with("__") => Err(wrong(format!("the method `{name}` is not safe"))),
        ValueKind::String if let (Some((_, method)), Some(said)) = (of_text, value.as_str()) => {
            Ok(like(value, method(said, arguments)?))
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

/// What is made of an escaped text is escaped.
pub(super) fn like(value: &Value, made: Value) -> Value {
    match value.is_safe() {
        true => escaped(made),
        false => made,
    }
}

fn escaped(value: Value) -> Value {
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
    let wanted = required(wanted)?;
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
        let key = required(key)?;
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

/// What a method without arguments returns.
fn alone(given: &[Value], result: impl Into<Value>) -> Result<Value, Error> {
    let [] = arguments_of(given, [])?;
    Ok(result.into())
}

fn all(said: &str, given: &[Value], is: fn(char) -> bool) -> Result<Value, Error> {
    alone(given, !said.is_empty() && said.chars().all(is))
}

/// Python's white space, which has separators that Unicode's has not.
pub(super) fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\x1c'..='\x1f').contains(&char)
}

/// Whether all characters are digits, or some of these.
fn is_number(said: &str, given: &[Value], others: &str) -> Result<Value, Error> {
    for char in said.chars() {
        // The rest takes tables of Unicode. Numbers among letters are Chinese.
        if !char.is_ascii() && !"¹²³¼½¾".contains(char) && char.is_numeric()
            || char > '\u{33ff}' && others.contains('½')
        {
            return Err(wrong(format!(
                "whether `{char}` is a number is not known here"
            )));
        }
        if !char.is_ascii_digit() && !others.contains(char) {
            return alone(given, false);
        }
    }
    alone(given, !said.is_empty())
}

/// Whether a text has small letters and no capital ones.
pub(super) fn is_lower(text: &str) -> bool {
    text.contains(char::is_lowercase) && !text.contains(char::is_uppercase)
}

/// Whether a text has capital letters and no small ones.
pub(super) fn is_upper(text: &str) -> bool {
    text.contains(char::is_uppercase) && !text.contains(char::is_lowercase)
}

/// The text that a method looks for.
fn part(given: &[Value]) -> Result<String, Error> {
    let [part] = arguments_of(given, ["part"])?;
    text_of(&required(part)?).map(String::from)
}

fn separator(part: String) -> Result<String, Error> {
    match part.is_empty() {
        true => Err(wrong("a separator is not empty")),
        false => Ok(part),
    }
}

fn find(said: &str, given: &[Value], is_from_end: bool) -> Result<Value, Error> {
    let part = part(given)?;
    let at = match is_from_end {
        true => said.rfind(&part),
        false => said.find(&part),
    };
    Ok(at.map_or(Value::from(-1), |at| said[..at].chars().count().into()))
}

fn index(said: &str, given: &[Value], is_from_end: bool) -> Result<Value, Error> {
    let at = find(said, given, is_from_end)?;
    match at == Value::from(-1) {
        true => Err(wrong("the text has no such part")),
        false => Ok(at),
    }
}

fn parts(said: &str, given: &[Value], is_from_end: bool) -> Result<Value, Error> {
    let part = separator(part(given)?)?;
    let (found, none) = match is_from_end {
        true => (said.rsplit_once(&part), ["", "", said]),
        false => (said.split_once(&part), [said, "", ""]),
    };
    let parts = found.map_or(none, |(before, after)| [before, &part, after]);
    Ok(Tuple::from(parts.map(Value::from)).into())
}

fn split(said: &str, is_from_end: bool, arguments: &[Value]) -> Result<Value, Error> {
    let [separator, most] = arguments_of(arguments, ["sep", "maxsplit"])?;
    let most = usize::try_from(whole(&most, -1)?).unwrap_or(usize::MAX - 1) + 1;
    let mut parts: Vec<&str> = Vec::new();
    match unless_none(separator) {
        Some(separator) => {
            let separator = self::separator(text_of(&separator)?.into())?;
            match is_from_end {
                true => parts.extend(said.rsplitn(most, &separator)),
                false => parts.extend(said.splitn(most, &separator)),
            }
        }
        None if is_from_end => {
            let mut rest = said.trim_end_matches(is_space);
            while !rest.is_empty() {
                let at = rest.rfind(is_space).filter(|_| parts.len() + 1 < most);
                let start = at.map_or(0, |at| {
                    at + rest[at..].chars().next().map_or(0, char::len_utf8)
                });
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end_matches(is_space);
            }
        }
        None => {
            let mut rest = said.trim_start_matches(is_space);
            while !rest.is_empty() {
                let end = rest.find(is_space).filter(|_| parts.len() + 1 < most);
                let end = end.unwrap_or(rest.len());
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start_matches(is_space);
            }
        }
    }
    if is_from_end {
        parts.reverse();
    }
    Ok(Value::from_iter(parts))
}

/// A text without characters at its sides: white space, unless others are named.
fn strip(said: &str, given: &[Value], [left, right]: [bool; 2]) -> Result<Value, Error> {
    let [chars] = arguments_of(given, ["chars"])?;
    let chars = unless_none(chars);
    let chars = chars.as_ref().map(text_of).transpose()?;
    let is_in = |char: char| chars.map_or(is_space(char), |chars| chars.contains(char));
    let said = if left {
        said.trim_start_matches(is_in)
    } else {
        said
    };
    Ok(Value::from(if right {
        said.trim_end_matches(is_in)
    } else {
        said
    }))
}

/// Whether a text, or one of a tuple, is there.
fn is_any(given: &[Value], is: impl Fn(&str) -> bool) -> Result<Value, Error> {
    let [parts] = arguments_of(given, ["parts"])?;
    let parts = required(parts)?;
    let parts = if parts.is_tuple() {
        items(&parts)?
    } else {
        vec![parts]
    };
    for part in &parts {
        if is(text_of(part)?) {
            return Ok(true.into());
        }
    }
    Ok(false.into())
}

/// A text of a width. `before` says how many of the missing characters precede it.
fn padded(said: &str, given: &[Value], before: fn(usize, usize) -> usize) -> Result<Value, Error> {
    let [width_of, fill] = arguments_of(given, ["width", "fillchar"])?;
    let (width, fill) = (width(&required(width_of)?)?, fill.unwrap_or(" ".into()));
    let fill = text_of(&fill)?;
    if fill.chars().count() != 1 {
        return Err(wrong("what fills a text is one character"));
    }
    let missing = width.saturating_sub(said.chars().count());
    let before = before(missing, width);
    let after = fill.repeat(missing - before);
    Ok(format!("{}{said}{after}", fill.repeat(before)).into())
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

/// The words that end with a separator each, with their first letters as capitals and small ones behind them.
pub(super) fn titled(
    text: &str,
    capital: fn(char) -> String,
    separates: fn(char) -> bool,
) -> String {
    let words = text.split_inclusive(separates).map(|word| {
        let mut chars = word.chars();
        let first = chars.next().map(capital).unwrap_or_default();
        first + &chars.as_str().to_lowercase()
    });
    words.collect()
}

/// Python's `str.title`: a letter is capital where none precedes it.
fn title(text: &str) -> String {
    let separates = |char: char| !char.is_uppercase() && !char.is_lowercase();
    titled(text, capital, separates)
}

/// Python's `str.capitalize`.
fn capitalised(text: &str) -> String {
    titled(text, capital, |_| false)
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
    let is_mapping = match values.kind() {
        ValueKind::Seq => !values.is_tuple(),
        kind => kind == ValueKind::Undefined || is_dictionary(values),
    };
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
