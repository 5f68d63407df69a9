//! What training and the commands that plan do first with their configuration.

use crate::adapters::read_folders;
use crate::failure::{Failure, Result};
use crate::samples::warn_of_warmup;
use crate::threads::start_threads;
use memory::Codes;
use settings::{Completed, FolderModel, LoraConfig, Resolved, Resume, Settings};

/// Starts the threads, and completes a command. One about a run that it resumes takes that run's own choices, as it would otherwise
/// describe another. Training itself looks for the run with all ranks and checksums (`train/resuming.rs`).
pub(crate) fn begin(resolved: Resolved) -> Result<Completed> {
    start_threads(resolved.config.train.threads)?;
    let resume = resolved.options.resume.as_ref();
    if resolved.given.resumed.is_none() && resume.is_some_and(|it| *it != Resume::Auto) {
        return Err(Failure::Usage(
            "--resume names no run with a checkpoint; name one, or leave it out".into(),
        ));
    }
    complete_and_warn(resolved)
}

/// Completes a command, and warns of the user's settings without effect.
pub(crate) fn complete_and_warn(resolved: Resolved) -> Result<Completed> {
    // Epochs become a number of steps only when the data is open.
    if resolved.config.train.epochs.is_none() {
        warn_of_warmup(&resolved.config);
    }
    let own = resolved.config.lora.clone();
    let completed = complete(resolved)?;
    warn_of_settings_in_vain(&completed, own)?;
    Ok(completed)
}

/// Completes a command that trains by what its folders say. A model that is stored as codes needs adapters, unless files have no other
/// form of it: what is in MXFP4 is widened, which is exact.
pub(crate) fn complete(resolved: Resolved) -> Result<Completed> {
    let folder = read_folders(&resolved.options)?;
    match &folder {
        Some(FolderModel {
            path,
            stored: Some(stored),
            adapters: None,
            ..
        }) if resolved.config.lora.rank.is_none() && stored.codes != Codes::Mxfp4 => {
            Err(Failure::Usage(format!(
                "the weights in {} are {}, which is not trained itself; add --lora RANK to train adapters on it, or give the folder with \
             the model in bf16 or f32 (`trainer export {0} --out DIR` writes the values of its codes)",
                path.display(),
                stored.codes.as_str(),
            )))
        }
        _ => Ok(resolved.complete(folder)?),
    }
}

/// Warns of settings without effect that came from no folder. `own` are the user's settings of adapters.
fn warn_of_settings_in_vain(completed: &Completed, own: LoraConfig) -> Result {
    let config = completed.decided(completed.config.data.seq);
    for (key, needs) in config.allowed_in_vain() {
        if !key.starts_with("model.") || completed.explicit_model_keys.contains(key) {
            tracing::warn!("{key} has no effect on the run: it is for {needs}");
        }
    }
    // What cannot be made into settings is refused soon, with its reason.
    let settings = config.lora.rank.map(|_| Settings::new(&config));
    let Some(Ok(settings)) = settings else {
        return Ok(());
    };
    let own = LoraConfig {
        rank: config.lora.rank,
        base_dtype: config.lora.base_dtype,
        ..own
    };
    let architecture = settings.architecture();
    for (key, pattern) in own.patterns_in_vain(&architecture.parameters.modules)? {
        tracing::warn!(
            "`{pattern}` in {key} has no effect on the run: it fits no layer that it could be for"
        );
    }
    Ok(())
}
