//! Adafactor on ranges of a tensor.

use super::{Signature, argument};
use kernels::{
    AdafactorRate, AdafactorStep, FactorVariance, MasterOperand, MatricesShape, UpdateSquares,
    VarianceOperand, VarianceScale, VarianceSums, WeightSquares,
};
use memory::DType;

/// More than a block, and no whole number of them.
const ELEMENTS: usize = 300;
const BLOCKS: usize = 2;
const SHAPE: MatricesShape = MatricesShape {
    matrices: 2,
    rows: 10,
    columns: 30,
};
const ROWS: usize = 20;
const COLUMNS: usize = 60;
const SUMS: usize = 240;

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let double = |name, dims: &[usize]| argument(name, DType::F64, dims);
    let any = |name, dims: &[usize]| argument(name, dtype, dims).free_type();
    let (clip, rates) = (|| float("clip", &[2]), || float("rates", &[3]));
    vec![
        Signature {
            operation: "variance_scale",
            outs: vec![double("out", &[1])],
            ins: vec![double("grains", &[7]).free_dim(0), clip()],
            call: |kernels, outs, ins| {
                kernels.run(VarianceScale {
                    out: outs[0].reborrow(),
                    grains: ins[0],
                    clip: ins[1],
                })
            },
        },
        Signature {
            operation: "variance_sums",
            outs: vec![double("sums", &[SUMS])],
            ins: vec![
                any("gradients", &[ELEMENTS]).free_dim(0),
                clip(),
                double("scale", &[1]),
            ],
            call: |kernels, outs, ins| {
                kernels.run(VarianceSums {
                    sums: outs[0].reborrow(),
                    gradients: ins[0],
                    clip: ins[1],
                    scale: ins[2],
                    first: 256,
                    shape: SHAPE,
                })
            },
        },
        Signature {
            operation: "factor_variance",
            outs: vec![
                float("rows", &[ROWS]),
                float("columns", &[COLUMNS]),
                float("factors", &[ROWS]),
            ],
            ins: vec![
                double("sums", &[2, SUMS]).free_dim(0),
                double("scale", &[1]),
                rates(),
                clip(),
            ],
            call: |kernels, outs, ins| {
                let [rows, columns, factors] = outs else {
                    unreachable!("three outputs")
                };
                kernels.run(FactorVariance {
                    rows: rows.reborrow(),
                    columns: columns.reborrow(),
                    factors: factors.reborrow(),
                    sums: ins[0],
                    scale: ins[1],
                    rates: ins[2],
                    clip: ins[3],
                    eps: 1e-7,
                    shape: SHAPE,
                })
            },
        },
        Signature {
            operation: "update_squares",
            outs: vec![double("squares", &[BLOCKS])],
            ins: vec![
                any("gradients", &[ELEMENTS]).free_dim(0),
                float("factors", &[ROWS]),
                float("columns", &[COLUMNS]),
                rates(),
                clip(),
            ],
            call: |kernels, outs, ins| {
                kernels.run(UpdateSquares {
                    squares: outs[0].reborrow(),
                    gradients: ins[0],
                    variance: VarianceOperand::Factors {
                        factors: ins[1],
                        columns: ins[2],
                        first: 256,
                        shape: SHAPE,
                    },
                    rates: ins[3],
                    clip: ins[4],
                    eps: 1e-7,
                })
            },
        },
        Signature {
            operation: "weight_squares",
            outs: vec![
                double("squares", &[BLOCKS]),
                any("parameters", &[ELEMENTS]).free_dim(0),
            ],
            ins: vec![],
            call: |kernels, outs, _| {
                let [grains, parameters] = outs else {
                    unreachable!("two tensors")
                };
                kernels.run(WeightSquares {
                    squares: grains.reborrow(),
                    parameters: parameters.reborrow(),
                    master: MasterOperand::Parameters,
                })
            },
        },
        Signature {
            operation: "adafactor_rate",
            outs: vec![float("out", &[1])],
            ins: vec![double("squares", &[2, BLOCKS]), rates()],
            call: |kernels, outs, ins| {
                kernels.run(AdafactorRate {
                    out: outs[0].reborrow(),
                    squares: ins[0],
                    rates: ins[1],
                    elements: ELEMENTS,
                    least_rms: 1e-3,
                    threshold: 1.0,
                })
            },
        },
        Signature {
            operation: "adafactor_step",
            outs: vec![
                any("parameters", &[ELEMENTS]).free_dim(0),
                float("variance", &[ELEMENTS]),
            ],
            ins: vec![
                any("gradients", &[ELEMENTS]),
                float("rate", &[1]),
                rates(),
                clip(),
                argument("key", DType::U32, &[2]),
            ],
            call: |kernels, outs, ins| {
                let [parameters, variance] = outs else {
                    unreachable!("two outputs")
                };
                kernels.run(AdafactorStep {
                    parameters: parameters.reborrow(),
                    master: MasterOperand::Parameters,
                    gradients: ins[0],
                    variance: VarianceOperand::Elements(variance.reborrow()),
                    rate: ins[1],
                    rates: ins[2],
                    clip: ins[3],
                    key: ins[4],
                    first_index: 512,
                    eps: 1e-7,
                    weight_decay: 0.1,
                })
            },
        },
    ]
}
