//! What a configuration says of experts and of latent attention.

use kernels::operation::{RouterGroups, RouterScore, Routing};
use serde::{Deserialize, Serialize};

/// A mixture of experts in place of the feed-forward layer: a router sends each token to some of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsConfig {
    /// Experts of a layer that a router chooses from.
    pub count: usize,
    /// Experts that each token is sent to.
    pub chosen: usize,
    /// Width of one expert.
    pub ffn: usize,
    /// Width of the shared experts together, to which every token goes; 0: there are none.
    #[serde(default)]
    pub shared_ffn: usize,
    /// What the shared experts give is multiplied by a sigmoid of each token's own (Qwen2-MoE).
    #[serde(default)]
    pub shared_gate: bool,
    /// Layers with a dense feed-forward layer instead, counted from 0 and in order.
    #[serde(default)]
    pub dense_layers: Vec<usize>,
    /// How scores follow from the router's logits.
    #[serde(default)]
    pub score: ScoreKind,
    /// The weights of the chosen are divided by their sum.
    #[serde(default)]
    pub normed: bool,
    /// The factor on weights.
    #[serde(default = "one")]
    pub factor: f64,
    /// Groups of neighbouring experts; 1: experts are chosen from all.
    #[serde(default = "one_group")]
    pub groups: usize,
    /// Groups that a token's experts are chosen from.
    #[serde(default = "one_group")]
    pub chosen_groups: usize,
    /// The router's product and the experts' have biases (gpt-oss).
    #[serde(default)]
    pub biases: bool,
    /// A bias is added to scores where experts are chosen, which the load of experts moves (DeepSeek-V3).
    #[serde(default)]
    pub choice_bias: bool,
}

/// How scores follow from a router's logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreKind {
    /// The softmax over all experts.
    #[default]
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

impl ScoreKind {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["softmax", "sigmoid"];
}

/// Which choices and scores a loss of balance takes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterAuxKind {
    /// Those of all layers of a micro-batch, as transformers does.
    #[default]
    Pooled,
    /// Those of a layer, as Megatron's `aux_loss`.
    Layer,
    /// Those of a sequence in a layer, as Megatron's `seq_aux_loss`.
    Sequence,
}

impl RouterAuxKind {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["pooled", "layer", "sequence"];
}

/// Latent attention: keys and values come from one narrow vector a token (DeepSeek-V2, 2024). A head of queries and keys
/// is `model.head_dim` wide.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentConfig {
    /// Width of the latent that keys and values are made from.
    pub kv: usize,
    /// Width of the latent that queries are made from; absent: they are made from the block's input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q: Option<usize>,
    /// Columns of a head of queries and keys that the rotary embedding turns.
    pub rotary_dim: usize,
    /// Width of a head of values.
    pub v_head_dim: usize,
    /// Neighbouring columns are turned together, not one of each half.
    #[serde(default)]
    pub neighbours: bool,
}

fn one() -> f64 {
    1.0
}

fn one_group() -> usize {
    1
}

impl ExpertsConfig {
    /// Experts in all layers, chosen by a softmax over all, with weights that add up to 1 (Mixtral): how many there are, how many a token
    /// is sent to, and the width of one.
    pub fn plain([count, chosen, ffn]: [usize; 3]) -> ExpertsConfig {
        ExpertsConfig {
            count,
            chosen,
            ffn,
            shared_ffn: 0,
            shared_gate: false,
            dense_layers: Vec::new(),
            score: ScoreKind::Softmax,
            normed: true,
            factor: 1.0,
            groups: 1,
            chosen_groups: 1,
            biases: false,
            choice_bias: false,
        }
    }

    /// The gate of shared experts, as a router with one expert: the weight is the sigmoid of its logit.
    pub(crate) const GATE: Routing = Routing {
        choices: 1,
        score: RouterScore::Sigmoid,
        is_normed: false,
        factor: 1.0,
        groups: None,
    };

    /// How the router chooses, and how it weighs what it chose.
    pub fn routing(&self) -> Routing {
        Routing {
            choices: self.chosen,
            score: match self.score {
                ScoreKind::Softmax => RouterScore::Softmax,
                ScoreKind::Sigmoid => RouterScore::Sigmoid,
            },
            is_normed: self.normed,
            factor: self.factor as f32,
            groups: (self.groups > 1).then_some(RouterGroups {
                count: self.groups,
                chosen: self.chosen_groups,
                best: match self.score {
                    ScoreKind::Softmax => 1,
                    ScoreKind::Sigmoid => 2,
                },
            }),
        }
    }

    /// Refuses numbers that make no experts, in a model of `layers` layers.
    pub(crate) fn check(&self, layers: usize) -> Result<(), String> {
        let [groups, chosen_groups] = [self.groups, self.chosen_groups];
        if [self.count, self.ffn, groups, chosen_groups].contains(&0) {
            return Err("count, ffn, groups and chosen_groups are at least 1".into());
        }
        if !self.count.is_multiple_of(groups) || chosen_groups > groups {
            return Err(format!(
                "{} experts in {groups} groups, of which {chosen_groups} are chosen: groups must divide count, and chosen_groups \
                 be at most groups",
                self.count
            ));
        }
        let size = self.count / groups;
        let choosable = chosen_groups * size;
        if !(1..=choosable).contains(&self.chosen) {
            return Err(format!(
                "chosen = {}; it must be from 1 to {choosable}, the experts of the chosen groups",
                self.chosen
            ));
        }
        if groups > 1 && self.score == ScoreKind::Sigmoid && size < 2 {
            return Err(
                "sigmoid scores rate a group by its best two experts, and a group has one".into(),
            );
        }
        if self.shared_gate && self.shared_ffn == 0 {
            return Err("shared_gate is set, and shared_ffn is 0".into());
        }
        if !(self.factor.is_finite() && self.factor > 0.0) {
            return Err(format!("factor = {}; it must be above 0", self.factor));
        }
        let dense = &self.dense_layers;
        if dense.len() >= layers {
            return Err(format!(
                "dense_layers = {dense:?} leave no layer to the experts; leave model.experts out"
            ));
        }
        if !dense.is_sorted_by(|one, next| one < next)
            || dense.last().is_some_and(|last| *last >= layers)
        {
            return Err(format!(
                "dense_layers = {dense:?}; write each of the {layers} layers, counted from 0, at most once and in order"
            ));
        }
        Ok(())
    }

    /// Whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        !self.dense_layers.contains(&layer)
    }
}

impl LatentConfig {
    /// Refuses widths that do not fit heads `head_dim` wide.
    pub(crate) fn check(&self, head_dim: usize) -> Result<(), String> {
        if [self.kv, self.q.unwrap_or(1), self.v_head_dim].contains(&0) {
            return Err("kv, q and v_head_dim are at least 1".into());
        }
        let turned = self.rotary_dim;
        if turned == 0 || !turned.is_multiple_of(2) || turned >= head_dim {
            return Err(format!(
                "rotary_dim = {turned}; it must be even, and less than model.head_dim = {head_dim}"
            ));
        }
        Ok(())
    }
}
