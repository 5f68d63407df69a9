//! The stages of a block and the activations that they read and write: the table that everything else follows.

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
    /// Attention probabilities.
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
    pub const ALL: [Activation; 16] = [
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
            Activation::Probs => Label::CoreAttn,
            Activation::O => Label::AttnValue,
            Activation::X2 => Label::AttnOut,
            Activation::Gate | Activation::Up => Label::Mlp,
            Activation::Act => Label::MlpAct,
        }
    }

    /// The stage that makes it; of the block before for [`Activation::X`].
    pub fn producer(self) -> Stage {
        let writes = |stage: &&Stage| stage.writes().contains(&self);
        *Stage::BLOCK
            .iter()
            .find(writes)
            .expect("every activation is written by a stage")
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

    /// What naming the label drops.
    pub fn drops(self) -> &'static [Activation] {
        use Activation::*;
        match self {
            Label::BlockInput => &[X],
            Label::Layernorm => &[H1, Rstd1, H2, Rstd2],
            Label::Qkv => &[QRaw, KRaw, Q, K, V],
            Label::CoreAttn => &[Probs],
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

    /// What the forward pass of the stage reads.
    pub fn reads(self) -> &'static [Activation] {
        use Activation::*;
        match self {
            Stage::Embedding => &[],
            Stage::AttnNorm => &[X],
            Stage::Qkv => &[H1],
            Stage::CoreAttn => &[Q, K, V],
            Stage::AttnOut => &[O, X],
            Stage::MlpNorm => &[X2],
            Stage::MlpUp => &[H2],
            Stage::MlpAct => &[Gate, Up],
            Stage::MlpDown => &[Act, X2],
        }
    }

    /// What the stage writes; [`Activation::X`] is the next block's.
    pub fn writes(self) -> &'static [Activation] {
        use Activation::*;
        match self {
            Stage::Embedding | Stage::MlpDown => &[X],
            Stage::AttnNorm => &[H1, Rstd1],
            Stage::Qkv => &[QRaw, KRaw, Q, K, V],
            Stage::CoreAttn => &[Probs, O],
            Stage::AttnOut => &[X2],
            Stage::MlpNorm => &[H2, Rstd2],
            Stage::MlpUp => &[Gate, Up],
            Stage::MlpAct => &[Act],
        }
    }

    /// What the backward pass of the stage reads.
    pub fn backward_reads(self) -> &'static [Activation] {
        use Activation::*;
        match self {
            Stage::Embedding => &[],
            Stage::AttnNorm => &[X, Rstd1],
            Stage::Qkv => &[H1, QRaw, KRaw],
            Stage::CoreAttn => &[Q, K, V, Probs],
            Stage::AttnOut => &[O],
            Stage::MlpNorm => &[X2, Rstd2],
            Stage::MlpUp => &[H2],
            Stage::MlpAct => &[Gate, Up],
            Stage::MlpDown => &[Act],
        }
    }

    /// The first and the last stage of a block that read an activation in the forward pass.
    pub fn first_and_last_reader(activation: Activation) -> Option<(Stage, Stage)> {
        let mut readers = Stage::BLOCK
            .into_iter()
            .filter(|stage| stage.reads().contains(&activation));
        let first = readers.next()?;
        Some((first, readers.next_back().unwrap_or(first)))
    }

    /// The stage of a block after whose backward pass an activation is released: the first in forward order that
    /// reads it, or its own where that reads its outputs.
    pub fn released_after(activation: Activation) -> Stage {
        let producer = activation.producer();
        if activation != Activation::X && producer.backward_reads().contains(&activation) {
            return producer;
        }
        let readers = Stage::first_and_last_reader(activation);
        readers
            .expect(
                "an activation that its own backward pass does not read is read by a later stage",
            )
            .0
    }
}

/// How often each stage was replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts([usize; 9]);

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
        for stage in [Stage::Embedding].into_iter().chain(Stage::BLOCK) {
            if self.get(stage) > 0 {
                map.serialize_entry(stage.name(), &self.get(stage))?;
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_activation_is_written_once_and_used() {
        for activation in Activation::ALL {
            let writers = Stage::BLOCK
                .iter()
                .filter(|stage| stage.writes().contains(&activation))
                .count();
            assert_eq!(writers, 1, "{activation:?}");
            let used = Stage::BLOCK
                .iter()
                .any(|stage| stage.backward_reads().contains(&activation));
            assert!(used, "{activation:?} is saved for no backward pass");
        }
    }

    #[test]
    fn release_points_follow_from_the_table() {
        assert_eq!(Stage::released_after(Activation::X), Stage::AttnNorm);
        assert_eq!(Stage::released_after(Activation::Probs), Stage::CoreAttn);
        assert_eq!(Stage::released_after(Activation::X2), Stage::MlpNorm);
        assert_eq!(Stage::released_after(Activation::QRaw), Stage::Qkv);
        assert_eq!(Stage::released_after(Activation::O), Stage::AttnOut);
        assert_eq!(
            Stage::first_and_last_reader(Activation::X),
            Some((Stage::AttnNorm, Stage::AttnOut))
        );
        assert_eq!(Stage::first_and_last_reader(Activation::Rstd1), None);
    }
}
