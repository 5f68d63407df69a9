//! Ranks with a GPU each, started as torchrun starts them, over the library that stands in for NCCL.

use super::{figures, on_gpu};
use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace, free_port};

const RANKS: usize = 2;

/// Runs the binary on every rank; they meet at a place that no other job has.
fn on_gpus(place: &Workplace, arguments: [&str; RANKS]) -> Vec<Outcome> {
    on_gpus_with(place, arguments, [&[]; RANKS])
}

/// The same with settings of each rank's own.
fn on_gpus_with(
    place: &Workplace,
    arguments: [&str; RANKS],
    settings: [&[(&str, &str)]; RANKS],
) -> Vec<Outcome> {
    let port = (free_port() - 1).to_string();
    let run = |rank_number: usize| {
        let (rank, size, devices) = (
            rank_number.to_string(),
            RANKS.to_string(),
            RANKS.to_string(),
        );
        let variables = [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", rank.as_str()),
            ("WORLD_SIZE", size.as_str()),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port.as_str()),
            ("STAND_IN_DEVICES", devices.as_str()),
        ];
        let variables = [&variables, settings[rank_number]].concat();
        on_gpu(place, arguments[rank_number], &variables)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Losses, norms and weights; memory and traffic of every rank as planned.
#[test]
fn ranks_have_the_bits_of_a_group_of_one() {
    let place = Workplace::new();
    let flags = "--config small.toml --device cuda --dtype bf16 --bucket-size 8KiB";
    on_gpu(
        &place,
        &format!("{flags} --zero 0 --accum 2 --out alone --save-final alone/model"),
        &[],
    )
    .succeeds();
    let bits = |out: &str| {
        let weights = std::fs::read(place.path(&format!("{out}/model/model.safetensors"))).unwrap();
        (figures(&Metrics::read(&place, out)), weights)
    };
    for (out, way) in [
        ("zero-0", "--zero 0"),
        ("zero-1", "--zero 1 --recompute full"),
        ("zero-2", "--zero 2 --offload-optimizer pinned"),
        ("zero-3", "--zero 3 --recompute core_attn"),
    ] {
        let arguments = format!("{flags} {way} --accum 1 --out {out} --save-final {out}/model");
        for outcome in on_gpus(&place, [&arguments; RANKS]) {
            outcome.succeeds();
        }
        assert!(bits(out) == bits("alone"), "{way}");
        for rank in 0..RANKS {
            let metrics = Metrics::read(&place, &format!("{out}/ranks/{rank}"));
            let ranks = metrics.of_kind("ranks").next().unwrap();
            assert!(
                ranks["engine"].as_str().unwrap().starts_with("NCCL "),
                "{ranks}"
            );
            for step in metrics.steps() {
                assert_eq!(
                    step["peak_bytes"], step["planned_peak_bytes"],
                    "{way}, rank {rank}"
                );
                assert!(
                    step["sent_bytes"].as_u64().unwrap() > 0,
                    "{way}, rank {rank}: {step}"
                );
            }
        }
    }
}

/// A rank that runs out of memory ends the other, which names it, long before it would have given up: a test lasts no longer
/// than ten minutes.
#[test]
fn a_rank_that_fails_ends_the_others() {
    let place = Workplace::new();
    let all = "--config small.toml --device cuda --zero 3 --accum 1 --out out --set collectives.timeout_s=1000";
    let little = format!("{all} --memory-limit 1MiB --force");
    let outcomes = on_gpus(&place, [all, &little]);
    // What one ended with, all do.
    for outcome in &outcomes {
        assert_eq!(outcome.code, Some(3), "{outcome:?}");
    }
    let sentence = "failed: CUDA out of memory. Tried to allocate";
    let named =
        outcomes[0].stderr.contains("error: rank 1 (") && outcomes[0].stderr.contains(sentence);
    assert!(named, "{:?}", outcomes[0]);
}

/// Kernels that fail their trial on one rank are taken by none, so that all add up alike. They are tried before the engine between ranks
/// opens the GPUs, which let in one process at a time.
#[test]
fn ranks_give_up_kernels_together() {
    let place = Workplace::new();
    let run = "--config tiny-moe --device cuda --dtype bf16 --set model.layers=1 --set model.head_dim=64 --attention flash --seq 16 \
               --micro-batch 2 --accum 1 --steps 1 --zero 1";
    // What one keeps, the other does not find.
    let caches = place.path("others");
    let own = ("XDG_CACHE_HOME", caches.to_str().unwrap());
    let gpu = place.path("gpu");
    let exclusive = ("STAND_IN_EXCLUSIVE", gpu.to_str().unwrap());
    let families = ["attention", "experts"];
    let said_of =
        |family: &str| format!("kernels of {family} for 9.0 (sm90) were wrong in a trial");
    for (fault, kind) in [("", "sm90"), ("wrong", "sm80")] {
        let out = format!("run-{kind}");
        let arguments = format!("{run} --out {out}");
        let second = [exclusive, ("STAND_IN_SM90", fault), own];
        for outcome in on_gpus_with(&place, [&arguments; RANKS], [&[exclusive], &second]) {
            let told = outcome.succeeds();
            for reason in families.map(said_of) {
                assert_eq!(told.stderr.contains(&reason), kind == "sm80", "{told:?}");
            }
        }
        let metrics = Metrics::read(&place, &out);
        let record = metrics.of_kind("run").next().unwrap();
        let given_up = record["kernels_given_up"].as_str();
        for family in families {
            assert_eq!(record[format!("{family}_kernels")], kind);
            let is_said = given_up.is_some_and(|told| told.contains(&said_of(family)));
            assert_eq!(is_said, kind == "sm80");
        }
        std::fs::remove_dir_all(&caches).unwrap();
    }
    let named = format!("{run} --out named --set experts.kernels=sm90");
    let second = [("STAND_IN_SM90", "wrong"), own];
    for outcome in on_gpus_with(&place, [&named; RANKS], [&[], &second]) {
        assert_eq!(outcome.code, Some(5), "{outcome:?}");
    }
}
