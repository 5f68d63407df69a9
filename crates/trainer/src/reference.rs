//! What the model that training on preferences begins with thinks of its data: a file that `eval` writes and `train` reads.

use crate::failure::{Failure, Result};
use data::Dataset;
use serde::{Deserialize, Serialize};
use settings::Config;
use std::path::Path;

/// More than the mean loss of a token by any sound model: a probability of e^-1000.
const MOST_LOSS: f32 = 1000.0;

/// The file's contents, as JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reference {
    /// Of the data ([`Dataset::fingerprint`]).
    data: String,
    /// Tokens of a sequence, at most.
    seq: usize,
    /// The sum of the losses of each sequence: its negative log-probability.
    losses: Vec<f32>,
}

/// Writes the losses of all sequences of some data.
pub(crate) fn write(file: &Path, dataset: &Dataset, losses: Vec<f32>) -> Result {
    let reference = Reference {
        data: dataset.fingerprint(),
        seq: dataset.seq(),
        losses,
    };
    let json = serde_json::to_vec(&reference).expect("texts and numbers");
    std::fs::write(file, json).map_err(Failure::file(file))
}

/// The data with the losses of `dpo.reference`, if the configuration names them.
pub(crate) fn attach(dataset: Dataset, config: &Config) -> Result<Dataset> {
    let Some(file) = &config.dpo.reference else {
        return Ok(dataset);
    };
    let wrong = |what: &str| {
        Failure::Usage(format!(
            "{} {what}; write it with `trainer eval MODEL --data DATA --seq {} --reference FILE`",
            file.display(),
            dataset.seq()
        ))
    };
    let json = files::read_regular(file).map_err(Failure::file(file))?;
    let read = serde_json::from_slice::<Reference>(&json);
    let reference = read.map_err(|error| {
        wrong(&format!(
            "has no log-probabilities of a reference ({error})"
        ))
    })?;
    if reference.data != dataset.fingerprint() || reference.losses.len() != dataset.rows() {
        return Err(wrong("has the log-probabilities of other data"));
    }
    if reference.seq != dataset.seq() {
        return Err(wrong(&format!(
            "is for sequences of at most {} tokens",
            reference.seq
        )));
    }
    // Sums of losses are at least 0, but for rounding.
    let possible = -1.0..=MOST_LOSS * dataset.seq() as f32;
    if let Some(loss) = reference
        .losses
        .iter()
        .find(|loss| !possible.contains(*loss))
    {
        return Err(Failure::Malformed {
            path: file.clone(),
            reason: format!(
                "a sequence of at most {} tokens has a loss of {loss}, which no sound model gives; write it anew with `trainer eval \
                 MODEL --reference FILE`",
                dataset.seq()
            ),
        });
    }
    Ok(dataset.with_reference(reference.losses))
}
