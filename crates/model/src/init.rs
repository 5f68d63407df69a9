//! Fresh weights.

use crate::ModelConfig;
use crate::weights::CHUNK;
use memory::{Entry, Layout};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Hands every parameter's initial values to `set` in chunks: the first element's place in the arena, and values.
/// Matrices are normal with the configuration's standard deviation, norm weights 1, biases 0 (Hugging Face's
/// defaults). The same seed gives the same weights on every machine: each tensor has a random stream of its own.
///
/// # Errors
/// What `set` returns.
pub fn initialise<E>(
    config: &ModelConfig,
    layout: &Layout,
    seed: u64,
    mut set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let mut chunk = Vec::with_capacity(CHUNK);
    for (index, entry) in layout.entries().iter().enumerate() {
        let mut values = InitialValues::new(config, entry, index, seed);
        for start in (0..entry.elements()).step_by(CHUNK) {
            chunk.clear();
            chunk.extend(values.by_ref().take(CHUNK.min(entry.elements() - start)));
            set(entry.offset + start, &chunk)?;
        }
    }
    Ok(())
}

/// The endless initial values of one parameter.
pub struct InitialValues {
    random: ChaCha8Rng,
    deviation: f32,
    constant: Option<f32>,
}

impl InitialValues {
    /// Those of the parameter at `index` of the layout.
    pub fn new(config: &ModelConfig, entry: &Entry, index: usize, seed: u64) -> InitialValues {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(index as u64);
        let constant = match entry.shape.len() {
            1 if entry.name.ends_with("bias") => Some(0.0),
            1 => Some(1.0),
            _ => None,
        };
        InitialValues {
            random,
            deviation: config.init_std as f32,
            constant,
        }
    }
}

impl Iterator for InitialValues {
    type Item = f32;

    fn next(&mut self) -> Option<f32> {
        Some(self.constant.unwrap_or_else(|| {
            let value: f32 = StandardNormal.sample(&mut self.random);
            value * self.deviation
        }))
    }
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
        let values = |name: &str, shape: &[usize], index, seed| -> Vec<f32> {
            let entry = entry(name, shape);
            InitialValues::new(&config, &entry, index, seed)
                .take(entry.elements())
                .collect()
        };
        let matrix = |index, seed| values("q_proj.weight", &[200, 100], index, seed);
        let (n, drawn) = (20_000.0, matrix(3, 7));
        let mean = drawn.iter().sum::<f32>() / n;
        let deviation = (drawn.iter().map(|value| value * value).sum::<f32>() / n).sqrt();
        assert!(
            mean.abs() < 6e-4 && (deviation - 0.02).abs() < 4e-4,
            "{mean} {deviation}"
        );
        assert_eq!(drawn, matrix(3, 7));
        assert_ne!(drawn, matrix(4, 7));
        assert_ne!(drawn, matrix(3, 8));
        assert_eq!(values("norm.weight", &[2], 0, 7), [1.0, 1.0]);
        assert_eq!(values("q_proj.bias", &[2], 0, 7), [0.0, 0.0]);
    }

    #[test]
    fn chunks_cover_every_parameter_once() {
        let text = r#"{"hidden": 300, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "vocab": 2000}"#;
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        let layout = crate::layout(&config, |_, _| false);
        assert!(
            layout.entries()[0].elements() > 2 * CHUNK,
            "the embedding needs three chunks"
        );
        let mut filled = vec![f32::NAN; layout.elements()];
        let set = |offset: usize, values: &[f32]| -> Result<(), ()> {
            assert!(
                filled[offset..offset + values.len()]
                    .iter()
                    .all(|value| value.is_nan())
            );
            filled[offset..offset + values.len()].copy_from_slice(values);
            Ok(())
        };
        initialise(&config, &layout, 1, set).unwrap();
        for (index, entry) in layout.entries().iter().enumerate() {
            let expected: Vec<f32> = InitialValues::new(&config, entry, index, 1)
                .take(entry.elements())
                .collect();
            assert_eq!(filled[entry.range()], expected);
        }
    }
}
