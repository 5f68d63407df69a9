//! Random shapes.

use crate::attention::{Attention, Scores, shape};
use crate::case::judge;
use crate::device::{Start, computing, planning};
use crate::matmul::{COLUMNS, Layout, PLAIN, Product, TRANSPOSED, TRANSPOSED_COLUMNS};
use crate::{DTYPES, case};
use memory::DType;
use proptest::prelude::*;
use proptest::sample::select;

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// A case on everything that takes it.
fn hold(case: &dyn case::Case, dtype: DType) {
    for device in computing(dtype) {
        device.memory.set_poison(true);
        judge(case, &device);
    }
    for device in planning(dtype) {
        case::run(case, &device);
    }
}

fn layouts() -> impl Strategy<Value = Layout> {
    select(&[PLAIN, TRANSPOSED, COLUMNS, TRANSPOSED_COLUMNS][..])
}

fn starts() -> impl Strategy<Value = Start> {
    select(&[Start::Overwrite, Start::Accumulate, Start::Add][..])
}

/// Compute type, then types of `out`, `a`, `b`.
fn dtypes() -> impl Strategy<Value = (DType, [DType; 3])> {
    let mixed = [
        select(&DTYPES[..]),
        select(&DTYPES[..]),
        select(&DTYPES[..]),
    ];
    prop_oneof![
        Just((DType::F32, [DType::F32; 3])),
        Just((DType::BF16, [DType::BF16; 3])),
        mixed.prop_map(|dtypes| (DType::BF16, dtypes)),
    ]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn matmul_of_any_shape(
        sizes in [1..80usize, 1..80usize, 1..80usize],
        (compute, dtypes) in dtypes(),
        layouts in [layouts(), layouts()],
        start in starts(),
        seed in 0..1000u64,
    ) {
        hold(&Product { sizes, dtypes, layouts, start, seed }, compute);
    }

    /// From a few tokens and channels on: of fewer, every gradient may cancel.
    #[test]
    fn attention_of_any_shape(
        batch in 1..4usize,
        seq in 6..100usize,
        kv_heads in 1..4usize,
        group in 1..9usize,
        head_dim in 4..30usize,
        range in 0.5..2.0,
        dtype in select(&DTYPES[..]),
    ) {
        let shape = shape([batch, seq, kv_heads * group, kv_heads, head_dim]);
        hold(&Attention { dtype, shape, scores: Scores::Random(range) }, dtype);
    }
}
