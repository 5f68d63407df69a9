//! Ranks on GPUs: NCCL's calls and the driver's, on libraries that stand in for them and run the kernels emulated.

use crate::ranks::job::{MICRO_BATCHES, Run, command, open_mpi, place};
use crate::workplace::{Workplace, free_port, outcome};
use std::process::{Child, Command, Stdio};

/// What the stand-in takes for the channels of two ranks, which are as many as the trainer allows.
const NCCL: u64 = 2 * 16 * (12 << 20);

const TRAIN: &str =
    "--config llama.toml --device cuda --dtype f32 --steps 2 --bucket-size 32KiB --quiet";

/// Both libraries before any other, and two GPUs.
fn on_gpus(job: &mut Command) {
    job.env("LD_LIBRARY_PATH", emulation::stand_in_folder());
    job.env("STAND_IN_DEVICES", "2");
}

fn arguments(ranks: usize, more: &str, out: &str) -> String {
    let accum = MICRO_BATCHES / ranks;
    format!("{TRAIN} {more} --accum {accum} --out {out} --save-final {out}/model")
}

/// Losses, norms and weights; memory and traffic as planned on every rank.
fn bits(run: &Run) -> (Vec<String>, Vec<u8>) {
    for (own, plan) in run.ranks.iter().zip(&run.plans) {
        for step in own.steps() {
            for name in ["peak_bytes", "sent_bytes"] {
                assert_eq!(step[name], plan[name], "{name}");
            }
        }
    }
    let steps = run.metrics.steps();
    assert_eq!(steps.len(), 2);
    let figures = steps
        .iter()
        .map(|step| format!("{} {}", step["loss"], step["grad_norm"]));
    (figures.collect(), run.weights.clone())
}

fn alone(place: &Workplace) -> (Vec<String>, Vec<u8>) {
    let arguments = arguments(1, "--zero 0", "alone");
    let mut job = place.command(&arguments);
    on_gpus(&mut job);
    outcome(job, &arguments).succeeds();
    bits(&Run::read(place, "alone", 1))
}

/// By MPI, which hands NCCL's id round.
#[test]
fn started_by_mpirun() {
    let place = place();
    let alone = alone(&place);
    for zero in [1, 3] {
        let out = format!("zero-{zero}");
        let arguments = arguments(2, &format!("--zero {zero}"), &out);
        let mut job = command(&place, open_mpi(2), &arguments);
        on_gpus(&mut job);
        let said = outcome(job, &arguments).succeeds();
        assert!(!said.stderr.contains("stand-in: "), "{said:?}");
        let run = Run::read(&place, &out, 2);
        assert!(bits(&run) == alone, "stage {zero}");
        let record = run.ranks[1].of_kind("ranks").next().unwrap();
        assert!(
            record["engine"].as_str().unwrap().contains("NCCL"),
            "{record}"
        );
        assert_eq!(
            run.ranks[1].0[0]["device"], "cuda:1",
            "each rank has its own"
        );
    }
}

/// Ranks that share sequences.
#[test]
fn sharing_sequences() {
    let place = place();
    let run = |zero: usize| {
        let out = format!("zero-{zero}");
        let arguments = arguments(1, &format!("--zero {zero} --cp 2"), &out);
        let mut job = command(&place, open_mpi(2), &arguments);
        on_gpus(&mut job);
        let said = outcome(job, &arguments).succeeds();
        assert!(!said.stderr.contains("stand-in: "), "{said:?}");
        bits(&Run::read(&place, &out, 2))
    };
    assert!(run(1) == run(3));
}

/// Neighbouring stages exchange over the communicator that also adds up gradients. No rank has all weights.
#[test]
fn stages_of_a_pipeline() {
    let place = place();
    let run = |ranks: usize, more: &str, out: &str| {
        let untied = "--set model.tie_embeddings=false --zero 1";
        let arguments = format!("{TRAIN} {untied} {more} --accum {MICRO_BATCHES} --out {out}");
        let mut job = command(&place, open_mpi(ranks), &arguments);
        on_gpus(&mut job);
        let said = outcome(job, &arguments).succeeds();
        assert!(!said.stderr.contains("stand-in: "), "{said:?}");
        bits(&Run::read(&place, out, ranks)).0
    };
    let one = run(1, "", "one");
    assert!(run(2, "--pp 2", "two") == one);
    assert!(run(2, "--pp 2 --pipeline-schedule zb-h1", "later") == one);
}

/// Two ranks as torchrun starts them. `set` sets what a rank has of its own.
fn as_torchrun_does(
    place: &Workplace,
    arguments: &str,
    set: impl Fn(&mut Command, usize),
) -> [Child; 2] {
    let port = free_port() - 1;
    [0, 1].map(|rank: usize| {
        let mut job = place.command(arguments);
        on_gpus(&mut job);
        set(&mut job, rank);
        job.env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .stdout(Stdio::null());
        job.spawn().unwrap()
    })
}

/// As where a rank is gone without a word. Launches that follow the exchange are so many that a driver would take no more of them;
/// a rank stops before, and its deadline ends it, also where the exchange is the run's last.
#[test]
fn an_exchange_that_never_ends_ends_every_rank() {
    let place = place();
    let arguments = |out: &str, accum: usize| {
        format!("{TRAIN} --zero 3 --accum {accum} --set collectives.timeout_s=1 --out {out}")
    };
    let exchanges = |rank: usize| place.path(&format!("exchanges-{rank}"));
    let whole = as_torchrun_does(&place, &arguments("whole", 1), |job, rank| {
        job.env("STAND_IN_EXCHANGES", exchanges(rank));
    });
    for mut rank in whole {
        assert!(rank.wait().unwrap().success());
    }
    let last = std::fs::read_to_string(exchanges(0))
        .unwrap()
        .lines()
        .count();
    // Those before the first step's are the rehearsal's.
    for (endless, accum) in [(6, 64), (last, 1)] {
        let arguments = arguments(&format!("endless-{endless}"), accum);
        let ranks = as_torchrun_does(&place, &arguments, |job, _| {
            job.env("STAND_IN_ENDLESS_EXCHANGE", endless.to_string());
            job.stderr(Stdio::piped());
        });
        for rank in ranks {
            let ended = rank.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(ended.status.code(), Some(5), "{endless}: {said}");
            let is_told = said.contains("for its device, which waits for other ranks");
            assert!(
                is_told && !said.contains("this one waits"),
                "{endless}: {said}"
            );
        }
    }
}

/// By the variables that torchrun sets, without any MPI.
#[test]
fn started_as_torchrun_does() {
    let place = place();
    let alone = alone(&place);
    let arguments = arguments(2, "--zero 2", "run");
    let uses = |rank: usize| place.path(&format!("first-uses-{rank}"));
    let ranks = as_torchrun_does(&place, &arguments, |job, rank| {
        job.env("STAND_IN_FIRST_USES", uses(rank));
    });
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
    let run = Run::read(&place, "run", 2);
    assert!(bits(&run) == alone);
    for (rank, plan) in run.plans.iter().enumerate() {
        // To the other rank, and along the ring: before anything is leased, and known to the plan.
        let nccl = &plan["nccl"];
        assert_eq!(
            (&nccl["bytes"], &nccl["is_measured"]),
            (&NCCL.into(), &true.into())
        );
        let uses = std::fs::read_to_string(uses(rank)).unwrap();
        let held: Vec<u64> = uses.lines().map(|line| line.parse().unwrap()).collect();
        let (nccl, products) = held.split_at(2);
        assert_eq!(nccl, [0, 0]);
        assert!(
            products.len() >= 8 && products.iter().all(|held| *held == products[0]),
            "{held:?}"
        );
    }
}
