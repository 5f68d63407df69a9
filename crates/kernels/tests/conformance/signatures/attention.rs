//! Both passes of attention.

use super::{Argument, Signature, argument};
use crate::attention::shape;
use crate::device::Device;
use kernels::{Attention, AttentionBackward, AttentionShape, Dropout};
use memory::{DType, In};

/// A quarter is dropped, by a key that is the last of what is read.
pub fn dropout<'a>(ins: &[In<'a>]) -> Option<Dropout<'a>> {
    let key = *ins.last()?;
    Some(Dropout {
        probability: 0.25,
        key,
    })
}

pub fn key() -> Argument {
    argument("key", DType::U32, &[2])
}

/// batch 2, seq 5, 4 heads on 2, each of 6.
pub fn attention_shape() -> AttentionShape {
    shape([2, 5, 4, 2, 6])
}

pub fn signatures(dtype: DType, device: &Device) -> [Signature; 2] {
    let (target, shape) = (device.kernels.target(), attention_shape());
    let scratch = |elements| argument("scratch", DType::F32, &[elements]);
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let forward = Signature {
        operation: "attention",
        outs: vec![
            real("out", &[10, 24]),
            real("probs", &[2, 4, 5, 5]),
            scratch(Attention::scratch_elements(target, shape, dtype, true)),
        ],
        ins: vec![
            real("q", &[10, 24]),
            real("k", &[10, 12]),
            real("v", &[10, 12]),
            key(),
        ],
        call: |kernels, outs, ins| {
            let [out, probs, scratch] = outs else {
                unreachable!()
            };
            let (out, probs, scratch) = (out.reborrow(), probs.reborrow(), scratch.reborrow());
            kernels.run(Attention {
                out: Some(out),
                probs: Some(probs),
                scratch,
                q: ins[0],
                k: ins[1],
                v: ins[2],
                shape: attention_shape(),
                dropout: dropout(ins),
            })
        },
    };
    let backward = Signature {
        operation: "attention_backward",
        outs: vec![
            real("dq", &[10, 24]),
            real("dk", &[10, 12]),
            real("dv", &[10, 12]),
            scratch(AttentionBackward::scratch_elements(target, shape, dtype)),
        ],
        ins: vec![
            real("dout", &[10, 24]),
            real("probs", &[2, 4, 5, 5]),
            real("q", &[10, 24]),
            real("k", &[10, 12]),
            real("v", &[10, 12]),
            key(),
        ],
        call: |kernels, outs, ins| {
            let [dq, dk, dv, scratch] = outs else {
                unreachable!()
            };
            let (dq, dk, dv, scratch) = (
                dq.reborrow(),
                dk.reborrow(),
                dv.reborrow(),
                scratch.reborrow(),
            );
            let shape = attention_shape();
            kernels.run(AttentionBackward {
                dq,
                dk,
                dv,
                scratch,
                dout: ins[0],
                probs: ins[1],
                q: ins[2],
                k: ins[3],
                v: ins[4],
                shape,
                dropout: dropout(ins),
            })
        },
    };
    [forward, backward]
}
