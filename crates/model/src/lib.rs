//! Decoder-only transformers, with an explicit backward pass and a table of saved activations.
//!
//! A [`Block`] is a list of [`Stage`]s, each of which says what named [`Activation`]s it reads and writes. A [`Policy`]
//! says for every activation of every layer whether it is kept, waits on the host, or is made again. The backward pass
//! pulls what it needs from the [`SavedActivations`] table; what was dropped is replayed by running its stage again. Forward and
//! replay are the same code on the same inputs, so every policy gives the same bits.
//!
//! [`Architecture::of`] makes the blocks of the known families; an [`Architecture`] can be put together from
//! any other stages as well.
//!
//! This crate leases memory and calls [`kernels::Kernels`]; it never computes on data itself, and never decides
//! a policy.

mod activation;
mod adapter;
mod architecture;
mod architectures;
mod balance;
mod batch;
mod block;
mod block_spec;
mod config;
mod config_error;
mod deferred_gradients;
mod delta_config;
mod error;
mod expert_adapter;
mod expert_groups;
mod experts_config;
mod features;
mod flowing;
mod forward_backward;
mod fp8;
mod fp8_cells;
mod fp8_underflows;
mod host_places;
mod hugging_face;
mod inference;
mod init;
mod kv_cache;
mod label;
mod linear;
mod lora;
mod matrix;
mod model;
mod needed;
mod offload;
mod on_tiles;
mod parameters;
mod parts;
mod pass;
mod pass_balance;
mod pass_deferred;
mod pass_fp8;
mod patterns;
mod policy;
mod position;
mod purpose;
mod randomness;
mod replays;
mod rope_scaling;
mod saved;
mod sharing;
mod stage;
pub mod stages;
mod statistics;
mod stored;
#[cfg(test)]
mod test_model;
mod tiles;

pub use activation::{Activation, BatchShape, Dimension, Extent};
pub use architecture::Architecture;
pub use balance::RouterLosses;
pub use batch::{Batch, Tokens};
pub use block::Block;
pub use block_spec::{AttentionSpec, BlockSpec, FeedForwardSpec};
pub use config::ModelConfig;
pub use config_error::ModelConfigError;
pub use deferred_gradients::DeferredGradients;
pub use delta_config::DeltaConfig;
pub use error::{ModelError, Result};
pub use experts_config::{ExpertsConfig, LatentConfig, RouterAuxKind, ScoreKind};
pub use features::{ActivationFunction, NormKind, NormPlacement, PositionKind, QkNormExtent};
pub use fp8::{Fp8Layer, Fp8Operand, Fp8Products, Fp8Site};
pub use fp8_underflows::UnderflowShare;
pub use hugging_face::{
    ADAPTER_CONFIG, ADAPTER_STEM, AdapterConfig, AdapterError, AdapterFactors, AdapterWeights,
    Family, HfConfigError, LeftOut, MAX_SHARD_BYTES, ModelWeights, Origin, OriginError,
    OutgoingWeights, ParameterPart, PlainModules, Quantisation, WeightsError, WholeModel,
    file_specs, import, import_adapter, loading_bytes, saving_bytes, sources_of_files,
    write_adapter, write_model,
};
pub use init::{DrawingOrder, Fresh, InitialValues, initialise, initialise_factors};
pub use kv_cache::{
    CacheShape, CacheWidths, CachedSequences, KvCache, LayerCache, LayerCacheShape, LayerState,
    StateShape,
};
pub use label::{Label, Labels};
pub use linear::Linear;
pub use lora::{AdapterTarget, LinearModule, Lora, LoraInit, LoraPatternError, ModulePattern};
pub use model::{Computation, Model};
pub use parameters::{Initial, Parameter, ParameterId, Parameters, PartParameters};
pub use pass::{Pass, Work};
pub use patterns::NamePatterns;
pub use policy::{
    Action, Actions, MegatronFlags, OffloadError, OffloadLabels, Policy, Spec, SpecError,
};
pub use position::LayerActivation;
pub use purpose::{HeadLoss, LossPart, PolicyGradient, Preferences, Purpose, StepLoss, Training};
pub use randomness::{DropoutKeys, DropoutSite, Randomness};
pub use replays::ReplayCounts;
pub use rope_scaling::RopeScaling;
pub use saved::{HeldBlocks, SavedActivations};
pub use sharing::SharingRanks;
pub use stage::{Declared, Io, Stage};
pub use stages::Attention;
pub use stored::{
    ExpertFiles, FileTensor, HeadParts, MatrixOrder, Stored, Transposition, TurnedAxis,
};
