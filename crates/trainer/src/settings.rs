//! What a step is made of: the configuration, read by those who compute.

use crate::config::{AttentionBackend, Config, Resolved};
use crate::config::{Dtype, GradDtype, Master, Schedule as ScheduleName, StateDtype};
use crate::config::{HardwareConfig, OffloadWindow, OptimizerPlace};
use crate::failure::Failure;
use crate::offload::{OptimizerOffload, Window};
use memory::{DType, Layout};
use model::{Attention, ModelConfig, OffloadLabels, Policy};
use optim::{
    Hyperparameters, MasterFormat, MomentFormat, SMALLEST_QUANTISED, Schedule, ScheduleKind,
};
use std::collections::BTreeMap;
use wildmatch::WildMatch;

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
    /// What is kept, what is recomputed and what waits on the host.
    pub policy: Policy,
    /// Recompute specifications of ranges of layers, which hold beside whatever specification the rest has.
    pub layer_specs: BTreeMap<String, String>,
    /// Tokens in a chunk of the output head.
    pub head_chunk: usize,
    /// How attention is computed.
    pub attention: Attention,
    /// AdamW's numbers.
    pub optimizer: Hyperparameters,
    /// What training adds to the weights.
    pub states: States,
    /// Whether optimizer states live in host memory.
    pub offload: Option<OptimizerOffload>,
    /// The learning rate.
    pub schedule: Schedule,
    /// Of stochastic rounding.
    pub seed: u64,
    /// What estimates of time go by.
    pub hardware: HardwareConfig,
}

/// What training adds to the weights, across steps.
#[derive(Clone, Debug, PartialEq)]
pub struct States {
    /// The moments.
    pub moments: MomentFormat,
    /// What stands beside bf16 weights.
    pub master: MasterFormat,
    /// The gradients' type.
    pub gradients: DType,
    /// Name patterns (`*`, `?`) of tensors whose moments stay f32 where others are quantised.
    pub f32_patterns: Vec<String>,
}

impl Default for States {
    fn default() -> States {
        States {
            moments: MomentFormat::F32,
            master: MasterFormat::F32,
            gradients: DType::F32,
            f32_patterns: Vec::new(),
        }
    }
}

impl States {
    fn new(config: &Config) -> States {
        let optim = &config.optim;
        States {
            moments: match optim.state_dtype {
                StateDtype::F32 => MomentFormat::F32,
                StateDtype::Bf16 => MomentFormat::Bf16,
                StateDtype::EightBit => MomentFormat::Quantised,
            },
            master: match optim.master {
                Master::F32 => MasterFormat::F32,
                Master::Bf16Split => MasterFormat::Remainder,
                Master::None => MasterFormat::None,
            },
            gradients: match optim.grad_dtype {
                GradDtype::F32 => DType::F32,
                GradDtype::Bf16 => DType::BF16,
            },
            f32_patterns: optim.f32_states.clone(),
        }
    }
}

impl Settings {
    /// Reads a resolved configuration; `seq` is the data's.
    ///
    /// # Errors
    /// A recompute specification or labels to offload that cannot be followed.
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
            )?
            .offload(&OffloadLabels::parse(&config.offload.activations)?)?,
            layer_specs: config.recompute.layers.clone(),
            head_chunk: config.memory.head_chunk,
            attention: attention(config.attention.backend, seq),
            optimizer: hyperparameters(config),
            states: States::new(config),
            offload: optimizer_offload(config),
            schedule: schedule(config),
            seed: config.train.seed,
            hardware: config.hardware.clone(),
        })
    }

    /// The same with another recompute specification; none if it does not go with those of single layers. Offload of
    /// activations ends where what is offloaded would be recomputed.
    pub fn with_recompute(&self, spec: &str) -> Option<Settings> {
        let recompute = Policy::with_layers(spec, &self.layer_specs, self.model.layers).ok()?;
        let both = recompute.clone().offload(self.policy.offloaded());
        Some(Settings {
            policy: both.unwrap_or(recompute),
            ..self.clone()
        })
    }

    /// The narrowest type that a matrix product reads or writes: bf16 if gradients or everything is.
    pub fn narrowest_dtype(&self) -> DType {
        match (self.dtype, self.states.gradients) {
            (DType::F32, gradients) => gradients,
            (dtype, _) => dtype,
        }
    }

    /// Where each parameter lies in the arenas.
    ///
    /// # Errors
    /// A pattern of names that fits no parameter.
    pub fn layout(&self) -> Result<Layout, Failure> {
        if self.states.moments != MomentFormat::Quantised {
            return Ok(model::layout(&self.model, |_, _| false));
        }
        let patterns: Vec<WildMatch> = self
            .states
            .f32_patterns
            .iter()
            .map(|pattern| WildMatch::new(pattern))
            .collect();
        let layout = model::layout(&self.model, |name, elements| {
            elements < SMALLEST_QUANTISED || patterns.iter().any(|pattern| pattern.matches(name))
        });
        let names = || layout.entries().iter().map(|entry| entry.name.as_str());
        for (pattern, text) in patterns.iter().zip(&self.states.f32_patterns) {
            if !names().any(|name| pattern.matches(name)) {
                let example = names().next_back().unwrap_or_default();
                return Err(Failure::Usage(format!(
                    "`{text}` in optim.f32_states fits no parameter of this model; names look like {example}, \
                     and * stands for any characters"
                )));
            }
        }
        Ok(layout)
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

fn optimizer_offload(config: &Config) -> Option<OptimizerOffload> {
    let offload = &config.offload;
    let is_on = offload.optimizer == OptimizerPlace::Pinned;
    is_on.then_some(OptimizerOffload {
        fraction: offload.fraction,
        window: match offload.window {
            OffloadWindow::Forward => Window::Forward,
            OffloadWindow::End => Window::End,
        },
        slab_bytes: offload.slab_mib << 20,
        slots: offload.buffer_count,
    })
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

/// Sequences from which flash attention is faster than eager attention on the CPU (`benches/results/`).
pub const FLASH_FROM_SEQ: usize = 256;

/// The kind of attention for sequences of `seq` tokens: `auto` is flash from [`FLASH_FROM_SEQ`] on, else eager.
pub fn attention(backend: AttentionBackend, seq: usize) -> Attention {
    match backend {
        AttentionBackend::Eager => Attention::Eager,
        AttentionBackend::Flash => Attention::Flash,
        AttentionBackend::Auto if seq >= FLASH_FROM_SEQ => Attention::Flash,
        AttentionBackend::Auto => Attention::Eager,
        AttentionBackend::Cudnn => unreachable!("the configuration was refused: not built"),
    }
}
