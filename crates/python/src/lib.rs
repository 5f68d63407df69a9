//! `import trainer`: the library and the program in Python's process. The package in `python/trainer` makes classes of it.
#![cfg(feature = "python")]

mod arrays;
mod dlpack;
mod errors;
mod objects;
mod program;
mod python_trainer;
mod rows;
mod trainer_thread;
mod views;
mod weight;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
fn _trainer(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<python_trainer::PythonTrainer>()?;
    module.add_class::<weight::Weight>()?;
    module.add_function(wrap_pyfunction!(program::main, module)?)?;
    module.add_function(wrap_pyfunction!(program::is_within, module)?)
}
