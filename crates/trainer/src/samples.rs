//! How a configuration describes the data.

use crate::failure::{Failure, Result};
use data::{Dataset, Format, Inputs, Options, Packing, Split};
use session::Evaluation;
use settings::{AttentionBackend, Config, RunOptions, check};
use std::path::Path;

/// How documents become rows, and why.
fn packing(config: &Config, options: Options) -> (Packing, String) {
    let (packing, reason) = options.decided_packing();
    if (config.data.packing, packing) != (Packing::Auto, Packing::FirstFit) {
        return (packing, reason);
    }
    if config.attention.backend == AttentionBackend::Eager {
        let reason = "eager attention cannot keep documents from seeing each other";
        return (Packing::Concatenate, reason.into());
    }
    // Evaluations are planned with the packing of the run.
    let evaluated = config.eval.every.and(config.eval.path.clone());
    let evaluated = evaluated.map(|path| Options {
        path: Some(path.into()),
        split: Split::Validation,
        ..options
    });
    match evaluated.filter(|evaluated| !evaluated.has_documents()) {
        Some(_) => {
            let reason = "the data of --eval-data does not say where documents begin";
            (Packing::Concatenate, reason.into())
        }
        None => (packing, reason),
    }
}

/// Which data a run reads, and how it is divided into steps.
pub(crate) fn data_options(config: &Config, seq_is_explicit: bool) -> Options {
    decided_options(config, seq_is_explicit).0
}

/// The same, and why documents become rows as they do.
pub(crate) fn decided_options(config: &Config, seq_is_explicit: bool) -> (Options, String) {
    let format = config.data.format;
    let is_safetensors = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let only = config.data.path.as_ref().and_then(Inputs::only);
    let from_file =
        matches!(format, Format::Auto | Format::Batches) && only.is_some_and(is_safetensors);
    // A batch file has its own sequence length, which is used unless the user sets one.
    let asks_the_file = from_file && !seq_is_explicit;
    let options = Options {
        path: config.data.path.clone(),
        format,
        seq: (!asks_the_file).then_some(config.data.seq),
        micro_batch: config.batch.micro,
        // A step of all ranks together, of which each reads its own part.
        accum: config.micro_batches(),
        shuffle: config.data.shuffle,
        seed: config.train.seed,
        vocab: config.model.vocab,
        packing: config.data.packing,
        pairs: config.has_pairs(),
        split: Split::Train,
        tails: false,
    };
    let (packing, reason) = packing(config, options.clone());
    (Options { packing, ..options }, reason)
}

/// What `eval` reads: the validation part of `data.path`, in file order and to its end. Weights of several paths do not
/// count.
pub(crate) fn evaluation_options(config: &Config, seq_is_explicit: bool) -> Options {
    let options = data_options(config, seq_is_explicit);
    Options {
        path: options.path.map(Inputs::unweighted),
        accum: 1,
        shuffle: false,
        pairs: false,
        split: Split::Validation,
        tails: true,
        ..options
    }
}

/// What evaluations during training read, in the same way.
pub(crate) fn held_out_options(config: &Config) -> Result<Options> {
    let prepared = config.data.path.clone().map(Inputs::unweighted);
    let prepared = prepared.filter(|data| data.paths().all(Path::is_dir));
    let chosen = config.eval.path.clone();
    let chosen = chosen.map(|path| (path.into(), Split::Validation));
    let (path, split) = chosen.or(prepared.map(|data| (data, Split::HeldOut))).ok_or_else(|| {
        let message = "--eval-every needs data that is not trained on; name it with --eval-data, or train on a folder that \
                       `trainer prepare` wrote with --validation";
        Failure::Usage(message.into())
    })?;
    Ok(Options {
        path: Some(path),
        split,
        micro_batch: config.eval.micro_batch.unwrap_or(config.batch.micro),
        ..evaluation_options(config, true)
    })
}

/// Refuses data without any target.
pub(crate) fn refuse_nothing(evaluation: &Evaluation, dataset: &Dataset) -> Result {
    match evaluation.targets {
        0 => Err(Failure::Usage(format!(
            "nothing to evaluate on: no token is a target ({})",
            dataset.describe()
        ))),
        _ => Ok(()),
    }
}

/// The steps in which every sample of the data is read `train.epochs` times; `train.steps` if the length is not given in epochs.
/// The last step is filled up with samples of the next pass.
///
/// # Errors
/// If this would be too many steps.
pub(crate) fn steps(config: &Config, options: &RunOptions, data: &Dataset) -> Result<usize> {
    let Some(epochs) = config.train.epochs else {
        return Ok(config.train.steps);
    };
    let (samples, in_a_step) = (data.samples(), config.batch.micro * config.micro_batches());
    let steps = epochs * samples as f64 / in_a_step as f64;
    // Rounding can make a product such as 0.1 x 30 a little larger than 3.
    let steps = (steps - steps * 1e-12).ceil().clamp(1.0, MOST_STEPS) as usize;
    tracing::info!("--epochs {epochs}: {samples} samples in each, {steps} steps of {in_a_step}");
    let mut in_steps = config.clone();
    (in_steps.train.epochs, in_steps.train.steps) = (None, steps);
    check::contradictions(&in_steps)?;
    warn_of_warmup(&in_steps);
    options.check_steps(steps)?;
    Ok(steps)
}

/// Warns if a run ends before its warmup does.
pub(crate) fn warn_of_warmup(config: &Config) {
    let (warmup, steps) = (config.lr.warmup_steps, config.train.steps);
    if warmup > steps {
        tracing::warn!(
            "the learning rate never reaches lr.peak: lr.warmup_steps is {warmup}, and the run has {steps} steps"
        );
    }
}

/// More steps than any run makes. An `f64` holds the number exactly.
const MOST_STEPS: f64 = 1e15;

/// Sequences in a micro-batch of evaluations: no more than their data has, so that the plan is for what is computed. If the data
/// cannot be opened, the code that reads it reports the error.
pub(crate) fn evaluation_rows(config: &Config) -> Option<usize> {
    let asked = config.eval.micro_batch;
    let opened = || Dataset::open(&held_out_options(config).ok()?).ok();
    let Some(data) = config.eval.every.and_then(|_| opened()) else {
        return asked;
    };
    let samples = config.eval.samples.unwrap_or(usize::MAX);
    let rows = asked.unwrap_or(config.batch.micro);
    Some(rows.min(samples).min(data.samples()))
}
