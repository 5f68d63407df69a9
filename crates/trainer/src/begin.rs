//! What training and the commands that plan do first with their configuration.

use crate::adapters::adopt_adapters;
use crate::checkpoints::configuration_to_resume;
use crate::failure::Failure;
use crate::initial_model::adopt_model_to_train;
use crate::samples::warn_of_warmup;
use crate::threads::start_threads;
use data::Packing;
use settings::load::{Source, load};
use settings::{AutoOr, Config, LoraConfig, Resolved, Resume, Settings, Task};

/// Starts the threads, warns of settings without effect, and adopts a folder's model or a resumed run's settings.
pub(crate) fn begin(resolved: &mut Resolved) -> Result<(), Failure> {
    start_threads(resolved.config.train.threads)?;
    // Epochs become a number of steps only when the data is open.
    if resolved.config.train.epochs.is_none() {
        warn_of_warmup(&resolved.config);
    }
    keep_choices_of_run(resolved)?;
    let own = resolved.config.lora.clone();
    adopt_folders(resolved)?;
    warn_of_settings_in_vain(resolved, &own)
}

/// Adopts the adapters and the model of the folders that the options name.
pub(crate) fn adopt_folders(resolved: &mut Resolved) -> Result<(), Failure> {
    adopt_adapters(resolved)?;
    match resolved.options.init_from.clone() {
        Some(folder) => adopt_model_to_train(resolved, &folder),
        None => Ok(()),
    }
}

/// Warns of the user's settings that have no effect. Settings that came from model or adapter folders are not warned of; `own`
/// are the user's settings of adapters.
fn warn_of_settings_in_vain(resolved: &Resolved, own: &LoraConfig) -> Result<(), Failure> {
    let config = resolved.decided(resolved.config.data.seq);
    let is_own = |key: &str| !key.starts_with("model.") || resolved.sets(key);
    for (key, needs) in config
        .allowed_in_vain()
        .into_iter()
        .filter(|(key, _)| is_own(key))
    {
        tracing::warn!("{key} has no effect on the run: it is for {needs}");
    }
    if [
        own.rank_pattern.len(),
        own.alpha_pattern.len(),
        own.base_skip.len(),
    ] == [0; 3]
    {
        return Ok(());
    }
    // What cannot be made into settings is refused soon, with its reason.
    let Ok(settings) = Settings::new(&config) else {
        return Ok(());
    };
    let own = LoraConfig {
        rank: config.lora.rank,
        base_dtype: config.lora.base_dtype,
        ..own.clone()
    };
    let architecture = settings.architecture();
    for (key, pattern) in own.patterns_in_vain(&architecture.parameters.modules)? {
        tracing::warn!(
            "`{pattern}` in {key} has no effect on the run: it fits no layer that it could be for"
        );
    }
    Ok(())
}

/// Makes commands about a resumed run use the run's own choices. Otherwise they would describe another run. Training itself takes
/// them with all ranks and checksums (`train/resuming.rs`).
fn keep_choices_of_run(resolved: &mut Resolved) -> Result<(), Failure> {
    let options = &resolved.options;
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
    let source = Source::open(&file.to_string_lossy())?;
    keep_choices(&mut resolved.config, &load(&source, &[], false)?.config);
    Ok(())
}

/// Takes what a configuration leaves open, and what would change bits, from the run before: the chunk of the output head, and how
/// documents become rows.
pub(crate) fn keep_choices(config: &mut Config, before: &Config) {
    let (chunk, packing) = (&mut config.memory.head_chunk, &mut config.data.packing);
    if *chunk == AutoOr::Auto {
        *chunk = before.memory.head_chunk;
    }
    if *packing == Packing::Auto {
        *packing = before.data.packing;
    }
}
