//! Loads, stores, address spaces and asynchronous copies, and every mistake with them.

use crate::harness::{Program, by_lane, fault, kernel, run, run_grid, words, words_by_lane};
use ptx::{ArgumentValue, GlobalMemory, LaunchError, MistakeKind, Module, PtxParameter, Shape};

pub const PROGRAMS: &[(&str, Program)] = &[
    ("ld.const.f32", || constant("f32")),
    ("ld.const.u32", || constant("u32")),
    ("ld.global.f32", || {
        round_trip("global", "f32", 1, ".b32", 4)
    }),
    ("ld.global.f64", || {
        round_trip("global", "f64", 1, ".b64", 8)
    }),
    ("ld.global.nc.f32", || read_only("f32")),
    ("ld.global.nc.u32", || read_only("u32")),
    ("ld.global.s32", sign),
    ("ld.global.u16", || {
        round_trip("global", "u16", 1, ".b16", 2)
    }),
    ("ld.global.u32", zeros_above),
    ("ld.global.u64", || {
        round_trip("global", "u64", 1, ".b64", 8)
    }),
    ("ld.global.u8", || round_trip("global", "u8", 1, ".b16", 1)),
    ("ld.global.v2.u32", || {
        round_trip("global", "u32", 2, ".b32", 4)
    }),
    ("ld.global.v4.f32", || {
        round_trip("global", "f32", 4, ".f32", 4)
    }),
    ("ld.global.v4.u32", || {
        round_trip("global", "u32", 4, ".b32", 4)
    }),
    ("ld.local.f32", || local("f32")),
    ("ld.local.u32", || local("u32")),
    ("ld.shared.f32", || through_shared("f32", 1, ".f32", 4)),
    ("ld.shared.f64", || through_shared("f64", 1, ".f64", 8)),
    ("ld.shared.u32", || through_shared("u32", 1, ".b32", 4)),
    ("ld.shared.v4.f32", || through_shared("f32", 4, ".f32", 4)),
    ("ld.shared.v4.u32", || through_shared("u32", 4, ".b32", 4)),
    ("st.shared.f32", || through_shared("f32", 1, ".f32", 4)),
    ("st.shared.f64", || through_shared("f64", 1, ".f64", 8)),
    ("st.shared.u32", || through_shared("u32", 1, ".b32", 4)),
    ("st.shared.v4.f32", || through_shared("f32", 4, ".f32", 4)),
    ("st.shared.v4.u32", || through_shared("u32", 4, ".b32", 4)),
    ("ld.v4.f32", || generic("f32", ".f32")),
    ("ld.v4.u32", || generic("u32", ".b32")),
    ("st.global.f32", || {
        round_trip("global", "f32", 1, ".b32", 4)
    }),
    ("st.global.f64", || {
        round_trip("global", "f64", 1, ".b64", 8)
    }),
    ("st.global.u16", || {
        round_trip("global", "u16", 1, ".b16", 2)
    }),
    ("st.global.u32", || {
        round_trip("global", "u32", 1, ".b32", 4)
    }),
    ("st.global.u64", || {
        round_trip("global", "u64", 1, ".b64", 8)
    }),
    ("st.global.u8", || round_trip("global", "u8", 1, ".b32", 1)),
    ("st.global.v2.f32", || stores_vector("f32", 2, ".b32", 4)),
    ("st.global.v2.u16", || stores_vector("u16", 2, ".b16", 2)),
    ("st.global.v2.u32", || {
        round_trip("global", "u32", 2, ".b32", 4)
    }),
    ("st.global.v4.f32", || {
        round_trip("global", "f32", 4, ".f32", 4)
    }),
    ("st.global.v4.u32", || {
        round_trip("global", "u32", 4, ".b32", 4)
    }),
    ("st.local.f32", || local("f32")),
    ("st.local.u32", || local("u32")),
    ("ld.param.f32", parameters),
    ("ld.param.u32", parameters),
    ("ld.param.u64", parameters),
    ("cvta.local.u64", generic_local),
    ("cvta.to.local.u64", generic_local),
    ("cvta.shared.u64", || generic("u32", ".b32")),
    ("cvta.to.shared.u64", generic_shared),
    ("cvta.to.global.u64", variable),
    ("cp.async.ca.shared.global", copy_of_four),
    ("cp.async.cg.shared.global", copy),
    ("cp.async.wait_all", copy),
    ("cp.async.commit_group", copy_groups),
    ("cp.async.wait_group", copy_groups),
];

/// `{%v0, %v1}`, or `%v0` alone.
fn vector(count: usize) -> (String, String) {
    let names: Vec<String> = (0..count).map(|index| format!("%v{index}")).collect();
    match count {
        1 => (String::new(), names[0].clone()),
        _ => (format!(".v{count}"), format!("{{{}}}", names.join(", "))),
    }
}

/// Bytes of every lane, all different.
fn pattern() -> Vec<u32> {
    (0..256)
        .map(|word: u32| word.wrapping_mul(0x0103_0507) ^ 0x8090_a0b0)
        .collect()
}

/// The first `bytes` of each lane equal the input; the rest is untouched.
fn check_copied(output: &[u32], bytes: usize) {
    for (lane, (found, expected)) in output.chunks(8).zip(pattern().chunks(8)).enumerate() {
        let [found, expected] = [found, expected].map(|words| {
            words
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect::<Vec<u8>>()
        });
        assert_eq!(found[..bytes], expected[..bytes], "lane {lane}");
        assert_eq!(found[bytes..], vec![0xee; 32 - bytes], "lane {lane}");
    }
}

/// Loads and stores at an offset that is not zero.
fn round_trip(space: &str, kind: &str, count: usize, register: &str, bytes: usize) -> String {
    let (suffix, operand) = vector(count);
    let text = by_lane(&format!(
        ".reg {register} %v<4>;
        add.s64 %in, %in, -16;
        ld.{space}{suffix}.{kind} {operand}, [%in+16];
        add.s64 %out, %out, 16;
        st.{space}{suffix}.{kind} [%out+-16], {operand};"
    ));
    check_copied(&words(&text, 32, &pattern(), 256), bytes * count);
    text
}

fn stores_vector(kind: &str, count: usize, register: &str, bytes: usize) -> String {
    let (suffix, operand) = vector(count);
    let loads: String = (0..count)
        .map(|index| format!("ld.global.{kind} %v{index}, [%in+{}];\n", index * bytes))
        .collect();
    let text = by_lane(&format!(
        ".reg {register} %v<4>;
        {loads}
        st.global{suffix}.{kind} [%out], {operand};"
    ));
    check_copied(&words(&text, 32, &pattern(), 256), bytes * count);
    text
}

fn through_shared(kind: &str, count: usize, register: &str, bytes: usize) -> String {
    let (suffix, operand) = vector(count);
    let loads: String = (0..count)
        .map(|index| format!("ld.global.{kind} %v{index}, [%in+{}];\n", index * bytes))
        .collect();
    let text = by_lane(&format!(
        ".reg {register} %v<4>, %n;
        .reg .b64 %s;
        .shared .align 16 .b8 first_array[100];
        .shared .align 16 .b8 array[512];
        {loads}
        mov.u64 %s, array;
        mul.wide.u32 %at, %lane, 16;
        add.s64 %s, %s, %at;
        st.shared{suffix}.{kind} [%s], {operand};
        ld.shared{suffix}.{kind} {operand}, [%s];
        {}",
        (0..count)
            .map(|index| format!("st.global.{kind} [%out+{}], %v{index};\n", index * bytes))
            .collect::<String>()
    ));
    check_copied(&words(&text, 32, &pattern(), 256), bytes * count);
    text
}

/// A wider register gets the sign, or zeros.
fn sign() -> String {
    let text = by_lane(".reg .b64 %v;\nld.global.s32 %v, [%in];\nst.global.u64 [%out], %v;");
    let output = words(&text, 32, &[0xffff_fffe; 256], 256);
    assert_eq!(output[..2], [0xffff_fffe, 0xffff_ffff]);
    text
}

fn zeros_above() -> String {
    let text = by_lane(".reg .b64 %v;\nld.global.u32 %v, [%in];\nst.global.u64 [%out], %v;");
    let output = words(&text, 32, &[0xffff_fffe; 256], 256);
    assert_eq!(output[..2], [0xffff_fffe, 0]);
    text
}

fn read_only(kind: &str) -> String {
    let body = format!(
        ".reg .b32 %v;
        ld.global.nc.{kind} %v, [%in];
        st.global.u32 [%out], %v;"
    );
    let text = by_lane(&body);
    check_copied(&words(&text, 32, &pattern(), 256), 4);
    // Nobody may write these bytes, not even the thread itself later.
    let found = fault(&by_lane(&body.replace("[%out]", "[%in]")), 1, 32);
    assert_eq!(found.kind, MistakeKind::Race);
    text
}

/// An element of a module's array by its index: the second of {1.5, -2}.
fn constant(kind: &str) -> String {
    let text = by_lane(&format!(
        ".reg .b32 %v;
        ld.const.{kind} %v, [numbers+4];
        st.global.u32 [%out], %v;"
    ));
    let text = text.replace(
        ".visible",
        ".const .align 4 .f32 numbers[2] = {0f3FC00000, 0fC0000000};\n.visible",
    );
    assert_eq!(words(&text, 32, &pattern(), 256)[0], (-2f32).to_bits());
    text
}

/// Bytes of a module's variable, which a kernel may not write.
fn variable() -> String {
    let body = ".reg .b64 %g;
        .reg .b32 %v;
        mov.u64 %g, TABLE;
        cvta.to.global.u64 %g, %g;
        ld.global.u32 %v, [%g+4];
        st.global.u32 [%out], %v;";
    let table = ".global .align 4 .b8 TABLE[8] = {1, 2, 3, 4, 5, 6, 7, 8};\n.visible";
    let text = by_lane(body).replace(".visible", table);
    assert_eq!(words(&text, 32, &pattern(), 256)[0], 0x0807_0605);
    let beyond = text.replace("[%g+4]", "[%g+8]");
    let found = fault(&beyond, 1, 32);
    assert_eq!(found.kind, MistakeKind::OutOfBounds);
    assert!(found.message.contains("`TABLE`"), "{found}");
    assert_eq!(
        fault(&text.replace("[%out], %v", "[%g], %v"), 1, 32).kind,
        MistakeKind::OutOfBounds
    );
    text
}

/// Every lane has local memory of its own.
fn local(kind: &str) -> String {
    let text = by_lane(&format!(
        ".reg .b32 %v;
        .reg .b64 %l;
        .local .align 4 .b8 place[8];
        ld.global.{kind} %v, [%in];
        mov.u64 %l, place;
        st.local.{kind} [%l+4], %v;
        bar.warp.sync -1;
        mov.u32 %v, 0;
        ld.local.{kind} %v, [%l+4];
        st.global.u32 [%out], %v;"
    ));
    check_copied(&words(&text, 32, &pattern(), 256), 4);
    let unwritten = text.replace(
        &format!("ld.local.{kind} %v, [%l+4]"),
        &format!("ld.local.{kind} %v, [%l]"),
    );
    assert_eq!(fault(&unwritten, 1, 32).kind, MistakeKind::Uninitialised);
    let beyond = text.replace("[%l+4], %v", "[%l+8], %v");
    assert_eq!(fault(&beyond, 1, 32).kind, MistakeKind::OutOfBounds);
    text
}

fn generic_local() -> String {
    let text = by_lane(
        ".reg .b32 %v;
        .reg .b64 %l;
        .local .align 4 .b8 place[8];
        ld.global.u32 %v, [%in];
        mov.u64 %l, place;
        st.local.u32 [%l], %v;
        cvta.local.u64 %l, %l;
        cvta.to.local.u64 %l, %l;
        ld.local.u32 %v, [%l];
        st.global.u32 [%out], %v;",
    );
    check_copied(&words(&text, 32, &pattern(), 256), 4);
    let other = text.replace("cvta.to.local", "cvta.to.shared");
    assert_eq!(fault(&other, 1, 32).kind, MistakeKind::OutOfBounds);
    text
}

fn generic_shared() -> String {
    let text = by_lane(
        ".reg .b32 %v;
        .reg .b64 %s;
        mov.u64 %s, dynamic;
        mul.wide.u32 %at, %lane, 16;
        add.s64 %s, %s, %at;
        cvta.shared.u64 %s, %s;
        cvta.to.shared.u64 %s, %s;
        ld.global.u32 %v, [%in];
        st.shared.u32 [%s], %v;
        ld.shared.u32 %v, [%s];
        st.global.u32 [%out], %v;",
    );
    check_copied(&words(&text, 32, &pattern(), 256), 4);
    // A generic address is none of shared memory before it is converted.
    let unconverted = text.replace("cvta.to.shared.u64 %s, %s;", "");
    assert_eq!(fault(&unconverted, 1, 32).kind, MistakeKind::OutOfBounds);
    text
}

/// The same instruction reads global or shared memory, by the address alone.
fn generic(kind: &str, register: &str) -> String {
    let body = |address: &str| {
        by_lane(&format!(
            ".reg {register} %v<4>;
            .reg .b64 %g;
            mov.u64 %g, dynamic;
            add.s64 %g, %g, %at;
            ld.global.v4.{kind} {{%v0, %v1, %v2, %v3}}, [%in];
            st.shared.v4.{kind} [%g], {{%v0, %v1, %v2, %v3}};
            cvta.shared.u64 %g, %g;
            ld.v4.{kind} {{%v0, %v1, %v2, %v3}}, [{address}];
            st.global.v4.{kind} [%out], {{%v0, %v1, %v2, %v3}};"
        ))
    };
    for address in ["%g", "%in"] {
        check_copied(&words(&body(address), 32, &pattern(), 256), 16);
    }
    body("%g")
}

/// Parameters of several sizes lie at multiples of their alignment.
fn parameters() -> String {
    let text = ".visible .entry test(.param .u32 a, .param .u64 b, .param .f32 c, .param .align 8 .b8 d[16], .param .u32 e)
        {
        .reg .b32 %r<4>;
        .reg .b64 %rd<4>;
        .reg .f32 %f;
        ld.param.u32 %r0, [a];
        ld.param.u64 %rd0, [b];
        ld.param.f32 %f, [c];
        ld.param.u64 %rd1, [d+8];
        ld.param.u32 %r1, [e];
        st.global.u32 [%rd0], %r0;
        st.global.f32 [%rd0+4], %f;
        st.global.u64 [%rd0+8], %rd1;
        st.global.u32 [%rd0+16], %r1;
        ret;
        }";
    let module = Module::parse(text).unwrap();
    let places: Vec<(usize, usize)> = module.kernels()[0]
        .parameters()
        .iter()
        .map(|PtxParameter { offset, bytes }| (*offset, *bytes))
        .collect();
    assert_eq!(places, [(0, 4), (8, 8), (16, 4), (24, 16), (40, 4)]);
    let mut memory = GlobalMemory::new();
    let at = memory.allocate("out", 32);
    let structure: Vec<u8> = [1u64, 0x1122_3344_5566]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let arguments = [
        ArgumentValue::I32(-5),
        ArgumentValue::U64(at),
        ArgumentValue::F32(1.5),
        ArgumentValue::Bytes(structure),
        ArgumentValue::I32(9),
    ];
    let shape = Shape {
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
    };
    module
        .launch("test", shape, &arguments, &mut memory)
        .unwrap();
    let mut expected = Vec::new();
    expected.extend((-5i32).to_le_bytes());
    expected.extend(1.5f32.to_le_bytes());
    expected.extend(0x1122_3344_5566u64.to_le_bytes());
    expected.extend(9u32.to_le_bytes());
    assert_eq!(memory.read(at, 20).unwrap(), expected);
    let wrong = module
        .launch("test", shape, &arguments[1..], &mut memory)
        .unwrap_err();
    assert_eq!(wrong.to_string(), "test: 4 arguments for 5 parameters");
    let mut other = arguments.clone();
    other[2] = ArgumentValue::U64(0);
    let wrong = module
        .launch("test", shape, &other, &mut memory)
        .unwrap_err();
    assert_eq!(
        wrong.to_string(),
        "test: argument 2 has 8 bytes; the parameter has 4"
    );
    text.into()
}

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
    let load = "ld.shared.v4.u32 {%v0, %v1, %v2, %v3}, [%to];";
    let never = text.replace("cp.async.wait_all;\n", "").replace(load, "");
    assert_eq!(fault(&never, 1, 32).kind, MistakeKind::Unfinished);
    let crooked = fault(&text.replace("[%in], 16", "[%in+4], 16"), 1, 32);
    assert_eq!(crooked.kind, MistakeKind::Misaligned);
    let more = fault(&text.replace("%read, 16, 4", "%read, 20, 4"), 1, 32);
    assert_eq!(more.kind, MistakeKind::Meaningless, "{more}");
    // Another lane does not see what this lane waited for.
    let of_others = text.replace("ld.shared", "xor.b32 %to, %to, 16;\nld.shared");
    assert_eq!(fault(&of_others, 1, 32).kind, MistakeKind::Race);
    // The source is read until the wait.
    let source = text.replace(
        "cp.async.wait_all;",
        "st.global.u32 [%in], %word;\ncp.async.wait_all;",
    );
    let output = words(&source, 32, &pattern(), 256);
    assert_eq!(output[8], 16, "the copy is made at the wait");
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
            ".reg .b64 %v;
            .shared .align {alignment} .b8 array[16];
            mov.u64 %v, 0;
            st.shared.v4.f32 [array], {{%f, %f, %f, %f}};"
        ));
        let text = text.replace(".reg .b64 %v;", ".reg .b64 %v;\n.reg .f32 %f;");
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

/// Accesses `[%at]` by `first` and then by `second`, in one of several ways that order them or do not.
fn race(body: &str, blocks: u32, threads: u32) -> Option<MistakeKind> {
    let text = kernel(&format!(
        ".reg .b32 %t, %b, %v;
        .reg .b16 %h;
        .reg .b64 %at, %own;
        .reg .pred %first, %other;
        .shared .align 4 .b8 word[4];
        ld.param.u64 %at, [first];
        mov.u32 %t, %tid.x;
        mov.u32 %b, %ctaid.x;
        add.s32 %v, %t, %b;
        setp.eq.s32 %first, %v, 0;
        setp.ne.s32 %other, %v, 0;
        mul.wide.u32 %own, %v, 2;
        add.s64 %own, %own, %at;
        {body}"
    ));
    let mut memory = GlobalMemory::new();
    let first = memory.allocate_with("first", &[0; 1024]);
    let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(0)];
    match run_grid(&text, [blocks, 1, 1], threads, &arguments, &mut memory) {
        Ok(_) => None,
        Err(LaunchError::Mistake(fault)) => Some(fault.kind),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn races_are_found_and_ordered_accesses_are_not() {
    let found = Some(MistakeKind::Race);
    let (read, write) = ("ld.global.u32 %v, [%at];", "st.global.u32 [%at], %v;");
    // Between blocks, in either order; both may read.
    assert_eq!(
        race(&format!("@%first {write}\n@%other {read}"), 2, 1),
        found
    );
    assert_eq!(
        race(&format!("@%first {read}\n@%other {write}"), 2, 1),
        found
    );
    assert_eq!(race(write, 2, 1), found);
    assert_eq!(race(read, 2, 1), None);
    // Three readers of several blocks, and one that writes.
    assert_eq!(
        race(
            &format!("setp.lt.u32 %first, %b, 3;\n@%first {read}\n@!%first {write}"),
            4,
            1
        ),
        found
    );
    // Within a block a barrier orders, and nothing else.
    for threads in [32, 64] {
        for (first, then) in [(write, read), (read, write), (write, write)] {
            for order in ["", "bar.sync 0;"] {
                let body = format!(
                    "@%first {first}\n{order}\nsetp.eq.s32 %other, %t, {};\n@%other {then}",
                    threads - 1
                );
                let expected = if order.is_empty() { found } else { None };
                assert_eq!(race(&body, 1, threads), expected, "{body}");
            }
        }
        // All read, then one writes.
        assert_eq!(race(&format!("{read}\n@%first {write}"), 1, threads), found);
        assert_eq!(
            race(&format!("{read}\nbar.sync 0;\n@%first {write}"), 1, threads),
            None
        );
    }
    // A warp's own barrier orders the accesses of its lanes, not those of other warps.
    let of_warp = format!("@%first {write}\nbar.warp.sync -1;\nsetp.eq.s32 %other, %t, ");
    assert_eq!(race(&format!("{of_warp} 31;\n@%other {read}"), 1, 64), None);
    assert_eq!(
        race(&format!("{of_warp} 32;\n@%other {read}"), 1, 64),
        found
    );
    // Order among some lanes of a warp is not tracked.
    let partial = of_warp.replace("-1", "-2");
    let partial = format!("@%first bra over;\n{partial} 31;\n@%other {read}\nover:");
    let first = format!("@%first {write}\n");
    assert_eq!(race(&(first + &partial), 1, 32), found);
    // A shuffle of all lanes orders what they read before what they write afterwards, and nothing else.
    let shuffle = "shfl.sync.idx.b32 %v, %v, 0, 31, -1;";
    let last = "setp.eq.s32 %other, %t, 31;";
    let after = |first: &str, then: &str, mask: &str| {
        let shuffle = shuffle.replace("-1", mask);
        race(
            &format!("{first}\n{shuffle}\n{last}\n@%other {then}"),
            1,
            32,
        )
    };
    assert_eq!(after(read, write, "-1"), None);
    assert_eq!(after(&format!("@%first {write}"), read, "-1"), found);
    assert_eq!(after(&format!("@%first {write}"), write, "-1"), found);
    let warps = format!("{read}\n{shuffle}\n@%first {write}");
    assert_eq!(race(&warps, 1, 64), found, "another warp reads too");
    // A barrier of two of three warps orders these alone.
    let of_two = "setp.lt.u32 %first, %t, 64;\n@!%first bra over;\nbar.sync 1, 64;\nover:\nsetp.eq.s32 %other, %t, ";
    assert_eq!(
        race(
            &format!("@%first {write}\n{of_two} 32;\n@%other {read}"),
            1,
            96
        ),
        None
    );
    assert_eq!(
        race(
            &format!("@%first {write}\n{of_two} 64;\n@%other {read}"),
            1,
            96
        ),
        found
    );
    // Neighbours within a word do not race, whatever was accessed before as a whole.
    let halves = "mov.u16 %h, 1;\nst.global.u16 [%own], %h;";
    assert_eq!(
        race(halves, 4, 32).map(|_| ()),
        Some(()),
        "threads of several blocks have the same"
    );
    assert_eq!(race(halves, 1, 64), None);
    assert_eq!(race(&format!("{read}\nbar.sync 0;\n{halves}"), 1, 64), None);
    assert_eq!(race(halves, 2, 1), None);
    // Shared memory too.
    assert_eq!(race("st.shared.u32 [word], %t;", 1, 32), found);
    assert_eq!(
        race(
            "@%first st.shared.u32 [word], %t;\nbar.sync 0;\nld.shared.u32 %v, [word];",
            1,
            64
        ),
        None
    );
}

/// 32 lanes: words in a row, a word of each second bank, one word, and a column of a matrix of 32 words a row.
#[test]
fn sectors_and_conflicts_are_counted_by_line() {
    for (shift, rounds, sectors) in [(2, 1, 4), (3, 2, 8), (31, 1, 1), (7, 32, 32)] {
        let text = kernel(&format!(
            ".reg .b32 %t, %v;
            .reg .b64 %in, %at;
            .shared .align 128 .b8 words[4096];
            ld.param.u64 %in, [first];
            mov.u32 %t, %tid.x;
            mov.u32 %v, %t;
            shl.b32 %t, %t, {shift};
            and.b32 %t, %t, 4095;
            cvt.u64.u32 %at, %t;
            add.s64 %in, %in, %at;
            ld.global.u32 %v, [%in];
            @!%never st.shared.u32 [%t], %v;
            ",
        ))
        .replace(".reg .b32 %t", ".reg .pred %never;\n.reg .b32 %t")
        .replace("mov.u32 %v, %t;", "setp.eq.s32 %never, 0, 1;");
        let mut memory = GlobalMemory::new();
        let first = memory.allocate_with("first", &[0; 4096]);
        let text = match shift {
            // All lanes may read one word, and only one write it.
            31 => text.replace("setp.eq.s32 %never, 0, 1", "setp.ne.s32 %never, %t, 0"),
            _ => text,
        };
        let arguments = [ArgumentValue::U64(first), ArgumentValue::U64(0)];
        let report = run(&text, 32, &arguments, &mut memory).unwrap();
        let [global, shared] = report.lines[..] else {
            panic!("{report:?}");
        };
        assert_eq!(
            (global.counts.global, global.counts.sectors),
            (1, sectors),
            "{shift}"
        );
        assert_eq!(
            (shared.counts.shared, shared.counts.rounds),
            (1, rounds),
            "{shift}"
        );
        assert_eq!(shared.counts.conflicts, rounds - 1, "{shift}");
    }
}

#[test]
fn launches_that_a_device_refuses_are_refused() {
    let text =
        kernel(".shared .align 16 .b8 array[49152];").replace(")\n{", ")\n.maxntid 128, 1, 1\n{");
    let module = Module::parse(&text).unwrap();
    let mut memory = GlobalMemory::new();
    let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(0)];
    let good = Shape {
        grid: [1; 3],
        block: [128, 1, 1],
        shared_bytes: 0,
    };
    let mut launch = |name: &str, shape| {
        module
            .launch(name, shape, &arguments, &mut memory)
            .map(|_| ())
    };
    launch("test", good).unwrap();
    for (name, shape, message) in [
        ("other", good, "no such kernel"),
        (
            "test",
            Shape {
                block: [129, 1, 1],
                ..good
            },
            "128 are allowed",
        ),
        (
            "test",
            Shape {
                block: [0, 1, 1],
                ..good
            },
            "128 are allowed",
        ),
        (
            "test",
            Shape {
                grid: [1, 65_536, 1],
                ..good
            },
            "a grid of",
        ),
        (
            "test",
            Shape {
                shared_bytes: 120 << 10,
                ..good
            },
            "bytes of shared memory",
        ),
    ] {
        let error = launch(name, shape).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_block_knows_its_place_in_the_grid() {
    let (_, lanes) = words_by_lane("mov.u32 %d, %laneid;", |_| 0);
    assert_eq!(lanes, (0..32).collect::<Vec<u32>>());
    let text = kernel(
        ".reg .b32 %x, %y, %z, %n, %v;
        .reg .b64 %out, %at;
        ld.param.u64 %out, [second];
        mov.u32 %x, %ctaid.x;
        mov.u32 %y, %ctaid.y;
        mov.u32 %z, %ctaid.z;
        mov.u32 %n, %nctaid.y;
        mad.lo.s32 %v, %z, %n, %y;
        mov.u32 %n, %nctaid.x;
        mad.lo.s32 %v, %v, %n, %x;
        mul.wide.u32 %at, %v, 4;
        add.s64 %out, %out, %at;
        mov.u32 %n, %nctaid.z;
        mul.lo.s32 %x, %x, 100;
        mad.lo.s32 %x, %y, 10, %x;
        add.s32 %x, %x, %z;
        st.global.u32 [%out], %x;",
    );
    let mut memory = GlobalMemory::new();
    let second = memory.allocate("second", 4 * 24);
    let arguments = [ArgumentValue::U64(0), ArgumentValue::U64(second)];
    run_grid(&text, [4, 3, 2], 1, &arguments, &mut memory).unwrap();
    let last = memory.read(second + 4 * 23, 4).unwrap();
    assert_eq!(u32::from_le_bytes(last.try_into().unwrap()), 321);
    assert_eq!(memory.written(second, 96).unwrap(), 96);
}
