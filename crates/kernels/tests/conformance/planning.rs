//! Planning accepts what computing does, and counts what it would compute.

use crate::attention::{Attention, Scores, shape};
use crate::device::{Device, Start, planning};
use crate::flash_attention::FlashAttention;
use crate::layout::{PLAIN, TRANSPOSED};
use crate::matmul::{Bias, Product};
use crate::{DTYPES, SUITE, case};
use kernels::Target;
use kernels::meta::{FlopCounter, Meta};
use memory::{DType, Layer, Memory, Phase};

#[test]
fn planning_accepts_every_case() {
    for dtype in DTYPES {
        for device in planning(dtype) {
            for (_, cases) in SUITE {
                for case in cases(dtype) {
                    case::run(case.as_ref(), &device);
                }
            }
        }
    }
}

#[test]
fn products_count_in_the_phase_that_asks_for_them() {
    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
    let kernels = Meta::new(&memory, Target::Cuda, DType::F32, flops.clone()).unwrap();
    let device = Device::new("meta", memory, Box::new(kernels));
    let product = Product {
        sizes: [37, 48, 131],
        dtypes: [DType::F32; 3],
        layouts: [PLAIN, TRANSPOSED],
        out: PLAIN,
        bias: Bias::None,
        start: Start::Overwrite,
        seed: 1,
    };
    let attention = Attention {
        dtype: DType::F32,
        shape: shape([2, 37, 6, 2, 20]),
        scores: Scores::Random(1.0),
        sinks: None,
        dropout: None,
    };
    let forward = device.memory.enter(Phase::Forward, Layer::Block(0));
    case::run(&product, &device);
    drop(forward);
    let backward = device.memory.enter(Phase::Backward, Layer::Block(0));
    case::run(&attention, &device);
    drop(backward);
    let recompute = device.memory.enter(Phase::Recompute, Layer::Block(0));
    case::run(&FlashAttention::plain(attention), &device);
    drop(recompute);
    let of_attention = 2 * 2 * 6 * 37 * 37 * 20;
    let mut counted = flops.by_phase();
    assert_eq!(*counted.get_mut(Phase::Forward), 2 * 37 * 48 * 131);
    // Two products forward, four backward.
    assert_eq!(*counted.get_mut(Phase::Backward), 6 * of_attention);
    // Without stored scores, backward makes them again.
    assert_eq!(*counted.get_mut(Phase::Recompute), 7 * of_attention);
}
