//! Models for pictures and text, of which the text part is read.

use crate::hugging_face::folders::{Shape, Tensors, changed, golden, tensors};
use files::{Disk, Dtype};
use memory::DType;
use model::{ModelConfig, ModelWeights, Origin, WholeModel, write_model};
use serde_json::{Value, json};
use std::path::Path;

const TEXT: &str = "ministral3";

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// What transformers 5.23 writes around the text part.
fn around(text: Value) -> Value {
    json!({
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "float32",
        "image_token_index": 10,
        "model_type": "mistral3",
        "text_config": text,
        "tie_word_embeddings": false,
        "transformers_version": "5.23.0",
        "vision_config": {"model_type": "pixtral", "hidden_size": 16},
        "vision_feature_layer": -1
    })
}

/// The names of tensors in files of transformers and of publishers, and those that its modules have.
const NAMES: [fn(&str) -> String; 2] = [
    |name| format!("language_model.{name}"),
    |name| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.into(),
    },
];

/// A tensor for pictures, and one of what joins them to the text.
const PICTURES: [[&str; 2]; 2] = [
    [
        "vision_tower.conv.weight",
        "multi_modal_projector.norm.weight",
    ],
    [
        "model.vision_tower.conv.weight",
        "model.multi_modal_projector.norm.weight",
    ],
];

/// The golden folder of the text part as one of a model for pictures, with some change.
fn wrapped(way: usize, change: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let folder = changed(TEXT, |tensors| {
        let own = std::mem::take(tensors).into_iter();
        *tensors = own.map(|(name, it)| (NAMES[way](&name), it)).collect();
        for name in PICTURES[way] {
            tensors.insert(name.into(), (Dtype::I32, vec![1], vec![0; 4]));
        }
        change(tensors);
    });
    let mut text = config(folder.path()).as_object().unwrap().clone();
    for key in ["architectures", "dtype", "transformers_version"] {
        text.remove(key).unwrap();
    }
    text.insert("unheard_of".into(), 7.into());
    let path = folder.path().join("config.json");
    std::fs::write(path, around(text.into()).to_string()).unwrap();
    folder
}

#[test]
fn the_text_part_is_read_and_exported_as_its_own_family() {
    let plain = Shape::of(&Origin::read(&golden(TEXT)).unwrap());
    for (way, pictures) in PICTURES.iter().enumerate() {
        let folder = wrapped(way, |_| {});
        let origin = Origin::read(folder.path()).unwrap();
        let shape = Shape::of(&origin);
        assert_eq!(shape.config, plain.config);
        let of_file = ModelConfig::from_hf(&config(folder.path()).to_string()).unwrap();
        assert_eq!(of_file, plain.config);
        let positions = of_file.context_length(&config(folder.path()).to_string());
        assert_eq!(positions, Some(64));
        assert!(shape.read(folder.path()) == plain.read(&golden(TEXT)));

        let weights = ModelWeights::open(folder.path(), &shape.parameters).unwrap();
        let said = weights.left_out().unwrap().to_string();
        for name in pictures {
            let module = name.split_inclusive('.').rev().skip(2);
            let beginning: String = module.collect::<Vec<_>>().into_iter().rev().collect();
            assert!(said.contains(&format!("`{beginning}*`")), "{said}");
        }
        assert!(said.contains("an export is without them"), "{said}");
        assert!(WholeModel::of(origin.clone(), weights).is_none());
        let weights = ModelWeights::open(folder.path(), &shape.parameters).unwrap();

        let out = tempfile::tempdir().unwrap();
        let files = origin.files(&shape.config, 19, DType::F32);
        let source = weights.converted(DType::F32);
        write_model(&Disk, out.path(), &files, &source, u64::MAX).unwrap();
        assert!(tensors(out.path()) == tensors(&golden(TEXT)));
        let mut expected = config(&golden(TEXT));
        expected["unheard_of"] = 7.into();
        assert_eq!(config(out.path()), expected);
    }
}

#[test]
fn what_is_missing_or_unknown_beside_pictures_is_named() {
    let refused = |way: usize, change: &dyn Fn(&mut Tensors)| {
        let folder = wrapped(way, change);
        let shape = Shape::of(&Origin::read(folder.path()).unwrap());
        let opened = ModelWeights::open(folder.path(), &shape.parameters);
        opened.unwrap_err().to_string()
    };
    const NORM: &str = "model.norm.weight";
    const HEAD: &str = "lm_head.weight";
    for (way, own) in NAMES.iter().enumerate() {
        for name in [NORM, HEAD] {
            let said = refused(way, &|tensors| drop(tensors.remove(&own(name)).unwrap()));
            assert!(said.contains(&format!("`{name}` is missing")), "{said}");
        }
        // A second tensor for the same parameter has no place, and neither has one of unknown modules.
        for name in [NORM, "audio_tower.weight", "language_model.model.x.weight"] {
            let said = refused(way, &|tensors| {
                let any = tensors[&own(NORM)].clone();
                tensors.insert(name.into(), any);
            });
            assert!(said.contains("is not one of the model's"), "{said}");
        }
    }
    // A model without pictures has no place for them.
    let plain = Shape::of(&Origin::read(&golden(TEXT)).unwrap());
    let folder = changed(TEXT, |tensors| {
        let any = tensors[NORM].clone();
        tensors.insert(PICTURES[0][0].into(), any);
    });
    let opened = ModelWeights::open(folder.path(), &plain.parameters);
    let said = opened.unwrap_err().to_string();
    assert!(said.contains(PICTURES[0][0]), "{said}");
}

/// transformers ties heads unless the outer key is false or the files have another one; published files have the outer key
/// missing, and the text part's is right.
#[test]
fn a_head_is_tied_where_both_keys_allow_it() {
    for (outer, own, is_tied) in [
        (Some(false), Some(true), false),
        (Some(true), Some(true), true),
        (None, Some(true), true),
        (Some(true), Some(false), false),
        (None, None, false),
    ] {
        let mut json = around(config(&golden(TEXT)));
        json["tie_word_embeddings"] = json!(outer);
        json["text_config"]["tie_word_embeddings"] = json!(own);
        let config = ModelConfig::from_hf(&json.to_string()).unwrap();
        assert_eq!(config.tie_embeddings, is_tied, "{outer:?} {own:?}");
    }
}

#[test]
fn a_wrapper_of_another_class_or_without_a_text_part_is_refused() {
    for (key, value, expected) in [
        ("architectures", json!(["Mistral3Model"]), "`Mistral3Model`"),
        ("text_config", json!(null), "`text_config` is missing"),
        (
            "text_config",
            json!({"model_type": "mistral4"}),
            "`mistral4`",
        ),
        (
            "quantization_config",
            json!({"quant_method": "fp8"}),
            "`quantization_config`",
        ),
    ] {
        let mut json = around(config(&golden(TEXT)));
        json[key] = value;
        let said = ModelConfig::from_hf(&json.to_string())
            .unwrap_err()
            .to_string();
        assert!(said.contains(expected), "{said}");
    }
}

/// Layers that predict a second token have names of their own in these, and the outer key says whether the head is tied.
#[test]
fn folders_of_qwen_are_read_without_pictures_and_predictors() {
    for (text, class) in [
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ] {
        let folder = changed(text, |tensors| {
            let own = std::mem::take(tensors).into_iter();
            *tensors = own.map(|(name, it)| (NAMES[1](&name), it)).collect();
            for name in ["model.visual.patch_embed.weight", "mtp.fc.weight"] {
                tensors.insert(name.into(), (Dtype::I32, vec![1], vec![0; 4]));
            }
        });
        let mut own = config(&golden(text)).as_object().unwrap().clone();
        own.remove("architectures").unwrap();
        let is_tied = own.remove("tie_word_embeddings").unwrap();
        let wrapper = json!({
            "architectures": [class], "model_type": text, "text_config": own, "tie_word_embeddings": is_tied,
            "vision_config": {"model_type": "qwen3_5_vision", "depth": 1},
        });
        let path = folder.path().join("config.json");
        std::fs::write(path, wrapper.to_string()).unwrap();
        let plain = Shape::of(&Origin::read(&golden(text)).unwrap());
        let origin = Origin::read(folder.path()).unwrap();
        let shape = Shape::of(&origin);
        assert_eq!(shape.config, plain.config);
        assert!(shape.read(folder.path()) == plain.read(&golden(text)));
        let weights = ModelWeights::open(folder.path(), &shape.parameters).unwrap();
        let said = weights.left_out().unwrap().to_string();
        for word in [
            "`model.visual.*`",
            "which is not trained",
            "`mtp.*`",
            "second token",
            "an export copies them from here",
        ] {
            assert!(said.contains(word), "{said}");
        }
        let out = tempfile::tempdir().unwrap();
        let files = origin.files(&shape.config, 19, DType::F32);
        let source = weights.converted(DType::F32);
        write_model(&Disk, out.path(), &files, &source, u64::MAX).unwrap();
        assert!(tensors(out.path()) == tensors(&golden(text)));

        let opened = || ModelWeights::open(folder.path(), &shape.parameters).unwrap();
        let whole = WholeModel::of(origin.clone(), opened()).unwrap();
        let (files, all) = (whole.files(files), whole.with_text(&source));
        write_model(&Disk, out.path(), &files, &all, u64::MAX).unwrap();
        assert!(tensors(out.path()) == tensors(folder.path()));
        assert_eq!(config(out.path()), config(folder.path()));
        assert_eq!(whole.untrained_bytes(), 8);
    }
}

/// Without a `quantization_config` nobody would read FP8, and an export has none.
#[test]
fn what_is_quantised_beside_the_text_part_is_not_exported() {
    const VISUAL: &str = "model.visual.patch_embed.weight";
    let shape = Shape::of(&Origin::read(&golden("qwen3_5")).unwrap());
    for (dtype, is_exported) in [(Dtype::I32, true), (Dtype::F8_E4M3, false)] {
        let folder = changed("qwen3_5", |tensors| {
            let own = std::mem::take(tensors).into_iter();
            *tensors = own.map(|(name, it)| (NAMES[1](&name), it)).collect();
            let bytes = vec![0; dtype.bitsize() / 8];
            tensors.insert(VISUAL.into(), (Dtype::I32, vec![1], vec![0; 4]));
            tensors.insert("mtp.fc.weight".into(), (dtype, vec![1], bytes));
        });
        let weights = ModelWeights::open(folder.path(), &shape.parameters).unwrap();
        let left_out = weights.left_out().unwrap();
        assert_eq!(left_out.is_exported(), is_exported, "{left_out}");
    }
}

/// Keys of the text part that training may change stand where readers look for them, and all other keys stay.
#[test]
fn keys_around_a_text_part_stay() {
    let folder = changed("qwen3_5", |tensors| {
        let own = std::mem::take(tensors).into_iter();
        *tensors = own.map(|(name, it)| (NAMES[1](&name), it)).collect();
        let name = "model.visual.patch_embed.weight";
        tensors.insert(name.into(), (Dtype::I32, vec![1], vec![0; 4]));
    });
    let mut text = config(folder.path());
    let text = text.as_object_mut().unwrap();
    for key in ["architectures", "dtype", "tie_word_embeddings"] {
        text.remove(key).unwrap();
    }
    text.insert("mtp_num_hidden_layers".into(), 1.into());
    let mut whole = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "float32", "text_config": text,
        "tie_word_embeddings": true, "vision_config": {"dtype": "float32"}, "image_token_id": 5,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    });
    std::fs::write(folder.path().join("config.json"), whole.to_string()).unwrap();
    let processor = "preprocessor_config.json";
    std::fs::write(folder.path().join(processor), "{\"size\": 3}").unwrap();
    let origin = Origin::read(folder.path()).unwrap();
    let mut shape = Shape::of(&origin);
    shape.config.norm_eps = 0.5;
    let files = origin.files(&shape.config, 19, DType::BF16);
    assert!(files.iter().all(|(name, _)| name != processor));
    let weights = ModelWeights::open(folder.path(), &shape.parameters).unwrap();
    let mut files = WholeModel::of(origin, weights).unwrap().files(files);
    let (name, written) = files.pop().unwrap();
    assert_eq!(name, "config.json", "it comes last");
    assert_eq!(files, [(processor.into(), b"{\"size\": 3}".to_vec())]);
    let written: Value = serde_json::from_slice(&written).unwrap();
    whole["dtype"] = "bfloat16".into();
    whole["text_config"]["rms_norm_eps"] = 0.5.into();
    whole.as_object_mut().unwrap().remove("quantization_config");
    assert_eq!(written, whole);
}
