//! GLM-4.7-Flash: DeepSeek-V3 whose dense layers are listed, and with other defaults.

use super::decoder::Assumed;
use super::latent::{AssumedExperts, AssumedWidths, PREDICTORS};
use super::{Description, SavedAs, deepseek_v3, experts};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::Value;

pub(super) const FAMILY: Description = Description {
    aliases: &[
        ("num_local_experts", "n_routed_experts"),
        (PREDICTORS[1], PREDICTORS[0]),
    ],
    ..Description::new(["glm4_moe_lite", "Glm4MoeLiteForCausalLM"], read, write)
};

const ASSUMED: Assumed = Assumed {
    norm_eps: 1e-5,
    ..Assumed::LLAMA
};

const EXPERTS: AssumedExperts = AssumedExperts {
    count: 64,
    chosen: 4,
    ffn: 1536,
    shared: 1,
    factor: 1.8,
};

const WIDTHS: AssumedWidths = AssumedWidths {
    kv: 512,
    q: 768,
    own: 192,
    rotary: 64,
    value: 256,
};

const TYPES: &str = "mlp_layer_types";

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    let config = deepseek_v3::read_attention(keys, &ASSUMED, &WIDTHS)?;
    let dense_layers = dense_layers(keys, config.layers)?;
    Ok(ModelConfig {
        experts: Some(deepseek_v3::experts_by_sigmoid(
            keys,
            &EXPERTS,
            dense_layers,
            [1, 1],
        )?),
        ..config
    })
}

/// Its class does not look at `first_k_dense_replace`, which files have all the same.
fn dense_layers(keys: &Keys, layers: usize) -> Result<Vec<usize>, HfConfigError> {
    if keys.is_null(TYPES) {
        return Ok(vec![0]);
    }
    let types = keys.get(TYPES).as_array();
    let types = types.filter(|types| types.len() == layers);
    let types = types.ok_or(HfConfigError::Key(TYPES, "a name for each layer"))?;
    match types
        .iter()
        .find(|kind| **kind != "dense" && **kind != "sparse")
    {
        Some(other) => Err(HfConfigError::Unsupported(TYPES, other.to_string())),
        None => Ok((0..layers)
            .filter(|layer| types[*layer] == "dense")
            .collect()),
    }
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let experts = experts::of(config);
    let mut json = deepseek_v3::write(config, saved);
    let kinds = (0..config.layers).map(|layer| match experts.are_in(layer) {
        true => "sparse",
        false => "dense",
    });
    json[TYPES] = kinds.collect();
    // Its class does not read the key, and others would read the first layers.
    let keys = json.as_object_mut();
    keys.expect("it was made as an object")
        .shift_remove("first_k_dense_replace");
    json
}
