//! The `export` command: a checkpoint becomes a model in Hugging Face layout.

use crate::checkpoints::model_folder;
use crate::failure::Failure;
use crate::limits::refuse_model_without_room;
use crate::run_dir::{make_folder, refuse_non_empty};
use crate::stdout::print;
use clap::Args;
use files::Disk;
use memory::DType;
use model::{
    Architecture, Attention, MAX_SHARD_BYTES, ModelConfig, ModelWeights, Origin, write_model,
};
use settings::{FloatType, Size};
use std::path::PathBuf;

/// Flags of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Run directory, of which the newest whole checkpoint is taken, or folder of a checkpoint or a model
    #[arg(value_name = "DIR")]
    pub from: PathBuf,
    /// Folder for the model, new or empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Weights that a file has at most [default: 5GB]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub max_shard_size: Option<Size>,
    /// Data type of the weights [default: that of the checkpoint]
    #[arg(long, value_name = "f32|bf16", value_parser = FloatType::NAMES.to_vec())]
    pub dtype: Option<String>,
    /// Try although the disk seems to have no room
    #[arg(long)]
    pub force: bool,
}

impl ExportArgs {
    fn max_shard_bytes(&self) -> Result<u64, Failure> {
        match self.max_shard_size {
            None => Ok(MAX_SHARD_BYTES),
            Some(Size::Bytes(bytes)) => Ok(bytes),
            Some(share @ Size::Percent(_)) => Err(Failure::Usage(format!(
                "--max-shard-size {share} is a share of a device; write a size such as 5GB"
            ))),
        }
    }

    fn dtype(&self) -> Option<DType> {
        let name = self.dtype.as_deref()?;
        let narrow = name == FloatType::Bf16.name();
        Some(if narrow { DType::BF16 } else { DType::F32 })
    }
}

/// Writes the model of a checkpoint with the files that came with it. Weights are copied from file to file, without a
/// device and without holding the model in memory.
pub(crate) fn export(args: &ExportArgs) -> Result<(), Failure> {
    let (out, max_shard_bytes) = (&args.out, args.max_shard_bytes()?);
    refuse_non_empty(out)?;
    let from = model_folder(&args.from)?;
    let origin = Origin::read(&from)?;
    let text = origin.config().unwrap_or_default();
    let config = ModelConfig::from_hf(text).map_err(|source| Failure::HfConfig {
        path: from.join("config.json"),
        source,
    })?;
    let architecture = Architecture::of(&config, Attention::default());
    let parameters = architecture.parameters();
    let weights = ModelWeights::open(&from, parameters)?;
    let dtype = args.dtype().unwrap_or(weights.dtype());
    // Sequence length 0, because the model has its own config.json.
    let files = origin.files(&config, 0, dtype);
    let converted = weights.converted(dtype);
    refuse_model_without_room(out, &converted, &files, max_shard_bytes, args.force)?;
    make_folder(out, "--out")?;
    write_model(&Disk, out, &files, &converted, max_shard_bytes)?;
    print(format_args!(
        "{} parameters of {} in {}\n",
        parameters.layout(|_, _| false).parameters(),
        from.display(),
        out.display()
    ))
}
