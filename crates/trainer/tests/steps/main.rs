//! Steps as the library takes them: the same bits in every mode, home and number of ranks, and memory as planned.

mod common;

mod advice;
mod bitwise;
mod candle_transformers;
mod config;
mod elsewhere;
mod experts;
mod fp8;
mod frozen;
mod golden_peaks;
#[cfg(feature = "cuda")]
mod interpreted;
mod large_plans;
mod learning;
mod library;
mod limits;
mod lora;
mod offload_activations;
mod optimizer_states;
mod out_of_memory;
mod packed_documents;
mod peft_reference;
mod pipeline;
mod plan;
mod policy;
mod preferences;
mod same_bits;
mod scheduled;
mod schedules;
mod sharing;
mod sleep;
mod synthetic;
mod tiles;
mod torch_reference;
mod transformers_reference;
mod trl_reference;
mod zero;
