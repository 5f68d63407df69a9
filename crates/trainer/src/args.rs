//! The flags that `train`, `plan` and `profile` share.

use crate::checkpoints::configuration_to_resume;
use crate::key_flags::KeyFlags;
use clap::Args;
use clap::builder::PossibleValuesParser;
use memory::Rank;
use model::MegatronFlags;
use optim::OptimizerKind;
use settings::load::Override;
use settings::{Given, Resume, RunOptions};
use std::path::PathBuf;

/// Flags that `train`, `plan` and `profile` share.
#[derive(Clone, Debug, Default, Args)]
pub struct RunArgs {
    /// Where the configuration comes from.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Flags that stand for a key.
    #[command(flatten)]
    pub keys: KeyFlags,
    /// Whose weights are trained.
    #[command(flatten)]
    pub weights: WeightsArgs,
    /// What memory is spent on.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// What is written.
    #[command(flatten)]
    pub output: OutputArgs,
    /// What is gone on with.
    #[command(flatten)]
    pub resume: ResumeArgs,
}

/// Flags of a command that measures a run and prints what it found.
#[derive(Debug, Default, Args)]
pub struct MeasuringArgs {
    /// Print JSON to standard output
    #[arg(long)]
    pub json: bool,
    /// The flags of `train`.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Where the configuration comes from.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Configuration")]
pub struct SourceArgs {
    /// Preset or TOML file [default: tiny]
    #[arg(long, value_name = "NAME|FILE")]
    pub config: Option<String>,
    /// Set any configuration key (repeatable)
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

/// Whose weights are trained.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Training")]
pub struct WeightsArgs {
    /// Start from a model in Hugging Face layout
    #[arg(long, value_name = "DIR")]
    pub init_from: Option<PathBuf>,
    /// Start from adapters in a folder as PEFT writes it
    #[arg(long, value_name = "DIR")]
    pub lora_from: Option<PathBuf>,
}

/// Whose plan is made, of ranks that train together. `train` learns it from its launcher.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Several ranks")]
pub struct RankArgs {
    /// Plan for N ranks, a device each
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST_RANKS))]
    pub ranks: Option<u64>,
    /// The rank whose plan is made [default: the first that needs most]
    #[arg(long, value_name = "R", requires = "ranks")]
    pub rank: Option<u64>,
}

/// More ranks than any machine has. The limit exists because layouts are padded for ranks.
const MOST_RANKS: u64 = 1 << 16;

impl RankArgs {
    /// The rank that the flags name.
    pub fn rank(self) -> Option<Rank> {
        Some(Rank {
            of: self.ranks? as usize,
            number: self.rank.unwrap_or(0) as usize,
        })
    }
}

/// The values of `--optimizer`: the names of optimizers, and AdamW with 8-bit states.
fn optimizers() -> PossibleValuesParser {
    let names = OptimizerKind::NAMES.iter().copied();
    PossibleValuesParser::new(names.chain(["adamw8bit"]))
}

/// The end of the name of an optimizer with 8-bit states.
const QUANTISED: &str = "8bit";

/// What memory is spent on, in other words than those of keys.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Memory")]
pub struct MemoryArgs {
    /// Megatron's granularity: none, selective, full
    #[arg(long, value_name = "NAME")]
    pub recompute_granularity: Option<String>,
    /// Megatron's modules for selective recompute [default: core_attn]
    #[arg(long, value_name = "NAMES", num_args = 0..)]
    pub recompute_modules: Option<Vec<String>>,
    /// Megatron's method for full recompute: uniform, block
    #[arg(long, value_name = "NAME")]
    pub recompute_method: Option<String>,
    /// Megatron's number of layers for full recompute
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub recompute_num_layers: Option<String>,
    /// The optimizer; adamw8bit is adamw with --state-dtype 8bit [default: adamw]
    #[arg(long, value_name = "NAME", value_parser = optimizers())]
    pub optimizer: Option<String>,
}

/// What is written.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Run directory [default: runs/NAME-TIME]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write the trained model in Hugging Face layout
    #[arg(long, value_name = "DIR")]
    pub save_final: Option<PathBuf>,
    /// Draw the last step's memory: snapshot.pickle, trace.json, timeline.svg. `plan` and `profile` take the folder
    #[arg(long, value_name = "DIR")]
    pub trace: Option<Option<PathBuf>>,
    /// Write the gradients of step N, before clipping
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub dump_gradients: Option<u64>,
    /// No progress
    #[arg(long)]
    pub quiet: bool,
}

/// What is gone on with.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Training")]
pub struct ResumeArgs {
    /// Go on from a run or checkpoint folder, or from the newest checkpoint under --out (auto: begin where there is none).
    /// Flags that are not given are those of the run
    #[arg(long, value_name = "DIR|latest|auto")]
    pub resume: Option<PathBuf>,
    /// Resume with settings that change what is computed
    #[arg(long, requires = "resume")]
    pub allow_change: bool,
}

impl RunArgs {
    /// The configuration that the flags give.
    pub fn given(&self) -> Given {
        let memory = &self.memory;
        let mut flags = self.keys.overrides.clone();
        if let Some(name) = &memory.optimizer {
            let flag = |key, value| Override {
                place: format!("--optimizer {name}"),
                ..Override::from_flag("--optimizer", key, value)
            };
            let quantised = name.strip_suffix(QUANTISED);
            flags.push(flag("optim.kind", quantised.unwrap_or(name)));
            flags.extend(quantised.map(|_| flag("optim.state_dtype", "8bit")));
        }
        if self.output.trace.is_some() {
            flags.push(Override::from_switch("--trace", "log.trace", true));
        }
        Given {
            config: self.source.config.clone(),
            resumed: self.resumed_configuration(),
            flags,
            set: self.source.set.clone(),
            megatron: MegatronFlags {
                granularity: memory.recompute_granularity.clone(),
                modules: memory.recompute_modules.clone(),
                method: memory.recompute_method.clone(),
                num_layers: memory.recompute_num_layers.clone(),
            },
            ..Given::default()
        }
    }

    /// The files that the flags name, and other options beside the configuration.
    pub fn options(&self, json: bool) -> RunOptions {
        RunOptions {
            out: self.output.out.clone(),
            init_from: self.weights.init_from.clone(),
            lora_from: self.weights.lora_from.clone(),
            resume: self.resume.resume.clone().map(Resume::from),
            allow_change: self.resume.allow_change,
            save_final: self.output.save_final.clone(),
            dump_gradients: self.output.dump_gradients,
            trace: self.output.trace.clone(),
            quiet: self.output.quiet,
            json,
        }
    }

    /// The configuration file of the run that is resumed, for settings that the command line leaves open.
    fn resumed_configuration(&self) -> Option<String> {
        let resume = Resume::from(self.resume.resume.clone()?);
        let file = configuration_to_resume(&resume, self.output.out.as_deref())?;
        file.to_str().map(str::to_owned)
    }
}

/// The keys that flags set, for the flags that are given.
pub(crate) fn overrides(flags: &[(&str, &str, &Option<String>)]) -> Vec<Override> {
    let flags = flags.iter();
    flags
        .filter_map(|(flag, key, text)| Some(Override::from_flag(flag, key, text.as_deref()?)))
        .collect()
}
