//! `config.json` as Hugging Face writes it.

use super::Quantisation;
use super::families::{Family, SavedAs, alias_names, of_family};
use super::keys::{HfConfigError, check_architecture};
use super::rope::max_position;
use super::wrapper::{model_types, text_part};
use crate::{ModelConfig, RopeScaling};
use files::unique_json;
use memory::DType;

impl ModelConfig {
    /// Reads the text of a `config.json`. A model for pictures and text is read as its text part.
    ///
    /// # Errors
    /// [`HfConfigError`] that names the key.
    pub fn from_hf(text: &str) -> Result<ModelConfig, HfConfigError> {
        let json = of_family(text_part(unique_json(text)?)?)?;
        let model_type = json["model_type"].as_str();
        let model_type = model_type.ok_or(HfConfigError::Key("model_type", "a string"))?;
        let family = Family::find(model_type);
        let family = family.ok_or_else(|| unknown(model_type))?;
        check_architecture(&json, family.name(), family.class())?;
        Quantisation::read(&json)?;
        let layers = &json["per_layer_config"];
        if !layers.is_null() {
            let value = layers.to_string();
            return Err(HfConfigError::Unsupported("per_layer_config", value));
        }
        let config = family.read(&json)?;
        config.check_sizes()?;
        let needs_name = config.family().ok() != Some(family) && family.has(&config);
        let config = ModelConfig {
            family: needs_name.then_some(family),
            ..config
        };
        config.validate()?;
        Ok(config)
    }

    /// The longest sequence that the model of a `config.json` was made for, with this scaling of its positions; none where the file
    /// does not say.
    pub fn context_length(&self, text: &str) -> Option<usize> {
        let json = text_part(unique_json(text).ok()?).ok()?;
        let most = json["max_position_embeddings"].as_u64()? as usize;
        let stretched = match &self.rope_scaling {
            // The other kinds name the positions that they begin from.
            Some(RopeScaling::Linear { factor }) => (most as f64 * factor) as usize,
            _ => most,
        };
        Some(max_position(self, stretched))
    }

    /// The text of a `config.json` for a model made here, trained on sequences of `seq` tokens, with weights of `dtype`.
    pub fn to_hf(&self, seq: usize, dtype: DType) -> String {
        let family = self.family();
        let family = family.expect("it was refused where the configuration was read");
        let dtype = dtype_name(dtype);
        let json = family.write(self, &SavedAs { seq, dtype });
        format!("{json:#}\n")
    }
}

/// The error of a file of another family.
fn unknown(model_type: &str) -> HfConfigError {
    let families = Family::NAMES.iter().copied();
    let known = families.chain(alias_names()).chain(model_types());
    HfConfigError::Family {
        found: model_type.into(),
        known: known.collect::<Vec<_>>().join(", "),
    }
}

/// What Hugging Face calls a type of weights.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F32 => "float32",
        other => panic!("weights are written in f32 or bf16, not in {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RopeScaling;

    const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 20, "intermediate_size": 100, "vocab_size": 131, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": true, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#;

    /// Reads a text, after checking that the written form of the result reads back as the same.
    fn read(text: &str) -> ModelConfig {
        let config = ModelConfig::from_hf(text).unwrap();
        let written = config.to_hf(64, DType::F32);
        assert_eq!(ModelConfig::from_hf(&written).unwrap(), config, "{written}");
        config
    }

    /// Llama's text with `beginning` in place of its `model_type`.
    fn with(beginning: &str) -> String {
        LLAMA.replacen("\"model_type\": \"llama\"", beginning, 1)
    }

    #[test]
    fn what_is_written_is_read_again() {
        let config = read(LLAMA);
        assert_eq!(
            (config.q_width(), config.kv_width(), config.tie_embeddings),
            (60, 20, true)
        );
        assert!(!config.qkv_bias && !config.qk_norm);
        assert!(read(&with("\"model_type\": \"qwen2\"")).qkv_bias);
        assert!(read(&with("\"model_type\": \"qwen3\"")).qk_norm);
    }

    #[test]
    fn biases_are_those_of_the_family() {
        let biases = |beginning: &str| {
            let config = read(&with(beginning));
            [config.qkv_bias, config.o_bias, config.mlp_bias]
        };
        let all = "\"attention_bias\": true, \"model_type\"";
        assert_eq!(biases(&format!("{all}: \"llama\"")), [true, true, false]);
        assert_eq!(biases(&format!("{all}: \"qwen3\"")), [true, true, false]);
        assert_eq!(biases(&format!("{all}: \"qwen2\"")), [true, false, false]);
        let none = format!("{all}: \"mistral\", \"sliding_window\": null");
        assert_eq!(biases(&none), [false; 3]);
        let mlp = "\"model_type\": \"llama\", \"mlp_bias\": true";
        assert_eq!(biases(mlp), [false, false, true]);
    }

    /// vLLM and SGLang refuse Gemma 2 if the two differ.
    #[test]
    fn both_keys_of_gemma_have_its_activation() {
        for family in ["gemma2", "gemma3_text"] {
            let text = with(&format!("\"model_type\": \"{family}\""));
            let written = read(&text).to_hf(64, DType::F32);
            for key in ["hidden_act", "hidden_activation"] {
                let named = format!("\"{key}\": \"gelu_pytorch_tanh\"");
                assert!(written.contains(&named), "{written}");
            }
        }
    }

    /// What transformers reads for models of three layers.
    #[test]
    fn windows_are_those_of_the_family() {
        let window = |family: &str, keys: &str| {
            let config = read(&with(&format!("\"model_type\": \"{family}\"{keys}")));
            (config.sliding_window, config.full_attention_layers)
        };
        let none = (None, vec![]);
        assert_eq!(window("llama", ", \"sliding_window\": 5"), none);
        assert_eq!(window("mistral", ", \"sliding_window\": null"), none);
        assert_eq!(
            window("mistral", ", \"sliding_window\": 5"),
            (Some(5), vec![])
        );
        assert_eq!(window("mistral", ""), (Some(4096), vec![]));
        let phi3 = |keys: &str| {
            let text = with(&format!("\"model_type\": \"phi3\"{keys}"));
            let config = read(&text.replace("\"llama3\"", "\"default\""));
            assert!(config.fused_projections);
            config.sliding_window
        };
        assert_eq!(phi3(", \"sliding_window\": 5"), Some(5));
        assert_eq!((phi3(""), phi3(", \"sliding_window\": null")), (None, None));
        for family in ["qwen2", "qwen3"] {
            let unused = ", \"sliding_window\": 5, \"max_window_layers\": 1";
            assert_eq!(window(family, unused), none);
            let used = format!("{unused}, \"use_sliding_window\": true");
            assert_eq!(window(family, &used), (Some(5), vec![0]));
            assert_eq!(
                window(family, &used.replace("layers\": 1", "layers\": 3")),
                none
            );
            assert_eq!(window(family, ", \"use_sliding_window\": true"), none);
            let types = "\"sliding_attention\", \"full_attention\", \"sliding_attention\"";
            let mixed = format!("{used}, \"layer_types\": [{types}]");
            assert_eq!(window(family, &mixed), (Some(5), vec![1]));
        }
    }

    #[test]
    fn a_file_is_of_the_family_that_has_the_features() {
        let plain = ModelConfig::from_hf(LLAMA).unwrap();
        let window = Some(5);
        let family = |config: &ModelConfig| {
            config.validate().ok()?;
            let json: serde_json::Value =
                serde_json::from_str(&config.to_hf(64, DType::F32)).unwrap();
            Some(json["model_type"].as_str().unwrap().to_owned())
        };
        let fused = ModelConfig {
            fused_projections: true,
            rope_scaling: None,
            ..plain.clone()
        };
        assert_eq!(family(&fused).as_deref(), Some("phi3"));
        let written = fused.to_hf(64, DType::F32);
        assert!(written.contains("\"pad_token_id\": null"), "{written}");
        let with = |[qkv_bias, o_bias, mlp_bias, qk_norm]: [u8; 4], window, full: &[usize]| {
            family(&ModelConfig {
                qkv_bias: qkv_bias == 1,
                o_bias: o_bias == 1,
                mlp_bias: mlp_bias == 1,
                qk_norm: qk_norm == 1,
                sliding_window: window,
                full_attention_layers: full.to_vec(),
                ..plain.clone()
            })
        };
        for (features, window, full, expected) in [
            ([0, 0, 0, 0], None, &[][..], Some("llama")),
            ([1, 1, 1, 0], None, &[], Some("llama")),
            ([0, 0, 1, 0], None, &[], Some("llama")),
            ([0, 0, 0, 0], window, &[], Some("mistral")),
            ([1, 0, 0, 0], window, &[1], Some("qwen2")),
            ([0, 0, 0, 1], window, &[0], Some("qwen3")),
            ([1, 1, 0, 1], None, &[], Some("qwen3")),
            ([0, 0, 0, 0], window, &[1], Some("smollm3")),
            ([1, 1, 0, 0], window, &[], Some("smollm3")),
            ([0, 0, 0, 1], None, &[], Some("qwen3")),
            ([0, 1, 0, 0], None, &[], None),
            ([1, 0, 1, 0], None, &[], None),
            ([1, 0, 0, 1], None, &[], None),
        ] {
            let found = with(features, window, full);
            assert_eq!(
                found.as_deref(),
                expected,
                "{features:?} {window:?} {full:?}"
            );
        }
    }

    /// Files spell the keys in two ways.
    #[test]
    fn rotary_scaling_is_read_as_transformers_reads_it() {
        let scaling = |keys: &str| {
            let given = LLAMA.find("\"rope_scaling\"").unwrap();
            let beginning = &LLAMA[..given];
            let texts = ["rope_scaling", "rope_parameters"].map(|name| {
                let positions = "\"max_position_embeddings\": 4096";
                format!("{beginning} {positions}, \"{name}\": {{{keys}}}}}")
            });
            let [older, newer] = texts.map(|text| read(&text).rope_scaling);
            assert_eq!(older, newer);
            older.unwrap()
        };
        let linear = scaling("\"type\": \"linear\", \"factor\": 2");
        assert_eq!(linear, RopeScaling::Linear { factor: 2.0 });
        let yarn = |attention_factor| RopeScaling::Yarn {
            factor: 8.0,
            original_max_position: 512,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor,
            mscale_all_dim: None,
            truncate: true,
        };
        let given = "\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 512";
        assert_eq!(
            scaling(given),
            yarn(None),
            "the factor follows from positions"
        );
        let factor = format!("{given}, \"factor\": 8");
        let weighed = format!("{factor}, \"mscale\": 0.707, \"mscale_all_dim\": 1.0");
        let RopeScaling::Yarn {
            attention_factor, ..
        } = scaling(&weighed)
        else {
            panic!("it is YaRN");
        };
        let expected = (0.0707 * 8f64.ln() + 1.0) / (0.1 * 8f64.ln() + 1.0);
        assert!((attention_factor.unwrap() - expected).abs() < 1e-15);
        let outright = format!("{weighed}, \"attention_factor\": 1.5, \"beta_fast\": null");
        assert_eq!(scaling(&outright), yarn(Some(1.5)));
    }

    /// The values are those of transformers 5.23, of files that say something in two places.
    #[test]
    fn rotary_parameters_that_stand_twice_are_those_of_transformers() {
        let read = |keys: &str| {
            let given = LLAMA.find("\"rope_theta\"").unwrap();
            let positions = "\"max_position_embeddings\": 4096";
            let text = format!("{} {positions}, {keys}}}", &LLAMA[..given]);
            let config = ModelConfig::from_hf(&text);
            config.map(|config| (config.rope_theta, config.rope_scaling))
        };
        let top = "\"rope_theta\": 1e4";
        let newer = "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5e5}";
        let linear = |theta| (theta, Some(RopeScaling::Linear { factor: 2.0 }));
        let older = "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0";
        for (keys, expected) in [
            (format!("{top}, {newer}"), (5e5, None)),
            (format!("{newer}, \"rope_scaling\": {{}}"), (5e5, None)),
            (format!("{top}, {older}, \"rope_theta\": 5e5}}"), linear(5e5)),
            (format!("{older}}}, {newer}"), linear(1e4)),
            (format!("\"rope_theta\": 7, {older}}}, {newer}"), linear(7.0)),
            (
                format!("{older}, \"rope_type\": \"default\"}}"),
                (1e4, None),
            ),
            (
                "\"partial_rotary_factor\": 0.5, \"rope_scaling\": {\"partial_rotary_factor\": 1.0}".into(),
                (1e4, None),
            ),
        ] {
            assert_eq!(read(&keys).unwrap(), expected, "{keys}");
        }
        let llama3 = "\"rope_type\": \"llama3\", \"rope_theta\": 5e5, \"factor\": 8.0, \"low_freq_factor\": 1.0, \
                      \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 1024";
        let both = format!("{top}, \"rope_scaling\": null, \"rope_parameters\": {{{llama3}}}");
        let (theta, scaling) = read(&both).unwrap();
        let original = scaling.unwrap().original_max_position();
        assert_eq!((theta, original), (5e5, Some(1024)));
        for (keys, word) in [
            (
                "\"partial_rotary_factor\": 0.5",
                "`partial_rotary_factor` = 0.5",
            ),
            (
                "\"rope_scaling\": \"linear\"",
                "`rope_scaling` is missing or is not an object",
            ),
            (
                "\"rope_theta\": 1, \"rope_theta\": 2",
                "`rope_theta` is there twice",
            ),
        ] {
            let message = read(keys).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    /// Expected values are transformers 5.23's: a name in its attribute map wins, and names of other families are ignored.
    #[test]
    fn values_that_stand_under_two_names_are_those_of_transformers() {
        let read = |family: &str, keys: &str| {
            let text = format!(
                r#"{{"model_type": "{family}", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 32,
                "intermediate_size": 100, "vocab_size": 131, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 1, "head_dim": 64{keys}}}"#
            );
            ModelConfig::from_hf(&text)
        };
        let [all, local] = [3, 1].map(|count| {
            let keys = ["num_local_experts", "num_experts", "n_routed_experts"].into_iter();
            let keys = keys.zip([4, 3, 5]).take(count);
            keys.map(|(key, value)| format!(", \"{key}\": {value}"))
                .collect::<String>()
        });
        for (family, of_all, of_local) in [
            ("mixtral", 3, 4),
            ("qwen2_moe", 3, 60),
            ("qwen3_moe", 4, 4),
            ("deepseek_v2", 3, 64),
            ("deepseek_v3", 4, 4),
        ] {
            let count = |keys| read(family, keys).unwrap().experts.unwrap().count;
            assert_eq!([count(&all), count(&local)], [of_all, of_local], "{family}");
        }
        for (family, heads) in [
            ("llama", 32),
            ("mistral", 8),
            ("qwen2", 32),
            ("phi3", 32),
            ("mixtral", 8),
            ("qwen2_moe", 16),
            ("qwen3_moe", 4),
        ] {
            assert_eq!(read(family, "").unwrap().kv_heads, heads, "{family}");
        }
        for (family, keys, word) in [
            (
                "deepseek_v3",
                ", \"qk_rope_head_dim\": 32",
                "`head_dim` = 64, where qk_rope_head_dim is 32",
            ),
            (
                "llama",
                ", \"per_layer_config\": [{}]",
                "`per_layer_config` = [{}]",
            ),
        ] {
            let message = read(family, keys).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
        assert!(
            read("deepseek_v2", ", \"qk_rope_head_dim\": 32").is_ok(),
            "it ignores head_dim"
        );
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let cases = [
            ("llama\"", "bloom\"", "model_type `bloom`"),
            (
                "\"head_dim\": 20",
                "\"architectures\": [\"LlamaForSequenceClassification\"]",
                "`LlamaForSequenceClassification`, which is not supported; a llama model is trained as LlamaForCausalLM",
            ),
            (
                "\"head_dim\": 20",
                "\"architectures\": \"LlamaForCausalLM\"",
                "`architectures` is missing or is not a list of names",
            ),
            (
                "\"head_dim\": 20",
                "\"quantization_config\": {\"bits\": 4}",
                "`quantization_config`: weights quantised by null",
            ),
            (
                "\"head_dim\": 20",
                "\"layer_types\": [\"full_attention\", \"sliding_attention\"]",
                "`layer_types` = ",
            ),
            (
                "\"vocab_size\": 131",
                "\"vocab_size\": 18446744073709551615",
                "more than 2^48",
            ),
            (
                "\"num_hidden_layers\": 3",
                "\"num_hidden_layers\": 18446744073709551615",
                "model.layers = 18446744073709551615",
            ),
            (
                "\"vocab_size\": 131",
                "\"vocab\": 1",
                "`vocab_size` is missing",
            ),
            (
                "\"rope_type\": \"llama3\"",
                "\"rope_type\": \"dynamic\"",
                "`rope_scaling` = dynamic",
            ),
            (
                "\"rope_type\": \"llama3\"",
                "\"rope_type\": \"longrope\"",
                "`rope_scaling` = longrope",
            ),
            (
                "\"rope_type\": \"llama3\"",
                "\"partial_rotary_factor\": 0.5",
                "`partial_rotary_factor` = 0.5",
            ),
            (
                "\"rope_type\": \"llama3\"",
                "\"sliding_attention\": {}",
                "`rope_scaling` = {",
            ),
            ("\"head_dim\": 20", "\"head_dim\": 21", "odd"),
            (
                "\"llama\"",
                "\"qwen2\", \"mlp_bias\": true",
                "`mlp_bias` = true",
            ),
            (
                "\"llama\"",
                "\"qwen2\", \"layer_types\": [\"full_attention\"]",
                "`layer_types` is missing or is not a name for each layer",
            ),
            (
                "\"llama\"",
                "\"qwen2\", \"layer_types\": [\"full_attention\", \"full_attention\", \"sliding_attention\"]",
                "`layer_types` = \"sliding_attention\"",
            ),
            ("\"llama\"", "\"gemma\"", "model_type `gemma`"),
            ("\"llama\"", "\"phi\"", "model_type `phi`"),
            ("\"llama\"", "\"phi3\"", "`rope_scaling` = llama3"),
            (
                "\"llama\"",
                "\"mistral\", \"resid_pdrop\": 0.1",
                "`resid_pdrop` = 0.1",
            ),
        ];
        for (from, to, expected) in cases {
            let message = ModelConfig::from_hf(&LLAMA.replacen(from, to, 1))
                .unwrap_err()
                .to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(ModelConfig::from_hf("{").is_err());
    }
}
