//! `configs/` and configurations written by a run.

use memory::Window;
use std::collections::BTreeSet;
use units::{Reduce, Zero};

use toml::{Table, Value};

use super::{config, file};
use crate::keys::KEYS;
use crate::load::Source;
use crate::schedule::PipelineSchedule;
use crate::{
    AttentionBackend, AttentionConfig, AutoOr, BaseType, BatchConfig, CheckpointConfig,
    CollectivesConfig, Config, DataConfig, Device, DpoConfig, DpoLoss, EvalConfig,
    ExpertProductsConfig, FloatType, Fp8Config, Fp8Gradients, Fp8Recipe, Fp8Weights, Graphs,
    HardwareConfig, HostPlace, KernelChoice, LogConfig, LoraConfig, LrConfig, MemoryConfig,
    Objective, OffloadConfig, OptimConfig, OptimizerPlace, ParallelConfig, RankEngine,
    RecomputeConfig, Release, Size, TrainConfig, dotted, preset, reference,
};
use data::{Format, Packing};
use model::{
    ActivationFunction, DeltaConfig, ExpertsConfig, LatentConfig, LoraInit, NormKind,
    NormPlacement, PositionKind, QkNormExtent, RouterAuxKind, ScoreKind,
};
use optim::{LrAdjust, MasterFormat, MomentFormat, OptimizerKind, ScheduleKind};

const REFERENCE: &str = include_str!("../../../../configs/reference.toml");

/// A configuration in which every key has a value, none its default. The literals are exhaustive:
/// a new field does not compile until it stands here.
fn full() -> Config {
    Config {
        model: model::ModelConfig {
            family: Some(Value::from("qwen3").try_into().unwrap()),
            hidden: 96,
            layers: 5,
            heads: 6,
            kv_heads: 3,
            head_dim: 20,
            ffn: 131,
            vocab: 257,
            tie_embeddings: true,
            qkv_bias: true,
            o_bias: true,
            mlp_bias: false,
            fused_projections: false,
            qk_norm: true,
            qk_norm_over: QkNormExtent::All,
            sliding_window: Some(9),
            full_attention_layers: vec![0, 2],
            norm: NormKind::Rms,
            norm_placement: NormPlacement::After,
            zero_centered_norm: true,
            activation: ActivationFunction::ClampedSwiglu,
            swiglu_alpha: 1.5,
            swiglu_limit: 5.0,
            positions: PositionKind::Rotary,
            max_positions: Some(64),
            biases: false,
            dropout: 0.0,
            norm_eps: 1e-6,
            rope_theta: 500_000.0,
            rope_scaling: Some(model::RopeScaling::Yarn {
                factor: 8.0,
                original_max_position: 8192,
                beta_fast: 16.0,
                beta_slow: 2.0,
                attention_factor: Some(1.25),
                mscale_all_dim: Some(0.707),
                truncate: false,
            }),
            rotary_share: 0.5,
            window_rope_theta: Some(300.0),
            no_rope_layers: vec![1, 4],
            query_temperature: Some(0.3),
            embedding_multiplier: 12.0,
            scale_embedding: true,
            residual_multiplier: 0.22,
            attention_multiplier: Some(0.125),
            attn_logit_softcapping: Some(40.0),
            final_logit_softcapping: Some(20.0),
            attention_sinks: true,
            attention_gate: true,
            logits_scaling: 10.0,
            init_std: 0.01,
            router_aux: 1.0 / 3.0,
            router_aux_kind: RouterAuxKind::Sequence,
            router_z_loss: 1e-3,
            experts: Some(ExpertsConfig {
                count: 12,
                chosen: 3,
                ffn: 29,
                shared_ffn: 31,
                shared_gate: true,
                dense_layers: vec![0, 3],
                score: ScoreKind::Sigmoid,
                normed: true,
                factor: 2.5,
                groups: 4,
                chosen_groups: 2,
                biases: true,
                choice_bias: true,
            }),
            latent: Some(LatentConfig {
                kv: 11,
                q: Some(13),
                rotary_dim: 6,
                v_head_dim: 18,
                neighbours: true,
            }),
            delta: Some(DeltaConfig {
                key_heads: 3,
                value_heads: 9,
                key_head_dim: 10,
                value_head_dim: 14,
                conv_width: 5,
                attention_layers: vec![1, 2],
                by_key_head: true,
            }),
        },
        data: DataConfig {
            path: Some("a \"quoted\" folder/tokens.bin".into()),
            format: Format::U16,
            any_tokenizer: true,
            shuffle: false,
            packing: Packing::Pad,
            prefetch: 5,
            seq: 37,
        },
        batch: BatchConfig { micro: 3, accum: 2 },
        train: TrainConfig {
            steps: 7,
            epochs: Some(0.1 + 0.2),
            objective: Objective::Dpo,
            seed: i64::MAX as u64,
            device: Some(Device::Cuda { index: 1 }),
            dtype: Some(FloatType::Bf16),
            threads: Some(3),
            max_skipped: 5,
            freeze: vec!["*embed*".to_owned()],
            graphs: Graphs::Off,
        },
        optim: OptimConfig {
            state_dtype: MomentFormat::Quantised,
            master: MasterFormat::Remainder,
            grad_dtype: FloatType::Bf16,
            beta1: 0.1 + 0.2,
            beta2: 0.999,
            eps: 1e-30,
            weight_decay: 0.0,
            clip_norm: f64::INFINITY,
            f32_states: vec![],
            kind: OptimizerKind::Muon,
            muon_momentum: 0.1 + 0.2,
            nesterov: false,
            ns_steps: 7,
            ns_coefficients: [2.0, -1.5, 0.5],
            ns_eps: 1e-9,
            ns_dtype: FloatType::F32,
            lr_adjust: LrAdjust::Original,
            router_bias_rate: 1e-3,
            matrices: Some(vec!["*mlp*".into()]),
            // Another optimizer's.
            adafactor_eps: Config::default().optim.adafactor_eps,
            beta2_decay: -0.8,
            clip_threshold: 1.0,
            release: Release::Backward,
        },
        lr: LrConfig {
            peak: 1.0 / 3.0,
            matrices: Some(0.02),
            schedule: ScheduleKind::Wsd,
            warmup_steps: 1,
            decay_steps: Some(2),
            min_ratio: 0.0,
        },
        fp8: Fp8Config {
            recipe: Fp8Recipe::Block,
            gradients: Fp8Gradients::E4m3,
            except: vec!["*down_proj*".into()],
            save: false,
            weights: Fp8Weights::Step,
            fast_accumulation: true,
        },
        lora: LoraConfig {
            rank: Some(12),
            alpha: Some(3.0),
            targets: vec!["q_proj".to_owned()],
            layers: Some(vec![1]),
            rank_pattern: [("q_proj".to_owned(), 4)].into(),
            alpha_pattern: [("v_proj".to_owned(), 1.5)].into(),
            dropout: 0.25,
            rslora: true,
            init: LoraInit::Gaussian,
            b_lr_ratio: 4.0,
            base_dtype: Some(BaseType::Bf16),
            base_skip: vec!["o_proj".into()],
        },
        dpo: DpoConfig {
            beta: 0.25,
            loss: DpoLoss::Sigmoid,
            reference: Some("a reference".into()),
        },
        recompute: RecomputeConfig {
            spec: "core_attn,mlp".to_owned(),
            layers: [("0-3".to_owned(), "full".to_owned())].into(),
            state_interval: Some(16),
            costs: Some("profile.json".into()),
        },
        attention: AttentionConfig {
            backend: AttentionBackend::Flash,
            kernels: KernelChoice::Sm80,
        },
        experts: ExpertProductsConfig {
            kernels: KernelChoice::Sm90,
        },
        offload: OffloadConfig {
            optimizer: OptimizerPlace::Folder("scratch/states".into()),
            parameters: HostPlace::Pinned,
            parameter_slots: 3,
            gradients: HostPlace::Pinned,
            activations: "block_input".to_owned(),
            fraction: 0.5,
            window: Window::End,
            buffer_count: 4,
            slab_mib: 32,
            path: Some("/scratch".into()),
        },
        eval: EvalConfig {
            every: Some(11),
            path: Some("held-out.bin".into()),
            micro_batch: Some(8),
            samples: Some(99),
        },
        checkpoint: CheckpointConfig {
            every: Some(500),
            keep_last: Some(3),
            keep_best: true,
            blocking: true,
        },
        memory: MemoryConfig {
            limit: Some(Size::Bytes(24 << 30)),
            budget: Some(AutoOr::Number(Size::Percent(95.0))),
            force: true,
            head_chunk: AutoOr::Number(100),
            expert_unit: Some(4),
            tile_tokens: Some(300),
        },
        hardware: HardwareConfig {
            h2d_gbps: Some(25.5),
            d2h_gbps: Some(24.5),
            both_ways_gbps: Some(40.5),
            disk_gbps: Some(6.5),
            link_gbps: Some(450.5),
            memory_gbps: Some(3000.5),
            peak_tflops: Some(989.0),
            algorithms: Some("algorithms.json".into()),
        },
        collectives: CollectivesConfig {
            engine: RankEngine::Mpi,
            zero: Some(Zero::Gradients),
            bucket_size: Size::Bytes(1 << 20),
            reduce: Reduce::Step,
            overlap_grad_reduce: false,
            overlap_param_gather: false,
            reshard_after_forward: false,
            shard_group: Some(8),
            timeout_s: 60,
        },
        rank: None,
        engine_bytes: None,
        parallel: ParallelConfig {
            context: 1,
            context_parts: Some(1),
            pipeline: 1,
            schedule: PipelineSchedule::OneForwardOneBackward,
            virtual_stage_layers: Some(2),
            pipeline_layout: Some(vec![1, 1]),
        },
        log: LogConfig {
            every: 10,
            tensorboard: true,
            sample_every: Some(20),
            sample_prompt: "Once".to_owned(),
            sample_tokens: 21,
            trace: true,
            nvtx: true,
        },
    }
}

fn key_names(text: &str) -> BTreeSet<String> {
    let table = Value::Table(toml::from_str::<Table>(text).unwrap());
    let mut found = Vec::new();
    dotted::visit("", &table, "a test", &mut found).unwrap();
    found.into_iter().map(|(key, _)| key).collect()
}

fn all_keys() -> BTreeSet<String> {
    KEYS.iter().map(|key| key.name.to_owned()).collect()
}

/// Parameters, counted from the shape alone; the biases of routers are none, since nothing trains them.
fn parameters(model: &model::ModelConfig) -> usize {
    let hidden = model.hidden;
    if let Some(positions) = model.max_positions {
        let attention = 4 * hidden * hidden + 4 * hidden;
        let layer = attention + 2 * hidden * model.ffn + model.ffn + hidden + 4 * hidden;
        return (model.vocab + positions + 2) * hidden + model.layers * layer;
    }
    let layers = (0..model.layers).map(|layer| {
        let feed_forward = match (&model.experts, model.has_experts(layer)) {
            (Some(experts), true) => of_experts(model, experts),
            _ => 3 * hidden * model.ffn,
        };
        let norms = if model.norm_placement == NormPlacement::Both {
            4
        } else {
            2
        };
        let mixer = match &model.delta {
            Some(delta) if model.has_delta(layer) => of_delta(model, delta),
            _ => of_attention(model),
        };
        mixer + feed_forward + norms * hidden
    });
    let embeddings = if model.tie_embeddings { 1 } else { 2 };
    embeddings * model.vocab * hidden + layers.sum::<usize>() + hidden
}

fn of_delta(model: &model::ModelConfig, delta: &DeltaConfig) -> usize {
    let values = delta.value_heads * delta.value_head_dim;
    let mixed = 2 * delta.key_heads * delta.key_head_dim + values;
    let products = model.hidden * (mixed + 2 * values + 2 * delta.value_heads);
    products + mixed * delta.conv_width + 2 * delta.value_heads + delta.value_head_dim
}

fn of_attention(model: &model::ModelConfig) -> usize {
    let (hidden, q, kv) = (model.hidden, model.q_width(), model.kv_width());
    if let Some(latent) = &model.latent {
        let queries = latent.q.map_or(hidden * q, |rank| (hidden + 1 + q) * rank);
        let values = model.heads * latent.v_head_dim;
        let up = model.heads * (model.head_dim - latent.rotary_dim) + values;
        let down = hidden * (latent.kv + latent.rotary_dim) + latent.kv;
        return queries + down + latent.kv * up + values * hidden;
    }
    let bias = if model.qkv_bias { q + 2 * kv } else { 0 };
    let head_norms = match (model.qk_norm, model.qk_norm_over) {
        (false, _) => 0,
        (true, QkNormExtent::Head) => 2 * model.head_dim,
        (true, QkNormExtent::All) => q + kv,
    };
    let o_bias = if model.o_bias { hidden } else { 0 };
    let sinks = if model.attention_sinks {
        model.heads
    } else {
        0
    };
    let gate = if model.attention_gate { hidden * q } else { 0 };
    2 * hidden * q + 2 * hidden * kv + bias + o_bias + head_norms + sinks + gate
}

fn of_experts(model: &model::ModelConfig, experts: &ExpertsConfig) -> usize {
    let widths = experts.count * experts.ffn + experts.shared_ffn;
    let router = experts.count * model.hidden;
    let gate = if experts.shared_gate { model.hidden } else { 0 };
    let of_biases = experts.count * (2 * experts.ffn + model.hidden + 1);
    let biases = if experts.biases { of_biases } else { 0 };
    3 * model.hidden * widths + router + gate + biases
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
        ("tiny-moe", 527_680),
        ("tiny-mla", 474_496),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_404_352),
        ("smollm3-3b", 3_075_098_624),
        ("granite-4.1-3b", 3_402_836_480),
        ("olmo-3-7b", 7_298_011_136),
        ("ministral-3-8b", 8_489_553_920),
        ("phi-4-mini", 3_836_021_760),
        ("glm-4.5-air", 106_852_245_504),
        ("glm-4.7-flash", 29_943_390_976),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-3-12b", 11_766_034_176),
        ("gemma-3-27b", 27_009_346_304),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("qwen3.5-0.8b", 752_393_024),
        ("qwen3.5-2b", 1_881_825_088),
        ("qwen3.5-4b", 4_205_751_296),
        ("qwen3.5-9b", 8_953_803_264),
        ("qwen3.5-27b", 26_895_998_464),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ];
    for (name, count) in published {
        assert_eq!(parameters(&config(Some(name)).model), count, "{name}");
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
        .filter(|path| path.extension().is_some_and(|end| end == "toml"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    let presets = preset::names().map(str::to_owned);
    let expected: BTreeSet<String> = presets.chain(["reference".to_owned()]).collect();
    assert_eq!(files, expected);
}

#[test]
fn every_field_has_a_key_and_every_key_a_field() {
    let (yarn, mut llama3, mut long) = (full(), full(), full());
    llama3.model.rope_scaling = Some(model::RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192,
    });
    long.model.rope_scaling = Some(model::RopeScaling::LongRope {
        factor: 8.0,
        original_max_position: 8192,
        short_factor: vec![1.0],
        long_factor: vec![8.0],
        attention_factor: None,
    });
    let keys = [yarn, llama3, long].map(|config| key_names(&config.to_toml().unwrap()));
    let all = keys.iter().fold(BTreeSet::new(), |all, keys| &all | keys);
    assert_eq!(all, all_keys());
}

#[test]
fn a_written_configuration_loads_as_the_same() {
    for original in [Config::default(), full(), config(Some("llama-3.1-405b"))] {
        let text = original.to_toml().unwrap();
        let read: Config = toml::from_str(&text).unwrap();
        assert_eq!(read, original, "{text}");
    }
    let set = ["data.seq=37", "memory.limit=95%", "lr.peak=1e-5"].map(String::from);
    let original = config(None).with(&set).unwrap();
    let (_folder, path) = file(&original.to_toml().unwrap());
    assert_eq!(config(Some(&path)), original);
}

/// After a change of keys, `BLESS_REFERENCE=1 cargo test -p settings` writes the reference anew.
#[test]
fn the_reference_is_that_of_the_keys() {
    if std::env::var_os("BLESS_REFERENCE").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/reference.toml");
        std::fs::write(path, reference()).unwrap();
        return;
    }
    assert_eq!(REFERENCE, reference());
    let read: Config = toml::from_str(REFERENCE).unwrap();
    assert_eq!(read, Config::default());

    // Keys without a default are examples behind a `#`: with them, every key is there, and valid.
    let is_example = |line: &str| line.starts_with('#') && !line.starts_with("# ");
    let lines = REFERENCE.lines();
    let examples = lines.map(|line| if is_example(line) { &line[1..] } else { line });
    let examples: Vec<&str> = examples.collect();
    assert_eq!(key_names(&examples.join("\n")), all_keys());
}

/// What a later layer says replaces what an earlier one said, and is checked as the command line is.
#[test]
fn further_settings_are_those_of_the_command_line() {
    let tiny = config(None);
    let with = |set: &str| tiny.with(&[set.to_owned()]);
    assert_eq!(with("model.kv_heads=4").unwrap().model.kv_heads, 4);
    for (set, words) in [
        ("model.kv_heads=3", "not a multiple"),
        ("model.kv_head=4", "did you mean `model.kv_heads`?"),
        ("offload.window=end", "--offload-optimizer pinned"),
    ] {
        let message = with(set).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn the_default_model_is_that_of_the_default_preset() {
    assert_eq!(config(None).model, Config::default().model);
}

#[test]
fn a_preset_wins_over_a_file_of_its_name() {
    let source = Source::open("tiny").unwrap();
    assert_eq!(source.place, "the preset tiny");
}
