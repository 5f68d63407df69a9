//! TODO

use crate::operation::{
    BalanceLoss, CountChoices, GroupByExpert, Route, RouteBackward, RouterZLoss, StepRouterBias,
};

pub(super) fn route(_operation: Route) {
    todo!()
}

pub(super) fn route_backward(_operation: RouteBackward) {
    todo!()
}

pub(super) fn router_z_loss(_operation: RouterZLoss) {
    todo!()
}

pub(super) fn group_by_expert(_operation: GroupByExpert) {
    todo!()
}

pub(super) fn count_choices(_operation: CountChoices) {
    todo!()
}

pub(super) fn balance_loss(_operation: BalanceLoss) {
    todo!()
}

pub(super) fn step_router_bias(_operation: StepRouterBias) {
    todo!()
}
