//! The trainers whose files are read: how they are told apart, what they do where a file says nothing, and how their memory
//! differs from what is planned here.

use super::meaning::plain;
use serde::Serialize;

/// The program that a configuration file belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Program {
    /// The `config.json` of a model of Hugging Face's.
    HuggingFaceModel,
    /// `TrainingArguments` of transformers.
    Transformers,
    /// `SFTConfig` and `DPOConfig` of TRL.
    Trl,
    /// Axolotl.
    Axolotl,
    /// LLaMA-Factory.
    LlamaFactory,
    /// Megatron-LM, its own arguments.
    Megatron,
    /// Megatron-Bridge.
    MegatronBridge,
    /// DeepSpeed.
    DeepSpeed,
    /// The file of `accelerate launch --config_file`.
    Accelerate,
}

use Program::*;

/// The defaults of transformers' arguments.
const OF_TRANSFORMERS: &[(&str, &str)] = &[
    ("per_device_train_batch_size", "8"),
    ("gradient_accumulation_steps", "1"),
    ("learning_rate", "5e-5"),
    ("lr_scheduler_type", "linear"),
    ("weight_decay", "0.0"),
    ("adam_beta2", "0.999"),
    ("num_train_epochs", "3.0"),
    ("fp32", "true"),
    ("zero_stage", "0"),
];

/// Those of TRL that differ.
const OF_TRL: &[(&str, &str)] = &[
    ("max_length", "1024"),
    ("bf16", "true"),
    ("gradient_checkpointing", "true"),
];

/// Keys that TRL's arguments have, and transformers' do not.
const NAMES_OF_TRL: &[&str] = &[
    "assistant-only-loss",
    "beta",
    "completion-only-loss",
    "dataset-text-field",
    "max-length",
    "packing",
    "padding-free",
    "use-peft",
];

/// Why bytes of a parameter differ between transformers and here.
const MIXED_TYPES_OF_TRANSFORMERS: &str = "bf16 of transformers computes in bf16 on f32 weights: 16 bytes a parameter, and copies in bf16 while a \
     step runs; here there are bf16 weights beside f32 masters: 18 bytes, 16 with --master bf16-split";

/// How transformers' memory, and that of what stands on it, differs.
const LOGITS_OF_TRANSFORMERS: &str = "transformers holds the logits of a whole micro-batch, 4 bytes x batch x sequence x vocabulary and as much \
     for their gradient, unless Liger's fused loss is on; here they exist in chunks";

impl Program {
    /// All of them, for messages.
    pub(crate) const NAMES: &str = "Hugging Face's config.json and TrainingArguments, TRL, axolotl, LLaMA-Factory, Megatron-LM and \
         Megatron-Bridge, DeepSpeed, accelerate";

    /// Its usual name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            HuggingFaceModel => "a Hugging Face model",
            Transformers => "transformers",
            Trl => "TRL",
            Axolotl => "axolotl",
            LlamaFactory => "LLaMA-Factory",
            Megatron => "Megatron-LM",
            MegatronBridge => "Megatron-Bridge",
            DeepSpeed => "DeepSpeed",
            Accelerate => "accelerate",
        }
    }

    /// Sections of its files whose keys mean what they do outside of sections, in the form of [`plain`]. A key of another section
    /// is known by its whole name alone.
    pub(super) fn sections(self) -> &'static [&'static str] {
        match self {
            HuggingFaceModel => &[],
            Transformers | Trl => &["fsdp-config", "lr-scheduler-kwargs", "optim-args"],
            Axolotl => &["fsdp-config"],
            LlamaFactory => &["fsdp-config", "peft-config", "quant-config"],
            Megatron => &["language-model", "model-parallel"],
            MegatronBridge => &[
                "checkpoint",
                "checkpoint-config",
                "dataset",
                "dataset-config",
                "ddp",
                "ddp-config",
                "dist",
                "dist-config",
                "logger",
                "logger-config",
                "mixed-precision",
                "mixed-precision-config",
                "model",
                "model-config",
                "optimizer",
                "optimizer-config",
                "rng",
                "rng-config",
                "scheduler",
                "scheduler-config",
                "tokenizer",
                "tokenizer-config",
                "train",
                "train-config",
            ],
            DeepSpeed => &[
                "bf16",
                "data-types",
                "optimizer.params",
                "scheduler.params",
                "zero-optimization",
            ],
            Accelerate => &["deepspeed-config", "fsdp-config", "parallelism-config"],
        }
    }

    /// The program whose files have keys of these names, if that can be told.
    pub(crate) fn of<'a>(names: impl Iterator<Item = &'a str>) -> Option<Program> {
        let names: Vec<String> = names.map(plain).collect();
        let has = |name: &str| names.iter().any(|one| one == name);
        let has_section = |name: &str| names.iter().any(|one| one.starts_with(name));
        let has_one = |of: &[&str]| of.iter().any(|name| has(name));
        let is_model = has("model-type") && has_one(&["hidden-size", "n-embd"]);
        let is_zero = has_section("zero-optimization.") || has("train-micro-batch-size-per-gpu");
        let of_bridge = ["train.", "train-config.", "model.", "model-config."];
        let is_launch = has_one(&["compute-environment", "distributed-type"]);
        let is_of_transformers =
            has_one(&["output-dir", "per-device-train-batch-size", "learning-rate"]);
        let found = [
            (HuggingFaceModel, is_model),
            (Accelerate, is_launch),
            (DeepSpeed, is_zero),
            (Axolotl, has("base-model")),
            (
                LlamaFactory,
                has_one(&["stage", "finetuning-type", "cutoff-len", "peft-config.name"]),
            ),
            (
                MegatronBridge,
                of_bridge.iter().any(|name| has_section(name)),
            ),
            (Trl, is_of_transformers && has_one(NAMES_OF_TRL)),
            (Transformers, is_of_transformers),
            (
                Megatron,
                has_one(&["num-layers", "micro-batch-size", "seq-length"]),
            ),
        ];
        let found = found.into_iter().find(|(_, is_it)| *is_it);
        found.map(|(program, _)| program)
    }

    /// Its defaults for an objective, in its own words, as far as a plan or the command depends on them. The earlier go before.
    pub(crate) fn defaults(self, objective: Option<&str>) -> Vec<(&'static str, &'static str)> {
        let own: &[_] = match self {
            HuggingFaceModel | Accelerate => &[],
            Transformers => &[("gradient_checkpointing", "false")],
            Trl if objective == Some("dpo") => &[("learning_rate", "1e-6")],
            Trl => &[("learning_rate", "2e-5")],
            LlamaFactory => &[("disable_gradient_checkpointing", "false")],
            Axolotl => &[
                ("micro_batch_size", "1"),
                ("gradient_accumulation_steps", "1"),
                ("weight_decay", "0.0"),
                ("adam_beta2", "0.999"),
                ("bf16", "auto"),
                ("fp32", "true"),
                ("gradient_checkpointing", "false"),
                ("zero_stage", "0"),
            ],
            Megatron => &[
                ("gradient_accumulation_steps", "1"),
                ("fp32", "true"),
                ("adam_beta2", "0.999"),
                ("weight_decay", "0.01"),
                ("use_distributed_optimizer", "false"),
            ],
            // Its recipes say the rest, and a file says where it differs from one.
            MegatronBridge => &[("gradient_accumulation_steps", "1")],
            DeepSpeed => &[
                ("gradient_accumulation_steps", "1"),
                ("zero_optimization.stage", "0"),
            ],
        };
        let inherited: &[&[_]] = match self {
            Trl => &[OF_TRL, OF_TRANSFORMERS],
            Transformers | LlamaFactory => &[OF_TRANSFORMERS],
            _ => &[],
        };
        [&[own], inherited].concat().concat()
    }

    /// Shapes of its models where a shape is given and says nothing of this.
    pub(crate) fn shape(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Megatron | MegatronBridge => &[
                ("normalization", "LayerNorm"),
                ("swiglu", "false"),
                ("position_embedding_type", "learned_absolute"),
                ("disable_bias_linear", "false"),
                ("untie_embeddings_and_output_weights", "false"),
            ],
            _ => &[],
        }
    }

    /// Why its own peak is another than the plan's, as far as that is known.
    pub(crate) fn differs(self) -> &'static [&'static str] {
        match self {
            HuggingFaceModel | Accelerate => &[],
            Transformers => &[MIXED_TYPES_OF_TRANSFORMERS, LOGITS_OF_TRANSFORMERS],
            Trl => &[
                MIXED_TYPES_OF_TRANSFORMERS,
                "TRL holds the logits of a whole micro-batch unless its loss is chunked (chunked_nll, by itself in recent versions) or \
                 Liger's; here they exist in chunks",
            ],
            Axolotl | LlamaFactory => &[LOGITS_OF_TRANSFORMERS],
            Megatron | MegatronBridge => &[
                "Megatron divides products by tensor parallelism, of which a rank holds a part; here every rank computes whole layers, \
                 and --zero 3 or --cp divides what it keeps",
            ],
            DeepSpeed => &[
                "ZeRO-3 of DeepSpeed keeps parameters that it gathered within stage3_max_live_parameters, and buckets beside them; here \
                 one unit is gathered ahead",
            ],
        }
    }
}
