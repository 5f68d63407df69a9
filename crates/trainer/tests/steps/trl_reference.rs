//! Five steps of preferences against Hugging Face's TRL (`benches/peers/trl_reference.py` wrote `tests/golden/trl`).

use crate::common::golden::Golden;
use data::{BesideTargets, MASKED, MicroBatch, StepBatch};
use memory::{DType, Memory};
use model::{AdapterConfig, Lora, Policy};
use serde_json::Value;
use session::{Inference, Session, SessionError};
use settings::{BaseStorage, LoraConfig, Settings, StepObjective};
use std::collections::BTreeMap;
use std::path::Path;

/// The adapters of a folder.
fn adapters(folder: &Path) -> Lora {
    let adapter = AdapterConfig::read(folder).unwrap();
    let lora = LoraConfig::default()
        .adopted(adapter, BaseStorage::default())
        .unwrap();
    lora.adapters().unwrap().unwrap()
}

/// A row of `seq` tokens: a prompt, and an answer whose tokens are the targets.
fn row(pair: &Value, answer: &str, seq: usize) -> (Vec<i32>, Vec<i32>) {
    let ids = |key: &str| serde_json::from_value::<Vec<i32>>(pair[key].clone()).unwrap();
    let (prompt, answer) = (ids("prompt_ids"), ids(answer));
    let mut targets = vec![MASKED; prompt.len() - 1];
    targets.extend(&answer);
    let mut tokens = [prompt, answer].concat();
    tokens.pop();
    tokens.resize(seq, 0);
    targets.resize(seq, MASKED);
    (tokens, targets)
}

/// The reference's steps, a row for each answer.
fn batches(reference: &Value, settings: &Settings) -> Vec<StepBatch> {
    let pairs = reference["pairs"].as_array().unwrap();
    let micro = pairs.chunks(settings.micro_batch / 2).map(|pairs| {
        let rows = pairs.iter().flat_map(|pair| {
            let answers = ["chosen_ids", "rejected_ids"];
            answers.map(|answer| row(pair, answer, settings.seq))
        });
        let (input_ids, targets): (Vec<_>, Vec<_>) = rows.unzip();
        MicroBatch {
            input_ids: input_ids.concat(),
            targets: targets.concat(),
            rows: settings.micro_batch,
            seq: settings.seq,
            part: memory::Rank::ALONE,
            documents: None,
            lengths: None,
            beside: None,
        }
    });
    let micro: Vec<MicroBatch> = micro.collect();
    let steps = micro.chunks(settings.accum);
    steps.map(|step| step.iter().cloned().collect()).collect()
}

fn number(step: &Value, key: &str) -> f64 {
    step[key].as_f64().unwrap()
}

/// The largest relative error of losses and gradient norms, and the largest absolute one of rewards.
fn errors(session: &mut Session, batches: &[StepBatch], expected: &Value) -> [f64; 2] {
    let (mut relative, mut absolute) = (0f64, 0f64);
    for (batch, expected) in batches.iter().zip(expected.as_array().unwrap()) {
        let made = session.step(batch).unwrap();
        for (own, key) in [(made.loss, "loss"), (made.grad_norm, "grad_norm")] {
            let theirs = number(expected, key);
            relative = relative.max((f64::from(own) / theirs - 1.0).abs());
        }
        let rewards = made.rewards.unwrap();
        assert_eq!(
            rewards.margin,
            (f64::from(rewards.chosen) - f64::from(rewards.rejected)) as f32
        );
        for (own, key) in [
            (rewards.chosen, "rewards_chosen"),
            (rewards.rejected, "rewards_rejected"),
            (rewards.accuracy, "rewards_accuracy"),
        ] {
            absolute = absolute.max((f64::from(own) - number(expected, key)).abs());
        }
    }
    [relative, absolute]
}

fn reference() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/trl/reference.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn settings(golden: &Golden, reference: &Value) -> Settings {
    Settings {
        objective: StepObjective::Preferences {
            beta: number(reference, "beta") as f32,
            has_reference: false,
        },
        micro_batch: 2 * reference["pairs_of_micro_batch"].as_u64().unwrap() as usize,
        accum: reference["accum"].as_u64().unwrap() as usize,
        ..golden.settings(DType::F32, "none")
    }
}

/// With other factors on rewards, the figures are others.
#[test]
fn adapters_agree_with_trl() {
    let (golden, reference) = (Golden::open("transformers/llama"), reference());
    let start = golden.folder.join("../../peft/llama/start");
    let plain = settings(&golden, &reference);
    let labels = plain.model.labels().with_lora();
    for (mode, head_chunk, beta) in [
        ("none", 40, 1.0),
        ("lora,layernorm", 7, 1.0),
        ("none", 40, 1.01),
    ] {
        let layers = plain.model.layers;
        let policy = Policy::with_layers(labels, mode, &BTreeMap::new(), layers).unwrap();
        let settings = Settings {
            lora: Some(adapters(&start)),
            objective: StepObjective::Preferences {
                beta: number(&reference, "beta") as f32 * beta,
                has_reference: false,
            },
            policy,
            head_chunk,
            ..plain.clone()
        };
        let mut session = golden.session(&settings);
        session.incoming().import_adapter(&start).unwrap();
        let batches = batches(&reference, &settings);
        let [relative, absolute] = errors(&mut session, &batches, &reference["adapter"]);
        let is_near = relative < 1e-5 && absolute < 1e-5;
        assert_eq!(is_near, beta == 1.0, "{mode}: {relative:e}, {absolute:e}");
    }
}

#[test]
fn a_whole_model_agrees_with_trl() {
    let (golden, reference) = (Golden::open("transformers/llama"), reference());
    let settings = settings(&golden, &reference);
    let settings = Settings {
        objective: settings.objective.with_reference(),
        ..settings
    };
    let mut batches = batches(&reference, &settings);
    let mut first = Inference::on_cpu(&settings, &Memory::host()).unwrap();
    first.incoming().import(&golden.folder).unwrap();
    for micro in batches.iter_mut().flat_map(|step| &mut step.micro) {
        let one = std::iter::once(Ok::<_, SessionError>(micro.clone()));
        let (losses, _) = first.forward().sequence_losses(one).unwrap();
        micro.beside = Some(BesideTargets::Reference(losses));
    }
    let mut session = golden.session(&settings);
    let [relative, absolute] = errors(&mut session, &batches, &reference["whole"]);
    assert!(
        relative < 1e-5 && absolute < 1e-5,
        "{relative:e}, {absolute:e}"
    );
}
