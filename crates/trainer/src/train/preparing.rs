//! Opens all that a run reads, decides what is open, and plans, before anything is written.

use super::evaluation_inputs::EvaluationInputs;
use super::resuming::Resumed;
use super::saver::{Saver, origin};
use crate::decisions::{self, planning};
use crate::device::{DeviceStep, OpenDevice};
use crate::failure::Failure;
use crate::initial_model::beyond_context;
use crate::job::Job;
use crate::limits::{limit, refuse_without_room};
use crate::model_tokens::ModelTokens;
use crate::reference;
use crate::run_dir::refuse_model;
use crate::samples::{data_options, decide_packing, set_steps_from_epochs};
use data::{Dataset, Inputs};
use model::Origin;
use planner::{Plan, StepOnPaper};
use session::SessionError;
use settings::{Config, HEURISTIC, OptimizerPlace, Resolved, Settings};
use std::path::Path;

/// A run that is ready to start, with all that it reads. Nothing has been written for it yet.
pub(super) struct Prepared {
    pub(super) resolved: Resolved,
    pub(super) resumed: Option<Resumed>,
    pub(super) dataset: Dataset,
    /// What the model's tokens stand for after training on this data.
    pub(super) tokens: ModelTokens,
    pub(super) device: OpenDevice,
    pub(super) step: DeviceStep,
    pub(super) plan: Plan,
    pub(super) limit: Option<u64>,
}

impl Prepared {
    /// Opens the data and the device, decides what is left open, and plans. A run that is not possible is refused here.
    pub(super) fn new(job: &Job, mut resolved: Resolved) -> Result<Prepared, Failure> {
        let mut resumed = Resumed::find(job, &resolved)?;
        if let Some(resumed) = &resumed {
            resolved = resumed.own_settings(resolved)?;
            resumed.keep_choices(&mut resolved.config)?;
        }
        if let Some(choice) = decide_packing(&mut resolved) {
            tracing::info!("{choice}");
        }
        let from = resumed.as_ref().map(Resumed::folder);
        let from = from.or(resolved.options.init_from.as_deref());
        let tokens = ModelTokens::of_run(&resolved, from);
        let dataset = tokens.open(&data_options(&resolved))?;
        let dataset = reference::attach(dataset, &resolved.config)?;
        let goes_on = resumed
            .as_ref()
            .is_some_and(|resumed| resumed.read(&dataset));
        if !goes_on && !resolved.config.data.any_tokenizer {
            tokens.check(&dataset)?;
        }
        let tokens = tokens.after(&dataset);
        set_steps_from_epochs(&mut resolved, &dataset)?;
        let (config, device) = decisions::on_device(&resolved, job.group())?;
        resolved.config = config;
        let beyond = beyond_context(&resolved, resolved.config.data.seq);
        if let Some(beyond) = beyond.filter(|_| job.leads()) {
            tracing::warn!("{beyond}");
        }
        let step = device.step(Settings::new(&resolved.config)?)?;
        if let Some(resumed) = &mut resumed {
            resolved.name = resumed.state().name.clone();
            let algorithms = step.algorithms.as_deref();
            resumed.compare(&resolved, &dataset.fingerprint(), algorithms)?;
        }
        let (from, made) = resumed
            .as_ref()
            .map_or_else(Default::default, Resumed::begins);
        dataset.check_targets(from, resolved.config.train.steps.saturating_sub(made))?;
        let busy = planning(resolved.options.quiet || !job.leads());
        let plan = Plan {
            algorithms: step.algorithms.clone(),
            ..Plan::new(&Settings::new(&resolved.config)?, device.target())?
        };
        drop(busy);
        let limit = limit(&resolved, &device)?;
        refuse_without_room(&resolved.config, &plan, device.target(), limit)?;
        refuse_beforehand(&resolved)?;
        if resolved.config.log.nvtx {
            device.show_ranges();
        }
        name_paths_for_later(&mut resolved.config);
        Ok(Prepared {
            resolved,
            resumed,
            dataset,
            tokens,
            device,
            step,
            plan,
            limit,
        })
    }

    /// How long a step takes on paper.
    pub(super) fn seconds_on_paper(&self) -> Result<f64, SessionError> {
        let paper = StepOnPaper::new(&self.step.settings, self.device.target())?;
        Ok(paper.seconds)
    }

    /// Opens what is needed for evaluating and saving.
    pub(super) fn open_companions(&self, job: &Job) -> Result<(EvaluationInputs, Saver), Failure> {
        let (config, options) = (&self.resolved.config, &self.resolved.options);
        let resumed = self.resumed.as_ref();
        let from = resumed
            .map(Resumed::folder)
            .or(options.init_from.as_deref());
        let mut data = config.data.path.iter().flat_map(Inputs::paths);
        let data = data.find(|path| path.join("tokenizer.json").is_file());
        let evaluation_inputs =
            EvaluationInputs::open(&self.resolved, &self.step.settings, &self.tokens)?;
        let evaluated = evaluation_inputs.fingerprint();
        let best = resumed.and_then(|resumed| resumed.best(evaluated.as_deref()));
        Ok((
            evaluation_inputs,
            Saver::new(origin(from, data)?, best, job.group()),
        ))
    }

    /// The first rank refuses to write the trained model over an existing one. If all steps were made before, it may be
    /// this run's own model: then it is kept, and none is written.
    pub(super) fn keep_or_refuse_final_model(
        &mut self,
        job: &Job,
        origin: &Origin,
    ) -> Result<(), Failure> {
        let Some(folder) = &self.resolved.options.save_final else {
            return Ok(());
        };
        let refused = match job.leads() {
            true => refuse_model(folder, origin.names()),
            false => Ok(()),
        };
        let is_made = self.steps_before() == self.resolved.config.train.steps;
        let stays = job.word_of_first(&(is_made && refused.is_err()).to_string())?;
        if stays == true.to_string() {
            tracing::info!(
                "{} has a model already, which stays as it is",
                folder.display()
            );
            self.resolved.options.save_final = None;
            return Ok(());
        }
        job.agree(refused)
    }
}

/// Makes paths in the configuration independent of the current folder, because a run may be resumed from another one.
fn name_paths_for_later(config: &mut Config) {
    let states = match &mut config.offload.optimizer {
        OptimizerPlace::Folder(folder) => Some(folder),
        _ => None,
    };
    let algorithms = &mut config.hardware.algorithms;
    let algorithms = algorithms
        .as_mut()
        .filter(|path| *path != Path::new(HEURISTIC));
    let data = config.data.path.iter_mut().flat_map(Inputs::paths_mut);
    let paths = [
        &mut config.eval.path,
        &mut config.offload.path,
        &mut config.dpo.reference,
    ];
    let paths = paths.into_iter().flatten().chain(data);
    for path in paths.chain(states).chain(algorithms) {
        if let Ok(absolute) = std::path::absolute(&*path) {
            *path = absolute;
        }
    }
}

/// Refuses options that would fail later.
fn refuse_beforehand(resolved: &Resolved) -> Result<(), Failure> {
    if let Some(Some(_)) = resolved.options.trace {
        return Err(Failure::Usage(
            "train draws into its run directory; write --trace without a folder, and name the run's with --out".into(),
        ));
    }
    Ok(())
}
