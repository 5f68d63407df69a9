//! Weights by name, which others read in place or copy.

use crate::dlpack;
use crate::trainer_thread::TrainerThread;
use crate::views::{View, Views};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::sync::Arc;
use trainer::{DType, Failure, Trainer, WeightInPlace};

/// A weight of a trainer. `torch.from_dlpack(weight)` reads it in place where `is_view` says so; `numpy()` is a view of f32 on the CPU, else a
/// copy as f32. A view shows what later steps change, must not be written, and keeps `sleep` and `load` from being called; the trainer's memory lives as long as it does.
#[pyclass(module = "trainer", frozen)]
pub(crate) struct Weight {
    thread: Arc<TrainerThread>,
    views: Views,
    name: String,
    dims: Vec<usize>,
    dtype: &'static str,
    is_view: bool,
}

impl Weight {
    /// All weights of a trainer.
    pub(crate) fn all(
        py: Python<'_>,
        thread: &Arc<TrainerThread>,
        views: &Views,
    ) -> PyResult<Vec<(String, Weight)>> {
        let described = |trainer: &mut Trainer| {
            let names: Vec<String> = trainer.parameter_names().map(Into::into).collect();
            let described = names.into_iter().map(|name| {
                let here = trainer.weight_in_place(&name)?;
                let (dims, dtype) = match &here {
                    Some(here) => (here.shape.clone(), here.dtype),
                    None => (trainer.stored_shape(&name)?, DType::F32),
                };
                Ok((name, dims, dtype, here.is_some()))
            });
            described.collect::<Result<Vec<_>, Failure>>()
        };
        let described = thread.call(py, described)?.into_iter();
        let weights = described.map(|(name, dims, dtype, is_view)| {
            let weight = Weight {
                thread: thread.clone(),
                views: views.clone(),
                name: name.clone(),
                dims,
                dtype: dtype.as_str(),
                is_view,
            };
            (name, weight)
        });
        Ok(weights.collect())
    }

    /// Where it is, and a view that is counted.
    fn in_place(&self, py: Python) -> PyResult<(WeightInPlace, View)> {
        let (name, views) = (self.name.clone(), self.views.clone());
        let here = self.thread.call(py, move |trainer| {
            let here = trainer.weight_in_place(&name)?;
            Ok(here.map(|here| (Sent(here), views.add())))
        })?;
        here.map(|(Sent(here), view)| (here, view)).ok_or_else(|| {
            PyBufferError::new_err(format!(
                "`{}` is on the host, stored as codes, or in another order than in files, so there is no view of it; numpy() copies it",
                self.name
            ))
        })
    }
}

/// An address that goes from thread to thread.
struct Sent(WeightInPlace);

// SAFETY: only the address is passed on.
unsafe impl Send for Sent {}

#[pymethods]
impl Weight {
    /// Its shape in Hugging Face's files.
    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.dims.clone()
    }

    /// `f32` or `bf16`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype
    }

    /// Whether DLPack gives a view of it. Weights on the host, in codes such as NF4, or in another order than in files are copied by `numpy()` alone.
    #[getter]
    fn is_view(&self) -> bool {
        self.is_view
    }

    fn __repr__(&self) -> String {
        let kind = if self.is_view { "view" } else { "copy" };
        format!(
            "Weight({}, {:?}, {}, {kind})",
            self.name, self.dims, self.dtype
        )
    }

    fn __dlpack_device__(&self, py: Python) -> PyResult<(i32, i32)> {
        Ok(dlpack::device(&self.in_place(py)?.0))
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python,
        stream: Option<Bound<PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        // All work on the weight is done when its place is known, whatever the stream.
        let _ = stream;
        let (here, view) = self.in_place(py)?;
        if copy == Some(true) || dl_device.is_some_and(|device| device != dlpack::device(&here)) {
            return Err(PyBufferError::new_err(
                "a weight is lent where it lies; copy the tensor, or move it, afterwards",
            ));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::lend(py, &here, is_versioned, view)
    }

    /// As an array of NumPy: a view where it is f32 on the CPU, else a copy as f32.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, weight) = (slf.py(), slf.get());
        let numpy = py.import("numpy")?;
        let is_here = weight.is_view && weight.in_place(py)?.0.gpu.is_none();
        if is_here && weight.dtype == DType::F32.as_str() {
            return numpy.call_method1("from_dlpack", (slf,));
        }
        let name = weight.name.clone();
        let values = weight
            .thread
            .call(py, move |trainer| trainer.parameter_values(&name))?;
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        let named = PyDict::new(py);
        named.set_item("dtype", "float32")?;
        let flat = numpy.call_method("frombuffer", (PyBytes::new(py, &bytes),), Some(&named))?;
        flat.call_method1("reshape", (weight.dims.clone(),))
    }
}
