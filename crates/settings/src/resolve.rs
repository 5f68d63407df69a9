//! Resolves a command line into what a command needs to know.

use crate::Result;
use std::collections::BTreeSet;
use std::path::PathBuf;

use data::Packing;
use memory::Rank;
use model::MegatronFlags;

use super::choices::{AUTO, AutoOr, FloatType, Release};
use super::device::Device;
use super::error::refused;
use super::kernel_choice::check_kernels;
use super::load::{self, Override, Source};
use super::size::Size;
use super::{Config, check, preset};

/// The command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Task {
    /// Train a model.
    #[default]
    Train,
    /// Predict a run's memory.
    Plan,
    /// Write a freshly initialised model.
    Init,
    /// Time the operations of a step.
    Profile,
    /// Time the algorithms of matrix products.
    Tune,
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
    /// The rank's number on its machine, if a launcher started it.
    pub local_rank: Option<usize>,
    /// Whether automatic recompute fills the device if neither a budget nor a limit is set.
    pub fills_device: bool,
    /// Bytes of the device of which a limit may be a share.
    pub device_bytes: Option<u64>,
}

impl Given {
    /// All settings of the command line, in the order in which they apply.
    ///
    /// # Errors
    /// An argument of `--set` that sets nothing, or flags of Megatron's that do not go together.
    pub fn overrides(&self) -> Result<Vec<Override>> {
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
    /// [`ConfigError::Contradiction`](crate::ConfigError::Contradiction), which names the option.
    pub fn check_steps(&self, steps: usize) -> Result {
        match self.dump_gradients {
            Some(step) if step > steps as u64 => refused(format!(
                "--dump-gradients {step} asks for a step after the last; the run has {steps} steps"
            )),
            _ => Ok(()),
        }
    }

    /// Refuses options that do not go together, or not with a configuration.
    fn check(&self, task: Task, config: &Config) -> Result {
        // Epochs become a number of steps only when the data is open.
        if config.train.epochs.is_none() {
            self.check_steps(config.train.steps)?;
        }
        if self.dump_gradients.is_some() && config.ranks().is_some() {
            return refused(
                "--dump-gradients writes the gradients of a step, and of several ranks each has the sum of its part alone; train \
                 without a launcher and without --zero to see them",
            );
        }
        if self.dump_gradients.is_some() && config.optim.release == Release::Backward {
            return refused(
                "--dump-gradients writes the gradients of a step, and with optim.release = \"backward\" there are never all of them; \
                 leave one of the two out",
            );
        }
        if task == Task::Train && self.save_final.is_some() && config.parallel.pipeline > 1 {
            return refused(
                "--save-final and --dump-gradients write the whole model from one rank, and under --pp no rank has it; save a checkpoint \
                 (--save-every N), and take `trainer export` with it",
            );
        }
        if task == Task::Train && matches!(self.trace, Some(Some(_))) {
            return refused(
                "train draws into its run directory; write --trace without a folder, and name the run's with --out",
            );
        }
        match self.lora_from.is_some() && self.resume.is_some() {
            false => Ok(()),
            true => refused(
                "--lora-from begins with a folder's adapters, and --resume goes on with a run's; leave one of the two out",
            ),
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

/// A command with its configuration, as the command line gives it, and its options.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// Keys of `[model]` that the user set, as `model.key`: by `--set`, or in the preset or file of an explicit
    /// `--config`. With `init_from` they must equal those of the model there.
    pub explicit_model_keys: BTreeSet<String>,
    /// Sections of `[model]` that the user gave some keys of, which must equal those of the model of `init_from` too.
    pub model_parts: toml::Table,
    /// Whether the command line sets `data.seq`. A batch file must then have the same length.
    pub seq_is_explicit: bool,
    /// Whether the chunk of the output head is left to be chosen.
    pub chooses_head_chunk: bool,
}

impl Resolved {
    /// The device to use: the configured one, else the task's default.
    pub fn device(&self) -> Device {
        let configured = self.config.train.device;
        match self.task {
            Task::Init => Device::Cpu,
            Task::Plan | Task::Tune => configured.unwrap_or(Device::Cuda { index: 0 }),
            Task::Train | Task::Profile => configured.unwrap_or_else(Device::best),
        }
    }

    /// The data type to use: the configured one, else the device's default.
    pub fn dtype(&self) -> FloatType {
        self.decided(self.config.data.seq).dtype()
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

impl Config {
    /// Takes what is left open, and would change bits, from the run before: the chunk of the output head, and how documents become
    /// rows.
    fn keep_choices(&mut self, before: &Config) {
        let (chunk, packing) = (&mut self.memory.head_chunk, &mut self.data.packing);
        if *chunk == AutoOr::Auto {
            *chunk = before.memory.head_chunk;
        }
        if *packing == Packing::Auto {
            *packing = before.data.packing;
        }
    }
}

/// Loads and checks the configuration that the command line describes.
///
/// # Errors
/// If a flag or setting is unknown, contradictory, out of range or not built.
pub fn resolve(task: Task, given: Given, options: RunOptions) -> Result<Resolved> {
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
    let memory = &mut config.memory;
    if given.fills_device && memory.limit.is_none() && config.recompute.spec.trim() == AUTO {
        memory.budget = memory.budget.or(Some(AutoOr::Auto));
    }
    if let (Some(bytes), Some(limit)) = (given.device_bytes, memory.limit) {
        memory.limit = Some(Size::Bytes(limit.bytes_of(bytes)));
    }
    let chooses_head_chunk = config.memory.head_chunk == AutoOr::Auto;
    if let Some(run) = &given.resumed {
        match Source::open(run).and_then(|run| load::load(&run, &[], false)) {
            Ok(before) => config.keep_choices(&before.config),
            // This checkpoint is damaged. Resuming may take an older one, and then resolves everything again.
            Err(_) if given.config.is_some() => {}
            Err(error) => return Err(error),
        }
    }
    if let Some(rank) = given.rank {
        config.join(rank)?;
    }
    check::built(&config, &loaded.places, task == Task::Train)?;
    let mut adapted = config.clone();
    // Adapters of a folder have its rank, and the whole is checked again when it is known.
    let of_folder = options.lora_from.as_ref().map(|_| 1);
    adapted.lora.rank = adapted.lora.rank.or(of_folder);
    check::contradictions(&adapted)?;
    if !model_elsewhere {
        check::model(&config)?;
    }
    options.check(task, &config)?;

    let of_file = file.map(|_| source.model_keys());
    let set = loaded.places.keys().filter_map(|key| model_key(key));
    let explicit_model_keys = of_file.into_iter().flatten().chain(set).collect();
    let mut resolved = Resolved {
        task,
        name: source.name,
        chooses_head_chunk,
        config,
        options,
        given,
        explicit_model_keys,
        model_parts: loaded.model_parts,
        seq_is_explicit: loaded.places.contains_key("data.seq"),
    };
    if let (Some(local), Some(_)) = (resolved.given.local_rank, resolved.config.rank) {
        resolved.config.train.device = Some(resolved.device().of_rank(local));
    }
    if task != Task::Init && resolved.device() == Device::Cpu {
        check_kernels(&resolved.config, None)?;
    }
    Ok(resolved)
}

/// The key of `[model]` that a dotted key names, or that contains it.
fn model_key(key: &str) -> Option<String> {
    let mut parts = key.split('.');
    let is_model = parts.next() == Some("model");
    is_model.then(|| parts.next().map(|name| format!("model.{name}")))?
}
