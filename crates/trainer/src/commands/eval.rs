//! The `eval` command: loss, perplexity and bits per byte of a model on data.

use super::trained::{Trained, TrainedArgs};
use crate::args::overrides;
use crate::failure::{Failure, Result};
use crate::reference;
use crate::samples::{data_options, evaluation_options, refuse_nothing};
use crate::stdout::{print, print_json};
use clap::Args;
use data::{Dataset, Packing};
use planner::InferencePlan;
use serde::Serialize;
use session::Inference;
use settings::load::Override;
use settings::{Objective, Settings};
use std::path::{Path, PathBuf};

/// Flags of `eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// The model.
    #[command(flatten)]
    pub trained: TrainedArgs,
    /// Token, batch or text file, or a folder of token files, of which the validation part is taken
    #[arg(long, value_name = "PATH")]
    pub data: String,
    /// Sequences in a micro-batch [default: 1]
    #[arg(long, value_name = "B", allow_negative_numbers = true)]
    pub micro_batch: Option<String>,
    /// Sequence length [default: that of the run's training, or at most 1024]
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub seq: Option<String>,
    /// Write the log-probability of each text in prepared preferences to this file, for dpo.reference
    ///
    /// Reads the shards for training, not those for validation.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
}

/// The output of `eval --json`.
#[derive(Serialize)]
struct Record {
    model: PathBuf,
    data: String,
    loss: f64,
    perplexity: f64,
    /// Null if it is not known how many bytes of text a token has.
    bits_per_byte: Option<f64>,
    targets: usize,
    samples: usize,
    seq: usize,
    peak_bytes: u64,
    planned_peak_bytes: u64,
}

/// Evaluates a model.
pub(crate) fn eval(args: &EvalArgs) -> Result {
    let mut flags = overrides(&[
        ("--micro-batch", "batch.micro", &args.micro_batch),
        ("--seq", "data.seq", &args.seq),
    ]);
    flags.push(Override::from_flag("--data", "data.path", &args.data));
    let trained = Trained::open(&args.trained, flags)?;
    let seq_is_explicit = trained.completed.seq_is_explicit;
    let seq = match seq_is_explicit {
        true => trained.completed.config.data.seq,
        false => trained.seq(),
    };
    let mut config = trained.completed.decided(seq);
    // Training's packing is used only for prepared folders, because other data has no documents.
    let (packing, prepared) = (trained.packing(), Path::new(&args.data).is_dir());
    let is_default = config.data.packing == Packing::Auto;
    if let (Some(packing), true, true) = (packing, prepared, is_default) {
        config.data.packing = packing;
    }
    let options = match &args.reference {
        None => evaluation_options(&config, seq_is_explicit),
        Some(_) => {
            (config.train.objective, config.data.packing) = (Objective::Dpo, Packing::Pad);
            data_options(&config, seq_is_explicit)
        }
    };
    let dataset = trained.tokens().open_own(&options, &config)?;
    (config.data.seq, config.data.packing) = (dataset.seq(), dataset.options().packing);
    let samples = match &args.reference {
        None => dataset
            .samples()
            .min(config.eval.samples.unwrap_or(usize::MAX)),
        Some(_) => dataset.rows(),
    };
    let settings = Settings::new(&config)?;
    let (mut inference, plan) = trained.load(&settings, |settings, target| {
        InferencePlan::of_evaluation(settings, target, config.batch.micro.min(samples))
    })?;
    if let Some(file) = &args.reference {
        return write_reference(&args.trained.from, inference, &dataset, file);
    }
    let batches = dataset.once(config.eval.samples);
    let evaluation = inference
        .forward()
        .evaluate(batches.map(|micro| micro.map_err(Failure::from)))?;
    refuse_nothing(&evaluation, &dataset)?;
    refuse_unsound(&args.trained.from, evaluation.loss().is_finite())?;
    let record = Record {
        loss: evaluation.loss(),
        perplexity: evaluation.perplexity(),
        bits_per_byte: dataset
            .bytes_per_token()
            .map(|bytes| evaluation.bits_per_byte(bytes)),
        targets: evaluation.targets,
        samples,
        seq: dataset.seq(),
        peak_bytes: evaluation.peak_bytes,
        planned_peak_bytes: plan.peak_bytes,
        model: trained.folder,
        data: args.data.clone(),
    };
    match args.trained.json {
        true => print_json(&record),
        false => print(in_words(&record)),
    }
}

/// Refuses a model whose losses are not numbers.
fn refuse_unsound(model: &Path, is_finite: bool) -> Result {
    match is_finite {
        true => Ok(()),
        false => Err(Failure::Malformed {
            path: model.into(),
            reason: "its losses are not finite, so its weights are not sound, or too large for their data type; take an earlier \
                     checkpoint, or compute in --dtype f32"
                .into(),
        }),
    }
}

/// Writes the losses of the sequences of preferences that a model will be trained on.
fn write_reference(
    model: &Path,
    mut inference: Inference,
    dataset: &Dataset,
    file: &Path,
) -> Result {
    let batches = dataset.by_number();
    let (losses, _) = inference
        .forward()
        .sequence_losses(batches.map(|micro| micro.map_err(Failure::from)))?;
    refuse_unsound(model, losses.iter().all(|loss| loss.is_finite()))?;
    let written = format!("{} texts; wrote {}\n", losses.len(), file.display());
    reference::write(file, dataset, losses)?;
    print(written)
}

fn in_words(record: &Record) -> String {
    let bits = match record.bits_per_byte {
        Some(bits) => format!("  bits per byte {bits:.4}"),
        None => String::new(),
    };
    format!(
        "loss {:.4}  perplexity {:.3}{bits}  ({} targets in {} sequences of {})\n",
        record.loss, record.perplexity, record.targets, record.samples, record.seq
    )
}
