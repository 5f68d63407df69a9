//! Jinja 2's filters by Python's rules.
//!
//! Filters that no chat template uses are missing; an error names them.

use super::arguments::{
    is_true, named as arguments_of, required, text as text_of, unless_none, whole, width,
};
use super::lazy::Lazy;
use super::methods::{self, entries, is_space, like, lines, titled};
use super::operators::{arithmetic, attribute, item};
use super::values::{Number, compared, equal, escaped, integer, items, length, named, text, wrong};
use crate::python_json::{is_dictionary, tojson};
use Filter::{Alone, Given, Method, Stated};
use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::cmp::Ordering::{self, Greater, Less};

/// What computes a filter.
#[derive(Clone, Copy)]
enum Filter {
    /// From the value alone.
    Alone(fn(&Value) -> Result<Value, Error>),
    /// From the value and the arguments.
    Given(fn(&Value, &[Value]) -> Result<Value, Error>),
    /// The same, with the state of the template, whose filters it calls.
    Stated(fn(&mut State, &Value, &[Value]) -> Result<Value, Error>),
    /// The method of that name of the value's text.
    Method(&'static str),
}

const FILTERS: &[(&str, Filter)] = &[
    ("abs", Alone(absolute)),
    ("attr", Given(attribute_alone)),
    ("capitalize", Method("capitalize")),
    ("center", Stated(center)),
    ("count", Alone(|value| Ok(length(value)?.into()))),
    ("d", Given(default)),
    ("default", Given(default)),
    ("dictsort", Given(dictsort)),
    ("e", Alone(escape)),
    ("escape", Alone(escape)),
    (
        "first",
        Alone(|value| Ok(items(value)?.first().cloned().unwrap_or_default())),
    ),
    ("float", Given(float)),
    ("forceescape", Alone(|value| escape(&text(value)?.into()))),
    (
        "format",
        Given(|value, arguments| {
            let tuple = Tuple::from(arguments);
            methods::percent(&Value::from(text(value)?), &Value::from(tuple))
        }),
    ),
    ("indent", Given(indent)),
    ("int", Given(int)),
    (
        "items",
        Alone(|value| match value.kind() {
            ValueKind::Undefined => Ok(Lazy::generator(Vec::new())),
            ValueKind::Map if is_dictionary(value) => Ok(Lazy::generator(entries(value)?)),
            _ => Err(wrong(format!("{} is no dictionary", named(value)))),
        }),
    ),
    ("join", Given(join)),
    (
        "last",
        Alone(|value| match Lazy::is_generator(value) {
            true => Err(wrong("a generator has no last item; add `|list`")),
            false => Ok(items(value)?.last().cloned().unwrap_or_default()),
        }),
    ),
    ("length", Alone(|value| Ok(length(value)?.into()))),
    ("list", Alone(|value| items(value).map(Value::from))),
    ("lower", Method("lower")),
    ("map", Stated(map)),
    ("max", Given(|value, given| extreme(value, given, Greater))),
    ("min", Given(|value, given| extreme(value, given, Less))),
    ("reject", Stated(select::<false, false>)),
    ("rejectattr", Stated(select::<true, false>)),
    ("replace", Stated(replace)),
    (
        "reverse",
        Alone(|value| match value.as_str() {
            Some(text) => Ok(like(value, text.chars().rev().collect::<String>().into())),
            None if Lazy::is_generator(value) => Ok(items(value)?.into_iter().rev().collect()),
            None => Ok(Lazy::generator(items(value)?.into_iter().rev().collect())),
        }),
    ),
    ("round", Given(round)),
    (
        "safe",
        Alone(|value| Ok(Value::from_safe_string(text(value)?))),
    ),
    ("select", Stated(select::<false, true>)),
    ("selectattr", Stated(select::<true, true>)),
    ("sort", Given(sort)),
    ("string", Alone(string)),
    ("sum", Given(sum)),
    ("title", Alone(title)),
    (
        "tojson",
        Given(|value, arguments| {
            let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
            let [ascii, indent, separators, sort_keys] = arguments_of(arguments, names)?;
            let indent = unless_none(indent).as_ref().map(indentation).transpose()?;
            tojson(value, indent, [ascii, separators, sort_keys]).map(Value::from)
        }),
    ),
    ("trim", Method("strip")),
    ("unique", Given(unique)),
    ("upper", Method("upper")),
];

/// Filters of minijinja that Jinja 2 does not have, or that differ in it.
const REMOVED: [&str; 9] = [
    "batch", "bool", "chain", "groupby", "lines", "pprint", "slice", "split", "zip",
];

pub(super) fn add(environment: &mut Environment) {
    for name in REMOVED {
        environment.remove_filter(name);
    }
    for &(name, filter) in FILTERS {
        let call = move |state: &mut State, value: &Value, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            match filter {
                Alone(filter) => {
                    let [] = arguments_of(&arguments, [])?;
                    filter(value)
                }
                Given(filter) => filter(value, &arguments),
                Stated(filter) => filter(state, value, &arguments),
                Method(name) => methods::call(state, &string(value)?, name, &arguments),
            }
        };
        environment.add_filter(name, call);
    }
}

fn string(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ => text(value).map(Value::from),
    }
}

fn escape(value: &Value) -> Result<Value, Error> {
    escaped(value).map(Value::from_safe_string)
}

fn center(state: &mut State, value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [width] = arguments_of(arguments, ["width"])?;
    let width = width.unwrap_or(Value::from(80));
    methods::call(state, &string(value)?, "center", &[width])
}

fn replace(state: &mut State, value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [old, new, count] = arguments_of(arguments, ["old", "new", "count"])?;
    let [old, new] = [old, new].map(|part| text(&required(part)?).map(Value::from));
    let count = Value::from(whole(&unless_none(count), -1)?);
    methods::call(state, &text(value)?.into(), "replace", &[old?, new?, count])
}

fn sum(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [attribute, start] = arguments_of(arguments, ["attribute", "start"])?;
    let sum = start.unwrap_or(Value::from(0));
    if sum.kind() == ValueKind::String {
        return Err(wrong("texts are joined, and not summed"));
    }
    items(value)?.into_iter().try_fold(sum, |sum, item| {
        arithmetic(&sum, "+", &of_attribute(&item, &attribute, &None)?)
    })
}

fn absolute(value: &Value) -> Result<Value, Error> {
    match Number::of(value) {
        Some(Number::Integer(number)) => Ok(Number::Integer(number.saturating_abs()).into()),
        Some(Number::Float(number)) => Ok(number.abs().into()),
        None => Err(wrong(format!("{} is no number", named(value)))),
    }
}

/// An attribute, but no item.
fn attribute_alone(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [name] = arguments_of(arguments, ["name"])?;
    let name = required(name)?;
    match text_of(&name)? {
        name if is_dictionary(value) && !methods::is_known(value, name) => Ok(Value::UNDEFINED),
        name => attribute(value, name),
    }
}

fn default(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [default, boolean] = arguments_of(arguments, ["default_value", "boolean"])?;
    let is_missing = value.is_undefined() || is_true(&boolean) && !value.is_true();
    Ok(match is_missing {
        true => default.unwrap_or(Value::from("")),
        false => value.clone(),
    })
}

/// A number's text as Rust reads it: Python allows an underscore between digits, and the digits of other scripts, which we refuse.
fn digits(text: &str, base: u32) -> Result<String, Error> {
    let text = text.trim();
    if text.contains(|char: char| !char.is_ascii() && char.is_numeric()) {
        return Err(wrong(format!(
            "whether `{text}` is a number is not known here"
        )));
    }
    let is_digit = |char: char| char.is_digit(base);
    let parts: Vec<&str> = text.split('_').collect();
    let mut pairs = parts.windows(2);
    let is_number = pairs.all(|pair| pair[0].ends_with(is_digit) && pair[1].starts_with(is_digit));
    Ok(if is_number {
        parts.concat()
    } else {
        text.into()
    })
}

fn truncated(number: f64) -> Result<Value, Error> {
    match number.abs() < i128::MAX as f64 {
        true => Ok(Number::Integer(number as i128).into()),
        false => Err(wrong("a number is too large")),
    }
}

fn float(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [default] = arguments_of(arguments, ["default"])?;
    let default = default.unwrap_or(Value::from(0.0));
    Ok(match (Number::of(value), value.as_str()) {
        (Some(number), _) => number.float().into(),
        (None, Some(text)) => digits(text, 10)?
            .parse::<f64>()
            .map_or(default, Value::from),
        (None, None) if value.is_undefined() => {
            return Err(wrong("an undefined value is no number"));
        }
        (None, None) => default,
    })
}

fn int(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [default, base] = arguments_of(arguments, ["default", "base"])?;
    let base = match whole(&base, 10)? {
        10 => 10,
        16 => 16,
        _ => return Err(wrong("the base of `int` is 10 or 16 here")),
    };
    let default = default.unwrap_or(Value::from(0));
    let number = match (Number::of(value), value.as_str()) {
        (Some(Number::Float(number)), _) => Some(number),
        (Some(number), _) => return Ok(number.into()),
        (None, Some(text)) => {
            let text = text.trim();
            let (sign, rest) = text.split_at(usize::from(text.starts_with(['-', '+'])));
            let hexadecimal = rest.strip_prefix("0x").or(rest.strip_prefix("0X"));
            let hexadecimal = hexadecimal.map(|rest| rest.strip_prefix('_').unwrap_or(rest));
            let rest = hexadecimal.filter(|_| base == 16).unwrap_or(rest);
            let whole = i128::from_str_radix(&(sign.to_owned() + &digits(rest, base)?), base);
            match whole {
                Ok(number) if rest.starts_with(|char: char| char.is_digit(base)) => {
                    return Ok(Number::Integer(number).into());
                }
                _ => digits(text, 10)?.parse::<f64>().ok(),
            }
        }
        (None, None) if value.is_undefined() => {
            return Err(wrong("an undefined value is no number"));
        }
        (None, None) => None,
    };
    let number = number.filter(|number| number.is_finite());
    number.map_or(Ok(default), truncated)
}

fn round(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [precision, method] = arguments_of(arguments, ["precision", "method"])?;
    // No float has more digits than 400.
    let precision = usize::try_from(whole(&precision, 0)?)
        .map_err(|_| wrong("the precision of `round` is not negative here"))?
        .min(400);
    let method = method.as_ref().map_or(Ok("common"), text_of)?;
    let number =
        Number::of(value).ok_or_else(|| wrong(format!("{} is no number", named(value))))?;
    let scale = 10_f64.powi(precision as i32);
    Ok(match (method, number) {
        ("common", Number::Integer(_)) => number.into(),
        ("common", Number::Float(number)) => format!("{number:.precision$}")
            .parse::<f64>()
            .unwrap_or(number)
            .into(),
        ("ceil" | "floor", _) if scale.is_infinite() => {
            return Err(wrong("a number is too large"));
        }
        ("ceil", number) => ((number.float() * scale).ceil() / scale).into(),
        ("floor", number) => ((number.float() * scale).floor() / scale).into(),
        _ => return Err(wrong("the method of `round` is common, ceil or floor")),
    })
}

fn indentation(given: &Value) -> Result<String, Error> {
    match given.as_str() {
        Some(text) => Ok(text.into()),
        None => Ok(" ".repeat(width(given)?)),
    }
}

fn indent(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [given, first, blank] = arguments_of(arguments, ["width", "first", "blank"])?;
    let indent = indentation(&given.unwrap_or(Value::from(4)))?;
    // As in Jinja, a last line that is empty counts.
    let said = format!("{}\n", text_of(value)?);
    let mut out = String::new();
    for (at, line) in lines(&said, false).into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        let is_indented = match at {
            0 => is_true(&first),
            _ => is_true(&blank) || !line.is_empty(),
        };
        if is_indented {
            out += &indent;
        }
        out += line;
    }
    Ok(like(value, out.into()))
}

/// The attribute of an item that a filter looks at, such as `a.b` or `0`; the item itself without one. A default stands for each
/// part of it that is undefined.
fn of_attribute(
    value: &Value,
    attribute: &Option<Value>,
    default: &Option<Value>,
) -> Result<Value, Error> {
    let part = |value: Value, part: &Value| match (item(&value, part)?, default) {
        (found, Some(default)) if found.is_undefined() && !default.is_none() => Ok(default.clone()),
        (found, _) => Ok(found),
    };
    let Some(attribute) = attribute else {
        return Ok(value.clone());
    };
    let Some(path) = attribute.as_str() else {
        return part(value.clone(), attribute);
    };
    path.split('.').try_fold(value.clone(), |value, name| {
        let is_number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        match name.parse::<i64>() {
            Ok(at) if is_number => part(value, &at.into()),
            _ => part(value, &name.into()),
        }
    })
}

fn title(value: &Value) -> Result<Value, Error> {
    let separates = |char| matches!(char, '-' | '(' | '{' | '[' | '<') || is_space(char);
    let capital = |char: char| char.to_uppercase().collect();
    Ok(titled(&text(value)?, capital, separates).into())
}

fn small(value: Value, case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(text) if !case_sensitive => text.to_lowercase().into(),
        _ => value,
    }
}

fn join(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [separator, attribute] = arguments_of(arguments, ["d", "attribute"])?;
    let attribute = unless_none(attribute);
    let text_of_item = |item: Value| text(&of_attribute(&item, &attribute, &None)?);
    let texts: Result<Vec<String>, Error> = items(value)?.into_iter().map(text_of_item).collect();
    let separator = separator.as_ref().map_or(Ok(String::new()), text)?;
    Ok(texts?.join(&separator).into())
}

/// Sorts as Python does: equal ones stay in their order, and values that have no order are an error.
fn sorted(keyed: Vec<(Value, Value)>, is_reverse: bool) -> Result<Vec<Value>, Error> {
    let mut sorted: Vec<(Value, Value)> = Vec::with_capacity(keyed.len());
    let mut failed = None;
    for (key, value) in keyed {
        let at = sorted.partition_point(|(other, _)| match compared(other, &key) {
            Ok(order) if is_reverse => order.is_ge(),
            Ok(order) => order.is_le(),
            Err(error) => {
                failed.get_or_insert(error);
                true
            }
        });
        sorted.insert(at, (key, value));
    }
    if let Some(error) = failed {
        return Err(error);
    }
    Ok(sorted.into_iter().map(|(_, value)| value).collect())
}

fn sort(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let names = ["reverse", "case_sensitive", "attribute"];
    let [reverse, case_sensitive, attribute] = arguments_of(arguments, names)?;
    let attribute = unless_none(attribute);
    let parts: Vec<Option<Value>> = match attribute.as_ref().and_then(Value::as_str) {
        Some(paths) => paths.split(',').map(|path| Some(path.into())).collect(),
        None => vec![attribute],
    };
    let key = |item: &Value| -> Result<Value, Error> {
        let key = |part| {
            Ok(small(
                of_attribute(item, part, &None)?,
                is_true(&case_sensitive),
            ))
        };
        parts.iter().map(key).collect()
    };
    let keyed: Result<Vec<_>, Error> = items(value)?
        .into_iter()
        .map(|item| Ok((key(&item)?, item)))
        .collect();
    sorted(keyed?, is_true(&reverse)).map(Value::from)
}

fn dictsort(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] =
        arguments_of(arguments, ["case_sensitive", "by", "reverse"])?;
    let place = match by.as_ref().map_or(Some("key"), Value::as_str) {
        Some("key") => 0,
        Some("value") => 1,
        _ => return Err(wrong("dictsort is by `key` or `value`")),
    };
    if value.kind() != ValueKind::Map || !is_dictionary(value) {
        return Err(wrong(format!("{} is no dictionary", named(value))));
    }
    let keyed = entries(value)?.into_iter().map(|entry| {
        let key = entry.get_item_by_index(place)?;
        Ok((small(key, is_true(&case_sensitive)), entry))
    });
    sorted(keyed.collect::<Result<_, Error>>()?, is_true(&reverse)).map(Value::from)
}

fn extreme(value: &Value, arguments: &[Value], wanted: Ordering) -> Result<Value, Error> {
    let [case_sensitive, attribute] = arguments_of(arguments, ["case_sensitive", "attribute"])?;
    let mut best: Option<(Value, Value)> = None;
    for item in items(value)? {
        let key = small(
            of_attribute(&item, &attribute, &None)?,
            is_true(&case_sensitive),
        );
        let is_better = match &best {
            Some((best, _)) => compared(&key, best)? == wanted,
            None => true,
        };
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(best.map(|(_, item)| item).unwrap_or_default())
}

fn unique(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [case_sensitive, attribute] = arguments_of(arguments, ["case_sensitive", "attribute"])?;
    let (mut seen, mut found): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    for item in items(value)? {
        let key = small(
            of_attribute(&item, &attribute, &None)?,
            is_true(&case_sensitive),
        );
        if matches!(key.kind(), ValueKind::Seq | ValueKind::Map) && !key.is_tuple() {
            return Err(wrong("lists and dictionaries are never unique"));
        }
        if !seen.iter().any(|seen| equal(seen, &key)) {
            seen.push(key);
            found.push(item);
        }
    }
    Ok(Lazy::generator(found))
}

/// The items of a value that a filter goes through, if it is true.
fn items_if_true(value: &Value) -> Result<Vec<Value>, Error> {
    match value.is_true() {
        true => items(value),
        false => Ok(Vec::new()),
    }
}

fn map(state: &mut State, value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let found: Result<Vec<Value>, Error> = match arguments.split_first() {
        Some((name, rest)) if !name.is_kwargs() => {
            let name = text_of(name)?;
            let filtered = items_if_true(value)?.into_iter().map(|item| {
                let filtered = state.apply_filter(name, &[&[item], rest].concat());
                filtered.map_err(|error| unknown(error, "filter", name))
            });
            filtered.collect()
        }
        _ => {
            let [attribute, default] = arguments_of(arguments, ["attribute", "default"])?;
            if attribute.is_none() {
                return Err(wrong("`map` needs a filter or an attribute"));
            }
            let found = |item: Value| of_attribute(&item, &attribute, &default);
            items_if_true(value)?.into_iter().map(found).collect()
        }
    };
    found.map(Lazy::generator)
}

fn select<const BY_ATTRIBUTE: bool, const WANTED: bool>(
    state: &mut State,
    value: &Value,
    arguments: &[Value],
) -> Result<Value, Error> {
    let (attribute, rest) = match BY_ATTRIBUTE {
        true => match arguments.split_first() {
            Some((attribute, rest)) => (Some(attribute.clone()), rest),
            None => return Err(wrong("the attribute is missing")),
        },
        false => (None, arguments),
    };
    let mut found = Vec::new();
    for item in items_if_true(value)? {
        let looked_at = of_attribute(&item, &attribute, &None)?;
        let is_so = match rest.split_first() {
            None => looked_at.is_true(),
            Some((test, rest)) => {
                let name = text_of(test)?;
                let tested = state.perform_test(name, &[&[looked_at], rest].concat());
                tested.map_err(|error| unknown(error, "test", name))?
            }
        };
        if is_so == WANTED {
            found.push(item);
        }
    }
    Ok(Lazy::generator(found))
}

/// The error, with the name of the filter or test that there is not.
fn unknown(error: Error, what: &str, name: &str) -> Error {
    match error.kind() {
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest => {
            wrong(format!("there is no {what} `{name}` here"))
        }
        _ => error,
    }
}

/// Whether `value % by == rest`.
pub(super) fn has_rest(value: &Value, by: &Value, rest: i64) -> Result<bool, Error> {
    Ok(equal(&arithmetic(value, "%", by)?, &Value::from(rest)))
}

/// Whether two values are the same one; of numbers and texts Python does not say.
pub(super) fn is_same(a: &Value, b: &Value) -> Result<bool, Error> {
    let is_single = |value: &Value| matches!(value.kind(), ValueKind::None | ValueKind::Bool);
    match is_single(a) || is_single(b) {
        true => Ok(a.kind() == b.kind() && a == b),
        false if a.kind() != b.kind() => Ok(false),
        false => Err(wrong("`sameas` is for true, false and none; use `==`")),
    }
}

/// Whether it is an integer. Booleans are not, as in Jinja's `integer` test.
pub(super) fn is_integer(value: &Value) -> bool {
    value.kind() == ValueKind::Number && integer(value).is_ok()
}
