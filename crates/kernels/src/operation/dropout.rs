//! Random dropout of elements, by their number rather than their order.

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{Field, Visit, operation};
use super::operand::OperandRule;
use memory::{In, Out};

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
        })
    }

    fn multiplier(&self, scale: f32) -> Checked {
        self.that(scale.is_finite(), || {
            format!("`scale` is {scale}, expected a finite number")
        })
    }
}

impl Field for Dropout<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        self.key.visit(rule.named("key"), visit)
    }
}

operation! {
    /// `out [t, h] = residual + scale dropout(out + bias)`, in place and rounded once, with `bias [h]` and `residual [t, h]`. Each
    /// of the three may be left out. Where these are rows of a larger tensor, `first` is the index in it of their first element.
    BiasDropoutAdd "bias_dropout_add": out [t, h] {
        out: Out<'a> [t, h] changes,
        bias: Option<In<'a>> [h],
        dropout: Option<Dropout<'a>> [2] u32 uncounted,
        first: usize,
        scale: f32,
        residual: Option<In<'a>> [t, h],
    }

    /// `out = scale dropout(x)`, both `[t, h]`, rounded once. It drops the elements that [`BiasDropoutAdd`] drops, so it also
    /// makes the gradient of what that adds to a residual.
    DropoutScale "dropout_scale": out [t, h] {
        out: Out<'a> [t, h],
        x: In<'a> [t, h],
        dropout: Option<Dropout<'a>> [2] u32 uncounted,
        first: usize,
        scale: f32,
    }
}

impl Contract for BiasDropoutAdd<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.dropout(self.dropout)?;
        check.multiplier(self.scale)
    }
}

impl Contract for DropoutScale<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.dropout(self.dropout)?;
        check.multiplier(self.scale)
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
