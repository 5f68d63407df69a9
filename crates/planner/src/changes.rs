//! Settings that a run might add, as `--set` takes them: what a plan compares, and what an out-of-memory error tries.

use data::{Format, Inputs};
use kernels::Target;
use memory::{DType, Home};
use model::{Attention, Policy, Spec};
use optim::{MasterFormat, MomentFormat};
use settings::{Config, Settings};
use std::path::Path;
use units::Zero;

/// What full recompute keeps, and host memory can hold.
const BLOCK_INPUT: &str = "block_input";

const STATES_ON_HOST: &str = "offload.optimizer=pinned";

/// A folder for states, beside the run directories; the user will name a faster disk.
const SCRATCH: &str = "./scratch";

/// Tokens of a tile: so many rows still fill a GPU in every product.
const TILE_TOKENS: usize = 8192;

/// Sequences are not made shorter than this.
pub(crate) const SHORTEST: usize = 128;

/// Settings to add to a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Change {
    /// Each as `--set` takes it.
    pub(crate) set: Vec<String>,
    /// The loss is no longer bitwise the same then, if only by the order of sums.
    pub(crate) changes_math: bool,
}

impl Change {
    /// A change that keeps the bits of the loss.
    fn exact<const N: usize>(set: [String; N]) -> Change {
        Change {
            set: set.into(),
            changes_math: false,
        }
    }

    /// A change of the loss, if only of its last bits.
    fn inexact<const N: usize>(set: [String; N]) -> Change {
        Change {
            set: set.into(),
            changes_math: true,
        }
    }

    /// Both, this one first.
    fn and(&self, other: &Change) -> Change {
        Change {
            set: [&self.set[..], &other.set].concat(),
            changes_math: self.changes_math || other.changes_math,
        }
    }

    /// The settings of a run with the change; none where it would be refused.
    pub(crate) fn applied_to(&self, config: &Config) -> Option<Settings> {
        Settings::new(&config.with(&self.set).ok()?).ok()
    }

    /// The same with optimizer states in a folder, where it puts them into host memory.
    pub(crate) fn with_states_on_disk(&self) -> Option<Change> {
        let mut on_disk = self.clone();
        let states = on_disk.set.iter_mut().find(|set| *set == STATES_ON_HOST)?;
        *states = format!("offload.optimizer={SCRATCH}");
        Some(on_disk)
    }

    /// Whether something waits in host memory that did not.
    pub(crate) fn offloads(&self) -> bool {
        let offloads = |set: &String| set.starts_with("offload.") && !set.ends_with("=none");
        self.set.iter().any(offloads)
    }
}

/// Specifications that are compared for every model.
const STRATEGIES: [&str; 9] = [
    "none",
    "core_attn",
    "layernorm",
    "mlp_act",
    "qkv",
    "mlp",
    "core_attn,layernorm,mlp_act",
    "core_attn,layernorm,mlp",
    "full",
];

/// Specifications that a model is tried with: those of [`STRATEGIES`] whose labels it has, and `full:uniform:N` for small N
/// and for the root of the number of layers (Chen et al. 2016).
pub(crate) fn recompute_specs(policy: &Policy) -> Vec<String> {
    let (labels, layers) = (policy.labels(), policy.layers());
    let root = (1..).find(|root| root * root >= layers).unwrap_or(layers);
    let mut chunks = vec![2, 4, root];
    chunks.sort();
    chunks.dedup();
    chunks.retain(|chunk| (2..=layers).contains(chunk));
    let uniform = chunks
        .into_iter()
        .map(|chunk| format!("full:uniform:{chunk}"));
    let strategies = STRATEGIES.into_iter();
    let known = strategies.filter(|spec| Spec::parse(spec, labels).is_ok());
    known.map(String::from).chain(uniform).collect()
}

/// Another recompute specification; none if it does not go with those of single layers. Offload of activations ends where
/// what is offloaded would be recomputed.
pub(crate) fn recompute(config: &Config, spec: &str) -> Option<Change> {
    let mut recompute = Change::exact([format!("recompute.spec={spec}")]);
    // Specifications of single layers stay; clauses say a whole policy, which another takes the place of.
    let mut layers = config.recompute.layers.values();
    if layers.len() > 0 && layers.all(|text| Policy::is_written_in_clauses(text)) {
        recompute = recompute.and(&Change::exact(["recompute.layers={}".into()]));
    }
    let resident = recompute.and(&Change::exact(["offload.activations=none".into()]));
    let mut ways = [recompute, resident].into_iter();
    ways.find(|change| change.applied_to(config).is_some())
}

/// What to recompute chosen within a budget; that decides for every layer.
pub(crate) fn automatic_recompute(config: &Config, budget: u64) -> Change {
    let auto = Change::exact([
        "recompute.spec=auto".into(),
        format!("memory.budget={budget}"),
    ]);
    match config.recompute.layers.is_empty() {
        true => auto,
        false => auto.and(&Change::exact(["recompute.layers={}".into()])),
    }
}

/// What a plan compares, each change alone and in words: grouped heads, the chunked head, accumulation, attention, and
/// formats and places of states, weights and gradients.
pub(crate) fn compared(
    config: &Config,
    settings: &Settings,
    target: Target,
) -> Vec<(String, Change)> {
    let mut changes = Vec::new();
    let (heads, tokens) = (settings.model.heads, settings.micro_batch * settings.seq);
    if settings.model.kv_heads < heads {
        changes.push((
            format!("every query head with keys and values of its own (kv_heads = {heads})"),
            Change::inexact([format!("model.kv_heads={heads}")]),
        ));
    }
    if settings.head_chunk < tokens {
        changes.push((
            format!("logits of all {tokens} tokens at once (head_chunk = {tokens})"),
            Change::inexact([format!("memory.head_chunk={tokens}")]),
        ));
    }
    let (accum, micro) = (2 * settings.accum, 2 * settings.micro_batch);
    changes.push((
        format!("twice the accumulation (accum = {accum})"),
        Change::inexact([format!("batch.accum={accum}")]),
    ));
    changes.push((
        format!("twice the micro-batch (micro = {micro})"),
        Change::inexact([format!("batch.micro={micro}")]),
    ));
    let (other, scores) = match settings.attention {
        Attention::Eager => (Attention::Flash, "never stored"),
        Attention::Flash | Attention::Cudnn => (Attention::Eager, "stored"),
    };
    let name = other.name();
    changes.push((
        format!("scores {scores} (--attention {name})"),
        attention(other),
    ));
    let states = [
        (
            "8-bit moments (--state-dtype 8bit)",
            eight_bit_moments(settings),
        ),
        (
            "an exact master in 16 bits more (--master bf16-split)",
            split_master(settings),
        ),
        (
            "gradients accumulated in bf16 (--grad-dtype bf16)",
            narrow_gradients(settings),
        ),
        (
            "optimizer states on the host (--offload-optimizer pinned)",
            states_on_host(settings, target),
        ),
        (
            "weights on the host (--offload-parameters pinned)",
            weights_on_host(settings, target),
        ),
        (
            "gradients on the host (--offload-gradients pinned)",
            gradients_on_host(settings, target),
        ),
        (
            "gradients released in the backward pass, without clipping (optim.release=backward)",
            released_gradients(settings),
        ),
        (
            "full recompute, in tiles of tokens (memory.tile_tokens)",
            tiles(config, settings),
        ),
    ];
    let states = states.into_iter();
    changes.extend(states.filter_map(|(about, change)| Some((about.into(), change?))));
    changes
}

/// What may make a run fit, in the order in which it is tried.
pub(crate) fn smaller(config: &Config, settings: &Settings, target: Target) -> Vec<Change> {
    let is_new = |change: &Change| {
        let applied = change.applied_to(config);
        applied.is_some_and(|applied| applied.policy != settings.policy)
    };
    let recompute = |spec: &str| recompute(config, spec).filter(is_new);
    let full = recompute("full");
    let specs = recompute_specs(&settings.policy);
    let mut changes: Vec<Change> = specs.iter().filter_map(|spec| recompute(spec)).collect();
    if settings.attention == Attention::Eager {
        changes.push(attention(Attention::Flash));
    }

    // Formats of states are changed one after the other, each beside those before.
    let formats = [
        split_master(settings),
        eight_bit_moments(settings),
        narrow_gradients(settings),
    ];
    let mut states = Change::default();
    for format in formats.iter().flatten() {
        states = states.and(format);
        changes.push(states.clone());
    }
    changes.extend(full.as_ref().map(|full| states.and(full)));

    let stages = Zero::ALL.into_iter();
    for stage in stages.filter_map(|zero| divided(settings, zero)) {
        let and_full = full.as_ref().map(|full| stage.and(full));
        changes.extend([Some(stage), and_full].into_iter().flatten());
    }

    let on_host = states_on_host(settings, target);
    let inputs = block_inputs_on_host(settings, target).filter(is_new);
    let both = |one: &Option<Change>| Some(one.as_ref()?.and(on_host.as_ref()?));
    let (full_and_states, inputs_and_states) = (both(&full), both(&inputs));
    let elsewhere = all_on_host(settings, target);
    let all = |one: &Option<Change>| Some(one.as_ref()?.and(elsewhere.as_ref()?));
    let tiles = tiles(config, settings);
    let inputs_in_tiles = inputs.as_ref().zip(tiles.as_ref());
    let inputs_in_tiles = inputs_in_tiles.map(|(inputs, tiles)| tiles.and(inputs));
    let further = [
        all(&full),
        all(&inputs),
        all(&inputs_in_tiles),
        tiles,
        elsewhere.clone(),
    ];
    let on_host = [on_host, full_and_states, inputs, inputs_and_states];
    changes.extend(on_host.into_iter().chain(further).flatten());
    changes.extend(released_gradients(settings));

    let micro_batch = settings.micro_batch;
    for micro in (1..micro_batch).rev() {
        if micro_batch.is_multiple_of(micro) {
            let accum = settings.accum * (micro_batch / micro);
            let split = [
                format!("batch.micro={micro}"),
                format!("batch.accum={accum}"),
            ];
            let split = Change::inexact(split);
            let and_full = full.as_ref().map(|full| split.and(full));
            changes.extend([Some(split), and_full].into_iter().flatten());
        }
    }
    let chunk = settings.head_chunk.div_ceil(4);
    changes.push(Change::inexact([format!("memory.head_chunk={chunk}")]));
    changes.extend(smaller_evaluations(settings));
    changes
}

/// Weights, gradients and states on the host: those of them that are not there.
fn all_on_host(settings: &Settings, target: Target) -> Option<Change> {
    let places = [
        states_on_host(settings, target),
        weights_on_host(settings, target),
        gradients_on_host(settings, target),
    ];
    places
        .into_iter()
        .flatten()
        .reduce(|one, other| one.and(&other))
}

/// Micro-batches of evaluations, halved again and again: they change no bit of what is trained.
fn smaller_evaluations(settings: &Settings) -> impl Iterator<Item = Change> {
    let half = |rows: &usize| Some(rows / 2).filter(|rows| *rows > 0);
    let rows = settings.between.evaluation.and_then(|rows| half(&rows));
    let rows = std::iter::successors(rows, half);
    rows.map(|rows| Change::exact([format!("eval.micro_batch={rows}")]))
}

/// What the run recomputes, and one label more; none where that changes nothing.
pub(crate) fn recompute_too(config: &Config, settings: &Settings, label: &str) -> Option<Change> {
    let spec = match config.recompute.spec.trim() {
        "none" => label.to_string(),
        spec => format!("{spec},{label}"),
    };
    recompute_anew(config, settings, &spec)
}

/// Another recompute specification; none where that changes nothing.
pub(crate) fn recompute_anew(config: &Config, settings: &Settings, spec: &str) -> Option<Change> {
    let change = recompute(config, spec)?;
    (change.applied_to(config)?.policy != settings.policy).then_some(change)
}

/// The next smaller micro-batch that divides this one, and as many more of them.
pub(crate) fn smaller_micro_batch(settings: &Settings) -> Option<Change> {
    let whole = settings.micro_batch;
    let micro = (1..whole)
        .rev()
        .find(|micro| whole.is_multiple_of(*micro))?;
    let accum = settings.accum * (whole / micro);
    Some(Change::inexact([
        format!("batch.micro={micro}"),
        format!("batch.accum={accum}"),
    ]))
}

/// Sequences of half the length, and twice as many of them; none below [`SHORTEST`], or where a file brings them.
pub(crate) fn shorter_sequences(config: &Config, settings: &Settings) -> Option<Change> {
    let is_batches = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let mut paths = config.data.path.iter().flat_map(Inputs::paths);
    let from_file = config.data.format == Format::Batches || paths.any(is_batches);
    let seq = settings.seq / 2;
    let helps = settings.seq.is_multiple_of(2) && seq >= SHORTEST;
    let accum = 2 * settings.accum;
    (helps && !from_file)
        .then(|| Change::inexact([format!("data.seq={seq}"), format!("batch.accum={accum}")]))
}

/// Weights and activations in bf16, with a master that takes no more than they did in f32.
pub(crate) fn computed_in_bf16(settings: &Settings) -> Option<Change> {
    let bf16 = Change::inexact(["train.dtype=bf16".into()]);
    let master = Change::exact([format!("optim.master={}", MasterFormat::Remainder)]);
    (settings.dtype == DType::F32).then(|| match settings.states.master {
        MasterFormat::F32 => bf16.and(&master),
        _ => bf16,
    })
}

/// Scores that are never stored, where they are.
pub(crate) fn flash_attention(settings: &Settings) -> Option<Change> {
    (settings.attention == Attention::Eager).then(|| attention(Attention::Flash))
}

fn attention(kind: Attention) -> Change {
    Change::inexact([format!("attention.backend={}", kind.name())])
}

pub(crate) fn split_master(settings: &Settings) -> Option<Change> {
    let helps = settings.dtype == DType::BF16 && settings.states.master == MasterFormat::F32;
    helps.then(|| Change::exact([format!("optim.master={}", MasterFormat::Remainder)]))
}

pub(crate) fn eight_bit_moments(settings: &Settings) -> Option<Change> {
    let helps = settings.states.moments != MomentFormat::Quantised;
    helps.then(|| Change::inexact([format!("optim.state_dtype={}", MomentFormat::Quantised)]))
}

pub(crate) fn narrow_gradients(settings: &Settings) -> Option<Change> {
    let helps = settings.states.gradients == DType::F32;
    helps.then(|| Change::inexact(["optim.grad_dtype=bf16".into()]))
}

/// None where host memory is the device's own.
pub(crate) fn states_on_host(settings: &Settings, target: Target) -> Option<Change> {
    let helps = target == Target::Cuda && settings.homes.states == Home::Device;
    helps.then(|| Change::exact([STATES_ON_HOST.into()]))
}

/// As [`states_on_host`], of weights. Of ranks, each has its own part of them there, once they are divided.
pub(crate) fn weights_on_host(settings: &Settings, target: Target) -> Option<Change> {
    let helps = target == Target::Cuda && settings.homes.weights == Home::Device;
    let on_host = Change::exact(["offload.parameters=pinned".into()]);
    helps.then(|| match divided(settings, Zero::Weights) {
        Some(divided) => divided.and(&on_host),
        None => on_host,
    })
}

/// A later stage of what ranks divide; none where a rank has no others to divide with.
pub(crate) fn divided(settings: &Settings, zero: Zero) -> Option<Change> {
    let ranks = settings.ranks.as_ref()?;
    let helps = ranks.rank.of > 1 && ranks.zero < zero;
    helps.then(|| Change::exact([format!("collectives.zero={}", zero.stage())]))
}

/// As [`states_on_host`], of gradients; none where ranks send them.
pub(crate) fn gradients_on_host(settings: &Settings, target: Target) -> Option<Change> {
    let on_device = settings.homes.gradients == Home::Device;
    let helps = target == Target::Cuda && on_device && settings.ranks.is_none();
    helps.then(|| Change::exact(["offload.gradients=pinned".into()]))
}

/// No gradients but those of the block at work, without clipping, which needs the norm of them all; none where ranks add
/// theirs up.
pub(crate) fn released_gradients(settings: &Settings) -> Option<Change> {
    let on_device = settings.homes.gradients == Home::Device;
    let helps = settings.accum == 1 && on_device && settings.ranks.is_none();
    helps.then(|| {
        Change::inexact([
            "optim.release=backward".into(),
            "optim.clip_norm=inf".into(),
        ])
    })
}

/// Full recompute, in tiles of tokens: otherwise a block's activations are all there while it is at work.
pub(crate) fn tiles(config: &Config, settings: &Settings) -> Option<Change> {
    let tokens = settings.micro_batch * settings.seq;
    let tile = (tokens / 4).min(TILE_TOKENS);
    let helps = tile >= SHORTEST && settings.tile_tokens.is_none_or(|now| now > tile);
    let in_tiles = Change::inexact([format!("memory.tile_tokens={tile}")]);
    let is_full = config.recompute.spec.trim().starts_with("full");
    helps.then_some(())?;
    match is_full {
        true => Some(in_tiles),
        false => Some(recompute(config, "full")?.and(&in_tiles)),
    }
}

/// Full recompute, with what it keeps on the host; the last block keeps its own.
pub(crate) fn block_inputs_on_host(settings: &Settings, target: Target) -> Option<Change> {
    let helps = target == Target::Cuda && settings.model.layers > 1;
    let set = || {
        [
            "recompute.spec=full".into(),
            format!("offload.activations={BLOCK_INPUT}"),
        ]
    };
    helps.then(|| Change::exact(set()))
}

#[cfg(test)]
mod tests {
    use super::{Change, Policy, STATES_ON_HOST, recompute_specs};

    #[test]
    fn states_go_to_a_disk_where_the_host_would_hold_them() {
        let set = ["recompute.spec=full".into(), STATES_ON_HOST.into()];
        let on_disk = Change::exact(set).with_states_on_disk().unwrap();
        assert_eq!(
            on_disk.set,
            ["recompute.spec=full", "offload.optimizer=./scratch"]
        );
        let without = Change::exact(["offload.parameters=pinned".into()]);
        assert_eq!(without.with_states_on_disk(), None);
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
