//! Python's operators, as filters that the rewritten templates call.

use super::arguments::{text as text_of, unless_none, whole};
use super::methods::{self, Method};
use super::values::{
    Number, compared, contains, equal, escaped, integer, items, named, text, wrong,
};
use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

/// What a text or list may have after it was repeated.
const LONGEST: usize = 10_000_000;

pub(super) fn add(environment: &mut Environment) {
    environment.add_filter("_op", operate);
    environment.add_filter("_sign", sign);
    environment.add_filter("_attr", attribute);
    environment.add_filter("_item", item);
    environment.add_filter("_slice", slice);
    environment.add_filter("_iter", |value: &Value| items(value).map(Value::from));
    environment.add_filter(
        "_call",
        |state: &mut State, value: &Value, name: &str, arguments: Rest<ValueOrKwargs>| {
            methods::call(state, value, name, &arguments.into_values())
        },
    );
}

/// `a < b`, or the chain `a < b < c` with the operators and operands that follow.
fn operate(a: &Value, operator: &str, b: &Value, chain: Rest<Value>) -> Result<Value, Error> {
    let mut result = operation(a, operator, b)?;
    let mut left = b;
    for [operator, right] in chain.as_chunks().0 {
        if !result.is_true() {
            break;
        }
        result = operation(left, text_of(operator)?, right)?;
        left = right;
    }
    Ok(result)
}

fn operation(a: &Value, operator: &str, b: &Value) -> Result<Value, Error> {
    let is = |wanted: bool| Ok(Value::from(wanted));
    match operator {
        "==" => is(equal(a, b)),
        "!=" => is(!equal(a, b)),
        "<" => is(compared(a, b)?.is_lt()),
        "<=" => is(compared(a, b)?.is_le()),
        ">" => is(compared(a, b)?.is_gt()),
        ">=" => is(compared(a, b)?.is_ge()),
        "in" => is(contains(b, a)?),
        "not in" => is(!contains(b, a)?),
        "~" => Ok(Value::from(text(a)? + &text(b)?)),
        "%" if a.kind() == ValueKind::String => methods::percent(a, b),
        _ => arithmetic(a, operator, b),
    }
}

pub(super) fn arithmetic(a: &Value, operator: &str, b: &Value) -> Result<Value, Error> {
    let refused = || {
        wrong(format!(
            "`{operator}` is not for {} and {}",
            named(a),
            named(b)
        ))
    };
    let (Some(left), Some(right)) = (Number::of(a), Number::of(b)) else {
        return match operator {
            "+" => joined(a, b).ok_or_else(refused)?,
            "*" => repeated(a, b)
                .or_else(|| repeated(b, a))
                .ok_or_else(refused)?,
            _ => Err(refused()),
        };
    };
    let zero = matches!(operator, "/" | "//" | "%") && right.float() == 0.0;
    if zero || operator == "**" && left.float() == 0.0 && right.float() < 0.0 {
        return Err(wrong("a division by zero"));
    }
    let number = match (left, right) {
        (Number::Integer(a), Number::Integer(b))
            if operator != "/" && !(operator == "**" && b < 0) =>
        {
            let number = match operator {
                "+" => a.checked_add(b),
                "-" => a.checked_sub(b),
                "*" => a.checked_mul(b),
                "//" => (a.checked_div_euclid(b))
                    .map(|whole| whole - i128::from(b < 0 && a.rem_euclid(b) != 0)),
                "%" => (a.checked_rem_euclid(b))
                    .map(|rest| rest + if b < 0 && rest != 0 { b } else { 0 }),
                _ => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            };
            Number::Integer(number.ok_or_else(|| wrong("a number is too large"))?)
        }
        _ => {
            let (a, b) = (left.float(), right.float());
            // As Python does: the rest has the sign of the divisor, and the quotient follows from it.
            let rest = match a % b {
                0.0 => 0.0_f64.copysign(b),
                rest if (rest < 0.0) != (b < 0.0) => rest + b,
                rest => rest,
            };
            Number::Float(match operator {
                "+" => a + b,
                "-" => a - b,
                "*" => a * b,
                "/" => a / b,
                "//" => ((a - rest) / b).round(),
                "%" => rest,
                _ if a < 0.0 && b.fract() != 0.0 => {
                    return Err(wrong("a power is a complex number"));
                }
                _ => match a.powf(b) {
                    power if power.is_infinite() => return Err(wrong("a number is too large")),
                    power => power,
                },
            })
        }
    };
    Ok(number.into())
}

fn joined(a: &Value, b: &Value) -> Option<Result<Value, Error>> {
    match (a.kind(), b.kind()) {
        (ValueKind::String, ValueKind::String) if a.is_safe() || b.is_safe() => {
            let both = escaped(a).and_then(|first| Ok(first + &escaped(b)?));
            Some(both.map(Value::from_safe_string))
        }
        (ValueKind::String, ValueKind::String) => Some(Ok(Value::from(format!("{a}{b}")))),
        (ValueKind::Seq, ValueKind::Seq) if a.is_tuple() == b.is_tuple() => {
            let both = items(a).and_then(|first| Ok([first, items(b)?].concat()));
            Some(both.map(|both| sequence(both, a)))
        }
        _ => None,
    }
}

/// A list, or a tuple if `like` is one.
fn sequence(values: Vec<Value>, like: &Value) -> Value {
    match like.is_tuple() {
        true => Value::from(Tuple::from(values)),
        false => Value::from(values),
    }
}

fn repeated(what: &Value, times: &Value) -> Option<Result<Value, Error>> {
    let times = usize::try_from(integer(times).ok()?.max(0)).ok()?;
    let length = what.len().unwrap_or(0);
    if length.saturating_mul(times) > LONGEST {
        return Some(Err(wrong("a repeated text or list is too long")));
    }
    match what.kind() {
        ValueKind::String => Some(Ok(Value::from(what.to_string().repeat(times)))),
        ValueKind::Seq => {
            let repeated = |items| std::iter::repeat_n(items, times).flatten().collect();
            Some(items(what).map(|items: Vec<Value>| sequence(repeated(items), what)))
        }
        _ => None,
    }
}

fn sign(value: &Value, sign: &str) -> Result<Value, Error> {
    let number = match (Number::of(value), sign) {
        (Some(Number::Integer(number)), "-") => number.checked_neg().map(Number::Integer),
        (Some(Number::Float(number)), "-") => Some(Number::Float(-number)),
        (number, _) => number,
    };
    let refused = || wrong(format!("`{sign}` is not for {}", named(value)));
    number.map(Value::from).ok_or_else(refused)
}

/// Attributes of Python's numbers.
const OF_NUMBERS: [&str; 4] = ["real", "imag", "numerator", "denominator"];

/// `value.name`: a method, or else a dictionary's entry.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(wrong(format!(
            "an undefined value has no attribute `{name}`"
        )));
    }
    if name.starts_with("__") {
        // As in transformers' sandbox.
        return Ok(Value::UNDEFINED);
    }
    if methods::is_known(value, name) {
        let (of, name) = (value.clone(), name.into());
        return Ok(Value::from_object(Method { of, name }));
    }
    match value.kind() {
        ValueKind::Map | ValueKind::Plain | ValueKind::Seq => value.get_attr(name),
        ValueKind::Bool | ValueKind::Number if OF_NUMBERS.contains(&name) => {
            Err(wrong(format!("numbers have no attribute `{name}` here")))
        }
        _ => Ok(Value::UNDEFINED),
    }
}

/// `value[key]`; undefined where there is no such item.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    let of_attribute = |found: Value| match key.as_str() {
        Some(name) if found.is_undefined() => attribute(value, name),
        _ => Ok(found),
    };
    match value.kind() {
        ValueKind::Undefined => Err(wrong("an undefined value has no items")),
        ValueKind::Seq | ValueKind::String => match integer(key) {
            Ok(at) => {
                let length = value.len().unwrap_or(0) as i128;
                let at = if at < 0 { at + length } else { at };
                let found = (0..length).contains(&at).then_some(at as usize);
                Ok(match (found, value.as_str()) {
                    (None, _) => Value::UNDEFINED,
                    (Some(at), Some(text)) => {
                        text.chars().nth(at).map(Value::from).unwrap_or_default()
                    }
                    (Some(at), None) => value.get_item_by_index(at)?,
                })
            }
            Err(_) => of_attribute(Value::UNDEFINED),
        },
        ValueKind::Map => of_attribute(value.get_item(key).unwrap_or_default()),
        ValueKind::Iterable => Err(wrong("a generator has no items; add `|list`")),
        _ => of_attribute(Value::UNDEFINED),
    }
}

/// `value[start:stop:step]`.
fn slice(value: &Value, start: &Value, stop: &Value, step: Option<Value>) -> Result<Value, Error> {
    if !matches!(value.kind(), ValueKind::String | ValueKind::Seq) {
        return Err(wrong(format!("{} has no parts; add `|list`", named(value))));
    }
    let step = whole(&unless_none(step), 1)?;
    let items = items(value)?;
    let length = items.len() as i128;
    let (lowest, highest) = match step {
        0 => return Err(wrong("the step of a slice is not 0")),
        1.. => (0, length),
        _ => (-1, length - 1),
    };
    let (first, last) = match step > 0 {
        true => (lowest, highest),
        false => (highest, lowest),
    };
    let adjust = |bound: &Value, missing: i128| match bound.is_none() {
        true => Ok(missing),
        false => {
            integer(bound).map(|at| (if at < 0 { at + length } else { at }).clamp(lowest, highest))
        }
    };
    let (mut at, stop) = (adjust(start, first)?, adjust(stop, last)?);
    let mut part = Vec::new();
    while if step > 0 { at < stop } else { at > stop } {
        part.push(items[at as usize].clone());
        at = at.saturating_add(step);
    }
    match value.kind() {
        ValueKind::String => {
            let chars: Vec<&str> = part.iter().filter_map(Value::as_str).collect();
            Ok(Value::from(chars.concat()))
        }
        _ => Ok(sequence(part, value)),
    }
}
