//! Muon (Jordan et al. 2024), as `torch.optim.Muon`: weights move along the momentum of their matrix, which
//! Newton-Schulz's iteration makes nearly orthogonal.

use crate::moment::{Moment, moment};
use crate::update::{Update, UpdateQueue, WholeTensor};
use choices::choices;
use kernels::quantise::SIGNED;
use kernels::{
    Combine, DivideByNorm, Gram, Init, Matmul, Momentum, NormAndClip, NormGrains, Result, StepAlong,
};
use memory::{DType, GRAIN_ELEMENTS, In, Out, one_behind_another};
use std::ops::Range;

choices! {
    /// How the learning rate of a matrix depends on its shape.
    #[derive(Default)]
    LrAdjust {
        /// 0.2 x the root of its longer side: updates as large as AdamW's.
        #[default]
        MatchRmsAdamw = "match_rms_adamw",
        /// The root of rows / columns in the shape that files have, at least 1.
        Original = "original",
    }
}

/// Muon's numbers that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether the direction is one step ahead of the momentum (Nesterov).
    pub nesterov: bool,
    /// Iterations of Newton-Schulz.
    pub ns_steps: usize,
    /// The iteration's coefficients: of X, X X' X and (X X')^2 X.
    pub ns_coefficients: [f64; 3],
    /// Lower bound of the norm that a direction is divided by.
    pub ns_eps: f64,
    /// The type in which the iteration computes: f32 or bf16.
    pub ns_dtype: DType,
    /// How learning rates follow from shapes.
    pub lr_adjust: LrAdjust,
}

impl Default for Muon {
    fn default() -> Muon {
        Muon {
            momentum: 0.95,
            nesterov: true,
            ns_steps: 5,
            ns_coefficients: [3.4445, -4.775, 2.0315],
            ns_eps: 1e-7,
            ns_dtype: DType::BF16,
            lr_adjust: LrAdjust::default(),
        }
    }
}

pub(crate) static MOMENTUM: [Moment; 1] = [moment!("momentum", SIGNED)];

/// Where the parts of the iteration's scratch are, in bytes, for a matrix of this shape. They are f64 sums of squares
/// by grains, `[2]` f32 for the norm, an f32 product before rounding, and the Gram matrix of the shorter side.
fn places(shape: [usize; 2], dtype: DType) -> Vec<Range<usize>> {
    let elements = shape[0] * shape[1];
    let side = shape[0].min(shape[1]);
    one_behind_another([
        8 * elements.div_ceil(GRAIN_ELEMENTS),
        2 * 4,
        4 * elements,
        dtype.size_in_bytes() * side * side,
    ])
}

impl Muon {
    /// The factor on the learning rate of a matrix.
    fn ratio(&self, [rows, columns]: [usize; 2]) -> f64 {
        match self.lr_adjust {
            LrAdjust::MatchRmsAdamw => 0.2 * (rows.max(columns) as f64).sqrt(),
            LrAdjust::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
        }
    }

    /// One iteration: X = a X + (b G + c G G) X with the Gram matrix G = X X' of the shorter side. Every sum is rounded
    /// once.
    fn iterate(
        &self,
        on: &UpdateQueue,
        [rows, columns]: [usize; 2],
        x: &mut Out,
        (product, gram): (&mut Out, &mut Out),
    ) -> Result {
        let [a, b, c] = self.ns_coefficients.map(|factor| factor as f32);
        let (side, is_wide) = (rows.min(columns), rows < columns);
        let (elements, square) = (rows * columns, side * side);
        let matrix = x.as_in().reshape([rows, columns]);
        on.run(Gram {
            out: gram.reborrow().reshape([side, side]),
            x: match is_wide {
                true => matrix,
                false => matrix.t(),
            },
        })?;
        let squared = product.reborrow().rows(0..square);
        // G is symmetric, so its transposed view gives the same product, and the CPU multiplies that view faster.
        on.run(Gram {
            out: squared.reshape([side, side]),
            x: gram.as_in().reshape([side, side]).t(),
        })?;
        on.run(Combine {
            out: gram.reborrow(),
            x: product.as_in().rows(0..square),
            alpha: c,
            beta: b,
        })?;
        let g = gram.as_in().reshape([side, side]);
        let (left, right) = match is_wide {
            true => (g, matrix),
            false => (matrix, g),
        };
        let moved = product.reborrow().rows(0..elements);
        on.run(Matmul {
            out: moved.reshape([rows, columns]),
            a: left,
            b: right,
            bias: None,
            init: Init::Overwrite,
        })?;
        on.run(Combine {
            out: x.reborrow(),
            x: product.as_in().rows(0..elements),
            alpha: 1.0,
            beta: a,
        })
    }

    /// Bytes of scratch that [`Muon::transform`] needs for a matrix of this shape.
    pub(crate) fn scratch_bytes(&self, shape: [usize; 2]) -> usize {
        places(shape, self.ns_dtype)[3].end
    }

    /// Enqueues the update of the momentum and the direction of a range, `out [n]`.
    pub(crate) fn direct(&self, on: &UpdateQueue, mut update: Update, out: Out) -> Result {
        let momentum = update.moments.pop().expect("there is one moment");
        on.run(Momentum {
            out,
            momentum,
            gradients: update.gradients,
            clip: update.clip,
            key: update.key,
            first_index: update.first_index,
            decay: self.momentum as f32,
            nesterov: self.nesterov,
        })
    }

    /// Enqueues the transformation of a whole direction, in place, into what weights move along. `rates` are those of
    /// the step.
    pub(crate) fn transform(
        &self,
        on: &UpdateQueue,
        shape: [usize; 2],
        mut direction: Out,
        scratch: Out,
        rates: In,
    ) -> Result {
        let parts = scratch.disjoint_rows(&places(shape, self.ns_dtype));
        let Ok([grains, norm, product, gram]) = <[Out; 4]>::try_from(parts) else {
            unreachable!("there are four places")
        };
        let (mut grains, mut norm) = (grains.cast(DType::F64), norm.cast(DType::F32));
        on.run(NormGrains {
            grains: grains.reborrow(),
            x: direction.as_in(),
        })?;
        // Only the norm is used, so `loss` can be any finite value: rates are always finite.
        on.run(NormAndClip {
            out: norm.reborrow(),
            grains: grains.into_in(),
            loss: rates.rows(0..1),
            max_norm: None,
        })?;
        on.run(DivideByNorm {
            x: direction.reborrow(),
            norm: norm.into_in().rows(0..1),
            eps: self.ns_eps as f32,
        })?;
        let mut product = product.cast(DType::F32);
        let mut gram = gram.cast(self.ns_dtype);
        for _ in 0..self.ns_steps {
            self.iterate(on, shape, &mut direction, (&mut product, &mut gram))?;
        }
        Ok(())
    }

    /// Enqueues the update of a range's weights. If the clipping factor is not finite, they stay as they are.
    pub(crate) fn apply(
        &self,
        on: &UpdateQueue,
        update: Update,
        matrix: &WholeTensor,
        direction: In,
    ) -> Result {
        on.run(StepAlong {
            parameters: update.weights,
            master: update.master,
            direction,
            rate: update.rates,
            clip: update.clip,
            key: update.key,
            first_index: update.first_index,
            scale: self.ratio(matrix.stored) as f32,
            weight_decay: update.weight_decay,
        })
    }
}
