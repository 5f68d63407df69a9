//! The router of a mixture of experts.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, accumulates, arguments, int, kernel};
use crate::Result;
use crate::operation::{
    BalanceLoss, CountChoices, GroupByExpert, Route, RouteBackward, RouterScore, RouterZLoss,
    Routing, StepRouterBias,
};
use memory::In;

/// Threads of a block that groups, or that sums: as in `router.cu`.
const THREADS: usize = 512;

/// Blocks of so many threads.
fn blocks(count: usize) -> Extent {
    Extent::new([count, 1, 1], [THREADS, 1, 1])
}

/// Sequences of which a table has a row each; one for all without a table.
fn count(rows: &Option<In>) -> usize {
    rows.as_ref().map_or(1, |rows| rows.dims()[0])
}

/// Choices, whether scores are sigmoids, whether they are normed, and the factor.
fn routing_arguments(routing: &Routing) -> [Argument; 4] {
    let is_sigmoid = routing.score == RouterScore::Sigmoid;
    arguments! { int(routing.choices), is_sigmoid, routing.is_normed, routing.factor }
}

pub(super) fn route<D: Driver>(cuda: &Cuda<D>, op: Route) -> Result {
    let (tokens, experts) = (op.logits.dims()[0], op.logits.dims()[1]);
    let [choices, is_sigmoid, is_normed, factor] = routing_arguments(&op.routing);
    let [groups, chosen_groups, best] = match op.routing.groups {
        Some(groups) => [groups.count, groups.chosen, groups.best],
        None => [0; 3],
    };
    let arguments = arguments! {
        &op.ids, &op.weights, &op.scores, &op.logits, &op.bias, &op.lengths, tokens,
        tokens / count(&op.lengths), int(experts), choices, is_sigmoid, is_normed, factor,
        int(groups), int(chosen_groups), int(best),
    };
    let kernel = kernel!("router", "route_f32");
    cuda.launch(kernel, Extent::lanes(tokens, WARP), &arguments)
}

pub(super) fn route_backward<D: Driver>(cuda: &Cuda<D>, op: RouteBackward) -> Result {
    let (tokens, experts) = (op.logits.dims()[0], op.logits.dims()[1]);
    let sequences = count(&op.balance).max(count(&op.lengths));
    let [choices, is_sigmoid, is_normed, factor] = routing_arguments(&op.routing);
    let arguments = arguments! {
        &op.dlogits, &op.dweights, &op.logits, &op.ids, &op.balance, &op.lengths, tokens,
        tokens / sequences, int(experts), choices, is_sigmoid, is_normed, factor,
        op.z_loss.unwrap_or(0.0),
    };
    let kernel = kernel!("router", "route_backward", op.dlogits.dtype());
    cuda.launch(kernel, Extent::lanes(tokens, WARP), &arguments)
}

pub(super) fn router_z_loss<D: Driver>(cuda: &Cuda<D>, op: RouterZLoss) -> Result {
    let (tokens, experts) = (op.logits.dims()[0], op.logits.dims()[1]);
    let arguments = arguments! {
        &op.losses, &op.logits, &op.lengths, tokens, tokens / count(&op.lengths), int(experts),
        op.factor,
    };
    let kernel = kernel!("router", "router_z_loss_f32");
    cuda.launch(kernel, Extent::lanes(tokens, WARP), &arguments)
}

pub(super) fn group_by_expert<D: Driver>(cuda: &Cuda<D>, op: GroupByExpert) -> Result {
    let arguments = arguments! {
        &op.offsets, &op.row_token, &op.row_slot, &op.slot_row, &op.ids, op.ids.elements(),
        int(op.ids.dims()[1]),
    };
    let kernel = kernel!("router", "group_by_expert_i32");
    cuda.launch(kernel, blocks(op.experts), &arguments)
}

pub(super) fn count_choices<D: Driver>(cuda: &Cuda<D>, op: CountChoices) -> Result {
    let (sequences, experts) = (op.counts.dims()[0], op.counts.dims()[1]);
    let arguments = arguments! {
        &op.counts, &op.ids, &op.lengths, op.ids.elements() / sequences, experts, op.ids.dims()[1],
    };
    let kernel = kernel!("router", "count_choices_f32");
    cuda.launch(kernel, blocks(sequences * experts), &arguments)
}

pub(super) fn balance_loss<D: Driver>(cuda: &Cuda<D>, op: BalanceLoss) -> Result {
    let (rows, experts) = (op.counts.dims()[0], op.counts.dims()[1]);
    let arguments = arguments! {
        &op.loss, &op.gradient, &op.counts, &op.sums, &op.lengths, rows / op.pooled, experts,
        op.pooled, count(&op.lengths), op.factor, accumulates(&op.init),
    };
    cuda.launch(kernel!("router", "balance_loss_f32"), blocks(1), &arguments)
}

pub(super) fn step_router_bias<D: Driver>(cuda: &Cuda<D>, op: StepRouterBias) -> Result {
    let arguments = arguments![&op.bias, &op.counts, &op.clip, op.bias.elements(), op.rate];
    let kernel = kernel!("router", "step_router_bias_f32");
    cuda.launch(kernel, blocks(1), &arguments)
}
