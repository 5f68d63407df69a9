//! Models as Hugging Face keeps them: `config.json`, and weights in safetensors.

mod config;
mod gpt2;
mod weights;

pub use config::HfConfigError;
pub(crate) use weights::CHUNK;
pub use weights::{WeightsError, encode, export, import};
