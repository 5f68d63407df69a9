//! Makes ranks that save or open a checkpoint together agree: if one of them fails, all do.

use crate::Result;
use crate::error::CheckpointError;
use collectives::{Group, GroupError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// A rank's result.
#[derive(Serialize, Deserialize)]
enum Word<T> {
    Done(T),
    Failed { reason: String, is_full: bool },
}

/// Collects the results of all ranks, in their order.
///
/// # Errors
/// This rank's own failure, else [`CheckpointError::OtherRank`] for the first rank that failed;
/// [`CheckpointError::Group`] if ranks are lost.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(
    group: &dyn Group,
    own: Result<T>,
) -> Result<Vec<T>> {
    let (word, own) = match own {
        Ok(done) => (Word::Done(done), None),
        Err(error) => {
            let (reason, is_full) = (error.to_string(), error.is_full());
            (Word::Failed { reason, is_full }, Some(error))
        }
    };
    let word = serde_json::to_vec(&word).expect("names and numbers are JSON");
    let shared = group.share(&word);
    if let Some(error) = own {
        return Err(error);
    }
    let mut all = Vec::new();
    for (rank, word) in shared?.iter().enumerate() {
        let word: Word<T> = serde_json::from_slice(word).map_err(|error| {
            let reason = format!(
                "rank {rank} speaks another language ({error}): all must run the same trainer"
            );
            GroupError::Failed(reason)
        })?;
        all.push(word);
    }
    let all = all.into_iter().enumerate().map(|(rank, word)| match word {
        Word::Done(done) => Ok(done),
        Word::Failed { reason, is_full } => Err(CheckpointError::OtherRank {
            rank,
            reason,
            is_full,
        }),
    });
    all.collect()
}

/// This rank's result, if all ranks succeeded.
///
/// # Errors
/// As [`gather`].
pub(crate) fn agree<T>(group: &dyn Group, own: Result<T>) -> Result<T> {
    let mut made = None;
    gather(group, own.map(|own| made = Some(own)))?;
    Ok(made.expect("it was made if no rank failed"))
}
