//! What a `config.json` says of weights that are quantised.

use super::keys::HfConfigError;
use fancy_regex::Regex;
use memory::Codes;
use serde_json::{Value, json};

/// How the matrices of a folder's linear layers are stored, if as codes.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantisation {
    /// How they are stored.
    pub codes: Codes,
    /// Modules whose matrices are plain numbers all the same, as [`PlainModules`] takes them.
    pub skipped: Vec<String>,
}

impl Quantisation {
    /// What the text of a `config.json` says; none of weights that are plain, or become plain when they are read (FP8).
    ///
    /// # Errors
    /// [`HfConfigError::Quantised`] that names a way which is not read.
    pub fn of(text: &str) -> Result<Option<Quantisation>, HfConfigError> {
        Quantisation::read(&serde_json::from_str(text)?)
    }

    pub(super) fn read(config: &Value) -> Result<Option<Quantisation>, HfConfigError> {
        let said = &config["quantization_config"];
        if said.is_null() || is_fp8(said) {
            return Ok(None);
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
        let skipped = match &said["llm_int8_skip_modules"] {
            Value::Null => Some(Vec::new()),
            skipped => serde_json::from_value(skipped.clone()).ok(),
        };
        let is_no = HfConfigError::Key("llm_int8_skip_modules", "a list of names");
        Ok(Some(Quantisation {
            codes: Codes::Nf4,
            skipped: skipped.ok_or(is_no)?,
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
