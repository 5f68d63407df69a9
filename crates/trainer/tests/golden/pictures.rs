//! A folder of Qwen3.5 for pictures and text, made of the text model that transformers wrote.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::path::Path;

/// A file for processing pictures.
pub const PROCESSOR: (&str, &str) = ("preprocessor_config.json", "{\"size\": 3}");

/// What the folder has beside the text model.
pub const BESIDE: [(&str, Dtype, &[usize], &[u8]); 3] = [
    (
        "model.visual.patch.weight",
        Dtype::BF16,
        &[2, 1],
        &[1, 2, 3, 4],
    ),
    ("model.visual.places", Dtype::I64, &[1], &[5; 8]),
    ("mtp.fc.weight", Dtype::F32, &[1, 1], &[6; 4]),
];

/// The name that a text model's tensor has there.
pub fn wrapped(name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.into(),
    }
}

/// Writes it into a new folder. Returns a file of batches for it.
pub fn write(folder: &Path) -> Vec<u8> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/transformers/qwen3_5");
    let read = |name: &str| std::fs::read(golden.join(name)).unwrap();
    let bytes = read("model.safetensors");
    let text = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<(String, TensorView)> = text.tensors();
    all.iter_mut().for_each(|(name, _)| *name = wrapped(name));
    for (name, dtype, shape, bytes) in BESIDE {
        let tensor = TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
        all.push((name.into(), tensor));
    }
    let mut text: Value = serde_json::from_slice(&read("config.json")).unwrap();
    text.as_object_mut().unwrap().remove("architectures");
    let whole = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "float32",
        "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text, "vision_config": {"depth": 1},
    });
    std::fs::create_dir(folder).unwrap();
    let weights = safetensors::serialize(all, None).unwrap();
    std::fs::write(folder.join("model.safetensors"), weights).unwrap();
    std::fs::write(folder.join("config.json"), whole.to_string()).unwrap();
    let (name, processor) = PROCESSOR;
    std::fs::write(folder.join(name), processor).unwrap();
    read("batches.safetensors")
}
