//! What training and the commands that plan do first with their configuration.

use crate::adapters::adopt_adapters;
use crate::checkpoints::configuration_to_resume;
use crate::failure::Failure;
use crate::initial_model::adopt_model_to_train;
use crate::samples::warn_of_warmup;
use crate::threads::start_threads;
use settings::load::{Source, load};
use settings::{AutoOr, Resolved, Resume, Task};

/// Starts the threads, warns of settings without effect, and adopts a folder's model or a resumed run's settings.
pub(crate) fn begin(resolved: &mut Resolved) -> Result<(), Failure> {
    start_threads(resolved.config.train.threads)?;
    for (key, needs) in resolved.config.unused() {
        tracing::warn!("{key} has no effect on the run: it is for {needs}");
    }
    // Epochs become a number of steps only when the data is open.
    if resolved.config.train.epochs.is_none() {
        warn_of_warmup(&resolved.config);
    }
    keep_head_chunk(resolved)?;
    adopt_folders(resolved)
}

/// Adopts the adapters and the model of the folders that the options name.
pub(crate) fn adopt_folders(resolved: &mut Resolved) -> Result<(), Failure> {
    adopt_adapters(resolved)?;
    match resolved.options.init_from.clone() {
        Some(folder) => adopt_model_to_train(resolved, &folder),
        None => Ok(()),
    }
}

/// Makes commands about a resumed run use the run's chunk of the output head, if the configuration leaves it open.
/// Otherwise they would describe another run. Training itself takes the chunk with all ranks and checksums
/// (`train/resuming.rs`).
fn keep_head_chunk(resolved: &mut Resolved) -> Result<(), Failure> {
    let (options, chunk) = (&resolved.options, &mut resolved.config.memory.head_chunk);
    let (Some(resume), false) = (&options.resume, resolved.task == Task::Train) else {
        return Ok(());
    };
    let Some(file) = configuration_to_resume(resume, options.out.as_deref()) else {
        if *resume == Resume::Auto {
            return Ok(());
        }
        return Err(Failure::Usage(
            "--resume names no run with a checkpoint; name one, or leave it out".into(),
        ));
    };
    if *chunk == AutoOr::Auto {
        let source = Source::open(&file.to_string_lossy())?;
        *chunk = load(&source, &[], false)?.config.memory.head_chunk;
    }
    Ok(())
}
