//! A trainer that sleeps between steps: the same bits and bytes as without, and nothing held meanwhile.

use crate::common::elsewhere::{all_pinned, state, with_form};
use crate::common::experts::deepseek;
use crate::common::{assert_as_planned, odd_model, plan, session, step_batch};
use crate::library::{batch, config, refusal, trainer};
use candle_core::{DType, Tensor};
use memory::Memory;
use model::ModelConfig;
use optim::{MasterFormat, MomentFormat};
use session::{Asleep, Session, SessionError, StepOutcome};
use settings::Settings;
use std::collections::BTreeMap;
use trainer::{SleepLevel, Trainer, configuration};

const STEPS: usize = 4;

/// Wide enough for matrices of codes, for blocks of 8-bit moments, and for products in FP8.
const WIDE: [&str; 3] = ["model.hidden=64", "model.ffn=112", "model.head_dim=16"];

/// A small model of GLM's, whose routers have biases.
const EXPERTS: [&str; 17] = [
    "train.device=cpu",
    "train.dtype=f32",
    "model.vocab=23",
    "model.hidden=32",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_dim=8",
    "model.ffn=40",
    "model.experts.count=4",
    "model.experts.chosen=2",
    "model.experts.ffn=16",
    "model.experts.shared_ffn=16",
    "optim.router_bias_rate=0.01",
    "data.seq=8",
    "batch.micro=2",
    "batch.accum=2",
];

/// What trainers hold across steps, in all its forms.
const FORMS: [(&str, &[&str]); 7] = [
    ("AdamW", &[]),
    (
        "8-bit states on the host",
        &["optim.state_dtype=8bit", "offload.optimizer=pinned"],
    ),
    (
        "everything on the host",
        &[
            "offload.optimizer=pinned",
            "offload.parameters=pinned",
            "offload.gradients=pinned",
        ],
    ),
    (
        "bf16 with a master, in FP8",
        &["train.dtype=bf16", "optim.master=f32", "fp8.recipe=tensor"],
    ),
    ("Muon", &["optim.kind=muon"]),
    (
        "adapters on NF4",
        &["lora.rank=2", "lora.base_dtype=nf4", "model.ffn=128"],
    ),
    (
        "gradients released",
        &[
            "optim.release=backward",
            "optim.clip_norm=inf",
            "batch.micro=4",
            "batch.accum=1",
        ],
    ),
];

/// Everything that can be read from a trainer, as numbers.
fn everything(trainer: &Trainer) -> BTreeMap<String, Vec<f64>> {
    let numbers = |tensor: &Tensor| {
        let flat = tensor.flatten_all().unwrap().to_dtype(DType::F64);
        flat.unwrap().to_vec1().unwrap()
    };
    let names: Vec<String> = trainer.parameter_names().map(Into::into).collect();
    let mut all = BTreeMap::new();
    for name in names {
        for (state, tensor) in trainer.states(&name).unwrap() {
            all.insert(format!("{name}.{state}"), numbers(&tensor));
        }
        if let Ok(gradient) = trainer.gradient(&name) {
            all.insert(format!("{name}.gradient"), numbers(&gradient));
        }
        all.insert(name.clone(), numbers(&trainer.parameter(&name).unwrap()));
    }
    all
}

fn assert_same_step(name: &str, slept: &StepOutcome, awake: &StepOutcome) {
    let bits = |outcome: &StepOutcome| {
        (
            outcome.step,
            outcome.loss.to_bits(),
            outcome.grad_norm.to_bits(),
        )
    };
    assert_eq!(bits(slept), bits(awake), "{name}");
    let (memory, planned) = (&slept.memory, &awake.memory);
    assert_eq!(memory.peak, planned.peak, "{name}");
    assert_eq!(memory.phase_peaks, planned.phase_peaks, "{name}");
    assert_eq!(
        memory.host_pinned_bytes, planned.host_pinned_bytes,
        "{name}"
    );
    assert_eq!(slept.traffic, awake.traffic, "{name}");
}

#[test]
fn steps_have_the_same_bits_and_bytes_with_a_sleep_after_each() {
    let experts = configuration("glm-4.5-air", &EXPERTS).unwrap();
    let dense = FORMS.map(|(name, set)| (name, config(&[&WIDE, set].concat())));
    for (name, config) in dense.into_iter().chain([("experts", experts)]) {
        let [mut slept, mut awake] = [(); 2].map(|()| Trainer::new(config.clone()).unwrap());
        let (ids, targets) = batch();
        for _ in 0..STEPS {
            let outcomes = [&mut slept, &mut awake].map(|one| one.step(&ids, &targets).unwrap());
            assert_same_step(name, &outcomes[0], &outcomes[1]);
            assert_eq!(outcomes[0].memory.peak.bytes, slept.plan().peak_bytes);
            assert!(everything(&slept) == everything(&awake), "{name}");
            let handed = slept.sleep(SleepLevel::Keep).unwrap();
            assert_eq!(handed.given_back_bytes, slept.plan().reserved_bytes);
            assert_eq!((handed.held_bytes, handed.device_used_bytes), (0, None));
            assert!(handed.kept_on_host_bytes > slept.plan().host_pinned_bytes);
            slept.wake().unwrap();
            let losses = [&mut slept, &mut awake].map(|one| one.loss(&ids, &targets).unwrap());
            assert_eq!(losses[0].to_bits(), losses[1].to_bits(), "{name}");
        }
    }
}

#[test]
fn a_sleeping_trainer_says_so_and_wakes() {
    let mut trainer = trainer(&[]);
    let (ids, targets) = batch();
    trainer.step(&ids, &targets).unwrap();
    let names: Vec<String> = trainer.parameter_names().map(Into::into).collect();
    trainer.wake().unwrap();
    trainer.sleep(SleepLevel::Keep).unwrap();
    let says = ["the trainer sleeps", "wake()"];
    refusal(trainer.step(&ids, &targets), &says);
    refusal(trainer.loss(&ids, &targets), &says);
    refusal(trainer.parameter(&names[0]), &says);
    refusal(trainer.gradient(&names[0]), &says);
    refusal(trainer.states(&names[0]), &says);
    refusal(trainer.set_parameter(&names[0], &ids), &says);
    let folder = tempfile::tempdir().unwrap();
    refusal(trainer.save(folder.path().join("model")), &says);
    refusal(trainer.sleep(SleepLevel::Keep), &says);
    assert_eq!(trainer.parameter_names().collect::<Vec<_>>(), names);
    assert_eq!(trainer.config().data.seq, 8);
    trainer.wake().unwrap();
    assert_eq!(trainer.step(&ids, &targets).unwrap().step, 2);
}

#[test]
fn states_on_a_disk_keep_a_trainer_awake() {
    let folder = tempfile::tempdir().unwrap();
    let home = format!("offload.optimizer={}", folder.path().display());
    let mut trainer = trainer(&[&home]);
    let (ids, targets) = batch();
    trainer.step(&ids, &targets).unwrap();
    let before = everything(&trainer);
    refusal(
        trainer.sleep(SleepLevel::Keep),
        &["scratch file", "offload.optimizer=pinned"],
    );
    assert!(everything(&trainer) == before);
    assert_eq!(trainer.step(&ids, &targets).unwrap().step, 2);
}

/// Sessions in which something is on the device and something on the host.
fn mixed() -> [(&'static str, Settings); 2] {
    let of = |model: ModelConfig| Settings {
        homes: all_pinned(),
        router_bias_rate: 0.01,
        ..with_form(
            model,
            (
                memory::DType::BF16,
                MomentFormat::Quantised,
                MasterFormat::Remainder,
            ),
            "none",
            memory::DType::F32,
        )
    };
    [("dense", of(odd_model(2))), ("experts", of(deepseek()))]
}

fn asleep(session: Session) -> Asleep {
    let mut session = session;
    session.fall_asleep().unwrap()
}

/// Wakes a session in a memory that may refuse some lease.
fn wake(
    asleep: &Asleep,
    settings: &Settings,
    change: impl FnOnce(&Memory),
) -> Result<Session, SessionError> {
    let memory = Memory::host();
    change(&memory);
    let woken = asleep.wake(&memory, || {
        let session = Session::on_cpu(settings.clone(), &memory)?;
        memory.reserve_slab(plan(settings).slab_bytes)?;
        Ok(session)
    });
    if woken.is_err() {
        assert_eq!(memory.live_leases(), 0, "what was leased is given back");
    }
    woken
}

#[test]
fn a_refused_waking_keeps_everything() {
    for (name, settings) in mixed() {
        let mut reference = session(&settings);
        let mut slept = session(&settings);
        for one in [&mut reference, &mut slept] {
            one.step(&step_batch(&settings, 0)).unwrap();
        }
        let before = state(&reference);
        assert!(before == state(&slept), "{name}");
        let asleep = asleep(slept);
        let kept = asleep.bytes();
        // The session, unless it is refused.
        let granted = |woken: Result<Session, SessionError>| match woken {
            Ok(session) => Some(session),
            Err(SessionError::OutOfMemory(error)) => {
                assert!(!error.name.is_empty() && asleep.bytes() == kept, "{error}");
                None
            }
            Err(other) => panic!("{name}: {other}"),
        };
        let limit = plan(&settings).persistent_bytes - 1;
        let limited = wake(&asleep, &settings, |memory| memory.set_limit(Some(limit)));
        assert!(granted(limited).is_none(), "{name}");
        let mut leases = 0;
        let mut woken = loop {
            let woken = wake(&asleep, &settings, |memory| memory.refuse_after(leases));
            if let Some(session) = granted(woken) {
                break session;
            }
            leases += 1;
        };
        assert!(leases > 10, "{name}: {leases} leases");
        assert_eq!(asleep.bytes(), 0, "the session has everything");
        // Not to be refused in the next step.
        woken.memory().refuse_after(usize::MAX);
        assert!(before == state(&woken), "{name}");
        assert_eq!(woken.progress(), (1, 1));
        for one in [&mut reference, &mut woken] {
            let outcome = one.step(&step_batch(&settings, 1)).unwrap();
            assert_as_planned(name, &plan(&settings), &outcome);
        }
        assert!(state(&reference) == state(&woken), "{name}");
    }
}
