//! One call of every operation on tensors that fit, and what of them is free to change.

mod adafactor;
mod adamw;
mod attention;
mod cache;
mod experts;
mod flash_attention;
mod fp8;
mod general;
mod layers;
mod muon;
mod router;

pub use attention::attention_shape;
pub use layers::{layer_norm_backward, split_qkv};
pub use router::ROUTING;

use crate::device::Device;
use kernels::{KernelError, Kernels};
use memory::{DType, In, Out};

/// A tensor of a call.
#[derive(Clone, Debug)]
pub struct Argument {
    pub name: &'static str,
    pub dtype: DType,
    pub dims: Vec<usize>,
    /// A dimension that no other tensor has to share.
    pub free_dim: Option<usize>,
    /// f32 and bf16 are both welcome, whatever the others hold.
    pub free_type: bool,
    /// May be strided.
    pub free_layout: bool,
    /// May have any number of dimensions.
    pub free_rank: bool,
}

impl Argument {
    fn free_dim(self, dim: usize) -> Argument {
        Argument {
            free_dim: Some(dim),
            ..self
        }
    }

    fn free_type(self) -> Argument {
        Argument {
            free_type: true,
            ..self
        }
    }

    fn free_layout(self) -> Argument {
        Argument {
            free_layout: true,
            ..self
        }
    }

    fn free_rank(self) -> Argument {
        Argument {
            free_rank: true,
            ..self
        }
    }
}

pub fn argument(name: &'static str, dtype: DType, dims: &[usize]) -> Argument {
    Argument {
        name,
        dtype,
        dims: dims.to_vec(),
        free_dim: None,
        free_type: false,
        free_layout: false,
        free_rank: false,
    }
}

/// A call of an operation.
pub struct Signature {
    pub operation: &'static str,
    pub outs: Vec<Argument>,
    pub ins: Vec<Argument>,
    pub call: Call,
}

/// The operation on outputs and inputs in the order of their arguments.
pub type Call = fn(&Kernels, &mut [Out], &[In]) -> Result<(), KernelError>;

/// A call of every operation but the transfers.
pub fn signatures(dtype: DType, device: &Device) -> Vec<Signature> {
    let mut signatures = general::signatures(dtype);
    signatures.extend(layers::signatures(dtype));
    signatures.extend(attention::signatures(dtype, device));
    signatures.extend(flash_attention::signatures(dtype, device));
    signatures.extend(fp8::signatures(dtype));
    signatures.extend(cache::signatures(dtype));
    signatures.extend(experts::signatures(dtype, device));
    signatures.extend(adafactor::signatures(dtype));
    signatures.extend(adamw::signatures(dtype));
    signatures.extend(muon::signatures(dtype));
    signatures.extend(router::signatures(dtype));
    signatures
}
