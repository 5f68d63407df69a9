//! The `init` command.

use crate::args::{SourceArgs, overrides};
use crate::failure::{Failure, Result};
use crate::limits::refuse_model_without_room;
use crate::run_dir::{make_model_folder, refuse_non_empty};
use crate::stdout::print;
use clap::Args;
use files::{Disk, narrow};
use memory::DType;
use model::{
    Architecture, Attention, Fresh, Initial, MAX_SHARD_BYTES, Origin, OutgoingWeights, write_model,
};
use settings::load::Override;
use settings::{Completed, ConfigError, Given, Resolved, RunOptions, Task, resolve};
use std::cell::RefCell;
use std::path::PathBuf;

/// Flags of `init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Folder for the model
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Where the configuration comes from.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Seed of the initialisation
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<String>,
    /// Data type of the weights [default: f32]
    #[arg(long, value_name = "f32|bf16")]
    pub dtype: Option<String>,
    /// CPU threads; never changes results
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<String>,
    /// Try although the disk seems to have no room
    #[arg(long)]
    pub force: bool,
    /// No progress
    #[arg(long)]
    pub quiet: bool,
}

impl InitArgs {
    pub(crate) fn resolve(&self) -> Result<Resolved, ConfigError> {
        let flags = [
            ("--seed", "train.seed", &self.seed),
            ("--dtype", "train.dtype", &self.dtype),
            ("--threads", "train.threads", &self.threads),
        ];
        let mut flags = overrides(&flags);
        if self.force {
            flags.push(Override::from_switch("--force", "memory.force", true));
        }
        let given = Given {
            config: self.source.config.clone(),
            flags,
            set: self.source.set.clone(),
            ..Given::default()
        };
        let options = RunOptions {
            out: Some(self.out.clone()),
            quiet: self.quiet,
            ..RunOptions::default()
        };
        resolve(Task::Init, given, options)
    }
}

/// Writes a freshly initialised model in Hugging Face layout.
pub(crate) fn init(completed: &Completed) -> Result {
    let folder = completed
        .options
        .out
        .as_deref()
        .ok_or_else(|| Failure::Usage("init needs --out DIR".into()))?;
    refuse_non_empty(folder)?;
    let config = &completed.config;
    let architecture = Architecture::of(&config.model, Attention::default());
    let parameters = architecture.parameters;
    let layout = parameters.layout(|_, _| false);
    let dtype = DType::from(completed.dtype());
    let fresh = Fresh {
        deviation: config.model.init_std,
        seed: config.train.seed,
    };
    let initial: Vec<(Initial, DType)> = parameters
        .in_layout()
        .map(|parameter| (parameter.initial, parameter.dtype(dtype)))
        .collect();
    // Elements are drawn in order. A tensor that is written transposed is read, and drawn, several times; one that has
    // tensors in two files is drawn anew for the second, as far as the first went.
    let drawn = RefCell::new((0, 0, fresh.values(initial[0].0, 0)));
    let weights = OutgoingWeights::new(&parameters, dtype, |index, elements| {
        let (of, next, values) = &mut *drawn.borrow_mut();
        let (initial, dtype) = initial[index];
        if (*of, *next) != (index, elements.start) {
            (*of, *values) = (index, fresh.values(initial, index as u64));
            values.by_ref().take(elements.start).for_each(drop);
        }
        *next = elements.end;
        let values: Vec<f32> = values.take(elements.len()).collect();
        Ok(narrow(&values, dtype.into()).into_owned().into())
    });
    let files = Origin::default().files(&config.model, config.data.seq, dtype);
    let is_forced = config.memory.force;
    refuse_model_without_room(folder, &weights, &files, MAX_SHARD_BYTES, is_forced)?;
    let _lock = make_model_folder(folder)?;
    write_model(&Disk, folder, &files, &weights, MAX_SHARD_BYTES)?;
    print(format_args!(
        "{} parameters in {}\n",
        layout.parameters(),
        folder.display()
    ))
}
