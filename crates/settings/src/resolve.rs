//! Resolves a command line into what a command needs to know.

use std::path::PathBuf;

use memory::Rank;
use model::MegatronFlags;

use super::choices::{AutoOr, FloatType, Release};
use super::device::Device;
use super::load::{self, Override, Source};
use super::size::Size;
use super::{Config, ConfigError, LoraConfig, check, preset};

/// The command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Train a model.
    Train,
    /// Predict a run's memory.
    Plan,
    /// Write a freshly initialised model.
    Init,
    /// Time the operations of a step.
    Profile,
    /// Time the algorithms of matrix products.
    Tune,
    /// Describe the machine.
    Doctor,
}

/// The configuration as the command line gives it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Given {
    /// Preset or file.
    pub config: Option<String>,
    /// The configuration of the checkpoint to resume, for what the command line leaves open.
    pub resumed: Option<String>,
    /// Flags that set keys.
    pub flags: Vec<Override>,
    /// The arguments of `--set`, in order.
    pub set: Vec<String>,
    /// Megatron's recompute flags.
    pub megatron: MegatronFlags,
    /// The rank of this process, from the launcher or from `plan --ranks`.
    pub rank: Option<Rank>,
    /// The budget of automatic recompute if neither a budget nor a limit is set.
    pub budget: Option<AutoOr<Size>>,
}

impl Given {
    /// All settings of the command line, in the order in which they apply.
    ///
    /// # Errors
    /// An argument of `--set` that sets nothing, or flags of Megatron's that do not go together.
    pub fn overrides(&self) -> Result<Vec<Override>, ConfigError> {
        let mut overrides = self.flags.clone();
        if let Some(spec) = self.megatron.spec()? {
            let flag = "--recompute-granularity";
            overrides.push(Override::from_flag(flag, "recompute.spec", &spec));
        }
        for argument in &self.set {
            overrides.push(Override::from_set(argument)?);
        }
        Ok(overrides)
    }
}

/// What a run reads and writes, besides its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Run directory. For `init`, the model's folder.
    pub out: Option<PathBuf>,
    /// Hugging Face folder to start from; it sets the model.
    pub init_from: Option<PathBuf>,
    /// Folder of adapters to start from, as PEFT writes it; it sets `[lora]`.
    pub lora_from: Option<PathBuf>,
    /// Run or checkpoint to resume.
    pub resume: Option<Resume>,
    /// Whether a resumed run may compute something else than before.
    pub allow_change: bool,
    /// Folder for the trained model.
    pub save_final: Option<PathBuf>,
    /// The step, from 1, whose gradients are written.
    pub dump_gradients: Option<u64>,
    /// Whether to draw pictures of memory, and the folder for them if the command has no run directory.
    pub trace: Option<Option<PathBuf>>,
    /// Whether to show no progress.
    pub quiet: bool,
    /// Whether to print JSON on stdout.
    pub json: bool,
}

impl RunOptions {
    /// Refuses the number of a step after the last one.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`], which names the option.
    pub fn check_steps(&self, steps: usize) -> Result<(), ConfigError> {
        match self.dump_gradients {
            Some(step) if step > steps as u64 => Err(ConfigError::Contradiction(format!(
                "--dump-gradients {step} asks for a step after the last; the run has {steps} steps"
            ))),
            _ => Ok(()),
        }
    }
}

/// What to resume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest whole checkpoint of the run directory.
    Latest,
    /// The same; if there is none, the run starts from its beginning.
    Auto,
    /// A checkpoint, or the newest whole one of a run.
    Folder(PathBuf),
}

impl From<PathBuf> for Resume {
    fn from(folder: PathBuf) -> Resume {
        match folder.to_str() {
            Some("latest") => Resume::Latest,
            Some("auto") => Resume::Auto,
            _ => Resume::Folder(folder),
        }
    }
}

/// A command with its configuration and options.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The command.
    pub task: Task,
    /// The preset's name, or the configuration file's name without its extension.
    pub name: String,
    /// The configuration.
    pub config: Config,
    /// What is read and written.
    pub options: RunOptions,
    /// The configuration as the command line gives it.
    pub given: Given,
    /// Keys of `[model]` that the user set, as `model.key`, sorted: by `--set`, or in the preset or file of an explicit
    /// `--config`. With `init_from` they must equal those of the model there.
    pub explicit_model_keys: Vec<String>,
    /// Sections of `[model]` that the user gave some keys of, which must equal those of the model of `init_from` too.
    pub model_parts: toml::Table,
    /// Whether the command line sets `data.seq`. A batch file must then have the same length.
    pub seq_is_explicit: bool,
    /// Whether the chunk of the output head is left to be chosen.
    pub chooses_head_chunk: bool,
    /// The longest sequence that the model of `init_from` was made for, where its folder says so.
    pub context_length: Option<usize>,
}

impl Resolved {
    /// Whether the user set this key of `[model]`.
    pub fn sets(&self, key: &str) -> bool {
        self.explicit_model_keys.iter().any(|set| set == key)
    }

    /// The device to use: the configured one, else the task's default.
    pub fn device(&self) -> Device {
        let configured = self.config.train.device;
        match self.task {
            Task::Init | Task::Doctor => Device::Cpu,
            Task::Plan | Task::Tune => configured.unwrap_or(Device::Cuda { index: 0 }),
            Task::Train | Task::Profile => configured.unwrap_or_else(Device::best),
        }
    }

    /// The data type to use: the configured one, else the device's default.
    pub fn dtype(&self) -> FloatType {
        self.decided(self.config.data.seq)
            .train
            .dtype
            .expect("it is decided")
    }

    /// The configuration with the task's device, the device's type, and the data's sequence length `seq`.
    pub fn decided(&self, seq: usize) -> Config {
        let mut config = self.config.clone();
        config.data.seq = seq;
        config.train.device = Some(self.device());
        config.train.dtype = Some(config.dtype());
        config
    }
}

/// Loads and checks the configuration that the command line describes.
///
/// # Errors
/// If a flag or setting is unknown, contradictory, out of range or not built.
pub fn resolve(task: Task, given: Given, options: RunOptions) -> Result<Resolved, ConfigError> {
    let file = given.config.as_ref().or(given.resumed.as_ref());
    let source = match (file, &options.init_from) {
        (Some(name), _) => Source::open(name)?,
        // The user's own model is trained with the defaults, not with a preset's settings.
        (None, Some(folder)) => Source::defaults(folder),
        (None, None) => Source::open(preset::DEFAULT)?,
    };
    let model_elsewhere = options.init_from.is_some();
    let loaded = load::load(&source, &given.overrides()?, model_elsewhere)?;
    let mut config = loaded.config;
    if config.chooses() && config.memory.limit.is_none() {
        config.memory.budget = config.memory.budget.or(given.budget);
    }
    if let Some(rank) = given.rank {
        config.join(rank)?;
    }
    check::built(&config, &loaded.places, task == Task::Train)?;
    match options.lora_from {
        // The rank comes from that folder, and the whole is checked again when it is known.
        Some(_) if config.lora.rank.is_none() => check::contradictions(&Config {
            lora: LoraConfig {
                rank: Some(1),
                ..config.lora.clone()
            },
            ..config.clone()
        })?,
        _ => check::contradictions(&config)?,
    }
    if !model_elsewhere {
        check::model(&config)?;
    }
    // Epochs become a number of steps only when the data is open.
    if config.train.epochs.is_none() {
        options.check_steps(config.train.steps)?;
    }

    if options.dump_gradients.is_some() && config.ranks().is_some() {
        return Err(ConfigError::Contradiction(
            "--dump-gradients writes the gradients of a step, and of several ranks each has the sum of its part alone; train \
             without a launcher and without --zero to see them"
                .into(),
        ));
    }

    if options.dump_gradients.is_some() && config.optim.release == Release::Backward {
        return Err(ConfigError::Contradiction(
            "--dump-gradients writes the gradients of a step, and with optim.release = \"backward\" there are never all of them; \
             leave one of the two out"
                .into(),
        ));
    }

    let mut explicit_model_keys = match file {
        Some(_) => source.model_keys(),
        None => Vec::new(),
    };
    explicit_model_keys.extend(loaded.places.keys().filter_map(|key| model_key(key)));
    explicit_model_keys.sort();
    explicit_model_keys.dedup();
    Ok(Resolved {
        task,
        name: source.name,
        chooses_head_chunk: config.memory.head_chunk == AutoOr::Auto,
        context_length: None,
        config,
        options,
        given,
        explicit_model_keys,
        model_parts: loaded.model_parts,
        seq_is_explicit: loaded.places.contains_key("data.seq"),
    })
}

/// The key of `[model]` that a dotted key names, or that contains it.
fn model_key(key: &str) -> Option<String> {
    let mut parts = key.split('.');
    let is_model = parts.next() == Some("model");
    is_model.then(|| parts.next().map(|name| format!("model.{name}")))?
}
