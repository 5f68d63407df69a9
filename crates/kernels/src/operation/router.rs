//! The router of a mixture of experts: which experts a token is sent to, with which weights, and the tables by which
//! rows are grouped by expert.
//!
//! Shapes: `t` tokens, `e` experts, `k` choices of a token, `r = t k` rows.

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{operation, size};
use memory::{In, Out};

/// The most experts of a router: a token's logits lie in the registers of a warp.
pub(crate) const EXPERTS_MAX: usize = 512;

/// How scores follow from logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScore {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// Experts are chosen only from the best groups of neighbouring experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    /// Groups; divides the number of experts.
    pub count: usize,
    /// Groups that are left to choose from.
    pub chosen: usize,
    /// A group is as good as the sum of this many of its best choices: 1 or 2.
    pub best: usize,
}

/// How a router chooses, and how it weighs what it chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts that each token is sent to.
    pub choices: usize,
    /// How scores follow from logits.
    pub score: RouterScore,
    /// The scores of the chosen are divided by their sum plus 1e-20.
    pub is_normed: bool,
    /// The factor on weights.
    pub factor: f32,
    /// None: from all experts.
    pub groups: Option<RouterGroups>,
}

operation! {
    /// Sends tokens to experts, of which there are at most 512. From f32 `logits [t, e]` follow scores (f32; softmax
    /// subtracts the greatest logit). Chosen are the `choices` greatest of score + `bias [e]` (f32), within the best groups
    /// if there are some. Without a bias, and without groups of two best, logits are compared in place of scores: they
    /// have the same order, and no roundings. Of equal ones the lowest expert (or group) is taken first; a NaN counts as
    /// less than any number, so the choices are always distinct.
    /// `ids [t, k]` (i32) are the chosen experts in ascending order, `weights [t, k]` (f32) the weights in the same order:
    /// factor x score, divided by the sum of the chosen + 1e-20 if normed. The bias is never in a weight. `scores [t, e]`
    /// (f32) are what losses of balance see: the softmax, or the sigmoids divided by their sum + 1e-20. Each output may be
    /// left out. `lengths [n]` (i32), where sequences have padding, is how many tokens each of `n` sequences of equally many
    /// begins with that are none: `scores` of padding are 0.
    Route "route": logits [t, e] {
        ids: Option<Out<'a>> [t, routing.choices] i32,
        weights: Option<Out<'a>> [t, routing.choices] f32,
        scores: Option<Out<'a>> [t, e] f32,
        logits: In<'a> [t, e] f32,
        bias: Option<In<'a>> [e] f32,
        lengths: Option<In<'a>> [size(lengths.as_ref(), 0)] i32,
        routing: Routing,
    }

    /// The gradient of [`Route`]: `dlogits [t, e]` (f32 or bf16) from `dweights [t, k]` (f32). Choice and bias have none.
    /// `balance [n, e]` (f32) is the gradient of the output `scores` by the loss of balance, one row for all tokens of a
    /// sequence: `t` is `n` sequences of equally many tokens. `z_loss` is the factor of [`RouterZLoss`], whose gradient is
    /// added too. Both are left out if there is no such loss. Padding, which `lengths [n]` tells as for [`Route`], has no part
    /// in either.
    RouteBackward "route_backward": dlogits, logits [t, e] {
        dlogits: Out<'a> [t, e],
        dweights: In<'a> [t, routing.choices] f32,
        logits: In<'a> [t, e] f32,
        ids: In<'a> [t, routing.choices] i32,
        routing: Routing,
        balance: Option<In<'a>> [size(balance.as_ref(), 0), e] f32,
        z_loss: Option<f32>,
        lengths: Option<In<'a>> [size(balance.as_ref().or(lengths.as_ref()), 0)] i32,
    }

    /// `losses [t]` (f32) = factor x (log-sum-exp of each row of `logits [t, e]`)^2 (Zoph et al. 2022). With `lengths [n]`,
    /// as for [`Route`], that of padding is 0, and the factor is divided by the number of other tokens.
    RouterZLoss "router_z_loss": losses, logits [t, e] {
        losses: Out<'a> [t] f32,
        logits: In<'a> [t, e] f32,
        lengths: Option<In<'a>> [size(lengths.as_ref(), 0)] i32,
        factor: f32,
    }

    /// Groups the choices `ids [t, k]` (i32, ascending in each row) by expert, by a stable counting sort: rows are in the
    /// order of experts, then of tokens. All i32: expert `i` has the rows from `offsets [e + 1]` i to i + 1; row `i` is that
    /// of token `row_token [r]` and of choice `row_slot [r]` = token k + column; `slot_row [t, k]` is the inverse.
    GroupByExpert "group_by_expert": ids [t, k] {
        offsets: Option<Out<'a>> [experts + 1] i32,
        row_token: Option<Out<'a>> [t * k] i32,
        row_slot: Option<Out<'a>> [t * k] i32,
        slot_row: Option<Out<'a>> [t, k] i32,
        ids: In<'a> [t, k] i32,
        experts: usize,
    }

    /// `counts [n, e]` (f32) = how often each expert is chosen in each of `n` sequences of equally many rows of
    /// `ids [t, k]` (i32), padding left out that `lengths [n]` tells as for [`Route`].
    CountChoices "count_choices": counts [n, e], ids [t, k] {
        counts: Out<'a> [n, e] f32,
        ids: In<'a> [t, k] i32,
        lengths: Option<In<'a>> [n] i32,
    }

    /// The loss of balance of routers (Fedus et al. 2021), with its gradient. `counts [n, e]` and `sums [n, e]` (f32) are
    /// choices and summed scores of `n` sequences; the sequences of each `pooled` consecutive rows are taken together. With
    /// c and s the sums of these rows, the loss is factor x sum of c s over experts and groups; `loss [1]` (f32) = init +
    /// it. Each row of `gradient [n, e]` (f32) becomes factor x c of its group: the gradient of the score of each of its
    /// tokens. Where sequences have padding, `lengths [m]` (i32) has the tokens without it of the `m` sequences that every
    /// router has rows of, and the factor is divided by the square of a group's number of such tokens.
    BalanceLoss "balance_loss": gradient [n, e] {
        loss: Out<'a> [1] f32 plus(init),
        gradient: Out<'a> [n, e] f32,
        counts: In<'a> [n, e] f32,
        sums: In<'a> [n, e] f32,
        lengths: Option<In<'a>> [size(lengths.as_ref(), 0)] i32,
        pooled: usize,
        factor: f32,
        init: Init<'a> [] in_place,
    }

    /// Moves the bias of choices towards experts with less than the mean load (Wang et al. 2024): `bias [e]` (f32) += rate
    /// x sign(mean of counts - count), from `counts [e]` (f32). Nothing is done if the second number of `clip [2]` (f32,
    /// [`super::NormAndClip`]) is NaN, as for a skipped step.
    StepRouterBias "step_router_bias": bias [e] {
        bias: Out<'a> [e] f32 changes,
        counts: In<'a> [e] f32,
        clip: In<'a> [2] f32 uncounted,
        rate: f32,
    }
}

impl Routing {
    /// Refuses numbers that do not fit `experts` experts.
    fn check(&self, check: &Check, experts: usize) -> Checked {
        let choices = self.choices;
        let mut choosable = experts;
        if let Some(RouterGroups {
            count,
            chosen,
            best,
        }) = self.groups
        {
            check.that(count > 0 && experts.is_multiple_of(count), || {
                format!("{experts} experts are not {count} equal groups")
            })?;
            let size = experts / count;
            check.that((1..=count).contains(&chosen), || {
                format!("{chosen} of {count} groups cannot be chosen")
            })?;
            check.that((1..=2).contains(&best) && best <= size, || {
                format!("a group of {size} experts has no {best} best; 1 or 2 are added up")
            })?;
            choosable = chosen * size;
        }
        check.that((1..=choosable).contains(&choices), || {
            format!("{choices} of {choosable} experts cannot be chosen")
        })
    }
}

/// Refuses more experts than there is room for.
fn at_most(check: &Check, experts: usize) -> Checked {
    check.that(experts <= EXPERTS_MAX, || {
        format!("a router has at most {EXPERTS_MAX} experts, not {experts}")
    })
}

/// Refuses an operand of sequences that do not divide the tokens.
fn divides(check: &Check, sequences: &Option<In>, tokens: usize) -> Checked {
    let Some(count) = sequences.as_ref().map(|of| of.dims()[0]) else {
        return Ok(());
    };
    check.that(count > 0 && tokens.is_multiple_of(count), || {
        format!("{tokens} tokens are not {count} sequences of equal length")
    })
}

impl Contract for Route<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [tokens, experts] = [self.logits.dims()[0], self.logits.dims()[1]];
        at_most(check, experts)?;
        self.routing.check(check, experts)?;
        divides(check, &self.lengths, tokens)
    }
}

impl Contract for RouteBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [tokens, experts] = [self.logits.dims()[0], self.logits.dims()[1]];
        at_most(check, experts)?;
        self.routing.check(check, experts)?;
        divides(check, &self.balance, tokens)?;
        divides(check, &self.lengths, tokens)
    }
}

impl Contract for RouterZLoss<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        at_most(check, self.logits.dims()[1])?;
        divides(check, &self.lengths, self.losses.dims()[0])
    }
}

impl Contract for GroupByExpert<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        at_most(check, self.experts)?;
        let rows = self.ids.elements();
        check.that(i32::try_from(rows).is_ok(), || {
            format!("{rows} rows are more than an i32 counts; take fewer tokens in a micro-batch")
        })
    }
}

impl Contract for CountChoices<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        divides(check, &Some(self.counts.as_in()), self.ids.dims()[0])
    }
}

impl Contract for BalanceLoss<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let (rows, pooled) = (self.gradient.dims()[0], self.pooled);
        divides(check, &self.lengths, rows)?;
        check.that(pooled > 0 && rows.is_multiple_of(pooled), || {
            format!("{rows} sequences are not groups of {pooled}")
        })
    }
}

impl Contract for StepRouterBias<'_> {}
