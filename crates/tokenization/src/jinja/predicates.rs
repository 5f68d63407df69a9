//! Jinja 2's tests by Python's rules.

use super::filters::{has_rest, is_integer, is_same};
use super::lazy::Lazy;
use super::methods::{Method, is_lower, is_upper};
use super::values::{compared, contains, equal, text, wrong};
use crate::python_json::is_dictionary;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, Value};

/// A test without arguments.
type Test = fn(&Value) -> Result<bool, Error>;
/// A test with one.
type Comparison = fn(&Value, &Value) -> Result<bool, Error>;

const TESTS: &[(&str, Test)] = &[
    ("callable", |value| {
        let is_method = value.downcast_object_ref::<Method>().is_some();
        Ok(is_method || matches!(value.kind(), ValueKind::Plain | ValueKind::Undefined))
    }),
    ("even", |value| has_rest(value, &Value::from(2), 0)),
    ("float", |value| {
        Ok(value.kind() == ValueKind::Number && !value.is_integer())
    }),
    ("integer", |value| Ok(is_integer(value))),
    ("iterable", |value| Ok(is_iterable(value))),
    ("lower", |value| Ok(is_lower(&text(value)?))),
    ("mapping", |value| {
        Ok(value.kind() == ValueKind::Map && is_dictionary(value))
    }),
    ("odd", |value| has_rest(value, &Value::from(2), 1)),
    ("sequence", |value| {
        if value.kind() == ValueKind::Iterable && value.downcast_object_ref::<Lazy>().is_none() {
            return Err(wrong("`range` is no list here; add `|list`"));
        }
        let is = matches!(
            value.kind(),
            ValueKind::Undefined | ValueKind::String | ValueKind::Seq
        );
        Ok(is || value.kind() == ValueKind::Map && is_dictionary(value))
    }),
    ("upper", |value| Ok(is_upper(&text(value)?))),
];

const COMPARISONS: &[(&[&str], Comparison)] = &[
    (&["divisibleby"], |a, b| has_rest(a, b, 0)),
    (&["eq", "equalto", "=="], |a, b| Ok(equal(a, b))),
    (&["ge", ">="], |a, b| Ok(compared(a, b)?.is_ge())),
    (&["gt", "greaterthan", ">"], |a, b| {
        Ok(compared(a, b)?.is_gt())
    }),
    (&["in"], |a, b| contains(b, a)),
    (&["le", "<="], |a, b| Ok(compared(a, b)?.is_le())),
    (&["lt", "lessthan", "<"], |a, b| Ok(compared(a, b)?.is_lt())),
    (&["ne", "!="], |a, b| Ok(!equal(a, b))),
    (&["sameas"], is_same),
];

/// Tests of minijinja that Jinja 2 does not have, or whose answers differ.
const REMOVED: [&str; 6] = [
    "endingwith",
    "filter",
    "int",
    "safe",
    "startingwith",
    "test",
];

pub(super) fn add(environment: &mut Environment) {
    for name in REMOVED {
        environment.remove_test(name);
    }
    for (name, test) in TESTS {
        environment.add_test(*name, *test);
    }
    for (names, comparison) in COMPARISONS {
        for name in *names {
            environment.add_test(*name, *comparison);
        }
    }
}

fn is_iterable(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Map => is_dictionary(value),
        kind => matches!(
            kind,
            ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Iterable
        ),
    }
}
