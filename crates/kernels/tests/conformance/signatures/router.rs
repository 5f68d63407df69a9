//! Routers, and the heads of latent attention.

use super::{Signature, argument};
use kernels::{
    BalanceLoss, CountChoices, ExpandKeys, ExpandKeysBackward, GroupByExpert, Init, Positions,
    RotaryTail, Route, RouteBackward, RouterScore, RouterZLoss, Routing, StepRouterBias,
};
use memory::DType;

const ROUTING: Routing = Routing {
    choices: 2,
    score: RouterScore::Softmax,
    is_normed: true,
    factor: 1.0,
    groups: None,
};

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let mut signatures = of_routers(dtype);
    signatures.extend(of_tables());
    signatures.extend(of_latents(dtype));
    signatures
}

fn of_routers(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let table = |name, dims: &[usize]| argument(name, DType::I32, dims);
    vec![
        Signature {
            operation: "route",
            outs: vec![
                table("ids", &[6, 2]),
                float("weights", &[6, 2]),
                float("scores", &[6, 5]),
            ],
            ins: vec![float("logits", &[6, 5]), float("bias", &[5])],
            call: |kernels, outs, ins| {
                let [ids, weights, scores] = outs else {
                    unreachable!("the signature has three outputs")
                };
                kernels.run(Route {
                    ids: Some(ids.reborrow()),
                    weights: Some(weights.reborrow()),
                    scores: Some(scores.reborrow()),
                    logits: ins[0],
                    bias: Some(ins[1]),
                    routing: ROUTING,
                })
            },
        },
        Signature {
            operation: "route_backward",
            outs: vec![real("dlogits", &[6, 5]).free_type()],
            ins: vec![
                float("dweights", &[6, 2]),
                float("logits", &[6, 5]),
                table("ids", &[6, 2]),
                float("balance", &[3, 5]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(RouteBackward {
                    dlogits: outs[0].reborrow(),
                    dweights: ins[0],
                    logits: ins[1],
                    ids: ins[2],
                    routing: ROUTING,
                    balance: Some(ins[3]),
                    z_loss: Some(0.5),
                })
            },
        },
        Signature {
            operation: "router_z_loss",
            outs: vec![float("losses", &[6])],
            ins: vec![float("logits", &[6, 5]).free_dim(1)],
            call: |kernels, outs, ins| {
                kernels.run(RouterZLoss {
                    losses: outs[0].reborrow(),
                    logits: ins[0],
                    factor: 0.5,
                })
            },
        },
        Signature {
            operation: "step_router_bias",
            outs: vec![float("bias", &[5])],
            ins: vec![float("counts", &[5]), float("clip", &[2])],
            call: |kernels, outs, ins| {
                kernels.run(StepRouterBias {
                    bias: outs[0].reborrow(),
                    counts: ins[0],
                    clip: ins[1],
                    rate: 0.5,
                })
            },
        },
    ]
}

fn of_tables() -> Vec<Signature> {
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let table = |name, dims: &[usize]| argument(name, DType::I32, dims);
    vec![
        Signature {
            operation: "group_by_expert",
            outs: vec![
                table("offsets", &[6]),
                table("row_token", &[12]),
                table("row_slot", &[12]),
                table("slot_row", &[6, 2]),
            ],
            ins: vec![table("ids", &[6, 2])],
            call: |kernels, outs, ins| {
                let [offsets, row_token, row_slot, slot_row] = outs else {
                    unreachable!("the signature has four outputs")
                };
                kernels.run(GroupByExpert {
                    offsets: Some(offsets.reborrow()),
                    row_token: Some(row_token.reborrow()),
                    row_slot: Some(row_slot.reborrow()),
                    slot_row: Some(slot_row.reborrow()),
                    ids: ins[0],
                    experts: 5,
                })
            },
        },
        Signature {
            operation: "count_choices",
            outs: vec![float("counts", &[3, 5]).free_dim(1)],
            ins: vec![table("ids", &[6, 2]).free_dim(1)],
            call: |kernels, outs, ins| {
                kernels.run(CountChoices {
                    counts: outs[0].reborrow(),
                    ids: ins[0],
                })
            },
        },
        Signature {
            operation: "balance_loss",
            outs: vec![float("loss", &[1]), float("gradient", &[4, 5])],
            ins: vec![float("counts", &[4, 5]), float("sums", &[4, 5])],
            call: |kernels, outs, ins| {
                let [loss, gradient] = outs else {
                    unreachable!("the signature has two outputs")
                };
                kernels.run(BalanceLoss {
                    loss: loss.reborrow(),
                    gradient: gradient.reborrow(),
                    counts: ins[0],
                    sums: ins[1],
                    pooled: 2,
                    factor: 0.5,
                    init: Init::Overwrite,
                })
            },
        },
    ]
}

fn of_latents(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    vec![
        Signature {
            operation: "rotary_tail",
            outs: vec![real("x", &[6, 28]).free_type()],
            ins: vec![float("table", &[2, 3, 2]).free_dim(1)],
            call: |kernels, outs, ins| {
                kernels.run(RotaryTail {
                    x: outs[0].reborrow(),
                    head_dim: 4,
                    table: ins[0],
                    positions: Positions::Sequences(3),
                    are_neighbours: true,
                    inverse: false,
                })
            },
        },
        Signature {
            operation: "expand_keys",
            outs: vec![real("k", &[6, 18]), real("v", &[6, 15])],
            ins: vec![real("kv", &[6, 27]), real("k_rotary", &[6, 2])],
            call: |kernels, outs, ins| {
                let [k, v] = outs else {
                    unreachable!("the signature has two outputs")
                };
                kernels.run(ExpandKeys {
                    k: Some(k.reborrow()),
                    v: Some(v.reborrow()),
                    kv: ins[0],
                    k_rotary: ins[1],
                    heads: 3,
                })
            },
        },
        Signature {
            operation: "expand_keys_backward",
            outs: vec![real("dkv", &[6, 27]), real("dk_rotary", &[6, 2])],
            ins: vec![real("dk", &[6, 18]), real("dv", &[6, 15])],
            call: |kernels, outs, ins| {
                let [dkv, dk_rotary] = outs else {
                    unreachable!("the signature has two outputs")
                };
                kernels.run(ExpandKeysBackward {
                    dkv: dkv.reborrow(),
                    dk_rotary: dk_rotary.reborrow(),
                    dk: ins[0],
                    dv: ins[1],
                    heads: 3,
                })
            },
        },
    ]
}
