//! What a step is made of: the configuration, read by those who compute.

use crate::config::{Config, Resolved};
use crate::config::{Dtype, Schedule as ScheduleName};
use crate::failure::Failure;
use memory::DType;
use model::{ModelConfig, Policy};
use optim::{Hyperparameters, Schedule, ScheduleKind};

/// Everything that decides the memory and the arithmetic of a step.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The shape of the model.
    pub model: ModelConfig,
    /// Compute type.
    pub dtype: DType,
    /// Tokens in a sequence.
    pub seq: usize,
    /// Sequences in a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches in a step.
    pub accum: usize,
    /// What is kept and what is recomputed.
    pub policy: Policy,
    /// Tokens in a chunk of the output head.
    pub head_chunk: usize,
    /// AdamW's numbers.
    pub optimizer: Hyperparameters,
    /// The learning rate.
    pub schedule: Schedule,
}

impl Settings {
    /// Reads a resolved configuration; `seq` is the data's.
    ///
    /// # Errors
    /// A recompute specification that cannot be followed.
    pub fn new(resolved: &Resolved, seq: usize) -> Result<Settings, Failure> {
        let config = &resolved.config;
        Ok(Settings {
            model: config.model.clone(),
            dtype: dtype(resolved.dtype()),
            seq,
            micro_batch: config.batch.micro,
            accum: config.batch.accum,
            policy: Policy::with_layers(
                &config.recompute.spec,
                &config.recompute.layers,
                config.model.layers,
            )?,
            head_chunk: config.memory.head_chunk,
            optimizer: hyperparameters(config),
            schedule: schedule(config),
        })
    }

    /// Tokens of a step, masked ones included.
    pub fn tokens_per_step(&self) -> usize {
        self.seq * self.micro_batch * self.accum
    }
}

/// The compute type as the kernels call it.
pub fn dtype(name: Dtype) -> DType {
    match name {
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
    }
}

fn hyperparameters(config: &Config) -> Hyperparameters {
    let optim = &config.optim;
    Hyperparameters {
        beta1: optim.beta1,
        beta2: optim.beta2,
        eps: optim.eps,
        weight_decay: optim.weight_decay,
        clip_norm: optim.clip_norm,
    }
}

fn schedule(config: &Config) -> Schedule {
    Schedule {
        kind: match config.lr.schedule {
            ScheduleName::Constant => ScheduleKind::Constant,
            ScheduleName::Linear => ScheduleKind::Linear,
            ScheduleName::Cosine => ScheduleKind::Cosine,
            ScheduleName::Wsd => ScheduleKind::Wsd,
        },
        peak: config.lr.peak,
        warmup_steps: config.lr.warmup_steps,
        decay_steps: config.lr.decay_steps,
        min_ratio: config.lr.min_ratio,
        total_steps: config.train.steps,
    }
}
