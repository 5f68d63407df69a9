//! Random shapes.

use crate::attention::{Attention, Scores, with_values};
use crate::case::judge;
use crate::compare::{Expected, Rule};
use crate::device::{Start, computing, planning};
use crate::dropout::Dropped;
use crate::flash_attention::FlashAttention;
use crate::grouped_products::{self, Experts, Rows};
use crate::layout::{COLUMNS, Layout, PLAIN, TRANSPOSED, TRANSPOSED_COLUMNS};
use crate::matmul::{Bias, Product};
use crate::sinks::Sinks;
use crate::{DTYPES, case};
use kernels::{AttentionShape, Positive};
use memory::DType;
use proptest::collection;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::RngSeed;

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 48,
        failure_persistence: None,
        // The same shapes each time: whether every opcode of the PTX is executed depends on them.
        rng_seed: RngSeed::Fixed(2),
        ..ProptestConfig::default()
    }
}

/// A case on everything that takes it.
fn hold(case: &dyn case::Case, dtype: DType) {
    let devices = computing(dtype);
    for device in &devices {
        device.memory.set_poison(true);
    }
    judge(case, &devices);
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

fn dropouts() -> impl Strategy<Value = Option<Dropped>> {
    let share = select(&[0.0f32, 0.1, 0.5][..]);
    (share, any::<u64>())
        .prop_map(|(probability, key)| (probability > 0.0).then_some(Dropped { probability, key }))
}

/// Of a few keys at least, for the same reason as sequences.
fn windows() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![Just(None), (4..120usize).prop_map(Some)]
}

/// Mostly as wide as keys, for which CUDA has more kernels.
fn v_head_dims() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![4 => Just(None), 1 => (4..40usize).prop_map(Some)]
}

fn scales() -> impl Strategy<Value = Option<f32>> {
    prop_oneof![Just(None), (0.05f32..0.5).prop_map(Some)]
}

/// Mostly none: with one CUDA has kernels for the widest heads alone.
fn caps() -> impl Strategy<Value = Option<f32>> {
    prop_oneof![3 => Just(None), 1 => (0.5f32..5.0).prop_map(Some)]
}

fn sinks() -> impl Strategy<Value = Option<Sinks>> {
    let gradient = (
        select(&DTYPES[..]),
        select(&[Start::Overwrite, Start::Accumulate][..]),
    );
    let learning = (-3.0..3.0, gradient)
        .prop_map(|(around, (dtype, start))| Some(Sinks::learning(around, dtype, start)));
    prop_oneof![Just(None), learning]
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
        out in select(&[PLAIN, COLUMNS][..]),
        bias in select(&[Bias::None, Bias::Aligned, Bias::Misaligned][..]),
        start in starts(),
        seed in 0..1000u64,
    ) {
        hold(&Product { sizes, dtypes, layouts, out, bias, start, seed }, compute);
    }

    #[test]
    fn grouped_products_of_any_shape(
        rows in collection::vec(0..80usize, 1..6),
        inner in 1..80usize,
        outputs in 1..150usize,
        by_columns in any::<bool>(),
        tokens in [option::of(1..100usize), option::of(1..100usize)],
        start in select(&[Start::Overwrite, Start::Accumulate][..]),
        [dtype, gradient] in [select(&DTYPES[..]), select(&DTYPES[..])],
    ) {
        let experts = Experts(rows);
        let both = tokens.map(|tokens| tokens.map_or(Rows::InOrder, Rows::OfTokens));
        let rows = both[0];
        let product = grouped_products::Product { dtype, experts, rows, inner, outputs, by_columns };
        hold(&product, dtype);
        let grouped_products::Product { experts, .. } = product;
        let gradient =
            grouped_products::Gradient { dtype, gradient, start, experts, rows: both, inner, outputs };
        hold(&gradient, DType::BF16);
    }

    /// Shapes have a few tokens and channels at least: of fewer, every gradient may cancel.
    #[test]
    fn attention_of_any_shape(
        batch in 1..4usize,
        seq in 6..100usize,
        kv_heads in 1..4usize,
        group in 1..9usize,
        head_dim in 4..30usize,
        v_head_dim in v_head_dims(),
        range in 0.5..2.0,
        window in windows(),
        scale in scales(),
        cap in caps(),
        sinks in sinks(),
        dropout in dropouts(),
        dtype in select(&DTYPES[..]),
    ) {
        let sizes = [batch, seq, kv_heads * group, kv_heads, head_dim];
        let shape = AttentionShape { window, cap: cap.map(Positive::new), ..with_values(sizes, v_head_dim.unwrap_or(head_dim), scale) };
        hold(&Attention { dtype, shape, scores: Scores::Random(range), sinks, dropout }, dtype);
    }

    /// Shapes span several blocks of queries and keys, with documents of up to some length and with dropout.
    #[test]
    fn flash_attention_of_any_shape(
        batch in 1..3usize,
        seq in 6..150usize,
        kv_heads in 1..3usize,
        group in 1..5usize,
        head_dim in 4..40usize,
        v_head_dim in v_head_dims(),
        longest in 6..150usize,
        window in windows(),
        scale in scales(),
        cap in caps(),
        sinks in sinks(),
        dropout in dropouts(),
        dtype in select(&DTYPES[..]),
    ) {
        let sizes = [batch, seq, kv_heads * group, kv_heads, head_dim];
        let shape = AttentionShape { window, cap: cap.map(Positive::new), ..with_values(sizes, v_head_dim.unwrap_or(head_dim), scale) };
        let attention = Attention { dtype, shape, scores: Scores::Random(1.5), sinks, dropout };
        let lengths = vec![longest, longest / 5 + 1, longest / 2 + 1];
        hold(&FlashAttention { attention, lengths }, dtype);
    }

    /// With the same key both drop the same elements.
    #[test]
    fn flash_attention_is_attention(
        seq in 6..150usize,
        kv_heads in 1..3usize,
        group in 1..5usize,
        head_dim in 4..40usize,
        v_head_dim in v_head_dims(),
        window in windows(),
        scale in scales(),
        cap in caps(),
        sinks in sinks(),
        dropout in dropouts(),
    ) {
        let sizes = [1, seq, kv_heads * group, kv_heads, head_dim];
        let shape = AttentionShape { window, cap: cap.map(Positive::new), ..with_values(sizes, v_head_dim.unwrap_or(head_dim), scale) };
        let scores = Scores::Random(1.5);
        let case = || Attention { dtype: DType::F32, shape, scores, sinks, dropout };
        for device in computing(DType::F32) {
            device.memory.set_poison(true);
            let eager = case::run(&case(), &device);
            let flash = case::run(&FlashAttention::plain(case()), &device);
            // Out and gradients: before them eager has two outputs of probabilities, flash one of statistics.
            for (eager, flash) in eager[2..].iter().zip(&flash[1..]) {
                let expected = Expected::new("flash", eager.values(), Rule::Chained);
                expected.judge(flash, device.kernels.target()).unwrap();
            }
        }
    }
}
