//! The router of a mixture of experts.

use super::dispatch::by_dtype;
use super::simd::{Real, exp, lane_max, lane_sum, vectorized};
use super::{Shared, overwrites, shared};
use crate::operation::{
    BalanceLoss, CountChoices, EXPERTS_MAX, GroupByExpert, Route, RouteBackward, RouterGroups,
    RouterScore, RouterZLoss, Routing, StepRouterBias,
};
use memory::{In, Out};
use rayon::prelude::*;

/// Tokens of a task.
const TOKENS: usize = 64;

/// Added to each sum of scores before anything is divided by it, so that no division is by 0.
const TINY: f32 = 1e-20;

/// The keys by which experts are chosen: greater ones are taken first. These stand for no number.
const ABSENT: u32 = 0;
const NAN: u32 = 1;
const CHOSEN: u32 = u32::MAX;

/// Which tokens are padding: those of each sequence that come after as many as its length.
#[derive(Clone, Copy)]
struct Padding<'a> {
    lengths: &'a [i32],
    seq: usize,
}

impl<'a> Padding<'a> {
    /// None if no token is padding.
    fn of(lengths: Option<In<'a>>, tokens: usize) -> Option<Padding<'a>> {
        lengths.map(|lengths| Padding {
            lengths: lengths.slice(),
            seq: tokens / lengths.elements(),
        })
    }

    fn has(self, token: usize) -> bool {
        token % self.seq >= self.lengths[token / self.seq] as usize
    }

    /// How many tokens are not padding.
    fn others(self) -> f32 {
        self.lengths.iter().sum::<i32>() as f32
    }
}

pub(super) fn route(op: Route) {
    let experts = op.logits.dims()[1];
    let padding = Padding::of(op.lengths, op.logits.dims()[0]);
    let bias = op.bias.map(|bias| bias.slice::<f32>());
    let (ids, weights) = (op.ids.map(shared::<i32>), op.weights.map(shared::<f32>));
    let all_scores = op.scores.map(shared::<f32>);
    let tasks = op.logits.slice::<f32>().par_chunks(TOKENS * experts);
    tasks.enumerate().for_each(|(task, logits)| {
        let tokens = (task * TOKENS..).zip(logits.chunks_exact(experts));
        for (token, logits) in tokens {
            let mut scores = [0.0; EXPERTS_MAX];
            let scores = &mut scores[..experts];
            score(scores, logits, op.routing.score);
            let chosen = choose_experts(logits, scores, bias, &op.routing);
            let chosen = || (0..experts).filter(|expert| chosen[*expert] == CHOSEN);
            let sum: f32 = chosen().map(|expert| scores[expert]).sum();
            let divisor = if op.routing.is_normed {
                sum + TINY
            } else {
                1.0
            };
            for (choice, expert) in chosen().enumerate() {
                let at = token * op.routing.choices + choice;
                // SAFETY: the choices of a token belong to its task alone.
                unsafe {
                    write(ids, at, expert as i32);
                    write(weights, at, scores[expert] / divisor * op.routing.factor);
                }
            }
            let mut sum = sum_of_balanced(scores, op.routing.score);
            if padding.is_some_and(|padding| padding.has(token)) {
                // The sum may be NaN, which would make the quotients NaN too.
                scores.fill(0.0);
                sum = 1.0;
            }
            for (expert, score) in scores.iter().enumerate() {
                // SAFETY: as above.
                unsafe { write(all_scores, token * experts + expert, score / sum) };
            }
        }
    });
}

/// Writes an element of an output that may have been left out.
///
/// # Safety
/// The element lies in the output, and nothing else touches it.
unsafe fn write<T>(out: Option<Shared<T>>, at: usize, value: T) {
    if let Some(out) = out {
        // SAFETY: the caller's promise.
        unsafe { out.at(at).write(value) };
    }
}

/// The divisor of the scores that the loss of balance sees: sigmoids are divided by their sum, softmaxes by nothing.
fn sum_of_balanced(scores: &[f32], score: RouterScore) -> f32 {
    match score {
        RouterScore::Softmax => 1.0,
        RouterScore::Sigmoid => sum(scores) + TINY,
    }
}

/// The scores of a token.
fn score(scores: &mut [f32], logits: &[f32], score: RouterScore) {
    match score {
        RouterScore::Softmax => {
            softmax(scores, logits);
        }
        RouterScore::Sigmoid => sigmoid(scores, logits),
    }
}

/// The keys of a token's experts: `CHOSEN` of those that it is sent to.
fn choose_experts(
    logits: &[f32],
    scores: &[f32],
    bias: Option<&[f32]>,
    routing: &Routing,
) -> [u32; EXPERTS_MAX] {
    let adds_two = routing.groups.is_some_and(|groups| groups.best == 2);
    let mut values = [0.0; EXPERTS_MAX];
    let values = &mut values[..logits.len()];
    match bias {
        Some(bias) => add(values, scores, bias),
        None if adds_two => values.copy_from_slice(scores),
        None => values.copy_from_slice(logits),
    }
    let mut keys = [ABSENT; EXPERTS_MAX];
    let own = keys.iter_mut().zip(&*values);
    own.for_each(|(key, value)| *key = key_of(*value));
    if let Some(groups) = routing.groups {
        leave_groups(&mut keys, values, groups);
    }
    choose(&mut keys[..values.len()], routing.choices);
    keys
}

/// Takes away the keys of experts that are not in the best groups.
fn leave_groups(keys: &mut [u32], values: &[f32], groups: RouterGroups) {
    let size = values.len() / groups.count;
    let mut of_groups = [ABSENT; EXPERTS_MAX];
    let of_groups = &mut of_groups[..groups.count];
    for (group, values) in of_groups.iter_mut().zip(values.chunks_exact(size)) {
        let mut best = [f32::NAN; 2];
        for value in values {
            if key_of(*value) > key_of(best[0]) {
                best = [*value, best[0]];
            } else if key_of(*value) > key_of(best[1]) {
                best[1] = *value;
            }
        }
        *group = key_of(best[..groups.best].iter().sum());
    }
    choose(of_groups, groups.chosen);
    for (group, keys) in of_groups.iter().zip(keys.chunks_exact_mut(size)) {
        if *group != CHOSEN {
            keys.fill(ABSENT);
        }
    }
}

/// Replaces the `count` greatest keys by `CHOSEN`, of equal ones the first.
fn choose(keys: &mut [u32], count: usize) {
    for _ in 0..count {
        let mut best = (ABSENT, 0);
        for (index, key) in keys.iter().enumerate() {
            if *key > best.0 && *key != CHOSEN {
                best = (*key, index);
            }
        }
        keys[best.1] = CHOSEN;
    }
}

/// Ordered like the numbers. Both zeros are equal, and a NaN is less than any.
fn key_of(value: f32) -> u32 {
    if value.is_nan() {
        return NAN;
    }
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

pub(super) fn route_backward(op: RouteBackward) {
    by_dtype!(op.dlogits.dtype(), route_backward_of(op));
}

fn route_backward_of<T: Real>(mut op: RouteBackward) {
    let (experts, choices) = (op.logits.dims()[1], op.routing.choices);
    let tokens = op.logits.dims()[0];
    let padding = Padding::of(op.lengths, tokens);
    if let (Some(factor), Some(padding)) = (&mut op.z_loss, padding) {
        *factor /= padding.others();
    }
    let balance = op
        .balance
        .map(|rows| (rows.slice::<f32>(), tokens / rows.dims()[0]));
    let (dweights, ids) = (op.dweights.slice::<f32>(), op.ids.slice::<i32>());
    let tasks = op.dlogits.slice_mut::<T>().par_chunks_mut(TOKENS * experts);
    let tasks = tasks.zip(op.logits.slice::<f32>().par_chunks(TOKENS * experts));
    tasks.enumerate().for_each(|(task, (dlogits, logits))| {
        let rows = dlogits.chunks_exact_mut(experts);
        let rows = rows.zip(logits.chunks_exact(experts));
        for (token, (dlogits, logits)) in (task * TOKENS..).zip(rows) {
            let own = token * choices..(token + 1) * choices;
            let given = (&dweights[own.clone()], &ids[own]);
            let balance = balance.map(|(rows, seq)| &rows[token / seq * experts..][..experts]);
            let (balance, z_loss) = match padding {
                Some(padding) if padding.has(token) => (None, None),
                _ => (balance, op.z_loss),
            };
            backward(dlogits, logits, given, &op.routing, balance, z_loss);
        }
    });
}

/// The gradient of a token's logits.
fn backward<T: Real>(
    dlogits: &mut [T],
    logits: &[f32],
    (dweights, ids): (&[f32], &[i32]),
    routing: &Routing,
    balance: Option<&[f32]>,
    z_loss: Option<f32>,
) {
    let (mut scores, mut dscores) = ([0.0; EXPERTS_MAX], [0.0; EXPERTS_MAX]);
    let scores = &mut scores[..logits.len()];
    let dscores = &mut dscores[..logits.len()];
    score(scores, logits, routing.score);
    weights_backward(dscores, scores, (dweights, ids), routing);
    if let Some(balance) = balance {
        let total = sum_of_balanced(scores, routing.score);
        // The softmax is not divided by anything.
        let mean = match routing.score {
            RouterScore::Softmax => 0.0,
            RouterScore::Sigmoid => dot(balance, scores) / total,
        };
        add_scaled(dscores, balance, mean, 1.0 / total);
    }
    match routing.score {
        RouterScore::Softmax => softmax_backward(dscores, scores),
        RouterScore::Sigmoid => sigmoid_backward(dscores, scores),
    }
    if let Some(factor) = z_loss {
        let lse = softmax(scores, logits);
        add_scaled(dscores, scores, 0.0, 2.0 * factor * lse);
    }
    let pairs = dlogits.iter_mut().zip(dscores);
    pairs.for_each(|(out, value)| *out = T::narrow(*value));
}

/// Sets the gradients of the chosen scores.
fn weights_backward(
    dscores: &mut [f32],
    scores: &[f32],
    (dweights, ids): (&[f32], &[i32]),
    routing: &Routing,
) {
    let chosen = || ids.iter().map(|id| *id as usize).zip(dweights);
    let (mut mean, mut divisor) = (0.0, 1.0);
    if routing.is_normed {
        divisor = TINY + chosen().map(|(expert, _)| scores[expert]).sum::<f32>();
        let products = chosen().map(|(expert, dweight)| dweight * scores[expert]);
        mean = products.sum::<f32>() / divisor;
    }
    for (expert, dweight) in chosen() {
        dscores[expert] = (dweight - mean) / divisor * routing.factor;
    }
}

pub(super) fn router_z_loss(op: RouterZLoss) {
    let [tokens, experts] = [0, 1].map(|dim| op.logits.dims()[dim]);
    let padding = Padding::of(op.lengths, tokens);
    let factor = padding.map_or(op.factor, |padding| op.factor / padding.others());
    let losses = op.losses.slice_mut::<f32>().par_chunks_mut(TOKENS);
    let tasks = losses.zip(op.logits.slice::<f32>().par_chunks(TOKENS * experts));
    tasks.enumerate().for_each(|(task, (losses, logits))| {
        let rows = losses.iter_mut().zip(logits.chunks_exact(experts));
        for (token, (loss, logits)) in (task * TOKENS..).zip(rows) {
            let lse = softmax(&mut [0.0; EXPERTS_MAX][..experts], logits);
            *loss = match padding {
                Some(padding) if padding.has(token) => 0.0,
                _ => factor * lse * lse,
            };
        }
    });
}

/// Sorted in one task: that takes less time than reading the ids once for each expert in many.
pub(super) fn group_by_expert(op: GroupByExpert) {
    let (choices, ids) = (op.ids.dims()[1], op.ids.slice::<i32>());
    let mut starts = [0; EXPERTS_MAX + 1];
    for id in ids {
        starts[*id as usize + 1] += 1;
    }
    for expert in 0..op.experts {
        starts[expert + 1] += starts[expert];
    }
    if let Some(offsets) = op.offsets {
        offsets
            .slice_mut::<i32>()
            .copy_from_slice(&starts[..=op.experts]);
    }
    let table = |out: Option<Out>| out.map(shared::<i32>);
    let (row_token, row_slot, slot_row) =
        (table(op.row_token), table(op.row_slot), table(op.slot_row));
    for (slot, id) in ids.iter().enumerate() {
        let next = &mut starts[*id as usize];
        let row = *next as usize;
        *next += 1;
        // SAFETY: there are as many rows as ids, and this is the only task.
        unsafe {
            write(row_token, row, (slot / choices) as i32);
            write(row_slot, row, slot as i32);
            write(slot_row, slot, row as i32);
        }
    }
}

pub(super) fn count_choices(op: CountChoices) {
    let (sequences, experts) = (op.counts.dims()[0], op.counts.dims()[1]);
    let (choices, ids) = (op.ids.dims()[1], op.ids.slice::<i32>());
    let of_sequence = ids.len() / sequences;
    let lengths = op.lengths.map(|lengths| lengths.slice::<i32>());
    let counts = op.counts.slice_mut::<f32>().par_chunks_mut(experts);
    counts.enumerate().for_each(|(sequence, counts)| {
        counts.fill(0.0);
        let own = lengths.map_or(of_sequence, |lengths| lengths[sequence] as usize * choices);
        for id in &ids[sequence * of_sequence..][..own] {
            counts[*id as usize] += 1.0;
        }
    });
}

pub(super) fn balance_loss(op: BalanceLoss) {
    let experts = op.counts.dims()[1];
    let group = op.pooled * experts;
    let groups = op.gradient.slice_mut::<f32>().chunks_exact_mut(group);
    let groups = groups.zip(op.counts.slice::<f32>().chunks_exact(group));
    let groups = groups.zip(op.sums.slice::<f32>().chunks_exact(group));
    let lengths = op.lengths.map(|lengths| lengths.slice::<i32>());
    let mut total = 0.0;
    for (number, ((gradient, counts), sums)) in groups.enumerate() {
        let squared = lengths.map_or(1.0, |lengths| {
            let own = lengths
                .iter()
                .cycle()
                .skip(number * op.pooled % lengths.len());
            let tokens: f64 = own.take(op.pooled).map(|length| f64::from(*length)).sum();
            // Nothing was counted where there is only padding.
            tokens.max(1.0).powi(2)
        });
        for expert in 0..experts {
            let [count, sum] = [counts, sums].map(|rows| {
                let column = rows[expert..].iter().step_by(experts);
                column.map(|value| f64::from(*value)).sum::<f64>()
            });
            total += count * (sum / squared);
            let column = gradient[expert..].iter_mut().step_by(experts);
            column.for_each(|out| *out = (f64::from(op.factor) * (count / squared)) as f32);
        }
    }
    let loss = &mut op.loss.slice_mut::<f32>()[0];
    let before = if overwrites(&op.init) {
        0.0
    } else {
        f64::from(*loss)
    };
    *loss = (before + f64::from(op.factor) * total) as f32;
}

pub(super) fn step_router_bias(op: StepRouterBias) {
    if op.clip.slice::<f32>()[1].is_nan() {
        return;
    }
    let counts = op.counts.slice::<f32>();
    let total: f64 = counts.iter().map(|count| f64::from(*count)).sum();
    for (bias, count) in op.bias.slice_mut::<f32>().iter_mut().zip(counts) {
        // Whole numbers: both sides are exact.
        let of_all = f64::from(*count) * counts.len() as f64;
        if of_all < total {
            *bias += op.rate;
        } else if of_all > total {
            *bias -= op.rate;
        }
    }
}

vectorized! {
    /// Sets scores to the softmax of logits, and returns the logarithm of the sum of the logits' exponentials.
    fn softmax(scores: &mut [f32], logits: &[f32]) -> f32 {
        let largest = lane_max(logits);
        for (score, logit) in scores.iter_mut().zip(logits) {
            *score = exp(logit - largest);
        }
        let sum = lane_sum([&*scores], |[score]| score);
        scores.iter_mut().for_each(|score| *score /= sum);
        largest + sum.ln()
    }

    fn sigmoid(scores: &mut [f32], logits: &[f32]) {
        for (score, logit) in scores.iter_mut().zip(logits) {
            *score = 1.0 / (1.0 + exp(-logit));
        }
    }

    fn sum(x: &[f32]) -> f32 {
        lane_sum([x], |[x]| x)
    }

    fn dot(x: &[f32], y: &[f32]) -> f32 {
        lane_sum([x, y], |[x, y]| x * y)
    }

    fn add(out: &mut [f32], x: &[f32], y: &[f32]) {
        for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
            *out = x + y;
        }
    }

    /// `out += (x - mean) * factor`.
    fn add_scaled(out: &mut [f32], x: &[f32], mean: f32, factor: f32) {
        for (out, x) in out.iter_mut().zip(x) {
            *out += (x - mean) * factor;
        }
    }

    /// Gradients of scores become those of logits.
    fn softmax_backward(gradients: &mut [f32], scores: &[f32]) {
        let mean = lane_sum([&*gradients, scores], |[gradient, score]| gradient * score);
        for (gradient, score) in gradients.iter_mut().zip(scores) {
            *gradient = (*gradient - mean) * score;
        }
    }

    /// As `softmax_backward`.
    fn sigmoid_backward(gradients: &mut [f32], scores: &[f32]) {
        for (gradient, score) in gradients.iter_mut().zip(scores) {
            *gradient *= score * (1.0 - score);
        }
    }
}
