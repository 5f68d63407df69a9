//! Functions of a gate: what comes of gate and up, and the derivatives. As in `kernels/gate.cuh`.

use super::simd::exp;

/// sqrt(8 / pi), twice the factor in the tanh: 1 + tanh(u) is 2 sigmoid(2 u).
const GELU_FACTOR: f32 = 1.595_769;

/// The weight of the cube.
const CUBE: f32 = 0.044_715;

/// The share of `x` that GELU lets pass.
#[inline(always)]
pub(super) fn gelu_share(x: f32) -> f32 {
    1.0 / (1.0 + exp(-GELU_FACTOR * (x + CUBE * x * x * x)))
}

/// The derivative of GELU, divided by the share.
#[inline(always)]
pub(super) fn gelu_slope(x: f32, share: f32) -> f32 {
    let slope = GELU_FACTOR * (1.0 + 3.0 * CUBE * x * x);
    1.0 + x * (1.0 - share) * slope
}

/// act = passed factor: a function of the gate by one of up. Each has its derivative beside it.
pub(super) struct Gated {
    pub(super) passed: f32,
    pub(super) slope: f32,
    pub(super) factor: f32,
    pub(super) factor_slope: f32,
}

/// A [`crate::GateFunction`] as a type, so that loops are compiled for each.
pub(super) trait Gate: Copy + Sync {
    fn act(self, g: f32, u: f32) -> f32;

    fn gated(self, g: f32, u: f32) -> Gated;
}

#[derive(Clone, Copy)]
pub(super) struct Silu;

impl Gate for Silu {
    #[inline(always)]
    fn act(self, g: f32, u: f32) -> f32 {
        g / (1.0 + exp(-g)) * u
    }

    #[inline(always)]
    fn gated(self, g: f32, u: f32) -> Gated {
        let sigmoid = 1.0 / (1.0 + exp(-g));
        let silu = g * sigmoid;
        Gated {
            passed: silu,
            slope: sigmoid + silu * (1.0 - sigmoid),
            factor: u,
            factor_slope: 1.0,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct GeluTanh;

impl Gate for GeluTanh {
    #[inline(always)]
    fn act(self, g: f32, u: f32) -> f32 {
        g * gelu_share(g) * u
    }

    #[inline(always)]
    fn gated(self, g: f32, u: f32) -> Gated {
        let share = gelu_share(g);
        Gated {
            passed: g * share,
            slope: share * gelu_slope(g, share),
            factor: u,
            factor_slope: 1.0,
        }
    }
}

/// (u + 1) g sigmoid(alpha g), with g cut at `limit` and u at both -limit and limit. NaN stays NaN.
#[derive(Clone, Copy)]
pub(super) struct ClampedSwish {
    pub(super) alpha: f32,
    pub(super) limit: f32,
}

impl Gate for ClampedSwish {
    #[inline(always)]
    fn act(self, g: f32, u: f32) -> f32 {
        let of = self.gated(g, u);
        of.passed * of.factor
    }

    #[inline(always)]
    fn gated(self, g: f32, u: f32) -> Gated {
        let (alpha, limit) = (self.alpha, self.limit);
        let (cuts_gate, cuts_up) = (g > limit, u > limit || u < -limit);
        let gate = if cuts_gate { limit } else { g };
        let up = if cuts_up { limit.copysign(u) } else { u };
        let sigmoid = 1.0 / (1.0 + exp(-alpha * gate));
        let slope = sigmoid + alpha * gate * sigmoid * (1.0 - sigmoid);
        Gated {
            passed: gate * sigmoid,
            slope: if cuts_gate { 0.0 } else { slope },
            factor: up + 1.0,
            factor_slope: if cuts_up { 0.0 } else { 1.0 },
        }
    }
}

/// Calls a function generic over an element type and a gate's function, with the types that are given as values; the function is the
/// last argument.
macro_rules! by_gate {
    ($dtype:expr, $function:expr, $call:ident($($argument:expr),* $(,)?)) => {{
        use $crate::cpu::gate::{ClampedSwish, GeluTanh, Silu};
        match $function {
            $crate::GateFunction::Silu => by_dtype!($dtype, $call($($argument,)* Silu)),
            $crate::GateFunction::GeluTanh => by_dtype!($dtype, $call($($argument,)* GeluTanh)),
            $crate::GateFunction::ClampedSwish { alpha, limit } => {
                by_dtype!($dtype, $call($($argument,)* ClampedSwish { alpha, limit }))
            }
        }
    }};
}
pub(super) use by_gate;
