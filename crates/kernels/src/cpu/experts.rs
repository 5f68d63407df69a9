//! TODO

use crate::operation::{
    GatherRows, GroupedGradient, GroupedMatmul, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};

pub(super) fn gather_rows(_operation: GatherRows) {
    todo!()
}

pub(super) fn sum_rows(_operation: SumRows) {
    todo!()
}

pub(super) fn grouped_matmul(
    workspace: Option<&std::cell::RefCell<memory::Buffer>>,
    instructions: super::Instructions,
    _operation: GroupedMatmul,
) {
    todo!()
}

pub(super) fn grouped_gradient(
    workspace: Option<&std::cell::RefCell<memory::Buffer>>,
    instructions: super::Instructions,
    _operation: GroupedGradient,
) {
    todo!()
}

pub(super) fn weighed_swiglu(_operation: WeighedSwiglu) {
    todo!()
}

pub(super) fn weighed_swiglu_backward(_operation: WeighedSwigluBackward) {
    todo!()
}
