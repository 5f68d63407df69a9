//! The estimate of activation memory that the field goes by (Korthikanti et al. 2022), beside what is kept here.

use crate::activations::{PlannedActivation, total_bytes};
use crate::formulas::Formula;
use memory::{DType, round_up};
use model::{Attention, Label, ModelConfig, NormKind};
use settings::Settings;

/// What is kept of a layer under the estimate.
#[derive(Clone, Copy, PartialEq)]
enum KeptActivations {
    Everything,
    AllButScores,
    BlockInputs,
}

/// The estimates without recompute, with selective and with full recompute, in 16 bits, for one micro-batch.
pub(crate) fn korthikanti(settings: &Settings, activations: &[PlannedActivation]) -> Vec<Formula> {
    let config = &settings.model;
    let tokens = settings.own_seq() * settings.micro_batch;
    let layers = config.layers as f64;
    let sbh = (tokens * config.hidden) as f64;
    let scores = 5.0 * (tokens * config.heads * settings.seq) as f64;
    let of_label = |label| total_bytes(activations, label).all;
    let (all, core) = (of_label(None), of_label(Some(Label::CORE_ATTN)));
    let estimate = |kept, name, formula, bytes: f64, plan_bytes| Formula {
        name,
        formula,
        bytes: (layers * bytes) as u64,
        plan_bytes,
        difference: match config.norm {
            NormKind::Layer => exact(settings, kept, activations),
            NormKind::Rms => in_words(settings, kept),
        },
    };
    vec![
        estimate(
            KeptActivations::Everything,
            "activations, all kept (Korthikanti et al. 2022)",
            "L s b h (34 + 5 a s / h)",
            34.0 * sbh + scores,
            all,
        ),
        estimate(
            KeptActivations::AllButScores,
            "activations, selective recompute (Korthikanti et al. 2022)",
            "34 L s b h",
            34.0 * sbh,
            all - core,
        ),
        estimate(
            KeptActivations::BlockInputs,
            "activations, full recompute (Korthikanti et al. 2022)",
            "2 L s b h",
            2.0 * sbh,
            of_label(Some(Label::BLOCK_INPUT)),
        ),
    ]
}

/// Why a Llama layer differs from the GPT layer that is estimated.
fn in_words(settings: &Settings, kept: KeptActivations) -> String {
    let config = &settings.model;
    let mut reasons = vec![];
    if kept == KeptActivations::Everything && !settings.attention.stores_scores() {
        reasons.push("it counts stored scores, which flash attention does not have".into());
    }
    if kept != KeptActivations::BlockInputs {
        reasons.push(
            "it counts a GPT layer with dropout masks and a feed-forward width of 4 h".to_string(),
        );
        reasons.push(feed_forward(config));
        if config.latent.is_some() {
            reasons.push("queries, keys and values come from latents, which are kept too".into());
        }
        if config.kv_heads < config.heads {
            reasons.push(format!(
                "{} key-value heads for {} query heads",
                config.kv_heads, config.heads
            ));
        }
    }
    if settings.dtype == DType::F32 {
        reasons.push("f32 takes twice the bytes".into());
    }
    if kept == KeptActivations::BlockInputs {
        reasons.push("the plan's figure is the block inputs".into());
    }
    reasons.join("; ")
}

/// What is kept of a feed-forward layer, or of the experts in its place.
fn feed_forward(config: &ModelConfig) -> String {
    let of_hidden = |width: usize| width as f64 / config.hidden as f64;
    let dense = format!("gate, up and act of {:.2} h each", of_hidden(config.ffn));
    let Some(experts) = &config.experts else {
        return format!("here {dense} and no masks");
    };
    let shared = match experts.shared_ffn {
        0 => String::new(),
        width => format!(", of shared experts {:.2} h", of_hidden(width)),
    };
    let others = match experts.dense_layers.len() {
        0 => String::new(),
        count => format!(", in {count} dense layers {dense}"),
    };
    format!(
        "here the input (h), gate, up and act ({:.2} h) of each of {} experts that a token is sent to{shared}{others}, and no masks",
        of_hidden(experts.ffn),
        experts.chosen
    )
}

/// Every difference of a GPT-2 layer from the estimate, in bytes over all layers.
fn exact(settings: &Settings, kept: KeptActivations, activations: &[PlannedActivation]) -> String {
    let differences = differences(settings, kept, activations).into_iter();
    let told = differences.filter(|(bytes, _)| *bytes != 0);
    let reasons: Vec<String> = told
        .map(|(bytes, why)| format!("{bytes:+} bytes: {why}"))
        .collect();
    match reasons.is_empty() {
        true => "none: the plan has the same bytes".into(),
        false => reasons.join("; "),
    }
}

/// The type of activations that are kept as codes.
const CODES: &str = DType::F8E4M3.as_str();

/// Bytes that the plan has more than the estimate, or less, and why. They add up to the whole difference.
fn differences(
    settings: &Settings,
    kept: KeptActivations,
    activations: &[PlannedActivation],
) -> Vec<(i64, &'static str)> {
    let config = &settings.model;
    let of_layers = |bytes: usize| (bytes * config.layers) as i64;
    let tokens = settings.own_seq() * settings.micro_batch;
    let scores = config.heads * settings.seq * tokens;
    let is_kept = |activation: &&PlannedActivation| match kept {
        KeptActivations::Everything => true,
        KeptActivations::AllButScores => activation.label != Label::CORE_ATTN.name(),
        KeptActivations::BlockInputs => activation.label == Label::BLOCK_INPUT.name(),
    };
    let kept_here = || activations.iter().filter(is_kept);
    let elements = |activation: &PlannedActivation| activation.shape.iter().product::<usize>();
    let unrounded = |activation: &PlannedActivation| {
        let size = match activation.dtype {
            codes if codes == CODES => 1,
            "bf16" => 2,
            _ => 4,
        };
        (elements(activation) * size) as u64
    };
    let rounding = |activation: &PlannedActivation| {
        let bytes = unrounded(activation);
        (round_up(bytes) - bytes) as i64
    };
    let wide = match settings.dtype {
        DType::F32 => {
            let is_statistic = |name| ["mean1", "rstd1", "mean2", "rstd2", "lse"].contains(&name);
            let tensors = kept_here().filter(|activation| !is_statistic(activation.name));
            tensors
                .map(|activation| 2 * elements(activation) as i64)
                .sum()
        }
        _ => 0,
    };
    let codes = kept_here().filter(|activation| activation.dtype == CODES);
    let codes = codes.map(|activation| -(elements(activation) as i64)).sum();
    let mut differences = vec![
        (wide, "f32 takes twice the bytes"),
        (codes, "codes of FP8 take half the bytes"),
        (kept_here().map(rounding).sum(), "leases are rounded up"),
    ];
    if kept != KeptActivations::BlockInputs {
        let feed_forward = 4 * (config.ffn as i64 - 4 * config.hidden as i64) * tokens as i64;
        differences.extend([
            (
                -of_layers(2 * tokens * config.hidden),
                "the masks of both residual dropouts are made again from their keys",
            ),
            (
                of_layers(16 * tokens),
                "mean and deviation of both norms are kept, in f32",
            ),
            (
                feed_forward * config.layers as i64,
                "the feed-forward width is not 4 h",
            ),
        ]);
    }
    if kept == KeptActivations::Everything {
        match settings.attention {
            Attention::Eager => differences.push((
                -of_layers(3 * scores),
                "the mask of the probabilities and their dropped copy are made again, not kept",
            )),
            _ => differences.extend([
                (-of_layers(5 * scores), "flash attention stores no scores"),
                (
                    of_layers(4 * config.heads * tokens),
                    "it keeps a log-sum-exp for each query",
                ),
            ]),
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Plan;
    use kernels::Target;
    use settings::Config;

    const GPT2: &str = "model.hidden=96 model.layers=3 model.heads=4 model.kv_heads=4 model.head_dim=24 model.ffn=384 \
        model.tie_embeddings=true model.norm=layer model.activation=gelu_tanh model.positions=learned \
        model.max_positions=256 model.biases=true model.dropout=0.1 train.device=cuda data.seq=256 batch.micro=2";

    fn formulas_and_differences(changes: &str) -> Vec<(Formula, Vec<(i64, &'static str)>)> {
        let words = GPT2.split_whitespace().chain(changes.split(' '));
        let set: Vec<String> = words.map(String::from).collect();
        let config = Config::default().with(&set).unwrap();
        let settings = Settings::new(&config).unwrap();
        let plan = Plan::new(&settings, Target::Cuda).unwrap();
        let kinds = [
            KeptActivations::Everything,
            KeptActivations::AllButScores,
            KeptActivations::BlockInputs,
        ];
        let named = kinds.map(|kept| differences(&settings, kept, &plan.activations));
        let formulas = korthikanti(&settings, &plan.activations);
        formulas.into_iter().zip(named).collect()
    }

    #[test]
    fn every_difference_of_a_gpt_2_is_named() {
        for attention in ["eager", "flash"] {
            for dtype in ["bf16", "f32", "bf16 fp8.recipe=tensor"] {
                for (odd, is_even) in [
                    ("", true),
                    (" model.ffn=304 data.seq=77 batch.micro=3", false),
                ] {
                    let changes = format!("attention.backend={attention} train.dtype={dtype}{odd}");
                    for (formula, named) in formulas_and_differences(&changes) {
                        let sum: i64 = named.iter().map(|(bytes, _)| bytes).sum();
                        let whole = formula.plan_bytes as i64 - formula.bytes as i64;
                        assert_eq!(sum, whole, "{changes}: {}", formula.name);
                        assert!(named[2].0 == 0 || !is_even, "{changes}: {named:?}");
                    }
                }
            }
        }
    }

    /// The published figures, for a layer with stored scores in 16 bits.
    #[test]
    fn full_recompute_is_the_estimate_to_the_byte() {
        let all = formulas_and_differences("attention.backend=eager train.dtype=bf16");
        let [none, selective, full] = all.try_into().ok().unwrap();
        assert_eq!(full.0.plan_bytes, full.0.bytes);
        let (tokens, hidden, layers) = (512, 96, 3);
        let masks = -2 * tokens * hidden * layers;
        let scores = -3 * 4 * 256 * tokens * layers;
        let statistics = 16 * tokens * layers;
        let whole = |formula: &Formula| formula.plan_bytes as i64 - formula.bytes as i64;
        assert_eq!(whole(&selective.0), masks + statistics);
        assert_eq!(whole(&none.0), masks + statistics + scores);
    }
}
