//! The router of a mixture of experts: choices, weights, tables by expert, and losses of balance. A token is computed by
//! one task, in f32, and every sum has one order.

use super::dispatch::by_dtype;
use super::overwrites;
use super::simd::Real;
use crate::operation::{
    BalanceLoss, CountChoices, GroupByExpert, Route, RouteBackward, RouterGroups, RouterScore,
    RouterZLoss, Routing, StepRouterBias,
};
use memory::Out;
use rayon::prelude::*;

/// Tokens of a task.
const TOKENS: usize = 64;

/// Scores of one token, which replace its logits.
fn score(logits: &mut [f32], score: RouterScore) {
    match score {
        RouterScore::Sigmoid => logits
            .iter_mut()
            .for_each(|logit| *logit = 1.0 / (1.0 + (-*logit).exp())),
        RouterScore::Softmax => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for logit in logits.iter_mut() {
                *logit = (*logit - largest).exp();
                sum += *logit;
            }
            logits.iter_mut().for_each(|score| *score /= sum);
        }
    }
}

/// The log-sum-exp of a token's logits.
fn log_sum_exp(logits: &[f32]) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
    largest + sum.ln()
}

/// The place of the greatest of some numbers that are not taken; the first of equal ones, and a NaN only where all are.
fn greatest(numbers: &[f32], taken: &[bool]) -> usize {
    let mut best: Option<usize> = None;
    for at in (0..numbers.len()).filter(|at| !taken[*at]) {
        let number = numbers[at];
        let is_better = best.is_none_or(|best| {
            number > numbers[best] || (numbers[best].is_nan() && !number.is_nan())
        });
        if is_better {
            best = Some(at);
        }
    }
    best.expect("fewer are taken than there are")
}

/// Marks the experts that cannot be chosen, because their groups are not among the best.
fn close_groups(choices: &[f32], closed: &mut [bool], groups: RouterGroups) {
    let size = choices.len() / groups.count;
    let rates: Vec<f32> = choices
        .chunks(size)
        .map(|group| {
            let mut taken = vec![false; size];
            let mut best = || {
                let at = greatest(group, &taken);
                taken[at] = true;
                group[at]
            };
            let first = best();
            if groups.best == 2 {
                first + best()
            } else {
                first
            }
        })
        .collect();
    let mut open = vec![false; groups.count];
    for _ in 0..groups.chosen {
        let group = greatest(&rates, &open);
        open[group] = true;
        closed[group * size..(group + 1) * size].fill(false);
    }
}

/// The experts of one token, in ascending order.
fn choose(choices: &[f32], routing: &Routing, ids: &mut [i32]) {
    let mut taken = vec![routing.groups.is_some(); choices.len()];
    if let Some(groups) = routing.groups {
        close_groups(choices, &mut taken, groups);
    }
    for id in ids.iter_mut() {
        let expert = greatest(choices, &taken);
        taken[expert] = true;
        *id = expert as i32;
    }
    ids.sort_unstable();
}

/// The sum by which the weights of the chosen are divided.
fn norm_of(chosen: impl Iterator<Item = f32>, routing: &Routing) -> f32 {
    match routing.is_normed {
        true => chosen.sum::<f32>() + 1e-20,
        false => 1.0,
    }
}

/// Runs of rows of an output that may be left out.
fn tasks<'a, T: Send>(out: Option<Out<'a>>, width: usize, count: usize) -> Vec<Option<&'a mut [T]>>
where
    T: memory::Element,
{
    match out {
        Some(out) => out
            .slice_mut::<T>()
            .chunks_mut(TOKENS * width)
            .map(Some)
            .collect(),
        None => (0..count).map(|_| None).collect(),
    }
}

pub(super) fn route(operation: Route) {
    let Route {
        ids,
        weights,
        scores,
        logits,
        bias,
        routing,
    } = operation;
    let [tokens, experts] = [logits.dims()[0], logits.dims()[1]];
    let (choices, count) = (routing.choices, tokens.div_ceil(TOKENS));
    let bias = bias.map(|bias| bias.slice::<f32>());
    let ids = tasks::<i32>(ids, choices, count);
    let weights = tasks::<f32>(weights, choices, count);
    let scores = tasks::<f32>(scores, experts, count);
    let logits = logits.slice::<f32>().par_chunks(TOKENS * experts);
    let outputs = (ids, weights, scores).into_par_iter();
    logits
        .zip(outputs)
        .for_each(|(logits, (mut ids, mut weights, mut scores))| {
            let mut of_token = vec![0.0f32; experts];
            let mut biased = vec![0.0f32; experts];
            let mut chosen = vec![0i32; choices];
            for (token, logits) in logits.chunks_exact(experts).enumerate() {
                of_token.copy_from_slice(logits);
                score(&mut of_token, routing.score);
                biased.copy_from_slice(&of_token);
                for (biased, bias) in biased.iter_mut().zip(bias.into_iter().flatten()) {
                    *biased += bias;
                }
                choose(&biased, &routing, &mut chosen);
                let place = token * choices..(token + 1) * choices;
                if let Some(ids) = &mut ids {
                    ids[place.clone()].copy_from_slice(&chosen);
                }
                if let Some(weights) = &mut weights {
                    let of = |expert: &i32| of_token[*expert as usize];
                    let sum = norm_of(chosen.iter().map(of), &routing);
                    for (weight, expert) in weights[place].iter_mut().zip(&chosen) {
                        *weight = routing.factor * (of(expert) / sum);
                    }
                }
                if let Some(scores) = &mut scores {
                    let sum = seen_sum(&of_token, routing.score);
                    let scores = &mut scores[token * experts..(token + 1) * experts];
                    for (seen, score) in scores.iter_mut().zip(&of_token) {
                        *seen = score / sum;
                    }
                }
            }
        });
}

/// What scores are divided by for losses of balance: sigmoids by their sum.
fn seen_sum(scores: &[f32], kind: RouterScore) -> f32 {
    match kind {
        RouterScore::Softmax => 1.0,
        RouterScore::Sigmoid => scores.iter().sum(),
    }
}

pub(super) fn route_backward(operation: RouteBackward) {
    by_dtype!(operation.dlogits.dtype(), route_backward_of(operation));
}

fn route_backward_of<T: Real>(operation: RouteBackward) {
    let RouteBackward {
        dlogits,
        dweights,
        logits,
        ids,
        routing,
        balance,
        z_loss,
    } = operation;
    let [tokens, experts] = [logits.dims()[0], logits.dims()[1]];
    let seq = balance.map_or(1, |balance| tokens / balance.dims()[0]);
    let (balance, choices) = (
        balance.map(|balance| balance.slice::<f32>()),
        routing.choices,
    );
    let (dweights, ids) = (dweights.slice::<f32>(), ids.slice::<i32>());
    let inputs = logits.slice::<f32>().par_chunks(TOKENS * experts);
    let outputs = dlogits.slice_mut::<T>().par_chunks_mut(TOKENS * experts);
    outputs
        .zip(inputs)
        .enumerate()
        .for_each(|(task, (dlogits, logits))| {
            let mut scores = vec![0.0f32; experts];
            let mut dscores = vec![0.0f32; experts];
            let rows = dlogits.chunks_exact_mut(experts);
            for (row, (dlogits, logits)) in rows.zip(logits.chunks_exact(experts)).enumerate() {
                let token = task * TOKENS + row;
                let place = token * choices..(token + 1) * choices;
                scores.copy_from_slice(logits);
                score(&mut scores, routing.score);
                dscores.fill(0.0);
                let chosen = (&ids[place.clone()], &dweights[place]);
                chosen_gradient(&mut dscores, &scores, chosen, &routing);
                if let Some(balance) = balance {
                    let gradient = &balance[token / seq * experts..][..experts];
                    seen_gradient(&mut dscores, &scores, gradient, routing.score);
                }
                through_scores(&mut dscores, &scores, routing.score);
                if let Some(factor) = z_loss {
                    let sum = log_sum_exp(logits);
                    for (gradient, logit) in dscores.iter_mut().zip(logits) {
                        *gradient += 2.0 * factor * sum * (logit - sum).exp();
                    }
                }
                for (out, gradient) in dlogits.iter_mut().zip(&dscores) {
                    *out = T::narrow(*gradient);
                }
            }
        });
}

/// Adds the gradient of the scores of the chosen by the gradient of their weights.
fn chosen_gradient(
    dscores: &mut [f32],
    scores: &[f32],
    (ids, dweights): (&[i32], &[f32]),
    routing: &Routing,
) {
    let of = |id: &i32| scores[*id as usize];
    let sum = norm_of(ids.iter().map(of), routing);
    let pairs = || ids.iter().zip(dweights);
    let mean = match routing.is_normed {
        true => pairs()
            .map(|(id, dweight)| routing.factor * dweight * (of(id) / sum))
            .sum(),
        false => 0.0f32,
    };
    for (id, dweight) in pairs() {
        dscores[*id as usize] += (routing.factor * dweight - mean) / sum;
    }
}

/// Adds the gradient of scores by that of what losses of balance see.
fn seen_gradient(dscores: &mut [f32], scores: &[f32], gradient: &[f32], kind: RouterScore) {
    let sum = seen_sum(scores, kind);
    let mean = match kind {
        RouterScore::Softmax => 0.0,
        RouterScore::Sigmoid => {
            let terms = gradient.iter().zip(scores);
            terms
                .map(|(gradient, score)| gradient * (score / sum))
                .sum()
        }
    };
    for (dscore, gradient) in dscores.iter_mut().zip(gradient) {
        *dscore += (gradient - mean) / sum;
    }
}

/// The gradient of logits by that of scores, in place.
fn through_scores(dscores: &mut [f32], scores: &[f32], kind: RouterScore) {
    let pairs = || dscores.iter().zip(scores);
    let mean: f32 = match kind {
        RouterScore::Softmax => pairs().map(|(dscore, score)| dscore * score).sum(),
        RouterScore::Sigmoid => 0.0,
    };
    for (dscore, score) in dscores.iter_mut().zip(scores) {
        *dscore = match kind {
            RouterScore::Softmax => score * (*dscore - mean),
            RouterScore::Sigmoid => *dscore * score * (1.0 - score),
        };
    }
}

pub(super) fn router_z_loss(operation: RouterZLoss) {
    let RouterZLoss {
        losses,
        logits,
        factor,
    } = operation;
    let experts = logits.dims()[1];
    let losses = losses.slice_mut::<f32>().par_iter_mut();
    let rows = logits.slice::<f32>().par_chunks(experts);
    losses.zip(rows).for_each(|(loss, logits)| {
        let sum = log_sum_exp(logits);
        *loss = factor * sum * sum;
    });
}

/// Counts, adds up, and places rows in the order of tokens. One task does it all: it is a small part of a layer.
pub(super) fn group_by_expert(operation: GroupByExpert) {
    let GroupByExpert {
        offsets,
        row_token,
        row_slot,
        slot_row,
        ids,
        experts,
    } = operation;
    let (choices, ids) = (ids.dims()[1], ids.slice::<i32>());
    let mut next = vec![0i32; experts + 1];
    ids.iter().for_each(|id| next[*id as usize + 1] += 1);
    (0..experts).for_each(|expert| next[expert + 1] += next[expert]);
    if let Some(offsets) = offsets {
        offsets.slice_mut::<i32>().copy_from_slice(&next);
    }
    let mut row_token = row_token.map(|out| out.slice_mut::<i32>());
    let mut row_slot = row_slot.map(|out| out.slice_mut::<i32>());
    let mut slot_row = slot_row.map(|out| out.slice_mut::<i32>());
    for (slot, id) in ids.iter().enumerate() {
        let row = next[*id as usize];
        next[*id as usize] += 1;
        if let Some(tokens) = &mut row_token {
            tokens[row as usize] = (slot / choices) as i32;
        }
        if let Some(slots) = &mut row_slot {
            slots[row as usize] = slot as i32;
        }
        if let Some(rows) = &mut slot_row {
            rows[slot] = row;
        }
    }
}

pub(super) fn count_choices(CountChoices { counts, ids }: CountChoices) {
    let (sequences, experts) = (counts.dims()[0], counts.dims()[1]);
    let of_sequence = ids.elements() / sequences;
    let rows = counts.slice_mut::<f32>().chunks_exact_mut(experts);
    for (counts, ids) in rows.zip(ids.slice::<i32>().chunks(of_sequence.max(1))) {
        counts.fill(0.0);
        ids.iter().for_each(|id| counts[*id as usize] += 1.0);
    }
}

pub(super) fn balance_loss(operation: BalanceLoss) {
    let BalanceLoss {
        loss,
        gradient,
        counts,
        sums,
        pooled,
        factor,
        init,
    } = operation;
    let experts = counts.dims()[1];
    let group = pooled * experts;
    let gradients = gradient.slice_mut::<f32>().chunks_exact_mut(group);
    let [counts, sums] = [counts, sums].map(|of| of.slice::<f32>().chunks_exact(group));
    let mut total = 0.0;
    for ((gradient, counts), sums) in gradients.zip(counts).zip(sums) {
        for expert in 0..experts {
            let pool = |of: &[f32]| of.iter().skip(expert).step_by(experts).sum::<f32>();
            let (count, sum) = (pool(counts), pool(sums));
            total += count * sum;
            let of_expert = gradient.iter_mut().skip(expert).step_by(experts);
            of_expert.for_each(|gradient| *gradient = factor * count);
        }
    }
    let loss = &mut loss.slice_mut::<f32>()[0];
    *loss = factor * total + if overwrites(&init) { 0.0 } else { *loss };
}

pub(super) fn step_router_bias(operation: StepRouterBias) {
    let StepRouterBias {
        bias,
        counts,
        clip,
        rate,
    } = operation;
    if clip.slice::<f32>()[1].is_nan() {
        return;
    }
    let counts = counts.slice::<f32>();
    let mean = counts.iter().sum::<f32>() / counts.len() as f32;
    for (bias, count) in bias.slice_mut::<f32>().iter_mut().zip(counts) {
        *bias += match mean - count {
            0.0 => 0.0,
            less => rate * less.signum(),
        };
    }
}
