//! Routers, and latent attention.

use super::{Signature, argument};
use kernels::{
    BalanceLoss, CountChoices, ExpandKeys, ExpandKeysBackward, GroupByExpert, Init, Positions,
    RotaryTail, Route, RouteBackward, RouterGroups, RouterScore, RouterZLoss, Routing,
    StepRouterBias,
};
use memory::DType;

/// Two of six experts, in the best of two groups.
pub const ROUTING: Routing = Routing {
    choices: 2,
    score: RouterScore::Sigmoid,
    is_normed: true,
    factor: 2.5,
    groups: Some(RouterGroups {
        count: 2,
        chosen: 1,
        best: 2,
    }),
};

fn of_routers(dtype: DType) -> Vec<Signature> {
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let table = |name, dims: &[usize]| argument(name, DType::I32, dims);
    vec![
        Signature {
            operation: "route",
            outs: vec![
                table("ids", &[10, 2]),
                float("weights", &[10, 2]),
                float("scores", &[10, 6]),
            ],
            ins: vec![
                float("logits", &[10, 6]),
                float("bias", &[6]),
                // Three sequences are not of equal length.
                table("lengths", &[2]),
            ],
            call: |kernels, outs, ins| {
                let [ids, weights, scores] = outs else {
                    unreachable!("three outputs")
                };
                kernels.run(Route {
                    ids: Some(ids.reborrow()),
                    weights: Some(weights.reborrow()),
                    scores: Some(scores.reborrow()),
                    logits: ins[0],
                    bias: Some(ins[1]),
                    lengths: Some(ins[2]),
                    routing: ROUTING,
                })
            },
        },
        Signature {
            operation: "route_backward",
            outs: vec![argument("dlogits", dtype, &[10, 6]).free_type()],
            ins: vec![
                float("dweights", &[10, 2]),
                float("logits", &[10, 6]),
                table("ids", &[10, 2]),
                float("balance", &[2, 6]),
                table("lengths", &[2]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(RouteBackward {
                    dlogits: outs[0].reborrow(),
                    dweights: ins[0],
                    logits: ins[1],
                    ids: ins[2],
                    routing: ROUTING,
                    balance: Some(ins[3]),
                    z_loss: Some(0.1),
                    lengths: Some(ins[4]),
                })
            },
        },
        Signature {
            operation: "router_z_loss",
            outs: vec![float("losses", &[10])],
            ins: vec![
                float("logits", &[10, 6]).free_dim(1),
                table("lengths", &[2]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(RouterZLoss {
                    losses: outs[0].reborrow(),
                    logits: ins[0],
                    lengths: Some(ins[1]),
                    factor: 0.1,
                })
            },
        },
        Signature {
            operation: "group_by_expert",
            outs: vec![
                table("offsets", &[7]),
                table("row_token", &[20]),
                table("row_slot", &[20]),
                table("slot_row", &[10, 2]),
            ],
            ins: vec![table("ids", &[10, 2])],
            call: |kernels, outs, ins| {
                let [offsets, row_token, row_slot, slot_row] = outs else {
                    unreachable!("four tables")
                };
                kernels.run(GroupByExpert {
                    offsets: Some(offsets.reborrow()),
                    row_token: Some(row_token.reborrow()),
                    row_slot: Some(row_slot.reborrow()),
                    slot_row: Some(slot_row.reborrow()),
                    ids: ins[0],
                    experts: 6,
                })
            },
        },
        Signature {
            operation: "count_choices",
            outs: vec![float("counts", &[2, 6]).free_dim(1)],
            ins: vec![table("ids", &[10, 2]).free_dim(1), table("lengths", &[2])],
            call: |kernels, outs, ins| {
                kernels.run(CountChoices {
                    counts: outs[0].reborrow(),
                    ids: ins[0],
                    lengths: Some(ins[1]),
                })
            },
        },
    ]
}

fn of_balance() -> Vec<Signature> {
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let lengths = argument("lengths", DType::I32, &[2]);
    vec![
        Signature {
            operation: "balance_loss",
            outs: vec![float("loss", &[1]), float("gradient", &[4, 6])],
            ins: vec![float("counts", &[4, 6]), float("sums", &[4, 6]), lengths],
            call: |kernels, outs, ins| {
                let [loss, gradient] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(BalanceLoss {
                    loss: loss.reborrow(),
                    gradient: gradient.reborrow(),
                    counts: ins[0],
                    sums: ins[1],
                    lengths: Some(ins[2]),
                    pooled: 2,
                    factor: 0.1,
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "step_router_bias",
            outs: vec![float("bias", &[6])],
            ins: vec![float("counts", &[6]), float("clip", &[2])],
            call: |kernels, outs, ins| {
                kernels.run(StepRouterBias {
                    bias: outs[0].reborrow(),
                    counts: ins[0],
                    clip: ins[1],
                    rate: 0.001,
                })
            },
        },
    ]
}

fn of_latents(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    vec![
        Signature {
            operation: "rotary_tail",
            outs: vec![real("x", &[10, 10]).free_type()],
            // A head of five has no room for three pairs.
            ins: vec![argument("table", DType::F32, &[2, 7, 2]).free_dim(1)],
            call: |kernels, outs, ins| {
                kernels.run(RotaryTail {
                    x: outs[0].reborrow(),
                    head_dim: 5,
                    table: ins[0],
                    positions: Positions::Sequences(5),
                    are_neighbours: true,
                    inverse: false,
                })
            },
        },
        Signature {
            operation: "expand_keys",
            outs: vec![real("k", &[4, 10]), real("v", &[4, 8])],
            ins: vec![real("kv", &[4, 14]), real("k_rotary", &[4, 2])],
            call: |kernels, outs, ins| {
                let [k, v] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(ExpandKeys {
                    k: Some(k.reborrow()),
                    v: Some(v.reborrow()),
                    kv: ins[0],
                    k_rotary: ins[1],
                    heads: 2,
                })
            },
        },
        Signature {
            operation: "expand_keys_backward",
            outs: vec![real("dkv", &[4, 14]), real("dk_rotary", &[4, 2])],
            ins: vec![real("dk", &[4, 10]), real("dv", &[4, 8])],
            call: |kernels, outs, ins| {
                let [dkv, dk_rotary] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(ExpandKeysBackward {
                    dkv: dkv.reborrow(),
                    dk_rotary: dk_rotary.reborrow(),
                    dk: ins[0],
                    dv: ins[1],
                    heads: 2,
                })
            },
        },
    ]
}

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let mut signatures = of_routers(dtype);
    signatures.extend(of_balance());
    signatures.extend(of_latents(dtype));
    signatures
}
