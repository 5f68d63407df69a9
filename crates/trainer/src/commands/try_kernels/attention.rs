//! Flash attention, forward and backward: a long sequence, and two whose length is no multiple of a tile, in documents; with and without a
//! window and dropout, where a run has them.
//!
//! Queries go up to [`QUERIES_MAX`] over the scale of scores, other numbers up to 1. So scores have a standard deviation of a third of
//! that, and every tile of keys has most of the weight of some query: what is lost of one shows.
//!
//! The backward passes of both kinds start from the `out` and `lse` of the kernels for 8.0.

use super::trial::{Case, Looked, OF_TERMS, Result, Tolerance, TrialGpu};
use crate::kernel_trial::{AttentionWidths, ELEMENTS_MAX};
use kernels::{
    AttentionShape, Dropout, FlashAttention, FlashAttentionBackward, FlashOptions, Init,
};
use memory::Buffer;
use memory::DType::{BF16, F32, I32, U32};
use std::fmt;
use std::iter::once;
use std::ops::Range;

/// The most that a query has, over 1 / sqrt of its width: a power of two.
const QUERIES_MAX: f32 = 8.0;

/// The share of the largest element of a head's row that sums may differ by, beside their rounding to bf16. Terms of `out`, `dq`, `dk` and
/// `dv` have probabilities, or gradients of scores, as factors. Both kinds round these to bf16, each by 2^-9 of a term on average, at most
/// 2^-8, and not alike. The other factors have random signs: errors of a sum add up as its terms do, to the root of the sum of squares, so
/// that their standard deviation is about 2^-9 of that of the row's elements. The largest of a row has twice the latter, so this is 16
/// times the former; and of one or two terms it is the most that they differ by.
const OF_ROW: f32 = 1.0 / 64.0;

/// The longest of the sequences that are two.
const RAGGED_MAX: usize = 1_000;

/// Lengths of documents, over and over.
const DOCUMENTS: [usize; 6] = [1, 5, 64, 130, 3, 200];

/// The share of probabilities that is dropped.
const DROPPED: f32 = 0.25;

/// So many pieces of a large result are looked at.
const PIECES: usize = 16;

/// What kernels of both kinds compute.
pub(super) struct AttentionCase {
    shape: AttentionShape,
    has_documents: bool,
    drops: bool,
    /// `out` and `lse` by the kernels for 8.0.
    forward: Option<[Buffer; 2]>,
}

/// All cases of a run.
pub(super) fn cases(widths: &AttentionWidths) -> Vec<AttentionCase> {
    let windows = once(None).chain((widths.window > 0).then_some(Some(widths.window)));
    let ragged = (widths.seq - 1).clamp(1, RAGGED_MAX);
    let of_window = |window| {
        let dropped = once(false).chain(widths.drops.then_some(true));
        dropped.flat_map(move |drops| {
            [([1, widths.seq], false), ([2, ragged], true)].map(|(size, has_documents)| {
                AttentionCase {
                    shape: widths.shape(size, window),
                    has_documents,
                    drops,
                    forward: None,
                }
            })
        })
    };
    windows.flat_map(of_window).collect()
}

impl fmt::Display for AttentionCase {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let AttentionShape {
            batch,
            seq,
            heads,
            kv_heads,
            qk_head_dim,
            v_head_dim,
            window,
            ..
        } = self.shape;
        write!(
            f,
            "{batch} x {seq} tokens, {heads} heads of {qk_head_dim} and {v_head_dim}, {kv_heads} of keys"
        )?;
        if let Some(window) = window {
            write!(f, ", a window of {window}")?;
        }
        f.write_str(if self.has_documents {
            ", documents"
        } else {
            ""
        })?;
        f.write_str(if self.drops { ", dropout" } else { "" })
    }
}

/// For each token of two sequences where its document begins.
fn documents([batch, seq]: [usize; 2]) -> Vec<u32> {
    let of_sequence = |sequence: usize| {
        let lengths = DOCUMENTS.into_iter().cycle().skip(sequence);
        let mut start = 0;
        let tokens = lengths.flat_map(move |length| {
            let own = start;
            start += length;
            std::iter::repeat_n(own as u32, length)
        });
        tokens.take(seq)
    };
    (0..batch).flat_map(of_sequence).collect()
}

/// Rows of a matrix that are looked at: all, or pieces from the first to the last.
fn pieces([rows, width]: [usize; 2]) -> Vec<Range<usize>> {
    let most = ELEMENTS_MAX / 4 / width;
    let (count, piece) = match rows <= most {
        true => (1, rows),
        false => (PIECES, (most / PIECES).max(1)),
    };
    let range = |number: usize| {
        let start = number * (rows - piece) / (count - 1).max(1);
        start..start + piece
    };
    (0..count).map(range).collect()
}

impl AttentionCase {
    /// What gradients of scores differ by where both terms of `dP - D` are the same sum, as those of a query that sees one key.
    fn of_score_gradients(&self) -> f32 {
        let AttentionShape { v_head_dim, .. } = self.shape;
        self.shape.scale() * OF_TERMS * v_head_dim as f32 / 4.0
    }

    /// What the logarithm of a sum differs by: scores are sums of terms of a quarter of the largest on average.
    fn of_log_sum(&self) -> f32 {
        let width = self.shape.qk_head_dim as f32;
        OF_TERMS * (1.0 + self.shape.scale() * QUERIES_MAX * width / 4.0)
    }

    fn look(
        &self,
        gpu: &TrialGpu,
        what: &'static str,
        of: &Buffer,
        head_dim: usize,
        absolute: f32,
    ) -> Result<Looked> {
        let bound = Tolerance {
            absolute,
            of_row: OF_ROW,
            row: head_dim,
        };
        let dims = of.dims();
        let rows = pieces([dims[0], dims[1]]).into_iter();
        gpu.look(what, of.view(), rows.map(|rows| (rows, bound)).collect())
    }
}

impl Case for AttentionCase {
    fn results(&mut self, gpu: &TrialGpu) -> Result<Vec<Looked>> {
        let shape = self.shape;
        let AttentionShape {
            batch,
            seq,
            heads,
            qk_head_dim,
            v_head_dim,
            ..
        } = shape;
        let q = gpu.random_within(QUERIES_MAX, BF16, shape.q(), 1)?;
        let [k, v, dout] = [(shape.k(), 2), (shape.v(), 3), (shape.out(), 4)]
            .map(|(dims, key)| gpu.random(BF16, dims, key));
        let (k, v, dout) = (k?, v?, dout?);
        let documents = gpu.numbers(I32, &documents([batch, seq]))?;
        let key = gpu.numbers(U32, &[5, 6])?;
        let options = FlashOptions {
            documents: self
                .has_documents
                .then(|| documents.view().reshape([batch, seq])),
            dropout: self.drops.then(|| Dropout {
                probability: DROPPED,
                key: key.view(),
            }),
        };
        let mut out = gpu.random(BF16, shape.out(), 7)?;
        let mut lse = gpu.random(F32, [batch, heads, seq], 8)?;
        let elements = FlashAttention::scratch_elements(gpu.kernels.target(), shape, BF16);
        gpu.kernels.run(FlashAttention {
            out: Some(out.view_mut()),
            lse: Some(lse.view_mut()),
            scratch: gpu.room(F32, [elements])?.view_mut(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            sinks: None,
            shape,
            options,
        })?;
        let of_log_sum = vec![(0..batch * heads, Tolerance::of_all(self.of_log_sum()))];
        let rows = lse.view().reshape([batch * heads, seq]);
        let mut looked = vec![
            self.look(gpu, "out", &out, v_head_dim, OF_TERMS)?,
            gpu.look("lse", rows, of_log_sum)?,
        ];
        let [out, lse] = self.forward.get_or_insert([out, lse]);
        let mut dq = gpu.random(BF16, shape.q(), 9)?;
        let mut dk = gpu.random(BF16, shape.k(), 10)?;
        let mut dv = gpu.random(BF16, shape.v(), 11)?;
        let elements = FlashAttentionBackward::scratch_elements(gpu.kernels.target(), shape, BF16);
        gpu.kernels.run(FlashAttentionBackward {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            dsinks: None,
            dsinks_init: Init::Overwrite,
            scratch: gpu.room(F32, [elements])?.view_mut(),
            dout: dout.view(),
            out: out.view(),
            lse: lse.view(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            sinks: None,
            shape,
            options,
        })?;
        let of_scores = self.of_score_gradients();
        let of_keys = of_scores * QUERIES_MAX * shape.group() as f32;
        looked.extend([
            self.look(gpu, "dq", &dq, qk_head_dim, of_scores)?,
            self.look(gpu, "dk", &dk, qk_head_dim, of_keys)?,
            self.look(gpu, "dv", &dv, v_head_dim, OF_TERMS)?,
        ]);
        Ok(looked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::random::random_u32;
    use std::collections::HashSet;

    #[test]
    fn every_kind_of_attention_is_tried() {
        let widths = AttentionWidths::STANDARD;
        let of = |widths| -> HashSet<(bool, bool, bool)> {
            let cases = cases(&widths).into_iter();
            let of_case = |case: AttentionCase| {
                let is_windowed = case.shape.is_windowed();
                (is_windowed, case.drops, case.has_documents)
            };
            cases.map(of_case).collect()
        };
        assert_eq!(of(widths).len(), 8);
        let mut plain = widths;
        (plain.window, plain.drops) = (0, false);
        assert_eq!(
            of(plain),
            [false, true].map(|packs| (false, false, packs)).into()
        );
        let starts = documents([2, 12]);
        assert_eq!(starts[..12], [0, 1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 6]);
        assert_eq!(starts[12..], [0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5]);
    }

    #[test]
    fn large_results_are_looked_at_from_the_first_row_to_the_last() {
        assert!(matches!(&pieces([1_000, 64])[..], [all] if *all == (0..1_000)));
        let pieces = pieces([4_096, 8_192]);
        assert_eq!(pieces.first().unwrap().start, 0);
        assert_eq!(pieces.last().unwrap().end, 4_096);
        let rows: usize = pieces.iter().map(Range::len).sum();
        assert!(
            rows * 8_192 <= ELEMENTS_MAX / 4
                && pieces.windows(2).all(|two| two[0].end < two[1].start)
        );
    }

    const SEQ: usize = 96;
    const WIDTH: usize = 64;

    fn bf16(value: f32) -> f32 {
        let bits = value.to_bits();
        f32::from_bits((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000)
    }

    fn random(key: u64, row: usize) -> [f32; WIDTH] {
        let number = |at: usize| random_u32(key, (row * WIDTH + at) as u64) as i32;
        std::array::from_fn(|at| bf16(number(at) as f32 / (1u64 << 31) as f32))
    }

    /// `out` of one head, with probabilities that are rounded relative to `base`, and keys that a query sees.
    fn out(base: f32, sees: impl Fn(usize, usize) -> bool) -> Looked {
        let bound = Tolerance {
            absolute: OF_TERMS,
            of_row: OF_ROW,
            row: WIDTH,
        };
        let mut bytes = Vec::new();
        for query in 0..SEQ {
            let q = random(1, query);
            let (mut sum, mut sums) = (0.0, [0.0; WIDTH]);
            for key in (0..SEQ).filter(|key| sees(query, *key)) {
                let products = random(2, key).into_iter().zip(q);
                let score: f32 = products.map(|(k, q)| k * QUERIES_MAX * q).sum();
                let weight = (score / (WIDTH as f32).sqrt() - base).exp();
                sum += weight;
                for (sum, v) in sums.iter_mut().zip(random(3, key)) {
                    *sum += bf16(weight) * v;
                }
            }
            bytes.extend(
                sums.map(|of| bf16(of / sum).to_le_bytes())
                    .iter()
                    .flat_map(|all| [all[2], all[3]]),
            );
        }
        Looked {
            what: "out",
            dtype: BF16,
            parts: vec![(bytes, bound)],
        }
    }

    /// Probabilities are rounded relative to another base by each kind; a key too many, or too few, is another result.
    #[test]
    fn roundings_of_probabilities_are_no_mistake_and_a_lost_key_is_one() {
        let right = out(0.0, |query, key| key <= query);
        let rounded = out(0.4, |query, key| key <= query);
        assert!(right != rounded);
        assert_eq!(rounded.mistake(&right), None);
        for mistaken in [
            out(0.4, |query, key| key < query.max(1)),
            out(0.4, |query, key| key <= query + 1),
            out(0.4, |query, key| key <= query && key != 40),
            out(0.4, |query, key| key <= query && !(query >= 80 && key < 16)),
        ] {
            assert!(mistaken.mistake(&right).is_some());
        }
    }
}
