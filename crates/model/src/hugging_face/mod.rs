//! Models as Hugging Face stores them: `config.json`, weights in safetensors, and the files beside them.

mod adapter;
mod config;
mod error;
mod factors;
mod families;
mod found;
mod keys;
mod merge;
mod mxfp4;
mod nf4;
mod origin;
mod outgoing;
mod quantisation;
mod rope;
mod turned;
mod weights;
mod whole;
mod wrapper;
mod write;

use crate::parameters::{Parameter, Parameters};
use crate::stored::Transposition;
use files::CHUNK_BYTES;
use turned::Turned;

pub use adapter::{ADAPTER_CONFIG, ADAPTER_STEM, AdapterConfig, AdapterError, import_adapter};
pub use error::WeightsError;
pub use factors::AdapterFactors;
pub use families::Family;
pub(crate) use families::{ExpertNames, ExpertTensors};
pub use keys::HfConfigError;
pub use merge::AdapterWeights;
pub use origin::{Origin, OriginError};
pub use outgoing::{OutgoingWeights, file_specs, sources_of_files};
pub use quantisation::{PlainModules, Quantisation};
pub use weights::{ModelWeights, ParameterPart, import};
pub use whole::WholeModel;
pub use wrapper::LeftOut;
pub use write::{MAX_SHARD_BYTES, write_adapter, write_model};

/// The most host memory that loading takes beside leases: chunks of values as they are read, in f32, and in their final
/// type. A test holds the resident set to it.
pub fn loading_bytes(parameters: &Parameters) -> u64 {
    5 * CHUNK_BYTES as u64 + turned_bytes(parameters)
}

/// The most host memory that saving takes beside leases.
pub fn saving_bytes(parameters: &Parameters) -> u64 {
    2 * CHUNK_BYTES as u64 + turned_bytes(parameters)
}

/// The most bytes of a transpose that are held at a time, for parameters that files store transposed.
fn turned_bytes(parameters: &Parameters) -> u64 {
    let size = size_of::<f32>();
    let room = |of: Transposition| {
        let rooms = [of, of.reversed()].map(|of| Turned::new(of, size).room());
        rooms[0].max(rooms[1])
    };
    let turned = parameters.in_layout().filter_map(Parameter::turned);
    let most = turned.map(room).max();
    most.unwrap_or(0) as u64
}
