//! Attention over keys and values that a cache keeps in blocks while tokens are generated (Kwon et al. 2023).

use super::AttentionShape;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use super::operand::{Operand, reads};
use memory::{In, Out};

/// Tokens of a block of a cache.
pub const CACHE_BLOCK: usize = 16;

operation! {
    /// Stores the keys and values of the last tokens of each sequence: `k [b * n, w]`, `v [b * n, u]`, `n` rows for
    /// each of `b` sequences, into `k_cache [blocks, 16, w]`, `v_cache [blocks, 16, u]`. Without `v_cache`,
    /// `k_cache [blocks, 16, w + u]` has both side by side.
    ///
    /// `table [b, m]` i32 names the blocks of each sequence, in order; `lengths [b]` i32 are its tokens, including the new
    /// ones. If a sequence has fewer than `n` tokens, its rows come last, and rows before its first token are not stored.
    /// The caller ensures that the named blocks exist and suffice for the lengths, and that no two sequences write to the
    /// same block.
    StoreInCache "store_in_cache": k [r, w], v [_, u], k_cache [blocks, _, _], table [b, m] {
        k_cache: Out<'a> [blocks, CACHE_BLOCK, if v_cache.is_some() { w } else { w + u }] uncounted,
        v_cache: Option<Out<'a>> [blocks, CACHE_BLOCK, u] uncounted,
        k: In<'a> [r, w],
        v: In<'a> [r, u],
        table: In<'a> [b, m] i32,
        lengths: In<'a> [b] i32,
    }

    /// Causal attention of the last `shape.seq` tokens of each sequence over all of its tokens, or over the last `shape.window` of
    /// them. Keys and values are in a cache that [`StoreInCache`] has filled, those of the last tokens included.
    /// `q [b * n, heads * d]`; `out [b * n, heads * e]`; `k_cache [blocks, 16, kv_heads * d]`, `v_cache [blocks, 16, kv_heads * e]`,
    /// `table` and `lengths` as there. Without `v_cache`, the values are the first `e` columns of each head of keys (latent
    /// attention in its absorbed form, DeepSeek-V2 2024). Rows before a sequence's first token become 0. `sinks` are those of
    /// [`super::Attention`].
    ///
    /// The bits of a row of `out` depend only on its query, its position, and the keys and values up to there. They do not
    /// depend on the rest of the batch, on the blocks in use, or on how many tokens are new.
    CachedAttention "cached_attention": q, k_cache [blocks, _, _], table [_, m] {
        out: Out<'a> [..shape.out()],
        q: In<'a> [..shape.q()],
        k_cache: In<'a> [blocks, CACHE_BLOCK, shape.k()[1]] touched(shape.batch * m * CACHE_BLOCK),
        v_cache: Option<In<'a>> [blocks, CACHE_BLOCK, shape.v()[1]] touched(shape.batch * m * CACHE_BLOCK),
        table: In<'a> [shape.batch, m] i32,
        lengths: In<'a> [shape.batch] i32,
        sinks: Option<In<'a>> [shape.heads],
        shape: AttentionShape,
    }
}

impl Contract for StoreInCache<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [rows, sequences] = [self.k.dims()[0], self.table.dims()[0]];
        check.that(sequences > 0 && rows.is_multiple_of(sequences), || {
            format!("{rows} rows are not as many for each of {sequences} sequences")
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let mut operands = self.declared_operands();
        // It writes as many bytes as it reads.
        operands.extend([self.k, self.v].map(reads));
        operands
    }
}

impl CachedAttention<'_> {
    /// Keys of a sequence whose blocks are all full. Lengths are only on the device, so costs are those of a full
    /// table.
    fn most_keys(&self) -> usize {
        self.table.dims()[1] * CACHE_BLOCK
    }
}

impl Contract for CachedAttention<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)
    }

    fn conditions(&self, check: &Check) -> Checked {
        let [k_dim, v_dim] = self.shape.head_dims();
        check.that(self.v_cache.is_some() || v_dim <= k_dim, || {
            format!("values of {v_dim} columns are no part of keys of {k_dim}")
        })
    }

    fn multiplications(&self) -> usize {
        (self.q.elements() + self.out.elements()) * self.most_keys()
    }
}
