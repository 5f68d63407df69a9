//! Experts in files: a tensor for each or all in one, quantised weights, and a layer that is no part of the model.

use crate::hugging_face::folders::{Shape, Tensors, changed, golden, tensors, written};
use files::Dtype;
use model::{ModelConfig, ModelWeights, Origin};

fn shape(family: &str) -> Shape {
    Shape::of(&Origin::read(&golden(family)).unwrap())
}

/// The tensors of an expert's parts one after the other, as transformers has them in memory.
fn fuse(tensors: &mut Tensors, layer: usize, parts: &[&str], name: &str) {
    let part_of = |expert: usize, part: &str| {
        format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight")
    };
    let (mut bytes, mut experts, mut shape) = (Vec::new(), 0, Vec::new());
    while tensors.contains_key(&part_of(experts, parts[0])) {
        for part in parts {
            let (_, own, values) = tensors.remove(&part_of(experts, part)).unwrap();
            shape = own;
            bytes.extend(values);
        }
        experts += 1;
    }
    let dims = vec![experts, parts.len() * shape[0], shape[1]];
    let name = format!("model.layers.{layer}.mlp.experts.{name}");
    tensors.insert(name, (Dtype::F32, dims, bytes));
}

#[test]
fn experts_may_be_one_tensor() {
    let shape = shape("mixtral");
    let folder = changed("mixtral", |tensors| {
        let before = tensors.len();
        for layer in 0..2 {
            fuse(tensors, layer, &["w1", "w3"], "gate_up_proj");
            fuse(tensors, layer, &["w2"], "down_proj");
            let gate = |module| format!("model.layers.{layer}.{module}.gate.weight");
            let router = tensors.remove(&gate("block_sparse_moe")).unwrap();
            tensors.insert(gate("mlp"), router);
        }
        assert_eq!(tensors.len(), before - 2 * 12 + 4);
    });
    assert!(shape.read(folder.path()) == shape.read(&golden("mixtral")));
    // What is read so is exported a tensor for each expert.
    let weights = ModelWeights::open(folder.path(), &shape.parameters).unwrap();
    let out = tempfile::tempdir().unwrap();
    let source = weights.converted(memory::DType::F32);
    files::write_tensors(&files::Disk, out.path(), "model", &source, u64::MAX).unwrap();
    assert!(tensors(out.path()) == tensors(&golden("mixtral")));
}

const PREDICTOR: &str = "model.layers.3.eh_proj.weight";

fn with_predictor(family: &str) -> tempfile::TempDir {
    changed(family, |tensors| {
        let any = tensors.values().next().unwrap().clone();
        tensors.insert(PREDICTOR.into(), any);
    })
}

#[test]
fn a_layer_that_predicts_a_second_token_is_left_out_where_experts_have_biases() {
    for family in ["deepseek_v3", "glm4_moe", "glm4_moe_lite"] {
        let (own, whole) = (shape(family), golden(family));
        let folder = with_predictor(family);
        let weights = ModelWeights::open(folder.path(), &own.parameters).unwrap();
        let said = weights.left_out().unwrap().to_string();
        assert!(said.contains("`model.layers.3.*`"), "{family} {said}");
        assert!(own.read(folder.path()) == own.read(&whole), "{family}");
        let weights = ModelWeights::open(&whole, &own.parameters).unwrap();
        assert_eq!(weights.left_out(), None);
    }
    let other = shape("qwen3_moe");
    let folder = with_predictor("qwen3_moe");
    let refused = ModelWeights::open(folder.path(), &other.parameters).unwrap_err();
    assert!(refused.to_string().contains(PREDICTOR), "{refused}");
}

/// The shape and the weights of a golden model, with other values of some keys of its `config.json`: then weights are made here.
fn resized(family: &str, keys: &[(&str, usize)]) -> (Shape, Tensors) {
    if keys.is_empty() {
        return (shape(family), tensors(&golden(family)));
    }
    let text = std::fs::read_to_string(golden(family).join("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    keys.iter()
        .for_each(|(key, value)| json[*key] = (*value).into());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    let shape = Shape::of(&Origin::read(folder.path()).unwrap());
    let arena: Vec<f32> = (0..shape.layout.elements())
        .map(|place| place as f32)
        .collect();
    let source = shape.outgoing(&arena, memory::DType::F32);
    files::write_tensors(&files::Disk, folder.path(), "model", &source, u64::MAX).unwrap();
    drop(source);
    (shape, tensors(folder.path()))
}

/// A folder with a weight in FP8, with a factor for each of so many blocks of 128 x 128, and one with the values of that weight.
fn quantised(weights: &Tensors, name: &str, blocks: Option<[usize; 2]>) -> [tempfile::TempDir; 2] {
    let [mut quantised, mut plain] = [weights.clone(), weights.clone()];
    let shape = weights[name].1.clone();
    // All codes but NaN.
    let codes: Vec<u8> = (0..shape.iter().product::<usize>())
        .map(|place| (place * 37 % 127) as u8)
        .collect();
    let mut values = Vec::new();
    files::widen(Dtype::F8_E4M3, &codes, &mut values);
    if let Some(blocks) = blocks {
        let factors: Vec<f32> = (0..blocks[0] * blocks[1])
            .map(|block| 0.5 + block as f32)
            .collect();
        for (place, value) in values.iter_mut().enumerate() {
            let (row, column) = (place / shape[1], place % shape[1]);
            *value *= factors[row / 128 * blocks[1] + column / 128];
        }
        let bytes = bytemuck::cast_slice(&factors).to_vec();
        let factors = (Dtype::F32, blocks.to_vec(), bytes);
        quantised.insert(format!("{name}_scale_inv"), factors);
    }
    quantised.insert(name.into(), (Dtype::F8_E4M3, shape.clone(), codes));
    let bytes = bytemuck::cast_slice(&values).to_vec();
    plain.insert(name.into(), (Dtype::F32, shape, bytes));
    [quantised, plain].map(written)
}

/// Also where files have outputs by head, whose blocks then hold rows of several parts.
#[test]
fn quantised_weights_are_widened_by_their_factors() {
    const GATE: &str = "model.layers.0.mlp.gate_proj.weight";
    const BY_HEAD: &str = "model.layers.0.linear_attn.in_proj_qkvz.weight";
    const WIDE: [(&str, usize); 3] = [
        ("linear_num_key_heads", 6),
        ("linear_num_value_heads", 12),
        ("hidden_size", 136),
    ];
    for (family, keys, name, blocks) in [
        ("deepseek_v3", &[][..], GATE, [1, 1]),
        ("llama", &[], GATE, [1, 1]),
        ("qwen3_next", &[], BY_HEAD, [1, 1]),
        ("qwen3_next", &WIDE, BY_HEAD, [2, 2]),
    ] {
        let (shape, weights) = resized(family, keys);
        let folders = quantised(&weights, name, Some(blocks));
        let [widened, plain] = folders.each_ref().map(|folder| shape.read(folder.path()));
        assert!(widened == plain, "{family} {blocks:?}");
        let [folder, plain] = folders.each_ref().map(|folder| folder.path());
        let weights_of = ModelWeights::open(folder, &shape.parameters).unwrap();
        let out = tempfile::tempdir().unwrap();
        let source = weights_of.converted(memory::DType::F32);
        files::write_tensors(&files::Disk, out.path(), "model", &source, u64::MAX).unwrap();
        assert!(tensors(out.path()) == tensors(plain), "{family} {blocks:?}");
        for blocks in [None, Some([blocks[0], blocks[1] + 1])] {
            let [folder, _] = quantised(&weights, name, blocks);
            let refused = ModelWeights::open(folder.path(), &shape.parameters).unwrap_err();
            assert!(refused.to_string().contains("_scale_inv"), "{refused}");
        }
    }
}

/// Which layers are dense, in every way of saying so.
#[test]
fn dense_layers_are_those_that_transformers_makes() {
    let dense = |family: &str, keys: &str| {
        let text = std::fs::read_to_string(golden(family).join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let more: serde_json::Value = serde_json::from_str(keys).unwrap();
        for (key, value) in more.as_object().unwrap() {
            json[key] = value.clone();
        }
        let config = ModelConfig::from_hf(&json.to_string()).unwrap();
        config.experts.unwrap().dense_layers
    };
    assert_eq!(dense("qwen2_moe", r#"{"mlp_only_layers": [0, 2]}"#), [0, 2]);
    assert_eq!(
        dense(
            "qwen2_moe",
            r#"{"mlp_only_layers": [], "decoder_sparse_step": 2}"#
        ),
        [0, 2]
    );
    assert_eq!(
        dense("deepseek_v3", r#"{"first_k_dense_replace": 2}"#),
        [0, 1]
    );
}

#[test]
fn what_would_change_the_arithmetic_is_refused() {
    for (family, key, value) in [
        ("mixtral", "router_jitter_noise", "0.1"),
        ("mixtral", "sliding_window", "5"),
        ("deepseek_v2", "topk_method", "\"noaux_tc\""),
        ("deepseek_v3", "scoring_func", "\"softmax\""),
        ("deepseek_v3", "moe_layer_freq", "2"),
        (
            "deepseek_v3",
            "quantization_config",
            "{\"quant_method\": \"gptq\"}",
        ),
        (
            "qwen3_moe",
            "quantization_config",
            "{\"quant_method\": \"fp8\", \"weight_block_size\": [64, 64]}",
        ),
        ("qwen3_moe", "use_sliding_window", "true"),
        ("qwen3_moe", "mlp_only_layers", "[0, 1.5]"),
        ("qwen3_moe", "mlp_only_layers", "[-1]"),
        ("qwen2_moe", "mlp_only_layers", "[3]"),
        ("qwen2_moe", "mlp_only_layers", "1"),
    ] {
        let text = std::fs::read_to_string(golden(family).join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json[key] = serde_json::from_str(value).unwrap();
        let refused = ModelConfig::from_hf(&json.to_string()).unwrap_err();
        let named = format!("`{key}`");
        assert!(refused.to_string().contains(&named), "{family} {refused}");
    }
}
