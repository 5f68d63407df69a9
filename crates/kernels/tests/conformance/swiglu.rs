//! The gated activation and its gradients in place.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::oracle::{constant, gradients, values, variable};
use candle_core::Result;
use kernels::{KernelError, SwigluBackward};
use memory::DType;

#[derive(Debug)]
struct Swiglu {
    dtype: DType,
    tokens: usize,
    width: usize,
    /// Largest of the gate's entries: up to where a sigmoid is 0 or 1 in f32.
    range: f64,
}

impl Swiglu {
    fn tensors(&self) -> [Host; 3] {
        let dims = [self.tokens, self.width];
        [
            Host::random(self.dtype, dims, self.range, 1),
            Host::random(self.dtype, dims, 1.0, 2),
            Host::random(self.dtype, dims, 1.0, 3),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 3]> {
        let [gate, up, dact] = self.tensors();
        let (gate, up) = (variable(&gate)?, variable(&up)?);
        let sigmoid = (gate.neg()?.exp()? + 1.0)?.recip()?;
        let act = (gate.as_tensor() * sigmoid)?.mul(&up)?;
        let mut found = gradients(&act, &constant(&dact)?, &[&gate, &up])?;
        let dup = found.remove(1);
        Ok([values(&act)?, found.remove(0), dup])
    }
}

impl Case for Swiglu {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [mut gate, mut up, dact] = self.tensors().map(|host| device.put(&host));
        let mut act = device.room(self.dtype, [self.tokens, self.width]);
        device.kernels.run(kernels::Swiglu {
            act: act.view_mut(),
            gate: gate.view(),
            up: up.view(),
        })?;
        device.kernels.run(SwigluBackward {
            gate: gate.view_mut(),
            up: up.view_mut(),
            dact: dact.view(),
        })?;
        Ok([&act, &gate, &up].map(|tensor| device.take(tensor)).into())
    }

    fn expected(&self) -> Vec<Expected> {
        let [act, dgate, dup] = self.oracle().unwrap();
        vec![
            Expected::new("swiglu", act, Rule::Standard),
            Expected::new("swiglu_backward: gate", dgate, Rule::Standard),
            Expected::new("swiglu_backward: up", dup, Rule::Standard),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (tokens, width) in [(1, 1), (1, 131), (37, 131), (37, 1000)] {
        for range in [3.0, 200.0] {
            cases.push(Box::new(Swiglu {
                dtype,
                tokens,
                width,
                range,
            }));
        }
    }
    cases
}
