//! DLPack: tensors that libraries lend each other in place (`dlpack.h` 1.0, and the form from before).

use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyErr_Clear, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::any::Any;
use std::ffi::{CStr, c_void};
use trainer::{DType, WeightInPlace};

/// The names of capsules whose tensor nobody has taken.
const CAPSULE: &CStr = c"dltensor";
const VERSIONED_CAPSULE: &CStr = c"dltensor_versioned";

/// Kinds of devices.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;

const READ_ONLY: u64 = 1;

/// Codes of types.
const SIGNED: u8 = 0;
const UNSIGNED: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const BOOL: u8 = 6;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: [i32; 2],
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    /// In elements; null where rows follow each other.
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct VersionedManaged {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut VersionedManaged)>,
    flags: u64,
    tensor: Tensor,
}

/// A type of numbers, of whatever size.
#[derive(Clone, Copy)]
pub(crate) enum NumberType {
    Signed,
    Unsigned,
    Float,
    BFloat,
}

/// A tensor that another library lends for a call.
pub(crate) struct Lent<'py> {
    capsule: Bound<'py, PyAny>,
}

impl<'py> Lent<'py> {
    /// Borrows `x`; none if the host cannot read its memory.
    pub(crate) fn by(x: &Bound<'py, PyAny>) -> PyResult<Option<Lent<'py>>> {
        let (device, _): (i32, i32) = x.call_method0("__dlpack_device__")?.extract()?;
        if ![CPU, CUDA_HOST].contains(&device) {
            return Ok(None);
        }
        let capsule = x.call_method0("__dlpack__")?;
        capsule
            .cast::<PyCapsule>()?
            .pointer_checked(Some(CAPSULE))?;
        Ok(Some(Lent { capsule }))
    }

    fn tensor(&self) -> &Tensor {
        let capsule = self.capsule.cast::<PyCapsule>().expect("it is one");
        let pointer = capsule.pointer_checked(Some(CAPSULE));
        let pointer = pointer.expect("`by` has looked").as_ptr();
        // SAFETY: a capsule of this name has such a tensor, which lives as long as the capsule does, and longer than this borrow.
        unsafe { &(*pointer.cast::<Managed>()).tensor }
    }

    /// The type and size of its elements; none for those that are not known here.
    pub(crate) fn element(&self) -> Option<(NumberType, usize)> {
        let tensor = self.tensor();
        let element = match tensor.code {
            SIGNED => NumberType::Signed,
            UNSIGNED | BOOL => NumberType::Unsigned,
            FLOAT => NumberType::Float,
            BFLOAT => NumberType::BFloat,
            _ => return None,
        };
        let is_known = tensor.lanes == 1 && matches!(tensor.bits, 8 | 16 | 32 | 64);
        is_known.then(|| (element, usize::from(tensor.bits / 8)))
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        let tensor = self.tensor();
        numbers(tensor.shape, tensor.dimensions)
            .iter()
            .map(|size| *size as usize)
            .collect()
    }

    /// Its elements of `size` bytes, row by row.
    pub(crate) fn bytes(&self, size: usize) -> Vec<u8> {
        let (tensor, shape) = (self.tensor(), self.shape());
        let behind = |dimension: usize| shape[dimension + 1..].iter().product::<usize>() as i64;
        let strides = match tensor.strides.is_null() {
            true => (0..shape.len()).map(behind).collect(),
            false => numbers(tensor.strides, tensor.dimensions).to_vec(),
        };
        let first = tensor.data.cast::<u8>();
        let first = first.wrapping_add(tensor.byte_offset as usize);
        let elements = (0..shape.iter().product()).flat_map(|mut index: usize| {
            let mut offset = 0;
            for (dimension, stride) in shape.iter().zip(&strides).rev() {
                offset += (index % dimension) as i64 * stride;
                index /= dimension;
            }
            let at = first.wrapping_offset(offset as isize * size as isize);
            // SAFETY: the element lies in the tensor.
            unsafe { std::slice::from_raw_parts(at, size) }
        });
        elements.copied().collect()
    }
}

/// Sizes or strides.
fn numbers<'a>(first: *const i64, count: i32) -> &'a [i64] {
    match count {
        0 => &[],
        // SAFETY: the producer gives as many numbers as there are dimensions.
        _ => unsafe { std::slice::from_raw_parts(first, count as usize) },
    }
}

/// Kept as long as a tensor lives that we lend.
struct Kept {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _keeps: Box<dyn Any + Send>,
}

/// The device of a weight.
pub(crate) fn device(weight: &WeightInPlace) -> (i32, i32) {
    match weight.gpu {
        None => (CPU, 0),
        Some(index) => (CUDA, index as i32),
    }
}

/// Lends a weight, read-only as far as the receiver's version can say so. `keeps` lives until the receiver is done with it.
pub(crate) fn lend(
    py: Python<'_>,
    weight: &WeightInPlace,
    is_versioned: bool,
    keeps: impl Any + Send,
) -> PyResult<Py<PyAny>> {
    let signed = |numbers: &[usize]| numbers.iter().map(|number| *number as i64).collect();
    let kept = Box::new(Kept {
        shape: signed(&weight.shape),
        strides: signed(&weight.strides),
        _keeps: Box::new(keeps),
    });
    let (kind, index) = device(weight);
    let tensor = Tensor {
        data: weight.pointer.cast_mut().cast(),
        device: [kind, index],
        dimensions: kept.shape.len() as i32,
        code: match weight.dtype {
            DType::BF16 => BFLOAT,
            _ => FLOAT,
        },
        bits: 8 * weight.dtype.size_in_bytes() as u8,
        lanes: 1,
        shape: kept.shape.as_ptr().cast_mut(),
        strides: kept.strides.as_ptr().cast_mut(),
        byte_offset: 0,
    };
    let context = Box::into_raw(kept).cast();
    let capsule = match is_versioned {
        true => {
            let managed = VersionedManaged {
                version: [1, 0],
                context,
                deleter: Some(give_back_versioned),
                flags: READ_ONLY,
                tensor,
            };
            let managed = Box::into_raw(Box::new(managed)).cast();
            // SAFETY: the name lives forever, and the destructor takes the pointer back if nobody has.
            unsafe { PyCapsule_New(managed, VERSIONED_CAPSULE.as_ptr(), Some(drop_versioned)) }
        }
        false => {
            let managed = Managed {
                tensor,
                context,
                deleter: Some(give_back),
            };
            let managed = Box::into_raw(Box::new(managed)).cast();
            // SAFETY: as above.
            unsafe { PyCapsule_New(managed, CAPSULE.as_ptr(), Some(drop_unversioned)) }
        }
    };
    // SAFETY: a new reference, or null with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind)
}

unsafe extern "C" fn give_back(managed: *mut Managed) {
    // SAFETY: both are boxes of `lend`, and the receiver calls this once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Kept>()));
    }
}

unsafe extern "C" fn give_back_versioned(managed: *mut VersionedManaged) {
    // SAFETY: as in `give_back`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Kept>()));
    }
}

unsafe extern "C" fn drop_unversioned(capsule: *mut PyObject) {
    // SAFETY: Python calls it with the capsule; one that was taken has another name.
    unsafe {
        if let Some(managed) = untaken(capsule, CAPSULE) {
            give_back(managed.cast());
        }
    }
}

unsafe extern "C" fn drop_versioned(capsule: *mut PyObject) {
    // SAFETY: as above.
    unsafe {
        if let Some(managed) = untaken(capsule, VERSIONED_CAPSULE) {
            give_back_versioned(managed.cast());
        }
    }
}

/// # Safety
/// `capsule` is a capsule.
unsafe fn untaken(capsule: *mut PyObject, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the caller's promise.
    unsafe {
        if PyCapsule_IsValid(capsule, name.as_ptr()) == 0 {
            return None;
        }
        let pointer = PyCapsule_GetPointer(capsule, name.as_ptr());
        if pointer.is_null() {
            PyErr_Clear();
            return None;
        }
        Some(pointer)
    }
}
