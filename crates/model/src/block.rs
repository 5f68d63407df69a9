//! A block: its stages in forward order, and the table of activations that follows from what they read and write.

use crate::stage::{Declared, Io, Stage};
use crate::{Activation, Extent};

/// A block of a model. Blocks of one model may differ.
pub struct Block {
    stages: Vec<Declared>,
    table: Vec<Facts>,
}

/// What follows from the stages for one activation. Stages are numbers in forward order.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) activation: Activation,
    pub(crate) extent: Extent,
    /// The stage that makes it; none for the block's input, which the block before makes.
    pub(crate) producer: Option<usize>,
    /// Whether a forward pass reads it.
    pub(crate) is_read: bool,
    /// The last stage that has to do with it in the forward pass: the last that reads it, else the one that makes it.
    pub(crate) last_used_by: usize,
    /// The first stage that reads it, in whatever pass. Since backward runs in reverse, nobody can need it after that
    /// stage's backward pass, whose own outputs may have to be made again until then.
    pub(crate) released_after: usize,
}

impl Block {
    /// A block whose input is `width` wide.
    ///
    /// # Panics
    /// If the stages make no block: each activation must be written by one stage, before any reads it, and
    /// [`Activation::NEXT_X`] by the last.
    pub fn new(width: usize, stages: impl IntoIterator<Item = Box<dyn Stage>>) -> Block {
        let stages: Vec<_> = stages.into_iter().map(Declared::of).collect();
        let ios: Vec<&Io> = stages.iter().map(|declared| &declared.io).collect();
        let (last, others) = ios.split_last().expect("a block has stages");
        let ends_well = last.extent(Activation::NEXT_X) == Some(&Extent::tokens(width));
        let ends_once = others
            .iter()
            .all(|io| io.extent(Activation::NEXT_X).is_none());
        assert!(
            ends_well && ends_once,
            "the last stage of a block, and no other, writes the next block's x, as wide as its own"
        );
        let mut table = vec![Facts::new(&ios, Activation::X, Extent::tokens(width), None)];
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
        let block = Block { stages, table };
        block.assert_reads_are_written();
        block
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

    /// Its stages, in forward order.
    pub fn stages(&self) -> &[Declared] {
        &self.stages
    }

    /// Every activation but what the next block counts as its own, in the order in which they are made.
    pub fn activations(&self) -> impl Iterator<Item = (Activation, &Extent)> {
        let table = self.table.iter();
        table.map(|facts| (facts.activation, &facts.extent))
    }

    /// What is known of the activations, in the order in which they are made.
    pub(crate) fn table(&self) -> &[Facts] {
        &self.table
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
        let reads_backward = |io: &Io| io.backward_reads.contains(&activation);
        let readers = || stages().filter(move |(_, io)| reads(io));
        let mut users = stages().filter(|(_, io)| reads(io) || reads_backward(io));
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
        }
    }
}
