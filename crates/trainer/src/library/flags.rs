//! Trainers that flags describe, as on the command line.

use super::Trainer;
use super::explaining::explained;
use crate::begin::complete_and_warn;
use crate::cli::{Cli, Command};
use crate::failure::{Failure, Result};
use crate::threads::threads_of;
use crate::train::{BATCHES_OF_A_PROGRAM, is_of_a_program};
use collectives::Launch;
use settings::{BetweenSteps, Config, Resolved, Task, resolve};
use std::ffi::OsString;
use std::path::Path;

/// A trainer as flags of `trainer train` describe it, not made yet.
pub struct Described {
    resolved: Resolved,
}

impl Described {
    /// Reads flags.
    ///
    /// ```
    /// let flags = ["--config=tiny", "--seq=32", "--recompute=full", "--lr=1e-3"];
    /// let trainer = trainer::Described::by(&flags)?.make(Default::default())?;
    /// assert_eq!(trainer.config().data.seq, 32);
    /// # Ok::<(), trainer::Failure>(())
    /// ```
    ///
    /// # Errors
    /// [`Failure::Usage`] or [`Failure::Config`]: a flag that is unknown, out of range, or contradicts another, or that says what a program's own loop
    /// decides, such as `--data`.
    pub fn by<S: AsRef<str>>(flags: &[S]) -> Result<Described> {
        refuse_what_the_loop_decides(flags)?;
        // Batches are no file, and a run that goes on from a checkpoint has to name its data.
        let data = format!("--data={BATCHES_OF_A_PROGRAM}");
        let words = ["trainer", "train", &data].into_iter();
        let words = words.chain(flags.iter().map(AsRef::as_ref));
        let cli = Cli::from_words(words.map(OsString::from)).map_err(|refused| {
            let said = refused.render().to_string();
            Failure::Usage(said.trim_start_matches("error: ").trim_end().into())
        })?;
        let Some(Command::Train(run)) = cli.command else {
            unreachable!("the words name the command");
        };
        let resolved = resolve(Task::Train, run.given(), run.options(false))?;
        refuse_several_processes()?;
        warn_of_what_the_loop_decides(flags, &resolved.config);
        Ok(Described { resolved })
    }

    /// Worker threads that it asks for, or else one for each processor. The thread that makes the trainer and uses it should be one of
    /// them.
    pub fn threads(&self) -> usize {
        threads_of(self.resolved.config.train.threads)
    }

    /// What the flags say, before a folder's model completes it.
    pub fn config(&self) -> &Config {
        &self.resolved.config
    }

    /// Makes the trainer. Besides steps it is planned with what comes between them: evaluations, and texts that are generated together.
    ///
    /// # Errors
    /// As [`Trainer::new`] and [`Trainer::from_pretrained`].
    pub fn make(self, between: BetweenSteps) -> Result<Trainer> {
        let completed = complete_and_warn(self.resolved)?;
        let config = completed.config.clone();
        Trainer::of(completed, between).map_err(|failure| explained(failure, &config))
    }
}

/// Flags without a meaning for single steps, each with what to do instead.
const OF_THE_LOOP: [(&str, &str); 19] = [
    ("data", "pass batches to step"),
    ("no-shuffle", "pass batches in the order that you want"),
    ("eval-data", "pass batches to eval"),
    ("eval-micro-batch", "batch.micro is that of evaluations too"),
    ("eval-every", "call eval"),
    ("sample-every", "call generate"),
    ("save-every", "call save"),
    ("save-blocking", "save waits"),
    ("keep-last", "remove old checkpoints yourself"),
    ("keep-best", "save where eval is the lowest"),
    ("save-final", "call export"),
    ("out", "save names the run's folder"),
    (
        "resume",
        "make the trainer with the run's settings, and load the checkpoint",
    ),
    ("allow-change", "load takes other settings"),
    ("epochs", "set steps, the length of the schedule"),
    ("dump-gradients", "use `trainer train`"),
    ("trace", "use `trainer train`"),
    ("tensorboard", "write the records of metrics"),
    ("quiet", "nothing is shown; RUST_LOG=error hides warnings"),
];

fn refuse_what_the_loop_decides<S: AsRef<str>>(flags: &[S]) -> Result {
    let named = |flag: &str| {
        let name = flag.strip_prefix("--")?.split('=').next()?.to_owned();
        OF_THE_LOOP.iter().find(|(own, _)| *own == name)
    };
    match flags.iter().find_map(|flag| named(flag.as_ref())) {
        None => Ok(()),
        Some((name, instead)) => Err(Failure::Usage(format!(
            "--{name} is for the loop of `trainer train`, and here the loop is the program's: {instead}"
        ))),
    }
}

/// Says which settings of a file or of `--set` have no effect. Presets have some too, which nobody set.
fn warn_of_what_the_loop_decides<S: AsRef<str>>(flags: &[S], config: &Config) {
    let is_file = |flag: &S| {
        let file = flag.as_ref().strip_prefix("--config=");
        file.is_some_and(|file| Path::new(file).is_file())
    };
    let says = |flag: &S, key: &str| is_file(flag) || flag.as_ref().starts_with(key);
    if !flags.iter().any(|flag| says(flag, "--set=")) {
        return;
    }
    let mut without = config.clone();
    without.without_between_steps();
    let checkpoints = flags.iter().any(|flag| says(flag, "--set=checkpoint."));
    let sections = [
        ("eval", config.eval != without.eval),
        (
            "checkpoint",
            checkpoints && config.checkpoint != without.checkpoint,
        ),
        ("train.epochs", config.train.epochs != without.train.epochs),
        ("log", config.log != without.log),
        ("data.path", !is_of_a_program(config)),
    ];
    for (section, is_set) in sections {
        if is_set {
            tracing::warn!(
                "settings of {section} have no effect: here the loop is the program's, which passes batches, and calls eval, generate and save"
            );
        }
    }
}

/// Refuses to train as one of several processes, each of which would train alone.
fn refuse_several_processes() -> Result {
    let launch = Launch::from_environment()?;
    match launch.filter(|launch| launch.size > 1) {
        None => Ok(()),
        Some(launch) => Err(Failure::Usage(format!(
            "this is process {} of {} that a launcher started, and a program trains in one; take `trainer train` for several ranks, or start the \
             program alone",
            launch.rank, launch.size
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// A flag that is renamed would be ignored without a word.
    #[test]
    fn flags_of_the_loop_exist() {
        let cli = Cli::command();
        let train = cli.find_subcommand("train").unwrap();
        for (name, _) in OF_THE_LOOP {
            assert!(
                train
                    .get_arguments()
                    .any(|flag| flag.get_long() == Some(name)),
                "{name}"
            );
        }
    }
}
