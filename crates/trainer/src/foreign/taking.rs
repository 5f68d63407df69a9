//! From the keys of foreign files to settings of ours, and what became of each key.

use super::file::{ForeignFile, ForeignKey};
use super::gathered::{CommandLine, Set, Setting, SettingsSoFar, Spot, text_of, written};
use super::meaning::{Foreign, ForeignPart, Meaning, near, plain, sets_of};
use super::part::{self, At, NotBuilt, PartResult};
use super::program::Program;
use super::table::{find, find_key};
use serde::Serialize;
use settings::ConfigError;
use std::path::{Path, PathBuf};

/// The outcome of a foreign key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeyOutcome {
    /// A setting of ours says it.
    TakenOver,
    /// A setting of ours is near it, and not the same.
    Near,
    /// It has no meaning for a plan.
    WithoutMeaning,
    /// It is not built here.
    NotBuilt,
    /// No table has it.
    Unknown,
}

/// A key of a file, and what became of it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct KeyRow {
    /// The file; none: no file has the key, and the program goes by this value.
    pub(crate) file: Option<PathBuf>,
    /// Its name there.
    pub(crate) key: String,
    /// Its value there.
    pub(crate) value: String,
    /// Its outcome.
    pub(crate) outcome: KeyOutcome,
    /// The settings of ours that say it.
    pub(crate) here: Vec<String>,
    /// What to do, or why there is nothing to do.
    pub(crate) remark: String,
}

/// The outcome of a key: the last three fields of its row.
struct KeyResult {
    outcome: KeyOutcome,
    here: Vec<String>,
    remark: String,
}

impl KeyResult {
    fn new(outcome: KeyOutcome, remark: &str) -> KeyResult {
        KeyResult {
            outcome,
            here: Vec::new(),
            remark: remark.into(),
        }
    }

    fn taken(here: Vec<String>) -> KeyResult {
        KeyResult {
            outcome: KeyOutcome::TakenOver,
            here,
            remark: String::new(),
        }
    }

    fn row(self, file: Option<PathBuf>, key: &str, value: String) -> KeyRow {
        KeyRow {
            file,
            key: key.into(),
            value,
            outcome: self.outcome,
            here: self.here,
            remark: self.remark,
        }
    }
}

/// What was taken over from foreign files.
#[derive(Debug)]
pub(crate) struct ForeignSettings {
    /// Settings, in the order of the files.
    pub(crate) settings: Vec<Setting>,
    /// A preset.
    pub(crate) config: Option<String>,
    /// A model's folder.
    pub(crate) init_from: Option<PathBuf>,
    /// Ranks that the files start.
    pub(crate) ranks: Option<u64>,
    /// All keys, in the order of the files, and defaults that were gone by.
    pub(crate) rows: Vec<KeyRow>,
}

/// When a key is looked at: others depend on some.
fn turn(meaning: Meaning) -> usize {
    match meaning {
        Meaning::Of(ForeignPart::Devices | ForeignPart::Shard) => 0,
        Meaning::Of(
            ForeignPart::GlobalBatch
            | ForeignPart::MinLr
            | ForeignPart::WarmupShare
            | ForeignPart::Positions
            | ForeignPart::Stages
            | ForeignPart::EvalPacking,
        ) => 3,
        Meaning::Of(ForeignPart::StepCount(_)) => DEFAULTS,
        _ => 1,
    }
}

/// The turn of what programs do where the files say nothing.
const DEFAULTS: usize = 2;

/// Takes over what files say, beside what the command line says.
///
/// # Errors
/// A value that none of ours can be, files that contradict each other, or something that a plan needs and nobody says.
pub(crate) fn take(
    files: &[ForeignFile],
    told: &CommandLine,
) -> Result<ForeignSettings, ConfigError> {
    let mut to = SettingsSoFar::new(told);
    let keys = files
        .iter()
        .flat_map(|file| file.keys.iter().map(move |key| (file, key)));
    let keys: Vec<_> = keys
        .map(|(file, key)| (file, key, find_key(file.program, &key.name)))
        .collect();
    let mut rows: Vec<Option<KeyRow>> = vec![None; keys.len()];
    let mut assumed = Vec::new();
    for at_turn in 0..4 {
        if at_turn == DEFAULTS {
            assumed = defaults(files, &mut to)?;
        }
        for (row, (file, key, foreign)) in rows.iter_mut().zip(&keys) {
            if foreign.map_or(1, |foreign| turn(foreign.meaning)) == at_turn {
                *row = Some(of_file(file, key, *foreign, files, &mut to)?);
            }
        }
    }
    if to.known("train.objective") == Some("dpo") {
        count_both_answers(&mut to, rows.iter_mut().flatten());
    }
    if let Some(spec) = to.recompute.spec()? {
        let spot = Spot {
            place: "Megatron's recompute",
            is_default: false,
        };
        to.set("recompute.spec", &spec, spot)?;
    }
    let missing = missing(files, &to);
    if !missing.is_empty() {
        return Err(ConfigError::Contradiction(format!(
            "the files of --from leave open what a plan needs: {}",
            missing.join("; ")
        )));
    }
    let mut rows: Vec<KeyRow> = rows.into_iter().flatten().collect();
    forget_in_vain(&mut to, &mut rows);
    let settings = to.settings.iter();
    let settings = settings.map(|one| format!("{}={}", one.key, one.text));
    let settings: Vec<String> = settings.collect();
    // A file may have said otherwise since.
    let holds = |row: &KeyRow| row.here.iter().any(|here| settings.contains(here));
    rows.extend(assumed.into_iter().filter(|row| holds(row)));
    Ok(ForeignSettings {
        settings: to.settings,
        config: to.config,
        init_from: to.init_from,
        ranks: to.ranks,
        rows,
    })
}

/// Takes settings back that have no effect beside the others, such as an adapter's where there are none.
fn forget_in_vain(to: &mut SettingsSoFar, rows: &mut [KeyRow]) {
    for (key, what) in to.in_vain() {
        to.forget(key);
        let beginning = format!("{key}=");
        for row in &mut *rows {
            let before = row.here.len();
            row.here.retain(|here| !here.starts_with(&beginning));
            if row.here.is_empty() && before > 0 {
                row.outcome = KeyOutcome::WithoutMeaning;
                row.remark = format!("no effect here: it is for {what}");
            }
        }
    }
}

/// Others count pairs in a micro-batch of preferences. Here it has the two sequences of each.
fn count_both_answers<'a>(to: &mut SettingsSoFar, rows: impl Iterator<Item = &'a mut KeyRow>) {
    let mut settings = to.settings.iter_mut();
    let Some(micro) = settings.find(|one| one.key == "batch.micro") else {
        return;
    };
    let Ok(pairs) = micro.text.parse::<u64>() else {
        return;
    };
    let was = format!("batch.micro={pairs}");
    micro.text = pairs.saturating_mul(2).to_string();
    for here in rows
        .flat_map(|row| &mut row.here)
        .filter(|here| **here == was)
    {
        *here = format!("batch.micro={}", micro.text);
    }
}

/// A key of a file.
fn of_file(
    file: &ForeignFile,
    key: &ForeignKey,
    foreign: Option<&Foreign>,
    files: &[ForeignFile],
    to: &mut SettingsSoFar,
) -> Result<KeyRow, ConfigError> {
    let text = text_of(&key.value);
    let place = format!("`{}` of {}", key.name, file.path.display());
    let at = At {
        name: &key.name,
        text: &text,
        spot: Spot {
            place: &place,
            is_default: false,
        },
        file: Some(file),
        files,
    };
    let became = match foreign {
        None => KeyResult::new(KeyOutcome::Unknown, ""),
        Some(foreign) if file.program == Program::HuggingFaceModel => of_model(file, foreign, to),
        Some(foreign) if is_open(&text, foreign) => {
            KeyResult::new(KeyOutcome::WithoutMeaning, "left open there")
        }
        Some(foreign) => {
            became(foreign, at, to).or_else(|error| match is_needed(foreign.meaning) {
                true => Err(error),
                false => Ok(KeyResult::new(KeyOutcome::NotBuilt, &error.to_string())),
            })?
        }
    };
    let value = key.value.as_str().map_or(text.clone(), str::to_owned);
    Ok(became.row(Some(file.path.clone()), &key.name, value))
}

/// Whether a plan needs what a key says. It needs no rates, and nothing of checkpoints and lines of progress.
fn is_needed(meaning: Meaning) -> bool {
    let key = match meaning {
        Meaning::Key(key) | Meaning::Of(ForeignPart::StepCount(key)) => key,
        Meaning::Of(ForeignPart::MinLr | ForeignPart::WarmupShare) => "lr.",
        Meaning::Of(ForeignPart::Minutes) => "collectives.timeout_s",
        Meaning::Of(ForeignPart::Betas) => "optim.beta",
        _ => return true,
    };
    let needless = [
        "checkpoint.",
        "collectives.timeout_s",
        "dpo.beta",
        "log.",
        "lr.",
        "optim.beta",
        "optim.eps",
        "optim.weight_decay",
        "train.seed",
    ];
    !needless.iter().any(|needless| key.starts_with(needless))
}

/// Nothing is given, another file is to say it, or a variable whose value is elsewhere.
fn is_open(text: &str, foreign: &Foreign) -> bool {
    let is_a_word = match foreign.meaning {
        Meaning::Words(words) => sets_of(words, text).is_some(),
        _ => false,
    };
    ["null", "", "{}"].contains(&text) || text.starts_with('$') || (text == "auto" && !is_a_word)
}

/// A key of a model's `config.json`, which `--init-from` reads.
fn of_model(file: &ForeignFile, foreign: &Foreign, to: &mut SettingsSoFar) -> KeyResult {
    if to.init_from.is_none() && !to.told.init_from {
        let folder = file.path.parent().filter(|folder| *folder != Path::new(""));
        to.init_from = Some(folder.unwrap_or(Path::new(".")).into());
    }
    match foreign.meaning {
        Meaning::Key(key) if key.starts_with("model.") => KeyResult::taken(vec![key.into()]),
        Meaning::Words(_) | Meaning::Of(_) if !foreign.is_called("torch-dtype") => {
            KeyResult::taken(vec!["--init-from".into()])
        }
        Meaning::Needless | Meaning::Beside => {
            KeyResult::new(KeyOutcome::WithoutMeaning, foreign.ours)
        }
        Meaning::NotBuilt => KeyResult::new(KeyOutcome::NotBuilt, foreign.ours),
        _ => KeyResult::new(
            KeyOutcome::WithoutMeaning,
            &format!("of the files; of a run: {}", foreign.ours),
        ),
    }
}

/// What becomes of a key that has a value.
///
/// # Errors
/// The value is none of our key's, or another file has another one.
fn became(foreign: &Foreign, at: At, to: &mut SettingsSoFar) -> Result<KeyResult, ConfigError> {
    let mut is_near = false;
    let given: PartResult = match foreign.meaning {
        Meaning::Key(key) => to.set(key, at.text, at.spot).map(Ok),
        Meaning::Words(words) => match sets_of(words, at.text) {
            Some("") => Ok(Ok(Set::remark("as it is here"))),
            Some(sets) => {
                is_near = near(sets).is_some();
                let sets = near(sets).unwrap_or(sets);
                to.set_all(sets, at.spot).map(Ok)
            }
            None => Ok(Err(NotBuilt(None))),
        },
        Meaning::Named => match find(at.text) {
            Some(row) => return became(row, At { text: "true", ..at }, to),
            None if is_off(at) => Ok(Ok(Set::remark("other keys say the type"))),
            None => Ok(Err(NotBuilt(None))),
        },
        Meaning::Of(part) => part::take(part, at, to),
        Meaning::Beside | Meaning::Needless => {
            return Ok(KeyResult::new(KeyOutcome::WithoutMeaning, foreign.ours));
        }
        Meaning::NotBuilt if is_off(at) => {
            let why = "off there, and not built here";
            return Ok(KeyResult::new(KeyOutcome::WithoutMeaning, why));
        }
        Meaning::NotBuilt => Ok(Err(NotBuilt(None))),
    };
    Ok(match given? {
        Ok(set) if is_near && !set.here.is_empty() => KeyResult {
            here: set.here,
            ..KeyResult::new(KeyOutcome::Near, foreign.ours)
        },
        Ok(set) => KeyResult {
            remark: set.remark.unwrap_or_default(),
            ..KeyResult::taken(set.here)
        },
        Err(NotBuilt(instead)) => KeyResult::new(
            KeyOutcome::NotBuilt,
            instead.as_deref().unwrap_or(foreign.ours),
        ),
    })
}

/// A feature that is off: parallelism of one device too.
fn is_off(at: At) -> bool {
    let word = plain(at.text);
    let of_one = at.name.contains("parallel") && word == "1";
    of_one || ["false", "none", "0", "0.0", "[]", "disabled"].contains(&word.as_str())
}

/// What the programs of the files do where these say nothing.
fn defaults(files: &[ForeignFile], to: &mut SettingsSoFar) -> Result<Vec<KeyRow>, ConfigError> {
    let mut rows = Vec::new();
    let has_shape = to.settings.iter().any(|one| one.key == "model.hidden");
    for file in files {
        let shape = file.program.shape().iter().filter(|_| has_shape);
        let defaults = file.program.defaults(to.known("train.objective"));
        for (name, value) in defaults.iter().chain(shape) {
            let foreign = find_key(file.program, name).expect("the table has what programs assume");
            let is_it = |key: &&ForeignKey| plain(&key.name) == plain(name);
            let own = file.keys.iter().find(is_it);
            let is_answered = own.is_some_and(|key| !is_open(&text_of(&key.value), foreign));
            if is_answered || is_said(foreign, to) {
                continue;
            }
            let place = format!("{name} of {}", file.program.name());
            let at = At {
                name,
                text: value,
                spot: Spot {
                    place: &place,
                    is_default: true,
                },
                file: None,
                files,
            };
            let became = became(foreign, at, to)?;
            if !became.here.is_empty() {
                rows.push(became.row(None, name, (*value).into()));
            }
        }
    }
    if has_shape {
        complete_heads(to)?;
    }
    Ok(rows)
}

/// Whether something says already what a default would.
fn is_said(foreign: &Foreign, to: &SettingsSoFar) -> bool {
    let of_a_word = |words: &[(&str, &str)]| {
        let sets = words.iter().map(|(_, sets)| near(sets).unwrap_or(sets));
        let sets = sets.flat_map(|sets| sets.split(' '));
        let keys = sets
            .filter_map(|set| set.split_once('='))
            .map(|(key, _)| key);
        keys.into_iter().next().map(str::to_owned)
    };
    let key = match foreign.meaning {
        Meaning::Key("train.epochs") if to.known("train.steps").is_some() => return true,
        Meaning::Key(key) => Some(key.to_owned()),
        Meaning::Words(words) => of_a_word(words),
        Meaning::Of(ForeignPart::Shard) => Some("collectives.zero".into()),
        _ => None,
    };
    let is_recompute = key.as_deref() == Some("recompute.spec");
    let of_megatron = is_recompute && to.recompute.granularity.is_some();
    of_megatron || key.is_some_and(|key| to.known(&key).is_some())
}

/// Heads of keys, and their width, where a shape says nothing of them.
fn complete_heads(to: &mut SettingsSoFar) -> Result<(), ConfigError> {
    let spot = Spot {
        place: "the shape of the model",
        is_default: true,
    };
    let (Some(hidden), Some(heads)) = (to.number("model.hidden"), to.number("model.heads")) else {
        return Ok(());
    };
    to.set("model.kv_heads", &heads.to_string(), spot)?;
    let width = hidden / heads.max(1.0);
    if to.known("model.head_dim").is_none() {
        to.set("model.head_dim", &width.to_string(), spot)?;
    }
    if to.known("model.ffn").is_none() && to.known("model.activation") == Some("gelu_tanh") {
        to.set("model.ffn", &(4.0 * hidden).to_string(), spot)?;
    }
    Ok(())
}

/// What a plan needs and nobody has said, by the name of what says it.
fn missing(files: &[ForeignFile], to: &SettingsSoFar) -> Vec<String> {
    let mut missing = Vec::new();
    let is_a_model = to.told.model || to.config.is_some() || to.init_from.is_some();
    let shape = ["hidden", "layers", "heads", "ffn", "vocab"].map(|name| format!("model.{name}"));
    let has_one = shape.iter().any(|key| to.known(key).is_some());
    if !is_a_model && !has_one {
        missing
            .push("the model (--config NAME, --init-from DIR, or --from its config.json)".into());
    }
    let named = |what: &str, key: &str| format!("{what} ({})", written(key));
    if !is_a_model && has_one {
        let open = shape.iter().filter(|key| to.known(key).is_none());
        missing.extend(open.map(|key| named(key, key)));
    }
    // A model's folder alone is planned as --init-from has it.
    let is_a_run = |file: &ForeignFile| file.program != Program::HuggingFaceModel;
    let describes_a_run = files.iter().any(is_a_run);
    for (what, key) in [
        ("the sequence length", "data.seq"),
        ("the micro-batch", "batch.micro"),
    ] {
        if describes_a_run && to.known(key).is_none() {
            missing.push(named(what, key));
        }
    }
    if to.needs_ranks && to.ranks().is_none() {
        let of = files
            .iter()
            .map(|file| file.program.name())
            .collect::<Vec<_>>()
            .join(" and ");
        missing.push(format!("on how many devices {of} runs (--ranks N)"));
    }
    missing
}
