//! Settings of ours, as they are gathered from other trainers' files.

use super::meaning::plain;
use memory::Rank;
use model::MegatronFlags;
use serde_json::Value;
use settings::kind::Kind;
use settings::load::{Override, Source, load};
use settings::{Config, ConfigError, Device, dotted};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The settings of the command line, which go before those of the files.
#[derive(Debug, Default)]
pub(crate) struct CommandLine {
    /// Keys of ours that it sets, with their values.
    pub(crate) keys: BTreeMap<String, String>,
    /// Whether it names a model, by `--config` or `--init-from`.
    pub(crate) model: bool,
    /// Whether it names one by `--init-from`.
    pub(crate) init_from: bool,
    /// `--ranks`.
    pub(crate) ranks: Option<u64>,
}

/// A setting of ours.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The dotted key.
    pub(crate) key: String,
    /// Its value, as `--set` takes it.
    pub(crate) text: String,
    /// Which key of which file says so.
    pub(super) place: String,
    /// No file says so: it is what the program does by itself.
    pub(super) is_default: bool,
}

/// Where a value stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot<'a> {
    /// The key and its file.
    pub(super) place: &'a str,
    /// No file has it.
    pub(super) is_default: bool,
}

/// The settings that were gathered so far.
#[derive(Debug)]
pub(super) struct SettingsSoFar<'a> {
    pub(super) told: &'a CommandLine,
    pub(super) settings: Vec<Setting>,
    /// A preset.
    pub(super) config: Option<String>,
    /// A model's folder.
    pub(super) init_from: Option<PathBuf>,
    /// Processes that the files start.
    pub(super) ranks: Option<u64>,
    /// Some key means another thing for another number of ranks.
    pub(super) needs_ranks: bool,
    /// Megatron's words for recompute.
    pub(super) recompute: MegatronFlags,
}

impl<'a> SettingsSoFar<'a> {
    pub(super) fn new(told: &'a CommandLine) -> SettingsSoFar<'a> {
        SettingsSoFar {
            told,
            settings: Vec::new(),
            config: None,
            init_from: None,
            ranks: None,
            needs_ranks: false,
            recompute: MegatronFlags::default(),
        }
    }

    /// The ranks of the command line, or else of the files.
    pub(super) fn ranks(&self) -> Option<u64> {
        self.told.ranks.or(self.ranks)
    }

    /// The value of a key, on the command line or in the files.
    pub(super) fn known(&self, key: &str) -> Option<&str> {
        let gathered = self.settings.iter().find(|setting| setting.key == key);
        let told = self.told.keys.get(key).map(String::as_str);
        told.or(gathered.map(|setting| setting.text.as_str()))
    }

    /// The number that a key has.
    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.known(key)?.parse().ok()
    }

    /// Sets each of `key=value`, with spaces between, and gives back what to say of it.
    pub(super) fn set_all(&mut self, words: &str, spot: Spot) -> Result<Set, ConfigError> {
        let mut all = Set::default();
        for word in words.split(' ').filter(|word| !word.is_empty()) {
            let (key, text) = word.split_once('=').expect("the table has key=value");
            let set = self.set(key, text, spot)?;
            all.here.extend(set.here);
            all.remark = all.remark.or(set.remark);
        }
        Ok(all)
    }

    /// Sets a key, unless the command line sets it, or a file does where this is a default.
    ///
    /// # Errors
    /// The value is none of the key's, or another file has another one.
    pub(super) fn set(&mut self, key: &str, text: &str, spot: Spot) -> Result<Set, ConfigError> {
        let text = checked(key, text, spot.place)?;
        if self.told.keys.contains_key(key) {
            return Ok(Set::remark("the command line says it"));
        }
        let is_long = key == "train.epochs" && self.known("train.steps").is_some();
        if is_long || key == "train.steps" && self.told.keys.contains_key("train.epochs") {
            return Ok(Set::remark("another key says how long the run is"));
        }
        if key.starts_with("collectives.") && self.ranks().is_none() {
            self.needs_ranks |= key == "collectives.zero" && text != "0";
            return Ok(Set::remark("of several devices: --ranks N"));
        }
        let here = format!("{key}={text}");
        match self.settings.iter_mut().find(|setting| setting.key == key) {
            Some(earlier) if earlier.text == text => {}
            Some(_) if spot.is_default => return Ok(Set::remark("the files say otherwise")),
            Some(earlier) if !earlier.is_default => {
                return Err(ConfigError::Contradiction(format!(
                    "{} says {}={}, and {} says {here}; leave one of the two out, or give {} on the command line",
                    earlier.place,
                    earlier.key,
                    earlier.text,
                    spot.place,
                    written(key)
                )));
            }
            earlier => {
                let setting = Setting {
                    key: key.into(),
                    text,
                    place: spot.place.into(),
                    is_default: spot.is_default,
                };
                match earlier {
                    Some(earlier) => *earlier = setting,
                    None => self.settings.push(setting),
                }
            }
        }
        Ok(Set {
            here: vec![here],
            remark: None,
        })
    }

    /// Settings of files that have no effect beside all others, each with what it is for. None where these are no configuration:
    /// then the plan says why.
    pub(super) fn in_vain(&self) -> Vec<(&'static str, &'static str)> {
        let told = self.told.keys.iter();
        let of_files = self.settings.iter();
        let of_files = of_files.map(|one| (&one.key, &one.text));
        let all = told.chain(of_files);
        let all = all.map(|(key, text)| Override::from_set(&format!("{key}={text}")));
        let configuration = || -> Result<Config, ConfigError> {
            let source = match &self.config {
                Some(preset) => Source::open(preset)?,
                None => Source::defaults(Path::new("")),
            };
            let mut config = load(&source, &all.collect::<Result<Vec<_>, _>>()?, true)?.config;
            let device = Device::Cuda { index: 0 };
            config.train.device.get_or_insert(device);
            if let Some(of) = self.ranks() {
                let number = 0;
                let of = of as usize;
                config.join(Rank { number, of })?;
            }
            Ok(config)
        };
        let in_vain = configuration().map(|config| config.in_vain());
        let in_vain = in_vain.unwrap_or_default().into_iter();
        let is_of_files = |(key, _): &(&str, &str)| self.settings.iter().any(|one| one.key == *key);
        in_vain.filter(is_of_files).collect()
    }

    /// Takes a key back that another one makes void.
    pub(super) fn forget(&mut self, key: &str) {
        self.settings.retain(|setting| setting.key != key);
    }
}

/// The settings that a foreign key made.
#[derive(Debug, Default)]
pub(super) struct Set {
    /// `key=value` of ours.
    pub(super) here: Vec<String>,
    /// A remark for the user.
    pub(super) remark: Option<String>,
}

impl Set {
    pub(super) fn remark(text: &str) -> Set {
        Set {
            here: Vec::new(),
            remark: Some(text.into()),
        }
    }
}

/// The flag of a key, with what it takes; `--set` where it has none.
pub(crate) fn written(key: &str) -> String {
    let flag = dotted::find(key).and_then(|key| key.flag);
    match flag.map(|flag| (flag.name, flag.argument)) {
        Some((name, settings::FlagArgument::Value(takes))) => format!("{name} {takes}"),
        _ => format!("--set {key}=VALUE"),
    }
}

/// A value in the form that our key takes: whole numbers without a point.
fn checked(key: &str, text: &str, place: &str) -> Result<String, ConfigError> {
    let kind = dotted::find(key).map_or(Kind::Text, |key| key.kind);
    let is_whole = matches!(
        kind,
        Kind::Whole(_) | Kind::WholeUpTo(..) | Kind::WholeOrAuto(_) | Kind::Size
    );
    let number = text.parse::<f64>().ok();
    let text = match number.filter(|number| is_whole && number.fract() == 0.0) {
        Some(number) if number.abs() < 1e15 => (number as i64).to_string(),
        _ => text.to_owned(),
    };
    kind.check(key, &kind.parse(&text), place)?;
    Ok(text)
}

/// A value as text: what stands in quotes without them, yes and no of YAML as true and false.
pub(super) fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => match plain(text).as_str() {
            "yes" | "on" | "true" => "true".into(),
            "no" | "off" | "false" => "false".into(),
            _ => text.clone(),
        },
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(text_of).collect();
            items.join(" ")
        }
        other => other.to_string(),
    }
}
