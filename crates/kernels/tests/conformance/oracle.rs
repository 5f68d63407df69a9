//! Candle's autograd in f64 on the CPU, over primitive operations: its fused ones drop gradients in silence.

use crate::host::Host;
use candle_core::{Device, Result, Tensor, Var};

/// The elements of a tensor in row-major order.
pub type Elements = Vec<f64>;

/// A tensor that no gradient is asked of.
pub fn constant(host: &Host) -> Result<Tensor> {
    Tensor::from_vec(host.values(), host.dims.as_slice(), &Device::Cpu)
}

/// A tensor that gradients are asked of.
pub fn variable(host: &Host) -> Result<Var> {
    Var::from_tensor(&constant(host)?)
}

/// The gradients of `sum(output * doutput)`; every variable must have one.
pub fn gradients(output: &Tensor, doutput: &Tensor, variables: &[&Var]) -> Result<Vec<Vec<f64>>> {
    let store = (output * doutput)?.sum_all()?.backward()?;
    let gradient =
        |variable: &&Var| values(store.get(variable).expect("the oracle dropped a gradient"));
    variables.iter().map(gradient).collect()
}

/// The elements in row-major order.
pub fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.flatten_all()?.to_vec1()
}

/// The sums of pairs.
pub fn add(a: Vec<f64>, b: &[f64]) -> Vec<f64> {
    assert_eq!(a.len(), b.len());
    a.into_iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Softmax over the last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let last = x.rank() - 1;
    let exponentials = x.broadcast_sub(&x.max_keepdim(last)?.detach())?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(last)?)
}
