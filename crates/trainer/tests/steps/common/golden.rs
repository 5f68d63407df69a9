//! The references that PyTorch made (`tests/golden/README.md`).

use super::constant_rate;
use candle_core::Device;
use data::{MicroBatch, Packing, StepBatch};
use memory::{DType, Memory};
use model::{Architecture, Attention, ModelConfig, Policy};
use optim::{AdamW, Hyperparameters};
use serde_json::Value;
use session::Session;
use settings::{KernelChoice, PerFamily, Settings, StateFormats, StepObjective};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Tensors by Hugging Face name.
pub type Tensors = BTreeMap<String, Vec<f32>>;

/// One reference run.
pub struct Golden {
    /// Its folder.
    pub folder: PathBuf,
    /// Its `reference.json`.
    pub reference: Value,
}

/// What PyTorch computed in a step.
pub struct ReferenceStep {
    /// Mean over the step's targets.
    pub loss: f64,
    /// Before clipping.
    pub grad_norm: f64,
    /// Targets that are not masked.
    pub targets: usize,
}

impl Golden {
    /// Both references.
    pub fn all() -> [Golden; 2] {
        ["torch_llama_tiny", "torch_llama_masked_tied"].map(Golden::open)
    }

    /// A folder of `tests/golden`.
    pub fn open(name: &str) -> Golden {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden")
            .join(name);
        let text = std::fs::read_to_string(folder.join("reference.json")).unwrap();
        let reference = serde_json::from_str(&text).unwrap();
        Golden { folder, reference }
    }

    /// The reference's name.
    pub fn name(&self) -> &str {
        self.folder.file_name().unwrap().to_str().unwrap()
    }

    /// The settings that the reference was made with. The head's chunk is ours: small enough for several.
    pub fn settings(&self, dtype: DType, mode: &str) -> Settings {
        let text = std::fs::read_to_string(self.folder.join("config.json")).unwrap();
        let model = ModelConfig::from_hf(&text).unwrap();
        let optimizer = &self.reference["optimizer"];
        let number = |value: &Value| value.as_f64().unwrap();
        let size = |key: &str| self.reference[key].as_u64().unwrap() as usize;
        assert_eq!(number(&optimizer["clip_eps"]), 1e-6);
        Settings {
            freeze: Vec::new(),
            lora: None,
            fp8: None,
            objective: StepObjective::NextTokens,
            policy: Policy::with_layers(model.labels(), mode, &BTreeMap::new(), model.layers)
                .unwrap(),
            model,
            structure: Architecture::declared,
            dtype,
            seq: size("seq"),
            micro_batch: size("micro_batch"),
            accum: size("accum"),
            head_chunk: 40,
            tile_tokens: None,
            expert_unit: None,
            state_interval: 1,
            packing: Packing::Concatenate,
            between: Default::default(),
            checkpoint_copy: false,
            attention: Attention::Eager,
            kernels: PerFamily::new(|_| KernelChoice::Auto),
            optimizer: Hyperparameters {
                adamw: AdamW {
                    beta1: number(&optimizer["betas"][0]),
                    beta2: number(&optimizer["betas"][1]),
                    eps: number(&optimizer["eps"]),
                },
                weight_decay: number(&optimizer["weight_decay"]),
                clip_norm: number(&optimizer["clip_grad_norm"]),
                ..Hyperparameters::default()
            },
            whole_matrices: Default::default(),
            router_bias_rate: 0.0,
            states: StateFormats::default(),
            homes: Default::default(),
            ranks: None,
            pipeline: None,
            engine_bytes: None,
            schedule: constant_rate(number(&optimizer["lr"])),
            seed: 0,
            hardware: Default::default(),
            graphs_off: None,
        }
    }

    /// A session with the reference's first weights.
    pub fn session(&self, settings: &Settings) -> Session {
        let mut session = Session::on_cpu(settings.clone(), &Memory::host()).unwrap();
        session.incoming().import(&self.folder).unwrap();
        session
    }

    /// The batches of all steps.
    pub fn batches(&self) -> Vec<StepBatch> {
        let list = |value: &Value| value.as_array().unwrap().clone();
        let (ids, targets) = (
            list(&self.reference["input_ids"]),
            list(&self.reference["targets"]),
        );
        let steps = ids
            .iter()
            .zip(&targets)
            .enumerate()
            .map(|(step, (ids, targets))| {
                let (ids, targets) = (list(ids), list(targets));
                let micro = ids.iter().zip(&targets).enumerate();
                StepBatch::from_iter(micro.map(|(micro, (ids, targets))| {
                    let lengths = &self.reference["lengths"][step][micro];
                    MicroBatch {
                        lengths: serde_json::from_value(lengths.clone()).unwrap(),
                        ..micro_batch(ids, targets)
                    }
                }))
            });
        steps.collect()
    }

    /// What PyTorch computed in every step.
    pub fn steps(&self) -> Vec<ReferenceStep> {
        reference_steps(&self.reference["steps"])
    }

    /// The tensors of one of the reference's files.
    pub fn tensors(&self, file: &str) -> Tensors {
        tensors(&self.folder.join(file))
    }
}

/// The entries of a list `steps`.
pub fn reference_steps(steps: &Value) -> Vec<ReferenceStep> {
    let steps = steps.as_array().unwrap().iter();
    steps
        .map(|step| ReferenceStep {
            loss: step["loss"].as_f64().unwrap(),
            grad_norm: step["grad_norm"].as_f64().unwrap(),
            targets: step["target_tokens"].as_u64().unwrap() as usize,
        })
        .collect()
}

fn micro_batch(ids: &Value, targets: &Value) -> MicroBatch {
    let rows = |value: &Value| -> Vec<Vec<i32>> { serde_json::from_value(value.clone()).unwrap() };
    let (ids, targets) = (rows(ids), rows(targets));
    MicroBatch {
        rows: ids.len(),
        seq: ids[0].len(),
        input_ids: ids.concat(),
        targets: targets.concat(),
        part: memory::Rank::ALONE,
        documents: None,
        lengths: None,
        beside: None,
    }
}

/// The tensors of a safetensors file, as f32.
pub fn tensors(path: &Path) -> Tensors {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let values = tensors.into_iter().map(|(name, tensor)| {
        let values = tensor.flatten_all().unwrap();
        let values = values.to_dtype(candle_core::DType::F32).unwrap();
        (name, values.to_vec1().unwrap())
    });
    values.collect()
}

/// The gradients of a session's last step.
pub fn gradients(session: &Session) -> Tensors {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gradients.safetensors");
    session.export_gradients(&path).unwrap();
    tensors(&path)
}

/// A session's weights as it exports them.
pub fn weights(session: &mut Session) -> Tensors {
    let folder = tempfile::tempdir().unwrap();
    session.export(folder.path(), &[], None).unwrap();
    tensors(&folder.path().join("model.safetensors"))
}
