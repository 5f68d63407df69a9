//! Random dropout of elements, by their number rather than their order.

use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
use memory::{DType, In, Out};

/// Dropout (Srivastava et al. 2014): some elements become 0, the others are multiplied by [`Dropout::scale`].
///
/// The number of an element is [`crate::random::random_u32`] of the key and of the element's index in its tensor. It is
/// dropped if its number is below [`Dropout::threshold`]. So every computation drops the same elements, in any order.
///
/// Attention drops probabilities after they are normalised, so the sum that normalises is not dropped, by their index in
/// `[b, heads, s, s]`, `((sequence * heads + head) * s + query) * s + key_position`.
#[derive(Clone, Copy)]
pub struct Dropout<'a> {
    /// Share that is dropped, from 0 to below 1.
    pub probability: f32,
    /// `[2]` u32: low and high half of the key that names the stream of random numbers. Every layer, site, micro-batch
    /// and step has another key. It is in device memory, so that a captured section can be launched again.
    pub key: In<'a>,
}

impl Dropout<'_> {
    /// Random numbers below this drop their element: the probability's share of all `u32`.
    pub fn threshold(&self) -> u32 {
        (f64::from(self.probability) * (1u64 << 32) as f64) as u32
    }

    /// The factor on kept elements: 1 / (1 - probability).
    pub fn scale(&self) -> f32 {
        1.0 / (1.0 - self.probability)
    }

    /// Itself if it can drop anything; none for probability 0, which changes no bit.
    pub(crate) fn effective(self) -> Option<Self> {
        (self.probability > 0.0).then_some(self)
    }
}

impl Check {
    pub(super) fn dropout(&self, dropout: Option<Dropout>) -> Checked {
        let probability = dropout.map_or(0.0, |dropout| dropout.probability);
        self.that((0.0..1.0).contains(&probability), || {
            format!("dropout of {probability}, expected from 0 to below 1")
        })?;
        dropout.map_or(Ok(()), |dropout| {
            self.tensor("key", &dropout.key, &[2], DType::U32)
        })
    }
}

/// `out [t, h] = residual + dropout(out + bias)`, in place and rounded once, with `bias [h]` and `residual [t, h]`. Each
/// of the three may be left out. Where these are rows of a larger tensor, `first` is the index in it of their first element.
pub struct BiasDropoutAdd<'a> {
    pub out: Out<'a>,
    pub bias: Option<In<'a>>,
    pub dropout: Option<Dropout<'a>>,
    pub first: usize,
    pub residual: Option<In<'a>>,
}

/// `dx = dropout(dy)`, both `[t, h]`: drops the elements of the gradient that [`BiasDropoutAdd`] dropped.
pub struct DropoutBackward<'a> {
    pub dx: Out<'a>,
    pub dy: In<'a>,
    pub dropout: Dropout<'a>,
    pub first: usize,
}

impl Contract for BiasDropoutAdd<'_> {
    fn name(&self) -> &'static str {
        "bias_dropout_add"
    }

    fn check(&self, check: &Check) -> Checked {
        let out = &self.out;
        check.real_of_rank("out", out, 2)?;
        if let Some(bias) = &self.bias {
            check.tensor("bias", bias, &out.dims()[1..], out.dtype())?;
        }
        if let Some(residual) = &self.residual {
            check.tensor("residual", residual, out.dims(), out.dtype())?;
        }
        check.dropout(self.dropout)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let ins = self.bias.into_iter().chain(self.residual).map(reads);
        [changes(&self.out)].into_iter().chain(ins).collect()
    }
}

impl Contract for DropoutBackward<'_> {
    fn name(&self) -> &'static str {
        "dropout_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let dx = &self.dx;
        check.real_of_rank("dx", dx, 2)?;
        check.tensor("dy", &self.dy, dx.dims(), dx.dtype())?;
        check.dropout(Some(self.dropout))
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.dx), reads(self.dy)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_the_share_of_all_numbers() {
        let threshold = |probability| {
            Dropout {
                probability,
                key: In::of_slice(&[0u32, 0], [2]),
            }
            .threshold()
        };
        assert_eq!(threshold(0.0), 0);
        assert_eq!(threshold(0.25), 1 << 30);
        assert_eq!(threshold(1.0 - f32::EPSILON / 2.0), u32::MAX - 255);
    }
}
