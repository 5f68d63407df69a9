//! Operations on rows of experts.

use super::{Signature, argument};
use kernels::{
    GatherRows, GroupedGradient, GroupedMatmul, Init, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};
use memory::DType;

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let table = |name, dims: &[usize]| argument(name, DType::I32, dims);
    vec![
        Signature {
            operation: "gather_rows",
            outs: vec![real("rows", &[8, 6])],
            ins: vec![real("x", &[4, 6]).free_dim(0), table("row_token", &[8])],
            call: |kernels, outs, ins| {
                kernels.run(GatherRows {
                    rows: outs[0].reborrow(),
                    x: ins[0],
                    row_token: ins[1],
                })
            },
        },
        Signature {
            operation: "sum_rows",
            outs: vec![real("out", &[4, 6])],
            ins: vec![
                real("rows", &[8, 6]),
                table("slot_row", &[4, 2]),
                real("init", &[4, 6]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(SumRows {
                    out: outs[0].reborrow(),
                    rows: ins[0],
                    slot_row: ins[1],
                    init: Init::Add(ins[2]),
                })
            },
        },
        Signature {
            operation: "grouped_matmul",
            outs: vec![real("out", &[3, 6])],
            ins: vec![
                real("x", &[3, 5]),
                real("weights", &[3, 6, 5]),
                table("offsets", &[4]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(GroupedMatmul {
                    out: outs[0].reborrow(),
                    x: ins[0],
                    weights: ins[1],
                    by_columns: false,
                    offsets: ins[2],
                })
            },
        },
        Signature {
            operation: "grouped_matmul",
            outs: vec![real("out", &[3, 6])],
            ins: vec![
                real("x", &[3, 5]),
                real("weights", &[3, 5, 6]),
                table("offsets", &[4]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(GroupedMatmul {
                    out: outs[0].reborrow(),
                    x: ins[0],
                    weights: ins[1],
                    by_columns: true,
                    offsets: ins[2],
                })
            },
        },
        Signature {
            operation: "grouped_gradient",
            outs: vec![float("out", &[3, 6, 5]).free_type()],
            ins: vec![
                real("dy", &[3, 6]),
                real("x", &[3, 5]),
                table("offsets", &[4]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(GroupedGradient {
                    out: outs[0].reborrow(),
                    dy: ins[0],
                    x: ins[1],
                    offsets: ins[2],
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "weighed_swiglu",
            outs: vec![real("act", &[4, 6])],
            ins: vec![
                real("gate_up", &[4, 12]),
                float("weights", &[2, 2]).free_rank(),
                table("row_slot", &[4]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(WeighedSwiglu {
                    act: outs[0].reborrow(),
                    gate_up: ins[0],
                    weights: ins[1],
                    row_slot: Some(ins[2]),
                })
            },
        },
        Signature {
            operation: "weighed_swiglu_backward",
            outs: vec![real("gate_up", &[4, 12]), float("dweights", &[2, 2])],
            ins: vec![
                real("dact", &[4, 6]),
                float("weights", &[2, 2]),
                table("row_slot", &[4]),
            ],
            call: |kernels, outs, ins| {
                let [gate_up, dweights] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(WeighedSwigluBackward {
                    gate_up: gate_up.reborrow(),
                    dweights: dweights.reborrow(),
                    dact: ins[0],
                    weights: ins[1],
                    row_slot: Some(ins[2]),
                })
            },
        },
    ]
}
