//! Products in eight bits as a configuration describes them, and what does not go with them.

use super::choices::{FloatType, Fp8Gradients, Fp8Recipe, Fp8Weights};
use super::error::refused;
use super::keys::Fp8Config;
use super::schema::Config;
use crate::Result;
use kernels::ScaledMatmul;
use kernels::cuda::PRODUCT_ELEMENTS_MAX;
use kernels::fp8::Fp8;
use model::{BlockSpec, Fp8Products, NamePatterns, Parameters};
use std::collections::BTreeSet;

impl Default for Fp8Config {
    fn default() -> Fp8Config {
        Fp8Config {
            recipe: Fp8Recipe::Off,
            gradients: Fp8Gradients::E5m2,
            except: Vec::new(),
            save: true,
            weights: Fp8Weights::Use,
            fast_accumulation: false,
        }
    }
}

impl Fp8Config {
    /// The products that blocks compute in FP8; none if they compute none.
    pub(crate) fn products(&self) -> Option<Fp8Products> {
        (self.recipe != Fp8Recipe::Off).then(|| Fp8Products {
            gradients: match self.gradients {
                Fp8Gradients::E5m2 => Fp8::E5m2,
                Fp8Gradients::E4m3 => Fp8::E4m3,
            },
            except: NamePatterns::new(&self.except),
            saves_codes: self.save,
            keeps_weights: self.weights == Fp8Weights::Step,
            fast_accumulation: self.fast_accumulation,
        })
    }
}

/// Refuses what is not built, and what does not go with products in FP8.
pub(crate) fn check(config: &Config) -> Result {
    let fp8 = &config.fp8;
    match fp8.recipe {
        Fp8Recipe::Off => return Ok(()),
        Fp8Recipe::Tensor => {}
        Fp8Recipe::Rowwise | Fp8Recipe::Block => {
            return refused(format!(
                "fp8.recipe is {}, and scales for rows or blocks are not built. Scales here are powers of two, so they would only save values \
                 far below their tensor's largest; fp8_underflows in metrics.jsonl says how many are lost. Take --fp8 tensor",
                fp8.recipe
            ));
        }
    }
    if config.lora.rank.is_some() {
        return refused(
            "--fp8 is for trained matrices, and --lora freezes them; leave one of the two out (--base-dtype 8bit makes the frozen \
             model smaller)",
        );
    }
    if config.has_pairs() {
        return refused(
            "--objective dpo compares the model with its reference, whose losses are made in bf16, so rewards would not begin at 0 with \
             --fp8; leave one of the two out",
        );
    }
    if config.has_policy() {
        return refused(
            "--objective policy compares the model with log-probabilities that are made in bf16, so ratios would not begin at 1 with \
             --fp8; leave one of the two out",
        );
    }
    if config.memory.tile_tokens.is_some() {
        return refused(
            "memory.tile_tokens cuts a micro-batch into tiles, and the scale of FP8 is one for the whole; leave --fp8 or the tiles out",
        );
    }
    Ok(())
}

/// Refuses a model with products that no GPU computes in FP8.
pub(crate) fn check_model(config: &Config) -> Result {
    if config.fp8.recipe == Fp8Recipe::Off {
        return Ok(());
    }
    let widths = config
        .model
        .blocks()
        .into_iter()
        .flat_map(|block| widths(config, &block));
    let mut odd = widths.filter(|(_, width)| !width.is_multiple_of(ScaledMatmul::MULTIPLE));
    match odd.next() {
        None => Ok(()),
        Some((what, width)) => refused(format!(
            "{what} is {width}, and products in FP8 have widths that are multiples of {}; change it, or leave --fp8 out",
            ScaledMatmul::MULTIPLE
        )),
    }
}

/// The widths of a block's products in FP8, and what makes them.
fn widths(config: &Config, block: &BlockSpec) -> Vec<(&'static str, usize)> {
    let attention = &block.attention;
    let mut widths = vec![("model.hidden", config.model.hidden)];
    if let Some(delta) = &block.delta {
        let of_heads = delta.value_heads * (1 + usize::from(delta.by_key_head));
        widths.extend([
            (
                "model.delta.value_heads times value_head_dim",
                delta.value_width(),
            ),
            (
                "the width of queries, keys and values of model.delta",
                delta.mixed_width(),
            ),
            ("the number of gates of model.delta's heads", of_heads),
        ]);
    } else {
        widths.push((
            "the width of attention's output (heads times the width of a head)",
            attention.o_width(),
        ));
    }
    if attention.latent.is_none() && block.delta.is_none() {
        let [keys, values] = attention.kv_widths();
        let of_heads = "model.kv_heads times the width of a head";
        widths.extend([
            ("model.heads times the width of a head", attention.q_width()),
            (of_heads, keys),
            (of_heads, values),
        ]);
    }
    if block.experts.is_none() {
        widths.push(("model.ffn", block.feed_forward.width));
    }
    widths
}

/// Refuses f32, once the device is known that decides it, and more tokens than a product may have outputs. One product computes all
/// matrices of a layer in FP8, so it cannot be split to fit.
pub(crate) fn check_step(config: &Config) -> Result {
    if config.fp8.recipe == Fp8Recipe::Off {
        return Ok(());
    }
    if config.dtype() == FloatType::F32 {
        return refused(
            "--fp8 needs a model that computes in bf16, and this one computes in f32; add --dtype bf16, or leave --fp8 out",
        );
    }
    let outputs = config.model.blocks().into_iter().map(|block| {
        let attention = &block.attention;
        let of_mixer = match &block.delta {
            Some(delta) => delta.projected_width(),
            None => attention.q_outputs() + attention.kv_widths().iter().sum::<usize>(),
        };
        of_mixer.max(2 * block.feed_forward.width)
    });
    let (outputs, tokens) = (
        outputs.max().unwrap_or(1),
        config.batch.micro * config.part_seq(),
    );
    let most = PRODUCT_ELEMENTS_MAX / outputs;
    match tokens <= most {
        true => Ok(()),
        false => refused(format!(
            "a micro-batch has {tokens} tokens, and with --fp8 one product makes up to {outputs} numbers of each, of which cuBLASLt \
             takes 2^31; make --micro-batch or --seq smaller, for at most {most} tokens, or leave --fp8 out"
        )),
    }
}

/// Refuses an exception that fits no product in FP8, and exceptions that leave none.
pub(crate) fn check_exceptions(fp8: &Fp8Products, parameters: &Parameters) -> Result {
    let matrices = parameters.fp8_candidates();
    if let Some(pattern) = fp8.except.unfit(matrices.clone()).next() {
        return refused(format!(
            "fp8.except has `{pattern}`, which fits no matrix with products in FP8; those are {}",
            in_all_blocks(matrices)
        ));
    }
    match parameters.has_fp8() {
        true => Ok(()),
        false => refused(
            "no product is left for --fp8: fp8.except or train.freeze fits a matrix of each; make a pattern narrower, or leave --fp8 \
             out",
        ),
    }
}

/// Names with `*` for the number of the block, each once, and the numbers.
fn in_all_blocks<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let (mut of_blocks, mut numbers) = (Vec::new(), BTreeSet::new());
    for name in names {
        let parts = name.split('.').map(|part| match part.parse::<usize>() {
            Ok(number) => {
                numbers.insert(number);
                "*"
            }
            Err(_) => part,
        });
        let name = parts.collect::<Vec<_>>().join(".");
        if !of_blocks.contains(&name) {
            of_blocks.push(name);
        }
    }
    match (numbers.first(), numbers.last()) {
        (Some(first), Some(last)) => {
            format!("{}, in blocks {first} to {last}", of_blocks.join(", "))
        }
        _ => "none, since all are frozen (train.freeze)".into(),
    }
}
