//! GPT-2's activation and its gradient in place.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::largest::{with_codes, with_largest};
use crate::oracle::{constant, gradients, values, variable};
use candle_core::Result;
use kernels::KernelError;
use kernels::operation::{self, GeluBackward};
use memory::DType;

#[derive(Debug)]
struct Gelu {
    dtype: DType,
    tokens: usize,
    width: usize,
    /// Of the input's entries: up to where a tanh is 1 in f32, and beyond.
    range: f64,
}

impl Gelu {
    fn tensors(&self) -> [Host; 2] {
        let dims = [self.tokens, self.width];
        [
            Host::random(self.dtype, dims, self.range, 1),
            Host::random(self.dtype, dims, 1.0, 2),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let [x, dact] = self.tensors();
        let x = variable(&x)?;
        let cube = (x.sqr()? * x.as_tensor())?;
        let inner = ((x.as_tensor() + (cube * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
        let act = ((inner.tanh()? + 1.0)? * (x.as_tensor() * 0.5)?)?;
        let mut found = gradients(&act, &constant(&dact)?, &[&x])?;
        Ok([values(&act)?, found.remove(0)])
    }
}

/// act and the gradient of x, and that the largest magnitude of each is found.
pub fn act_and_gradient(
    device: &Device,
    host: &Host,
    dact: &Host,
) -> std::result::Result<[Host; 2], KernelError> {
    let [x, dact] = [host, dact].map(|host| device.put(host));
    let act = with_codes(device, (host.dtype, host.dims), |act, form| {
        device.run(operation::Gelu {
            act,
            x: x.view(),
            form,
        })
    })?;
    let gradient = with_largest(device, |largest| {
        let mut x = device.put(host);
        device.run(GeluBackward {
            x: x.view_mut(),
            dact: dact.view(),
            largest,
        })?;
        Ok(device.take(&x))
    })?;
    Ok([act, gradient])
}

impl Case for Gelu {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [x, dact] = self.tensors();
        Ok(act_and_gradient(device, &x, &dact)?.into())
    }

    fn expected(&self) -> Vec<Expected> {
        let [act, dx] = self.oracle().unwrap();
        // Far below zero nothing passes, and nothing is left to compare with.
        vec![
            Expected::new("gelu", act, Rule::Standard).with_terms(1.0),
            Expected::new("gelu_backward", dx, Rule::Standard).with_terms(1.0),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (tokens, width) in [(1, 1), (1, 131), (37, 131), (37, 1000)] {
        for range in [3.0, 200.0] {
            cases.push(Box::new(Gelu {
                dtype,
                tokens,
                width,
                range,
            }));
        }
    }
    cases
}
