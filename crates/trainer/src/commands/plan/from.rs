//! `plan --from`: the configuration of another trainer, planned as a run of this one.

use super::advice::train_command;
use crate::args::{RankArgs, RunArgs};
use crate::failure::Result;
use crate::foreign::{
    CommandLine, ForeignFile, ForeignSettings, KeyOutcome, KeyRow, Program, Setting, take,
};
use clap::Args;
use planner::Plan;
use report::Table;
use serde::Serialize;
use settings::load::Override;
use settings::{ConfigError, FlagArgument, Resolved, dotted};
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use toml::Value;

/// Flags of `plan` that name files of other trainers.
#[derive(Clone, Debug, Default, Args)]
pub struct FromArgs {
    /// Plan what another trainer's configuration says (repeatable): Hugging Face, axolotl, LLaMA-Factory, Megatron,
    /// DeepSpeed, accelerate. Flags go before it
    #[arg(long, value_name = "FILE")]
    pub from: Vec<PathBuf>,
}

/// The files of `--from`, and what happened to each of their keys.
#[derive(Debug, Serialize)]
pub(super) struct FromFiles {
    /// The files, each with whose it is.
    files: Vec<FileOf>,
    /// The command that trains the same here.
    command: String,
    /// Every key.
    keys: Vec<KeyRow>,
    /// Why the peak of those programs is another.
    differs: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct FileOf {
    path: PathBuf,
    program: Program,
}

/// A plan, and what became of the files that it was made from.
#[derive(Serialize)]
pub(super) struct PlanOf<'a> {
    #[serde(flatten)]
    pub(super) plan: &'a Plan,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from: Option<&'a FromFiles>,
}

/// The files of `--from`, and the flags with the settings that were taken from them.
pub(super) struct ReadFiles {
    /// The flags of `train`.
    pub(super) run: RunArgs,
    /// The flags about ranks.
    pub(super) rank: RankArgs,
    /// The files.
    pub(super) files: Vec<ForeignFile>,
    /// The settings that were taken from them.
    pub(super) taken: ForeignSettings,
}

impl FromArgs {
    /// Reads the files; none where none is named.
    ///
    /// # Errors
    /// A file that cannot be read or understood, files that contradict each other, or what a plan needs and nobody says.
    pub(super) fn read(&self, run: &RunArgs, rank: RankArgs) -> Result<Option<ReadFiles>> {
        if self.from.is_empty() {
            return Ok(None);
        }
        let files = self.from.iter().map(|path| ForeignFile::read(path));
        let files = files.collect::<Result<Vec<_>>>()?;
        let taken = take(&files, &told(run, rank)?)?;
        Ok(Some(ReadFiles {
            run: with_taken(run.clone(), &taken),
            rank: RankArgs {
                ranks: rank.ranks.or(taken.ranks),
                ..rank
            },
            files,
            taken,
        }))
    }
}

/// Flags with what was taken over before them.
fn with_taken(mut run: RunArgs, taken: &ForeignSettings) -> RunArgs {
    let (config, init_from) = (&mut run.source.config, &mut run.weights.init_from);
    *init_from = init_from.take().or(taken.init_from.clone());
    if init_from.is_none() {
        *config = config.take().or(taken.config.clone());
    }
    let (mut flags, mut set) = (Vec::new(), Vec::new());
    for Setting { key, text, .. } in &taken.settings {
        let flag = dotted::find(key).and_then(|key| key.flag);
        match flag.map(|flag| (flag.name, flag.argument)) {
            Some((flag, FlagArgument::Value(_))) => {
                flags.push(Override::from_flag(flag, key, text));
            }
            _ => set.push(format!("{key}={text}")),
        }
    }
    run.keys.overrides.splice(0..0, flags);
    run.source.set.splice(0..0, set);
    run
}

/// The settings of the command line, which go before those of the files.
fn told(run: &RunArgs, rank: RankArgs) -> Result<CommandLine> {
    let given = run.given();
    let mut all = given.flags;
    for argument in &given.set {
        all.push(Override::from_set(argument)?);
    }
    let text = |value: Value| value.as_str().map_or(value.to_string(), str::to_owned);
    let mut keys: BTreeMap<String, String> = all
        .into_iter()
        .map(|one| (one.key, text(one.value)))
        .collect();
    if let Some(spec) = given.megatron.spec().map_err(ConfigError::from)? {
        keys.insert("recompute.spec".into(), spec);
    }
    Ok(CommandLine {
        keys,
        model: given.config.is_some() || run.weights.init_from.is_some(),
        init_from: run.weights.init_from.is_some(),
        ranks: rank.ranks,
    })
}

impl FromFiles {
    /// Describes the files, for a run with these flags.
    pub(super) fn new(
        files: Vec<ForeignFile>,
        taken: ForeignSettings,
        run: &RunArgs,
        resolved: &Resolved,
    ) -> FromFiles {
        let mut differs: Vec<&str> = Vec::new();
        for reason in files.iter().flat_map(|file| file.program.differs()) {
            if !differs.contains(reason) {
                differs.push(reason);
            }
        }
        let of = |file: ForeignFile| FileOf {
            path: file.path,
            program: file.program,
        };
        FromFiles {
            files: files.into_iter().map(of).collect(),
            command: train_command(run, resolved, Vec::new()),
            keys: taken.rows,
            differs,
        }
    }

    /// The rows with one outcome, as a table.
    fn table(&self, outcome: KeyOutcome, columns: &[&str]) -> Option<Table> {
        let mut table = Table::new(columns, &[]);
        let rows = self.keys.iter().filter(|row| row.outcome == outcome);
        let mut is_empty = true;
        for row in rows {
            is_empty = false;
            let place = match (&row.file, self.files.len()) {
                (None, _) => format!("{} (by itself)", row.key),
                (Some(file), 2..) => {
                    let name = file.file_name().unwrap_or(file.as_os_str());
                    format!("{}: {}", name.display(), row.key)
                }
                (Some(_), _) => row.key.clone(),
            };
            let here = match row.here.is_empty() {
                true => row.remark.clone(),
                false if row.remark.is_empty() => row.here.join(" "),
                false => format!("{} ({})", row.here.join(" "), row.remark),
            };
            table.row([place, shortened(&row.value), here]);
        }
        (!is_empty).then_some(table)
    }
}

/// The beginning of a value that is long.
fn shortened(value: &str) -> String {
    const MOST: usize = 32;
    match value.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", value[..end].replace('\n', " ")),
        None => value.replace('\n', " "),
    }
}

impl Display for FromFiles {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        for FileOf { path, program } in &self.files {
            writeln!(f, "\n{} is of {}", path.display(), program.name())?;
        }
        let parts = [
            (
                KeyOutcome::TakenOver,
                "taken over",
                ["key", "value", "here"],
            ),
            (
                KeyOutcome::Near,
                "near, and not the same here",
                ["key", "value", "here"],
            ),
            (
                KeyOutcome::WithoutMeaning,
                "without meaning for a plan",
                ["key", "value", "why"],
            ),
            (
                KeyOutcome::NotBuilt,
                "not built",
                ["key", "value", "what to do"],
            ),
            (
                KeyOutcome::Unknown,
                "in no table, and left out: if it matters, say it by a flag",
                ["key", "value", ""],
            ),
        ];
        for (outcome, title, columns) in parts {
            if let Some(table) = self.table(outcome, &columns) {
                write!(f, "\n{title}\n{table}")?;
            }
        }
        writeln!(
            f,
            "\nThis is what the run takes here. What it takes there is another figure:"
        )?;
        for reason in &self.differs {
            writeln!(f, "- {reason}")?;
        }
        writeln!(
            f,
            "- PyTorch's allocator rounds, and leaves holes that grow; CUDA's own memory comes on top, here and there"
        )?;
        writeln!(f, "\nhere: {}", self.command)
    }
}
