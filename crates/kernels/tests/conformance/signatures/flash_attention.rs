//! Both passes of attention without stored scores.

use super::attention::{dropout, key};
use super::{Signature, argument, attention_shape};
use crate::device::Device;
use kernels::{FlashAttention, FlashAttentionBackward, FlashOptions};
use memory::{DType, In};

/// Documents and a key come last.
fn options<'a>(ins: &[In<'a>]) -> FlashOptions<'a> {
    FlashOptions {
        documents: Some(ins[ins.len() - 2]),
        dropout: dropout(ins),
    }
}

pub fn signatures(dtype: DType, device: &Device) -> [Signature; 2] {
    let (target, shape) = (device.kernels.target(), attention_shape());
    let scratch = |elements| argument("scratch", DType::F32, &[elements]);
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let documents = || argument("documents", DType::I32, &[2, 5]);
    let forward = Signature {
        operation: "flash_attention",
        outs: vec![
            real("out", &[10, 24]),
            argument("lse", DType::F32, &[2, 4, 5]),
            scratch(FlashAttention::scratch_elements(target, shape, dtype)),
        ],
        ins: vec![
            real("q", &[10, 24]),
            real("k", &[10, 12]),
            real("v", &[10, 12]),
            documents(),
            key(),
        ],
        call: |kernels, outs, ins| {
            let [out, lse, scratch] = outs else {
                unreachable!()
            };
            let (out, lse, scratch) = (out.reborrow(), lse.reborrow(), scratch.reborrow());
            let (shape, options) = (attention_shape(), options(ins));
            let (out, lse) = (Some(out), Some(lse));
            kernels.run(FlashAttention {
                out,
                lse,
                scratch,
                q: ins[0],
                k: ins[1],
                v: ins[2],
                shape,
                options,
            })
        },
    };
    let backward = Signature {
        operation: "flash_attention_backward",
        outs: vec![
            real("dq", &[10, 24]),
            real("dk", &[10, 12]),
            real("dv", &[10, 12]),
            scratch(FlashAttentionBackward::scratch_elements(
                target, shape, dtype,
            )),
        ],
        ins: vec![
            real("dout", &[10, 24]),
            real("out", &[10, 24]),
            argument("lse", DType::F32, &[2, 4, 5]),
            real("q", &[10, 24]),
            real("k", &[10, 12]),
            real("v", &[10, 12]),
            documents(),
            key(),
        ],
        call: |kernels, outs, ins| {
            let [dq, dk, dv, scratch] = outs else {
                unreachable!()
            };
            kernels.run(FlashAttentionBackward {
                dq: dq.reborrow(),
                dk: dk.reborrow(),
                dv: dv.reborrow(),
                scratch: scratch.reborrow(),
                dout: ins[0],
                out: ins[1],
                lse: ins[2],
                q: ins[3],
                k: ins[4],
                v: ins[5],
                shape: attention_shape(),
                options: options(ins),
            })
        },
    };
    [forward, backward]
}
