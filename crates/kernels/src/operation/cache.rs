//! Attention over keys and values that a cache keeps in blocks while tokens are generated (Kwon et al. 2023).

use super::AttentionShape;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, reads, writes};
use memory::{DType, In, Out};

/// Tokens of a block of a cache.
pub const CACHE_BLOCK: usize = 16;

/// Stores the keys and values of the last tokens of each sequence: `k [b * n, w]`, `v [b * n, u]`, `n` rows for
/// each of `b` sequences, into `k_cache [blocks, 16, w]`, `v_cache [blocks, 16, u]`. Without `v_cache`,
/// `k_cache [blocks, 16, w + u]` has both side by side.
///
/// `table [b, m]` i32 names the blocks of each sequence, in order; `lengths [b]` i32 are its tokens, including the new
/// ones. If a sequence has fewer than `n` tokens, its rows come last, and rows before its first token are not stored.
/// The caller ensures that the named blocks exist and suffice for the lengths, and that no two sequences write to the
/// same block.
pub struct StoreInCache<'a> {
    pub k_cache: Out<'a>,
    pub v_cache: Option<Out<'a>>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub table: In<'a>,
    pub lengths: In<'a>,
}

/// Causal attention of the last `shape.seq` tokens of each sequence over all of its tokens, or over the last `shape.window` of
/// them. Keys and values are in a cache that [`StoreInCache`] has filled, those of the last tokens included.
/// `q [b * n, heads * d]`; `out [b * n, heads * e]`; `k_cache [blocks, 16, kv_heads * d]`, `v_cache [blocks, 16, kv_heads * e]`,
/// `table` and `lengths` as there. Without `v_cache`, the values are the first `e` columns of each head of keys (latent
/// attention in its absorbed form, DeepSeek-V2 2024). Rows before a sequence's first token become 0.
///
/// The bits of a row of `out` depend only on its query, its position, and the keys and values up to there. They do not
/// depend on the rest of the batch, on the blocks in use, or on how many tokens are new.
pub struct CachedAttention<'a> {
    pub out: Out<'a>,
    pub q: In<'a>,
    pub k_cache: In<'a>,
    pub v_cache: Option<In<'a>>,
    pub table: In<'a>,
    pub lengths: In<'a>,
    pub shape: AttentionShape,
}

/// A table of blocks for `sequences` sequences, and their lengths.
fn check_table(check: &Check, sequences: usize, table: &In, lengths: &In) -> Checked {
    check.rank("table", table, 2)?;
    let blocks = table.dims()[1];
    check.tensor("table", table, &[sequences, blocks], DType::I32)?;
    check.tensor("lengths", lengths, &[sequences], DType::I32)
}

/// Checks the cache of keys, and that of values if there is one, against the widths of a token in each.
fn check_caches(
    check: &Check,
    (k_cache, k_width): (&dyn View, usize),
    values: Option<(&dyn View, usize)>,
    dtype: DType,
) -> Checked {
    check.rank("k_cache", k_cache, 3)?;
    let blocks = k_cache.view().dims()[0];
    check.tensor("k_cache", k_cache, &[blocks, CACHE_BLOCK, k_width], dtype)?;
    values.map_or(Ok(()), |(v_cache, v_width)| {
        check.tensor("v_cache", v_cache, &[blocks, CACHE_BLOCK, v_width], dtype)
    })
}

impl Contract for StoreInCache<'_> {
    fn name(&self) -> &'static str {
        "store_in_cache"
    }

    fn check(&self, check: &Check) -> Checked {
        let (k, v) = (&self.k, &self.v);
        check.real_of_rank("k", k, 2)?;
        check.rank("v", v, 2)?;
        let (rows, [k_width, v_width]) = (k.dims()[0], [k.dims()[1], v.dims()[1]]);
        check.tensor("v", v, &[rows, v_width], k.dtype())?;
        let values = self.v_cache.as_ref().map(|cache| (cache as _, v_width));
        let of_keys = match values {
            Some(_) => k_width,
            None => k_width + v_width,
        };
        check_caches(check, (&self.k_cache, of_keys), values, k.dtype())?;
        check.rank("table", &self.table, 2)?;
        let sequences = self.table.dims()[0];
        check_table(check, sequences, &self.table, &self.lengths)?;
        check.that(sequences > 0 && rows.is_multiple_of(sequences), || {
            format!("{rows} rows are not as many for each of {sequences} sequences")
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let ins = [self.k, self.v, self.table, self.lengths].map(reads);
        // It writes as many bytes as it reads.
        let written = [self.k, self.v].map(reads);
        ins.into_iter().chain(written).collect()
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
    fn name(&self) -> &'static str {
        "cached_attention"
    }

    fn check(&self, check: &Check) -> Checked {
        let shape = self.shape;
        shape.check(check, [&[("q", &self.q)], &[], &[], &[("out", &self.out)]])?;
        let [k_dim, v_dim] = shape.head_dims();
        check.that(self.v_cache.is_some() || v_dim <= k_dim, || {
            format!("values of {v_dim} columns are no part of keys of {k_dim}")
        })?;
        let [k_width, v_width] = [k_dim, v_dim].map(|dim| shape.kv_heads * dim);
        let values = self.v_cache.as_ref().map(|cache| (cache as _, v_width));
        check_caches(check, (&self.k_cache, k_width), values, self.q.dtype())?;
        check_table(check, shape.batch, &self.table, &self.lengths)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let keys = self.shape.batch * self.most_keys();
        let caches = [self.k_cache].into_iter().chain(self.v_cache).map(|cache| {
            let &[blocks, each, width] = cache.dims() else {
                unreachable!("the check asks for three dimensions");
            };
            let slots = blocks * each;
            reads(cache.reshape([slots, width]).rows(0..keys.min(slots)))
        });
        let others = [
            reads(self.q),
            writes(&self.out),
            reads(self.table),
            reads(self.lengths),
        ];
        others.into_iter().chain(caches).collect()
    }

    fn multiplications(&self) -> usize {
        (self.q.elements() + self.out.elements()) * self.most_keys()
    }
}
