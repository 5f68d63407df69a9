//! How far down the backward pass goes, and which activations it needs.

use crate::balance::Balance;
use crate::parameters::{Parameter, ParameterId, Parameters};
use crate::policy::{Action, Policy};
use crate::saved::{BlockActions, Fp8State};
use crate::stage::Declared;
use crate::statistics::Statistics;
use crate::{
    Activation, Architecture, BatchShape, Block, Extent, HeldBlocks, LayerActivation,
    SavedActivations,
};
use memory::{DType, Memory, OutOfMemory, Role};
use std::collections::HashSet;
use std::ops::Range;

/// The block at which the backward pass ends: the first with a trained parameter, or with a stage that adds a loss or
/// counts, since stages do both in their backward pass. The number of blocks if no block has one. `None` if the
/// embedding is trained: the pass then covers everything.
pub(crate) fn lowest_trained(embedding: &[ParameterId], blocks: &[Block]) -> Option<usize> {
    if embedding.iter().any(|id| id.is_trained()) {
        return None;
    }
    let works = |declared: &Declared| {
        let stage = &declared.stage;
        let is_trained = declared.parameters.iter().any(|id| id.is_trained());
        is_trained || stage.has_loss() || stage.statistics().is_some()
    };
    let lowest = blocks
        .iter()
        .position(|block| block.stages.iter().any(works));
    Some(lowest.unwrap_or(blocks.len()))
}

/// FLOPs per token that frozen matrices among some parameters save, because their gradients are not computed. Of a stack
/// of matrices a token uses `choices`.
pub(crate) fn frozen_flops(parameters: &Parameters, used: &[ParameterId], choices: usize) -> u64 {
    let used = used.iter().map(|id| parameters.get(*id));
    let frozen = used.filter(|parameter| parameter.role == Role::Frozen);
    let matrices = frozen.filter(|parameter| parameter.shape.len() > 1);
    let elements = matrices.map(|parameter| used_elements(parameter, choices));
    2 * elements.sum::<usize>() as u64
}

/// Elements of a parameter that a token uses: of a stack of matrices those of `choices`.
pub(crate) fn used_elements(parameter: &Parameter, choices: usize) -> usize {
    match parameter.shape[..] {
        [_, rows, columns] => choices * rows * columns,
        _ => parameter.elements(),
    }
}

impl Architecture {
    /// What happens to the activations of each block ([`Block::activations`]) between forward and backward. It is what
    /// the policy says, except that activations which neither a backward pass nor a replay reads are dropped.
    pub fn actions(&self, policy: &Policy) -> Vec<Vec<Action>> {
        let needed = self.needed(policy);
        let action =
            |layer, activation| match needed.contains(&LayerActivation { layer, activation }) {
                true => policy.action(layer, activation),
                false => Action::Recompute,
            };
        let blocks = self.blocks.iter().enumerate();
        blocks
            .map(|(layer, block)| {
                let activations = block.activations();
                activations.map(|(of, _)| action(layer, of)).collect()
            })
            .collect()
    }

    /// The actions of a rank that computes only some blocks. The first block's input is received and cannot be made again, so it is
    /// kept if a backward pass needs it. Nothing is kept of other ranks' blocks.
    pub fn actions_of(&self, policy: &Policy, layers: &Range<usize>) -> Vec<Vec<Action>> {
        let needed = self.needed(policy);
        let first = LayerActivation::input_of(layers.start);
        let mut actions = self.actions(policy);
        for (layer, actions) in actions.iter_mut().enumerate() {
            if !layers.contains(&layer) {
                actions.fill(Action::Recompute);
            }
        }
        let is_received = first.layer > 0 && needed.contains(&first);
        if is_received && let Some(block) = self.blocks.get(first.layer) {
            let mut activations = block.activations();
            let place = activations.position(|(of, _)| of == Activation::X);
            let action = &mut actions[first.layer][place.expect("a block has an input")];
            if *action == Action::Recompute {
                *action = Action::Keep;
            }
        }
        actions
    }

    /// Empty tables of a model's activations, with the head's input after those of the blocks: for each run of blocks that is held,
    /// those of its micro-batches. It leases pinned host memory for what the policy offloads of each micro-batch, which has this shape.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the host's memory is refused.
    pub fn lease_saved(
        &self,
        memory: &Memory,
        dtype: DType,
        policy: &Policy,
        (batch, held): (BatchShape, &[HeldBlocks]),
    ) -> Result<SavedActivations, OutOfMemory> {
        let statistics = Statistics::lease(memory, self.statistics())?;
        let has_balance = self.router_losses.is_some_and(|losses| losses.aux > 0.0);
        let balance = || {
            let stages = self.stages_of_blocks();
            let routers = stages.filter_map(|(at, stage)| Some((at, stage.router()?.0)));
            let lease = || Balance::lease(memory, routers.collect(), batch.rows);
            has_balance.then(lease).transpose()
        };
        let is_held = |block| held.iter().any(|run| run.layers.contains(&block));
        let all = (&self.parameters, self.blocks.len());
        let fp8 = Fp8State::lease(memory, all, is_held, batch)?;
        let common = (statistics, fp8);
        let mut saved = SavedActivations::without_tables(common, dtype);
        for run in held {
            let layers = self.rows_of(policy, &run.layers);
            for _ in 0..run.micro_batches {
                let layers = (run.layers.start, &layers[..]);
                saved.lease_table(memory, layers, batch, balance()?)?;
            }
        }
        Ok(saved)
    }

    /// The activations of some neighbouring blocks, with what becomes of them where a rank computes no others, and the input of what
    /// follows.
    fn rows_of(&self, policy: &Policy, own: &Range<usize>) -> Vec<BlockActions> {
        let blocks = self.blocks.iter().zip(self.actions_of(policy, own));
        let blocks = blocks.skip(own.start).take(own.len());
        let rows = blocks.map(|(block, actions)| {
            let activations = block.activations().zip(actions);
            let row = |((of, extent), action): ((_, &Extent), _)| (of, *extent, action);
            activations.map(row).collect()
        });
        let action = match own.end == self.blocks.len() {
            true => policy.action(own.end, Activation::X),
            false => Action::Recompute,
        };
        let next = vec![(Activation::X, Extent::tokens(self.width()), action)];
        rows.chain([next]).collect()
    }

    /// The activations that backward passes read, and those that their replays read under a policy.
    fn needed(&self, policy: &Policy) -> HashSet<LayerActivation> {
        let lowest = self.lowest_trained.unwrap_or(0);
        let mut needed = HashSet::new();
        for (layer, block) in self.blocks.iter().enumerate().rev() {
            let here = |activation: &Activation| LayerActivation {
                layer,
                activation: *activation,
            };
            for declared in block.stages.iter().rev() {
                if layer >= lowest {
                    needed.extend(declared.io.backward_reads.iter().map(here));
                }
                let mut written = declared.io.writes.iter();
                let is_replayed = written.any(|(activation, _)| {
                    let of = match *activation == Activation::NEXT_X {
                        true => LayerActivation {
                            layer: layer + 1,
                            activation: Activation::X,
                        },
                        false => here(activation),
                    };
                    let is_dropped = policy.action(of.layer, of.activation) == Action::Recompute;
                    needed.contains(&of) && (is_dropped || self.is_within(of))
                });
                if is_replayed {
                    needed.extend(declared.io.reads.iter().map(here));
                }
            }
        }
        needed
    }
}
