//! The default of every key; `configs/reference.toml` lists the same.

use std::collections::BTreeMap;

use model::ModelConfig;

use super::choices::{
    DataFormat, GradDtype, Master, OffloadWindow, OptimizerPlace, Schedule, StateDtype,
};
use super::schema::{
    AttentionConfig, BatchConfig, Config, DataConfig, HardwareConfig, LogConfig, LrConfig,
    MemoryConfig, OffloadConfig, OptimConfig, RecomputeConfig, TrainConfig,
};

/// The shape of the default run, `tiny`.
fn default_model() -> ModelConfig {
    ModelConfig {
        hidden: 64,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn: 176,
        vocab: 256,
        tie_embeddings: false,
        qkv_bias: false,
        qk_norm: false,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        init_std: 0.02,
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model: default_model(),
            data: DataConfig::default(),
            batch: BatchConfig::default(),
            train: TrainConfig::default(),
            optim: OptimConfig::default(),
            lr: LrConfig::default(),
            recompute: RecomputeConfig::default(),
            attention: AttentionConfig::default(),
            offload: OffloadConfig::default(),
            memory: MemoryConfig::default(),
            hardware: HardwareConfig::default(),
            log: LogConfig::default(),
        }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            path: None,
            format: DataFormat::Auto,
            shuffle: true,
            seq: 1024,
        }
    }
}

impl Default for BatchConfig {
    fn default() -> Self {
        Self { micro: 1, accum: 1 }
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 1000,
            seed: 0,
            device: None,
            dtype: None,
            threads: None,
            max_skipped: 3,
        }
    }
}

impl Default for OptimConfig {
    fn default() -> Self {
        Self {
            state_dtype: StateDtype::F32,
            master: Master::F32,
            grad_dtype: GradDtype::F32,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip_norm: 1.0,
            f32_states: vec!["*norm*".to_owned(), "*embed_tokens*".to_owned()],
        }
    }
}

impl Default for LrConfig {
    fn default() -> Self {
        Self {
            peak: 3e-4,
            schedule: Schedule::Constant,
            warmup_steps: 0,
            decay_steps: None,
            min_ratio: 0.1,
        }
    }
}

impl Default for RecomputeConfig {
    fn default() -> Self {
        Self {
            spec: "none".to_owned(),
            layers: BTreeMap::new(),
        }
    }
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self {
            optimizer: OptimizerPlace::None,
            activations: "none".to_owned(),
            fraction: 1.0,
            window: OffloadWindow::Forward,
            buffer_count: 3,
            slab_mib: 64,
            path: None,
        }
    }
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            limit: None,
            budget: None,
            head_chunk: 512,
        }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            every: 10,
            trace: false,
            nvtx: false,
        }
    }
}
