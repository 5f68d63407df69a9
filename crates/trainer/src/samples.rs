//! What a configuration says of the data.

use crate::chosen::chosen;
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
        accum: config.batch.accum,
        shuffle: config.data.shuffle,
        seed: config.train.seed,
        vocab: config.model.vocab,
        packing: config.data.packing,
        split: Split::Train,
    }
}

/// What evaluations while training read: in file order, each sample once.
pub(crate) fn held_out_options(config: &Config) -> Result<Options, Failure> {
    let prepared = config.data.path.as_ref().filter(|path| path.is_dir());
    let path = config.eval.path.as_ref().or(prepared).ok_or_else(|| {
        let message = "--eval-every needs data that is not trained on; name it with --eval-data, or train on a folder that \
                       `trainer prepare` wrote with --validation";
        Failure::Usage(message.into())
    })?;
    Ok(Options {
        path: Some(path.clone()),
        format: config.data.format,
        seq: Some(config.data.seq),
        micro_batch: config.eval.micro_batch.unwrap_or(config.batch.micro),
        accum: 1,
        shuffle: false,
        seed: config.train.seed,
        vocab: config.model.vocab,
        packing: config.data.packing,
        split: Split::Validation,
    })
}

/// The configuration that a run would have, without open questions: a batch file brings its own sequence length, and what to
/// recompute is chosen.
pub(crate) fn decided(resolved: &Resolved) -> Result<Config, Failure> {
    let options = data_options(resolved);
    let seq = match options.seq {
        Some(seq) => seq,
        None => Dataset::open(&options)?.seq(),
    };
    chosen(resolved, resolved.decided(seq))
}
