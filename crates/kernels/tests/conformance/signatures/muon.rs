//! What Muon takes beside products of matrices.

use super::{Signature, argument};
use kernels::{Combine, DivideByNorm, MasterOperand, MomentOperand, Momentum, StepAlong};
use memory::DType;

/// More than a block, and no whole number of them.
const ELEMENTS: usize = 300;
const BLOCKS: usize = 2;

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let any = |name, dims: &[usize]| argument(name, dtype, dims).free_type();
    let key = || argument("key", DType::U32, &[2]);
    vec![
        Signature {
            operation: "momentum",
            outs: vec![
                any("out", &[ELEMENTS]),
                float("momentum", &[ELEMENTS]).free_type(),
            ],
            ins: vec![any("gradients", &[ELEMENTS]), float("clip", &[2]), key()],
            call: |kernels, outs, ins| {
                let [out, momentum] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(Momentum {
                    out: out.reborrow(),
                    momentum: MomentOperand::Plain(momentum.reborrow()),
                    gradients: ins[0],
                    clip: ins[1],
                    key: ins[2],
                    first_index: 512,
                    decay: 0.95,
                    nesterov: true,
                })
            },
        },
        Signature {
            operation: "momentum",
            outs: vec![
                any("out", &[ELEMENTS]),
                argument("momentum.codes", DType::U8, &[ELEMENTS]),
                float("momentum.absmax", &[BLOCKS]),
            ],
            ins: vec![any("gradients", &[ELEMENTS]), float("clip", &[2]), key()],
            call: |kernels, outs, ins| {
                let [out, codes, absmax] = outs else {
                    unreachable!("three outputs")
                };
                kernels.run(Momentum {
                    out: out.reborrow(),
                    momentum: MomentOperand::Quantised {
                        codes: codes.reborrow(),
                        absmax: absmax.reborrow(),
                    },
                    gradients: ins[0],
                    clip: ins[1],
                    key: ins[2],
                    first_index: 512,
                    decay: 0.95,
                    nesterov: false,
                })
            },
        },
        Signature {
            operation: "divide_by_norm",
            outs: vec![any("x", &[ELEMENTS]).free_dim(0)],
            ins: vec![float("norm", &[1])],
            call: |kernels, outs, ins| {
                kernels.run(DivideByNorm {
                    x: outs[0].reborrow(),
                    norm: ins[0],
                    eps: 1e-7,
                })
            },
        },
        Signature {
            operation: "combine",
            outs: vec![any("out", &[ELEMENTS])],
            ins: vec![float("x", &[ELEMENTS])],
            call: |kernels, outs, ins| {
                kernels.run(Combine {
                    out: outs[0].reborrow(),
                    x: ins[0],
                    alpha: 2.0,
                    beta: 0.5,
                })
            },
        },
        Signature {
            operation: "step_along",
            outs: vec![any("parameters", &[ELEMENTS])],
            ins: vec![
                any("direction", &[ELEMENTS]),
                float("rate", &[1]),
                float("clip", &[2]),
                key(),
            ],
            call: |kernels, outs, ins| {
                kernels.run(StepAlong {
                    parameters: outs[0].reborrow(),
                    master: MasterOperand::Parameters,
                    direction: ins[0],
                    rate: ins[1],
                    clip: ins[2],
                    key: ins[3],
                    first_index: 512,
                    scale: 0.2,
                    weight_decay: 0.1,
                })
            },
        },
    ]
}
