//! Names of other trainers, and their meaning here: for flags, and for keys of files.

use super::meaning::Meaning::{Key, Named, Of, Words};
use super::meaning::{Foreign, ForeignPart, beside, foreign, needless, not_built, plain};
use super::program::Program;

/// On a row whose `true` asks for what is always done here, or for nothing that has a price.
const ON: &[(&str, &str)] = &[("true|false", "")];

/// Kinds of optimizers, in the words of Hugging Face, torchtitan and DeepSpeed.
const OPTIMIZERS: &[(&str, &str)] = &[
    (
        "adamw|adam|fusedadam|adamw-hf|adamw-torch|adamw-torch-fused|adamw-apex-fused",
        "",
    ),
    ("adamw-8bit|adamw-bnb-8bit", "optim.state_dtype=8bit"),
    ("paged-adamw|paged-adamw-32bit", "~offload.optimizer=pinned"),
    (
        "paged-adamw-8bit",
        "~optim.state_dtype=8bit offload.optimizer=pinned",
    ),
    ("adafactor", "optim.kind=adafactor"),
    ("muon", "optim.kind=muon"),
];

const SCHEDULES: &[(&str, &str)] = &[
    ("linear", "lr.schedule=linear"),
    ("cosine|cosine-with-min-lr", "lr.schedule=cosine"),
    ("constant|constant-with-warmup", "lr.schedule=constant"),
    ("wsd|warmup-stable-decay", "lr.schedule=wsd"),
];

const DEEPSPEED_SCHEDULES: &[(&str, &str)] = &[
    ("warmuplr", "~lr.schedule=constant"),
    ("warmupdecaylr", "~lr.schedule=linear"),
    ("warmupcosinelr", "~lr.schedule=cosine"),
];

const RECOMPUTE: &[(&str, &str)] = &[
    ("true|full", "recompute.spec=full"),
    ("false|none", "recompute.spec=none"),
    ("selective", "recompute.spec=layernorm,mlp"),
    (
        "offload|unsloth",
        "recompute.spec=full offload.activations=block_input",
    ),
];

const ATTENTION: &[(&str, &str)] = &[
    (
        "true|flash|fused|fa2|flash-attention-2|flash-attention-3|sdpa",
        "attention.backend=flash",
    ),
    ("eager|unfused", "attention.backend=eager"),
    ("false|auto", ""),
];

const TYPES: &[(&str, &str)] = &[
    ("bfloat16|bf16", "train.dtype=bf16"),
    ("float32|fp32", "train.dtype=f32"),
    ("auto", ""),
];

/// Formats of FP8: Megatron's `hybrid` has gradients in e5m2.
const FP8: &[(&str, &str)] = &[
    ("hybrid|true", "~fp8.recipe=tensor"),
    ("e4m3", "~fp8.recipe=tensor fp8.gradients=e4m3"),
    ("none|null|false", ""),
];

const STATES: &[(&str, &str)] = &[
    ("fp32|float32", ""),
    ("bf16|bfloat16", "optim.state_dtype=bf16"),
];

const GRADIENTS: &[(&str, &str)] = &[
    ("fp32|float32|torch.float32", "optim.grad_dtype=f32"),
    ("bf16|bfloat16|torch.bfloat16", "optim.grad_dtype=bf16"),
];

const HOST: &[(&str, &str)] = &[("true|cpu", "offload.optimizer=pinned"), ("false|none", "")];

/// The row of a flag. `learning-rate` and `lr`, `gradient` and `grad` are the same word in it.
pub(crate) fn find(flag: &str) -> Option<&'static Foreign> {
    let short = |name: &str| {
        let name = name.replace("learning-rate", "lr");
        name.replace("gradient", "grad")
    };
    let name = plain(flag);
    let is_it = |one: &&str| short(one) == short(&name);
    let in_short = || FOREIGN.iter().find(|row| row.names.iter().any(is_it));
    row_of(&[&name]).or_else(in_short)
}

/// The row of a file's key: of its whole name, or of what is left of it within a section of the program's.
pub(super) fn find_key(program: Program, name: &str) -> Option<&'static Foreign> {
    let name = plain(name);
    if let Some(inside) = name.strip_prefix("deepspeed.") {
        return find_key(Program::DeepSpeed, inside);
    }
    let sections = program.sections().iter();
    let within = sections.filter_map(|section| name.strip_prefix(section)?.strip_prefix('.'));
    match within.min_by_key(|rest| rest.len()) {
        Some(rest) => row_of(&[&name, rest]),
        None => row_of(&[&name]),
    }
}

/// The row that has one of these names, or else that covers one.
fn row_of(names: &[&str]) -> Option<&'static Foreign> {
    let called = |name: &&str| FOREIGN.iter().find(|row| row.is_called(name));
    let covers = |name: &&str| FOREIGN.iter().find(|row| row.covers(name));
    let both = names.iter().map(called).chain(names.iter().map(covers));
    both.flatten().next()
}

/// Every name that this trainer knows of another. `docs/guides/coming-from.md` lists those that people type, and a test holds its
/// rows to these.
#[rustfmt::skip]
pub(super) const FOREIGN: &[Foreign] = &[
    // Batch, length and steps.
    foreign(&["batch-size", "micro-batch-size", "per-device-train-batch-size", "train-micro-batch-size-per-gpu", "local-batch-size"], "--micro-batch B", Key("batch.micro")),
    foreign(&["global-batch-size", "train-batch-size"], "--micro-batch B --accum A: a step has B x A sequences on each rank, or on each group of --cp ranks", Of(ForeignPart::GlobalBatch)),
    foreign(&["gradient-accumulation-steps", "grad-accumulation", "grad-accum"], "--accum A", Key("batch.accum")),
    foreign(&["max-steps", "train-iters", "max-iters", "training-steps", "num-iterations", "training.steps"], "--steps N", Of(ForeignPart::Steps)),
    foreign(&["num-train-epochs", "num-epochs", "max-epochs"], "--epochs N", Key("train.epochs")),
    not_built(&["warmup-min-lr", "warmup-max-lr", "warmup-type", "decay-ratio", "decoupled-lr", "decoupled-min-lr", "warmup-min-ratio"], "--lr X, --schedule and --warmup say how the rate goes"),
    not_built(&["train-samples", "lr-decay-samples", "lr-warmup-samples"], "--steps N, --set lr.decay_steps=N, --warmup N: samples divided by the sequences of a step"),
    foreign(&["seq-length", "seq-len", "sequence-length", "sequence-len", "max-seq-length", "max-seq-len", "max-length", "block-size", "cutoff-len"], "--seq S", Key("data.seq")),
    foreign(&["seed"], "--seed N", Key("train.seed")),
    // The optimizer.
    foreign(&["learning-rate", "lr"], "--lr X", Key("lr.peak")),
    foreign(&["min-lr"], "--set lr.min_ratio=X: a fraction of --lr", Of(ForeignPart::MinLr)),
    foreign(&["min-lr-factor", "min-lr-rate", "cosine-min-lr-ratio", "cos-min-ratio"], "--set lr.min_ratio=X", Key("lr.min_ratio")),
    foreign(&["lr-scheduler-type", "lr-scheduler", "lr-schedule", "lr-decay-style", "lr-scheduler.decay-type"], "--schedule constant|linear|cosine|wsd", Words(SCHEDULES)),
    foreign(&["scheduler.type"], "--schedule constant|linear|cosine; DeepSpeed warms up by a logarithm unless warmup_type is linear, and its cosine ends at cos_min_ratio, 0.0001 by itself", Words(DEEPSPEED_SCHEDULES)),
    foreign(&["lr-decay-iters", "total-num-steps"], "--set lr.decay_steps=N", Key("lr.decay_steps")),
    foreign(&["warmup-steps", "num-warmup-steps", "lr-warmup-steps", "lr-warmup-iters", "warmup-iters", "warmup-num-steps"], "--warmup N", Of(ForeignPart::StepCount("lr.warmup_steps"))),
    foreign(&["warmup-ratio", "lr-warmup-fraction"], "--warmup N: a number of steps, not a share", Of(ForeignPart::WarmupShare)),
    foreign(&["max-grad-norm", "clip-grad", "grad-clip", "gradient-clipping", "max-norm"], "--clip NORM", Of(ForeignPart::Clip)),
    foreign(&["adam-beta1", "beta1"], "--set optim.beta1=X", Key("optim.beta1")),
    foreign(&["adam-beta2", "beta2"], "--set optim.beta2=X", Key("optim.beta2")),
    foreign(&["adam-eps", "adam-epsilon", "eps"], "--set optim.eps=X", Key("optim.eps")),
    foreign(&["betas"], "--set optim.beta1=X, optim.beta2=X", Of(ForeignPart::Betas)),
    foreign(&["weight-decay"], "--weight-decay X", Key("optim.weight_decay")),
    foreign(&["optim", "optimizer", "optimizer.type", "optimizer.name"], "--optimizer adamw|adamw8bit|muon|adafactor; --offload-optimizer pinned keeps all states on the host, where paged ones stay on the device until memory is short", Words(OPTIMIZERS)),
    foreign(&["exp-avg-dtype", "exp-avg-sq-dtype"], "--state-dtype f32|bf16|8bit, for both moments", Words(STATES)),
    foreign(&["main-grads-dtype", "grad-accum-dtype", "communication-data-type", "mixed-precision-reduce"], "--grad-dtype f32|bf16", Words(GRADIENTS)),
    foreign(&["grad-reduce-in-fp32", "accumulate-allreduce-grads-in-fp32"], "--grad-dtype f32", Words(&[("true", "optim.grad_dtype=f32"), ("false", "optim.grad_dtype=bf16")])),
    foreign(&["grad-reduce-in-bf16"], "--grad-dtype bf16", Words(&[("true", "optim.grad_dtype=bf16"), ("false", "")])),
    foreign(&["use-precision-aware-optimizer", "store-param-remainders"], "--master bf16-split", Words(&[("true", "optim.master=bf16-split"), ("false", "")])),
    foreign(&["bf16-master-weights-and-grads", "bf16-master-weights-and-gradients"], "--master none --grad-dtype bf16", Words(&[("true", "optim.master=none optim.grad_dtype=bf16"), ("false", "")])),
    foreign(&["bf16-optimizer-states"], "--state-dtype bf16", Words(&[("true", "optim.state_dtype=bf16"), ("false", "")])),
    foreign(&["optimizer.implementation"], "--state-dtype bf16 for fused_opt_states_bf16", Words(&[("fused-opt-states-bf16", "optim.state_dtype=bf16"), ("fused|foreach|for-loop", "")])),
    foreign(&["pure-bf16"], "--master none --grad-dtype bf16 --state-dtype bf16", Words(&[("true", "train.dtype=bf16 optim.master=none optim.grad_dtype=bf16 optim.state_dtype=bf16"), ("false", "")])),
    // Types, recompute, attention, places.
    foreign(&["bf16"], "--dtype bf16", Words(&[("true|full|auto", "train.dtype=bf16"), ("false", "")])),
    foreign(&["bf16.enabled"], "--dtype bf16", Words(&[("true", "train.dtype=bf16"), ("false", "")])),
    foreign(&["mixed-precision"], "--dtype bf16", Named),
    foreign(&["fp32"], "--dtype f32", Words(&[("true", "train.dtype=f32"), ("false", "")])),
    foreign(&["torch-dtype", "dtype", "mixed-precision-param", "params-dtype"], "--dtype f32|bf16", Words(TYPES)),
    foreign(&["training.dtype"], "--master none --grad-dtype bf16 --state-dtype bf16 for bfloat16", Words(&[("float32", ""), ("bfloat16", "optim.master=none optim.grad_dtype=bf16 optim.state_dtype=bf16")])),
    foreign(&["fp16", "fp16.enabled"], "--dtype bf16: f16 is not built, since bf16 needs no loss scaling", Words(&[("true", "~train.dtype=bf16"), ("false", "")])),
    foreign(&["fp8", "fp8-format"], "--fp8 tensor, with fp8.gradients=e4m3 for e4m3: scales are each tensor's own, powers of two, without a history", Words(FP8)),
    foreign(&["fp8-recipe"], "--fp8 tensor, which has one scale a tensor, of its values at hand", Words(&[("tensorwise", "")])),
    not_built(&["fp8-param", "fp8-param-gather", "enable-fsdp-float8-all-gather", "fp8-enable-fsdp-float8-all-gather"], "--set fp8.weights=step, under --fp8 tensor: codes are kept for a step, and with --zero 3 sent instead of weights from the second use on"),
    needless(&["fp8-amax-history-len", "fp8-amax-compute-algo", "fp8-margin", "fp8-interval"], "a scale follows from the values at hand, without a history"),
    not_built(&["fp8-*", "float8.*", "quantize.*"], "--fp8 tensor: products of the blocks in FP8; fp8.except names matrices that stay in bf16"),
    foreign(&["gradient-checkpointing", "activation-checkpointing", "activation-checkpoint.mode", "fsdp-activation-checkpointing", "enable-activation-checkpointing"], "--recompute full", Words(RECOMPUTE)),
    foreign(&["disable-gradient-checkpointing"], "--recompute full|none", Words(&[("false", "recompute.spec=full"), ("true", "recompute.spec=none")])),
    foreign(&["recompute-activations", "checkpoint-activations"], "--recompute core_attn", Words(&[("true", "recompute.spec=core_attn"), ("false", "")])),
    foreign(&["recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules"], "the same flag, or --recompute SPEC", Of(ForeignPart::Recompute)),
    foreign(&["attn-implementation", "use-flash-attn", "flash-attention", "flash-attn", "attention-backend"], "--attention auto|eager|flash", Words(ATTENTION)),
    foreign(&["optimizer-cpu-offload", "cpu-offload", "offload-optimizer-device", "offload-optimizer.device"], "--offload-optimizer pinned", Words(HOST)),
    not_built(&["partition-activations", "activation-checkpointing.partition-activations"], "--cp N: each of N ranks has a part of every sequence's activations"),
    not_built(&["cpu-checkpointing", "activation-checkpointing.cpu-checkpointing"], "--recompute full --offload-activations block_input"),
    needless(&["activation-checkpointing.*"], "--recompute says what is recomputed; its buffers have their places in the plan"),
    foreign(&["offload-param.device", "offload-param-device", "enable-cpu-offload", "fsdp-offload-params", "offload-params"], "--offload-parameters pinned", Words(&[("cpu", "offload.parameters=pinned"), ("true", "offload.parameters=pinned offload.gradients=pinned offload.optimizer=pinned"), ("none", ""), ("false", "")])),
    foreign(&["optimizer-offload-fraction", "offload-optimizer.ratio"], "--set offload.fraction=X", Key("offload.fraction")),
    not_built(&["nvme-path", "offload-optimizer.nvme-path", "offload-optimizer-nvme-path", "offload-param.nvme-path", "offload-param-nvme-path"], "--offload-optimizer DIR, with the folder"),
    not_built(&["cpu-offloading", "cpu-offloading-num-layers", "fine-grained-activation-offloading", "offload-modules", "activation-offloading"], "--offload-activations LABELS, by which activations wait on the host, or recompute.layers for those of some layers"),
    not_built(&["activation-checkpointing-kwargs", "activation-checkpointing-kwargs.*"], "--recompute full --offload-activations block_input, if they are offloaded"),
    not_built(&["activation-checkpoint.memory-budget"], "--recompute auto --memory-budget SIZE: bytes of the peak, where theirs is a share of what is saved"),
    needless(&["overlap-cpu-optimizer-d2h-h2d"], "offload.window is forward by default, which overlaps"),
    needless(&["sub-group-size"], "offload.slab_mib and offload.buffer_count say how large the chunks of an update are, and how many"),
    // The model.
    foreign(&["model", "model-name", "model-name-or-path", "pretrained-model-name-or-path", "pretrained-checkpoint", "base-model", "model.name", "model.flavor"], "--init-from DIR, a model in Hugging Face layout; or --config NAME to begin anew", Of(ForeignPart::Model)),
    foreign(&["model-type", "architectures"], "--init-from DIR, whose config.json says the family", Of(ForeignPart::Family)),
    foreign(&["hidden-act", "activation-function"], "--init-from DIR, whose config.json says it; or --set model.activation=NAME", Of(ForeignPart::Family)),
    foreign(&["num-layers", "num-hidden-layers", "n-layer"], "--config NAME, or --set model.layers=N", Key("model.layers")),
    foreign(&["hidden-size", "n-embd"], "--config NAME, or --set model.hidden=N", Key("model.hidden")),
    foreign(&["num-attention-heads", "n-head"], "--config NAME, or --set model.heads=N", Key("model.heads")),
    foreign(&["num-query-groups", "num-key-value-heads"], "--config NAME, or --set model.kv_heads=N", Key("model.kv_heads")),
    foreign(&["kv-channels", "head-dim"], "--config NAME, or --set model.head_dim=N", Key("model.head_dim")),
    foreign(&["ffn-hidden-size", "intermediate-size", "n-inner"], "--config NAME, or --set model.ffn=N", Key("model.ffn")),
    foreign(&["vocab-size", "padded-vocab-size"], "--config NAME, or --set model.vocab=N", Key("model.vocab")),
    foreign(&["tie-word-embeddings", "share-embeddings-and-output-weights"], "--set model.tie_embeddings=true", Key("model.tie_embeddings")),
    foreign(&["untie-embeddings-and-output-weights"], "--set model.tie_embeddings=false", Words(&[("true", "model.tie_embeddings=false"), ("false", "model.tie_embeddings=true")])),
    foreign(&["rms-norm-eps", "norm-epsilon", "layernorm-epsilon", "layer-norm-epsilon"], "--set model.norm_eps=X", Key("model.norm_eps")),
    foreign(&["normalization"], "--set model.norm=rms|layer", Words(&[("rmsnorm", "model.norm=rms"), ("layernorm", "model.norm=layer")])),
    foreign(&["swiglu", "gated-linear-unit"], "--set model.activation=swiglu", Words(&[("true", "model.activation=swiglu"), ("false", "model.activation=gelu_tanh")])),
    foreign(&["disable-bias-linear"], "--set model.biases=false", Words(&[("true", "model.biases=false"), ("false", "model.biases=true")])),
    foreign(&["add-bias-linear"], "--set model.biases=true", Key("model.biases")),
    foreign(&["add-qkv-bias"], "--set model.qkv_bias=true", Key("model.qkv_bias")),
    foreign(&["attention-bias"], "--set model.qkv_bias=true, model.o_bias=true", Words(&[("true", "model.qkv_bias=true model.o_bias=true"), ("false", "")])),
    foreign(&["mlp-bias"], "--set model.mlp_bias=true", Key("model.mlp_bias")),
    foreign(&["qk-layernorm"], "--set model.qk_norm=true", Key("model.qk_norm")),
    foreign(&["position-embedding-type"], "--set model.positions=rotary|learned", Words(&[("rope", "model.positions=rotary"), ("learned-absolute", "model.positions=learned")])),
    foreign(&["rotary-base", "rope-theta"], "--set model.rope_theta=X", Key("model.rope_theta")),
    foreign(&["init-method-std", "initializer-range"], "--set model.init_std=X", Key("model.init_std")),
    foreign(&["hidden-dropout", "attention-dropout", "resid-pdrop", "embd-pdrop", "attn-pdrop"], "--set model.dropout=X: one rate for all", Of(ForeignPart::Dropout)),
    foreign(&["max-position-embeddings", "n-positions", "n-ctx"], "--set model.max_positions=N, for learned positions alone", Of(ForeignPart::Positions)),
    foreign(&["sliding-window"], "--set model.sliding_window=N", Key("model.sliding_window")),
    not_built(&["window-size"], "--set model.sliding_window=N: theirs does not count a query's own key, so N is one more"),
    foreign(&["use-sliding-window", "max-window-layers", "layer-types"], "--set model.full_attention_layers=[...]", Of(ForeignPart::Family)),
    foreign(&["rope-scaling", "rope-parameters", "rope-scaling.*", "rope-parameters.*"], "--set model.rope_scaling.kind=llama3|yarn|linear, and what it needs", Of(ForeignPart::Family)),
    foreign(&["num-experts", "n-routed-experts", "num-local-experts"], "--config NAME, or [model.experts]", Key("model.experts.count")),
    foreign(&["moe-router-topk", "num-experts-per-tok"], "--config NAME, or [model.experts]", Key("model.experts.chosen")),
    foreign(&["moe-ffn-hidden-size", "moe-intermediate-size"], "--config NAME, or [model.experts]", Key("model.experts.ffn")),
    foreign(&["moe-shared-expert-intermediate-size", "shared-expert-intermediate-size"], "--config NAME, or [model.experts]", Key("model.experts.shared_ffn")),
    foreign(&["moe-layer-freq"], "--config NAME, or [model.experts]", Of(ForeignPart::DenseLayers)),
    foreign(&["n-shared-experts", "first-k-dense-replace", "decoder-sparse-step", "mlp-only-layers", "norm-topk-prob", "n-group", "topk-group", "routed-scaling-factor", "scoring-func", "topk-method"], "--config NAME, or [model.experts]", Of(ForeignPart::Family)),
    foreign(&["multi-latent-attention"], "--config NAME, a preset or a TOML file with [model.latent]", Words(ON)),
    foreign(&["kv-lora-rank"], "--set model.latent.kv=N", Key("model.latent.kv")),
    foreign(&["q-lora-rank"], "--set model.latent.q=N", Key("model.latent.q")),
    foreign(&["qk-rope-head-dim", "qk-pos-emb-head-dim"], "--set model.latent.rotary_dim=N", Key("model.latent.rotary_dim")),
    foreign(&["v-head-dim"], "--set model.latent.v_head_dim=N", Key("model.latent.v_head_dim")),
    foreign(&["qk-nope-head-dim", "qk-head-dim"], "--set model.head_dim=N: with the columns that are turned", Of(ForeignPart::Family)),
    foreign(&["moe-aux-loss-coeff", "router-aux-loss-coef"], "--set model.router_aux=X", Key("model.router_aux")),
    foreign(&["moe-router-load-balancing-type"], "--set model.router_aux_kind=pooled, layer or sequence", Words(&[("aux-loss", "model.router_aux_kind=layer"), ("seq-aux-loss", "model.router_aux_kind=sequence"), ("none", "")])),
    foreign(&["moe-z-loss-coeff"], "--set model.router_z_loss=X", Key("model.router_z_loss")),
    foreign(&["moe-router-bias-update-rate"], "--set optim.router_bias_rate=X", Key("optim.router_bias_rate")),
    not_built(&["moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity", "moe-token-drop-policy"], "no token is dropped, and the plan is exact all the same"),
    not_built(&["moe-input-jitter-eps"], "routers read what the layer reads"),
    needless(&["moe-grouped-gemm", "moe-permute-fusion", "moe-token-dispatcher-type"], "there is one way, and it is grouped"),
    foreign(&["rotary-percent", "partial-rotary-factor"], "--set model.rotary_share=X, in a family that has it", Words(&[("1.0", ""), ("1", ""), ("0.5", "model.rotary_share=0.5"), ("0.75", "model.rotary_share=0.75")])),
    not_built(&["apply-layernorm-1p", "num-nextn-predict-layers", "mtp-num-layers"], "the model is planned and trained without it"),
    // Adapters, other objectives.
    foreign(&["lora-r", "lora-rank", "peft-config.r"], "--lora RANK", Key("lora.rank")),
    foreign(&["use-peft"], "--lora RANK", Words(ON)),
    foreign(&["adapter", "finetuning-type", "peft-config.name"], "--lora RANK, or nothing to train all weights", Words(&[("lora|qlora", ""), ("full", "")])),
    foreign(&["lora-alpha"], "--set lora.alpha=X", Key("lora.alpha")),
    foreign(&["lora-dropout"], "--set lora.dropout=X", Key("lora.dropout")),
    foreign(&["lora-target-modules", "target-modules", "lora-target"], "--set lora.targets=LIST", Of(ForeignPart::Targets)),
    foreign(&["lora-target-linear"], "--set lora.targets=[\"all-linear\"], beside those that lora_target_modules names", Of(ForeignPart::Targets)),
    foreign(&["use-rslora", "peft-use-rslora"], "--set lora.rslora=true", Key("lora.rslora")),
    foreign(&["loraplus-lr-ratio"], "--set lora.b_lr_ratio=X", Key("lora.b_lr_ratio")),
    foreign(&["load-in-4bit"], "--base-dtype nf4, with --lora RANK", Words(&[("true", "lora.base_dtype=nf4"), ("false", "")])),
    foreign(&["load-in-8bit"], "--base-dtype 8bit, with --lora RANK: block-wise codes, not those of LLM.int8", Words(&[("true", "~lora.base_dtype=8bit"), ("false", "")])),
    foreign(&["quantization-bit"], "--base-dtype nf4 or 8bit, with --lora RANK; 8bit has block-wise codes, not those of LLM.int8", Words(&[("4", "lora.base_dtype=nf4"), ("8", "~lora.base_dtype=8bit")])),
    foreign(&["quantization-method", "quant-config.name"], "--base-dtype nf4 or 8bit, with --lora RANK: as bitsandbytes stores weights", Words(&[("bnb|bitsandbytes", "")])),
    not_built(&["use-dora", "lora-modules-to-save", "peft-use-dora", "peft-config.modules-to-save", "neftune-noise-alpha", "relora-steps"], "--lora RANK trains plain adapters, or --set train.freeze=[...] the rest"),
    foreign(&["rl"], "--objective dpo", Words(&[("dpo", "train.objective=dpo data.packing=pad")])),
    foreign(&["loss-type", "pref-loss"], "--objective dpo has the sigmoid loss alone (dpo.loss)", Words(&[("sigmoid", "")])),
    foreign(&["beta", "pref-beta", "rl-beta", "dpo-beta"], "--set dpo.beta=X, under --objective dpo", Key("dpo.beta")),
    foreign(&["stage"], "--objective dpo for preferences; `trainer prepare` and --data for pretraining and instructions", Words(&[("pt", ""), ("sft", ""), ("dpo", "train.objective=dpo data.packing=pad")])),
    // Several devices.
    foreign(&["zero-stage", "zero-optimization.stage"], "--zero 0|1|2|3, under mpirun, srun or torchrun", Key("collectives.zero")),
    foreign(&["distributed-type", "dist-config.name", "fsdp-version"], "--zero 3 for FSDP, under mpirun, srun or torchrun", Of(ForeignPart::Distribution)),
    foreign(&["deepspeed", "fsdp", "deepspeed-config-file", "dist-config.config-file"], "--zero 0|1|2|3, under mpirun, srun or torchrun", Of(ForeignPart::Division)),
    foreign(&["data-parallel-sharding-strategy", "fsdp-sharding-strategy"], "--zero 3 for FULL_SHARD, with --reshard-after-forward=false for SHARD_GRAD_OP, --zero 0 for NO_SHARD; optim_grads is --zero 2, optim --zero 1; for HYBRID_SHARD see --shard-group N", Words(&[("full-shard|1", "collectives.zero=3"), ("shard-grad-op|2", "collectives.zero=3 collectives.reshard_after_forward=false"), ("no-shard|3", "collectives.zero=0"), ("optim-grads-params", "collectives.zero=3"), ("optim-grads", "collectives.zero=2"), ("optim", "collectives.zero=1")])),
    foreign(&["use-distributed-optimizer"], "--zero 1, under mpirun, srun or torchrun", Words(&[("true", "collectives.zero=1"), ("false", "collectives.zero=0")])),
    foreign(&["data-parallel-shard-degree", "parallelism-config-dp-shard-size"], "--zero 3, over all ranks", Of(ForeignPart::Shard)),
    foreign(&["zero-hpz-partition-size"], "--shard-group N, under --zero 3", Of(ForeignPart::ShardGroup)),
    foreign(&["nproc-per-node", "nnodes", "num-processes"], "plan --ranks N; the launcher starts them", Of(ForeignPart::Devices)),
    foreign(&["overlap-grad-reduce", "overlap-comm"], "the same flag: --overlap-grad-reduce", Key("collectives.overlap_grad_reduce")),
    foreign(&["overlap-param-gather"], "the same flag", Key("collectives.overlap_param_gather")),
    foreign(&["reduce-bucket-size", "ddp-bucket-size"], "--bucket-size SIZE, in bytes where theirs counts elements", Of(ForeignPart::Bucket)),
    not_built(&["bucket-cap-mb", "ddp-bucket-cap-mb"], "--bucket-size SIZE"),
    foreign(&["fsdp-reshard-after-forward", "reshard-after-forward"], "--reshard-after-forward=true|false", Words(&[("true", "collectives.reshard_after_forward=true"), ("false", "collectives.reshard_after_forward=false"), ("default", ""), ("always", ""), ("never", "collectives.reshard_after_forward=false"), ("full-shard", ""), ("shard-grad-op", "collectives.reshard_after_forward=false"), ("no-shard", "collectives.zero=0")])),
    not_built(&["expert-model-parallel-size", "expert-tensor-parallel-size", "expert-parallel-degree", "expert-tensor-parallel-degree"], "every rank computes all experts of its tokens; --zero 3 divides their weights among ranks"),
    foreign(&["context-parallel-size", "context-parallel-degree", "parallelism-config-cp-size"], "the same flag: --context-parallel-size, which divides heads in attention", Key("parallel.context")),
    not_built(&["tensor-model-parallel-size", "tensor-parallel-size", "tensor-parallel-degree", "parallelism-config-tp-size"], "--zero 3 divides weights, gradients and states among all ranks, and --cp N activations, with the same bits on any number of ranks; sums over parts of a product would have others"),
    not_built(&["sequence-parallel", "distribute-saved-activations"], "--cp N: each of N ranks has a part of every sequence's activations, in norms too"),
    foreign(&["pipeline-model-parallel-size", "pipeline-parallel-degree"], "the same flag: --pipeline-model-parallel-size", Key("parallel.pipeline")),
    foreign(&["num-layers-per-virtual-pipeline-stage"], "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage N", Of(ForeignPart::Stages)),
    not_built(&["pipeline-model-parallel-layout", "virtual-pipeline-model-parallel-size"], "--pipeline-layout has the blocks of each stage, or of each virtual stage under --pipeline-schedule interleaved; --num-layers-per-virtual-pipeline-stage N gives all of them N"),
    foreign(&["pipeline-parallel-schedule"], "--pipeline-schedule gpipe|1f1b|interleaved", Words(&[("gpipe", "parallel.schedule=gpipe"), ("1f1b", "parallel.schedule=1f1b"), ("interleaved1f1b", "parallel.schedule=interleaved")])),
    not_built(&["data-parallel-replicate-degree", "parallelism-config-dp-replicate-size"], "--zero 3 --shard-group N: weights once in each group of N ranks, gradients and states once among all ranks"),
    // Data, checkpoints and what is written.
    foreign(&["save-steps", "save-interval", "checkpoint-interval", "checkpoint.interval"], "--save-every N", Of(ForeignPart::StepCount("checkpoint.every"))),
    foreign(&["save-total-limit", "keep-latest-k"], "--keep-last K", Key("checkpoint.keep_last")),
    foreign(&["logging-steps", "log-interval", "log-freq"], "--set log.every=N", Of(ForeignPart::StepCount("log.every"))),
    foreign(&["distributed-timeout-minutes"], "--set collectives.timeout_s=N", Of(ForeignPart::Minutes)),
    foreign(&["ddp-timeout", "dist-timeout"], "--set collectives.timeout_s=N", Key("collectives.timeout_s")),
    beside(&["tokenizer", "tokenizer-name", "tokenizer-name-or-path", "tokenizer-model", "tokenizer-path", "tokenizer-type", "tokenizer-use-fast", "template", "chat-template", "special-tokens.*", "train-on-inputs", "train-on-prompt", "mask-history", "assistant-only-loss", "completion-only-loss", "dataset-kwargs.*", "tiktoken-pattern"], "trainer prepare TEXTS --tokenizer DIR --out data, then --data data: tokens are made before a run"),
    beside(&["dataset", "dataset-name", "dataset-path", "data-path", "train-file", "train-data-path", "input-bin", "datasets.*", "dataset-mixture.*", "mock-data", "split", "max-samples", "train-dataset"], "--data PATH: the plan does not depend on the text; `trainer prepare` makes its tokens"),
    beside(&["val-set-size", "val-size"], "trainer prepare TEXTS --validation SHARE keeps that share apart, for --eval-every N"),
    beside(&["group-by-length"], "--packing pad has documents of like length beside each other"),
    foreign(&["packing", "sample-packing", "neat-packing"], "--packing first-fit, or pad for false, beside --data of `trainer prepare`", Of(ForeignPart::Packing)),
    foreign(&["eval-sample-packing", "eval-packing"], "--packing says it of evaluations too", Of(ForeignPart::EvalPacking)),
    foreign(&["pad-to-sequence-len"], "with --packing concatenate and first-fit, rows have --seq tokens; with pad, lengths in steps", Words(&[("true", "")])),
    beside(&["validation-file", "valid-data-path", "val-data-path", "eval-dataset"], "--eval-data PATH"),
    beside(&["eval-steps", "eval-interval", "val-loss-every", "evals-per-epoch", "eval-iters", "eval-strategy", "evaluation-strategy", "do-eval", "per-device-eval-batch-size"], "--eval-every N, beside --eval-data PATH: then evaluations are planned"),
    beside(&["output-dir", "save", "save-dir", "checkpoint-dir", "dump-folder", "checkpoint.folder", "hub-model-id"], "--out DIR says where a run writes"),
    beside(&["load", "resume-from-checkpoint"], "--resume DIR|latest|auto goes on with a run, in --out RUN"),
    beside(&["report-to", "tensorboard-dir", "enable-tensorboard", "log-memory-to-tensorboard", "save-tb-folder", "logging-dir", "plot-loss"], "--tensorboard; metrics.jsonl and `trainer report` are always there"),
    beside(&["load-best-model-at-end"], "--keep-best, beside --eval-every N: that checkpoint is kept, and not loaded"),
    beside(&["save-strategy", "saves-per-epoch", "async-mode", "async-save", "enable-checkpoint", "ckpt-format"], "--save-every N says when; saving goes on beside the computation, unless --save-blocking"),
    needless(&["torch-compile", "compile", "torch-compile-backend", "compile.enable", "dynamo-config.*", "dynamo-backend"], "there is nothing to compile"),
    foreign(&["use-cpu"], "--device cpu", Words(&[("true", "train.device=cpu"), ("false", "")])),
    needless(&["compute-environment", "num-machines", "machine-rank", "main-process-ip", "main-process-port", "main-training-function", "rdzv-backend", "same-network", "enable-cpu-affinity", "gpu-ids", "downcast-bf16", "tpu-*", "deepspeed-multinode-launcher", "deepspeed-hostfile", "zero3-init-flag", "deepspeed-moe-layer-cls-names", "fork-launched"], "the launcher tells ranks of each other, and weights are never made whole first"),
    needless(&["autotuning.*", "auto-find-batch-size"], "`trainer plan --largest micro-batch` says what fits, without attempts"),
    needless(&["local-rank", "node-rank", "master-addr", "master-port", "ddp-backend", "ddp-find-unused-parameters"], "the launcher tells ranks of each other"),
    needless(&["dataloader-num-workers", "num-workers", "preprocessing-num-workers", "dataset-num-proc", "dataloader-pin-memory", "overwrite-cache", "dataset-prepared-path", "data-cache-path", "remove-unused-columns", "no-mmap-bin-files", "no-create-attention-mask-in-dataloader", "dataloader.*"], "data is read ahead by one thread, as tokens that are there already"),
    needless(&["gradient-checkpointing-kwargs.*", "preserve-rng-state"], "a replay has the same bits, whatever way"),
    needless(&["loss.num-chunks"], "memory.head_chunk is the tokens of a chunk, not the number of chunks"),
    needless(&["tf32", "liger-*", "cross-entropy-loss-fusion", "use-liger-kernel", "enable-liger-kernel", "xformers-attention", "use-unsloth", "tp-comm-overlap"], "which kernels compute is the trainer's affair; logits are never whole (memory.head_chunk)"),
    foreign(&["plugins"], "nothing for Liger and CutCrossEntropy, since logits are never whole (memory.head_chunk)", Of(ForeignPart::Plugins)),
    not_built(&["s2-attention", "shift-attn"], "every token attends to all before it, or to those in model.sliding_window"),
    needless(&["contiguous-gradients", "contiguous-memory-optimization", "round-robin-gradients", "allgather-partitions", "allgather-bucket-size", "reduce-scatter", "stage3-prefetch-bucket-size", "stage3-param-persistence-threshold", "stage3-max-live-parameters", "stage3-max-reuse-distance", "pin-memory", "no-pin-cpu-params", "memory-efficient-linear", "limit-all-gathers", "empty-unused-memory-level", "empty-cache-steps", "torch-empty-cache-steps"], "each buffer has its place in the plan, and there is no allocator to tame"),
    needless(&["zero-allow-untested-optimizer", "zero-force-ds-cpu-optimizer"], "every optimizer goes with every --zero and with offload"),
    needless(&["offload-optimizer.pin-memory", "offload-param.pin-memory", "offload-optimizer.buffer-count", "offload-optimizer.buffer-size", "offload-param.buffer-count", "offload-param.buffer-size"], "host memory of offload is always pinned, and offload.slab_mib and offload.buffer_count say how its buffers are cut"),
    foreign(&["gradient-predivide-factor"], "--grad-dtype f32, in which sums over ranks do not overflow", Words(&[("1|1.0", "")])),
    not_built(&["prescale-gradients"], "--grad-dtype f32, in which sums over ranks do not overflow"),
    needless(&["stage3-gather-16bit-weights-on-model-save", "stage3-gather-fp16-weights-on-model-save", "zero3-save-16bit-model", "save-safetensors", "save-only-model", "export-dtype", "model-weights-only", "last-save-model-only", "overwrite-output-dir", "push-to-hub", "hub-strategy"], "a checkpoint is a Hugging Face folder, or becomes one by `trainer export`"),
    needless(&["fsdp-config", "fsdp-*", "auto-wrap-policy", "transformer-layer-cls-to-wrap", "state-dict-type", "final-state-dict-type", "cpu-ram-efficient-loading", "lora-fan-in-fan-out"], "units are the blocks, and their layout is the trainer's affair"),
    beside(&["lora-model-dir"], "--lora-from DIR begins with adapters that are there"),
    needless(&["fp16.*", "loss-scale", "initial-loss-scale"], "bf16 needs no loss scaling"),
    needless(&["wandb-*", "mlflow-*", "comet-*", "wandb.*", "monitor-config.*", "comms-config.*", "comms-logger.*", "tensorboard.*", "wall-clock-breakdown", "steps-per-print", "dump-state", "log-level", "logging-strategy", "log-throughput", "run-name", "description", "log-on-each-node", "disable-tqdm", "print-config"], "metrics.jsonl has every step, for any tool"),
    beside(&["record-memory-history"], "--trace draws the memory of the last step"),
    needless(&["profile", "profile-step-start", "profile-step-end", "profiling.*", "profiling-config.*", "profiler.*", "flops-profiler.*"], "`trainer profile` times operations; --trace draws memory"),
    needless(&["do-train", "do-predict", "trust-remote-code", "strict", "debug", "use-mcore-models", "hub-private-repo", "model-revision", "cache-dir", "transformers-version", "eval-table-size", "manual-gc", "gc-freq", "deterministic-mode", "exit-duration-in-mins", "hf-assets-path", "label-names", "prediction-loss-only", "nccl-communicator-config-path"], "it changes neither the step nor its memory here"),
    not_built(&["early-stopping-patience"], "--keep-best, beside --eval-every N, keeps the best checkpoint; the run goes on to its end"),
    not_built(&["loss-watchdog-threshold", "loss-watchdog-patience"], "train.max_skipped ends a run whose loss or gradients are not finite; no threshold does"),
    foreign(&["calculate-per-token-loss"], "the loss is the mean over all tokens of a step", Words(&[("true", "")])),
    needless(&["use-cache", "bos-token-id", "eos-token-id", "pad-token-id", "pretraining-tp", "name-or-path", "id2label", "label2id", "auto-map", "quantization-config.*", "rope-interleave", "output-router-logits", "summary-*", "task-specific-params.*", "n-layers-unused", "ep-size", "aux-loss-alpha", "seq-aux"], "it is the model's own, and goes with its folder"),
    needless(&["selective-ac-option", "per-op-sac-force-recompute-mm-shapes-by-fqns", "early-stop", "recompute-layernorm"], "--recompute LABELS says what is recomputed"),
    needless(&["group-query-attention"], "model.kv_heads says how many"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::foreign::meaning::near;
    use clap::{Command, CommandFactory};
    use settings::dotted;
    use settings::keys::KEYS;
    use std::collections::BTreeSet;

    /// All flags of a command and those below it.
    fn flags(command: &Command, into: &mut BTreeSet<String>) {
        for argument in command.get_arguments() {
            let aliases = argument.get_visible_aliases().unwrap_or_default();
            let names = argument.get_long().into_iter().chain(aliases);
            into.extend(names.map(|name| format!("--{name}")));
        }
        for below in command.get_subcommands() {
            flags(below, into);
        }
    }

    #[test]
    fn answers_name_flags_and_keys_that_there_are() {
        let mut known = BTreeSet::new();
        flags(&Cli::command(), &mut known);
        let mut seen = BTreeSet::new();
        for row in FOREIGN {
            for name in row.names {
                assert!(seen.insert(*name), "{name} stands twice");
            }
            let words = row.ours.split([' ', ',', ';', ':', '=']);
            for flag in words.filter(|word| word.starts_with("--")) {
                assert!(known.contains(flag), "{flag} in {:?}", row.ours);
            }
        }
    }

    #[test]
    fn what_is_taken_over_is_a_value_of_a_key() {
        for row in FOREIGN {
            let sets = match row.meaning {
                Key(key) => {
                    assert!(dotted::find(key).is_some(), "{key}");
                    continue;
                }
                Words(words) => words,
                _ => continue,
            };
            let sets = sets.iter().map(|(_, sets)| near(sets).unwrap_or(sets));
            let sets = sets.flat_map(|sets| sets.split(' '));
            for set in sets.filter(|set| !set.is_empty()) {
                let (name, text) = set.split_once('=').unwrap();
                let kind = dotted::find(name).unwrap().kind;
                kind.check(name, &kind.parse(text), set).unwrap();
            }
        }
    }

    #[test]
    fn names_are_found_with_their_sections_or_not_at_all() {
        let ours = |program, name: &str| find_key(program, name).map(|row| row.names[0]);
        let bridge = |name| ours(Program::MegatronBridge, name);
        assert_eq!(bridge("model.seq_length"), bridge("seq-length"));
        assert_eq!(bridge("mixed_precision.fp8"), Some("fp8"));
        assert_eq!(bridge("validation.seq_length"), None);
        let deepspeed = |name| ours(Program::DeepSpeed, name);
        assert_eq!(deepspeed("zero_optimization.stage"), Some("zero-stage"));
        assert_eq!(deepspeed("optimizer.params.eps"), deepspeed("adam-eps"));
        assert_eq!(deepspeed("fp16.hysteresis"), Some("fp16.*"));
        assert_eq!(
            deepspeed("autotuning.arg_mappings.train_micro_batch_size_per_gpu"),
            deepspeed("autotuning.enabled")
        );
        let written_out = ours(Program::Transformers, "deepspeed.zero_optimization.stage");
        assert_eq!(written_out, Some("zero-stage"));
        let axolotl = |name| ours(Program::Axolotl, name);
        assert_eq!(axolotl("datasets[1].seed"), axolotl("dataset"));
        assert_eq!(axolotl("wandb_run_id"), Some("wandb-*"));
        assert_eq!(axolotl("diffusion.eps"), None);
        assert_eq!(axolotl("fsdp_config.new_key"), None);
        assert_eq!((axolotl("no_such_key"), axolotl("a.no_such")), (None, None));
    }

    /// Flags have many names, of which two are the same words.
    #[test]
    fn a_flag_is_found_by_its_long_and_its_short_words() {
        for (flag, ours) in [
            ("--learning-rate-scheduler", "--schedule"),
            ("--learning_rate_schedule", "--schedule"),
            ("--learning-rate-decay-style", "--schedule"),
            ("--learning-rate-warmup-steps", "--warmup"),
            ("--min-learning-rate", "lr.min_ratio"),
            ("--grad-accumulation-steps", "--accum"),
            ("--gradient-accum", "--accum"),
            ("--gradient-clip", "--clip"),
            ("--grad-checkpointing", "--recompute"),
        ] {
            let row = find(flag.trim_start_matches("--")).unwrap_or_else(|| panic!("{flag}"));
            assert!(row.ours.contains(ours), "{flag}: {}", row.ours);
        }
        assert!(find("learning").is_none());
    }

    /// The flags and keys of ours that a text names, each by its key if it has one.
    fn named(text: &str) -> BTreeSet<String> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c)));
        let words = words.map(|word| word.trim_end_matches('.'));
        let name = |word: &str| {
            let is_it = |name: &str| word == name;
            let mut keys = KEYS.iter();
            let of_flag = keys.find(|key| {
                let flag = key.flag.as_ref();
                flag.is_some_and(|flag| is_it(flag.name) || flag.alias.is_some_and(is_it))
            });
            let key = of_flag.or_else(|| dotted::find(word));
            let flag = || word.starts_with("--").then(|| word.to_owned());
            key.map(|key| key.name.to_owned()).or_else(flag)
        };
        words
            .filter_map(name)
            .filter(|name| name != "--set")
            .collect()
    }

    /// What a row says here: in its words, and by the keys that it sets.
    fn said(row: &Foreign) -> BTreeSet<String> {
        let mut said = named(row.ours);
        match row.meaning {
            Key(key) => said.extend([key.to_owned()]),
            Words(words) => said.extend(words.iter().flat_map(|(_, sets)| named(sets))),
            _ => {}
        }
        said
    }

    /// Trainers whose keys the guide names, as it calls them.
    const NAMED: [&str; 8] = [
        "HF",
        "TRL",
        "DeepSpeed",
        "Megatron",
        "torchtitan",
        "axolotl",
        "accelerate",
        "FSDP",
    ];

    /// Names in the guide's tables that are no flags or keys of files: of Python's functions, classes and values.
    const NO_KEYS: &[&str] = &[
        "adamw_8bit",
        "chosen",
        "completion",
        "distributed.checkpoint",
        "eager",
        "estimate-memory",
        "estimate_zero3_model_states_mem_needs_all_live",
        "find_executable_batch_size",
        "fully_shard",
        "fused_linear_cross_entropy",
        "linear",
        "llama3",
        "lomo",
        "paged_adamw_8bit",
        "preprocess_data.py",
        "prompt",
        "register_post_accumulate_grad_hook",
        "rejected",
        "unfused",
        "yarn",
    ];

    /// The names of a cell of the guide: code behind the name of a trainer, and flags.
    fn names<'a>(cell: &'a str, trainer: &mut Option<&'a str>) -> Vec<(&'a str, Option<&'a str>)> {
        let mut names = Vec::new();
        for (number, part) in cell.split('`').enumerate() {
            if number % 2 == 0 {
                let words = part.split(|c: char| !c.is_ascii_alphanumeric());
                let mut known = words.filter_map(|word| NAMED.iter().find(|one| **one == word));
                *trainer = known
                    .next_back()
                    .copied()
                    .or(trainer.filter(|_| number > 0 || part.starts_with("...")));
                continue;
            }
            let name = part.split([':', '=', ' ']).next().unwrap_or(part);
            let is_key = name
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c));
            let is_flag = name.starts_with("--");
            if is_key && (is_flag || trainer.is_some()) && !NO_KEYS.contains(&name) {
                names.push((name.trim_start_matches("--"), *trainer));
            }
        }
        names
    }

    /// The guide's rows are this table's: each name of another trainer's is found, and what is written here instead is the same.
    #[test]
    fn the_guide_says_what_the_table_says() {
        let guide = include_str!("../../../../docs/guides/coming-from.md");
        let (mut wrong, mut count) = (Vec::new(), 0);
        let sections = guide
            .split("\n## ")
            .filter(|section| !section.starts_with("LLMQ"));
        for line in sections
            .skip(2)
            .flat_map(str::lines)
            .filter(|line| line.starts_with("| "))
        {
            let cells: Vec<&str> = line.trim_matches(['|', ' ']).split(" | ").collect();
            let mut trainer = None;
            let ours = named(cells[1]);
            let mut all = BTreeSet::new();
            for (name, trainer) in names(cells[0], &mut trainer) {
                count += 1;
                let row = match trainer {
                    Some("DeepSpeed") => {
                        let places = [
                            "zero_optimization.",
                            "",
                            "zero_optimization.offload_optimizer.",
                        ];
                        let mut all = places.iter().flat_map(|place| {
                            ["", ".device"].map(|end| format!("{place}{name}{end}"))
                        });
                        all.find_map(|name| find_key(Program::DeepSpeed, &name))
                    }
                    // The table has its keys with their section where another's is called the same.
                    Some("torchtitan") => find(name).or_else(|| find(name.split_once('.')?.1)),
                    _ => find(name),
                };
                match row {
                    None => wrong.push(format!("`{name}` is in no row of the table: {line}")),
                    Some(row) if !ours.is_empty() && said(row).is_disjoint(&ours) => {
                        wrong.push(format!("`{name}` is `{}`: {line}", row.ours));
                    }
                    Some(row) => all.extend(said(row)),
                }
            }
            if !all.is_empty() && !ours.is_subset(&all) {
                let more: Vec<_> = ours.difference(&all).collect();
                wrong.push(format!("the table lacks {more:?}: {line}"));
            }
        }
        assert!(count > 180, "{count}");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
