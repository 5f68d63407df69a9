//! Patterns that freeze some of a model.

use model::{ModelConfig, NormKind};

/// How many there are.
pub const CHOICES: usize = 5;

/// Nothing; embeddings; these and the first block, so that the backward pass ends above; every matrix of every block, so that
/// blocks have no gradients to send; and norms with some of the matrices that are multiplied as one.
pub fn patterns(model: &ModelConfig, choice: usize) -> Vec<String> {
    let llama: [&[&str]; CHOICES] = [
        &[],
        &["*embed_tokens*"],
        &["*embed_tokens*", "*.layers.0.*"],
        &["*_proj.weight"],
        &["*norm*", "*.k_proj.*", "*.gate_proj.*"],
    ];
    let gpt2: [&[&str]; CHOICES] = [
        &[],
        &["*.wte.*", "*.wpe.*"],
        &["*.wte.*", "*.wpe.*", "*.h.0.*"],
        &["*.attn.*.weight", "*.mlp.*.weight"],
        &["*.ln_?.weight", "*.c_proj.*", "*.wpe.*"],
    ];
    let of_family = match model.norm {
        NormKind::Rms => llama,
        NormKind::Layer => gpt2,
    };
    let is_all_matrices = choice == 3 && model.delta.is_some();
    let of_delta: &[&str] = match is_all_matrices {
        true => &["*.in_proj_*", "*.conv1d.*"],
        false => &[],
    };
    let all = of_family[choice].iter().chain(of_delta);
    all.map(|text| text.to_string()).collect()
}
