//! Sequences of different lengths, which begin where numbers on the device say.

use crate::graphs::*;
use crate::library::Descriptor;
use crate::run::Attention;
use half::bf16;

/// Room for three sequences of up to nine tokens.
const SHAPE: Shape = Shape {
    batch: 3,
    heads: 2,
    kv_heads: 1,
    seq: 9,
    head_dim: 16,
};

#[track_caller]
fn refused<T>(result: Result<T, String>, part: &str) {
    let message = result.err().expect("the mistake is refused");
    assert!(message.contains(part), "{message}");
}

#[test]
fn graphs_that_ragged_layouts_do_not_allow() {
    let device = described(H100).unwrap();
    let plan = |graph: Descriptor| heuristic(&graph, Some(&device));
    let whole = plan(ragged(SHAPE, true).unwrap()).unwrap();
    assert_eq!(workspace_bytes(&whole), 17_408);
    refused(
        plan(ragged(SHAPE, false).unwrap()),
        "without one length of queries and keys for each sequence",
    );
    let alone = attention(SHAPE, SHAPE.q(uid::Q).ragged()).unwrap();
    refused(
        plan(graph(&[alone]).unwrap()),
        "is not ragged, and others are",
    );
    let mut short = SHAPE.q(uid::Q).ragged();
    short.begins = Some((uid::BEGINS, SHAPE.batch));
    refused(short.made(), "there must be one i32 more than sequences");
}

/// Runs with these lengths, and begins in tokens. Gives the output, which was all 7.
fn run(lengths: [i32; 3], begins: [i32; 4]) -> Result<Vec<f32>, String> {
    let mut attention = Attention::new(SHAPE);
    attention.write(uid::O, &[7.0; 3 * 9 * 2 * 16]);
    let plan = heuristic(&ragged(SHAPE, true)?, None)?;
    let mut uids = attention.forward_uids();
    let of_heads = |heads: i32| begins.map(|token| token * heads * 16).to_vec();
    for (uid, numbers) in [
        (uid::LENGTHS, lengths.to_vec()),
        (uid::BEGINS + uid::Q, of_heads(2)),
        (uid::BEGINS + uid::K, of_heads(1)),
        (uid::BEGINS + uid::V, of_heads(1)),
        (uid::BEGINS + uid::O, of_heads(2)),
    ] {
        let bytes = 4 * numbers.len();
        let block = attention.session.block(bytes);
        // SAFETY: a block of so many bytes, which nothing else looks at now.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), block.cast(), numbers.len()) };
        attention.blocks.insert(uid, (block, bytes));
        uids.push(uid);
    }
    attention.execute(&plan, &uids)?;
    Ok(attention.read(uid::O))
}

/// The first token of a sequence sees itself alone: its output is its value, in both heads. What is no token of a sequence keeps what
/// it had.
#[test]
fn sequences_begin_where_they_are_said_to_and_nothing_else_is_written() {
    let out = run([4, 0, 9], [0, 6, 6, 15]).unwrap();
    let values = crate::run::numbers(uid::V as u32, 3 * 9 * 16);
    for first in [0, 6] {
        let value = &values[16 * first..][..16];
        let row = &out[32 * first..][..32];
        assert_eq!(row, [value, value].concat(), "{first}");
    }
    let row = |token: usize| &out[32 * token..][..32];
    for token in [4, 5].into_iter().chain(15..27) {
        assert_eq!(row(token), [bf16::from_f32(7.0).to_f32(); 32], "{token}");
    }
    for token in (0..4).chain(6..15) {
        assert!(row(token).iter().all(|x| x.is_finite() && *x != 7.0));
    }
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    for (lengths, begins, part) in [
        (
            [10, 0, 0],
            [0, 10, 10, 10],
            "sequence 0 of tensor 1 has 10 tokens",
        ),
        (
            [4, 4, 4],
            [0, 3, 7, 11],
            "sequence 0 of tensor 1 has 4 tokens from element 0 on",
        ),
        (
            [4, -1, 0],
            [0, 4, 4, 4],
            "sequence 1 of tensor 1 has -1 tokens",
        ),
        ([9, 9, 9], [0, 9, 19, 28], "is not within a live block"),
    ] {
        refused(run(lengths, begins), part);
    }
}
