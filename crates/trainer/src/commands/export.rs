//! The `export` command: a checkpoint becomes a model in Hugging Face layout.

use crate::adapters::{BaseModel, BaseWeights, has_adapters};
use crate::checkpoints::model_folder;
use crate::failure::{Failure, Result};
use crate::limits::refuse_model_without_room;
use crate::model_tokens::json;
use crate::run_dir::{make_model_folder, refuse_non_empty};
use crate::stdout::print;
use crate::whole_model::{left_out, whole_model};
use checkpoint::STATE_FILE;
use clap::Args;
use files::{Disk, TensorSource};
use memory::DType;
use model::{
    AdapterConfig, AdapterFactors, AdapterWeights, Architecture, Attention, MAX_SHARD_BYTES,
    ModelConfig, ModelWeights, Origin, Parameters, WholeModel, write_adapter, write_model,
};
use settings::{BaseStorage, FloatType, LoraConfig, Size};
use std::path::{Path, PathBuf};

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
    /// Data type of the weights [default: that of the checkpoint, or bf16 if its run started from a folder in bf16]
    #[arg(long, value_name = "f32|bf16", value_parser = FloatType::NAMES.to_vec())]
    pub dtype: Option<String>,
    /// Of a run with adapters, write the whole model with what they add
    #[arg(long)]
    pub merge: bool,
    /// The model under adapters [default: what their folder says]
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    /// Try although the disk seems to have no room
    #[arg(long)]
    pub force: bool,
}

impl ExportArgs {
    fn max_shard_bytes(&self) -> Result<u64> {
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
pub(crate) fn export(args: &ExportArgs) -> Result {
    let out = &args.out;
    args.max_shard_bytes()?;
    refuse_non_empty(out)?;
    let from = model_folder(&args.from)?;
    if has_adapters(&from) {
        return match args.merge {
            true => merge(args, &from),
            false => adapters_alone(args, &from),
        };
    }
    let flags = [("--merge", args.merge), ("--base", args.base.is_some())];
    if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) {
        return Err(Failure::Usage(format!(
            "{flag} is for adapters on a model, and {} has none; leave it out",
            from.display()
        )));
    }
    let (origin, config) = described(&from)?;
    let architecture = Architecture::of(&config, Attention::default());
    let parameters = architecture.parameters;
    let weights = ModelWeights::open(&from, &parameters)?;
    let whole = rest_of((&from, &config), &weights, &parameters);
    let of_origin = || origin_dtype(&from).unwrap_or(weights.dtype());
    let dtype = args.dtype().unwrap_or_else(of_origin);
    // Sequence length 0, because the model has its own config.json.
    let files = origin.files(&config, 0, dtype);
    write(args, files, &weights.converted(dtype), whole.as_ref())?;
    print(format_args!(
        "{} parameters of {} in {}\n",
        parameters.layout(|_, _| false).parameters(),
        from.display(),
        out.display()
    ))
}

/// The model that an export of a folder completes; what is dropped is said.
fn rest_of<'a>(
    (folder, config): (&Path, &ModelConfig),
    weights: &ModelWeights,
    parameters: &'a Parameters,
) -> Option<WholeModel<'a>> {
    let left_out = left_out(folder, config);
    match weights.left_out() {
        Some(dropped) if left_out.is_none() => tracing::info!("{dropped}"),
        _ => {}
    }
    whole_model(left_out.as_ref(), parameters)
}

/// Writes a model, as the text part of a whole one if there is one.
fn write(
    args: &ExportArgs,
    files: Vec<(String, Vec<u8>)>,
    text: &dyn TensorSource,
    whole: Option<&WholeModel>,
) -> Result {
    let (out, max_shard_bytes) = (&args.out, args.max_shard_bytes()?);
    let all = whole.map(|whole| whole.with_text(text));
    let all: &dyn TensorSource = match &all {
        Some(all) => all,
        None => text,
    };
    let files = match whole {
        Some(whole) => whole.files(files),
        None => files,
    };
    refuse_model_without_room(out, all, &files, max_shard_bytes, args.force)?;
    let _lock = make_model_folder(out)?;
    Ok(write_model(&Disk, out, &files, all, max_shard_bytes)?)
}

/// The files of a model's folder, and what its `config.json` describes.
fn described(folder: &Path) -> Result<(Origin, ModelConfig)> {
    let origin = Origin::read(folder)?;
    let config = ModelConfig::from_hf(origin.config().unwrap_or_default());
    let config = config.map_err(|source| Failure::HfConfig {
        path: folder.join("config.json"),
        source,
    })?;
    Ok((origin, config))
}

/// The type of the folder that the run of a checkpoint started from, if the run computed in a wider one.
fn origin_dtype(checkpoint: &Path) -> Option<DType> {
    let state = json(&checkpoint.join(STATE_FILE));
    let is_narrower = state["origin_dtype"] == FloatType::Bf16.name();
    is_narrower.then(|| {
        tell_rounding("the run started from");
        DType::BF16
    })
}

/// Says that a model is narrower than what was trained.
fn tell_rounding(folder: &str) {
    tracing::info!(
        "written in bf16, the type of the folder that {folder}: what training changed by less than 1/256 of a weight is rounded \
         away; --dtype f32 keeps it, and `trainer eval` shows the difference"
    );
}

/// Writes adapters without their model, as PEFT reads them, whether one process wrote them or several ranks.
fn adapters_alone(args: &ExportArgs, adapters: &Path) -> Result {
    let out = &args.out;
    let base = match adapters.join("config.json").is_file() {
        true => None,
        false => Some(BaseModel::of_adapters(adapters, args.base.as_deref())?),
    };
    let base = base.as_ref().and_then(BaseModel::folder);
    let (origin, config) = described(base.unwrap_or(adapters))?;
    let lora =
        LoraConfig::default().adopted(AdapterConfig::read(adapters)?, BaseStorage::default())?;
    let lora = lora.adapters()?.expect("a folder of adapters has a rank");
    let parameters = Parameters::adapted(lora);
    let adapted = Architecture::declared(&config, Attention::default(), parameters);
    let factors = AdapterFactors::read(adapters, &adapted.parameters)?;
    let dtype = args.dtype().unwrap_or(factors.dtype);
    let (weights, mut files) = (factors.outgoing(dtype), origin.files(&config, 0, dtype));
    files.extend(BaseModel::files_of(adapters)?);
    refuse_model_without_room(out, &weights, &files, u64::MAX, args.force)?;
    let _lock = make_model_folder(out)?;
    write_adapter(&Disk, out, &files, &weights)?;
    print(format_args!(
        "adapters of {} in {}\n",
        adapters.display(),
        out.display()
    ))
}

/// Writes the model under adapters, with what they add.
fn merge(args: &ExportArgs, adapters: &Path) -> Result {
    let base = BaseModel::of_adapters(adapters, args.base.as_deref())?;
    let Some(folder) = base.folder() else {
        return Err(Failure::Usage(format!(
            "the adapters in {} belong to a fresh model that is in no folder; write it by `trainer init --out DIR` with the run's \
             --config and --seed, and name it with --base DIR",
            adapters.display()
        )));
    };
    let (origin, config) = described(folder)?;
    let lora = LoraConfig::default().adopted(AdapterConfig::read(adapters)?, base.storage())?;
    let lora = lora.adapters()?.expect("a folder of adapters has a rank");
    let of = |parameters| Architecture::declared(&config, Attention::default(), parameters);
    let (plain, adapted) = (of(Parameters::default()), of(Parameters::adapted(lora)));
    let BaseWeights::Folder(folder) = base.weights(&plain.parameters)? else {
        unreachable!("it has a folder");
    };
    let weights = ModelWeights::open(folder, &plain.parameters)?;
    let factors = AdapterWeights::read(adapters, &adapted.parameters)?;
    let dtype = args.dtype().unwrap_or(weights.dtype());
    if args.dtype.is_none() && dtype == DType::BF16 {
        tell_rounding("is under the adapters");
    }
    let merged = factors.merged_with(&weights, dtype, base.coded_from().into());
    let files = origin.files(&config, 0, dtype);
    let whole = rest_of((folder, &config), &weights, &plain.parameters);
    write(args, files, &merged, whole.as_ref())?;
    print(format_args!(
        "{} with the adapters of {} in {}\n",
        folder.display(),
        adapters.display(),
        args.out.display()
    ))
}
