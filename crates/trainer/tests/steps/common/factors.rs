//! The table of what runs may differ in. Whatever is computed, it has the same bits wherever it lives, whatever is recomputed and
//! whoever computes it.

use super::covering::{self, Pair};
use super::elsewhere::models as dense_models;
use super::{Random, config, experts, frozen};
use memory::{DType, Rank};
use model::{ModelConfig, RouterAuxKind};
use settings::{AutoOr, ConfigError, Settings};
use std::fmt;
use std::path::Path;

/// A name, what is computed, as settings of both sides of a comparison, and where and by whom, as settings of one side.
type Choice = (&'static str, &'static str, &'static str);

/// Who has a factor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Of {
    Any,
    /// A process alone, whose updates may wait for the next step.
    Alone,
    /// A group of ranks, or of one.
    Group,
}

/// What runs differ in. The first choice is the usual one.
struct Factor(&'static str, Of, &'static [Choice]);

const fn both(name: &'static str, settings: &'static str) -> Choice {
    (name, settings, "")
}

const fn moved(name: &'static str, settings: &'static str) -> Choice {
    (name, "", settings)
}

/// To add a feature, add a factor, or a choice of one; where it does not go with another, a line of [`REFUSED`].
#[rustfmt::skip]
const FACTORS: &[Factor] = &[
    Factor("model", Of::Any, &[
        both("Llama", ""), both("tied", ""), both("biases", ""), both("norms", ""), both("norms-tied", ""), both("GPT-2", ""),
        both("GPT-2-untied", ""), both("norms-behind", ""), both("norms-both", ""), both("multipliers", ""), both("share", ""), both("Qwen3.5", ""), both("Qwen2-MoE", ""), both("DeepSeek-V3", ""), both("gpt-oss", ""), both("Qwen3-Next", ""),
    ]),
    Factor("form", Of::Any, &[
        both("f32", "train.dtype=f32"),
        both("f32-bf16", "train.dtype=f32 optim.state_dtype=bf16"),
        both("f32-8bit", "train.dtype=f32 optim.state_dtype=8bit"),
        both("bf16", "train.dtype=bf16"),
        both("bf16-split", "train.dtype=bf16 optim.master=bf16-split"),
        both("bf16-24", "train.dtype=bf16 optim.master=bf16+8"),
        both("bf16-alone", "train.dtype=bf16 optim.master=none"),
        both("bf16-bf16", "train.dtype=bf16 optim.state_dtype=bf16"),
        both("bf16-bf16-split", "train.dtype=bf16 optim.state_dtype=bf16 optim.master=bf16-split"),
        both("bf16-bf16-alone", "train.dtype=bf16 optim.state_dtype=bf16 optim.master=none"),
        both("bf16-8bit", "train.dtype=bf16 optim.state_dtype=8bit"),
        both("bf16-8bit-split", "train.dtype=bf16 optim.state_dtype=8bit optim.master=bf16-split"),
        both("bf16-8bit-24", "train.dtype=bf16 optim.state_dtype=8bit optim.master=bf16+8"),
        both("bf16-8bit-alone", "train.dtype=bf16 optim.state_dtype=8bit optim.master=none"),
    ]),
    Factor("gradient-type", Of::Any, &[both("f32", ""), both("bf16", "optim.grad_dtype=bf16")]),
    Factor("optimizer", Of::Any, &[both("adamw", ""), both("muon", "optim.kind=muon"), both("adafactor", "optim.kind=adafactor")]),
    Factor("batches", Of::Any, &[both("4", "batch.accum=4"), both("1", "batch.accum=1"), both("2", "batch.accum=2"), both("8", "batch.accum=8")]),
    Factor("frozen", Of::Any, &[both("0", ""), both("1", ""), both("2", ""), both("3", ""), both("4", "")]),
    Factor("adapters", Of::Any, &[
        both("none", ""),
        both("some", "lora.rank=3 lora.alpha=5.0 lora.dropout=0.1 lora.b_lr_ratio=4.0"),
        both("on-nf4", "lora.rank=3 lora.dropout=0.1 lora.base_dtype=nf4"),
        both("on-8bit", "lora.rank=3 lora.rank_pattern={down_proj=2} lora.base_dtype=8bit"),
        both("of-experts", "lora.rank=3 lora.targets=[\"all-linear\",\"experts.gate_up_proj\",\"mlp.experts.down_proj\"]"),
        both("of-nf4-experts", "lora.rank=3 lora.base_dtype=nf4 lora.targets=[\"experts.gate_up_proj\",\"mlp.experts.down_proj\"]"),
        both("of-mxfp4-experts", "lora.rank=3 lora.base_dtype=mxfp4 lora.targets=[\"experts.gate_up_proj\",\"mlp.experts.down_proj\"] model.hidden=64"),
    ]),
    Factor("objective", Of::Any, &[both("tokens", ""), both("preferences", "train.objective=dpo data.path=pairs batch.micro=2 model.router_aux=0.0 model.router_z_loss=0.0")]),
    Factor("attention", Of::Any, &[both("eager", "attention.backend=eager"), both("flash", "attention.backend=flash")]),
    Factor("tiles", Of::Any, &[both("none", ""), both("9", "memory.tile_tokens=9"), both("20", "memory.tile_tokens=20")]),
    Factor("fp8", Of::Any, &[
        both("off", ""),
        both("on", "fp8.recipe=tensor model.hidden=64 model.head_dim=16 model.ffn=144"),
        ("wide", "fp8.recipe=tensor model.hidden=64 model.head_dim=16 model.ffn=144", "fp8.save=false"),
        ("kept", "fp8.recipe=tensor model.hidden=64 model.head_dim=16 model.ffn=144", "fp8.weights=step"),
        ("some-kept", "fp8.recipe=tensor fp8.except=[\"*.1.*\"] model.hidden=64 model.head_dim=16 model.ffn=144", "fp8.weights=step"),
    ]),
    Factor("documents", Of::Any, &[both("cut", ""), both("packed", "data.path=documents data.packing=first-fit")]),
    Factor("mode", Of::Any, &[
        moved("none", ""), moved("full", "recompute.spec=full"), moved("uniform", "recompute.spec=full:uniform:2"),
        moved("block", "recompute.spec=full:block:1"), moved("core_attn", "recompute.spec=core_attn"),
        moved("layernorm", "recompute.spec=layernorm"), moved("mlp", "recompute.spec=mlp"),
        moved("qkv", "recompute.spec=qkv"), moved("attn_out", "recompute.spec=attn_out"), moved("mlp_act", "recompute.spec=mlp_act"),
        moved("three", "recompute.spec=core_attn,layernorm,mlp"), moved("others", "recompute.spec=qkv,attn_out,mlp_act"),
        moved("moe", "recompute.spec=moe"), moved("gdn_norm_out", "recompute.spec=gdn_norm_out"), moved("lora", "recompute.spec=lora"),
    ]),
    Factor("state-interval", Of::Any, &[moved("1", ""), ("2", "data.seq=132", "recompute.state_interval=2")]),
    Factor("offloaded", Of::Any, &[
        moved("nothing", ""), moved("inputs", "offload.activations=block_input"), moved("attention", "offload.activations=qkv,core_attn"),
        moved("mlp", "offload.activations=mlp,attn_out,block_input"),
        moved("all", "offload.activations=block_input,layernorm,qkv,core_attn,attn_value,attn_out,mlp"),
    ]),
    Factor("weights", Of::Any, &[
        moved("here", ""), moved("pinned", "offload.parameters=pinned"),
        moved("one-slot", "offload.parameters=pinned offload.parameter_slots=1"),
        moved("three-slots", "offload.parameters=pinned offload.parameter_slots=3"),
    ]),
    Factor("expert-units", Of::Any, &[
        moved("all", ""),
        ("16", "model.hidden=64 model.heads=3 model.kv_heads=3 model.head_dim=64 model.experts.count=64 model.experts.ffn=48", "memory.expert_unit=16"),
        ("32", "model.hidden=64 model.heads=3 model.kv_heads=3 model.head_dim=64 model.experts.count=64 model.experts.ffn=48", "memory.expert_unit=32"),
    ]),
    Factor("gradients", Of::Any, &[
        moved("here", ""), moved("pinned", "offload.gradients=pinned"), ("released", "optim.clip_norm=inf", "optim.release=backward"),
    ]),
    Factor("states", Of::Any, &[
        moved("here", ""), moved("pinned", "offload.optimizer=pinned"), moved("half", "offload.optimizer=pinned offload.fraction=0.5"),
        moved("disk", "offload.optimizer=DISK"), moved("half-disk", "offload.optimizer=DISK offload.fraction=0.5"),
    ]),
    Factor("window", Of::Alone, &[moved("forward", ""), moved("end", "offload.window=end")]),
    Factor("zero", Of::Group, &[
        moved("0", "collectives.zero=0"), moved("1", "collectives.zero=1"), moved("2", "collectives.zero=2"),
        moved("3", "collectives.zero=3"), moved("3-kept", "collectives.zero=3 collectives.reshard_after_forward=false"),
        moved("3-groups", "collectives.zero=3 collectives.shard_group=2"),
    ]),
    Factor("ranks", Of::Group, &[moved("1", ""), moved("2", ""), moved("4", "")]),
    Factor("exchanges", Of::Group, &[
        moved("large", ""), moved("some", "collectives.bucket_size=40000"),
        moved("small-awaited", "collectives.bucket_size=2000 collectives.overlap_grad_reduce=false"),
        moved("gathers-awaited", "collectives.bucket_size=40000 collectives.overlap_param_gather=false"),
    ]),
    Factor("parts", Of::Group, &[
        both("1", ""), both("3", "parallel.context_parts=3"), ("3-shared", "parallel.context_parts=3", "parallel.context=3"),
        both("4", "parallel.context_parts=4"), ("4-shared", "parallel.context_parts=4", "parallel.context=4"),
        ("4-by-2", "parallel.context_parts=4", "parallel.context=2"), ("2-shared", "parallel.context_parts=2", "parallel.context=2"),
    ]),
    Factor("stages", Of::Group, &[
        moved("1", ""),
        ("2", "model.router_aux=0.0 model.router_z_loss=0.0", "parallel.pipeline=2 parallel.pipeline_layout=[1,3]"),
        ("3-gpipe", "model.router_aux=0.0 model.router_z_loss=0.0",
            "parallel.pipeline=3 parallel.pipeline_layout=[1,2,1] parallel.schedule=gpipe"),
        ("4-zb-h1", "model.router_aux=0.0 model.router_z_loss=0.0", "parallel.pipeline=4 parallel.schedule=zb-h1"),
        ("2-zb-h1", "model.router_aux=0.0 model.router_z_loss=0.0",
            "parallel.pipeline=2 parallel.pipeline_layout=[1,3] parallel.schedule=zb-h1"),
        ("2-interleaved", "model.router_aux=0.0 model.router_z_loss=0.0", "parallel.pipeline=2 parallel.schedule=interleaved"),
        ("2-of-8-runs", "model.layers=8 model.router_aux=0.0 model.router_z_loss=0.0",
            "parallel.pipeline=2 parallel.schedule=interleaved parallel.virtual_stage_layers=1"),
    ]),
];

/// What the program refuses together: of each factor that a line names, one of the choices there (`=`), or one that is not (`!=`).
#[rustfmt::skip]
const REFUSED: &[&str] = &[
    "form!=f32,bf16,bf16-split,bf16-24,bf16-alone optimizer=adafactor",
    "frozen=3 optimizer=muon model!=Qwen2-MoE,DeepSeek-V3,gpt-oss,Qwen3-Next",
    "frozen!=0 adapters!=none",
    "adapters=some optimizer!=adamw",
    "adapters=of-experts,of-nf4-experts,of-mxfp4-experts model!=Qwen2-MoE,DeepSeek-V3,gpt-oss,Qwen3-Next",
    "expert-units!=all model!=Qwen2-MoE,Qwen3-Next",
    "expert-units!=all optimizer!=adamw",
    "expert-units!=all gradients=released",
    "expert-units!=all adapters=on-nf4,on-8bit,of-nf4-experts,of-mxfp4-experts",
    "expert-units!=all parts=3,4,4-by-2",
    "expert-units!=all weights!=here window=forward",
    "objective=preferences adapters=none",
    "objective=preferences documents=packed",
    "objective=preferences parts!=1",
    "objective=preferences stages!=1",
    "documents=packed attention=eager",
    "tiles!=none model=Qwen2-MoE,DeepSeek-V3,gpt-oss,Qwen3-Next",
    "tiles!=none offloaded=mlp,all",
    "fp8!=off form=f32,f32-bf16,f32-8bit",
    "fp8!=off frozen=3",
    "fp8!=off adapters!=none",
    "fp8!=off tiles!=none",
    "fp8=kept,some-kept gradients=released weights!=here",
    "model=DeepSeek-V3,share,gpt-oss frozen=4",
    "model=DeepSeek-V3 mode=qkv,others",
    "model=DeepSeek-V3 offloaded=attention,all",
    "mode=moe model!=Qwen2-MoE,DeepSeek-V3,gpt-oss,Qwen3-Next",
    "mode=lora adapters=none",
    "mode=gdn_norm_out model!=Qwen3.5,Qwen3-Next",
    "mode=uniform offloaded=inputs",
    "mode=full,uniform,block,core_attn,qkv,three,others offloaded=attention",
    "mode=full,uniform,block,mlp,attn_out,mlp_act,three,others offloaded=mlp",
    "mode!=none,moe,lora,gdn_norm_out offloaded=all",
    "gradients=released batches!=1",
    "gradients=released window=end",
    "gradients=released zero!=",
    "gradients=pinned zero=0",
    "window=end weights=here gradients=here states=here",
    "zero=3-groups weights!=here",
    "zero=3,3-kept,3-groups stages!=1",
    "model!=norms,norms-tied,norms-both,GPT-2,GPT-2-untied,Qwen3.5,Qwen3-Next parts=4,4-shared,4-by-2,2-shared",
    "model=norms,norms-tied,norms-both,GPT-2,GPT-2-untied,Qwen3.5,Qwen3-Next parts=3,3-shared",
    "model=tied,norms-tied,GPT-2,GPT-2-untied stages!=1",
    "model=DeepSeek-V3,gpt-oss,Qwen3-Next stages=4-zb-h1,2-zb-h1",
    "adapters!=none,of-nf4-experts,of-mxfp4-experts stages=4-zb-h1,2-zb-h1",
    "tiles!=none stages=4-zb-h1,2-zb-h1",
    "fp8=on,wide,kept frozen!=2 stages=4-zb-h1,2-zb-h1",
    "fp8=on,wide,kept model=Qwen2-MoE,gpt-oss,Qwen3.5 stages=4-zb-h1,2-zb-h1",
    "batches=1 stages=2-interleaved,2-of-8-runs",
    "batches=2 ranks=2 stages=2-interleaved,2-of-8-runs",
    "batches=4 ranks=4 stages=2-interleaved,2-of-8-runs",
    "parts=3,4,4-by-2 stages!=1",
];

/// What is not refused, but cannot be divided, takes more than 18 ranks, or leaves nothing that differs.
#[rustfmt::skip]
const LEFT_OUT: &[&str] = &[
    "batches=1 ranks!=1",
    "batches=2 ranks=4",
    "ranks=2 parts=3-shared,4-shared stages=3-gpipe,4-zb-h1",
    "ranks=4 parts=2-shared stages=3-gpipe,4-zb-h1",
    "ranks=4 parts=3-shared,4-shared stages!=1",
    "zero=3-groups ranks!=4",
    "states=half,half-disk frozen=3",
    "optimizer=muon fp8=some-kept states=half,half-disk window=end",
    "expert-units!=all frozen=4",
    "expert-units!=all model=Qwen3-Next",
    "expert-units!=all weights=here gradients=here window!=",
    "expert-units!=all weights=here gradients=here zero=0,1",
    "states!=here optimizer=adafactor form=f32,bf16-alone",
    "states!=here optimizer=adafactor adapters!=none",
    "mode=layernorm,mlp,mlp_act,lora,gdn_norm_out tiles!=none",
    "mode=mlp,mlp_act model=gpt-oss,Qwen3-Next",
    "state-interval!=1 model!=Qwen3.5,Qwen3-Next",
    "mode=block frozen=2",
    "mode=mlp,mlp_act frozen=2,3,4",
    "mode=block,mlp,mlp_act adapters=of-nf4-experts,of-mxfp4-experts",
];

/// Factors, by number, each with choices of it.
type Rule = Vec<(usize, Vec<usize>)>;

fn rules(texts: &[&str]) -> Vec<Rule> {
    let term = |text: &str| {
        let (name, is_not, names) = match text.split_once("!=") {
            Some((name, names)) => (name, true, names),
            None => text
                .split_once('=')
                .map(|(name, names)| (name, false, names))
                .unwrap(),
        };
        let factor = number_of(name);
        let names: Vec<&str> = names.split(',').filter(|name| !name.is_empty()).collect();
        let all = FACTORS[factor].2;
        let unknown = names
            .iter()
            .find(|name| all.iter().all(|choice| choice.0 != **name));
        assert_eq!(unknown, None, "{text}");
        let meant = |at: &usize| names.contains(&all[*at].0) != is_not;
        (factor, (0..all.len()).filter(meant).collect())
    };
    texts
        .iter()
        .map(|text| text.split(' ').map(term).collect())
        .collect()
}

fn number_of(name: &str) -> usize {
    let found = FACTORS.iter().position(|factor| factor.0 == name);
    found.unwrap_or_else(|| panic!("no factor is called {name}"))
}

/// A choice of each factor.
#[derive(Clone)]
pub struct Run {
    choices: Vec<usize>,
    is_of_group: bool,
    is_small: bool,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if self.is_of_group { "group" } else { "alone" })?;
        let chosen = self.chosen().filter(|(_, choice)| *choice > 0);
        for (factor, choice) in chosen {
            write!(f, " {}={}", FACTORS[factor].0, FACTORS[factor].2[choice].0)?;
        }
        Ok(())
    }
}

/// The factors that a process alone has, or those that a group has.
fn factors_of(is_of_group: bool) -> Vec<usize> {
    let other = if is_of_group { Of::Alone } else { Of::Group };
    let is_own = |at: &usize| FACTORS[*at].1 != other;
    (0..FACTORS.len()).filter(is_own).collect()
}

/// Runs in which every two choices meet that go together.
///
/// # Panics
/// If two choices meet in none, and no rule says that they are not to.
pub fn covering(is_of_group: bool, seed: u64) -> Vec<Run> {
    let own = factors_of(is_of_group);
    let counts: Vec<usize> = own.iter().map(|factor| FACTORS[*factor].2.len()).collect();
    let all = [rules(REFUSED), rules(LEFT_OUT)].concat();
    let (drawn, never) = covering::covering(&counts, seed, |choices| {
        breaks(&all, &own, choices).next().is_none()
    });
    // A factor has no choice that goes with both.
    let has_reason = |pair: &Pair| {
        (0..own.len()).any(|factor| {
            (0..counts[factor]).all(|choice| {
                let mut choices = vec![None; own.len()];
                choices[factor] = Some(choice);
                pair.iter()
                    .for_each(|(at, choice)| choices[*at] = Some(*choice));
                breaks(&all, &own, &choices).next().is_some()
            })
        })
    };
    let named = |pair: &Pair| {
        pair.map(|(at, choice)| {
            let factor = &FACTORS[own[at]];
            format!("{}={}", factor.0, factor.2[choice].0)
        })
    };
    let without_reason = never.iter().filter(|pair| !has_reason(pair));
    let without_reason: Vec<_> = without_reason.map(named).collect();
    assert!(without_reason.is_empty(), "{without_reason:?}");
    drawn
        .into_iter()
        .map(|drawn| Run::new(&own, &drawn, is_of_group))
        .collect()
}

/// The rules that choices of some factors break.
fn breaks<'a>(
    rules: &'a [Rule],
    own: &'a [usize],
    choices: &'a [Option<usize>],
) -> impl Iterator<Item = usize> + 'a {
    let is_met = |(factor, meant): &(usize, Vec<usize>)| {
        let at = own.iter().position(|one| one == factor);
        at.and_then(|at| choices[at])
            .is_some_and(|choice| meant.contains(&choice))
    };
    rules
        .iter()
        .enumerate()
        .filter(move |(_, rule)| rule.iter().all(is_met))
        .map(|(number, _)| number)
}

impl Run {
    fn new(own: &[usize], drawn: &[usize], is_of_group: bool) -> Run {
        let mut choices = vec![0; FACTORS.len()];
        own.iter()
            .zip(drawn)
            .for_each(|(factor, choice)| choices[*factor] = *choice);
        Run {
            choices,
            is_of_group,
            is_small: false,
        }
    }

    /// A run in milliseconds, as it is shown: `alone` or `group`, and choices that are not the usual ones.
    pub fn small(text: &str) -> Run {
        let (process, chosen) = text.split_once(' ').expect("a choice");
        let mut run = Run::new(&[], &[], process == "group");
        for word in chosen.split(' ') {
            let (name, choice) = word.split_once('=').expect("a factor");
            let factor = number_of(name);
            let at = FACTORS[factor].2.iter().position(|one| one.0 == choice);
            run.choices[factor] = at.unwrap_or_else(|| panic!("{name} is never {choice}"));
        }
        run.is_small = true;
        run
    }

    /// Its factors, by number, with what is chosen.
    fn chosen(&self) -> impl Iterator<Item = (usize, usize)> {
        let own = factors_of(self.is_of_group).into_iter();
        own.map(|factor| (factor, self.choices[factor]))
    }

    /// The name of what is chosen.
    pub fn of(&self, factor: &str) -> &'static str {
        let factor = number_of(factor);
        FACTORS[factor].2[self.choices[factor]].0
    }

    /// The same runs but for one factor each, which is as usual: of those by which the sides of a comparison differ.
    pub fn with_one_undone(&self) -> Vec<(String, Run)> {
        let differing = self
            .chosen()
            .filter(|(factor, choice)| *choice > 0 && !FACTORS[*factor].2[*choice].2.is_empty());
        let undone = differing.map(|(factor, choice)| {
            let mut run = self.clone();
            run.choices[factor] = 0;
            (
                format!("{}={}", FACTORS[factor].0, FACTORS[factor].2[choice].0),
                run,
            )
        });
        undone.collect()
    }

    fn model(&self) -> ModelConfig {
        // A stage needs a block.
        let layers = if self.is_small && !self.is_of_group {
            2
        } else {
            4
        };
        let dense = dense_models(layers).into_iter().map(|(_, model)| model);
        let experts = experts::models().map(|(_, model)| ModelConfig { layers, ..model });
        let mut models: Vec<ModelConfig> = dense.chain(experts).collect();
        let mut model = models.swap_remove(self.choices[number_of("model")]);
        if self.is_small {
            (model.ffn, model.vocab) = (60, 40);
        }
        if let Some(experts) = &mut model.experts
            && self.of("adapters") == "of-mxfp4-experts"
        {
            // Inputs of experts in MXFP4 are multiples of 32.
            (experts.ffn, experts.shared_ffn) = (32, 64 * experts.shared_ffn.min(1));
        }
        if let Some(latent) = &mut model.latent {
            // FP8 takes multiples of 16, and parts of sequences are not balanced one by one.
            (latent.v_head_dim, model.router_aux_kind) = (16, RouterAuxKind::Layer);
        }
        model
    }

    /// Settings, after those that are common to all runs.
    fn settings(&self, set: &[String], ranks: usize) -> Result<Settings, ConfigError> {
        let model = self.model();
        // Settings take the family's head, and it is untied afterwards.
        let is_tied = model.tie_embeddings;
        let mut config = config(model, DType::F32, "none");
        config.model.tie_embeddings |= config.model.biases;
        (config.data.seq, config.batch.micro) = (if self.is_small { 12 } else { 24 }, 1);
        config.memory.head_chunk = AutoOr::Number(if self.is_small { 7 } else { 15 });
        config.optim.f32_states = ["*embed_tokens*", "*.wte.*"].map(String::from).into();
        let frozen = self.choices[number_of("frozen")];
        config.train.freeze = frozen::patterns(&config.model, frozen);
        let experts = config.model.experts.as_ref();
        if self.of("adapters") == "none" && experts.is_some_and(|experts| experts.choice_bias) {
            config.optim.router_bias_rate = 0.01;
        }
        if ranks > 0 {
            config.rank = Some(Rank {
                number: 0,
                of: ranks,
            });
        }
        let mut settings = Settings::new(&config.with(set)?)?;
        settings.model.tie_embeddings = is_tied;
        settings.homes.chunk_bytes = CHUNK_BYTES;
        settings
            .layout(&settings.architecture())
            .and_then(|layout| settings.matrices(&settings.architecture(), &layout))?;
        Ok(settings)
    }

    fn set(&self, is_moved: bool) -> Vec<String> {
        let texts = self.chosen().flat_map(|(factor, choice)| {
            let (_, both, moved) = FACTORS[factor].2[choice];
            [both, if is_moved { moved } else { "" }]
        });
        texts
            .flat_map(str::split_whitespace)
            .map(String::from)
            .collect()
    }

    /// One process that computes the same, has everything on its device and recomputes nothing.
    pub fn reference(&self) -> Settings {
        let mut set = self.set(false);
        if self.is_of_group {
            set.push("collectives.zero=0".into());
        }
        self.settings(&set, 0)
            .unwrap_or_else(|refusal| panic!("{self}: {refusal}"))
    }

    /// The run, as its first rank has it, with states in a folder where they live on a disk.
    ///
    /// # Errors
    /// What does not go together.
    pub fn moved(&self, folder: &Path) -> Result<Settings, ConfigError> {
        let mut set = self.set(true);
        let number = |key: &str| {
            let value = set
                .iter()
                .find_map(|text| text.strip_prefix(key)?.strip_prefix('='));
            value.map_or(1, |value| value.parse::<usize>().expect("a number"))
        };
        let groups: usize = self.of("ranks").parse().expect("a number");
        let all = groups * number("parallel.pipeline") * number("parallel.context");
        let accum = number("batch.accum") / groups;
        set.iter_mut()
            .for_each(|text| *text = text.replace("DISK", &folder.to_string_lossy()));
        set.push(format!("batch.accum={accum}"));
        self.settings(&set, if self.is_of_group { all } else { 0 })
    }
}

/// Several chunks for the larger matrices.
const CHUNK_BYTES: usize = 20_000;

/// Runs that break one rule of [`REFUSED`] each, for all choices that it names.
pub fn refused(seed: u64) -> Vec<Run> {
    let all = [rules(REFUSED), rules(LEFT_OUT)].concat();
    let mut random = Random(seed);
    let mut found = Vec::new();
    for number in 0..REFUSED.len() {
        let mut is_drawn = false;
        for is_of_group in [false, true] {
            let own = factors_of(is_of_group);
            let counts: Vec<usize> = own.iter().map(|factor| FACTORS[*factor].2.len()).collect();
            for fixed in combinations(&all[number], &own) {
                let drawn = (0..100).find_map(|_| {
                    covering::draw(&mut random, &counts, &fixed, |choices| {
                        breaks(&all, &own, choices).all(|one| one == number)
                    })
                });
                is_drawn |= drawn.is_some();
                found.extend(drawn.map(|drawn| Run::new(&own, &drawn, is_of_group)));
            }
        }
        assert!(is_drawn, "{}: other rules say so", REFUSED[number]);
    }
    found
}

/// Every choice of each factor of a rule, if all of these are own factors.
fn combinations(rule: &Rule, own: &[usize]) -> Vec<Vec<(usize, usize)>> {
    let mut all = vec![Vec::new()];
    for (factor, meant) in rule {
        let Some(at) = own.iter().position(|one| one == factor) else {
            return Vec::new();
        };
        let longer = |before: Vec<(usize, usize)>| {
            meant
                .iter()
                .map(move |choice| [&before[..], &[(at, *choice)]].concat())
        };
        all = all.into_iter().flat_map(longer).collect();
    }
    all
}
