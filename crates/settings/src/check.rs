//! Refuses configurations with parts that are not built, and with contradictory settings.

use crate::Result;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::attention::attention;
use super::choices::{AUTO, AttentionBackend, AutoOr, Fp8Recipe, Fp8Weights, HostPlace, Release};
use super::device::Device;
use super::error::{ConfigError, refused};
use super::keys::OptimConfig;
use super::schema::Config;
use super::{dpo, expert_unit, fp8, lora, policy, ranks};
use data::{Format, Packing};
use memory::{Home, Layer, Window};
use model::{Architecture, Parameter, Parameters};
use optim::{MomentFormat, OptimizerKind, ScheduleKind};

/// More elements than any machine can hold in a tensor. Products of sizes stay far from overflow.
const MOST_ELEMENTS: f64 = 1e15;

/// More multiplications than the scores of a block's attention take of any rank. A tenth of what an operation's count can hold.
const MOST_OF_SCORES: f64 = 1e18;

/// Refuses to train with features that a binary without CUDA lacks. Planning with them is allowed. `places` has the
/// argument that set each key.
///
/// # Errors
/// For the first such value, as it was given.
pub fn built(config: &Config, places: &BTreeMap<String, String>, trains: bool) -> Result {
    let on_gpu = matches!(config.train.device, Some(Device::Cuda { .. }));
    let refused = [
        (
            on_gpu,
            "train.device",
            "; train with --device cpu, or predict the memory of a GPU with `trainer plan`",
        ),
        (
            config.log.nvtx,
            "log.nvtx",
            ", and only what runs on a GPU is shown to NVIDIA's profilers; leave it out",
        ),
    ];
    let lacks_cuda = trains && !cfg!(feature = "cuda");
    let mut refused = refused.into_iter();
    let asked_for = refused.find(|(is_asked_for, ..)| lacks_cuda && *is_asked_for);
    let Some((_, key, rest)) = asked_for else {
        return Ok(());
    };
    let mut values = config.values()?.into_iter();
    let value = values.find(|(one, _)| one.name == key);
    let written = || value.map(|(_, value)| format!("`{key} = {value}`"));
    Err(ConfigError::NotBuilt {
        what: places
            .get(key)
            .cloned()
            .or_else(written)
            .unwrap_or_default(),
        rest,
    })
}

/// Refuses settings that make no sense together, whatever the model: [`model()`] checks those that need to know it.
///
/// # Errors
/// For the first contradiction, with what to write instead.
pub fn contradictions(config: &Config) -> Result {
    let Config {
        lr, data, train, ..
    } = config;
    let has_states = config.homes()?.states != Home::Device;
    if has_states && config.offload.fraction == 0.0 {
        return refused(
            "`offload.fraction` is 0, so no optimizer states would be offloaded; make it more than 0 (1 is all of them), or \
             leave --offload-optimizer out",
        );
    }
    config.refuse_in_vain()?;
    lora::check(config)?;
    fp8::check(config)?;
    dpo::check(config)?;
    policy::check(config)?;
    release(config)?;
    ranks::check(config)?;
    if config.optim.kind == OptimizerKind::Adafactor {
        adafactor(&config.optim)?;
    }
    if let Some(decay_steps) = lr.decay_steps
        && lr.schedule == ScheduleKind::Wsd
        && train.epochs.is_none()
        && decay_steps > train.steps
    {
        return refused(format!(
            "`lr.decay_steps` is {decay_steps}, but the run has only {} steps; wsd decays within the run, so make it shorter",
            train.steps
        ));
    }
    if data.path.is_none() && !matches!(data.format, Format::Auto | Format::Text) {
        return refused(format!(
            "`data.format` is {}, but there is no file to read; give one with --data",
            data.format
        ));
    }
    between_steps(config)?;
    packing(config)?;
    automatic(config)?;
    sizes(config)
}

/// Refuses a model that makes no sense, and settings that do not go with it.
///
/// # Errors
/// The first of these, with what to write instead.
pub fn model(config: &Config) -> Result {
    config.model.validate()?;
    dpo::check_model(config)?;
    policy::check_model(config)?;
    fp8::check_model(config)?;
    expert_unit::check(config)?;
    experts(config)
}

/// Refuses to give gradients back in the backward pass that the step still needs.
fn release(config: &Config) -> Result {
    let (optim, offload) = (&config.optim, &config.offload);
    if optim.release == Release::Step {
        return Ok(());
    }
    if config.batch.accum > 1 {
        return refused(format!(
            "`optim.release` is backward, which updates a block as soon as its gradient is there, but a step sums the gradients \
             of {} micro-batches first; make batch.accum 1, or leave optim.release at step",
            config.batch.accum
        ));
    }
    if optim.clip_norm.is_finite() {
        return refused(format!(
            "`optim.release` is backward, which updates a block before the other gradients are there, but clipping to \
             optim.clip_norm = {} needs the norm of them all; make optim.clip_norm inf, or leave optim.release at step",
            optim.clip_norm
        ));
    }
    if config.fp8.recipe != Fp8Recipe::Off
        && config.fp8.weights == Fp8Weights::Step
        && offload.parameters == HostPlace::Pinned
    {
        return refused(
            "`optim.release` is backward, which updates a block in its backward pass, and with fp8.weights = \"step\" the block comes \
             from the host as codes then, which cannot be updated; make fp8.weights use, or leave optim.release at step",
        );
    }
    if offload.gradients == HostPlace::Pinned {
        return refused(
            "`optim.release` is backward, so gradients are used up in the backward pass and there are none to send to the \
             host; leave --offload-gradients out, or optim.release at step",
        );
    }
    if offload.window == Window::End {
        return refused(
            "`offload.window` is end, but `optim.release` is backward, which updates in the backward pass; leave one of the \
             two out",
        );
    }
    Ok(())
}

/// Refuses formats that Adafactor's states cannot have, and numbers that it cannot divide by.
fn adafactor(optim: &OptimConfig) -> Result {
    /// The root of the smallest normal f32. The square of a smaller number is 0 or inexact, and 0 / 0 is no update.
    const LEAST_EPS: f64 = 1.1e-19;
    if optim.state_dtype != MomentFormat::F32 {
        return refused(format!(
            "optim.state_dtype is {}, but adafactor keeps no moments of matrices, and its variances of rows, columns and vectors, \
             which are next to nothing, are f32; leave --state-dtype out",
            optim.state_dtype
        ));
    }
    if let AutoOr::Number(eps) = optim.adafactor_eps.0
        && eps < LEAST_EPS
    {
        return refused(format!(
            "the first of optim.adafactor_eps is {eps:e}, whose square no f32 holds; make it at least {LEAST_EPS:e} (what Hugging Face adds to squares, 1e-30, is its square)"
        ));
    }
    if optim.clip_threshold < LEAST_EPS {
        return refused(format!(
            "optim.clip_threshold is {:e}, so small that no weight would move; 1.0 is usual",
            optim.clip_threshold
        ));
    }
    Ok(())
}

/// Refuses options for evaluations and checkpoints if there are none.
fn between_steps(config: &Config) -> Result {
    let Config {
        checkpoint, eval, ..
    } = config;
    if checkpoint.keep_best && eval.every.is_none() {
        return refused(
            "--keep-best keeps the checkpoint with the lowest evaluation loss, and nothing is evaluated; add --eval-every N",
        );
    }
    if (checkpoint.keep_best || checkpoint.keep_last.is_some()) && !checkpoint.saves() {
        return refused(
            "--keep-last and --keep-best say which checkpoints are kept, and --save-every 0 writes none; leave one of them out",
        );
    }
    Ok(())
}

/// Refuses to pack documents if there are none, or if attention would look across them.
fn packing(config: &Config) -> Result {
    let (data, backend) = (&config.data, config.attention.backend);
    if config.packing() != Packing::Concatenate && data.path.is_none() {
        return refused(format!(
            "data.packing = \"{}\" needs documents, and the built-in text is one; give a folder that `trainer prepare` wrote \
             with --data",
            config.packing()
        ));
    }
    if data.packing == Packing::FirstFit && backend == AttentionBackend::Eager {
        return refused(
            "data.packing = \"first-fit\" keeps documents from seeing each other, which eager attention cannot; leave \
             --attention at auto, or take flash",
        );
    }
    Ok(())
}

/// Refuses what does not go with a mixture of experts.
fn experts(config: &Config) -> Result {
    let model = &config.model;
    let has_bias = model
        .experts
        .as_ref()
        .is_some_and(|experts| experts.choice_bias);
    if config.optim.router_bias_rate > 0.0 && !has_bias {
        return refused(
            "optim.router_bias_rate moves the biases of routers' choices, and the model has none; set \
             model.experts.choice_bias, or leave the rate out",
        );
    }
    if model.experts.is_none() {
        return Ok(());
    }
    if config.memory.tile_tokens.is_some() {
        return refused(
            "memory.tile_tokens cuts a micro-batch into tiles, and experts take the rows of a whole one; leave it out",
        );
    }
    Ok(())
}

/// Why nothing is chosen for a rank's step, where that is so.
pub fn not_chosen(config: &Config) -> Option<&'static str> {
    let parallel = &config.parallel;
    let has_parts = parallel.parts() > parallel.context;
    let in_stages = (parallel.pipeline > 1).then_some(NOT_IN_STAGES);
    in_stages.or(has_parts.then_some(NOT_IN_PARTS))
}

const NOT_IN_PARTS: &str = "--recompute auto counts the activations of one part of each sequence, and --context-parts gives a rank \
                            several; write --recompute full, or a list of labels, or take one part a rank (--context-parts as --cp)";

const NOT_IN_STAGES: &str = "--recompute auto compares steps of whole models, and --pp gives each rank a stage of one; write \
                                 --recompute full, or a list of labels, or take --pp 1";

/// Refuses an automatic choice without anything to choose by, and what it would decide itself.
fn automatic(config: &Config) -> Result {
    let Config {
        recompute, memory, ..
    } = config;
    if !config.chooses() {
        return Ok(());
    }
    if let Some(reason) = not_chosen(config) {
        return refused(reason);
    }
    if memory.budget.is_none() && memory.limit.is_none() {
        return refused(
            "--recompute auto needs to know what the peak may be; add --memory-budget SIZE, such as 60GiB",
        );
    }
    if !recompute.layers.is_empty() {
        return refused(
            "--recompute auto decides for every layer itself; leave recompute.layers out, or write a policy of your own \
             without auto",
        );
    }
    if !["none", AUTO].contains(&config.offload.activations.trim()) {
        return refused(
            "--recompute auto decides for every label itself; make offload.activations none, or auto to let it offload",
        );
    }
    Ok(())
}

/// Refuses shapes whose sizes would overflow.
fn sizes(config: &Config) -> Result {
    let (model, batch) = (&config.model, &config.batch);
    let product = |sizes: &[usize]| sizes.iter().map(|size| *size as f64).product::<f64>();
    let rows = product(&[batch.micro, config.data.seq]);
    // First the sizes that the model's structure is made with.
    let widths = [
        &[model.heads, model.head_dim][..],
        &[3, model.hidden],
        &[model.ffn],
        &[model.vocab],
    ];
    let mut largest = widths.map(product).into_iter().fold(0.0, f64::max);
    if largest <= MOST_ELEMENTS {
        model.check_extent()?;
        model.check_blocks()?;
        // One block for each run of equal blocks.
        let blocks = model.blocks();
        let runs: Vec<_> = blocks.chunk_by(Rc::ptr_eq).collect();
        let firsts: Vec<_> = runs.iter().map(|run| run[0].clone()).collect();
        let architecture =
            Architecture::of_blocks(model, &firsts, attention(config), Parameters::default());
        let elements = |parameter: &Parameter| match parameter.part {
            Layer::Block(run) => product(&parameter.shape) * runs[run].len() as f64,
            _ => product(&parameter.shape),
        };
        let parameters = architecture.parameters.in_layout().map(elements).sum();
        let activations = architecture.blocks.iter().map(|block| {
            let extents = block.activations();
            let elements = extents.map(|(_, extent)| extent.elements(batch.micro, config.data.seq));
            elements.sum::<f64>()
        });
        let activations = activations.fold(0.0, f64::max);
        let logits = rows * model.vocab as f64;
        let tokens = rows * batch.accum as f64;
        largest = [parameters, activations + logits, tokens]
            .into_iter()
            .fold(0.0, f64::max);
    }
    if largest > MOST_ELEMENTS {
        return refused(
            "the model or its batch is larger than any machine holds; check the sizes in model.*, \
             data.seq, batch.micro and batch.accum",
        );
    }
    let of_all = rows * product(&[config.data.seq, model.heads, model.head_dim]);
    if of_all / config.parallel.context.max(1) as f64 > MOST_OF_SCORES {
        return refused(
            "attention over so many tokens takes more operations than are counted; take a smaller data.seq or batch.micro, or a larger \
             --cp",
        );
    }
    Ok(())
}
