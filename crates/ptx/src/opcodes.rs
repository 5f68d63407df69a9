//! The table of supported opcodes.

use crate::executable::{Decode, Opcodes};
use crate::{
    access, arithmetic, async_copy, collective, compare, control, convert, logic, matrix, mbarrier,
    wgmma,
};
use std::collections::HashMap;
use std::sync::OnceLock;

const FAMILIES: [Opcodes; 14] = [
    access::OPCODES,
    access::PARAMETERS,
    access::WINDOWS,
    arithmetic::OPCODES,
    collective::OPCODES,
    compare::OPCODES,
    control::OPCODES,
    convert::OPCODES,
    async_copy::OPCODES,
    logic::OPCODES,
    matrix::OPCODES,
    mbarrier::OPCODES,
    wgmma::OPCODES,
    wgmma::PRODUCTS,
];

/// Every opcode that is supported, with all its modifiers, in no order that matters.
pub fn supported() -> impl Iterator<Item = &'static str> {
    FAMILIES.into_iter().flatten().map(|(name, _)| *name)
}

/// An opcode's name, and the function that decodes it.
pub(crate) fn find(opcode: &str) -> Option<(&'static str, Decode)> {
    static TABLE: OnceLock<HashMap<&'static str, Decode>> = OnceLock::new();
    let table = TABLE.get_or_init(|| FAMILIES.into_iter().flatten().copied().collect());
    let found = table.get_key_value(opcode);
    found.map(|(name, decode)| (*name, *decode))
}
