//! Both passes of attention without stored scores.

use super::{Signature, argument, attention_shape};
use crate::device::Device;
use kernels::{Dropout, FlashAttention, FlashAttentionBackward, FlashOptions};
use memory::{DType, In};

fn options(documents: In) -> FlashOptions {
    FlashOptions {
        documents: Some(documents),
        dropout: Some(Dropout {
            probability: 0.25,
            key: 1,
        }),
        ..FlashOptions::default()
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
        ],
        call: |kernels, outs, ins| {
            let [out, lse, scratch] = outs else {
                unreachable!()
            };
            let (out, lse, scratch) = (out.reborrow(), lse.reborrow(), scratch.reborrow());
            let (shape, options) = (attention_shape(), options(ins[3]));
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
                options: options(ins[6]),
            })
        },
    };
    [forward, backward]
}
