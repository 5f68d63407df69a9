//! Resumes a run from a checkpoint.

use crate::adapters::{BaseModel, BaseWeights};
use crate::checkpoints::{newest_if_any, newest_together};
use crate::decisions::Decided;
use crate::failure::{Failure, Result};
use crate::job::Job;
use crate::kernel_kinds::KernelKinds;
use checkpoint::{Best, Checkpoint, set_aside_after};
use collectives::Alone;
use data::{Batches, Dataset, Position};
use files::Disk;
use kernels::cuda::KernelKind;
use memory::Rank;
use session::Session;
use settings::load::{Source, load};
use settings::{
    Config, Given, HEURISTIC, KernelChoice, KernelFamily, PerFamily, Resolved, Resume, resolve,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file of a checkpoint with the run's settings.
const SETTINGS: &str = "config.toml";

/// Settings that say which adapters there are, and of which shapes.
const SHAPES_OF_ADAPTERS: [&str; 4] = [
    "lora.rank",
    "lora.targets",
    "lora.layers",
    "lora.rank_pattern",
];

/// A checkpoint to resume from.
pub(super) struct Resumed {
    checkpoint: Checkpoint,
    /// The run that continues in its own folder; none if a new run begins.
    run: Option<PathBuf>,
    /// Whether samples come from the same data, divided and ordered in the same way.
    are_same_samples: bool,
    /// The settings of the computation that change.
    pub(super) changes: Vec<String>,
}

impl Resumed {
    /// Finds the checkpoint that the command line names, if any, together with all ranks of the job.
    pub(super) fn find(job: &Job, resolved: &Resolved) -> Result<Option<Resumed>> {
        let out = resolved.options.out.as_deref();
        let under_out = |word: &str| {
            out.ok_or_else(|| {
                Failure::Usage(format!(
                    "--resume {word} takes the newest checkpoint under --out; name the run's folder with --out DIR"
                ))
            })
        };
        let group = job.group().unwrap_or_else(|| Arc::new(Alone));
        let found = match &resolved.options.resume {
            None => None,
            Some(Resume::Folder(folder)) => Some(newest_together(folder, &*group)?),
            Some(Resume::Latest) => Some(newest_together(under_out("latest")?, &*group)?),
            Some(Resume::Auto) => newest_if_any(under_out("auto")?, &*group)?,
        };
        let Some(checkpoint) = found else {
            return Ok(None);
        };
        Ok(Some(Resumed {
            run: going_on(&checkpoint.path, out)?,
            checkpoint,
            are_same_samples: true,
            changes: Vec::new(),
        }))
    }

    /// Takes the run's name. The settings that the command line leaves open were read from the newest checkpoint, unverified: if
    /// that one is damaged and an older one is used, all settings are resolved again.
    pub(super) fn own_settings(&self, mut resolved: Resolved) -> Result<Resolved> {
        let own = self.checkpoint.path.join(SETTINGS);
        let own = own.to_str().map(str::to_owned);
        if resolved.given.resumed != own {
            let given = Given {
                resumed: own,
                ..resolved.given
            };
            resolved = resolve(resolved.task, given, resolved.options)?;
        }
        Ok(Resolved {
            name: self.state().name.clone(),
            ..resolved
        })
    }

    /// Refuses to resume with settings, data or algorithms of matrix products that change the computation,
    /// unless changes are allowed.
    pub(super) fn compare(
        &mut self,
        decided: &Decided,
        dataset: &str,
        algorithms: Option<&str>,
    ) -> Result {
        let before = self.config()?;
        let changes = decided.config.changes_since(&before)?;
        let mut of_adapters = changes.iter();
        if let Some(change) = of_adapters.find(|change| SHAPES_OF_ADAPTERS.contains(&change.key)) {
            return Err(Failure::Usage(format!(
                "{change}: --allow-change cannot reshape the checkpoint's adapters, or add some where it has none; leave the setting \
                 out, or begin a new run"
            )));
        }
        // The batches of a program have no fingerprint, and the settings of the data say nothing of them.
        let is_program_s = self.checkpoint.state.data.is_empty();
        let counts = |key: &str| !is_program_s || key == "data.seq" || !key.starts_with("data.");
        let counted = changes.iter().filter(|change| counts(change.key));
        self.changes = counted.map(ToString::to_string).collect();
        let orders = |key: &str| key.starts_with("data.") || key == "train.seed";
        let is_same_data = self.checkpoint.state.data == dataset;
        self.are_same_samples = is_same_data && !changes.iter().any(|change| orders(change.key));
        if !is_same_data && !is_program_s {
            self.changes.push("the data is other than before".into());
        }
        let had = self.checkpoint.state.algorithms.as_deref();
        if let Some(has) = algorithms.filter(|has| *has != had.unwrap_or(HEURISTIC)) {
            let had = had.unwrap_or(HEURISTIC);
            let change = format!("algorithms of matrix products: {had} before, {has} now");
            self.changes.push(change);
        }
        if self.checkpoint.state.step > decided.config.train.steps as u64 {
            return Err(Failure::Usage(format!(
                "{} has {} steps, and the run ends after {} (--steps counts from the beginning); raise --steps",
                self.checkpoint.path.display(),
                self.checkpoint.state.step,
                decided.config.train.steps
            )));
        }
        if self.changes.is_empty() || decided.options.allow_change {
            return Ok(());
        }
        Err(Failure::Changed(self.changes.clone()))
    }

    /// The kernels that computed on CUDA: those for 8.0 before there were others.
    pub(super) fn kernels(&self) -> PerFamily<Option<KernelKind>> {
        let state = self.state();
        PerFamily::new(|family| {
            let name = match family {
                KernelFamily::Attention => &state.attention_kernels,
                KernelFamily::Experts => &state.experts_kernels,
            };
            let Some(name) = name else {
                return state.algorithms.as_ref().map(|_| KernelKind::Sm80);
            };
            let mut kinds = [KernelKind::Sm80, KernelKind::Sm90].into_iter();
            kinds.find(|kind| kind.name() == name)
        })
    }

    /// Refuses kernels that the configuration names, and that compute other bits than the run had, unless changes are allowed. Where the
    /// choice is left open, and the GPU does not run the same ones, this is only said.
    pub(super) fn compare_kernels(&mut self, decided: &Decided, kinds: &KernelKinds) -> Result {
        let before = self.kernels();
        let mut refused = Vec::new();
        for family in KernelFamily::ALL {
            let (Some(had), Some(has)) = (before[family], kinds.taken[family]) else {
                continue;
            };
            if had == has {
                continue;
            }
            let change = format!("{}: {had} before, {has} now", family.key());
            self.changes.push(change.clone());
            match family.choice(&decided.config) {
                KernelChoice::Auto => tracing::warn!(
                    "{change}: they add up in another order, so last bits differ from those of before"
                ),
                KernelChoice::Sm80 | KernelChoice::Sm90 => refused.push(change),
            }
        }
        match refused.is_empty() || decided.options.allow_change {
            true => Ok(()),
            false => Err(Failure::Changed(refused)),
        }
    }

    /// The configuration in the checkpoint.
    fn config(&self) -> Result<Config> {
        let text = self.checkpoint.file(SETTINGS)?.unwrap_or_default();
        let place = self.checkpoint.path.join(SETTINGS);
        let text = String::from_utf8_lossy(&text);
        let source = Source::parse(String::new(), place.display().to_string(), &text)?;
        let mut config = load(&source, &[], false)?.config;
        if let Some(ranks) = self.checkpoint.state.ranks {
            let of = ranks as usize;
            config.join(Rank { number: 0, of })?;
        }
        Ok(config)
    }

    /// Where the data goes on, and the number of steps made before.
    pub(super) fn begins(&self) -> (Position, usize) {
        let position = match self.are_same_samples {
            true => self.state().position,
            false => Position::default(),
        };
        (position, self.state().step as usize)
    }

    /// Where the run goes on, to follow what it trains on.
    pub(super) fn describe(&self) -> String {
        let (step, path) = (self.state().step, self.checkpoint.path.display());
        format!("; goes on after step {step}, from {path}")
    }

    /// The checkpoint's folder, which also has a model in Hugging Face layout.
    pub(super) fn folder(&self) -> &Path {
        &self.checkpoint.path
    }

    /// The run that continues in its own folder.
    pub(super) fn run(&self) -> Option<&Path> {
        self.run.as_deref()
    }

    /// The state of the run at the checkpoint.
    pub(super) fn state(&self) -> &checkpoint::TrainerState {
        &self.checkpoint.state
    }

    /// Whether the run read this data before.
    pub(super) fn read(&self, dataset: &Dataset) -> bool {
        self.checkpoint.state.data == dataset.fingerprint()
    }

    /// The model under the run's adapters, if it has some; `named` is a folder that has it now.
    pub(super) fn base(&self, config: &Config, named: Option<&Path>) -> Result<Option<BaseModel>> {
        let has_adapters = config.lora.rank.is_some();
        let base = has_adapters.then(|| BaseModel::of_checkpoint(self.folder(), named, config));
        base.transpose()
    }

    /// Restores a session's weights, optimizer states and counters.
    pub(super) fn restore(
        &self,
        session: &mut Session,
        config: &Config,
        base: Option<&BaseModel>,
    ) -> Result {
        restore(&self.checkpoint, session, config, base)
    }

    /// The data from the checkpoint's position, or from the beginning if the samples differ.
    pub(super) fn seek(&self, dataset: Dataset) -> Result<Batches> {
        let mut batches = dataset.batches();
        match self.are_same_samples {
            true => batches.seek(self.state().position)?,
            false => tracing::warn!("the data is read from its beginning: its samples are others"),
        }
        Ok(batches)
    }

    /// The best evaluation so far, if it was made on the same data.
    pub(super) fn best(&self, evaluation: Option<&str>) -> Option<Best> {
        let best = self.state().best.clone()?;
        if evaluation.is_some_and(|data| data != best.data) {
            tracing::warn!("the best evaluation so far was made on other data, and is forgotten");
            return None;
        }
        Some(best)
    }

    /// Renames later checkpoints of the run, because their steps are made again.
    pub(super) fn set_aside_later(&self) -> Result {
        let Some(run) = &self.run else {
            return Ok(());
        };
        for folder in set_aside_after(&Disk, run, self.state().step)? {
            tracing::warn!("a later checkpoint is now {}", folder.display());
        }
        Ok(())
    }
}

/// Restores the weights, optimizer states and counters of a checkpoint.
pub(crate) fn restore(
    checkpoint: &Checkpoint,
    session: &mut Session,
    config: &Config,
    base: Option<&BaseModel>,
) -> Result {
    let (folder, state) = (&checkpoint.path, &checkpoint.state);
    let (was, optim) = (&state.optimizer, &config.optim);
    let is = [optim.state_dtype.to_string(), optim.master.to_string()];
    if [&was.state_dtype, &was.master] != [&is[0], &is[1]] {
        tracing::info!(
            "optimizer states are converted through f32: moments {} to {}, master {} to {}",
            was.state_dtype,
            is[0],
            was.master,
            is[1]
        );
    }
    match base {
        None => {
            session.incoming().import(folder)?;
        }
        Some(base) => {
            let parameters = session.model().architecture().parameters.clone();
            match base.weights(&parameters)? {
                BaseWeights::Folder(folder) => drop(session.incoming().import(folder)?),
                BaseWeights::Fresh(fresh) => session.incoming().initialise(fresh)?,
            }
            session.incoming().import_adapter(folder)?;
        }
    }
    session.import_optimizer(folder)?;
    session.set_progress((state.step as usize, state.updates as usize));
    Ok(())
}

/// The run that continues: that of the checkpoint, unless `--out` names another folder.
fn going_on(checkpoint: &Path, out: Option<&Path>) -> Result<Option<PathBuf>> {
    let parent = checkpoint.parent();
    let in_a_run = parent.filter(|parent| parent.ends_with("checkpoints"));
    let run = in_a_run.and_then(Path::parent).map(|run| match run {
        run if run.as_os_str().is_empty() => PathBuf::from("."),
        run => run.to_path_buf(),
    });
    let is_same = |run: &Path, out: &Path| {
        let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.into());
        whole(run) == whole(out)
    };
    match (run, out) {
        (Some(run), None) => Ok(Some(run)),
        (Some(run), Some(out)) => Ok(is_same(&run, out).then_some(run)),
        (None, Some(_)) => Ok(None),
        (None, None) => Err(Failure::Usage(format!(
            "{} is in no run's folder that could go on; name a new one with --out DIR",
            checkpoint.display()
        ))),
    }
}
