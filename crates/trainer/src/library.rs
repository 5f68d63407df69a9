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
mod tensors;

pub use configuration::{configuration, configuration_from_text};

use crate::decisions;
use crate::failure::Failure;
use crate::limits::{limit, refuse_without_room};
use crate::model_tokens::ModelTokens;
use crate::samples::data_options;
use candle_core::Tensor;
use configuration::{of_pretrained, resolved};
use data::Dataset;
use memory::{Layer, Phase};
use model::{Origin, Parameter};
use planner::Plan;
use session::{Session, SessionError, StepOutcome};
use settings::{Config, Settings};
use std::collections::BTreeMap;
use std::path::Path;

/// A model with its optimizer, trained a step at a time.
///
/// All that it holds lives in memory of its own, planned to the byte. Tensors that it takes and gives are therefore copies, on
/// candle's CPU device where it gives them; changing one changes nothing of the trainer.
pub struct Trainer {
    session: Session,
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
    /// `data.seq`. The loss is the mean over all targets of the step. Loss or gradients that are not finite skip the update
    /// ([`StepOutcome::is_finite`]), where gradients are released that of the parts that have them.
    ///
    /// # Errors
    /// [`Failure::Usage`] for tensors of another shape or type and for tokens that the vocabulary does not have, by their place.
    /// [`Failure::OutOfMemory`] and [`Failure::Device`] leave the weights as they were; where gradients are released
    /// (`optim.release`), only if they come before the backward pass, and no step can be made after others.
    pub fn step(&mut self, ids: &Tensor, targets: &Tensor) -> Result<StepOutcome, Failure> {
        let batch = tensors::step_batch(&self.config, ids, targets)?;
        Ok(self.session.step(&batch)?)
    }

    /// The mean loss over all targets, of `ids` and `targets` as [`Trainer::step`] takes them. Nothing is trained.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn loss(&mut self, ids: &Tensor, targets: &Tensor) -> Result<f64, Failure> {
        let batch = tensors::step_batch(&self.config, ids, targets)?;
        let micro_batches = batch.micro.into_iter().map(Ok::<_, SessionError>);
        Ok(self.session.evaluate(micro_batches)?.loss())
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
        tensors::in_files_shape(self.session.parameter(index)?, parameter)
    }

    /// A copy of a parameter's gradient over the last step, before clipping, as f32 in the shape of the parameter. Before the
    /// first step it means nothing.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn gradient(&self, name: &str) -> Result<Tensor, Failure> {
        let (index, parameter) = self.find(name)?;
        tensors::in_files_shape(self.session.gradient(index)?, parameter)
    }

    /// Copies of what the optimizer keeps of a parameter, in the types in which it does: `first_moment` and `second_moment`, or
    /// of 8-bit moments their flat `first_moment.codes` and `first_moment.absmax` (one for 256 values in a row, as they lie in
    /// memory); `master` or `remainder` where bf16 weights have them.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn states(&self, name: &str) -> Result<BTreeMap<String, Tensor>, Failure> {
        let (index, parameter) = self.find(name)?;
        let states = self.session.states(index)?.into_iter();
        let tensors =
            states.map(|state| Ok((state.name.clone(), tensors::state(state, parameter)?)));
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
        let offset = self.session.model().layout().entries()[index].offset;
        Ok(self.session.set_values(offset, &values)?)
    }

    /// Writes the model to a folder in Hugging Face layout, which transformers and candle-transformers load, with the
    /// tokenizer's files and settings that it came with.
    ///
    /// # Errors
    /// [`Failure::File`] or [`Failure::Weights`].
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result<(), Failure> {
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
