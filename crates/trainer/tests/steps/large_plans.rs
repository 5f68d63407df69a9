//! Plans of models that no test machine could train.

use kernels::Target;
use memory::{DType, Homes, Rank, Window};
use model::{Attention, ModelConfig};
use optim::{MasterFormat, MomentFormat};
use planner::Plan;
use settings::load::{Source, load};
use settings::{AutoOr, Fp8Gradients, Fp8Recipe, Settings, StateFormats};
use std::time::Duration;
use units::Zero;

fn settings(model: ModelConfig, spec: &str) -> Settings {
    Settings {
        seq: 4096,
        micro_batch: 1,
        accum: 1,
        head_chunk: 512,
        ..crate::common::settings(model, DType::BF16, spec)
    }
}

fn preset(name: &str) -> ModelConfig {
    Source::open(name)
        .and_then(|preset| load(&preset, &[], false))
        .unwrap()
        .config
        .model
}

fn dense(hidden: usize, layers: usize, ffn: usize, vocab: usize) -> ModelConfig {
    let text = format!(
        r#"{{"hidden": {hidden}, "layers": {layers}, "heads": 32, "kv_heads": 32, "head_dim": {}, "ffn": {ffn},
            "vocab": {vocab}}}"#,
        hidden / 32
    );
    serde_json::from_str(&text).unwrap()
}

/// Megatron-LM's and DeepSpeed's 18 bytes: bf16 weight, f32 gradient, master and two moments.
#[test]
fn four_billion_parameters_need_72_gigabytes_across_steps() {
    let model = dense(3072, 32, 8192, 50_304);
    let plan = Plan::new(&settings(model, "full"), Target::Cuda).unwrap();
    let billions = plan.parameters as f64 / 1e9;
    assert!(
        (3.9..4.1).contains(&billions),
        "{billions} billion parameters"
    );
    let per_parameter = plan.bytes_per_parameter;
    assert!(
        (18.0..18.001).contains(&per_parameter),
        "{per_parameter} bytes a parameter"
    );
    let arenas = per_parameter * plan.parameters as f64 / 1e9;
    assert!((arenas - 18.0 * billions).abs() < 0.01, "{arenas} GB");
    assert!((70.0..74.0).contains(&arenas), "{arenas} GB");
}

/// Megatron-LM's 18 bytes for Llama-3 8B, divided among 64 ranks (Rajbhandari et al. 2020): all of them; 6 and a 64th of 12; 2 and
/// a 64th of 16; a 64th of all. Beside that live two buckets, in the first stages the sums of a rank's own part while further
/// micro-batches are computed, and some MiB of workspace, grains of the norm and padding.
#[test]
fn each_stage_divides_what_it_says() {
    let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
    for (zero, whole, divided) in [
        (Zero::Replicated, 18.0, 0.0),
        (Zero::States, 6.0, 12.0),
        (Zero::Gradients, 2.0, 16.0),
        (Zero::Weights, 0.0, 18.0),
    ] {
        let mut config = crate::common::config(preset("llama-3-8b"), DType::BF16, "full");
        config.collectives.zero = Some(zero);
        config.join(Rank { number: 7, of: 64 }).unwrap();
        let plan = Plan::new(&Settings::new(&config).unwrap(), Target::Cuda).unwrap();
        let parameters = plan.parameters as f64;
        let states = gib(parameters * (whole + divided / 64.0));
        let sums = match zero {
            Zero::Replicated | Zero::States => gib(parameters * 4.0 / 64.0),
            Zero::Gradients | Zero::Weights => 0.0,
        };
        let beside = gib(plan.persistent_bytes as f64) - states - sums - 0.25;
        assert!(
            (0.0..0.06).contains(&beside),
            "{zero:?}: {states} and {beside} GiB"
        );
        let published = [134.6, 46.3, 16.8, 2.1][usize::from(zero.stage())];
        assert!((states - published).abs() < 0.05, "{zero:?}: {states} GiB");
    }
}

/// Three slots of 64 MiB stay on the device, and the states of vectors.
#[test]
fn offload_takes_the_optimizer_off_the_device() {
    let model = dense(4096, 32, 11_008, 32_000);
    for (moments, master) in [
        (MomentFormat::F32, MasterFormat::F32),
        (MomentFormat::Quantised, MasterFormat::Remainder),
        (MomentFormat::Quantised, MasterFormat::None),
    ] {
        let resident = settings(model.clone(), "full");
        let states = StateFormats {
            moments,
            master,
            ..StateFormats::default()
        };
        let resident = Settings { states, ..resident };
        let offloaded = Settings {
            homes: crate::common::pinned_states(),
            ..resident.clone()
        };
        let [resident, offloaded] =
            [resident, offloaded].map(|settings| Plan::new(&settings, Target::Cuda).unwrap());
        let states = |plan: &Plan| {
            plan.arenas
                .iter()
                .skip(2)
                .map(|arena| arena.bytes)
                .sum::<u64>()
        };
        let saved = resident.peak_bytes - offloaded.peak_bytes;
        let share = saved as f64 / states(&resident) as f64;
        assert!(share > 0.95, "{moments:?}, {master:?}: {share}");
        assert!(offloaded.host_pinned_bytes <= states(&resident));
        assert_eq!(
            offloaded
                .host_arenas
                .iter()
                .map(|arena| arena.bytes)
                .sum::<u64>(),
            offloaded.host_pinned_bytes
        );
        let offload = offloaded.offload.unwrap();
        let hidden = offload.hidden_from_tokens.unwrap();
        // Each byte a parameter costs as much time as the forward pass of about 5500 tokens, at half an H100's peak.
        let bytes_per_parameter = offload.optimizer_bytes as f64 / offloaded.parameters as f64;
        assert!(
            (4500.0..6500.0).contains(&(hidden as f64 / bytes_per_parameter)),
            "{hidden} tokens"
        );
        assert!(offload.exposed_ms > 0.0, "{offload:?}");
    }
}

/// With as many tokens as it takes, what does not hide is what the first part of the model waits for; at the end of the
/// step nothing hides.
#[test]
fn updates_hide_behind_enough_tokens() {
    let planned = |model: &ModelConfig, micro_batch, window| {
        let homes = Homes {
            window,
            ..crate::common::pinned_states()
        };
        let settings = Settings {
            micro_batch,
            homes,
            ..settings(model.clone(), "full")
        };
        let plan = Plan::new(&settings, Target::Cuda).unwrap();
        plan.offload.unwrap()
    };
    let model = dense(4096, 32, 11_008, 32_000);
    let few = planned(&model, 1, Window::Forward);
    let enough = few.hidden_from_tokens.unwrap().div_ceil(4096) as usize;
    let enough = planned(&model, enough, Window::Forward);
    let at_the_end = planned(&model, 1, Window::End);
    // The way up and the way down, each at its half of both.
    let copies = 1e3 * enough.optimizer_bytes as f64 / (enough.both_ways_gbps / 2.0 * 1e9);
    assert!(few.exposed_ms > 0.7 * copies, "{few:?}");
    assert!(at_the_end.exposed_ms > 0.9 * copies, "{at_the_end:?}");
    let share = enough.exposed_ms / copies;
    assert!((0.001..0.08).contains(&share), "{share}: {enough:?}");
}

/// What this thread has had of a processor: what else the machine does counts for nothing.
fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes into the structure that lives here.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The least time that a plan takes of a processor in three, with all its work on one thread.
fn least_time(plan: impl Fn() + Sync) -> Duration {
    let timed = || {
        let start = processor_time();
        plan();
        processor_time() - start
    };
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let alone = alone.unwrap();
    let times = (0..3).map(|_| alone.install(timed));
    times.min().unwrap()
}

/// The largest presets, dense and of the most labels; a debug machine may be slow, so the best of three counts.
#[test]
fn the_largest_models_are_planned_in_under_a_second() {
    for name in ["llama-3.1-405b", "deepseek-v3"] {
        let mut config = crate::common::config(preset(name), DType::BF16, "full:uniform:2");
        (config.data.seq, config.memory.head_chunk) = (4096, AutoOr::Number(512));
        (config.batch.micro, config.batch.accum) = (1, 1);
        let best = least_time(|| {
            let plan = Plan::with_alternatives(&config, Target::Cuda).unwrap();
            assert!(!plan.strategies.is_empty() && !plan.effects.is_empty());
            assert!(plan.parameters > 400_000_000_000);
        });
        assert!(best < Duration::from_secs(1), "{name}: {best:?}");
    }
}

/// What other ranks send and receive is like what this one does: a plan counts it, and lists no rank's pieces.
#[test]
fn a_plan_takes_no_longer_for_more_ranks() {
    let model = ModelConfig {
        layers: 16,
        ..preset("llama-3.1-405b")
    };
    let best = |size: usize| {
        let mut config = crate::common::config(model.clone(), DType::BF16, "full");
        config.collectives.zero = Some(Zero::Weights);
        config
            .join(Rank {
                number: 1,
                of: size,
            })
            .unwrap();
        least_time(|| {
            let plan = Plan::with_alternatives(&config, Target::Cuda).unwrap();
            assert!(plan.ranks.unwrap().sent_bytes > 0);
        })
    };
    let (few, many) = (best(8), best(4096));
    assert!(many < 3 * few, "{few:?} for 8 ranks, {many:?} for 4096");
}

/// No stage is replayed more often than once a block, whatever the chunk; a chunk's last `mlp_down` not at all.
#[test]
fn uniform_recompute_replays_each_stage_once() {
    let layers = 12;
    let model = dense(64, layers, 128, 256);
    let replays = |spec: &str| {
        let memory = memory::Memory::shapes();
        let settings = settings(model.clone(), spec);
        let flops = kernels::meta::FlopCounter::default();
        let mut session =
            session::Session::on_shapes(settings, &memory, Target::Cuda, flops).unwrap();
        let ids = vec![0; 4096];
        let micro = data::MicroBatch {
            input_ids: ids.clone(),
            targets: ids,
            rows: 1,
            seq: 4096,
            part: memory::Rank::ALONE,
            documents: None,
            lengths: None,
            beside: None,
        };
        session
            .step(&data::StepBatch::from_iter([micro]))
            .unwrap()
            .replayed
    };
    for (chunk, expected_mlp_down) in [(1, 0), (2, 6), (4, 9), (5, 9), (12, 11)] {
        let replayed = replays(&format!("full:uniform:{chunk}"));
        assert_eq!(
            replayed.get("mlp_down"),
            expected_mlp_down,
            "chunks of {chunk}"
        );
        for stage in [
            "attn_norm",
            "qkv",
            "core_attn",
            "attn_out",
            "mlp_norm",
            "mlp_up",
            "mlp_act",
        ] {
            assert_eq!(replayed.get(stage), layers, "chunks of {chunk}: {stage}");
        }
    }
    assert_eq!(replays("full:block:5").total(), 5 * 7);
    assert_eq!(replays("none").total(), 0);
}

/// A chunk's activations live at once while it is replayed: larger chunks keep less and need more for a moment.
#[test]
fn uniform_recompute_shows_its_transient_peak() {
    let figures = |spec: &str| {
        let plan = Plan::new(&settings(dense(1024, 24, 4096, 32_000), spec), Target::Cuda).unwrap();
        (
            plan.peak_by_category.activation,
            plan.peak_by_category.temporary,
            plan.peak_bytes,
        )
    };
    let (one, four) = (figures("full:uniform:1"), figures("full:uniform:4"));
    assert!(
        four.0 < one.0,
        "fewer block inputs are kept: {four:?} {one:?}"
    );
    assert!(
        four.1 > one.1,
        "four blocks' activations are live in a replay: {four:?} {one:?}"
    );
}

/// Flash attention keeps nothing that grows with the square of the sequence: the plan is the table's sum.
#[test]
fn activations_under_flash_attention_grow_linearly() {
    let model = preset("llama-3.2-1b");
    let plan = |attention, seq| {
        let settings = Settings {
            seq,
            attention,
            ..settings(model.clone(), "none")
        };
        Plan::new(&settings, Target::Cuda).unwrap()
    };
    let activation = |attention, seq| plan(attention, seq).peak_by_category.activation as f64;
    let ratio = |attention| activation(attention, 16_384) / activation(attention, 8192);
    assert_eq!(ratio(Attention::Flash), 2.0);
    assert!(
        ratio(Attention::Eager) > 3.0,
        "stored scores grow with the square"
    );

    let seq = 131_072;
    let plan = plan(Attention::Flash, seq);
    // A layer's table in bf16, a token: x, h1, o, x2, h2, q of the hidden width; k and v; gate, up, act; two
    // statistics of norms in f32, and one for each head.
    assert_eq!(model.q_width(), model.hidden);
    let wide = 6 * model.hidden + 2 * model.kv_width() + 3 * model.ffn;
    let of_token = 2 * wide + 4 * (2 + model.heads);
    let table = (model.layers * seq * of_token) as u64;
    let listed: u64 = plan
        .activations
        .iter()
        .map(|activation| activation.bytes)
        .sum();
    assert_eq!(listed, table);
    assert_eq!(plan.peak_by_category.activation, table);
    assert!(
        plan.notes
            .iter()
            .any(|note| note.contains("`core_attn` drops the log-sum-exp"))
    );
}

/// Large models gain more by products in FP8 than small ones, and a plan of either kind says how much on paper.
#[test]
fn plans_say_what_fp8_gains() {
    let steps_as_fast = |name: &str, recipe: Fp8Recipe, row: &str| -> f64 {
        let mut config = crate::common::config(preset(name), DType::BF16, "none");
        (config.data.seq, config.batch.micro, config.batch.accum) = (8192, 1, 2);
        config.fp8.recipe = recipe;
        if row == "--fp8 off" {
            // Another key of FP8, which would be refused without it.
            config.fp8.gradients = Fp8Gradients::E4m3;
        }
        let effects = Plan::with_alternatives(&config, Target::Cuda)
            .unwrap()
            .effects;
        let mut effects = effects.iter().map(|effect| effect.change.as_str());
        let change = effects.find(|change| change.contains(row)).unwrap();
        let (_, figure) = change.split_once("steps ").unwrap();
        figure
            .strip_suffix(" times as fast on paper")
            .unwrap()
            .parse()
            .unwrap()
    };
    let gain = |name| steps_as_fast(name, Fp8Recipe::Off, "--fp8 tensor");
    let (small, large) = (gain("qwen2.5-0.5b"), gain("llama-3-8b"));
    assert!((1.0..1.2).contains(&small), "{small}");
    assert!((1.2..1.4).contains(&large), "{large}");
    let back = steps_as_fast("llama-3-8b", Fp8Recipe::Tensor, "--fp8 off");
    assert!((back * large - 1.0).abs() < 0.02, "{back} {large}");
    let kept = steps_as_fast("llama-3-8b", Fp8Recipe::Tensor, "fp8.weights=step");
    assert!((1.0..1.1).contains(&kept), "{kept}");
}
