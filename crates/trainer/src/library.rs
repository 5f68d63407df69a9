//! The trainer as a library: for those who train from a loop of their own, on tensors of candle.
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

mod configuration;
#[cfg(feature = "candle-cuda")]
mod on_gpu;
mod tensors;

pub use configuration::{configuration, configuration_from_text};

use crate::decisions;
use crate::failure::Failure;
use crate::limits::{limit, refuse_without_room};
use crate::model_tokens::ModelTokens;
use crate::samples::data_options;
use candle_core::{Device, Tensor};
use configuration::{of_pretrained, resolved};
use data::Dataset;
use memory::{Layer, Out, Phase};
use model::{Origin, Parameter};
use planner::Plan;
use session::{Session, SessionError, StepOutcome};
use settings::{Config, Settings};
use std::collections::BTreeMap;
use std::path::Path;

#[cfg(feature = "candle-cuda")]
use model::Stored;
#[cfg(feature = "cuda")]
use {kernels::cuda::CudaDevice, std::rc::Rc};

/// A model with its optimizer, trained a step at a time.
///
/// All that it holds lives in memory of its own, planned to the byte. Tensors that it gives are therefore copies, on
/// candle's CPU device unless [`Trainer::give_on`] says otherwise; changing one changes nothing of the trainer. Tensors that it takes
/// may be on any device of candle's.
pub struct Trainer {
    session: Session,
    /// Where tensors are given.
    given_on: Device,
    #[cfg(feature = "cuda")]
    gpu: Option<Rc<CudaDevice>>,
    config: Config,
    plan: Plan,
    /// What the model came with.
    origin: Origin,
    tokens: ModelTokens,
}

impl Trainer {
    /// A freshly initialised model, by `train.seed`, on `train.device`, or without that on the best device that this binary can
    /// use. Of `config` only what data is read, `train.steps` (but for the learning rate's schedule) and `log` mean nothing.
    ///
    /// # Errors
    /// [`Failure`]: contradictory settings, a device that cannot be used, memory that is refused.
    pub fn new(config: Config) -> Result<Trainer, Failure> {
        let seed = config.train.seed;
        let vocab = config.model.vocab;
        let made_here = (Origin::default(), ModelTokens::Untrained { vocab });
        Trainer::filled(config, made_here, |session| session.initialise(seed))
    }

    /// A model from a folder in Hugging Face layout, under the defaults with settings over them, each as `--set` takes it.
    ///
    /// ```no_run
    /// # use trainer::Trainer;
    /// let trainer = Trainer::from_pretrained("Qwen2.5-0.5B", &["data.seq=512", "lr.peak=1e-5"])?;
    /// # Ok::<(), trainer::Failure>(())
    /// ```
    ///
    /// # Errors
    /// As [`Trainer::new`], and for a folder that holds no model that this trainer knows.
    pub fn from_pretrained(folder: impl AsRef<Path>, set: &[&str]) -> Result<Trainer, Failure> {
        let folder = folder.as_ref();
        let config = of_pretrained(folder, set)?;
        let tokens = ModelTokens::of_folder(folder, config.model.vocab);
        let origin = (Origin::read(folder)?, tokens);
        Trainer::filled(config, origin, |session| session.import(folder))
    }

    fn filled(
        mut config: Config,
        (origin, tokens): (Origin, ModelTokens),
        fill: impl FnOnce(&mut Session) -> Result<(), SessionError>,
    ) -> Result<Trainer, Failure> {
        // A loop of one's own evaluates and saves as it likes: nothing is leased for a run's doing so.
        config.without_between_steps();
        let mut resolved = resolved(config);
        let (config, device) = decisions::on_device(&resolved, None)?;
        resolved.config = config;
        let step = device.step(Settings::new(&resolved.config)?)?;
        let plan = Plan::new(&step.settings, device.target())?;
        let limit = limit(&resolved, &device)?;
        refuse_without_room(&resolved.config, &plan, device.target(), limit)?;
        let memory = device.memory();
        memory.set_limit(limit);
        let kernels = device.kernels(&step, &memory)?;
        let mut session = Session::on_kernels(step.settings, &memory, kernels)?;
        {
            let _place = memory.enter(Phase::Load, Layer::Whole);
            fill(&mut session)?;
        }
        memory.reserve_slab(plan.slab_bytes)?;
        Ok(Trainer {
            session,
            given_on: Device::Cpu,
            #[cfg(feature = "cuda")]
            gpu: device.gpu().cloned(),
            config: resolved.config,
            plan,
            origin,
            tokens,
        })
    }

    /// The data of `data.path`, as `trainer train` would read it: its [`Dataset::batches`] are steps of this configuration.
    ///
    /// # Errors
    /// [`Failure::Data`] for what is no data, and [`Failure::ForeignData`] for what has other tokens than the model came with.
    pub fn data(&self) -> Result<Dataset, Failure> {
        let resolved = resolved(self.config.clone());
        self.tokens.open_own(&data_options(&resolved), &resolved)
    }

    /// One training step: forward and backward passes of every micro-batch, then the update.
    ///
    /// `ids` and `targets` are whole numbers `[rows, seq]`. Each target is the token wanted after the id at its place, or -100,
    /// which asks for none. `rows` are `batch.micro` for each micro-batch, of which there are `batch.accum` or fewer; `seq` is
    /// `data.seq`. They may be on any device of candle's, and are copied to the host, which checks and counts them. With the feature
    /// `candle-cuda` the step reads them where they are if they are contiguous tensors of I32 or U32 on the GPU that trains; others
    /// it uploads, and those of micro-batches that are a CUDA graph. The loss is the mean over all targets of the step. Loss or gradients that are not finite skip the update
    /// ([`StepOutcome::is_finite`]), where gradients are released that of the parts that have them.
    ///
    /// # Errors
    /// [`Failure::Usage`] for tensors of another shape or type and for tokens that the vocabulary does not have, by their place.
    /// [`Failure::OutOfMemory`] and [`Failure::Device`] leave the weights as they were; where gradients are released
    /// (`optim.release`), only if they come before the backward pass, and no step can be made after others.
    pub fn step(&mut self, ids: &Tensor, targets: &Tensor) -> Result<StepOutcome, Failure> {
        let batch = tensors::step_batch(&self.config, ids, targets)?;
        self.enter()?;
        #[cfg(feature = "candle-cuda")]
        if let Some(gpu) = self.gpu.clone() {
            return on_gpu::with_tokens(&gpu, (ids, targets), |lent| match lent {
                Some(lent) => Ok(self.session.step_lent(&batch, lent)?),
                None => Ok(self.session.step(&batch)?),
            })?;
        }
        Ok(self.session.step(&batch)?)
    }

    /// The mean loss over all targets, of `ids` and `targets` as [`Trainer::step`] takes them. Nothing is trained.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn loss(&mut self, ids: &Tensor, targets: &Tensor) -> Result<f64, Failure> {
        let batch = tensors::step_batch(&self.config, ids, targets)?;
        self.enter()?;
        let micro_batches = batch.micro.into_iter().map(Ok::<_, SessionError>);
        Ok(self.session.evaluate(micro_batches)?.loss())
    }

    /// From now on gives tensors on a device of candle's: the CPU, or with the feature `candle-cuda` the GPU that trains, where the
    /// device is best one of `Device::new_cuda_with_stream`. There parameters and gradients are copied within the GPU, in the
    /// order of the device's stream; by way of the host go optimizer states, what lives on the host, and parameters that files have
    /// transposed. Such copies are memory of candle's, which no plan counts.
    ///
    /// # Errors
    /// [`Failure::Usage`] for another device.
    pub fn give_on(&mut self, device: &Device) -> Result<(), Failure> {
        self.check_gives_on(device)?;
        self.given_on = device.clone();
        Ok(())
    }

    /// The names of all parameters, as Hugging Face's files have them.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        let entries = self.session.model().layout().entries().iter();
        entries.map(|entry| entry.name.as_str())
    }

    /// A copy of a parameter, as f32 in the shape that Hugging Face's files have it in.
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
    /// [`Failure::Usage`] names the nearest parameter where none has this name.
    pub fn parameter(&self, name: &str) -> Result<Tensor, Failure> {
        let (index, parameter) = self.find(name)?;
        let session = &self.session;
        let values = || session.parameter(index);
        self.give(parameter, values, |out| session.copy_parameter(index, out))
    }

    /// A copy of a parameter's gradient over the last step, before clipping, as f32 in the shape of the parameter. Before the
    /// first step it means nothing.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn gradient(&self, name: &str) -> Result<Tensor, Failure> {
        let (index, parameter) = self.find(name)?;
        let session = &self.session;
        let values = || session.gradient(index);
        self.give(parameter, values, |out| session.copy_gradient(index, out))
    }

    /// Copies of what the optimizer keeps of a parameter, in the types in which it does: `first_moment` and `second_moment`, or
    /// of 8-bit moments their flat `first_moment.codes` and `first_moment.absmax` (one for 256 values in a row, as they lie in
    /// memory); `master` or `remainder` where bf16 weights have them.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn states(&self, name: &str) -> Result<BTreeMap<String, Tensor>, Failure> {
        let (index, parameter) = self.find(name)?;
        self.enter()?;
        let states = self.session.states(index)?.into_iter();
        let tensors = states.map(|state| {
            let name = state.name.clone();
            let tensor = tensors::state(state, parameter)?;
            Ok((name, tensors::moved(tensor, &self.given_on, parameter)?))
        });
        tensors.collect()
    }

    /// Sets a parameter, and its master where it has one, to a copy of `values`, of any float type. What the optimizer keeps of
    /// it stays.
    ///
    /// # Errors
    /// As [`Trainer::parameter`], and where `values` have another shape.
    pub fn set_parameter(&mut self, name: &str, values: &Tensor) -> Result<(), Failure> {
        let (index, parameter) = self.find(name)?;
        let values = tensors::values_of(values, parameter)?;
        self.enter()?;
        let offset = self.session.model().layout().entries()[index].offset;
        Ok(self.session.set_values(offset, &values)?)
    }

    /// Writes the model to a folder in Hugging Face layout, which transformers and candle-transformers load, with the
    /// tokenizer's files and settings that it came with.
    ///
    /// # Errors
    /// [`Failure::File`] or [`Failure::Weights`].
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result<(), Failure> {
        self.enter()?;
        Ok(self.session.export(folder.as_ref(), &self.origin)?)
    }

    /// What was planned for a step; measured, it is [`StepOutcome::memory`].
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The configuration, with what it left open decided.
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn check_gives_on(&self, device: &Device) -> Result<(), Failure> {
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

    /// A tensor of f32 in the shape of files, on the device where tensors are given: `copy` fills memory of the GPU, and `values` are the
    /// same on the host.
    #[cfg_attr(not(feature = "candle-cuda"), allow(unused_variables))]
    fn give(
        &self,
        parameter: &Parameter,
        values: impl FnOnce() -> Result<Vec<f32>, SessionError>,
        copy: impl FnOnce(Out) -> Result<(), SessionError>,
    ) -> Result<Tensor, Failure> {
        self.enter()?;
        #[cfg(feature = "candle-cuda")]
        if let (Some(gpu), Device::Cuda(device)) = (&self.gpu, &self.given_on)
            && parameter.stored != Stored::Transposed
        {
            return on_gpu::filled(gpu, device, &parameter.shape, |out| Ok(copy(out)?));
        }
        let tensor = tensors::in_files_shape(values()?, parameter)?;
        tensors::moved(tensor, &self.given_on, parameter)
    }

    /// Makes the GPU's context that of this thread, which candle leaves in that of the GPU that it used last.
    fn enter(&self) -> Result<(), Failure> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            gpu.enter()?;
        }
        Ok(())
    }

    /// A parameter and its place in the layout.
    fn find(&self, name: &str) -> Result<(usize, &Parameter), Failure> {
        let model = self.session.model();
        let Some(index) = model.layout().find(name) else {
            return Err(Failure::Usage(format!(
                "the model has no parameter `{name}`; parameter_names() lists those that it has, such as `{}`",
                self.parameter_names().next().unwrap_or_default()
            )));
        };
        let mut parameters = model.architecture().parameters().in_layout();
        let parameter = parameters.nth(index);
        Ok((index, parameter.expect("the layout is of these parameters")))
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // What is given back is given back in this context. A failure here is one of earlier work.
        let _ = self.enter();
    }
}
