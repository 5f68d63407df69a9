//! Inputs of a micro-batch's loss beside targets, on the device.

use crate::Result;
use crate::forward::WhichModel;
use crate::session::Session;
use data::{BesideTargets, MicroBatch, PolicyTargets};
use memory::{Buffer, Category, DType, In};
use model::{Batch, HeadLoss, PolicyGradient, Preferences};
use settings::StepObjective;

/// Inputs of a micro-batch's loss beside targets.
pub(crate) enum Beside<'m> {
    /// The loss of next tokens takes none.
    Nothing,
    /// Preferences take the sum of each sequence's losses under the model that the training began with, `[rows]` f32.
    Reference { sums: Buffer, beta: f32 },
    /// A policy gradient takes log-probabilities under the old policy and under the reference, advantages and weights, `[4, rows, seq]`
    /// f32.
    Policy {
        tensors: Buffer,
        of_host: &'m PolicyTargets,
    },
}

impl Beside<'_> {
    /// The loss of the head with these inputs.
    pub(crate) fn head_loss(&self) -> HeadLoss<'_> {
        match self {
            Beside::Nothing => HeadLoss::NextTokens,
            Beside::Reference { sums, beta } => HeadLoss::Preferences(Preferences {
                reference: sums.view(),
                beta: *beta,
            }),
            Beside::Policy { tensors, of_host } => HeadLoss::Policy(policy(tensors, of_host)),
        }
    }
}

fn policy<'b>(tensors: &'b Buffer, of_host: &PolicyTargets) -> PolicyGradient<'b> {
    let all = tensors.view();
    let [rows, seq] = [all.dims()[1], all.dims()[2]];
    let of_kind = |kind: usize| -> In<'b> { all.rows(kind..kind + 1).reshape([rows, seq]) };
    PolicyGradient {
        old: of_kind(0),
        reference: of_host.reference.as_ref().map(|_| of_kind(1)),
        advantages: of_kind(2),
        weights: of_kind(3),
        clip_low: of_host.clip_low,
        clip_high: of_host.clip_high,
        beta: of_host.beta,
        by_sequence: of_host.by_sequence,
    }
}

impl Session {
    /// Leases and fills what a micro-batch's loss takes beside targets.
    pub(crate) fn beside<'m>(
        &mut self,
        batches: &[Batch],
        micro: &'m MicroBatch,
    ) -> Result<Beside<'m>> {
        Ok(match (self.settings.objective, &micro.beside) {
            (StepObjective::NextTokens, _) => Beside::Nothing,
            (StepObjective::Preferences { beta, .. }, _) => {
                let sums = self.reference(batches, micro)?;
                Beside::Reference { sums, beta }
            }
            (StepObjective::Policy, Some(BesideTargets::Policy(of_host))) => {
                let tensors = self.policy_tensors(micro, of_host)?;
                Beside::Policy { tensors, of_host }
            }
            (StepObjective::Policy, _) => panic!("a policy's targets come with its numbers"),
        })
    }

    /// The sum of the losses of each of a micro-batch's sequences under the model that the training began with, `[rows]` f32. It is
    /// known, or made by a forward pass without adapters.
    fn reference(&mut self, batches: &[Batch], micro: &MicroBatch) -> Result<Buffer> {
        let (name, rows) = ("reference", [micro.rows]);
        let mut sums = self.memory.lease(Category::Input, name, rows, DType::F32)?;
        if let Some(BesideTargets::Reference(known)) = &micro.beside {
            let known = bytemuck::cast_slice(known);
            self.kernels.upload(sums.view_mut(), known)?;
            return Ok(sums);
        }
        assert!(
            !self.settings.objective.has_reference(),
            "data comes with the losses of its reference"
        );
        let mut forward = self.forward_in_step();
        let model = forward.model;
        let work = forward.work_of(WhichModel::Reference, batches);
        model.sequence_losses(work, &mut sums)?;
        Ok(sums)
    }

    /// Room for the reference is leased in any case, so that the peak does not depend on it.
    fn policy_tensors(&self, micro: &MicroBatch, of_host: &PolicyTargets) -> Result<Buffer> {
        let (name, dims) = ("policy_targets", [4, micro.rows, micro.seq]);
        let mut tensors = self.memory.lease(Category::Input, name, dims, DType::F32)?;
        let of_kinds = [
            Some(&of_host.old),
            of_host.reference.as_ref(),
            Some(&of_host.advantages),
            Some(&of_host.weights),
        ];
        for (kind, values) in of_kinds.into_iter().enumerate() {
            if let Some(values) = values {
                let place = tensors.view_mut().rows(kind..kind + 1);
                self.kernels.upload(place, bytemuck::cast_slice(values))?;
            }
        }
        Ok(tensors)
    }
}
