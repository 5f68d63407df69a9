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

impl Swiglu {
    /// Act and the gradient of gate and up, with the largest magnitudes of both if they are to be found.
    fn made(&self, device: &Device, finds: bool) -> std::result::Result<[Host; 4], KernelError> {
        let [mut gate_up, dact] = self.tensors().map(|host| device.put(&host));
        let mut act = device.room(self.dtype, [self.tokens, self.width]);
        let mut largest = [0; 2].map(|_| device.put(&Host::new(DType::F32, [1], [7.0])));
        let [of_act, of_gradient] = &mut largest;
        device.kernels.run(kernels::Swiglu {
            act: act.view_mut(),
            gate_up: gate_up.view(),
            largest: finds.then(|| of_act.view_mut()),
        })?;
        device.kernels.run(SwigluBackward {
            gate_up: gate_up.view_mut(),
            dact: dact.view(),
            largest: finds.then(|| of_gradient.view_mut()),
        })?;
        let [of_act, of_gradient] = largest;
        Ok([act, gate_up, of_act, of_gradient].map(|tensor| device.take(&tensor)))
    }
}

impl Case for Swiglu {
    /// To find largest magnitudes changes no bit.
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [act, gradient, ..] = self.made(device, false)?;
        let [found_act, found_gradient, largest @ ..] = self.made(device, true)?;
        assert!(
            act == found_act && gradient == found_gradient,
            "{}",
            device.name
        );
        for (largest, made) in largest.iter().zip([&act, &gradient]) {
            let values = made.values().into_iter().map(f64::abs);
            let expected = values.fold(0.0, f64::max);
            assert_eq!(largest.values(), [expected], "{}", device.name);
        }
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
