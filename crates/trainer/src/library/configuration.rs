//! Makes configurations in code.

use crate::adapters::{adopt_adapters, has_adapters};
use crate::failure::Failure;
use crate::initial_model::adopt_model_to_train;
use settings::load::{Source, load};
use settings::{Config, Given, Resolved, RunOptions, Task, resolve};
use std::path::{Path, PathBuf};

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
/// [`Failure::Config`]: no such preset or file, or a setting that is unknown, out of range or contradicts another.
pub fn configuration(preset_or_file: &str, set: &[&str]) -> Result<Config, Failure> {
    let given = given(Some(preset_or_file.to_string()), set);
    Ok(resolve(Task::Plan, given, RunOptions::default())?.config)
}

/// The configuration in a TOML text, as in files.
///
/// # Errors
/// As [`configuration`].
pub fn configuration_from_text(text: &str) -> Result<Config, Failure> {
    let place = "the configuration's text".to_string();
    let source = Source::parse("library".into(), place, text)?;
    Ok(load(&source, &[], false)?.config.with(&[])?)
}

/// What a folder is trained with.
pub(super) struct Pretrained {
    pub(super) config: Config,
    /// The folder of the model.
    pub(super) model: PathBuf,
    /// The folder of adapters on it, if training goes on with such.
    pub(super) adapters: Option<PathBuf>,
}

impl Pretrained {
    /// The defaults with the model, or the adapters and their model, of a folder, and with settings over them.
    pub(super) fn new(folder: &Path, set: &[&str]) -> Result<Pretrained, Failure> {
        let adapters = has_adapters(folder).then(|| folder.to_path_buf());
        let options = RunOptions {
            init_from: adapters.is_none().then(|| folder.to_path_buf()),
            lora_from: adapters.clone(),
            ..RunOptions::default()
        };
        let mut resolved = resolve(Task::Plan, given(None, set), options)?;
        adopt_adapters(&mut resolved)?;
        let model = resolved.options.init_from.clone();
        let model = model.unwrap_or_else(|| folder.to_path_buf());
        adopt_model_to_train(&mut resolved, &model)?;
        Ok(Pretrained {
            config: resolved.config,
            model,
            adapters,
        })
    }
}

fn given(config: Option<String>, set: &[&str]) -> Given {
    Given {
        config,
        set: set.iter().map(|setting| setting.to_string()).collect(),
        ..Given::default()
    }
}

/// A configuration as a command resolves it.
pub(super) fn resolved(config: Config) -> Resolved {
    Resolved {
        task: Task::Train,
        name: "library".into(),
        config,
        options: RunOptions::default(),
        given: Given::default(),
        explicit_model_keys: Vec::new(),
        model_parts: Default::default(),
        seq_is_explicit: true,
        chooses_head_chunk: false,
        context_length: None,
    }
}
