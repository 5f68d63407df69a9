//! `configs/` and configurations written by a run.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::{config, file};
use crate::config::load::Source;
use crate::config::{
    AttentionBackend, AttentionConfig, BatchConfig, Config, DataConfig, DataFormat, Device, Dtype,
    GradDtype, HardwareConfig, LogConfig, LrConfig, Master, MemoryConfig, OffloadConfig,
    OffloadWindow, OptimConfig, OptimizerPlace, RecomputeConfig, Schedule, Size, StateDtype,
    TrainConfig, keys, preset,
};

const REFERENCE: &str = include_str!("../../../../../configs/reference.toml");

/// A configuration in which every key has a value, none its default. The literals are exhaustive:
/// a new field does not compile until it stands here.
fn full() -> Config {
    Config {
        model: model::ModelConfig {
            hidden: 96,
            layers: 5,
            heads: 6,
            kv_heads: 3,
            head_dim: 20,
            ffn: 131,
            vocab: 257,
            tie_embeddings: true,
            qkv_bias: true,
            qk_norm: true,
            norm_eps: 1e-6,
            rope_theta: 500_000.0,
            rope_scaling: Some(model::RopeScaling {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 8192,
            }),
            init_std: 0.01,
        },
        data: DataConfig {
            path: Some("a \"quoted\" folder/tokens.bin".into()),
            format: DataFormat::U16,
            shuffle: false,
            seq: 37,
        },
        batch: BatchConfig { micro: 3, accum: 2 },
        train: TrainConfig {
            steps: 7,
            seed: i64::MAX as u64,
            device: Some(Device::Cuda { index: 1 }),
            dtype: Some(Dtype::Bf16),
            threads: Some(3),
            max_skipped: 5,
        },
        optim: OptimConfig {
            state_dtype: StateDtype::EightBit,
            master: Master::Bf16Split,
            grad_dtype: GradDtype::Bf16,
            beta1: 0.1 + 0.2,
            beta2: 0.999,
            eps: 1e-30,
            weight_decay: 0.0,
            clip_norm: f64::INFINITY,
            f32_states: vec![],
        },
        lr: LrConfig {
            peak: 1.0 / 3.0,
            schedule: Schedule::Wsd,
            warmup_steps: 1,
            decay_steps: Some(2),
            min_ratio: 0.0,
        },
        recompute: RecomputeConfig {
            spec: "core_attn,mlp".to_owned(),
            layers: [("0-3".to_owned(), "full".to_owned())].into(),
        },
        attention: AttentionConfig {
            backend: AttentionBackend::Flash,
        },
        offload: OffloadConfig {
            optimizer: OptimizerPlace::Pinned,
            activations: "block_input".to_owned(),
            fraction: 0.5,
            window: OffloadWindow::End,
            buffer_count: 4,
            slab_mib: 32,
            path: Some("/scratch".into()),
        },
        memory: MemoryConfig {
            limit: Some(Size::Bytes(24 << 30)),
            budget: Some(Size::Percent(95.0)),
            head_chunk: 100,
        },
        hardware: HardwareConfig {
            h2d_gbps: Some(25.5),
            d2h_gbps: Some(24.5),
            both_ways_gbps: Some(40.5),
            peak_tflops: Some(989.0),
        },
        log: LogConfig {
            every: 10,
            trace: true,
            nvtx: true,
        },
    }
}

fn key_names(text: &str) -> BTreeSet<String> {
    let table = Value::Table(toml::from_str::<Table>(text).unwrap());
    let mut found = Vec::new();
    keys::visit("", &table, "a test", &mut found).unwrap();
    found.into_iter().map(|(key, _)| key).collect()
}

fn all_keys() -> BTreeSet<String> {
    keys::KEYS.iter().map(|(key, _)| key.to_string()).collect()
}

/// Parameters of the Llama family, counted from the shape alone.
fn parameters(model: &model::ModelConfig) -> usize {
    let (hidden, q, kv) = (model.hidden, model.q_width(), model.kv_width());
    let bias = if model.qkv_bias { q + 2 * kv } else { 0 };
    let head_norms = if model.qk_norm { 2 * model.head_dim } else { 0 };
    let attention = 2 * hidden * q + 2 * hidden * kv + bias + head_norms;
    let layer = attention + 3 * hidden * model.ffn + 2 * hidden;
    let embeddings = if model.tie_embeddings { 1 } else { 2 };
    embeddings * model.vocab * hidden + model.layers * layer + hidden
}

#[test]
fn presets_have_the_published_parameter_counts() {
    let published = [
        ("tiny", 217_664),
        ("llama-15m", 24_407_712),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen3-8b", 8_190_735_360),
    ];
    for (name, count) in published {
        assert_eq!(
            parameters(&config(&["--config", name]).model),
            count,
            "{name}"
        );
    }
    let names: BTreeSet<_> = published.into_iter().map(|(name, _)| name).collect();
    assert_eq!(preset::names().collect::<BTreeSet<_>>(), names);
}

#[test]
fn the_folder_of_configurations_is_compiled_in() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs");
    let files: BTreeSet<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    let presets = preset::names().map(str::to_owned);
    let expected: BTreeSet<String> = presets.chain(["reference".to_owned()]).collect();
    assert_eq!(files, expected);
}

#[test]
fn every_field_has_a_key_and_every_key_a_field() {
    assert_eq!(key_names(&full().to_toml().unwrap()), all_keys());
}

#[test]
fn a_written_configuration_loads_as_the_same() {
    for original in [
        Config::default(),
        full(),
        config(&["--config", "llama-3.1-405b"]),
    ] {
        let text = original.to_toml().unwrap();
        let read: Config = toml::from_str(&text).unwrap();
        assert_eq!(read, original, "{text}");
    }
    let resolved = config(&["--seq", "37", "--memory-limit", "95%", "--lr", "1e-5"]);
    let (_folder, path) = file(&resolved.to_toml().unwrap());
    assert_eq!(config(&["--config", &path]), resolved);
}

#[test]
fn the_reference_lists_every_key_with_its_default() {
    let read: Config = toml::from_str(REFERENCE).unwrap();
    assert_eq!(read, Config::default());

    // Keys without a default are examples behind a `#`: with them, every key is there, and valid.
    let lines: Vec<&str> = REFERENCE.lines().collect();
    let is_example = |line: &str| line.starts_with('#') && !line.starts_with("# ") && line != "#";
    let examples: String = lines
        .iter()
        .map(|line| if is_example(line) { &line[1..] } else { line })
        .flat_map(|line| [line, "\n"])
        .collect();
    assert_eq!(key_names(&examples), all_keys());

    // The keys written out are exactly those whose default is a value.
    let defaults = Config::default().to_toml().unwrap();
    assert_eq!(key_names(REFERENCE), key_names(&defaults));

    for pair in lines.windows(2) {
        let has_key = is_example(pair[1]) || pair[1].contains(" = ") && !pair[1].starts_with('#');
        assert!(
            !has_key || pair[0].starts_with("# "),
            "no explanation: {}",
            pair[1]
        );
    }
}

#[test]
fn the_default_model_is_that_of_the_default_preset() {
    assert_eq!(config(&[]).model, Config::default().model);
}

#[test]
fn a_preset_wins_over_a_file_of_its_name() {
    let source = Source::open("tiny").unwrap();
    assert_eq!(source.place, "the preset tiny");
}
