//! Whole training steps of the CUDA backend on a device that interprets the PTX in the binary: as on the processor, as planned,
//! and the same to the bit whatever is recomputed.

use crate::common::elsewhere::{forms, state, with_form};
use crate::common::side_by_side::side_by_side;
use crate::common::{assert_as_planned, hybrid, odd_model, pinned_states, step_batch};
use kernels::Target;
use kernels::cuda::{Cuda, KernelKind};
use memory::{DType, Memory};
use model::{Attention, ModelConfig, Policy};
use planner::Plan;
use ptx::{Interpreter, PtxTexts};
use session::{Session, SessionError};
use settings::load::{Source, load};
use settings::{KernelFamily, PerFamily, Settings, StepObjective};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

static TEXTS: LazyLock<Arc<PtxTexts>> = LazyLock::new(|| Arc::new(PtxTexts::of_this_binary()));

static TEXTS_ON_HOPPER: LazyLock<Arc<PtxTexts>> = LazyLock::new(|| Arc::new(PtxTexts::on_hopper()));

const LAYERS: usize = 2;

/// Weights change between two.
const STEPS: usize = 2;

/// A preset with as many layers.
fn preset(name: &str) -> ModelConfig {
    let model = load(&Source::open(name).unwrap(), &[], false)
        .unwrap()
        .config
        .model;
    ModelConfig {
        layers: LAYERS,
        ..model
    }
}

/// A model with a form of weights and states, and `seq` tokens in a row: more than a tile of attention has.
fn settings(model: ModelConfig, form: usize, seq: usize, attention: Attention) -> Settings {
    let gradients = [DType::F32, DType::BF16][form % 2];
    Settings {
        attention,
        seq,
        micro_batch: 2,
        accum: 2,
        ..with_form(model, forms()[form], "none", gradients)
    }
}

/// What steps came to.
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
    /// Gradients of the first step, by trained parameter.
    gradients: Vec<Vec<f32>>,
    /// Weights and states after the last.
    state: Vec<u8>,
    replays: usize,
    peak_bytes: u64,
}

fn run(mut session: Session, settings: &Settings, plan: &Plan) -> Run {
    session.initialise(7).unwrap();
    let memory = session.memory().clone();
    memory.reserve_slab(plan.slab_bytes).unwrap();
    memory.set_poison(true);
    let (mut outcomes, mut gradients) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let outcome = session.step(&step_batch(settings, step)).unwrap();
        assert_as_planned("a step", plan, &outcome);
        if step == 0 {
            let entries = session.model().layout().entries().iter().enumerate();
            let trained = entries.filter(|(_, entry)| entry.role.is_trained());
            gradients = trained
                .map(|(index, _)| session.gradient(index).unwrap())
                .collect();
        }
        outcomes.push(outcome);
    }
    Run {
        losses: outcomes.iter().map(|outcome| outcome.loss).collect(),
        norms: outcomes.iter().map(|outcome| outcome.grad_norm).collect(),
        gradients,
        state: state(&session),
        replays: outcomes[0].replayed.total(),
        peak_bytes: plan.peak_bytes,
    }
}

/// By kernels of these kinds: those for Hopper on what it runs of all sources.
fn interpreted(settings: &Settings, kinds: PerFamily<KernelKind>) -> Run {
    let interpreter = Interpreter::new(match kinds == PerFamily::SM80 {
        true => &TEXTS,
        false => &TEXTS_ON_HOPPER,
    });
    let memory = Memory::device(Rc::new(interpreter.clone()));
    let kernels = Cuda::new(interpreter, &memory, settings.narrowest_dtype()).unwrap();
    let kernels = kernels
        .with_attention_by(kinds.attention)
        .with_experts_by(kinds.experts);
    let session = Session::on_kernels(settings.clone(), &memory, Box::new(kernels)).unwrap();
    run(
        session,
        settings,
        &Plan::new(settings, Target::Cuda).unwrap(),
    )
}

fn on_cpu(settings: &Settings) -> Run {
    let session = Session::on_cpu(settings.clone(), &Memory::host()).unwrap();
    run(
        session,
        settings,
        &Plan::new(settings, Target::Cpu).unwrap(),
    )
}

/// The largest difference of a gradient's element, as a share of the largest in its parameter.
fn worst_gradient(found: &Run, expected: &Run) -> f32 {
    let of_parameter = |(found, expected): (&Vec<f32>, &Vec<f32>)| {
        assert!(found.iter().all(|value| value.is_finite()));
        let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let largest = expected
            .iter()
            .fold(0f32, |most, value| most.max(value.abs()));
        // An expert to which no token goes has zeros.
        differences.fold(0f32, f32::max) / largest.max(f32::MIN_POSITIVE)
    };
    assert_eq!(found.gradients.len(), expected.gradients.len());
    let pairs = found.gradients.iter().zip(&expected.gradients);
    pairs.map(of_parameter).fold(0f32, f32::max)
}

#[track_caller]
fn assert_near(name: &str, found: &[f32], expected: &[f32], share: f32) {
    for (found, expected) in found.iter().zip(expected) {
        let difference = (found - expected).abs() / expected.abs();
        assert!(
            difference <= share,
            "{name}: {found} in place of {expected}"
        );
    }
}

/// A model, the kernels that compute it, and how far its steps may be from those of the processor: by loss and norm, and by gradients. The
/// gradients of kernels for Hopper are held to those of the kernels for 8.0: where the processor rounds otherwise, a token may go to another
/// expert.
type Row = (&'static str, Settings, PerFamily<KernelKind>, f32, f32);

/// Kernels for Hopper.
const SM90: PerFamily<KernelKind> = PerFamily {
    attention: KernelKind::Sm90,
    experts: KernelKind::Sm90,
};

fn models() -> Vec<Row> {
    let dense = |form, seq| settings(odd_model(LAYERS), form, seq, Attention::Flash);
    let wide_heads = ModelConfig {
        head_dim: 64,
        ..preset("tiny-moe")
    };
    vec![
        ("dense, f32", dense(0, 71), PerFamily::SM80, 1e-6, 2e-5),
        ("dense, bf16", dense(7, 150), PerFamily::SM80, 1e-3, 4e-2),
        (
            "preferences, f32",
            Settings {
                objective: StepObjective::Preferences {
                    beta: 0.1,
                    has_reference: false,
                },
                ..dense(0, 71)
            },
            PerFamily::SM80,
            1e-6,
            2e-5,
        ),
        (
            "tiny-moe, bf16",
            settings(preset("tiny-moe"), 9, 40, Attention::Eager),
            PerFamily::SM80,
            1e-3,
            4e-2,
        ),
        (
            "tiny-moe on Hopper, bf16",
            settings(wide_heads, 9, 40, Attention::Flash),
            SM90,
            1e-3,
            4e-3,
        ),
        (
            "tiny-mla, f32",
            settings(preset("tiny-mla"), 0, 40, Attention::Flash),
            PerFamily::SM80,
            1e-6,
            2e-5,
        ),
        (
            "Qwen3.5, f32",
            settings(
                ModelConfig {
                    // The norm behind the rule divides by heads that may be nearly 0; this bounds what that makes of last bits.
                    norm_eps: 1e-2,
                    ..hybrid(LAYERS)
                },
                0,
                71,
                Attention::Flash,
            ),
            PerFamily::SM80,
            1e-6,
            // Terms of the gradients of `A_log` and `dt_bias` cancel.
            2e-4,
        ),
    ]
}

#[test]
fn steps_are_those_of_the_processor_and_as_planned_whatever_is_recomputed() {
    side_by_side(models(), |(name, kept, kinds, by_loss, by_gradient)| {
        let labels = kept.model.labels();
        let full = Policy::with_layers(labels, "full", &BTreeMap::new(), LAYERS).unwrap();
        let replayed = Settings {
            policy: full,
            ..kept.clone()
        };
        let (cpu, none, full) = (
            on_cpu(&kept),
            interpreted(&kept, kinds),
            interpreted(&replayed, kinds),
        );
        let reference = match kinds == PerFamily::SM80 {
            true => &cpu,
            false => &interpreted(&kept, PerFamily::SM80),
        };
        let worst = worst_gradient(&none, reference);
        println!(
            "{name}: losses {:?}, {:?} on the processor; norms {:?}, {:?}; gradients {}",
            none.losses, cpu.losses, none.norms, cpu.norms, worst
        );
        assert_near(name, &none.losses, &cpu.losses, by_loss);
        assert_near(name, &none.norms, &cpu.norms, by_gradient);
        assert!(worst <= by_gradient, "{name}: {worst}");
        // Another device's sums have other bits.
        assert!(none.gradients != cpu.gradients, "{name}");
        for family in KernelFamily::ALL {
            let mut others = kinds;
            others[family] = KernelKind::Sm80;
            if others != kinds {
                let others = interpreted(&kept, others);
                assert!(none.gradients != others.gradients, "{name}");
            }
        }
        assert!(none.replays == 0 && full.replays > 0, "{name}");
        assert!(full.peak_bytes < none.peak_bytes, "{name}");
        let bits = |values: &[f32]| {
            values
                .iter()
                .map(|value| value.to_bits())
                .collect::<Vec<u32>>()
        };
        assert_eq!(bits(&full.losses), bits(&none.losses), "{name}");
        assert_eq!(bits(&full.norms), bits(&none.norms), "{name}");
        assert!(full.gradients == none.gradients, "{name}: gradients differ");
        assert!(full.state == none.state, "{name}: weights or states differ");
    });
}

/// What a session holds goes to host memory and back by the backend's own copies.
#[test]
fn steps_with_a_sleep_after_each_are_the_same() {
    let settings = Settings {
        homes: pinned_states(),
        ..settings(odd_model(LAYERS), 7, 40, Attention::Flash)
    };
    let plan = Plan::new(&settings, Target::Cuda).unwrap();
    let run = |sleeps: bool| {
        let interpreter = Interpreter::new(&TEXTS);
        let memory = || Memory::device(Rc::new(interpreter.clone()));
        let open = |memory: &Memory| {
            let dtype = settings.narrowest_dtype();
            let kernels = Cuda::new(interpreter.clone(), memory, dtype)?;
            let session = Session::on_kernels(settings.clone(), memory, Box::new(kernels))?;
            memory.reserve_slab(plan.slab_bytes)?;
            Ok::<_, SessionError>(session)
        };
        let mut session = open(&memory()).unwrap();
        session.initialise(7).unwrap();
        for step in 0..STEPS {
            let outcome = session.step(&step_batch(&settings, step)).unwrap();
            assert_as_planned("a step", &plan, &outcome);
            if sleeps {
                let (asleep, left) = (session.fall_asleep().unwrap(), session.memory().clone());
                drop(session);
                assert_eq!(left.live_leases(), 0);
                let memory = memory();
                session = asleep.wake(&memory, || open(&memory)).unwrap();
            }
        }
        state(&session)
    };
    assert!(run(true) == run(false));
}
