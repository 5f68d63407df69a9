//! Models as Hugging Face keeps them: `config.json`, weights in safetensors, and what else came with them.

mod config;
mod gpt2;
mod origin;
mod weights;
mod write;

pub use config::HfConfigError;
pub use origin::{Origin, OriginError};
pub(crate) use weights::CHUNK;
pub use weights::{ModelWeights, WeightsError, encode, import};
pub use write::{MAX_SHARD_BYTES, OutgoingWeights, write_model};
