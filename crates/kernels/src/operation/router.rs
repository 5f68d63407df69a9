//! The router of a mixture of experts: which experts a token is sent to, with which weights, and the tables by which
//! rows are grouped by expert.
//!
//! Shapes: `t` tokens, `e` experts, `k` choices of a token, `r = t k` rows.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, sets, writes};
use memory::{DType, In, Out};

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
pub struct Route<'a> {
    pub ids: Option<Out<'a>>,
    pub weights: Option<Out<'a>>,
    pub scores: Option<Out<'a>>,
    pub logits: In<'a>,
    pub bias: Option<In<'a>>,
    pub lengths: Option<In<'a>>,
    pub routing: Routing,
}

/// The gradient of [`Route`]: `dlogits [t, e]` (f32 or bf16) from `dweights [t, k]` (f32). Choice and bias have none.
/// `balance [n, e]` (f32) is the gradient of the output `scores` by the loss of balance, one row for all tokens of a
/// sequence: `t` is `n` sequences of equally many tokens. `z_loss` is the factor of [`RouterZLoss`], whose gradient is
/// added too. Both are left out if there is no such loss. Padding, which `lengths [n]` tells as for [`Route`], has no part
/// in either.
pub struct RouteBackward<'a> {
    pub dlogits: Out<'a>,
    pub dweights: In<'a>,
    pub logits: In<'a>,
    pub ids: In<'a>,
    pub routing: Routing,
    pub balance: Option<In<'a>>,
    pub z_loss: Option<f32>,
    pub lengths: Option<In<'a>>,
}

/// `losses [t]` (f32) = factor x (log-sum-exp of each row of `logits [t, e]`)^2 (Zoph et al. 2022). With `lengths [n]`,
/// as for [`Route`], that of padding is 0, and the factor is divided by the number of other tokens.
pub struct RouterZLoss<'a> {
    pub losses: Out<'a>,
    pub logits: In<'a>,
    pub lengths: Option<In<'a>>,
    pub factor: f32,
}

/// Groups the choices `ids [t, k]` (i32, ascending in each row) by expert, by a stable counting sort: rows are in the
/// order of experts, then of tokens. All i32: expert `i` has the rows from `offsets [e + 1]` i to i + 1; row `i` is that
/// of token `row_token [r]` and of choice `row_slot [r]` = token k + column; `slot_row [t, k]` is the inverse.
pub struct GroupByExpert<'a> {
    pub offsets: Option<Out<'a>>,
    pub row_token: Option<Out<'a>>,
    pub row_slot: Option<Out<'a>>,
    pub slot_row: Option<Out<'a>>,
    pub ids: In<'a>,
    pub experts: usize,
}

/// `counts [n, e]` (f32) = how often each expert is chosen in each of `n` sequences of equally many rows of
/// `ids [t, k]` (i32), padding left out that `lengths [n]` tells as for [`Route`].
pub struct CountChoices<'a> {
    pub counts: Out<'a>,
    pub ids: In<'a>,
    pub lengths: Option<In<'a>>,
}

/// The loss of balance of routers (Fedus et al. 2021), with its gradient. `counts [n, e]` and `sums [n, e]` (f32) are
/// choices and summed scores of `n` sequences; the sequences of each `pooled` consecutive rows are taken together. With
/// c and s the sums of these rows, the loss is factor x sum of c s over experts and groups; `loss [1]` (f32) = init +
/// it. Each row of `gradient [n, e]` (f32) becomes factor x c of its group: the gradient of the score of each of its
/// tokens. Where sequences have padding, `lengths [m]` (i32) has the tokens without it of the `m` sequences that every
/// router has rows of, and the factor is divided by the square of a group's number of such tokens.
pub struct BalanceLoss<'a> {
    pub loss: Out<'a>,
    pub gradient: Out<'a>,
    pub counts: In<'a>,
    pub sums: In<'a>,
    pub lengths: Option<In<'a>>,
    pub pooled: usize,
    pub factor: f32,
    pub init: Init<'a>,
}

/// Moves the bias of choices towards experts with less than the mean load (Wang et al. 2024): `bias [e]` (f32) += rate
/// x sign(mean of counts - count), from `counts [e]` (f32). Nothing is done if the second number of `clip [2]` (f32,
/// [`super::NormAndClip`]) is NaN, as for a skipped step.
pub struct StepRouterBias<'a> {
    pub bias: Out<'a>,
    pub counts: In<'a>,
    pub clip: In<'a>,
    pub rate: f32,
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

/// Checks f32 logits and gives their numbers of tokens and of experts.
fn logits(check: &Check, logits: &In) -> Result<[usize; 2], crate::KernelError> {
    check.rank("logits", logits, 2)?;
    check.tensor("logits", logits, logits.dims(), DType::F32)?;
    let [tokens, experts] = [logits.dims()[0], logits.dims()[1]];
    at_most(check, experts)?;
    Ok([tokens, experts])
}

/// Checks a tensor of `n` sequences that divide `t` tokens.
fn sequences(check: &Check, name: &str, rows: &In, [tokens, experts]: [usize; 2]) -> Checked {
    check.rank(name, rows, 2)?;
    let count = rows.dims()[0];
    check.tensor(name, rows, &[count, experts], DType::F32)?;
    divides(check, count, tokens)
}

/// Checks lengths of `n` sequences that divide `t` tokens, `n` being `count` where that is known.
fn lengths(check: &Check, lengths: &Option<In>, count: Option<usize>, tokens: usize) -> Checked {
    lengths.iter().try_for_each(|lengths| {
        check.rank("lengths", lengths, 1)?;
        let count = count.unwrap_or(lengths.elements());
        check.tensor("lengths", lengths, &[count], DType::I32)?;
        divides(check, count, tokens)
    })
}

fn divides(check: &Check, count: usize, tokens: usize) -> Checked {
    check.that(count > 0 && tokens.is_multiple_of(count), || {
        format!("{tokens} tokens are not {count} sequences of equal length")
    })
}

impl Contract for Route<'_> {
    fn name(&self) -> &'static str {
        "route"
    }

    fn check(&self, check: &Check) -> Checked {
        let [tokens, experts] = logits(check, &self.logits)?;
        self.routing.check(check, experts)?;
        let chosen = [tokens, self.routing.choices];
        check.optional("ids", &self.ids, &chosen, DType::I32)?;
        check.optional("weights", &self.weights, &chosen, DType::F32)?;
        check.optional("scores", &self.scores, &[tokens, experts], DType::F32)?;
        lengths(check, &self.lengths, None, tokens)?;
        self.bias
            .iter()
            .try_for_each(|bias| check.tensor("bias", bias, &[experts], DType::F32))
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = [self.logits].into_iter().chain(self.bias);
        let read = read.chain(self.lengths).map(reads);
        let written = [&self.ids, &self.weights, &self.scores];
        let written = written.into_iter().flatten().map(writes);
        read.chain(written).collect()
    }
}

impl Contract for RouteBackward<'_> {
    fn name(&self) -> &'static str {
        "route_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let [tokens, experts] = logits(check, &self.logits)?;
        self.routing.check(check, experts)?;
        let chosen = [tokens, self.routing.choices];
        check.real("dlogits", &self.dlogits, &[tokens, experts])?;
        check.tensor("dweights", &self.dweights, &chosen, DType::F32)?;
        check.tensor("ids", &self.ids, &chosen, DType::I32)?;
        let count = self.balance.as_ref().map(|balance| balance.dims()[0]);
        lengths(check, &self.lengths, count, tokens)?;
        self.balance
            .iter()
            .try_for_each(|balance| sequences(check, "balance", balance, [tokens, experts]))
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = [self.logits, self.dweights, self.ids].into_iter();
        let read = read.chain(self.balance).chain(self.lengths);
        [writes(&self.dlogits)]
            .into_iter()
            .chain(read.map(reads))
            .collect()
    }
}

impl Contract for RouterZLoss<'_> {
    fn name(&self) -> &'static str {
        "router_z_loss"
    }

    fn check(&self, check: &Check) -> Checked {
        let [tokens, _] = logits(check, &self.logits)?;
        lengths(check, &self.lengths, None, tokens)?;
        check.tensor("losses", &self.losses, &[tokens], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = [self.logits].into_iter().chain(self.lengths).map(reads);
        [writes(&self.losses)].into_iter().chain(read).collect()
    }
}

impl Contract for GroupByExpert<'_> {
    fn name(&self) -> &'static str {
        "group_by_expert"
    }

    fn check(&self, check: &Check) -> Checked {
        at_most(check, self.experts)?;
        check.rank("ids", &self.ids, 2)?;
        check.tensor("ids", &self.ids, self.ids.dims(), DType::I32)?;
        let rows = self.ids.elements();
        check.that(i32::try_from(rows).is_ok(), || {
            format!("{rows} rows are more than an i32 counts; take fewer tokens in a micro-batch")
        })?;
        check.optional("offsets", &self.offsets, &[self.experts + 1], DType::I32)?;
        check.optional("row_token", &self.row_token, &[rows], DType::I32)?;
        check.optional("row_slot", &self.row_slot, &[rows], DType::I32)?;
        check.optional("slot_row", &self.slot_row, self.ids.dims(), DType::I32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let tables = [
            &self.offsets,
            &self.row_token,
            &self.row_slot,
            &self.slot_row,
        ];
        let written = tables.into_iter().flatten().map(writes);
        [reads(self.ids)].into_iter().chain(written).collect()
    }
}

impl Contract for CountChoices<'_> {
    fn name(&self) -> &'static str {
        "count_choices"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("ids", &self.ids, 2)?;
        check.tensor("ids", &self.ids, self.ids.dims(), DType::I32)?;
        check.rank("counts", &self.counts, 2)?;
        let experts = self.counts.dims()[1];
        let (counts, tokens) = (self.counts.as_in(), self.ids.dims()[0]);
        sequences(check, "counts", &counts, [tokens, experts])?;
        lengths(check, &self.lengths, Some(counts.dims()[0]), tokens)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = [self.ids].into_iter().chain(self.lengths).map(reads);
        [writes(&self.counts)].into_iter().chain(read).collect()
    }
}

impl Contract for BalanceLoss<'_> {
    fn name(&self) -> &'static str {
        "balance_loss"
    }

    fn check(&self, check: &Check) -> Checked {
        check.no_residual(&self.init)?;
        check.rank("counts", &self.counts, 2)?;
        let dims = self.counts.dims();
        check.tensor("counts", &self.counts, dims, DType::F32)?;
        check.tensor("sums", &self.sums, dims, DType::F32)?;
        check.tensor("gradient", &self.gradient, dims, DType::F32)?;
        check.tensor("loss", &self.loss, &[1], DType::F32)?;
        lengths(check, &self.lengths, None, dims[0])?;
        let (rows, pooled) = (dims[0], self.pooled);
        check.that(pooled > 0 && rows.is_multiple_of(pooled), || {
            format!("{rows} sequences are not groups of {pooled}")
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let tables = [self.counts, self.sums].into_iter().chain(self.lengths);
        [writes(&self.gradient), sets(&self.loss, &self.init)]
            .into_iter()
            .chain(tables.map(reads))
            .collect()
    }
}

impl Contract for StepRouterBias<'_> {
    fn name(&self) -> &'static str {
        "step_router_bias"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("bias", &self.bias, 1)?;
        let dims = self.bias.dims();
        check.tensor("bias", &self.bias, dims, DType::F32)?;
        check.tensor("counts", &self.counts, dims, DType::F32)?;
        check.tensor("clip", &self.clip, &[2], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![changes(&self.bias), reads(self.counts)]
    }
}
