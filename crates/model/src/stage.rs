//! A stage: a step of the forward pass that is run and replayed as one, with its backward pass.

use crate::{
    Activation, DropoutSite, Extent, LayerCacheShape, Linear, ParameterId, Pass, Result,
    SharingRanks,
};

/// A step of a model, in both directions.
///
/// A replay runs the forward pass again, so a stage may read only what [`Io`] names, its parameters, and what [`Pass`]
/// offers besides. It leases each output by [`Pass::output`], which returns none if nobody needs the output; the stage
/// then does not compute it. The backward pass takes the gradients of what the stage wrote ([`Pass::gradient`]) and
/// files those of what it read ([`Pass::file_gradient`]).
pub trait Stage {
    /// The name in reports.
    fn name(&self) -> &'static str;

    /// The activations that it reads and writes. [`Pass`] refuses others, and insists that it pulls all that it
    /// declares to read.
    fn io(&self) -> Io;

    /// Its linear layers. What their adapters keep is written besides what [`Stage::io`] names; their parameters, dropout and
    /// FLOPs are the stage's, unless it says otherwise.
    fn linears(&self) -> Vec<&Linear> {
        Vec::new()
    }

    /// The parameters that it uses. [`Pass`] refuses others.
    fn parameters(&self) -> Vec<ParameterId> {
        let linears = self.linears().into_iter();
        linears.flat_map(Linear::parameters).collect()
    }

    /// The matrices of its block that it uses besides in passes with a cache.
    fn parameters_with_cache(&self) -> Vec<ParameterId> {
        Vec::new()
    }

    /// If it mixes tokens: what it keeps in a cache.
    fn cache_shape(&self) -> Option<LayerCacheShape> {
        None
    }

    /// If it needs whole sequences: the stages that take its place where ranks share sequences.
    fn of_sharing(&self, _ranks: SharingRanks) -> Option<Vec<Box<dyn Stage>>> {
        None
    }

    /// If it keeps states in front of chunks ([`kernels::DeltaShape`]): the stage that keeps every `interval`-th.
    fn keeping_states(&self, _interval: usize) -> Option<Box<dyn Stage>> {
        None
    }

    /// Whether it runs once for all parts of its sequences that a rank has, and takes each in turn ([`Pass::each_part`]). Other stages
    /// run once for each part.
    fn joins_parts(&self) -> bool {
        false
    }

    /// Whether its backward pass reads the values of its matrices.
    fn reads_matrices_backward(&self) -> bool {
        true
    }

    /// Whether the gradients of its matrices can be deferred ([`crate::DeferredGradients`]). A stage without parameters has none.
    fn can_defer_gradients(&self) -> bool {
        self.parameters().is_empty()
    }

    /// Where it drops elements. [`Pass::dropout`] refuses other sites.
    fn dropout(&self) -> Vec<DropoutSite> {
        self.linears()
            .into_iter()
            .flat_map(Linear::dropout)
            .collect()
    }

    /// Whether it adds to the loss ([`Pass::add_loss`]).
    fn has_loss(&self) -> bool {
        false
    }

    /// Model FLOPs of its forward and backward pass for one token of a sequence of `seq`, as the field counts them: 6
    /// for each weight of a product, and attention's without regard to causality (Chowdhery et al. 2022).
    fn flops_per_token(&self, _seq: usize) -> u64 {
        self.linears()
            .into_iter()
            .map(Linear::flops_per_token)
            .sum()
    }

    /// How many numbers it counts over a step ([`Pass::accumulate_statistics`]), if any. A router counts how often it chose
    /// each expert.
    fn statistics(&self) -> Option<usize> {
        self.router().map(|(experts, _)| experts)
    }

    /// If it is a router: its experts, and the buffer that is added to scores where it chooses, if it has one.
    fn router(&self) -> Option<(usize, Option<ParameterId>)> {
        None
    }

    /// Whether its results for a token depend on that token alone, in both directions. Such a stage can run on tiles of
    /// tokens. It handles a tile like a micro-batch, and takes positions and the first token's number from
    /// [`Pass::positions`] and [`Pass::first_token`].
    fn is_by_token(&self) -> bool {
        false
    }

    /// How many matrices of a stack `[e, ...]` that is a parameter a token uses: 1, unless it is sent to several experts.
    fn choices(&self) -> usize {
        1
    }

    /// Computes those of its outputs that are needed.
    ///
    /// # Errors
    /// `ModelError` if a lease is refused or the device fails.
    fn forward(&self, pass: &mut Pass) -> Result;

    /// Adds to its parameters' gradients, and computes those of what it read.
    ///
    /// # Errors
    /// As [`Stage::forward`].
    fn backward(&self, pass: &mut Pass) -> Result;
}

/// What a stage reads and writes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Io {
    /// What its forward pass reads. Every run of the stage pulls all of it.
    pub reads: Vec<Activation>,
    /// What its forward pass writes.
    pub writes: Vec<(Activation, Extent)>,
    /// What its backward pass reads, without gradients. Every backward pass pulls all of it.
    pub backward_reads: Vec<Activation>,
}

impl Io {
    /// What it reads in one direction.
    pub(crate) fn reads_of(&self, is_backward: bool) -> &[Activation] {
        match is_backward {
            false => &self.reads,
            true => &self.backward_reads,
        }
    }

    /// Whether it reads an activation, in either pass.
    pub(crate) fn uses(&self, activation: Activation) -> bool {
        self.reads.contains(&activation) || self.backward_reads.contains(&activation)
    }

    /// Whether it writes to the residual stream.
    pub(crate) fn writes_residual_stream(&self) -> bool {
        let mut written = self.writes.iter();
        written.any(|(activation, _)| activation.label().is_residual_stream())
    }

    /// Shape and type of an output.
    pub(crate) fn extent(&self, activation: Activation) -> Option<&Extent> {
        let written = self.writes.iter().find(|(other, _)| *other == activation);
        written.map(|(_, extent)| extent)
    }
}

/// A stage with its declarations.
pub struct Declared {
    /// The stage.
    pub stage: Box<dyn Stage>,
    /// What it reads and writes.
    pub io: Io,
    /// The parameters that it uses.
    pub parameters: Vec<ParameterId>,
    /// Those that it uses in passes with a cache.
    pub parameters_with_cache: Vec<ParameterId>,
}

impl Declared {
    /// Collects a stage's declarations.
    pub(crate) fn of(stage: Box<dyn Stage>) -> Declared {
        let (parameters, mut io) = (stage.parameters(), stage.io());
        let linears = stage.linears().into_iter();
        io.writes.extend(linears.filter_map(Linear::writes));
        Declared {
            io,
            parameters_with_cache: [&parameters[..], &stage.parameters_with_cache()].concat(),
            parameters,
            stage,
        }
    }

    /// Whether it can run on tiles of tokens.
    ///
    /// # Panics
    /// If it can, but writes anything but one row for each token.
    pub(crate) fn is_by_token(&self) -> bool {
        let is_by_token = self.stage.is_by_token();
        for (activation, extent) in self.io.writes.iter().filter(|_| is_by_token) {
            assert!(
                extent.is_by_token(),
                "{} runs on tiles of tokens, and {} is no row for each of them",
                self.stage.name(),
                activation.name()
            );
        }
        is_by_token
    }
}
