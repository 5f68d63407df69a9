//! Matrix products by cuBLASLt.
//!
//! A product must depend only on the problem and on what is recorded of a run. So the algorithm is one measured
//! beforehand and kept in a file ([`super::algorithms`]). Otherwise it is the first that the library's heuristic names
//! for the problem, the workspace and the alignment of the matrices, without a trial. The heuristic is asked once per
//! problem. f32 stays f32 (no TF32).
//!
//! A long sum may be split over blocks (split-K): a weight gradient of a narrow matrix, or the data gradient of a head
//! with a large vocabulary, is a small matrix of long sums, and would keep few multiprocessors busy. In how many parts
//! follows from the algorithm. The parts are f32, in our own workspace, and added by a second kernel
//! ([`REDUCTIONS`]), so that their order does not depend on which block was done first.

use super::algorithms::Algorithms;
use super::choices::ChosenBy;
use super::facts::DeviceFacts;
use super::problem::{Layout, Pointers, Problem};
use super::{error, loading};
use crate::cuda::{BIAS_ALIGNMENT_BYTES, Gemm, Workspace};
use crate::{KernelError, Result};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUstream;
use memory::DType;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

/// `CUBLAS_OP_N` and `CUBLAS_OP_T` of `cublasOperation_t`, which cudarc declares for cuBLAS alone.
const AS_IT_IS: i32 = 0;
const TRANSPOSED: i32 = 1;

/// How an algorithm may put a sum together: in one piece (NONE), or in parts of the compute type, f32, that lie in
/// the workspace and are added by a kernel of their own (COMPUTE_TYPE).
///
/// Not in place (INPLACE): the parts are added up in the output itself, where blocks wait for one another in turn, and
/// where it is bf16 every partial sum is rounded. Not in the output's type (OUTPUT_TYPE): every part is rounded to it
/// before the sum. PyTorch forbids both where it may not reduce in bf16.
pub(super) const REDUCTIONS: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE
    as u32
    | sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// Every way, for a product of which no algorithm has one of those: its parts may be rounded, always in the same order.
pub(super) const ANY_REDUCTION: u32 =
    sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_MASK as u32;

pub(super) type Answer<T> = Result<T, CublasError>;

/// The library, with an algorithm for each problem seen so far.
pub(super) struct Products {
    pub(super) handle: sys::cublasLtHandle_t,
    plans: RefCell<HashMap<(Problem, usize), Rc<Plan>>>,
    algorithms: Option<Rc<Algorithms>>,
    /// Why the device multiplies no codes of FP8, if it does not.
    no_fp8: Option<String>,
}

impl Products {
    /// Looks for the library, so that a device is not opened in vain.
    pub(super) fn look_for_library() -> Result {
        if loading::CUBLASLT.is_there() {
            return Ok(());
        }
        Err(KernelError::device(
            "gemm",
            "cuBLASLt was not found: put the folder of libcublasLt.so.12 (or .13, if the driver is for CUDA 13) into \
             LD_LIBRARY_PATH; it comes with the CUDA toolkit, with PyTorch, and with `pip install nvidia-cublas-cu12`",
        ))
    }

    /// Opens the library for the device whose context is current. Products take these algorithms where they have one.
    pub(super) fn new(algorithms: Option<Rc<Algorithms>>, facts: &DeviceFacts) -> Result<Products> {
        let handle = result::create_handle();
        Ok(Products {
            handle: handle.map_err(|error| error::of_library("cuBLASLt does not start", error))?,
            plans: RefCell::default(),
            algorithms,
            no_fp8: facts.no_fp8(),
        })
    }

    /// Computes products in the order of the stream.
    ///
    /// # Safety
    /// As for `Driver::gemm`.
    pub(super) unsafe fn compute(
        &self,
        gemm: &Gemm,
        workspace: Workspace,
        stream: CUstream,
    ) -> Result {
        if let (Some(reason), Some(_)) = (&self.no_fp8, gemm.scales) {
            let message = format!("{reason}: leave --fp8 out");
            return Err(KernelError::device("scaled_matmul", message));
        }
        let (problem, pointers) = Problem::new(gemm)?;
        let refused = |error| error::of_library(format!("{:?}: {problem:?}", gemm.sizes), error);
        let plan = self.plan(problem, workspace.bytes).map_err(refused)?;
        let beta = if gemm.init.is_some() { 1.0 } else { 0.0 };
        // SAFETY: the caller's promise.
        let computed =
            unsafe { plan.compute(self.handle, pointers, [gemm.alpha, beta], workspace, stream) };
        computed.map_err(refused)
    }

    /// Problems so far whose sums have rounded parts.
    pub(super) fn rounded(&self) -> usize {
        let plans = self.plans.borrow();
        plans.values().filter(|plan| plan.is_rounded).count()
    }

    /// Problems so far that take an algorithm that was measured, and those that have one that the library does not take.
    pub(super) fn tuned(&self) -> (usize, usize) {
        let plans = self.plans.borrow();
        let count = |origin| plans.values().filter(|plan| plan.origin == origin).count();
        (count(ChosenBy::Measuring), count(ChosenBy::Refusal))
    }

    fn plan(&self, problem: Problem, workspace_bytes: usize) -> Answer<Rc<Plan>> {
        let key = (problem, workspace_bytes);
        if let Some(plan) = self.plans.borrow().get(&key) {
            return Ok(plan.clone());
        }
        let tuned = self.algorithms.as_ref();
        let tuned = tuned.and_then(|algorithms| algorithms.find(&problem, workspace_bytes));
        let plan = Plan::new(&problem)?.choose(self.handle, &problem, workspace_bytes, tuned)?;
        let plan = Rc::new(plan);
        self.plans.borrow_mut().insert(key, plan.clone());
        Ok(plan)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: created in `new`. A failure here is one of earlier work, and was or will be told there.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// A problem in the library's terms, and the algorithm for it.
pub(super) struct Plan {
    pub(super) product: Description,
    pub(super) left: MatrixLayout,
    pub(super) right: MatrixLayout,
    pub(super) c: MatrixLayout,
    pub(super) d: MatrixLayout,
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
    /// The parts of a split sum may be rounded.
    pub(super) is_rounded: bool,
    pub(super) origin: ChosenBy,
}

impl Plan {
    /// A problem for which no algorithm is chosen yet.
    pub(super) fn new(problem: &Problem) -> Answer<Plan> {
        let layout = |layout: &Layout| MatrixLayout::new(layout, problem.batch);
        Ok(Plan {
            product: Description::new(problem)?,
            left: layout(&problem.left)?,
            right: layout(&problem.right)?,
            c: layout(&problem.c)?,
            d: layout(&problem.d)?,
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            is_rounded: false,
            origin: ChosenBy::Heuristic,
        })
    }

    /// # Safety
    /// As for `Driver::gemm`, for a product that is this plan's problem.
    pub(super) unsafe fn compute(
        &self,
        handle: sys::cublasLtHandle_t,
        pointers: Pointers,
        [alpha, beta]: [f32; 2],
        workspace: Workspace,
        stream: CUstream,
    ) -> Answer<()> {
        // SAFETY: the caller's promise; the factors are read before the call returns.
        unsafe {
            if !pointers.bias.is_null() {
                self.product.set_bias(pointers.bias)?;
            }
            self.product.set_scales(pointers.scales)?;
            result::matmul(
                handle,
                self.product.0,
                address(&alpha),
                address(&beta),
                pointers.left.cast(),
                self.left.0,
                pointers.right.cast(),
                self.right.0,
                pointers.c.cast(),
                self.c.0,
                pointers.d.cast(),
                self.d.0,
                &self.algorithm,
                workspace.pointer.cast_mut().cast(),
                workspace.bytes,
                stream.cast(),
            )
        }
    }
}

/// Where the library reads a value from.
fn address<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F8E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        DType::F8E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// The kind of a product: f32 sums and factors, which operands are transposed, and whether a bias is added.
pub(super) struct Description(pub(super) sys::cublasLtMatmulDesc_t);

impl Description {
    fn new(problem: &Problem) -> Answer<Description> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = sys::cudaDataType::CUDA_R_32F;
        let description = Description(result::create_matmul_desc(compute, scale)?);
        let transposes = [
            (
                Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
                problem.left_transposed,
            ),
            (
                Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
                problem.right_transposed,
            ),
        ];
        for (attribute, transposed) in transposes {
            let operation = if transposed { TRANSPOSED } else { AS_IT_IS };
            description.set(attribute, &operation)?;
        }
        if problem.fast_accumulation {
            description.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1u8)?;
        }
        if problem.has_bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            let dtype = data_type(problem.d.dtype) as i32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &dtype)?;
            // The heuristic looks at its alignment alone, which is all biases'; products have their own.
            description.set_bias(std::ptr::without_provenance(BIAS_ALIGNMENT_BYTES))?;
        }
        Ok(description)
    }

    /// Where the bias of the next product lies, on the device.
    fn set_bias(&self, bias: *const u8) -> Answer<()> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)
    }

    /// Sets the addresses of the scales of the next product, null where it has none. The scale mode stays unset: libraries before 12.8 do
    /// not know it, and the default is one scale a matrix.
    fn set_scales(&self, scales: [*const u8; 2]) -> Answer<()> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let attributes = [
            Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
        ];
        let set = attributes
            .into_iter()
            .zip(scales)
            .filter(|(_, scale)| !scale.is_null());
        set.into_iter()
            .try_for_each(|(attribute, scale)| self.set(attribute, &scale))
    }

    /// Sets an attribute of the value's type.
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Answer<()> {
        let (value, bytes) = (address(value), size_of::<T>());
        // SAFETY: created in `new`; the library refuses a value of another size.
        unsafe { result::set_matmul_desc_attribute(self.0, attribute, value, bytes) }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created in `new`; it is host memory alone.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// How the matrices of a batch lie in memory.
pub(super) struct MatrixLayout(pub(super) sys::cublasLtMatrixLayout_t);

impl MatrixLayout {
    fn new(layout: &Layout, batch: i32) -> Answer<MatrixLayout> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let Layout {
            dtype,
            rows,
            columns,
            leading,
            batch_stride,
            ..
        } = *layout;
        let created = result::create_matrix_layout(data_type(dtype), rows, columns, leading)?;
        let created = MatrixLayout(created);
        let count = Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
        let stride = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        // SAFETY: created above; the attributes are an int32_t and an int64_t.
        unsafe {
            let (value, bytes) = (address(&batch), size_of::<i32>());
            result::set_matrix_layout_attribute(created.0, count, value, bytes)?;
            let (value, bytes) = (address(&batch_stride), size_of::<i64>());
            result::set_matrix_layout_attribute(created.0, stride, value, bytes)?;
        }
        Ok(created)
    }
}

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // SAFETY: created in `new`; it is host memory alone.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What an algorithm may do.
pub(super) struct Preference(pub(super) sys::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn new(
        problem: &Problem,
        workspace_bytes: usize,
        reductions: u32,
    ) -> Answer<Preference> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference(result::create_matmul_pref()?);
        let workspace = workspace_bytes as u64;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &workspace,
        )?;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            &reductions,
        )?;
        let alignments = [
            (
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                &problem.left,
            ),
            (
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                &problem.right,
            ),
            (
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                &problem.c,
            ),
            (
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                &problem.d,
            ),
        ];
        for (attribute, layout) in alignments {
            preference.set(attribute, &layout.alignment_bytes)?;
        }
        Ok(preference)
    }

    /// Sets an attribute of the value's type.
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Answer<()> {
        let (value, bytes) = (address(value), size_of::<T>());
        // SAFETY: created in `new`; the library refuses a value of another size.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, bytes) }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created in `new`; it is host memory alone.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
