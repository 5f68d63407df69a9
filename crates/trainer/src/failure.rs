//! Why a command ended early, and with which exit code (`docs/reference/exit-codes.md`).

use crate::last_words::LastWords;
use checkpoint::{CheckpointError, Damage, LockError};
use collectives::GroupError;
use data::DataError;
use kernels::{Fault, KernelError};
use memory::OutOfMemory;
use model::{HfConfigError, OriginError, WeightsError};
use optim::RestoreError;
use planner::{AutoError, Fix, NoDiskRoom, NoHostRoom};
#[cfg(feature = "text")]
use prepare::PrepareError;
use report::page::PageError;
use scratch::ScratchError;
use session::{OptimizerStateError, SessionError};
use settings::{ConfigError, Device, KernelFamily};
use std::path::PathBuf;
use tokenization::TokenizerError;

/// A result with a [`Failure`], unless another error is named.
pub type Result<T = (), E = Failure> = std::result::Result<T, E>;

/// A command that could not be carried out. The text says what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum Failure {
    /// Bad usage or configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Bad usage that only shows when the command is carried out.
    #[error("{0}")]
    Usage(String),
    /// A file of arguments is a script, whose values are known only when it runs.
    #[error("{path} is a shell script, and only a shell knows what it says (`{word}`)")]
    ShellScript { path: PathBuf, word: String },
    /// A lease was refused.
    #[error("{}{error}", rank.as_ref().map(|name| format!("rank {name}: ")).unwrap_or_default())]
    OutOfMemory {
        rank: Option<String>,
        error: OutOfMemory,
        hints: Vec<String>,
        fixes: Vec<Fix>,
    },
    /// No recompute policy was chosen.
    #[error(transparent)]
    Auto(AutoError),
    /// No recompute policy is within the budget, or a plan, which is printed all the same, is of a run that does not fit.
    #[error("{reason}")]
    DoesNotFit { reason: String, hints: Vec<String> },
    /// Host memory would not fit.
    #[error(transparent)]
    HostMemory(#[from] NoHostRoom),
    /// There is no place for scratch files.
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    /// A disk has too little space.
    #[error(transparent)]
    DiskSpace(#[from] NoDiskRoom),
    /// Bad data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Data that is no tokens of the model's.
    #[error("{why}")]
    ForeignData {
        why: String,
        command: Option<String>,
    },
    /// Bad weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A model that computes no numbers, or whose state is none of a run.
    #[error("{0}")]
    Unsound(SessionError),
    /// A bad file of optimizer states.
    #[error(transparent)]
    OptimizerState(#[from] OptimizerStateError),
    /// A bad `config.json`.
    #[error("{path}: {source}")]
    HfConfig {
        path: PathBuf,
        source: HfConfigError,
    },
    /// A file of the model to start from could not be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        path: PathBuf,
        source: std::io::Error,
    },
    /// `--init-from` does not name a model folder, and we know how to get one.
    #[error("{why}")]
    NoModelFolder { why: String, hint: String },
    /// A file that the command line names holds something else than it is for, or is not there.
    #[error("{path} cannot be used: {reason}")]
    Malformed { path: PathBuf, reason: String },
    /// A file of the run could not be written.
    #[error("cannot write {path}: {source}")]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file of algorithms for matrix products cannot be used.
    #[error("the algorithms in {path} cannot be used: {why}")]
    Algorithms { path: PathBuf, why: String },
    /// The device cannot be used at all.
    #[error("the device {device} cannot be used: {reason}")]
    NoDevice { device: Device, reason: String },
    /// Products in FP8 are asked for, and the device has none.
    #[error("`fp8.recipe` asks for products in FP8, and {0}")]
    NoFp8(String),
    /// Kernels are asked for that failed their trial.
    #[error("{} is sm90, and {reason}", family.key())]
    Kernels {
        family: KernelFamily,
        reason: String,
    },
    /// The device or its driver failed, or cannot do what was asked.
    #[error("the device failed: {0}")]
    Device(String),
    /// A file that the step reads and writes failed.
    #[error("the disk failed: {0}")]
    Disk(String),
    /// Other ranks cannot be reached, or do not answer.
    #[error("{0}")]
    Ranks(GroupError),
    /// They cannot, for one of them failed.
    #[error("{words}; this rank saw it so: {error}")]
    LostRank {
        words: Box<LastWords>,
        error: GroupError,
    },
    /// Another rank could not do what all must, and said why.
    #[error("{0}")]
    OtherRank(Box<LastWords>),
    /// The ranks of a job would not train the same.
    #[error("the ranks of this job were not started alike: {0}")]
    RanksDiffer(String),
    /// An operation was called wrongly.
    #[error("this is a defect of the trainer, not of what it was given: {0}")]
    Defect(String),
    /// Loss or gradients are not finite, in more steps than may be skipped or in the last ones.
    #[error(
        "step {step} diverged: loss {loss}, gradient norm {grad_norm}; the last {skipped} steps were skipped: they changed \
         neither weights nor optimizer state"
    )]
    Diverged {
        step: usize,
        loss: f32,
        grad_norm: f32,
        skipped: usize,
        start: &'static str,
    },
    /// Peaks are not those of the file.
    #[error("peaks have changed:\n{0}")]
    PeaksChanged(String),
    /// A peak is higher than that of the other file.
    #[error("the peak grew: {0}")]
    PeakGrew(String),
    /// Strategies of a matrix ended in another way than for want of memory.
    #[error("{failed} of the strategies failed: the reasons are above")]
    StrategiesFailed { failed: usize },
    /// A run directory cannot be reported on.
    #[error(transparent)]
    Report(#[from] PageError),
    /// A signal ended a matrix.
    #[error("interrupted; the table has what was measured by then")]
    BenchInterrupted {
        signal: i32,
        journal: Option<PathBuf>,
    },
    /// A signal ended the run.
    #[error("interrupted after step {step}, whose state is in {}{}", .checkpoint.display(), told(.rank))]
    Interrupted {
        rank: Option<usize>,
        step: usize,
        signal: i32,
        checkpoint: PathBuf,
    },
    /// A part that this build does not have.
    #[error("{what} is not in this trainer, which was built without the feature `{feature}`")]
    NotBuilt {
        what: &'static str,
        feature: &'static str,
    },
    /// No data set was made.
    #[cfg(feature = "text")]
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// A signal ended the making of a data set.
    #[cfg(feature = "text")]
    #[error("interrupted; nothing was kept")]
    PrepareInterrupted { signal: i32 },
    /// A run would go on as another one.
    #[error("the run would not go on as it was: {}", list(.0))]
    Changed(Vec<String>),
    /// The run directory cannot be had.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// No checkpoint could be read or written.
    #[error(transparent)]
    Checkpoint(CheckpointError),
}

impl Failure {
    /// A file that could not be written.
    pub fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Failure {
        let path = path.into();
        move |source| Failure::File { path, source }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            refused if refused.wants_host_memory() => 3,
            Failure::PeaksChanged(_) | Failure::PeakGrew(_) => 1,
            Failure::Scratch(ScratchError::Held { .. }) => 2,
            Failure::Scratch(ScratchError::Full { .. }) => 3,
            Failure::Scratch(_) => 4,
            Failure::ShellScript { .. } => 2,
            Failure::Config(_) | Failure::Usage(_) | Failure::Changed(_) | Failure::Lock(_) => 2,
            Failure::RanksDiffer(_) | Failure::Ranks(GroupError::Launch(_)) => 2,
            Failure::OtherRank(words) | Failure::LostRank { words, .. } => words.exit_code,
            Failure::Auto(AutoError::Costs(_)) => 4,
            Failure::OutOfMemory { .. }
            | Failure::HostMemory(_)
            | Failure::DiskSpace(_)
            | Failure::DoesNotFit { .. }
            | Failure::Auto(_) => 3,
            Failure::Data(error) if is_usage(error) => 2,
            Failure::NotBuilt { .. } | Failure::Tokenizer(TokenizerError::NotBuilt { .. }) => 2,
            #[cfg(feature = "text")]
            Failure::Prepare(error) if error.is_usage() => 2,
            #[cfg(feature = "text")]
            Failure::Prepare(error) if error.is_out_of_memory() => 3,
            #[cfg(feature = "text")]
            Failure::Prepare(_) => 4,
            #[cfg(feature = "text")]
            Failure::PrepareInterrupted { signal } => 128 + *signal as u8,
            Failure::Data(_)
            | Failure::ForeignData { .. }
            | Failure::Weights(_)
            | Failure::Unsound(_)
            | Failure::OptimizerState(_)
            | Failure::Checkpoint(_)
            | Failure::Tokenizer(_)
            | Failure::HfConfig { .. }
            | Failure::Unreadable { .. }
            | Failure::NoModelFolder { .. }
            | Failure::Malformed { .. }
            | Failure::File { .. }
            | Failure::Algorithms { .. }
            | Failure::Report(_) => 4,
            Failure::NoDevice { .. }
            | Failure::NoFp8(_)
            | Failure::Kernels { .. }
            | Failure::Device(_)
            | Failure::Disk(_)
            | Failure::Ranks(_)
            | Failure::StrategiesFailed { .. } => 5,
            Failure::Diverged { .. } => 6,
            // As after a panic.
            Failure::Defect(_) => 101,
            Failure::Interrupted { signal, .. } | Failure::BenchInterrupted { signal, .. } => {
                128 + *signal as u8
            }
        }
    }

    /// Whether the system had no host memory left for what passes between leases and files.
    fn wants_host_memory(&self) -> bool {
        use RestoreError::Files;
        match self {
            Failure::Weights(WeightsError::Read(error) | WeightsError::Write(error))
            | Failure::OptimizerState(OptimizerStateError::Files(error))
            | Failure::OptimizerState(OptimizerStateError::Restore {
                source: Files(error),
                ..
            }) => error.is_out_of_memory(),
            Failure::Checkpoint(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// Whether all ranks end of it and know, so that it is enough if one says it.
    pub(crate) fn is_of_all(&self) -> bool {
        matches!(
            self,
            Failure::OtherRank(_)
                | Failure::RanksDiffer(_)
                | Failure::Interrupted { .. }
                | Failure::Diverged { .. }
        )
    }

    /// The reason in the last record of the metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            refused if refused.wants_host_memory() => "out_of_memory",
            Failure::OutOfMemory { .. }
            | Failure::HostMemory(_)
            | Failure::DiskSpace(_)
            | Failure::DoesNotFit { .. }
            | Failure::Auto(_) => "out_of_memory",
            Failure::Diverged { .. } => "diverged",
            Failure::Interrupted { .. } => "interrupted",
            _ => "failed",
        }
    }

    /// What else may help.
    pub fn hints(&self) -> Vec<String> {
        let hint = match self {
            refused if refused.wants_host_memory() => Some(
                "raise the limit on this process's memory, or end what else runs here: `trainer plan` says what the host has to \
                 hold to load, save, resume and export"
                    .into(),
            ),
            Failure::Config(error) => error.hint(),
            Failure::ShellScript { path, .. } => Some(format!(
                "`bash -c 'torchrun() {{ printf \"%q \" \"$@\" > arguments.txt; }}; . \"$0\"' {}` runs the script with a torchrun that only writes \
                 its arguments down; then --from arguments.txt",
                crate::shell::quoted(&path.display().to_string())
            )),
            Failure::OutOfMemory { hints, .. } | Failure::DoesNotFit { hints, .. } => return hints.clone(),
            Failure::HostMemory(refused) => return refused.hints(),
            Failure::DiskSpace(refused) => return refused.hints(),
            Failure::NotBuilt { feature, .. } => Some(hint_of_feature(feature)),
            Failure::Tokenizer(TokenizerError::NotBuilt { .. }) => Some(hint_of_feature("text")),
            Failure::NoDevice { .. } => Some(
                "`trainer doctor` says what this machine offers; --device cpu trains without a GPU, and `trainer plan` \
                 predicts the memory of one"
                    .into(),
            ),
            Failure::NoFp8(_) => Some(
                "leave --fp8 out, and products are in bf16; a resumed run goes on so with --fp8 off --allow-change"
                    .into(),
            ),
            Failure::Kernels { family, .. } => Some(format!(
                "with {} at auto or sm80, kernels for 8.0 compute the same",
                family.key()
            )),
            Failure::Disk(_) => Some(
                "these files are scratch, and checkpoints are whole: look at the free space and the health of the disk, or \
                 name another folder, and go on from the last checkpoint with --resume latest"
                    .into(),
            ),
            Failure::RanksDiffer(_) => Some(
                "start all ranks with the same command, files and binary; what may differ is the device, its memory.limit, threads, \
                 and where files are; where auto stands for other things on other machines, write memory.head_chunk and \
                 --attention"
                    .into(),
            ),
            Failure::Interrupted { .. } => {
                Some("the same command with --resume latest and the run's --out goes on from there".into())
            }
            Failure::Changed(changes) => Some(hint_of_changes(changes)),
            Failure::Checkpoint(CheckpointError::NoneWhole { passed_over, .. }) if !passed_over.is_empty() => Some(
                "another folder for --out begins the run anew".into(),
            ),
            Failure::Checkpoint(CheckpointError::Damaged { damage: Damage::NoManifest, .. }) => Some(
                "name the folder of a run that saved checkpoints, or of one of these; eval, generate and export also take a \
                 model in Hugging Face layout: config.json and model.safetensors"
                    .into(),
            ),
            Failure::ForeignData { command, .. } => {
                let command = command.as_ref();
                command.map(|command| format!("`{command}` makes tokens for the model; give its --out to --data or --eval-data"))
            }
            Failure::NoModelFolder { hint, .. } => Some(hint.clone()),
            Failure::Weights(WeightsError::Write { .. }) => None,
            Failure::Unreadable { path, .. } if path.ends_with(model::ADAPTER_CONFIG) => Some(
                "a folder of adapters has adapter_config.json and adapter_model.safetensors, as PEFT and --save-final write them"
                    .into(),
            ),
            Failure::Unreadable { .. } | Failure::Weights(_) => Some(
                "--init-from takes a folder in Hugging Face layout: config.json and model.safetensors, as `trainer \
                 init` and --save-final write it"
                    .into(),
            ),
            Failure::Algorithms { .. } => Some(
                "`trainer tune` with --out and the flags of the run makes such a file for this GPU and its library; --set \
                 hardware.algorithms=heuristic does without, and a file that is another's is best deleted"
                    .into(),
            ),
            Failure::Diverged { step, skipped, start, .. } if step == skipped => Some(
                format!("nothing was trained yet, so the weights that the run started from are not sound: look at {start}"),
            ),
            Failure::PeaksChanged(_) => Some(
                "if the change is meant, `trainer bench --bless FILE` with the same flags takes it in".into(),
            ),
            Failure::BenchInterrupted { journal, .. } => Some(match journal {
                Some(file) => format!("the same command goes on from {}", file.display()),
                None => "with --continue FILE an interrupted matrix can go on".into(),
            }),
            Failure::Diverged { .. } => Some("a lower --lr or a longer lr.warmup_steps often helps".into()),
            _ => None,
        };
        hint.into_iter().collect()
    }
}

/// Gives the command that builds a trainer with one more feature, beside those of this one.
fn hint_of_feature(feature: &str) -> String {
    let built = [
        ("cuda", cfg!(feature = "cuda")),
        ("text", cfg!(feature = "text")),
        ("yaml", cfg!(feature = "yaml")),
    ];
    let kept = built
        .into_iter()
        .filter(|&(name, is_built)| is_built && name != feature);
    let features: Vec<&str> = kept.map(|(name, _)| name).chain([feature]).collect();
    format!(
        "`cargo build --release --features {}` adds it",
        features.join(",")
    )
}

fn list(changes: &[String]) -> String {
    changes.join("; ")
}

/// Who was told to end, where there are ranks.
fn told(rank: &Option<usize>) -> String {
    rank.map_or(String::new(), |rank| {
        format!("; rank {rank} was told to end")
    })
}

/// Whether bad data is really a bad setting.
fn is_usage(error: &DataError) -> bool {
    matches!(
        error,
        DataError::Zero { .. } | DataError::Setting(_) | DataError::NoDocuments { .. }
    )
}

/// Settings whose change may give a parameter states that no run saved.
const NEED_STATES: [&str; 3] = ["train.freeze:", "optim.kind:", "optim.matrices:"];

/// The key of a change in the parts of a sequence.
const PARTS: &str = "parallel.context_parts";

/// What helps a run that was resumed with other settings.
fn hint_of_changes(changes: &[String]) -> String {
    let hint = "leave these settings out, or add --allow-change if they are meant; recompute, offload, threads and what is \
                recorded may change freely";
    let of_parts = changes.iter().any(|change| change.starts_with(PARTS));
    let hint = match of_parts {
        true => format!(
            "{hint}; --context-parts N with the N of before keeps the bits, at every --cp that divides it"
        ),
        false => hint.into(),
    };
    let needs_states = |change: &String| NEED_STATES.iter().any(|key| change.starts_with(key));
    match changes.iter().any(needs_states) {
        true => format!(
            "{hint}; a parameter that was frozen, or that another optimizer updated, has no saved states to go on from: \
             `trainer export` the run, and start anew with --init-from"
        ),
        false => hint,
    }
}

impl From<LastWords> for Failure {
    fn from(words: LastWords) -> Failure {
        Failure::OtherRank(Box::new(words))
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Failure {
        match error {
            SessionError::Config(error) => error.into(),
            SessionError::OutOfMemory(error) => error.into(),
            SessionError::Kernel(error) => error.into(),
            SessionError::Weights(error) => error.into(),
            SessionError::Stopped => {
                Failure::Defect("a step was broken off without a signal".into())
            }
            SessionError::OptimizerState(error) => error.into(),
            SessionError::File { path, source } => Failure::File { path, source },
            SessionError::Scratch(error) => error.into(),
            SessionError::Frozen(_) | SessionError::StatesOnDisk => {
                Failure::Usage(error.to_string())
            }
            SessionError::NotFinite { .. } | SessionError::HalfUpdated | SessionError::Released => {
                Failure::Unsound(error)
            }
        }
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Failure {
        match error {
            CheckpointError::Group(error) => error.into(),
            error => Failure::Checkpoint(error),
        }
    }
}

impl From<GroupError> for Failure {
    fn from(error: GroupError) -> Failure {
        Failure::Ranks(error)
    }
}

impl From<OriginError> for Failure {
    fn from(OriginError { path, source }: OriginError) -> Failure {
        Failure::Unreadable { path, source }
    }
}

impl From<AutoError> for Failure {
    fn from(error: AutoError) -> Failure {
        match error {
            AutoError::Session(error) => error.into(),
            error => Failure::Auto(error),
        }
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Failure {
        let way_out = match error.fault {
            Fault::Caller => return Failure::Defect(error.to_string()),
            Fault::Disk => return Failure::Disk(error.to_string()),
            Fault::Collective => return GroupError::Failed(error.message).into(),
            Fault::DeviceFull => ": leave more room with --memory-limit",
            Fault::TooLarge if error.operation.starts_with("flash_") => {
                ": take --attention eager, or --dtype bf16 if it is f32"
            }
            Fault::Device | Fault::TooLarge => "",
        };
        Failure::Device(format!("{error}{way_out}"))
    }
}

impl From<OutOfMemory> for Failure {
    fn from(error: OutOfMemory) -> Failure {
        Failure::OutOfMemory {
            rank: None,
            error,
            hints: Vec::new(),
            fixes: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CheckpointError, Failure, Fault, TokenizerError, WeightsError};
    use files::{FilesError, host_room};
    use kernels::KernelError;

    #[test]
    fn host_memory_that_is_missing_for_files_is_out_of_memory() {
        let io = std::io::Error::from(host_room(usize::MAX / 4).unwrap_err());
        let written = FilesError::at("write", "model.safetensors".as_ref())(io);
        let read = host_room(usize::MAX / 4).unwrap_err();
        for failure in [
            Failure::Weights(WeightsError::Write(written)),
            Failure::Checkpoint(CheckpointError::Files(read)),
        ] {
            assert_eq!(
                (failure.exit_code(), failure.reason()),
                (3, "out_of_memory")
            );
            assert!(
                failure.to_string().contains("bytes of host memory"),
                "{failure}"
            );
            assert!(failure.hints()[0].contains("raise the limit"));
        }
        let full = FilesError::at("write", "x".as_ref())(std::io::ErrorKind::StorageFull.into());
        assert_eq!(Failure::Weights(WeightsError::Write(full)).exit_code(), 4);
    }

    #[test]
    fn what_this_build_does_not_have_is_refused_with_the_command_that_adds_it() {
        let tokenizer = TokenizerError::NotBuilt {
            path: "model/tokenizer.json".into(),
        };
        let yaml = Failure::NotBuilt {
            what: "reading YAML",
            feature: "yaml",
        };
        for (failure, feature) in [(tokenizer.into(), "text"), (yaml, "yaml")] {
            assert_eq!(failure.exit_code(), 2, "{failure}");
            let hints = failure.hints();
            assert!(hints[0].contains("cargo build --release --features"));
            assert!(hints[0].contains(feature), "{hints:?}");
        }
    }

    #[test]
    fn a_failing_device_is_told_apart_from_a_defect() {
        let device = Failure::from(KernelError::device("upload", "CUDA_ERROR_LAUNCH_FAILED"));
        let disk = Failure::from(KernelError::disk("disk_read", "cannot read 512 bytes"));
        assert_eq!((disk.exit_code(), disk.reason()), (5, "failed"));
        assert!(disk.hints()[0].contains("--resume latest"));
        let full = Failure::from(KernelError {
            fault: Fault::DeviceFull,
            ..KernelError::device("flash_attention", "no memory left")
        });
        let wide = Failure::from(KernelError::too_large("flash_attention", "wide heads"));
        let defect = Failure::from(KernelError::misfit("swiglu", "`gate_up` is [2, 3]"));
        assert_eq!((device.exit_code(), defect.exit_code()), (5, 101));
        assert!(
            full.to_string()
                .ends_with("left: leave more room with --memory-limit")
        );
        assert!(wide.to_string().contains("take --attention eager"));
        assert!(
            defect.to_string().ends_with("swiglu: `gate_up` is [2, 3]"),
            "{defect}"
        );
    }
}
