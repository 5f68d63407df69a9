//! The `init` command.

use crate::failure::Failure;
use crate::run_dir::{make_folder, refuse_non_empty};
use crate::stdout::print;
use files::Disk;
use memory::DType;
use model::{
    Architecture, Attention, Fresh, Initial, MAX_SHARD_BYTES, Origin, OutgoingWeights, encode,
    write_model,
};
use settings::Resolved;

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
    let weights = OutgoingWeights::new(parameters, dtype, |index| {
        let values = fresh.values(initial[index], index);
        let values: Vec<f32> = values.take(layout.entries()[index].elements()).collect();
        Ok(encode(&values, dtype).into_owned().into())
    });
    let files = Origin::default().files(&config.model, config.data.seq, dtype);
    write_model(&Disk, folder, &files, &weights, MAX_SHARD_BYTES)?;
    print(format_args!(
        "{} parameters in {}\n",
        layout.parameters(),
        folder.display()
    ))
}
