//! How a configuration describes the data.

use crate::failure::Failure;
use data::{Dataset, Format, Inputs, Options, Packing, Split};
use session::Evaluation;
use settings::{AttentionBackend, Config, Resolved, TrainConfig, check};
use std::path::Path;

/// Decides `data.packing`, if it is `auto`. Gives the choice and its reason in words.
pub(crate) fn decide_packing(resolved: &mut Resolved) -> Option<String> {
    if resolved.config.data.packing != Packing::Auto {
        return None;
    }
    let (packing, reason) = packing(resolved);
    resolved.config.data.packing = packing;
    Some(format!("data.packing is {packing}: {reason}"))
}

/// How documents become rows, and why.
fn packing(resolved: &Resolved) -> (Packing, String) {
    let config = &resolved.config;
    let options = options(resolved, config.data.packing);
    let (packing, reason) = options.decided_packing();
    if (config.data.packing, packing) != (Packing::Auto, Packing::FirstFit) {
        return (packing, reason);
    }
    if config.attention.backend == AttentionBackend::Eager {
        let reason = "eager attention cannot keep documents from seeing each other";
        return (Packing::Concatenate, reason.into());
    }
    // Evaluations are planned with the packing of the run.
    let evaluated = config
        .eval
        .path
        .clone()
        .filter(|_| config.eval.every.is_some());
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

/// The options that say which data a run reads, and how it is divided into steps.
pub(crate) fn data_options(resolved: &Resolved) -> Options {
    options(resolved, packing(resolved).0)
}

fn options(resolved: &Resolved, packing: Packing) -> Options {
    let config = &resolved.config;
    let format = config.data.format;
    let is_safetensors = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let from_file = matches!(format, Format::Auto | Format::Batches)
        && config
            .data
            .path
            .as_ref()
            .and_then(Inputs::only)
            .is_some_and(is_safetensors);
    // A batch file has its own sequence length, which is used unless the user sets one.
    let asks_the_file = from_file && !resolved.seq_is_explicit;
    Options {
        path: config.data.path.clone(),
        format,
        seq: (!asks_the_file).then_some(config.data.seq),
        micro_batch: config.batch.micro,
        // A step of all ranks together, of which each reads its own part.
        accum: config.micro_batches(),
        shuffle: config.data.shuffle,
        seed: config.train.seed,
        vocab: config.model.vocab,
        packing,
        pairs: config.has_pairs(),
        split: Split::Train,
        tails: false,
    }
}

/// What `eval` reads: the validation part of `data.path`, in file order and to its end. Weights of several paths do not
/// count.
pub(crate) fn evaluation_options(resolved: &Resolved) -> Options {
    let options = data_options(resolved);
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
pub(crate) fn held_out_options(resolved: &Resolved) -> Result<Options, Failure> {
    let config = &resolved.config;
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
        seq: Some(config.data.seq),
        micro_batch: config.eval.micro_batch.unwrap_or(config.batch.micro),
        ..evaluation_options(resolved)
    })
}

/// Refuses data without any target.
pub(crate) fn refuse_nothing(evaluation: &Evaluation, dataset: &Dataset) -> Result<(), Failure> {
    match evaluation.targets {
        0 => Err(Failure::Usage(format!(
            "nothing to evaluate on: no token is a target ({})",
            dataset.describe()
        ))),
        _ => Ok(()),
    }
}

/// Sets `train.steps` if the length of the run is given in epochs, so that every sample is read that often. The last
/// step is filled up with samples of the next pass.
///
/// # Errors
/// If this would be too many steps.
pub(crate) fn set_steps_from_epochs(
    resolved: &mut Resolved,
    data: &Dataset,
) -> Result<(), Failure> {
    let config = &mut resolved.config;
    let Some(epochs) = config.train.epochs else {
        return Ok(());
    };
    let (samples, in_a_step) = (data.samples(), config.batch.micro * config.micro_batches());
    let steps = epochs * samples as f64 / in_a_step as f64;
    // Rounding can make a product such as 0.1 x 30 a little larger than 3.
    let steps = (steps - steps * 1e-12).ceil().clamp(1.0, MOST_STEPS);
    config.train.steps = steps as usize;
    tracing::info!("--epochs {epochs}: {samples} samples in each, {steps} steps of {in_a_step}");
    let length = TrainConfig {
        epochs: None,
        ..config.train.clone()
    };
    check::contradictions(&Config {
        train: length,
        ..config.clone()
    })?;
    warn_of_warmup(config);
    resolved.options.check_steps(resolved.config.train.steps)?;
    Ok(())
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

/// Makes micro-batches of evaluations no larger than their data, so that the plan is for what is computed. If the data
/// cannot be opened, the code that reads it reports the error.
pub(crate) fn fit_evaluation(resolved: &Resolved, config: &mut Config) {
    if config.eval.every.is_none() {
        return;
    }
    let decided = Resolved {
        config: config.clone(),
        ..resolved.clone()
    };
    let opened = held_out_options(&decided).and_then(|options| Ok(Dataset::open(&options)?));
    let Ok(data) = opened else {
        return;
    };
    let samples = config
        .eval
        .samples
        .unwrap_or(usize::MAX)
        .min(data.samples());
    let rows = config.eval.micro_batch.unwrap_or(config.batch.micro);
    config.eval.micro_batch = Some(rows.min(samples));
}
