//! A linear layer, forward and backward, as products.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::Result;
use kernels::{Init, KernelError, Matmul};
use memory::DType;

/// The three products of a linear layer, the weight gradient in f32 on top of another micro-batch's.
#[derive(Debug)]
pub struct Linear {
    pub dtype: DType,
    pub tokens: usize,
    pub inputs: usize,
    pub outputs: usize,
}

impl Linear {
    fn tensors(&self) -> [Host; 4] {
        let Linear {
            dtype,
            tokens,
            inputs,
            outputs,
        } = *self;
        [
            Host::random(dtype, [tokens, inputs], 1.0, 1),
            Host::random(dtype, [outputs, inputs], 1.0, 2),
            Host::random(dtype, [tokens, outputs], 1.0, 3),
            Host::random(DType::F32, [outputs, inputs], 1.0, 4),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 3]> {
        let [x, weight, dy, earlier] = self.tensors();
        let (x, weight) = (variable(&x)?, variable(&weight)?);
        let y = x.matmul(&weight.t()?)?;
        let mut found = gradients(&y, &constant(&dy)?, &[&x, &weight])?;
        let dweight = add(found.remove(1), &earlier.values());
        Ok([values(&y)?, found.remove(0), dweight])
    }
}

impl Case for Linear {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [x, weight, dy, earlier] = self.tensors();
        let mut y = device.room(dy.dtype, dy.dims);
        let mut dx = device.room(x.dtype, x.dims);
        let [x, weight, dy, mut dweight] = [x, weight, dy, earlier].map(|host| device.put(&host));
        let kernels = &device.kernels;
        kernels.run(Matmul {
            out: y.view_mut(),
            a: x.view(),
            b: weight.view().t(),
            bias: None,
            init: Init::Overwrite,
        })?;
        kernels.run(Matmul {
            out: dx.view_mut(),
            a: dy.view(),
            b: weight.view(),
            bias: None,
            init: Init::Overwrite,
        })?;
        kernels.run(Matmul {
            out: dweight.view_mut(),
            a: dy.view().t(),
            b: x.view(),
            bias: None,
            init: Init::Accumulate,
        })?;
        Ok(vec![
            device.take(&y),
            device.take(&dx),
            device.take(&dweight),
        ])
    }

    fn expected(&self) -> Vec<Expected> {
        let [y, dx, dweight] = self.oracle().unwrap();
        vec![
            Expected::new("matmul: y", y, Rule::Standard),
            Expected::new("matmul: dx", dx, Rule::Standard),
            Expected::new("matmul: dweight", dweight, Rule::Standard),
        ]
    }
}
