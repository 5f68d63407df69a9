//! The loss of a policy gradient on sequences of tokens, with its gradient.

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// The clipped loss of a policy gradient (PPO, Schulman et al. 2017; GRPO, Shao et al. 2024) of the tokens of `b` sequences. `losses`
    /// are minus the log-probabilities of the targets under the model, `old` and `reference` the log-probabilities themselves under
    /// the policy that wrote the targets and under the one that the model is to stay near. With the ratio
    /// r = exp(-losses - old), the advantage A and q = reference + losses, the loss of a token is
    ///
    /// -min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A) + beta (exp(q) - q - 1).
    ///
    /// Without a `reference` the second term is 0. With `by_sequence` the logarithm of r is one for the whole sequence (GSPO, Zheng et al.
    /// 2025): the mean of its tokens', by their weights. Each token counts with its weight; where that is 0, nothing else is read.
    /// All tensors are f32.
    ///
    /// `factors` receive the derivative of the sum of all weighed losses by each entry of `losses`. `marks [4, b]` receive the sums over each
    /// sequence of the weighed losses, of the weighed exp(q) - q - 1, of the weights of tokens whose ratio is clipped, and of all weights.
    PolicyGradientLoss "policy_loss": factors [b, s] {
        factors: Out<'a> [b, s] f32,
        marks: Out<'a> [4, b] f32,
        losses: In<'a> [b, s] f32,
        old: In<'a> [b, s] f32,
        reference: Option<In<'a>> [b, s] f32,
        advantages: In<'a> [b, s] f32,
        weights: In<'a> [b, s] f32,
        clip_low: f32,
        clip_high: f32,
        beta: f32,
        by_sequence: bool,
    }
}

impl Contract for PolicyGradientLoss<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        let numbers = [
            ("clip_low", self.clip_low),
            ("clip_high", self.clip_high),
            ("beta", self.beta),
        ];
        numbers.into_iter().try_for_each(|(name, number)| {
            check.that(number.is_finite() && number >= 0.0, || {
                format!("`{name}` is {number}, expected a finite number of at least 0")
            })
        })
    }

    fn conditions(&self, check: &Check) -> Checked {
        check.that(self.beta == 0.0 || self.reference.is_some(), || {
            format!("`beta` is {}, and there is no `reference`", self.beta)
        })
    }
}
