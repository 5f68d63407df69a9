//! The router of a mixture of experts: choices, weights, tables by expert, and losses of balance.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{
    BalanceLoss, CountChoices, GroupByExpert, Route, RouteBackward, RouterScore, RouterZLoss,
    Routing, StepRouterBias,
};
use memory::DType;

/// The most experts, and the threads of blocks that work on tables: as in `router.cu`.
const EXPERTS_MAX: usize = 512;
const THREADS: usize = 256;

/// Refuses more experts than a warp has room for.
fn check_experts(operation: &'static str, experts: usize) -> Result<(), KernelError> {
    match experts <= EXPERTS_MAX {
        true => Ok(()),
        false => {
            let message =
                format!("{experts} experts are more than {EXPERTS_MAX}, the most on CUDA");
            Err(KernelError::too_large(operation, message))
        }
    }
}

/// One block.
fn alone() -> Extent {
    blocks(1)
}

/// This many blocks that work on tables.
fn blocks(count: usize) -> Extent {
    Extent {
        grid: [count, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    }
}

/// Experts, choices, whether scores are sigmoids, whether weights are normed.
fn numbers(routing: &Routing, experts: usize) -> [Argument; 4] {
    let is_sigmoid = routing.score == RouterScore::Sigmoid;
    [
        Argument::Int(experts as i32),
        Argument::Int(routing.choices as i32),
        Argument::Int(i32::from(is_sigmoid)),
        Argument::Int(i32::from(routing.is_normed)),
    ]
}

pub(super) fn route<D: Driver>(cuda: &Cuda<D>, operation: Route) -> Result<(), KernelError> {
    let Route {
        ids,
        weights,
        scores,
        logits,
        bias,
        routing,
    } = operation;
    let [tokens, experts] = [logits.dims()[0], logits.dims()[1]];
    check_experts("route", experts)?;
    let groups = routing
        .groups
        .map_or([1; 3], |groups| [groups.count, groups.chosen, groups.best]);
    let tensors = [
        Argument::optional(&ids),
        Argument::optional(&weights),
        Argument::optional(&scores),
        (&logits).into(),
        bias.as_ref().map_or(Argument::NULL, Argument::from),
        tokens.into(),
    ];
    let groups = groups.map(|number| Argument::Int(number as i32));
    let arguments = [
        &tensors[..],
        &numbers(&routing, experts),
        &groups,
        &[routing.factor.into()],
    ]
    .concat();
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
    } = operation;
    let [tokens, experts] = [logits.dims()[0], logits.dims()[1]];
    check_experts("route_backward", experts)?;
    let seq = balance.map_or(1, |balance| tokens / balance.dims()[0]);
    let tensors = [
        (&dlogits).into(),
        (&dweights).into(),
        (&logits).into(),
        (&ids).into(),
        balance.as_ref().map_or(Argument::NULL, Argument::from),
        tokens.into(),
        seq.into(),
        z_loss.unwrap_or(0.0).into(),
    ];
    let numbers = numbers(&routing, experts);
    let arguments = [&tensors[..], &numbers, &[routing.factor.into()]].concat();
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
        factor,
    } = operation;
    let [tokens, experts] = [logits.dims()[0], logits.dims()[1]];
    check_experts("router_z_loss", experts)?;
    let arguments = [
        (&losses).into(),
        (&logits).into(),
        tokens.into(),
        Argument::Int(experts as i32),
        factor.into(),
    ];
    let kernel = kernel!("router", "router_z_loss");
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
        ids.dims()[1].into(),
    ];
    let kernel = kernel!("router", "group_by_expert");
    cuda.launch(kernel, blocks(experts), &arguments)
}

pub(super) fn count_choices<D: Driver>(
    cuda: &Cuda<D>,
    CountChoices { counts, ids }: CountChoices,
) -> Result<(), KernelError> {
    let [sequences, experts] = [counts.dims()[0], counts.dims()[1]];
    let all = sequences * experts;
    let arguments = [
        (&counts).into(),
        (&ids).into(),
        all.into(),
        experts.into(),
        (ids.elements() / sequences).into(),
    ];
    let kernel = kernel!("router", "count_choices");
    cuda.launch(kernel, Extent::lanes(all, WARP), &arguments)
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
        pooled,
        factor,
        init,
    } = operation;
    let arguments = [
        (&loss).into(),
        (&gradient).into(),
        (&counts).into(),
        (&sums).into(),
        (counts.dims()[0] / pooled).into(),
        pooled.into(),
        counts.dims()[1].into(),
        factor.into(),
        accumulates(&init),
    ];
    cuda.launch(kernel!("router", "balance_loss"), alone(), &arguments)
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
    cuda.launch(kernel!("router", "step_router_bias"), alone(), &arguments)
}
