//! A command line made into everything that a command needs to know.

use std::path::PathBuf;

use memory::Rank;
use model::MegatronFlags;

use super::choices::{FloatType, Release};
use super::device::Device;
use super::load::{self, Override, Source};
use super::{Config, ConfigError, check, preset};

/// What to do.
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

/// What the command line says of the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Given {
    /// Preset or file.
    pub config: Option<String>,
    /// The configuration of the checkpoint that the run goes on from: for what the command line leaves open.
    pub resumed: Option<String>,
    /// Flags that stand for keys.
    pub flags: Vec<Override>,
    /// The arguments of `--set`, in their order.
    pub set: Vec<String>,
    /// Megatron's recompute flags.
    pub megatron: MegatronFlags,
    /// Which of several ranks: the launcher's word, or that of `plan --ranks`.
    pub rank: Option<Rank>,
}

/// What a run reads and writes, beside its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// Run directory; of `init`: the model's folder.
    pub out: Option<PathBuf>,
    /// Hugging Face folder to start from; it sets the model.
    pub init_from: Option<PathBuf>,
    /// Run or checkpoint to go on from.
    pub resume: Option<Resume>,
    /// A resumed run may compute something else than the one before.
    pub allow_change: bool,
    /// Folder for the trained model.
    pub save_final: Option<PathBuf>,
    /// The step, from 1, whose gradients are written.
    pub dump_gradients: Option<u64>,
    /// Pictures of memory are asked for on the command line; where they go, for a command without a run directory.
    pub trace: Option<Option<PathBuf>>,
    /// No progress.
    pub quiet: bool,
    /// Machine-readable output on stdout.
    pub json: bool,
}

impl RunOptions {
    /// Refuses to ask for a step after the last.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] says which.
    pub fn check_steps(&self, steps: usize) -> Result<(), ConfigError> {
        match self.dump_gradients {
            Some(step) if step > steps as u64 => Err(ConfigError::Contradiction(format!(
                "--dump-gradients {step} asks for a step after the last; the run has {steps} steps"
            ))),
            _ => Ok(()),
        }
    }
}

/// What a run goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest whole checkpoint of the run directory.
    Latest,
    /// The same; where there is none, the run begins.
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
    /// What to do.
    pub task: Task,
    /// The preset's name, or the configuration file's without its extension.
    pub name: String,
    /// The configuration.
    pub config: Config,
    /// What is read and written.
    pub options: RunOptions,
    /// What the command line says of the configuration.
    pub given: Given,
    /// Keys of `[model]` that the user set, as `model.key`, sorted: by `--set`, or in the preset or
    /// file of an explicit `--config`. With `init_from` they must agree with the model there.
    pub explicit_model_keys: Vec<String>,
    /// The command line sets `data.seq`: a batch file must agree with it.
    pub seq_is_explicit: bool,
}

impl Resolved {
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

    /// The configuration without what it leaves to the task, the device and the data, whose sequences have `seq` tokens.
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
/// A flag or setting that is unknown, contradictory, out of range or not built.
pub fn resolve(task: Task, given: Given, options: RunOptions) -> Result<Resolved, ConfigError> {
    let file = given.config.as_ref().or(given.resumed.as_ref());
    let source = match (file, &options.init_from) {
        (Some(name), _) => Source::open(name)?,
        // A model of the user's own is trained with the defaults, not with a preset's settings.
        (None, Some(folder)) => Source::defaults(folder),
        (None, None) => Source::open(preset::DEFAULT)?,
    };
    let mut overrides = given.flags.clone();
    if let Some(spec) = given.megatron.spec()? {
        let flag = "--recompute-granularity";
        overrides.push(Override::from_flag(flag, "recompute.spec", &spec));
    }
    for argument in &given.set {
        overrides.push(Override::from_set(argument)?);
    }

    let model_elsewhere = options.init_from.is_some();
    let loaded = load::load(&source, &overrides, model_elsewhere)?;
    let mut config = loaded.config;
    if let Some(rank) = given.rank {
        config.join(rank)?;
    }
    check::built(&config, &loaded.places, task == Task::Train)?;
    check::contradictions(&config)?;
    if !model_elsewhere {
        check::model(&config)?;
    }
    // How many steps some epochs are is known once the data is open.
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
        config,
        options,
        given,
        explicit_model_keys,
        seq_is_explicit: loaded.places.contains_key("data.seq"),
    })
}

/// The key of `[model]` that a dotted key is or lies in.
fn model_key(key: &str) -> Option<String> {
    let mut parts = key.split('.');
    let is_model = parts.next() == Some("model");
    is_model.then(|| parts.next().map(|name| format!("model.{name}")))?
}
