//! A whole product as kernels for Hopper compute one, and what becomes of it where a line is wrong.

use crate::device::numbers;
use nvrtc::{Nvrtc, SM_90A, Source};
use ptx::{ArgumentValue, GlobalMemory, LaunchError, Module, Shape};
use std::path::PathBuf;

const SOURCE: &str = include_str!("products.cu");
const ROWS: usize = 128;
const COLUMNS: usize = 128;
const DEPTH: usize = 320;

/// The wrapper of the instruction: its sums are operands 0 to 63.
fn multiply() -> String {
    let sums: Vec<String> = (0..64).map(|index| format!("%{index}")).collect();
    let operands: Vec<String> = (0..64)
        .map(|index| format!("\"+f\"(sums[{index}])"))
        .collect();
    format!(
        "__device__ void multiply(float (&sums)[64], u64 left, u64 right, u32 adds) {{
            asm volatile(\"{{ .reg .pred p; setp.ne.u32 p, %66, 0; \"
                \"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{}}}, %64, %65, p, 1, 1, 0, 1; }}\"
                : {} : \"l\"(left), \"l\"(right), \"r\"(adds));
        }}",
        sums.join(", "),
        operands.join(", ")
    )
}

/// The PTX of a source, and what the compiler warns of.
fn compiled(nvrtc: &Nvrtc, text: &str) -> (String, String) {
    let source = Source {
        path: "products.cu".into(),
        name: "products".into(),
        text: text.replace("MULTIPLY", &multiply()),
        headers: Vec::new(),
    };
    let compiled = nvrtc.compile(&source, SM_90A).unwrap();
    (String::from_utf8(compiled.ptx).unwrap(), compiled.warnings)
}

/// bf16, cut off.
fn bytes(values: &[f32]) -> Vec<u8> {
    let halves = values.iter().map(|value| (value.to_bits() >> 16) as u16);
    halves.flat_map(u16::to_le_bytes).collect()
}

/// The largest difference to sums in f64, or the mistake.
fn worst(text: &str) -> Result<f64, LaunchError> {
    let cut = |value: &f32| f32::from_bits(value.to_bits() >> 16 << 16);
    let [a, b] = [(ROWS * DEPTH, 1), (DEPTH * COLUMNS, 2)].map(|(count, seed)| {
        numbers(count, 2.0, seed)
            .iter()
            .map(cut)
            .collect::<Vec<f32>>()
    });
    let mut memory = GlobalMemory::new();
    let out = memory.allocate("out", 4 * ROWS * COLUMNS);
    let factors =
        [("a", &a), ("b", &b)].map(|(name, values)| memory.allocate_with(name, &bytes(values)));
    let arguments = [
        ArgumentValue::U64(out),
        ArgumentValue::U64(factors[0]),
        ArgumentValue::U64(factors[1]),
        ArgumentValue::I32(DEPTH as i32),
    ];
    let shape = Shape {
        grid: [1, 1, 1],
        block: [384, 1, 1],
        shared_bytes: (64 << 10) + 32,
    };
    let module = Module::parse(text).unwrap();
    module.launch("product", shape, &arguments, &mut memory)?;
    let found = memory
        .read(out, 4 * ROWS * COLUMNS)
        .unwrap()
        .chunks_exact(4);
    let found = found.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    let differences = found.enumerate().map(|(index, found)| {
        let (row, column) = (index / COLUMNS, index % COLUMNS);
        let terms =
            (0..DEPTH).map(|k| f64::from(a[row * DEPTH + k]) * f64::from(b[k * COLUMNS + column]));
        (terms.sum::<f64>() - f64::from(found)).abs()
    });
    // NaN is the worst.
    Ok(differences.max_by(f64::total_cmp).expect("there are some"))
}

#[test]
fn a_product_on_hopper_is_right_and_each_wrong_line_shows() {
    let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
    let nvrtc = Nvrtc::load(home.as_deref()).unwrap();
    let (text, warnings) = compiled(&nvrtc, SOURCE);
    assert_eq!(warnings, "");
    let right = worst(&text).unwrap();
    assert!(right < 1e-4, "{right}");
    let mut unnoticed = Vec::new();
    let early = "if (thread % 32 == 0) arrive(free + 8 * stage);";
    for (from, to, message) in [
        (
            "step / STAGES % 2)",
            "(step / STAGES + 1) % 2)",
            "a wait for ever: phase 1 of the barrier at 0x10400 lacks 128 of 128 arrivals",
        ),
        (
            "(step / STAGES + 1) % 2);\n            for",
            "step / STAGES % 2);\n            for",
            "lacks 8 of 8 arrivals",
        ),
        ("stage, 128);", "stage, 129);", "lacks 1 of 129 arrivals"),
        ("stage, 128);", "stage, 96);", "never written"),
        ("stage, 8);", "stage, 9);", "lacks 1 of 9 arrivals"),
        (
            "stage, 8);",
            "stage, 4);",
            "a wait for ever: phase 1 of the barrier at 0x10400 lacks 128 of 128",
        ),
        ("    __syncthreads();", "", "a race"),
        ("16, 16;", "16, 8;", ""),
        ("0x70", "0x30", ""),
        ("left + k * 32", "left + k * 16", ""),
        ("k * 2048, PANEL", "k * 2048, PANEL / 2", ""),
        ("chunk / 8 * PANEL", "chunk / 8 * 2048", "a race"),
        ("arrive_with_copies(full", "arrive(full", "never written"),
        ("        proxy_fence();", "", "no fence.proxy.async"),
        ("        product_fence();", "", "since the last wgmma.fence"),
        ("        product_commit();", "", "though products of warp 4"),
        ("aligned 0;", "aligned 1;", "a race: Write"),
        (
            "        product_commit();",
            &format!("        {early} product_commit();"),
            "a race: Write",
        ),
        ("step + k > 0", "1", "never wrote"),
        ("step + k > 0", "step > 0", ""),
        ("u32 232", "u32 240", "asks for 72 more registers"),
        (
            "u32 40",
            "u32 56",
            "a wait for ever: a warp asks for 64 more",
        ),
        (" __align__(1024)", "", "out of bounds"),
        (
            "        proxy_fence();",
            "        if (thread % 32 == 0) proxy_fence();",
            "no fence.proxy.async",
        ),
        (
            "(group - 1) * 64 * 128, right",
            "thread / 32 % 2 * 64 * 128, right",
            "disagree",
        ),
    ] {
        assert!(SOURCE.contains(from), "{from}");
        let mut text = SOURCE.replacen(from, to, 1);
        if to.contains(early) {
            text = text.replacen(&format!("keep(sums);\n        {early}"), "keep(sums);", 1);
        }
        assert_ne!(text, SOURCE);
        let found = worst(&compiled(&nvrtc, &text).0);
        let is_noticed = match &found {
            Ok(worst) => message.is_empty() && *worst > 0.1,
            Err(error) => !message.is_empty() && error.to_string().contains(message),
        };
        if !is_noticed {
            let found = found.map_err(|error| error.to_string());
            unnoticed.push(format!("{from} -> {to}: {found:?}"));
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
}
