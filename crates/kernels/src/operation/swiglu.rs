//! The gated activation of the feed-forward layer (Shazeer 2020).

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use super::output_form::OutputForm;
use memory::{In, Out};

/// The function of an element of gate, g, and the same element of up, u.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateFunction {
    /// `silu(g) u`: SwiGLU.
    Silu,
    /// `gelu(g) u` with GELU in its form with a tanh: GeGLU.
    GeluTanh,
    /// `(u + 1) g sigmoid(alpha g)`, where g is at most `limit`, and u between `-limit` and `limit` (gpt-oss). What lies beyond has no
    /// gradient; the bounds have one. Both numbers are finite and positive.
    ClampedSwish { alpha: f32, limit: f32 },
}

impl GateFunction {
    /// `alpha` and `limit`; functions without them do not read them.
    pub(crate) fn alpha_and_limit(self) -> [f32; 2] {
        match self {
            GateFunction::Silu | GateFunction::GeluTanh => [1.0; 2],
            GateFunction::ClampedSwish { alpha, limit } => [alpha, limit],
        }
    }

    /// Refuses numbers that are not finite and positive.
    pub(super) fn check(self, check: &Check) -> Checked {
        let [alpha, limit] = self.alpha_and_limit();
        check.positive("alpha", alpha)?;
        check.positive("limit", limit)
    }
}

operation! {
    /// `act [t, f]`: `function` of gate and up. Each row of `gate_up [t, 2 f]` has the columns of gate, then those of up. `form`: that
    /// of `act`.
    GatedActivation "swiglu": act [t, f] {
        act: Out<'a> [t, f] codes_if(form.is_codes()),
        gate_up: In<'a> [t, 2 * f],
        function: GateFunction,
        form: OutputForm<'a> [1] f32,
    }

    /// Gradients of [`GatedActivation`] in place: `gate_up` becomes its own gradient, of `dact [t, f]`. `largest [1]` (f32): if it is
    /// given, the largest magnitude of this gradient, as [`super::AbsMax`] finds it.
    GatedActivationBackward "swiglu_backward": gate_up, dact [t, f] {
        gate_up: Out<'a> [t, 2 * f] changes,
        dact: In<'a> [t, f],
        function: GateFunction,
        largest: Option<Out<'a>> [1] f32,
    }
}

impl Contract for GatedActivation<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.function.check(check)
    }
}

impl Contract for GatedActivationBackward<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.function.check(check)
    }
}
