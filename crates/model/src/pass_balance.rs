//! The losses of routers in a micro-batch's pass: where routers count their choices, and the gradient they get back.

use crate::pass::Pass;
use crate::{LossPart, Purpose, Result, RouterLosses};
use kernels::operation::BalanceLoss;
use memory::{In, Out};

impl Pass<'_> {
    /// The losses of routers, if the model trains and has some.
    pub(crate) fn router_losses(&self) -> Option<RouterLosses> {
        match self.work.purpose {
            Purpose::Training(_) => self.model.architecture().router_losses,
            Purpose::Inference(_) | Purpose::Reference => None,
        }
    }

    /// Micro-batches of the whole step.
    pub(crate) fn micro_batches(&mut self) -> usize {
        self.step_loss().micro_batches
    }

    /// Where the router that runs writes its counts `[sequences, experts]` and summed scores for the loss of balance.
    /// None without such a loss, and in replays, which would write the same.
    pub(crate) fn balance(&mut self) -> Option<[Out<'_>; 2]> {
        let at = self.running.at;
        let is_forward =
            matches!(self.work.purpose, Purpose::Training(_)) && self.backward_at.is_none();
        let balance = self.work.saved.balance_mut().filter(|_| is_forward);
        balance.map(|balance| balance.of_router(at))
    }

    /// The gradient `[sequences, experts]` of the scores of the router that runs, by the loss of balance.
    pub(crate) fn balance_gradient(&self) -> Option<In<'_>> {
        let balance = self.work.saved.balance();
        balance.map(|balance| balance.gradient_of(self.running.at))
    }

    /// The loss of balance and its gradient, once all routers have chosen.
    pub(crate) fn balance_loss(&mut self) -> Result {
        let Some(losses) = self.router_losses() else {
            return Ok(());
        };
        let (kernels, batch, part) = (self.work.kernels, self.batch(), self.part);
        let step = &mut self.work.purpose.training().losses[part];
        let Some(balance) = self.work.saved.balance_mut() else {
            return Ok(());
        };
        let (pooled, factor) = losses.pooled(balance, batch, step.micro_batches);
        let (loss, init) = step.part(LossPart::RouterAux);
        Ok(kernels.run(BalanceLoss {
            loss,
            gradient: balance.gradient.view_mut(),
            counts: balance.counts.view(),
            sums: balance.sums.view(),
            lengths: batch.lengths(),
            pooled,
            factor,
            init,
        })?)
    }
}
