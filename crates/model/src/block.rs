//! A block: its stages in forward order, and the table of activations that follows from what they read and write.

use crate::stage::{Declared, Io, Stage};
use crate::{Activation, Extent, Label, SharingRanks};
use std::ops::Range;

/// A block of a model. Blocks of one model may differ.
pub struct Block {
    /// Its stages, in forward order.
    pub stages: Vec<Declared>,
    /// What is known of the activations, in the order in which they are made.
    pub(crate) table: Vec<Facts>,
    /// The runs of its stages, in forward order.
    pub(crate) runs: Vec<StageRun>,
}

/// Neighbouring stages that run together on one tile of tokens after the other, or one stage on whole micro-batches.
#[derive(Clone, Debug)]
pub(crate) struct StageRun {
    pub(crate) stages: Range<usize>,
    /// Tokens in a tile; none: whole micro-batches.
    pub(crate) tile_tokens: Option<usize>,
}

/// What the stages of a block tell about one activation. Numbers of stages count in forward order.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) activation: Activation,
    pub(crate) extent: Extent,
    /// The stage that makes it; none for the block's input, which the block before makes.
    pub(crate) producer: Option<usize>,
    /// Whether a forward pass reads it.
    pub(crate) is_read: bool,
    /// The stage that uses it last in the forward pass: its last reader, or the stage that makes it if none reads it.
    pub(crate) last_used_by: usize,
    /// The first stage that reads it, in either pass. The backward pass runs in reverse, so no later backward pass
    /// needs the activation. The stage's own outputs may have to be replayed until its backward pass ends.
    pub(crate) released_after: usize,
    /// Whether it exists for one tile at a time, because one run of stages makes it and alone reads it.
    pub(crate) is_within: bool,
}

impl Block {
    /// A block whose input is `width` wide.
    ///
    /// # Panics
    /// If the stages do not fit together: one stage must write each activation before any stage reads it, and the last
    /// must write [`Activation::NEXT_X`].
    pub fn new(width: usize, stages: impl IntoIterator<Item = Box<dyn Stage>>) -> Block {
        Block::of_stages(Extent::tokens(width), stages)
    }

    fn of_stages(input: Extent, stages: impl IntoIterator<Item = Box<dyn Stage>>) -> Block {
        let stages: Vec<_> = stages.into_iter().map(Declared::of).collect();
        let ios: Vec<&Io> = stages.iter().map(|declared| &declared.io).collect();
        let (last, others) = ios.split_last().expect("a block has stages");
        let ends_well = last.extent(Activation::NEXT_X) == Some(&input);
        let ends_once = others
            .iter()
            .all(|io| io.extent(Activation::NEXT_X).is_none());
        assert!(
            ends_well && ends_once,
            "the last stage of a block, and no other, writes the next block's x, as wide as its own"
        );
        let mut table = vec![Facts::new(&ios, Activation::X, input, None)];
        for (at, io) in ios.iter().enumerate() {
            for (activation, extent) in &io.writes {
                if *activation != Activation::NEXT_X {
                    let is_new = table
                        .iter()
                        .all(|facts| facts.activation.name() != activation.name());
                    assert!(is_new, "two stages write {}", activation.name());
                    table.push(Facts::new(&ios, *activation, *extent, Some(at)));
                }
            }
        }
        let alone = |stage| StageRun {
            stages: stage..stage + 1,
            tile_tokens: None,
        };
        let block = Block {
            runs: (0..stages.len()).map(alone).collect(),
            stages,
            table,
        };
        block.assert_reads_are_written();
        block
    }

    /// The same block with runs of neighbouring stages that treat each token by itself, on tiles of `tokens`. A stage
    /// that writes to the residual stream ends its run, because the stream exists for whole micro-batches.
    ///
    /// # Panics
    /// If a stage on tiles writes anything but one row for each token.
    pub(crate) fn in_tiles(mut self, tokens: usize) -> Block {
        let run_on = |before: &usize, next: &usize| {
            let [before, next] = [*before, *next].map(|at| &self.stages[at]);
            before.is_by_token() && next.is_by_token() && !before.io.writes_residual_stream()
        };
        let numbers: Vec<usize> = (0..self.stages.len()).collect();
        let runs = numbers.chunk_by(run_on).map(|run| StageRun {
            stages: run[0]..run[0] + run.len(),
            tile_tokens: self.stages[run[0]].is_by_token().then_some(tokens),
        });
        self.runs = runs.collect();
        for facts in &mut self.table {
            let producer = facts.producer;
            let run = producer.and_then(|at| self.runs.iter().find(|run| run.stages.contains(&at)));
            facts.is_within = run.is_some_and(|run| {
                let users = self.stages.iter().enumerate();
                let mut users = users.filter(|(_, stage)| stage.io.uses(facts.activation));
                run.tile_tokens.is_some() && users.all(|(at, _)| run.stages.contains(&at))
            });
        }
        self
    }

    /// The same block where ranks share sequences. Not in tiles yet.
    ///
    /// # Panics
    /// As [`Block::new`].
    pub(crate) fn of_sharing(self, ranks: SharingRanks) -> Block {
        self.with_stages(|stage| stage.of_sharing(ranks))
    }

    /// The same block that keeps every `interval`-th state in front of chunks. Not in tiles yet.
    pub(crate) fn keeping_states(self, interval: usize) -> Block {
        self.with_stages(|stage| Some(vec![stage.keeping_states(interval)?]))
    }

    /// The same block with other stages in the place of some.
    fn with_stages(self, instead: impl Fn(&dyn Stage) -> Option<Vec<Box<dyn Stage>>>) -> Block {
        let input = self.facts(Activation::X).extent;
        let stages = self
            .stages
            .into_iter()
            .flat_map(|declared| instead(&*declared.stage).unwrap_or_else(|| vec![declared.stage]));
        Block::of_stages(input, stages)
    }

    /// Whether the gradients of all its matrices can be deferred ([`crate::DeferredGradients`]). A tile's activations do not outlive it.
    pub fn can_defer_gradients(&self) -> bool {
        let in_tiles = self.runs.iter().any(|run| run.tile_tokens.is_some());
        let mut stages = self.stages.iter();
        !in_tiles && stages.all(|declared| declared.stage.can_defer_gradients())
    }

    fn assert_reads_are_written(&self) {
        for (at, Declared { stage, io, .. }) in self.stages.iter().enumerate() {
            for activation in io.reads.iter().chain(&io.backward_reads) {
                let producer = self.facts(*activation).producer;
                let is_own = producer == Some(at) && !io.reads.contains(activation);
                assert!(
                    producer.is_none_or(|producer| producer < at) || is_own,
                    "{} reads {} before it is written",
                    stage.name(),
                    activation.name()
                );
            }
        }
    }

    /// The activations that a policy decides about, in the order in which they are made: those that exist for whole
    /// micro-batches, without [`Activation::NEXT_X`], which is the next block's.
    pub fn activations(&self) -> impl Iterator<Item = (Activation, &Extent)> {
        let table = self.table.iter().filter(|facts| !facts.is_within);
        table.map(|facts| (facts.activation, &facts.extent))
    }

    /// What is known of one activation.
    ///
    /// # Panics
    /// If the block has no such activation.
    pub(crate) fn facts(&self, activation: Activation) -> &Facts {
        let mut table = self.table.iter();
        let facts = table.find(|facts| facts.activation == activation);
        facts.unwrap_or_else(|| panic!("this block has no {}", activation.name()))
    }

    /// Whether another block's stages read and write the same activations, in the same extents and with the same
    /// labels. Weights and times may differ.
    pub(crate) fn is_like(&self, other: &Block) -> bool {
        let labels = |block: &Block| -> Vec<Label> {
            let table = block.table.iter();
            table.map(|facts| facts.activation.label()).collect()
        };
        let is_same = |(one, other): (&Declared, &Declared)| {
            one.stage.name() == other.stage.name() && one.io == other.io
        };
        self.stages.len() == other.stages.len()
            && self.stages.iter().zip(&other.stages).all(is_same)
            && labels(self) == labels(other)
    }

    /// Model FLOPs of all stages for one token.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let of_stage = |declared: &Declared| declared.stage.flops_per_token(seq);
        self.stages.iter().map(of_stage).sum()
    }
}

impl Facts {
    fn new(ios: &[&Io], activation: Activation, extent: Extent, producer: Option<usize>) -> Facts {
        let stages = || ios.iter().enumerate();
        let reads = |io: &Io| io.reads.contains(&activation);
        let readers = || stages().filter(move |(_, io)| reads(io));
        let mut users = stages().filter(|(_, io)| io.uses(activation));
        let first_user = users.next().map(|(at, _)| at);
        Facts {
            activation,
            extent,
            producer,
            is_read: readers().next().is_some(),
            last_used_by: readers()
                .next_back()
                .map(|(at, _)| at)
                .or(producer)
                .unwrap_or(0),
            released_after: first_user.or(producer).unwrap_or(0),
            is_within: false,
        }
    }
}
