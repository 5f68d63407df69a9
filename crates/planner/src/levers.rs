//! Levers: what may be changed of a run, for less memory or to see what that would take.
//!
//! [`levers`] is the one table of them. A plan compares each alone (`alternatives.rs`), a search pulls one after the other until the run
//! fits (`search.rs`), and an out-of-memory error tries them alone and in combinations ([`Setup::smaller`]).

use crate::change::{Change, set};
use crate::distinct_stages::distinct_stages;
use crate::figures::quick_figures;
use crate::fullest_rank::as_fullest_rank;
use crate::on_paper::StepOnPaper;
use crate::rates::NVLINK_RANKS;
use data::{Format, Inputs};
use kernels::Target;
use kernels::operation::DELTA_CHUNK;
use memory::{DType, Home, Window};
use model::{Attention, Policy, Spec};
use optim::{MasterFormat, MomentFormat};
use rayon::prelude::*;
use session::Result;
use settings::{
    AttentionBackend, AutoOr, BaseType, Config, ConfigError, FloatType, Fp8Config, Fp8Recipe,
    Fp8Weights, HostPlace, OptimizerPlace, Release, Settings, Size,
};
use std::collections::{BTreeMap, BTreeSet};
use std::iter::successors;
use std::path::Path;
use units::Zero;

/// The label that full recompute keeps, and that can be offloaded.
const BLOCK_INPUT: &str = "block_input";

/// Tokens of a tile: so many rows still fill a GPU in every product.
const TILE_TOKENS: usize = 8192;

/// Units that the experts of a layer are divided into.
const EXPERT_UNITS: usize = 8;

/// The rank of adapters that are offered.
const ADAPTER_RANK: usize = 16;

/// Sequences are not made shorter than this.
pub(crate) const SHORTEST: usize = 128;

/// A run as it is configured, of the rank that needs most memory, and the kind of device that it is for.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) config: Config,
    pub(crate) settings: Settings,
    pub(crate) target: Target,
}

/// A change that may make a run smaller.
pub(crate) struct Lever {
    /// Its name as a step of the advice, with figures of the run after it; empty if it saves nothing.
    pub(crate) rung: String,
    /// Its name as another setting that a plan compares; empty if it is not compared.
    pub(crate) effect: &'static str,
    /// Makes the change to a run; none if it changes nothing, or the result cannot run.
    pub(crate) pull: Pull,
}

impl Lever {
    /// Whether it may save memory.
    pub(crate) fn saves(&self) -> bool {
        !self.rung.is_empty()
    }
}

pub(crate) type Pull = Box<dyn Fn(&Setup) -> Option<Change>>;

/// Every lever. Of those that cost the same, a search pulls the first one first. Products in FP8 are only compared, never advised: they
/// change results.
#[rustfmt::skip]
pub(crate) fn levers(run: &Setup) -> impl Iterator<Item = Lever> {
    let lever = |rung: &str, effect, pull: fn(&Setup) -> Option<Change>| {
        Lever { rung: rung.into(), effect, pull: Box::new(pull) }
    };
    let recomputed = |words: &str, pull| Lever { rung: words.into(), effect: "", pull };
    let sizes = [
        lever("", "every query head with keys and values of its own (kv_heads = {heads})",
            |run| (run.settings.model.kv_heads < run.settings.model.heads).then(|| set!(model.kv_heads = run.settings.model.heads))),
        lever("", "logits of all {head_chunk} tokens at once (head_chunk = {head_chunk})",
            |run| (run.settings.head_chunk < run.tokens()).then(|| set!(memory.head_chunk = AutoOr::Number(run.tokens()), run.tokens()))),
        lever("", "twice the accumulation (accum = {accum})", |run| Some(set!(batch.accum = 2 * run.settings.accum))),
        lever("", "twice the micro-batch (micro = {micro})", |run| Some(set!(batch.micro = 2 * run.settings.micro_batch))),
        lever("micro-batches of {micro}, {accum} a step", "", |run| run.smaller_micro_batches().next()),
        lever("computed in bf16", "", Setup::computed_in_bf16),
    ];
    let policy = &run.settings.policy;
    let labels = policy.labels.named().map(move |label| {
        recomputed(&format!("{} recomputed", label.name()), Box::new(move |run| run.recompute_too(label.name())))
    });
    let full = recompute_specs(policy).into_iter().filter(|spec| spec.starts_with("full"));
    let full = full.map(move |spec| recomputed(&format!("recompute {spec}"), Box::new(move |run| run.recompute_anew(&spec))));
    let others = [
        lever("flash attention", "scores never stored (--attention flash)",
            |run| (run.settings.attention == Attention::Eager).then(|| set!(attention.backend = AttentionBackend::Flash))),
        lever("", "scores stored (--attention eager)",
            |run| (run.settings.attention != Attention::Eager).then(|| set!(attention.backend = AttentionBackend::Eager))),
        lever("", "products of the blocks in FP8 (--fp8 tensor)",
            |run| run.settings.fp8.is_none().then(|| set!(fp8.recipe = Fp8Recipe::Tensor))),
        lever("", "products of the blocks in bf16 (--fp8 off)", |run| run.settings.fp8.as_ref().map(|_| without_fp8())),
        lever("", "codes of weights made once a step (fp8.weights=step)",
            |run| run.settings.fp8.as_ref().filter(|fp8| !fp8.keeps_weights).map(|_| set!(fp8.weights = Fp8Weights::Step))),
        lever("codes of weights made at each use", "codes of weights made at each use (fp8.weights=use)",
            |run| run.settings.fp8.as_ref().filter(|fp8| fp8.keeps_weights).map(|_| set!(fp8.weights = Fp8Weights::Use))),
        lever("inputs of products in FP8 kept as codes", "inputs of products in FP8 kept as codes (fp8.save=true)",
            |run| run.settings.fp8.as_ref().filter(|fp8| !fp8.saves_codes).map(|_| set!(fp8.save = true))),
        lever("8-bit moments", "8-bit moments (--state-dtype 8bit)",
            |run| (run.settings.states.moments != MomentFormat::Quantised).then(|| set!(optim.state_dtype = MomentFormat::Quantised))),
        lever("an exact master in 16 bits more", "an exact master in 16 bits more (--master bf16-split)",
            |run| (run.settings.dtype == DType::BF16 && run.settings.states.master == MasterFormat::F32)
                .then(|| set!(optim.master = MasterFormat::Remainder))),
        lever("a master of 24 bits", "a master of 24 bits, in 8 bits more (--master bf16+8)",
            |run| (run.settings.dtype == DType::BF16 && matches!(run.settings.states.master, MasterFormat::F32 | MasterFormat::Remainder))
                .then(|| set!(optim.master = MasterFormat::RemainderByte))),
        lever("gradients in bf16", "gradients accumulated in bf16 (--grad-dtype bf16)",
            |run| (run.settings.states.gradients == DType::F32).then(|| set!(optim.grad_dtype = FloatType::Bf16))),
        lever("optimizer states divided among ranks (--zero 1)", "", |run| run.divided(Zero::States)),
        lever("gradients too divided among ranks (--zero 2)", "", |run| run.divided(Zero::Gradients)),
        lever("weights too divided among ranks (--zero 3)", "", |run| run.divided(Zero::Weights)),
        lever("recompute full, block inputs on the host", "", Setup::block_inputs_on_host),
        lever("optimizer states on the host", "optimizer states on the host (--offload-optimizer pinned)",
            |run| run.may_go(&run.settings.homes.states).then(|| set!(offload.optimizer = OptimizerPlace::Pinned, "pinned"))),
        lever("weights on the host", "weights on the host (--offload-parameters pinned)", Setup::weights_on_host),
        lever("gradients on the host", "gradients on the host (--offload-gradients pinned)", Setup::gradients_on_host),
        lever("one of {state_interval} states of the gated delta rule kept", "one of {state_interval} states of the gated delta rule kept (--state-interval {state_interval})",
            Setup::fewer_states),
        lever("{expert_unit} experts of a layer at a time", "{expert_unit} experts of a layer at a time (--expert-unit {expert_unit})", Setup::units_of_experts),
        lever("gradients released in the backward pass, no clipping",
            "gradients released in the backward pass, without clipping (optim.release=backward)", Setup::released_gradients),
        lever("recompute full, in tiles of {tile} tokens", "full recompute, in tiles of tokens (memory.tile_tokens)", Setup::tiles),
        lever("sequences of {seq}, {accum} micro-batches a step", "", Setup::shorter_sequences),
    ];
    sizes.into_iter().chain(labels).chain(full).chain(others)
}

/// The root of the number of a sequence's chunks, rounded down, then up to a power of two. A layer then keeps about as many states as one
/// segment has.
pub(crate) fn balanced_interval(seq: usize) -> usize {
    let chunks = seq.div_ceil(DELTA_CHUNK);
    let root = (chunks as f64).sqrt().floor() as usize;
    root.next_power_of_two()
}

/// Specifications that are compared for every model.
const STRATEGIES: &str = "none core_attn layernorm mlp_act qkv mla_up_proj mlp shared_experts moe_act moe \
    core_attn,layernorm,mlp_act core_attn,layernorm,mlp layernorm,moe_act layernorm,mlp,moe full";

/// Specifications that a model is tried with: those of [`STRATEGIES`] whose labels it has, and `full:uniform:N` for small N
/// and for the root of the number of layers (Chen et al. 2016).
pub(crate) fn recompute_specs(policy: &Policy) -> Vec<String> {
    let (labels, layers) = (policy.labels, policy.layers());
    let root = (1..).find(|root| root * root >= layers).unwrap_or(layers);
    let mut chunks = vec![2, 4, root];
    chunks.sort();
    chunks.dedup();
    chunks.retain(|chunk| (2..=layers).contains(chunk));
    let uniform = chunks
        .into_iter()
        .map(|chunk| format!("full:uniform:{chunk}"));
    let strategies = STRATEGIES.split(' ');
    let known = strategies.filter(|spec| Spec::parse(spec, labels).is_ok());
    known.map(String::from).chain(uniform).collect()
}

impl Setup {
    /// # Errors
    /// As [`Settings::new`].
    pub(crate) fn new(config: Config, target: Target) -> Result<Setup, ConfigError> {
        let (config, settings) = as_fullest_rank(config)?;
        Ok(Setup {
            config,
            settings,
            target,
        })
    }

    /// Which stage of a pipeline the run is planned for, in words before a change for its sake.
    pub(crate) fn of_stage(&self) -> String {
        match self.settings.stage().of {
            1 => String::new(),
            _ => format!("for stage {}: ", self.settings.stage().number),
        }
    }

    /// The run of another stage of a pipeline.
    pub(crate) fn in_stage(&self, stage: usize) -> Setup {
        let settings = self.settings.in_stage(stage);
        Setup {
            config: Config {
                rank: self.config.rank.map(|_| settings.rank_of_all()),
                ..self.config.clone()
            },
            settings,
            target: self.target,
        }
    }

    /// The run of the stage of a pipeline that needs most of its device; the run itself without one.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn largest_stage(&self) -> Result<Setup> {
        self.largest_of((0..self.settings.stage().of).collect())
    }

    /// The same in less time: of equal stages only the first is planned. Another may be a little larger, if leases happen to be placed
    /// worse there.
    ///
    /// # Errors
    /// As [`Setup::largest_stage`].
    pub(crate) fn about_the_largest_stage(&self) -> Result<Setup> {
        self.largest_of(distinct_stages(&self.settings))
    }

    fn largest_of(&self, stages: Vec<usize>) -> Result<Setup> {
        if self.settings.pipeline.is_none() {
            return Ok(self.clone());
        }
        let planned = stages.into_par_iter().with_max_len(1).map(|stage| {
            let planned = quick_figures(&self.settings.in_stage(stage), self.target)?;
            Ok((planned.reserved_bytes, stage))
        });
        let planned = planned.collect::<Result<Vec<(u64, usize)>>>()?;
        let largest = planned.into_iter().max().map_or(0, |(_, stage)| stage);
        Ok(self.in_stage(largest))
    }

    /// The run with a change; none where it would be refused.
    pub(crate) fn with(&self, change: &Change) -> Option<Setup> {
        self.try_with(change).ok()
    }

    /// The setup with a change, or why it is refused.
    pub(crate) fn try_with(&self, change: &Change) -> Result<Setup, ConfigError> {
        Setup::new(change.applied_to(&self.config)?, self.target)
    }

    /// The change of a lever in words, with figures of the run that is changed.
    pub(crate) fn words(&self, words: &str) -> String {
        let settings = &self.settings;
        let figures = [
            ("{heads}", settings.model.kv_heads),
            ("{head_chunk}", settings.head_chunk),
            ("{micro}", settings.micro_batch),
            ("{accum}", settings.accum),
            ("{seq}", settings.seq),
            ("{tile}", settings.tile_tokens.unwrap_or_default()),
            ("{expert_unit}", settings.expert_unit.unwrap_or_default()),
            ("{state_interval}", settings.state_interval),
        ];
        let words = words.to_string();
        figures.into_iter().fold(words, |words, (name, figure)| {
            words.replace(name, &figure.to_string())
        })
    }

    /// The seconds of its step on paper.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn seconds(&self) -> Result<f64> {
        Ok(StepOnPaper::new(&self.settings, self.target)?.seconds)
    }

    /// Every lever pulled whose change is wanted, and the run then: about the smallest that a search can reach.
    pub(crate) fn with_all(&self, wanted: impl Fn(&Change) -> bool) -> (Change, Setup) {
        let (mut all, mut run) = (Change::default(), self.clone());
        for lever in levers(self).filter(Lever::saves) {
            while let Some(change) = (lever.pull)(&run).filter(&wanted)
                && let Some(changed) = run.with(&change)
            {
                (all, run) = (all.and(&change), changed);
                if !change.halves() {
                    break;
                }
            }
        }
        (all, run)
    }

    /// Changes that may make a run fit, as an out-of-memory error tries them: each recompute specification and each lever alone; and what is
    /// no recompute also beside full recompute, and beside block inputs on the host.
    pub(crate) fn smaller(&self) -> Vec<Change> {
        let levers = levers(self).filter(Lever::saves);
        let levers = levers.filter_map(|lever| (lever.pull)(self));
        let chunk = self.settings.head_chunk.div_ceil(4);
        let chunk = set!(memory.head_chunk = AutoOr::Number(chunk), chunk);
        let others = levers.filter(|change| !change.sets(&["data.seq"]));
        let others = others.chain(self.smaller_micro_batches().skip(1));
        let others: Vec<Change> = others
            .chain([chunk])
            .chain(self.smaller_evaluations())
            .collect();
        let bases = [self.recompute_anew("full"), self.block_inputs_on_host()];
        let beside = bases.iter().flatten().flat_map(|base| {
            let others = others.iter();
            let others = others.filter(|change| !change.sets(&["recompute.spec"]));
            others.map(|change| change.and(base))
        });
        let specs = recompute_specs(&self.settings.policy);
        let specs = specs.iter().filter_map(|spec| self.recompute_anew(spec));
        let all = specs.chain(others.iter().cloned()).chain(beside);
        let mut seen = BTreeSet::new();
        all.filter(|change| seen.insert(change.set())).collect()
    }

    /// Other trainings, in words, in which adapters alone learn: on the model as it is, and on one in four bits.
    pub(crate) fn adapters(&self) -> Vec<(String, Change)> {
        let lora = &self.config.lora;
        let rank = set!(lora.rank = Some(ADAPTER_RANK), ADAPTER_RANK);
        let in_codes = set!(lora.base_dtype = Some(BaseType::Nf4), "nf4");
        let is_plain = matches!(lora.base_dtype, None | Some(BaseType::Bf16));
        let both = || {
            let words = format!("adapters of rank {ADAPTER_RANK} on the model in 4 bits");
            (words, rank.and(&in_codes))
        };
        let words = format!("adapters of rank {ADAPTER_RANK}");
        match lora.rank {
            None => vec![(words, rank.clone()), both()],
            Some(_) if is_plain => {
                vec![("the model under the adapters in 4 bits".into(), in_codes)]
            }
            Some(_) => Vec::new(),
        }
    }

    /// Micro-batches of evaluations, halved again and again: they change no bit of what is trained.
    fn smaller_evaluations(&self) -> impl Iterator<Item = Change> {
        let half = |rows: &usize| Some(rows / 2).filter(|rows| *rows > 0);
        let rows = self.settings.between.evaluation;
        let rows = successors(rows.and_then(|rows| half(&rows)), half);
        rows.map(|rows| set!(eval.micro_batch = Some(rows), rows))
    }

    /// Another recompute specification; none if it does not go with those of single layers. Offload of activations ends where
    /// what is offloaded would be recomputed.
    pub(crate) fn recompute(&self, spec: &str) -> Option<Change> {
        let mut recompute = set!(recompute.spec = spec.to_string());
        // Specifications of single layers stay; clauses say a whole policy, which another takes the place of.
        let mut layers = self.config.recompute.layers.values();
        if layers.len() > 0 && layers.all(|text| Policy::is_written_in_clauses(text)) {
            recompute = recompute.and(&no_layers());
        }
        let resident = recompute.and(&set!(offload.activations = "none".to_string()));
        let mut ways = [recompute, resident].into_iter();
        ways.find(|change| self.with(change).is_some())
    }

    /// The same; none where that changes nothing.
    pub(crate) fn recompute_anew(&self, spec: &str) -> Option<Change> {
        let change = self.recompute(spec)?;
        let changed = self.with(&change)?;
        (changed.settings.policy != self.settings.policy).then_some(change)
    }

    /// Recomputes one label more; none if the run recomputes it already.
    fn recompute_too(&self, label: &str) -> Option<Change> {
        self.recompute_anew(&match self.config.recompute.spec.trim() {
            "none" => label.to_string(),
            spec => format!("{spec},{label}"),
        })
    }

    /// Chooses what to recompute within a budget, for every layer.
    pub(crate) fn automatic_recompute(&self, budget: u64) -> Change {
        let budget = set!(
            memory.budget = Some(AutoOr::Number(Size::Bytes(budget))),
            budget
        );
        let auto = set!(recompute.spec = "auto".to_string()).and(&budget);
        match self.config.recompute.layers.is_empty() {
            true => auto,
            false => auto.and(&no_layers()),
        }
    }

    /// Smaller micro-batches that divide this one, the largest first, and as many more of them.
    fn smaller_micro_batches(&self) -> impl Iterator<Item = Change> {
        let (whole, accum) = (self.settings.micro_batch, self.settings.accum);
        let smaller = (1..whole)
            .rev()
            .filter(move |micro| whole.is_multiple_of(*micro));
        smaller.map(move |micro| {
            let more = set!(batch.accum = accum * (whole / micro));
            set!(batch.micro = micro).and(&more)
        })
    }

    /// Sequences of half the length, and twice as many of them; none below [`SHORTEST`], or where a file brings them.
    fn shorter_sequences(&self) -> Option<Change> {
        let (data, settings) = (&self.config.data, &self.settings);
        let is_batches = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
        let mut paths = data.path.iter().flat_map(Inputs::paths);
        let from_file = data.format == Format::Batches || paths.any(is_batches);
        let seq = settings.seq / 2;
        let helps = settings.seq.is_multiple_of(2) && seq >= SHORTEST;
        let more = set!(batch.accum = 2 * settings.accum);
        (helps && !from_file).then(|| set!(data.seq = seq).and(&more))
    }

    /// Weights and activations in bf16, with a master that takes no more than they did in f32.
    fn computed_in_bf16(&self) -> Option<Change> {
        let bf16 = set!(train.dtype = Some(FloatType::Bf16), "bf16");
        let master = set!(optim.master = MasterFormat::Remainder);
        (self.settings.dtype == DType::F32).then(|| match self.settings.states.master {
            MasterFormat::F32 => bf16.and(&master),
            _ => bf16,
        })
    }

    /// Tokens of a micro-batch, or of a part of one.
    fn tokens(&self) -> usize {
        self.settings.micro_batch * self.settings.part_seq()
    }

    /// Whether something that lives on the device could live on the host; not where host memory is the device's own.
    fn may_go(&self, home: &Home) -> bool {
        self.target == Target::Cuda && *home == Home::Device
    }

    /// Of ranks that divide them, each has its own part there. A pipeline's stage does not divide them.
    fn weights_on_host(&self) -> Option<Change> {
        let on_host = set!(offload.parameters = HostPlace::Pinned);
        let on_host = match self.settings.expert_unit {
            Some(_) => self.updated_at_the_end(on_host),
            None => on_host,
        };
        let helps = self.may_go(&self.settings.homes.weights);
        let divided = self.divided(Zero::Weights);
        let divided = divided.filter(|_| self.settings.pipeline.is_none());
        helps.then(|| match divided {
            Some(divided) => divided.and(&on_host),
            None => on_host,
        })
    }

    /// Of ranks that divide sums, each has few, and room for those of some units besides: only a pipeline's stages are helped much.
    fn gradients_on_host(&self) -> Option<Change> {
        let Settings {
            ranks, pipeline, ..
        } = &self.settings;
        let has_many = ranks.is_none() || pipeline.is_some();
        let helps = has_many && self.may_go(&self.settings.homes.gradients);
        helps.then(|| set!(offload.gradients = HostPlace::Pinned))
    }

    /// The run whose ranks of each machine have all weights together; none where ranks of several machines do not divide them, or where
    /// that is refused.
    pub(crate) fn within_machines(&self) -> Option<(Change, Setup)> {
        let ranks = self.settings.ranks.as_ref()?;
        let crosses = ranks.zero == Zero::Weights && ranks.rank.of > NVLINK_RANKS;
        let is_open = self.config.collectives.shard_group.is_none();
        let gathering = set!(collectives.shard_group = Some(NVLINK_RANKS), NVLINK_RANKS);
        let within = (crosses && is_open).then(|| self.with(&gathering))??;
        Some((gathering, within))
    }

    /// A later stage of what ranks divide; none where a rank has no others to divide with.
    fn divided(&self, zero: Zero) -> Option<Change> {
        let ranks = self.settings.ranks.as_ref()?;
        let helps = ranks.rank.of > 1 && ranks.zero < zero;
        helps.then(|| set!(collectives.zero = Some(zero), zero.stage()))
    }

    /// Fewer states of the gated delta rule; none where there is no such layer, or not all are kept.
    fn fewer_states(&self) -> Option<Change> {
        let settings = &self.settings;
        settings.model.delta.as_ref()?;
        let interval = balanced_interval(settings.seq);
        let is_longer = settings.state_interval == 1 && interval > 1;
        is_longer.then(|| set!(recompute.state_interval = Some(interval), interval))
    }

    /// About an eighth of a layer's experts in a unit; none where so few come already, or experts do not come and go.
    fn units_of_experts(&self) -> Option<Change> {
        let settings = &self.settings;
        let all = settings.model.experts.as_ref()?.count;
        let mut few = (1..=(all / EXPERT_UNITS).max(1)).rev();
        let experts = few.find(|few| all.is_multiple_of(*few))?;
        let homes = &settings.homes;
        let zero = settings.ranks.as_ref().map(|ranks| ranks.zero);
        let come_and_go = homes.weights != Home::Device
            || homes.gradients == Home::Pinned
            || zero >= Some(Zero::Gradients);
        let helps = come_and_go && settings.expert_unit.unwrap_or(all) > experts;
        let units = set!(memory.expert_unit = Some(experts), experts);
        let change = match homes.weights {
            Home::Device => units,
            _ => self.updated_at_the_end(units),
        };
        let changed = helps.then(|| self.with(&change))??.settings;
        changed
            .layout(&changed.architecture())
            .is_ok()
            .then_some(change)
    }

    /// A change with updates at the end of the step: in a forward pass they would need all experts of a block.
    fn updated_at_the_end(&self, change: Change) -> Change {
        match self.settings.homes.window {
            Window::Forward => change.and(&set!(offload.window = Window::End, "end")),
            Window::End => change,
        }
    }

    /// No gradients but those of the block at work, without clipping, which needs the norm of them all; none where ranks add
    /// theirs up.
    fn released_gradients(&self) -> Option<Change> {
        let settings = &self.settings;
        let on_device = settings.homes.gradients == Home::Device;
        let helps = settings.accum == 1 && on_device && settings.ranks.is_none();
        let unclipped = set!(optim.clip_norm = f64::INFINITY);
        helps.then(|| set!(optim.release = Release::Backward).and(&unclipped))
    }

    /// Full recompute, in tiles of tokens: otherwise a block's activations are all there while it is at work. None in FP8, whose
    /// scales are for whole micro-batches.
    fn tiles(&self) -> Option<Change> {
        let tile = (self.tokens() / 4).min(TILE_TOKENS);
        let now = self.settings.tile_tokens;
        if tile < SHORTEST || now.is_some_and(|now| now <= tile) {
            return None;
        }
        let in_tiles = set!(memory.tile_tokens = Some(tile), tile);
        match self.config.recompute.spec.trim().starts_with("full") {
            true => Some(in_tiles),
            false => Some(self.recompute("full")?.and(&in_tiles)),
        }
    }

    /// Full recompute, with what it keeps on the host; the last block keeps its own.
    fn block_inputs_on_host(&self) -> Option<Change> {
        let helps = self.target == Target::Cuda && self.settings.model.layers > 1;
        let inputs = set!(offload.activations = BLOCK_INPUT.to_string());
        helps.then(|| set!(recompute.spec = "full".to_string()).and(&inputs))
    }
}

/// The other keys of FP8, which are refused without it, go too.
fn without_fp8() -> Change {
    Change::new("fp8.recipe", "off".into(), |config| {
        config.fp8 = Fp8Config::default();
    })
}

/// No specifications of single layers.
fn no_layers() -> Change {
    set!(recompute.layers = BTreeMap::new(), "{}")
}

#[cfg(test)]
mod tests {
    use super::{Config, Policy, Setup, Target, levers, recompute_specs};
    use memory::Rank;

    /// A lever changes a configuration exactly as the flags do that are printed for it.
    #[test]
    fn levers_do_what_they_say() {
        let many = ["batch.micro=6", "data.seq=512", "eval.every=5"];
        let clauses = "recompute.layers={\"0\" = \"recompute: mlp\"}";
        let experts = [
            "train.device=cuda",
            "model.family=mixtral",
            "model.experts.normed=true",
            "model.experts.count=64",
            "model.experts.chosen=2",
            "model.experts.ffn=64",
            "offload.parameters=pinned",
        ];
        let hybrid = [
            "train.device=cuda",
            "model.attention_gate=true",
            "model.qk_norm=true",
            "model.zero_centered_norm=true",
            "model.delta.key_heads=2",
            "model.delta.value_heads=4",
            "model.delta.key_head_dim=64",
            "model.delta.value_head_dim=64",
            "data.seq=2048",
        ];
        let runs: [(&[&str], Option<usize>); 6] = [
            (&experts, None),
            (&hybrid, None),
            (&many, None),
            (&["attention.backend=eager", "train.device=cuda"], None),
            (
                &["train.device=cuda", clauses, "offload.activations=qkv"],
                None,
            ),
            (&many, Some(4)),
        ];
        let mut said = std::collections::BTreeSet::new();
        for (set, ranks) in runs {
            let mut config = Config::default();
            if let Some(of) = ranks {
                config.join(Rank { number: 1, of }).unwrap();
            }
            let set: Vec<String> = set.iter().map(ToString::to_string).collect();
            let run = Setup::new(config.with(&set).unwrap(), Target::Cuda).unwrap();
            let alone = levers(&run).filter_map(|lever| (lever.pull)(&run));
            let together = run
                .smaller()
                .into_iter()
                .chain([run.automatic_recompute(1 << 30)])
                .chain(run.adapters().into_iter().map(|(_, change)| change));
            let all: Vec<_> = alone.chain(together).collect();
            let on_disk = all.iter().filter_map(|change| change.with_states_on_disk());
            for change in on_disk.chain(all.iter().cloned()) {
                let put = change.applied_to(&run.config).ok();
                assert_eq!(
                    put,
                    run.config.with(&change.set()).ok(),
                    "{:?}",
                    change.set()
                );
                said.extend(put.map(|_| change.set().concat()));
            }
        }
        assert!(said.len() > 60, "{}: {said:?}", said.len());
        assert!(said.contains("memory.expert_unit=8offload.window=end"));
        assert!(said.contains("recompute.state_interval=8"));
    }

    #[test]
    fn chunks_of_blocks_fit_the_number_of_layers() {
        let uniform = |layers| -> Vec<String> {
            let specs = recompute_specs(&Policy::keep_all(layers)).into_iter();
            let chunks =
                specs.filter_map(|spec| spec.strip_prefix("full:uniform:").map(String::from));
            chunks.collect()
        };
        assert_eq!(uniform(1), [""; 0]);
        assert_eq!(uniform(3), ["2"]);
        assert_eq!(uniform(4), ["2", "4"]);
        assert_eq!(uniform(48), ["2", "4", "7"]);
        assert_eq!(uniform(126), ["2", "4", "12"]);
    }
}
