//! Five steps of adapters against Hugging Face's PEFT (`benches/peers/peft_reference.py` wrote `tests/golden/peft`), and folders that
//! transformers saved in NF4 (`benches/peers/quantised_folders.py` wrote `tests/golden/quantised`).

use crate::common::golden::{Golden, reference_steps, tensors};
use memory::{Codes, DType, Memory};
use model::{ADAPTER_CONFIG, AdapterConfig, Fresh, Lora, Parameters, Policy, Quantisation};
use optim::{Faster, Hyperparameters};
use session::Session;
use settings::{BaseStorage, LoraConfig, Settings};
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

/// Which layers have adapters, with rank and scale, in the words of a folder that the trainer writes and reads again.
fn written_and_read(lora: &Lora, parameters: &Parameters) -> Lora {
    let folder = tempfile::tempdir().unwrap();
    let text = AdapterConfig::text(lora, parameters, "base");
    std::fs::write(folder.path().join(ADAPTER_CONFIG), text).unwrap();
    assert_eq!(AdapterConfig::read(folder.path()).unwrap().base, "base");
    adapters(folder.path())
}

#[test]
fn adapters_agree_with_peft() {
    for family in [
        "llama",
        "qwen3",
        "gpt2",
        "llama-nf4",
        "llama-plus",
        "deepseek_v2",
        "deepseek_v3",
        "mixtral",
    ] {
        let (base, kind) = family.split_once('-').unwrap_or((family, ""));
        let golden = Golden::open(&format!("transformers/{base}"));
        let peft = golden.folder.join("../../peft").join(family);
        let start = peft.join("start");
        for mode in ["none", "lora,layernorm"] {
            let settings = golden.settings(DType::F32, "none");
            let lora = Some(Lora {
                base: (kind == "nf4").then_some(Codes::Nf4),
                ..adapters(&start)
            });
            let labels = settings.model.labels().with_lora();
            let layers = settings.model.layers;
            let policy = Policy::with_layers(labels, mode, &BTreeMap::new(), layers).unwrap();
            let text = std::fs::read_to_string(peft.join("reference.json")).unwrap();
            let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
            let ratio = reference["b_lr_ratio"].as_f64().unwrap();
            assert_eq!(ratio != 1.0, kind == "plus");
            let faster = (kind == "plus").then_some(Faster {
                ending: ".lora_B.weight",
                ratio,
            });
            let settings = Settings {
                lora,
                policy,
                optimizer: Hyperparameters {
                    faster,
                    ..settings.optimizer
                },
                ..settings
            };
            let mut session = golden.session(&settings);
            session.incoming().import_adapter(&start).unwrap();
            let parameters = &session.model().architecture().parameters;
            let own = settings.lora.as_ref().unwrap();
            let all: Vec<usize> = (0..layers).collect();
            for layers in [own.layers.clone(), own.layers.clone().or(Some(all))] {
                let lora = Lora {
                    layers,
                    ..own.clone()
                };
                let again = Settings {
                    lora: Some(written_and_read(&lora, parameters)),
                    ..settings.clone()
                };
                let again = golden.session(&again);
                let again = &again.model().architecture().parameters.modules;
                assert_eq!(again, &parameters.modules, "{family}");
                assert!(again.iter().any(|module| module.rank.is_some()));
            }
            let expected = reference_steps(&reference["steps"]);
            for (batch, expected) in golden.batches().iter().zip(expected) {
                let made = session.step(batch).unwrap();
                let near = |own: f32, theirs: f64| (f64::from(own) / theirs - 1.0).abs() < 1e-5;
                assert!(
                    near(made.loss, expected.loss),
                    "{family} {mode}: {}",
                    made.loss
                );
                assert!(near(made.grad_norm, expected.grad_norm), "{family} {mode}");
            }
            let folder = tempfile::tempdir().unwrap();
            session.export(folder.path(), &[], None).unwrap();
            let own = tensors(&folder.path().join("adapter_model.safetensors"));
            let theirs = tensors(&peft.join("adapter_final.safetensors"));
            assert_eq!(
                own.keys().collect::<Vec<_>>(),
                theirs.keys().collect::<Vec<_>>()
            );
            let first = tensors(&start.join("adapter_model.safetensors"));
            for (name, theirs) in &theirs {
                let largest = theirs
                    .iter()
                    .fold(0f32, |most, value| most.max(value.abs()));
                let far = |other: &[f32]| {
                    let pairs = other.iter().zip(theirs);
                    pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
                };
                assert!(far(&own[name]) < 1e-4, "{family} {mode} {name}");
                assert!(far(&first[name]) > 1e-3, "training moved nothing: {name}");
            }
        }
    }
}

/// The values that a folder's own codes stand for, to the bit, and the loss that transformers computes with them; with codes, and
/// widened as they are read.
#[test]
fn folders_in_nf4_are_read_as_they_are() {
    for family in ["llama", "gpt2"] {
        let golden = Golden::open(&format!("transformers/{family}"));
        let folder = golden.folder.join("../../quantised").join(family);
        let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
        let stored = Quantisation::of(&read("config.json")).unwrap().unwrap();
        let expected: serde_json::Value = serde_json::from_str(&read("values.json")).unwrap();
        let mut config = LoraConfig {
            rank: Some(2),
            ..LoraConfig::default()
        };
        config.adopt_codes(&stored, false).unwrap();
        let plain = golden.settings(DType::F32, "none");
        let labels = plain.model.labels().with_lora();
        let layers = plain.model.layers;
        let coded = Settings {
            lora: config.adapters().unwrap(),
            policy: Policy::with_layers(labels, "none", &BTreeMap::new(), layers).unwrap(),
            ..plain.clone()
        };
        let whole = golden.session(&plain);
        let mut losses = Vec::new();
        for settings in [coded, plain] {
            let mut session = Session::on_cpu(settings.clone(), &Memory::host()).unwrap();
            session.incoming().import(&folder).unwrap();
            if settings.lora.is_some() {
                let deviation = settings.model.init_std;
                let fresh = Fresh { deviation, seed: 1 };
                session.incoming().initialise_factors(fresh).unwrap();
            }
            let entries = session.model().layout().entries().to_vec();
            let mut quantised = 0;
            for (index, entry) in entries.iter().enumerate() {
                let values = session.parameter(index).unwrap();
                let sum = crc32fast::hash(bytemuck::cast_slice(&values));
                let before = whole.model().layout().find(&entry.name);
                let before = before.map(|index| whole.parameter(index).unwrap());
                match expected["crc32"].get(&entry.name) {
                    Some(known) => {
                        assert_eq!(*known, sum, "{family} {}", entry.name);
                        assert_eq!(entry.codes.is_some(), settings.lora.is_some());
                        assert!(before.is_some_and(|before| before != values));
                        quantised += 1;
                    }
                    None => {
                        assert_eq!(entry.codes, None, "{family} {}", entry.name);
                        assert!(before.is_none_or(|before| before == values));
                    }
                }
            }
            let listed = expected["crc32"].as_object().unwrap().len();
            assert_eq!((quantised, quantised > 4), (listed, true), "{family}");
            losses.push(session.step(&golden.batches()[0]).unwrap().loss);
        }
        assert_eq!(losses[0], losses[1], "{family}");
        let loss = expected["loss"].as_f64().unwrap();
        let far = |own: f32| (f64::from(own) / loss - 1.0).abs();
        assert!(far(losses[0]) < 1e-5, "{family} {losses:?} {loss}");
        let other = golden.session(&golden.settings(DType::F32, "none"));
        let other = { other }.step(&golden.batches()[0]).unwrap().loss;
        assert!(far(other) > 1e-4, "the codes change nothing");
    }
}
