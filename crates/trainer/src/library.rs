//! The trainer as a library, for programs that have their own training loop, on candle's tensors.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use trainer::{Trainer, configuration};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = configuration("tiny", &["data.seq=16", "batch.micro=2", "recompute.spec=core_attn"])?;
//! let mut trainer = Trainer::new(config)?;
//! let tokens = Tensor::arange(0u32, 34, &Device::Cpu)?.reshape((2, 17))?;
//! let (ids, targets) = (tokens.narrow(1, 0, 16)?, tokens.narrow(1, 1, 16)?);
//! let outcome = trainer.step(&ids, &targets)?;
//! assert_eq!(outcome.memory.peak.bytes, trainer.plan().peak_bytes);
//! # Ok(())
//! # }
//! ```

mod checkpoints;
mod configuration;
mod explaining;
mod flags;
mod generation;
#[cfg(feature = "candle-cuda")]
mod on_gpu;
mod policy;
mod records;
mod session_place;
mod sleep;
mod tensors;
mod token_rows;
mod weights_in_place;

pub use configuration::{configuration, configuration_from_text};
pub use flags::Described;
pub use policy::{PolicyBatch, PolicyLoss, PolicyLossKind};
pub use sleep::{Handed, SleepLevel};
pub use token_rows::TokenRows;
pub use weights_in_place::WeightInPlace;

use crate::adapters::{BaseModel, fill_adapters, model_files};
use crate::commands::ends_in;
use crate::decisions;
use crate::failure::{Failure, Result};
use crate::kernel_kinds::KernelKinds;
use crate::limits::{check_sample, limit, refuse_what_does_not_fit, refuse_without_room};
use crate::model_tokens::ModelTokens;
use crate::samples::data_options;
use crate::train::{Totals, narrower_type};
use crate::whole_model::{left_out, whole_model};
use candle_core::{Device, Tensor};
use checkpoint::LeftOutWeights;
use configuration::pretrained;
use data::{Dataset, StepBatch};
use memory::{Layer, Layout, Out, Phase};
use model::{Architecture, Attention, Origin, Parameter};
use planner::{Plan, StepPeaks};
use report::StepRecord;
use session::{LentTokens, SessionError, StepOutcome};
use session_place::{Opening, SessionPlace};
use settings::{BetweenSteps, Completed, Config, PerFamily, Settings};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

#[cfg(feature = "cuda")]
use kernels::cuda::CudaDevice;

/// A model with its optimizer, trained a step at a time.
///
/// All that it holds is in its own memory, planned to the byte. So tensors that it returns are copies, on candle's CPU
/// device unless [`Trainer::give_on`] sets another; changing them does not change the trainer. Tensors passed to it may
/// be on any of candle's devices.
pub struct Trainer {
    session: SessionPlace,
    opening: Opening,
    layout: Rc<Layout>,
    /// The device of returned tensors.
    given_on: Device,
    #[cfg(feature = "cuda")]
    gpu: Option<Rc<CudaDevice>>,
    config: Config,
    plan: Plan,
    /// The files that the model came with.
    origin: Origin,
    /// What exports copy from the folder that the model came from.
    left_out: Option<LeftOutWeights>,
    /// The model under adapters, if there are some.
    base: Option<BaseModel>,
    tokens: ModelTokens,
    /// The name of the configuration, for people.
    name: String,
    /// The kernels that it takes, on CUDA.
    kinds: KernelKinds,
    /// The type of the weights in the folder that the model came from, if it is narrower than the model's.
    origin_dtype: Option<String>,
    /// Tokens that end a text, as the model's folder says.
    ends: Vec<u32>,
    peaks: StepPeaks,
    peak_tflops: Option<f64>,
    made: Totals,
    record: Option<StepRecord>,
    /// The checkpoint that has all that the trainer has, if one does.
    saved: Option<PathBuf>,
    /// Whether what is under way is to be broken off.
    stop: Rc<dyn Fn() -> bool>,
}

impl Trainer {
    /// A model freshly initialised from `train.seed`, on `train.device`, or else on the best device that this binary
    /// can use. With `lora.rank` it is frozen, and adapters on it are trained. Of `config`, `log`, the choice of data and
    /// `train.steps` (except for the learning rate) have no effect.
    ///
    /// # Errors
    /// [`Failure`]: contradictory settings, a device that cannot be used, refused memory.
    pub fn new(config: Config) -> Result<Trainer> {
        Trainer::of(config.into(), BetweenSteps::default())
    }

    /// A model from a folder in Hugging Face layout, with the default settings and `set`, each as `--set` takes it. With
    /// `lora.rank` among them the model is frozen, and fresh adapters are trained. A folder of adapters goes on with them,
    /// on the model that the folder names.
    ///
    /// ```no_run
    /// # use trainer::Trainer;
    /// let trainer = Trainer::from_pretrained("Qwen2.5-0.5B", &["data.seq=512", "lr.peak=1e-5"])?;
    /// let set = ["data.seq=512", "lora.rank=16", "lora.targets=[\"q_proj\", \"v_proj\"]", "lora.base_dtype=nf4"];
    /// let adapters = Trainer::from_pretrained("Qwen2.5-0.5B", &set)?;
    /// # Ok::<(), trainer::Failure>(())
    /// ```
    ///
    /// # Errors
    /// As [`Trainer::new`], and for a folder without a model that this trainer supports.
    pub fn from_pretrained(folder: impl AsRef<Path>, set: &[&str]) -> Result<Trainer> {
        Trainer::of(pretrained(folder.as_ref(), set)?, BetweenSteps::default())
    }

    fn of(command: Completed, between: BetweenSteps) -> Result<Trainer> {
        let config = &command.config;
        let from = command.options.init_from.clone();
        let tokens = ModelTokens::of_run(config.model.vocab, from.as_deref());
        let origin = from.as_deref().map(Origin::read).transpose()?;
        if config.has_pairs() {
            return Err(Failure::Usage(
                "the library learns next tokens, and train.objective asks for preferences; leave it out, or run `trainer --objective \
                 dpo`"
                    .into(),
            ));
        }
        // The caller's loop decides when to evaluate and save, so nothing is leased for that.
        let (resolved, device) =
            decisions::on_device(&command.of_steps_alone(), None, None, PerFamily::default())?;
        let settings = Settings::new(&resolved.config)?;
        if let Some(sample) = between.sample {
            check_sample(sample, settings.seq)?;
        }
        // A policy's log-probabilities are asked for between steps.
        let evaluation = between.evaluation.or(settings.between.evaluation);
        let between = BetweenSteps {
            evaluation,
            ..between
        };
        let step = device.step(Settings {
            between,
            ..settings
        })?;
        let plan = Plan {
            algorithms: step.algorithms.clone(),
            ..Plan::new(&step.settings, device.target())?
        };
        let peaks = StepPeaks::new(&step.settings, device.target(), &plan);
        let limit = limit(&resolved.config, &device)?;
        refuse_without_room(&resolved.config, &plan, device.target(), limit)?;
        let run = (&resolved.config, &step.settings);
        refuse_what_does_not_fit(run, &plan, &device, limit)?;
        let opening = Opening {
            device,
            step,
            limit,
        };
        let memory = opening.memory();
        let mut session = opening.session(&memory)?;
        let mut origin_dtype = None;
        let base = {
            let _place = memory.enter(Phase::Load, Layer::Whole);
            match &from {
                None => session.initialise(resolved.config.train.seed)?,
                Some(folder) => {
                    origin_dtype = narrower_type(folder, session.model())?;
                    session.incoming().import(folder)?;
                }
            }
            fill_adapters(&mut session, &resolved.config, &resolved.options)?
        };
        memory.reserve_slab(plan.slab_bytes)?;
        Ok(Trainer {
            layout: session.model().layout().clone(),
            session: SessionPlace::Device(Box::new(session)),
            given_on: Device::Cpu,
            #[cfg(feature = "cuda")]
            gpu: opening.device.gpu().cloned(),
            peak_tflops: {
                let known = || opening.device.peak_tflops(plan.dtype);
                resolved.config.hardware.peak_tflops.or_else(known)
            },
            kinds: opening.device.kernel_kinds(),
            opening,
            config: resolved.config.clone(),
            plan,
            origin: origin.unwrap_or_default(),
            ends: from.as_deref().and_then(ends_in).unwrap_or_default(),
            left_out: from.and_then(|folder| left_out(&folder, &resolved.config.model)),
            base,
            tokens,
            name: resolved.name.clone(),
            origin_dtype,
            peaks,
            made: Totals::after(None),
            record: None,
            saved: None,
            stop: Rc::new(|| false),
        })
    }

    /// The data of `data.path`, as `trainer train` reads it. Its [`Dataset::batches`] are steps of this configuration.
    ///
    /// # Errors
    /// [`Failure::Data`] if it is no data, and [`Failure::ForeignData`] if its tokens are not the model's.
    pub fn data(&self) -> Result<Dataset> {
        let options = data_options(&self.config, true);
        self.tokens.open_own(&options, &self.config)
    }

    /// One training step: forward and backward passes of every micro-batch, then the update.
    ///
    /// `ids` and `targets` are integers `[rows, seq]`. Each target is the token that is wanted after the id at its
    /// place, or -100 for none. `rows` is `batch.micro` times the number of micro-batches, at most `batch.accum`; `seq`
    /// is `data.seq`. The tensors may be on any of candle's devices, and are copied to the host to be checked and
    /// counted. With the feature `candle-cuda`, the step reads them in place if they are contiguous tensors of I32 or
    /// U32 on the GPU that trains. Others are uploaded, and so are those of micro-batches that are a CUDA graph. The
    /// loss is the mean over all targets of the step. If the loss or gradients are not finite, the update is skipped
    /// ([`StepOutcome::is_finite`]); if gradients are released, only for the parts that have such gradients.
    ///
    /// # Errors
    /// [`Failure::Usage`] for another objective, tensors of another shape or type, and for tokens outside the vocabulary, with their
    /// place. [`Failure::OutOfMemory`] and [`Failure::Device`] leave the weights unchanged. If gradients are released
    /// (`optim.release`), this holds only for failures before the backward pass; after later ones no further step is
    /// possible.
    pub fn step(&mut self, ids: &Tensor, targets: &Tensor) -> Result<StepOutcome> {
        self.check_objective(false)?;
        let batch = tensors::rows(&self.config, ids, targets)?.batch(&self.config)?;
        #[cfg(feature = "candle-cuda")]
        if let Some(gpu) = self.gpu.clone() {
            return on_gpu::with_tokens(&gpu, (ids, targets), |lent| self.make(batch, lent))?;
        }
        self.make(batch, None)
    }

    /// Makes a step of next tokens, or of a policy, and writes it down.
    fn make(&mut self, batch: StepBatch, lent: Option<LentTokens>) -> Result<StepOutcome> {
        let batch = batch.in_parts(self.config.own_parts());
        self.enter()?;
        let begun = Instant::now();
        let session = self.session.awake_mut()?;
        self.saved = None;
        let outcome = session.step_lent(&batch, lent)?;
        let elapsed = outcome.done_at.saturating_duration_since(begun);
        self.note(&batch, &outcome, elapsed)?;
        Ok(outcome)
    }

    /// The mean loss over all targets of `ids` and `targets`, as for [`Trainer::step`], without training.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn loss(&mut self, ids: &Tensor, targets: &Tensor) -> Result<f64> {
        self.loss_of_rows(&tensors::rows(&self.config, ids, targets)?)
    }

    /// Breaks off steps, evaluations and generated texts during which `stop` says so, with an error. Nothing is left of such a step.
    pub fn stop_when(&mut self, stop: impl Fn() -> bool + 'static) {
        self.stop = Rc::new(stop);
        let stop = self.stop.clone();
        if let SessionPlace::Device(session) = &mut self.session {
            session.stop_when(move || stop());
        }
    }

    /// From now on returns tensors on one of candle's devices: the CPU, or with the feature `candle-cuda` the GPU that
    /// trains, preferably made by `Device::new_cuda_with_stream`. On the GPU, parameters and gradients are copied
    /// within it, in the order of the device's stream. Optimizer states, what lives on the host, and parameters that
    /// files have transposed go through the host. The copies are in candle's memory, which no plan counts.
    ///
    /// # Errors
    /// [`Failure::Usage`] for another device.
    pub fn give_on(&mut self, device: &Device) -> Result {
        self.check_gives_on(device)?;
        self.given_on = device.clone();
        Ok(())
    }

    /// The names of all parameters, as in Hugging Face's files, those of adapters as in PEFT's.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        let entries = self.layout.entries().iter();
        entries.map(|entry| entry.name.as_str())
    }

    /// A copy of a parameter, as f32 in its shape in Hugging Face's files.
    ///
    /// ```
    /// # use trainer::{Trainer, configuration};
    /// let trainer = Trainer::new(configuration("tiny", &[])?)?;
    /// let embedding = trainer.parameter("model.embed_tokens.weight")?;
    /// assert_eq!(embedding.dims(), [256, 64]);
    /// # Ok::<(), trainer::Failure>(())
    /// ```
    ///
    /// # Errors
    /// [`Failure::Usage`] if no parameter has this name; it names one that exists.
    pub fn parameter(&self, name: &str) -> Result<Tensor> {
        let (index, parameter) = self.find(name)?;
        let session = self.session.awake()?;
        let values = || session.parameter(index);
        self.give(parameter, values, |out| session.copy_parameter(index, out))
    }

    /// A parameter's shape in Hugging Face's files.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn stored_shape(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.find(name)?.1.stored_shape())
    }

    /// The values of [`Trainer::parameter`], row by row, in the host's memory.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn parameter_values(&self, name: &str) -> Result<Vec<f32>> {
        let (index, parameter) = self.find(name)?;
        self.enter()?;
        let tensor = tensors::in_files_shape(self.session.awake()?.parameter(index)?, parameter)?;
        tensors::values(&tensor, parameter)
    }

    /// A copy of a parameter's gradient of the last step, before clipping, as f32 in the parameter's shape. Before the
    /// first step, and between waking and the next step, it is undefined.
    ///
    /// # Errors
    /// As [`Trainer::parameter`], and if the parameter is frozen.
    pub fn gradient(&self, name: &str) -> Result<Tensor> {
        let (index, parameter) = self.find(name)?;
        let session = self.session.awake()?;
        let values = || session.gradient(index);
        self.give(parameter, values, |out| session.copy_gradient(index, out))
    }

    /// Copies of the optimizer states of a parameter, in their own types: `first_moment` and `second_moment`, or for
    /// 8-bit moments the flat `first_moment.codes` and `first_moment.absmax` (one for 256 consecutive values in
    /// memory), and `master` or `remainder` (16 bits, or 8 of a
    /// master of 24) if bf16 weights have them.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn states(&self, name: &str) -> Result<BTreeMap<String, Tensor>> {
        let (index, parameter) = self.find(name)?;
        self.enter()?;
        let states = self.session.awake()?.states(index)?.into_iter();
        let tensors = states.map(|state| {
            let name = state.name.clone();
            let tensor = tensors::state(state, parameter)?;
            Ok((name, tensors::moved(tensor, &self.given_on, parameter)?))
        });
        tensors.collect()
    }

    /// Sets a parameter, and its master if it has one, to a copy of `values`, of any float type. Its other optimizer
    /// states are not changed.
    ///
    /// # Errors
    /// As [`Trainer::parameter`], if `values` have another shape, and if the parameter belongs to the frozen model under
    /// adapters, since [`Trainer::save`] would lose the change.
    pub fn set_parameter(&mut self, name: &str, values: &Tensor) -> Result {
        let (index, parameter) = self.find(name)?;
        if self.base.is_some() && !parameter.is_factor {
            return Err(Failure::Usage(format!(
                "`{name}` belongs to the frozen model, which is not saved with its adapters; change it in the model's folder"
            )));
        }
        let values = tensors::values_of(values, parameter)?;
        self.enter()?;
        let offset = self.layout.entries()[index].offset;
        self.saved = None;
        let session = self.session.awake_mut()?;
        Ok(session.incoming().set_values(offset, &values)?)
    }

    /// Writes the model to a folder in Hugging Face layout, which transformers and candle-transformers load, with the
    /// tokenizer files and settings that it came with, and, if it is the text part of a folder of Qwen3.5, the rest of it. Of a model
    /// with adapters it writes those alone, as PEFT reads them; `trainer export --merge` makes one model of both.
    ///
    /// # Errors
    /// [`Failure::File`] or [`Failure::Weights`].
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result {
        self.enter()?;
        let session = self.session.awake_mut()?;
        let base = self.base.as_ref();
        let files = model_files(session, &self.origin, base, &self.config);
        let architecture = Architecture::of(&self.config.model, Attention::default());
        let left_out = self.left_out.as_ref().filter(|_| base.is_none());
        let whole = whole_model(left_out, &architecture.parameters);
        let exported = session.export(folder.as_ref(), &files, whole.as_ref());
        Ok(exported?)
    }

    /// Steps made, and updates: steps that were not skipped.
    ///
    /// # Errors
    /// [`Failure::Usage`] if it sleeps.
    pub fn progress(&self) -> Result<(usize, usize)> {
        Ok(self.session.awake()?.progress())
    }

    /// The plan of a step. [`StepOutcome::memory`] has what was measured.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The configuration, with everything decided that it left open.
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn check_gives_on(&self, device: &Device) -> Result {
        let is_known = match device {
            Device::Cpu => true,
            #[cfg(feature = "candle-cuda")]
            Device::Cuda(device) => self
                .gpu
                .as_ref()
                .is_some_and(|gpu| on_gpu::is_same(gpu, device)),
            _ => false,
        };
        if is_known {
            return Ok(());
        }
        Err(Failure::Usage(format!(
            "tensors cannot be given on {:?}: give_on takes the CPU, or with the feature `candle-cuda` the GPU that trains \
             (train.device)",
            device.location()
        )))
    }

    /// A tensor of f32 in the shape of files, on the device of returned tensors. `copy` fills memory of the GPU;
    /// `values` are the same values on the host.
    #[cfg_attr(not(feature = "candle-cuda"), allow(unused_variables))]
    fn give(
        &self,
        parameter: &Parameter,
        values: impl FnOnce() -> Result<Vec<f32>, SessionError>,
        copy: impl FnOnce(Out) -> Result<(), SessionError>,
    ) -> Result<Tensor> {
        self.enter()?;
        #[cfg(feature = "candle-cuda")]
        if let (Some(gpu), Device::Cuda(device)) = (&self.gpu, &self.given_on)
            && parameter.turned().is_none()
        {
            return on_gpu::filled(gpu, device, &parameter.stored_shape(), |out| Ok(copy(out)?));
        }
        let tensor = tensors::in_files_shape(values()?, parameter)?;
        tensors::moved(tensor, &self.given_on, parameter)
    }

    /// Makes the GPU's context current in this thread, because candle leaves the context of the GPU that it used last.
    fn enter(&self) -> Result {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            gpu.enter()?;
        }
        Ok(())
    }

    /// A parameter and its place in the layout.
    fn find(&self, name: &str) -> Result<(usize, &Parameter)> {
        let Some(index) = self.layout.find(name) else {
            return Err(Failure::Usage(format!(
                "the model has no parameter `{name}`; parameter_names() lists those that it has, such as `{}`",
                self.parameter_names().next().unwrap_or_default()
            )));
        };
        let model = self.session.awake()?.model();
        let mut parameters = model.architecture().parameters.in_layout();
        let parameter = parameters.nth(index);
        Ok((index, parameter.expect("the layout is of these parameters")))
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // Memory is released in this context. A failure here comes from earlier work.
        let _ = self.enter();
    }
}
