//! Decoder-only transformers of the Llama family, with an explicit backward pass and a table of saved activations.
//!
//! A block is a list of [`Stage`]s, each reading and writing named [`Activation`]s ([`StageTable`]). A [`Policy`] says
//! for every activation of every layer whether it is kept, waits on the host, or is made again. The backward pass
//! pulls what it needs from the [`Saved`] table; what was dropped is replayed by running its stage again. Forward and replay are the
//! same code on the same inputs, so every policy gives the same bits.
//!
//! This crate leases memory and calls [`kernels::Kernels`]; it never computes on data itself, and never decides
//! a policy.

mod backward;
mod block;
mod config;
mod flops;
mod gradients;
mod head;
mod hf_config;
mod init;
mod megatron;
mod model;
mod offload;
mod offload_labels;
mod parameters;
mod pass;
mod policy;
mod rope;
mod saved;
mod spec;
pub mod stage;
mod table;
mod weights;

pub use config::{ConfigError, ModelConfig, RopeScaling};
pub use flops::flops_per_token;
pub use gradients::Gradients;
pub use hf_config::HfConfigError;
pub use init::{InitialValues, initialise};
pub use megatron::MegatronFlags;
pub use model::{Batch, Model, ModelError, StepTotals};
pub use offload_labels::{OffloadError, OffloadLabels};
pub use parameters::{BlockParameters, ParameterIds, layout};
pub use pass::{Beside, Nothing};
pub use policy::{Action, Policy};
pub use saved::Saved;
pub use spec::{Spec, SpecError};
pub use stage::{Activation, Label, ReplayCounts, Stage};
pub use table::{Attention, StageTable};
pub use weights::{WeightsError, encode, export, import};
