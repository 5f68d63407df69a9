//! Foreign keys whose values are not simply ours: they need arithmetic, or other keys.

use super::file::{ForeignFile, ForeignKey};
use super::gathered::{Set, SettingsSoFar, Spot, text_of, written};
use super::meaning::ForeignPart;
use super::model::preset_of;
use super::program::Program;
use model::AdapterTarget;
use settings::ConfigError;
use std::path::Path;

/// The settings that a key made, or that it is not built.
pub(super) type PartResult = Result<Result<Set, NotBuilt>, ConfigError>;

/// Nothing here does it; the table says what to do, unless the reason does.
#[derive(Debug)]
pub(super) struct NotBuilt(pub(super) Option<String>);

/// A key and where it stands.
#[derive(Clone, Copy)]
pub(super) struct At<'a> {
    /// Its name, as the file has it.
    pub(super) name: &'a str,
    /// Its value, as text.
    pub(super) text: &'a str,
    pub(super) spot: Spot<'a>,
    /// The file, and all of them.
    pub(super) file: Option<&'a ForeignFile>,
    pub(super) files: &'a [ForeignFile],
}

/// Takes over what a key says.
pub(super) fn take(part: ForeignPart, at: At, to: &mut SettingsSoFar) -> PartResult {
    let number: Option<f64> = at.text.parse().ok();
    let set = match (part, number) {
        (ForeignPart::Model, _) => return model(at, to),
        (ForeignPart::Division, _) => return division(at, to),
        (ForeignPart::Targets, _) => targets(at, to)?,
        (ForeignPart::Distribution, _) => return distribution(at, to),
        (ForeignPart::Recompute, _) => recompute(at, to),
        (ForeignPart::DenseLayers, _) => return dense_layers(at, to),
        (ForeignPart::Betas, _) => return betas(at, to),
        (ForeignPart::Packing, _) => return packing(at, to),
        (ForeignPart::EvalPacking, _) => match to.known("data.packing") {
            Some(packing) if (at.text == "true") == (packing == "first-fit") => {
                Set::remark("as that of the training data")
            }
            _ => return Ok(Err(NotBuilt(None))),
        },
        (ForeignPart::Plugins, _) => {
            let is_of_logits =
                |name: &str| name.contains("liger") || name.contains("cut_cross_entropy");
            match at.text.split(' ').all(is_of_logits) {
                true => Set::remark("logits are never whole here"),
                false => return Ok(Err(NotBuilt(None))),
            }
        }
        (ForeignPart::Family, _) if at.name.ends_with("model_type") => {
            Set::remark("the model's own")
        }
        (ForeignPart::Family, _) => return Ok(Err(NotBuilt(None))),
        (ForeignPart::Positions, _) => match to.known("model.positions") {
            Some("learned") => to.set("model.max_positions", at.text, at.spot)?,
            _ => Set::remark("rotary positions have no end"),
        },
        (_, None) => {
            return Err(ConfigError::Contradiction(format!(
                "{} is {}, which is no number; give what it means by a flag of ours, and leave it out of the file",
                at.spot.place, at.text
            )));
        }
        (ForeignPart::Stages, _) => stages(at, to)?,
        (ForeignPart::Steps, Some(steps)) if steps <= 0.0 => {
            Set::remark("epochs say how long the run is")
        }
        (ForeignPart::Steps, _) => {
            to.forget("train.epochs");
            to.set("train.steps", at.text, at.spot)?
        }
        (ForeignPart::Clip, Some(norm)) if norm <= 0.0 => {
            to.set("optim.clip_norm", "inf", at.spot)?
        }
        (ForeignPart::Clip, _) => to.set("optim.clip_norm", at.text, at.spot)?,
        (ForeignPart::Dropout, Some(0.0)) => Set::remark("none, as here"),
        (ForeignPart::Dropout, _) => to.set("model.dropout", at.text, at.spot)?,
        (ForeignPart::GlobalBatch, Some(sequences)) => return global_batch(sequences, at, to),
        (ForeignPart::MinLr, Some(least)) => {
            match to.number("lr.peak").filter(|peak| *peak > 0.0) {
                Some(peak) => {
                    let share = (1e6 * least / peak).round() / 1e6;
                    to.set("lr.min_ratio", &share.to_string(), at.spot)?
                }
                None => return Ok(Err(NotBuilt(None))),
            }
        }
        (ForeignPart::WarmupShare, _) if to.known("lr.warmup_steps").is_some() => {
            Set::remark("the number of steps goes before it")
        }
        (ForeignPart::WarmupShare, Some(share)) => {
            return share_of_steps("lr.warmup_steps", share, at, to);
        }
        (ForeignPart::StepCount(key), Some(share)) if share > 0.0 && share < 1.0 => {
            return share_of_steps(key, share, at, to);
        }
        (ForeignPart::StepCount(key), _) => to.set(key, at.text, at.spot)?,
        (ForeignPart::Devices, Some(count)) => ranks(count, to),
        (ForeignPart::Shard, Some(degree)) => return shard(degree, at, to),
        (ForeignPart::ShardGroup, Some(1.0)) => Set::remark("all ranks divide the weights"),
        (ForeignPart::ShardGroup, _) => to.set("collectives.shard_group", at.text, at.spot)?,
        (ForeignPart::Bucket, Some(elements)) => {
            let bytes = (2.0 * elements).to_string();
            to.set("collectives.bucket_size", &bytes, at.spot)?
        }
        (ForeignPart::Minutes, Some(minutes)) => {
            let seconds = (60.0 * minutes).to_string();
            to.set("collectives.timeout_s", &seconds, at.spot)?
        }
    };
    Ok(Ok(set))
}

/// How documents become rows. Only data that `trainer prepare` wrote has documents, and a plan may do without any.
fn packing(at: At, to: &mut SettingsSoFar) -> PartResult {
    let is_of_llama_factory = |file: &&ForeignFile| file.program == Program::LlamaFactory;
    let llama_factory = at.file.filter(is_of_llama_factory);
    // There `neat_packing` is a way of `packing`.
    let also = |name: &str| {
        let is_it = |key: &ForeignKey| key.name == name && text_of(&key.value) == "true";
        llama_factory.is_some_and(|file| file.keys.iter().any(is_it))
    };
    let packing = match (at.name, at.text) {
        ("packing", "true") if llama_factory.is_some() && !also("neat_packing") => "concatenate",
        (_, "true") => "first-fit",
        _ if also("packing") || also("neat_packing") => {
            return Ok(Ok(Set::remark("another key packs")));
        }
        _ => "pad",
    };
    if to.known("data.path").is_none() {
        let flag = format!("--packing {packing}, beside --data of `trainer prepare`");
        return Ok(Err(NotBuilt(Some(flag))));
    }
    Ok(Ok(to.set("data.packing", packing, at.spot)?))
}

/// Blocks of each virtual stage, where there are several stages.
fn stages(at: At, to: &mut SettingsSoFar) -> Result<Set, ConfigError> {
    let stages = to.number("parallel.pipeline");
    if stages.is_none_or(|stages| stages < 2.0) {
        return Ok(Set::remark("there is one stage"));
    }
    let words = format!(
        "parallel.schedule=interleaved parallel.virtual_stage_layers={}",
        at.text
    );
    to.set_all(&words, at.spot)
}

/// A folder, or a name of which there is a preset.
fn model(at: At, to: &mut SettingsSoFar) -> PartResult {
    let name = at.text;
    let is_a_model = |file: &ForeignFile| file.program == Program::HuggingFaceModel;
    if to.told.model {
        return Ok(Ok(Set::remark("the command line says it")));
    }
    if at.files.iter().any(is_a_model) {
        return Ok(Ok(Set::remark(
            "its config.json is among the files of --from",
        )));
    }
    if Path::new(name).join("config.json").exists() {
        to.init_from = Some(name.into());
        return Ok(Ok(Set {
            here: vec![format!("--init-from {name}")],
            remark: None,
        }));
    }
    let Some((preset, differing)) = preset_of(name) else {
        return Ok(Err(NotBuilt(Some(
            "--from DIR of the model, whose config.json says its shape".into(),
        ))));
    };
    to.config = Some(preset.into());
    let mut set = to.set_all(differing, at.spot)?;
    set.here.insert(0, format!("--config {preset}"));
    set.remark = Some("for its weights: --init-from DIR of the model".into());
    Ok(Ok(set))
}

/// DeepSpeed by a file of its own, or FSDP by words.
fn division(at: At, to: &mut SettingsSoFar) -> PartResult {
    if at
        .files
        .iter()
        .any(|file| file.program == Program::DeepSpeed)
    {
        return Ok(Ok(Set::remark("its file is among those of --from")));
    }
    let words = at.text.to_lowercase().replace('_', "-");
    let zero = match () {
        () if words.contains("shard-grad-op") => {
            "collectives.zero=3 collectives.reshard_after_forward=false"
        }
        () if words.contains("full-shard") => "collectives.zero=3",
        () => {
            let more = format!("--from {}, or --zero 0|1|2|3", at.text);
            return Ok(Err(NotBuilt(Some(more))));
        }
    };
    Ok(Ok(to.set_all(zero, at.spot)?))
}

/// What a kind of launch says of the division, where no other key says more.
fn distribution(at: At, to: &mut SettingsSoFar) -> PartResult {
    let spot = Spot {
        is_default: true,
        ..at.spot
    };
    Ok(match at.text.to_lowercase().as_str() {
        "fsdp" | "fsdp2" | "1" | "2" => Ok(to.set("collectives.zero", "3", spot)?),
        "multi_gpu" => Ok(to.set("collectives.zero", "0", spot)?),
        "deepspeed" | "false" => Ok(Set::remark("other keys say how")),
        _ => Err(NotBuilt(None)),
    })
}

/// A share of all steps, rounded up.
fn share_of_steps(key: &str, share: f64, at: At, to: &mut SettingsSoFar) -> PartResult {
    Ok(match to.number("train.steps") {
        Some(steps) => Ok(to.set(key, &(share * steps).ceil().to_string(), at.spot)?),
        None => Err(NotBuilt(Some(format!(
            "{}: a number of steps; theirs is a share of them, and --steps N says how many there are",
            written(key)
        )))),
    })
}

/// Names of layers with adapters. Those of two keys are adapted together if one of them asks for all linear layers.
fn targets(at: At, to: &mut SettingsSoFar) -> Result<Set, ConfigError> {
    const KEY: &str = "lora.targets";
    let words = at.text.split([' ', ',']).filter(|name| !name.is_empty());
    let mut names: Vec<String> = words
        .map(|name| match name {
            "all" | "true" => AdapterTarget::ALL.into(),
            _ => name.into(),
        })
        .collect();
    if names == ["false"] {
        return Ok(Set::remark("as it is here"));
    }
    let of_files = to.settings.iter().find(|one| one.key == KEY);
    let earlier: Vec<String> = of_files
        .and_then(|one| serde_json::from_str(&one.text).ok())
        .unwrap_or_default();
    let all = AdapterTarget::ALL.to_string();
    if earlier.contains(&all) != names.contains(&all) && !earlier.is_empty() {
        names.splice(0..0, earlier);
        to.forget(KEY);
    }
    let text = serde_json::to_string(&names).expect("texts can be written");
    to.set(KEY, &text, at.spot)
}

/// Remembers one of Megatron's words, which mean something together.
fn recompute(at: At, to: &mut SettingsSoFar) -> Set {
    let text = at.text.to_owned();
    let flags = &mut to.recompute;
    match at.name.rsplit(['-', '_']).next() {
        Some("granularity") => flags.granularity = Some(text),
        Some("method") => flags.method = Some(text),
        Some("modules") => {
            flags.modules = Some(text.split([' ', ',']).map(str::to_owned).collect());
        }
        _ => flags.num_layers = Some(text),
    }
    Set {
        here: vec!["recompute.spec".into()],
        remark: None,
    }
}

/// `([0]*3+[1]*58)`, `[0, 1, 1]`, or 1 where all layers have experts.
fn dense_layers(at: At, to: &mut SettingsSoFar) -> PartResult {
    let text: String = at
        .text
        .chars()
        .filter(|c| !" ()'\"[]".contains(*c))
        .collect();
    if text == "1" {
        return Ok(Ok(Set::remark("all layers have experts")));
    }
    let mut kinds = Vec::new();
    for part in text.split(['+', ',']) {
        let (kind, count) = part.split_once('*').unwrap_or((part, "1"));
        match (kind, count.parse::<usize>()) {
            ("0" | "1", Ok(count)) if count < 1 << 12 => {
                kinds.extend(std::iter::repeat_n(kind == "0", count));
            }
            _ => {
                return Ok(Err(NotBuilt(Some(
                    "--set model.experts.dense_layers=[...]".into(),
                ))));
            }
        }
    }
    let dense = kinds.iter().enumerate().filter(|(_, is_dense)| **is_dense);
    let dense: Vec<String> = dense.map(|(layer, _)| layer.to_string()).collect();
    let list = format!("[{}]", dense.join(","));
    Ok(Ok(to.set("model.experts.dense_layers", &list, at.spot)?))
}

fn betas(at: At, to: &mut SettingsSoFar) -> PartResult {
    let betas: Vec<&str> = at.text.split(' ').collect();
    let [beta1, beta2] = betas[..] else {
        return Ok(Err(NotBuilt(None)));
    };
    let words = format!("optim.beta1={beta1} optim.beta2={beta2}");
    Ok(Ok(to.set_all(&words, at.spot)?))
}

/// Divides a step's sequences by micro-batches and by groups of ranks, of which each has sequences of its own. That leaves the
/// accumulation.
fn global_batch(sequences: f64, at: At, to: &mut SettingsSoFar) -> PartResult {
    if sequences <= 0.0 {
        return Ok(Ok(Set::remark("it follows from the others")));
    }
    let explicit = to
        .settings
        .iter()
        .find(|setting| setting.key == "batch.accum");
    if explicit.is_some_and(|setting| !setting.is_default) {
        return Ok(Ok(Set::remark("batch.accum says it")));
    }
    let (Some(micro), Some(ranks)) = (to.number("batch.micro"), to.ranks()) else {
        to.needs_ranks = true;
        return Ok(Ok(Set::remark("it depends on --ranks N")));
    };
    let shares = ["parallel.context", "parallel.pipeline"].map(|key| to.number(key).unwrap_or(1.0));
    let groups = ranks as f64 / shares.iter().product::<f64>();
    let accum = sequences / (micro * groups);
    if accum.fract() != 0.0 {
        return Err(ConfigError::Contradiction(format!(
            "{} asks for {sequences} sequences in a step, which {ranks} ranks, {groups} of them with sequences of their own, and {micro} in \
             a micro-batch cannot divide evenly; give another --ranks N or --micro-batch B",
            at.spot.place
        )));
    }
    Ok(Ok(to.set("batch.accum", &accum.to_string(), at.spot)?))
}

/// Processes multiply with those that another key has named: nodes with those of a node.
fn ranks(count: f64, to: &mut SettingsSoFar) -> Set {
    if to.told.ranks.is_some() {
        return Set::remark("the command line says --ranks");
    }
    let ranks = to.ranks.unwrap_or(1) * count.max(1.0) as u64;
    to.ranks = Some(ranks);
    Set {
        here: vec![format!("--ranks {ranks}")],
        remark: None,
    }
}

fn shard(degree: f64, at: At, to: &mut SettingsSoFar) -> PartResult {
    if degree == 1.0 {
        return Ok(Ok(to.set("collectives.zero", "0", at.spot)?));
    }
    if degree > 1.0 && to.ranks().is_none() {
        to.ranks = Some(degree as u64);
    }
    Ok(Ok(to.set("collectives.zero", "3", at.spot)?))
}
