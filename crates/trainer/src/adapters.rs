//! Folders of adapters, and the model that is under them.

use crate::failure::{Failure, Result};
use crate::initial_model::{read_model, refuse_what_is_no_folder};
use model::{ADAPTER_CONFIG, AdapterConfig, AdapterError, Lora, ModelWeights, Origin, Parameters};
use serde::{Deserialize, Serialize};
use session::Session;
use settings::{BaseStorage, BaseType, Config, FloatType, FolderModel, RunOptions};
use std::path::{Path, PathBuf};

/// The file beside adapters with what is known of the model under them.
const BASE: &str = "base.json";

/// The model under adapters: a folder's, or a fresh one that was never in files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct BaseModel {
    /// Its folder.
    folder: Option<PathBuf>,
    /// Names, shapes, types and contents of its tensors, if it is a folder's that was read.
    fingerprint: Option<String>,
    /// Of a fresh one, the seed and the standard deviation of its weights.
    fresh: Option<(u64, f64)>,
    /// How training stored its matrices, if as codes, and the type of the weights that these were made of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    codes: Option<(BaseType, FloatType)>,
    /// Modules whose matrices are no codes all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    skip: Vec<String>,
}

/// Where the weights under adapters come from.
pub(crate) enum BaseWeights<'a> {
    Folder(&'a Path),
    Fresh(model::Fresh),
}

impl From<AdapterError> for Failure {
    fn from(error: AdapterError) -> Failure {
        match error {
            AdapterError::Read { path, source } => Failure::Unreadable { path, source },
            AdapterError::Setting {
                path,
                key,
                value,
                why,
            } => Failure::Malformed {
                path,
                reason: format!("`{key}` is {value}, which {why}"),
            },
        }
    }
}

/// Whether a folder has adapters, and not a whole model.
pub(crate) fn has_adapters(folder: &Path) -> bool {
    folder.join(ADAPTER_CONFIG).is_file()
}

impl BaseModel {
    /// The model that a run begins with.
    pub(crate) fn of_run(
        folder: Option<&Path>,
        parameters: &Parameters,
        config: &Config,
    ) -> Result<BaseModel> {
        let mut base = BaseModel::default().stored_as(config);
        match folder {
            None => base.fresh = Some((config.train.seed, config.model.init_std)),
            Some(folder) => {
                let weights = ModelWeights::open(folder, parameters)?;
                base.fingerprint = Some(weights.fingerprint()?);
                base.folder = Some(absolute(folder)?);
            }
        }
        Ok(base)
    }

    /// The same model, stored as a configuration says.
    fn stored_as(self, config: &Config) -> BaseModel {
        let codes = config.lora.base_dtype;
        let codes = codes.filter(|base| *base != BaseType::Bf16);
        BaseModel {
            codes: codes.map(|base| (base, config.dtype())),
            skip: config.lora.base_skip.clone(),
            ..self
        }
    }

    /// How training stored it.
    pub(crate) fn storage(&self) -> BaseStorage {
        BaseStorage {
            dtype: self.codes.map(|(stored, _)| stored),
            skip: self.skip.clone(),
        }
    }

    /// The model that a folder of adapters belongs to; `named` is another folder that has it.
    pub(crate) fn of_adapters(folder: &Path, named: Option<&Path>) -> Result<BaseModel> {
        let known = BaseModel::known(folder)?;
        let said = AdapterConfig::read(folder)?.base;
        let is_there = |folder: &Path| folder.join("config.json").is_file();
        let mut base = known.unwrap_or_else(|| BaseModel {
            folder: (!said.is_empty()).then(|| said.clone().into()),
            ..BaseModel::default()
        });
        if let Some(named) = named {
            // It replaces a fresh model that would be made again from its seed; `weights` checks that both are equal.
            base.folder = Some(absolute(named)?);
        }
        match &base.folder {
            Some(folder) if is_there(folder) => Ok(base),
            None if base.fresh.is_some() => Ok(base),
            Some(missing) => Err(Failure::Usage(format!(
                "{} is of adapters on {}, which is no folder of a model here; name the model's folder with --base DIR (train: \
                 --init-from DIR)",
                folder.display(),
                missing.display()
            ))),
            None => Err(Failure::Usage(format!(
                "{} does not say which model its adapters belong to; name the model's folder with --base DIR (train: \
                 --init-from DIR)",
                folder.display()
            ))),
        }
    }

    /// The model that a run goes on with. One that was fresh is made again, and no folder takes its place.
    pub(crate) fn of_checkpoint(
        folder: &Path,
        named: Option<&Path>,
        config: &Config,
    ) -> Result<BaseModel> {
        let is_fresh = BaseModel::known(folder)?.is_some_and(|known| known.fresh.is_some());
        match named.filter(|_| is_fresh) {
            Some(named) => Err(Failure::Usage(format!(
                "the run began with a fresh model, which is made again from its seed; leave --init-from {} out",
                named.display()
            ))),
            None => Ok(BaseModel::of_adapters(folder, named)?.stored_as(config)),
        }
    }

    /// What the file beside a folder's adapters says of the model under them; none if there is no file, as in PEFT's folders.
    fn known(folder: &Path) -> Result<Option<BaseModel>> {
        let path = folder.join(BASE);
        let text = match files::read_small(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|source| Failure::Unreadable {
                path: path.clone(),
                source,
            })?,
        };
        let known = serde_json::from_slice(&text);
        known.map(Some).map_err(|error| Failure::Malformed {
            path,
            reason: error.to_string(),
        })
    }

    /// Refuses this model under a folder's adapters if they were trained on other contents.
    pub(crate) fn fits(&self, adapters: &Path, parameters: &Parameters) -> Result {
        let Some(known) = BaseModel::known(adapters)? else {
            return Ok(());
        };
        let Some(folder) = &self.folder else {
            return match known.fresh == self.fresh {
                true => Ok(()),
                false => Err(other_model(
                    adapters,
                    "another one",
                    "a fresh one of this seed",
                )),
            };
        };
        if let (Some(before), Some(now)) = (known.fingerprint, &self.fingerprint)
            && before != *now
        {
            return Err(other_model(folder, &before, now));
        }
        match known.fresh {
            Some(fresh) => is_fresh(folder, fresh, parameters),
            None => Ok(()),
        }
    }

    /// The type of the weights that training made codes of.
    pub(crate) fn coded_from(&self) -> FloatType {
        self.codes.map_or(FloatType::F32, |(_, from)| from)
    }

    /// Its folder.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Where its weights come from.
    ///
    /// # Errors
    /// If its folder has another model than before.
    pub(crate) fn weights(&self, parameters: &Parameters) -> Result<BaseWeights<'_>> {
        let Some(folder) = &self.folder else {
            let (seed, deviation) = self.fresh.unwrap_or_default();
            return Ok(BaseWeights::Fresh(model::Fresh { deviation, seed }));
        };
        if let Some(before) = &self.fingerprint {
            let now = ModelWeights::open(folder, parameters)?.fingerprint()?;
            if now != *before {
                return Err(other_model(folder, before, &now));
            }
        }
        if let Some(fresh) = self.fresh {
            is_fresh(folder, fresh, parameters)?;
        }
        Ok(BaseWeights::Folder(folder))
    }

    /// The files beside the factors in a folder of adapters, as they are there.
    pub(crate) fn files_of(adapters: &Path) -> Result<Vec<(String, Vec<u8>)>> {
        let read = |name: &str| match std::fs::read(adapters.join(name)) {
            Ok(bytes) => Some(Ok((name.to_owned(), bytes))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(source) => Some(Err(Failure::Unreadable {
                path: adapters.join(name),
                source,
            })),
        };
        [BASE, ADAPTER_CONFIG]
            .into_iter()
            .filter_map(read)
            .collect()
    }

    /// The files beside the factors: what is known of this model, and last what the adapters are like.
    pub(crate) fn files(&self, lora: &Lora, parameters: &Parameters) -> [(String, Vec<u8>); 2] {
        let base = serde_json::to_string_pretty(self).expect("paths are Unicode, and numbers JSON");
        let folder = self.folder.as_ref();
        let folder = folder.map_or(String::new(), |folder| folder.display().to_string());
        let config = AdapterConfig::text(lora, parameters, &folder);
        [
            (BASE.into(), format!("{base}\n").into_bytes()),
            (ADAPTER_CONFIG.into(), config.into_bytes()),
        ]
    }
}

/// The path by which adapters name their model.
fn absolute(folder: &Path) -> Result<PathBuf> {
    if folder.to_str().is_none() {
        return Err(Failure::Usage(format!(
            "adapters name the folder of their model, and {} is no Unicode; rename it",
            folder.display()
        )));
    }
    Ok(std::path::absolute(folder).unwrap_or_else(|_| folder.into()))
}

/// Refuses a folder whose weights are not those of a fresh model of this seed and deviation.
fn is_fresh(folder: &Path, (seed, deviation): (u64, f64), parameters: &Parameters) -> Result {
    let weights = ModelWeights::open(folder, parameters)?;
    if weights.are_fresh(model::Fresh { deviation, seed })? {
        return Ok(());
    }
    let before = format!("a fresh one of seed {seed}");
    Err(other_model(folder, &before, &weights.fingerprint()?))
}

/// Fills the adapters of a session whose model is already there: fresh ones, or those of the folder that the options name. Returns what
/// their folder will say of that model; none if the configuration asks for no adapters.
pub(crate) fn fill_adapters(
    session: &mut Session,
    config: &Config,
    options: &RunOptions,
) -> Result<Option<BaseModel>> {
    if config.lora.rank.is_none() {
        return Ok(None);
    }
    match &options.lora_from {
        Some(folder) => session.incoming().import_adapter(folder)?,
        None => session.incoming().initialise_factors(model::Fresh {
            deviation: config.model.init_std,
            seed: config.train.seed,
        })?,
    }
    let parameters = &session.model().architecture().parameters;
    let base = BaseModel::of_run(options.init_from.as_deref(), parameters, config)?;
    if let Some(folder) = &options.lora_from {
        base.fits(folder, parameters)?;
    }
    Ok(Some(base))
}

/// The files that are saved with a session's model: those that it came with, and what readers of adapters need.
pub(crate) fn model_files(
    session: &Session,
    origin: &Origin,
    base: Option<&BaseModel>,
    config: &Config,
) -> Vec<(String, Vec<u8>)> {
    let model = session.model();
    let mut files = origin.files(&config.model, config.data.seq, model.dtype());
    if let (Some(base), Some(lora)) = (base, session.settings().lora.as_ref()) {
        files.extend(base.files(lora, &model.architecture().parameters));
    }
    files
}

/// The refusal of a model that is not the one under some adapters.
fn other_model(folder: &Path, before: &str, now: &str) -> Failure {
    Failure::Malformed {
        path: folder.into(),
        reason: format!(
            "the adapters were trained on another model: {before} then, {now} here; name the folder with that model"
        ),
    }
}

/// Reads the adapters of `--lora-from`, and the model of `--init-from`; without the latter, the model that the adapters were trained on.
pub(crate) fn read_folders(options: &RunOptions) -> Result<Option<FolderModel>> {
    let (mut adapters, mut model) = (None, options.init_from.clone());
    if let Some(folder) = &options.lora_from {
        refuse_what_is_no_folder(folder)?;
        let base = BaseModel::of_adapters(folder, model.as_deref())?;
        adapters = Some((AdapterConfig::read(folder)?, base.storage()));
        model = Some(base.folder.ok_or_else(|| {
            Failure::Usage(format!(
                "the adapters in {} belong to a fresh model that is in no folder; write it by `trainer init --out DIR` with the \
                 run's --config and --seed, and name it with --init-from DIR",
                folder.display()
            ))
        })?);
    }
    let read = |folder: PathBuf| -> Result<FolderModel> {
        Ok(FolderModel {
            adapters,
            ..read_model(&folder)?
        })
    };
    model.map(read).transpose()
}
