//! The `init` command.

use crate::config::Resolved;
use crate::failure::Failure;
use crate::run_dir::{make_folder, refuse_non_empty};
use crate::settings::dtype;
use crate::stdout::print;
use model::{InitialValues, encode, export, layout};

/// Writes a freshly initialised model in Hugging Face layout.
pub(crate) fn initialise(resolved: &Resolved) -> Result<(), Failure> {
    let folder = resolved
        .options
        .out
        .as_deref()
        .ok_or_else(|| Failure::Usage("init needs --out DIR".into()))?;
    refuse_non_empty(folder)?;
    make_folder(folder, "--out")?;
    let config = &resolved.config;
    let (layout, dtype) = (layout(&config.model, |_, _| false), dtype(resolved.dtype()));
    let path = folder.join("model.safetensors");
    export(&path, &layout, dtype, |index| {
        let entry = &layout.entries()[index];
        let values = InitialValues::new(&config.model, entry, index, config.train.seed);
        let values: Vec<f32> = values.take(entry.elements()).collect();
        encode(&values, dtype).into_owned()
    })?;
    let name = if resolved.dtype() == crate::config::Dtype::Bf16 {
        "bfloat16"
    } else {
        "float32"
    };
    let path = folder.join("config.json");
    let text = config.model.to_hf(config.data.seq, name);
    std::fs::write(&path, text).map_err(Failure::file(path))?;
    print(format_args!(
        "{} parameters in {}\n",
        layout.parameters(),
        folder.display()
    ))
}
