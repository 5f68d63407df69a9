//! Steps on a policy gradient against TRL's formulas (`benches/peers/policy_reference.py` wrote `tests/golden/policy`), in all forms of a
//! step, and what they refuse.

use crate::common::{DTYPES, config, session, variants};
use data::{BesideTargets, PolicyTargets};
use kernels::Target;
use memory::Memory;
use planner::{InferencePlan, Plan};
use serde::Deserialize;
use session::{Inference, SessionError, shape_of_a_micro_batch, shape_of_a_step};
use settings::{Objective, Settings};
use std::path::{Path, PathBuf};
use trainer::{
    PolicyBatch, PolicyLoss, PolicyLossKind, PolicyNumbers, TokenRows, Trainer, WhichModel,
};

#[derive(Deserialize)]
struct Reference {
    clip_low: f32,
    clip_high: f32,
    longest: usize,
    rows: usize,
    seq: usize,
    /// By step and row, as what follows; advantages have one for a row.
    ids: Vec<Vec<Vec<i64>>>,
    targets: Vec<Vec<Vec<i64>>>,
    advantages: Vec<Vec<f32>>,
    old: Vec<Vec<Vec<f32>>>,
    began: Vec<Vec<Vec<f32>>>,
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    kind: String,
    beta: f32,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    loss: f64,
    grad_norm: f64,
    kl: f64,
    clip_share: f64,
}

/// A step's rows, one after the other.
struct Rows {
    tokens: TokenRows,
    advantages: Vec<f32>,
    old: Vec<f32>,
    began: Vec<f32>,
}

impl Rows {
    fn batch(&self) -> PolicyBatch<'_> {
        PolicyBatch {
            rows: &self.tokens,
            advantages: &self.advantages,
            old: &self.old,
            reference: Some(&self.began),
        }
    }
}

impl Reference {
    fn open() -> Reference {
        let path = golden("policy/reference.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn step(&self, step: usize) -> Rows {
        let each = |advantage: &f32| vec![*advantage; self.seq];
        Rows {
            tokens: TokenRows {
                dims: [self.rows, self.seq],
                ids: self.ids[step].concat(),
                targets: self.targets[step].concat(),
                positions: None,
            },
            advantages: self.advantages[step].iter().flat_map(each).collect(),
            old: self.old[step].concat(),
            began: self.began[step].concat(),
        }
    }

    fn loss(&self, run: &Run) -> PolicyLoss {
        PolicyLoss {
            kind: match &run.kind[..] {
                "grpo" => PolicyLossKind::Grpo,
                "dr_grpo" => PolicyLossKind::DrGrpo {
                    longest: self.longest,
                },
                "gspo" => PolicyLossKind::Gspo,
                "ppo" => PolicyLossKind::Ppo,
                other => panic!("{other} is no loss"),
            },
            clip_low: self.clip_low,
            clip_high: self.clip_high,
            beta: run.beta,
        }
    }

    /// The model of the reference, with so many rows in a micro-batch.
    fn trainer(&self, micro: usize, more: &[&str]) -> Trainer {
        let (seq, micro, accum) = (
            format!("data.seq={}", self.seq),
            format!("batch.micro={micro}"),
            format!("batch.accum={}", self.rows / micro),
        );
        let set = [&SET[..], &[&seq, &micro, &accum], more].concat();
        Trainer::from_pretrained(golden("transformers/llama"), &set).unwrap()
    }
}

/// The optimizer of the reference.
const SET: [&str; 11] = [
    "train.objective=policy",
    "train.device=cpu",
    "train.dtype=f32",
    "lr.peak=1e-3",
    "lr.schedule=constant",
    "lr.warmup_steps=0",
    "optim.beta2=0.95",
    "optim.eps=1e-8",
    "optim.weight_decay=0.1",
    "optim.clip_norm=1.0",
    "memory.head_chunk=7",
];

fn golden(path: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    folder.join("tests/golden").join(path)
}

/// The largest error of losses and of gradient norms, relative to their largest; and that of means over targets, absolute.
fn errors(made: &[(f32, f32, PolicyNumbers)], expected: &[Step]) -> [f64; 3] {
    let largest = |of: &dyn Fn(&Step) -> f64| {
        expected
            .iter()
            .map(of)
            .fold(0.0, |a: f64, b| a.max(b.abs()))
    };
    let losses = largest(&|step| step.loss);
    let mut errors = [0f64; 3];
    for ((loss, norm, numbers), step) in made.iter().zip(expected) {
        let apart = |own: f32, theirs: f64| (f64::from(own) - theirs).abs();
        let means = apart(numbers.kl, step.kl).max(apart(numbers.clip_share, step.clip_share));
        let of_step = [
            apart(*loss, step.loss) / losses,
            apart(*norm, step.grad_norm) / step.grad_norm,
            means,
        ];
        for (error, of_step) in errors.iter_mut().zip(of_step) {
            *error = error.max(of_step);
        }
    }
    errors
}

/// The steps of a run, each with the peak that was planned.
fn made(reference: &Reference, run: &Run, trainer: &mut Trainer) -> Vec<(f32, f32, PolicyNumbers)> {
    let steps = (0..run.steps.len()).map(|step| {
        let rows = reference.step(step);
        let outcome = trainer
            .policy_step(&rows.batch(), &reference.loss(run))
            .unwrap();
        assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
        (outcome.loss, outcome.grad_norm, outcome.policy.unwrap())
    });
    steps.collect()
}

/// Each loss clips some targets, and others not. Whatever is recomputed or offloaded, the bits are the same.
#[test]
fn five_steps_agree_with_trl() {
    let reference = Reference::open();
    for run in &reference.runs {
        let clips = run.steps.iter().map(|step| step.clip_share);
        assert!(clips.sum::<f64>() > 0.1, "{}", run.kind);
        let of = |micro: usize, form: &[&str]| {
            let mut trainer = reference.trainer(micro, form);
            made(&reference, run, &mut trainer)
        };
        let kept = of(2, &["recompute.spec=none"]);
        for made in [&kept, &of(4, &["recompute.spec=none"])] {
            let errors = errors(made, &run.steps);
            println!("{} {}: {errors:?}", run.kind, run.beta);
            assert!(
                errors.iter().all(|error| *error < 1e-5),
                "{} {}: {errors:?}",
                run.kind,
                run.beta
            );
        }
        let elsewhere = [
            "recompute.spec=core_attn",
            "offload.parameters=pinned",
            "offload.optimizer=pinned",
        ];
        for form in [&["recompute.spec=full"][..], &elsewhere] {
            assert_eq!(kept, of(2, form), "{} {form:?}", run.kind);
        }
    }
}

/// Those of the model as it began, in micro-batches of other sizes too.
#[test]
fn log_probabilities_agree_with_transformers() {
    let reference = Reference::open();
    for micro in [1, 4] {
        let mut trainer = reference.trainer(micro, &[]);
        for step in 0..reference.ids.len() {
            let rows = reference.step(step);
            let made = trainer
                .log_probs(&rows.tokens, WhichModel::Trained)
                .unwrap();
            for ((made, expected), target) in made.iter().zip(&rows.began).zip(&rows.tokens.targets)
            {
                assert!((made - expected).abs() < 1e-5, "{made} beside {expected}");
                assert!(*target >= 0 || *made == 0.0);
            }
        }
    }
}

/// Without a reference of its own, a batch has that of the model under the adapters: the same bits as if it were passed. Nothing is
/// dropped out.
#[test]
fn the_model_under_adapters_is_the_reference() {
    let reference = Reference::open();
    let dropouts = ["lora.dropout=0.5", "lora.dropout=0.0"];
    let [mut passed, mut left_out] =
        dropouts.map(|dropout| reference.trainer(2, &["lora.rank=3", dropout]));
    let loss = PolicyLoss {
        kind: PolicyLossKind::Grpo,
        clip_low: 0.2,
        clip_high: 0.2,
        beta: 0.3,
    };
    for step in 0..3 {
        let rows = reference.step(step);
        let under = WhichModel::Reference;
        let began = passed.log_probs(&rows.tokens, under).unwrap();
        let apart = began
            .iter()
            .zip(&rows.began)
            .map(|(own, theirs)| (own - theirs).abs());
        assert!(apart.fold(0.0, f32::max) < 1e-5);
        let [passed, left_out] =
            [(&mut passed, Some(&began[..])), (&mut left_out, None)].map(|(trainer, reference)| {
                let batch = PolicyBatch {
                    reference,
                    ..rows.batch()
                };
                let outcome = trainer.policy_step(&batch, &loss).unwrap();
                (outcome.loss, outcome.grad_norm, outcome.policy.unwrap())
            });
        assert_eq!(passed, left_out);
        // Fresh adapters add nothing.
        assert_eq!(passed.2.kl == 0.0, step == 0);
    }
}

/// What is planned between steps is what log-probabilities take, of either model, to the byte; so is an evaluation without a session.
#[test]
fn log_probabilities_take_what_is_planned() {
    for variant in [0, 3] {
        for dtype in DTYPES {
            let mut config = config(variants(2)[variant].1.clone(), dtype, "full");
            config.train.objective = Objective::Policy;
            config.lora.rank = Some(3);
            let settings = Settings::new(&config).unwrap();
            let plan = Plan::new(&settings, Target::Cpu).unwrap();
            let mut session = session(&settings);
            let outcome = session
                .step(&shape_of_a_step(&settings, settings.seq))
                .unwrap();
            assert_eq!(outcome.memory.peak.bytes, plan.peak_bytes);
            let micro = || {
                let micro = shape_of_a_micro_batch(&settings, settings.micro_batch, settings.seq);
                std::iter::once(Ok::<_, SessionError>(micro))
            };
            session.memory().begin_step();
            let mut forward = session.forward().unwrap();
            forward
                .token_losses(WhichModel::Reference, micro())
                .unwrap();
            let (losses, peak) = forward.token_losses(WhichModel::Trained, micro()).unwrap();
            assert_eq!(losses.len(), settings.micro_batch * settings.seq);
            assert_eq!(Some(peak), plan.eval_peak_bytes);
            let planned =
                InferencePlan::of_evaluation(&settings, Target::Cpu, settings.micro_batch).unwrap();
            let mut alone = Inference::on_cpu(&settings, &Memory::host()).unwrap();
            alone.memory().begin_step();
            let (_, peak) = alone
                .forward()
                .token_losses(WhichModel::Trained, micro())
                .unwrap();
            assert_eq!(peak, planned.peak_bytes);
        }
    }
}

/// Numbers that are masked are never read.
#[test]
fn masked_numbers_change_nothing() {
    let mut config = config(variants(2)[0].1.clone(), DTYPES[0], "none");
    config.train.objective = Objective::Policy;
    let settings = Settings::new(&config).unwrap();
    let steps = [0.0, f32::NAN].map(|masked| {
        let mut micro = shape_of_a_micro_batch(&settings, settings.micro_batch, settings.seq);
        let counts = |at: usize| at % 3 == 1;
        let of = |counted: f32| {
            (0..micro.targets.len())
                .map(|at| if counts(at) { counted } else { masked })
                .collect()
        };
        let policy = PolicyTargets {
            old: of(-4.0),
            reference: Some(of(-4.1)),
            advantages: of(0.7),
            weights: (0..micro.targets.len())
                .map(|at| if counts(at) { 0.01 } else { 0.0 })
                .collect(),
            clip_low: 0.2,
            clip_high: 0.2,
            beta: 0.1,
            by_sequence: false,
        };
        micro.beside = Some(BesideTargets::Policy(policy));
        let step = [micro.clone(), micro].into_iter().collect();
        let outcome = session(&settings).step(&step).unwrap();
        (outcome.loss, outcome.grad_norm, outcome.policy.unwrap())
    });
    assert_eq!(steps[0], steps[1]);
    assert!(steps[0].0.is_finite() && steps[0].1 > 0.0);
}

#[test]
fn what_no_step_can_learn_from_is_refused() {
    let reference = Reference::open();
    let (mut trainer, rows) = (reference.trainer(2, &[]), reference.step(0));
    let loss = reference.loss(&reference.runs[1]);
    let counted = rows.tokens.targets.iter();
    let counted = counted.clone().position(|target| *target >= 0).unwrap();
    let with = |value: f32| {
        let mut numbers = rows.old.clone();
        numbers[counted] = value;
        numbers
    };
    let [infinite, few] = [with(f32::INFINITY), vec![0.0; 3]];
    let tokens = |change: &dyn Fn(&mut TokenRows)| {
        let mut tokens = rows.tokens.clone();
        change(&mut tokens);
        tokens
    };
    let none = tokens(&|tokens| tokens.targets.fill(-100));
    let beyond = tokens(&|tokens| tokens.ids.fill(99));
    let long = tokens(&|tokens| tokens.dims = [2, 2 * tokens.dims[1]]);
    let fewer = tokens(&|tokens| tokens.targets.truncate(5));
    let batch = rows.batch();
    let nan = PolicyLoss {
        clip_low: f32::NAN,
        ..loss
    };
    let longest = PolicyLoss {
        kind: PolicyLossKind::DrGrpo { longest: 0 },
        ..loss
    };
    let of = |rows| PolicyBatch { rows, ..batch };
    for (batch, loss, message) in [
        (
            PolicyBatch {
                old: &infinite,
                ..batch
            },
            loss,
            "`old` at [0, ",
        ),
        (
            PolicyBatch {
                advantages: &infinite,
                ..batch
            },
            loss,
            "`advantages` at [0, ",
        ),
        (
            PolicyBatch {
                reference: Some(&infinite),
                ..batch
            },
            loss,
            "`reference` at [0, ",
        ),
        (PolicyBatch { old: &few, ..batch }, loss, "3 `old`"),
        (of(&none), loss, "all `targets` are -100"),
        (of(&beyond), loss, "`ids` at [0, 0] is 99"),
        (of(&long), loss, "1 to 19 tokens"),
        (of(&fewer), loss, "each token has one"),
        (
            PolicyBatch {
                reference: None,
                ..batch
            },
            loss,
            "there is no `reference`",
        ),
        (batch, nan, "`clip_low` is NaN"),
        (batch, longest, "the most targets of a row are 0"),
    ] {
        let error = trainer.policy_step(&batch, &loss).unwrap_err().to_string();
        assert!(error.contains(message), "{message}: {error}");
    }
    let error = trainer.log_probs(&rows.tokens, WhichModel::Reference);
    assert!(error.unwrap_err().to_string().contains("has no adapters"));
    let error = reference
        .trainer(2, &["train.objective=next-token"])
        .policy_step(&batch, &loss);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("train.objective is next-token")
    );
    let ids =
        candle_core::Tensor::zeros((4, 19), candle_core::DType::I64, &candle_core::Device::Cpu)
            .unwrap();
    let error = trainer.step(&ids, &ids).unwrap_err().to_string();
    assert!(error.contains("take policy_step"), "{error}");
    // The refused ones left nothing behind.
    assert_eq!(trainer.policy_step(&batch, &loss).unwrap().step, 1);
}
