//! Accesses that are out of bounds, misaligned, or of unwritten bytes, and reads of unwritten registers.

use crate::harness::{by_lane, fault, run};
use ptx::{ArgumentValue, GlobalMemory, LaunchError, MistakeKind};

#[test]
fn accesses_outside_of_allocations_are_found() {
    let store = |offset: &str| by_lane(&format!("st.global.u32 [%out+{offset}], %lane;"));
    let found = fault(&store("32"), 1, 32);
    assert_eq!(
        (found.kind, found.thread),
        (MistakeKind::OutOfBounds, [31, 0, 0])
    );
    assert!(
        found.message.contains("byte 1024 of `second` (1024 bytes)"),
        "{found}"
    );
    assert_eq!(found.text, "st.global.u32 [%out+32], %lane;");
    assert_eq!(fault(&store("-4"), 1, 32).thread, [0, 0, 0]);
    // Half within.
    let wide = by_lane(
        ".reg .b64 %v;\nmov.u64 %v, 0;\nadd.s64 %out, %out, 996;\nst.global.u64 [%out], %v;",
    );
    assert_eq!(fault(&wide, 1, 1).kind, MistakeKind::Misaligned);
    let null = by_lane(".reg .b64 %z;\nmov.u64 %z, 0;\nst.global.u32 [%z], %lane;");
    assert_eq!(fault(&null, 1, 1).kind, MistakeKind::OutOfBounds);
    let shared = by_lane(
        ".shared .align 4 .b8 a[4];\n.shared .align 4 .b8 b[4];\nst.shared.u32 [a+4], %lane;",
    );
    let found = fault(&shared, 1, 1);
    assert_eq!(found.kind, MistakeKind::OutOfBounds, "between two arrays");
}

#[test]
fn accesses_that_are_not_aligned_are_found() {
    for (kind, register, off) in [("u16", ".b16", 1), ("u32", ".b32", 2), ("u64", ".b64", 4)] {
        let text = by_lane(&format!(
            ".reg {register} %v;\nld.global.{kind} %v, [%in+{off}];"
        ));
        assert_eq!(fault(&text, 1, 1).kind, MistakeKind::Misaligned, "{kind}");
    }
    let text = by_lane(".reg .b32 %v<2>;\nld.global.v2.u32 {%v0, %v1}, [%in+4];");
    assert_eq!(
        fault(&text, 1, 1).kind,
        MistakeKind::Misaligned,
        "a vector as a whole"
    );
    // An array is no better aligned than it is declared.
    for alignment in [4, 8, 16] {
        let text = by_lane(&format!(
            ".reg .f32 %v;
            .shared .align {alignment} .b8 array[16];
            mov.f32 %v, 0f00000000;
            st.shared.v4.f32 [array], {{%v, %v, %v, %v}};"
        ));
        let mut memory = GlobalMemory::new();
        let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(0)];
        let done = run(&text, 1, &arguments, &mut memory);
        assert_eq!(done.is_ok(), alignment == 16, "{alignment}");
    }
}

#[test]
fn reads_of_what_nobody_wrote_are_found() {
    let load = by_lane(".reg .b32 %v;\nld.global.u32 %v, [%in];");
    let mut memory = GlobalMemory::new();
    let first = memory.allocate("first", 1024);
    memory.write(first, &[0; 999]).unwrap();
    let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(0)];
    run(&load, 31, &arguments, &mut memory).unwrap();
    let LaunchError::Mistake(found) = run(
        &load.replace("[%in]", "[%in+4]"),
        32,
        &arguments,
        &mut memory,
    )
    .unwrap_err() else {
        panic!("a launch error");
    };
    assert_eq!(
        (found.kind, found.thread),
        (MistakeKind::Uninitialised, [31, 0, 0])
    );
    assert!(
        found.message.contains("byte 996"),
        "the last byte of the word: {found}"
    );
    memory.forget(first, 4, 0xff).unwrap();
    let error = run(&load, 1, &arguments, &mut memory).unwrap_err();
    assert!(error.to_string().contains("never written"), "{error}");
    assert_eq!(memory.written(first, 1024).unwrap(), 0);
    // A block begins with shared memory that nobody wrote, whatever the block before it left there.
    let shared = by_lane(
        ".reg .b32 %v;
        .reg .pred %p;
        .shared .align 4 .b8 a[4];
        mov.u32 %v, %ctaid.x;
        setp.ne.u32 %p, %v, 0;
        @!%p st.shared.u32 [a], %lane;
        ld.shared.u32 %v, [a];",
    );
    let found = fault(&shared, 2, 1);
    assert_eq!(
        (found.kind, found.block),
        (MistakeKind::Uninitialised, [1, 0, 0])
    );
}

/// A lane that reads a register has written it: as a source, an address, an element of a vector, or a guard.
#[test]
fn reads_of_registers_that_a_lane_never_wrote_are_found() {
    let declared =
        ".reg .b32 %v<4>;\n.reg .b64 %x;\n.reg .pred %p, %q;\nsetp.lt.u32 %p, %lane, 7;\n";
    for (body, line, thread) in [
        ("add.s32 %v1, %v0, 1;", "add.s32 %v1, %v0, 1;", 0),
        ("ld.global.u32 %v0, [%x];", "ld.global.u32 %v0, [%x];", 0),
        (
            "mov.u32 %v0, %lane;\nst.global.v2.u32 [%out], {%v0, %v1};",
            "st.global.v2.u32 [%out], {%v0, %v1};",
            0,
        ),
        ("@%q mov.u32 %v0, 1;", "@%q mov.u32 %v0, 1;", 0),
        (
            "vote.sync.any.pred %p, !%q, -1;",
            "vote.sync.any.pred %p, !%q, -1;",
            0,
        ),
        // Written where the predicate holds alone.
        (
            "@%p mov.u32 %v0, 1;\nneg.s32 %v1, %v0;",
            "neg.s32 %v1, %v0;",
            7,
        ),
        (
            "@!%p mov.u32 %v0, 1;\nneg.s32 %v1, %v0;",
            "neg.s32 %v1, %v0;",
            0,
        ),
    ] {
        let found = fault(&by_lane(&format!("{declared}{body}")), 1, 32);
        let place = (found.kind, found.text.as_str(), found.thread[0]);
        assert_eq!(place, (MistakeKind::Unwritten, line, thread), "{found}");
    }
    let written =
        "@%p mov.u32 %v0, 1;\n@!%p mov.u32 %v0, 2;\n@%p neg.s32 %v1, %v0;\n@%p neg.s32 %v2, %v1;";
    let text = by_lane(&format!("{declared}{written}"));
    let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(0)];
    run(&text, 32, &arguments, &mut GlobalMemory::new()).unwrap();
}
