//! Every opcode, against values that follow from the PTX manual's description of it, not from any kernel.

mod arithmetic;
mod async_copy;
mod compare;
mod convert;
mod harness;
mod lanes;
mod launches;
mod logic;
mod matrix;
mod mbarrier;
mod memory;
mod mistakes;
mod races;
mod warp_group;
mod wgmma;

use harness::{Program, Table};
use std::collections::BTreeSet;

/// Opcodes whose lanes compute a value each.
const TABLES: [Table; 4] = [
    arithmetic::table,
    compare::table,
    convert::table,
    logic::table,
];

/// Every other opcode has a test that returns the program that it ran.
const PROGRAMS: [&[(&str, Program)]; 8] = [
    async_copy::PROGRAMS,
    lanes::PROGRAMS,
    matrix::PROGRAMS,
    mbarrier::PROGRAMS,
    memory::PROGRAMS,
    warp_group::PROGRAMS,
    wgmma::PRODUCTS,
    wgmma::PROGRAMS,
];

#[test]
fn lanes_compute_what_the_manual_says() {
    for table in TABLES {
        for case in table() {
            case.check();
        }
    }
}

#[test]
fn programs_do_what_the_manual_says() {
    for (opcode, program) in PROGRAMS.into_iter().flatten() {
        let text = program();
        let used = text
            .split_whitespace()
            .any(|word| word.trim_end_matches(';') == *opcode);
        assert!(used, "the test of `{opcode}` does not use it:\n{text}");
    }
}

/// Every supported opcode has a test.
#[test]
fn every_opcode_has_a_test() {
    let computed = TABLES.into_iter().flat_map(|table| table());
    let computed = computed.map(|case| case.opcode);
    let others = PROGRAMS.into_iter().flatten().map(|(opcode, _)| *opcode);
    let tested: BTreeSet<&str> = computed.chain(others).collect();
    let supported: BTreeSet<&str> = ptx::supported().collect();
    assert_eq!(tested, supported);
    assert_eq!(
        supported.len(),
        ptx::supported().count(),
        "one is there twice"
    );
}

#[test]
fn an_unknown_opcode_is_named_with_its_line() {
    let text = ".entry none()\n{\n.reg .b32 %r<3>;\nadd.s32 %r1, %r2, 1;\nsad.s32 %r1, %r2, 1, %r1;\nret;\n}\n";
    let error = ptx::Module::parse(text).err().unwrap();
    assert_eq!(error.line, 5);
    assert_eq!(error.message, "unknown opcode `sad.s32`");
}

#[test]
fn operands_of_another_number_width_or_kind_are_refused() {
    for (instruction, message) in [
        ("add.s32 %r1, %r2;", "2 operands in place of 3"),
        (
            "add.s32 %r1, %r2, %rd1;",
            "`%rd1` is one of the Doubles, not the Words",
        ),
        ("add.s32 %r1, %r2, %r9;", "`%r9` is not declared"),
        ("add.f32 %r1, %r2, 1;", "Integer(1) has another type"),
        ("add.s32 %r1|%p1, %r2, 1;", "is no register"),
        ("setp.lt.s32 %p1|%p2, %r1, %r2;", "is no predicate"),
        (
            "shfl.sync.idx.b32 %r1|%p9, %r2, 0, 31, -1;",
            "`%p9` is no predicate",
        ),
        ("mov.u32 %tid.x, %r1;", "`%tid.x` cannot be written"),
        ("ld.global.v2.u32 {%r1, 4}, [%rd1];", "cannot be written"),
        ("bra away;", "the label is not in this kernel"),
        (
            "cp.async.cg.shared.global [%r1], [%rd1], 8;",
            "a copy of 8 bytes",
        ),
    ] {
        let text = format!(
            ".entry none()\n{{\n.reg .b32 %r<3>;\n.reg .b64 %rd<3>;\n.reg .pred %p<3>;\n{instruction}\nret;\n}}\n"
        );
        let error = ptx::Module::parse(&text).err().unwrap();
        assert_eq!(error.line, 6, "{instruction}");
        assert!(
            error.message.contains(message),
            "{instruction}: {}",
            error.message
        );
    }
}
