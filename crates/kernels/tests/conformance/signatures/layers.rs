//! Operations on the rows of a layer.

use super::{Signature, argument};
use kernels::Init;
use memory::DType;

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let ids = |name| argument(name, DType::I32, &[4]);
    vec![
        Signature {
            operation: "add_bias",
            outs: vec![real("out", &[4, 6]).free_dim(0)],
            ins: vec![real("bias", &[6])],
            call: |kernels, outs, ins| kernels.add_bias(outs[0].reborrow(), ins[0]),
        },
        Signature {
            operation: "bias_backward",
            outs: vec![float("out", &[6]).free_type()],
            ins: vec![real("dy", &[4, 6]).free_dim(0).free_type()],
            call: |kernels, outs, ins| {
                kernels.bias_backward(outs[0].reborrow(), ins[0], Init::Accumulate)
            },
        },
        Signature {
            operation: "embedding",
            outs: vec![real("out", &[4, 6])],
            ins: vec![real("table", &[9, 6]).free_dim(0), ids("ids")],
            call: |kernels, outs, ins| kernels.embedding(outs[0].reborrow(), ins[0], ins[1]),
        },
        Signature {
            operation: "embedding_backward",
            outs: vec![float("dtable", &[9, 6]).free_dim(0).free_type()],
            ins: vec![real("dout", &[4, 6]).free_type(), ids("ids")],
            call: |kernels, outs, ins| {
                kernels.embedding_backward(outs[0].reborrow(), ins[0], ins[1], Init::Accumulate)
            },
        },
        Signature {
            operation: "rms_norm",
            outs: vec![real("y", &[4, 6]), float("rstd", &[4])],
            ins: vec![real("x", &[4, 6]), real("weight", &[6])],
            call: |kernels, outs, ins| {
                let [y, rstd] = outs else { unreachable!() };
                kernels.rms_norm(
                    Some(y.reborrow()),
                    Some(rstd.reborrow()),
                    ins[0],
                    ins[1],
                    1e-5,
                )
            },
        },
        Signature {
            operation: "rms_norm_backward",
            outs: vec![real("dx", &[4, 6]), float("dweight", &[6]).free_type()],
            ins: vec![
                real("dy", &[4, 6]),
                real("x", &[4, 6]),
                real("weight", &[6]),
                float("rstd", &[4]),
            ],
            call: |kernels, outs, ins| {
                let [dx, dweight] = outs else { unreachable!() };
                let (dx, dweight, init) = (dx.reborrow(), dweight.reborrow(), Init::Accumulate);
                kernels.rms_norm_backward(dx, init, dweight, init, ins[0], ins[1], ins[2], ins[3])
            },
        },
        Signature {
            operation: "rotary",
            outs: vec![real("x", &[10, 24]).free_type()],
            ins: vec![float("table", &[2, 5, 4])],
            call: |kernels, outs, ins| kernels.rotary(outs[0].reborrow(), ins[0], false),
        },
        Signature {
            operation: "swiglu",
            outs: vec![real("act", &[4, 6])],
            ins: vec![real("gate", &[4, 6]), real("up", &[4, 6])],
            call: |kernels, outs, ins| kernels.swiglu(outs[0].reborrow(), ins[0], ins[1]),
        },
        Signature {
            operation: "swiglu_backward",
            outs: vec![real("gate", &[4, 6]), real("up", &[4, 6])],
            ins: vec![real("dact", &[4, 6])],
            call: |kernels, outs, ins| {
                let [gate, up] = outs else { unreachable!() };
                kernels.swiglu_backward(gate.reborrow(), up.reborrow(), ins[0])
            },
        },
        Signature {
            operation: "cross_entropy",
            outs: vec![
                float("losses", &[4]),
                real("logits", &[4, 6]).free_dim(1).free_type(),
            ],
            ins: vec![ids("targets")],
            call: |kernels, outs, ins| {
                let [losses, logits] = outs else {
                    unreachable!()
                };
                kernels.cross_entropy(losses.reborrow(), logits.reborrow(), ins[0], 1.0)
            },
        },
    ]
}
