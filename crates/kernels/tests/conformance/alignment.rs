//! Tensors that start anywhere: kernels that access whole packs elsewhere go element by element here.

use crate::case::{Cases, judge};
use crate::device::computing;
use crate::{
    DTYPES, adamw, cross_entropy, delta_cache, elementwise, experts, gated_delta, gated_norm,
    grouped_products, latent, layer_norm, rms_norm, short_convolution, sigmoid_gate, swiglu,
};
use memory::DType;

/// Operations that take any alignment, and of how many cases one is run: AdamW has many of each form and size, which alignment
/// does not tell apart.
const ANYWHERE: [(Cases, usize); 14] = [
    (rms_norm::cases, 1),
    (layer_norm::cases, 1),
    (elementwise::cases, 1),
    (cross_entropy::cases, 1),
    (swiglu::cases, 1),
    (latent::cases, 1),
    (adamw::cases, 3),
    (experts::cases, 1),
    (grouped_products::cases, 1),
    (short_convolution::cases, 1),
    (gated_delta::cases, 1),
    (gated_norm::cases, 1),
    (delta_cache::cases, 1),
    (sigmoid_gate::cases, 1),
];

#[test]
fn tensors_may_start_anywhere() {
    for dtype in DTYPES {
        let mut devices = computing(dtype);
        for device in &mut devices {
            let starts = [0, 1].map(|shift| {
                device.shift = shift;
                let tensor = device.room(DType::BF16, [8]);
                tensor.view().pointer() as usize % 16
            });
            assert_eq!(starts, [0, 2], "the tensors differ in where they start");
        }
        for (cases, apart) in ANYWHERE {
            for case in cases(dtype).iter().step_by(apart) {
                judge(case.as_ref(), &devices);
            }
        }
    }
}
