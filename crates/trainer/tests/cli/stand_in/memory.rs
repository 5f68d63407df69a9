//! What the driver sees of a run, and what a run says about a driver that refuses.

use super::{IDLE, on_gpu, plan};
use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// 24 million parameters: a peak of 538 MiB.
const MODEL: &str = "--config llama-15m --device cuda --seq 256 --micro-batch 4 --recompute none --steps 2 --set memory.head_chunk=512";

/// Products load nothing: what they do is in `rehearsal`.
const WEIGHTLESS: (&str, &str) = ("STAND_IN_PRODUCT_BYTES", "0");

/// Bytes that a run of the model leases, and those that it needs of a device.
fn needs(place: &Workplace) -> (u64, u64) {
    let outcome = place.trainer(&format!("plan --json {MODEL}")).succeeds();
    let plan: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let bytes = |name: &str| plan[name].as_u64().unwrap();
    (bytes("peak_bytes"), bytes("reserved_bytes"))
}

/// `oom.json` of a run that ended for want of memory.
#[track_caller]
fn refused(place: &Workplace, flags: &str, settings: &[(&str, &str)], out: &str) -> Value {
    let arguments = format!("{MODEL} {flags} --out {out}");
    let settings = [settings, &[IDLE, WEIGHTLESS]].concat();
    on_gpu(place, &arguments, &settings).fails(3, &["CUDA out of memory. Tried to allocate"]);
    assert_eq!(Metrics::read(place, out).end_reason(), "out_of_memory");
    serde_json::from_str(&place.text(&format!("{out}/oom.json"))).unwrap()
}

/// Where the driver counts in our granules, what it counts is what was planned; where it rounds to 512 bytes, the
/// difference is a granule for some of the few blocks.
#[test]
fn the_driver_counts_what_was_planned() {
    let place = Workplace::new();
    let used = |rounding: &str, out: &str| {
        let settings = [IDLE, WEIGHTLESS, ("STAND_IN_ROUNDING_BYTES", rounding)];
        on_gpu(&place, &format!("{MODEL} --out {out}"), &settings).succeeds();
        let metrics = Metrics::read(&place, out);
        let steps = metrics.steps();
        let marks = [
            "device_used_high_bytes",
            "device_reserved_high_bytes",
            "device_total_used_bytes",
        ];
        let marks = steps
            .iter()
            .map(|step| marks.map(|mark| step[mark].as_u64().unwrap()));
        let marks: Vec<[u64; 3]> = marks.collect();
        assert_eq!(marks[0], marks[1], "constant over steps");
        let [used, reserved, total] = marks[0];
        assert_eq!(
            (reserved, total),
            (used.next_multiple_of(2 << 20), reserved)
        );
        used
    };
    let exact = used("256", "exact");
    assert_eq!(plan(&place, "exact")["reserved_bytes"], exact);
    let more = used("512", "rounded") - exact;
    assert!(0 < more && more <= 16 * 256, "{more}");
}

#[test]
fn a_limit_acts_to_the_granule() {
    let place = Workplace::new();
    let (peak, _) = needs(&place);
    let enough = format!("{MODEL} --memory-limit {peak} --out enough");
    on_gpu(&place, &enough, &[IDLE]).succeeds();
    let oom = refused(
        &place,
        &format!("--memory-limit {}", peak - 256),
        &[],
        "short",
    );
    assert_eq!(
        (&oom["cause"], &oom["limit_bytes"]),
        (&"capacity".into(), &(peak - 256).into())
    );
}

#[test]
fn a_limit_in_percent_is_of_the_device() {
    let place = Workplace::new();
    let (peak, _) = needs(&place);
    let total = (peak as f64 / 0.94) as u64;
    let settings = [
        IDLE,
        WEIGHTLESS,
        ("STAND_IN_TOTAL_BYTES", &total.to_string()),
    ];
    let limited = |limit: &str| {
        on_gpu(
            &place,
            &format!("{MODEL} --memory-limit {limit}"),
            &settings,
        )
    };
    limited("95%").succeeds();
    limited("93%").fails(3, &["CUDA out of memory", "The limit is"]);
}

/// On a device with half a page too little, whose size is not one of whole pages.
#[test]
fn every_fix_for_a_device_that_is_too_small_works() {
    let place = Workplace::new();
    let (_, reserved) = needs(&place);
    let total = (reserved.next_multiple_of(2 << 20) - (1 << 20)).to_string();
    let settings = [("STAND_IN_TOTAL_BYTES", total.as_str())];
    let oom = refused(&place, "", &settings, "small");
    assert_eq!(oom["cause"], "capacity");
    assert_ne!(oom["name"], "slab", "the tensor that does not fit is named");
    assert_eq!(oom["device_bytes"]["total"].to_string(), total);
    let fixes = oom["fixes"].as_array().unwrap();
    assert!(fixes.len() >= 10, "{fixes:?}");
    for fix in fixes {
        let set = fix["set"].as_array().unwrap().iter();
        let set: String = set
            .map(|one| format!(" --set {}", one.as_str().unwrap()))
            .collect();
        let settings = [settings[0], IDLE, WEIGHTLESS];
        on_gpu(&place, &format!("{MODEL}{set}"), &settings).succeeds();
    }
}

#[test]
fn memory_that_others_hold_is_blamed_on_them() {
    let place = Workplace::new();
    let (_, reserved) = needs(&place);
    let total = 16 << 30;
    let others = (total - reserved / 2).to_string();
    let total = total.to_string();
    let settings = [
        ("STAND_IN_TOTAL_BYTES", total.as_str()),
        ("STAND_IN_OTHERS_BYTES", &others),
    ];
    let oom = refused(&place, "", &settings, "shared");
    assert_eq!(oom["cause"], "other_process");
}

/// What the pool holds beyond its blocks is given back, and the block is asked for once more.
#[test]
fn a_refused_block_is_asked_for_twice() {
    let place = Workplace::new();
    let once = [IDLE, ("STAND_IN_FAIL_ALLOCATIONS", "5")];
    on_gpu(&place, MODEL, &once).succeeds();
    let twice = [("STAND_IN_FAIL_ALLOCATIONS", "5,6")];
    refused(&place, "", &twice, "twice");
}
