//! The arguments of Python's functions, which may be given by place or by name.

use super::values::{integer, named as kind, wrong};
use minijinja::value::{Kwargs, from_args};
use minijinja::{Error, Value};

/// The arguments of these names, in their order.
///
/// # Errors
/// Arguments that there are not, or twice.
pub(super) fn named<const N: usize>(
    arguments: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (places, options): (&[Value], Kwargs) = from_args(arguments)?;
    if places.len() > N {
        return Err(wrong(format!(
            "there are at most {N} arguments: {}",
            names.join(", ")
        )));
    }
    let mut found = [const { None }; N];
    for (at, (name, found)) in names.iter().zip(&mut found).enumerate() {
        let option = match options.has(name) {
            true => Some(options.get::<Value>(name)?),
            false => None,
        };
        if option.is_some() && at < places.len() {
            return Err(wrong(format!("the argument `{name}` is given twice")));
        }
        *found = places.get(at).cloned().or(option);
    }
    options.assert_all_used()?;
    Ok(found)
}

/// An argument that may not be left out.
pub(super) fn required(value: Option<Value>) -> Result<Value, Error> {
    value.ok_or_else(|| wrong("an argument is missing"))
}

/// An argument that is a text.
pub(super) fn text(value: &Value) -> Result<&str, Error> {
    let refused = || wrong(format!("an argument is a text, and not {}", kind(value)));
    value.as_str().ok_or_else(refused)
}

/// A number of characters; a negative one counts as 0.
pub(super) fn width(value: &Value) -> Result<usize, Error> {
    match integer(value)? {
        width @ ..=10_000 => Ok(usize::try_from(width).unwrap_or(0)),
        _ => Err(wrong("a width is at most 10000 here")),
    }
}

/// An argument that is an integer, or may be left out.
pub(super) fn whole(value: &Option<Value>, default: i128) -> Result<i128, Error> {
    value.as_ref().map_or(Ok(default), integer)
}

/// Whether an argument is true; left out, it is not.
pub(super) fn is_true(value: &Option<Value>) -> bool {
    value.as_ref().is_some_and(Value::is_true)
}

/// An argument that may be none, as if it were left out.
pub(super) fn unless_none(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_none())
}
