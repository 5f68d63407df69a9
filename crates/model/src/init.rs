//! Fresh weights.

use crate::ModelConfig;
use memory::Entry;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// The initial values of the parameter at `index` of the layout: matrices normal with the configuration's standard
/// deviation, norm weights 1, biases 0 (Hugging Face's defaults). The same seed gives the same weights on every
/// machine: each tensor has a random stream of its own.
pub fn initial_values(config: &ModelConfig, entry: &Entry, index: usize, seed: u64) -> Vec<f32> {
    if entry.shape.len() == 1 {
        let value = if entry.name.ends_with("bias") {
            0.0
        } else {
            1.0
        };
        return vec![value; entry.elements()];
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(index as u64);
    let deviation = config.init_std as f32;
    let normal = StandardNormal.sample_iter(random);
    normal
        .take(entry.elements())
        .map(|value: f32| value * deviation)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_normal_and_vectors_plain() {
        let text = r#"{"hidden": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "vocab": 8}"#;
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        let entry = |name: &str, shape: &[usize]| Entry {
            name: name.into(),
            offset: 0,
            shape: shape.to_vec(),
        };
        let values = initial_values(&config, &entry("q_proj.weight", &[200, 100]), 3, 7);
        let mean = values.iter().sum::<f32>() / 20_000.0;
        let deviation = (values.iter().map(|value| value * value).sum::<f32>() / 20_000.0).sqrt();
        assert!(
            mean.abs() < 6e-4 && (deviation - 0.02).abs() < 4e-4,
            "{mean} {deviation}"
        );
        assert_eq!(
            values,
            initial_values(&config, &entry("q_proj.weight", &[200, 100]), 3, 7)
        );
        assert_ne!(
            values,
            initial_values(&config, &entry("q_proj.weight", &[200, 100]), 4, 7)
        );
        assert_ne!(
            values,
            initial_values(&config, &entry("q_proj.weight", &[200, 100]), 3, 8)
        );
        assert_eq!(
            initial_values(&config, &entry("norm.weight", &[2]), 0, 7),
            [1.0, 1.0]
        );
        assert_eq!(
            initial_values(&config, &entry("q_proj.bias", &[2]), 0, 7),
            [0.0, 0.0]
        );
    }
}
