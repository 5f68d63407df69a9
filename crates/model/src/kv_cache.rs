//! The keys and values of sequences that are being generated, in blocks of [`CACHE_BLOCK`] tokens (Kwon et al. 2023).
//! Under latent attention they are latents, each beside the columns of keys that all heads share (DeepSeek-V2, 2024).

use crate::Result;
use crate::batch::send;
use kernels::Kernels;
use kernels::operation::CACHE_BLOCK;
use memory::{Buffer, Category, DType, In, Memory, Out};
use std::ops::Range;

/// Keys and values of every layer, in one lease. Each sequence has as many blocks of it as its tokens need.
pub struct KvCache {
    /// `[layers, blocks 16 widths]`: the keys of layer 0, its values, the keys of layer 1, and so on.
    keys_and_values: Buffer,
    blocks: usize,
    widths: CacheWidths,
    /// The blocks of each sequence, in order.
    tables: Vec<Vec<i32>>,
}

/// How much a cache holds for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Blocks of the model.
    pub layers: usize,
    /// Elements of a token in one layer.
    pub widths: CacheWidths,
}

/// Elements that attention keeps of a token in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheWidths {
    /// Its keys.
    pub keys: usize,
    /// Its values; none: they are the first columns of the keys.
    pub values: Option<usize>,
}

impl CacheWidths {
    /// All elements.
    pub fn elements(self) -> usize {
        self.keys + self.values.unwrap_or(0)
    }
}

/// The sequences of a cache that a micro-batch continues, one per row.
pub struct CachedSequences<'a> {
    cache: &'a mut KvCache,
    /// `[b, m]` i32: the blocks of each.
    table: Buffer,
    /// `[b]` i32: tokens of each sequence, including those of the micro-batch.
    lengths: Buffer,
}

/// The part of a cache that one layer's attention reads and writes.
pub struct LayerCache<'a> {
    /// `[blocks, 16, width of keys]`.
    pub k_cache: Out<'a>,
    /// `[blocks, 16, width of values]`; none: values are the first columns of keys.
    pub v_cache: Option<Out<'a>>,
    /// `[b, m]` i32: the blocks of each sequence.
    pub table: In<'a>,
    /// `[b]` i32: tokens of each sequence, including those of the micro-batch.
    pub lengths: In<'a>,
}

/// Blocks that sequences of `tokens` tokens each take together.
fn blocks(tokens: &[usize]) -> usize {
    tokens
        .iter()
        .map(|tokens| tokens.div_ceil(CACHE_BLOCK))
        .sum()
}

impl KvCache {
    /// Bytes for sequences of `tokens` tokens each: layers x elements of a token x tokens x bytes. The tokens of each
    /// sequence are rounded up to whole blocks.
    pub fn bytes(shape: CacheShape, dtype: DType, tokens: &[usize]) -> u64 {
        let values = shape.layers * shape.widths.elements();
        (values * blocks(tokens) * CACHE_BLOCK * dtype.size_in_bytes()) as u64
    }

    /// Leases room for sequences of at most `tokens` tokens each.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory) if it is refused.
    pub fn lease(
        memory: &Memory,
        CacheShape { layers, widths }: CacheShape,
        dtype: DType,
        tokens: &[usize],
    ) -> Result<KvCache> {
        let blocks = blocks(tokens);
        let of_layer = blocks * CACHE_BLOCK * widths.elements();
        let shape = [layers, of_layer];
        let mut free = 0..blocks as i32;
        let table = |tokens: &usize| free.by_ref().take(tokens.div_ceil(CACHE_BLOCK)).collect();
        Ok(KvCache {
            tables: tokens.iter().map(table).collect(),
            keys_and_values: memory.lease(Category::Activation, "kv_cache", shape, dtype)?,
            blocks,
            widths,
        })
    }

    /// The rows of a micro-batch: some of the cache's sequences. `lengths` are their tokens, including those of the
    /// micro-batch.
    ///
    /// # Errors
    /// `ModelError` if a lease is refused or the device fails.
    pub fn sequences(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        sequences: Range<usize>,
        lengths: &[usize],
    ) -> Result<CachedSequences<'_>> {
        let tables = &self.tables[sequences];
        let most = tables.iter().map(Vec::len).max().unwrap_or(0);
        // Shorter tables are padded. Attention never reads the padding, because the sequence has no tokens there.
        let padded = |table: &Vec<i32>| {
            let padding = most - table.len();
            [table.as_slice(), &vec![0; padding]].concat()
        };
        let table: Vec<i32> = tables.iter().flat_map(padded).collect();
        let fits = |(length, table): (&usize, &Vec<i32>)| *length <= table.len() * CACHE_BLOCK;
        assert!(
            lengths.iter().zip(tables).all(fits),
            "the cache has room for every token"
        );
        let lengths: Vec<i32> = lengths.iter().map(|length| *length as i32).collect();
        let rows = lengths.len();
        Ok(CachedSequences {
            table: send(memory, kernels, "cache_blocks", [rows, most], &table)?,
            lengths: send(memory, kernels, "cache_lengths", [rows], &lengths)?,
            cache: self,
        })
    }
}

impl CachedSequences<'_> {
    pub(crate) fn of_layer(&mut self, layer: usize) -> LayerCache<'_> {
        let KvCache {
            keys_and_values,
            blocks,
            widths,
            ..
        } = &mut *self.cache;
        let slots = *blocks * CACHE_BLOCK;
        let of_layer = keys_and_values.view_mut().rows(layer..layer + 1);
        let of_layer = of_layer.reshape([slots * widths.elements()]);
        let (keys, values) = of_layer.split_at(slots * widths.keys);
        let values_of = |width| values.reshape([*blocks, CACHE_BLOCK, width]);
        LayerCache {
            k_cache: keys.reshape([*blocks, CACHE_BLOCK, widths.keys]),
            v_cache: widths.values.map(values_of),
            table: self.table.view(),
            lengths: self.lengths.view(),
        }
    }
}
