//! Every form of moments, master weights and gradients: exact where it should be, as large as it should be, as good as
//! it should be.

use crate::common::side_by_side::side_by_side;
use crate::common::{DTYPES, odd_model, parameters, plan, session, step_batch};
use clap::Parser;
use data::{Dataset, Format, Options};
use kernels::Target;
use memory::{DType, GRANULARITY_BYTES, Memory};

use optim::{MasterFormat, MomentFormat};
use planner::OomReport;
use planner::Plan;
use session::SessionError;
use session::{Session, StepOutcome};
use settings::{Settings, StateFormats};
use trainer::cli::Cli;

const MOMENTS: [MomentFormat; 3] = [
    MomentFormat::F32,
    MomentFormat::Bf16,
    MomentFormat::Quantised,
];
const MASTERS: [MasterFormat; 4] = [
    MasterFormat::F32,
    MasterFormat::Remainder,
    MasterFormat::RemainderByte,
    MasterFormat::None,
];

/// The least memory: 6 bytes a parameter.
const SMALLEST: (MomentFormat, MasterFormat, DType) =
    (MomentFormat::Quantised, MasterFormat::None, DType::BF16);

fn states((moments, master, gradients): (MomentFormat, MasterFormat, DType)) -> StateFormats {
    StateFormats {
        moments,
        master,
        gradients,
        f32_patterns: Vec::new(),
    }
}

/// All forms for a type of weights; f32 weights are their own master.
fn forms(dtype: DType) -> Vec<StateFormats> {
    let masters = match dtype {
        DType::F32 => &MASTERS[..1],
        _ => &MASTERS[..],
    };
    let mut forms = Vec::new();
    for moments in MOMENTS {
        for master in masters {
            for gradients in DTYPES {
                forms.push(states((moments, *master, gradients)));
            }
        }
    }
    forms
}

/// Some matrices are below the size from which moments are quantised, and some above.
fn settings(dtype: DType, mode: &str, states: StateFormats) -> Settings {
    Settings {
        states,
        ..crate::common::settings(odd_model(3), dtype, mode)
    }
}

/// What a run computed, as bits.
#[derive(Clone, Debug, PartialEq)]
struct Bits {
    /// Loss and gradient norm of every step.
    steps: Vec<(u32, u32)>,
    weights: Vec<u32>,
}

fn bits_of(outcome: &StepOutcome) -> (u32, u32) {
    (outcome.loss.to_bits(), outcome.grad_norm.to_bits())
}

fn weights(session: &Session) -> Vec<u32> {
    let values = parameters(session).concat();
    values.into_iter().map(f32::to_bits).collect()
}

/// Steps on the batches with these numbers, and the last one's outcome.
fn run_steps(
    session: &mut Session,
    settings: &Settings,
    steps: std::ops::Range<usize>,
) -> (Bits, StepOutcome) {
    let outcomes: Vec<StepOutcome> = steps
        .map(|step| session.step(&step_batch(settings, step)).unwrap())
        .collect();
    let bits = Bits {
        steps: outcomes.iter().map(bits_of).collect(),
        weights: weights(session),
    };
    (bits, outcomes.into_iter().last().unwrap())
}

fn run(settings: &Settings, steps: usize) -> (Bits, StepOutcome) {
    run_steps(&mut session(settings), settings, 0..steps)
}

#[test]
fn a_split_master_is_an_f32_master_in_two_bytes_less_and_one_of_24_bits_takes_three_less() {
    for moments in MOMENTS {
        let [f32_master, split, byte, none] = MASTERS.map(|master| {
            let settings = settings(DType::BF16, "none", states((moments, master, DType::F32)));
            let (bits, outcome) = run(&settings, 50);
            (bits, outcome.memory.peak.bytes, plan(&settings))
        });
        let peaks = [none.1, byte.1, split.1, f32_master.1];
        assert!(peaks.is_sorted_by(|a, b| a < b), "{peaks:?}");
        let elements = session(&settings(DType::BF16, "none", StateFormats::default()))
            .model()
            .layout()
            .elements() as u64;
        for (one, bytes) in [(&split, 2), (&byte, 3), (&none, 4)] {
            let less = f32_master.2.persistent_bytes - one.2.persistent_bytes;
            assert_eq!(less, bytes * elements, "{moments:?}");
        }
        assert_eq!(f32_master.0.steps.len(), 50);
        assert!(f32_master.0 == split.0, "{moments:?}: the bits");
        assert!(f32_master.0 != none.0, "{moments:?}: a master shows");
        assert!(
            byte.0 != f32_master.0 && byte.0 != none.0,
            "{moments:?}: bits"
        );
    }
}

fn planned(arguments: &str) -> Plan {
    let arguments = ["trainer", "plan"].into_iter().chain(arguments.split(' '));
    let resolved = Cli::try_parse_from(arguments).unwrap().resolve().unwrap();
    let settings = Settings::new(&resolved.decided(resolved.config.data.seq)).unwrap();
    assert_eq!(settings.dtype, DType::BF16);
    Plan::new(&settings, Target::Cuda).unwrap()
}

#[test]
fn an_8b_model_takes_18_to_6_bytes_a_parameter() {
    let all = "--set optim.f32_states=[]";
    let cases = [
        ("18.00", "", all),
        ("14.00", "--state-dtype bf16", all),
        ("10.03", "--state-dtype 8bit --grad-dtype bf16", all),
        (
            "8.03",
            "--state-dtype 8bit --grad-dtype bf16 --master bf16-split",
            all,
        ),
        (
            "7.03",
            "--state-dtype 8bit --grad-dtype bf16 --master bf16+8",
            all,
        ),
        (
            "5.03",
            "--state-dtype 8bit --grad-dtype bf16 --master bf16+8 --accum 1 --set optim.release=backward --set optim.clip_norm=inf",
            all,
        ),
        (
            "6.03",
            "--state-dtype 8bit --grad-dtype bf16 --master none",
            all,
        ),
        // Embeddings keep f32 moments unless told otherwise.
        (
            "8.42",
            "--state-dtype 8bit --grad-dtype bf16 --master bf16-split",
            "--seed 0",
        ),
    ];
    for (expected, flags, patterns) in cases {
        let flags = format!("--config llama-3-8b {flags} {patterns}").replace("  ", " ");
        let plan = planned(&flags);
        assert_eq!(plan.parameters, 8_030_261_248);
        assert_eq!(
            format!("{:.2}", plan.bytes_per_parameter),
            expected,
            "{flags}"
        );
        let bytes: u64 = plan.arenas.iter().map(|arena| arena.bytes).sum();
        assert_eq!(
            bytes as f64 / plan.parameters as f64,
            plan.bytes_per_parameter
        );
    }
}

/// Whether two forms compute the same: only an exact master's format may not show.
fn compute_the_same(a: &StateFormats, b: &StateFormats) -> bool {
    let exact = |states: &StateFormats| match states.master {
        MasterFormat::Remainder => MasterFormat::F32,
        other => other,
    };
    (a.moments, exact(a), a.gradients) == (b.moments, exact(b), b.gradients)
}

#[test]
fn no_two_forms_compute_the_same() {
    for dtype in DTYPES {
        let found = side_by_side(forms(dtype), |form| {
            let bits = run(&settings(dtype, "none", form.clone()), 3).0;
            (form, bits)
        });
        for (index, (form, bits)) in found.iter().enumerate() {
            for (other, other_bits) in &found[..index] {
                let same = compute_the_same(form, other);
                assert_eq!(bits == other_bits, same, "{dtype:?} {form:?} {other:?}");
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same() {
    for dtype in DTYPES {
        let settings = settings(dtype, "full", states(SMALLEST));
        let [one, two, four] = [1, 2, 4].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| {
                let threads = rayon::current_num_threads();
                (threads, run(&settings, 10).0)
            })
        });
        assert_eq!([one.0, two.0, four.0], [1, 2, 4]);
        assert!(one.1 == two.1 && one.1 == four.1, "{dtype:?}");
    }
}

/// Another seed of stochastic rounding gives other bits, where anything is rounded stochastically.
#[test]
fn the_seed_shows_where_it_should() {
    for dtype in DTYPES {
        side_by_side(forms(dtype), |form| {
            let first = settings(dtype, "none", form.clone());
            let second = Settings {
                seed: first.seed + 1,
                ..first.clone()
            };
            let differs = run(&first, 3).0 != run(&second, 3).0;
            assert_eq!(
                differs,
                rounds_stochastically(dtype, &form),
                "{dtype:?} {form:?}"
            );
        });
    }
}

fn rounds_stochastically(dtype: DType, form: &StateFormats) -> bool {
    let weights = dtype == DType::BF16 && form.master == MasterFormat::None;
    weights || form.moments == MomentFormat::Bf16
}

/// What makes a step not finite.
#[derive(Clone, Copy, Debug)]
enum Bad {
    /// A weight of the last norm is no number: neither are loss and gradients.
    Nan,
    /// A weight of the head is enormous: the loss is, but the gradients' squares are above every f32.
    Huge,
}

/// Elements of two weights that tests break for a step: of the last norm and of the head.
fn breakable(session: &Session) -> [usize; 2] {
    let layout = session.model().layout();
    ["model.norm.weight", "lm_head.weight"].map(|name| {
        let index = layout.find(name).unwrap();
        layout.entries()[index].offset + 5
    })
}

/// Values that both weights get after a bad step, or in its place.
const MENDED: [f32; 2] = [1.1, 0.07];

fn mend(session: &mut Session) {
    for (offset, value) in breakable(session).into_iter().zip(MENDED) {
        session.incoming().set_values(offset, &[value]).unwrap();
    }
}

/// A step that must be skipped: it leaves the weights as they were.
fn bad_step(session: &mut Session, settings: &Settings, bad: Bad, batch: usize) {
    let [norm, head] = breakable(session);
    match bad {
        Bad::Nan => session.incoming().set_values(norm, &[f32::NAN]).unwrap(),
        Bad::Huge => session.incoming().set_values(head, &[3e20]).unwrap(),
    }
    let before = weights(session);
    let outcome = session.step(&step_batch(settings, batch)).unwrap();
    assert!(!outcome.is_finite(), "{bad:?}");
    assert!(!outcome.grad_norm.is_finite(), "{bad:?}");
    assert_eq!(
        outcome.loss.is_finite(),
        matches!(bad, Bad::Huge),
        "{bad:?}"
    );
    assert!(before == weights(session), "{bad:?}: weights");
}

/// Two good steps, perhaps a bad one, three more good ones. Without a bad one, the same weights are set by hand.
fn with_bad_step(settings: &Settings, bad: Option<(Bad, usize)>) -> [Bits; 2] {
    let mut session = session(settings);
    let (before, _) = run_steps(&mut session, settings, 0..2);
    mend(&mut session);
    if let Some((bad, batch)) = bad {
        bad_step(&mut session, settings, bad, batch);
        mend(&mut session);
    }
    let (after, _) = run_steps(&mut session, settings, 2..5);
    [before, after]
}

/// StateFormats show in the steps that follow, and so does the count of updates, in the bias corrections. Random numbers go by
/// the step, skipped or not: forms that use them are compared with a run that skipped another bad step.
#[test]
fn a_step_that_is_not_finite_changes_nothing() {
    for dtype in DTYPES {
        side_by_side(forms(dtype), |form| {
            let (settings, name) = (
                settings(dtype, "none", form.clone()),
                format!("{dtype:?} {form:?}"),
            );
            let nan = with_bad_step(&settings, Some((Bad::Nan, 50)));
            let huge = with_bad_step(&settings, Some((Bad::Huge, 60)));
            let never = with_bad_step(&settings, None);
            assert!(never[0] == nan[0] && never[0] == huge[0], "{name}");
            assert!(nan[1] == huge[1], "{name}: a skipped step shows");
            let by_step = rounds_stochastically(dtype, &form);
            assert_eq!(never[1] == nan[1], !by_step, "{name}");
            assert_ne!(never[1].steps[0], never[1].steps[1], "{name}: steps differ");
        });
    }
}

#[test]
fn smaller_states_are_among_the_fixes_and_fit() {
    for dtype in DTYPES {
        let config = crate::common::config(odd_model(3), dtype, "none");
        let settings = Settings::new(&config).unwrap();
        let limit = plan(&settings).peak_bytes - GRANULARITY_BYTES;
        let run = |settings: &Settings| {
            let memory = Memory::host();
            memory.set_limit(Some(limit));
            let mut session = Session::on_cpu(settings.clone(), &memory)?;
            session.initialise(7)?;
            let batch = step_batch(settings, 0);
            session
                .step(&batch)
                .map(|outcome| outcome.memory.peak.bytes)
        };
        let SessionError::OutOfMemory(error) = run(&settings).unwrap_err() else {
            panic!("out of memory")
        };
        let report = OomReport::new(&error, &config, Target::Cpu).unwrap();
        let has = |setting: &str, changes_math: bool| {
            let mut fixes = report.fixes.iter();
            fixes.any(|fix| {
                let last = fix.set.last().is_some_and(|last| last == setting);
                last && fix.changes_math == changes_math
            })
        };
        for (master, changes_math) in [("bf16-split", false), ("bf16+8", true)] {
            let set = format!("optim.master={master}");
            assert_eq!(has(&set, changes_math), dtype == DType::BF16, "{set}");
        }
        assert!(has("optim.state_dtype=8bit", true), "{:?}", report.fixes);
        // Beside f32 weights, the workspace in which bf16 products are widened is larger than this model's gradients.
        assert_eq!(has("optim.grad_dtype=bf16", true), dtype == DType::BF16);
        for fix in &report.fixes {
            let fixed = crate::common::fixed(&config, fix, limit);
            let peak = run(&fixed).unwrap_or_else(|failure| panic!("{fix:?}: {failure}"));
            assert_eq!(peak, fix.peak_bytes, "{fix:?}");
            let alone = fix.set == ["optim.master=bf16-split"];
            assert!(!alone || !fix.changes_math);
        }
    }
}

/// Lower than the preset's: at that, `tiny` knows its text by heart after 300 steps, and its loss is so sensitive that a
/// learning rate 0.01 % higher changes it by up to 3.6 % (`benches/results/2026-11-21-optimizer-states.md`).
const LEARNING_RATE: &str = "5e-4";

/// The mean of the last 30 of 300 losses of the preset `tiny`, on its own data, a micro-batch a step: with that the forms lie
/// within 0.2 % of one another.
fn final_loss(dtype: &str, states: StateFormats) -> f64 {
    let arguments = [
        "trainer",
        "--steps",
        "300",
        "--lr",
        LEARNING_RATE,
        "--accum",
        "1",
        "--dtype",
        dtype,
    ];
    let resolved = Cli::try_parse_from(arguments).unwrap().resolve().unwrap();
    let seq = resolved.config.data.seq;
    let settings = Settings {
        states,
        ..Settings::new(&resolved.decided(seq)).unwrap()
    };
    let dataset = Dataset::open(&Options {
        path: None,
        format: Format::Auto,
        seq: Some(seq),
        micro_batch: settings.micro_batch,
        accum: settings.accum,
        shuffle: resolved.config.data.shuffle,
        seed: resolved.config.train.seed,
        vocab: settings.model.vocab,
        packing: data::Packing::Concatenate,
        pairs: false,
        split: data::Split::Train,
        tails: false,
    });
    let mut batches = dataset.unwrap().batches();
    let mut session = session(&settings);
    let losses: Vec<f64> = (0..300)
        .map(|_| f64::from(session.step(&batches.next_step().unwrap()).unwrap().loss))
        .collect();
    assert!(losses[0] > 5.3, "{}", losses[0]);
    losses[270..].iter().sum::<f64>() / 30.0
}

/// The most different of the forms; `benches/results` has all, with more seeds.
#[test]
fn forms_learn_as_well_as_f32() {
    use MasterFormat::{F32, Remainder};
    use MomentFormat::{Bf16, Quantised};
    let forms = [
        ("f32", StateFormats::default()),
        ("f32", states((Quantised, F32, DType::F32))),
        ("f32", states((Bf16, F32, DType::F32))),
        ("bf16", states((Quantised, Remainder, DType::BF16))),
        ("bf16", states(SMALLEST)),
    ];
    let losses = side_by_side(&forms, |(dtype, form)| final_loss(dtype, form.clone()));
    let reference = losses[0];
    assert!((2.0..2.4).contains(&reference), "{reference}");
    for ((dtype, form), loss) in forms.iter().zip(losses).skip(1) {
        let off = loss / reference - 1.0;
        println!(
            "{dtype} weights, {form:?}: {loss:.4}, {:+.2} %",
            100.0 * off
        );
        assert_ne!(loss, reference);
        assert!(
            off.abs() < 0.01,
            "{dtype} {form:?}: {loss} beside {reference}"
        );
    }
}
