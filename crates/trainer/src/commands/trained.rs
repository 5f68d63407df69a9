//! Folders of trained models: `eval` and `generate` compute with them, `export` copies them, and runs resume from them.

use crate::adapters::{BaseModel, BaseWeights, has_adapters};
use crate::args::overrides;
use crate::checkpoints::model_folder;
use crate::device::OpenDevice;
use crate::failure::{Failure, Result};
use crate::initial_model::read_model;
use crate::kernel_kinds::KernelKinds;
use crate::limits::refuse_inference_without_room;
use crate::model_tokens::{ModelTokens, json};
use crate::threads::start_threads;
use clap::Args;
use data::Packing;
use kernels::Target;
use memory::{Layer, Phase};
use model::AdapterConfig;
use planner::InferencePlan;
use serde_json::Value;
use session::{Inference, SessionError};
use settings::load::Override;
use settings::{
    Completed, FolderModel, Given, PerFamily, Resolved, RunOptions, Settings, Task, resolve,
};
use std::path::{Path, PathBuf};
use tokenization::Tokenizer;

/// Flags of what takes a model that was trained.
#[derive(Debug, Args)]
pub struct TrainedArgs {
    /// Model in Hugging Face layout, checkpoint, or run directory, of which the newest whole checkpoint is taken
    #[arg(value_name = "MODEL_OR_RUN_DIR")]
    pub from: PathBuf,
    /// The model under adapters [default: what their folder says]
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    /// Where to compute [default: cuda if built and present, else cpu]
    #[arg(long, value_name = "cpu|cuda[:N]")]
    pub device: Option<String>,
    /// Data type of weights and activations [default: f32 on cpu, bf16 on cuda]
    #[arg(long, value_name = "f32|bf16")]
    pub dtype: Option<String>,
    /// CPU threads; never changes results
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<String>,
    /// Set a key of the configuration
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Print JSON to standard output
    #[arg(long)]
    pub json: bool,
}

/// A model's folder, and the settings to compute with.
pub(crate) struct Trained {
    pub(crate) folder: PathBuf,
    pub(crate) completed: Completed,
    /// Its `config.json`.
    description: Value,
    /// The folder of its adapters, and the model under them, if it has some.
    adapters: Option<(PathBuf, BaseModel)>,
}

impl Trained {
    /// Opens a model's folder. `flags` are the command's own settings.
    pub(crate) fn open(args: &TrainedArgs, flags: Vec<Override>) -> Result<Trained> {
        let shared = [
            ("--device", "train.device", &args.device),
            ("--dtype", "train.dtype", &args.dtype),
            ("--threads", "train.threads", &args.threads),
        ];
        let given = Given {
            flags: [overrides(&shared), flags].concat(),
            set: args.set.clone(),
            ..Given::default()
        };
        let options = RunOptions {
            init_from: Some(args.from.clone()),
            ..RunOptions::default()
        };
        let resolved = resolve(Task::Train, given, options)?;
        // First, because these threads compute a checkpoint's checksums.
        start_threads(resolved.config.train.threads)?;
        let mut folder = model_folder(&args.from)?;
        let (mut adapters, mut said) = (None, None);
        if has_adapters(&folder) {
            let base = BaseModel::of_adapters(&folder, args.base.as_deref())?;
            said = Some((AdapterConfig::read(&folder)?, base.storage()));
            let described = folder.join("config.json").is_file();
            let of_base = base.folder().filter(|_| !described).map(Path::to_path_buf);
            adapters = Some((folder.clone(), base));
            folder = of_base.unwrap_or(folder);
        } else if args.base.is_some() {
            return Err(Failure::Usage(format!(
                "--base names the model under adapters, and {} has none; leave it out",
                folder.display()
            )));
        }
        let model = FolderModel {
            adapters: said,
            ..read_model(&folder)?
        };
        Ok(Trained {
            completed: resolved.complete(Some(model))?,
            description: json(&folder.join("config.json")),
            folder,
            adapters,
        })
    }

    /// The number of positions that it was made for, if its files say.
    pub(crate) fn positions(&self) -> Option<usize> {
        let keys = ["max_position_embeddings", "n_positions"];
        let said = keys
            .into_iter()
            .find_map(|key| self.description[key].as_u64());
        said.map(|positions| positions as usize)
    }

    /// Length of the sequences that it was trained on, if the folder is a run's, but at most its number of positions.
    pub(crate) fn seq(&self) -> usize {
        let said = self.of_training("seq").and_then(|seq| seq.as_integer());
        let seq = said.map_or(self.completed.config.data.seq, |seq| seq as usize);
        seq.min(self.positions().unwrap_or(seq))
    }

    /// How documents were packed into the sequences that it was trained on, if the folder belongs to a run.
    pub(crate) fn packing(&self) -> Option<Packing> {
        self.of_training("packing")?.try_into().ok()
    }

    /// The value of a key of `[data]` in the run that trained it.
    fn of_training(&self, key: &str) -> Option<toml::Value> {
        let text = files::read_small_text(&self.folder.join("config.toml")).ok()?;
        let config: toml::Table = text.parse().ok()?;
        config.get("data")?.get(key).cloned()
    }

    /// What its tokens stand for.
    pub(crate) fn tokens(&self) -> ModelTokens {
        ModelTokens::of_folder(&self.folder, self.completed.config.model.vocab)
    }

    /// Its tokenizer: that of its folder, or bytes.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        self.tokens().tokenizer()?.ok_or_else(|| {
            Failure::Usage(format!(
                "{} has no tokenizer.json, and its {} tokens are not bytes; copy the tokenizer's files into the model's folder, or \
                 that of the run",
                self.folder.display(),
                self.completed.config.model.vocab
            ))
        })
    }

    /// The tokens that end its texts, from `generation_config.json`, else from `config.json`, else from the tokenizer.
    pub(crate) fn ends(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        ends_in(&self.folder).unwrap_or_else(|| tokenizer.end_of_text().into_iter().collect())
    }

    /// Plans for its device, leases the model there, loads its weights, and reserves the plan's slab.
    pub(crate) fn load(
        &self,
        settings: &Settings,
        plan: impl FnOnce(&Settings, Target) -> Result<InferencePlan, SessionError>,
    ) -> Result<(Inference, InferencePlan)> {
        let completed = &self.completed;
        let config = completed.decided(settings.seq);
        let kinds = KernelKinds::decide(&config, PerFamily::default())?;
        let device = OpenDevice::open(completed.device())?.taking(kinds);
        let plan = plan(settings, device.target())?;
        refuse_inference_without_room(&self.completed.config, &plan, device.target())?;
        device.warn_if_full(plan.reserved_bytes)?;
        let memory = device.memory();
        let kernels = device.kernels(&device.step(settings.clone())?, &memory)?;
        let mut inference = Inference::on_kernels(settings, &memory, kernels)?;
        {
            let _place = memory.enter(Phase::Load, Layer::Whole);
            self.fill(&mut inference, settings)?;
        }
        memory.reserve_slab(plan.slab_bytes)?;
        Ok((inference, plan))
    }

    /// Loads its weights, and those of its adapters.
    fn fill(&self, inference: &mut Inference, settings: &Settings) -> Result {
        let mut incoming = inference.incoming();
        let Some((adapters, base)) = &self.adapters else {
            incoming.import(&self.folder)?;
            return Ok(());
        };
        match base.weights(&settings.architecture().parameters)? {
            BaseWeights::Folder(folder) => drop(incoming.import(folder)?),
            BaseWeights::Fresh(fresh) => incoming.initialise(fresh)?,
        }
        Ok(incoming.import_adapter(adapters)?)
    }
}

/// Settings for sequences of `seq` tokens.
pub(crate) fn settings(resolved: &Resolved, seq: usize) -> Result<Settings> {
    Ok(Settings::new(&resolved.decided(seq))?)
}

/// The tokens that end a model's texts, if its folder names them: in `generation_config.json`, else in `config.json`.
pub(crate) fn ends_in(folder: &Path) -> Option<Vec<u32>> {
    let files = ["generation_config.json", "config.json"].into_iter();
    let mut said = files.filter_map(|name| tokens(&json(&folder.join(name))["eos_token_id"]));
    said.next()
}

/// A token, or a list of tokens; none if the value is neither.
fn tokens(json: &Value) -> Option<Vec<u32>> {
    let listed = match json {
        Value::Array(listed) => listed.as_slice(),
        Value::Number(_) => std::slice::from_ref(json),
        _ => return None,
    };
    let tokens = listed.iter().filter_map(Value::as_u64);
    Some(tokens.map(|token| token as u32).collect())
}
