//! Failures as Python's exceptions, by kind.

use crate::objects::object;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use trainer::Failure;

/// The exception for a failure: a class of `trainer._errors`, with the program's words, exit code and hints.
pub(crate) fn raised(py: Python, failure: &Failure) -> PyErr {
    exception(py, failure).unwrap_or_else(|error| error)
}

/// An exception of misuse.
pub(crate) fn usage(py: Python, message: String) -> PyErr {
    raised(py, &Failure::Usage(message))
}

fn exception(py: Python, failure: &Failure) -> PyResult<PyErr> {
    let facts = PyDict::new(py);
    let class = match failure {
        Failure::OutOfMemory { error, fixes, .. } => {
            facts.set_item("tensor", error.name)?;
            facts.set_item("requested_bytes", error.requested_bytes)?;
            facts.set_item("fixes", object(py, fixes)?)?;
            "OutOfMemory"
        }
        Failure::HostMemory(_) | Failure::DoesNotFit { .. } => "OutOfMemory",
        Failure::Config(_) | Failure::Usage(_) => "UsageError",
        _ => "TrainerError",
    };
    let hints = failure.hints();
    let hints = hints.iter().map(|hint| format!("\nhint: {hint}"));
    let message = format!("{failure}{}", hints.collect::<String>());
    let class = py.import("trainer._errors")?.getattr(class)?;
    let error = class.call((message, failure.exit_code()), Some(&facts))?;
    Ok(PyErr::from_value(error))
}
