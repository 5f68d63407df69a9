//! A step allocates nothing behind the ledger's back but what the GEMM library packs its operands into, and that
//! stays below what the run record says.
//!
//! A trainer that sleeps holds what it says, and no more after 200 sleeps.
//!
//! Every allocation of 4 KiB or more in any thread is traced to the function that asked for it. One test, since
//! what another one allocates meanwhile would be seen too.

#[path = "../steps/common/mod.rs"]
#[allow(dead_code, reason = "the tests of steps use the rest")]
mod common;

mod allocations;

use allocations::{SMALLEST, Watched, Watching, watch};
use common::{DTYPES, odd_model, plan, session, settings, step_batch};
use kernels::cpu::{Cpu, untracked_bytes_max};
use kernels::{Init, Matmul};
use memory::{DType, Homes, In, Memory, Out};
use model::{ModelConfig, OffloadLabels};
use optim::OptimizerKind;
use session::Session;
use settings::Settings;
use std::hint::black_box;
use trainer::{Handed, SleepLevel, Trainer, configuration};

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// The widths of `llama-15m`, two layers and a smaller vocabulary.
fn llama(dtype: DType, mode: &str) -> Settings {
    let model = ModelConfig {
        hidden: 288,
        heads: 6,
        kv_heads: 6,
        head_dim: 48,
        ffn: 768,
        vocab: 4000,
        ..odd_model(2)
    };
    Settings {
        seq: 256,
        micro_batch: 4,
        accum: 1,
        head_chunk: 512,
        ..settings(model, dtype, mode)
    }
}

fn small_product() {
    let cpu = Cpu::new(&Memory::host(), DType::F32).unwrap();
    let (a, mut out) = (vec![1f32; 64 * 64], vec![0f32; 64 * 64]);
    let (a, out) = (
        In::of_slice(&a, [64, 64]),
        Out::of_slice(&mut out, [64, 64]),
    );
    cpu.run(Matmul {
        out,
        a,
        b: a,
        bias: None,
        init: Init::Overwrite,
    })
    .unwrap();
}

/// The library keeps one buffer a thread from its first small product on: have every thread make one. Returns their
/// bytes.
fn warm_up() -> u64 {
    rayon::broadcast(|_| ());
    let (_, watched) = watch(|| {
        small_product();
        rayon::broadcast(|_| small_product());
    });
    watched.left_bytes.try_into().unwrap()
}

#[inline(never)]
fn allocate(bytes: usize) -> usize {
    black_box(vec![1u8; bytes]).len()
}

#[inline(never)]
fn grow() -> Vec<u8> {
    let mut grows = vec![0u8; 3000];
    grows.reserve_exact(6000);
    grows
}

#[track_caller]
fn assert_seen(watched: &Watched, sizes: &[usize], by: &str) {
    let seen: Vec<usize> = watched.made.iter().map(|made| made.bytes).collect();
    assert_eq!(seen, sizes);
    for made in &watched.made {
        assert!(!made.is_gemm_packing(), "{made}");
        let by = format!("hidden_allocations::{by}");
        assert_eq!(made.callers[0], by, "{made}");
    }
}

/// What is hidden is seen, and by its maker's name: in this thread, in another, behind a growing vector, within a
/// step; what is too small is not.
fn assert_that_the_watch_works() {
    let (_, watched) = watch(|| (allocate(SMALLEST - 1), allocate(SMALLEST), allocate(70_000)));
    assert_seen(&watched, &[SMALLEST, 70_000], "allocate");
    assert_eq!((watched.most_bytes, watched.left_bytes), (70_000, 0));
    let (lengths, watched) = watch(|| rayon::broadcast(|_| allocate(5000)));
    assert_seen(&watched, &lengths, "allocate");
    let (kept, watched) = watch(grow);
    assert_seen(&watched, &[9000], "grow");
    assert_eq!(watched.left_bytes, 9000);
    drop(kept);
}

/// Without a slab every lease is an allocation: a step's are seen, one by one.
fn assert_that_leases_are_seen() {
    let settings = settings(odd_model(2), DType::F32, "full");
    let mut session = Session::on_cpu(settings.clone(), &Memory::host()).unwrap();
    session.initialise(7).unwrap();
    let batch = step_batch(&settings, 0);
    session.step(&batch).unwrap();
    let (outcome, watched) = watch(|| session.step(&batch).unwrap());
    let leases: Vec<_> = watched
        .made
        .iter()
        .filter(|made| made.callers[0].starts_with("memory::"))
        .collect();
    let layers = settings.model.layers * settings.accum;
    assert!(leases.len() > 20 * layers, "{}", leases.len());
    let within_step = outcome.memory.peak.bytes - plan(&settings).persistent_bytes;
    assert!(watched.most_bytes as f64 > 0.9 * within_step as f64);
    assert_eq!(watched.left_bytes, 0);
}

/// Block inputs and optimizer states on the host.
fn offloaded(dtype: DType) -> Settings {
    let settings = llama(dtype, "full");
    let labels = OffloadLabels::parse("block_input").unwrap();
    Settings {
        policy: settings.policy.clone().offload(&labels).unwrap(),
        homes: Homes {
            chunk_bytes: 1 << 20,
            ..common::pinned_states()
        },
        ..settings
    }
}

/// `kept_bytes` are those that the library holds on to between products.
fn assert_nothing_hidden(settings: Settings, mode: &str, kept_bytes: u64) {
    let dtype = settings.dtype;
    let mut session = session(&settings);
    session.step(&step_batch(&settings, 0)).unwrap();
    let batch = step_batch(&settings, 1);
    let (outcome, watched) = watch(|| session.step(&batch).unwrap());
    assert!(outcome.is_finite());
    let hidden = watched.made.iter().filter(|made| !made.is_gemm_packing());
    let hidden: Vec<String> = hidden.map(ToString::to_string).collect();
    assert!(hidden.is_empty(), "{dtype:?} {mode}: {}", hidden.join(""));
    assert!(!watched.made.is_empty(), "packing is seen");
    assert_eq!(watched.left_bytes, 0, "{dtype:?} {mode}");
    let most = untracked_bytes_max(rayon::current_num_threads());
    println!(
        "{dtype:?} {mode}: {} packing buffers, {} bytes at once, {kept_bytes} kept, of {most}",
        watched.made.len(),
        watched.most_bytes,
    );
    assert!(watched.most_bytes + kept_bytes <= most, "{dtype:?} {mode}");
}

fn resident_bytes() -> f64 {
    // What was freed before may otherwise return to the system at any later time.
    // SAFETY: it only returns memory that nobody has.
    unsafe { libc::malloc_trim(0) };
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: f64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096.0
}

/// What a trainer gives back, and what the process then holds, while it sleeps and when it is awake again.
fn sleep_and_wake(trainer: &mut Trainer) -> (Handed, f64, f64) {
    let handed = trainer.sleep(SleepLevel::Keep).unwrap();
    let asleep = resident_bytes();
    trainer.wake().unwrap();
    (handed, asleep, resident_bytes())
}

/// Of what a sleeping trainer gives back, the process holds no more than it keeps, however often it slept.
fn assert_that_a_sleeping_trainer_holds_nothing() {
    // From this size on, glibc returns freed blocks to the system at once, instead of from the largest freed block on.
    // SAFETY: it only sets a number of malloc's.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) };
    let set = ["train.device=cpu", "model.vocab=8000", "model.layers=2"];
    let set = [&set[..], &["data.seq=128", "batch.micro=4"]].concat();
    let mut trainer = Trainer::new(configuration("llama-15m", &set).unwrap()).unwrap();
    let (first, ..) = sleep_and_wake(&mut trainer);
    let lost = (first.given_back_bytes - first.kept_on_host_bytes) as f64;
    assert!(lost > f64::from(32 << 20), "{first:?}");
    let mut resident = Vec::new();
    for _ in 1..200 {
        let (handed, asleep, awake) = sleep_and_wake(&mut trainer);
        assert_eq!((handed, handed.held_bytes), (first, 0));
        resident.push((asleep, awake));
    }
    let most = |of: &[(f64, f64)]| {
        let most = |a: (f64, f64), b: &(f64, f64)| (a.0.max(b.0), a.1.max(b.1));
        of.iter().fold((0.0, 0.0), most)
    };
    // How much of what is zero counts as resident depends on the system: seen were all of it, and all but the gradients. What a hundred
    // sleeps leave behind would be far more.
    let (before, after) = (most(&resident[..100]), most(&resident[100..]));
    let grown = (after.0 - before.0).max(after.1 - before.1);
    let fell = after.1 - after.0;
    assert!(
        grown < 0.5 * lost && fell > 0.4 * lost,
        "{before:?} {after:?} {first:?}"
    );
    let (_, watched) = watch(|| sleep_and_wake(&mut trainer));
    assert!(!watched.made.is_empty());
    assert_eq!(watched.left_bytes, 0);
}

#[test]
fn a_step_allocates_nothing_but_gemm_packing_and_a_sleep_keeps_what_it_says() {
    let kept_bytes = warm_up();
    assert_that_the_watch_works();
    assert_that_leases_are_seen();
    for dtype in DTYPES {
        for mode in ["none", "full"] {
            assert_nothing_hidden(llama(dtype, mode), mode, kept_bytes);
        }
        assert_nothing_hidden(offloaded(dtype), "full, offloaded", kept_bytes);
        for kind in [OptimizerKind::Muon, OptimizerKind::Adafactor] {
            let mut settings = llama(dtype, "none");
            settings.optimizer.kind = kind;
            assert_nothing_hidden(settings, &kind.to_string(), kept_bytes);
        }
    }
    assert_that_a_sleeping_trainer_holds_nothing();
}
