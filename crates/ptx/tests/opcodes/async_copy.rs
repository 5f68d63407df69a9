//! Asynchronous copies.

use crate::harness::{Program, by_lane, fault, words};
use crate::memory::{check_copied, pattern};
use ptx::MistakeKind;

pub const PROGRAMS: &[(&str, Program)] = &[
    ("cp.async.ca.shared.global", copy_of_four),
    ("cp.async.cg.shared.global", copy),
    ("cp.async.wait_all", copy),
    ("cp.async.commit_group", copy_groups),
    ("cp.async.wait_group", copy_groups),
];

/// Each lane copies 16 bytes; the lanes from 16 on read only 4 of them, those from 24 on none.
const COPY: &str = ".reg .b32 %to, %read, %v<4>;
    .reg .b64 %s;
    .reg .pred %p;
    mov.u64 %s, dynamic;
    cvt.u32.u64 %to, %s;
    shl.b32 %word, %lane, 4;
    add.s32 %to, %to, %word;
    setp.lt.u32 %p, %lane, 16;
    selp.b32 %read, 16, 4, %p;
    setp.lt.u32 %p, %lane, 24;
    selp.b32 %read, %read, 0, %p;
    cp.async.cg.shared.global [%to], [%in], 16, %read;
    cp.async.wait_all;
    ld.shared.v4.u32 {%v0, %v1, %v2, %v3}, [%to];
    st.global.v4.u32 [%out], {%v0, %v1, %v2, %v3};";

fn copy() -> String {
    let text = by_lane(COPY);
    let (input, output) = (pattern(), words(&text, 32, &pattern(), 256));
    for lane in 0..32 {
        let read_words = if lane < 16 { 4 } else { usize::from(lane < 24) };
        let mut expected = [0; 4];
        expected[..read_words].copy_from_slice(&input[8 * lane..8 * lane + read_words]);
        assert_eq!(output[8 * lane..8 * lane + 4], expected, "lane {lane}");
    }
    let early = fault(&text.replace("cp.async.wait_all;\n", ""), 1, 32);
    assert_eq!(early.kind, MistakeKind::Uninitialised, "{early}");
    assert!(early.text.starts_with("ld.shared.v4.u32"), "{early}");
    let (before, _) = text.split_once("cp.async.wait_all;").unwrap();
    let never = format!("{before}ret;\n}}\n");
    assert_eq!(fault(&never, 1, 32).kind, MistakeKind::Unfinished);
    let crooked = fault(&text.replace("[%in], 16", "[%in+4], 16"), 1, 32);
    assert_eq!(crooked.kind, MistakeKind::Misaligned);
    let more = fault(&text.replace("%read, 16, 4", "%read, 20, 4"), 1, 32);
    assert_eq!(more.kind, MistakeKind::Meaningless, "{more}");
    // Another lane does not see what this lane waited for.
    let of_others = text.replace("ld.shared", "add.s32 %to, %to, 16;\nld.shared");
    assert_eq!(fault(&of_others, 1, 32).kind, MistakeKind::Race);
    // The source is read until the wait.
    let source = text.replace(
        "cp.async.wait_all;",
        "st.global.u32 [%in], %word;\ncp.async.wait_all;",
    );
    assert_eq!(fault(&source, 1, 32).kind, MistakeKind::Race);
    // And the target written.
    let target = text.replace(
        "cp.async.wait_all;",
        "st.shared.u32 [%to], %word;\ncp.async.wait_all;",
    );
    assert_eq!(fault(&target, 1, 32).kind, MistakeKind::Race);
    text
}

fn copy_of_four() -> String {
    let text = by_lane(
        ".reg .b32 %to, %v;
        .reg .b64 %s;
        mov.u64 %s, dynamic;
        cvt.u32.u64 %to, %s;
        shl.b32 %word, %lane, 2;
        add.s32 %to, %to, %word;
        cp.async.ca.shared.global [%to], [%in], 4;
        cp.async.wait_all;
        ld.shared.u32 %v, [%to];
        st.global.u32 [%out], %v;",
    );
    check_copied(&words(&text, 32, &pattern(), 256), 4);
    text
}

/// Two groups, of which the first is waited for.
fn copy_groups() -> String {
    let text = by_lane(
        ".reg .b32 %to, %v;
        .reg .b64 %s;
        mov.u64 %s, dynamic;
        cvt.u32.u64 %to, %s;
        shl.b32 %word, %lane, 3;
        add.s32 %to, %to, %word;
        cp.async.ca.shared.global [%to], [%in], 4;
        cp.async.commit_group;
        cp.async.ca.shared.global [%to+4], [%in+4], 4;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.u32 %v, [%to];
        st.global.u32 [%out], %v;
        cp.async.wait_group 0;
        ld.shared.u32 %v, [%to+4];
        st.global.u32 [%out+4], %v;",
    );
    check_copied(&words(&text, 32, &pattern(), 256), 8);
    let early = text.replace("wait_group 1", "wait_group 2");
    assert_eq!(fault(&early, 1, 32).kind, MistakeKind::Uninitialised);
    let second = text.replace("ld.shared.u32 %v, [%to];", "ld.shared.u32 %v, [%to+4];");
    assert_eq!(fault(&second, 1, 32).kind, MistakeKind::Uninitialised);
    // A copy that belongs to no group yet is not waited for.
    let uncommitted = text
        .replacen(
            "commit_group;\n        cp.async.wait_group 1;",
            "wait_group 0;",
            1,
        )
        .replacen(
            "cp.async.wait_group 0;\n        ld.shared.u32 %v, [%to+4];",
            "ld.shared.u32 %v, [%to+4];",
            1,
        );
    assert_eq!(fault(&uncommitted, 1, 32).kind, MistakeKind::Uninitialised);
    text
}
