//! Both passes of attention.

use super::{Signature, argument};
use crate::attention::shape;
use crate::device::Device;
use kernels::AttentionShape;
use kernels::attention::{Pass, scratch_elements};
use memory::DType;

/// batch 2, seq 5, 4 heads on 2, each of 6.
pub fn attention_shape() -> AttentionShape {
    shape([2, 5, 4, 2, 6])
}

pub fn signatures(dtype: DType, device: &Device) -> [Signature; 2] {
    let scratch = |pass| {
        let elements = scratch_elements(device.kernels.target(), attention_shape(), dtype, pass);
        argument("scratch", DType::F32, &[elements])
    };
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let forward = Signature {
        operation: "attention",
        outs: vec![
            real("out", &[10, 24]),
            real("probs", &[2, 4, 5, 5]),
            scratch(Pass::Forward { probs_kept: true }),
        ],
        ins: vec![
            real("q", &[10, 24]),
            real("k", &[10, 12]),
            real("v", &[10, 12]),
        ],
        call: |kernels, outs, ins| {
            let [out, probs, scratch] = outs else {
                unreachable!()
            };
            let (out, probs, scratch) = (out.reborrow(), probs.reborrow(), scratch.reborrow());
            kernels.attention(
                Some(out),
                Some(probs),
                scratch,
                ins[0],
                ins[1],
                ins[2],
                attention_shape(),
            )
        },
    };
    let backward = Signature {
        operation: "attention_backward",
        outs: vec![
            real("dq", &[10, 24]),
            real("dk", &[10, 12]),
            real("dv", &[10, 12]),
            scratch(Pass::Backward),
        ],
        ins: vec![
            real("dout", &[10, 24]),
            real("probs", &[2, 4, 5, 5]),
            real("q", &[10, 24]),
            real("k", &[10, 12]),
            real("v", &[10, 12]),
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
            kernels.attention_backward(
                dq, dk, dv, scratch, ins[0], ins[1], ins[2], ins[3], ins[4], shape,
            )
        },
    };
    [forward, backward]
}
