//! Arrays from Python: NumPy's, torch's, lists, and whatever has the buffer protocol or DLPack.

use crate::dlpack::{Lent, NumberType};
use crate::errors::usage;
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

/// Numbers in the host's memory, row by row.
pub(crate) struct Array {
    name: &'static str,
    pub(crate) dims: Vec<usize>,
    values: Values,
}

enum Values {
    Whole(Vec<i64>),
    Floats(Vec<f32>),
}

/// By a character in Python's `struct`; native sizes and little-endian bytes.
fn number_of(format: &str) -> Option<NumberType> {
    match format.trim_start_matches(['@', '=', '<']) {
        "b" | "h" | "i" | "l" | "q" => Some(NumberType::Signed),
        "?" | "B" | "H" | "I" | "L" | "Q" => Some(NumberType::Unsigned),
        "e" | "f" | "d" => Some(NumberType::Float),
        _ => None,
    }
}

impl Values {
    /// Numbers that follow each other; none if floats have a size that is not known here.
    pub(crate) fn of_bytes(number: NumberType, size: usize, bytes: &[u8]) -> Option<Values> {
        let elements = bytes.chunks_exact(size);
        let is_signed = matches!(number, NumberType::Signed);
        let as_float: fn(&[u8]) -> f32 = match (number, size) {
            (NumberType::Signed | NumberType::Unsigned, _) => {
                let whole = elements.map(|bytes| widened(bytes, is_signed));
                return Some(Values::Whole(whole.collect()));
            }
            (NumberType::BFloat, 2) => |bytes| bf16::from_le_bytes(fixed(bytes)).to_f32(),
            (NumberType::Float, 2) => |bytes| f16::from_le_bytes(fixed(bytes)).to_f32(),
            (NumberType::Float, 4) => |bytes| f32::from_le_bytes(fixed(bytes)),
            (NumberType::Float, 8) => |bytes| f64::from_le_bytes(fixed(bytes)) as f32,
            _ => return None,
        };
        Some(Values::Floats(elements.map(as_float).collect()))
    }
}

impl Array {
    /// Copies `x`, which errors call `name`.
    pub(crate) fn read(name: &'static str, x: &Bound<PyAny>) -> PyResult<Array> {
        let py = x.py();
        if x.is_instance_of::<PyList>() || x.is_instance_of::<PyTuple>() {
            return Array::of_list(name, x);
        }
        match py.import("builtins")?.getattr("memoryview")?.call1((x,)) {
            Ok(view) => Array::of_view(name, &view),
            Err(_) if x.hasattr("__dlpack__")? => Array::of_dlpack(name, x),
            Err(_) => {
                let found = x.get_type().name()?;
                let message = format!(
                    "`{name}` is {found}; give an array of NumPy or torch, a list, or what has the buffer protocol or DLPack"
                );
                Err(usage(py, message))
            }
        }
    }

    fn of_list(name: &'static str, x: &Bound<PyAny>) -> PyResult<Array> {
        let py = x.py();
        if let Ok(rows) = x.extract::<Vec<Vec<i64>>>() {
            let (dims, values) = joined(name, py, rows)?;
            return Ok(Array {
                name,
                dims,
                values: Values::Whole(values),
            });
        }
        if let Ok(rows) = x.extract::<Vec<Vec<f32>>>() {
            let (dims, values) = joined(name, py, rows)?;
            return Ok(Array {
                name,
                dims,
                values: Values::Floats(values),
            });
        }
        let values: Vec<f32> = x.extract().map_err(|_| {
            let message =
                format!("`{name}` is a list of something else than numbers, or rows of numbers");
            usage(py, message)
        })?;
        Ok(Array {
            name,
            dims: vec![values.len()],
            values: Values::Floats(values),
        })
    }

    /// Reads a `memoryview`.
    fn of_view(name: &'static str, view: &Bound<PyAny>) -> PyResult<Array> {
        let format: String = view.getattr("format")?.extract()?;
        let size: usize = view.getattr("itemsize")?.extract()?;
        let bytes = view.call_method0("tobytes")?;
        let bytes = bytes.cast::<PyBytes>()?.as_bytes();
        let number = number_of(&format);
        let values = number.and_then(|number| Values::of_bytes(number, size, bytes));
        Ok(Array {
            name,
            dims: view.getattr("shape")?.extract()?,
            values: values.ok_or_else(|| not_known(view.py(), name, &format))?,
        })
    }

    fn of_dlpack(name: &'static str, x: &Bound<PyAny>) -> PyResult<Array> {
        let py = x.py();
        let lent = Lent::by(x)?.ok_or_else(|| {
            let message = format!(
                "`{name}` is on another device, and numbers are checked and counted on the host; pass {name}.cpu()"
            );
            usage(py, message)
        })?;
        let values = lent
            .element()
            .and_then(|(element, size)| Values::of_bytes(element, size, &lent.bytes(size)));
        Ok(Array {
            name,
            dims: lent.shape(),
            values: values.ok_or_else(|| not_known(py, name, "of DLPack"))?,
        })
    }

    /// Whole numbers `[rows, columns]`.
    pub(crate) fn whole(self, py: Python) -> PyResult<([usize; 2], Vec<i64>)> {
        let name = self.name;
        match (&self.dims[..], self.values) {
            (&[rows, columns], Values::Whole(values)) => Ok(([rows, columns], values)),
            (dims, Values::Whole(_)) => {
                let message =
                    format!("`{name}` is {dims:?}; it has rows of tokens, [rows, tokens]");
                Err(usage(py, message))
            }
            (_, Values::Floats(_)) => {
                let message =
                    format!("`{name}` is of floats; tokens are whole numbers of 8 to 64 bits");
                Err(usage(py, message))
            }
        }
    }
}

impl Array {
    /// Numbers of tokens as floats, `[rows, columns]`; where there may be one for each row, all its tokens have it.
    pub(crate) fn floats(
        self,
        py: Python,
        [rows, columns]: [usize; 2],
        may_be_of_rows: bool,
    ) -> PyResult<Vec<f32>> {
        let values: Vec<f32> = match self.values {
            Values::Whole(values) => values.into_iter().map(|value| value as f32).collect(),
            Values::Floats(values) => values,
        };
        match self.dims[..] {
            [of] if of == rows && may_be_of_rows => {
                let each = values
                    .iter()
                    .flat_map(|value| std::iter::repeat_n(*value, columns));
                Ok(each.collect())
            }
            [of, each] if [of, each] == [rows, columns] => Ok(values),
            _ => {
                let message = format!(
                    "`{}` is {:?}, and there are [{rows}, {columns}] tokens; each has one{}",
                    self.name,
                    self.dims,
                    if may_be_of_rows { ", or each row" } else { "" }
                );
                Err(usage(py, message))
            }
        }
    }
}

/// Rows as one; they must be of one length.
fn joined<T>(name: &str, py: Python, rows: Vec<Vec<T>>) -> PyResult<(Vec<usize>, Vec<T>)> {
    let columns = rows.first().map_or(0, Vec::len);
    if rows.iter().any(|row| row.len() != columns) {
        let message = format!("rows of `{name}` differ in length; pad them, with labels of -100");
        return Err(usage(py, message));
    }
    Ok((
        vec![rows.len(), columns],
        rows.into_iter().flatten().collect(),
    ))
}

fn not_known(py: Python, name: &str, found: &str) -> PyErr {
    let message = format!(
        "`{name}` has elements of a type `{found}` that is not known here; whole numbers, floats of 16 to 64 bits and bfloat16 are"
    );
    usage(py, message)
}

/// A whole number of little-endian bytes.
fn widened(bytes: &[u8], is_signed: bool) -> i64 {
    let is_negative = is_signed && bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut all = [if is_negative { 0xff } else { 0 }; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(all)
}

fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("elements have their size")
}
