//! Records as dictionaries, made without running Python: a signal that waits would be raised there.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde::Serialize;
use serde_json::Value;

/// The object that `json.loads` would make of the JSON of `of`.
pub(crate) fn object<'py>(py: Python<'py>, of: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    // By the text, in which floats of 32 bits have their shortest form.
    let text = serde_json::to_string(of).expect("keys are strings");
    of_value(py, &serde_json::from_str(&text).expect("it is JSON"))
}

fn of_value<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (None, Some(number)) => number.into_pyobject(py)?.into_any(),
            _ => number.as_f64().into_pyobject(py)?,
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(values) => {
            let list = PyList::empty(py);
            for value in values {
                list.append(of_value(py, value)?)?;
            }
            list.into_any()
        }
        Value::Object(fields) => {
            let dictionary = PyDict::new(py);
            for (name, value) in fields {
                dictionary.set_item(name, of_value(py, value)?)?;
            }
            dictionary.into_any()
        }
    })
}
