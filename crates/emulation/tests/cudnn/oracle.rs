//! Compares the results of graphs with attention by its definition, in f64.

use crate::graphs::*;
use crate::library::{Descriptor, Session};
use crate::run::Attention;

/// Of every row of `[b, s, heads, d]`.
struct Reference {
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

/// Where a row of a head begins in `[b, s, heads, d]`.
fn at(shape: Shape, heads: i64, batch: i64, head: i64, row: i64) -> usize {
    (((batch * shape.seq + row) * heads + head) * shape.head_dim) as usize
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

fn add(to: &mut [f64], factor: f64, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * f64::from(*from);
    }
}

fn reference(attention: &Attention) -> Reference {
    let shape = attention.shape;
    let [q, k, v, d_o] = [uid::Q, uid::K, uid::V, uid::D_O].map(|uid| attention.read(uid));
    let mut result = Reference {
        o: vec![0.0; q.len()],
        lse: vec![0.0; q.len() / shape.head_dim as usize],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
    };
    let (width, scale) = (shape.head_dim as usize, (shape.head_dim as f64).powf(-0.5));
    for (batch, head, row) in rows(shape) {
        let shared = head / (shape.heads / shape.kv_heads);
        let query = at(shape, shape.heads, batch, head, row);
        let keys: Vec<usize> = (0..=row)
            .map(|key| at(shape, shape.kv_heads, batch, shared, key))
            .collect();
        let scores: Vec<f64> = keys
            .iter()
            .map(|key| scale * dot(&q[query..query + width], &k[*key..*key + width]))
            .collect();
        let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
        let weights: Vec<f64> = scores
            .iter()
            .map(|score| (score - highest).exp() / sum)
            .collect();
        let place = ((batch * shape.heads + head) * shape.seq + row) as usize;
        result.lse[place] = highest + sum.ln();
        let gradients: Vec<f64> = keys
            .iter()
            .map(|key| dot(&d_o[query..query + width], &v[*key..*key + width]))
            .collect();
        let mean: f64 = weights
            .iter()
            .zip(&gradients)
            .map(|(weight, each)| weight * each)
            .sum();
        for ((key, weight), gradient) in keys.iter().zip(&weights).zip(&gradients) {
            let of_score = scale * weight * (gradient - mean);
            add(
                &mut result.o[query..query + width],
                *weight,
                &v[*key..*key + width],
            );
            add(
                &mut result.dv[*key..*key + width],
                *weight,
                &d_o[query..query + width],
            );
            add(
                &mut result.dq[query..query + width],
                of_score,
                &k[*key..*key + width],
            );
            add(
                &mut result.dk[*key..*key + width],
                of_score,
                &q[query..query + width],
            );
        }
    }
    result
}

fn rows(shape: Shape) -> impl Iterator<Item = (i64, i64, i64)> {
    (0..shape.batch).flat_map(move |batch| {
        (0..shape.heads).flat_map(move |head| (0..shape.seq).map(move |row| (batch, head, row)))
    })
}

/// Equal within a share of the largest number: the rounding of bf16, twice that for sums over heads.
#[track_caller]
fn close(found: &[f32], wanted: &[f64], part: f64) {
    assert_eq!(found.len(), wanted.len());
    let largest = wanted
        .iter()
        .fold(0.0, |largest: f64, each| largest.max(each.abs()));
    for (place, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let off = (f64::from(*found) - wanted).abs();
        assert!(
            off <= part * largest,
            "{place}: {found} is not {wanted}, of up to {largest}"
        );
    }
}

const SHAPES: [Shape; 4] = [
    Shape {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        seq: 33,
        head_dim: 16,
    },
    Shape {
        batch: 1,
        heads: 3,
        kv_heads: 3,
        seq: 64,
        head_dim: 64,
    },
    Shape {
        batch: 1,
        heads: 4,
        kv_heads: 1,
        seq: 7,
        head_dim: 8,
    },
    Shape {
        batch: 3,
        heads: 2,
        kv_heads: 1,
        seq: 2,
        head_dim: 128,
    },
];

#[test]
fn both_passes_are_attention() {
    for shape in SHAPES {
        let attention = Attention::new(shape);
        let plan = heuristic(&forward(shape).unwrap(), None).unwrap();
        attention.execute(&plan, &attention.forward_uids()).unwrap();
        let wanted = reference(&attention);
        close(&attention.read(uid::O), &wanted.o, 0.005);
        close(&attention.read_f32(uid::LSE), &wanted.lse, 1e-5);
        let plan = chosen(&backward(shape, false).unwrap(), 6, ORDERED, None).unwrap();
        attention
            .execute(&plan, &attention.backward_uids(false))
            .unwrap();
        close(&attention.read(uid::D_Q), &wanted.dq, 0.02);
        close(&attention.read(uid::D_K), &wanted.dk, 0.02);
        close(&attention.read(uid::D_V), &wanted.dv, 0.02);
    }
}

#[test]
fn a_node_is_what_its_parts_are() {
    for shape in SHAPES {
        let (whole, parts) = (Attention::new(shape), Attention::new(shape));
        let plan = heuristic(&forward(shape).unwrap(), None).unwrap();
        whole.execute(&plan, &whole.forward_uids()).unwrap();
        let plan = heuristic(&forward_in_parts(shape).unwrap(), None).unwrap();
        parts.execute(&plan, &parts.forward_uids()).unwrap();
        assert_eq!(whole.read(uid::O), parts.read(uid::O));
        assert_eq!(whole.read_f32(uid::LSE), parts.read_f32(uid::LSE));
    }
}

/// The gradients that a plan makes of the same inputs, twice.
fn twice(shape: Shape, plan: &Descriptor, is_direct: bool) -> [Vec<f32>; 2] {
    let attention = Attention::new(shape);
    let forward = heuristic(&forward(shape).unwrap(), None).unwrap();
    attention
        .execute(&forward, &attention.forward_uids())
        .unwrap();
    [(); 2].map(|()| {
        attention
            .execute(plan, &attention.backward_uids(is_direct))
            .unwrap();
        attention.read(uid::D_Q)
    })
}

#[test]
fn a_backward_pass_without_the_ordered_engine_is_noticed() {
    // Its context is this thread's.
    let _session = Session::new();
    for shape in SHAPES.into_iter().filter(|shape| shape.seq > 8) {
        let graph = backward(shape, false).unwrap();
        let [first, second] = twice(shape, &chosen(&graph, 6, ORDERED, None).unwrap(), false);
        assert_eq!(first, second);
        let [first, second] = twice(shape, &heuristic(&graph, None).unwrap(), false);
        assert_ne!(first, second);
        // Without sums in memory, order cannot matter.
        let plan = heuristic(&backward(shape, true).unwrap(), None).unwrap();
        let [first, second] = twice(shape, &plan, true);
        assert_eq!(first, second);
    }
}

#[test]
fn a_workspace_is_what_the_library_was_seen_to_say() {
    let device = described(H100).unwrap();
    // By cuDNN 9.28.0 with the same graphs: forward, ordered, and what the heuristic chooses for either backward pass.
    for (dims, forward_bytes, ordered, chosen_first, direct) in [
        ([2, 8, 2, 512, 64], 256, 2_098_432, 2_097_408, 10_486_016),
        ([2, 8, 8, 512, 64], 256, 1_280, 256, 8_388_864),
        ([2, 9, 3, 777, 72], 256, 4_030_336, 4_028_416, 30_865_408),
    ] {
        let [batch, heads, kv_heads, seq, head_dim] = dims;
        let shape = Shape {
            batch,
            heads,
            kv_heads,
            seq,
            head_dim,
        };
        let of = |plan: Result<_, String>| workspace_bytes(&plan.unwrap());
        let graph = backward(shape, false).unwrap();
        assert_eq!(
            of(heuristic(&forward(shape).unwrap(), Some(&device))),
            forward_bytes
        );
        assert_eq!(of(chosen(&graph, 6, ORDERED, Some(&device))), ordered);
        assert_eq!(of(heuristic(&graph, Some(&device))), chosen_first);
        assert_eq!(
            of(heuristic(&backward(shape, true).unwrap(), Some(&device))),
            direct
        );
    }
}

#[test]
fn a_workspace_is_overwritten() {
    let shape = SHAPES[0];
    let attention = Attention::new(shape);
    let plan = heuristic(&forward(shape).unwrap(), None).unwrap();
    let bytes = workspace_bytes(&plan);
    let workspace = attention.session.block(bytes + 64);
    // SAFETY: a block of so many bytes.
    let lies = unsafe { std::slice::from_raw_parts_mut(workspace.cast::<u8>(), bytes + 64) };
    lies.fill(7);
    let pack = attention
        .pack(&attention.forward_uids(), workspace)
        .unwrap();
    attention.session.execute(&plan, &pack).unwrap();
    assert!(lies[..bytes].iter().all(|byte| *byte == 0xff));
    assert!(lies[bytes..].iter().all(|byte| *byte == 7));
}
