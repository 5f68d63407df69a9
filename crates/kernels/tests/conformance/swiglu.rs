//! The gated activation and its gradients in place.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::largest::{with_codes, with_largest};
use crate::oracle::{constant, gradients, values, variable};
use candle_core::{Result, Tensor};
use kernels::{GateFunction, GatedActivation, GatedActivationBackward, KernelError};
use memory::DType;

/// The functions of a gate. The limit is one that many values are beyond.
pub const FUNCTIONS: [GateFunction; 3] = [
    GateFunction::Silu,
    GateFunction::GeluTanh,
    GateFunction::ClampedSwish {
        alpha: 1.702,
        limit: 2.0,
    },
];

/// Gate and up side by side, within these ranges. With a limit some lie on it.
pub fn gate_and_up(
    (dtype, function): (DType, GateFunction),
    [rows, width]: [usize; 2],
    ranges: [f64; 2],
) -> Host {
    let [mut gate, mut up] = [1, 2]
        .map(|seed| Host::random(dtype, [rows, width], ranges[seed - 1], seed as u64).values());
    if let GateFunction::ClampedSwish { limit, .. } = function {
        let limit = f64::from(limit);
        gate.iter_mut().step_by(7).for_each(|gate| *gate = limit);
        up.iter_mut().step_by(5).for_each(|up| *up = -limit);
        up.iter_mut().step_by(11).for_each(|up| *up = limit);
    }
    let rows_of_both = gate.chunks(width).zip(up.chunks(width));
    let values = rows_of_both.flat_map(|(gate, up)| [gate, up].concat());
    Host::new(dtype, [rows, 2 * width], values)
}

/// What a function makes of gate and up, by primitive operations.
pub fn activated(function: GateFunction, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let sigmoid = |x: &Tensor| (x.neg()?.exp()? + 1.0)?.recip();
    match function {
        GateFunction::Silu => (gate * sigmoid(gate)?)?.mul(up),
        GateFunction::GeluTanh => {
            let cube = (gate.sqr()? * gate)?;
            let inner = ((gate + (cube * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            ((inner.tanh()? + 1.0)? * (gate * 0.5)?)?.mul(up)
        }
        GateFunction::ClampedSwish { alpha, limit } => {
            let limit = f64::from(limit);
            let gate = cut(gate, &gate.le(limit)?, limit)?;
            let up = cut(up, &up.le(limit)?, limit)?;
            let up = cut(&up, &up.ge(-limit)?, -limit)?;
            let passed = (&gate * sigmoid(&(&gate * f64::from(alpha))?)?)?;
            passed.mul(&(up + 1.0)?)
        }
    }
}

/// x where it is within a bound, else the bound.
fn cut(x: &Tensor, within: &Tensor, bound: f64) -> Result<Tensor> {
    within.where_cond(x, &(x.zeros_like()? + bound)?)
}

/// The size of terms: far below zero nothing passes, and nothing is left to compare with.
pub fn terms(function: GateFunction) -> f64 {
    match function {
        GateFunction::Silu => 0.0,
        GateFunction::GeluTanh | GateFunction::ClampedSwish { .. } => 1.0,
    }
}

#[derive(Debug)]
struct Gated {
    dtype: DType,
    function: GateFunction,
    tokens: usize,
    width: usize,
    /// Largest of the gate's entries: up to where a sigmoid is 0 or 1 in f32.
    range: f64,
    /// That of up's.
    up_range: f64,
}

impl Gated {
    /// Gate and up side by side, and the gradient of what comes of them.
    fn tensors(&self) -> [Host; 2] {
        let [tokens, width] = [self.tokens, self.width];
        [
            gate_and_up(
                (self.dtype, self.function),
                [tokens, width],
                [self.range, self.up_range],
            ),
            Host::random(self.dtype, [tokens, width], 1.0, 3),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let [gate_up, dact] = self.tensors();
        let gate_up = variable(&gate_up)?;
        let gate = gate_up.narrow(1, 0, self.width)?;
        let up = gate_up.narrow(1, self.width, self.width)?;
        let act = activated(self.function, &gate, &up)?;
        let mut found = gradients(&act, &constant(&dact)?, &[&gate_up])?;
        Ok([values(&act)?, found.remove(0)])
    }
}

impl Case for Gated {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [host, dact] = self.tensors();
        let [gate_up, dact] = [&host, &dact].map(|host| device.put(host));
        let of = (self.dtype, [self.tokens, self.width]);
        let act = with_codes(device, of, |act, form| {
            device.run(GatedActivation {
                act,
                gate_up: gate_up.view(),
                function: self.function,
                form,
            })
        })?;
        let gradient = with_largest(device, |largest| {
            let mut gate_up = device.put(&host);
            device.run(GatedActivationBackward {
                gate_up: gate_up.view_mut(),
                dact: dact.view(),
                function: self.function,
                largest,
            })?;
            Ok(device.take(&gate_up))
        })?;
        Ok(vec![act, gradient])
    }

    fn expected(&self) -> Vec<Expected> {
        let [act, dgate_up] = self.oracle().unwrap();
        vec![
            Expected::new("swiglu", act, Rule::Standard).with_terms(terms(self.function)),
            Expected::new("swiglu_backward", dgate_up, Rule::Standard)
                .with_terms(terms(self.function)),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (tokens, width) in [(1, 1), (1, 131), (37, 131), (37, 1000), (3, 2056)] {
        // In the last, the largest magnitude of the gradients is gate's, in the others it is up's.
        let ranges = [(3.0, 1.0), (200.0, 1.0), (3.0, 50.0)];
        for (function, (range, up_range)) in FUNCTIONS
            .into_iter()
            .flat_map(|function| ranges.map(|ranges| (function, ranges)))
        {
            cases.push(Box::new(Gated {
                dtype,
                function,
                tokens,
                width,
                range,
                up_range,
            }));
        }
    }
    cases
}
