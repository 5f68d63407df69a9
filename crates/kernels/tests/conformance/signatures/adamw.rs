//! The optimizer.

use super::{Signature, argument};
use kernels::AdamW;
use memory::DType;

pub fn signature(dtype: DType) -> Signature {
    let state = |name| argument(name, DType::F32, &[7]);
    let mut outs = vec![
        argument("parameters", dtype, &[7]),
        state("first_moment"),
        state("second_moment"),
    ];
    if dtype == DType::BF16 {
        outs.push(state("master"));
    }
    Signature {
        operation: "adamw",
        outs,
        ins: vec![
            state("gradients"),
            argument("rates", DType::F32, &[3]),
            argument("clip", DType::F32, &[2]),
        ],
        call: |kernels, outs, ins| {
            let [parameters, first, second, rest @ ..] = outs else {
                unreachable!()
            };
            kernels.adamw(AdamW {
                parameters: parameters.reborrow(),
                master: rest.first_mut().map(|master| master.reborrow()),
                first_moment: first.reborrow(),
                second_moment: second.reborrow(),
                gradients: ins[0],
                rates: ins[1],
                clip: ins[2],
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
            })
        },
    }
}
