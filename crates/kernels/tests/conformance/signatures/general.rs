//! Operations on any tensors.

use super::{Signature, argument};
use kernels::{Init, NORM_PARTS};
use memory::DType;

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    vec![
        Signature {
            operation: "fill",
            outs: vec![real("out", &[4, 6]).free_type().free_rank()],
            ins: vec![],
            call: |kernels, outs, _| kernels.fill(outs[0].reborrow(), 1.0),
        },
        Signature {
            operation: "copy",
            outs: vec![real("out", &[4, 6]).free_type()],
            ins: vec![real("x", &[4, 6]).free_type()],
            call: |kernels, outs, ins| kernels.copy(outs[0].reborrow(), ins[0]),
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
                kernels.matmul(outs[0].reborrow(), ins[0], ins[1], Init::Add(ins[2]))
            },
        },
        Signature {
            operation: "sum",
            outs: vec![float("out", &[1])],
            ins: vec![float("x", &[9]).free_dim(0)],
            call: |kernels, outs, ins| kernels.sum(outs[0].reborrow(), ins[0], Init::Accumulate),
        },
        Signature {
            operation: "norm_and_clip",
            outs: vec![
                float("out", &[2]),
                argument("parts", DType::F64, &[NORM_PARTS]),
            ],
            ins: vec![
                float("x", &[9]).free_dim(0).free_type(),
                float("loss", &[1]),
            ],
            call: |kernels, outs, ins| {
                let [out, parts] = outs else { unreachable!() };
                kernels.norm_and_clip(out.reborrow(), parts.reborrow(), ins[0], ins[1], Some(1.0))
            },
        },
    ]
}
