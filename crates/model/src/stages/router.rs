//! The router of a mixture of experts: which experts a token is sent to, with which weights, and the tables that group
//! the chosen rows by expert. Its logits are a [`super::Projection`].

use super::written;
use crate::activation::Dimension;
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Label, LossPart, ParameterId, Pass, Result};
use kernels::Init;
use kernels::operation::{
    BiasBackward, CountChoices, GroupByExpert, Route, RouteBackward, RouterZLoss, Routing,
};
use memory::In;

/// Chooses experts by their logits. It also weighs shared experts that have a gate, as a router with one expert.
pub struct RouterChoice {
    /// The name in reports.
    pub name: &'static str,
    /// `[t, e]` f32.
    pub logits: Activation,
    /// `[t, k]` f32: the factors on what the chosen experts give.
    pub weights: Activation,
    /// `[t, k]` i32: the chosen experts, in ascending order.
    pub ids: Activation,
    /// Number of experts.
    pub experts: usize,
    /// How they are chosen.
    pub routing: Routing,
    /// Added to scores where experts are chosen: `[e]` f32, a buffer.
    pub bias: Option<ParameterId>,
    /// Whether choices are counted, and the router's own losses count.
    pub is_router: bool,
}

impl RouterChoice {
    /// The logits of a router.
    pub const LOGITS: Activation =
        Activation::new("router_logits", "d_router_logits", Label::MOE_ROUTER);
    /// The weights of the experts that a router chose.
    pub const WEIGHTS: Activation =
        Activation::new("router_weights", "d_router_weights", Label::MOE_ROUTER);
    /// The experts that a router chose.
    pub const IDS: Activation = Activation::new("router_ids", "no_gradient", Label::MOE_TABLES);
    /// The logits of the gate of shared experts.
    pub const SHARED_LOGITS: Activation =
        Activation::new("shared_logits", "d_shared_logits", Label::SHARED_EXPERTS);
    /// The factors on what shared experts give.
    pub const SHARED_WEIGHTS: Activation =
        Activation::new("shared_weights", "d_shared_weights", Label::SHARED_EXPERTS);
    /// The only expert of the gate of shared experts.
    pub const SHARED_IDS: Activation =
        Activation::new("shared_ids", "no_gradient", Label::SHARED_EXPERTS);

    fn chosen(&self) -> [Dimension; 2] {
        [Dimension::Tokens, Dimension::Fixed(self.routing.choices)]
    }
}

impl Stage for RouterChoice {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![self.logits],
            writes: vec![
                (self.weights, Extent::of_f32(&self.chosen())),
                (self.ids, Extent::of_i32(&self.chosen())),
            ],
            backward_reads: vec![self.logits, self.ids],
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.bias.into_iter().collect()
    }

    fn reads_matrices_backward(&self) -> bool {
        false
    }

    fn router(&self) -> Option<(usize, Option<ParameterId>)> {
        self.is_router.then_some((self.experts, self.bias))
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let logits = pass.pull(self.logits)?;
        let (mut weights, mut ids) = (pass.output(self.weights)?, pass.output(self.ids)?);
        if weights.is_some() || ids.is_some() {
            let sequences = match self.is_router {
                true => pass.balance().map(|[counts, _]| counts.dims()[0]),
                false => None,
            };
            let shape = [logits.dims()[0], self.experts];
            let scores = sequences.map(|_| pass.temporary_f32("router_scores", shape));
            let mut scores = scores.transpose()?;
            pass.kernels().run(Route {
                weights: written(&mut weights),
                ids: written(&mut ids),
                scores: written(&mut scores),
                logits: logits.view(),
                bias: self.bias.map(|bias| pass.parameter(bias)),
                lengths: pass.batch().lengths().filter(|_| self.is_router),
                routing: self.routing,
            })?;
            if let (Some(scores), Some(ids)) = (&scores, &ids) {
                balance(pass, scores.view(), ids.view())?;
            }
        }
        pass.put(self.weights, weights);
        pass.put(self.ids, ids);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dweights = pass.gradient(self.weights);
        let (logits, ids) = (pass.pull(self.logits)?, pass.pull(self.ids)?);
        let mut z_loss = None;
        if self.is_router {
            self.count(pass, ids.view())?;
            z_loss = add_z_loss(pass, logits.view())?;
        }
        let mut dlogits = pass.temporary(self.logits.gradient_name(), logits.dims())?;
        pass.kernels().run(RouteBackward {
            dlogits: dlogits.view_mut(),
            dweights: dweights.view(),
            logits: logits.view(),
            ids: ids.view(),
            routing: self.routing,
            balance: match self.is_router {
                true => pass.balance_gradient(),
                false => None,
            },
            z_loss,
            lengths: pass.batch().lengths().filter(|_| self.is_router),
        })?;
        pass.file_gradient(self.logits, dlogits);
        Ok(())
    }
}

impl RouterChoice {
    /// Adds the micro-batch's choices of each expert to those of the step.
    fn count(&self, pass: &mut Pass, ids: In) -> Result {
        let mut counts = pass.temporary_f32("choices", [1, self.experts])?;
        let kernels = pass.kernels();
        kernels.run(CountChoices {
            counts: counts.view_mut(),
            ids,
            lengths: None,
        })?;
        let (out, init) = pass.accumulate_statistics();
        Ok(kernels.run(BiasBackward {
            out: out.into(),
            dy: counts.view(),
            init,
        })?)
    }
}

/// Writes what the loss of balance needs of a router: how often each expert was chosen in each sequence, and the sums of
/// its scores.
fn balance(pass: &mut Pass, scores: In, ids: In) -> Result {
    let (kernels, lengths) = (pass.kernels(), pass.batch().lengths());
    let Some([counts, mut sums]) = pass.balance() else {
        return Ok(());
    };
    let seq = scores.dims()[0] / sums.dims()[0];
    for sequence in 0..sums.dims()[0] {
        let experts = sums.dims()[1];
        let row = sums.reborrow().rows(sequence..sequence + 1);
        kernels.run(BiasBackward {
            out: row.reshape([experts]).into(),
            dy: scores.rows(sequence * seq..(sequence + 1) * seq),
            init: Init::Overwrite,
        })?;
    }
    Ok(kernels.run(CountChoices {
        counts,
        ids,
        lengths,
    })?)
}

/// Adds a router's loss by the size of its logits, if it has one, and gives its factor.
fn add_z_loss(pass: &mut Pass, logits: In) -> Result<Option<f32>> {
    let z = pass.router_losses().map_or(0.0, |losses| losses.z);
    if z == 0.0 {
        return Ok(None);
    }
    let tokens = logits.dims()[0];
    // Where there is padding, the operations divide by the number of other tokens.
    let counted = if pass.batch().lengths().is_some() {
        1
    } else {
        tokens
    };
    let factor = (z / (counted * pass.micro_batches()) as f64) as f32;
    let mut losses = pass.temporary_f32("router_z_losses", [tokens])?;
    pass.kernels().run(RouterZLoss {
        losses: losses.view_mut(),
        logits,
        lengths: pass.batch().lengths(),
        factor,
    })?;
    pass.add_to_loss(LossPart::RouterZ, losses.view())?;
    Ok(Some(factor))
}

/// Groups the chosen rows by expert: the tables that experts work by. `t` tokens of `k` choices are `r` rows.
pub struct RouterTables {
    /// Number of experts.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub choices: usize,
}

impl RouterTables {
    /// `[e + 1]`: the first row of each expert.
    pub const OFFSETS: Activation =
        Activation::new("expert_offsets", "no_gradient", Label::MOE_TABLES);
    /// `[r]`: the token of each row.
    pub const ROW_TOKEN: Activation =
        Activation::new("row_token", "no_gradient", Label::MOE_TABLES);
    /// `[r]`: the place of each row's choice among all choices of all tokens.
    pub const ROW_SLOT: Activation = Activation::new("row_slot", "no_gradient", Label::MOE_TABLES);
    /// `[t, k]`: the row of each choice.
    pub const SLOT_ROW: Activation = Activation::new("slot_row", "no_gradient", Label::MOE_TABLES);

    const ALL: [Activation; 4] = [
        RouterTables::OFFSETS,
        RouterTables::ROW_TOKEN,
        RouterTables::ROW_SLOT,
        RouterTables::SLOT_ROW,
    ];
}

impl Stage for RouterTables {
    fn name(&self) -> &'static str {
        "moe_tables"
    }

    fn io(&self) -> Io {
        let rows = Dimension::TokensTimes(self.choices);
        let slots = [Dimension::Tokens, Dimension::Fixed(self.choices)];
        let extents = [
            Extent::of_i32(&[Dimension::Fixed(self.experts + 1)]),
            Extent::of_i32(&[rows]),
            Extent::of_i32(&[rows]),
            Extent::of_i32(&slots),
        ];
        Io {
            reads: vec![RouterChoice::IDS],
            writes: RouterTables::ALL.into_iter().zip(extents).collect(),
            backward_reads: Vec::new(),
        }
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let ids = pass.pull(RouterChoice::IDS)?;
        let mut tables = [None, None, None, None];
        for (table, of) in tables.iter_mut().zip(RouterTables::ALL) {
            *table = pass.output(of)?;
        }
        let [offsets, row_token, row_slot, slot_row] = tables.each_mut().map(written);
        pass.kernels().run(GroupByExpert {
            offsets,
            row_token,
            row_slot,
            slot_row,
            ids: ids.view(),
            experts: self.experts,
        })?;
        for (table, of) in tables.into_iter().zip(RouterTables::ALL) {
            pass.put(of, table);
        }
        Ok(())
    }

    /// Tables have no gradient.
    fn backward(&self, _pass: &mut Pass) -> Result {
        Ok(())
    }
}
