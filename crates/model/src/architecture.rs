//! The structure of a model: an embedding, blocks, a head, and the parameters that they declared.

use crate::block::{Block, Facts, StageRun};
use crate::needed::{frozen_flops, lowest_trained, used_elements};
use crate::parameters::{Parameter, Parameters};
use crate::position::StagePosition;
use crate::stage::{Declared, Stage};
use crate::stages::{Head, Rotary};
use crate::{
    Activation, CacheShape, DropoutSite, Extent, Labels, LayerActivation, ParameterId,
    RouterLosses, SharingRanks,
};
use memory::Role;
use std::ops::Range;

/// The structure of a model.
pub struct Architecture {
    /// The labels that policies name its activations by.
    pub labels: Labels,
    /// All parameters.
    pub parameters: Parameters,
    /// Writes the first block's [`Activation::X`], and saves nothing for its backward pass.
    embedding: Declared,
    /// The blocks, in forward order.
    pub blocks: Vec<Block>,
    /// The final norm and output head, which follow the last block.
    pub(crate) head: Head,
    /// The parameters that the head uses.
    pub(crate) head_parameters: Vec<ParameterId>,
    /// The first block with a trained parameter, or the number of blocks if none has one. `None` if the embedding is
    /// trained. The backward pass ends at this block.
    pub(crate) lowest_trained: Option<usize>,
    /// The rotary embeddings of its blocks.
    pub(crate) rotary: Vec<Rotary>,
    tile_tokens: Option<usize>,
    /// The ranks that share sequences.
    pub sharing: SharingRanks,
    /// The losses that its routers add, if any.
    pub router_losses: Option<RouterLosses>,
}

impl Architecture {
    /// A model of these parts. The parts have declared their parameters in `parameters`; `labels` are those of their
    /// activations.
    ///
    /// # Panics
    /// If there is no block.
    pub fn new(
        labels: Labels,
        parameters: Parameters,
        embedding: Box<dyn Stage>,
        blocks: Vec<Block>,
        head: Head,
    ) -> Architecture {
        assert!(!blocks.is_empty(), "a model has at least one block");
        let embedding = Declared::of(embedding);
        Architecture {
            labels,
            parameters,
            lowest_trained: lowest_trained(&embedding.parameters, &blocks),
            embedding,
            blocks,
            head_parameters: head.parameters(),
            head,
            rotary: Vec::new(),
            tile_tokens: None,
            sharing: SharingRanks::ALONE,
            router_losses: None,
        }
    }

    /// The same model with rotary embeddings, whose tables stages get from [`crate::Pass::rotary_tables`].
    pub fn with_rotary(self, rotary: impl IntoIterator<Item = Rotary>) -> Architecture {
        let mut distinct = Vec::new();
        for rotary in rotary {
            if !distinct.contains(&rotary) {
                distinct.push(rotary);
            }
        }
        Architecture {
            rotary: distinct,
            ..self
        }
    }

    /// The same model, whose routers add these losses. All its stages that count are routers then.
    pub fn with_router_losses(self, losses: Option<RouterLosses>) -> Architecture {
        Architecture {
            router_losses: losses,
            ..self
        }
    }

    /// The same model, with tiles of `tokens` tokens. Neighbouring stages that treat each token by itself run on one
    /// tile after the other, forward, in replays and backward. Activations that only they read exist for one tile at a
    /// time. `None` runs them on whole micro-batches.
    pub fn in_tiles(self, tokens: Option<usize>) -> Architecture {
        let Some(tokens) = tokens else {
            return self;
        };
        let blocks = self.blocks.into_iter();
        Architecture {
            blocks: blocks.map(|block| block.in_tiles(tokens)).collect(),
            tile_tokens: Some(tokens),
            ..self
        }
    }

    /// The same model that keeps every `interval`-th state in front of chunks of the gated delta rule.
    pub fn keeping_states(self, interval: usize) -> Architecture {
        if interval == 1 {
            return self;
        }
        let blocks = self.blocks.into_iter();
        Architecture {
            blocks: blocks.map(|block| block.keeping_states(interval)).collect(),
            ..self
        }
    }

    /// The same model where sequences have parts, each with a rank or several with one: a block's attention computes some heads of whole
    /// sequences at a time.
    ///
    /// # Panics
    /// If it has tiles: they are cut afterwards ([`Architecture::in_tiles`]).
    pub fn of_sharing(self, ranks: SharingRanks) -> Architecture {
        if ranks.parts() == 1 {
            return self;
        }
        assert!(self.tile_tokens.is_none(), "tiles are cut afterwards");
        let blocks = self.blocks.into_iter();
        Architecture {
            blocks: blocks.map(|block| block.of_sharing(ranks)).collect(),
            sharing: ranks,
            ..self
        }
    }

    /// The kind of each block, numbered in order of first appearance. Blocks of a kind have equal tables of
    /// activations; either all of them have a backward pass, or none.
    pub fn kinds(&self) -> Vec<usize> {
        let lowest = self.lowest_trained.unwrap_or(0);
        let mut firsts: Vec<(bool, &Block)> = Vec::new();
        let kind_of = |(layer, block)| {
            let is_below = layer < lowest;
            let is_first =
                |(below, first): &(bool, &Block)| *below == is_below && first.is_like(block);
            firsts.iter().position(is_first).unwrap_or_else(|| {
                firsts.push((is_below, block));
                firsts.len() - 1
            })
        };
        self.blocks.iter().enumerate().map(kind_of).collect()
    }

    /// Whether a backward pass computes the gradient of a block's input for the block before.
    pub fn needs_input_gradient(&self, layer: usize) -> bool {
        self.lowest_trained.is_none_or(|lowest| lowest < layer)
    }

    /// The sites of dropout with their layers, in forward order.
    pub fn dropout_sites(&self) -> Vec<(usize, DropoutSite)> {
        let embedding = self.embedding.stage.dropout().into_iter();
        let embedding = embedding.map(|site| (0, site));
        let blocks = self.blocks.iter().enumerate();
        let of_blocks = blocks.flat_map(|(layer, block)| {
            let sites = block.stages.iter();
            let sites = sites.flat_map(|declared| declared.stage.dropout());
            sites.map(move |site| (layer, site))
        });
        embedding.chain(of_blocks).collect()
    }

    /// The shape of a cache in each layer.
    ///
    /// # Panics
    /// If a layer mixes no tokens.
    pub fn cache_shape(&self) -> CacheShape {
        let of_block = |block: &Block| {
            let mut stages = block.stages.iter();
            let kept = stages.find_map(|declared| declared.stage.cache_shape());
            kept.expect("a cache is for layers that mix tokens")
        };
        CacheShape {
            layers: self.blocks.iter().map(of_block).collect(),
        }
    }

    /// The statistics that stages count over a step: position and name of the stage, and how many numbers it counts.
    pub(crate) fn statistics(&self) -> Vec<(StagePosition, &'static str, usize)> {
        let stages = self.stages_of_blocks();
        let counted =
            stages.filter_map(|(at, stage)| Some((at, stage.name(), stage.statistics()?)));
        counted.collect()
    }

    /// The stages of all blocks, each with its position.
    pub(crate) fn stages_of_blocks(&self) -> impl Iterator<Item = (StagePosition, &dyn Stage)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.flat_map(|(layer, block)| {
            let stages = block.stages.iter().enumerate();
            stages.map(move |(number, declared)| {
                (StagePosition::new(layer, number), &*declared.stage)
            })
        })
    }

    /// Its routers in the order of layers: how many experts each has, and the name of the buffer that is added to scores
    /// where it chooses, if it has one.
    pub fn routers(&self) -> Vec<(usize, Option<String>)> {
        let routers = self.stages_of_blocks().filter_map(|(_, stage)| {
            let (experts, bias) = stage.router()?;
            let name = bias.map(|bias| self.parameters.get(bias).name.clone());
            Some((experts, name))
        });
        routers.collect()
    }

    /// Width of the residual stream.
    pub fn width(&self) -> usize {
        self.head.width()
    }

    /// Whether stages that apply the rotary embedding run on parts of sequences of `seq` tokens. Where ranks share sequences,
    /// positions come with the batch.
    pub(crate) fn turns_in_tiles(&self, seq: usize) -> bool {
        let is_cut = self.tile_tokens.is_some_and(|tokens| tokens < seq);
        !self.rotary.is_empty() && is_cut && self.sharing.parts() == 1
    }

    /// Model FLOPs of forward and backward for one token of a sequence of `seq`, without replays. Frozen matrices have
    /// no gradient product. Blocks below the lowest trained one have no backward pass, which would be two thirds of
    /// their FLOPs.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let lowest = self.lowest_trained.unwrap_or(0);
        let frozen = |used: &[ParameterId], choices| frozen_flops(&self.parameters, used, choices);
        let blocks = self.blocks.iter().enumerate();
        let blocks = blocks.map(|(layer, block)| match layer < lowest {
            true => block.flops_per_token(seq) / 3,
            false => {
                let stages = block.stages.iter();
                let frozen = stages.map(|one| frozen(&one.parameters, one.stage.choices()));
                block.flops_per_token(seq) - frozen.sum::<u64>()
            }
        });
        self.embedding.stage.flops_per_token(seq)
            + blocks.sum::<u64>()
            + self.head.flops_per_token()
            - frozen(&self.head_parameters, 1)
    }

    /// Parameters that a token uses: all but buffers, and those of experts that it is not sent to.
    pub fn active_parameters(&self) -> usize {
        let unused = self.stages().flat_map(|declared| {
            let choices = declared.stage.choices();
            let used = declared.parameters.iter();
            used.map(move |id| {
                let parameter = self.parameters.get(*id);
                parameter.elements() - used_elements(parameter, choices)
            })
        });
        let all = self.parameters.in_layout();
        let all = all.filter(|parameter| parameter.role != Role::Buffer);
        all.map(Parameter::elements).sum::<usize>() - unused.sum::<usize>()
    }

    /// Model FLOPs of the forward pass for one token of a sequence of `seq`.
    pub fn forward_flops_per_token(&self, seq: usize) -> u64 {
        let blocks = self.blocks.iter().map(|block| block.flops_per_token(seq));
        let embedding = self.embedding.stage.flops_per_token(seq);
        (embedding + blocks.sum::<u64>() + self.head.flops_per_token()) / 3
    }

    /// All stages, in forward order.
    pub(crate) fn stages(&self) -> impl Iterator<Item = &Declared> {
        self.stages_of(0..self.blocks.len())
    }

    /// The stages of some blocks, and of the embedding before the first.
    pub(crate) fn stages_of(&self, layers: Range<usize>) -> impl Iterator<Item = &Declared> {
        let embedding = (layers.start == 0).then_some(&self.embedding);
        let blocks = self.blocks[layers].iter();
        let blocks = blocks.flat_map(|block| &block.stages);
        embedding.into_iter().chain(blocks)
    }

    /// The names of all stages, each once, in forward order.
    pub(crate) fn stage_names(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for name in self.stages().map(|declared| declared.stage.name()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The stage at a position; the embedding has one too.
    pub(crate) fn stage(&self, at: StagePosition) -> &Declared {
        match at.stage {
            None => &self.embedding,
            Some(stage) => &self.blocks[at.layer].stages[stage],
        }
    }

    /// The run of stages that a stage belongs to; none for the embedding.
    pub(crate) fn run_of(&self, at: StagePosition) -> Option<&StageRun> {
        let mut runs = self.blocks[at.layer].runs.iter();
        runs.find(|run| at.stage.is_some_and(|stage| run.stages.contains(&stage)))
    }

    /// The activation of a certain block that a stage at `at` means by a name.
    pub(crate) fn of_block(&self, at: StagePosition, activation: Activation) -> LayerActivation {
        let is_next = activation == Activation::NEXT_X;
        LayerActivation {
            layer: at.layer + usize::from(is_next && at.stage.is_some()),
            activation: if is_next { Activation::X } else { activation },
        }
    }

    /// The stage that makes an activation.
    pub(crate) fn producer(&self, of: LayerActivation) -> StagePosition {
        let within = self.facts(of).and_then(|facts| facts.producer);
        match (within, of.layer.checked_sub(1)) {
            (Some(stage), _) => StagePosition::new(of.layer, stage),
            (None, Some(before)) => {
                StagePosition::new(before, self.blocks[before].stages.len() - 1)
            }
            (None, None) => StagePosition::EMBEDDING,
        }
    }

    /// Whether any stage's forward pass reads an activation.
    pub(crate) fn is_read(&self, of: LayerActivation) -> bool {
        self.facts(of).is_none_or(|facts| facts.is_read)
    }

    /// Whether an activation exists for one tile at a time.
    pub(crate) fn is_within(&self, of: LayerActivation) -> bool {
        self.facts(of).is_some_and(|facts| facts.is_within)
    }

    /// Shape and type of an activation.
    pub(crate) fn extent(&self, of: LayerActivation) -> Extent {
        let extent = self.facts(of).map(|facts| facts.extent);
        extent.unwrap_or_else(|| Extent::tokens(self.width()))
    }

    /// The stage after whose backward pass an activation is released.
    pub(crate) fn released_after(&self, of: LayerActivation) -> StagePosition {
        let stage = self.facts(of).map_or(0, |facts| facts.released_after);
        StagePosition::new(of.layer, stage)
    }

    /// The activations whose last use in the forward pass is this stage.
    pub(crate) fn last_used_by(&self, at: StagePosition) -> impl Iterator<Item = LayerActivation> {
        self.facts_where(at, |facts| facts.last_used_by)
    }

    /// The activations that are released after a stage's backward pass.
    pub(crate) fn released_by(&self, at: StagePosition) -> impl Iterator<Item = LayerActivation> {
        self.facts_where(at, |facts| facts.released_after)
    }

    fn facts_where(
        &self,
        at: StagePosition,
        stage: impl Fn(&Facts) -> usize,
    ) -> impl Iterator<Item = LayerActivation> {
        let table = at.stage.map_or(&[][..], |_| &self.blocks[at.layer].table);
        let here = table
            .iter()
            .filter(move |facts| Some(stage(facts)) == at.stage);
        here.map(move |facts| LayerActivation {
            layer: at.layer,
            activation: facts.activation,
        })
    }

    /// The facts of an activation; none for the head's input, which belongs to no block.
    fn facts(&self, of: LayerActivation) -> Option<&Facts> {
        let block = self.blocks.get(of.layer);
        block.map(|block| block.facts(of.activation))
    }
}
