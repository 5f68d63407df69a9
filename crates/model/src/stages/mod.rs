//! The stages that blocks consist of. Each file has one family with its activations, parameters, both directions, and
//! FLOPs.

mod attention;
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

use crate::Extent;
use crate::fp8::Fp8Reader;
use memory::{Buffer, Out};

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
