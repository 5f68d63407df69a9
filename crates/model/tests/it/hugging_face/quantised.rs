//! Folders that transformers saved in NF4 (`benches/peers/quantised_folders.py`), and hostile ones made of them.

use crate::hugging_face::folders::{Tensors, changed, golden, tensors};
use files::Dtype;
use memory::{Codes, Layout};
use model::{
    AdapterTarget, Architecture, Attention, Lora, ModelConfig, ModelWeights, ParameterPart,
    Parameters, PlainModules, Quantisation, WeightsError,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use units::CodeBytes;

const LLAMA: &str = "../quantised/llama";
const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const STATE: &str = "quant_state.bitsandbytes__nf4";

/// Parameters and layout of a model in NF4 with adapters.
fn coded(skipped: &[&str]) -> (Parameters, Layout) {
    let text = std::fs::read_to_string(golden(LLAMA).join("config.json")).unwrap();
    let config = ModelConfig::from_hf(&text).unwrap();
    let patterns: Vec<String> = skipped.iter().map(|name| name.to_string()).collect();
    let lora = Lora {
        rank: 2,
        alpha: 2.0,
        targets: vec![AdapterTarget::new(AdapterTarget::ALL).unwrap()],
        base: Some(Codes::Nf4),
        base_skip: PlainModules::new(&patterns).unwrap(),
        ..Lora::default()
    };
    let parameters = Parameters::adapted(lora);
    let architecture = Architecture::declared(&config, Attention::Eager, parameters);
    let layout = architecture.parameters.layout(|_, _| false);
    (architecture.parameters.clone(), layout)
}

#[test]
fn codes_are_handed_over_as_they_are() {
    let (parameters, layout) = coded(&[]);
    let weights = ModelWeights::open(&golden(LLAMA), &parameters).unwrap();
    let mut found: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    let set = |part: ParameterPart| -> Result<(), WeightsError> {
        if let ParameterPart::Codes(entry, CodeBytes { first, bytes }) = part {
            let places = Codes::Nf4.places(layout.entries()[entry].elements());
            let matrix = found.entry(entry).or_insert(vec![0; places.bytes]);
            matrix[first..first + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    };
    weights.read(&layout, &layout.all(), set).unwrap();
    assert_eq!(found.len(), 14);
    let stored = tensors(&golden(LLAMA));
    for (entry, bytes) in found {
        let entry = &layout.entries()[entry];
        let places = Codes::Nf4.places(entry.elements());
        let own = |end: &str| &stored[&format!("{}{end}", entry.name)].2;
        assert_eq!(bytes[places.codes], own("")[..]);
        assert_eq!(bytes[places.absmax_codes], own(".absmax")[..]);
        assert_eq!(bytes[places.absmax], own(".nested_absmax")[..]);
        let state: Value = serde_json::from_slice(own(&format!(".{STATE}"))).unwrap();
        let offset = state["nested_offset"].as_f64().unwrap() as f32;
        assert_eq!(bytes[places.offset], offset.to_le_bytes());
    }
}

#[track_caller]
fn refused(words: &[&str], change: impl FnOnce(&mut Tensors)) {
    let folder = changed(LLAMA, change);
    for (parameters, _) in [coded(&[]), plain()] {
        let error = ModelWeights::open(folder.path(), &parameters).unwrap_err();
        let error = error.to_string();
        for word in words {
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}

fn plain() -> (Parameters, Layout) {
    let text = std::fs::read_to_string(golden(LLAMA).join("config.json")).unwrap();
    let config = ModelConfig::from_hf(&text).unwrap();
    let architecture = Architecture::of(&config, Attention::Eager);
    let layout = architecture.parameters.layout(|_, _| false);
    (architecture.parameters.clone(), layout)
}

fn part<'t>(all: &'t mut Tensors, end: &str) -> &'t mut (Dtype, Vec<usize>, Vec<u8>) {
    all.get_mut(&format!("{Q}{end}")).unwrap()
}

fn shortened(all: &mut Tensors, end: &str) {
    let (dtype, shape, bytes) = part(all, end);
    bytes.truncate(bytes.len() - dtype.bitsize() / 8);
    shape[0] -= 1;
}

fn with_state(all: &mut Tensors, change: impl Fn(&mut Value)) {
    let (_, shape, bytes) = part(all, &format!(".{STATE}"));
    let mut state = serde_json::from_slice(bytes).unwrap();
    change(&mut state);
    *bytes = state.to_string().into_bytes();
    shape[0] = bytes.len();
}

fn renamed(all: &mut Tensors, from: &str, to: &str) {
    let tensor = all.remove(&format!("{Q}{from}")).unwrap();
    all.insert(format!("{Q}{to}"), tensor);
}

#[test]
fn hostile_folders_get_a_sentence() {
    refused(&[Q, "359 bytes", "needs 360"], |all| shortened(all, ""));
    refused(&[Q, ".absmax` with 12 bytes of U8"], |all| {
        shortened(all, ".absmax");
    });
    refused(&[Q, "nested_absmax` with 4 bytes of F32"], |all| {
        shortened(all, ".nested_absmax");
    });
    for end in ["absmax", "quant_map", "nested_quant_map"] {
        refused(&[Q, &format!("{end}` with"), "is missing"], |all| {
            all.remove(&format!("{Q}.{end}"));
        });
    }
    refused(&[Q, "bnb_4bit_use_double_quant is off", "BF16"], |all| {
        all.remove(&format!("{Q}.nested_absmax"));
    });
    refused(&[Q, "quant_map` has other values"], |all| {
        part(all, ".quant_map").2[3] ^= 1;
    });
    refused(&[Q, "nested_quant_map` has other values"], |all| {
        part(all, ".nested_quant_map").2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    refused(&[Q, "no JSON"], |all| shortened(all, &format!(".{STATE}")));
    refused(&[Q, "no JSON", "70000 bytes"], |all| {
        let (_, shape, bytes) = part(all, &format!(".{STATE}"));
        (shape[0], *bytes) = (70_000, vec![b' '; 70_000]);
    });
    for (key, value, words) in [
        (
            "blocksize",
            json!(0),
            &["`blocksize` 0", "only 64", "BF16"][..],
        ),
        ("blocksize", json!(128), &["`blocksize` 128"]),
        (
            "nested_blocksize",
            json!(-1),
            &["`nested_blocksize` -1", "only 256"],
        ),
        ("shape", json!([24, 30]), &["shape [24,30]", "[30, 24]"]),
        ("shape", json!(null), &["shape null"]),
        (
            "nested_offset",
            json!("x"),
            &["`nested_offset` is no number"],
        ),
        (
            "nested_offset",
            json!(1e300),
            &["`nested_offset` is no number"],
        ),
    ] {
        refused(&[&[Q][..], words].concat(), |all| {
            with_state(all, |state| state[key] = value.clone());
        });
    }
    refused(&[Q, "FP4"], |all| {
        renamed(all, &format!(".{STATE}"), ".quant_state.bitsandbytes__fp4");
    });
    refused(&[Q, "LLM.int8"], |all| {
        let scales = (Dtype::F32, vec![1], vec![0; 4]);
        all.insert(Q.replace(".weight", ".SCB"), scales);
    });
    refused(
        &["lm_head.weight.absmax", "not one of the model's"],
        |all| {
            let extra = (Dtype::U8, vec![1], vec![0]);
            all.insert("lm_head.weight.absmax".into(), extra);
            all.insert(
                "lm_head.weight.nested_absmax".into(),
                (Dtype::U8, vec![1], vec![0]),
            );
        },
    );
}

/// A matrix that is plain in a folder of codes stays plain: nobody asked to make codes of it.
#[test]
fn modules_that_were_skipped_are_read_as_they_are() {
    let values = tensors(&golden("llama"));
    let folder = changed(LLAMA, |all| {
        all.retain(|name, _| !name.starts_with(Q));
        all.insert(Q.into(), values[Q].clone());
    });
    for skipped in [&[][..], &["model.layers.1.self_attn.q"], &["lm_head"]] {
        let (parameters, _) = coded(skipped);
        let error = ModelWeights::open(folder.path(), &parameters).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(Q), "{error}");
        assert!(error.contains("lora.base_skip"), "{error}");
    }
    let plain = |skipped: &str| {
        let (_, layout) = coded(&[skipped]);
        let mut entries = layout.entries().iter();
        entries.any(|entry| entry.name == Q && entry.codes.is_none())
    };
    let beginnings = [
        "model.layers.1",
        "model.layers.1.",
        r"model.layers.\d.self_attn",
    ];
    assert!(beginnings.into_iter().all(plain));
    let (parameters, layout) = coded(&["1.self_attn.q_proj"]);
    let weights = ModelWeights::open(folder.path(), &parameters).unwrap();
    let (mut found, mut codes) = (Vec::new(), 0);
    let place = layout.entries()[layout.find(Q).unwrap()].range();
    let set = |part: ParameterPart| -> Result<(), WeightsError> {
        match part {
            ParameterPart::Values(first, values) if place.contains(&first) => {
                found.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            ParameterPart::Values(..) => {}
            ParameterPart::Codes(_, part) => codes += usize::from(part.first == 0),
        }
        Ok(())
    };
    weights.read(&layout, &layout.all(), set).unwrap();
    assert_eq!(found, values[Q].2);
    assert_eq!(codes, 13);
}

#[test]
fn other_ways_to_quantise_are_refused_by_name() {
    let text = std::fs::read_to_string(golden(LLAMA).join("config.json")).unwrap();
    let of = |change: &dyn Fn(&mut Value)| {
        let mut config: Value = serde_json::from_str(&text).unwrap();
        change(&mut config["quantization_config"]);
        let text = config.to_string();
        let read = Quantisation::of(&text).map_err(|error| error.to_string());
        let model = ModelConfig::from_hf(&text).map(|_| ());
        assert_eq!(
            model.err().map(|error| error.to_string()),
            read.clone().err()
        );
        read
    };
    let stored = of(&|_| {}).unwrap().unwrap();
    assert_eq!((stored.codes, stored.plain.len()), (Codes::Nf4, 0));
    assert_eq!(of(&|said| *said = Value::Null), Ok(None));
    let named = of(&|said| said["llm_int8_skip_modules"] = json!(["lm_head"]));
    assert_eq!(named.unwrap().unwrap().plain, ["lm_head"]);
    let of_experts =
        of(&|said| *said = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}));
    let of_experts = of_experts.unwrap().unwrap();
    assert_eq!(
        (of_experts.codes, of_experts.plain.len()),
        (Codes::Mxfp4, 0)
    );
    let change = |key: &'static str, value: Value| {
        of(&move |said: &mut Value| said[key] = value.clone()).unwrap_err()
    };
    for (key, value, word) in [
        ("load_in_8bit", json!(true), "LLM.int8 (load_in_8bit)"),
        (
            "bnb_4bit_quant_type",
            json!("fp4"),
            "\"fp4\" instead of \"nf4\"",
        ),
        ("bnb_4bit_quant_type", json!(null), "null instead of"),
        (
            "bnb_4bit_use_double_quant",
            json!(false),
            "without bnb_4bit_use_double_quant",
        ),
        ("quant_method", json!("gptq"), "quantised by \"gptq\""),
        ("quant_method", json!("awq"), "quantised by \"awq\""),
        ("quant_method", json!("fp8"), "quantised by \"fp8\""),
    ] {
        let error = change(key, value);
        assert!(
            error.contains(word) && error.contains("in bf16 or f32"),
            "{error}"
        );
    }
    let error = change("llm_int8_skip_modules", json!(3));
    assert!(error.contains("`llm_int8_skip_modules`"), "{error}");
}
