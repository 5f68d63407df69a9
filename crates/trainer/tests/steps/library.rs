//! The trainer as a library: what it takes and gives, beside what is known of a step from elsewhere.

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;
use trainer::{Config, Failure, Trainer, configuration};

#[path = "../golden/pictures.rs"]
mod pictures;

/// Two families whose files differ: GPT-2's matrices are transposed there.
const FAMILIES: [&[&str]; 2] = [
    &["model.qkv_bias=true"],
    &[
        "model.norm=layer",
        "model.activation=gelu_tanh",
        "model.positions=learned",
        "model.max_positions=12",
        "model.biases=true",
        "model.tie_embeddings=true",
        "model.kv_heads=4",
    ],
];

/// A small model on the processor: two micro-batches of two rows of eight tokens.
pub fn config(more: &[&str]) -> Config {
    let small = [
        "model.hidden=24",
        "model.layers=2",
        "model.heads=4",
        "model.kv_heads=2",
        "model.head_dim=6",
        "model.ffn=40",
        "model.vocab=23",
        "model.init_std=0.2",
        "train.device=cpu",
        "data.seq=8",
        "batch.micro=2",
        "batch.accum=2",
        "lr.peak=0.01",
    ];
    configuration("tiny", &[&small[..], more].concat()).unwrap()
}

pub fn trainer(more: &[&str]) -> Trainer {
    Trainer::new(config(more)).unwrap()
}

/// Four rows of eight ids, and the tokens after them, two of which are not asked for.
pub fn batch() -> (Tensor, Tensor) {
    let ids: Vec<u32> = (0..32).map(|place| place * 7 % 23).collect();
    let target = |place: i64| {
        if place % 16 == 5 {
            -100
        } else {
            place * 5 % 23
        }
    };
    let targets: Vec<i64> = (0..32).map(target).collect();
    let tensor = |tensor: candle_core::Result<Tensor>| tensor.unwrap();
    (
        tensor(Tensor::from_vec(ids, (4, 8), &Device::Cpu)),
        tensor(Tensor::from_vec(targets, (4, 8), &Device::Cpu)),
    )
}

fn all(trainer: &Trainer) -> BTreeMap<String, Tensor> {
    let names = trainer.parameter_names();
    let named = names.map(|name| (name.to_string(), trainer.parameter(name).unwrap()));
    named.collect()
}

/// The largest difference of two tensors.
fn difference(one: &Tensor, other: &Tensor) -> f32 {
    assert_eq!((one.dims(), one.dtype()), (other.dims(), other.dtype()));
    let difference = (one - other).unwrap().abs().unwrap();
    difference.max_all().unwrap().to_scalar().unwrap()
}

/// Sequences in two parts on one process: the same step but for the order of sums, with the planned peak.
#[test]
fn a_step_in_parts_learns_the_same() {
    let (ids, targets) = batch();
    let mut trainers = [&[][..], &["parallel.context_parts=2"]].map(trainer);
    let losses = trainers.each_mut().map(|trainer| {
        let before = trainer.loss(&ids, &targets).unwrap();
        let outcome = trainer.step(&ids, &targets).unwrap();
        assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
        assert!((before - f64::from(outcome.loss)).abs() < 1e-6);
        before
    });
    assert!((losses[0] - losses[1]).abs() < 1e-6, "{losses:?}");
    let [whole, parts] = trainers.each_ref().map(all);
    for (name, whole) in &whole {
        assert!(difference(whole, &parts[name]) < 1e-4, "{name}");
    }
    let peaks = trainers.map(|trainer| trainer.plan().peak_bytes);
    assert_ne!(peaks[0], peaks[1]);
}

/// AdamW's first step by its definition, with candle: of every parameter, from its gradient to its moments and its value.
#[test]
fn parameters_gradients_and_states_belong_together() {
    for family in FAMILIES {
        let mut trainer = trainer(family);
        let before = all(&trainer);
        let (ids, targets) = batch();
        let loss = trainer.loss(&ids, &targets).unwrap();
        let outcome = trainer.step(&ids, &targets).unwrap();
        assert!((loss - f64::from(outcome.loss)).abs() < 1e-6, "{loss}");
        assert_eq!((outcome.step, outcome.targets), (1, 30));
        assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
        let clip = 1.0_f64.min(1.0 / (f64::from(outcome.grad_norm) + 1e-6));
        let mut squares = 0.0;
        for (name, before) in &before {
            let gradient = trainer.gradient(name).unwrap();
            squares += gradient
                .sqr()
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar::<f32>()
                .unwrap();
            let clipped = (gradient * clip).unwrap();
            let states = trainer.states(name).unwrap();
            let first = (&clipped * 0.1).unwrap();
            let second = (clipped.sqr().unwrap() * 0.05).unwrap();
            assert!(difference(&states["first_moment"], &first) < 1e-7, "{name}");
            assert!(
                difference(&states["second_moment"], &second) < 1e-7,
                "{name}"
            );
            let size = (clipped.abs().unwrap() + 1e-8).unwrap();
            let direction = (clipped / size).unwrap();
            let decay = if before.dims().len() > 1 {
                1.0 - outcome.lr * 0.1
            } else {
                1.0
            };
            let after = ((before * decay).unwrap() - (direction * outcome.lr).unwrap()).unwrap();
            assert!(
                difference(&trainer.parameter(name).unwrap(), &after) < 1e-5,
                "{name}"
            );
        }
        assert!((squares.sqrt() / outcome.grad_norm - 1.0).abs() < 1e-5);
    }
}

#[test]
fn what_is_saved_is_what_parameter_gives_and_comes_back() {
    for family in FAMILIES {
        let mut trainer = trainer(family);
        let (ids, targets) = batch();
        trainer.step(&ids, &targets).unwrap();
        let folder = tempfile::tempdir().unwrap();
        trainer.save(folder.path()).unwrap();
        let path = folder.path().join("model.safetensors");
        let saved = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let here = all(&trainer);
        assert_eq!(saved.len(), here.len());
        let set = ["data.seq=8", "batch.micro=4", "train.device=cpu"];
        let mut again = Trainer::from_pretrained(folder.path(), &set).unwrap();
        for (name, tensor) in &here {
            assert_eq!(difference(tensor, &saved[name]), 0.0, "{name}");
            assert_eq!(
                difference(tensor, &again.parameter(name).unwrap()),
                0.0,
                "{name}"
            );
        }
        let (one, other) = (trainer.loss(&ids, &targets), again.loss(&ids, &targets));
        assert!((one.unwrap() - other.unwrap()).abs() < 1e-6);
    }
}

/// A folder of Qwen3.5 comes back with what was not trained.
#[test]
fn a_text_part_is_saved_with_what_its_folder_has_beside_it() {
    let folders = tempfile::tempdir().unwrap();
    let [model, saved] = ["model", "saved"].map(|name| folders.path().join(name));
    pictures::write(&model);
    let set = ["data.seq=8", "batch.micro=4", "train.device=cpu"];
    let mut trainer = Trainer::from_pretrained(&model, &set).unwrap();
    let (ids, targets) = batch();
    trainer.step(&ids, &targets).unwrap();
    trainer.save(&saved).unwrap();
    let read = |folder: &Path, name: &str| std::fs::read(folder.join(name)).unwrap();
    let bytes = read(&saved, "model.safetensors");
    let written = SafeTensors::deserialize(&bytes).unwrap();
    for (name, dtype, shape, bytes) in pictures::BESIDE {
        let tensor = written.tensor(name).unwrap();
        let read = (tensor.dtype(), tensor.shape(), tensor.data());
        assert_eq!(read, (dtype, shape, bytes), "{name}");
    }
    for (name, _) in all(&trainer) {
        assert!(written.tensor(&pictures::wrapped(&name)).is_ok(), "{name}");
    }
    for name in ["config.json", pictures::PROCESSOR.0] {
        let [before, after] = [&model, &saved].map(|folder| {
            serde_json::from_slice::<serde_json::Value>(&read(folder, name)).unwrap()
        });
        assert_eq!(after, before);
    }
    let mut again = Trainer::from_pretrained(&saved, &set).unwrap();
    let losses = [&mut again, &mut trainer].map(|one| one.loss(&ids, &targets).unwrap());
    assert_eq!(losses[0], losses[1]);
}

#[test]
fn a_parameter_can_be_set() {
    for family in FAMILIES {
        let mut trainer = trainer(family);
        let before = all(&trainer);
        for (name, tensor) in &before {
            let twice = (tensor * 2.0).unwrap();
            trainer
                .set_parameter(name, &twice.to_dtype(DType::F64).unwrap())
                .unwrap();
            assert_eq!(
                difference(&trainer.parameter(name).unwrap(), &twice),
                0.0,
                "{name}"
            );
            assert!(
                trainer
                    .set_parameter(name, &Tensor::new(1f32, &Device::Cpu).unwrap())
                    .is_err()
            );
            trainer.set_parameter(name, tensor).unwrap();
        }
        for (name, tensor) in &all(&trainer) {
            assert_eq!(difference(&before[name], tensor), 0.0, "{name}");
        }
    }
}

#[test]
fn states_have_the_types_that_the_run_keeps_them_in() {
    let wide = [
        "model.hidden=48",
        "model.head_dim=12",
        "model.ffn=100",
        "train.dtype=bf16",
    ];
    let quantised = ["optim.state_dtype=8bit", "optim.master=bf16-split"];
    let mut trainer = trainer(&[&wide[..], &quantised].concat());
    let (ids, targets) = batch();
    trainer.step(&ids, &targets).unwrap();
    let states = trainer.states("model.layers.1.mlp.up_proj.weight").unwrap();
    let described = states
        .iter()
        .map(|(name, state)| (name.as_str(), state.dtype(), state.dims().to_vec()));
    let expected = [
        ("first_moment.absmax", DType::F32, vec![19]),
        ("first_moment.codes", DType::U8, vec![4800]),
        ("remainder", DType::I16, vec![100, 48]),
        ("second_moment.absmax", DType::F32, vec![19]),
        ("second_moment.codes", DType::U8, vec![4800]),
    ];
    assert_eq!(described.collect::<Vec<_>>(), expected);
}

/// The same numbers in less memory, whether a policy comes as text or is written into the configuration.
#[test]
fn a_policy_for_a_layer_changes_memory_alone() {
    let (ids, targets) = batch();
    let step = |config: Config| {
        let mut trainer = Trainer::new(config).unwrap();
        let outcome = trainer.step(&ids, &targets).unwrap();
        assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
        (outcome.loss, outcome.grad_norm, outcome.memory.peak.bytes)
    };
    let mut layer = config(&[]);
    layer.recompute.layers.insert("0".into(), "full".into());
    let (none, layer, full) = (
        step(config(&[])),
        step(layer),
        step(config(&["recompute.spec=full"])),
    );
    assert_eq!(
        [(layer.0, layer.1), (full.0, full.1)],
        [(none.0, none.1); 2]
    );
    assert!(
        full.2 < layer.2 && layer.2 < none.2,
        "{none:?} {layer:?} {full:?}"
    );
}

/// Says what was refused.
pub fn refusal<T>(outcome: Result<T, Failure>, parts: &[&str]) {
    let failure = outcome.err().expect("it is refused");
    assert_eq!(failure.exit_code(), 2, "{failure}");
    for part in parts {
        assert!(
            failure.to_string().contains(part),
            "no {part:?} in: {failure}"
        );
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_place() {
    let mut trainer = trainer(&[]);
    let (ids, targets) = batch();
    let before = all(&trainer);
    let mut refused = |ids: &Tensor, targets: &Tensor, parts: &[&str]| {
        refusal(trainer.step(ids, targets), parts);
        refusal(trainer.loss(ids, targets), parts);
    };
    let short = ids.narrow(1, 0, 7).unwrap();
    refused(
        &short,
        &targets,
        &["`ids` are [4, 7]", "[rows, 8]", "data.seq"],
    );
    let odd = ids.narrow(0, 0, 3).unwrap();
    refused(
        &odd,
        &targets,
        &["[3, 8]", "rows 2 for each of up to 2 micro-batches"],
    );
    let many = Tensor::cat(&[&ids, &ids], 0).unwrap();
    refused(&many, &targets, &["[8, 8]", "batch.accum"]);
    let flat = ids.flatten_all().unwrap();
    refused(&flat, &targets, &["`ids` are [32]"]);
    let half = targets.narrow(0, 0, 2).unwrap();
    refused(&ids, &half, &["[4, 8]", "[2, 8]"]);
    let floats = ids.to_dtype(DType::F32).unwrap();
    refused(&floats, &targets, &["`ids` are F32", "to_dtype"]);
    let over = (&ids + &ids).unwrap();
    refused(&over, &targets, &["`ids` at [0, 2] is 28", "0 to 22"]);
    let below = (&targets - 1.0).unwrap();
    refused(&ids, &below, &["`targets` at [0, 0] is -1"]);
    let none = (targets.zeros_like().unwrap() - 100.0).unwrap();
    refused(&ids, &none, &["all `targets` are -100"]);
    let unknown = trainer.parameter("lm_head");
    refusal(
        unknown,
        &["no parameter `lm_head`", "model.embed_tokens.weight"],
    );
    refusal(
        configuration("tiny", &["data.sequence=8"]),
        &["data.sequence"],
    );
    for (name, tensor) in &before {
        assert_eq!(difference(&trainer.parameter(name).unwrap(), tensor), 0.0);
    }
    let two_rows = |tensor: &Tensor| tensor.narrow(0, 0, 2).unwrap();
    trainer.step(&two_rows(&ids), &two_rows(&targets)).unwrap();
}

/// Steps like those of `config`, for a model from a folder.
const ADAPTERS: [&str; 5] = [
    "data.seq=8",
    "batch.micro=2",
    "batch.accum=2",
    "lr.peak=0.01",
    "train.device=cpu",
];

#[test]
fn adapters_on_a_folder_of_a_model_are_trained_saved_and_trained_on() {
    let folders = tempfile::tempdir().unwrap();
    let [model, saved] = ["model", "adapters"].map(|name| folders.path().join(name));
    let mut whole = trainer(&["model.hidden=64", "model.ffn=64"]);
    whole.save(&model).unwrap();
    let (ids, targets) = batch();
    let loss = whole.loss(&ids, &targets).unwrap();

    let set = [
        &ADAPTERS[..],
        &["lora.rank=2", r#"lora.targets=["q_proj", "down_proj"]"#],
    ]
    .concat();
    let mut adapted = Trainer::from_pretrained(&model, &set).unwrap();
    assert_eq!(adapted.loss(&ids, &targets).unwrap(), loss, "B is zero");
    let before = all(&adapted);
    let outcome = adapted.step(&ids, &targets).unwrap();
    assert_eq!(outcome.memory.peak.bytes, adapted.plan().peak_bytes);
    assert!(adapted.plan().peak_bytes < whole.plan().peak_bytes);
    let is_factor = |name: &str| name.contains(".lora_");
    let factors = before.keys().filter(|name| is_factor(name)).count();
    assert_eq!(factors, 2 * 2 * 2, "A and B of two layers in two blocks");
    for (name, after) in all(&adapted) {
        // A has no gradient while B is zero, but weight decay.
        let moved = difference(&after, &before[&name]) > 0.0;
        assert_eq!(moved, is_factor(&name), "{name}");
    }
    let frozen = "model.layers.0.self_attn.q_proj.weight";
    let gradient = adapted.gradient(frozen);
    assert!(gradient.err().unwrap().to_string().contains("frozen"));
    refusal(
        adapted.set_parameter(frozen, &before[frozen]),
        &[frozen, "the frozen model"],
    );
    adapted.save(&saved).unwrap();

    let mut again = Trainer::from_pretrained(&saved, &ADAPTERS).unwrap();
    for (name, now) in all(&again) {
        assert_eq!(difference(&now, &adapted.parameter(&name).unwrap()), 0.0);
    }
    let losses = [&mut again, &mut adapted].map(|one| one.loss(&ids, &targets).unwrap());
    assert_eq!(losses[0], losses[1]);
    assert_ne!(losses[0], loss);
}

#[test]
fn adapters_on_a_frozen_model_of_codes_go_with_the_library() {
    let set = [
        "model.hidden=64",
        "model.ffn=64",
        "lora.rank=2",
        "lora.base_dtype=nf4",
    ];
    let mut trainer = trainer(&set);
    let name = "model.layers.0.mlp.down_proj.weight";
    let values = trainer.parameter(name).unwrap();
    let distinct = values.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let block: std::collections::BTreeSet<u32> =
        distinct[..64].iter().map(|value| value.to_bits()).collect();
    assert!(block.len() <= 16, "{} values in a block", block.len());
    let (ids, targets) = batch();
    let outcome = trainer.step(&ids, &targets).unwrap();
    assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
    assert_eq!(difference(&trainer.parameter(name).unwrap(), &values), 0.0);
    let folder = tempfile::tempdir().unwrap();
    trainer.save(folder.path()).unwrap();
    refusal(
        Trainer::from_pretrained(folder.path(), &ADAPTERS),
        &["belong to a fresh model", "--init-from"],
    );
}
