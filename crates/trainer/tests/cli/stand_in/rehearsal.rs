//! What kernels and libraries take of a device is taken before anything else, so that a plan can be trusted.

use super::{IDLE, on_gpu};
use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};
use serde_json::Value;

/// 24 million parameters: a peak of 538 MiB.
const MODEL: &str = "--config llama-15m --device cuda --seq 256 --micro-batch 4 --recompute none --steps 2 --set memory.head_chunk=512";

const MIB: u64 = 1 << 20;

/// What each product loads, by default.
const PRODUCT_BYTES: u64 = 2 * MIB;

/// Bytes that the run of a command has in its pools whenever a product is computed for the first time.
fn first_uses(place: &Workplace, run: &str) -> Vec<u64> {
    let path = place.path("first-uses");
    std::fs::write(&path, "").unwrap();
    let settings = [IDLE, ("STAND_IN_FIRST_USES", path.to_str().unwrap())];
    on_gpu(place, run, &settings).succeeds();
    let noted = place.text("first-uses");
    noted.lines().map(|line| line.parse().unwrap()).collect()
}

/// Every first use meets what the rehearsal holds, and neither arenas nor slab.
#[test]
fn nothing_is_loaded_after_the_rehearsal() {
    let place = Workplace::new();
    for flags in [
        "--config small.toml --dtype f32 --attention eager",
        "--config small.toml --dtype bf16 --attention flash --recompute full",
        "--config small.toml --dtype bf16 --attention eager --accum 3 --recompute core_attn",
        "--config small.toml --offload-optimizer pinned --offload-activations block_input",
        "--config small.toml --set model.tie_embeddings=true --set memory.head_chunk=24",
        "--config gpt2 --seq 64 --micro-batch 1 --set model.layers=2",
    ] {
        let uses = first_uses(&place, &format!("{flags} --device cuda --steps 3"));
        assert!(uses.len() >= 8, "{flags}: {uses:?}");
        assert!(
            uses.iter().all(|held| *held == uses[0]),
            "{flags}: {uses:?}"
        );
    }
}

/// A run on a device of a size, whose pools reserve so much at a time.
fn on_device(place: &Workplace, out: &str, total: u64, others: u64, page: u64) -> Outcome {
    let [total, others, page] = [total, others, page].map(|bytes| bytes.to_string());
    let settings = [
        IDLE,
        ("STAND_IN_TOTAL_BYTES", total.as_str()),
        ("STAND_IN_OTHERS_BYTES", &others),
        ("STAND_IN_PAGE_BYTES", &page),
    ];
    on_gpu(place, &format!("{MODEL} --out {out}"), &settings)
}

/// What a run of [`MODEL`] reserves, and what it loads.
fn needs(place: &Workplace) -> (u64, u64) {
    let planned = place.trainer(&format!("plan --json {MODEL}")).succeeds();
    let plan: Value = serde_json::from_str(&planned.stdout).unwrap();
    let loaded = first_uses(place, MODEL).len() as u64 * PRODUCT_BYTES;
    (plan["reserved_bytes"].as_u64().unwrap(), loaded)
}

/// To the page: a device that has as much as is reserved and loaded is enough, and a byte less is not.
#[test]
fn what_fits_trains_and_what_does_not_is_refused_before_the_first_step() {
    let place = Workplace::new();
    let (reserved, loaded) = needs(&place);
    for page in [2 * MIB, 32 * MIB] {
        let enough = reserved.next_multiple_of(page) + loaded;
        on_device(&place, &format!("enough-{page}"), enough, 0, page).succeeds();
        let short = format!("short-{page}");
        let refused = on_device(&place, &short, enough - 1, 0, page);
        assert!(refused.stderr.contains("it will not fit"), "{refused:?}");
        let oom = explained(&place, &refused, &short);
        assert_eq!(oom["name"], "slab", "{oom}");
        assert!(oom["fixes"].as_array().unwrap().len() >= 10, "{oom}");
        let [fix] = oom["fixes"][0]["set"].as_array().unwrap().as_slice() else {
            panic!("{oom}");
        };
        let fixed = format!("{MODEL} --set {}", fix.as_str().unwrap());
        let total = (enough - 1).to_string();
        let settings = [
            IDLE,
            ("STAND_IN_TOTAL_BYTES", total.as_str()),
            ("STAND_IN_PAGE_BYTES", &page.to_string()),
        ];
        on_gpu(&place, &fixed, &settings).succeeds();
    }
}

/// Whatever product the shortage falls on.
#[test]
fn a_card_that_is_full_in_the_rehearsal_is_explained() {
    let place = Workplace::new();
    let (reserved, loaded) = needs(&place);
    let held = first_uses(&place, MODEL)[0].next_multiple_of(2 * MIB);
    let (total, products) = (16 << 30, loaded / PRODUCT_BYTES);
    for fitting in [0, 1, products / 2, products - 1] {
        let others = total - held - fitting * PRODUCT_BYTES;
        // Else the plan alone would refuse the run.
        let out = format!("full-{fitting}");
        let forced = format!("{out} --force");
        let refused = on_device(&place, &forced, total, others, 2 * MIB);
        assert!(!refused.stderr.contains("CUBLAS"), "{refused:?}");
        let oom = explained(&place, &refused, &out);
        assert_eq!(oom["name"], "what kernels and cuBLASLt load", "{oom}");
        assert_eq!(oom["cause"], "other_process", "{oom}");
    }
    for (setting, value) in [
        ("STAND_IN_MODULE_BYTES", "1073741824"),
        ("STAND_IN_LOCAL_BYTES", "65536"),
    ] {
        let reserved = reserved.to_string();
        let settings = [
            IDLE,
            ("STAND_IN_TOTAL_BYTES", reserved.as_str()),
            (setting, value),
        ];
        let refused = on_gpu(
            &place,
            &format!("{MODEL} --out {setting} --force"),
            &settings,
        );
        let oom = explained(&place, &refused, setting);
        assert_eq!(oom["name"], "what kernels and cuBLASLt load", "{oom}");
    }
}

/// `oom.json` of a run that made no step.
#[track_caller]
fn explained(place: &Workplace, refused: &Outcome, out: &str) -> Value {
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(
        refused
            .stderr
            .contains("CUDA out of memory. Tried to allocate"),
        "{refused:?}"
    );
    let metrics = Metrics::read(place, out);
    assert_eq!(
        (metrics.end_reason(), metrics.steps().len()),
        ("out_of_memory", 0)
    );
    serde_json::from_str(&place.text(&format!("{out}/oom.json"))).unwrap()
}

#[test]
fn a_product_that_only_rounds_its_parts_is_taken_and_said() {
    let place = Workplace::new();
    let run = |depth: &str| {
        let settings = [IDLE, ("STAND_IN_ROUNDED_DEPTH", depth)];
        on_gpu(&place, MODEL, &settings).succeeds()
    };
    let words = "in less than f32 in ";
    assert!(run("1024").stderr.contains(words));
    assert!(!run("1000000").stderr.contains(words));
}
