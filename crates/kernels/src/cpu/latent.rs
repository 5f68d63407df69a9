//! TODO

use crate::operation::{ExpandKeys, ExpandKeysBackward, RotaryTail};

pub(super) fn rotary_tail(_operation: RotaryTail) {
    todo!()
}

pub(super) fn expand_keys(_operation: ExpandKeys) {
    todo!()
}

pub(super) fn expand_keys_backward(_operation: ExpandKeysBackward) {
    todo!()
}
