//! The gate on the output of attention.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::oracle::{constant, gradients, values, variable};
use candle_core::Result;
use kernels::KernelError;
use kernels::operation::{self, SigmoidGateBackward};
use memory::DType;

#[derive(Debug)]
struct SigmoidGate {
    dtype: DType,
    tokens: usize,
    width: usize,
    /// The largest entries of the gate: up to where a sigmoid is 0 or 1 in f32.
    range: f64,
}

impl SigmoidGate {
    /// x, the gate, and the gradient of what comes of them.
    fn tensors(&self) -> [Host; 3] {
        let dims = [self.tokens, self.width];
        [
            Host::random(self.dtype, dims, 3.0, 1),
            Host::random(self.dtype, dims, self.range, 2),
            Host::random(self.dtype, dims, 1.0, 3),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 3]> {
        let [x, gate, dout] = self.tensors();
        let (x, gate) = (variable(&x)?, variable(&gate)?);
        let sigmoid = (gate.neg()?.exp()? + 1.0)?.recip()?;
        let out = (x.as_tensor() * sigmoid)?;
        let found = gradients(&out, &constant(&dout)?, &[&x, &gate])?;
        let [dx, dgate] = found.try_into().expect("a gradient of each");
        Ok([values(&out)?, dx, dgate])
    }
}

impl Case for SigmoidGate {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let hosts = self.tensors();
        let [x, gate, dout] = hosts.each_ref().map(|host| device.put(host));
        let room = || device.room(self.dtype, hosts[0].dims);
        let (mut out, mut dx, mut dgate) = (room(), room(), room());
        device.run(operation::SigmoidGate {
            out: out.view_mut(),
            x: x.view(),
            gate: gate.view(),
        })?;
        device.run(SigmoidGateBackward {
            dx: dx.view_mut(),
            dgate: dgate.view_mut(),
            dout: dout.view(),
            x: x.view(),
            gate: gate.view(),
        })?;
        Ok(vec![
            device.take(&out),
            device.take(&dx),
            device.take(&dgate),
        ])
    }

    fn expected(&self) -> Vec<Expected> {
        let [out, dx, dgate] = self.oracle().unwrap();
        // Where a gate is far from zero its gradient vanishes.
        vec![
            Expected::new("sigmoid_gate", out, Rule::Standard).with_terms(1.0),
            Expected::new("sigmoid_gate_backward: dx", dx, Rule::Standard).with_terms(1.0),
            Expected::new("sigmoid_gate_backward: dgate", dgate, Rule::Standard).with_terms(1.0),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (tokens, width) in [(1, 1), (1, 131), (37, 131), (37, 1000)] {
        for range in [3.0, 200.0] {
            cases.push(Box::new(SigmoidGate {
                dtype,
                tokens,
                width,
                range,
            }));
        }
    }
    cases
}
