//! The class behind `trainer.Trainer`.

use crate::errors::{raised, usage};
use crate::objects::object;
use crate::program::separate_connections;
use crate::rows::{RowSizes, at_tokens, labelled, masked, numbers};
use crate::trainer_thread::TrainerThread;
use crate::views::Views;
use crate::weight::Weight;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::path::PathBuf;
use std::sync::{Arc, Once};
use trainer::{
    BetweenSteps, Described, Failure, PolicyBatch, PolicyLoss, PolicyLossKind, SampledText,
    Sampling, SleepLevel, StepRecord, Trainer, WhichModel, log,
};

/// A model with its optimizer, on a thread of its own. `trainer.Trainer` is the class to use.
#[pyclass(module = "trainer", frozen)]
pub(crate) struct PythonTrainer {
    thread: Arc<TrainerThread>,
    views: Views,
    sizes: RowSizes,
    /// The records of the steps so far.
    metrics: Py<PyList>,
}

#[pymethods]
impl PythonTrainer {
    /// Makes the trainer that `flags` of `trainer train` describe, planned with evaluations, and with texts that are generated: how many at a time, and the
    /// most tokens of each.
    #[new]
    fn new(
        py: Python,
        flags: Vec<String>,
        generate: Option<(usize, usize)>,
    ) -> PyResult<PythonTrainer> {
        static LOG: Once = Once::new();
        LOG.call_once(log::begin_within);
        separate_connections(py);
        let refused = |failure: Failure| raised(py, &failure);
        let described = Described::by(&flags).map_err(refused)?;
        let between = BetweenSteps {
            evaluation: Some(described.config().batch.micro),
            sample: generate.map(|(sequences, tokens)| SampledText { sequences, tokens }),
        };
        let threads = described.threads();
        let views = Views::default();
        let make = move || described.make(between);
        let thread = TrainerThread::start(py, threads, views.clone(), make)?;
        let sizes = thread.call(py, |trainer| {
            let config = trainer.config();
            Ok(RowSizes {
                seq: config.data.seq,
                vocab: config.model.vocab,
            })
        })?;
        Ok(PythonTrainer {
            thread: Arc::new(thread),
            views,
            sizes,
            metrics: PyList::empty(py).unbind(),
        })
    }

    /// The plan of a step.
    fn plan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let plan = self.thread.call(py, |trainer| Ok(trainer.plan().clone()))?;
        object(py, &plan)
    }

    /// The list of the records of all steps.
    fn metrics(&self, py: Python) -> Py<PyList> {
        self.metrics.clone_ref(py)
    }

    /// The configuration, as TOML.
    fn config(&self, py: Python) -> PyResult<String> {
        self.thread
            .call(py, |trainer| Ok(trainer.config().to_toml()?))
    }

    /// Makes a step, and returns its record.
    #[pyo3(signature = (input_ids, labels, positions = None))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        input_ids: &Bound<PyAny>,
        labels: &Bound<PyAny>,
        positions: Option<&Bound<PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let rows = labelled(self.sizes, input_ids, labels, positions)?;
        let record = self.thread.call(py, move |trainer| {
            trainer.step_rows(&rows)?;
            Ok(trainer.record().cloned())
        })?;
        self.noted(py, record)
    }

    /// The mean loss over all targets, without training.
    #[pyo3(signature = (input_ids, labels, positions = None))]
    fn eval(
        &self,
        py: Python,
        input_ids: &Bound<PyAny>,
        labels: &Bound<PyAny>,
        positions: Option<&Bound<PyAny>>,
    ) -> PyResult<f64> {
        let rows = labelled(self.sizes, input_ids, labels, positions)?;
        self.thread
            .call(py, move |trainer| trainer.loss_of_rows(&rows))
    }

    /// Continues prompts; returns for each its tokens and why it ended.
    fn generate(
        &self,
        py: Python,
        prompts: Vec<Vec<u32>>,
        max_tokens: usize,
        ends: Option<Vec<u32>>,
        sampling: (f32, Option<usize>, f32, u64),
    ) -> PyResult<Vec<(Vec<u32>, &'static str)>> {
        let (temperature, top_k, top_p, seed) = sampling;
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            seed,
        };
        self.thread.call(py, move |trainer| {
            let made = trainer.generate(&prompts, max_tokens, ends, sampling)?;
            let made = made.into_iter().map(|made| {
                let reason = made.finish_reason();
                (made.tokens, reason)
            });
            Ok(made.collect())
        })
    }

    /// The log-probability of each token after those before it, `[rows, tokens]` f32 as bytes, and that shape; of the model, or of the one under its
    /// adapters.
    #[pyo3(signature = (ids, reference = false))]
    fn log_probs<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<PyAny>,
        reference: bool,
    ) -> PyResult<(Bound<'py, PyBytes>, [usize; 2])> {
        let rows = masked(self.sizes, ids, None)?;
        let which = match reference {
            true => WhichModel::Reference,
            false => WhichModel::Trained,
        };
        let (rows, values) = self.thread.call(py, move |trainer| {
            let values = trainer.log_probs(&rows, which)?;
            Ok((rows, values))
        })?;
        let values = at_tokens(&rows, &values);
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        let [count, width] = rows.dims;
        Ok((PyBytes::new(py, &bytes), [count, width + 1]))
    }

    /// Makes a step on a policy gradient, and returns its record. `clip` is how far below and above 1 a ratio may be, and `longest` the most
    /// targets of a row.
    #[pyo3(signature = (ids, mask, advantages, old_log_probs, reference_log_probs, clip, beta, loss, longest))]
    fn policy_step<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<PyAny>,
        mask: &Bound<PyAny>,
        advantages: &Bound<PyAny>,
        old_log_probs: &Bound<PyAny>,
        reference_log_probs: Option<&Bound<PyAny>>,
        clip: (f32, f32),
        beta: f32,
        loss: &str,
        longest: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let kind = match loss {
            "dr_grpo" if longest == 0 => {
                let message = "`loss` is dr_grpo, which divides by the longest text that may be written: pass max_completion_length";
                return Err(usage(py, message.into()));
            }
            "dr_grpo" => PolicyLossKind::DrGrpo { longest },
            _ if longest > 0 => {
                let message = format!(
                    "max_completion_length is for dr_grpo alone, and `loss` is {loss}; leave it out"
                );
                return Err(usage(py, message));
            }
            "grpo" => PolicyLossKind::Grpo,
            "gspo" => PolicyLossKind::Gspo,
            "ppo" => PolicyLossKind::Ppo,
            other => {
                let message = format!("`loss` is {other}; it is grpo, dr_grpo, gspo or ppo");
                return Err(usage(py, message));
            }
        };
        let rows = masked(self.sizes, ids, Some(mask))?;
        let advantages = numbers(&rows, ("advantages", true), advantages)?;
        let old = numbers(&rows, ("old_log_probs", false), old_log_probs)?;
        let reference = reference_log_probs;
        let reference = reference.map(|of| numbers(&rows, ("reference_log_probs", false), of));
        let reference = reference.transpose()?;
        let loss = PolicyLoss {
            kind,
            clip_low: clip.0,
            clip_high: clip.1,
            beta,
        };
        let record = self.thread.call(py, move |trainer| {
            let batch = PolicyBatch {
                rows: &rows,
                advantages: &advantages,
                old: &old,
                reference: reference.as_deref(),
            };
            trainer.policy_step(&batch, &loss)?;
            Ok(trainer.record().cloned())
        })?;
        self.noted(py, record)
    }

    /// All weights by name.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = PyDict::new(py);
        for (name, weight) in Weight::all(py, &self.thread, &self.views)? {
            state.set_item(name, Bound::new(py, weight)?)?;
        }
        Ok(state)
    }

    /// Writes a checkpoint into a run's folder; returns its own.
    fn save(&self, py: Python, run: PathBuf) -> PyResult<PathBuf> {
        self.thread
            .call(py, move |trainer| trainer.save_checkpoint(run))
    }

    /// Writes the model in Hugging Face layout.
    fn export(&self, py: Python, folder: PathBuf) -> PyResult<()> {
        self.thread.call(py, move |trainer| trainer.save(folder))
    }

    /// Goes on from a checkpoint or a run, or takes the weights of a folder in Hugging Face layout.
    fn load(&self, py: Python, folder: PathBuf) -> PyResult<()> {
        let views = self.views.clone();
        self.thread.call(py, move |trainer| {
            views.refuse("load")?;
            match Trainer::is_checkpoint(&folder) {
                true => trainer.load_checkpoint(folder),
                false => trainer.load_weights(folder),
            }
        })
    }

    /// Gives the device's memory back, and keeps all in host memory or, if a checkpoint has it, nothing. Returns bytes by name.
    fn sleep<'py>(&self, py: Python<'py>, keeps: bool) -> PyResult<Bound<'py, PyAny>> {
        let level = match keeps {
            true => SleepLevel::Keep,
            false => SleepLevel::Drop,
        };
        let views = self.views.clone();
        let handed = self.thread.call(py, move |trainer| {
            views.refuse("sleep")?;
            trainer.sleep(level)
        })?;
        object(py, &handed)
    }

    /// Takes the device's memory again.
    fn wake(&self, py: Python) -> PyResult<()> {
        self.thread.call(py, |trainer| trainer.wake())
    }

    /// Steps made.
    fn steps(&self, py: Python) -> PyResult<usize> {
        self.thread.call(py, |trainer| Ok(trainer.progress()?.0))
    }

    /// Ends the thread and gives all memory back, or what has views with the last of them.
    fn close(&self, py: Python) {
        self.thread.close(py);
    }
}

impl PythonTrainer {
    /// A step's record, which is in the list of all before Python goes on: a signal may be raised there.
    fn noted<'py>(
        &self,
        py: Python<'py>,
        record: Option<StepRecord>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let record = object(py, &record)?;
        self.metrics.bind(py).append(&record)?;
        Ok(record)
    }
}
