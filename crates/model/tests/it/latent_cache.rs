//! Latent attention over a cache of latents, in its absorbed form, against passes over whole sequences.

use crate::common::harness::{Run, VOCAB, tokens};
use model::{
    AdapterTarget, Architecture, Attention, CacheWidths, LatentConfig, Lora, ModelConfig,
    Parameters, Policy,
};

/// Tokens of each sequence.
const LENGTHS: [usize; 3] = [13, 5, 9];

/// Tokens of each that come one at a time, after the others.
const LAST: usize = 3;

/// Of a family with experts, which has latents; all layers are dense, so that stages can run on tiles.
fn config(latent: &LatentConfig, scaling: &str) -> ModelConfig {
    let text = r#"{"hidden": 20, "layers": 2, "heads": 3, "kv_heads": 3, "head_dim": 10, "ffn": 44, "vocab": 31,
        "experts": {"count": 2, "chosen": 1, "ffn": 4, "dense_layers": [0, 1]}}"#;
    let config: ModelConfig = serde_json::from_str(text).unwrap();
    ModelConfig {
        latent: Some(latent.clone()),
        rope_scaling: serde_json::from_str(scaling).unwrap(),
        ..config
    }
}

/// The logits after each of the last tokens of a sequence, `[LAST + 1, VOCAB]` for each, from passes over all before it.
fn whole(run: &mut Run, sequences: &[Vec<i32>]) -> Vec<Vec<f32>> {
    let mut logits = |sequence: &Vec<i32>| {
        let ends = sequence.len() - LAST..=sequence.len();
        let places: Vec<i32> = (0..sequence.len() as i32).collect();
        ends.flat_map(|end| run.next_logits((1, &sequence[..end], &places[..end]), None))
            .collect()
    };
    sequences.iter().map(&mut logits).collect()
}

/// The same from a cache: each sequence but its last tokens in two parts, then one token of all at a time.
fn cached(run: &mut Run, sequences: &[Vec<i32>]) -> Vec<Vec<f32>> {
    let mut cache = run.cache(&LENGTHS);
    let mut logits = vec![Vec::new(); sequences.len()];
    for (number, sequence) in sequences.iter().enumerate() {
        let prompt = sequence.len() - LAST;
        for part in [0..prompt / 2, prompt / 2..prompt] {
            let places: Vec<i32> = part.clone().map(|place| place as i32).collect();
            let ids = &sequence[part.clone()];
            let of_cache = (&mut cache, number..number + 1, &[part.end][..]);
            let next = run.next_logits((1, ids, &places), Some(of_cache));
            if part.end == prompt {
                logits[number].extend(next);
            }
        }
    }
    for step in (0..LAST).rev() {
        let places: Vec<usize> = LENGTHS.iter().map(|length| length - 1 - step).collect();
        let ids: Vec<i32> = places
            .iter()
            .zip(sequences)
            .map(|(at, of)| of[*at])
            .collect();
        let lengths: Vec<usize> = places.iter().map(|place| place + 1).collect();
        let places: Vec<i32> = places.iter().map(|place| *place as i32).collect();
        let of_cache = (&mut cache, 0..sequences.len(), &lengths[..]);
        let next = run.next_logits((sequences.len(), &ids, &places), Some(of_cache));
        for (logits, next) in logits.iter_mut().zip(next.chunks(VOCAB)) {
            logits.extend(next);
        }
    }
    logits
}

fn adapters() -> Lora {
    Lora {
        rank: 3,
        alpha: 9.0,
        targets: vec![AdapterTarget::new(AdapterTarget::ALL).unwrap()],
        ..Lora::default()
    }
}

/// With a latent of queries and without; turned by neighbours and by halves; with a scale of their own; on tiles; with adapters.
#[test]
fn logits_are_those_of_whole_sequences() {
    let latent = LatentConfig {
        kv: 7,
        q: None,
        rotary_dim: 4,
        v_head_dim: 5,
        neighbours: false,
    };
    let with_q = LatentConfig {
        q: Some(11),
        neighbours: true,
        ..latent.clone()
    };
    let yarn = r#"{"kind": "yarn", "factor": 4.0, "original_max_position": 8, "beta_fast": 4.0, "beta_slow": 1.0,
        "attention_factor": 1.3, "mscale_all_dim": 0.7, "truncate": true}"#;
    for (latent, scaling) in [(&latent, "null"), (&with_q, "null"), (&with_q, yarn)] {
        let config = config(latent, scaling);
        for (tile_tokens, has_adapters) in [(None, false), (Some(4), false), (None, true)] {
            let parameters = match has_adapters {
                true => Parameters::adapted(adapters()),
                false => Parameters::default(),
            };
            let architecture = Architecture::declared(&config, Attention::Flash, parameters);
            let architecture = architecture.in_tiles(tile_tokens);
            let widths = CacheWidths {
                keys: 7 + 4,
                values: None,
            };
            assert_eq!(architecture.cache_shape().of_tokens(), (2, Some(widths)));
            let policy = Policy::keep_all_of(architecture.labels, 2);
            let mut run = Run::on_cpu(architecture, &policy);
            let sequences = [1, 2, 3].map(|seed| tokens(seed).0);
            let cut = |(ids, length): (&Vec<i32>, &usize)| ids[..*length].to_vec();
            let sequences: Vec<Vec<i32>> = sequences.iter().zip(&LENGTHS).map(cut).collect();
            let [expected, found] = [whole(&mut run, &sequences), cached(&mut run, &sequences)];
            assert_ne!(expected, found, "the sums are of another order");
            for (expected, found) in expected.iter().zip(&found) {
                assert_eq!((LAST + 1) * VOCAB, expected.len());
                let rows = expected.chunks(VOCAB);
                assert!(
                    rows.clone()
                        .zip(rows.skip(1))
                        .all(|(row, next)| row != next)
                );
                for (expected, found) in expected.iter().zip(found) {
                    let distance = (expected - found).abs();
                    assert!(distance < 1e-5, "{config:?}: {expected} {found}");
                }
            }
        }
    }
}
