//! PyTorch's five steps, made by the binary from the same files, in every recompute mode.

use crate::batches::batch_file;
use crate::metrics::Metrics;
use crate::workplace::Workplace;
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

pub const MODES: [&str; 6] = [
    "none",
    "core_attn",
    "layernorm",
    "mlp",
    "full",
    "core_attn,mlp",
];

type Tensors = BTreeMap<String, Vec<f32>>;

/// A folder of `tests/golden`.
struct Reference {
    folder: PathBuf,
    json: Value,
}

impl Reference {
    fn open(name: &str) -> Reference {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden")
            .join(name);
        let text = std::fs::read_to_string(folder.join("reference.json")).unwrap();
        Reference {
            folder,
            json: serde_json::from_str(&text).unwrap(),
        }
    }

    /// `[step][micro-batch][sample][position]` as one row of numbers, in this order.
    fn tokens(&self, name: &str) -> Vec<i32> {
        fn flatten(value: &Value, into: &mut Vec<i32>) {
            match value.as_array() {
                Some(values) => values.iter().for_each(|value| flatten(value, into)),
                None => into.push(value.as_i64().unwrap() as i32),
            }
        }
        let mut tokens = Vec::new();
        flatten(&self.json[name], &mut tokens);
        tokens
    }

    fn size(&self, name: &str) -> usize {
        self.json[name].as_u64().unwrap() as usize
    }

    fn tensors(&self, name: &str) -> Tensors {
        tensors(&std::fs::read(self.folder.join(name)).unwrap())
    }

    /// The command line that repeats it.
    fn command(&self, data: &str, mode: &str) -> String {
        format!(
            "train --init-from {} --data {data} --no-shuffle --micro-batch {} --accum {} --steps 5 --lr 1e-3 \
             --dump-gradients 1 --save-final {mode}/final --out {mode} --device cpu --recompute {mode} --quiet",
            self.folder.display(),
            self.size("micro_batch"),
            self.size("accum"),
        )
    }
}

fn tensors(file: &[u8]) -> Tensors {
    let file = SafeTensors::deserialize(file).unwrap();
    let floats = |bytes: &[u8]| -> Vec<f32> {
        let (chunks, rest) = bytes.as_chunks();
        assert!(rest.is_empty());
        chunks.iter().copied().map(f32::from_le_bytes).collect()
    };
    file.iter()
        .map(|(name, tensor)| {
            assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
            (name.to_string(), floats(tensor.data()))
        })
        .collect()
}

#[track_caller]
fn assert_relative(actual: &Value, expected: &Value, tolerance: f64, what: &str) {
    let (actual, expected) = (actual.as_f64().unwrap(), expected.as_f64().unwrap());
    let difference = (actual - expected).abs() / expected.abs();
    assert!(
        difference <= tolerance,
        "{what}: {actual}, in PyTorch {expected}"
    );
}

/// Every entry of every tensor is within `tolerance(tensor)`.
#[track_caller]
fn assert_close(actual: &Tensors, expected: &Tensors, tolerance: fn(&[f32]) -> f32, what: &str) {
    assert!(expected.len() > 10);
    assert_eq!(
        actual.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "{what}"
    );
    for (name, expected) in expected {
        let (actual, tolerance) = (&actual[name], tolerance(expected));
        assert_eq!(actual.len(), expected.len(), "{what}: {name}");
        assert!(tolerance > 0.0, "{what}: {name} is zero");
        for (actual, expected) in actual.iter().zip(expected) {
            let near = (actual - expected).abs() <= tolerance;
            assert!(near, "{what}: {name}: {actual}, in PyTorch {expected}");
        }
    }
}

fn hundredth_of_a_percent(tensor: &[f32]) -> f32 {
    1e-4 * tensor.iter().fold(0.0, |most, value| value.abs().max(most))
}

fn agrees_in_every_mode(name: &str) {
    let (reference, place) = (Reference::open(name), Workplace::new());
    let (input_ids, targets) = (reference.tokens("input_ids"), reference.tokens("targets"));
    let data = batch_file(&input_ids, &targets, reference.size("seq"));
    place.file("batches.safetensors", data);
    let gradients = reference.tensors("grads_step0.safetensors");
    let weights = reference.tensors("model_final.safetensors");
    let mut runs = Vec::new();
    for mode in MODES {
        place
            .trainer(&reference.command("batches.safetensors", mode))
            .succeeds();
        let metrics = Metrics::read(&place, mode);
        let expected = reference.json["steps"].as_array().unwrap();
        assert_eq!((metrics.steps().len(), expected.len()), (5, 5), "{mode}");
        for (step, expected) in metrics.steps().into_iter().zip(expected) {
            let what = format!("{mode}, step {}", expected["step"]);
            assert_eq!(step["step"], expected["step"], "{what}");
            assert_eq!(step["tokens"], expected["target_tokens"], "{what}");
            assert_relative(&step["loss"], &expected["loss"], 1e-5, &what);
            assert_relative(&step["grad_norm"], &expected["grad_norm"], 1e-5, &what);
        }
        let read = |name| tensors(&std::fs::read(place.path(mode).join(name)).unwrap());
        let found = read("gradients/step-1.safetensors");
        assert_close(&found, &gradients, hundredth_of_a_percent, mode);
        assert_close(&read("final/model.safetensors"), &weights, |_| 1e-4, mode);
        runs.push((metrics, found));
    }
    modes_differ_in_memory_alone(&runs);
}

/// That the modes agree says something only if they did different things.
fn modes_differ_in_memory_alone(runs: &[(Metrics, Tensors)]) {
    let (none, gradients) = &runs[0];
    assert_eq!(none.steps()[0]["replayed"], serde_json::json!({}));
    for (index, (run, own)) in runs.iter().enumerate().skip(1) {
        let (step, other) = (run.steps()[0], none.steps()[0]);
        assert_ne!(step["replayed"], other["replayed"], "{}", MODES[index]);
        assert_ne!(step["peak_bytes"], other["peak_bytes"], "{}", MODES[index]);
        assert_eq!(run.losses(), none.losses(), "{}", MODES[index]);
        assert_eq!(own, gradients, "{}", MODES[index]);
    }
}

#[test]
fn a_tiny_llama() {
    agrees_in_every_mode("torch_llama_tiny");
}

#[test]
fn a_tied_llama_of_odd_sizes_with_masked_targets() {
    agrees_in_every_mode("torch_llama_masked_tied");
}
