//! Runs with weights, gradients and states elsewhere than on the device, and the bits that they must have.

use super::{odd_model, settings, step_batch, variants};
use files::TensorSource;
use memory::{DType, Home, Homes};
use model::ModelConfig;
use optim::{MasterFormat, MomentFormat, OptimizerKind};
use session::{Session, StepOutcome};
use settings::{Settings, StateFormats};

/// Type of the weights, moments, and what stands beside bf16 weights.
pub type Form = (DType, MomentFormat, MasterFormat);

/// States of every form.
pub fn forms() -> Vec<Form> {
    let moments = [
        MomentFormat::F32,
        MomentFormat::Bf16,
        MomentFormat::Quantised,
    ];
    let masters = [
        MasterFormat::F32,
        MasterFormat::Remainder,
        MasterFormat::RemainderByte,
        MasterFormat::None,
    ];
    let f32 = moments.map(|moments| (DType::F32, moments, MasterFormat::None));
    let bf16 = moments.map(|moments| masters.map(|master| (DType::BF16, moments, master)));
    f32.into_iter().chain(bf16.into_iter().flatten()).collect()
}

/// Llama, with its head tied and not, biases, Qwen3's norms, GPT-2, and what newer families have.
pub fn models(layers: usize) -> Vec<(&'static str, ModelConfig)> {
    let [
        bias,
        norm,
        tied,
        gpt2,
        behind,
        both,
        multipliers,
        share,
        delta,
    ] = variants(layers);
    let other_head = |model: &ModelConfig| ModelConfig {
        tie_embeddings: !model.tie_embeddings,
        ..model.clone()
    };
    let tied_norm = other_head(&norm.1);
    let gpt2_head = other_head(&gpt2.1);
    vec![
        ("Llama", odd_model(layers)),
        tied,
        bias,
        norm,
        ("q/k norm, tied", tied_norm),
        gpt2,
        ("GPT-2 with a head", gpt2_head),
        behind,
        both,
        multipliers,
        share,
        delta,
    ]
}

/// The settings of a test, with states of a form.
pub fn with_form(
    model: ModelConfig,
    (dtype, moments, master): Form,
    mode: &str,
    gradients: DType,
) -> Settings {
    Settings {
        states: StateFormats {
            moments,
            master,
            gradients,
            f32_patterns: vec!["*embed_tokens*".into(), "*.wte.*".into()],
        },
        ..settings(model, dtype, mode)
    }
}

/// The optimizers, of which the first makes ranges, the others whole tensors.
pub const OPTIMIZERS: [OptimizerKind; 3] = [
    OptimizerKind::AdamW,
    OptimizerKind::Muon,
    OptimizerKind::Adafactor,
];

/// The same with another optimizer, in the format that its states may have.
pub fn with_optimizer(mut settings: Settings, kind: OptimizerKind) -> Settings {
    settings.optimizer.kind = kind;
    if kind == OptimizerKind::Adafactor {
        settings.states.moments = MomentFormat::F32;
    }
    settings
}

/// Everything that there is on the host, in several chunks for the larger matrices.
pub fn all_pinned() -> Homes {
    Homes {
        states: Home::Pinned,
        weights: Home::Pinned,
        gradients: Home::Pinned,
        chunk_bytes: 20_000,
        ..Homes::default()
    }
}

/// The same with everything on the device.
pub fn resident(settings: &Settings) -> Settings {
    Settings {
        homes: Homes::default(),
        ranks: None,
        ..settings.clone()
    }
}

/// What a run came to, to the bit.
#[derive(PartialEq)]
pub struct Bits {
    /// Number, loss and norm of each step.
    pub steps: Vec<(usize, u32, u32)>,
    /// Weights and states after the last.
    pub state: Vec<u8>,
}

/// Number, loss and norm of a step, to the bit.
pub fn bits(outcome: &StepOutcome) -> (usize, u32, u32) {
    let (loss, norm) = (outcome.loss.to_bits(), outcome.grad_norm.to_bits());
    (outcome.step, loss, norm)
}

/// Weights and optimizer states, to the bit. Every update must be finished.
pub fn state(session: &Session) -> Vec<u8> {
    fn write(source: &dyn TensorSource, bytes: &mut Vec<u8>) {
        for index in 0..source.tensors().len() {
            source.write_to(index, bytes).unwrap();
        }
    }
    let (state, mut bytes) = (session.state(), Vec::new());
    write(&state.weights(), &mut bytes);
    write(&state.optimizer(), &mut bytes);
    bytes
}

/// Asks for steps without waiting for each, and sees every outcome.
pub fn run(
    session: &mut Session,
    settings: &Settings,
    steps: std::ops::Range<usize>,
    mut see: impl FnMut(&StepOutcome),
) -> Bits {
    let mut outcomes = Vec::new();
    for step in steps {
        session.start_step(&step_batch(settings, step)).unwrap();
        outcomes.extend(session.take_finished());
    }
    outcomes.extend(session.finish_step().unwrap());
    outcomes.iter().for_each(&mut see);
    Bits {
        steps: outcomes.iter().map(bits).collect(),
        state: state(session),
    }
}
