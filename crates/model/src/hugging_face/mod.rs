//! Models as Hugging Face keeps them: `config.json`, weights in safetensors, and what else came with them.

mod config;
mod gpt2;
mod keys;
mod llama;
mod origin;
mod outgoing;
mod rope;
mod turned;
mod weights;
mod write;

use crate::parameters::{Parameters, Stored};
use files::CHUNK_BYTES;
use turned::Turned;

pub use keys::HfConfigError;
pub use origin::{Origin, OriginError};
pub use outgoing::{OutgoingWeights, file_specs};
pub use weights::{ModelWeights, WeightsError, import};
pub use write::{MAX_SHARD_BYTES, write_model};

/// The most host memory that loading takes beside leases: chunks of values as they are read, in f32, and as they are kept. A test
/// holds the resident set to it.
pub fn loading_bytes(parameters: &Parameters) -> u64 {
    5 * CHUNK_BYTES as u64 + turned_bytes(parameters)
}

/// The same for saving.
pub fn saving_bytes(parameters: &Parameters) -> u64 {
    2 * CHUNK_BYTES as u64 + turned_bytes(parameters)
}

/// Most bytes that are turned at a time, for parameters whose transpose is in files.
fn turned_bytes(parameters: &Parameters) -> u64 {
    let room = |shape: &[usize]| {
        let [rows, columns] = [shape[0], shape[1]];
        let stored = Turned::f32(columns, rows);
        Turned::f32(rows, columns).room().max(stored.room())
    };
    let turned = parameters
        .in_layout()
        .filter(|parameter| parameter.stored == Stored::Transposed);
    let most = turned.map(|parameter| room(&parameter.shape)).max();
    most.unwrap_or(0) as u64
}
