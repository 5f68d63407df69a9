//! The names of it all: stages, the activations that they read and write, and what policies call these.

use serde::ser::{Serialize, SerializeMap, Serializer};

/// A named intermediate result of a block. `b` batch, `s` sequence, `h` hidden, `q`/`k` widths of all query or
/// key-value heads, `a` query heads, `f` feed-forward width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Activation {
    /// The block's input `[b s, h]`.
    X,
    /// Normalised input of attention `[b s, h]`.
    H1,
    /// Its reciprocal root mean square `[b s]`.
    Rstd1,
    /// Queries before their norm `[b s, q]`, in models that have one.
    QRaw,
    /// Keys before their norm `[b s, k]`, in models that have one.
    KRaw,
    /// Queries after bias, norm and rotary embedding `[b s, q]`.
    Q,
    /// Keys after bias, norm and rotary embedding `[b s, k]`.
    K,
    /// Values `[b s, k]`.
    V,
    /// Attention probabilities `[b, a, s, s]`.
    Probs,
    /// Output of attention, before its projection `[b s, q]`.
    O,
    /// Logarithm of the sum of the exponentials of a query's scores `[b, a, s]` f32, under flash attention.
    Lse,
    /// The residual stream after attention `[b s, h]`.
    X2,
    /// Normalised input of the feed-forward layer `[b s, h]`.
    H2,
    /// Its reciprocal root mean square `[b s]`.
    Rstd2,
    /// Gate `[b s, f]`.
    Gate,
    /// Up projection `[b s, f]`.
    Up,
    /// silu(gate) up `[b s, f]`.
    Act,
}

/// What a recompute policy calls a group of activations; Megatron's module names where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Label {
    /// The block's input: dropped by `full:uniform:N` alone.
    BlockInput,
    /// Both norms' outputs and statistics.
    Layernorm,
    /// Queries, keys and values.
    Qkv,
    /// Attention probabilities; under flash attention the log-sum-exp.
    CoreAttn,
    /// What attention hands to its projection: dropped by `full` alone.
    AttnValue,
    /// The residual stream between attention and feed-forward.
    AttnOut,
    /// Gate, up and their product.
    Mlp,
    /// The product alone.
    MlpAct,
}

impl Activation {
    /// All activations, in forward order.
    pub const ALL: [Activation; 17] = [
        Activation::X,
        Activation::H1,
        Activation::Rstd1,
        Activation::QRaw,
        Activation::KRaw,
        Activation::Q,
        Activation::K,
        Activation::V,
        Activation::Probs,
        Activation::O,
        Activation::Lse,
        Activation::X2,
        Activation::H2,
        Activation::Rstd2,
        Activation::Gate,
        Activation::Up,
        Activation::Act,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Activation::X => "x",
            Activation::H1 => "h1",
            Activation::Rstd1 => "rstd1",
            Activation::QRaw => "q_raw",
            Activation::KRaw => "k_raw",
            Activation::Q => "q",
            Activation::K => "k",
            Activation::V => "v",
            Activation::Probs => "probs",
            Activation::O => "o",
            Activation::Lse => "lse",
            Activation::X2 => "x2",
            Activation::H2 => "h2",
            Activation::Rstd2 => "rstd2",
            Activation::Gate => "gate",
            Activation::Up => "up",
            Activation::Act => "act",
        }
    }

    /// The smallest group that a policy names it by.
    pub fn label(self) -> Label {
        match self {
            Activation::X => Label::BlockInput,
            Activation::H1 | Activation::Rstd1 | Activation::H2 | Activation::Rstd2 => {
                Label::Layernorm
            }
            Activation::QRaw | Activation::KRaw | Activation::Q | Activation::K | Activation::V => {
                Label::Qkv
            }
            Activation::Probs | Activation::Lse => Label::CoreAttn,
            Activation::O => Label::AttnValue,
            Activation::X2 => Label::AttnOut,
            Activation::Gate | Activation::Up => Label::Mlp,
            Activation::Act => Label::MlpAct,
        }
    }
}

impl Label {
    /// All labels, in forward order.
    pub const ALL: [Label; 8] = [
        Label::BlockInput,
        Label::Layernorm,
        Label::Qkv,
        Label::CoreAttn,
        Label::AttnValue,
        Label::AttnOut,
        Label::Mlp,
        Label::MlpAct,
    ];

    /// The labels that a comma list may name.
    pub const NAMED: [Label; 6] = [
        Label::Layernorm,
        Label::Qkv,
        Label::CoreAttn,
        Label::AttnOut,
        Label::Mlp,
        Label::MlpAct,
    ];

    /// What naming the label drops, where the model has it.
    pub fn drops(self) -> &'static [Activation] {
        use Activation::*;
        match self {
            Label::BlockInput => &[X],
            Label::Layernorm => &[H1, Rstd1, H2, Rstd2],
            Label::Qkv => &[QRaw, KRaw, Q, K, V],
            Label::CoreAttn => &[Probs, Lse],
            Label::AttnValue => &[O],
            Label::AttnOut => &[X2],
            Label::Mlp => &[Gate, Up, Act],
            Label::MlpAct => &[Act],
        }
    }

    /// The name in reports and settings.
    pub fn name(self) -> &'static str {
        match self {
            Label::BlockInput => "block_input",
            Label::Layernorm => "layernorm",
            Label::Qkv => "qkv",
            Label::CoreAttn => "core_attn",
            Label::AttnValue => "attn_value",
            Label::AttnOut => "attn_out",
            Label::Mlp => "mlp",
            Label::MlpAct => "mlp_act",
        }
    }

    /// A clause that asks whether the nearest of some labels was meant; empty where none is near.
    pub(crate) fn hint(name: &str, labels: &[Label]) -> String {
        let distance = |label: &&Label| strsim::damerau_levenshtein(label.name(), name);
        let nearest = labels.iter().min_by_key(distance);
        let near = nearest.filter(|label| distance(label) <= 1 + name.len() / 3);
        near.map_or(String::new(), |label| {
            format!("; did you mean `{}`?", label.name())
        })
    }
}

/// A step of the forward pass that is run, and replayed, as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Token embedding: writes the first block's `x`.
    Embedding,
    /// RMSNorm before attention.
    AttnNorm,
    /// Query, key and value projections, bias, norm, rotary embedding.
    Qkv,
    /// Scores, softmax, weighted values.
    CoreAttn,
    /// Output projection and residual.
    AttnOut,
    /// RMSNorm before the feed-forward layer.
    MlpNorm,
    /// Gate and up projections.
    MlpUp,
    /// silu(gate) up.
    MlpAct,
    /// Down projection and residual: writes the next block's `x`.
    MlpDown,
}

impl Stage {
    /// Number of stages.
    pub const COUNT: usize = 9;

    /// All stages, in forward order.
    pub const ALL: [Stage; Stage::COUNT] = [
        Stage::Embedding,
        Stage::AttnNorm,
        Stage::Qkv,
        Stage::CoreAttn,
        Stage::AttnOut,
        Stage::MlpNorm,
        Stage::MlpUp,
        Stage::MlpAct,
        Stage::MlpDown,
    ];

    /// The stages of a block, in forward order.
    pub const BLOCK: [Stage; 8] = [
        Stage::AttnNorm,
        Stage::Qkv,
        Stage::CoreAttn,
        Stage::AttnOut,
        Stage::MlpNorm,
        Stage::MlpUp,
        Stage::MlpAct,
        Stage::MlpDown,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embedding => "embedding",
            Stage::AttnNorm => "attn_norm",
            Stage::Qkv => "qkv",
            Stage::CoreAttn => "core_attn",
            Stage::AttnOut => "attn_out",
            Stage::MlpNorm => "mlp_norm",
            Stage::MlpUp => "mlp_up",
            Stage::MlpAct => "mlp_act",
            Stage::MlpDown => "mlp_down",
        }
    }
}

/// How often each stage was replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts([usize; Stage::COUNT]);

impl ReplayCounts {
    /// Counts a replay.
    pub fn add(&mut self, stage: Stage) {
        self.0[stage as usize] += 1;
    }

    /// Counts all replays of another micro-batch.
    pub fn add_all(&mut self, other: &ReplayCounts) {
        self.0
            .iter_mut()
            .zip(other.0)
            .for_each(|(count, more)| *count += more);
    }

    /// Replays of one stage.
    pub fn get(&self, stage: Stage) -> usize {
        self.0[stage as usize]
    }

    /// Replays of all stages.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

impl Serialize for ReplayCounts {
    /// A map from stage name to count, without zeros.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for stage in Stage::ALL {
            if self.get(stage) > 0 {
                map.serialize_entry(stage.name(), &self.get(stage))?;
            }
        }
        map.end()
    }
}
