//! The gated delta rule (Yang et al. 2025).
//!
//! A chunk of C tokens of a value head, with the state S in front of it, c the running sum of gates, `D_ij = e^(c_i - c_j)`,
//! `e = e^c` and `r = e^(c_C - c)`, all of them 0 across documents: `A = strict(beta K K^T D)`, `P = tril(Q K^T D)`,
//! `(1 + A) N = beta (V - e K S)`, `O = e Q S + P N`, and the next state is `e^(c_C) S + (r K)^T N`.

mod backward;
mod chunk;
mod forward;
mod products;

use super::{Shared, part};
pub(super) use backward::gated_delta_backward;
pub(crate) use backward::scratch as backward_scratch;
pub(super) use chunk::softplus;
pub(super) use forward::gated_delta;
pub(crate) use forward::scratch as forward_scratch;
use memory::{Element, In, Out};

/// Columns that one task convolves, or whose weights' gradients it sums.
pub(super) const COLUMNS: usize = 64;

/// Rows that are summed before their sum is added to the total, so that long sums lose little precision.
pub(super) const ROWS: usize = 64;

/// Where documents are.
#[derive(Clone, Copy)]
pub(super) struct Documents<'a> {
    seq: usize,
    firsts: Option<&'a [i32]>,
}

impl<'a> Documents<'a> {
    pub(super) fn of(seq: usize, documents: Option<In<'a>>) -> Documents<'a> {
        Documents {
            seq,
            firsts: documents.map(In::slice),
        }
    }

    /// The first token of a token's document.
    pub(super) fn first(&self, token: usize) -> usize {
        token / self.seq * self.seq + self.firsts.map_or(0, |firsts| firsts[token] as usize)
    }
}

/// A row of a view with gaps between rows.
pub(super) fn row<'a, T: Element>(x: &In<'a>, token: usize) -> &'a [T] {
    let (width, stride) = (x.dims()[1], x.strides()[0]);
    // SAFETY: the row lies within the view, which is borrowed for as long.
    unsafe {
        std::slice::from_raw_parts(x.pointer().cast::<T>().wrapping_add(token * stride), width)
    }
}

/// Rows of an output with gaps between them, that tasks write in disjoint places.
#[derive(Clone, Copy)]
pub(super) struct OutRows<T> {
    first: Shared<T>,
    stride: usize,
}

impl<T: Element> OutRows<T> {
    pub(super) fn of(out: &Out) -> OutRows<T> {
        OutRows {
            first: Shared(out.pointer().cast()),
            stride: out.strides()[0],
        }
    }

    /// Some columns of a row.
    ///
    /// # Safety
    /// They lie in the output, and no other task touches them.
    pub(super) unsafe fn columns<'a>(
        self,
        token: usize,
        first: usize,
        columns: usize,
    ) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { part(self.first, token * self.stride + first, columns) }
    }
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
