//! The algorithms that cuBLASLt has for a problem, and the choice among them.

use super::algorithms::TunedProduct;
use super::problem::Problem;
use super::products::{ANY_REDUCTION, Answer, Plan, Preference, REDUCTIONS};
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use std::mem::MaybeUninit;

/// The source of a product's choice of algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChosenBy {
    /// The library's heuristic, which names it first.
    Heuristic,
    /// A measurement.
    Measuring,
    /// The heuristic, because the library refused the measured algorithm.
    Refusal,
}

/// The algorithms that the library's heuristic names for a problem, best first.
pub(super) struct Choices {
    pub(super) algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    /// Whether the parts of a split sum may be rounded.
    pub(super) are_rounded: bool,
}

impl Plan {
    /// The plan with the measured algorithm, or, if the library refuses it, with the heuristic's first.
    pub(super) fn choose(
        mut self,
        handle: sys::cublasLtHandle_t,
        problem: &Problem,
        workspace_bytes: usize,
        tuned: Option<&TunedProduct>,
    ) -> Answer<Plan> {
        if let Some(tuned) = tuned {
            let algorithm = tuned.algorithm();
            if self.takes(handle, &algorithm, workspace_bytes) {
                (self.algorithm, self.is_rounded) = (algorithm, tuned.is_rounded());
                self.origin = ChosenBy::Measuring;
                return Ok(self);
            }
            self.origin = ChosenBy::Refusal;
        }
        let choices = self.choices(handle, problem, workspace_bytes, 1)?;
        (self.algorithm, self.is_rounded) = (choices.algorithms[0], choices.are_rounded);
        Ok(self)
    }

    /// Up to `most` algorithms, at least one. They may round parts of a sum only if every algorithm does.
    pub(super) fn choices(
        &self,
        handle: sys::cublasLtHandle_t,
        problem: &Problem,
        workspace_bytes: usize,
        most: usize,
    ) -> Answer<Choices> {
        let named = |reductions| {
            let preference = Preference::new(problem, workspace_bytes, reductions)?;
            self.named(handle, &preference, most)
        };
        let (named, are_rounded) = match named(REDUCTIONS) {
            Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => {
                (named(ANY_REDUCTION)?, true)
            }
            named => (named?, false),
        };
        let fitting = named
            .iter()
            .filter(|one| one.workspaceSize <= workspace_bytes);
        let algorithms: Vec<_> = fitting.map(|one| one.algo).collect();
        match algorithms.is_empty() {
            true => Err(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            )),
            false => Ok(Choices {
                algorithms,
                are_rounded,
            }),
        }
    }

    /// The algorithms that the heuristic names under a preference; at least one.
    fn named(
        &self,
        handle: sys::cublasLtHandle_t,
        preference: &Preference,
        most: usize,
    ) -> Answer<Vec<sys::cublasLtMatmulHeuristicResult_t>> {
        let mut results = vec![MaybeUninit::uninit(); most];
        let mut found = 0;
        // SAFETY: everything is alive, and the results have room for `most`, of which the first `found` are written.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.product.0,
                self.left.0,
                self.right.0,
                self.c.0,
                self.d.0,
                preference.0,
                most as i32,
                results.as_mut_ptr().cast(),
                &mut found,
            )
        }
        .result()?;
        let found = results.into_iter().take(found.max(0) as usize);
        // SAFETY: the library has written these.
        let named = found.map(
            |result: MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>| unsafe {
                result.assume_init()
            },
        );
        let is_usable = |one: &sys::cublasLtMatmulHeuristicResult_t| one.state.result().is_ok();
        let named: Vec<_> = named.filter(is_usable).collect();
        match named.is_empty() {
            true => Err(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            )),
            false => Ok(named),
        }
    }

    /// Whether the library can use this algorithm for the problem within a workspace.
    fn takes(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        workspace_bytes: usize,
    ) -> bool {
        let mut result = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: everything is alive; the library writes the result, which is numbers alone and zero until then.
        let (status, result) = unsafe {
            let status = sys::cublasLtMatmulAlgoCheck(
                handle,
                self.product.0,
                self.left.0,
                self.right.0,
                self.c.0,
                self.d.0,
                algorithm,
                result.as_mut_ptr(),
            );
            (status, result.assume_init())
        };
        status.result().is_ok() && result.workspaceSize <= workspace_bytes
    }
}
