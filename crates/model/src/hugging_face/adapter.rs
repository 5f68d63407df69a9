//! Adapters in folders as PEFT writes them: `adapter_config.json`, and `adapter_model.safetensors` with both factors of
//! every layer.

use super::error::WeightsError;
use super::weights::read_turned;
use crate::lora::{AdapterTarget, LinearModule, Lora, LoraInit, OF_EXPERTS};
use crate::parameters::{Parameter, Parameters};
use crate::stored::Stored;
use files::{Dtype, Tensors, in_chunks, unique_json, widen};
use indexmap::IndexMap;
use memory::{Cover, Layout};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The file that says what adapters are like.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// The name, without its ending, of the file with the factors.
pub const ADAPTER_STEM: &str = "adapter_model";

/// The prefix that PEFT puts before the names of the model's modules.
const PREFIX: &str = "base_model.model.";

/// Why an adapter's folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum AdapterError {
    /// A file that cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A setting that is not built, or that is no setting.
    #[error("{path}: `{key}` is {value}, which {why}")]
    Setting {
        path: PathBuf,
        key: &'static str,
        value: String,
        why: &'static str,
    },
}

/// The settings that `adapter_config.json` holds.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// `lora.rank`.
    pub rank: usize,
    /// `lora.alpha`.
    pub alpha: f64,
    /// `lora.targets`.
    pub targets: Vec<String>,
    /// `lora.layers`.
    pub layers: Option<Vec<usize>>,
    /// `lora.rank_pattern`.
    pub ranks: IndexMap<String, usize>,
    /// `lora.alpha_pattern`.
    pub alphas: IndexMap<String, f64>,
    /// `lora.dropout`.
    pub dropout: f64,
    /// `lora.rslora`.
    pub is_rank_stabilised: bool,
    /// `lora.init`.
    pub init: LoraInit,
    /// The folder or the name of the model that it belongs to; may be empty.
    pub base: String,
}

/// The largest rank that is read. No layer has so many inputs and outputs.
const RANK_MAX: usize = 1 << 20;

/// Settings that change what an adapter computes and are not built. They must be absent, null, false or empty.
const NOT_BUILT: [&str; 19] = [
    "use_dora",
    "modules_to_save",
    "exclude_modules",
    "layers_pattern",
    "layer_replication",
    "trainable_token_indices",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "loftq_config",
    "eva_config",
    "corda_config",
    "arrow_config",
    "alora_invocation_tokens",
    "megatron_config",
    "velora_config",
    "kasa_config",
    "lora_ga_config",
    "monteclora_config",
];

impl AdapterConfig {
    /// Reads a folder's `adapter_config.json`.
    ///
    /// # Errors
    /// [`AdapterError`], which names the key.
    pub fn read(folder: &Path) -> Result<AdapterConfig, AdapterError> {
        let path = folder.join(ADAPTER_CONFIG);
        let text = files::read_small_text(&path).map_err(|source| AdapterError::Read {
            path: path.clone(),
            source,
        })?;
        let config: Map<String, Value> =
            unique_json(&text).map_err(|error| AdapterError::Read {
                path: path.clone(),
                source: error.into(),
            })?;
        parse(&config).map_err(|(key, why)| AdapterError::Setting {
            path,
            key,
            value: config.get(key).unwrap_or(&Value::Null).to_string(),
            why,
        })
    }

    /// The text of the file for adapters of these layers, of a model in the folder `base`.
    pub fn text(lora: &Lora, parameters: &Parameters, base: &str) -> String {
        let is_of_experts = |module: &&LinearModule| module.experts.is_some();
        let (of_experts, modules): (Vec<_>, Vec<_>) =
            parameters.modules.iter().partition(is_of_experts);
        let is_transposed = |one: &Parameter| one.stored == Stored::Transposed;
        let number = |value: f64| match value.fract() == 0.0 {
            true => json!(value as i64),
            false => json!(value),
        };
        let ranks = lora.ranks.iter();
        let ranks = ranks.map(|(pattern, rank)| (pattern.text.clone(), json!(rank)));
        let alphas = lora.alphas.iter();
        let alphas = alphas.map(|(pattern, alpha)| (pattern.text.clone(), number(*alpha)));
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora.rank,
            "lora_alpha": number(lora.alpha),
            "lora_dropout": f64::from(lora.dropout),
            "use_rslora": lora.is_rank_stabilised,
            "init_lora_weights": match lora.init {
                LoraInit::Kaiming => json!(true),
                LoraInit::Gaussian => json!("gaussian"),
            },
            "target_modules": targets(&modules, lora.layers.as_deref()),
            "target_parameters": experts_with_adapters(&of_experts, lora.layers.is_some()),
            "layers_to_transform": lora.layers,
            "rank_pattern": ranks.collect::<Map<_, _>>(),
            "alpha_pattern": alphas.collect::<Map<_, _>>(),
            "bias": "none",
            "fan_in_fan_out": parameters.in_layout().any(is_transposed),
            "inference_mode": true,
        });
        let text = serde_json::to_string_pretty(&config).expect("keys are strings");
        format!("{text}\n")
    }
}

/// The `target_modules` or `target_parameters` of a file: the ends of the modules' names, if in these layers all modules whose
/// names end so have adapters, or else their whole names.
fn targets<'a>(modules: &[&'a LinearModule], layers: Option<&[usize]>) -> BTreeSet<&'a str> {
    let adapted = || modules.iter().filter(|module| module.rank.is_some());
    let ends: BTreeSet<&str> = adapted().map(|module| module.end()).collect();
    let is_left_out = |module: &&LinearModule| {
        let is_asked = layers.is_none_or(|layers| layers.contains(&module.layer));
        is_asked && module.rank.is_none() && ends.contains(module.end())
    };
    match modules.iter().any(is_left_out) {
        false => ends,
        true => adapted().map(|module| &module.name[..]).collect(),
    }
}

/// The `target_parameters` of a file. PEFT takes them in all layers, whatever `layers_to_transform` says, so with layers each
/// is named as a whole.
fn experts_with_adapters<'a>(modules: &[&'a LinearModule], has_layers: bool) -> BTreeSet<&'a str> {
    if !has_layers {
        return targets(modules, None);
    }
    let adapted = modules.iter().filter(|module| module.rank.is_some());
    adapted.map(|module| &module.name[..]).collect()
}

/// The names of `target_parameters`: parameters of experts, since others are not built.
fn parameters_of_experts(
    list: &Value,
    has_layers: bool,
) -> Result<Vec<String>, (&'static str, &'static str)> {
    const KEY: &str = "target_parameters";
    let names = match list {
        Value::Null => Some(Vec::new()),
        Value::Array(list) => texts(list),
        _ => None,
    };
    let names = names.ok_or((KEY, IS_NO))?;
    let of_experts = |name: &String| {
        let target = AdapterTarget::new(name);
        target.is_ok_and(|target| target.names_experts())
    };
    if !names.iter().all(of_experts) {
        return Err((
            KEY,
            "names other parameters than those of experts, which is not built",
        ));
    }
    if has_layers && !names.iter().all(|name| name.contains(".layers.")) {
        return Err((
            "layers_to_transform",
            "does not hold for target_parameters, which PEFT takes in all layers; name them with their layers",
        ));
    }
    Ok(names)
}

/// Says that a value cannot be read.
const IS_NO: &str = "is of another kind than PEFT writes";

fn texts(list: &[Value]) -> Option<Vec<String>> {
    list.iter()
        .map(|text| text.as_str().map(str::to_owned))
        .collect()
}

/// Reads the file's keys; an error names the key, and says what is wrong with it.
fn parse(config: &Map<String, Value>) -> Result<AdapterConfig, (&'static str, &'static str)> {
    let none = Value::Null;
    let get = |key: &str| config.get(key).unwrap_or(&none);
    let is_unset = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    if get("peft_type") != "LORA" {
        return Err(("peft_type", "is not built; LORA is"));
    }
    if !matches!(get("bias"), Value::Null) && get("bias") != "none" {
        return Err(("bias", "is not built; biases are frozen (none)"));
    }
    if let Some(key) = NOT_BUILT.into_iter().find(|key| !is_unset(get(key))) {
        return Err((key, "is not built"));
    }
    let init = match get("init_lora_weights") {
        Value::Null | Value::Bool(_) => LoraInit::Kaiming,
        Value::String(name) if name == "gaussian" => LoraInit::Gaussian,
        _ => return Err(("init_lora_weights", "is not built; true and gaussian are")),
    };
    let whole = |value: &Value| value.as_u64().map(|number| number as usize);
    let rank = |value: &Value| whole(value).filter(|rank| (1..=RANK_MAX).contains(rank));
    let alpha = |value: &Value| value.as_f64().filter(|alpha| (*alpha as f32).is_normal());
    let layers = match get("layers_to_transform") {
        Value::Null => None,
        Value::Array(list) if list.is_empty() => None,
        Value::Array(list) => Some(list.iter().map(whole).collect::<Option<Vec<_>>>()),
        one => Some(whole(one).map(|one| vec![one])),
    };
    let of_experts = parameters_of_experts(get("target_parameters"), layers.is_some())?;
    let targets = match get("target_modules") {
        Value::Null if !of_experts.is_empty() => Some(Vec::new()),
        Value::String(all) if all == AdapterTarget::ALL => Some(vec![all.clone()]),
        // A text alone is always an expression for whole names.
        Value::String(expression) => Some(vec![format!("({expression})")]),
        Value::Array(list) => texts(list),
        _ => None,
    };
    Ok(AdapterConfig {
        rank: rank(get("r")).ok_or(("r", "is no rank that a layer can have"))?,
        alpha: alpha(get("lora_alpha")).ok_or(("lora_alpha", "is no factor"))?,
        targets: [targets.ok_or(("target_modules", IS_NO))?, of_experts].concat(),
        layers: layers
            .map(|layers| layers.ok_or(("layers_to_transform", IS_NO)))
            .transpose()?,
        ranks: by_pattern(get("rank_pattern"), rank).ok_or(("rank_pattern", IS_NO))?,
        alphas: by_pattern(get("alpha_pattern"), alpha).ok_or(("alpha_pattern", IS_NO))?,
        dropout: match get("lora_dropout") {
            Value::Null => 0.0,
            share => share
                .as_f64()
                .filter(|share| (0.0..1.0).contains(share))
                .ok_or(("lora_dropout", "is no share from 0 to below 1"))?,
        },
        is_rank_stabilised: match get("use_rslora") {
            Value::Null => false,
            flag => flag
                .as_bool()
                .ok_or(("use_rslora", "is neither true nor false"))?,
        },
        init,
        base: get("base_model_name_or_path")
            .as_str()
            .unwrap_or_default()
            .to_owned(),
    })
}

/// Reads a table from patterns of module names to values, of which the first that fits counts. None if it is no table, or a
/// value cannot be read.
fn by_pattern<T>(table: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<IndexMap<String, T>> {
    let read = |(text, value): (&String, &Value)| Some((text.clone(), read(value)?));
    match table {
        Value::Null => Some(IndexMap::new()),
        table => table.as_object()?.iter().map(read).collect(),
    }
}

impl Parameters {
    /// The factors of adapters alone, under PEFT's names.
    pub fn factors(&self) -> Parameters {
        self.some(|parameter| {
            parameter.is_factor.then(|| Parameter {
                name: format!("{PREFIX}{}", self.name_of_factor(&parameter.name)),
                ..parameter.clone()
            })
        })
    }

    /// PEFT's name of a factor. It wraps the module of experts once for each of their parameters that has an adapter: outside
    /// is the last one, and each before it is in the `base_layer` of the next.
    fn name_of_factor(&self, name: &str) -> String {
        let Some((experts, rest)) = name.split_once(OF_EXPERTS) else {
            return name.into();
        };
        let (own, factor) = rest
            .split_once('.')
            .expect("a factor has a name of its own");
        let adapted = self.modules.iter().rev();
        let adapted = adapted.filter(|module| module.rank.is_some());
        let adapted = adapted.filter_map(|module| module.name.strip_prefix(experts));
        let mut wrapped = adapted.filter_map(|end| end.strip_prefix(OF_EXPERTS));
        let outside = wrapped.position(|parameter| parameter == own);
        let outside = outside.expect("it has an adapter");
        let module = &OF_EXPERTS[..OF_EXPERTS.len() - 1];
        format!(
            "{experts}{module}{}.{factor}",
            ".base_layer".repeat(outside)
        )
    }
}

/// Reads the `wanted` elements of all factors from an adapter's folder and hands them to `set`, in chunks: the first
/// element's place in the arena, and f32 values.
///
/// # Errors
/// [`WeightsError`], or what `set` returns.
pub fn import_adapter<E: From<WeightsError>>(
    folder: &Path,
    parameters: &Parameters,
    layout: &Layout,
    wanted: &Cover,
    mut set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let tensors = Tensors::open_folder(folder, ADAPTER_STEM).map_err(WeightsError::Read)?;
    let wrong = |name: &str, problem: String| WeightsError::Tensor {
        path: folder.into(),
        name: name.into(),
        problem,
    };
    let factors = parameters.factors();
    let is_whole = matches!(tensors, Tensors::Whole(_));
    let entries = parameters.in_layout().zip(layout.entries());
    let entries = entries.filter(|(parameter, _)| parameter.is_factor);
    let mut names: BTreeSet<&str> = tensors.names().into_iter().collect();
    let mut values = Vec::new();
    for (factor, (_, entry)) in factors.in_layout().zip(entries) {
        let name = &factor.name[..];
        let tensor = tensors.get(name);
        let tensor = tensor.ok_or_else(|| wrong(name, "is missing".into()))?;
        names.remove(name);
        let needed = match is_whole {
            true => factor.stored_shape(),
            false => factor.shape.clone(),
        };
        if tensor.shape != needed {
            let problem = format!("has shape {:?}; the adapter needs {needed:?}", tensor.shape);
            return Err(wrong(name, problem).into());
        }
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            let problem = format!("holds {:?}; convert it to F32, BF16 or F16", tensor.dtype);
            return Err(wrong(name, problem).into());
        }
        let place = |of: &Range<usize>| entry.offset + of.start..entry.offset + of.end;
        let is_wanted = |of: &Range<usize>| wanted.within(&place(of)).elements() > 0;
        if is_whole && factor.turned().is_some() {
            read_turned(&tensor, factor, is_wanted, |first, values| {
                set(entry.offset + first, values)
            })?;
            continue;
        }
        let size = tensor.dtype.bitsize() / 8;
        for chunk in in_chunks(0..entry.elements()).filter(is_wanted) {
            let bytes = tensor.bytes.get(chunk.start * size..chunk.end * size);
            let bytes = bytes.map_err(WeightsError::Read)?;
            values.clear();
            widen(tensor.dtype, &bytes, &mut values);
            set(place(&chunk).start, &values)?;
        }
    }
    match names.first() {
        None => Ok(()),
        Some(name) => {
            let problem = "belongs to no adapter that adapter_config.json describes";
            Err(wrong(name, problem.into()).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(change: impl Fn(&mut Map<String, Value>)) -> Result<AdapterConfig, AdapterError> {
        let folder = tempfile::tempdir().unwrap();
        let mut config = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
            "bias": "none", "modules_to_save": null, "use_dora": false, "loftq_config": {}, "init_lora_weights": true,
            "lora_dropout": 0.25, "layers_to_transform": 3, "rank_pattern": {"q_proj": 4}, "unheard_of": 1});
        change(config.as_object_mut().unwrap());
        std::fs::write(folder.path().join(ADAPTER_CONFIG), config.to_string()).unwrap();
        AdapterConfig::read(folder.path())
    }

    #[test]
    fn a_configuration_is_read_as_peft_means_it() {
        let config = read(|_| {}).unwrap();
        assert_eq!((config.rank, config.alpha, config.dropout), (8, 16.0, 0.25));
        assert_eq!(config.layers, Some(vec![3]));
        assert_eq!(config.ranks, [("q_proj".into(), 4)].into());
        assert_eq!(config.targets, ["q_proj", "v_proj"]);
        let of_text = read(|config| {
            config.insert("target_modules".into(), json!("q_proj"));
        });
        let target = AdapterTarget::new(&of_text.unwrap().targets[0]).unwrap();
        assert!(!target.fits("model.layers.0.self_attn.q_proj") && target.fits("q_proj"));
    }

    #[test]
    fn parameters_of_experts_are_targets() {
        let with = |layers: Value, modules: Value, name: &str| {
            read(|config| {
                config.insert("layers_to_transform".into(), layers.clone());
                config.insert("target_modules".into(), modules.clone());
                config.insert("target_parameters".into(), json!([name]));
            })
        };
        let (down, whole) = (
            "mlp.experts.down_proj",
            "model.layers.3.mlp.experts.down_proj",
        );
        let config = with(Value::Null, json!(["q_proj"]), down).unwrap();
        assert_eq!(config.targets, ["q_proj", down]);
        let config = with(json!([3]), Value::Null, whole).unwrap();
        assert_eq!(config.targets, [whole]);
        let error = with(json!([3]), Value::Null, down).unwrap_err().to_string();
        assert!(error.contains("`layers_to_transform` is [3]"), "{error}");
    }

    #[test]
    fn what_is_not_built_is_refused_by_name() {
        for (key, value) in [
            ("use_dora", json!(true)),
            ("bias", json!("all")),
            ("modules_to_save", json!(["lm_head"])),
            ("peft_type", json!("IA3")),
            ("init_lora_weights", json!("pissa")),
            ("r", json!(0)),
            ("r", json!(1u64 << 62)),
            ("lora_alpha", json!(1e300)),
            ("lora_dropout", json!("0.5")),
            ("lora_dropout", json!(1.5)),
            ("use_rslora", json!(1)),
            ("rank_pattern", json!({"q_proj": 0})),
            ("alpha_pattern", json!([1])),
            ("target_parameters", json!(["self_attn.q_proj.weight"])),
            ("target_parameters", json!("mlp.experts.down_proj")),
        ] {
            let error = read(|config| {
                config.insert(key.into(), value.clone());
            });
            let text = error.unwrap_err().to_string();
            assert!(text.contains(&format!("`{key}` is {value}")), "{text}");
        }
    }
}
