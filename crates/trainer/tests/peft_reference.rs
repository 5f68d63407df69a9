//! Five steps of adapters against Hugging Face's PEFT (`benches/peers/peft_reference.py` wrote `tests/golden/peft`).

mod common;

use common::golden::{Golden, reference_steps, tensors};
use memory::{Codes, DType};
use model::{ADAPTER_CONFIG, AdapterConfig, Lora, Parameters, Policy};
use settings::{LoraConfig, Settings};
use std::collections::BTreeMap;
use std::path::Path;

/// The adapters of a folder.
fn adapters(folder: &Path) -> Lora {
    let adapter = AdapterConfig::read(folder).unwrap();
    let lora = LoraConfig::default().adopted(adapter).unwrap();
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
        "deepseek_v2",
        "deepseek_v3",
        "mixtral",
    ] {
        let base = family.strip_suffix("-nf4");
        let golden = Golden::open(&format!("transformers/{}", base.unwrap_or(family)));
        let peft = golden.folder.join("../../peft").join(family);
        let start = peft.join("start");
        for mode in ["none", "lora,layernorm"] {
            let settings = golden.settings(DType::F32, "none");
            let lora = Some(Lora {
                base: base.map(|_| Codes::Nf4),
                ..adapters(&start)
            });
            let labels = settings.model.labels().with_lora();
            let layers = settings.model.layers;
            let policy = Policy::with_layers(labels, mode, &BTreeMap::new(), layers).unwrap();
            let settings = Settings {
                lora,
                policy,
                ..settings
            };
            let mut session = golden.session(&settings);
            session.import_adapter(&start).unwrap();
            let parameters = session.model().architecture().parameters();
            let again = Settings {
                lora: Some(written_and_read(
                    settings.lora.as_ref().unwrap(),
                    parameters,
                )),
                ..settings.clone()
            };
            let again = golden.session(&again);
            let again = again.model().architecture().parameters().modules();
            assert_eq!(again, parameters.modules(), "{family}");
            assert!(again.iter().any(|module| module.rank.is_some()));
            let text = std::fs::read_to_string(peft.join("reference.json")).unwrap();
            let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
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
            session.export_with(folder.path(), &[]).unwrap();
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
