//! The stages of experts in a block.

use crate::hugging_face::ExpertNames;
use crate::parameters::{ExpertFiles, Initial, PartParameters};
use crate::stages::{
    ExpertActivation, ExpertLinear, ExpertsDown, ExpertsUp, NormStage, Projection,
    ResidualProjection, RouterChoice, RouterTables,
};
use crate::{Activation, ExpertsConfig, Family, Linear, ModelConfig, Stage};

const H2: Activation = NormStage::H2;
const X2: Activation = ResidualProjection::X2;

/// The router, the experts that it chooses, and the shared ones. Parameters have the names that transformers gives them.
pub(super) fn stages(
    hidden: usize,
    experts: &ExpertsConfig,
    names: ExpertNames,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let (ffn, count, choices) = (experts.ffn, experts.count, experts.chosen);
    let ExpertNames { module, up, down } = names;
    let files = |end, parts| ExpertFiles { end, module, parts };
    let up = files("mlp.experts.gate_up_proj", up);
    let down = files("mlp.experts.down_proj", down);
    let mut stages = router(hidden, experts, module, own);
    stages.push(Box::new(ExpertsUp {
        linear: ExpertLinear::declare(own, up.end, [count, 2 * ffn, hidden], up),
        input: H2,
        choices,
    }));
    stages.push(Box::new(ExpertActivation {
        name: "moe_act",
        input: ExpertsUp::GATE_UP,
        output: ExpertActivation::ACT,
        weights: Some((RouterChoice::WEIGHTS, Some(RouterTables::ROW_SLOT))),
        choices,
        width: ffn,
    }));
    let linear = ExpertLinear::declare(own, down.end, [count, hidden, ffn], down);
    stages.extend(shared_experts(hidden, experts, own));
    let shared = (experts.shared_ffn > 0).then(|| {
        let name = format!("{}.down_proj", shared_name(experts));
        Linear::declare(own, &name, [hidden, experts.shared_ffn], false)
    });
    stages.push(Box::new(ExpertsDown {
        linear,
        shared,
        residual: X2,
        choices,
    }));
    stages
}

/// The router: its logits, its choice of experts, and the tables of each one's rows.
fn router(
    hidden: usize,
    experts: &ExpertsConfig,
    module: &str,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let count = experts.count;
    let gate = format!("{module}.gate");
    vec![
        Box::new(Projection {
            name: "moe_router",
            input: H2,
            output: RouterChoice::LOGITS,
            linear: Linear::declare(&mut own.without_adapters(), &gate, [count, hidden], false),
            in_f32: true,
        }),
        Box::new(RouterChoice {
            name: "moe_choice",
            logits: RouterChoice::LOGITS,
            weights: RouterChoice::WEIGHTS,
            ids: RouterChoice::IDS,
            experts: count,
            routing: experts.routing(),
            bias: experts.choice_bias.then(|| {
                let name = format!("{gate}.e_score_correction_bias");
                own.buffer(&name, &[count], Initial::Zero)
            }),
            is_router: true,
        }),
        Box::new(RouterTables {
            experts: count,
            choices: experts.chosen,
        }),
    ]
}

/// How files name a model's experts.
pub(super) fn names(config: &ModelConfig) -> ExpertNames {
    match (&config.experts, config.family) {
        (None, _) => ExpertNames::USUAL,
        (Some(_), Some(family)) => family.experts(),
        (Some(_), None) => Family::expert_names_of(config),
    }
}

/// Qwen2-MoE has one shared expert, and DeepSeek several, which are one matrix in its files too.
fn shared_name(experts: &ExpertsConfig) -> &'static str {
    match experts.shared_gate {
        true => "mlp.shared_expert",
        false => "mlp.shared_experts",
    }
}

/// The shared experts, up to their activation, and their gate.
fn shared_experts(
    hidden: usize,
    experts: &ExpertsConfig,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let width = experts.shared_ffn;
    if width == 0 {
        return Vec::new();
    }
    let mut stages: Vec<Box<dyn Stage>> = Vec::new();
    if experts.shared_gate {
        stages.push(Box::new(Projection {
            name: "shared_gate",
            input: H2,
            output: RouterChoice::SHARED_LOGITS,
            linear: Linear::declare(
                &mut own.without_adapters(),
                "mlp.shared_expert_gate",
                [1, hidden],
                false,
            ),
            in_f32: true,
        }));
        stages.push(Box::new(RouterChoice {
            name: "shared_weight",
            logits: RouterChoice::SHARED_LOGITS,
            weights: RouterChoice::SHARED_WEIGHTS,
            ids: RouterChoice::SHARED_IDS,
            experts: 1,
            routing: ExpertsConfig::GATE,
            bias: None,
            is_router: false,
        }));
    }
    let parts = ["gate_proj", "up_proj"].map(|part| format!("{}.{part}", shared_name(experts)));
    let parts = parts.iter().map(|name| (name.as_str(), width));
    stages.push(Box::new(Projection {
        name: "shared_up",
        input: H2,
        output: ExpertActivation::SHARED_GATE_UP,
        linear: Linear::declare_together(own, parts, hidden, false),
        in_f32: false,
    }));
    let weights = experts
        .shared_gate
        .then_some((RouterChoice::SHARED_WEIGHTS, None));
    stages.push(Box::new(ExpertActivation {
        name: "shared_act",
        input: ExpertActivation::SHARED_GATE_UP,
        output: ExpertActivation::SHARED_ACT,
        weights,
        choices: 1,
        width,
    }));
    stages
}
