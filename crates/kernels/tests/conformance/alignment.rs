//! Tensors that start anywhere: kernels that access whole packs elsewhere go element by element here.

use crate::case::{Cases, judge};
use crate::device::computing;
use crate::{DTYPES, adamw, cross_entropy, elementwise, layer_norm, rms_norm, swiglu};
use memory::DType;

/// Operations that take any alignment.
const ANYWHERE: [Cases; 6] = [
    rms_norm::cases,
    layer_norm::cases,
    elementwise::cases,
    cross_entropy::cases,
    swiglu::cases,
    adamw::cases,
];

#[test]
fn tensors_may_start_anywhere() {
    for dtype in DTYPES {
        for mut device in computing(dtype) {
            let starts = [0, 1].map(|shift| {
                device.shift = shift;
                let tensor = device.room(DType::BF16, [8]);
                tensor.view().pointer() as usize % 16
            });
            assert_eq!(starts, [0, 2], "the tensors differ in where they start");
            for case in ANYWHERE.iter().flat_map(|cases| cases(dtype)) {
                judge(case.as_ref(), &device);
            }
        }
    }
}
