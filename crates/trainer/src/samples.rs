//! What a configuration says of the data.

use crate::failure::Failure;
use data::{Dataset, Format, Options, Split};
use settings::{Config, Resolved};
use std::path::Path;

/// What to read, and how to cut it into steps.
pub(crate) fn data_options(resolved: &Resolved) -> Options {
    let config = &resolved.config;
    let format = config.data.format;
    let is_safetensors = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let from_file = matches!(format, Format::Auto | Format::Batches)
        && config.data.path.as_deref().is_some_and(is_safetensors);
    // A batch file says its own sequence length, unless the user insists.
    let asks_the_file = from_file && !resolved.seq_is_explicit;
    Options {
        path: config.data.path.clone(),
        format,
        seq: (!asks_the_file).then_some(config.data.seq),
        micro_batch: config.batch.micro,
        // Every rank reads the whole step, and takes what is its own.
        accum: config.micro_batches(),
        shuffle: config.data.shuffle,
        seed: config.train.seed,
        vocab: config.model.vocab,
        packing: config.data.packing,
        split: Split::Train,
    }
}

/// What `eval` reads: the validation part of `data.path`, in file order.
pub(crate) fn evaluation_options(resolved: &Resolved) -> Options {
    Options {
        accum: 1,
        shuffle: false,
        split: Split::Validation,
        ..data_options(resolved)
    }
}

/// What evaluations while training read, likewise.
pub(crate) fn held_out_options(resolved: &Resolved) -> Result<Options, Failure> {
    let config = &resolved.config;
    let prepared = config.data.path.as_ref().filter(|path| path.is_dir());
    let chosen = config
        .eval
        .path
        .as_ref()
        .map(|path| (path, Split::Validation));
    let (path, split) = chosen.or(prepared.map(|path| (path, Split::HeldOut))).ok_or_else(|| {
        let message = "--eval-every needs data that is not trained on; name it with --eval-data, or train on a folder that \
                       `trainer prepare` wrote with --validation";
        Failure::Usage(message.into())
    })?;
    Ok(Options {
        path: Some(path.clone()),
        split,
        seq: Some(config.data.seq),
        micro_batch: config.eval.micro_batch.unwrap_or(config.batch.micro),
        ..evaluation_options(resolved)
    })
}

/// Makes micro-batches of evaluations no larger than their data: what is planned is what is computed. Data that cannot be
/// opened is left to those who read it.
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
