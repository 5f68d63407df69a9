//! Makes configurations in code.

use crate::adapters::has_adapters;
use crate::begin::complete;
use crate::failure::Result;
use settings::load::{Source, load};
use settings::{Completed, Config, Given, RunOptions, Task, resolve};
use std::path::Path;

/// The configuration of a preset (`tiny`, `llama-3-8b`) or a file, with settings over it, each as `--set` takes it,
/// such as `recompute.spec=full`. Its fields may be changed afterwards; [`Config::with`] checks them.
///
/// ```
/// let mut config = trainer::configuration("llama-3-8b", &["data.seq=4096", "recompute.spec=core_attn"])?;
/// config.recompute.layers.insert("0-15".into(), "full".into());
/// # config.with(&[])?;
/// # Ok::<(), trainer::Failure>(())
/// ```
///
/// # Errors
/// [`Failure::Config`](crate::Failure::Config): no such preset or file, or a setting that is unknown, out of range or contradicts another.
pub fn configuration(preset_or_file: &str, set: &[&str]) -> Result<Config> {
    let given = given(Some(preset_or_file.to_string()), set);
    Ok(resolve(Task::Plan, given, RunOptions::default())?.config)
}

/// The configuration in a TOML text, as in files.
///
/// # Errors
/// As [`configuration`].
pub fn configuration_from_text(text: &str) -> Result<Config> {
    let place = "the configuration's text".to_string();
    let source = Source::parse("library".into(), place, text)?;
    Ok(load(&source, &[], false)?.config.with(&[])?)
}

/// The defaults with the model, or the adapters and their model, of a folder, and with settings over them.
pub(super) fn pretrained(folder: &Path, set: &[&str]) -> Result<Completed> {
    let folder = Some(folder.to_path_buf());
    let (init_from, lora_from) = match folder.as_deref().is_some_and(has_adapters) {
        true => (None, folder),
        false => (folder, None),
    };
    let options = RunOptions {
        init_from,
        lora_from,
        ..RunOptions::default()
    };
    complete(resolve(Task::Train, given(None, set), options)?)
}

fn given(config: Option<String>, set: &[&str]) -> Given {
    Given {
        config,
        set: set.iter().map(|setting| setting.to_string()).collect(),
        ..Given::default()
    }
}
