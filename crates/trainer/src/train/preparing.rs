//! Opens all that a run reads, decides what is open, and plans, before anything is written.

use super::evaluation_inputs::EvaluationInputs;
use super::resuming::Resumed;
use super::saver::{Saver, origin};
use crate::begin::complete_and_warn;
use crate::decisions::{self, Decided, planning};
use crate::device::{DeviceStep, OpenDevice};
use crate::failure::{Failure, Result};
use crate::initial_model::beyond_context;
use crate::job::Job;
use crate::limits::{limit, refuse_without_room};
use crate::model_tokens::ModelTokens;
use crate::reference;
use crate::run_dir::refuse_model;
use crate::samples::decided_options;
use crate::whole_model::left_out;
use data::{Dataset, Inputs, Packing};
use model::Origin;
use planner::{Plan, StepOnPaper};
use session::SessionError;
use settings::{Config, Resolved, Settings};
use std::path::PathBuf;

/// A run that is ready to start, with all that it reads. Nothing has been written for it yet.
pub(super) struct Prepared {
    pub(super) decided: Decided,
    /// Folder for the trained model.
    pub(super) save_final: Option<PathBuf>,
    pub(super) resumed: Option<Resumed>,
    pub(super) dataset: Dataset,
    /// What the model's tokens stand for after training on this data.
    pub(super) tokens: ModelTokens,
    pub(super) device: OpenDevice,
    pub(super) step: DeviceStep,
    pub(super) plan: Plan,
    pub(super) limit: Option<u64>,
}

/// What a checkpoint says of its data if a program made its steps, of batches of its own.
pub(crate) const BATCHES_OF_A_PROGRAM: &str = "batches-of-a-program";

/// Whether the data of a configuration is no file.
pub(crate) fn is_of_a_program(config: &Config) -> bool {
    let inputs = config.data.path.as_ref();
    inputs.is_some_and(|inputs| *inputs == Inputs::from(PathBuf::from(BATCHES_OF_A_PROGRAM)))
}

impl Prepared {
    /// Opens the data and the device, decides what is left open, and plans. A run that is not possible is refused here.
    pub(super) fn new(job: &Job, resolved: Resolved) -> Result<Prepared> {
        let mut resumed = Resumed::find(job, &resolved)?;
        let command = complete_and_warn(match &resumed {
            None => resolved,
            Some(resumed) => resumed.own_settings(resolved)?,
        })?;
        let config = &command.config;
        if resumed.is_some() && is_of_a_program(config) {
            return Err(Failure::Usage(
                "a program made the steps of this checkpoint, of batches of its own; name the data to go on with: --data PATH".into(),
            ));
        }
        let (options, reason) = decided_options(config, command.seq_is_explicit);
        if config.data.packing == Packing::Auto {
            tracing::info!("data.packing is {}: {reason}", options.packing);
        }
        let from = resumed.as_ref().map(Resumed::folder);
        let from = from.or(command.options.init_from.as_deref());
        let tokens = ModelTokens::of_run(config.model.vocab, from);
        let dataset = reference::attach(tokens.open(&options)?, config)?;
        let goes_on = resumed
            .as_ref()
            .is_some_and(|resumed| resumed.read(&dataset));
        if !goes_on && !config.data.any_tokenizer {
            tokens.check(&dataset)?;
        }
        let tokens = tokens.after(&dataset);
        let before = resumed.as_ref().map(Resumed::kernels).unwrap_or_default();
        let (decided, device) =
            decisions::on_device(&command, Some(&dataset), job.group(), before)?;
        let beyond = beyond_context(&command, decided.config.data.seq);
        if let Some(beyond) = beyond.filter(|_| job.leads()) {
            tracing::warn!("{beyond}");
        }
        let step = device.step(Settings::new(&decided.config)?)?;
        if let Some(resumed) = &mut resumed {
            let algorithms = step.algorithms.as_deref();
            resumed.compare(&decided, &dataset.fingerprint(), algorithms)?;
        }
        let (from, made) = resumed
            .as_ref()
            .map_or_else(Default::default, Resumed::begins);
        dataset.check_targets(from, decided.config.train.steps.saturating_sub(made))?;
        let busy = planning(decided.options.quiet || !job.leads());
        let plan = Plan {
            algorithms: step.algorithms.clone(),
            ..Plan::new(&Settings::new(&decided.config)?, device.target())?
        };
        drop(busy);
        let limit = limit(&decided.config, &device)?;
        refuse_without_room(&decided.config, &plan, device.target(), limit)?;
        if decided.config.log.nvtx {
            device.show_ranges();
        }
        Ok(Prepared {
            save_final: decided.options.save_final.clone(),
            decided: decided.with_whole_paths(),
            resumed,
            dataset,
            tokens,
            device,
            step,
            plan,
            limit,
        })
    }

    /// Takes the kernels that all ranks take, and compares them with those of the run that goes on.
    pub(super) fn agree_on_kernels(mut self, job: &Job) -> Result<Prepared> {
        let kinds = self.device.kernel_kinds().of_all_ranks(job)?;
        self.step.settings.kernels = kinds.named(self.step.settings.kernels);
        self.device = self.device.taking(kinds.clone());
        let compared = match &mut self.resumed {
            Some(resumed) => resumed.compare_kernels(&self.decided, &kinds),
            None => Ok(()),
        };
        job.agree(compared).map(|()| self)
    }

    /// How long a step takes on paper.
    pub(super) fn seconds_on_paper(&self) -> Result<f64, SessionError> {
        let paper = StepOnPaper::new(&self.step.settings, self.device.target())?;
        Ok(paper.seconds)
    }

    /// Opens what is needed for evaluating and saving.
    pub(super) fn open_companions(&self, job: &Job) -> Result<(EvaluationInputs, Saver)> {
        let (config, options) = (&self.decided.config, &self.decided.options);
        let resumed = self.resumed.as_ref();
        let from = resumed
            .map(Resumed::folder)
            .or(options.init_from.as_deref());
        let mut data = config.data.path.iter().flat_map(Inputs::paths);
        let data = data.find(|path| path.join("tokenizer.json").is_file());
        let evaluation_inputs = EvaluationInputs::open(config, &self.step.settings, &self.tokens)?;
        let evaluated = evaluation_inputs.fingerprint();
        let best = resumed.and_then(|resumed| resumed.best(evaluated.as_deref()));
        let mut saver = Saver::new(origin(from, data)?, best, job.group());
        // Adapters are saved without their model.
        if config.lora.rank.is_none() {
            saver.left_out = match (resumed, from) {
                (Some(resumed), _) => resumed.state().left_out.clone(),
                (None, from) => from.and_then(|folder| left_out(folder, &config.model)),
            };
        }
        Ok((evaluation_inputs, saver))
    }

    /// The first rank refuses to write the trained model over an existing one. If all steps were made before, it may be
    /// this run's own model: then it is kept, and none is written.
    pub(super) fn keep_or_refuse_final_model(&mut self, job: &Job, origin: &Origin) -> Result {
        let Some(folder) = &self.save_final else {
            return Ok(());
        };
        let refused = match job.leads() {
            true => refuse_model(folder, origin.names()),
            false => Ok(()),
        };
        let is_made = self.steps_before() == self.decided.config.train.steps;
        let stays = job.word_of_first(&(is_made && refused.is_err()).to_string())?;
        if stays == true.to_string() {
            tracing::info!(
                "{} has a model already, which stays as it is",
                folder.display()
            );
            self.save_final = None;
            return Ok(());
        }
        job.agree(refused)
    }
}
