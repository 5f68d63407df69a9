//! Loads, stores and address spaces.

use crate::harness::{Program, by_lane, fault, words};
use ptx::{ArgumentValue, GlobalMemory, MistakeKind, Module, PtxParameter, Shape};

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
    ("ld.shared.u16", || through_shared("u16", 1, ".b16", 2)),
    ("ld.shared.u8", || through_shared("u8", 1, ".b16", 1)),
    ("ld.shared.u32", || through_shared("u32", 1, ".b32", 4)),
    ("ld.shared.v2.f32", || through_shared("f32", 2, ".f32", 4)),
    ("ld.shared.v4.f32", || through_shared("f32", 4, ".f32", 4)),
    ("ld.shared.v4.u32", || through_shared("u32", 4, ".b32", 4)),
    ("st.shared.f32", || through_shared("f32", 1, ".f32", 4)),
    ("st.shared.f64", || through_shared("f64", 1, ".f64", 8)),
    ("st.shared.u16", || through_shared("u16", 1, ".b16", 2)),
    ("st.shared.u8", || through_shared("u8", 1, ".b16", 1)),
    ("st.shared.u32", || through_shared("u32", 1, ".b32", 4)),
    ("st.shared.v2.f32", || through_shared("f32", 2, ".f32", 4)),
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
pub fn pattern() -> Vec<u32> {
    (0..256)
        .map(|word: u32| word.wrapping_mul(0x0103_0507) ^ 0x8090_a0b0)
        .collect()
}

/// The first `bytes` of each lane equal the input; the rest is untouched.
pub fn check_copied(output: &[u32], bytes: usize) {
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
