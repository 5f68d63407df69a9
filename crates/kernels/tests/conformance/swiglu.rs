//! The gated activation and its gradients in place.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::largest::{with_codes, with_largest};
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
    /// That of up's.
    up_range: f64,
}

impl Swiglu {
    /// Gate and up side by side, and the gradient of what comes of them.
    fn tensors(&self) -> [Host; 2] {
        let [tokens, width] = [self.tokens, self.width];
        let gate = Host::random(self.dtype, [tokens, width], self.range, 1).values();
        let up = Host::random(self.dtype, [tokens, width], self.up_range, 2).values();
        let rows = gate.chunks(width).zip(up.chunks(width));
        let gate_up = rows.flat_map(|(gate, up)| [gate, up].concat());
        [
            Host::new(self.dtype, [tokens, 2 * width], gate_up),
            Host::random(self.dtype, [tokens, width], 1.0, 3),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let [gate_up, dact] = self.tensors();
        let gate_up = variable(&gate_up)?;
        let gate = gate_up.narrow(1, 0, self.width)?;
        let up = gate_up.narrow(1, self.width, self.width)?;
        let sigmoid = (gate.neg()?.exp()? + 1.0)?.recip()?;
        let act = (gate * sigmoid)?.mul(&up)?;
        let mut found = gradients(&act, &constant(&dact)?, &[&gate_up])?;
        Ok([values(&act)?, found.remove(0)])
    }
}

impl Case for Swiglu {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [host, dact] = self.tensors();
        let [gate_up, dact] = [&host, &dact].map(|host| device.put(host));
        let of = (self.dtype, [self.tokens, self.width]);
        let act = with_codes(device, of, |act, form| {
            device.run(kernels::Swiglu {
                act,
                gate_up: gate_up.view(),
                form,
            })
        })?;
        let gradient = with_largest(device, |largest| {
            let mut gate_up = device.put(&host);
            device.run(SwigluBackward {
                gate_up: gate_up.view_mut(),
                dact: dact.view(),
                largest,
            })?;
            Ok(device.take(&gate_up))
        })?;
        Ok(vec![act, gradient])
    }

    fn expected(&self) -> Vec<Expected> {
        let [act, dgate_up] = self.oracle().unwrap();
        vec![
            Expected::new("swiglu", act, Rule::Standard),
            Expected::new("swiglu_backward", dgate_up, Rule::Standard),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (tokens, width) in [(1, 1), (1, 131), (37, 131), (37, 1000), (3, 2056)] {
        // In the last, the largest magnitude of the gradients is gate's, in the others it is up's.
        for (range, up_range) in [(3.0, 1.0), (200.0, 1.0), (3.0, 50.0)] {
            cases.push(Box::new(Swiglu {
                dtype,
                tokens,
                width,
                range,
                up_range,
            }));
        }
    }
    cases
}
