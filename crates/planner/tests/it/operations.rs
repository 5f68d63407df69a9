//! Compares the bytes that operations read and write with sums by hand.

use kernels::Target;
use planner::Plan;
use settings::Config;
use std::collections::BTreeMap;

/// Sizes that differ from one another, so that none can stand for another.
const TOKENS: u64 = 1024;
const SEQ: u64 = 512;
const CHUNK: u64 = 256;
const LAYERS: u64 = 2;
const HIDDEN: u64 = 256;
const HEADS: u64 = 4;
const QUERIES: u64 = 128;
const KEYS: u64 = 32;
const FFN: u64 = 640;
const VOCAB: u64 = 512;

const QKV: u64 = QUERIES + 2 * KEYS;

/// Columns of each layer's output, and of its input: queries, keys and values; attention's output; gate and up; down.
const PRODUCTS: [[u64; 2]; 4] = [
    [QKV, HIDDEN],
    [HIDDEN, QUERIES],
    [2 * FFN, HIDDEN],
    [HIDDEN, FFN],
];

/// Elements of a block's matrices.
fn matrices() -> u64 {
    PRODUCTS
        .iter()
        .map(|[outputs, inputs]| outputs * inputs)
        .sum()
}

/// With `more` settings.
fn planned(recipe: &str, more: &str) -> Plan {
    let set = format!(
        "train.device=cuda train.dtype=bf16 attention.backend=flash fp8.recipe={recipe} data.seq={SEQ} batch.micro={} batch.accum=3 \
         memory.head_chunk={CHUNK} model.layers={LAYERS} model.hidden={HIDDEN} model.heads={HEADS} model.kv_heads={} \
         model.head_dim={} model.ffn={FFN} model.vocab={VOCAB}{more}",
        TOKENS / SEQ,
        HEADS * KEYS / QUERIES,
        QUERIES / HEADS,
    );
    let set: Vec<String> = set.split(' ').map(String::from).collect();
    Plan::with_alternatives(&Config::default().with(&set).unwrap(), Target::Cuda).unwrap()
}

/// Bytes of a block's products: forward; for the gradient of the input; for that of the weight, which is f32 and added to. An operand
/// has `size` bytes an element, and `scales` come with each product. Attention's output and down add the residual.
fn products(size: u64, scales: u64) -> u64 {
    let of_one = |[outputs, inputs]: [u64; 2]| {
        let (x, y, w) = (TOKENS * inputs, TOKENS * outputs, outputs * inputs);
        let residual = if outputs == HIDDEN { 2 * y } else { 0 };
        let forward = size * (x + w) + 2 * y + residual;
        let of_input = size * (y + w) + 2 * x;
        let of_weight = size * (x + y) + 2 * 4 * w;
        forward + of_input + of_weight + 3 * scales
    };
    PRODUCTS.into_iter().map(of_one).sum()
}

/// Bytes of the passes of FP8 in a block. Codes of `n` elements of bf16 take `3 n`, with scale and largest magnitude, and 8 bytes for each
/// of as many counters of underflows as the largest tensor has.
fn passes_of_fp8() -> u64 {
    let counters = 8 * (TOKENS * 2 * FFN / 2048);
    let (inputs, outputs) = PRODUCTS.iter().fold((0, 0), |(inputs, outputs), [y, x]| {
        (inputs + TOKENS * x, outputs + TOKENS * y)
    });
    let codes = 3 * (inputs + outputs) + 8 * (8 + counters);
    // Weights become codes, and transposed codes anew.
    let of_weights = 2 * (3 * matrices() + 4 * 8);
    // Attention's output is kept in bf16; all else is transposed as codes.
    let attention = TOKENS * QUERIES;
    let transposed = 2 * (inputs + outputs - attention) + 3 * attention + 8;
    // One pass for attention's output, and one for each gradient that a norm made.
    let largest = 2 * (attention + 2 * TOKENS * HIDDEN) + 3 * 4;
    codes + of_weights + transposed + largest
}

/// Bytes of a micro-batch by group. `largest` are those of a largest magnitude that a kernel finds beside its own work.
fn by_hand(is_fp8: bool) -> BTreeMap<&'static str, u64> {
    let largest = if is_fp8 { 4 } else { 0 };
    let x = TOKENS * HIDDEN;
    let statistics = 4 * TOKENS;
    let norm = 2 * 2 * x + 2 * HIDDEN + statistics;
    // Adds to the gradient of the residual, and to the weight's in f32.
    let norm_backward = 2 * 4 * x + 2 * HIDDEN + 2 * 4 * HIDDEN + statistics;
    let (q, k, lse) = (2 * TOKENS * QUERIES, 2 * TOKENS * KEYS, 4 * TOKENS * HEADS);
    let turns = 2 * 4 * SEQ * (QUERIES / HEADS / 2);
    let rotary = 2 * (2 * 2 * TOKENS * QKV + turns) + largest;
    let act = 2 * TOKENS * FFN;
    let activation = 3 * act + (2 * 2 * act + act) + 2 * largest;
    let logits = 2 * CHUNK * VOCAB;
    let (rows, head) = (2 * CHUNK * HIDDEN, HIDDEN * VOCAB);
    let of_chunk = (2 * rows + 2 * HIDDEN + 4 * CHUNK)
        + (rows + 2 * head + logits)
        + (2 * logits + 2 * 4 * CHUNK)
        + (rows + logits + 2 * 4 * head)
        + (rows + logits + 2 * head)
        + (3 * rows + 2 * HIDDEN + 2 * 4 * HIDDEN + 4 * CHUNK);
    let mut groups = BTreeMap::from([
        (
            "products",
            LAYERS * products(if is_fp8 { 1 } else { 2 }, 2 * largest),
        ),
        ("norms", LAYERS * 2 * (norm + largest + norm_backward)),
        (
            "attention",
            LAYERS * (2 * q + 2 * k + lse + 4 * q + 4 * k + lse),
        ),
        ("rotary, split and join", LAYERS * rotary),
        ("activation functions", LAYERS * activation),
        (
            "embedding",
            2 * 2 * x + 4 * TOKENS + (2 * x + 4 * TOKENS + 2 * 4 * VOCAB * HIDDEN),
        ),
        ("head", TOKENS / CHUNK * of_chunk + 4 * TOKENS),
    ]);
    if is_fp8 {
        groups.insert("passes of FP8", LAYERS * passes_of_fp8());
    }
    groups
}

/// To the byte, so that an operation that ran twice, or moved a tensor once more, would show.
#[test]
fn groups_move_what_is_counted_by_hand() {
    for (recipe, is_fp8) in [("off", false), ("tensor", true)] {
        let plan = planned(recipe, "");
        let passes = plan
            .operations
            .iter()
            .filter(|one| one.micro_batch_bytes > 0);
        let passes: BTreeMap<_, _> = passes
            .map(|one| (one.group, one.micro_batch_bytes))
            .collect();
        assert_eq!(passes, by_hand(is_fp8), "{recipe}");
        let updates = plan.operations.iter().filter(|one| one.update_bytes > 0);
        let updates: Vec<_> = updates.map(|one| (one.group, one.update_bytes)).collect();
        // Gradients in f32 for their norm, and for AdamW, which reads and writes master and moments in f32, and writes weights in bf16.
        let (matrices, vectors) = (
            2 * VOCAB * HIDDEN + LAYERS * matrices(),
            (2 * LAYERS + 1) * HIDDEN,
        );
        let grains = matrices / 4096 + 1;
        let update = (4 + 4 + 3 * 8 + 2) * (matrices + vectors) + 2 * 8 * grains;
        assert_eq!(updates, [("gradients and optimizer", update)], "{recipe}");
    }
}

/// Where memory takes next to no time.
const AT_ONCE: &str = " hardware.peak_tflops=0.001 hardware.memory_gbps=1e9";

/// The shares of the peak that products and attention reach, and how much faster FP8 is. Heads are too narrow for kernels for Hopper.
#[test]
fn times_follow_from_the_rates_that_were_measured() {
    let of_products = (2 * 3 * LAYERS * TOKENS * matrices()) as f64 / 0.7;
    let pairs = TOKENS * (SEQ + 1) / 2;
    let of_one = (2 * LAYERS * pairs * QUERIES) as f64;
    let of_attention = of_one * (2.0 / 0.3 + 5.0 / 0.2);
    for (recipe, times) in [("off", 1.0), ("tensor", 1.7)] {
        let plan = planned(recipe, AT_ONCE);
        for (group, flops) in [
            ("products", of_products / times),
            ("attention", of_attention),
        ] {
            let mut operations = plan.operations.iter();
            let found = operations.find(|one| one.group == group).unwrap();
            let off = found.micro_batch_ms * 1e6 / flops - 1.0;
            assert!(off.abs() < 1e-6, "{recipe} {group}: {off}");
        }
    }
}

/// Milliseconds that a group takes in a micro-batch on paper.
fn ms(plan: &Plan, group: &str) -> f64 {
    let mut operations = plan.operations.iter();
    operations
        .find(|one| one.group == group)
        .unwrap()
        .micro_batch_ms
}

/// The shares are expected ones of the peak, and a note says so. Replays of attention follow its forward pass.
#[test]
fn kernels_for_hopper_count_with_what_is_expected_of_them() {
    let (sm80, f32) = (" attention.kernels=sm80", " train.dtype=f32");
    for (width, seq, set, [forward, backward]) in [
        (64, SEQ, "", [320.0 / 989.0, 260.0 / 989.0]),
        (64, 4096, "", [440.0 / 989.0, 340.0 / 989.0]),
        (64, 4096, sm80, [0.3, 0.2]),
        (64, 4096, f32, [0.3, 0.2]),
        (128, 4095, "", [400.0 / 989.0, 320.0 / 989.0]),
        (128, 8192, "", [610.0 / 989.0, 440.0 / 989.0]),
        (256, 8192, "", [0.3, 0.2]),
    ] {
        let planned = |recompute: &str| {
            let heads = format!("model.head_dim={width} model.heads=2 model.kv_heads=1");
            let more =
                format!("{heads} data.seq={seq} batch.micro=1{set} recompute.spec={recompute}");
            planned("off", &format!("{AT_ONCE} {more}"))
        };
        let (plan, replaying) = (planned("none"), planned("core_attn"));
        let product = (2 * LAYERS * 2 * width * seq * (seq + 1) / 2) as f64 / 1e6;
        let took = ms(&plan, "attention");
        let replays = ms(&replaying, "attention") - took;
        for (took, expected) in [
            (took, product * (2.0 / forward + 5.0 / backward)),
            (replays, product / forward),
        ] {
            let off = took / expected - 1.0;
            assert!(off.abs() < 1e-6, "{width} {seq}{set}: {off}");
        }
        let is_estimate = plan.notes.iter().any(|note| note.contains("estimates"));
        assert_eq!(is_estimate, forward != 0.3, "{:?}", plan.notes);
    }
}

/// Each token goes to two of four experts, which have three products a layer, forward and for both gradients.
#[test]
fn products_of_experts_count_with_what_is_expected_of_their_kernels() {
    let experts = format!("model.experts={{count=4,chosen=2,ffn={FFN},normed=true}}");
    let [measured, expected] = ["sm80", "auto"].map(|kernels| {
        let plan = planned(
            "off",
            &format!("{AT_ONCE} {experts} experts.kernels={kernels}"),
        );
        let mut notes = plan.notes.iter();
        let is_estimate = notes.any(|note| note.contains("products of experts at"));
        assert_eq!(is_estimate, kernels == "auto", "{:?}", plan.notes);
        ms(&plan, "products")
    });
    let flops = (3 * 2 * LAYERS * 2 * TOKENS * 3 * FFN * HIDDEN) as f64 / 1e6;
    let off = (measured - expected) / (flops / 0.25 - flops / (550.0 / 989.0)) - 1.0;
    assert!(off.abs() < 1e-6, "{off}");
}
