//! Operations on any tensors.

use super::{Signature, argument};
use kernels::{
    DequantiseBytes, DequantiseNf4, Fill, Gram, Init, Matmul, NormAndClip, NormGrains,
    PreferenceLoss, Sum, SumInOrder,
};
use memory::DType;

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    vec![
        Signature {
            operation: "fill",
            outs: vec![real("out", &[4, 6]).free_type().free_rank()],
            ins: vec![],
            call: |kernels, outs, _| {
                kernels.run(Fill {
                    out: outs[0].reborrow(),
                    value: 1.0,
                })
            },
        },
        Signature {
            operation: "copy",
            outs: vec![real("out", &[4, 6]).free_type()],
            ins: vec![real("x", &[4, 6]).free_type().free_layout()],
            call: |kernels, outs, ins| {
                kernels.run(kernels::Copy {
                    out: outs[0].reborrow(),
                    x: ins[0],
                })
            },
        },
        Signature {
            operation: "matmul",
            outs: vec![real("out", &[4, 6])],
            ins: vec![
                real("a", &[4, 5]).free_type().free_layout(),
                real("b", &[5, 6]).free_type().free_layout(),
                real("init", &[4, 6]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(Matmul {
                    out: outs[0].reborrow(),
                    a: ins[0],
                    b: ins[1],
                    bias: None,
                    init: Init::Add(ins[2]),
                })
            },
        },
        Signature {
            operation: "matmul",
            outs: vec![real("out", &[4, 6])],
            ins: vec![
                real("a", &[4, 5]).free_type().free_layout(),
                real("b", &[5, 6]).free_type().free_layout(),
                real("bias", &[6]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(Matmul {
                    out: outs[0].reborrow(),
                    a: ins[0],
                    b: ins[1],
                    bias: Some(ins[2]),
                    init: Init::Overwrite,
                })
            },
        },
        Signature {
            operation: "dequantise_bytes",
            outs: vec![real("out", &[3, 100]).free_type().free_rank()],
            ins: vec![argument("codes", DType::U8, &[300]), float("absmax", &[2])],
            call: |kernels, outs, ins| {
                kernels.run(DequantiseBytes {
                    out: outs[0].reborrow(),
                    codes: ins[0],
                    absmax: ins[1],
                })
            },
        },
        Signature {
            operation: "dequantise_nf4",
            outs: vec![real("out", &[3, 100]).free_type().free_rank()],
            ins: vec![
                argument("codes", DType::U8, &[150]),
                argument("absmax_codes", DType::U8, &[5]),
                float("absmax", &[1]),
                float("offset", &[1]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(DequantiseNf4 {
                    out: outs[0].reborrow(),
                    codes: ins[0],
                    absmax_codes: ins[1],
                    absmax: ins[2],
                    offset: ins[3],
                })
            },
        },
        Signature {
            operation: "gram",
            outs: vec![real("out", &[4, 4]).free_type()],
            ins: vec![real("x", &[4, 5]).free_dim(1).free_type().free_layout()],
            call: |kernels, outs, ins| {
                kernels.run(Gram {
                    out: outs[0].reborrow(),
                    x: ins[0],
                })
            },
        },
        Signature {
            operation: "sum",
            outs: vec![float("out", &[1])],
            ins: vec![float("x", &[9]).free_dim(0)],
            call: |kernels, outs, ins| {
                kernels.run(Sum {
                    out: outs[0].reborrow(),
                    x: ins[0],
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "preference_loss",
            outs: vec![float("factors", &[6]), float("marks", &[4, 3])],
            ins: vec![
                float("policy", &[6]),
                float("reference", &[6]),
                float("scale", &[1]),
            ],
            call: |kernels, outs, ins| {
                let [factors, marks] = outs else {
                    unreachable!()
                };
                kernels.run(PreferenceLoss {
                    factors: factors.reborrow(),
                    marks: marks.reborrow(),
                    policy: ins[0],
                    reference: ins[1],
                    scale: ins[2],
                    beta: 0.1,
                })
            },
        },
        Signature {
            operation: "sum_in_order",
            outs: vec![real("out", &[6])],
            ins: vec![real("x", &[4, 6]).free_dim(0)],
            call: |kernels, outs, ins| {
                kernels.run(SumInOrder {
                    out: outs[0].reborrow(),
                    x: ins[0],
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "norm_grains",
            outs: vec![argument("grains", DType::F64, &[1])],
            ins: vec![float("x", &[9]).free_dim(0).free_type()],
            call: |kernels, outs, ins| {
                kernels.run(NormGrains {
                    grains: outs[0].reborrow(),
                    x: ins[0],
                })
            },
        },
        Signature {
            operation: "norm_and_clip",
            outs: vec![float("out", &[2])],
            ins: vec![
                argument("grains", DType::F64, &[9]).free_dim(0),
                float("loss", &[1]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(NormAndClip {
                    out: outs[0].reborrow(),
                    grains: ins[0],
                    loss: ins[1],
                    max_norm: Some(1.0),
                })
            },
        },
    ]
}
