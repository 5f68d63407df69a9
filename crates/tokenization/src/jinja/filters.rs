//! Jinja 2's filters by Python's rules.
//!
//! Those that no chat template has use for are not here; a template that has one is refused by its name.

use super::arguments::{is_true, named as arguments_of, text as text_of, unless_none, whole};
use super::lazy::Lazy;
use super::methods::{self, capitalised, entries, lines, stripped};
use super::operators::{arithmetic, attribute, item};
use super::values::{Number, compared, equal, escaped, integer, items, length, named, text, wrong};
use crate::python_json::is_dictionary;
use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::cmp::Ordering;

/// A filter: of the value and its arguments.
type Filter = fn(&mut State, &Value, &[Value]) -> Result<Value, Error>;

const FILTERS: &[(&str, Filter)] = &[
    ("abs", |_, value, _| absolute(value)),
    ("attr", |_, value, arguments| {
        let [name] = arguments_of(arguments, ["name"])?;
        attribute_alone(value, text_of(&name)?)
    }),
    ("capitalize", |_, value, _| {
        Ok(capitalised(&text(value)?).into())
    }),
    ("center", |state, value, arguments| {
        let [width] = arguments_of(arguments, ["width"])?;
        let width = Value::from(whole(&width, 80)?);
        methods::call(state, &Value::from(text(value)?), "center", &[width])
    }),
    ("count", |_, value, _| Ok(length(value)?.into())),
    ("d", |_, value, arguments| default(value, arguments)),
    ("default", |_, value, arguments| default(value, arguments)),
    ("dictsort", |_, value, arguments| dictsort(value, arguments)),
    ("e", |_, value, _| {
        Ok(Value::from_safe_string(escaped(value)?))
    }),
    ("escape", |_, value, _| {
        Ok(Value::from_safe_string(escaped(value)?))
    }),
    ("first", |_, value, _| {
        Ok(items(value)?.first().cloned().unwrap_or_default())
    }),
    ("float", |_, value, arguments| float(value, arguments)),
    ("forceescape", |_, value, _| {
        Ok(Value::from_safe_string(escaped(&text(value)?.into())?))
    }),
    ("format", |_, value, arguments| {
        let tuple = Tuple::from(arguments);
        methods::percent(&Value::from(text(value)?), &Value::from(tuple))
    }),
    ("indent", |_, value, arguments| indent(value, arguments)),
    ("int", |_, value, arguments| int(value, arguments)),
    ("items", |_, value, _| match value.kind() {
        ValueKind::Undefined => Ok(Lazy::generator(Vec::new())),
        ValueKind::Map if is_dictionary(value) => Ok(Lazy::generator(entries(value)?)),
        _ => Err(wrong(format!("{} is no dictionary", named(value)))),
    }),
    ("join", |_, value, arguments| join(value, arguments)),
    ("last", |_, value, _| match Lazy::is_used_up(value) {
        true => Err(wrong(
            "what is only gone through has no last item; put `|list` before it",
        )),
        false => Ok(items(value)?.last().cloned().unwrap_or_default()),
    }),
    ("length", |_, value, _| Ok(length(value)?.into())),
    ("list", |_, value, _| items(value).map(Value::from)),
    ("lower", |_, value, _| {
        Ok(text(value)?.to_lowercase().into())
    }),
    ("map", map),
    ("max", |_, value, arguments| {
        extreme(value, arguments, Ordering::Greater)
    }),
    ("min", |_, value, arguments| {
        extreme(value, arguments, Ordering::Less)
    }),
    ("reject", |state, value, arguments| {
        select(state, value, arguments, (false, false))
    }),
    ("rejectattr", |state, value, arguments| {
        select(state, value, arguments, (true, false))
    }),
    ("replace", |state, value, arguments| {
        let [old, new, count] = arguments_of(arguments, ["old", "new", "count"])?;
        let (Some(old), Some(new)) = (old, new) else {
            return Err(wrong("an argument of `replace` is missing"));
        };
        let [old, new] = [old, new].map(|part| text(&part).map(Value::from));
        let count = Value::from(whole(&unless_none(count), -1)?);
        methods::call(state, &text(value)?.into(), "replace", &[old?, new?, count])
    }),
    ("reverse", |_, value, _| match value.as_str() {
        Some(text) => Ok(text.chars().rev().collect::<String>().into()),
        None if Lazy::is_used_up(value) => Ok(items(value)?.into_iter().rev().collect()),
        None => Ok(Lazy::generator(items(value)?.into_iter().rev().collect())),
    }),
    ("round", |_, value, arguments| round(value, arguments)),
    ("safe", |_, value, _| {
        Ok(Value::from_safe_string(text(value)?))
    }),
    ("select", |state, value, arguments| {
        select(state, value, arguments, (false, true))
    }),
    ("selectattr", |state, value, arguments| {
        select(state, value, arguments, (true, true))
    }),
    ("sort", |_, value, arguments| sort(value, arguments)),
    ("string", |_, value, _| match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ => Ok(text(value)?.into()),
    }),
    ("sum", |_, value, arguments| {
        let [attribute, start] = arguments_of(arguments, ["attribute", "start"])?;
        let items = items(value)?;
        let sum = start.unwrap_or(Value::from(0));
        if sum.kind() == ValueKind::String {
            return Err(wrong("texts are joined, and not summed"));
        }
        items.into_iter().try_fold(sum, |sum, item| {
            arithmetic(&sum, "+", &of_attribute(&item, &attribute)?)
        })
    }),
    ("title", |_, value, _| Ok(titled(&text(value)?).into())),
    ("tojson", |_, value, arguments| {
        let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let options = arguments_of(arguments, names)?;
        crate::python_json::tojson(value, options).map(Value::from)
    }),
    ("trim", |_, value, arguments| {
        let [chars] = arguments_of(arguments, ["chars"])?;
        Ok(stripped(&text(value)?, "strip", &unless_none(chars))?.into())
    }),
    ("unique", |_, value, arguments| unique(value, arguments)),
    ("upper", |_, value, _| {
        Ok(text(value)?.to_uppercase().into())
    }),
];

/// Filters of minijinja that Jinja 2 does not have, or that differ in it.
const REMOVED: [&str; 9] = [
    "batch", "bool", "chain", "groupby", "lines", "pprint", "slice", "split", "zip",
];

/// Filters that leave an escaped text escaped.
const ESCAPED: [&str; 7] = [
    "capitalize",
    "center",
    "indent",
    "lower",
    "reverse",
    "trim",
    "upper",
];

/// Filters that take no arguments.
const ALONE: [&str; 17] = [
    "abs",
    "capitalize",
    "count",
    "e",
    "escape",
    "first",
    "forceescape",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "reverse",
    "safe",
    "string",
    "title",
    "upper",
];

pub(super) fn add(environment: &mut Environment) {
    for name in REMOVED {
        environment.remove_filter(name);
    }
    for (name, filter) in FILTERS {
        let call = move |state: &mut State, value: &Value, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            if ALONE.contains(name) {
                let [] = arguments_of(&arguments, [])?;
            }
            let result = filter(state, value, &arguments)?;
            Ok::<Value, Error>(match value.is_safe() && ESCAPED.contains(name) {
                true => methods::escaped(result),
                false => result,
            })
        };
        environment.add_filter(*name, call);
    }
}

fn absolute(value: &Value) -> Result<Value, Error> {
    match Number::of(value) {
        Some(Number::Integer(number)) => Ok(Number::Integer(number.saturating_abs()).into()),
        Some(Number::Float(number)) => Ok(number.abs().into()),
        None => Err(wrong(format!("{} is no number", named(value)))),
    }
}

/// An attribute, but no item.
fn attribute_alone(value: &Value, name: &str) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map if is_dictionary(value) && !methods::is_known(value, name) => {
            Ok(Value::UNDEFINED)
        }
        _ => attribute(value, name),
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

fn float(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [default] = arguments_of(arguments, ["default"])?;
    let default = default.unwrap_or(Value::from(0.0));
    Ok(match (Number::of(value), value.as_str()) {
        (Some(number), _) => number.float().into(),
        (None, Some(text)) => text.trim().parse::<f64>().map_or(default, Value::from),
        (None, None) if value.is_undefined() => {
            return Err(wrong("an undefined value is no number"));
        }
        (None, None) => default,
    })
}

fn int(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [default, base] = arguments_of(arguments, ["default", "base"])?;
    let base = whole(&base, 10)?;
    let default = default.unwrap_or(Value::from(0));
    Ok(match (Number::of(value), value.as_str()) {
        (Some(Number::Float(number)), _) if number.is_finite() => {
            Number::Integer(number.trunc() as i128).into()
        }
        (Some(Number::Float(_)), _) => default,
        (Some(number), _) => number.into(),
        (None, Some(text)) => {
            let text = text.trim();
            let parsed = match base {
                10 => text.parse::<i128>().ok(),
                16 => i128::from_str_radix(text.trim_start_matches("0x"), 16).ok(),
                _ => return Err(wrong("the base of `int` is 10 or 16 here")),
            };
            let float = || text.parse::<f64>().ok().filter(|number| number.is_finite());
            let number = parsed.or_else(|| float().map(|number| number.trunc() as i128));
            number.map_or(default, |number| Number::Integer(number).into())
        }
        (None, None) if value.is_undefined() => {
            return Err(wrong("an undefined value is no number"));
        }
        (None, None) => default,
    })
}

fn round(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [precision, method] = arguments_of(arguments, ["precision", "method"])?;
    let precision = whole(&precision, 0)?;
    let precision = usize::try_from(precision)
        .map_err(|_| wrong("the precision of `round` is not negative here"))?;
    let method = match &method {
        Some(_) => text_of(&method)?,
        None => "common",
    };
    let number =
        Number::of(value).ok_or_else(|| wrong(format!("{} is no number", named(value))))?;
    let scale = 10_f64.powi(precision as i32);
    Ok(match (method, number) {
        ("common", Number::Integer(_)) => number.into(),
        ("common", Number::Float(number)) => format!("{number:.precision$}")
            .parse::<f64>()
            .unwrap_or(number)
            .into(),
        ("ceil", number) => ((number.float() * scale).ceil() / scale).into(),
        ("floor", number) => ((number.float() * scale).floor() / scale).into(),
        _ => return Err(wrong("the method of `round` is common, ceil or floor")),
    })
}

fn indent(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let [width, first, blank] = arguments_of(arguments, ["width", "first", "blank"])?;
    let indent = match &width {
        Some(width) if width.kind() == ValueKind::String => width.to_string(),
        width => " ".repeat(usize::try_from(whole(width, 4)?.clamp(0, 1000)).unwrap_or(0)),
    };
    let said = Some(value.clone());
    // As in Jinja, a last line that is empty counts.
    let said = format!("{}\n", text_of(&said)?);
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
    Ok(out.into())
}

/// Jinja's `title`, which keeps the letters behind an apostrophe small.
fn titled(text: &str) -> String {
    let mut begins = true;
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        let separates = matches!(char, '-' | '(' | '{' | '[' | '<') || char.is_whitespace();
        match begins && !separates {
            true => out.extend(char.to_uppercase()),
            false => out.extend(char.to_lowercase()),
        }
        begins = separates;
    }
    out
}

/// The attribute of an item that a filter looks at, such as `a.b` or `0`; the item itself without one.
fn of_attribute(value: &Value, attribute: &Option<Value>) -> Result<Value, Error> {
    let Some(attribute) = attribute else {
        return Ok(value.clone());
    };
    let Some(path) = attribute.as_str() else {
        return item(value, attribute);
    };
    path.split('.').try_fold(value.clone(), |value, part| {
        let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        match part.parse::<i64>() {
            Ok(at) if is_number => item(&value, &at.into()),
            _ => item(&value, &part.into()),
        }
    })
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
    let text_of_item = |item: Value| text(&of_attribute(&item, &attribute)?);
    let texts: Result<Vec<String>, Error> = items(value)?.into_iter().map(text_of_item).collect();
    let separator = separator.as_ref().map_or(Ok(String::new()), text)?;
    Ok(texts?.join(&separator).into())
}

/// Sorts as Python does: equal ones stay in their order, and values that have no order are an error.
fn sorted(keyed: Vec<(Value, Value)>, is_reverse: bool) -> Result<Vec<Value>, Error> {
    let mut sorted: Vec<(Value, Value)> = Vec::with_capacity(keyed.len());
    for (key, value) in keyed {
        let (mut low, mut high) = (0, sorted.len());
        while low < high {
            let middle = (low + high) / 2;
            let order = compared(&key, &sorted[middle].0)?;
            let is_before = if is_reverse {
                order.is_gt()
            } else {
                order.is_lt()
            };
            match is_before {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        sorted.insert(low, (key, value));
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
        let key = |part| Ok(small(of_attribute(item, part)?, is_true(&case_sensitive)));
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
        let key = small(of_attribute(&item, &attribute)?, is_true(&case_sensitive));
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
        let key = small(of_attribute(&item, &attribute)?, is_true(&case_sensitive));
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
    let is_by_name = !arguments.first().is_some_and(Value::is_kwargs);
    if is_by_name {
        let name = arguments
            .first()
            .ok_or_else(|| wrong("`map` needs a filter or an attribute"))?;
        let name = Some(name.clone());
        let name = text_of(&name)?;
        let filtered = items_if_true(value)?.into_iter().map(|item| {
            let filtered = state.apply_filter(name, &[&[item], &arguments[1..]].concat());
            filtered.map_err(|error| unknown(error, "filter", name))
        });
        return Ok(Lazy::generator(filtered.collect::<Result<_, _>>()?));
    }
    let [attribute, default] = arguments_of(arguments, ["attribute", "default"])?;
    if attribute.is_none() {
        return Err(wrong("`map` needs a filter or an attribute"));
    }
    let found = items_if_true(value)?.into_iter().map(|item| {
        let found = of_attribute(&item, &attribute)?;
        Ok(match &default {
            Some(default) if found.is_undefined() => default.clone(),
            _ => found,
        })
    });
    Ok(Lazy::generator(found.collect::<Result<_, Error>>()?))
}

fn select(
    state: &mut State,
    value: &Value,
    arguments: &[Value],
    (by_attribute, wanted): (bool, bool),
) -> Result<Value, Error> {
    let (attribute, rest) = match by_attribute {
        true => match arguments.split_first() {
            Some((attribute, rest)) => (Some(attribute.clone()), rest),
            None => return Err(wrong("the attribute is missing")),
        },
        false => (None, arguments),
    };
    let mut found = Vec::new();
    for item in items_if_true(value)? {
        let looked_at = of_attribute(&item, &attribute)?;
        let is_so = match rest.split_first() {
            None => looked_at.is_true(),
            Some((test, rest)) => {
                let test = Some(test.clone());
                let name = text_of(&test)?;
                let tested = state.perform_test(name, &[&[looked_at], rest].concat());
                tested.map_err(|error| unknown(error, "test", name))?
            }
        };
        if is_so == wanted {
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

/// Whether this rest is left of a division.
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

/// Whether an integer is one: true and false are, for Python, and Jinja leaves them out.
pub(super) fn is_integer(value: &Value) -> bool {
    value.kind() == ValueKind::Number && integer(value).is_ok()
}
