//! Every key, in the order of the reference and of help, and the struct of each section, which its rows make.

use super::choices::{
    AttentionBackend, AutoOr, BaseType, DpoLoss, FloatType, Fp8Gradients, Fp8Recipe, Fp8Weights,
    Graphs, HostPlace, KernelChoice, Objective, OptimizerPlace, RankEngine, Release,
};
use super::device::Device;
use super::key::Mark::{ComparedApart, KeepsBits, PerRank};
use super::key::{Key, key, optional};
use super::kind::{Kind, Range};
use super::need;
use super::schedule::PipelineSchedule;
use super::size::Size;
use data::{Format, Inputs, Packing};
use indexmap::IndexMap;
use memory::Window;
use model::{
    ActivationFunction, Family, LoraInit, NormKind, NormPlacement, PositionKind, QkNormExtent,
    RopeScaling, RouterAuxKind, ScoreKind,
};
use optim::{LrAdjust, MasterFormat, MomentFormat, OptimizerKind, ScheduleKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use units::{Reduce, Zero};

/// The headings of help.
const TRAINING: &str = "Training";
const MEMORY: &str = "Memory";
const RANKS: &str = "Several ranks";
const OUTPUT: &str = "Output";

/// Makes the struct of each section, a field a row, and [`KEYS`] of all rows: first those of the model, whose struct is its crate's.
macro_rules! keys {
    (
        model: [$($model:expr,)*]
        $(
            $(#[$attribute:meta])*
            $section:ident: $Section:ident {$(
                $name:ident: $type:ty =
                    $make:ident($kind:expr, $default:expr, $about:literal $(,)?) $(.$word:ident($($said:expr),* $(,)?))*,
            )*}
        )*
    ) => {
        $(
            $(#[$attribute])*
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $Section {$(
                #[doc = $about]
                pub $name: $type,
            )*}
        )*

        /// Every key.
        pub const KEYS: &[Key] = &[
            $($model,)*
            $($(
                $make(concat!(stringify!($section), ".", stringify!($name)), $kind, $default, $about) $(.$word($($said),*))*,
            )*)*
        ];
    };
}

// To add a key, add a row: type, kind, default, explanation, flag, its marks ([`Mark`]), and the feature without which it has no
// effect (`need.rs`).
keys! {
    model: [
        optional("model.family", Kind::Choice(Family::NAMES), ("\"llama\"", "the first that has all features of the model"),
            "The `model_type` of the model's files")
            .details("A model whose features the family's files cannot say is refused."),
        key("model.hidden", Kind::Whole(1), "64", "Width of the residual stream"),
        key("model.layers", Kind::Whole(1), "4", "Number of transformer blocks"),
        key("model.heads", Kind::Whole(1), "4", "Number of query heads"),
        key("model.kv_heads", Kind::Whole(1), "2", "Number of key and value heads; divides `heads`")
            .details("Left out of a [model] section: as many as `heads`."),
        key("model.head_dim", Kind::Whole(1), "16", "Width of one head")
            .details("Left out of a [model] section: hidden / heads."),
        key("model.ffn", Kind::Whole(1), "176", "Width of the feed-forward layer"),
        key("model.vocab", Kind::Whole(1), "256", "Number of tokens known to the embedding and the output head"),
        key("model.tie_embeddings", Kind::Bool, "false", "The output head reuses the embedding matrix"),
        key("model.qkv_bias", Kind::Bool, "false", "The q, k and v projections have a bias (Qwen2)"),
        key("model.o_bias", Kind::Bool, "false", "The output projection of attention has a bias (Llama with `attention_bias`)"),
        key("model.mlp_bias", Kind::Bool, "false", "The projections of the feed-forward layer have a bias (Llama with `mlp_bias`)"),
        key("model.fused_projections", Kind::Bool, "false",
            "q, k and v are one matrix in Hugging Face's files, and gate and up another (Phi-3)"),
        key("model.qk_norm", Kind::Bool, "false", "q and k are normalised before the rotary embedding (Qwen3)"),
        key("model.qk_norm_over", Kind::Choice(QkNormExtent::NAMES), "\"head\"",
            "What these norms take together: the columns of a head, or of all heads (OLMo 2)")
            .needs(need::QK_NORM),
        optional("model.sliding_window", Kind::Whole(1), ("4096", "none"),
            "Sliding-window attention: the most keys that a query sees, its own included (Mistral, Qwen2, Qwen3)"),
        key("model.full_attention_layers", Kind::Wholes, "[]",
            "Layers that see all keys in spite of `sliding_window`, counted from 0"),
        key("model.norm", Kind::Choice(NormKind::NAMES), "\"rms\"",
            "How the residual stream is normalised: RMSNorm (Llama), or LayerNorm (GPT-2)")
            .details("GPT-2 differs from others in this, activation, positions, max_positions, biases and dropout together; mixtures are \
                      refused."),
        key("model.norm_placement", Kind::Choice(NormPlacement::NAMES), "\"before\"",
            "Norms stand before attention and the feed-forward layer, or after them, on what they add to the residual stream (OLMo 2)")
            .details("both: before and after (Gemma 2 and 3)."),
        key("model.zero_centered_norm", Kind::Bool, "false", "Norms multiply by 1 + their weight, which starts at 0 (Gemma)"),
        key("model.activation", Kind::Choice(ActivationFunction::NAMES), "\"swiglu\"",
            "Activation function of the feed-forward layer and of experts; gelu_tanh has no gate")
            .details("swiglu: silu(gate) up; geglu_tanh: gelu(gate) up (Gemma); clamped_swiglu: gate sigmoid(swiglu_alpha gate) (up + 1), \
                      clamped by swiglu_limit (gpt-oss)."),
        key("model.swiglu_alpha", Kind::Real(Range::Positive), "1.702", "The factor within the sigmoid of clamped_swiglu")
            .needs(need::CLAMPED_SWIGLU),
        key("model.swiglu_limit", Kind::Real(Range::Positive), "7.0",
            "clamped_swiglu takes gate up to this, and up from minus this to this")
            .needs(need::CLAMPED_SWIGLU),
        key("model.positions", Kind::Choice(PositionKind::NAMES), "\"rotary\"",
            "How tokens know where they stand: by the rotary embedding, or by learned vectors"),
        optional("model.max_positions", Kind::Whole(1), ("1024", "none"), "Learned positions: the longest sequence"),
        key("model.biases", Kind::Bool, "false", "All projections have a bias"),
        key("model.dropout", Kind::Real(Range::BelowOne), "0.0",
            "Rate at which attention probabilities, what is added to the residual stream, and the embedding are dropped")
            .needs(need::NEXT_TOKENS),
        key("model.norm_eps", Kind::Real(Range::Positive), "1e-5", "Added to the mean square, or the variance, inside every norm"),
        key("model.rope_theta", Kind::Real(Range::Positive), "10000.0", "Base of the rotary embedding's wavelengths")
            .needs(need::ROTARY),
        key("model.rotary_share", Kind::Real(Range::Positive), "1.0",
            "Share of a head's columns that the rotary embedding turns, the first ones; at most 1 (GLM-4.5, Phi-4-mini)")
            .needs(need::ROTARY),
        optional("model.window_rope_theta", Kind::Real(Range::Positive), ("10000.0", "they turn as other layers do"),
            "Layers with a window turn by this base, without rope_scaling (OLMo 3, Gemma 3)"),
        key("model.no_rope_layers", Kind::Wholes, "[]", "Layers without the rotary embedding, counted from 0 (SmolLM3)")
            .needs(need::ROTARY),
        optional("model.query_temperature", Kind::Real(Range::Positive), ("0.1", "none"),
            "Queries are multiplied by 1 + this times ln(1 + floor(position / rope_scaling.original_max_position)) (Ministral 3)"),
        key("model.embedding_multiplier", Kind::Real(Range::Positive), "1.0", "The embedding is multiplied by this (Granite)"),
        key("model.scale_embedding", Kind::Bool, "false",
            "The embedding is multiplied by sqrt(hidden), rounded to the type that is computed in (Gemma)"),
        key("model.residual_multiplier", Kind::Real(Range::Positive), "1.0",
            "What attention and the feed-forward layer add to the residual stream is multiplied by this (Granite)"),
        optional("model.attention_multiplier", Kind::Real(Range::Positive), ("0.015625", "1 / sqrt(head_dim)"),
            "Attention's scores are multiplied by this (Granite, which needs it; Gemma)"),
        optional("model.attn_logit_softcapping", Kind::Real(Range::Positive), ("50.0", "none"),
            "Attention's scores s become c tanh(s / c), with this c (Gemma 2)"),
        optional("model.final_logit_softcapping", Kind::Real(Range::Positive), ("30.0", "none"),
            "Logits z become c tanh(z / c), with this c (Gemma 2)"),
        key("model.attention_sinks", Kind::Bool, "false",
            "Every head has a learned score that joins its softmax and has no value (gpt-oss)"),
        key("model.attention_gate", Kind::Bool, "false",
            "Attention's output is multiplied by the sigmoid of a gate that the projection of queries makes beside them (Qwen3-Next)"),
        key("model.logits_scaling", Kind::Real(Range::Positive), "1.0", "Logits are divided by this (Granite)"),
        optional("model.rope_scaling.kind", Kind::Choice(RopeScaling::KINDS), ("\"llama3\"", "llama3, if the section has keys"),
            "How rotary wavelengths are stretched for sequences longer than those of the original training")
            .details("linear divides positions by the factor and needs no other key; llama3 (Llama 3.1) needs the next four keys; yarn \
                      needs `factor` and `original_max_position`; longrope (Phi-4-mini) needs these, `short_factor` and `long_factor`."),
        optional("model.rope_scaling.factor", Kind::Real(Range::Positive), ("8.0", "none"), "How far long wavelengths are stretched"),
        optional("model.rope_scaling.low_freq_factor", Kind::Real(Range::Positive), ("1.0", ""),
            "llama3: wavelengths above `original_max_position` divided by this are stretched"),
        optional("model.rope_scaling.high_freq_factor", Kind::Real(Range::Positive), ("4.0", ""),
            "llama3: wavelengths below `original_max_position` divided by this are kept; those between are blended"),
        optional("model.rope_scaling.original_max_position", Kind::Whole(1), ("8192", ""),
            "llama3, yarn, longrope: context length of the original training"),
        optional("model.rope_scaling.beta_fast", Kind::Real(Range::Positive), ("32.0", "32"),
            "yarn: pairs that turn more often within the original context are kept"),
        optional("model.rope_scaling.beta_slow", Kind::Real(Range::Positive), ("1.0", "1"),
            "yarn: pairs that turn less often are stretched; those between are blended"),
        optional("model.rope_scaling.attention_factor", Kind::Real(Range::Positive),
            ("1.2", "yarn: 0.1 ln(factor) + 1; longrope: sqrt(1 + ln(factor) / ln(original_max_position))"),
            "yarn, longrope: cosines and sines are multiplied by this"),
        optional("model.rope_scaling.short_factor", Kind::Positives, ("[1.0, 1.0]", ""),
            "longrope: how far the wavelength of each pair is stretched in sequences of at most `original_max_position` tokens"),
        optional("model.rope_scaling.long_factor", Kind::Positives, ("[1.0, 32.0]", ""), "longrope: the same in longer sequences"),
        optional("model.rope_scaling.mscale_all_dim", Kind::Real(Range::Positive), ("1.0", "none"),
            "yarn, under latent attention: scores are multiplied by the square of 0.1 times it times ln(factor), plus 1 (DeepSeek)"),
        optional("model.rope_scaling.truncate", Kind::Bool, ("true", "true"),
            "yarn: the ends of the blended pairs are rounded outwards to whole pairs"),
        key("model.init_std", Kind::Real(Range::Positive), "0.02", "Standard deviation of freshly initialised matrices"),
        key("model.router_aux", Kind::Real(Range::NotNegative), "0.0",
            "Coefficient of the routers' loss of balance, which metrics show beside the loss; 0 is none")
            .details("The loss is a mean over the micro-batches of a step."),
        key("model.router_aux_kind", Kind::Choice(RouterAuxKind::NAMES), "\"pooled\"",
            "Which choices and scores that loss takes together")
            .details("pooled: those of all layers, as transformers does; layer: of each layer, as Megatron's aux_loss; sequence: of each \
                      sequence in a layer, as its seq_aux_loss.")
            .needs(need::BALANCE),
        key("model.router_z_loss", Kind::Real(Range::NotNegative), "0.0",
            "Coefficient of the mean squared log-sum-exp of the routers' logits, which keeps them small; 0 is none"),
        optional("model.experts.count", Kind::Whole(1), ("8", "none, all layers are dense"),
            "Experts of a layer that its router chooses from, in place of the feed-forward layer (Mixtral, Qwen2-MoE, Qwen3-MoE, \
             DeepSeek-V2 and V3)")
            .details("The section needs this and the next two keys."),
        optional("model.experts.chosen", Kind::Whole(1), ("2", ""), "Experts that each token is sent to"),
        optional("model.experts.ffn", Kind::Whole(1), ("64", ""), "Width of one expert"),
        optional("model.experts.shared_ffn", Kind::Whole(0), ("64", "0, there are none"),
            "Width of the shared experts together, to which every token goes"),
        optional("model.experts.shared_gate", Kind::Bool, ("true", "false"),
            "What shared experts give is multiplied by a sigmoid of each token's own (Qwen2-MoE)"),
        optional("model.experts.dense_layers", Kind::Wholes, ("[0]", "[]"),
            "Layers with a feed-forward layer of width `ffn` and without experts, counted from 0"),
        optional("model.experts.score", Kind::Choice(ScoreKind::NAMES), ("\"softmax\"", "softmax"),
            "How scores follow from the router's logits: over all experts, or of each by itself (DeepSeek-V3)"),
        optional("model.experts.normed", Kind::Bool, ("true", "false"), "The weights of a token's experts are divided by their sum"),
        optional("model.experts.factor", Kind::Real(Range::Positive), ("2.5", "1"), "Factor on these weights (DeepSeek)"),
        optional("model.experts.groups", Kind::Whole(1), ("8", "1"),
            "Groups of neighbouring experts, of which a token's experts come from the best few (DeepSeek); 1: from all"),
        optional("model.experts.chosen_groups", Kind::Whole(1), ("4", "1"), "Groups that a token's experts come from"),
        optional("model.experts.biases", Kind::Bool, ("true", "false"), "The router and the experts have biases (gpt-oss)"),
        optional("model.experts.choice_bias", Kind::Bool, ("true", "false"),
            "A bias for each expert counts where experts are chosen, not where they are weighed (DeepSeek-V3)")
            .details("optim.router_bias_rate moves it."),
        optional("model.latent.kv", Kind::Whole(1), ("512", "none, attention has no latents"),
            "Latent attention (DeepSeek-V2): width of the latent that keys and values are made from")
            .details("The section needs this key, `rotary_dim` and `v_head_dim`."),
        optional("model.latent.q", Kind::Whole(1), ("1536", "queries are made from the block's input"),
            "Width of the latent that queries are made from"),
        optional("model.latent.rotary_dim", Kind::Whole(1), ("64", ""),
            "Columns of a head of queries and keys that the rotary embedding turns; the rest of `head_dim` has no position"),
        optional("model.latent.v_head_dim", Kind::Whole(1), ("128", ""), "Width of a head of values"),
        optional("model.latent.neighbours", Kind::Bool, ("true", "false"),
            "Neighbouring columns are turned together, not one of each half"),
        optional("model.delta.key_heads", Kind::Whole(1), ("16", "none, all layers have attention"),
            "The gated delta rule in place of attention (Qwen3-Next, Qwen3.5): heads of queries and keys")
            .details("The section needs this and the next three keys."),
        optional("model.delta.value_heads", Kind::Whole(1), ("32", ""), "Heads of values, a multiple of `key_heads`"),
        optional("model.delta.key_head_dim", Kind::Whole(1), ("128", ""), "Width of a head of queries, and of one of keys; at most 128"),
        optional("model.delta.value_head_dim", Kind::Whole(1), ("128", ""), "Width of a head of values"),
        optional("model.delta.conv_width", Kind::Whole(1), ("4", "4"),
            "Tokens that the convolution in front of the rule sees, the token itself included; at most 8"),
        optional("model.delta.attention_layers", Kind::Wholes, ("[3, 7]", "[]"), "Layers with attention, counted from 0"),
        optional("model.delta.by_key_head", Kind::Bool, ("true", "false"),
            "Files have the projections as one matrix by key head (Qwen3-Next)"),
    ]

    /// `[data]`
    data: DataConfig {
        path: Option<Inputs> = optional(Kind::Inputs, ("\"tokens.bin\"", "built-in text"),
            "Token, batch or text file, or a folder of token files; several, as a list, take turns (repeatable)")
            .details("[\"a:0.3\", \"b:0.7\"] mixes them by weight; without weights each gives all that it has.")
            .flag("--data", "PATH[:WEIGHT]", TRAINING).marks(&[ComparedApart, PerRank]),
        format: Format = key(Kind::Choice(Format::NAMES), "\"auto\"", "How the file is read")
            .details("auto goes by its ending and by how it begins; batches is safetensors with input_ids and targets, llmc has \
                      llm.c's header, u16 is bare 16-bit tokens (nanoGPT), text is bytes.")
            .needs(need::DATA),
        any_tokenizer: bool = key(Kind::Bool, "false", "Data is taken whose tokens are not those of the model's tokenizer")
            .details("Without it a model that came with weights refuses them, and text unless it reads bytes.").marks(&[KeepsBits]),
        shuffle: bool = key(Kind::Bool, "true", "Samples are drawn in an order shuffled by train.seed")
            .switch("--no-shuffle", (false, "Read samples in file order"), Some(TRAINING)),
        packing: Packing = key(Kind::Choice(Packing::NAMES), "\"auto\"", "How documents become sequences")
            .details("auto is first-fit for documents with masks (chats, instructions), pad for pairs (dpo), else concatenate, and a run \
                      says and writes down which. concatenate cuts the stream of tokens every seq tokens; first-fit packs whole documents, of which none sees \
                      another (flash attention); pad gives each its own row, beside others of like length. The latter two need \
                      documents: a folder that `trainer prepare` wrote, pad also takes batch files.")
            .flag("--packing", "auto|concatenate|first-fit|pad", TRAINING),
        prefetch: usize = key(Kind::Whole(1), "2", "Steps that are read ahead; never changes results").marks(&[KeepsBits, PerRank]),
        seq: usize = key(Kind::Whole(1), "1024", "Sequence length").flag("--seq", "S", TRAINING),
    }

    /// `[batch]`
    batch: BatchConfig {
        micro: usize = key(Kind::Whole(1), "1", "Sequences in a micro-batch").flag("--micro-batch", "B", TRAINING),
        accum: usize = key(Kind::Whole(1), "1", "Gradient accumulation: micro-batches in a step")
            .flag("--accum", "A", TRAINING).marks(&[ComparedApart]),
    }

    /// `[train]`
    train: TrainConfig {
        steps: usize = key(Kind::Whole(1), "1000", "Number of optimizer steps").flag("--steps", "N", TRAINING).marks(&[ComparedApart]),
        epochs: Option<f64> = optional(Kind::Real(Range::Positive), ("3.0", "train.steps says how long the run is"),
            "Passes over the data, instead of a number of steps")
            .details("A run writes down the train.steps that follow; the last step is filled up from the next pass.")
            .flag("--epochs", "N", TRAINING).marks(&[ComparedApart]),
        objective: Objective = key(Kind::Choice(Objective::NAMES), "\"next-token\"", "What is learnt: next tokens, preferences between pairs (dpo), or a policy by its gradient")
            .details("dpo needs a folder that `trainer prepare` wrote of `chosen` and `rejected`, or batch files \
                      whose every two rows are a pair. Steps of a policy are made by a program, with `policy_step` of the library or \
                      of Python; plan knows them. Nothing is dropped out with either.")
            .flag("--objective", "next-token|dpo|policy", TRAINING),
        seed: u64 = key(Kind::Whole(0), "0", "Seed of initialisation, shuffling, stochastic rounding and dropout")
            .flag("--seed", "N", TRAINING),
        device: Option<Device> = optional(Kind::Device, ("\"cpu\"", "train: cuda if built and present, else cpu; plan: cuda"), "Device")
            .details("It is cpu, cuda or cuda:N.")
            .flag("--device", "cpu|cuda[:N]", TRAINING).marks(&[PerRank]),
        dtype: Option<FloatType> = optional(Kind::Choice(FloatType::NAMES), ("\"bf16\"", "f32 on cpu, bf16 on cuda"),
            "Data type of weights and activations")
            .flag("--dtype", "f32|bf16", TRAINING),
        threads: Option<usize> = optional(Kind::Whole(1), ("2", "one per core"), "CPU threads; never changes results")
            .flag("--threads", "N", TRAINING).marks(&[KeepsBits, PerRank]),
        max_skipped: usize = key(Kind::Whole(0), "3",
            "Steps in a row that may be skipped because their loss or gradients are not finite")
            .details("Weights and moments then stay as they are; one more ends the run with exit code 6.").marks(&[KeepsBits]),
        freeze: Vec<String> = key(Kind::Texts, "[]", "Patterns of parameters that are not trained, such as `*embed_tokens*`")
            .details("They have no gradient and no optimizer state, and count neither for the norm nor for decay; they are saved \
                      with the model. Names are Hugging Face's, * stands for any characters, ? for one."),
        graphs: Graphs = key(Kind::Choice(Graphs::NAMES), "\"auto\"", "Micro-batches as CUDA graphs; never changes results")
            .details("auto launches those after the first of a step at once, on CUDA without ranks, from batch.accum = 3 on.").marks(&[KeepsBits]),
    }

    /// `[optim]`
    optim: OptimConfig {
        kind: OptimizerKind = key(Kind::Choice(OptimizerKind::NAMES), "\"adamw\"", "The optimizer (--optimizer)")
            .details("muon updates the matrices of the blocks, and AdamW the rest. adafactor keeps the variance of a matrix by rows \
                      and columns, and no moment besides: next to no states."),
        state_dtype: MomentFormat = key(Kind::Choice(MomentFormat::NAMES), "\"f32\"", "Data type of the optimizer's moments")
            .flag("--state-dtype", "f32|bf16|8bit", MEMORY),
        master: MasterFormat = key(Kind::Choice(MasterFormat::NAMES), "\"f32\"",
            "What stands beside bf16 weights: an f32 copy, the 16 bits that they leave out of one, 8 of them, or nothing")
            .details("bf16-split is an exact f32; bf16+8 is rounded to 24 bits; none rounds stochastically. For f32 weights it has no effect.")
            .flag("--master", "f32|bf16-split|bf16+8|none", MEMORY).needs(need::BF16_WEIGHTS),
        grad_dtype: FloatType = key(Kind::Choice(FloatType::NAMES), "\"f32\"", "Data type of gradients")
            .flag("--grad-dtype", "f32|bf16", MEMORY),
        beta1: f64 = key(Kind::Real(Range::BelowOne), "0.9", "Decay of the first moment").needs(need::MOMENTS),
        beta2: f64 = key(Kind::Real(Range::BelowOne), "0.95", "Decay of the second moment").needs(need::MOMENTS),
        eps: f64 = key(Kind::Real(Range::Positive), "1e-8", "Added to the root of the second moment").needs(need::MOMENTS),
        weight_decay: f64 = key(Kind::Real(Range::NotNegative), "0.1",
            "Decoupled weight decay of the matrices; norm weights and biases have none")
            .flag("--weight-decay", "X", TRAINING),
        clip_norm: f64 = key(Kind::Real(Range::PositiveOrInfinite), "1.0",
            "Gradients are scaled down to this global norm; inf turns clipping off")
            .flag("--clip", "NORM", TRAINING),
        f32_states: Vec<String> = key(Kind::Texts, "[\"*norm*\", \"*embed_tokens*\", \"*.ln_*\", \"*.wte.*\", \"*.wpe.*\"]",
            "Name patterns of tensors that keep f32 moments under 8-bit states").needs(need::EIGHT_BITS),
        muon_momentum: f64 = key(Kind::Real(Range::BelowOne), "0.95", "Muon: decay of the momentum").needs(need::MUON),
        nesterov: bool = key(Kind::Bool, "true", "Muon: the direction is a step ahead of the momentum").needs(need::MUON),
        ns_steps: usize = key(Kind::WholeUpTo(1, 99), "5", "Muon: iterations of Newton-Schulz").needs(need::MUON),
        ns_coefficients: [f64; 3] = key(Kind::Reals(3), "[3.4445, -4.775, 2.0315]", "Muon: coefficients of an iteration").needs(need::MUON),
        ns_eps: f64 = key(Kind::Real(Range::Positive), "1e-7", "Muon: the least norm that a direction is divided by").needs(need::MUON),
        ns_dtype: FloatType = key(Kind::Choice(FloatType::NAMES), "\"bf16\"", "Muon: data type of the iteration").needs(need::MUON),
        lr_adjust: LrAdjust = key(Kind::Choice(LrAdjust::NAMES), "\"match_rms_adamw\"",
            "Muon: how the learning rate of a matrix follows from its shape")
            .details("match_rms_adamw: 0.2 x the root of the longer side; original: the root of rows / columns, at least 1.").needs(need::MUON),
        router_bias_rate: f64 = key(Kind::Real(Range::NotNegative), "0.0",
            "How far a step moves the bias of an expert's choices towards the mean load; DeepSeek-V3 took 0.001")
            .details("It needs model.experts.choice_bias."),
        matrices: Option<Vec<String>> = optional(Kind::Texts, ("[\"*proj*\"]", "all matrices of the blocks"),
            "Muon: name patterns of the matrices that it updates").needs(need::MUON),
        adafactor_eps: (AutoOr<f64>, f64) = key(Kind::AutoAndReal, "[\"auto\", 1e-3]",
            "Adafactor: the least root of a variance, and the least root mean square of weights that steps go by")
            .details("auto is the epsilon of f32, 1.19e-7, whatever the weights' type.").needs(need::ADAFACTOR),
        beta2_decay: f64 = key(Kind::Real(Range::NotPositive), "-0.8", "Adafactor: variances move by t^this towards step t's squares")
            .needs(need::ADAFACTOR),
        clip_threshold: f64 = key(Kind::Real(Range::Positive), "1.0",
            "Adafactor: updates whose root mean square is larger are scaled down to it").needs(need::ADAFACTOR),
        release: Release = key(Kind::Choice(Release::NAMES), "\"step\"", "When gradients have served their purpose")
            .details("backward updates each block as soon as its gradient is there, which then needs no memory; for one micro-batch \
                      a step (batch.accum = 1) and without clipping (optim.clip_norm = inf)."),
    }

    /// `[lr]`
    lr: LrConfig {
        peak: f64 = key(Kind::Real(Range::NotNegative), "3e-4", "Peak learning rate").flag("--lr", "X", TRAINING),
        matrices: Option<f64> = optional(Kind::Real(Range::NotNegative), ("0.02", "lr.peak"),
            "Peak learning rate of the matrices that muon updates").needs(need::MUON),
        schedule: ScheduleKind = key(Kind::Choice(ScheduleKind::NAMES), "\"constant\"", "How the learning rate falls after the warmup")
            .details("wsd is warmup, stable, decay.")
            .flag("--schedule", "constant|linear|cosine|wsd", TRAINING),
        warmup_steps: usize = key(Kind::Whole(0), "0", "Steps over which the learning rate rises linearly to its peak")
            .flag("--warmup", "N", TRAINING),
        decay_steps: Option<usize> = optional(Kind::Whole(1), ("500", "until the last step, for wsd the last tenth of the steps"),
            "Steps of the decay").needs(need::FALLING_RATE),
        min_ratio: f64 = key(Kind::Real(Range::Share), "0.1", "Learning rate after the decay, as a fraction of the peak")
            .needs(need::FALLING_MINIMUM),
    }

    /// `[fp8]`
    fp8: Fp8Config {
        recipe: Fp8Recipe = key(Kind::Choice(Fp8Recipe::NAMES), "\"off\"",
            "Products of the blocks' dense layers in eight bits (FP8), forward and backward, with one scale for a tensor")
            .details("Attention, norms, experts, embedding, output head, evaluations and text stay in bf16. rowwise and block are not built.")
            .flag("--fp8", "off|tensor", TRAINING),
        gradients: Fp8Gradients = key(Kind::Choice(Fp8Gradients::NAMES), "\"e5m2\"", "Format of gradients in these products; all else is e4m3")
            .details("e5m2 has a wider range, e4m3 smaller errors.").needs(need::FP8),
        except: Vec<String> = key(Kind::Texts, "[]", "Patterns of matrices whose products stay in bf16, such as `*.layers.0.*` or `*down_proj*`")
            .details("Names are Hugging Face's; of a product of several matrices one suffices.").needs(need::FP8),
        save: bool = key(Kind::Bool, "true", "Activations that only these products read are kept as codes: one byte instead of two")
            .marks(&[KeepsBits]).needs(need::FP8),
        weights: Fp8Weights = key(Kind::Choice(Fp8Weights::NAMES), "\"use\"", "How long the codes of weights are kept: while they are used, or for the step")
            .details("step takes a byte for each of their elements where the weights are, and makes codes once instead of at each use. Weights on the host, or divided by --zero 3, then come as codes, in half the bytes, from their second use in a step on.").marks(&[KeepsBits]).needs(need::FP8),
        fast_accumulation: bool = key(Kind::Bool, "false", "Forward products may keep sums in fewer bits, on GPUs that do so (14 bits on Hopper)")
            .details("Up to 10 % faster (torch's product on an H100), and less exact the longer the sum is; `trainer tune` times both.").needs(need::FP8),
    }

    /// `[lora]`
    lora: LoraConfig {
        rank: Option<usize> = optional(Kind::Whole(1), ("16", "no adapters, the model itself is trained"),
            "Low-rank adapters (LoRA): their rank; the model itself is frozen")
            .details("They are Hugging Face PEFT's, in a folder as PEFT writes it.").flag("--lora", "RANK", TRAINING),
        alpha: Option<f64> = optional(Kind::Real(Range::Positive), ("32.0", "lora.rank"),
            "What an adapter adds is multiplied by alpha / rank").needs(need::LORA),
        targets: Vec<String> = key(Kind::Texts, "[\"all-linear\"]", "Linear layers that get adapters, by the ends of their names")
            .details("all-linear: all of the blocks', without routers and experts. Names are Hugging Face's (q_proj, c_attn); what has \
                      other characters is a regular expression for whole names. Experts are mlp.experts.gate_up_proj and \
                      mlp.experts.down_proj.").needs(need::LORA),
        layers: Option<Vec<usize>> = optional(Kind::Wholes, ("[30, 31]", "all"), "Blocks that get adapters, counted from 0")
            .needs(need::LORA),
        rank_pattern: IndexMap<String, usize> = key(Kind::WholeTable(1), "{}",
            "Ranks of layers whose names end in what an expression fits, e.g. { \"q_proj\" = 32 }")
            .details("Of several that fit, the first counts.").needs(need::LORA),
        alpha_pattern: IndexMap<String, f64> = key(Kind::RealTable(Range::Positive), "{}", "Alphas, likewise").needs(need::LORA),
        dropout: f64 = key(Kind::Real(Range::BelowOne), "0.0", "Rate at which inputs of adapters are dropped")
            .needs(need::LORA).needs(need::NEXT_TOKENS),
        rslora: bool = key(Kind::Bool, "false", "The factor is alpha / sqrt(rank)").needs(need::LORA),
        init: LoraInit = key(Kind::Choice(LoraInit::NAMES), "\"kaiming\"", "What fresh factors A are; factors B are zero")
            .details("kaiming: uniform within 1 / sqrt(inputs); gaussian: normal with standard deviation 1 / rank.").needs(need::LORA),
        b_lr_ratio: f64 = key(Kind::Real(Range::Positive), "1.0", "Learning rate of factors B over that of factors A (LoRA+)")
            .needs(need::LORA),
        base_dtype: Option<BaseType> = optional(Kind::Choice(BaseType::NAMES), ("\"bf16\"", "train.dtype"),
            "Data type of the frozen model under adapters")
            .details("mxfp4 is for experts: other matrices stay in train.dtype.")
            .flag("--base-dtype", "bf16|8bit|nf4|mxfp4", TRAINING).needs(need::LORA),
        base_skip: Vec<String> = key(Kind::Texts, "[]", "Modules whose matrices stay in train.dtype under a base_dtype of few bits")
            .details("Ends of names, or beginnings up to a dot, which may be regular expressions: llm_int8_skip_modules of transformers.")
            .needs(need::LORA).needs(need::CODES),
    }

    /// `[dpo]`
    dpo: DpoConfig {
        beta: f64 = key(Kind::Real(Range::Positive), "0.1", "Factor on rewards: how closely the model is held to its reference")
            .needs(need::DPO),
        loss: DpoLoss = key(Kind::Choice(DpoLoss::NAMES), "\"sigmoid\"", "How a pair's loss follows from the margin of its rewards")
            .needs(need::DPO),
        reference: Option<PathBuf> = optional(Kind::Text, ("\"reference.json\"", "adapters: the model under them, computed in every step"),
            "Log-probabilities under the reference: what `trainer eval MODEL --reference FILE` wrote")
            .details("Training the model itself needs them.").marks(&[PerRank]).needs(need::DPO),
    }

    /// `[recompute]`
    recompute: RecomputeConfig {
        spec: String = key(Kind::Text, "\"none\"",
            "Activations to recompute: none, full, full:uniform:N, full:block:N, auto, or a list of {NAMED}")
            .details("auto is the fastest on paper whose peak is within memory.budget, or else within memory.limit.")
            .flag("--recompute", "SPEC", MEMORY).marks(&[KeepsBits]),
        layers: BTreeMap<String, String> = key(Kind::TextTable, "{}", "Specifications for ranges of layers, e.g. { \"0-3\" = \"full\" }")
            .details("Or clauses: \"recompute: mlp, qkv; offload: block_input; keep: mlp_act\", with any labels.").marks(&[KeepsBits]),
        state_interval: Option<usize> = optional(Kind::Whole(1), ("16", "1, and under --recompute auto what it chooses"),
            "Chunks of 64 tokens between two states of the gated delta rule that core_attn keeps")
            .details("Backward passes make the others again from these, some at a time, so a layer at work needs less too.")
            .flag("--state-interval", "N", MEMORY).marks(&[KeepsBits]).needs(need::DELTA),
        costs: Option<PathBuf> = optional(Kind::Text, ("\"profile.json\"", ""),
            "Measured times that auto counts with: what `trainer profile --json` printed")
            .flag("--costs", "FILE", MEMORY).marks(&[KeepsBits, PerRank]).needs(need::AUTO),
    }

    /// `[attention]`
    attention: AttentionConfig {
        backend: AttentionBackend = key(Kind::Choice(AttentionBackend::NAMES), "\"auto\"", "Attention implementation")
            .details("eager stores scores, flash never does; auto takes flash from sequences of 256 tokens on.")
            .flag("--attention", "auto|eager|flash", MEMORY),
        kernels: KernelChoice = key(Kind::Choice(KernelChoice::NAMES), "\"auto\"", "Which of our CUDA kernels compute it")
            .details("sm90 has instructions of compute capability 9.0 (H100, H200), for flash attention in bf16 with heads wider than 32; \
                      sm80 runs from 8.0 on. auto takes sm90 on GPUs of 9.0. Memory is the same; sums are in another order, so last \
                      bits differ.")
            .marks(&[ComparedApart]).needs(need::BF16_FLASH).needs(need::GPU),
    }

    /// `[experts]`
    experts: ExpertProductsConfig {
        kernels: KernelChoice = key(Kind::Choice(KernelChoice::NAMES), "\"auto\"", "Which of our CUDA kernels compute products of experts in bf16")
            .details("sm90 has instructions of compute capability 9.0 (H100, H200), sm80 runs from 8.0 on. auto takes sm90 on GPUs of 9.0. \
                      Memory is the same; sums are in another order, so last bits differ.")
            .marks(&[ComparedApart]).needs(need::BF16_EXPERTS).needs(need::GPU),
    }

    /// `[offload]`
    offload: OffloadConfig {
        optimizer: OptimizerPlace = key(Kind::NameOrFolder(OptimizerPlace::NAMES), "\"none\"",
            "Moments and master weights in pinned host memory, or in files in a folder on a disk")
            .details("It is none, pinned, a folder, or disk, for which offload.path names one. The files are scratch: a run removes \
                      them when it ends.")
            .flag("--offload-optimizer", "none|pinned|DIR", MEMORY).marks(&[KeepsBits, PerRank]),
        parameters: HostPlace = key(Kind::Choice(HostPlace::NAMES), "\"none\"",
            "Weights in pinned host memory, from where each block's come to the device when they are needed")
            .flag("--offload-parameters", "none|pinned", MEMORY).marks(&[KeepsBits]),
        parameter_slots: usize = key(Kind::Whole(1), "2",
            "Units of offloaded weights that are on the device at a time: embedding, blocks, head")
            .details("One computes while the next one comes.").marks(&[KeepsBits]).needs(need::OFFLOADED_WEIGHTS),
        gradients: HostPlace = key(Kind::Choice(HostPlace::NAMES), "\"none\"",
            "Gradients in pinned host memory, of which the device holds the blocks' that are being computed")
            .flag("--offload-gradients", "none|pinned", MEMORY).marks(&[KeepsBits]),
        activations: String = key(Kind::Text, "\"none\"",
            "Activations that wait in pinned host memory for their backward pass: none, auto, or a list of {ALL}")
            .details("None of them may be recomputed too. auto lets --recompute auto offload.")
            .flag("--offload-activations", "LABELS", MEMORY).marks(&[KeepsBits]),
        fraction: f64 = key(Kind::Real(Range::Share), "1.0",
            "Share of the blocks whose optimizer state is offloaded, above 0 up to 1: the last ones, at least one")
            .details("The output head is always among them, unless it is the embedding; 1 takes the embedding too.")
            .marks(&[KeepsBits]).needs(need::OFFLOADED_STATES),
        window: Window = key(Kind::Choice(Window::NAMES), "\"forward\"", "When what is offloaded is updated")
            .details("forward is during the next forward pass, end at the end of the step; among several ranks it is always end.")
            .marks(&[KeepsBits]).needs(need::OFFLOADED_UPDATES),
        buffer_count: usize = key(Kind::Whole(1), "3", "Chunks of an offloaded update that are on the device at a time")
            .details("One comes, one is updated, one goes.").marks(&[KeepsBits]).needs(need::OFFLOADED_UPDATES),
        slab_mib: usize = key(Kind::WholeUpTo(1, 1 << 20), "64", "Most MiB of a chunk, up to 1048576")
            .details("What muon and adafactor update as whole tensors is not cut.").marks(&[KeepsBits]).needs(need::OFFLOADED_UPDATES),
        path: Option<PathBuf> = optional(Kind::Text, ("\"/scratch\"", ""), "Folder on a disk for optimizer states: the same as naming it in offload.optimizer")
            .marks(&[KeepsBits, PerRank]),
    }

    /// `[eval]`
    #[derive(Default)]
    eval: EvalConfig {
        every: Option<usize> = optional(Kind::Whole(1), ("100", "no evaluation while training"), "Steps between two evaluations")
            .flag("--eval-every", "N", TRAINING).marks(&[KeepsBits]),
        path: Option<PathBuf> = optional(Kind::Text, ("\"validation.bin\"", "the validation part of data.path"),
            "What is evaluated on: a file, or a folder that `trainer prepare` wrote")
            .flag("--eval-data", "PATH", TRAINING).marks(&[KeepsBits, PerRank]).needs(need::EVALUATIONS),
        micro_batch: Option<usize> = optional(Kind::Whole(1), ("8", "batch.micro"), "Sequences in a micro-batch of an evaluation")
            .flag("--eval-micro-batch", "B", TRAINING).marks(&[KeepsBits]).needs(need::EVALUATIONS),
        samples: Option<usize> = optional(Kind::Whole(1), ("512", "all"), "The most sequences that an evaluation takes: the first ones")
            .marks(&[KeepsBits]).needs(need::EVALUATIONS),
    }

    /// `[checkpoint]`
    checkpoint: CheckpointConfig {
        every: Option<usize> = optional(Kind::Whole(0), ("500", "only the last step is saved"),
            "Steps between two checkpoints; the last step has one too; 0 saves nothing unless a signal ends the run")
            .flag("--save-every", "N", OUTPUT).marks(&[KeepsBits]),
        keep_last: Option<usize> = optional(Kind::Whole(1), ("3", "all"), "Checkpoints that are kept: the newest ones")
            .flag("--keep-last", "K", OUTPUT).marks(&[KeepsBits]),
        keep_best: bool = key(Kind::Bool, "false", "The checkpoint with the lowest loss on eval.path is kept too")
            .switch("--keep-best", (true, "Keep the checkpoint with the lowest evaluation loss too"), Some(OUTPUT)).marks(&[KeepsBits]),
        blocking: bool = key(Kind::Bool, "false", "Training waits until a checkpoint is written; needs no copy in host memory")
            .switch("--save-blocking", (true, "Wait for checkpoints: needs no copy of the state in host memory"), Some(OUTPUT))
            .marks(&[KeepsBits]).needs(need::CHECKPOINTS),
    }

    /// `[memory]`
    memory: MemoryConfig {
        limit: Option<Size> = optional(Kind::Size, ("\"24GiB\"", ""), "Refuse leases beyond this (24GiB, 80GB, 1500000, 95%)")
            .flag("--memory-limit", "SIZE", MEMORY).marks(&[KeepsBits, PerRank]),
        budget: Option<AutoOr<Size>> = optional(Kind::SizeOrAuto, ("\"22GiB\"", ""), "What the peak may be under --recompute auto; auto: what is free")
            .details("auto is the memory of the device that is free when the run starts; in a plan, all of --device-memory but for context and \
                      libraries.")
            .flag("--memory-budget", "SIZE|auto", MEMORY).marks(&[KeepsBits, PerRank]).needs(need::AUTO),
        force: bool = key(Kind::Bool, "false", "A run is tried although its plan does not fit the device, the limit or the host")
            .switch("--force", (true, "Try a run whose plan does not fit"), Some(MEMORY)).marks(&[KeepsBits, PerRank]),
        head_chunk: AutoOr<usize> = key(Kind::WholeOrAuto(1), "\"auto\"", "Tokens in a chunk of the output head")
            .details("Changes the order of sums, so also the gradients' last bits. auto is 512 on cpu; on cuda the smallest of 512 to \
                      8192 that is within 0.5 % of the fastest on paper, or else the largest below it that memory holds. A run writes \
                      down the number, and goes on with it."),
        expert_unit: Option<usize> = optional(Kind::Whole(1), ("32", "all"),
            "Experts of a layer whose matrices come to the device together, and whose gradients leave it together")
            .details("For weights on the host, --zero 2 and 3, and gradients on the host: of each matrix of a layer's experts then \
                      only as many such groups are there as offload.parameter_slots has, 2 by default. It divides the number of experts.")
            .flag("--expert-unit", "N", MEMORY).marks(&[KeepsBits]).needs(need::UNITS),
        tile_tokens: Option<usize> = optional(Kind::Whole(1), ("8192", "whole micro-batches"),
            "Tokens in a tile of the stages that need no other token: norms, projections and the feed-forward network")
            .details("What these stages would make for a whole micro-batch, and is recomputed, then exists for a tile at a time. Changes \
                      the order of sums, so also the gradients' last bits."),
    }

    /// `[hardware]`
    #[derive(Default)]
    hardware: HardwareConfig {
        h2d_gbps: Option<f64> = optional(Kind::Real(Range::Positive), ("25.0", ""), "Measured bandwidth from host to device, GB/s")
            .marks(&[KeepsBits, PerRank]),
        d2h_gbps: Option<f64> = optional(Kind::Real(Range::Positive), ("25.0", ""), "Measured bandwidth from device to host, GB/s")
            .marks(&[KeepsBits, PerRank]),
        both_ways_gbps: Option<f64> = optional(Kind::Real(Range::Positive), ("40.0", ""),
            "Measured bandwidth of both at a time, added up, GB/s").marks(&[KeepsBits, PerRank]),
        disk_gbps: Option<f64> = optional(Kind::Real(Range::Positive), ("6.5", ""),
            "Measured bandwidth of the disk of offloaded states, reads or writes, GB/s: what `trainer doctor --path DIR` says")
            .marks(&[KeepsBits, PerRank]),
        link_gbps: Option<f64> = optional(Kind::Real(Range::Positive), ("450.0", ""),
            "Measured bandwidth of a rank's link to the others, each way, GB/s: what `trainer doctor` says under a launcher")
            .marks(&[KeepsBits, PerRank]),
        memory_gbps: Option<f64> = optional(Kind::Real(Range::Positive), ("3000.0", ""),
            "Bandwidth of the device's memory, reads and writes together, GB/s").marks(&[KeepsBits, PerRank]),
        peak_tflops: Option<f64> = optional(Kind::Real(Range::Positive), ("989.0", ""),
            "Peak rate of matrix products, TFLOP/s; utilisation (mfu) is relative to it").marks(&[KeepsBits, PerRank]),
        algorithms: Option<PathBuf> = optional(Kind::Text, ("\"algorithms.json\"", "what `trainer tune` keeps for the GPU, if it does, else heuristic"),
            "File of the algorithms that products take on cuda, as `trainer tune` writes it")
            .details("heuristic: cuBLASLt's first choice. Other algorithms may change bits, so a run writes down which it took.")
            .marks(&[ComparedApart, PerRank]),
    }

    /// `[collectives]`
    collectives: CollectivesConfig {
        engine: RankEngine = key(Kind::Choice(RankEngine::NAMES), "\"auto\"", "What moves bytes between ranks")
            .details("auto is NCCL between GPUs and MPI between processors; alone makes a process a group of its own, whatever \
                      launched it. Never changes results.").marks(&[KeepsBits]),
        zero: Option<Zero> = optional(Kind::WholeUpTo(0, 3), ("1", "1 under a launcher; without one there is no group"),
            "What ranks divide (ZeRO): 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too")
            .details("Never changes results. Without a launcher, a group of one, whose bits many ranks have too.")
            .flag("--zero", "0|1|2|3", RANKS).marks(&[KeepsBits]),
        bucket_size: Size = key(Kind::Size, "\"128MiB\"", "Most bytes that a reduction receives at a time, over all ranks")
            .details("Never changes results.")
            .flag("--bucket-size", "SIZE", RANKS).marks(&[KeepsBits]).needs(need::RANKS),
        reduce: Reduce = key(Kind::Choice(Reduce::NAMES), "\"micro-batch\"", "When gradients are added up over ranks")
            .details("micro-batch continues one sum, whose bits do not depend on the number of ranks; step adds up a rank's own first, \
                      for stages 0 and 1: it sends less, with other bits.")
            .flag("--reduce", "micro-batch|step", RANKS).marks(&[ComparedApart]).needs(need::RANKS),
        overlap_grad_reduce: bool = key(Kind::Bool, "true", "Gradients are exchanged while the backward pass goes on")
            .details("Never changes results.")
            .toggle("--overlap-grad-reduce", RANKS).marks(&[KeepsBits]).needs(need::RANKS),
        overlap_param_gather: bool = key(Kind::Bool, "true", "Weights are gathered ahead of their use, beside the computation")
            .details("Never changes results.")
            .toggle("--overlap-param-gather", RANKS).marks(&[KeepsBits]).needs(need::GATHERED_WEIGHTS),
        reshard_after_forward: bool = key(Kind::Bool, "true",
            "Under --zero 3, gathered weights go after the forward pass and are gathered again for the backward pass")
            .details("false keeps them: less is sent, and all weights are there at the peak. Never changes results.")
            .toggle("--reshard-after-forward", RANKS).marks(&[KeepsBits]).needs(need::DIVIDED_WEIGHTS),
        shard_group: Option<usize> = optional(Kind::Whole(2), ("8", "all ranks"),
            "Under --zero 3, neighbouring ranks that have all weights together, such as those of a machine")
            .details("Units are then gathered within a group. Gradients and optimizer states are divided among all ranks as before. Never \
                      changes results.")
            .flag("--shard-group", "N", RANKS).marks(&[KeepsBits]).needs(need::DIVIDED_WEIGHTS),
        timeout_s: u64 = key(Kind::WholeUpTo(1, 1 << 31), "600", "Seconds after which a run ends whose other ranks do not answer")
            .marks(&[KeepsBits]).needs(need::RANKS),
    }

    /// `[parallel]`
    parallel: ParallelConfig {
        context: usize = key(Kind::Whole(1), "1", "Ranks that share each sequence, each with a part of its tokens (context parallelism)")
            .details("In attention each has a part of the heads, of whole sequences. A part counts as a micro-batch, so the bits are \
                      those of any number of ranks at equal parallel.context_parts.")
            .flag("--context-parallel-size", "N", RANKS).alias("--cp").marks(&[ComparedApart]),
        context_parts: Option<usize> = optional(Kind::Whole(1), ("4", "as many as parallel.context"),
            "Equal parts of each sequence, a multiple of parallel.context: each rank has several neighbouring ones, one after the other")
            .details("At equal parts, loss, norm and weights have the same bits for every parallel.context that divides them, also on one \
                      process.")
            .flag("--context-parts", "N", RANKS).marks(&[ComparedApart]),
        pipeline: usize = key(Kind::Whole(1), "1", "Stages of the pipeline, each with some neighbouring blocks of the model (pipeline parallelism)")
            .details("Ranks divide into this many stages: the first ranks are the first stage. The bits are those of one stage.")
            .flag("--pipeline-model-parallel-size", "N", RANKS).alias("--pp").marks(&[KeepsBits]),
        schedule: PipelineSchedule = key(Kind::Choice(PipelineSchedule::NAMES), "\"1f1b\"", "In which order the stages of a pipeline work")
            .details("gpipe: all forward passes of a step, then all backward passes; 1f1b: one of each in turn, so that fewer micro-batches \
                      are under way; interleaved: the same with several virtual stages (runs of blocks) to a stage, which wait less, send more \
                      and hold more; batch.accum is a multiple of parallel.pipeline then; zb-h1: as 1f1b, but gradients of matrices are deferred to \
                      where a stage would wait, and keep their inputs until then. The bits are the same.")
            .flag("--pipeline-schedule", "NAME", RANKS).marks(&[KeepsBits]).needs(need::PIPELINE),
        virtual_stage_layers: Option<usize> = optional(Kind::Whole(1), ("4", "two virtual stages to a stage, of about the same FLOPs"),
            "Blocks of each virtual stage under parallel.schedule = \"interleaved\"")
            .flag("--num-layers-per-virtual-pipeline-stage", "N", RANKS).marks(&[KeepsBits]).needs(need::INTERLEAVED),
        pipeline_layout: Option<Vec<usize>> = optional(Kind::Wholes, ("[10, 11, 11]", "stages have about the same FLOPs"),
            "Blocks of each stage of the pipeline, in order")
            .details("Under interleaved, of each virtual stage: the first of every stage, then the second of every stage.")
            .flag("--pipeline-layout", "[N,N,...]", RANKS).marks(&[KeepsBits]).needs(need::PIPELINE),
    }

    /// `[log]`
    log: LogConfig {
        every: usize = key(Kind::Whole(1), "10", "Steps between two lines of progress; metrics.jsonl has every step").marks(&[KeepsBits]),
        tensorboard: bool = key(Kind::Bool, "false", "Event files for TensorBoard are written into the run directory")
            .switch("--tensorboard", (true, "Write event files for TensorBoard"), Some(OUTPUT)).marks(&[KeepsBits]),
        sample_every: Option<usize> = optional(Kind::Whole(1), ("100", ""), "Steps between two samples of the model's own text")
            .flag("--sample-every", "N", OUTPUT).marks(&[KeepsBits]),
        sample_prompt: String = key(Kind::Text, "\"The \"", "What a sample begins with")
            .details("The rest is drawn at temperature 0.8 from the 40 likeliest tokens.").marks(&[KeepsBits]).needs(need::SAMPLES),
        sample_tokens: usize = key(Kind::Whole(1), "64", "Tokens of a sample, at most").marks(&[KeepsBits]).needs(need::SAMPLES),
        trace: bool = key(Kind::Bool, "false", "The last step's memory and queues are drawn; every operation is waited for").marks(&[KeepsBits]),
        nvtx: bool = key(Kind::Bool, "false", "On CUDA, phases and layers are NVTX ranges, which `nsys profile` draws")
            .details("Costs nothing worth measuring where no profiler is attached.").marks(&[KeepsBits]),
    }
}
