//! TODO

use super::{Cuda, Driver};
use crate::KernelError;
use crate::operation::{
    BalanceLoss, CountChoices, GroupByExpert, Route, RouteBackward, RouterZLoss, StepRouterBias,
};

pub(super) fn route<D: Driver>(_cuda: &Cuda<D>, _operation: Route) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn route_backward<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: RouteBackward,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn router_z_loss<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: RouterZLoss,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn group_by_expert<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: GroupByExpert,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn count_choices<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: CountChoices,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn balance_loss<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: BalanceLoss,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn step_router_bias<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: StepRouterBias,
) -> Result<(), KernelError> {
    todo!()
}
