//! Pipelines: any number of stages, by any engine, comes to the bits of one, and resumes on any other.

use crate::metrics::Metrics;
use crate::ranks::job::{MICRO_BATCHES, Run, command, mpich, open_mpi, place};
use crate::workplace::{Workplace, outcome};

const MODEL: &str =
    "--config llama.toml --set model.tie_embeddings=false --set model.layers=4 --quiet";

/// Number and loss, to the bit, of each record of a kind.
fn numbers(place: &Workplace, out: &str, kind: &str) -> Vec<(u64, u64)> {
    let metrics = Metrics::read(place, out);
    let of = |record: &serde_json::Value| {
        let loss = record["loss"].as_f64().unwrap().to_bits();
        (record["step"].as_u64().unwrap(), loss)
    };
    metrics.of_kind(kind).map(of).collect()
}

/// Trains on some ranks, of which so many make other micro-batches.
fn train(place: &Workplace, (ranks, groups): (usize, usize), more: &str, out: &str) -> Run {
    let launcher = match out {
        "mpich" => mpich(ranks),
        _ => open_mpi(ranks),
    };
    let accum = MICRO_BATCHES / groups;
    let arguments = format!("{MODEL} --accum {accum} {more} --out {out}");
    outcome(command(place, launcher, &arguments), &arguments).succeeds();
    let run = Run::read(place, out, ranks);
    for (rank, plan) in run.plans.iter().enumerate() {
        for name in ["peak_bytes", "sent_bytes"] {
            let planned = plan[name].as_u64().unwrap();
            let measured = run.field(rank, name);
            assert!(
                measured.iter().all(|measured| *measured == planned),
                "{out}, rank {rank}: {name} {planned}, {measured:?}"
            );
        }
    }
    run
}

#[test]
fn stages_give_the_same_bits() {
    let place = place();
    let one = train(&place, (1, 1), "--zero 1", "one");
    let grids = [
        ((2, 1), "--pp 2 --zero 2 --recompute full", "two"),
        ((4, 2), "--pp 2 --zero 1 --pipeline-schedule gpipe", "four"),
        (
            (4, 2),
            "--pp 2 --zero 2 --pipeline-schedule interleaved",
            "runs",
        ),
        ((2, 1), "--pp 2 --zero 0 --pipeline-layout [1,3]", "mpich"),
        ((4, 2), "--pp 2 --zero 2 --pipeline-schedule zb-h1", "later"),
    ];
    for (ranks, more, out) in grids {
        let run = train(&place, ranks, more, out);
        assert_eq!(numbers(&place, "one", "step"), numbers(&place, out, "step"));
        for plan in &run.plans {
            let held = |plan: &serde_json::Value| plan["persistent_bytes"].as_u64().unwrap();
            assert!(
                held(plan) < held(&one.plans[0]),
                "{out}: a stage holds less"
            );
            assert_eq!(plan["pipeline"], 2);
        }
    }
    let on_host =
        "--pp 2 --offload-parameters pinned --offload-gradients pinned --offload-optimizer pinned";
    let away = train(&place, (2, 1), on_host, "on_host");
    assert_eq!(
        numbers(&place, "one", "step"),
        numbers(&place, "on_host", "step")
    );
    assert!(away.plans[0]["host_pinned_bytes"].as_u64().unwrap() > 0);
    let on_hosts = |weights: &str, out: &str| {
        let more =
            format!("--pp 2 --zero 2 --offload-optimizer pinned --offload-parameters {weights}");
        let run = train(&place, (4, 2), &more, out);
        assert_eq!(numbers(&place, "one", "step"), numbers(&place, out, "step"));
        run.plans[0]["host_pinned_bytes"].as_u64().unwrap()
    };
    assert!(on_hosts("pinned", "weights_too") > on_hosts("none", "states_alone"));
    let shared = train(&place, (2, 1), "--cp 2 --zero 1", "shared");
    let both = train(&place, (4, 1), "--cp 2 --pp 2 --zero 2", "both");
    assert_eq!(
        numbers(&place, "shared", "step"),
        numbers(&place, "both", "step")
    );
    assert_eq!([one, shared, both].map(|run| run.plans.len()), [1, 2, 4]);
}

/// A checkpoint of two stages, resumed by one process, and the other way; evaluations agree.
#[test]
fn checkpoints_resume_on_other_numbers_of_stages() {
    let place = place();
    let accum = MICRO_BATCHES;
    let run = |ranks: usize, more: &str| {
        let arguments = format!(
            "{MODEL} --accum {accum} --zero 1 --eval-data data.safetensors --eval-every 1 --set eval.samples=4 {more}"
        );
        outcome(command(&place, open_mpi(ranks), &arguments), &arguments).succeeds();
    };
    run(1, "--out whole");
    let on_host = "--offload-parameters pinned --offload-gradients pinned";
    run(
        2,
        &format!("--pp 2 --out stages --save-every 1 --steps 2 {on_host}"),
    );
    run(1, "--out resumed --resume stages");
    run(1, "--out first --save-every 1 --steps 2");
    run(
        2,
        "--pp 2 --pipeline-schedule interleaved --out then --resume first",
    );
    let numbers = |out: &str, kind: &str| numbers(&place, out, kind);
    for kind in ["step", "eval"] {
        let whole = numbers("whole", kind);
        assert_eq!(whole.len(), 3);
        assert_eq!(numbers("stages", kind), whole[..2], "{kind}");
        assert_eq!(numbers("resumed", kind), whole[2..], "{kind}");
        assert_eq!(numbers("then", kind), whole[2..], "{kind}");
    }
}

#[test]
fn what_has_no_pipeline_is_refused_with_what_to_do() {
    let place = place();
    let refused = |more: &str, words: &str| {
        let arguments = format!("plan --config llama.toml --ranks 2 --pp 2 {more}");
        place.trainer(&arguments).fails(2, &[words]);
    };
    refused("--set model.tie_embeddings=true", "tie_embeddings = false");
    refused(
        "--set model.tie_embeddings=false --packing pad",
        "take --packing first-fit",
    );
    refused("--set model.tie_embeddings=false --zero 3", "take --zero 2");
    refused(
        "--set model.tie_embeddings=false --pipeline-layout [2,1]",
        "add up to 2 (model.layers)",
    );
    let automatic = "--set model.tie_embeddings=false --recompute auto --memory-budget 1GiB";
    refused(automatic, "write --recompute full");
    refused(
        "--set model.tie_embeddings=false --pareto",
        "write --recompute full",
    );
    place
        .trainer("plan --config llama.toml --pipeline-schedule gpipe")
        .fails(2, &["add --pp N"]);
    refused(
        "--set model.tie_embeddings=false --set model.layers=1",
        "smaller --pp",
    );
    let untied = "--set model.tie_embeddings=false";
    refused(
        &format!("{untied} --pipeline-schedule zb-h1 --set memory.tile_tokens=16"),
        "take --pipeline-schedule 1f1b",
    );
    let in_fp8 = "plan --config tiny --dtype bf16 --fp8 tensor --ranks 2 --pp 2";
    place
        .trainer(&format!("{in_fp8} {untied} --pipeline-schedule zb-h1"))
        .fails(2, &["take --pipeline-schedule 1f1b"]);
    let interleaved = format!("{untied} --pipeline-schedule interleaved");
    refused(&format!("{interleaved} --accum 2"), "each need 4");
    refused(
        &format!("{untied} --num-layers-per-virtual-pipeline-stage 1"),
        "add --pipeline-schedule interleaved",
    );
    refused(
        &format!("{interleaved} --set model.layers=4 --accum 3"),
        "make --accum a multiple of 2",
    );
    refused(
        &format!("{interleaved} --accum 2 --num-layers-per-virtual-pipeline-stage 2"),
        "a multiple of 4",
    );
    refused(
        &format!("{interleaved} --accum 2 --pipeline-layout [1,1]"),
        "a multiple of 2 numbers (parallel.pipeline), at least 4",
    );
    refused(
        &format!(
            "{interleaved} --accum 2 --pipeline-layout [1,1] --num-layers-per-virtual-pipeline-stage 1"
        ),
        "leave one of the two out",
    );
}

/// A limit that the first stage alone exceeds: a plan says so, and the run is refused with the stage's name.
#[test]
fn a_stage_that_does_not_fit_is_named() {
    let place = place();
    let flags = format!("{MODEL} --accum {MICRO_BATCHES} --pp 2");
    let planned = |rank: usize| -> u64 {
        let arguments = format!("plan --json {flags} --ranks 2 --rank {rank}");
        let plan: serde_json::Value =
            serde_json::from_str(&place.trainer(&arguments).succeeds().stdout).unwrap();
        plan["peak_bytes"].as_u64().unwrap()
    };
    let peaks = [planned(0), planned(1)];
    let (largest, limit) = match peaks[0] > peaks[1] {
        true => (0, peaks[1]),
        false => (1, peaks[0]),
    };
    assert_ne!(peaks[0], peaks[1]);
    let limited = format!("{flags} --memory-limit {limit}");
    let told = place.trainer(&format!("plan {limited} --ranks 2 --rank {}", 1 - largest));
    assert_eq!(told.code, Some(3), "{told:?}");
    let told = told.stdout;
    assert!(
        told.contains(&format!("stage {largest} does not fit the limit")),
        "{told}"
    );
    let refused = outcome(
        command(&place, open_mpi(2), &format!("{limited} --out refused")),
        "",
    );
    let named = format!("rank {largest} (stage {largest} of 2");
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(refused.stderr.contains(&named), "{refused:?}");
}
