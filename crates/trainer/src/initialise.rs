//! The `init` command.

use crate::failure::Failure;
use crate::run_dir::{make_folder, refuse_non_empty};
use crate::stdout::print;
use memory::DType;
use model::{Architecture, Attention, Fresh, Initial, encode, export};
use settings::{FloatType, Resolved};

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
    let architecture = Architecture::of(&config.model, Attention::default());
    let parameters = architecture.parameters();
    let layout = parameters.layout(|_, _| false);
    let dtype = DType::from(resolved.dtype());
    let fresh = Fresh {
        deviation: config.model.init_std,
        seed: config.train.seed,
    };
    let initial: Vec<Initial> = parameters
        .in_layout()
        .map(|parameter| parameter.initial)
        .collect();
    let path = folder.join("model.safetensors");
    export(&path, parameters, dtype, |index| {
        let values = fresh.values(initial[index], index);
        let values: Vec<f32> = values.take(layout.entries()[index].elements()).collect();
        encode(&values, dtype).into_owned()
    })?;
    let name = if resolved.dtype() == FloatType::Bf16 {
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
