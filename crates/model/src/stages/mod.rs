//! The stages that blocks consist of. Each file has one family with its activations, parameters, both directions, and
//! FLOPs.

mod attention;
mod attention_gate;
mod delta;
mod delta_columns;
mod delta_norm;
mod delta_to_heads;
mod embedding;
mod experts;
mod head;
mod latent;
mod mlp_activation;
mod norm;
mod projection;
mod qkv;
mod qkv_tensors;
mod residual;
mod rotary;
mod router;
mod sharing;

pub use attention::{Attention, CoreAttention};
pub use attention_gate::AttentionGate;
pub use delta::Delta;
pub use delta_columns::DeltaColumns;
pub use delta_norm::DeltaNorm;
pub use embedding::Embedding;
pub use experts::{ExpertActivation, ExpertLinear, ExpertsDown, ExpertsUp};
pub use head::Head;
pub use latent::{LatentDown, LatentHeads, LatentUp};
pub use mlp_activation::MlpActivation;
pub use norm::{Norm, NormBehind, NormStage};
pub use projection::Projection;
pub use qkv::{HeadNorms, Qkv};
pub use residual::ResidualProjection;
pub(crate) use rotary::RotaryTables;
pub use rotary::{Rotary, Temperature};
pub use router::{RouterChoice, RouterTables};

use crate::fp8::Fp8Reader;
use crate::{Extent, Result};
use kernels::Kernels;
use kernels::operation::BiasDropoutAdd;
use memory::{Buffer, In, Out};

/// The extent of an activation of so many columns: codes, if its only reader is a layer that takes codes.
fn extent_of(read_by: Option<Fp8Reader>, width: usize) -> Extent {
    match read_by {
        Some(reader) if reader.as_codes => Extent::codes(width),
        _ => Extent::tokens(width),
    }
}

/// The place for an output that may not be needed.
fn written(buffer: &mut Option<Buffer>) -> Option<Out<'_>> {
    buffer.as_mut().map(Buffer::view_mut)
}

/// `out += x`.
fn add(kernels: &Kernels, out: Out, x: In) -> Result {
    Ok(kernels.run(BiasDropoutAdd {
        out,
        bias: None,
        dropout: None,
        first: 0,
        scale: 1.0,
        residual: Some(x),
    })?)
}

/// `out *= factor`; nothing for a factor of 1.
fn multiply(kernels: &Kernels, out: Out, factor: f32) -> Result {
    if factor == 1.0 {
        return Ok(());
    }
    Ok(kernels.run(BiasDropoutAdd {
        out,
        bias: None,
        dropout: None,
        first: 0,
        scale: factor,
        residual: None,
    })?)
}
