//! Codes of FP8, and their products.

use super::{Signature, argument};
use kernels::{AbsMax, Init, Quantise, QuantiseTransposed, ScaledMatmul, TransposeCodes};
use memory::DType;

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name| argument(name, DType::F32, &[1]);
    let codes = |name, dims: &[usize]| argument(name, DType::F8E4M3, dims);
    let mut signatures = vec![
        Signature {
            operation: "abs_max",
            outs: vec![float("out")],
            ins: vec![real("x", &[4, 6]).free_type().free_rank()],
            call: |kernels, outs, ins| {
                kernels.run(AbsMax {
                    out: outs[0].reborrow(),
                    x: ins[0],
                })
            },
        },
        Signature {
            operation: "quantise",
            outs: vec![
                codes("codes", &[4, 6]),
                float("scale"),
                argument("underflows", DType::F32, &[3, 1])
                    .free_dim(0)
                    .free_layout(),
            ],
            ins: vec![real("x", &[4, 6]).free_type(), float("largest")],
            call: |kernels, outs, ins| {
                let [codes, scale, underflows] = outs else {
                    unreachable!()
                };
                kernels.run(Quantise {
                    codes: codes.reborrow(),
                    scale: scale.reborrow(),
                    underflows: Some(underflows.reborrow()),
                    x: ins[0],
                    largest: ins[1],
                })
            },
        },
        Signature {
            operation: "quantise_transposed",
            outs: vec![codes("codes", &[32, 16]), float("scale")],
            ins: vec![
                real("x", &[7, 32]).free_type().free_dim(0),
                float("largest"),
            ],
            call: |kernels, outs, ins| {
                let [codes, scale] = outs else { unreachable!() };
                kernels.run(QuantiseTransposed {
                    codes: codes.reborrow(),
                    scale: scale.reborrow(),
                    x: ins[0],
                    largest: ins[1],
                })
            },
        },
        Signature {
            operation: "transpose_codes",
            outs: vec![codes("out", &[32, 16])],
            ins: vec![codes("x", &[7, 32]).free_dim(0)],
            call: |kernels, outs, ins| {
                kernels.run(TransposeCodes {
                    out: outs[0].reborrow(),
                    x: ins[0],
                })
            },
        },
    ];
    // Kernels of f32 have no workspace for them.
    if dtype == DType::BF16 {
        signatures.push(Signature {
            operation: "scaled_matmul",
            outs: vec![real("out", &[4, 16])],
            ins: vec![
                codes("a", &[4, 32]),
                codes("b", &[16, 32]),
                float("scale"),
                float("scale"),
                real("init", &[4, 16]),
                real("bias", &[16]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(ScaledMatmul {
                    out: outs[0].reborrow(),
                    a: ins[0],
                    b: ins[1],
                    scales: [ins[2], ins[3]],
                    bias: Some(ins[5]),
                    init: Init::Add(ins[4]),
                    fast_accumulation: false,
                })
            },
        });
    }
    signatures
}
