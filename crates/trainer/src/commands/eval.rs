//! The `eval` command: loss, perplexity and bits per byte of a model on data.

use super::trained::{Trained, TrainedArgs, settings};
use crate::args::overrides;
use crate::device::OpenDevice;
use crate::failure::Failure;
use crate::reference;
use crate::samples::{data_options, evaluation_options, refuse_nothing};
use crate::stdout::{print, print_json};
use clap::Args;
use data::Packing;
use planner::InferencePlan;
use serde::Serialize;
use settings::Objective;
use settings::load::Override;
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
pub(crate) fn eval(args: &EvalArgs) -> Result<(), Failure> {
    let mut flags = overrides(&[
        ("--micro-batch", "batch.micro", &args.micro_batch),
        ("--seq", "data.seq", &args.seq),
    ]);
    flags.push(Override::from_flag("--data", "data.path", &args.data));
    let mut trained = Trained::open(&args.trained, flags)?;
    if !trained.resolved.seq_is_explicit {
        trained.resolved.config.data.seq = trained.seq();
    }
    // Training's packing is used only for prepared folders, because other data has no documents.
    let (packing, prepared) = (trained.packing(), Path::new(&args.data).is_dir());
    let is_default = trained.resolved.config.data.packing == Packing::Auto;
    if let (Some(packing), true, true) = (packing, prepared, is_default) {
        trained.resolved.config.data.packing = packing;
    }
    if let Some(file) = &args.reference {
        return write_reference(&args.trained.from, trained, file);
    }
    let options = evaluation_options(&trained.resolved);
    let dataset = trained.tokens().open_own(&options, &trained.resolved)?;
    trained.resolved.config.data.packing = dataset.options().packing;
    let config = &trained.resolved.config;
    let samples = dataset
        .samples()
        .min(config.eval.samples.unwrap_or(usize::MAX));
    let settings = settings(&trained.resolved, dataset.seq())?;
    let device = OpenDevice::open(trained.resolved.device())?;
    let rows = config.batch.micro.min(samples);
    let plan = InferencePlan::of_evaluation(&settings, device.target(), rows)?;
    let mut inference = trained.load(&settings, &device, &plan)?;
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
fn refuse_unsound(model: &Path, is_finite: bool) -> Result<(), Failure> {
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
fn write_reference(model: &Path, mut trained: Trained, file: &Path) -> Result<(), Failure> {
    let config = &mut trained.resolved.config;
    config.train.objective = Objective::Dpo;
    config.data.packing = Packing::Pad;
    let options = data_options(&trained.resolved);
    let dataset = trained.tokens().open_own(&options, &trained.resolved)?;
    let settings = settings(&trained.resolved, dataset.seq())?;
    let device = OpenDevice::open(trained.resolved.device())?;
    let rows = options.micro_batch.min(dataset.rows());
    let plan = InferencePlan::of_evaluation(&settings, device.target(), rows)?;
    let mut inference = trained.load(&settings, &device, &plan)?;
    let batches = dataset.by_number();
    let (losses, _) = inference
        .forward()
        .sequence_losses(batches.map(|micro| micro.map_err(Failure::from)))?;
    refuse_unsound(model, losses.iter().all(|loss| loss.is_finite()))?;
    let written = format!("{} texts; wrote {}\n", losses.len(), file.display());
    reference::write(file, &dataset, losses)?;
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
