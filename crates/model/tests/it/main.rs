//! Blocks against candle's autograd in f64, and folders of models as Hugging Face has them.

mod common;

mod block_oracle;
mod buffers;
mod declarations;
mod gpt2;
mod hugging_face;
mod latent_cache;
mod lora;
mod parallel_block;
mod synthetic;
mod tiles;
