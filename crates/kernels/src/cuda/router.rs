//! The router of a mixture of experts.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{
    BalanceLoss, CountChoices, GroupByExpert, Route, RouteBackward, RouterScore, RouterZLoss,
    Routing, StepRouterBias,
};
use memory::{DType, In};

/// Threads of a block that groups, or that sums: as in `router.cu`.
const THREADS: usize = 512;

/// Blocks of so many threads.
fn blocks(count: usize) -> Extent {
    Extent {
        grid: [count, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    }
}

fn int(number: usize) -> Argument {
    Argument::Int(number as i32)
}

fn optional(x: &Option<In>) -> Argument {
    x.as_ref().map_or(Argument::NULL, Argument::from)
}

/// Sequences of which a table has a row each; one for all without a table.
fn count(rows: &Option<In>) -> usize {
    rows.as_ref().map_or(1, |rows| rows.dims()[0])
}

/// Choices, whether scores are sigmoids, whether they are normed, and the factor.
fn routing_arguments(routing: &Routing) -> [Argument; 4] {
    [
        int(routing.choices),
        (routing.score == RouterScore::Sigmoid).into(),
        routing.is_normed.into(),
        routing.factor.into(),
    ]
}

pub(super) fn route<D: Driver>(cuda: &Cuda<D>, operation: Route) -> Result<(), KernelError> {
    let Route {
        ids,
        weights,
        scores,
        logits,
        bias,
        lengths,
        routing,
    } = operation;
    let (tokens, experts) = (logits.dims()[0], logits.dims()[1]);
    let [choices, is_sigmoid, is_normed, factor] = routing_arguments(&routing);
    let [groups, chosen_groups, best] = match routing.groups {
        Some(groups) => [groups.count, groups.chosen, groups.best],
        None => [0; 3],
    };
    let arguments = [
        Argument::optional(&ids),
        Argument::optional(&weights),
        Argument::optional(&scores),
        (&logits).into(),
        optional(&bias),
        optional(&lengths),
        tokens.into(),
        (tokens / count(&lengths)).into(),
        int(experts),
        choices,
        is_sigmoid,
        is_normed,
        factor,
        int(groups),
        int(chosen_groups),
        int(best),
    ];
    let kernel = kernel!("router", "route_f32");
    cuda.launch(kernel, Extent::lanes(tokens, WARP), &arguments)
}

pub(super) fn route_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: RouteBackward,
) -> Result<(), KernelError> {
    let RouteBackward {
        dlogits,
        dweights,
        logits,
        ids,
        routing,
        balance,
        z_loss,
        lengths,
    } = operation;
    let (tokens, experts) = (logits.dims()[0], logits.dims()[1]);
    let sequences = count(&balance).max(count(&lengths));
    let [choices, is_sigmoid, is_normed, factor] = routing_arguments(&routing);
    let arguments = [
        (&dlogits).into(),
        (&dweights).into(),
        (&logits).into(),
        (&ids).into(),
        optional(&balance),
        optional(&lengths),
        tokens.into(),
        (tokens / sequences).into(),
        int(experts),
        choices,
        is_sigmoid,
        is_normed,
        factor,
        z_loss.unwrap_or(0.0).into(),
    ];
    let kernel = kernel!("router", "route_backward", dlogits.dtype());
    cuda.launch(kernel, Extent::lanes(tokens, WARP), &arguments)
}

pub(super) fn router_z_loss<D: Driver>(
    cuda: &Cuda<D>,
    operation: RouterZLoss,
) -> Result<(), KernelError> {
    let RouterZLoss {
        losses,
        logits,
        lengths,
        factor,
    } = operation;
    let (tokens, experts) = (logits.dims()[0], logits.dims()[1]);
    let arguments = [
        (&losses).into(),
        (&logits).into(),
        optional(&lengths),
        tokens.into(),
        (tokens / count(&lengths)).into(),
        int(experts),
        factor.into(),
    ];
    let kernel = kernel!("router", "router_z_loss_f32");
    cuda.launch(kernel, Extent::lanes(tokens, WARP), &arguments)
}

pub(super) fn group_by_expert<D: Driver>(
    cuda: &Cuda<D>,
    operation: GroupByExpert,
) -> Result<(), KernelError> {
    let GroupByExpert {
        offsets,
        row_token,
        row_slot,
        slot_row,
        ids,
        experts,
    } = operation;
    let arguments = [
        Argument::optional(&offsets),
        Argument::optional(&row_token),
        Argument::optional(&row_slot),
        Argument::optional(&slot_row),
        (&ids).into(),
        ids.elements().into(),
        int(ids.dims()[1]),
    ];
    let kernel = kernel!("router", "group_by_expert_i32");
    cuda.launch(kernel, blocks(experts), &arguments)
}

pub(super) fn count_choices<D: Driver>(
    cuda: &Cuda<D>,
    operation: CountChoices,
) -> Result<(), KernelError> {
    let CountChoices {
        counts,
        ids,
        lengths,
    } = operation;
    let (sequences, experts) = (counts.dims()[0], counts.dims()[1]);
    let arguments = [
        (&counts).into(),
        (&ids).into(),
        optional(&lengths),
        (ids.elements() / sequences).into(),
        experts.into(),
        ids.dims()[1].into(),
    ];
    let kernel = kernel!("router", "count_choices_f32");
    cuda.launch(kernel, blocks(sequences * experts), &arguments)
}

pub(super) fn balance_loss<D: Driver>(
    cuda: &Cuda<D>,
    operation: BalanceLoss,
) -> Result<(), KernelError> {
    let BalanceLoss {
        loss,
        gradient,
        counts,
        sums,
        lengths,
        pooled,
        factor,
        init,
    } = operation;
    let (rows, experts) = (counts.dims()[0], counts.dims()[1]);
    let arguments = [
        (&loss).into(),
        (&gradient).into(),
        (&counts).into(),
        (&sums).into(),
        optional(&lengths),
        (rows / pooled).into(),
        experts.into(),
        pooled.into(),
        count(&lengths).into(),
        factor.into(),
        accumulates(&init),
    ];
    cuda.launch(kernel!("router", "balance_loss_f32"), blocks(1), &arguments)
}

pub(super) fn step_router_bias<D: Driver>(
    cuda: &Cuda<D>,
    operation: StepRouterBias,
) -> Result<(), KernelError> {
    let StepRouterBias {
        bias,
        counts,
        clip,
        rate,
    } = operation;
    let arguments = [
        (&bias).into(),
        (&counts).into(),
        (&clip).into(),
        bias.elements().into(),
        rate.into(),
    ];
    let kernel = kernel!("router", "step_router_bias_f32");
    cuda.launch(kernel, blocks(1), &arguments)
}
