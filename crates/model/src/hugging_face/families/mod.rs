//! The families of models, a file each: what a `config.json` of its `model_type` says, what transformers' class assumes of
//! keys that are missing, and what is refused. To add a family, add its file, and a line to `FAMILIES`.

mod aliases;
mod decoder;
mod deepseek_v2;
mod deepseek_v3;
mod experts;
mod gaps;
mod gated_delta;
mod gemma;
mod gemma2;
mod gemma3_text;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt2;
mod gpt_oss;
mod granite;
mod latent;
mod llama;
mod ministral3;
mod mistral;
mod mixtral;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod smollm3;
mod windows;

use super::keys::{HfConfigError, Keys};
use crate::ModelConfig;
pub(super) use aliases::{names as alias_names, of_family};
use gaps::Gaps;
pub(super) use latent::PREDICTORS;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use serde_json::{Map, Value};
use std::fmt;

/// All families. A model that names none is written as the first that has all its features.
const FAMILIES: [&Description; 24] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &phi3::FAMILY,
    &mixtral::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3_moe::FAMILY,
    &deepseek_v2::FAMILY,
    &deepseek_v3::FAMILY,
    &gpt2::FAMILY,
    &smollm3::FAMILY,
    &granite::FAMILY,
    &olmo2::FAMILY,
    &olmo3::FAMILY,
    &gemma2::FAMILY,
    &gemma3_text::FAMILY,
    &gpt_oss::FAMILY,
    &ministral3::FAMILY,
    &glm4_moe::FAMILY,
    &glm4_moe_lite::FAMILY,
    &qwen3_next::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_5_moe::FAMILY,
];

/// What a family's file says.
struct Description {
    /// Its `model_type`.
    model_type: &'static str,
    /// Transformers' class that has the language model's head.
    class: &'static str,
    /// Transformers' attribute map: the first name stands for the second, and wins where a file has both.
    aliases: &'static [(&'static str, &'static str)],
    /// How files name experts.
    experts: ExpertNames,
    /// The model that the keys describe.
    read: fn(&Keys) -> Result<ModelConfig, HfConfigError>,
    /// The keys of a model, without its class and type. What the family does not have is left out.
    write: fn(&ModelConfig, &SavedAs) -> Value,
}

impl Description {
    /// A family without aliases, whose files name experts as most do; by its `model_type` and class.
    const fn new(
        [model_type, class]: [&'static str; 2],
        read: fn(&Keys) -> Result<ModelConfig, HfConfigError>,
        write: fn(&ModelConfig, &SavedAs) -> Value,
    ) -> Description {
        Description {
            model_type,
            class,
            aliases: &[],
            experts: ExpertNames::USUAL,
            read,
            write,
        }
    }
}

/// How a model is saved.
pub(super) struct SavedAs {
    /// The longest sequence that it was trained on.
    pub(super) seq: usize,
    /// What transformers calls the type of its weights.
    pub(super) dtype: &'static str,
}

/// The names of experts in files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExpertNames {
    /// The router.
    pub(crate) router: &'static str,
    /// Their tensors.
    pub(crate) tensors: ExpertTensors,
}

/// The tensors of experts in files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ExpertTensors {
    /// Each expert has its own.
    ByExpert {
        /// The module of the experts.
        module: &'static str,
        /// The parts of an expert's first product.
        up: &'static [&'static str],
        /// The second product.
        down: &'static [&'static str],
    },
    /// A tensor has those of all experts, inputs by outputs, and columns of gate and up in turn (gpt-oss).
    Interleaved,
}

impl ExpertNames {
    /// The names that most families have.
    pub(crate) const USUAL: ExpertNames = ExpertNames {
        router: "mlp.gate",
        tensors: ExpertTensors::ByExpert {
            module: "mlp",
            up: &["gate_proj", "up_proj"],
            down: &["down_proj"],
        },
    };
}

/// A family of models: a `model_type` of transformers.
#[derive(Clone, Copy)]
pub struct Family(&'static Description);

impl Family {
    /// The names of all families.
    pub const NAMES: &'static [&'static str] = &{
        let mut names = [""; FAMILIES.len()];
        let mut at = 0;
        while at < names.len() {
            names[at] = FAMILIES[at].model_type;
            at += 1;
        }
        names
    };

    fn all() -> impl Iterator<Item = Family> {
        FAMILIES.into_iter().map(Family)
    }

    /// The family with this `model_type`.
    pub(super) fn find(model_type: &str) -> Option<Family> {
        Family::all().find(|family| family.name() == model_type)
    }

    /// Its `model_type`.
    pub fn name(self) -> &'static str {
        self.0.model_type
    }

    /// Transformers' class that has the language model's head.
    pub(super) fn class(self) -> &'static str {
        self.0.class
    }

    /// How files name the experts of a model that names no family. Plans ask often, so only families with names of their own are
    /// tried; none before them in the list has experts.
    pub(crate) fn expert_names_of(config: &ModelConfig) -> ExpertNames {
        let mut own = Family::all().filter(|family| family.experts() != ExpertNames::USUAL);
        let found = own.find(|family| family.has(config));
        found.map_or(ExpertNames::USUAL, Family::experts)
    }

    /// How its files name experts.
    pub(crate) fn experts(self) -> ExpertNames {
        self.0.experts
    }

    /// The model that a file of this family describes.
    pub(super) fn read(self, json: &Value) -> Result<ModelConfig, HfConfigError> {
        (self.0.read)(&Keys(&self.without_aliases(json)))
    }

    /// The same file with each value under the one name by which it is read.
    fn without_aliases(self, json: &Value) -> Value {
        let mut json = json.clone();
        for (alias, key) in self.0.aliases {
            if !json[*alias].is_null() {
                json[*key] = json[*alias].take();
            }
        }
        json
    }

    /// The `config.json` of a model of this family.
    pub(super) fn write(self, config: &ModelConfig, saved: &SavedAs) -> Value {
        let mut json = Map::new();
        json.insert("architectures".into(), vec![self.class()].into());
        json.insert("model_type".into(), self.name().into());
        let Value::Object(keys) = (self.0.write)(config, saved) else {
            unreachable!("a family writes an object");
        };
        json.extend(keys);
        Value::Object(json)
    }

    /// Whether a file of this family can describe a model.
    pub(super) fn has(self, config: &ModelConfig) -> bool {
        matches!(self.gaps(config), Gaps::None)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Family {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Family, D::Error> {
        let name = String::deserialize(deserializer)?;
        let unknown = || D::Error::custom(format!("{name:?} is no family of models"));
        Family::find(&name).ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RopeScaling;
    use serde_json::json;

    /// A file with sizes alone, and what transformers 5.23 makes of it.
    #[test]
    fn missing_keys_are_what_transformers_assumes() {
        let read_with = |model_type: &str, more: Value| {
            let mut text = json!({
                "model_type": model_type, "hidden_size": 80, "num_hidden_layers": 9, "num_attention_heads": 40,
                "intermediate_size": 48, "vocab_size": 100, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            });
            let all = text.as_object_mut().expect("it is an object");
            all.extend(more.as_object().cloned().unwrap_or_default());
            ModelConfig::from_hf(&text.to_string()).unwrap()
        };
        let read = |model_type: &str| read_with(model_type, json!({}));
        for (family, kv_heads, head_dim, norm_eps, rope_theta, is_tied) in [
            ("llama", 40, 2, 1e-6, 1e4, false),
            ("mistral", 8, 2, 1e-6, 1e4, false),
            ("phi3", 40, 2, 1e-5, 1e4, false),
            ("smollm3", 4, 2, 1e-6, 2e6, true),
            ("granite", 40, 2, 1e-6, 1e4, false),
            ("olmo2", 40, 2, 1e-5, 1e4, false),
            ("olmo3", 40, 2, 1e-5, 5e5, false),
            ("ministral3", 8, 128, 1e-5, 1e6, false),
            ("glm4_moe_lite", 40, 256, 1e-5, 1e4, false),
            ("gemma2", 4, 256, 1e-6, 1e4, true),
            ("gemma3_text", 4, 256, 1e-6, 1e6, true),
            ("gpt_oss", 8, 64, 1e-5, 150_000.0, false),
            ("qwen3_next", 2, 256, 1e-6, 1e4, false),
            ("qwen3_5_text", 4, 256, 1e-6, 1e4, false),
            ("qwen3_5_moe_text", 2, 256, 1e-6, 1e4, false),
        ] {
            let config = read(family);
            let found = (config.kv_heads, config.head_dim, config.norm_eps);
            assert_eq!(found, (kv_heads, head_dim, norm_eps), "{family}");
            let found = (config.rope_theta, config.tie_embeddings);
            assert_eq!(found, (rope_theta, is_tied), "{family}");
        }
        assert_eq!(read("smollm3").no_rope_layers, [3, 7]);
        assert_eq!(read("granite").attention_multiplier, Some(1.0));
        let gemma2 = read("gemma2");
        let caps = (
            gemma2.attn_logit_softcapping,
            gemma2.final_logit_softcapping,
        );
        assert_eq!(caps, (Some(50.0), Some(30.0)));
        assert_eq!(gemma2.full_attention_layers, [1, 3, 5, 7]);
        let gemma3 = read("gemma3_text");
        assert_eq!(gemma3.window_rope_theta, Some(1e4));
        assert_eq!(gemma3.full_attention_layers, [5]);
        // An empty object counts as missing there, and the class assumes YaRN.
        let gpt_oss = read_with("gpt_oss", json!({"rope_scaling": {}}));
        assert!(matches!(
            gpt_oss.rope_scaling,
            Some(RopeScaling::Yarn {
                truncate: false,
                ..
            })
        ));
        assert_eq!(gpt_oss.sliding_window, Some(128));
        assert_eq!((gpt_oss.swiglu_alpha, gpt_oss.swiglu_limit), (1.702, 7.0));
        let next = read("qwen3_next");
        assert_eq!(
            (next.rotary_dim(), next.experts.unwrap().normed),
            (64, true)
        );
        let delta = next.delta.unwrap();
        let widths = [delta.key_heads, delta.value_heads, delta.mixed_width()];
        assert_eq!(
            (widths, &delta.attention_layers[..]),
            ([16, 32, 8192], &[3, 7][..])
        );
        let every_second = read_with("qwen3_5_text", json!({"full_attention_interval": 2}));
        assert_eq!(every_second.delta.unwrap().attention_layers, [1, 3, 5, 7]);
        let olmo3 = read("olmo3");
        let windows = (olmo3.sliding_window, &olmo3.full_attention_layers[..]);
        assert_eq!(windows, (Some(4096), &[3, 7][..]));
        let ministral3 = read("ministral3");
        assert_eq!(ministral3.query_temperature, Some(0.1));
        let Some(RopeScaling::Yarn {
            factor,
            original_max_position,
            attention_factor,
            ..
        }) = ministral3.rope_scaling
        else {
            panic!("it is YaRN");
        };
        assert_eq!(
            (factor, original_max_position, attention_factor),
            (16.0, 16384, Some(1.0))
        );
        let lite = read("glm4_moe_lite").experts.unwrap();
        assert_eq!(
            (lite.count, lite.ffn, lite.factor, &lite.dense_layers[..]),
            (64, 1536, 1.8, &[0][..])
        );
    }

    /// Each is as transformers 5.23 takes it, or refused where that ignores or mixes keys.
    #[test]
    fn rotary_embeddings_by_kind_of_layer_are_those_of_transformers() {
        let read = |keys: &str| {
            let text = format!(
                r#"{{"model_type": "olmo3", "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 9,
                "intermediate_size": 8, "max_position_embeddings": 64{keys}}}"#
            );
            let config = ModelConfig::from_hf(&text).map_err(|error| error.to_string());
            config.map(|it| {
                (
                    it.rope_theta,
                    it.window_rope_theta,
                    it.rope_scaling.is_some(),
                )
            })
        };
        let yarn = r#", "rope_scaling": {"rope_type": "yarn", "factor": 2}"#;
        let kinds =
            r#", "rope_parameters": {"full_attention": {"rope_theta": 7, "rope_type": "default"}}"#;
        for (keys, expected) in [
            (String::new(), (5e5, None, false)),
            (r#", "rope_theta": 700"#.into(), (700.0, Some(5e5), false)),
            (
                format!(r#", "rope_theta": 700{yarn}"#),
                (700.0, Some(5e5), true),
            ),
            (kinds.into(), (7.0, Some(5e5), false)),
        ] {
            assert_eq!(read(&keys), Ok(expected), "{keys}");
        }
        for (keys, word) in [
            (
                r#", "rope_parameters": {"rope_theta": 7, "rope_type": "default"}"#,
                "`rope_parameters` = ",
            ),
            (
                r#", "rope_scaling": {"type": "yarn", "factor": 2}"#,
                "`rope_scaling` = ",
            ),
            (
                r#", "original_max_position_embeddings": 32"#,
                "`original_max_position_embeddings` = 32",
            ),
        ] {
            let message = read(keys).unwrap_err();
            assert!(message.contains(word), "{message}");
        }
    }
}
