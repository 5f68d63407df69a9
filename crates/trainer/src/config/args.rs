//! The flags that `train`, `plan` and `bench` share, and the keys that they stand for.

use std::path::PathBuf;

use clap::Args;
use model::MegatronFlags;

use super::load::Override;

/// Flags that `train`, `plan` and `bench` share. Those with a configuration key are kept as text:
/// they are read and checked like `--set`.
#[derive(Debug, Default, Args)]
pub struct RunArgs {
    /// Where the configuration comes from.
    #[command(flatten)]
    pub source: SourceArgs,
    /// What is trained, and how long.
    #[command(flatten)]
    pub training: TrainingArgs,
    /// What memory is spent on.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// What is written.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Flags without a key that are not built yet.
    #[command(flatten)]
    pub later: LaterArgs,
}

/// Where the configuration comes from.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Configuration")]
pub struct SourceArgs {
    /// Preset or TOML file [default: tiny]
    #[arg(long, value_name = "NAME|FILE")]
    pub config: Option<String>,
    /// Set any configuration key (repeatable)
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

/// What is trained, and how long.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Training")]
pub struct TrainingArgs {
    /// Token, batch or text file [default: built-in text]
    #[arg(long, value_name = "PATH")]
    pub data: Option<String>,
    /// Read samples in file order
    #[arg(long)]
    pub no_shuffle: bool,
    /// Start from a model in Hugging Face layout
    #[arg(long, value_name = "DIR")]
    pub init_from: Option<PathBuf>,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub steps: Option<String>,
    /// Sequences in a micro-batch
    #[arg(long, value_name = "B", allow_negative_numbers = true)]
    pub micro_batch: Option<String>,
    /// Gradient accumulation: micro-batches in a step
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    pub accum: Option<String>,
    /// Sequence length
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub seq: Option<String>,
    /// Peak learning rate
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub lr: Option<String>,
    /// Seed of initialisation and shuffling
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<String>,
    /// Device [default: train: cuda if built and present, else cpu; plan: cuda]
    #[arg(long, value_name = "cpu|cuda[:N]")]
    pub device: Option<String>,
    /// Data type of weights and activations [default: f32 on cpu, bf16 on cuda]
    #[arg(long, value_name = "f32|bf16")]
    pub dtype: Option<String>,
    /// CPU threads; never changes results
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<String>,
}

/// What memory is spent on.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Memory")]
pub struct MemoryArgs {
    /// Activations to recompute: none, full, full:uniform:N, full:block:N, or a list of layernorm, qkv, core_attn,
    /// attn_out, mlp, mlp_act
    #[arg(long, value_name = "SPEC")]
    pub recompute: Option<String>,
    /// Megatron's granularity: none, selective, full
    #[arg(long, value_name = "NAME")]
    pub recompute_granularity: Option<String>,
    /// Megatron's modules for selective recompute [default: core_attn]
    #[arg(long, value_name = "NAMES", num_args = 0..)]
    pub recompute_modules: Option<Vec<String>>,
    /// Megatron's method for full recompute: uniform, block
    #[arg(long, value_name = "NAME")]
    pub recompute_method: Option<String>,
    /// Megatron's number of layers for full recompute
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub recompute_num_layers: Option<String>,
    /// Attention implementation
    #[arg(long, value_name = "auto|eager|flash")]
    pub attention: Option<String>,
    /// Refuse leases beyond this (24GiB, 80GB, 1500000, 95%)
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory_limit: Option<String>,
    /// Activations that wait in pinned host memory for their backward pass: none, or a list of block_input, layernorm,
    /// qkv, core_attn, attn_value, attn_out, mlp, mlp_act
    #[arg(long, value_name = "LABELS")]
    pub offload_activations: Option<String>,
    /// Data type of AdamW's moments
    #[arg(long, value_name = "f32|bf16|8bit")]
    pub state_dtype: Option<String>,
    /// adamw8bit stands for --state-dtype 8bit
    #[arg(long, value_name = "NAME", value_parser = ["adamw", "adamw8bit"])]
    pub optimizer: Option<String>,
    /// What stands beside bf16 weights: an f32 copy, the 16 bits that they leave out of one, or nothing
    #[arg(long, value_name = "f32|bf16-split|none")]
    pub master: Option<String>,
    /// Data type of gradients
    #[arg(long, value_name = "f32|bf16")]
    pub grad_dtype: Option<String>,
    /// Moments and master weights in pinned host memory, updated during the next forward pass
    #[arg(long, value_name = "none|pinned")]
    pub offload_optimizer: Option<String>,
    /// Memory that automatic choices plan for
    #[arg(long, hide = true, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory_budget: Option<String>,
}

/// What is written.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Run directory [default: runs/NAME-TIME]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write the trained model in Hugging Face layout
    #[arg(long, value_name = "DIR")]
    pub save_final: Option<PathBuf>,
    /// Write the gradients of step N, before clipping
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub dump_gradients: Option<u64>,
    /// Record every lease for memory viewers
    #[arg(long, hide = true)]
    pub trace: bool,
    /// No progress
    #[arg(long)]
    pub quiet: bool,
}

/// Flags without a key that are not built yet: recognised, and refused with a sentence.
#[derive(Debug, Default, Args)]
pub struct LaterArgs {
    /// Steps between checkpoints
    #[arg(long, hide = true, value_name = "N", allow_negative_numbers = true)]
    pub save_every: Option<String>,
    /// Checkpoints to keep
    #[arg(long, hide = true, value_name = "K", allow_negative_numbers = true)]
    pub keep_last: Option<String>,
    /// Run or checkpoint to continue
    #[arg(long, hide = true, value_name = "DIR")]
    pub resume: Option<String>,
    /// What the advice of `plan` must fit
    #[arg(long, hide = true, value_name = "SIZE", allow_hyphen_values = true)]
    pub device_memory: Option<String>,
}

impl RunArgs {
    /// Flags that stand for keys of the configuration, with their keys.
    pub fn flags_and_keys() -> Vec<(&'static str, &'static str)> {
        let flags = RunArgs::default();
        let flags = flags.keyed_flags().map(|(flag, key, _)| (flag, key));
        flags.to_vec()
    }

    /// Flags that take a value of a key, with their keys and what was given.
    fn keyed_flags(&self) -> [(&'static str, &'static str, &Option<String>); 19] {
        let (training, memory) = (&self.training, &self.memory);
        [
            ("--data", "data.path", &training.data),
            ("--steps", "train.steps", &training.steps),
            ("--micro-batch", "batch.micro", &training.micro_batch),
            ("--accum", "batch.accum", &training.accum),
            ("--seq", "data.seq", &training.seq),
            ("--lr", "lr.peak", &training.lr),
            ("--seed", "train.seed", &training.seed),
            ("--device", "train.device", &training.device),
            ("--dtype", "train.dtype", &training.dtype),
            ("--threads", "train.threads", &training.threads),
            ("--recompute", "recompute.spec", &memory.recompute),
            ("--attention", "attention.backend", &memory.attention),
            ("--memory-limit", "memory.limit", &memory.memory_limit),
            (
                "--offload-activations",
                "offload.activations",
                &memory.offload_activations,
            ),
            ("--state-dtype", "optim.state_dtype", &memory.state_dtype),
            ("--master", "optim.master", &memory.master),
            ("--grad-dtype", "optim.grad_dtype", &memory.grad_dtype),
            (
                "--offload-optimizer",
                "offload.optimizer",
                &memory.offload_optimizer,
            ),
            ("--memory-budget", "memory.budget", &memory.memory_budget),
        ]
    }

    /// The settings that the flags stand for, in the order of the fields.
    pub fn overrides(&self) -> Vec<Override> {
        let mut overrides: Vec<Override> = self
            .keyed_flags()
            .into_iter()
            .filter_map(|(flag, key, text)| Some(Override::from_flag(flag, key, text.as_deref()?)))
            .collect();
        if self.training.no_shuffle {
            overrides.push(Override::from_switch("--no-shuffle", "data.shuffle", false));
        }
        if self.output.trace {
            overrides.push(Override::from_switch("--trace", "log.trace", true));
        }
        if self.memory.optimizer.as_deref() == Some("adamw8bit") {
            let mut states = Override::from_flag("--optimizer", "optim.state_dtype", "8bit");
            states.place = "--optimizer adamw8bit".to_owned();
            overrides.push(states);
        }
        overrides
    }

    /// Megatron's recompute flags.
    pub fn megatron(&self) -> MegatronFlags {
        let memory = &self.memory;
        MegatronFlags {
            granularity: memory.recompute_granularity.clone(),
            modules: memory.recompute_modules.clone(),
            method: memory.recompute_method.clone(),
            num_layers: memory.recompute_num_layers.clone(),
        }
    }

    /// The flags given that have no key and may not be built.
    pub fn keyless_flags(&self) -> impl Iterator<Item = &'static str> {
        let later = &self.later;
        let flags = [
            ("--save-every", later.save_every.is_some()),
            ("--keep-last", later.keep_last.is_some()),
            ("--resume", later.resume.is_some()),
            ("--device-memory", later.device_memory.is_some()),
        ];
        flags
            .into_iter()
            .filter(|(_, given)| *given)
            .map(|(flag, _)| flag)
    }
}
