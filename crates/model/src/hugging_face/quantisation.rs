//! Reads from `config.json` how a folder's weights are quantised.

use super::keys::HfConfigError;
use fancy_regex::Regex;
use files::unique_json;
use memory::Codes;
use serde_json::{Value, json};

/// How a folder stores quantised matrices: as codes those of its linear layers, or in MXFP4 those of its experts alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantisation {
    /// How they are stored.
    pub codes: Codes,
    /// Modules whose matrices are plain numbers all the same, as [`PlainModules`] takes them.
    pub plain: Vec<String>,
}

impl Quantisation {
    /// Reads the text of a `config.json`; none if the weights are plain, or become plain when they are read (FP8).
    ///
    /// # Errors
    /// [`HfConfigError::Quantised`] that names a way which is not read.
    pub fn of(text: &str) -> Result<Option<Quantisation>, HfConfigError> {
        Quantisation::read(&unique_json(text)?)
    }

    pub(super) fn read(config: &Value) -> Result<Option<Quantisation>, HfConfigError> {
        let said = &config["quantization_config"];
        if said.is_null() || is_fp8(said) {
            return Ok(None);
        }
        if said["quant_method"] == "mxfp4" {
            // The folder's tensors say which experts are codes, and nothing else ever is.
            return Ok(Some(Quantisation {
                codes: Codes::Mxfp4,
                plain: Vec::new(),
            }));
        }
        let refused = |way: String| Err(HfConfigError::Quantised(way));
        if said["quant_method"] != "bitsandbytes" {
            return refused(format!("quantised by {}", said["quant_method"]));
        }
        let is_on = |key: &str| said[key] == true;
        if is_on("load_in_8bit") || is_on("_load_in_8bit") {
            return refused("in 8 bits by LLM.int8 (load_in_8bit)".into());
        }
        if said["bnb_4bit_quant_type"] != "nf4" {
            let kind = &said["bnb_4bit_quant_type"];
            return refused(format!(
                "with bnb_4bit_quant_type {kind} instead of \"nf4\""
            ));
        }
        if !is_on("bnb_4bit_use_double_quant") {
            return refused("in nf4 without bnb_4bit_use_double_quant".into());
        }
        let plain = match &said["llm_int8_skip_modules"] {
            Value::Null => Some(Vec::new()),
            plain => serde_json::from_value(plain.clone()).ok(),
        };
        let is_no = HfConfigError::Key("llm_int8_skip_modules", "a list of names");
        Ok(Some(Quantisation {
            codes: Codes::Nf4,
            plain: plain.ok_or(is_no)?,
        }))
    }
}

/// Modules whose matrices are plain numbers though those of others are codes, by the rules of transformers: named by the end
/// of their names, or by the beginning up to a dot, which may be a regular expression.
#[derive(Clone, Debug, Default)]
pub struct PlainModules(Vec<(String, Option<Regex>)>);

impl PlainModules {
    /// The modules that some patterns name.
    ///
    /// # Errors
    /// The pattern that is no regular expression.
    pub fn new(patterns: &[String]) -> Result<PlainModules, String> {
        let read = |pattern: &String| {
            // Plain names need no expression, and folders may list hundreds.
            let is_name = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
            if pattern.chars().all(is_name) {
                return Ok((pattern.clone(), None));
            }
            let beginning = Regex::new(&format!(r"^(?:{pattern})(?:(?<=\.)|(?=\.|$))"));
            let beginning = beginning.map_err(|_| pattern.clone())?;
            Ok((pattern.clone(), Some(beginning)))
        };
        patterns
            .iter()
            .map(read)
            .collect::<Result<_, _>>()
            .map(PlainModules)
    }

    /// Whether a module is one of them.
    pub fn has(&self, module: &str) -> bool {
        self.0.iter().any(|(pattern, beginning)| {
            let begins = || match (beginning, module.strip_prefix(&pattern[..])) {
                (Some(beginning), _) => beginning.is_match(module).unwrap_or(false),
                (None, Some(rest)) => {
                    rest.is_empty() || rest.starts_with('.') || pattern.ends_with('.')
                }
                (None, None) => false,
            };
            module.ends_with(&pattern[..]) || begins()
        })
    }
}

/// Whether weights are quantised as those of DeepSeek-V3 are published: FP8, with a factor for each block of 128 x 128.
fn is_fp8(quantization: &Value) -> bool {
    quantization["quant_method"] == "fp8" && quantization["weight_block_size"] == json!([128, 128])
}

#[cfg(test)]
mod tests {
    use super::PlainModules;

    #[test]
    fn plain_modules_are_named_by_their_ends_and_beginnings() {
        const QUERIES: &str = "model.layers.3.self_attn.q_proj";
        const EXPERTS: &str = "model.layers.3.mlp.experts.gate_up_proj";
        const SHARED: &str = "model.layers.3.mlp.shared_experts.gate_proj";
        for (pattern, module, is_plain) in [
            ("q_proj", QUERIES, true),
            ("model.layers.3", QUERIES, true),
            ("model.layers.", QUERIES, true),
            ("model.layer", QUERIES, false),
            ("layers.3", QUERIES, false),
            (r"model\.layers\.[0-3]", QUERIES, true),
            (r"model\.layers\.[4-9]", QUERIES, false),
            (r".*\.self_attn", QUERIES, true),
            (r".*\.self", QUERIES, false),
            (r".*\.experts", EXPERTS, true),
            (r".*\.experts", SHARED, false),
        ] {
            let plain = PlainModules::new(&[pattern.into()]).unwrap();
            assert_eq!(plain.has(module), is_plain, "{pattern} {module}");
        }
        assert_eq!(PlainModules::new(&["(".into()]).unwrap_err(), "(");
    }
}
