//! The stages of experts in a block.

use crate::hugging_face::{ExpertNames, ExpertTensors};
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::stages::{
    ExpertActivation, ExpertLinear, ExpertsDown, ExpertsUp, NormStage, Projection,
    ResidualProjection, RouterChoice, RouterTables,
};
use crate::stored::{ExpertFiles, Stored};
use crate::{Activation, ExpertsConfig, Family, Linear, ModelConfig, Stage};
use kernels::operation::GateFunction;

const H2: Activation = NormStage::H2;
const X2: Activation = ResidualProjection::X2;

/// The router, the experts that it chooses, and the shared ones. Parameters have the names that transformers gives them.
pub(super) fn stages(
    hidden: usize,
    (experts, gate): (&ExpertsConfig, GateFunction),
    names: ExpertNames,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let (ffn, count, choices) = (experts.ffn, experts.count, experts.chosen);
    let mut stages = router(hidden, experts, names.router, own);
    let shape = [count, 2 * ffn, hidden];
    let (linear, up_bias) = declare_product(own, UP, shape, (experts, names.tensors));
    stages.push(Box::new(ExpertsUp {
        linear,
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
        gate,
        bias: up_bias,
    }));
    let shape = [count, hidden, ffn];
    let (linear, bias) = declare_product(own, DOWN, shape, (experts, names.tensors));
    stages.extend(shared_experts(hidden, (experts, gate), own));
    let shared = (experts.shared_ffn > 0).then(|| {
        let name = format!("{}.down_proj", shared_name(experts));
        Linear::declare(own, &name, [hidden, experts.shared_ffn], false)
    });
    stages.push(Box::new(ExpertsDown {
        linear,
        shared,
        residual: X2,
        choices,
        bias,
    }));
    stages
}

const UP: &str = "mlp.experts.gate_up_proj";
const DOWN: &str = "mlp.experts.down_proj";

/// The product `name` of every expert, with its bias if they have biases.
fn declare_product(
    own: &mut PartParameters,
    name: &'static str,
    shape: [usize; 3],
    (experts, tensors): (&ExpertsConfig, ExpertTensors),
) -> (ExpertLinear, Option<ParameterId>) {
    let [count, outputs, _] = shape;
    let files = match tensors {
        ExpertTensors::ByExpert { module, up, down } => {
            let parts = if name == UP { up } else { down };
            let end = name;
            Stored::ByExpert(ExpertFiles { end, module, parts })
        }
        ExpertTensors::Interleaved => Stored::ExpertsTransposed {
            is_interleaved: name == UP,
        },
    };
    let bias = experts.biases.then(|| {
        let shape = [count, outputs];
        own.expert_vectors(&format!("{name}_bias"), shape, name == UP)
    });
    (ExpertLinear::declare(own, name, shape, files), bias)
}

/// The router: its logits, its choice of experts, and the tables of each one's rows.
fn router(
    hidden: usize,
    experts: &ExpertsConfig,
    name: &str,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let count = experts.count;
    let shape = [count, hidden];
    vec![
        Box::new(Projection {
            name: "moe_router",
            input: H2,
            output: RouterChoice::LOGITS,
            linear: Linear::declare(&mut own.without_adapters(), name, shape, experts.biases),
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
                let name = format!("{name}.e_score_correction_bias");
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
    (experts, gate): (&ExpertsConfig, GateFunction),
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
        gate,
        bias: None,
    }));
    stages
}
