//! Operations on rows of experts.

use super::{Signature, argument};
use crate::device::Device;
use kernels::{
    ExpertRows, GroupedGradient, GroupedMatmul, Init, SumRows, Target, WeighedSwiglu,
    WeighedSwigluBackward,
};
use memory::{DType, In};

fn of_tokens<'a>(x: In<'a>, row_token: In<'a>) -> ExpertRows<'a> {
    ExpertRows {
        x,
        row_token: Some(row_token),
    }
}

pub fn signatures(dtype: DType, device: &Device) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let table = |name, dims: &[usize]| argument(name, DType::I32, dims);
    // Rows in order take no scratch. 3 rows of tokens do where they are gathered: `width` is that of all tables' rows together.
    let target = device.kernels.target();
    let scratch = |width: usize| {
        let is_gathered = target == Target::Cpu && dtype == DType::F32;
        argument(
            "scratch",
            DType::F32,
            &[if is_gathered { 3 * width } else { 0 }],
        )
    };
    vec![
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
            outs: vec![real("out", &[3, 6]), scratch(0)],
            ins: vec![
                real("x", &[3, 5]),
                real("weights", &[3, 6, 5]),
                table("offsets", &[4]),
            ],
            call: |kernels, outs, ins| {
                let [out, scratch] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(GroupedMatmul {
                    out: out.reborrow(),
                    scratch: scratch.reborrow(),
                    rows: ExpertRows::in_order(ins[0]),
                    weights: ins[1],
                    by_columns: false,
                    offsets: ins[2],
                })
            },
        },
        Signature {
            operation: "grouped_matmul",
            outs: vec![real("out", &[3, 6]), scratch(5)],
            ins: vec![
                real("x", &[2, 5]).free_dim(0),
                table("row_token", &[3]),
                real("weights", &[3, 5, 6]),
                table("offsets", &[4]),
            ],
            call: |kernels, outs, ins| {
                let [out, scratch] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(GroupedMatmul {
                    out: out.reborrow(),
                    scratch: scratch.reborrow(),
                    rows: of_tokens(ins[0], ins[1]),
                    weights: ins[2],
                    by_columns: true,
                    offsets: ins[3],
                })
            },
        },
        Signature {
            operation: "grouped_gradient",
            outs: vec![float("out", &[3, 6, 5]).free_type(), scratch(0)],
            ins: vec![
                real("dy", &[3, 6]),
                real("x", &[3, 5]),
                table("offsets", &[4]),
            ],
            call: |kernels, outs, ins| {
                let [out, scratch] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(GroupedGradient {
                    out: out.reborrow(),
                    scratch: scratch.reborrow(),
                    dy: ExpertRows::in_order(ins[0]),
                    rows: ExpertRows::in_order(ins[1]),
                    offsets: ins[2],
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "grouped_gradient",
            outs: vec![float("out", &[3, 6, 5]).free_type(), scratch(11)],
            ins: vec![
                real("dy", &[2, 6]).free_dim(0),
                table("row_token", &[3]),
                real("x", &[4, 5]).free_dim(0),
                table("row_token", &[3]),
                table("offsets", &[4]),
            ],
            call: |kernels, outs, ins| {
                let [out, scratch] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(GroupedGradient {
                    out: out.reborrow(),
                    scratch: scratch.reborrow(),
                    dy: of_tokens(ins[0], ins[1]),
                    rows: of_tokens(ins[2], ins[3]),
                    offsets: ins[4],
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
