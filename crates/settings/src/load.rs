//! A preset or file, overridden by the command line, made into a [`Config`].

use crate::Result;
use std::collections::BTreeMap;
use std::path::Path;

use model::RopeScaling;
use serde::Deserialize;
use toml::{Table, Value};

use super::defaults::defaults;
use super::error::ConfigError;
use super::kind::Kind;
use super::preset;
use super::schema::Config;
use super::{check, dotted};

/// A preset or a configuration file as it was written.
#[derive(Clone, Debug)]
pub struct Source {
    /// The preset's name or the file's name without its extension.
    pub name: String,
    /// What error messages call it.
    pub place: String,
    /// Its keys, all known and of the right type.
    pub table: Table,
}

/// One setting of the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// The dotted key, or a section if the value is a table.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// The argument as given, for error messages.
    pub place: String,
    /// It came from a dedicated flag, not from `--set`.
    pub is_flag: bool,
}

/// A configuration and where parts of it came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration, its keys valid each by itself.
    pub config: Config,
    /// Sections of `[model]` that have some of their keys alone, where the model comes from elsewhere, which has them all.
    pub model_parts: Table,
    /// The argument that set a key, for keys set on the command line.
    pub places: BTreeMap<String, String>,
}

/// Keys of `[model]` that have no default once the section is there.
const SHAPE: [&str; 5] = ["hidden", "layers", "heads", "ffn", "vocab"];

/// Keys of `[model]` that follow from these.
const HEADS: [&str; 2] = ["kv_heads", "head_dim"];

/// Lists of layers in `[model]`.
const LISTS_OF_LAYERS: [&str; 4] = [
    "model.full_attention_layers",
    "model.no_rope_layers",
    "model.experts.dense_layers",
    "model.delta.attention_layers",
];

/// Sections of `[model]` that may be absent, each with the keys that it needs.
const SECTIONS: [(&str, &[&str]); 3] = [
    ("model.experts", &["count", "chosen", "ffn"]),
    ("model.latent", &["kv", "rotary_dim", "v_head_dim"]),
    (
        "model.delta",
        &["key_heads", "value_heads", "key_head_dim", "value_head_dim"],
    ),
];

impl Source {
    /// No preset and no file: the defaults, named after the model that they train.
    pub fn defaults(model: &Path) -> Self {
        let name = model
            .file_name()
            .map_or("model".into(), |name| name.to_string_lossy());
        Self {
            name: name.into_owned(),
            place: "the defaults".into(),
            table: Table::new(),
        }
    }

    /// Finds a preset called `name`, else reads the file of that path.
    ///
    /// # Errors
    /// Neither exists, the file is not TOML, a key is unknown or a value unfitting.
    pub fn open(name: &str) -> Result<Self> {
        let path = Path::new(name);
        let unknown_preset = match preset::text(name) {
            Ok(text) => return Self::parse(name.to_owned(), format!("the preset {name}"), text),
            Err(error) => error,
        };
        let is_path = path.components().count() > 1 || path.extension().is_some_and(is_toml);
        if !is_path && !path.exists() {
            return Err(unknown_preset);
        }
        let text = files::read_small_text(path).map_err(|source| ConfigError::Unreadable {
            path: name.to_owned(),
            source,
        })?;
        let stem = path.file_stem().unwrap_or(path.as_os_str());
        Self::parse(stem.to_string_lossy().into_owned(), name.to_owned(), &text)
    }

    /// Reads a configuration's text.
    ///
    /// # Errors
    /// The text is not TOML, a key is unknown or a value unfitting.
    pub fn parse(name: String, place: String, text: &str) -> Result<Self> {
        let table: Table = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| {
                let before = text.get(..span.start).unwrap_or_default();
                before.matches('\n').count() + 1
            });
            ConfigError::Syntax {
                place: place.clone(),
                message: format!("line {line}: {}", error.message().replace('\n', ", ")),
            }
        })?;
        let root = Value::Table(table.clone());
        dotted::visit("", &root, &place, &mut Vec::new())?;
        Ok(Self { name, place, table })
    }

    /// The keys directly under `[model]`, dotted.
    pub fn model_keys(&self) -> Vec<String> {
        let model = self.table.get("model").and_then(Value::as_table);
        model
            .into_iter()
            .flat_map(Table::keys)
            .map(|key| format!("model.{key}"))
            .collect()
    }
}

fn is_toml(extension: &std::ffi::OsStr) -> bool {
    extension == "toml"
}

impl Override {
    /// Reads the argument of `--set`.
    ///
    /// # Errors
    /// It is not of the form `section.key=value`.
    pub fn from_set(argument: &str) -> Result<Self> {
        let (key, value) = argument
            .split_once('=')
            .map(|(key, value)| (key.trim(), value.trim()))
            .filter(|(key, _)| !key.is_empty())
            .ok_or_else(|| ConfigError::NotAnAssignment(argument.to_owned()))?;
        let kind = dotted::find(key).map_or(Kind::TextTable, |key| key.kind);
        Ok(Self {
            key: key.to_owned(),
            value: kind.parse(value),
            place: format!("--set {argument}"),
            is_flag: false,
        })
    }

    /// The value `text` of the flag `flag`, which stands for `key`.
    pub fn from_flag(flag: &str, key: &str, text: &str) -> Self {
        let value = match dotted::find(key).map(|key| key.kind) {
            None | Some(Kind::Text | Kind::Inputs) => Value::String(text.to_owned()),
            Some(kind) => kind.parse(text),
        };
        Self {
            key: key.to_owned(),
            value,
            place: format!("{flag} {text}"),
            is_flag: true,
        }
    }

    /// The values of the flag `flag`, which may be repeated: a list where it is.
    pub fn from_flags(flag: &str, key: &str, texts: &[String]) -> Self {
        if let [text] = texts {
            return Self::from_flag(flag, key, text);
        }
        let places: Vec<String> = texts.iter().map(|text| format!("{flag} {text}")).collect();
        Self {
            key: key.to_owned(),
            value: texts.to_vec().into(),
            place: places.join(" "),
            is_flag: true,
        }
    }

    /// What the flag `flag`, which takes no value, sets `key` to.
    pub fn from_switch(flag: &str, key: &str, value: bool) -> Self {
        Self {
            key: key.to_owned(),
            value: Value::Boolean(value),
            place: flag.to_owned(),
            is_flag: true,
        }
    }
}

/// Merges defaults, `source` and `overrides`, later ones winning. With `model_elsewhere` the
/// model's shape comes from another place (a Hugging Face folder) and need not be complete.
///
/// # Errors
/// An unknown key or unfitting value in an override, a flag that contradicts another flag, or an
/// incomplete model.
pub fn load(source: &Source, overrides: &[Override], model_elsewhere: bool) -> Result<Loaded> {
    let mut table = defaults();
    if source.table.contains_key("model") && !model_elsewhere {
        let model = table.get_mut("model").and_then(Value::as_table_mut);
        let model = model.expect("the model has defaults");
        for name in SHAPE.iter().chain(&HEADS) {
            model.remove(*name);
        }
    }
    let root = Value::Table(source.table.clone());
    let mut written = Vec::new();
    dotted::visit("", &root, &source.place, &mut written)?;
    for (key, value) in written {
        dotted::insert(&mut table, &key, value.clone());
    }
    let mut set = Overrides::new();
    for argument in overrides {
        let mut found = Vec::new();
        dotted::visit(&argument.key, &argument.value, &argument.place, &mut found)?;
        for (key, value) in found {
            if let Some((earlier_value, earlier)) = set.get(&key)
                && earlier.is_flag
                && argument.is_flag
                && *earlier_value != value
            {
                return Err(ConfigError::Conflict {
                    key,
                    first: format!("`{}`", earlier.place),
                    second: format!("`{}`", argument.place),
                });
            }
            dotted::insert(&mut table, &key, value.clone());
            set.insert(key, (value, argument));
        }
    }
    forget_other_place(&mut table, &set)?;
    forget_other_length(&mut table, &set)?;
    forget_layers_beyond(&mut table, &set);
    derive_heads(&mut table, &source.place)?;
    complete_rope_scaling(&mut table, &source.place)?;
    let mut model_parts = Table::new();
    for (section, needed) in SECTIONS {
        let Err(error) = check_section(&table, section, needed, &source.place) else {
            continue;
        };
        let part = dotted::get(&table, section).filter(|_| model_elsewhere);
        let part = part.cloned().ok_or(error)?;
        dotted::remove(&mut table, section);
        model_parts.insert(section.trim_start_matches("model.").into(), part);
    }
    let read = |table: &Table| {
        Config::deserialize(Value::Table(table.clone())).map_err(|error| ConfigError::Syntax {
            place: source.place.clone(),
            message: error.message().replace('\n', ", "),
        })
    };
    let mut config = read(&table)?;
    // If the command line turns a feature off (`--optimizer adamw`), the file's keys for that feature are dropped too.
    let needless = config.left_in_vain(|key| set.contains_key(key));
    if !needless.is_empty() {
        let defaults = defaults();
        for key in needless {
            tracing::info!(
                "{} of {} has no effect here and is left out",
                key.name,
                source.place
            );
            match dotted::get(&defaults, key.name) {
                Some(value) => dotted::insert(&mut table, key.name, value.clone()),
                None => dotted::remove(&mut table, key.name),
            }
        }
        config = read(&table)?;
    }
    let places = set
        .into_iter()
        .map(|(key, (_, argument))| (key, format!("`{}`", argument.place)))
        .collect();
    Ok(Loaded {
        config,
        model_parts,
        places,
    })
}

/// The overrides by key, each with its value.
type Overrides<'a> = BTreeMap<String, (&'a Value, &'a Override)>;

/// A place of optimizer states that is asked for now is meant instead of the folder that the file names.
fn forget_other_place(table: &mut Table, set: &Overrides) -> Result {
    let Some((place, argument)) = set.get("offload.optimizer") else {
        return Ok(());
    };
    match (place.as_str(), set.get("offload.path")) {
        (Some("disk"), None) => {}
        (_, None) => dotted::remove(table, "offload.path"),
        (Some("none"), Some((_, path))) => {
            return Err(ConfigError::Conflict {
                key: "offload.optimizer".into(),
                first: format!("`{}`", argument.place),
                second: format!("`{}`", path.place),
            });
        }
        _ => {}
    }
    Ok(())
}

/// Steps that are asked for now are meant instead of epochs that the file asks for.
fn forget_other_length(table: &mut Table, set: &Overrides) -> Result {
    match (set.get("train.steps"), set.get("train.epochs")) {
        (Some((_, steps)), Some((_, epochs))) => Err(ConfigError::Contradiction(format!(
            "`{}` and `{}` both say how long the run is; leave one of the two out",
            steps.place, epochs.place
        ))),
        (Some(_), None) => {
            dotted::remove(table, "train.epochs");
            Ok(())
        }
        _ => Ok(()),
    }
}

/// If the command line takes fewer layers than the file has, those beyond leave the file's lists of layers.
fn forget_layers_beyond(table: &mut Table, set: &Overrides) {
    let Some(layers) = set
        .get("model.layers")
        .and_then(|(layers, _)| layers.as_integer())
    else {
        return;
    };
    for key in LISTS_OF_LAYERS
        .iter()
        .filter(|key| !set.contains_key(**key))
    {
        let Some(Value::Array(listed)) = dotted::get(table, key) else {
            continue;
        };
        let is_within = |layer: &&Value| layer.as_integer().is_none_or(|layer| layer < layers);
        let within: Vec<Value> = listed.iter().filter(is_within).cloned().collect();
        if within.len() < listed.len() {
            tracing::info!(
                "{key}: layers from {layers} on are left out, since model.layers = {layers}"
            );
            dotted::insert(table, key, Value::Array(within));
        }
    }
}

impl Config {
    /// The configuration with further settings, each as `--set` takes it.
    ///
    /// # Errors
    /// A setting that the command line would refuse too.
    pub fn with(&self, set: &[String]) -> Result<Config> {
        let source = Source {
            name: String::new(),
            place: "the run's configuration".into(),
            table: Table::try_from(self)?,
        };
        let set = set.iter().map(|argument| Override::from_set(argument));
        let mut config = load(&source, &set.collect::<Result<Vec<_>, _>>()?, false)?.config;
        (config.rank, config.engine_bytes) = (self.rank, self.engine_bytes);
        config.accepted()
    }

    /// The configuration itself, after values of it were changed.
    ///
    /// # Errors
    /// [`ConfigError`] where the command line would refuse it.
    pub fn accepted(self) -> Result<Config> {
        check::contradictions(&self)?;
        check::model(&self)?;
        Ok(self)
    }
}

/// Fills the kind of `rope_scaling` in where it was left out, as in files from before there were several, and looks for the keys
/// that the kind needs.
fn complete_rope_scaling(table: &mut Table, place: &str) -> Result {
    const SECTION: &str = "model.rope_scaling";
    let Some(scaling) = dotted::get(table, SECTION).and_then(Value::as_table) else {
        return Ok(());
    };
    let given = scaling.get("kind").and_then(Value::as_str);
    let kind = given.unwrap_or("llama3").to_owned();
    let [needed, allowed] = RopeScaling::keys(&kind);
    if let Some(name) = needed.iter().find(|name| !scaling.contains_key(**name)) {
        return Err(ConfigError::Missing {
            key: format!("{SECTION}.{name}"),
            place: place.to_owned(),
            rule: "each kind of rope_scaling needs its keys (configs/reference.toml lists them)",
        });
    }
    let known = |name: &&String| {
        *name == "kind" || needed.contains(&name.as_str()) || allowed.contains(&name.as_str())
    };
    if let Some(name) = scaling.keys().find(|name| !known(name)) {
        return Err(ConfigError::Contradiction(format!(
            "`{SECTION}.{name}` in {place} says nothing with kind = \"{kind}\"; leave it out, or set another kind"
        )));
    }
    dotted::insert(table, &format!("{SECTION}.kind"), Value::String(kind));
    Ok(())
}

/// Looks for the keys that a section needs where it is there.
fn check_section(table: &Table, section: &str, needed: &[&str], place: &str) -> Result {
    let Some(given) = dotted::get(table, section).and_then(Value::as_table) else {
        return Ok(());
    };
    match needed.iter().find(|name| !given.contains_key(**name)) {
        None => Ok(()),
        Some(name) => Err(ConfigError::Missing {
            key: format!("{section}.{name}"),
            place: place.to_owned(),
            rule: "the section needs this key beside the others (configs/reference.toml explains them)",
        }),
    }
}

/// Fills `kv_heads` and `head_dim` of a model that leaves them out, once its shape is complete.
fn derive_heads(table: &mut Table, place: &str) -> Result {
    let size = |name: &str| dotted::get(table, &format!("model.{name}"))?.as_integer();
    let missing = |name: &str, rule| ConfigError::Missing {
        key: format!("model.{name}"),
        place: place.to_owned(),
        rule,
    };
    if let Some(name) = SHAPE.into_iter().find(|name| size(name).is_none()) {
        let rule = "a [model] section needs hidden, layers, heads, ffn and vocab";
        return Err(missing(name, rule));
    }
    let (hidden, heads) = (size("hidden").unwrap_or(1), size("heads").unwrap_or(1));
    let (kv_heads, head_dim) = (size("kv_heads"), size("head_dim"));
    if kv_heads.is_none() {
        dotted::insert(table, "model.kv_heads", Value::Integer(heads));
    }
    if head_dim.is_none() {
        if hidden % heads != 0 {
            let rule = "hidden is not a multiple of heads, so the width of a head must be given";
            return Err(missing("head_dim", rule));
        }
        dotted::insert(table, "model.head_dim", Value::Integer(hidden / heads));
    }
    Ok(())
}
